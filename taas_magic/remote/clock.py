"""A clock for Dask that no step of the system's clock disturbs."""

import time

import distributed.batched
from tornado.ioloop import IOLoop

_started = time.time() - time.monotonic()


def steady() -> float:
    """Seconds since 1970 as this process counted them since its start."""
    return _started + time.monotonic()


def use_steady_clock() -> None:
    """Makes Dask's streams in this process, and the current loop's timers, keep the steady clock.

    A stream waits for the end of its batch by the system's clock: set back by an hour, it would be
    silent for an hour, and the lease would end the host.
    """
    distributed.batched.time = steady
    IOLoop.current().time = steady  # type: ignore[method-assign]
