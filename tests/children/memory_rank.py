"""Load a payload as a rank does, and print the private memory that it takes, in KiB.

python -m tests.children.memory_rank PAYLOAD
"""

import sys
import types
from pathlib import Path

import torch  # noqa: F401  # before the first measurement

from taas_magic.capture import payload


def private_kib() -> int:
    """Return the size of this process's private memory in KiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private"))


def main() -> None:
    """Load the payload, and print the sum of its variable `big`.

    After a line of input, print the private memory that the load and the sum took, in KiB.
    """
    namespace = types.ModuleType("__main__")
    sys.modules["__main__"] = namespace
    before = private_kib()
    payload.read(Path(sys.argv[1])).load_into(namespace.__dict__)
    print(namespace.big.sum().item(), flush=True)
    sys.stdin.readline()
    print(private_kib() - before, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
