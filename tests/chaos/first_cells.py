"""Disturb a kernel between the loading of the extension and the end of its second cell.

Each round does one *deed* at a random moment: it kills the pool's process, runs `%taas down`, or
interrupts, restarts or kills the kernel. Each cell must succeed, or fail soon after the deed with a
message that says what ended. No process and no file may be left.
"""

import random
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from tests.chaos.tree import NOT_OURS, is_over
from tests.conftest import TOKEN, abandoned, carriers, describe, end
from tests.eventually import HUNG_S, eventually, left_after
from tests.frontend import Frontend, Scene, kernel
from tests.harness import words

CELLS = (
    "%%taas --gpus 1\nprint('first')",
    "%%taas --gpus 2\nimport time\nprint('second', flush=True)\ntime.sleep(1)",
)
DEEDS = ("kill pool", "down", "interrupt", "restart kernel", "kill kernel")
CLEAR = {
    "kill pool": r'pool "local"(:| did not start:) (its|the connection to its) process \d+ ',
    "down": r"KeyboardInterrupt|this kernel ended|the command `down` ended the pool",
    "interrupt": "KeyboardInterrupt|aborted",
}
"""For each deed: a pattern that the message of a failed cell must match to be clear."""

UNCLEAR = re.compile(r"ConnectionPool|<TLS|object at 0x|Traceback|Comm|hangs")
MORE_S = 3.0
"""Maximum seconds between the start of a phase (`FirstCells._has_begun`) and the deed."""


@dataclass
class Result:
    """The results of all rounds.

    Attributes:
        deeds: Number of rounds, by a text with the deed and the outcome of the cells.
        late: Rounds in which a failed cell ended too late.
        unclear: Rounds in which the message of a failed cell was not clear.
        left: Processes, mounts and files that were left.
    """

    deeds: Counter[str] = field(default_factory=Counter)
    late: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} x {what}" for what, count in sorted(self.deeds.items()))
        return (
            f"{self.deeds.total()} rounds ({counts}); a cell ended too late: {len(self.late)}; "
            f"without a clear message: {len(self.unclear)}; left over: {len(self.left)}"
        )

    @property
    def wrong(self) -> list[str]:
        return self.late + self.unclear + self.left


class FirstCells:
    """Rounds that each start a kernel, run the cells and do one deed.

    Args:
        seed: Seed of the deeds and their moments.
        deeds: The deeds to choose from; a subset of DEEDS.
        end_s: Longest time between the deed and the end of a cell that fails, in seconds.
        gone_s: Seconds after which nothing may be left.
    """

    def __init__(
        self, scene: Scene, seed: int, deeds: Sequence[str], end_s: float, gone_s: float
    ) -> None:
        self._scene, self._random, self._deeds = scene, random.Random(seed), deeds
        self._end_s, self._gone_s = end_s, gone_s
        self._files = set(Path("/dev/shm").iterdir())
        self.result = Result()

    def play(self, rounds: int, say: Callable[[str], None]) -> Result:
        """Play `rounds` rounds. Call `say` with one line for each."""
        for number in range(1, rounds + 1):
            token, began, known = secrets.token_hex(8), time.monotonic(), len(self.result.wrong)
            with kernel(self._scene.project, **self._scene.environ(), **{TOKEN: token}) as frontend:
                what = self._round(frontend, number)
            left = left_after(partial(self._left, token), self._gone_s)
            self.result.left += [f"{number}: {what}: {each}" for each in left]
            for process in carriers(token):
                end(process)
            is_wrong = ", WRONG" * (len(self.result.wrong) > known)
            say(f"{number}: {what} ({time.monotonic() - began:.0f} s){is_wrong}")
        return self.result

    def _round(self, frontend: Frontend, number: int) -> str:
        """Run the cells, and do a deed meanwhile. Record the outcome, and return it as text."""
        deed = self._random.choice(self._deeds)
        phase, delay_s = self._random.randrange(5), self._random.uniform(0.0, MORE_S)
        beside = frontend.new_subshell() if deed == "down" else None
        requests = [self._send(frontend, cell) for cell in CELLS]
        ended: dict[str, float] = {}
        begun_at = done_at = 0.0

        def is_over() -> bool:
            nonlocal begun_at, done_at
            now = time.monotonic()
            for request in requests:
                if request in frontend.replies:
                    ended.setdefault(request, now)
            if not begun_at and self._has_begun(frontend, requests, phase):
                begun_at = now
            if not done_at and begun_at and now >= begun_at + delay_s:
                done_at = now
                self._do(frontend, deed, beside)
            is_without_cells = done_at and deed in ("restart kernel", "kill kernel")
            return bool(is_without_cells) or len(ended) == len(requests)

        frontend.wait(is_over, HUNG_S)
        told = f"{deed} {delay_s:.1f} s after phase {phase}"
        if not done_at:
            self.result.deeds["nothing in time"] += 1
            return f"{told}: the cells were faster"
        if deed == "kill kernel":
            eventually(lambda: not frontend.manager.is_alive())
            self.result.deeds[deed] += 1
            return told
        if deed == "restart kernel":
            frontend.manager.restart_kernel()
            frontend.client.wait_for_ready(timeout=HUNG_S)
            requests, ended, done_at = [self._send(frontend, CELLS[0])], {}, time.monotonic()
        errors = [self._outcome(frontend, request) for request in requests]
        began = 0.0
        for request, error in zip(requests, errors, strict=True):
            after_s = ended.get(request, done_at) - max(done_at, began)
            began = ended.get(request, done_at)  # the next cell begins when this cell has ended
            if not error:
                continue
            if not re.search(CLEAR.get(deed, "nothing"), error) or UNCLEAR.search(error):
                self.result.unclear.append(f"{number}: {told}: {error}")
            if after_s > self._end_s:
                self.result.late.append(f"{number}: {told}: {after_s:.1f} s: {error}")
        what = " and ".join("failed" if error else "succeeded" for error in errors)
        self.result.deeds[f"{deed}: {what}"] += 1
        seconds = ", ".join(f"{at - done_at:+.1f} s" for at in ended.values())
        return f"{told}: {what} {seconds}"

    def _has_begun(self, frontend: Frontend, requests: Sequence[str], phase: int) -> bool:
        """Return whether a phase has begun.

        The phases: 0: the pool's process exists. 1: it listens. 2: the first cell shows its status
        header. 3: the first cell has ended. 4: the second cell has printed.
        """
        first, second = requests
        if phase == 0:
            return self._pool_of(frontend) is not None
        if phase == 1:
            return any(self._scene.state.glob("pools/*/pool.json"))
        if phase == 2:
            return bool(frontend.contents(first, "display_data")) or first in frontend.replies
        if phase == 3:
            return first in frontend.replies
        return "second" in frontend.text(second) or second in frontend.replies

    def _do(self, frontend: Frontend, deed: str, beside: str | None) -> None:
        if deed == "kill pool":
            if (process := self._pool_of(frontend)) is not None:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        elif deed == "down":
            frontend.send("%taas down", beside)
        elif deed == "interrupt":
            frontend.manager.interrupt_kernel()
        elif deed == "kill kernel":
            frontend.process.kill()

    def _send(self, frontend: Frontend, cell: str) -> str:
        content = {"code": cell, "silent": False, "store_history": True, "stop_on_error": False}
        message = frontend.client.session.msg("execute_request", content)
        frontend.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def _outcome(self, frontend: Frontend, request: str) -> str:
        """Return the error of a cell; "" if the cell succeeded."""
        reply = frontend.finish(request, HUNG_S)
        if reply["status"] == "error":
            return f"{reply['ename']}: {reply['evalue']}"
        return "" if reply["status"] == "ok" else str(reply["status"])

    def _pool_of(self, frontend: Frontend) -> psutil.Process | None:
        """Return the pool's process, also before it listens; None if there is none."""
        with suppress(psutil.NoSuchProcess):
            for process in frontend.process.children():
                if "taas_magic.pool.process" in words(process) and not is_over(process):
                    return process
        return None

    def _left(self, token: str) -> list[str]:
        """Return descriptions of the processes, mounts and files that are left of the rounds."""
        scene = self._scene
        found = [f"process {describe(process)}" for process in carriers(token)]
        files = abandoned(set(Path("/dev/shm").iterdir()) - self._files)
        kept = [path for path in scene.tmp.iterdir() if not NOT_OURS.fullmatch(path.name)]
        mounts = Path("/proc/mounts").read_text().splitlines()
        found += [f"mount {line}" for line in mounts if str(scene.folder) in line]
        return found + [f"file {path}" for path in (*files, *kept)]
