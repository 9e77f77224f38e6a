"""Faults of a run or pool do not affect the next cell: docs/faults.md 61 to 65 and 69 to 72.

Most tests start a kernel with folders of its own, and damage these.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell

from taas_magic.config import PoolConfig
from taas_magic.journal.folder import ENDED_STATES, RunFolder, summary
from taas_magic.store.rule import user_name
from tests.eventually import HUNG_S, eventually
from tests.frontend import Frontend, Scene, environment
from tests.harness import forkservers, left_of, processes, remove_cgroup, words
from tests.rig.pools import settings_in

pytestmark = [pytest.mark.usefixtures("no_leftovers")]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes root")

NEXT = "%%taas --gpus 1\nprint('next')"


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.close()


@contextlib.contextmanager
def small_disk(path: Path, options: str) -> Iterator[None]:
    """Mount a tmpfs at a folder until the block ends."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def tree(frontend: Frontend) -> list[psutil.Process]:
    return frontend.process.children(recursive=True)


def only(frontend: Frontend, word: str) -> psutil.Process:
    """Wait until exactly one process below a kernel has `word` in its command line; return it.

    More processes can have it for a moment: a process that is ending, or a fork before its exec.
    """
    found: list[psutil.Process] = []

    def is_one() -> bool:
        found[:] = [process for process in tree(frontend) if word in words(process)]
        return len(found) == 1

    eventually(is_one)
    return found[0]


def head(frontend: Frontend, request: str) -> str:
    """Return the last text of a cell's status header."""
    shown = frontend.contents(request, "update_display_data")
    return str(shown[-1]["data"]["text/plain"])


def error(frontend: Frontend, request: str) -> str:
    """Return the traceback that a failed cell shows, without colours."""
    [shown] = frontend.contents(request, "error")
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(shown["traceback"]))


@pytest.mark.fault(63)
@as_root
def test_a_home_that_cannot_be_written_or_is_full_and_a_full_tmpdir(scene: Scene) -> None:
    """The state folder is below the home folder. One kernel meets all faults."""
    home = scene.folder / "home"
    home.mkdir()
    with (
        small_disk(home, "ro,size=4m"),
        small_disk(scene.tmp, "size=8m,nr_inodes=200"),
        scene.kernel(TAAS_STATE_DIR="", HOME=str(home)) as frontend,
    ):
        a_home_that_cannot_be_written_is_told_in_one_line(frontend)
        subprocess.run(["mount", "-o", "remount,rw", home], check=True)
        a_home_without_file_locks_is_told_in_one_line(frontend)
        assert "[0] next" in frontend.text(frontend.run(NEXT))
        frontend.run(LOADER)
        a_full_tmpdir_fails_the_cell_and_no_other(scene, frontend)
        a_full_state_folder_ends_no_run(home / "filler", frontend)


def a_home_that_cannot_be_written_is_told_in_one_line(frontend: Frontend) -> None:
    for cell in (NEXT, "%taas status", "%taas down"):
        refused = frontend.send(cell)
        frontend.finish(refused)
        assert re.fullmatch(
            r"PoolError: cannot write to .*, the folder of runs and pools: .*",
            error(frontend, refused),
        )


def a_home_without_file_locks_is_told_in_one_line(frontend: Frontend) -> None:
    frontend.run(
        "import errno, fcntl, os\n"
        "flock = fcntl.flock\n"
        "def refuse(*arguments):\n"
        "    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))\n"
        "fcntl.flock = refuse"
    )
    refused = frontend.send(NEXT)
    frontend.finish(refused)
    assert re.fullmatch(
        r"PoolError: cannot write to .*/taas, the folder of runs and pools: its file system has no "
        r"file locks \(flock\); correct this, or set TAAS_STATE_DIR .*",
        error(frontend, refused),
    )
    frontend.run("fcntl.flock = flock")


def a_full_tmpdir_fails_the_cell_and_no_other(scene: Scene, frontend: Frontend) -> None:
    for flags in ("", "--cpus 1"):
        made = fill_with_files(scene.tmp)
        cell = f"%%taas --gpus 1 {flags}\nfor batch in loader: print('a batch')"
        request = frontend.send(cell)
        assert frontend.finish(request)["status"] == "error"
        assert f"cannot create a folder in {scene.tmp}" in error(frontend, request)
        assert "its file system is full" in error(frontend, request)
        for path in made:
            path.unlink()
        assert "[0] next" in frontend.text(frontend.run(NEXT))


def a_full_state_folder_ends_no_run(filler: Path, frontend: Frontend) -> None:
    fill = f"""%%taas --gpus 2
import os
if os.environ["RANK"] == "0":
    with open({str(filler)!r}, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    print("full")
for batch in loader:
    pass
for i in range(3000):
    print(i, "x" * 90, flush=True)
6 * 7"""
    request = frontend.run(fill)
    assert "[0] full" in frontend.text(request)
    incomplete = "the journal of this run is incomplete: its file system is (almost )?full"
    assert re.search(incomplete, head(frontend, request))
    assert head(frontend, request).count("journal of this run") == 1
    refused = frontend.send(NEXT)
    assert frontend.finish(refused)["status"] == "error"
    assert "its file system is full" in error(frontend, refused)
    assert "\n" not in error(frontend, refused)
    frontend.run("%taas status")
    filler.unlink()
    assert "[0] next" in frontend.text(frontend.run(NEXT))


LOADER = """
import taas, torch
from torch.utils.data import DataLoader, TensorDataset
loader = taas.register(DataLoader(TensorDataset(torch.zeros(2)), batch_size=2))
"""


def fill_with_files(folder: Path) -> list[Path]:
    """Create files in a folder until its file system is full; return their paths."""
    made: list[Path] = []
    with contextlib.suppress(OSError):
        while True:
            path = folder / f"filler-{len(made)}"
            path.touch()
            made.append(path)
    return made


@pytest.mark.fault(69)
@as_root
def test_a_small_dev_shm(scene: Scene) -> None:
    """All batches together exceed /dev/shm. They arrive nevertheless, with and without fetchers."""
    script = """
from tests.notebook.test_aftermath import shell_with
shell = shell_with()
shell.run_cell('''
import taas, torch
from torch.utils.data import DataLoader, Dataset
class Large(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.full((1 << 20,), float(index))
loader = taas.register(DataLoader(Large(), batch_size=4, num_workers=2))
''').raise_error()
cell = "\\nprint(sum(float(batch.mean()) for batch in loader))"
assert shell.run_cell("%%taas --gpus 1 --cpus 1" + cell).success
assert shell.run_cell("%%taas --gpus 1" + cell).success
shell.run_line_magic("taas", "down")
"""
    words = ["unshare", "-m", "sh", "-c"]
    words += ['mount -t tmpfs -o size=64m none /dev/shm && exec "$@"', "sh", sys.executable, "-c"]
    done = subprocess.run(
        [*words, script],
        env={**os.environ, **scene.environ()},
        capture_output=True,
        text=True,
        cwd=scene.project,
        timeout=HUNG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("[0] 124.0") == 2


@pytest.mark.fault(64, 65)
def test_odd_texts_are_shown_escaped_and_torn_run_folders_hurt_nobody(scene: Scene) -> None:
    project = scene.folder / os.fsdecode(b"caf\xe9")
    scene.project = project
    project.mkdir()
    with scene.kernel(ODD=os.fsdecode(b"\xe9t\xe9")) as frontend:
        torn_run_folders_hurt_nobody(scene, frontend)
        texts_that_no_codec_takes_are_shown_escaped(frontend)


def torn_run_folders_hurt_nobody(scene: Scene, frontend: Frontend) -> None:
    frontend.run("%%taas --gpus 1 --name whole\nprint('next')")
    runs = scene.state / "runs"
    [whole] = runs.iterdir()
    eventually(lambda: not (whole / "payload").exists())  # the run removes its payload last
    for name, plan in (("1-empty", ""), ("1-torn", '{"name": "x", "po'), ("1-list", "[]")):
        (runs / name).mkdir()
        (runs / name / "plan.json").write_text(plan)
    (runs / "1-none").mkdir()
    shutil.copytree(whole, runs / "2-cut")
    events = runs / "2-cut" / "events.jsonl"
    events.write_bytes(b'{"kind": "li\xff\n' + events.read_bytes()[:-20])
    old_s = time.time() - 3600
    for folder in runs.glob("1-*"):
        os.utime(folder, (old_s, old_s))
    status = frontend.text(frontend.run("%taas status"))
    assert re.search(rf"{whole.name} +SUCCEEDED", status)
    assert re.search(r"2-cut +LOST", status)
    assert frontend.text(frontend.run("%taas logs")) == "next\n"
    assert "[0] next" in frontend.text(frontend.run(NEXT))
    assert not list(runs.glob("1-*"))


def texts_that_no_codec_takes_are_shown_escaped(frontend: Frontend) -> None:
    request = frontend.send("%%taas --gpus 2\nraise ValueError('caf\\udce9')")
    assert frontend.finish(request)["ename"] == "RankFailed"
    assert "caf\\udce9" in error(frontend, request)
    assert "caf\\udce9" in frontend.text(frontend.run("%taas logs"))
    source = """%%taas --gpus 2
import os, warnings
from IPython.display import display
open(b"caf\\xe9.txt", "w").close()
display({"text/plain": "shown \\udce9"}, raw=True)
os.write(1, b"caf\\xe9\\n")
print("nul", chr(0), ascii(os.environ["ODD"]), ascii(os.getcwd()[-4:]))"""
    request = frontend.run(source)
    assert r"'\udce9t\udce9' 'caf\udce9'" in frontend.text(request)
    shown = [content["data"] for content in frontend.contents(request, "display_data")]
    assert {"text/plain": "shown \\udce9"} in shown
    assert "[0] next" in frontend.text(frontend.run(NEXT))


@pytest.mark.fault(61, 72)
def test_a_pool_that_stood_still_has_its_run_and_its_kernels(scene: Scene) -> None:
    """The run and its kernel continue after a suspension of the pool's process beyond the lease."""
    (scene.folder / "config").mkdir()
    settings_in(scene.folder / "config", '[pools.local]\nengine = "local"\nlease_s = 2\n')
    with scene.kernel() as frontend:
        a_pool_that_stands_still_for_longer_than_the_lease_loses_no_run(frontend)
        a_pool_of_another_torch_is_not_joined(scene, frontend)


def a_pool_that_stands_still_for_longer_than_the_lease_loses_no_run(frontend: Frontend) -> None:
    request = frontend.send(
        "%%taas --gpus 2\nimport time\nprint('here', flush=True)\ntime.sleep(6)\nprint('done')"
    )
    frontend.wait(lambda: "here" in frontend.text(request))
    pool = only(frontend, "taas_magic.pool.process")
    pool.suspend()
    time.sleep(4.5)  # longer than the lease and the time allowed beyond it
    pool.resume()
    assert frontend.finish(request)["status"] == "ok"
    assert "done" in frontend.text(request)


def a_pool_of_another_torch_is_not_joined(scene: Scene, old: Frontend) -> None:
    other = scene.folder / "other"
    (other / "torch-9.9.9.dist-info").mkdir(parents=True)
    (other / "torch-9.9.9.dist-info" / "METADATA").write_text("Name: torch\nVersion: 9.9.9\n")
    paths = os.pathsep.join([str(other), environment(scene.folder)["PYTHONPATH"]])
    first = only(old, "taas_magic.pool.process")
    with scene.kernel(PYTHONPATH=paths, TAAS_WARM="0") as new:
        request = new.run(NEXT)
        assert re.search(
            r'another kernel uses pool "local" with Python \S+, torch 2\.\S+; '
            "this kernel starts its own",
            new.text(request),
        )
        assert only(new, "taas_magic.pool.process").pid != first.pid
    old.run(NEXT)


HARMS = [
    (harm, process)
    for process in ("taas_magic.host.agent", "taas_magic.host.supervisor")
    for harm in (psutil.Process.kill, psutil.Process.suspend)
]


@pytest.mark.nightly
@pytest.mark.fault(62)
def test_warm_up_watches_what_it_started(scene: Scene) -> None:
    """A harmed process of a starting host fails the cell before the time limit of the start."""
    go = scene.folder / "go"
    with scene.kernel(TAAS_WARM="0", PYTHONPATH=warm_only_after(go, scene)) as frontend:
        for harm, what in HARMS:
            request = frontend.send(NEXT)
            agent = only(frontend, "taas_magic.host.agent")
            harm(harmed := only(frontend, what))
            began = time.monotonic()
            assert frontend.finish(request)["ename"] == "PoolError"
            took_s = time.monotonic() - began
            assert "before it was ready" in error(frontend, request)
            assert re.search(r"\(/.*/pool\.log\)", error(frontend, request))
            assert took_s < PoolConfig("local").start_timeout_s, f"{took_s:.1f} s"
            assert not left_of([agent, harmed])
        go.touch()
        a_pool_imports_more_before_the_fork_and_says_what_it_cannot(frontend)
        nothing_is_left_but_the_state_folder(scene, frontend)


def a_pool_imports_more_before_the_fork_and_says_what_it_cannot(frontend: Frontend) -> None:
    request = frontend.run("%%taas --gpus 1\nimport sys\nprint('waits_for_it' in sys.modules)")
    assert "[0] True" in frontend.text(request)
    assert "preload: 'no_such_module' was not imported" in head(frontend, request)


def nothing_is_left_but_the_state_folder(scene: Scene, frontend: Frontend) -> None:
    frontend.run(LOADER)
    frontend.run("%%taas --gpus 2 --cpus 1\nlist(loader)")
    only(frontend, "taas_magic.host.agent").kill()
    frontend.run(NEXT)
    only(frontend, "taas_magic.host.supervisor").kill()
    frontend.run(NEXT)
    frontend.run("%taas down")
    torchs = f"torchinductor_{user_name()}"  # the import of torch creates this cache
    eventually(lambda: {path.name for path in scene.tmp.iterdir()} <= {torchs})
    assert not list(scene.project.iterdir())


def warm_only_after(go: Path, scene: Scene) -> str:
    """Set the local pool up so that the warm-up of its hosts waits until the file `go` exists.

    Returns:
        The kernel's PYTHONPATH, with the module that waits.
    """
    modules, config = scene.folder / "modules", scene.folder / "config"
    for folder in (modules, config):
        folder.mkdir()
    settings_in(config, '[pools.local]\npreload = ["waits_for_it", "no_such_module"]\n')
    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n"
    (modules / "waits_for_it.py").write_text(waits)
    return os.pathsep.join([str(modules), environment(scene.folder)["PYTHONPATH"]])


@pytest.mark.fault(62)
def test_the_error_of_a_torch_that_cannot_be_imported_has_the_logs_last_lines(scene: Scene) -> None:
    broken = scene.folder / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ImportError('this torch is broken')\n")
    paths = os.pathsep.join([str(broken), environment(scene.folder)["PYTHONPATH"]])
    with scene.kernel(TAAS_WARM="0", PYTHONPATH=paths) as frontend:
        request = frontend.send(NEXT)
        assert frontend.finish(request)["ename"] == "PoolError"
        cause = "the forkserver could not import torch: ImportError: this torch is broken"
        assert cause in error(frontend, request)


@pytest.mark.nightly
def test_an_interrupt_and_a_kernels_death_while_a_run_starts_leave_no_run(scene: Scene) -> None:
    with scene.kernel(TAAS_WARM="0") as frontend:
        frontend.run(LOADER)
        an_interrupt_while_fetchers_come_up_does_not_reach_the_next_cell(frontend)
        a_kernel_that_dies_while_its_run_is_launched_leaves_no_run(scene, frontend)


def an_interrupt_while_fetchers_come_up_does_not_reach_the_next_cell(frontend: Frontend) -> None:
    request = frontend.send("%%taas --gpus 1 --cpus 1\nfor batch in loader: pass")
    frontend.wait(lambda: "warm up" in frontend.text(request))
    frontend.manager.interrupt_kernel()
    following = frontend.send(NEXT.replace("1", "1 --cpus 1") + "\nlist(loader)")
    assert frontend.finish(request)["ename"] == "KeyboardInterrupt"
    if frontend.finish(following)["status"] == "aborted":  # the interrupt also ended this cell
        following = frontend.send(NEXT.replace("1", "1 --cpus 1") + "\nlist(loader)")
    assert frontend.finish(following)["status"] == "ok", error(frontend, following)


def a_kernel_that_dies_while_its_run_is_launched_leaves_no_run(
    scene: Scene, frontend: Frontend
) -> None:
    [forkserver] = forkservers(tree(frontend))
    kept = tree(frontend)
    begun = set((scene.state / "runs").glob("*/events.jsonl"))
    forkserver.suspend()  # the launch of the run waits until the forkserver continues
    frontend.send("%%taas --gpus 1\nimport time\ntime.sleep(600)")
    new: set[Path] = set()

    def is_launched() -> bool:
        new.update(set((scene.state / "runs").glob("*/events.jsonl")) - begun)
        return bool(new)

    eventually(is_launched)
    frontend.process.kill()
    [events] = new
    eventually(lambda: "kernel is gone" in events.read_text())
    with contextlib.suppress(psutil.NoSuchProcess):  # the agent may have killed it
        forkserver.resume()
    eventually(lambda: summary(RunFolder(events.parent)).state in ENDED_STATES)
    assert not left_of(kept)


@pytest.mark.fault(71)
@as_root
def test_a_child_that_may_not_be_signalled_is_named(scene: Scene) -> None:
    without_kill = ["setpriv", "--bounding-set=-kill", "--inh-caps=-kill"]
    script = """
import os, subprocess
from tests.notebook.test_aftermath import shell_with
shell = shell_with()
assert shell.run_cell('''%%taas --gpus 1
import psutil, subprocess, time
stays = subprocess.Popen(["setpriv", "--reuid=65534", "--clear-groups", "sleep", "601"])
while psutil.Process(stays.pid).name() != "sleep":  # wait until setpriv has changed the user
    time.sleep(0.01)
other = subprocess.Popen(["sleep", "600"])
print("other", other.pid, flush=True)
''').success
assert shell.run_cell("%%taas --gpus 1\\nprint('next')").success
shell.run_line_magic("taas", "down")
"""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in scene.environ().items():
            patch.setenv(name, value)
        python = [sys.executable, "-c", script]
        done = subprocess.run(
            [*without_kill, *python], capture_output=True, text=True, cwd=scene.project, timeout=250
        )
    assert done.returncode == 0, done.stdout + done.stderr
    [stays] = set(re.findall(r"could not be ended: (\d+) \(sleep\)", done.stdout))
    os.kill(int(stays), signal.SIGKILL)
    [other] = re.findall(r"other (\d+)", done.stdout)
    assert not left_of(processes([int(other)]))
    assert "[0] next" in done.stdout


def shell_with() -> InteractiveShell:
    """Return an IPython shell that has loaded the extension, for scripts of tests."""
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "taas_magic")
    return shell


@pytest.mark.nightly
@pytest.mark.fault(70)
def test_files_beside_the_notebook_with_names_of_modules(scene: Scene) -> None:
    """PYTHONPATH contains the notebook's folder; the files appear after the kernel has started."""
    paths = os.pathsep.join([".", "", environment(scene.folder)["PYTHONPATH"]])
    with scene.kernel(PYTHONPATH=paths) as frontend:
        frontend.run(NEXT)
        frontend.run("%taas down")
        for name in ("random", "queue", "logging", "struct", "socket", "selectors", "json"):
            (scene.project / f"{name}.py").write_text("raise SystemExit('beside the notebook')\n")
        assert "[0] next" in frontend.text(frontend.run(NEXT))


@as_root
def test_the_quota_of_a_cgroup_bounds_the_cores() -> None:
    version_1 = Path("/sys/fs/cgroup/cpu")
    group = (version_1 if version_1.is_dir() else version_1.parent) / f"taas-{os.getpid()}"
    try:
        group.mkdir()
        if version_1.is_dir():
            (group / "cpu.cfs_quota_us").write_text("50000")
        else:
            (group / "cpu.max").write_text("50000 100000")
    except OSError as refused:
        pytest.skip(f"no CPU cgroup can be made: {refused}")
    code = f"""
import os
from taas_magic.probe import cores
before = cores()
open({str(group / "cgroup.procs")!r}, "w").write(str(os.getpid()))
print(before, cores())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    remove_cgroup(group)
    before, after = map(int, done.stdout.split())
    assert after == 1
    assert before == len(os.sched_getaffinity(0)) or before == 1


LOADER = """
import taas
from torch.utils.data import DataLoader
loader = taas.register(DataLoader(list(range(4)), 2))
"""


def test_the_project_may_be_the_temporary_folder(scene: Scene) -> None:
    """A notebook in /tmp: the pool's folder, with the pipes of its ranks, is in the project."""
    read = "print(sum(batch.sum().item() for batch in loader))"
    with scene.kernel(TMPDIR=str(scene.project)) as frontend:
        frontend.run(LOADER)
        for flags in ("--gpus 2 --cpus 1", "--gpus 2 --session s", "--session s"):
            text = frontend.text(frontend.run(f"%%taas {flags}\n{read}"))
            assert re.search(r"\[0\] \d", text) and re.search(r"\[1\] \d", text)
            assert "wrote" not in text


def test_warnings_may_be_errors_in_the_kernel_and_in_ranks(scene: Scene) -> None:
    with scene.kernel(PYTHONWARNINGS="error::DeprecationWarning") as frontend:
        for flags in ("--gpus 1", "--gpus 1 --session s"):
            text = frontend.text(frontend.run(f"%%taas {flags}\nprint('ran')"))
            assert "[0] ran" in text


OF_A_CONTAINER = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
OF_NOBODY = {"HOME": "", "USER": "", "LOGNAME": ""}


@pytest.mark.nightly
def test_surroundings_of_containers_and_batch_jobs(scene: Scene) -> None:
    """No locale, no home, and a TMPDIR that is too long for the path of a Unix socket."""
    long = scene.tmp / ("x" * 90)
    long.mkdir()
    with scene.kernel(**OF_A_CONTAINER, **OF_NOBODY, TMPDIR=str(long)) as frontend:
        request = frontend.run("%%taas --gpus 1 --name größe\nprint('größer')")
        assert "[0] größer" in frontend.text(request)
        assert "größe" in frontend.text(frontend.run("%taas status"))


@pytest.mark.nightly
@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="IPython itself (parso) does not import without a home"
)
@as_root
def test_a_user_without_name_and_home() -> None:
    """Such a user exists in a container that is started with an arbitrary user id."""
    nobody = 54321
    scene = Scene(Path(tempfile.mkdtemp(prefix="nobody-", dir="/tmp")))
    for folder in (scene.folder, scene.tmp, scene.project, scene.state):
        os.chown(folder, nobody, nobody)
    script = """
from tests.notebook.test_aftermath import shell_with
shell = shell_with()
assert shell.run_cell("%%taas --gpus 1\\nprint('next')").success
shell.run_line_magic("taas", "down")
"""

    given = scene.environ()
    given["IPYTHONDIR"] = str(scene.tmp / "ipython")
    kept = {
        name: value for name, value in os.environ.items() if name.startswith(("TAAS_TEST", "PATH"))
    }
    rights = "+dac_override,+dac_read_search"  # so that the user can read root's Python
    caps = [f"--inh-caps={rights}", f"--ambient-caps={rights}"]
    words_ = ["setpriv", f"--reuid={nobody}", f"--regid={nobody}", "--clear-groups", *caps]
    done = subprocess.run(
        [*words_, sys.executable, "-c", script],
        env={**kept, **given},
        capture_output=True,
        text=True,
        cwd=scene.project,
        timeout=HUNG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0] next" in done.stdout
    shutil.rmtree(scene.folder)
    scene.close()
