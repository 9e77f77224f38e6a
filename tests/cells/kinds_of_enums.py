"""Enums of several kinds, and asserts about their copies in ranks."""

# %%
import dataclasses
import enum


class Shade(enum.Enum):
    RED = 1
    CRIMSON = 1


class Perm(enum.Flag):
    R = 1
    W = 2
    RW = 3


class Level(int, enum.Enum):
    def __new__(cls, number, name):
        level = int.__new__(cls, number)
        level._value_ = name
        return level

    LOW = 1, "low"
    HIGH = 2, "high"
    TOP = 2, "high"


@dataclasses.dataclass
class Creature:
    size: str
    legs: int = 4


class Animal(Creature, enum.Enum):
    BEETLE = "small", 6


as_member = getattr(enum, "member", lambda function: (function,))  # new in Python 3.11


class Operation(enum.Enum):
    SQUARE = as_member(lambda x: x * x)
    NONE = float("nan")


both, level = Perm.RW, Level.HIGH
square, none, neither = Operation.SQUARE, Operation.NONE, Perm.R & Perm.W

# %%
assert Shade["CRIMSON"] is Shade["RED"] is Shade(1) and len(Shade) == 1
assert Perm.R | Perm.W == Perm.RW is both is Perm(3) and neither == Perm.R & Perm.W
assert Level["TOP"] is Level["HIGH"] is level and Level.HIGH + 1 == 3 and Level.LOW.value == "low"
assert Animal.BEETLE.legs == 6 and isinstance(Animal.BEETLE, Creature)
assert list(Operation) == [square, none]
out = "as in the notebook"
