"""Rehearsals in a real kernel: what they report, and that the project store does not change."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cellfiles import cells_of
from tests.frontend import Frontend

pytestmark = [pytest.mark.usefixtures("no_leftovers")]

DEFINE, TRAIN, FILES = cells_of("rehearsed_training")


@pytest.fixture
def kernel(frontend_of_module: Frontend) -> Iterator[Frontend]:
    """Yield a kernel with a loader, a model and a checkpoint.

    After the tests, check that the notebook's folder is unchanged.
    """
    frontend_of_module.run(DEFINE)
    yield frontend_of_module
    assert files(frontend_of_module) == {"last.pt": "an old checkpoint"}


def files(kernel: Frontend) -> dict[str, str]:
    """Return the text of each file below the notebook's folder, by path; "" for a folder.

    Skip files and folders whose names begin with a dot.
    """
    folder = Path(kernel.process.cwd())
    found = (path for path in folder.rglob("*") if not path.name.startswith("."))
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else "" for path in found
    }


def rows(text: str) -> dict[str, str]:
    """Return the texts of the report in a cell's output, by the label of their row."""
    _, _, report = text.partition("rehearsal (")
    return {
        found[1]: found[2]
        for line in report.splitlines()[1:]
        if (found := re.match(r"  (\S.*?)  +(.*)", line))
    }


def failed(kernel: Frontend, cell: str) -> tuple[str, str]:
    """Run a cell that fails; return its output and its error."""
    request = kernel.send(cell)
    assert kernel.finish(request)["status"] == "error"
    [shown] = kernel.contents(request, "error")
    return kernel.text(request), re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(shown["traceback"]))


@pytest.mark.parametrize("flag", ["", "--rehearse", "--dry-run"])
def test_a_cell_that_is_not_python_names_its_line(kernel: Frontend, flag: str) -> None:
    _, error = failed(kernel, f"%%taas --gpus 1 {flag}\nx = 1\ny = )")
    assert re.search(r'File "Cell In\[\d+\]", line 3\n +y = \)\n', error), error
    assert "unmatched ')'" in error and "capture" not in error


def test_a_rehearsal_runs_the_whole_cell_and_reports(kernel: Frontend) -> None:
    text = kernel.text(
        kernel.run(f"%%taas --gpus 4 --rehearse --out seen --shared-writes shards\n{TRAIN}")
    )
    assert "steps [3, 3] 3 3 2" in text
    assert "rehearsal (3 batches a pass on 2 CPU ranks here): SUCCEEDED" in text
    assert '; for pool "local": 4 ranks on 1 host' in text
    found = rows(text)
    assert re.search(r"KiB to each host: .*net \d+ bytes \(Linear\)", found["sent"])
    assert re.search(
        r"KiB to each fetcher; one fetcher prepares [\d.,e+]+ batches/s here, "
        r"a CPU rank uses [\d.,]+; 4 such ranks need --cpus \d+",
        found["loader train"],
    )
    assert re.match(r"at most \d+\.\d MiB for a rank \(rank [01]", found["memory"])
    assert re.match(r"last\.pt \(\d\.\d KiB\), shards/0 \(1 byte\)", found["would write"])
    assert "outside" not in found and "would fail" not in found
    assert kernel.text(kernel.run("print('seen' in globals())")) == "False\n"


def test_a_cell_that_fails_in_the_rehearsal_fails_as_it_would(kernel: Frontend) -> None:
    cell = "for x, y in train:\n    net(x[:, :5])"
    text, error = failed(kernel, f"%%taas --gpus 2 --rehearse 1\n{cell}")
    assert "RuntimeError" in error and "mat1 and mat2 shapes cannot be multiplied" in error
    assert "--> 3     net(x[:, :5])" in error
    assert "rehearsal (1 batch a pass on 2 CPU ranks here): FAILED" in text
    assert "KiB to each fetcher; one fetcher prepares" in text


def test_what_cannot_travel_is_reported_before_anything_runs(kernel: Frontend) -> None:
    kernel.run("lock, also = threading.Lock(), open('last.pt')")
    cell = "%%taas --gpus 2 --rehearse\nprint(lock, also)"
    text, error = failed(kernel, cell)
    kernel.run("also.close()")
    found = [line.split()[2] for line in text.splitlines() if line.startswith("  would fail  ")]
    assert sorted(found) == ["`also`", "`lock`"]
    assert "rehearsal (3 batches a pass on 2 CPU ranks here): not run" in text
    assert not any(f"{name} is a" in error for name in found)  # only the report has the reasons
    why = "CaptureError: the cell was not run, because 2 objects cannot be sent to the ranks: see "
    assert f'{why}"would fail" in the report above' in error


def test_files_outside_the_store_are_reported(kernel: Frontend, tmp_path: Path) -> None:
    cell = f"""%%taas --gpus 1 --rehearse
path = "{tmp_path}/model.pt"
torch.save(net.state_dict(), path)
with open("{tmp_path}/temporary", "w") as file:
    pass
os.remove("{tmp_path}/temporary")
"""
    found = rows(kernel.text(kernel.run(cell)))
    assert found["outside"].startswith(f"{tmp_path}/model.pt (")
    assert "temporary" not in found["outside"] and "would write" not in found
    assert found["not cut short"].startswith("loops of the cell, because the cell uses no regis")
    assert os.listdir(tmp_path) == ["model.pt"]


def test_a_program_that_the_cell_starts_cannot_write_to_the_store(kernel: Frontend) -> None:
    cell = "import subprocess\nprint('code', subprocess.call(['touch', 'made']))"
    assert "code 1" in kernel.text(kernel.run(f"%%taas --gpus 1 --rehearse\n{cell}"))


def test_in_a_rehearsal_all_ranks_see_rank_0s_files_and_the_store_stays_unchanged(
    kernel: Frontend,
) -> None:
    kernel.run(
        "from taas_magic.store.rule import locked_store\n"
        "another_run = locked_store(os.path.realpath('.'), 'another run')\n"
        "another_run.__enter__()"  # another run is now the owner of the store
    )
    _, error = failed(kernel, "%%taas --gpus 1\npass")
    assert "run another run writes to the project store" in error
    text = kernel.text(kernel.run(f"%%taas --gpus 2 --rehearse --shared-writes shards\n{FILES}"))
    kernel.run("another_run.__exit__(None, None, None)")
    assert "rank 1 writes a shard of a checkpoint into the project store" in text
    written = (
        r"7 files, \d\.\d KiB: last\.pt \(5 bytes\), log\.txt \(6 bytes\), out/array\.npy \(152"
    )
    assert re.match(written, rows(text)["would write"])


def test_a_library_that_cannot_be_redirected_says_why(kernel: Frontend) -> None:
    cell = "os.chmod = os.chmod.__wrapped__\nos.chmod(os.path.abspath('last.pt'), 0o600)"
    _, error = failed(kernel, f"%%taas --gpus 1 --rehearse\n{cell}")
    assert "a rehearsal writes nothing to the project store" in error


def test_loaders_that_are_not_registered_are_named(kernel: Frontend) -> None:
    kernel.run("plain = DataLoader(data, batch_size=4)")
    cell = "print(len(list(train)), len(list(plain)))"
    text = kernel.text(kernel.run(f"%%taas --gpus 1 --rehearse\n{cell}"))
    assert "3 40" in text
    assert rows(text)["not cut short"].startswith("loops over plain, because it is not reg")


def test_a_pool_that_cannot_run_the_cell_is_an_error_after_the_report(kernel: Frontend) -> None:
    text, error = failed(kernel, "%%taas --gpus 100 --rehearse\nprint('ran', rank := 1)")
    assert "ran 1" in text and "SUCCEEDED" in text
    why = "this machine allows 1 to 64 CPU processes; you requested 100"
    assert rows(text)["would fail"] == why
    assert 'the cell ran here, but would fail on pool "local" for a reason: see "would' in error
    assert why not in error  # only the report has the reason


def test_a_rehearsal_applies_the_rule_for_ranks_other_than_0(kernel: Frontend) -> None:
    cell = "open(f'made-{os.environ[\"RANK\"]}', 'w').close()"
    _, error = failed(kernel, f"%%taas --gpus 2 --rehearse --store-writes refuse\n{cell}")
    assert "rank 1 may not: only rank 0 writes to the project store" in error
    assert "1 other rank" not in error  # rank 0 wrote its file
