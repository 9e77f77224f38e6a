"""What a pool's process does for a detached run in the place of its kernel.

It passes on what fetchers of another pool say, ends them, and runs the command of `notify`.
"""

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from distributed import Client, Security

from taas_magic.errors import PoolError
from taas_magic.host.spec import topic
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import Event, Halt, RunEnded, TakeFetchers, ask, event_of
from taas_magic.pool.hosts import Tasks
from taas_magic.pool.process import place_in

ANSWER_S = 20.0
"""How long the process of the fetchers' pool may take to answer."""

NOTIFY_S = 60.0
"""How long the command of `notify` may run."""

EndFetchers = Callable[[], Awaitable[None]]
"""Ends the fetchers of a run, wherever they are."""


async def take_fetchers(
    folder: Path,
    share_id: str,
    relay: Callable[[Sequence[Event]], Awaitable[None]],
    tasks: Tasks,
) -> EndFetchers:
    """Become the owner of fetchers that another pool's process has; return what ends them.

    They end with the connection that is made here, so also when this process is gone.

    Args:
        folder: The folder of that pool.
        relay: Takes what the fetchers say.

    Raises:
        PoolError: That pool's process does not answer, or has not got them any more.
        OSError: It cannot be reached.
    """
    place = place_in(folder)
    if place is None:
        raise PoolError(f"the process of their pool has ended ({folder})")
    security = Security(**place.security)
    client = await Client(
        place.address, security=security, asynchronous=True, set_as_default=False, timeout=ANSWER_S
    )

    def hear(pair: tuple[float, tuple[str, bytes]]) -> None:
        tasks.start(relay([event_of(pair[1][1])]))

    async def end() -> None:
        try:
            await asyncio.wait_for(ask(client.scheduler, Halt(share_id, "kill")), ANSWER_S)
        except asyncio.TimeoutError:
            pass  # they end with the connection
        finally:
            await client.close(timeout=2)

    try:
        client.subscribe_topic(topic(client.id), hear)
        taking = ask(client.scheduler, TakeFetchers(client.id, share_id))
        said = await asyncio.wait_for(taking, ANSWER_S)
        if said is None:
            raise PoolError("they have ended")
    except (PoolError, OSError, asyncio.TimeoutError) as error:
        await client.close(timeout=2)
        raise PoolError(str(error) or "their pool does not answer") from error
    await relay(said)
    return end


def notify(folder: RunFolder, ended: RunEnded) -> None:
    """Run the user's command at the end of a detached run; what it prints is in the run's folder.

    Blocks until it has ended, and no longer than NOTIFY_S.
    """
    context = folder.context()
    if not context.notify:
        return
    about = {
        "TAAS_RUN_ID": folder.run_id,
        "TAAS_RUN_STATE": ended.state,
        "TAAS_RUN_DURATION_S": f"{ended.elapsed_s or 0.0:.1f}",
    }
    with (folder.path / "notify.log").open("ab") as log:
        process = subprocess.Popen(
            context.notify,
            shell=True,  # it is a command line of the user's own taas.toml
            cwd=context.project,
            env={**os.environ, **about},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            process.wait(NOTIFY_S)
        except subprocess.TimeoutExpired:
            process.kill()
            log.write(f"taas: it had not ended after {NOTIFY_S:.0f} s and was killed\n".encode())
            process.wait()
