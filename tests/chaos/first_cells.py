"""Kills the pool's process between the loading of the extension and the end of the second cell.

Each round starts a kernel, which loads the extension and so warms the local pool in a thread, and
runs two cells. At a random moment the pool's process is killed. Each cell must end with success, or
soon after the kill with a message that says what ended; nothing may be left.
"""

import random
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos.tree import NOT_OURS, is_over, left_after
from tests.conftest import TOKEN, abandoned, carriers, describe, end
from tests.eventually import eventually
from tests.frontend import WAIT_S, Frontend, Scene, kernel
from tests.harness import words

CELLS = (
    "%%taas --gpus 1\nprint('first')",
    "%%taas --gpus 2\nimport time\nprint('second', flush=True)\ntime.sleep(1)",
)
CLEAR = re.compile(r'pool "local"(:| did not start:) (its|the connection to its) process \d+ ')
UNCLEAR = re.compile(r"ConnectionPool|<TLS|object at 0x|Traceback|Comm|hangs")


@dataclass
class Result:
    """The outcome of all rounds.

    Attributes:
        kills: How many rounds killed a process, by what the cells did then.
        late: Rounds in which a cell that failed did not end in time.
        unclear: Rounds in which a cell failed without saying clearly why.
        left: What was left.
    """

    kills: Counter[str] = field(default_factory=Counter)
    late: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} x {what}" for what, count in sorted(self.kills.items()))
        return (
            f"{self.kills.total()} rounds ({counts}); a cell ended too late: {len(self.late)}; "
            f"without a clear message: {len(self.unclear)}; left over: {len(self.left)}"
        )

    @property
    def wrong(self) -> list[str]:
        return self.late + self.unclear + self.left


class FirstCells:
    """Plays rounds.

    Args:
        scene: The surroundings of the kernels.
        seed: Decides when the process is killed.
        spread_s: The latest moment of the kill, in seconds after the kernel has started.
        end_s: Seconds for a cell that fails to end after the kill.
        gone_s: Seconds until nothing may be left.
    """

    def __init__(
        self, scene: Scene, seed: int, spread_s: float, end_s: float, gone_s: float
    ) -> None:
        self._scene, self._random = scene, random.Random(seed)
        self._spread_s, self._end_s, self._gone_s = spread_s, end_s, gone_s
        self._files = set(Path("/dev/shm").iterdir())
        self.result = Result()

    def play(self, rounds: int, say: Callable[[str], None]) -> Result:
        """Play so many rounds; `say` is called with a line for each."""
        for number in range(1, rounds + 1):
            token, began = secrets.token_hex(8), time.monotonic()
            with kernel(self._scene.project, **self._scene.environ(), **{TOKEN: token}) as frontend:
                what = self._round(frontend, number)
                if self._random.random() < 0.25:
                    frontend.process.kill()
                    eventually(lambda: not frontend.manager.is_alive())
            left = left_after(lambda token=token: self._left(token), self._gone_s)  # type: ignore[misc]
            self.result.left += [f"{number}: {what}: {each}" for each in left]
            for process in carriers(token):
                end(process)
            say(f"{number}: {what} ({time.monotonic() - began:.0f} s)")
        return self.result

    def _round(self, frontend: Frontend, number: int) -> str:
        """Run the cells and kill the process meanwhile; return what happened."""
        delay_s = self._random.uniform(0.0, self._spread_s)
        requests = [self._send(frontend, cell) for cell in CELLS]
        kill_at, killed_at, victim = time.monotonic() + delay_s, 0.0, None
        ended: dict[str, float] = {}

        def are_over() -> bool:
            nonlocal killed_at, victim
            now = time.monotonic()
            for request in requests:
                if request in frontend.replies:
                    ended.setdefault(request, now)
            if victim is None and now >= kill_at and (victim := self._victim(frontend)):
                with suppress(psutil.NoSuchProcess):
                    victim.kill()
                killed_at = now
            return len(ended) == len(requests)

        frontend.wait(are_over, 3 * WAIT_S)
        told = [self._outcome(frontend, request) for request in requests]
        if victim is None:
            self.result.kills["no kill"] += 1
            return f"no process to kill after {delay_s:.1f} s: {told}"
        began = 0.0
        for request, message in zip(requests, told, strict=True):
            after_s = ended[request] - max(killed_at, began)
            began = ended[request]  # the next cell begins then
            if not message:
                continue
            if not CLEAR.search(message) or UNCLEAR.search(message):
                self.result.unclear.append(f"{number}: {message}")
            if after_s > self._end_s:
                self.result.late.append(f"{number}: {after_s:.1f} s: {message}")
        what = " and ".join("failed" if message else "succeeded" for message in told)
        self.result.kills[what] += 1
        seconds = ", ".join(f"{ended[request] - killed_at:+.1f} s" for request in requests)
        return f"killed {victim.pid} after {delay_s:.1f} s: {what}, ended at {seconds}"

    def _send(self, frontend: Frontend, cell: str) -> str:
        content = {"code": cell, "silent": False, "store_history": True, "stop_on_error": False}
        message = frontend.client.session.msg("execute_request", content)
        frontend.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def _outcome(self, frontend: Frontend, request: str) -> str:
        """Return what a cell raised; "" for success."""
        reply = frontend.finish(request)
        return "" if reply["status"] == "ok" else f"{reply['ename']}: {reply['evalue']}"

    def _victim(self, frontend: Frontend) -> psutil.Process | None:
        """Return the pool's process, also before it listens; None while there is none."""
        with suppress(psutil.NoSuchProcess):
            for process in frontend.process.children():
                if "taas_magic.pool.process" in words(process) and not is_over(process):
                    return process
        return None

    def _left(self, token: str) -> list[str]:
        """Return what is there when nothing should be."""
        scene = self._scene
        found = [f"process {describe(process)}" for process in carriers(token)]
        files = abandoned(set(Path("/dev/shm").iterdir()) - self._files)
        kept = [path for path in scene.tmp.iterdir() if not NOT_OURS.fullmatch(path.name)]
        mounts = Path("/proc/mounts").read_text().splitlines()
        found += [f"mount {line}" for line in mounts if str(scene.folder) in line]
        return found + [f"file {path}" for path in (*files, *kept)]
