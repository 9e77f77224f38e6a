"""Tests of the example notebooks: their stored outputs, and their outputs when executed again."""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import nbformat
import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.session import Session
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.eventually import HUNG_S
from tests.frontend import ROOT, Frontend
from tests.nightly import all_nightly_but

NOTEBOOKS = ROOT / "notebooks"
NAMES = ("quickstart", "pragma", "lightning")
WITH_PICTURE = ("quickstart", "pragma")
ACCURACY = re.compile(r"^accuracy (0\.\d+)", re.MULTILINE)

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


class SecondClient(AsyncKernelClient):
    """Asynchronous client of a kernel that already has another client.

    This client needs its own session id, because the kernel sends each reply to the client with the
    session id of the request.
    """

    def __init__(self, session: Session, **options: Any) -> None:
        super().__init__(session=Session(key=session.key), **options)


@pytest.fixture(scope="module")
def beside(frontend_of_module: Frontend) -> Frontend:
    """Copy the notebooks to the folder of the kernel that executes them; return the kernel.

    The farms get two hosts instead of three.
    """
    frontend_of_module.manager.client_factory = SecondClient
    folder = frontend_of_module.process.cwd()
    shutil.copytree(NOTEBOOKS, folder, dirs_exist_ok=True)
    settings = Path(folder, "taas.toml")
    before, farm, after = settings.read_text().partition("[pools.farm]")
    settings.write_text(before + farm + after.replace("max_hosts = 3", "max_hosts = 2"))
    return frontend_of_module


def outputs(notebook: NotebookNode) -> Iterator[NotebookNode]:
    for cell in notebook.cells:
        yield from cell.get("outputs", ())


def texts(notebook: NotebookNode) -> str:
    """Return all text in the outputs of a notebook."""
    shown = (o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs(notebook))
    return "\n".join(shown)


def executed(
    beside: Frontend, name: str, changes: Mapping[str, str] = MappingProxyType({})
) -> NotebookNode:
    """Execute the copy of a notebook; return the notebook with its new outputs.

    All notebooks use one kernel, because the imports of each new kernel take 4 s of processor time.
    Before each notebook, the namespace of the kernel is emptied.

    Args:
        changes: Texts of the notebook's code, each with the text that replaces it.
    """
    beside.run("%reset -f")
    notebook = nbformat.read(f"{beside.process.cwd()}/{name}.ipynb", as_version=4)
    for old, new in changes.items():
        cells = [it for it in notebook.cells if it.cell_type == "code" and old in it.source]
        assert cells, f"the notebook {name} has no {old}"
        for cell in cells:
            cell.source = cell.source.replace(old, new)
    client = NotebookClient(
        notebook, beside.manager, timeout=HUNG_S, startup_timeout=HUNG_S, iopub_timeout=HUNG_S
    )
    try:
        client.execute()
    finally:
        if client.kc is not None:
            client.kc.stop_channels()
    return notebook


def stored(name: str) -> NotebookNode:
    """Return a stored notebook; check that it is valid and contains no path of this checkout."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert str(ROOT) not in texts(notebook)
    return notebook


def check(notebook: NotebookNode, name: str) -> None:
    """Check that the outputs show a successful training."""
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    text = texts(notebook)
    assert "SUCCEEDED" in text
    found = ACCURACY.search(text)
    assert found is not None and float(found[1]) > 0.95
    pictures = [o for o in outputs(notebook) if "image/png" in o.get("data", {})]
    assert len(pictures) == (name in WITH_PICTURE)


@pytest.mark.parametrize("name", all_nightly_but({"quickstart"}, NAMES))
def test_it_trains(beside: Frontend, name: str) -> None:
    check(executed(beside, name), name)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_stored_with_its_outputs(name: str) -> None:
    notebook = stored(name)
    kernel = {"name": "taas", "display_name": "Python (TaaS)", "language": "python"}
    assert notebook.metadata.kernelspec == kernel
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    check(notebook, name)


def test_in_the_store_notebook_only_rank_0_writes(beside: Frontend) -> None:
    notebook = executed(beside, "store")
    check_store(notebook)
    assert not list(Path(beside.process.cwd()).glob("*.pt")), "an example clears away what it made"


def test_the_store_notebook_is_stored_with_its_outputs() -> None:
    notebook = stored("store")
    check_store(notebook)


def check_store(notebook: NotebookNode) -> None:
    """Check that the outputs show one writer, discarded writes, and a run that was resumed."""
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    text = texts(notebook)
    assert (
        "not saved (only rank 0 writes): weights.pt from ranks 1-3" in text
        and "protected by:" in text
    )
    assert "every rank reads [0.0, 0.0, 0.0]" in text
    assert "restarts 1" in text and "from step 12" in text


@pytest.mark.nightly
def test_the_data_service_notebook_shows_that_fetchers_end_the_waiting(beside: Frontend) -> None:
    notebook = executed(beside, "data_service")
    check_data_service(notebook)


def test_the_data_service_notebook_is_stored_with_its_outputs() -> None:
    notebook = stored("data_service")
    text = texts(notebook)
    check_data_service(notebook)
    assert "advice: ranks waited" in text and "--cpus" in text
    shares = re.findall(r"^(\d|no) fetchers? +waited +(\d+) %", text, re.MULTILINE)
    waited = {fetchers: int(share) for fetchers, share in shares}
    assert waited["4"] < waited["no"] / 2


def check_data_service(notebook: NotebookNode) -> None:
    """Check that the outputs show equal weights and two pictures.

    The ranks' waiting times, and so the advice, depend on the load of this machine.
    """
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    text = texts(notebook)
    assert "all three networks are equal to the last bit" in text
    found = ACCURACY.search(text)
    assert found is not None and float(found[1]) > 0.9
    assert len([o for o in outputs(notebook) if "image/png" in o.get("data", {})]) == 2


FEWER_STEPS = {"range(40)": "range(10)", "range(20)": "range(5)", "range(20, 40)": "range(5, 10)"}


@pytest.mark.nightly
def test_divided_models_have_the_weights_of_one_process(beside: Frontend) -> None:
    notebook = executed(beside, "model_parallel", FEWER_STEPS)
    check_model_parallel(notebook)
    assert not Path(beside.process.cwd(), "checkpoints").exists(), (
        "an example clears away what it made"
    )


def test_the_notebook_of_model_parallelism_is_stored_with_its_outputs() -> None:
    notebook = stored("model_parallel")
    check_model_parallel(notebook)


def check_model_parallel(notebook: NotebookNode) -> None:
    """Check that the outputs show shards, the last rank's losses, and equal weights."""
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    text = texts(notebook)
    assert text.count("(128, 64) of (256, 64) are here") >= 2
    last, alone = re.findall(r"^losses of .*: +(\d\.\d+ … \d\.\d+)$", text, re.MULTILINE)
    assert last == alone
    compared = re.findall(r"largest difference of a weight (\S+)$", text, re.MULTILINE)
    assert len(compared) == 4 and all(float(difference) < 1e-12 for difference in compared)


def test_the_datacube_notebook_is_stored_with_its_outputs() -> None:
    notebook = stored("datacube")
    text = texts(notebook)
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert "killed by SIGKILL" in text and "goes on after epoch 2" in text
    assert "equal weights: True" in text


SAID_BY_FARMS = {
    "farm": ("one of 2 nodes is killed", "12 solutions, accuracy", "closed · 12 done"),
    "sweep": ("ValueError: trial 7 has bad luck", "19 of 20 trials", "19 done, 1 failed"),
}
SHORT_SWEEP = {"len(study.trials) < 20": "len(study.trials) < 10"}
SAID_BY_SHORT_SWEEP = ("ValueError: trial 7 has bad luck", "9 of 10 trials", "9 done, 1 failed")


@pytest.mark.nightly
def test_the_farm_notebook_shows_all_solutions(beside: Frontend) -> None:
    check_farm(executed(beside, "farm"), "farm", SAID_BY_FARMS["farm"])


@pytest.mark.nightly
def test_the_sweep_notebook_shows_all_trials(beside: Frontend) -> None:
    pytest.importorskip("optuna")
    check_farm(executed(beside, "sweep", SHORT_SWEEP), "sweep", SAID_BY_SHORT_SWEEP)


@pytest.mark.parametrize("name", SAID_BY_FARMS)
def test_a_notebook_with_a_farm_is_stored_with_its_outputs(name: str) -> None:
    notebook = stored(name)
    check_farm(notebook, name, SAID_BY_FARMS[name])


def check_farm(notebook: NotebookNode, name: str, said_by_farm: Iterable[str]) -> None:
    """Check that the outputs show all solutions, and the failures before them."""
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    text = texts(notebook)
    assert all(said in text for said in said_by_farm)
    pictures = [o for o in outputs(notebook) if "image/png" in o.get("data", {})]
    assert len(pictures) == (name == "sweep")


def test_the_federations_notebook_is_stored_with_its_outputs() -> None:
    notebook = stored("federated")
    text = texts(notebook)
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    alone = [float(share) for share in re.findall(r"^site \d alone +(0\.\d+)", text, re.MULTILINE)]
    together = ACCURACY.search(text)
    assert len(alone) == 3 and together is not None and float(together[1]) > max(alone) + 0.2


def test_the_tutorial_shows_each_step(beside: Frontend) -> None:
    check_tutorial(executed(beside, "tutorial"))
    assert not (Path(beside.process.cwd()) / "digits.pt").exists()


def test_the_tutorial_is_stored_with_its_outputs() -> None:
    check_tutorial(stored("tutorial"))


def check_tutorial(notebook: NotebookNode) -> None:
    """Check that the outputs show what the tutorial's text promises after each step."""
    text = texts(notebook)
    found = [float(share) for share in re.findall(r"accuracy[a-z0-9 ]*:? (0\.\d+)", text)]
    assert len(found) == 3 and min(found) > 0.8
    assert "not saved (only rank 0 writes): digits.pt from rank 1" in text
    assert "the checkpoint has 0.weight, 0.bias, 2.weight, 2.bias" in text
    shares = {int(count) for count in re.findall(r"epoch \d: (\d+) samples on this rank", text)}
    assert sum(shares) == 1400
    [failure] = [output for output in outputs(notebook) if output.output_type == "error"]
    assert (failure.ename, failure.evalue.count("no picture 1,401")) == ("RankFailed", 1)
    assert "rank 1, which failed first" in text
    assert "nothing is started" in text


def test_a_sessions_ranks_keep_their_model(beside: Frontend) -> None:
    # rank 0 may be slow; the barrier ensures that rank 0 takes part when rank 1 fails
    failing = "if rank == 1:"
    check_session(executed(beside, "session", {failing: f"dist.barrier()\n{failing}"}))


def test_the_notebook_of_sessions_is_stored_with_its_outputs() -> None:
    check_session(stored("session"))


def check_session(notebook: NotebookNode) -> None:
    """Check that losses fall from cell to cell, even after an error, and no session is left."""
    errors = [output for output in outputs(notebook) if output.output_type == "error"]
    assert [error.ename for error in errors] == ["RankFailed"]
    text = texts(notebook)
    assert text.count("True") == 2  # the loss has fallen
    norms = re.findall(r"rank (\d): gradient norm ([\d.]+)", text)
    assert len(norms) == 2 and norms[0][1] == norms[1][1]
    assert "the process group was interrupted in a collective (rank 0)" in text
    assert "Session exp has ended" in text and "no sessions" in text
