"""One rank's batches of one epoch, in order: what the course says, from what the supply answers."""

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from taas_magic.data.outcome import Opened
from taas_magic.data.scout import ScoutedCourse
from taas_magic.data.shard import Ask, Course, Part, Place, Verdict
from taas_magic.data.supply import Reply, Supply
from taas_magic.errors import ProtocolError

_MOST_STEPS = 256
_READY_BATCHES = 2
_STOP_S = 0.2


class Step(NamedTuple):
    """What a rank is handed in one step, and where the epoch goes on after it."""

    reply: Reply
    row_units: int
    after: Place


class Window:
    """How many steps ahead a rank asks: as many batches as fit into `window_bytes`.

    Args:
        window_bytes: The bound.
        least: But never less than this, so that no lane idles.
    """

    def __init__(self, window_bytes: int, least: int) -> None:
        self._window_bytes, self._least = window_bytes, least
        self._largest = 0

    def saw(self, size: int) -> None:
        """Take note of a batch's size."""
        if size > self._largest:
            self._largest = size

    @property
    def steps(self) -> int:
        """How many steps ahead to ask."""
        if not self._largest:
            return self._least
        return max(self._least, min(self._window_bytes // self._largest, _MOST_STEPS))


def steps(
    supply: Supply, opened: Opened, part: Part, place: Place, window_bytes: int
) -> Iterator[Step]:
    """Yield a rank's steps, from `place` on, of the epoch that its supply was opened for."""
    course: Course | ScoutedCourse
    if opened.batches is not None and not opened.counted:
        course = Course(part, opened.batches, place)
    else:
        course = ScoutedCourse(part, opened.batches, opened.streams or 1, place)
    window = Window(window_bytes, 2 * -(-supply.lanes // part.world_size) + 1)
    walk = _Walk(supply, course, window, is_bounded=part.units is not None)
    for step in itertools.count(place.position // part.world_size):
        reply = walk.take(step)
        if reply is None:
            return
        yield Step(reply, course.row_units(step), course.place(step + 1))


class _Walk:
    """Asks ahead along a course, and learns what the course needs to know."""

    def __init__(
        self, supply: Supply, course: Course | ScoutedCourse, window: Window, is_bounded: bool
    ) -> None:
        self._supply, self._course, self._window = supply, course, window
        self._scouts = isinstance(course, ScoutedCourse)
        self._learns_late = is_bounded and not self._scouts
        self._unlearnt: deque[Ask] = deque()
        self._kept: dict[int, Reply] = {}
        self._ask_again_at = 0

    def take(self, step: int) -> Reply | None:
        """The batch to hand out at a step; None at the end."""
        if step >= self._ask_again_at:
            self._ask_ahead(step)
        while (slot := self._course.at(step)) is Verdict.WAIT:
            if not self._unlearnt:
                self._ask_ahead(step)
            self._learn()
        if isinstance(slot, Verdict):
            return None
        reply = self._kept.pop(slot) if slot in self._kept else self._supply.reply(Ask(slot, True))
        if reply.units < 0:
            raise ProtocolError(f"batch {slot} does not exist after all")
        if self._learns_late:
            self._course.learn(slot, reply.units)
        self._window.saw(reply.size)
        return reply

    def _ask_ahead(self, step: int) -> None:
        """Ask for a whole window; the next time when a quarter of it is used up."""
        ahead = self._window.steps
        asks = list(self._course.asks(step + ahead))
        self._supply.ask(asks)
        if self._scouts:
            self._unlearnt += asks
        self._ask_again_at = step + max(1, ahead // 4)

    def _learn(self) -> None:
        ask = self._unlearnt.popleft()
        reply = self._supply.reply(ask)
        self._course.learn(ask.slot, reply.units)
        if ask.mine and reply.units >= 0:
            self._kept[ask.slot] = reply


class Ahead(Iterator[Step]):
    """Takes steps in a thread of its own, so that large batches arrive while the rank computes."""

    def __init__(self, source: Iterator[Step], work: Callable[[Reply], Reply]) -> None:
        self._source, self._work = source, work
        self._queue: queue.Queue[Step | BaseException] = queue.Queue(_READY_BATCHES)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="taas-receive", daemon=True)
        self._thread.start()

    def __next__(self) -> Step:
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._queue.put(item)
            raise item
        return item

    def close(self) -> None:
        """Stop after the batch that is under way; blocks until then."""
        self._stopped.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=_STOP_S / 10)
            except queue.Empty:
                self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            for step in self._source:
                if self._stopped.is_set():
                    return
                self._queue.put(step._replace(reply=self._work(step.reply)))
            self._queue.put(StopIteration())
        except BaseException as error:
            # It belongs to whoever iterates; this thread only carries it there.
            self._queue.put(error)
