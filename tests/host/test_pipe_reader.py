"""`PipeReader`: turning what ranks write to their pipes into events, messages and log files."""

import errno
import io
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from taas_magic.host import link
from taas_magic.host.output import MAX_INCOMPLETE, MESSAGE_LIMIT_BYTES, PipeReader, _MessageStream
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import (
    Display,
    Event,
    Note,
    RankErrorSent,
    RankMessage,
    RankRaised,
    StoreMessage,
    encode,
)
from tests.eventually import HUNG_S

RAISED = RankRaised("ValueError", "bad", ["Traceback", "ValueError: bad"])


class Rank:
    """A fake rank: both ends of its pipes. A `PipeReader` reads them and delivers to lists.

    Attributes:
        events: Events that the reader delivered for the pool's process.
        messages: Messages of the rank that the reader delivered, and the reader's notes about
            invalid messages.
    """

    def __init__(self, folder: Path) -> None:
        run = RunFolder(folder / "run")
        (run.path / "logs").mkdir(parents=True)
        self.log = run.log(0)
        self.events: list[Event] = []
        self.messages: list[Event | RankMessage | StoreMessage] = []
        self.heard = threading.Event()
        self._numbers = itertools.count()
        self.reader = PipeReader(folder, run, [0], self.events.append, self._take)
        self.output = os.open(link.rank_file(folder, 0, "log"), os.O_WRONLY)
        self.message_pipe = os.open(link.rank_file(folder, 0, "messages"), os.O_WRONLY)

    def _take(self, rank: int, message: Event | RankMessage | StoreMessage) -> None:
        self.messages.append(message)
        self.heard.set()

    def say(self, message: Event | RankMessage) -> None:
        """Write a message to the message pipe, as a rank does."""
        for piece in link.pieces(encode(message), b"%d" % next(self._numbers)):
            os.write(self.message_pipe, piece)

    def heard_all(self, count: int) -> None:
        """Wait until `count` messages have arrived."""
        while len(self.messages) < count:
            assert self.heard.wait(HUNG_S)
            self.heard.clear()

    def close(self) -> None:
        os.close(self.output)
        os.close(self.message_pipe)
        self.reader.close()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.close()


def test_a_traceback_is_in_the_log_once_after_what_was_written_before(rank: Rank) -> None:
    os.write(rank.output, b"before\nno end")
    rank.say(RAISED)
    rank.say(RankRaised("ValueError", "bad", ["drawn"]))
    rank.say(RankErrorSent())
    rank.heard_all(3)
    os.write(rank.output, b"after\n")
    rank.reader.drain(0)
    assert rank.log.read_text() == "before\nno end\nTraceback\nValueError: bad\nafter\n"


def test_a_traceback_is_logged_even_if_the_rank_has_closed_its_output(rank: Rank) -> None:
    os.write(rank.output, b"before\n")
    os.close(rank.output)
    rank.reader.drain(0)
    rank.output = os.dup(rank.message_pipe)
    rank.say(RAISED)
    assert rank.heard.wait(HUNG_S)
    assert rank.log.read_text() == "before\nTraceback\nValueError: bad\n"


class OverQuota(io.FileIO):
    """A log file on NFS in a home folder that is over its quota.

    A test machine has no NFS, where closing a file reports writes that have failed meanwhile.
    """

    def close(self) -> None:
        super().close()
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


class FullAtOnce(OverQuota):
    def write(self, data: Any) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


@pytest.mark.parametrize("file", [OverQuota, FullAtOnce])
def test_a_log_that_cannot_be_closed_gives_one_note_and_the_reader_continues(
    rank: Rank, file: type[OverQuota]
) -> None:
    stream = rank.reader._logs[0]
    assert stream.file is not None
    stream.file.close()
    stream.file = file(rank.log, "ab")
    os.write(rank.output, b"before\n")
    os.close(rank.output)
    rank.output = os.dup(rank.message_pipe)
    while stream.is_open:  # the reader closes the pipe, which has no writer any more
        rank.reader.drain(0)
        assert rank.reader._thread.is_alive()
    rank.say(RankErrorSent())
    rank.heard_all(1)
    [note] = [event.text for event in rank.events if isinstance(event, Note)]
    why = "your quota on its file system is used up"
    assert note == f"the log of rank 0 is incomplete: {why} ({rank.log})"


def test_a_message_that_is_too_large_becomes_a_note_and_the_next_one_arrives(rank: Rank) -> None:
    rank.say(Display(data={"text/plain": "x" * 2 * MESSAGE_LIMIT_BYTES}))
    rank.say(Display(data={"text/plain": "y" * 1_000_000}))
    rank.heard_all(2)
    note, display = rank.messages
    assert isinstance(note, Note) and note.text == "rank 0 sent 134 MB at once: not shown"
    assert isinstance(display, Display) and len(display.data["text/plain"]) == 1_000_000


def test_invalid_messages_give_one_note_and_the_next_message_arrives(rank: Rank) -> None:
    for junk in (b"no message\n", b"\xff\n", b"x" * 1_000_000, b"\n. {}\n"):
        os.write(rank.message_pipe, junk)
    rank.say(RankErrorSent())
    rank.heard_all(2)
    note, reported = rank.messages
    assert isinstance(note, Note) and note.text.startswith("a process of rank 0 wrote to the pipe")
    assert reported == RankErrorSent()


def test_incomplete_messages_of_ended_forks_do_not_block_other_messages(rank: Rank) -> None:
    cut = Display(data={"text/plain": "x" * 5000})
    for number in range(10 * MAX_INCOMPLETE):
        os.write(rank.message_pipe, next(link.pieces(encode(cut), b"gone-%d" % number)))
    rank.say(cut)
    rank.heard_all(1)
    assert isinstance(rank.messages[0], Display)
    [begun] = [it._begun for it in rank.reader._streams() if isinstance(it, _MessageStream)]
    assert len(begun) <= MAX_INCOMPLETE


def test_pipes_that_their_rank_has_not_opened_yet_stay_open_for_the_next_run(
    tmp_path: Path,
) -> None:
    runs = [RunFolder(tmp_path / name) for name in ("session", "cell")]
    for run in runs:
        (run.path / "logs").mkdir(parents=True)
    reader = PipeReader(tmp_path, runs[0], [0], lambda event: None, lambda rank, message: None)
    reader.redirect_to(runs[1], lambda event: None, lambda rank, message: None)
    for pipe in (link.rank_file(tmp_path, 0, "log"), link.rank_file(tmp_path, 0, "messages")):
        # `open` fails if the reader has closed its end. A rank would wait forever there.
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    reader.close()


def test_a_pipe_that_ends_while_the_next_run_begins_leaves_no_open_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [RunFolder(tmp_path / name) for name in ("session", "cell")]
    for run in runs:
        (run.path / "logs").mkdir(parents=True)
    reader = PipeReader(tmp_path, runs[0], [0], lambda event: None, lambda rank, message: None)
    change = reader._change_sink

    def end_and_change(*given: Any) -> None:
        reader._close_stream(reader._logs[0])
        change(*given)

    monkeypatch.setattr(reader, "_change_sink", end_and_change)
    reader.redirect_to(runs[1], lambda event: None, lambda rank, message: None)
    logs = [str(run.log(0)) for run in runs]
    assert not [it.path for it in psutil.Process().open_files() if it.path in logs]
    reader.close()
