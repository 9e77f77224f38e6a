"""Turns what is known of a failed rank into the failure that the notebook shows. Pure."""

import traceback

from taas_magic.errors import TaasError
from taas_magic.remote.watch import Failure, RankState, Verdict, is_consequence

_ADVICE = {
    "SIGKILL": "something on the host killed it; the system's log (dmesg) may say why",
    "SIGSEGV": "native code crashed; the Python stack above is where it was called",
    "SIGABRT": "native code gave up; its last words are above",
    "left": "end a rank by letting the cell end; all ranks must take the same number of steps",
    "exit": "os._exit ends a rank before the cell's end; raise an exception instead",
    "stopped": "it was stopped from outside (SIGSTOP); nothing that it did can have caused that",
    "timeout": "raise --timeout, or look where the ranks stood",
}


def failure(
    state: RankState,
    verdict: Verdict,
    host: str,
    log_path: str,
    tail: list[str],
    signal_name: str,
) -> Failure:
    """The failure event's fields for one rank; see docs/events.md."""
    kind = _kind(state, verdict)
    return {
        "rank": state.rank,
        "host": host,
        "pid": state.pid,
        "how": kind,
        "etype": state.etype if kind == "raised" else "",
        "message": state.message or state.hint,
        "traceback": state.traceback or state.stack,
        "signal": signal_name,
        "exitcode": state.exitcode,
        "consequence": kind == "raised" and is_consequence(state.etype, state.message),
        "log_path": log_path,
        "advice": _ADVICE.get(signal_name or kind, ""),
        "tail": [] if kind == "raised" else tail,
    }


def _kind(state: RankState, verdict: Verdict) -> str:
    if state.etype:
        return "raised"
    if state.ended:
        return "signal" if (state.exitcode or 0) < 0 else "exit"
    return verdict.cause if verdict.cause in ("stopped", "timeout", "left") else "left"


def host_failure(host: str, error: BaseException) -> Failure:
    """The failure of a host where something other than a rank went wrong.

    An error of ours says by itself what the user can do; of another the traceback may tell.
    """
    lines = [] if isinstance(error, TaasError) else traceback.format_exception(error)
    return {
        "rank": None,
        "host": host,
        "pid": None,
        "how": "host",
        "etype": type(error).__name__,
        "message": str(error),
        "traceback": lines,
        "signal": "",
        "exitcode": None,
        "consequence": False,
        "log_path": "",
        "advice": "",
        "tail": [],
    }
