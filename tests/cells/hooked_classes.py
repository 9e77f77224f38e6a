"""Classes whose creation runs code of the notebook, and asserts about their copies in ranks."""

# %%
import abc
import collections.abc
import dataclasses
import typing

made = []


class Base:
    key = ""

    def __init_subclass__(cls, *, key):
        made.append(key)
        cls.key = key


class Named(Base, key="named"):
    pass


class Checked(Base, key="checked"):
    rate = 0

    def __init_subclass__(cls):
        super().__init_subclass__(key="below")
        assert cls.rate > 0


class Checks(abc.ABCMeta):
    def __new__(meta, name, bases, attributes, *, key):
        made.append(attributes["key"])
        return super().__new__(meta, name, bases, attributes)

    def __init__(cls, name, bases, attributes, *, key):
        made.append(key)


T = typing.TypeVar("T")


class Below(Checked, typing.Generic[T]):
    rate = 1


class Counted(collections.abc.Sized, typing.Generic[T], metaclass=Checks, key="again"):
    key = "own"

    def __len__(self):
        return 3

    @dataclasses.dataclass
    class Options:
        rate: float = 0.5


# %%
import contextlib
import pickle

assert (Named.key, Below.key, Counted.key, len(Counted())) == ("named", "below", "own", 3)
assert made == ["named", "checked", "below", "own", "again"], made
assert typing.get_origin(Counted[int]) is Counted and typing.get_args(Counted[int]) == (int,)
assert type(Counted) is Checks and isinstance(Counted(), collections.abc.Sized)
options = pickle.loads(pickle.dumps(Counted.Options()))
assert repr(options) == "Counted.Options(rate=0.5)", options


class Later(Base, key="later"):
    pass


assert made[-1] == Later.key == "later"
with contextlib.suppress(AssertionError):

    class Wrong(Checked):
        pass


assert made[-1] == "below" and "Wrong" not in globals()
