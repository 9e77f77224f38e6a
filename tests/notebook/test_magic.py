"""The magics in a real IPython shell, where a fake replaces the modules `launch` and `pools`."""

import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from msgspec.structs import replace
from traitlets.config import Config as ShellConfig

import taas
import taas_magic.notebook
from taas_magic.capture.work import CellWork
from taas_magic.config import Config
from taas_magic.errors import UsageError
from taas_magic.journal import folder as journal
from taas_magic.journal.folder import PlanHead, RunFolder
from taas_magic.messages import HostStatus, PoolStatus, RunEnded, StateChanged
from taas_magic.notebook import magic, pools
from taas_magic.notebook.pools import PoolRow
from taas_magic.notebook.runs import Run
from taas_magic.plan import Flags
from tests.eventually import eventually


class FakeLaunch(ModuleType):
    """Fake of the modules `launch` and `pools`. `asked` lists the calls, with their arguments."""

    def __init__(self) -> None:
        super().__init__("taas_magic.notebook.launch")
        self.last_run: Any = None
        self.asked: list[tuple[Any, ...]] = []

    def execute(
        self, flags: Flags, cell: CellWork, shell: InteractiveShell, config: Config
    ) -> None:
        self.asked.append(("execute", flags, cell))

    def dry_run_text(
        self, flags: Flags, cell: CellWork, shell: InteractiveShell, config: Config
    ) -> str:
        return f"{flags.gpus} ranks"

    def stop(self, run: Run, config: Config) -> None:
        self.asked.append(("stop", run.id))

    def rows(self, config: Config) -> list[PoolRow]:
        here = HostStatus(
            host="here",
            protection="Landlock",
            runs=["a"],
            allocated_s=7200.0,
            idle_s=None,
            gpu_hours=4.0,
        )
        there = replace(here, host="there", runs=[], protection="read-only mount", idle_s=61.0)
        hosts = [here, there]
        status = PoolStatus(hosts=hosts, refused=3, gpu_hours=8.0, used_gpu_hours=2.0)
        return [PoolRow("local", "local", "ready", status)]

    def warm(self, config: Config, name: str = "local") -> None:
        self.asked.append(("warm", name))

    def down(self, name: str, config: Config) -> None:
        self.asked.append(("down", name))


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> FakeLaunch:
    fake = FakeLaunch()
    for name in ("launch", "pools"):
        monkeypatch.setitem(sys.modules, f"taas_magic.notebook.{name}", fake)
        monkeypatch.setattr(taas_magic.notebook, name, fake, raising=False)
    return fake


@pytest.fixture
def shell(
    launch: FakeLaunch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[InteractiveShell]:
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TAAS_WARM", "0")
    # A new shell replaces `__main__` in `sys.modules`; monkeypatch restores it.
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    settings = ShellConfig()
    settings.HistoryManager.hist_file = ":memory:"
    shell = InteractiveShell(config=settings)
    taas_magic.load_ipython_extension(shell)
    yield shell
    taas_magic.unload_ipython_extension(shell)
    shell.history_manager.end_session()


def run(shell: InteractiveShell, cell: str) -> Exception | None:
    """Run a cell as a frontend does; return the exception that the cell raised, or None."""
    result = shell.run_cell(cell, store_history=True)
    error = result.error_before_exec or result.error_in_exec
    assert error is None or isinstance(error, Exception)
    return error


def asked_cell(launch: FakeLaunch) -> CellWork:
    cell = launch.asked[-1][2]
    assert isinstance(cell, CellWork)
    return cell


def a_run(run_id: str, state: str, log: str = "") -> journal.JournalWriter:
    """Create the folder and journal of a run.

    Returns:
        The journal's writer. The run's controller counts as alive until the writer is closed.
    """
    folder = RunFolder.create(run_id, PlanHead(run_id, "", "local", 2), "")
    writer = journal.JournalWriter(folder)
    writer.append(StateChanged(state=state) if state == "RUNNING" else RunEnded(state=state))
    eventually(lambda: any(folder.read_events()))
    folder.log(1).write_text(log)
    return writer


def test_a_cell_is_launched_with_its_original_text(
    shell: InteractiveShell, launch: FakeLaunch
) -> None:
    raw = "%%taas --gpus 2\nx = 1\ny = 2\n"
    assert run(shell, raw) is None
    name, flags, cell = launch.asked[0]
    assert (name, flags) == ("execute", Flags(gpus=2))
    assert (cell.source, cell.raw, cell.line_offset) == ("x = 1\ny = 2\n", raw, 1)


def test_a_cell_is_launched_with_the_file_name_that_the_kernel_uses(
    shell: InteractiveShell, launch: FakeLaunch
) -> None:
    run(shell, "x = 1")
    run(shell, "%%taas --gpus 2\nx = 1")
    cell = asked_cell(launch)
    assert cell.execution_count == 2
    assert shell.compile.format_code_name(cell.filename) == ("Cell", "In[2]")


def test_the_comment_form_keeps_the_notebooks_lines(
    shell: InteractiveShell, launch: FakeLaunch
) -> None:
    raw = "# Trains.\n#!g2.8\n\n#pragma taas --gpus 2\n\nx = 1\n"
    assert run(shell, raw) is None
    cell = asked_cell(launch)
    assert launch.asked[0][1] == Flags(gpus=2, pool="g2.8")
    assert (cell.raw, cell.source, cell.line_offset) == (raw, "\nx = 1\n", 4)
    assert raw.splitlines()[cell.line_offset :] == cell.source.splitlines()


def test_a_cell_that_is_indented_as_a_whole(shell: InteractiveShell, launch: FakeLaunch) -> None:
    raw = "    #pragma taas --gpus 2\n    x = 1\n"
    assert run(shell, raw) is None
    cell = asked_cell(launch)
    assert (cell.raw, cell.line_offset) == (raw, 1)


def test_code_may_call_the_magic(shell: InteractiveShell, launch: FakeLaunch) -> None:
    assert run(shell, "get_ipython().run_cell_magic('taas', '--gpus 2', 'x = 1')") is None
    cell = asked_cell(launch)
    assert (cell.source, cell.raw, cell.line_offset) == ("x = 1", "%%taas --gpus 2\nx = 1", 1)
    assert cell.execution_count is None


def test_variables_in_the_magics_line_are_expanded(
    shell: InteractiveShell, launch: FakeLaunch
) -> None:
    run(shell, "n, label = 3, 'probe'")
    assert run(shell, "%%taas --gpus {n + 1} --name $label\nx = 1") is None
    assert launch.asked[0][1] == Flags(gpus=4, name="probe")


@pytest.mark.fault(58)
@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("%%taas --gpus 0\nx = 1", 'got "0"'),
        ("%%taas --gpus -1\nx = 1", 'got "-1"'),
        ("%%taas --gpus NaN\nx = 1", 'got "NaN"'),
        ("%%taas --gpus 1e9\nx = 1", 'got "1e9"'),
        ("%%taas --gpus {nothing}\nx = 1", "a name that the notebook does not have"),
        ("%%taas --gpus\nx = 1", "--gpus needs a number"),
        ("%%taas --gpus 2 --units 0\nx = 1", 'got "0"'),
        ("%%taas --gpus 2 --pool nowhere\nx = 1", 'No pool "nowhere". There is no taas.toml'),
        ("#!g2.8\nx = 1", "#pragma taas --gpus 2"),
        ("#!g2.8", "#pragma taas --gpus 2"),
        ("#!g2.8", '"#!g2.8" applies only to its own cell, and this cell has nothing below it'),
        ("#!nowhere\nx = 1", 'No pool "nowhere". There is no taas.toml'),
        ("#pragma taas --gpus 2\n\n", "nothing to run"),
        ("%taas --gpus 2", "begin it with %%taas"),
        ("%taas statsu", 'did you mean "status"'),
        (
            "%taas nothing",
            "attach, detach, stacks, ranks, stop, pools, warm, sessions, vars, debug, end, "
            "restart, down, report",
        ),
        ("%taas pools x", 'does not take "x". The command is used as: pools'),
        ("%taas logs --rank x", '--rank needs a rank\'s number, such as 3; got "x"'),
        ("%taas logs --rank", "--rank needs a rank's number, such as 3"),
        ("%taas stop", "No run is running"),
        ("%taas logs 'x", "a quote is not closed"),
        ("%taas warm nowhere", 'No pool "nowhere"'),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(
    shell: InteractiveShell,
    launch: FakeLaunch,
    capsys: pytest.CaptureFixture[str],
    cell: str,
    said: str,
) -> None:
    error = run(shell, cell)
    assert isinstance(error, UsageError)
    assert said in str(error)
    assert launch.asked == []
    assert len(capsys.readouterr().out.strip().splitlines()) == 1


def test_a_cell_below_another_magic_has_the_file_of_the_notebooks_cell(
    shell: InteractiveShell, launch: FakeLaunch
) -> None:
    for number in (1, 2):
        assert run(shell, "%%time\n%%taas --gpus 2\nx = 1") is None
        cell = asked_cell(launch)
        assert (cell.execution_count, cell.line_offset) == (number, 2)


def test_an_interrupt_before_the_ranks_start_is_one_line(
    shell: InteractiveShell, launch: FakeLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "execute", interrupted)
    error = shell.run_cell("%%taas --gpus 2\nx = 1").error_in_exec
    assert isinstance(error, KeyboardInterrupt)
    assert error._render_traceback_() == ["Stopped by you before the ranks started."]  # type: ignore[attr-defined]


def test_a_broken_taas_toml_is_reported_and_can_be_mended_without_a_restart(
    shell: InteractiveShell, launch: FakeLaunch
) -> None:
    Path("taas.toml").write_text("[pools.x]\nengin = 'ssh'\n")
    error = run(shell, "%%taas --gpus 2\nx = 1")
    assert 'did you mean "engine"' in str(error)
    Path("taas.toml").write_text("[pools.x]\n")
    assert run(shell, "%%taas --gpus 2 --pool x\nx = 1") is None


def test_a_pool_name_that_stands_for_local_gives_a_note(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, "#!g2.8\n#pragma taas --gpus 2\nx = 1")
    assert 'pool "g2.8" is this machine' in capsys.readouterr().out


def test_a_warning_about_a_pragma_below_code_appears_before_the_cell_runs(
    shell: InteractiveShell, launch: FakeLaunch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(shell, "print('ran')\n#pragma taas --gpus 2") is None
    first, second = capsys.readouterr().out.splitlines()
    assert '"#pragma taas --gpus 2" in line 2 is below code' in first and second == "ran"
    assert launch.asked == []


def test_loading_the_extension_replaces_another_module_taas(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taas_magic.unload_ipython_extension(shell)
    assert "taas" not in sys.modules
    other = ModuleType("taas")
    other.__path__ = []
    monkeypatch.setitem(sys.modules, "taas", other)
    taas_magic.load_ipython_extension(shell)
    assert run(shell, "import taas\nassert taas.register") is None
    assert "another package named `taas` is imported" in capsys.readouterr().out


def test_the_device_type_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert taas.device_type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert taas.device_type == "cuda"


def test_dry_run_prints_the_plan(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, "%%taas --gpus 2 --dry-run\nx = 1")
    assert capsys.readouterr().out == "2 ranks\n"


def test_status_and_logs_read_the_journal(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, "%taas")
    assert "no runs" in capsys.readouterr().out
    a_run("20260101-000000-aaaaaa", "SUCCEEDED", log="hello\n").close()
    run(shell, "%taas status")
    assert "20260101-000000-aaaaaa  SUCCEEDED  2" in capsys.readouterr().out
    run(shell, "%taas logs --rank 1")
    assert capsys.readouterr().out == "hello\n"
    run(shell, "%taas logs --rank=0 20260101")
    assert "wrote nothing" in capsys.readouterr().out


def test_stop_takes_the_newest_run_that_runs(shell: InteractiveShell, launch: FakeLaunch) -> None:
    writers = [
        a_run("20260101-000000-aaaaaa", "RUNNING"),
        a_run("20260102-000000-bbbbbb", "RUNNING"),
        a_run("20260103-000000-cccccc", "SUCCEEDED"),
    ]
    assert run(shell, "%taas stop") is None
    assert run(shell, "%taas stop 20260101") is None
    for writer in writers:
        writer.close()
    stopped = [("stop", "20260102-000000-bbbbbb"), ("stop", "20260101-000000-aaaaaa")]
    assert launch.asked == stopped


def test_pools_warm_and_down(
    shell: InteractiveShell, launch: FakeLaunch, capsys: pytest.CaptureFixture[str]
) -> None:
    for cell in ("%taas pools", "%taas warm", "%taas down local"):
        assert run(shell, cell) is None
    assert launch.asked == [("warm", "local"), ("down", "local")]
    shown = capsys.readouterr().out
    assert "local  local   ready  here   a                2 h 00 min  4.00\n" in shown
    assert "                      there  idle 1 min 01 s  2 h 00 min  4.00\n" in shown
    assert 'pool "local": 8.00 GPU-hours, 25% of them in runs\n' in shown
    assert (
        'pool "local": refused 3 connections or messages that were not authenticated, invalid, '
        "forbidden or too late\n(" in shown
    )


def test_pools_check_shows_a_table(
    shell: InteractiveShell,
    launch: FakeLaunch,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    monkeypatch.setattr(pools, "rows", launch.rows)
    monkeypatch.setattr(launch, "check", pools.check, raising=False)
    assert run(shell, "%taas pools --check local") is None
    shown = capsys.readouterr().out
    assert shown.startswith("pool ") and "protected by Landlock" in shown
    assert "fit for runs: 1 of 1 hosts" in shown
    assert 'No pool "nowhere"' in str(run(shell, "%taas pools --check nowhere"))


def test_help_shows_every_flag_and_every_command(shell: InteractiveShell) -> None:
    cell_help = shell.object_inspect("%%taas")["docstring"]
    assert "--max-restarts R" in cell_help and "#pragma taas" in cell_help
    assert "%taas logs [RUN] [--rank R]" in shell.object_inspect("%taas")["docstring"]


def test_unloading_removes_the_magics_the_comment_form_and_the_completions(
    shell: InteractiveShell,
) -> None:
    taas_magic.unload_ipython_extension(shell)
    assert shell.find_cell_magic("taas") is None and shell.find_line_magic("taas") is None
    assert run(shell, "#pragma taas --gpus 0\nx = 1") is None
    assert shell.Completer.custom_matchers == []


def test_load_ext_taas_loads_the_extension(shell: InteractiveShell) -> None:
    taas_magic.unload_ipython_extension(shell)
    for command, is_loaded in (("load", True), ("reload", True), ("unload", False)):
        assert run(shell, f"%{command}_ext taas") is None
        assert (shell.find_cell_magic("taas") is not None) is is_loaded


def test_a_warm_up_that_has_not_begun_before_down_does_not_begin(
    shell: InteractiveShell, launch: FakeLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up's thread may still be importing Dask when `%taas down` runs."""
    monkeypatch.setattr(magic, "_pending_warm_ups", [Config()])
    assert run(shell, "%taas down") is None
    magic._warm_up(Config())
    assert ("warm", "local") not in launch.asked


def test_loading_warms_the_local_pool_in_a_thread(
    shell: InteractiveShell, launch: FakeLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    taas_magic.unload_ipython_extension(shell)
    threads: list[Any] = []

    def thread(**arguments: Any) -> Any:
        threads.append(arguments)
        return SimpleNamespace(start=lambda: None)

    monkeypatch.delenv("TAAS_WARM")
    # Replaced only in `magic`, because other threads of this process start threads too.
    monkeypatch.setattr("taas_magic.notebook.magic.threading", SimpleNamespace(Thread=thread))
    taas_magic.load_ipython_extension(shell)
    assert launch.asked == []
    threads[0]["target"](*threads[0]["args"])
    assert launch.asked == [("warm", "local")]


def test_loading_with_a_broken_taas_toml_says_so_and_loads(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taas_magic.unload_ipython_extension(shell)
    monkeypatch.delenv("TAAS_WARM")
    Path("taas.toml").write_text("nothing = 1")
    taas_magic.load_ipython_extension(shell)
    assert "cannot warm up a pool" in capsys.readouterr().err
    assert shell.find_cell_magic("taas") is not None


def test_taas_last_run_is_the_last_run(launch: FakeLaunch) -> None:
    assert taas.last_run is None
    launch.last_run = object()
    assert taas.last_run is launch.last_run
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'; it has: .*runs"):
        attrgetter("nothing")(taas)
