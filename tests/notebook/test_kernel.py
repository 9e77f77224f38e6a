"""The kernel "Python (TaaS)" as a real process, driven by a Jupyter client."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import write_connection_file
from jupyter_client.manager import KernelManager, start_new_kernel

from tests.eventually import HUNG_S

ROOT = Path(__file__).parents[2]
KERNELSPEC = ROOT / "kernels" / "taas"

pytestmark = [
    pytest.mark.usefixtures("no_leftovers"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture
def manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leftovers: str
) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    """Yield a kernel of the checkout's kernelspec; its folder has a broken `random.py`."""
    shutil.copytree(KERNELSPEC, tmp_path / "jupyter" / "kernels" / "taas")
    project = tmp_path / "project"
    project.mkdir()
    (project / "random.py").write_text("raise SystemExit('the notebook folder was imported')\n")
    (project / "taas.toml").write_text('[pools."c1.4"]\n[pools."g2.8"]\n')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TAAS_WARM", "0")
    manager, client = start_new_kernel(HUNG_S, kernel_name="taas", cwd=str(project))
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


@pytest.fixture
def client(manager: tuple[KernelManager, BlockingKernelClient]) -> BlockingKernelClient:
    return manager[1]


def output_of(client: BlockingKernelClient, code: str) -> tuple[str, str]:
    """Run a cell; return its status, and its output or traceback."""
    texts: list[str] = []

    def take(message: dict[str, dict[str, str]]) -> None:
        content = message["content"]
        texts.append(content.get("text") or "\n".join(content.get("traceback", ())))

    reply = client.execute_interactive(code, output_hook=take, timeout=HUNG_S)
    return reply["content"]["status"], "".join(texts)


def completions(client: BlockingKernelClient, code: str, cursor: int | None = None) -> list[str]:
    """Return the completions that Tab offers at `cursor` (default: the end of the code)."""
    position = len(code) if cursor is None else cursor
    content = client.complete(code, position, reply=True, timeout=HUNG_S)["content"]
    assert content["cursor_end"] == position
    matches: list[str] = content["matches"]
    return matches


OLDER = """
import ipykernel

ipykernel.version_info, ipykernel.__version__ = (6, 29, 0), "6.29.0"
from taas_magic.kernel import main

main()
"""


def test_an_ipykernel_that_cannot_encrypt_says_so_instead_of_not_answering(tmp_path: Path) -> None:
    connection = tmp_path / "kernel.json"
    public, secret = zmq.curve_keypair()
    write_connection_file(str(connection), curve_publickey=public, curve_secretkey=secret)
    command = [sys.executable, "-c", OLDER, "-f", str(connection)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HUNG_S)
    assert done.returncode == 1
    assert "ipykernel 6.29.0 cannot read: install ipykernel 7.3 or newer" in done.stderr


def test_the_extension_is_on_without_load_ext(
    manager: tuple[KernelManager, BlockingKernelClient],
) -> None:
    process_manager, client = manager
    status, text = output_of(client, "#!g2.8\nx = 1")
    assert (status, text.count("\n")) == ("error", 0)
    assert "#pragma taas --gpus 2" in text
    assert output_of(client, "import sys; print(sys.executable)") == ("ok", sys.executable + "\n")
    spec = process_manager.kernel_spec
    assert spec is not None and spec.display_name == "Python (TaaS)"
    assert output_of(client, "%load_ext taas_magic") == ("ok", ""), "as notebooks for any kernel"
    assert output_of(client, "%reload_ext taas_magic") == ("ok", "")
    assert output_of(client, "#!g2.8\nx = 1")[0] == "error"


def test_ordinary_cells_run_in_the_kernel_without_torch(client: BlockingKernelClient) -> None:
    code = "import sys; print([name for name in ('torch', 'distributed') if name in sys.modules])"
    assert output_of(client, code) == ("ok", "[]\n")


def test_tab_completes_flags_pools_variables_and_commands(client: BlockingKernelClient) -> None:
    output_of(client, "model = history = 1")
    assert completions(client, "%%taas --g") == ["--gpus"]
    assert "--max-restarts" in completions(client, "%%taas --gpus 2 ")
    assert "--gpus" not in completions(client, "%%taas --gpus 2 ")
    assert completions(client, "%%taas --gpus 2 --pool ") == ["c1.4", "g2.8", "local"]
    assert completions(client, "%%taas --gpus 2 --pool=c") == ["c1.4"]
    assert completions(client, "%%taas --gpus 2 --data-pool ") == ["c1.4", "g2.8", "local"]
    assert {"3", "--out"} <= set(completions(client, "%%taas --gpus 2 --rehearse "))
    assert completions(client, "%%taas --gpus 2 --rehearse --ou") == ["--out"]
    assert completions(client, "%%taas --out ") == ["model", "history"]
    assert completions(client, "%%taas --out model,hi") == ["history"]
    assert completions(client, "%taas st") == ["status", "stacks", "stop"]
    assert completions(client, "%taas down c") == ["c1.4"]
    assert completions(client, "#!g") == ["g2.8"]
    assert completions(client, "#pragma taas --time") == ["--timeout"]
    assert completions(client, "%%taas --po\nx = 1\n", cursor=11) == ["--pool"]
    assert "model" in completions(client, "%%taas --gpus 2\nmod")


def test_the_kernelspec_names_the_environments_python() -> None:
    spec = json.loads((KERNELSPEC / "kernel.json").read_text())
    manager = KernelManager()
    manager._kernel_spec = manager.kernel_spec_manager.kernel_spec_class(**spec)
    assert manager.format_kernel_cmd()[:3] == [sys.executable, "-m", "taas_magic.kernel"]
    sizes = {file.name for file in KERNELSPEC.iterdir()}
    assert {"logo-32x32.png", "logo-64x64.png", "logo-svg.svg"} <= sizes
