"""Other services that deliver batches to a process, as rows of benchmarks/data.py.

Each service is used as its documentation says, with one process that prepares batches. A service
that is not installed (`pip install '.[bench]'`) has no row.
"""

import contextlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection

import torch
from deliverers import FORK, Take


def _serve(address: Connection) -> None:
    """Run the tf.data service in this process: one dispatcher and one worker.

    Args:
        address: Pipe to which the dispatcher's address is sent.
    """
    import tensorflow

    service = tensorflow.data.experimental.service
    dispatcher = service.DispatchServer()
    where = dispatcher.target.split("://")[1]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=where))
    address.send(dispatcher.target)
    worker.join()


@contextlib.contextmanager
def tf_data(size: int) -> Iterator[Take]:
    """Yield a function that returns batches of the tf.data service, which gRPC transfers."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    ours, theirs = FORK.Pipe()
    server = FORK.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    theirs.close()
    try:
        target = ours.recv()
        import tensorflow

        dataset = tensorflow.data.Dataset.from_tensors(
            tensorflow.zeros([size], tensorflow.uint8)
        ).repeat()
        distribute = tensorflow.data.experimental.service.distribute
        distributed = dataset.apply(distribute(processing_mode="parallel_epochs", service=target))
        received = iter(distributed)
        to_dlpack = tensorflow.experimental.dlpack.to_dlpack
        yield lambda: torch.utils.dlpack.from_dlpack(to_dlpack(next(received)))
    finally:
        server.terminate()
        server.join()


@contextlib.contextmanager
def ray_data(size: int) -> Iterator[Take]:
    """Yield a function that returns batches of Ray Data from this host's object store."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        # Ray's processes would try to reach each other through the proxy.
        del os.environ[name]
    import numpy
    import ray

    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
    )
    try:
        row = {"batch": numpy.zeros((1, size), numpy.uint8)}
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        dataset = ray.data.range(1_000_000).map_batches(lambda _: row, batch_size=1)
        batches = iter(dataset.iter_torch_batches(batch_size=1))
        try:
            yield lambda: next(batches)["batch"]
        finally:
            batches.close()
    finally:
        ray.shutdown()


Make = Callable[[int], AbstractContextManager[Take]]
PEERS: dict[str, tuple[str, Make]] = {
    "Ray Data": ("ray", ray_data),
    "tf.data service": ("tensorflow", tf_data),
}
"""For each row: the package that it needs, and the function that yields its batches."""


def installed() -> dict[str, Make]:
    """Return the rows whose package is installed, and print the names of the others."""
    rows = {}
    for name, (package, make) in PEERS.items():
        if importlib.util.find_spec(package) is None:
            print(f"{name} is not installed (pip install '.[bench]'): its row is left out")
        else:
            rows[name] = make
    return rows
