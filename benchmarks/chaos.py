"""A thousand faults at random during runs; the stream, the weights and the ledger stay the same.

    python -m benchmarks.chaos [--faults 1000] [--seed 1]

Kills, stops and resumes fetchers and their lanes and cuts connections. The same seed plays the same
faults again.
"""

import argparse
import collections
import tempfile
import time
from pathlib import Path

from tests.chaos.harm import play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = play(Path(folder), asked.seed, asked.faults)
    counts = ", ".join(f"{count} x {kind}" for kind, count in collections.Counter(done).items())
    print(f"{len(done)} faults ({counts}) in {time.perf_counter() - started:.0f} s: all the same")


if __name__ == "__main__":
    main()
