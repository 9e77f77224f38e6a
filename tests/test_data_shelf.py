"""A lane's shelf: what is prepared next, what memory holds, and what lies on disk instead."""

import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from taas_magic.data import encode
from taas_magic.data.answer import Answer
from taas_magic.data.disk import NoDisk
from taas_magic.data.shelf import Shelf
from taas_magic.data.spill import Spill
from taas_magic.data.stock import Key, Stock
from taas_magic.data.wire import Kind

BATCH_BYTES = 64 << 10


def key(slot: int, epoch: int = 0) -> Key:
    return Key(Kind.GET, epoch, slot)


def answer(slot: int) -> Answer:
    """A batch of one tensor and one string."""
    batch = {"x": torch.full((BATCH_BYTES // 4,), float(slot)), "name": f"batch {slot}"}
    return Answer(Kind.BATCH, encode.encode(batch), units=slot, order=9)


def opened(item: Any) -> tuple[list[float], str]:
    """What a rank makes of an answer."""
    body = memoryview(bytearray(b"".join(bytes(part) for part in item.body.parts())))
    batch = encode.decode(body, len(item.body.head))
    return batch["x"].unique().tolist(), batch["name"]


def shelf_of(tmp_path: Path, limit_bytes: int = 1 << 30) -> tuple[Shelf, Spill]:
    """Memory for two batches, and a disk."""
    spill = Spill(tmp_path / "spill", limit_bytes)
    return Shelf(2 * BATCH_BYTES + 4096, disk=spill), spill


def prepare(shelf: Shelf, slots: range) -> None:
    shelf.work_ahead(iter([key(slot) for slot in slots]))
    for slot in slots:
        assert shelf.next() == key(slot)
        shelf.put(key(slot), answer(slot))


def test_connections_are_served_in_turn() -> None:
    shelf = Shelf(1 << 30)
    for slot in range(0, 200, 2):
        shelf.want("rank 0", [key(slot)])
    for slot in (1, 3):
        shelf.want("rank 1", [key(slot)])
    order = []
    for _ in range(5):
        chosen = shelf.next()
        assert chosen is not None
        order.append(chosen.slot)
        shelf.put(chosen, answer(0))
    assert order == [0, 1, 2, 3, 4]


def test_a_full_lane_prepares_what_a_connection_sends_next() -> None:
    """Though what follows in its stream was nearer, and has used up the memory."""
    shelf = Shelf(BATCH_BYTES, follows=lambda epoch, slot: slot >= 2)
    for slot in (0, 2, 4):
        shelf.want("rank", [key(slot)])
    assert shelf.next() == key(2)
    shelf.put(key(2), answer(2))
    with ThreadPoolExecutor() as pool:
        chosen = pool.submit(shelf.next)
        assert shelf.take("rank", key(0), 0.0) is None
        assert chosen.result(60) == key(0)
        shelf.put(key(0), answer(0))
        assert shelf.take("rank", key(0), 60.0) is not None


def test_an_answer_that_was_thrown_away_for_room_is_prepared_again() -> None:
    shelf = Shelf(BATCH_BYTES)
    shelf.want("rank", [key(0)], only_count=True)
    shelf.want("rank", [key(0)])
    assert shelf.next() == key(0)
    shelf.put(key(0), answer(0))
    assert shelf.count("rank", key(0), 0.0) == 0
    shelf.want("other", [key(1)])
    with ThreadPoolExecutor() as pool:
        chosen = pool.submit(shelf.next)
        assert chosen.result(60) == key(1)
        shelf.put(key(1), answer(1))
        chosen = pool.submit(shelf.next)
        assert shelf.take("rank", key(0), 0.0) is None
        assert chosen.result(60) == key(0)


def test_what_a_connection_wanted_is_not_prepared_when_it_is_gone() -> None:
    shelf = Shelf(1 << 30)
    shelf.want("rank 0", [key(0)])
    shelf.want("rank 1", [key(1)])
    shelf.gone("rank 0")
    assert shelf.next() == key(1)


def test_the_owner_is_told_before_it_waits() -> None:
    told = threading.Event()
    shelf = Shelf(1 << 30, on_idle=told.set)
    with ThreadPoolExecutor() as pool:
        chosen = pool.submit(shelf.next)
        assert told.wait(60)
        shelf.want("rank", [key(7)])
        assert chosen.result(60) == key(7)


def test_a_lane_forgets_what_all_ranks_are_past() -> None:
    shelf, slots, most = Shelf(1 << 30), 100, 0
    small = Answer(Kind.BATCH, b"batch", units=1)
    for epoch in range(50):
        shelf.work_ahead(iter([Key(Kind.OPEN, epoch, 0), *(key(s, epoch) for s in range(slots))]))
        for _ in range(slots + 1):
            chosen = shelf.next()
            assert chosen is not None
            shelf.put(chosen, small)
        for slot in range(slots // 2):  # the rank leaves its loop in the middle of the epoch
            shelf.want("rank", [key(slot, epoch)])
            assert shelf.take("rank", key(slot, epoch), 0.0) is small
        most = max(most, shelf.entries)
    left, counts = slots // 2 + 1, slots
    assert most == 2 * (left + counts)


def test_of_a_long_epoch_a_lane_remembers_the_latest_counts() -> None:
    shelf, slots = Shelf(1 << 30), 40_000
    small = Answer(Kind.BATCH, b"batch", units=7)
    for slot in range(slots):
        shelf.want("rank", [key(slot)])
        assert shelf.next() == key(slot)
        shelf.put(key(slot), small)
        assert shelf.take("rank", key(slot), 0.0) is small
    assert shelf.entries < slots // 2
    assert shelf.count("other rank", key(slots - 1), 0.0) == 7


def test_a_count_that_was_forgotten_is_found_out_again() -> None:
    shelf = Shelf(1 << 30)
    prepare(shelf, range(5))
    shelf.want("slow", [key(3)], only_count=True)
    for epoch in (1, 2):
        shelf.want("fast", [key(0, epoch)])
        assert shelf.next() == key(0, epoch)
        shelf.put(key(0, epoch), answer(0))
    assert shelf.count("slow", key(3), 0.0) is None
    assert shelf.next() == key(3)
    shelf.put(key(3), answer(3))
    assert shelf.count("slow", key(3), 0.0) == 3


def test_many_small_batches_take_no_more_memory_than_there_is() -> None:
    idle = threading.Event()
    shelf = Shelf(1 << 20, on_idle=idle.set)
    shelf.work_ahead(iter([key(slot) for slot in range(100_000)]))

    def work() -> None:
        while (chosen := shelf.next()) is not None:
            shelf.put(chosen, Answer(Kind.BATCH, b"x"))

    with ThreadPoolExecutor() as pool:
        working = pool.submit(work)
        assert idle.wait(60)
        shelf.close()
        working.result(60)
    assert 100 < shelf.ready_batches < 2000


def test_over_the_budget_batches_lie_on_disk_and_come_back_bit_for_bit(tmp_path: Path) -> None:
    shelf, spill = shelf_of(tmp_path)
    prepare(shelf, range(6))
    assert shelf.ready_batches == 6
    assert shelf.ready_bytes <= 2 * BATCH_BYTES + 4096
    files = list((tmp_path / "spill").iterdir())
    assert len(files) == 4
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert spill.bytes == sum(file.stat().st_size for file in files)
    for slot in range(6):
        shelf.want("rank", [key(slot)])
        item = shelf.take("rank", key(slot), 5.0)
        assert isinstance(item, Answer)
        assert (item.units, item.order) == (slot, 9)
        assert item.checksum() == answer(slot).checksum()
        assert opened(item) == ([float(slot)], f"batch {slot}")
    assert not list((tmp_path / "spill").iterdir())
    assert (spill.bytes, shelf.ready_batches, shelf.ready_bytes) == (0, 0, 0)


def test_what_is_asked_for_makes_room_by_going_to_disk(tmp_path: Path) -> None:
    shelf, _ = shelf_of(tmp_path)
    prepare(shelf, range(2))
    for slot in (10, 12, 14):
        shelf.want("rank", [key(slot)])
        assert shelf.next() == key(slot)
        shelf.put(key(slot), answer(slot))
    assert list((tmp_path / "spill").iterdir())
    for slot in (0, 1):
        shelf.want("rank", [key(slot)])
        assert opened(shelf.take("rank", key(slot), 5.0)) == ([float(slot)], f"batch {slot}")


def test_the_limit_of_the_disk_holds(tmp_path: Path) -> None:
    shelf, spill = shelf_of(tmp_path, limit_bytes=2 * BATCH_BYTES)
    shelf.work_ahead(iter([key(slot) for slot in range(100)]))
    prepared = 0
    while shelf.ready_bytes < 2 * BATCH_BYTES or spill.has_room:
        chosen = shelf.next()
        assert chosen is not None
        shelf.put(chosen, answer(chosen.slot))
        prepared += 1
    assert prepared <= 6
    assert spill.bytes <= 3 * BATCH_BYTES
    assert not spill.is_full, "the limit is no fault of the disk"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "taas-test", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs root, to mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_makes_the_lane_wait_and_nothing_is_lost(small_disk: Path) -> None:
    shelf, spill = shelf_of(small_disk)
    shelf.work_ahead(iter([key(slot) for slot in range(100)]))
    slots = []
    while not spill.is_full:
        chosen = shelf.next()
        assert chosen is not None
        shelf.put(chosen, answer(chosen.slot))
        slots.append(chosen.slot)
    assert not spill.has_room
    assert 4 <= len(slots) < 10
    for slot in slots:
        shelf.want("rank", [key(slot)])
        assert opened(shelf.take("rank", key(slot), 5.0)) == ([float(slot)], f"batch {slot}")


def test_a_lane_that_follows_a_dead_one_clears_its_files(tmp_path: Path) -> None:
    shelf, _ = shelf_of(tmp_path)
    prepare(shelf, range(6))
    _, spill = shelf_of(tmp_path)
    assert spill.bytes == 0
    assert not list((tmp_path / "spill").iterdir())


def test_a_full_lane_is_woken_for_an_eighth_of_its_memory_and_not_for_each_batch() -> None:
    count = 64
    one = Answer(Kind.VALUE, bytes(1 << 20))
    stock = Stock(count * one.size, NoDisk())
    keys = [Key(Kind.GET, 0, slot) for slot in range(count)]
    for key in keys:
        stock.lay(key, one)
    assert stock.is_full
    stock.remove(keys[0])
    assert not stock.has_gap
    for key in keys[1:10]:
        stock.remove(key)
    assert stock.has_gap
