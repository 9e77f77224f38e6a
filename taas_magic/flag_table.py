"""The table of `%%taas`'s flags: names, how their values are read, and what the help says."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from IPython.core.magic_arguments import argument

from taas_magic.flag_values import (
    MAX_RANKS,
    count,
    duration_s,
    names,
    one_of,
    prefill,
    ranks,
    variable,
    whole,
    world_sizes,
)
from taas_magic.store import WRITES


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        name: With its dashes.
        metavar: What stands for the value in the help; "" for a switch.
        read: Text -> value; raises ValueError.
        possible: Completes "possible is …".
        help: What it does.
        examples: Values that Tab offers; the first is in the help.
    """

    name: str
    metavar: str
    read: Callable[[str], Any]
    possible: str
    help: str
    examples: tuple[str, ...] = ()

    @property
    def field(self) -> str:
        """The name in the parser's answer."""
        return self.name.removeprefix("--").replace("-", "_")

    def decorator(self) -> Callable[..., Any]:
        """The flag as IPython's `@argument`."""
        example = f" Example: {self.name} {self.examples[0]}" if self.examples else ""
        settings = {"help": (self.help + example).replace("%", "%%")}
        if self.metavar:
            settings["metavar"] = self.metavar
            settings["action"] = "append" if self.name in REPEATED else "store"
        else:
            settings["action"] = "store_true"
        decorated: Callable[..., Any] = argument(self.name, **settings)
        return decorated


REPEATED = ("--env", "--shared-writes")
"""Flags that may be given more than once."""

FLAGS = (
    Flag(
        "--gpus",
        "N",
        world_sizes,
        f"a whole number from 1 to {MAX_RANKS}, or two such as 8:16",
        "Ranks in all, one a GPU; without GPUs, CPU ranks; A:B starts with A and may grow to B.",
        ("8", "1", "2", "4", "16", "8:16"),
    ),
    Flag(
        "--cpus",
        "M",
        whole(0),
        "a whole number from 0",
        "CPU hosts that run the registered loaders; 0 (default): the ranks do.",
        ("4", "0", "1", "2", "8"),
    ),
    Flag(
        "--units",
        "K",
        count,
        "a whole number from 1, such as 20480000, 20_480_000, 20M or 1.5G",
        "Bound on the units (batches) that all ranks together are given.",
        ("20M", "10K", "1_000_000"),
    ),
    Flag(
        "--pool",
        "NAME",
        str,
        "the name of a pool",
        "Where the ranks run; default local: this machine; see %taas pools.",
        ("g2.8",),
    ),
    Flag(
        "--data-pool",
        "NAME",
        str,
        "the name of a pool",
        'Where fetchers run; default: the pool with role = "data", else that of the ranks.',
        ("c1.4",),
    ),
    Flag(
        "--prefill",
        "SIZE",
        prefill,
        "a size such as 500MB, a number of batches, or all (with --units)",
        "What fetchers must have ready before ranks start; default: both start together.",
        ("500MB", "200", "all"),
    ),
    Flag(
        "--uneven-hosts",
        "",
        bool,
        "",
        "Let hosts have different numbers of ranks, where they do not divide evenly.",
    ),
    Flag(
        "--out",
        "NAMES",
        names,
        "names of variables with commas between, such as model,history",
        "Variables that rank 0 sends back into the notebook.",
        ("model,history",),
    ),
    Flag(
        "--name",
        "TEXT",
        str,
        "a text; in quotes where it has spaces",
        "What the run is called in lists.",
        ('"first try"',),
    ),
    Flag(
        "--max-restarts",
        "R",
        whole(0),
        "a whole number from 0",
        "How often all ranks may start again after one died; default 0.",
        ("2", "1", "5"),
    ),
    Flag(
        "--timeout",
        "T",
        duration_s,
        "a time above 0, such as 90, 90s, 5m or 2h",
        "Ends the run after so long.",
        ("2h", "90s", "30m"),
    ),
    Flag(
        "--env",
        "KEY=VALUE",
        variable,
        "KEY=VALUE, in quotes where it has spaces",
        "An environment variable of the ranks; may be repeated.",
        ("OMP_NUM_THREADS=2", "NCCL_DEBUG=INFO"),
    ),
    Flag(
        "--logs",
        "RANKS",
        ranks,
        "all, or ranks such as 0,2-5",
        "Whose lines the notebook shows; all (default) or some.",
        ("0,2-5", "all", "0"),
    ),
    Flag(
        "--store",
        "PATH",
        str,
        "a folder",
        "The project store, where rank 0 writes; default: taas.toml's, else the notebook's folder.",
        ("results",),
    ),
    Flag(
        "--store-writes",
        "RULE",
        one_of(*WRITES),
        " or ".join(WRITES),
        "Other ranks' writes to the store: kept from it in silence (discard, default) or an error.",
        WRITES[::-1],
    ),
    Flag(
        "--shared-writes",
        "PATH",
        str,
        "a folder in the project store",
        "A folder of the store that all ranks write, for sharded checkpoints; may be repeated.",
        ("checkpoints",),
    ),
    Flag(
        "--dry-run",
        "",
        bool,
        "",
        "Print what would run and what would travel, and start nothing.",
    ),
)

BY_NAME = {flag.name: flag for flag in FLAGS}
