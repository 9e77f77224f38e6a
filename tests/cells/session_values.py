"""Values of a notebook for a session: some share objects, and one changes when it is pickled."""

# %%
import array
import collections
import functools
import itertools

import torch


class Cfg:
    lr = 0.1

    def double(self):
        return 2 * self.lr


class Agent:
    def __init__(self, **parts):
        self.eps = 1.0
        vars(self).update(parts)


class Slotted:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0


class Caching:
    def __init__(self):
        self.n = 0

    def __getstate__(self):
        state = dict(vars(self))
        self.cache = 1
        return state


slotted = Slotted()
caching = Caching()
replay, numbers, count = collections.deque(), array.array("i"), itertools.count()
agent = Agent(replay=replay, numbers=numbers, count=count, slotted=slotted)
weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], 1.0)


def loss(params=weight):
    return params.sum()


conf = {"loss": loss}
net = Agent(act=functools.partial(max, 0), seen=0)
