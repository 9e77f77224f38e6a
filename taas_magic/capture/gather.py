"""Picks the notebook's values that travel, in the order in which they can be loaded."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from taas_magic.capture.bytecode import code_use
from taas_magic.capture.culprit import refusal, type_name
from taas_magic.capture.names import THE_CELL, why_used_by
from taas_magic.capture.pickling import ValuePickler
from taas_magic.errors import CaptureError

_MODULE_NAMES = {"__name__", "__doc__", "__package__", "__loader__", "__spec__"}
_MODULE_NAMES |= {"__builtin__", "__builtins__", "__annotations__"}
_HISTORY = {"_ih", "_oh", "_dh"}
_SHELL_NAMES = {"get_ipython", "exit", "quit", "open", "display"}
_INPUT = re.compile(r"_i{1,3}|_i\d+")
_OUTPUT = re.compile(r"_{1,3}|_\d+")


@dataclass(frozen=True)
class Captured:
    """One notebook name that travels: its share of the payload in bytes, and why it travels."""

    name: str
    size_bytes: int
    why: str
    type_name: str


class Gathering:
    """Pickles names one after the other, each after the names that its functions need."""

    def __init__(self, namespace: dict[str, Any], problems: list[str] | None = None) -> None:
        self.pickler = ValuePickler(namespace)
        self.captured: list[Captured] = []
        self.modules: list[ModuleType] = []
        self._namespace = namespace
        self._problems = problems
        self._met: set[str] = set()

    def take(self, names: Mapping[str, str]) -> None:
        for name, why in names.items():
            if name in self._met or not self._travels(name):
                continue
            self._met.add(name)
            try:
                self._add(name, why)
            except CaptureError as error:
                if self._problems is None:
                    raise
                self._problems.append(str(error))

    def _add(self, name: str, why: str) -> None:
        """Code that runs while a value is loaded (`__setstate__`, `__hash__`) finds its globals:
        where pickling shows that others are needed, those are put before it."""
        value = self._namespace[name]
        if isinstance(value, FunctionType) and value.__globals__ is self._namespace:
            self.take(dict.fromkeys(sorted(code_use(value.__code__).names), why_used_by(name)))
        with self.pickler.undoing() as undo:
            size_bytes, needs = self._pickle(name, value, why)
            missing = [need for need in needs if need not in self._met and self._travels(need)]
            if missing:
                undo()
        if missing:
            self.take(dict.fromkeys(missing, why_used_by(name)))
            size_bytes, _ = self._pickle(name, value, why)
        self.captured.append(Captured(name, size_bytes, why, type_name(value)))
        if isinstance(value, ModuleType):
            self.modules.append(value)

    def _pickle(self, name: str, value: Any, why: str) -> tuple[int, list[str]]:
        self.pickler.needs.clear()
        try:
            return self.pickler.add(value), list(self.pickler.needs)
        except Exception as error:
            note = "" if why == THE_CELL else why
            raise refusal(name, value, self.pickler.probe, error, note) from error

    def _travels(self, name: str) -> bool:
        return name in self._namespace and not belongs_to_ipython(name, self._namespace)


def belongs_to_ipython(name: str, namespace: Mapping[str, Any]) -> bool:
    """Whether a name is the shell's or the module's own, and not one that the user has rebound."""
    value = namespace[name]
    if name in _MODULE_NAMES or name in _HISTORY:
        return True
    if name in _SHELL_NAMES:
        return any(owner.partition(".")[0] in ("IPython", "ipykernel") for owner in _owners(value))
    if name in ("In", "Out"):
        return value is namespace.get("_ih" if name == "In" else "_oh")
    if _INPUT.fullmatch(name):
        return isinstance(value, str) and (not value or value in namespace.get("_ih", ()))
    if _OUTPUT.fullmatch(name):
        shown = namespace.get("_oh", {}).values()
        return any(value is item for item in shown) or (isinstance(value, str) and not value)
    return False


def _owners(value: Any) -> list[str]:
    """Modules that a value may come from; IPython's `open` calls itself `io`'s."""
    scope = getattr(value, "__globals__", {})
    names = (getattr(value, "__module__", ""), type(value).__module__, scope.get("__name__"))
    return [name for name in names if isinstance(name, str)]
