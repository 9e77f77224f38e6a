"""Tests of the figure of a run's data loading, which is drawn from the journal."""

import sys

import numpy as np
import pytest

from taas_magic.errors import UsageError
from taas_magic.journal.analysis import curves, draw_loaders
from taas_magic.messages import Event
from tests.events import event


def data(time: float, rank: int, batches: int, waited_s: float, host: str) -> Event:
    span_s = time % 1000
    counts = {"batches": batches, "units": batches, "bytes": batches * 1e6}
    train = {**counts, "waited_s": waited_s, "span_s": span_s}
    return event("data", host, time=time, rank=rank, loaders={"train": train})


def journal() -> list[Event]:
    """Return the events of two ranks in 6 s, with 10 batches/s each.

    Each rank waits 3/4 of the first 3 s, and 1/4 of the last 3 s.
    """
    events = [event("state", time=1000.0, state="RUNNING")]
    for second in range(1, 7):
        waited_s = 0.75 * min(second, 3) + 0.25 * max(0, second - 3)
        events.append(data(1000.0 + second, 0, 10 * second, waited_s, "gpu1"))
        events.append(data(1000.0 + second, 1, 10 * second, waited_s, "gpu2"))
    return events


def test_shares_and_rates_over_time() -> None:
    seconds, steps = zip(*curves(journal())["train"], strict=True)
    assert seconds == tuple(sorted(seconds))
    assert seconds[-1] == pytest.approx(5.5)
    assert steps[0].waited_fraction == pytest.approx(0.75)
    assert steps[-1].waited_fraction == pytest.approx(0.25)
    assert steps[2].rate(steps[2].batches) == pytest.approx(20.0)
    assert steps[2].rate(steps[2].bytes) == pytest.approx(20e6)


def test_a_restart_is_no_negative_rate() -> None:
    restart = event("restart", time=1006.5, attempt=1)
    events = [*journal(), restart, data(1008.0, 0, 2, 0.1, "gpu1"), data(1009.5, 0, 5, 1.0, "gpu1")]
    seconds, steps = zip(*curves(events)["train"], strict=True)
    assert min(step.batches for step in steps) > 0
    assert seconds == tuple(sorted(seconds))


def test_the_figure_shows_waiting_and_rates() -> None:
    from matplotlib.figure import Figure

    figure = draw_loaders(journal(), "digits")
    assert isinstance(figure, Figure)
    above, below = figure.axes
    assert above.get_title() == "digits"
    assert "waited" in above.get_ylabel()
    assert np.size(above.lines[0].get_xdata()) == np.size(below.lines[0].get_xdata()) == 6


def test_without_loaders_or_matplotlib_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no registered loader was used"):
        draw_loaders(journal()[:1], "digits")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="pip install matplotlib"):
        draw_loaders(journal(), "digits")
