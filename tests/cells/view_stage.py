"""A view of a run, whose clock the test sets, and functions that make events for it."""

# %%
from pathlib import Path

import msgspec

from taas_magic.display.head import RunState
from taas_magic.display.view import View
from taas_magic.messages import AnyEvent
from taas_magic.plan import Flags, HostCapacity, make_plan


def event(kind, host="gpu1", **values):
    line = {"kind": kind, "time": 0.0, "host": host, **values}
    return msgspec.convert(line, AnyEvent, str_keys=True)


def lines(rank, *texts):
    return event("lines", rank=rank, lines=list(texts))


def ended(state="SUCCEEDED", first=None, failures=()):
    return event("ended", state=state, first=first, failures=list(failures), elapsed_s=1.5)


def png(**values):
    data = {"text/plain": "a figure", "image/png": "iVBORw0KGgo="}
    values = {"display_id": None, "update": False, **values}
    return event("display", rank=0, data=data, metadata={}, **values)


class Stage:
    def __init__(self, ranks=2, name="digits", gpus=0, **values):
        self.now = 100.0
        plan = make_plan(Flags(gpus=ranks, name=name), HostCapacity(0, ranks), "run-1")
        state = RunState(plan, Path("/runs/run-1"), gpus)
        self.view = View(state, clock=lambda: self.now, **values)

    def play(self, *events, seconds=0.0):
        for seen in events:
            self.view.feed(seen)
        self.now += seconds
        self.view.tick(self.now)

    def end(self, *events):
        self.play(*events)
        self.view.close()
