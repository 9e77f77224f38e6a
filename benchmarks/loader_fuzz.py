"""Compare remote loaders of random configurations with local DataLoaders, bit for bit.

    python -m benchmarks.loader_fuzz [--draws 500] [--first 0] [--seed N]

Each draw is a loader with its ranks, its fetchers and its faults (tests/data/draws.py). For each
draw with a difference, the script prints the seed; `--seed` repeats the draw.
"""

import argparse
import tempfile
import time
import warnings
from pathlib import Path

from tests.data.draws import differences, draw

_TELL_EVERY = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    asked = parser.parse_args()
    seeds = range(asked.first, asked.first + asked.draws)
    if asked.seed is not None:
        seeds = range(asked.seed, asked.seed + 1)
        print(draw(asked.seed))
    warnings.simplefilter("ignore")  # such as torch's warning of more workers than cores
    began, differ = time.perf_counter(), 0
    for seed in seeds:
        if seed > seeds.start and (seed - seeds.start) % _TELL_EVERY == 0:
            print(f"{seed - seeds.start} draws, {differ} differ", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = differences(draw(seed), Path(folder))
        differ += bool(found)
        for text in found:
            print(f"seed {seed}: {text}", flush=True)
    took_s = time.perf_counter() - began
    print(f"{len(seeds)} draws from seed {seeds.start} on, {differ} differ ({took_s:.0f} s)")


if __name__ == "__main__":
    main()
