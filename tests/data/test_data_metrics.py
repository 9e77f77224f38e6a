"""Tests of a rank's reports about received batches, and of the ledger of these batches."""

import threading
import time
from pathlib import Path

import pytest

from taas_magic.data import service
from taas_magic.data.loader import RankFeed
from taas_magic.host import heartbeat
from taas_magic.host.link import AgentLink
from taas_magic.messages import Event, RankCounts, RankMessage, RankReport, StoreMessage
from tests.data import ledger
from tests.eventually import HUNG_S


def line(
    rank: int = 0,
    pass_number: int = 0,
    epoch: int = 0,
    attempt: int = 0,
    first_step: int = 0,
    batches: int = 3,
) -> ledger.Handed:
    return ledger.Handed(attempt, "train", pass_number, epoch, rank, 2, first_step, batches)


def test_the_ledger_shows_that_no_batch_was_handed_out_twice() -> None:
    assert ledger.audit([line(), line(rank=1)]) == []
    assert ledger.audit([line(), line(rank=1), line(pass_number=1)]) == []
    assert ledger.audit([line(), line(attempt=1)]) == []


def test_the_ledger_names_batches_that_were_handed_out_twice() -> None:
    assert "positions [2, 4] were" in ledger.audit([line(), line(first_step=1, batches=2)])[0]
    assert "different epochs" in ledger.audit([line(), line(rank=1, epoch=1)])[0]


def test_the_ledger_shows_which_batches_are_missing() -> None:
    assert ledger.missing([line(), line(rank=1, batches=2)], 6) == [5]


def test_the_ledger_has_room_for_any_name(tmp_path: Path) -> None:
    written, name = service.BatchLedger(tmp_path, 2**31, 2**31), "\1" * 100
    for pass_number in range(200):
        at = written.begin_pass(name, pass_number, 2**31, 2**31, 2**63)
        for _ in range(pass_number):
            written.count_batch(at)
    written.close()
    found = ledger.read_ledgers(tmp_path)
    assert {(line.loader, line.first_step) for line in found} == {(name, 2**63)}
    assert [(line.pass_number, line.batches) for line in found] == [
        (pass_number, pass_number) for pass_number in range(200)
    ]


class Handed(RankFeed):
    """Feed of a rank that reports a number of received batches, `batches`, which a test sets."""

    batches = 0

    def counts(self) -> dict[str, RankCounts]:
        return {"train": RankCounts(batches=self.batches)}


class Busy(AgentLink):
    """Link to an agent on which a report of the heartbeat thread takes long to send.

    Sending takes until the main thread has sent a report, but at most 0.2 s.

    Attributes:
        said: Numbers of batches in the sent reports, in order.
        began: Set when the heartbeat thread begins to send a report.
        over: Set when a report was sent.
    """

    def __init__(self) -> None:
        self.said: list[int] = []
        self.began, self.over = threading.Event(), threading.Event()

    def wait_for_request(self, timeout_s: float) -> bytes:
        time.sleep(timeout_s)
        return b""

    def send(self, message: Event | RankMessage | StoreMessage) -> None:
        if not isinstance(message, RankReport):
            return
        if threading.current_thread() is not threading.main_thread():
            self.began.set()
            self.over.wait(0.2)
        self.said.append(message.loaders["train"].batches)
        self.over.set()


def test_the_last_report_of_a_rank_counts_all_its_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat, "RANK_BEAT_S", 0.001)
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    handed, busy = Handed(0, 1, lambda name: b""), Busy()
    with heartbeat.send_heartbeats(busy, handed):
        assert busy.began.wait(HUNG_S)
        handed.batches = 7
    for thread in threading.enumerate():
        if thread.name == "taas-heartbeat":
            thread.join()
    assert busy.said[-1] == 7
