"""The GPUs of this host."""

import os
import re
from pathlib import Path


def count_gpus() -> int:
    """CUDA devices that a process of this machine would see, without asking CUDA.

    Asking torch would make a CUDA context in the kernel, which no fork of it survives.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    devices = (path.name for path in Path("/dev").glob("nvidia*"))
    return sum(1 for device in devices if re.fullmatch(r"nvidia\d+", device))
