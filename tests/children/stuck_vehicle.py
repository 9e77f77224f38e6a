"""Run a vehicle's event loop with a task that ignores its cancellation, as a task of Dask may.

python -m tests.children.stuck_vehicle COMMAND

`sys.argv` of the process is COMMAND, for example a command of Dask.
"""

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

from taas_magic.host import vehicle


async def ignore_cancellation() -> None:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            print("a task ignores its cancellation", flush=True)


async def main() -> None:
    """Let a vehicle follow a supervisor (`cat`), and return while the supervisor still runs."""
    worker: Any = SimpleNamespace(nanny=None)
    supervisor = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
    plugin = vehicle.Vehicle("", 60.0, 60.0)
    tasks = [
        asyncio.create_task(plugin._follow(worker, supervisor)),
        asyncio.create_task(ignore_cancellation()),
    ]
    await asyncio.wait(tasks, timeout=0.1)


if __name__ == "__main__":
    sys.modules["__main__"].__spec__, sys.argv = None, sys.argv[1:]
    vehicle.EXIT_S = 0.5
    asyncio.run(main())
