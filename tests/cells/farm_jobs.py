"""Functions that run as jobs of a farm."""

# %%
import multiprocessing
import os
import signal
import subprocess
import sys
import threading  # noqa: F401
import time

import numpy  # noqa: F401
import torch

import taas

SCALE = 3


class Solution:
    def __init__(self, value, pid):
        self.value, self.pid = value, pid


def train(x, *, more=0):
    print("training", x)
    return Solution(x * SCALE + more, os.getpid())


def divide(x):
    return 1 / x


def once(path):
    if not os.path.exists(path):
        open(path, "w").close()
        raise ValueError("the first time")
    return "the second time"


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def save(value):
    taas.save(value, "model.pt")
    with open("stray.txt", "w") as stray:
        stray.write("not for the store")
    return os.path.exists("here.txt")


def leave_stray(number):
    found = os.path.exists("left.txt"), os.path.exists("left-by-os.txt")
    open("left.txt", "w").close()
    os.close(os.open("left-by-os.txt", os.O_WRONLY | os.O_CREAT))
    node = os.path.dirname(os.path.dirname(os.environ["TAAS_SAVES"]))
    return found, sum(name.startswith("scratch-") for name in os.listdir(node))


def total(array):
    array[0] = 1
    return float(array.sum())


def wait(path):
    open(path, "w").close()
    time.sleep(600)


def wait_unless(path):
    if not os.path.exists(path):
        with open(path, "w") as mark:
            mark.write(str(os.getpid()))
        time.sleep(600)
    return "elsewhere"


def fork_and(how):
    child = os.fork()
    if not child and how == "exit":
        sys.exit(3)
    if not child and how == "raise":
        raise ValueError("of the child")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else "the child"


def save_at_second_try(path):
    if not os.path.exists(path):
        open(path, "w").close()
        taas.save(1, "first.pt")
        raise ValueError("the first time")
    taas.save(2, "second-\udce9.pt")


def close_output(how):
    if how == "closed":
        sys.stdout.close()
    else:
        sys.stdout = sys.stderr = None


def mark_with(array, path):
    open(path, "w").close()


def leave_a_child(how, path):
    """Write the pid of a child to `path`; die if `how` says so."""
    leave = os.setsid if how == "another session" else os.setpgrp
    child = subprocess.Popen(["sleep", "600"], preexec_fn=leave)
    with open(path, "w") as file:
        file.write(str(child.pid))
    if how == "another group, and the job dies":
        os.kill(os.getpid(), signal.SIGKILL)


def in_a_pool(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.apply(triple, (2,))


def triple(x):
    return SCALE * x


def default_dtype():
    return str(torch.get_default_dtype())
