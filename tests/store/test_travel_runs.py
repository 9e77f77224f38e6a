"""Tests of runs on hosts that do not share the project store: copies to hosts, and files back."""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from taas_magic.config import load_config
from taas_magic.errors import RankFailed, RunLost, StoreError
from taas_magic.journal.folder import RunFolder
from taas_magic.notebook import pools
from tests.cellfiles import cells_of
from tests.events import line_of
from tests.eventually import HUNG_S, eventually
from tests.harness import Notebook, Outcome, interrupt_twice
from tests.rig.hosts import Hosts, hosts_up
from tests.rig.pools import enter, given_back, settings_in, ssh_pool
from tests.store.travel_rig import tree_of

pytestmark = [pytest.mark.network]

POOLS = {"two": [1, 2], "doomed": [3]}

SAVE = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo"); dist.barrier()  # else one may end before the other is there
rank = dist.get_rank()
model = torch.full((4,), float(rank))
"""


@pytest.fixture(scope="module")
def hosts(warm_notebook: Notebook) -> Iterator[Hosts]:
    """Run three hosts that share the state folder with this machine, but not the project."""
    with hosts_up(3, share=[warm_notebook.state_dir]) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def settings(
    warm_notebook: Notebook, hosts: Hosts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Yield a configuration folder with pools of `hosts`; end the pools after the tests."""
    tables = [ssh_pool(name, hosts, numbers, gpus=2) for name, numbers in POOLS.items()]
    toml = '[store]\nlimit = "4MiB"\n' + "".join(tables)
    folder = settings_in(tmp_path_factory.mktemp("config"), toml)
    with given_back(warm_notebook, folder, *POOLS):
        yield folder


@pytest.fixture
def far(warm_notebook: Notebook, settings: Path, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """Return a notebook with an empty project folder, which the pools' hosts do not share."""
    enter(warm_notebook, settings, monkeypatch)
    for path in warm_notebook.project.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return warm_notebook


def notes(outcome: Outcome) -> list[str]:
    return [event["text"] for event in outcome.of_kind("note")]


def test_every_rank_saves_and_one_file_comes_back(far: Notebook) -> None:
    outcome = far.run(SAVE + 'torch.save(model, "m.pt")\nprint(os.getcwd())', "--pool two")
    assert outcome.error is None, outcome.shown
    assert torch.load("m.pt", weights_only=True).tolist() == [0.0] * 4
    assert os.listdir() == ["m.pt"]
    assert outcome.run is not None
    receipt = outcome.run.receipt
    assert receipt.written == {"m.pt": os.path.getsize("m.pt")} and receipt.complete
    assert receipt.kept_out == {"m.pt": (1,)} and not receipt.missing and not receipt.not_sent
    assert "/.cache/taas/projects/" in outcome.lines[0][-1]


def test_the_project_is_copied_to_hosts_and_changes_come_back(far: Notebook) -> None:
    Path("data").mkdir()
    Path("data/numbers.csv").write_text("1,2,3")
    Path("old.txt").touch()
    Path("secret").symlink_to("/etc/hostname")
    os.mkfifo("pipe")
    source = """
import os
from pathlib import Path
if os.environ["RANK"] == "0":
    total = sum(map(int, Path("data/numbers.csv").read_text().split(",")))
    Path("out/deep").mkdir(parents=True)
    Path("out/deep/total.txt").write_text(str(total))
    Path("old.txt").unlink()
    os.system("echo by the shell > data/shell.txt")
"""
    outcome = far.run(source, "--pool two")
    assert outcome.error is None, outcome.shown
    assert Path("out/deep/total.txt").read_text() == "6"
    assert Path("data/shell.txt").read_text() == "by the shell\n"
    assert Path("old.txt").exists() and Path("secret").is_symlink()
    assert any("old.txt was not copied to" in note for note in notes(outcome))
    assert "not copied from the project store: pipe (a FIFO), secret (a symbolic link)" in (
        notes(outcome)
    )
    assert outcome.run is not None
    assert set(outcome.run.receipt.written) == {"out/deep/total.txt", "data/shell.txt"}


@pytest.mark.fault(75)
def test_secrets_and_what_others_believe_stay_where_they_are(far: Notebook) -> None:
    """docs/faults.md 75: secrets are not copied to hosts; files that tools trust do not come back.

    Notes name the first of these files.
    """
    for path in (".env", ".ssh/id_ed25519", "keys/.netrc"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("secret")
    Path(".bashrc").write_text("mine")
    before = tree_of(Path())
    source = """
import os
from pathlib import Path
print("HELD", sorted(str(p) for p in Path().rglob("*") if p.is_file()), flush=True)
if os.environ["RANK"] == "0":
    for name in (".bashrc", ".GIT/hooks/post-merge", "taas.toml", ".env.local"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("from the host")
"""
    outcome = far.run(source, "--pool two")
    assert outcome.error is None, outcome.shown
    assert tree_of(Path()) == before
    texts = [line for lines in outcome.lines.values() for line in lines]
    assert "HELD ['.bashrc']" in texts
    said = "\n".join(notes(outcome))
    assert "not copied from the project store: .env (it may hold a secret, like 2 more" in said
    assert "was not copied to the project store: shells, ssh, git" in said
    assert outcome.run is not None
    assert set(outcome.run.receipt.not_sent) >= {".bashrc", "taas.toml", ".env.local"}


@pytest.mark.fault(75)
def test_files_of_the_user_stay_and_those_of_runs_are_replaced(far: Notebook) -> None:
    """New files that tools load by themselves do not come back from the host.

    All ranks see the versions that rank 0 wrote.
    """
    Path("results.json").write_text("mine")
    Path("train.py").write_text("mine")
    source = """
if rank == 0:
    for name in ("results.json", "train.py", "random.py", "conftest.py", ".gdbinit", "log.txt"):
        open(name, "a").write("of rank 0")
    os.makedirs("exp/.hydra", exist_ok=True)
    open("exp/train.py", "w").write("a copy")
    open("exp/.hydra/config.yaml", "w").write("lr: 1")
while not os.path.exists("exp/.hydra/config.yaml") or "rank 0" not in open("train.py").read():
    time.sleep(0.1)
dist.barrier()
"""
    for runs in (1, 2):
        outcome = far.run(SAVE + source, "--pool two", gpus=4)
        assert outcome.error is None and outcome.run is not None, outcome.shown
        assert tree_of(Path()) == {
            "results.json": b"mine", "results.json.from-host": b"mineof rank 0",
            "train.py": b"mine", "train.py.from-host": b"mineof rank 0",
            "log.txt": b"of rank 0" * runs, "exp": None, "exp/.hydra": None,
            "exp/train.py": b"a copy", "exp/.hydra/config.yaml": b"lr: 1",
        }  # fmt: skip
        kept = {"results.json", "train.py", "random.py", "conftest.py", ".gdbinit"}
        assert set(outcome.run.receipt.not_sent) == kept
    said = [note for note in notes(outcome) if "was not copied to the project store" in note]
    assert len(said) == 2 and all("[store] overwrite" in note for note in said)


def test_other_hosts_read_what_rank_0_saved(far: Notebook) -> None:
    source = """
if rank == 0:
    torch.save(model, "m.pt")
while not os.path.exists("m.pt"):
    time.sleep(0.1)
print(torch.load("m.pt", weights_only=True)[0].item())
torch.save(model, "m.pt")
dist.barrier()
os.makedirs("out", exist_ok=True)
torch.save(model, "out/m.pt")
"""
    outcome = far.run(SAVE + source, "--pool two", gpus=4)
    assert outcome.error is None, outcome.shown
    assert {lines[-1] for lines in outcome.lines.values()} == {"0.0"}
    for name in ("m.pt", "out/m.pt"):
        assert torch.load(name, weights_only=True).tolist() == [0.0] * 4
    assert outcome.run is not None
    receipt = outcome.run.receipt
    assert set(receipt.written) == {"m.pt", "out/m.pt"} and not receipt.missing
    assert all(receipt.kept_out[name] == (1, 2, 3) for name in ("m.pt", "out/m.pt"))


def test_other_hosts_follow_checkpoints_that_rank_0_rotates(far: Notebook) -> None:
    """Rank 0 writes and renames a checkpoint, removes the old one, and replaces "latest"."""
    [cell] = cells_of("rotated_checkpoints")
    outcome = far.run(cell, "--pool two", gpus=4)
    assert outcome.error is None, outcome.shown
    assert set(os.listdir()) == {"checkpoint-3", "latest"}
    assert Path("latest").read_text() == "3" and notes(outcome) == []


@pytest.mark.nightly
def test_shards_of_all_hosts_come_back(far: Notebook) -> None:
    source = """
import torch.distributed.checkpoint as dcp
dcp.save({f"only-{rank}": torch.ones(2) * rank}, checkpoint_id="checkpoint")
"""
    outcome = far.run(SAVE + source, "--pool two --shared-writes checkpoint", gpus=4)
    assert outcome.error is None, outcome.shown
    assert len(list(Path("checkpoint").glob("*.distcp"))) == 4
    assert Path("checkpoint/.metadata").exists()
    assert outcome.run is not None and outcome.run.receipt.shared == ("checkpoint",)


def test_after_a_restart_all_hosts_have_rank_0s_checkpoint(far: Notebook) -> None:
    source = """
if not os.path.exists("m.pt"):
    dist.barrier()
    if rank == 0:
        torch.save(torch.tensor(7.0), "m.pt")
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), 9)
    time.sleep(600)
print(torch.load("m.pt", weights_only=True).item())
"""
    outcome = far.run(SAVE + source, "--pool two --max-restarts 1", gpus=4)
    assert outcome.error is None, outcome.shown
    assert [outcome.lines[rank][-1] for rank in range(4)] == ["7.0"] * 4
    assert outcome.run is not None and set(outcome.run.receipt.written) == {"m.pt"}


def test_a_cells_files_come_back_after_the_end_of_its_session(far: Notebook, hosts: Hosts) -> None:
    """A dead rank ends the session while its cell still sends files over a slow network."""
    source = """
if rank == 0:
    for name in ("a.bin", "b.bin"):
        with open(name, "wb") as file:
            file.write(os.urandom(1_000_000))
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), 9)
"""
    assert far.run("1", "--session s --pool two").error is None
    for number in POOLS["two"]:
        hosts.limit(number, "2mbit")
    try:
        outcome = far.run(SAVE + source, "--session s")
    finally:
        for number in POOLS["two"]:
            hosts.limit(number, "none")
    assert isinstance(outcome.error, RankFailed), outcome.shown
    assert not [note for note in notes(outcome) if "no longer copied" in note]
    assert {path.name: path.stat().st_size for path in Path().iterdir()} == dict.fromkeys(
        ("a.bin", "b.bin"), 1_000_000
    )
    assert outcome.run is not None and set(outcome.run.receipt.written) == {"a.bin", "b.bin"}


def test_two_interrupts_while_a_session_copies_the_store_end_only_the_cell(
    far: Notebook, hosts: Hosts
) -> None:
    assert far.run("1", "--pool two").error is None
    Path("big.bin").write_bytes(os.urandom(3_000_000))
    pool = pools.named("two", load_config(far.project)).connection
    assert pool is not None

    def interrupt() -> None:
        eventually(lambda: any(len(host.runs) == 2 for host in pool.status().hosts))
        interrupt_twice()

    for number in POOLS["two"]:
        hosts.limit(number, "400kbit")
    try:
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        outcome = far.run("print('first')", "--session s --pool two")
        interrupting.join()
    finally:
        for number in POOLS["two"]:
            hosts.limit(number, "none")
    assert isinstance(outcome.error, KeyboardInterrupt), outcome.shown
    outcome = far.run("print('second')", "--session s")
    assert outcome.error is None, outcome.shown
    assert outcome.lines == {0: ["second"], 1: ["second"]}
    far.define("%taas end s")


def test_a_project_beyond_the_limit_is_refused_with_advice(far: Notebook) -> None:
    Path("big.bin").write_bytes(bytes(5 << 20))
    outcome = far.run("1", "--pool two")
    assert isinstance(outcome.error, StoreError)
    assert "big.bin 5.0 MiB" in outcome.shown and ".taasignore" in outcome.shown
    Path(".taasignore").write_text("*.bin\n")
    assert far.run("1", "--pool two").error is None


@pytest.mark.fault(14)
def test_a_host_that_comes_back_changes_nothing(far: Notebook, hosts: Hosts) -> None:
    """A host was cut off until its run was lost. The pool refuses the files that it still sends."""
    source = """
if rank == 0:
    for number in range(100_000):
        with open(f"{number}.txt", "w") as file:
            file.write("x" * 1000)
        if number == 20:
            print("writing", flush=True)
        time.sleep(0.02)
time.sleep(600)
"""
    processes: list[psutil.Process] = []

    def cut() -> None:
        eventually(lambda: "writing" in said(far), within_s=HUNG_S)
        eventually(lambda: list(far.project.glob("*.txt")))
        processes.extend(hosts.processes(3))
        hosts.cut(3)

    cutting = threading.Thread(target=cut)
    cutting.start()
    outcome = far.run(SAVE + source, "--pool doomed")
    cutting.join()
    assert isinstance(outcome.error, RunLost), outcome.shown
    before = tree_of(far.project)
    assert before and all(content == b"x" * 1000 for content in before.values())
    hosts.heal(3)
    _, alive = psutil.wait_procs(processes, timeout=HUNG_S)
    assert not alive and tree_of(far.project) == before


@pytest.mark.nightly
def test_power_off_after_a_save_loses_nothing(far: Notebook, hosts: Hosts) -> None:
    """Closed files reach the store during the run; no part of an unclosed file does."""
    source = """
from pathlib import Path
if rank == 0:
    Path("epochs").mkdir()
    for number in range(50):
        Path(f"epochs/{number}.txt").write_text(str(number))
    torch.save(torch.arange(1_000_000), "m.pt")
    with open("unfinished.txt", "w") as file:
        file.write("half")
        file.flush()
        print("saved", flush=True)
        time.sleep(600)
time.sleep(600)
"""

    def cut_power() -> None:
        eventually(lambda: "saved" in said(far), within_s=HUNG_S)
        eventually(lambda: Path("m.pt").exists() and len(os.listdir("epochs")) == 50)
        hosts.kill(3)

    cutting = threading.Thread(target=cut_power)
    cutting.start()
    outcome = far.run(SAVE + source, "--pool doomed")
    cutting.join()
    assert outcome.error is not None
    assert torch.load("m.pt", weights_only=True).equal(torch.arange(1_000_000))
    assert {name: Path(name).read_text() for name in map(str, Path("epochs").iterdir())} == {
        f"epochs/{number}.txt": str(number) for number in range(50)
    }
    assert set(tree_of(far.project)) == {
        "m.pt", "epochs", *(f"epochs/{number}.txt" for number in range(50))
    }  # fmt: skip


def said(notebook: Notebook) -> list[str]:
    """Return the lines of rank 0 in the newest run."""
    newest = max((notebook.state_dir / "runs").iterdir(), default=None)
    events = [line_of(event) for event in RunFolder(newest).read_events()] if newest else []
    lines = [event["lines"] for event in events if event["kind"] == "lines" and event["rank"] == 0]
    return [line for some in lines for line in some]
