"""Tests of a run's view in a real kernel, in IPython in a terminal, and in plain Python."""

import os
import pty
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel

from tests.cellfiles import cells_of
from tests.eventually import HUNG_S
from tests.frontend import is_rank_table

Message = dict[str, Any]
Execute = Callable[[str], list[Message]]

[PRELUDE] = cells_of("view_stage")


@pytest.fixture(scope="module")
def client() -> Iterator[BlockingKernelClient]:
    manager, client = start_new_kernel(HUNG_S, kernel_name="python3")
    try:
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.fixture
def execute(client: BlockingKernelClient) -> Execute:
    """Return a function that runs code in the kernel and returns the messages of its output."""
    return lambda code: run_in(client, code, allow_stdin=False)


def run_in(client: BlockingKernelClient, code: str, **how: Any) -> list[Message]:
    """Run code, and return the messages of its output, except those of the table of ranks."""
    return [it for it in all_of(client, code, **how) if not is_rank_table(it["content"])]


def all_of(client: BlockingKernelClient, code: str, **how: Any) -> list[Message]:
    messages: list[Message] = []
    reply = client.execute_interactive(
        PRELUDE + textwrap.dedent(code), timeout=HUNG_S, output_hook=messages.append, **how
    )
    assert reply["content"]["status"] == "ok", reply["content"].get("traceback")
    kinds = ("status", "execute_input")
    return [message for message in messages if message["msg_type"] not in kinds]


def contents(messages: list[Message], kind: str) -> list[dict[str, Any]]:
    return [message["content"] for message in messages if message["msg_type"] == kind]


def kinds(messages: list[Message]) -> list[str]:
    return [message["msg_type"] for message in messages]


def test_a_run_in_a_kernel(execute: Execute) -> None:
    messages = execute("""
        stage = Stage()
        stage.play(event("state", state="RUNNING"))
        stage.play(event("started", attempt=0, pids={"0": 1, "1": 2}))
        stage.play(lines(0, "a", "b"), lines(1, "a", "b"), lines(0, "<i>"), seconds=1.0)
        stage.end(ended())
    """)
    assert kinds(messages) == [
        "display_data",
        "stream",
        "update_display_data",
        "update_display_data",
    ]
    (stream,) = contents(messages, "stream")
    assert stream == {"name": "stdout", "text": "[0-1 ×2] a\n[0-1 ×2] b\n[0] <i>\n"}  # noqa: RUF001
    (first,) = contents(messages, "display_data")
    last = contents(messages, "update_display_data")[-1]
    assert first["transient"] == last["transient"] == {"display_id": "run-1:head"}
    assert "STARTING" in first["data"]["text/html"]
    assert "SUCCEEDED" in last["data"]["text/html"]
    assert last["data"]["text/plain"].startswith("SUCCEEDED digits · ranks 2")


def test_five_thousand_lines_are_one_message(execute: Execute) -> None:
    messages = execute("""
        stage = Stage(ranks=1)
        stage.play(lines(0, *(f"{i:079}" for i in range(5_000))))
        stage.end(ended())
    """)
    (stream,) = contents(messages, "stream")
    assert [int(line[4:]) for line in stream["text"].splitlines()] == list(range(5_000))


def test_texts_of_hosts_are_escaped_in_the_header(execute: Execute) -> None:
    messages = execute("""
        stage = Stage(name="<img src=x onerror=y>")
        stage.end(event("note", text="<script>"), ended())
    """)
    shown = contents(messages, "update_display_data")[-1]["data"]["text/html"]
    assert "&lt;script&gt;" in shown and "&lt;img" in shown
    assert "<script" not in shown and "<img" not in shown


def test_the_header_is_sent_only_if_it_changes_and_at_most_ten_times_a_second(
    execute: Execute,
) -> None:
    messages = execute("""
        stage = Stage()
        for step in range(100):
            stage.play(event("progress", rank=0, text=f"{step}"), seconds=0.01)
        for _ in range(100):
            stage.play(event("note", text="the same"), lines(1, "x"), seconds=0.001)
    """)
    assert 9 <= len(contents(messages, "update_display_data")) <= 12


def test_a_header_with_the_same_content_is_not_sent_again(execute: Execute) -> None:
    messages = execute("""
        stage = Stage()
        for _ in range(4):
            stage.play(event("note", text="the same"), seconds=0.2)
    """)
    assert len(contents(messages, "update_display_data")) == 1


CSS = re.compile(
    r"<style>[.]taas-ranks-run-1>span{display:none}.*?::before{content:'(.*?)'}</style>"
)
"""The rule in the status header that shows the table of an active run's ranks."""


def test_the_table_of_ranks_is_updated_without_being_replaced(
    client: BlockingKernelClient,
) -> None:
    code = """
        from unittest import mock
        mock.patch("taas_magic.display.head.MAX_ROWS", 6).start()
        stage = Stage(ranks=8)
        stage.play(event("started", attempt=0, pids={str(rank): 100 + rank for rank in range(8)}))
        for step in range(20):
            place = f"Cell In[1], line {step}: '</style><b>' " + chr(92)
            rows = [{"rank": rank, "cpus": 0.5, "place": place} for rank in range(8)]
            stage.play(event("usage", attempt=0, ranks=rows), seconds=0.2)
        stage.end(ended())
        mock.patch.stopall()
    """
    messages = all_of(client, code, allow_stdin=False)
    ids = [(m["msg_type"], m["content"]["transient"]["display_id"]) for m in messages]
    assert ids[:2] == [("display_data", "run-1:head"), ("display_data", "run-1:ranks")]
    assert ids[-2:] == [("update_display_data", f"run-1:{it}") for it in ("ranks", "head")]
    tables = [m["content"]["data"]["text/html"] for m in messages if is_rank_table(m["content"])]
    heads = [m["content"]["data"]["text/html"] for m in messages if not is_rank_table(m["content"])]
    shown, removed = tables
    assert shown.startswith("<details") and "<pre class='taas-ranks-run-1'" in shown
    assert removed == ""
    rules = dict.fromkeys(found[1] for head in heads if (found := CSS.search(head)))
    assert 4 <= len(rules) <= 5, "it changes once a second"
    text = re.sub(r"\\([0-9a-f]+) ", lambda it: chr(int(it[1], 16)), [*rules][-1])
    lines = text.splitlines()
    assert len(lines) == 8 and lines[-1] == "… and 2 more ranks"
    assert lines[6].split()[:4] == ["5", "gpu1", "105", "50"]
    assert re.search(r"  Cell In\[1], line 1\d: '</style><b>' \\$", lines[1])
    assert "<style" not in heads[-1] and "line 19: &#x27;&lt;/style&gt;" in heads[-1]
    assert "<summary>ranks (the last report of each)</summary>" in heads[-1]


def test_curves_change_once_a_second_at_most_and_have_all_values_at_the_end(
    execute: Execute,
) -> None:
    messages = execute("""
        stage = Stage()
        for step in range(20):
            points = [["loss", step, step, 0.0]]
            progress = event("progress", rank=0, text=f"{step}")
            stage.play(event("metrics", rank=0, points=points), progress, seconds=0.2)
        stage.end(ended())
    """)
    heads = contents(messages, "update_display_data")
    found = [re.search("loss: .*", head["data"]["text/plain"]) for head in heads]
    shown = list(dict.fromkeys(curve[0] for curve in found if curve))
    assert 4 <= len(shown) <= 5 and shown[-1].endswith("20 values")
    pictures = [re.search("<img src='[^']*'", head["data"]["text/html"]) for head in heads]
    assert len({picture[0] for picture in pictures if picture}) == len(shown)


def test_the_elapsed_time_is_updated_without_events(execute: Execute) -> None:
    messages = execute("""
        stage = Stage()
        for _ in range(3):
            stage.now = stage.view.next_due()
            stage.view.tick(stage.now)
        stage.end(ended())
        due = stage.view.next_due()
        assert due == float("inf") or due <= stage.now + 0.1
    """)
    heads = [head["data"]["text/plain"] for head in contents(messages, "update_display_data")]
    assert [f"elapsed {second} s" in heads[second - 1] for second in (1, 2, 3)] == [True] * 3


def test_a_display_comes_after_the_lines_printed_before_it(execute: Execute) -> None:
    messages = execute("""
        stage = Stage()
        stage.play(lines(0, "before"), png(), lines(0, "after"), seconds=1.0)
        stage.play(event("display", rank=1, data={"text/plain": "no"}, metadata={}))
    """)
    assert kinds(messages)[:4] == ["display_data", "stream", "display_data", "stream"]
    assert contents(messages, "display_data")[1]["data"]["image/png"] == "iVBORw0KGgo="
    assert len(contents(messages, "display_data")) == 2


def test_only_texts_and_pictures_of_an_untrusted_pool_are_shown(execute: Execute) -> None:
    """HTML and JavaScript are left out, because a script in the browser can control the kernel."""
    messages = execute("""
        stage = Stage()
        plan = stage.view._state.plan
        stage.view._state.plan = msgspec.structs.replace(plan, trusted=False)
        html = {"text/html": "<script>run()</script>", "application/javascript": "run()"}
        stage.play(event("display", rank=0, data={**html, "text/plain": "as text"}))
        stage.play(event("display", rank=0, data=html, metadata={"isolated": True}))
        stage.play(png())
    """)
    _, first, second, picture = contents(messages, "display_data")
    assert first["data"] == {"text/plain": "as text"}
    assert second["data"].keys() == {"text/plain"} and second["metadata"] == {}
    assert picture["data"]["image/png"] == "iVBORw0KGgo="


def test_displays_are_updated_under_ids_of_their_own_run(execute: Execute) -> None:
    messages = execute("""
        stage = Stage()
        stage.play(png(display_id="fig"), png(display_id="fig", update=True))
    """)
    shown = contents(messages, "display_data")[1]
    (updated,) = contents(messages, "update_display_data")
    assert shown["transient"] == updated["transient"] == {"display_id": "run-1:0:fig"}


@pytest.mark.parametrize("wait", [False, True])
def test_clearing_leaves_the_head(execute: Execute, wait: bool) -> None:
    messages = execute(f"""
        stage = Stage()
        stage.play(lines(0, "old"), event("clear", rank=0, wait={wait}))
        print("mark", flush=True)
        stage.play(png())
    """)
    order = kinds(messages)
    cleared = order.index("clear_output")
    mark = next(
        i for i, message in enumerate(messages) if "mark" in message["content"].get("text", "")
    )
    assert (cleared > mark) == wait
    assert order[cleared + 1] == "display_data"
    assert messages[cleared + 1]["content"]["transient"] == {"display_id": "run-1:head"}
    assert order.count("clear_output") == 1


def test_many_small_batches_stay_below_the_servers_message_limit(execute: Execute) -> None:
    messages = execute("""
        stage = Stage(ranks=1)
        for step in range(1000):
            stage.play(lines(0, f"{step}"), seconds=0.001)
        stage.end(ended())
    """)
    streams = contents(messages, "stream")
    text = "".join(stream["text"] for stream in streams)
    assert text.splitlines() == [f"[0] {step}" for step in range(1000)]
    assert len(streams) <= 400
    assert all(stream["text"].endswith("\n") for stream in streams)


def test_a_flood_is_a_full_cell_and_one_display_that_is_updated_once_a_second(
    execute: Execute,
) -> None:
    messages = execute("""
        stage = Stage(ranks=1)
        for step in range(300):
            stage.play(lines(0, *(f"{step} {i:090}" for i in range(200))), seconds=0.1)
        stage.end(ended())
    """)
    streams = [stream["text"] for stream in contents(messages, "stream")]
    assert 450_000 < sum(map(len, streams)) < 550_000
    rest = [m["content"] for m in messages if ":rest" in str(m["content"].get("transient"))]
    assert [m["msg_type"] for m in messages].count("display_data") == 2
    assert 25 <= len(rest) <= 35
    last = rest[-1]["data"]["text/plain"]
    assert last.endswith(f"[0] 299 {199:090}") and "%taas logs run-1" in last
    assert len(last) < 20_000


def test_a_console_gets_all_lines_and_the_end_as_text(client: BlockingKernelClient) -> None:
    code = """
        stage = Stage(ranks=1)
        stage.play(lines(0, *(f"{i:090}" for i in range(20_000))))
        stage.end(ended())
    """
    streams = contents(run_in(client, code, allow_stdin=True), "stream")
    text = "".join(stream["text"] for stream in streams)
    assert text.count("\n") > 20_000
    assert "\nSUCCEEDED digits · ranks 1" in text


def test_a_console_gets_the_last_lines_of_a_flood_at_the_end(client: BlockingKernelClient) -> None:
    code = """
        stage = Stage(ranks=1)
        for step in range(12):
            stage.play(lines(0, *(f"{step} {i:090}" for i in range(10_000))), seconds=1.0)
        stage.end(ended())
    """
    streams = contents(run_in(client, code, allow_stdin=True), "stream")
    text = "".join(stream["text"] for stream in streams)
    assert 8_000_000 < len(text) < 9_000_000
    assert f" MB): %taas logs run-1\n[0] 11 {9900:090}\n" in text
    assert f"[0] 11 {9999:090}\nSUCCEEDED digits" in text


def test_a_run_in_a_widgets_callback_shows_its_end_as_text(client: BlockingKernelClient) -> None:
    """JupyterLab's Output widget ignores updates of displays."""
    run_in(
        client,
        """
        def on_open(comm, message):
            stage = Stage()
            stage.play(lines(0, "a"), seconds=1.0)
            stage.end(ended())
        get_ipython().kernel.comm_manager.register_target("runs", on_open)
        """,
    )
    opened = client.session.msg(
        "comm_open", {"comm_id": "1", "target_name": "runs", "data": {}, "metadata": {}}
    )
    client.shell_channel.send(opened)
    text, state = "", ""
    while state != "idle":
        message = client.get_iopub_msg(timeout=HUNG_S)
        if message["parent_header"].get("msg_id") == opened["header"]["msg_id"]:
            text += message["content"].get("text", "")
            state = message["content"].get("execution_state", "")
    assert "SUCCEEDED digits · ranks 2" in text


def test_captured_output_has_only_the_first_and_the_last_header(execute: Execute) -> None:
    messages = execute("""
        from IPython.utils.capture import capture_output
        with capture_output() as captured:
            stage = Stage()
            for step in range(50):
                stage.play(event("progress", rank=0, text=f"{step}%"), seconds=1.0)
            stage.end(ended())
        headers = [it._repr_mime_("text/plain") for it in captured.outputs]
        print(len([it for it in headers if it]), "SUCCEEDED" in headers[-1])
    """)
    # a slow kernel sends the line in two messages
    text = "".join(stream["text"] for stream in contents(messages, "stream"))
    assert text == "2 True\n"


def test_a_restart_is_a_line_of_the_log(execute: Execute) -> None:
    messages = execute("""
        failure = {"rank": 1, "host": "gpu1", "pid": 7, "how": "signal", "signal": "SIGKILL"}
        stage = Stage()
        stage.play(lines(0, "one"))
        stage.play(event("restart", attempt=1, failure=failure), seconds=1.0)
    """)
    text = "".join(stream["text"] for stream in contents(messages, "stream"))
    assert text == (
        "[0] one\n── restart 1 of all ranks after rank 1 on host gpu1 (pid 7): "
        "killed by SIGKILL ──\n"
    )


URGENT = """
stand = {"rank": 1, "pid": 7, "quiet_s": 60.0, "place": "Cell In[1], line 3", "waits_for": "a lock"}
stage = Stage()
stage.play(event("started", attempt=0, pids={"0": 1, "1": 2}), event("note", text="early"))
for _ in range(3):
    stage.play(event("note", text="not heard for 5 s"), seconds=0.2)
    stage.play(event("hang", attempt=0, ranks=[stand]), seconds=1.0)
for number in range(20):
    stage.play(event("note", text=f"another {number}"), seconds=0.2)
stage.play(lines(0, "a"), seconds=0.2)
"""


def urgent(text: str) -> list[str]:
    """Check that the output has the message about the hang once; return the lines with notes."""
    assert text.count("no rank has made progress") == 1 and "Cell In[1], line 3  a lock\n" in text
    assert "note: … and 12 more notes" not in text
    return [line for line in text.splitlines() if line.startswith("note: ")]


NOTES = [
    "note: early",
    "note: not heard for 5 s",
    *(f"note: another {number}" for number in range(7)),
    "note: … and 1 more notes",
]


def test_urgent_notes_are_written_as_text_if_the_header_cannot_change(
    client: BlockingKernelClient, tmp_path: Any
) -> None:
    streams = contents(run_in(client, URGENT, allow_stdin=True), "stream")
    assert urgent("".join(stream["text"] for stream in streams)) == NOTES
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + URGENT],
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=True,
    )
    assert urgent(done.stdout.partition("log: ")[2]) == NOTES


TERMINAL_RUN = (
    PRELUDE
    + """
stage = Stage()
stage.play(event("progress", rank=0, text="50%"), seconds=0.2)
stage.play(lines(0, "a"), lines(1, "a"), seconds=0.2)
stage.play(png(), seconds=0.2)
stage.end(ended())
"""
)
START = "STARTING digits · ranks 0 of 2 up"
END = "SUCCEEDED digits · ranks 2"


@pytest.mark.parametrize("command", [["-m", "IPython", "--quick", "-c"], ["-c"]])
def test_without_a_front_end(command: list[str], tmp_path: Any) -> None:
    done = subprocess.run(
        [sys.executable, *command, TERMINAL_RUN],
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        env={**os.environ, "IPYTHONDIR": str(tmp_path)},
        check=True,
    )
    shown = done.stdout.splitlines()
    log = [line for line in shown if not line.startswith(("log: ", "note: ", "rank 0: "))]
    assert log[0].startswith(START)
    assert log[1:3] == ["[0-1 ×2] a", "a figure"]  # noqa: RUF001
    assert log[3].startswith(END)
    assert "\r" not in done.stdout and "\x1b" not in done.stdout


def in_a_terminal(code: str) -> str:
    """Run code in a process whose standard output is a terminal; return what it wrote."""
    primary, secondary = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stdout=secondary) as process:
        os.close(secondary)
        shown = b""
        with suppress(OSError):  # Linux raises this when the other end is closed
            while block := os.read(primary, 65536):
                shown += block
        os.close(primary)
        assert process.wait(HUNG_S) == 0
    return shown.decode().replace("\r\n", "\n")


def test_a_terminal_redraws_the_progress_bar() -> None:
    text = in_a_terminal(TERMINAL_RUN)
    assert "\n50%\r\x1b[K[0-1 ×2] a\n50%\r\x1b[Ka figure\n50%" in text  # noqa: RUF001
    assert END in text.rpartition("\r\x1b[K")[2]


METRICS_RUN = (
    PRELUDE
    + """
stage = Stage(ranks=1)
stage.play(event("state", state="RUNNING"))
for step in range(30):
    points = [["loss", step, 30 - step, 0.0]]
    bar = event("progress", rank=0, text=f"steps: {step}%|##  | {step}/99 [1it/s]")
    stage.play(event("metrics", rank=0, points=points), bar, seconds=0.1)
    if step == 15:
        stage.play(lines(0, "a line of the log"))
stage.end(ended())
print("after the run")
"""
)


def test_a_terminal_has_a_status_line_that_changes_once_a_second() -> None:
    text = in_a_terminal(METRICS_RUN)
    last = text.rpartition("\r\x1b[K")[2]
    assert last.startswith("SUCCEEDED digits") and last.endswith("\nafter the run\n")
    status = [part for part in text.split("\r\x1b[K")[:-1] if "loss: " in part]
    drawn = re.findall("RUNNING · .*", "\n".join(status))
    assert 3 <= len(set(drawn)) <= 4, drawn
    assert re.fullmatch(r"RUNNING · 1 s · loss: \d\d [█▇▆▅▄▃▂▁]+ · steps: \d+% \d+/99 .*", drawn[1])
    assert all(len(line) < 80 for line in drawn)
    above = text.partition("a line of the log\n")
    assert above[0].endswith("\r\x1b[K[0] ") and above[2].startswith("RUNNING · 1 s · loss: ")


def test_a_file_gets_no_status_line() -> None:
    command = [sys.executable, "-c", METRICS_RUN]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "\r" not in shown and "\x1b" not in shown
    assert shown.count("loss: ") == 1 and "[0] a line of the log\n" in shown
