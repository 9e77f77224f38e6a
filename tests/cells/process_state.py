"""Settings of the notebook's process, asserts that ranks have them too, and their reset."""

import sys

kernels_argv = list(sys.argv)

# %%
import logging
import multiprocessing
import sys
import threading
import time
import warnings

import matplotlib
import numpy
import torch

warnings.filterwarnings("ignore", message="of no interest", category=UserWarning)


class Ours(UserWarning):
    pass


warnings.simplefilter("ignore", Ours)
form = "<%(name)s|%(asctime)s|%(message)s>"
logging.basicConfig(level=logging.INFO, format=form, datefmt="%Y", stream=sys.stdout)
logging.getLogger("matplotlib").setLevel(logging.ERROR)


def of_1970(seconds):
    return time.gmtime(0)


logging.root.handlers[0].formatter.converter = lambda seconds: of_1970(seconds)
untold = logging.StreamHandler(sys.stdout)
untold.setFormatter(logging.Formatter("never %(message)s"))
untold.formatter.converter = threading.Lock().__enter__
logging.root.addHandler(untold)
own = logging.getLogger("experiment")
own.setLevel(logging.DEBUG)
own.propagate = False
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(logging.Formatter("own %(message)s"))
own.addHandler(handler)
sys.argv = ["train.py", "--lr", "0.1"]
sys.setrecursionlimit(4321)
multiprocessing.set_start_method("spawn", force=True)
numpy.set_printoptions(precision=3, suppress=True)
numpy.seterr(divide="raise")
matplotlib.rcParams["lines.linewidth"] = 7
matplotlib.rcParams["axes.prop_cycle"] = matplotlib.cycler(color=["red", "blue"])  # type: ignore[attr-defined]
torch.set_default_dtype(torch.float64)
torch.set_float32_matmul_precision("medium")
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cudnn.benchmark = True
torch.set_grad_enabled(False)
torch.multiprocessing.set_sharing_strategy("file_system")
torch.set_default_device("meta")
torch.manual_seed(7)

# %%
import logging
import multiprocessing
import sys
import warnings

import numpy
import torch

logging.info("hello")
logging.getLogger("experiment").debug("hello")
warnings.warn("of no interest", stacklevel=1)
warnings.warn("told", stacklevel=1)
assert logging.root.level == logging.INFO and len(logging.root.handlers) == 1
assert not logging.getLogger("matplotlib").isEnabledFor(logging.WARNING)
assert sys.argv == ["train.py", "--lr", "0.1"] and sys.getrecursionlimit() == 4321
assert multiprocessing.get_start_method() == "spawn"
assert str(numpy.array([1.23456e-9, 2.0])) == "[0. 2.]" and numpy.geterr()["divide"] == "raise"
rc = sys.modules["matplotlib"].rcParams
assert rc["lines.linewidth"] == 7 and rc["axes.prop_cycle"].by_key() == {"color": ["red", "blue"]}
assert "inline" in rc["backend"], rc["backend"]
assert torch.ones(1).dtype == torch.float64 and torch.ones(1).device.type == "meta"
assert torch.get_float32_matmul_precision() == "medium"
assert torch.get_deterministic_debug_mode() == 1 and torch.backends.cudnn.benchmark
assert not torch.is_grad_enabled()
assert torch.multiprocessing.get_sharing_strategy() == "file_system"
assert torch.initial_seed() == 7
drawn = torch.rand(3, device="cpu").tolist()
print("drawn", drawn)
empty = torch.ones(0, device="cpu")

# %%
torch.set_default_device("cpu")
torch.set_default_dtype(torch.float32)
torch.seed()
torch.set_grad_enabled(True)
torch.use_deterministic_algorithms(False)
torch.multiprocessing.set_sharing_strategy("file_descriptor")
multiprocessing.set_start_method(None, force=True)
numpy.seterr(divide="warn")
sys.argv = kernels_argv
