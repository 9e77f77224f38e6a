"""Tests of the project store and the receipt in runs: only rank 0 writes, and all ranks read."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from taas_magic.display import head
from taas_magic.errors import RankFailed, StoreError
from taas_magic.store.ownership import RunFileRecord
from taas_magic.store.rule import locked_store, store_state_folder
from taas_magic.store.tree import Tree
from tests.cellfiles import cells_of
from tests.events import new_state, parsed
from tests.harness import Notebook, Outcome

SAVE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo"); dist.barrier()  # else one may end before the other is there
rank = dist.get_rank()
model = torch.full((4,), float(rank))
"""


@pytest.fixture(autouse=True)
def empty_store(notebook: Notebook) -> None:
    for path in notebook.project.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def head_of(outcome: Outcome) -> str:
    state = new_state()
    for event in outcome.events:
        state.apply(parsed(event))
    return head.header_text(state, 0.0) + re.sub(
        "<[^>]*>", "", head.mime_bundle(state, 0.0)["text/html"]
    )


@pytest.mark.fault(42)
def test_an_unguarded_save_on_8_ranks_gives_one_whole_file(notebook: Notebook) -> None:
    source = """
torch.save(model, "m.pt")
dist.barrier()
print(torch.load("m.pt", weights_only=True)[0].item())
"""
    outcome = notebook.run(SAVE + source, gpus=8)
    assert outcome.error is None
    assert outcome.lines == {rank: ["0.0"] for rank in range(8)}
    assert torch.load("m.pt", weights_only=True).tolist() == [0.0] * 4
    assert os.listdir() == ["m.pt"]
    assert outcome.run is not None
    receipt = outcome.run.receipt
    assert receipt.written == {"m.pt": os.path.getsize("m.pt")}
    assert receipt.kept_out == {"m.pt": (1, 2, 3, 4, 5, 6, 7)}
    assert not receipt.missing and receipt.means and receipt.complete
    shown = head_of(outcome)
    assert shown.count("m.pt from ranks 1-7") == 2 and shown.count(receipt.means) == 2


SIGHTS = """
if os.environ["RANK"] == "1":
    walks_both()
    saves_and_finds()
    rotates_checkpoints()
    maps_tensors()
    for name in ("missing/m.pt", "missing.bin", "folder"):
        try:
            saves(name, 1.0) if name.endswith("pt") else changes(name)
        except OSError as error:
            print(type(error).__name__, error)
"""


def test_a_rank_sees_its_own_writes_together_with_the_stores_files(notebook: Notebook) -> None:
    """A rank other than 0 saves, lists, loads, moves and removes files.

    Errors name the path that the rank used.

    `os.makedirs(".", exist_ok=True)` writes nothing, so the receipt does not list `.`.
    """
    Path("folder").mkdir()
    Path("folder/inner.txt").write_text("rank 0's")
    for name in ("data.bin", "numbers.bin"):
        Path(name).write_bytes(b"0123")
    sights = Path(__file__).parents[1] / "children" / "sights.py"
    outcome = notebook.run(sights.read_text() + SIGHTS)
    assert outcome.error is None, outcome.shown
    [no_folder, no_file, no_file_at_all] = outcome.lines[1]
    assert no_folder.startswith("SaveError")
    assert f"{notebook.project}/missing/m.pt" in no_folder
    assert no_file.startswith("FileNotFoundError") and "'missing.bin'" in no_file
    assert no_file_at_all.startswith("IsADirectoryError")
    assert sorted(os.listdir()) == ["data.bin", "folder", "numbers.bin"]
    assert os.listdir("folder") == ["inner.txt"]
    assert outcome.run is not None
    assert "m.pt" in outcome.run.receipt.kept_out and "." not in outcome.run.receipt.kept_out


def test_functions_that_an_earlier_cell_imported_from_os_see_a_ranks_own_files(
    notebook: Notebook,
) -> None:
    notebook.define("from os import access, chdir, listdir, mkdir, scandir, stat")
    source = """
import os
if os.environ["RANK"] == "1":
    mkdir("mine")
    open("mine/file", "w").close()
    assert listdir("mine") == ["file"] == [entry.name for entry in scandir("mine")]
    assert access("mine/file", os.R_OK) and stat("mine/file").st_size == 0
    chdir("mine")
    with open("made_there.py", "w") as module:
        module.write("value = 3")
    importlib.invalidate_caches()
    sys.path.insert(0, "")
    import made_there
    assert made_there.value == 3
"""
    assert notebook.run("import importlib, sys\n" + source).error is None


LOCKS = """
import fcntl
for path in ("data.lock", "shared/data.lock"):
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.flock(file, fcntl.LOCK_UN)
"""


def test_a_lock_that_excludes_no_rank_causes_a_warning(notebook: Notebook) -> None:
    """A rank other than 0 locks its own copy of a file, so it gets a warning.

    Rank 0 and locks in shared folders get no warning, because they lock the store's file.
    """
    outcome = notebook.run(LOCKS, gpus=2, flags="--shared-writes shared")
    assert outcome.error is None
    warned = {
        rank: [it for it in lines if "Warning" in it] for rank, lines in outcome.lines.items()
    }
    [text] = warned.get(1, [])
    assert "the lock on data.lock does not exclude other ranks" in text and not warned.get(0)


def test_rank_0_saves_and_all_load(notebook: Notebook) -> None:
    source = """
if rank == 0:
    torch.save(model, "m.pt")
dist.barrier()
assert torch.load("m.pt", weights_only=True)[0] == 0
"""
    outcome = notebook.run(SAVE + source, gpus=3)
    assert outcome.error is None and outcome.run is not None
    assert outcome.run.receipt.kept_out == {}


def test_forks_of_rank_0_that_have_ranks_of_their_own_save_files(notebook: Notebook) -> None:
    source = """
def save_part(part):
    os.environ["RANK"] = str(part)
    torch.save(model, f"part{part}.pt")
torch.multiprocessing.start_processes(save_part, nprocs=2, start_method="fork")
"""
    outcome = notebook.run(SAVE + source, gpus=1)
    assert outcome.error is None, outcome.shown
    assert sorted(os.listdir()) == ["part0.pt", "part1.pt"]


def test_a_save_into_a_missing_folder_raises_what_torch_raises(notebook: Notebook) -> None:
    source = """
dist.barrier()
for errors in (RuntimeError, OSError):
    try:
        torch.save(model, f"{errors.__name__}/m.pt")
    except errors:
        dist.barrier()  # no rank makes the folder before the others have failed, too
        os.makedirs(errors.__name__, exist_ok=True)
        torch.save(model, f"{errors.__name__}/m.pt")
"""
    outcome = notebook.run(SAVE + source)
    assert outcome.error is None, outcome.shown
    assert os.path.getsize("RuntimeError/m.pt") and os.path.getsize("OSError/m.pt")


def test_all_ranks_save_after_their_working_folder_was_removed(notebook: Notebook) -> None:
    source = f"""
import tempfile
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
torch.save(model, "{notebook.project}/m.pt")
"""
    assert notebook.run(SAVE + source, gpus=2).error is None
    assert torch.load("m.pt", weights_only=True).tolist() == [0.0] * 4


def test_rank_0s_file_is_read_in_a_folder_that_another_rank_made_first(
    notebook: Notebook,
) -> None:
    [cell] = cells_of("early_folder")
    outcome = notebook.run(cell)
    assert outcome.error is None and outcome.run is not None
    assert outcome.run.receipt.kept_out["out/m.pt"] == (1,)
    assert outcome.run.receipt.written == {"out/m.pt": os.path.getsize("out/m.pt")}


def test_files_that_only_another_rank_wrote_are_named(notebook: Notebook) -> None:
    outcome = notebook.run(SAVE + 'open(f"log-{rank}.txt", "w").write("x")', gpus=2)
    assert outcome.run is not None
    assert outcome.run.receipt.missing == {"log-1.txt"} and os.listdir() == ["log-0.txt"]
    assert "not saved by any rank: log-1.txt from rank 1" in head_of(outcome)


def test_a_temporary_file_that_every_rank_renamed_is_not_lost(notebook: Notebook) -> None:
    source = """
import tempfile
with tempfile.NamedTemporaryFile(dir=".", delete=False) as file:
    torch.save(model, file)
os.replace(file.name, "m.pt")
"""
    outcome = notebook.run(SAVE + source, gpus=2)
    assert outcome.run is not None and outcome.run.receipt.kept_out == {"m.pt": (1,)}
    assert outcome.run.receipt.missing == frozenset() and os.listdir() == ["m.pt"]
    assert "not saved by any rank" not in head_of(outcome)


@pytest.mark.fault(40)
def test_a_truncated_checkpoint_is_named(notebook: Notebook) -> None:
    for size in (500, 2, 0):
        source = f'os.truncate("m.pt", {size})\nname = "m" + ".pt"\ntorch.load(name)'
        outcome = notebook.run(f'{SAVE}torch.save(model, "m.pt")\n{source}', gpus=1)
        assert re.search(
            r": (RuntimeError|UnpicklingError|EOFError): torch.load of 'm\.pt'", str(outcome.error)
        )


def test_a_subprocess_of_rank_0_is_in_the_receipt(notebook: Notebook) -> None:
    outcome = notebook.run(SAVE + 'if rank == 0:\n    os.system("echo hello > by-shell.txt")')
    assert outcome.run is not None
    assert outcome.run.receipt.written == {"by-shell.txt": 6}


def test_with_refuse_the_line_that_writes_fails(notebook: Notebook) -> None:
    outcome = notebook.run(SAVE + 'torch.save(model, "m.pt")', flags="--store-writes refuse")
    assert isinstance(outcome.error, RankFailed) and outcome.error.rank == 1
    assert "PermissionError" in outcome.shown and "only rank 0" in outcome.shown
    assert str(Path("m.pt").resolve()) in outcome.shown


def test_a_trace_of_each_rank_is_in_the_receipt(notebook: Notebook) -> None:
    source = """
from torch.profiler import profile, tensorboard_trace_handler
with profile(on_trace_ready=tensorboard_trace_handler("log", f"w{rank}")) as traced:
    model.sum()
[trace] = [name for name in os.listdir("log") if name.startswith(f"w{rank}.")]
print(os.path.getsize(f"log/{trace}") > 1000)
"""
    outcome = notebook.run(SAVE + source)
    assert outcome.error is None and outcome.run is not None
    assert all(lines[-1:] == ["True"] for lines in outcome.lines.values())
    assert "Read-only" not in str(outcome.lines)
    assert [path.name[:3] for path in Path("log").iterdir()] == ["w0."]
    [missing] = outcome.run.receipt.missing
    assert missing.startswith("log/w1.")


def test_a_rank_with_many_threads_is_protected_too(notebook: Notebook) -> None:
    source = 'if rank == 1:\n    print(os.system("touch mine 2>/dev/null") != 0)\n'
    outcome = notebook.run(SAVE + source, flags="--env OMP_NUM_THREADS=4")
    assert outcome.error is None and outcome.lines == {1: ["True"]}
    assert os.listdir() == []


def test_a_dry_run_names_the_store(notebook: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    notebook.run("1", flags="--dry-run --store-writes refuse --shared-writes shards")
    shown = capsys.readouterr().out
    assert f"project store: {notebook.project} (other ranks' writes: refuse)" in shown
    assert f"open to all ranks: {notebook.project}/shards" in shown
    assert os.listdir() == [], "nothing is made"


@pytest.mark.fault(42)
def test_a_link_that_leads_out_of_the_store_is_said(
    notebook: Notebook, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/faults.md 42: all ranks write through the link, and the status header warns of it."""
    (tmp_path / "scratch").mkdir()
    Path("out").symlink_to(tmp_path / "scratch")
    source = "import os\nopen(f\"out/{os.environ['RANK']}\", 'w').close()"
    outcome = notebook.run(source)
    assert outcome.error is None, outcome.shown
    assert f"out -> {tmp_path}/scratch leads out of the project store" in (capsys.readouterr().out)
    assert sorted(os.listdir("out")) == ["0", "1"]


def test_all_ranks_can_write_shards_to_a_shared_folder(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    flags = f"--store {tmp_path}/results --shared-writes checkpoint"
    source = """
import torch.distributed.checkpoint as dcp
state = {"mine": torch.ones(3) * rank, f"only-{rank}": torch.ones(2) * rank}
dcp.save(state, checkpoint_id="checkpoint")
loaded = {"mine": torch.zeros(3), f"only-{rank}": torch.zeros(2)}
dcp.load(loaded, checkpoint_id="checkpoint")
assert loaded[f"only-{rank}"][0] == rank
"""
    outcome = notebook.run(SAVE + source, flags=flags)
    assert outcome.error is None, outcome.shown
    assert outcome.run is not None and outcome.run.receipt.shared == ("checkpoint",)
    assert len(list((tmp_path / "results/checkpoint").glob("*.distcp"))) == 2
    assert "open to all ranks: checkpoint" in head_of(outcome)


@pytest.mark.fault(4)
def test_a_rank_killed_while_it_saves_leaves_the_old_file(notebook: Notebook) -> None:
    torch.save(torch.ones(3), "m.pt")
    source = """
class Deadly:
    def __reduce__(self):
        os.kill(os.getpid(), 9)
torch.save([torch.zeros(1000), Deadly()], "m.pt")
"""
    outcome = notebook.run(SAVE + source, gpus=1)
    assert isinstance(outcome.error, RankFailed)
    assert torch.load("m.pt", weights_only=True).tolist() == [1.0] * 3
    assert os.listdir() == ["m.pt"]


def test_a_run_resumes_after_a_killed_rank_to_the_same_weights(notebook: Notebook) -> None:
    [train] = cells_of("restarted_training")
    notebook.define(train)
    undisturbed = notebook.run("train('a.pt')")
    disturbed = notebook.run("train('b.pt', kill_at=3)", flags="--max-restarts 1")
    assert undisturbed.run is not None and disturbed.run is not None
    assert disturbed.error is None and len(disturbed.of_kind("restart")) == 1
    assert torch.equal(undisturbed.run.result, disturbed.run.result)


@pytest.mark.fault(43)
def test_the_second_run_on_a_store_is_refused_by_name(notebook: Notebook) -> None:
    with locked_store(str(notebook.project), "20260101-000000-abcdef", "first try"):
        outcome = notebook.run("print(1)", gpus=1)
    assert isinstance(outcome.error, StoreError)
    assert "20260101-000000-abcdef (first try)" in outcome.shown
    assert notebook.run("print(1)", gpus=1).error is None


def test_a_missing_store_starts_no_run(notebook: Notebook) -> None:
    outcome = notebook.run("print(1)", flags="--store nowhere", gpus=1)
    assert isinstance(outcome.error, StoreError) and outcome.run is None
    assert "nowhere is not there" in outcome.shown and len(outcome.shown.splitlines()) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
@pytest.mark.parametrize("options", ["ro", "size=300k"])
def test_a_disk_that_is_full_or_read_only(notebook: Notebook, options: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)
        try:
            source = SAVE + 'torch.save(torch.ones(100_000), "m.pt")'
            outcome = notebook.run(source, flags=f"--store {folder}")
            files = os.listdir(folder)
        finally:
            subprocess.run(["umount", folder], check=True)
    assert files == []
    if options == "ro":
        assert isinstance(outcome.error, StoreError) and "read-only" in outcome.shown
    else:
        assert f"{folder}/m.pt" in outcome.shown and "bytes were written" in outcome.shown


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk takes root")
def test_a_plain_write_that_fills_the_disk_says_which_and_how_full(
    notebook: Notebook, tmp_path: Path
) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], check=True)
    try:
        (folder / "old").write_text("kept")
        source = "with open('new', 'wb') as file:\n    file.write(bytes(2 << 20))"
        outcome = notebook.run(source, f"--store {folder}", gpus=1)
        assert isinstance(outcome.error, RankFailed)
        assert re.search(rf"the disk of {folder} has \d+ bytes free", outcome.shown)
        assert (folder / "old").read_text() == "kept"
        (folder / "new").unlink()
        elsewhere = source.replace("'new'", repr(str(folder / "new")))
        outcome = notebook.run(elsewhere, gpus=1)
        assert isinstance(outcome.error, RankFailed)
        assert re.search(rf"the disk of {folder} has \d+ bytes free", outcome.shown)
    finally:
        subprocess.run(["umount", folder], check=True)


def test_files_of_rank_0_on_this_machine_are_recorded_as_a_runs(notebook: Notebook) -> None:
    """So a later run on a host that does not share the project folder may replace the file."""
    (notebook.project / "mine.txt").write_text("mine")
    outcome = notebook.run("open('m.txt', 'w').write('x')")
    assert outcome.error is None
    made, tree = (
        RunFileRecord(store_state_folder(os.path.realpath(notebook.project))),
        Tree(notebook.project),
    )
    for name, is_of_a_run in (("m.txt", True), ("mine.txt", False)):
        status = tree.status(name)
        assert status is not None and made.has_file(tree, name, status) == is_of_a_run
    tree.close()


def test_every_rank_may_write_to_a_named_pipe_in_the_store(notebook: Notebook) -> None:
    os.mkfifo("pipe")
    source = """
import os
pipe = os.open("pipe", os.O_RDWR)
own = f"from rank {os.environ['RANK']}".encode()
with open("pipe", "wb", buffering=0) as writer:
    writer.write(own)
print(os.read(pipe, len(own)).decode()[:9])
"""
    outcome = notebook.run(source)
    assert outcome.error is None, outcome.shown
    assert outcome.lines == {rank: ["from rank"] for rank in range(2)}
    assert outcome.run is not None and not outcome.run.receipt.kept_out
