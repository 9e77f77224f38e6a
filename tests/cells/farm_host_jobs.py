"""Functions that run as jobs of a farm on hosts that share no files."""

# %%
import os
import socket
import time

import numpy  # noqa: F401
from scaling import scale  # type: ignore[import-not-found]

import taas


class Solution:
    def __init__(self, value, host):
        self.value, self.host = value, host


def train(x):
    with open("data.txt") as file:
        more = len(file.read())
    print("training", x, flush=True)
    taas.save(x, "models/model.pt")
    with open("stray.txt", "w") as stray:
        stray.write("not for the store")
    return Solution(scale(x) + more, socket.gethostname())


def meet(x, limit_s=0.2):
    time.sleep(limit_s)
    return socket.gethostname()


def total(array, go):
    print("begun", flush=True)
    while not os.path.exists(go):
        time.sleep(0.1)
    array[0] = 1
    return float(array.sum()), socket.gethostname()


def wait_while(name, value):
    print("begun", flush=True)
    while os.environ[name] == value:
        time.sleep(0.1)
    return os.environ[name]


def variable(name):
    return os.environ[name]
