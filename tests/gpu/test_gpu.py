"""Runs on a real GPU, in a real kernel. `make gpu-test` runs these tests; one GPU is enough."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.eventually import HUNG_S
from tests.frontend import Frontend

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU (make gpu-test)"),
    pytest.mark.usefixtures("no_leftovers"),
]

SLEEP = "torch.cuda._sleep(6_000_000_000)  # about 3 s on the GPU; the call returns at once"


def value(frontend: Frontend, expression: str) -> str:
    """Return the text of an expression's value in the notebook."""
    return frontend.text(frontend.run(f"print({expression})")).strip()


def error(frontend: Frontend, cell: str) -> str:
    """Run a cell that fails; return its output, followed by its traceback."""
    request = frontend.send(cell)
    assert frontend.finish(request)["status"] == "error"
    [shown] = frontend.contents(request, "error")
    return frontend.text(request) + re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(shown["traceback"]))


def used_gpu_bytes() -> int:
    """Return how many bytes of the GPU's memory all processes use."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_a_model_travels_from_gpu_to_gpu_and_back(frontend_of_module: Frontend) -> None:
    frontend_of_module.run(
        "import torch\n"
        "net = torch.nn.Linear(64, 8).cuda()\n"
        "adam = torch.optim.Adam(net.parameters())\n"
        "data = torch.randn(32, 64).cuda()\n"
        "def train(net, adam):\n"
        "    for _ in range(5):\n"
        "        loss = net(data).square().mean()\n"
        "        adam.zero_grad()\n"
        "        loss.backward()\n"
        "        adam.step()\n"
        "    return loss.detach()\n"
        "import copy\n"
        "expected = train(*copy.deepcopy((net, adam)))"
    )
    frontend_of_module.run(
        "%%taas --gpus 1 --out net,adam,loss\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "dist.all_reduce(torch.zeros(1, device='cuda'))\n"
        "loss = train(net, adam)"
    )
    assert (
        value(frontend_of_module, "next(net.parameters()).device, loss.device").count("cuda") == 2
    )
    assert value(frontend_of_module, "torch.equal(loss, expected)") == "True"
    frontend_of_module.run("train(net, adam)")  # works only if `adam` has the parameters of `net`


def test_results_come_to_the_cpu_of_a_notebook_without_cuda(kernel_of_its_own: Frontend) -> None:
    kernel_of_its_own.run("import torch")
    kernel_of_its_own.run("%%taas --gpus 1 --out there\nthere = torch.ones(2).cuda()")
    assert value(kernel_of_its_own, "there.device, torch.cuda.is_initialized()") == "cpu False"


def test_more_ranks_than_gpus_can_run_on_the_cpu(frontend_of_module: Frontend) -> None:
    many = torch.cuda.device_count() + 1
    refused = error(frontend_of_module, f"%%taas --gpus {many}\n1")
    assert "one for each rank" in refused and "--env CUDA_VISIBLE_DEVICES=" in refused
    run = frontend_of_module.run(
        f"%%taas --gpus {many} --env CUDA_VISIBLE_DEVICES=\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "print(torch.cuda.is_available(), dist.get_backend())"
    )
    assert "False gloo" in frontend_of_module.text(run)


def test_metrics_on_the_gpu_are_sent_once_they_are_computed(frontend_of_module: Frontend) -> None:
    run = frontend_of_module.send(
        "%%taas --gpus 1\n"
        "import taas, time, torch\n"
        "taas.log(loss=torch.ones(1, device='cuda') * 3)\n"
        f"{SLEEP}\n"
        "taas.log(loss=torch.ones(1, device='cuda') * 4)\n"
        "torch.cuda.synchronize()\n"
        "begun = time.perf_counter()\n"
        f"for _ in range(4): {SLEEP}\n"
        "for _ in range(1000): taas.log(late=torch.ones(1, device='cuda'))\n"
        "print('queued', flush=True)\n"
    )
    frontend_of_module.wait(lambda: "queued" in frontend_of_module.text(run))
    # The heartbeat thread does not wait for the metrics. So it answers while the GPU is busy.
    subshell = frontend_of_module.new_subshell()
    stacks = frontend_of_module.send("%taas ranks", subshell_id=subshell)
    frontend_of_module.finish(stacks)
    shown = frontend_of_module.text(stacks)
    assert "did not" not in shown and "GPU memory" in shown, shown
    assert frontend_of_module.finish(run)["status"] == "ok"
    counts = "{n: len(v) for n, v in m.items()}"
    frontend_of_module.run("import taas\nmetrics = taas.last_run.metrics")
    assert value(frontend_of_module, "list(metrics['loss'])[:2]") == "[3.0, 4.0]", counts
    assert value(frontend_of_module, "metrics['late'].notna().sum()") == "1000"


def test_ranks_shows_the_use_of_the_gpu(frontend_of_module: Frontend) -> None:
    pytest.importorskip("pynvml")
    frontend_of_module.run(
        "%%taas --gpus 1 --detach --name busy\n"
        "import torch\n"
        "a = torch.randn(4096, 4096, device='cuda')\n"
        "while True:\n"
        "    b = a @ a\n"
        "    torch.cuda.synchronize()\n"
    )
    frontend_of_module.run("import re, time, taas")
    wait = (
        "from IPython.utils.capture import capture_output\n"
        f"deadline = time.monotonic() + {HUNG_S}\n"
        "while time.monotonic() < deadline:\n"
        "    with capture_output() as shown: get_ipython().run_line_magic('taas', 'ranks')\n"
        "    if 'GPU memory' in shown.stdout: break\n"
        "print(shown.stdout)"
    )
    shown = frontend_of_module.text(frontend_of_module.run(wait))
    frontend_of_module.run("%taas stop")
    frontend_of_module.fail("taas.runs()[0].wait()")  # raises, because the run was stopped
    assert re.search(r"GPU +GPU memory", shown), shown
    assert re.search(r" \d+ %  +\d+\.\d MB", shown), shown


def test_a_session_survives_errors_that_leave_its_gpu_intact(frontend_of_module: Frontend) -> None:
    before = used_gpu_bytes()
    frontend_of_module.run(
        "%%taas --gpus 1 --session exp\n"
        "import torch\n"
        "big = torch.ones(256, 1024, 1024, device='cuda')"
    )
    assert used_gpu_bytes() - before >= 2**30
    huge = "%%taas --session exp\nhuge = torch.empty(2**50, dtype=torch.uint8, device='cuda')"
    assert "out of memory" in error(frontend_of_module, huge)
    kept = frontend_of_module.run("%%taas --session exp\nprint(big.sum().item() / 2**28)")
    assert "1.0" in frontend_of_module.text(kept)
    tables = frontend_of_module.text(frontend_of_module.run("%taas sessions\n%taas vars exp"))
    assert "1.1 GB" in tables and "cuda:0" in tables
    broken = error(
        frontend_of_module, "%%taas --session exp\nprint(big[torch.tensor([300], device='cuda')])"
    )
    assert "CUDA_LAUNCH_BLOCKING" in broken and "%taas restart" in broken
    frontend_of_module.run("%taas restart exp")
    again = frontend_of_module.run(
        "%%taas --session exp\nimport torch\nprint(torch.ones(1, device='cuda'))"
    )
    assert "cuda:0" in frontend_of_module.text(again)
    frontend_of_module.run("%taas end exp")
    assert used_gpu_bytes() - before < 2**29


def test_a_profile_has_the_kernels_of_the_gpu(frontend_of_module: Frontend) -> None:
    frontend_of_module.run(
        "%%taas --gpus 1 --profile 3\n"
        "import taas, torch\n"
        "net = torch.nn.Linear(512, 512).cuda()\n"
        "for _ in range(6):\n"
        "    net(torch.ones(64, 512, device='cuda')).sum().backward()\n"
        "    taas.step()"
    )
    path = Path(value(frontend_of_module, "taas.last_run.timeline().path"))
    kinds = {event.get("cat") for event in json.loads(path.read_text())["traceEvents"]}
    assert "kernel" in kinds
    assert "Profiler clears" not in value(frontend_of_module, "taas.last_run.logs()")


def test_each_job_of_a_farm_has_a_gpu(frontend_of_module: Frontend) -> None:
    frontend_of_module.run(
        "import taas\n"
        "def use(number):\n"
        "    import torch\n"
        "    return number, torch.cuda.device_count(), torch.ones(1).cuda().item()\n"
        "with taas.farm(gpus=1) as farm:\n"
        "    jobs = [farm.submit(use, number) for number in range(3)]\n"
        "    results = [job.result() for job in jobs]"
    )
    assert value(frontend_of_module, "results") == "[(0, 1, 1.0), (1, 1, 1.0), (2, 1, 1.0)]"


def test_fetched_batches_are_pinned(frontend_of_module: Frontend) -> None:
    frontend_of_module.run(
        "import taas, torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "data = TensorDataset(torch.arange(64.0).reshape(16, 4))\n"
        "loader = DataLoader(data, batch_size=4, pin_memory=True)\n"
        "taas.register(loader)"
    )
    run = frontend_of_module.run(
        "%%taas --gpus 1 --cpus 1\n"
        "for [batch] in loader:\n"
        "    print(batch.is_pinned(), batch.cuda(non_blocking=True).sum().item())"
    )
    lines = re.findall(r"True [\d.]+", frontend_of_module.text(run))
    assert lines == ["True 120.0", "True 376.0", "True 632.0", "True 888.0"]
    frontend_of_module.run("taas.unregister(loader)")
