"""Tasks that a pool's process does for a detached run, because the kernel may be gone."""

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from distributed import Client, Security

from taas_magic.errors import PoolError
from taas_magic.host.spec import topic
from taas_magic.host.system import wait_or_kill
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import Event, Halt, RunEnded, TakeOverFetchers, decode_event, send_request
from taas_magic.pool.address import read_address
from taas_magic.pool.hosts import BackgroundTasks

ANSWER_S = 20.0
"""Maximum seconds for another pool's process to respond to a request about fetchers."""

NOTIFY_S = 60.0
"""Maximum seconds for which the user's `notify` command may run; then it is killed."""

EndFetchers = Callable[[], Awaitable[None]]
"""Function that ends the fetchers of a detached run, on whichever pool these fetchers run."""


async def take_over_fetchers(
    folder: Path,
    share_id: str,
    relay: Callable[[Sequence[Event]], Awaitable[None]],
    tasks: BackgroundTasks,
) -> EndFetchers:
    """Make this process the owner of fetchers on another pool; return a function that ends them.

    Connect to the other pool's process and ask it to send the fetchers' events to this process. The
    returned function kills the fetchers and closes the connection. If the connection breaks
    earlier, for example because this process ends, the other process ends the fetchers. If this
    call fails, it closes the connection.

    Args:
        folder: Folder of the other pool, with its `pool.json`.
        share_id: Id by which the other pool identifies the run's fetchers.
        relay: First called with the fetchers' earlier start and end events; this function waits for
            the end of this call. Then called with each further event.
        tasks: Runs the calls of `relay` for further events in the background.

    Raises:
        PoolError: The other pool's process has ended or does not respond, or the fetchers have
            ended.
        OSError: The other pool's process cannot be reached.
    """
    pool_address = read_address(folder)
    if pool_address is None:
        raise PoolError(f"the process of their pool has ended ({folder})")
    security = Security(**pool_address.security)
    client = await Client(
        pool_address.address,
        security=security,
        asynchronous=True,
        set_as_default=False,
        timeout=ANSWER_S,
    )

    def on_message(pair: tuple[float, tuple[str, bytes]]) -> None:
        tasks.start(relay([decode_event(pair[1][1])]))

    async def end() -> None:
        try:
            await asyncio.wait_for(send_request(client.scheduler, Halt(share_id, "kill")), ANSWER_S)
        except asyncio.TimeoutError:
            pass  # the fetchers end with the connection
        finally:
            await client.close(timeout=2)

    try:
        client.subscribe_topic(topic(client.id), on_message)
        taking = send_request(client.scheduler, TakeOverFetchers(client.id, share_id))
        events = await asyncio.wait_for(taking, ANSWER_S)
        if events is None:
            raise PoolError("they have ended")
        await relay(events)
    except BaseException as error:
        await client.close(timeout=2)
        if isinstance(error, OSError | asyncio.TimeoutError):
            raise PoolError(str(error) or "their pool does not answer") from error
        raise
    return end


def notify(folder: RunFolder, ended: RunEnded) -> None:
    """Run the user's `notify` command after a detached run, if taas.toml sets this command.

    The shell runs the command in the project folder. The command gets the run's id, state and
    duration in environment variables. Its output goes to `notify.log` in the run folder. This call
    blocks until the command has ended. If the command has not ended after `NOTIFY_S`, this call
    kills the command, and writes a line about this to `notify.log`.
    """
    context = folder.context()
    if not context.notify:
        return
    variables = {
        "TAAS_RUN_ID": folder.run_id,
        "TAAS_RUN_STATE": ended.state,
        "TAAS_RUN_DURATION_S": f"{ended.elapsed_s or 0.0:.1f}",
    }
    with (folder.path / "notify.log").open("ab") as log:
        process = subprocess.Popen(
            context.notify,
            shell=True,  # the command line comes from the user's own taas.toml
            cwd=context.project,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        if not wait_or_kill(process, NOTIFY_S):
            log.write(f"taas: it had not ended after {NOTIFY_S:.0f} s and was killed\n".encode())
