"""Measure what a run costs in addition to the work of its ranks, for several numbers of ranks.

    python benchmarks/scale.py --ranks 1 8 64 512 8192

One part measures the pool's process with its connections (scale_hosts.py), in CPU time except for
the delay of a line. The other part measures the notebook's view (scale_view.py), in elapsed time. A
user notices two figures: the delay of a line, and the longest time in which the notebook is busy
without a pause. 8,192 ranks take some minutes, mostly for TLS handshakes and for the simulated
agents.
"""

import argparse
import sys

import scale_hosts
import scale_view

BUSY_AIM_MS = 100.0
HOSTS_HEAD = (
    "ranks",
    "a host joins, ms",
    "launch, µs a rank",
    "a line, µs",
    "line late by, ms",
    "end, µs a rank",
    "beats, % of a core",
    "KiB a rank",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 512, 8192])
    parser.add_argument("--only", choices=("hosts", "view"))
    asked = parser.parse_args()
    if asked.only != "view":
        _print_row(HOSTS_HEAD)
        _print_row(["---"] * len(HOSTS_HEAD))
        for ranks in asked.ranks:
            _print_row([f"{ranks:,}", *map(_short, scale_hosts.measure(ranks))])
    if asked.only != "hosts":
        _print_view(asked.ranks)
    return 0


def _print_view(sizes: list[int]) -> None:
    """Print the table of the view's costs, and whether its longest stretch reaches the aim."""
    longest_ms = 0.0
    for number, ranks in enumerate(sizes):
        scenes, held_mib = scale_view.measure(ranks)
        if number == 0:
            print("\nThe view: µs a rank's event (longest stretch of work, ms)\n")
            _print_row(["ranks", *(scene.name for scene in scenes), "MiB"])
            _print_row(["---"] * (len(scenes) + 2))
        cells = [f"{_short(s.per_event_us)} ({_short(s.longest_ms)})" for s in scenes]
        _print_row([f"{ranks:,}", *cells, _short(held_mib)])
        longest_ms = max(longest_ms, *(scene.longest_ms for scene in scenes))
    verdict = "reached" if longest_ms < BUSY_AIM_MS else "missed"
    print(f"\nbusy at a stretch: {longest_ms:.0f} ms, aim {BUSY_AIM_MS:.0f} ms: {verdict}")


def _print_row(cells: list[str] | tuple[str, ...]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


if __name__ == "__main__":
    sys.exit(main())
