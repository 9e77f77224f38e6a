"""Choose the notebook's variables to send to the ranks of a session.

A name that a cell of the session assigned belongs to the ranks. Every other name belongs to the
notebook. The kernel sends a value of the notebook again if the digest of its pickle has changed.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from taas_magic.capture.culprit import Destination
from taas_magic.capture.digest import plain_digest
from taas_magic.capture.names import THE_CELL, UsedNames, reason_used_by
from taas_magic.capture.pickling import Pickled, ValuePickler
from taas_magic.errors import CaptureError

_STATE = "<state of the process>"
_LISTED = 5


@dataclass(frozen=True)
class SentValue:
    """Record of a value that was sent to the ranks.

    Attributes:
        shared: Ids of the objects in the value that other variables may also hold.
    """

    digest: bytes
    shared: frozenset[int] = frozenset()


@dataclass
class VariablesToSend:
    """Variables and settings of the notebook that are sent for one cell of a session.

    Attributes:
        why: Reason for each name that is sent.
        state: Process state of the notebook; empty if the ranks have it already.
        reads: Names that the code of each function or class of the cell reads, by function or
            class.
    """

    why: dict[str, str] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    sent: dict[str, SentValue] = field(default_factory=dict)
    reads: Mapping[str, frozenset[str]] = field(default_factory=dict)


class RankVariables:
    """The kernel's record of the variables that a session's ranks have.

    Attributes:
        owned: Digest (`plain_digest`) of each variable that a cell assigned, by name; "" for a
            variable that is not plain. If several ranks reported the variable, the lowest rank
            counts.
    """

    def __init__(self) -> None:
        self.owned: dict[str, str] = {}
        self._sent: dict[str, SentValue] = {}
        """Values of the notebook that the ranks have, by name."""

        self._reads: dict[str, frozenset[str]] = {}
        """Names that each function or class of an earlier cell reads when its code runs."""

        self._announced: dict[str, object] = {}
        """Digest or id of each notebook value that a line for the user has named, by name."""

        self._returned: dict[str, int] = {}
        """Id of the notebook's object for each name that `--out` returned."""

        self._code: set[str] = set()
        """Functions, classes and modules that the ranks had when this kernel took them over."""

    @property
    def all(self) -> set[str]:
        """All names that the ranks have."""
        return {*self.owned, *self._code, *(name for name in self._sent if name != _STATE)}

    def assume_state(self, state: dict[str, Any]) -> None:
        """Record that the ranks have the notebook's process state. Only changes are sent later."""
        self._sent[_STATE] = SentValue(_digest_of(_pickled(state)))

    def take_over(self, variables: Mapping[str, str], code: Iterable[str]) -> None:
        """Record the variables of the ranks when this kernel takes over another kernel's session.

        Args:
            variables: Digests of the ranks' variables, as in `owned`.
            code: Names of the ranks' functions, classes and modules. If a cell uses such a name,
                the notebook sends its own object of this name.
        """
        self.owned |= variables
        self._code = set(code)

    def choose(
        self,
        used: UsedNames,
        namespace: dict[str, Any],
        state: dict[str, Any],
        *,
        send: Iterable[str],
        to: Destination,
        is_user_variable: Callable[[str], bool],
        refuse: Callable[[CaptureError], None],
    ) -> VariablesToSend:
        """Choose the variables of the notebook to send for a cell.

        The candidates are the variables that the cell uses, and the variables that these need. A
        candidate is sent if the ranks lack it, if its value has changed, or if it is a module or in
        `send`. Candidates that share an object with a sent variable are sent, too, and so is a
        changed process state. When the ranks have received the result, the caller must call
        `record_sent`.

        Args:
            send: Names whose values are sent although cells have assigned them (`--send`).
            is_user_variable: Returns whether a name is a variable of the user. Other names are
                skipped.
            refuse: Called with the error of each value that cannot be sent.
        """
        choice = VariablesToSend(reads=used.definitions)
        forced = set(send)
        needed, kept = self._pickle_needed(
            self._wanted(used, forced), forced, namespace, to, is_user_variable, refuse
        )
        changed = {
            name
            for name, (sent, _) in needed.items()
            if name in forced or not self._is_at_ranks(name, sent) or _is_module(namespace[name])
        }
        changed = _with_sharers(changed, {name: sent for name, (sent, _) in needed.items()})
        choice.why = {name: needed[name][1] for name in reversed(needed) if name in changed}
        choice.sent = {name: needed[name][0] for name in choice.why}
        state_sent = SentValue(_digest_of(_pickled(state)))
        if not self._is_at_ranks(_STATE, state_sent):
            choice.state, choice.sent[_STATE] = state, state_sent
        choice.notes = self._notes(choice, kept, namespace, forced)
        return choice

    def _wanted(self, used: UsedNames, forced: set[str]) -> dict[str, str]:
        """Return the reason for each name in `--send`, and for each name that the cell reads.

        The cell may call functions that earlier cells have defined in the ranks. So if the cell
        reads any name that belongs to the ranks, also return the names that these functions read.
        """
        wanted = {**dict.fromkeys(forced, THE_CELL), **used.why}
        if any(name in self.owned for name in used.why):
            for name, reads in self._reads.items():
                for read in reads:
                    wanted.setdefault(read, reason_used_by(name))
        return wanted

    def _pickle_needed(
        self,
        wanted: dict[str, str],
        forced: set[str],
        namespace: dict[str, Any],
        to: Destination,
        is_user_variable: Callable[[str], bool],
        refuse: Callable[[CaptureError], None],
    ) -> tuple[dict[str, tuple[SentValue, str]], list[str]]:
        """Pickle the wanted variables of the notebook, and the variables that these need.

        Each variable is pickled on its own, only for its digest. A variable that belongs to the
        ranks is not pickled unless it is in `forced`. The errors go to `refuse`.

        Returns:
            The record and the reason of each pickled variable, by name, in the order of pickling.
            And the names that belong to the ranks, but have a new value in the notebook.
        """
        needed: dict[str, tuple[SentValue, str]] = {}
        kept: list[str] = []
        waiting = dict(wanted)
        while waiting:
            name = next(iter(waiting))
            why = waiting.pop(name)
            if name in needed or not is_user_variable(name):
                continue
            if name in self.owned and name not in forced:
                if self._must_tell_user(name, namespace[name]):
                    kept.append(name)
                continue
            try:
                sent, needs = _pickle_value(name, namespace, to)
            except CaptureError as error:
                refuse(error)
                continue
            needed[name] = sent, why
            waiting |= {need: reason_used_by(name) for need in needs if need not in waiting}
        return needed, kept

    def record_sent(self, choice: VariablesToSend) -> None:
        """Record that all ranks have received the variables in `choice`.

        These names belong to the notebook from now on. A variable sent earlier may share an object
        with the values in `choice`. Because the ranks now have a second copy of this object, the
        record of the earlier variable is removed.
        """
        fresh = frozenset[int]().union(*(sent.shared for sent in choice.sent.values()))
        for name, sent in list(self._sent.items()):
            if name not in choice.sent and sent.shared & fresh:
                del self._sent[name]  # the ranks have a new copy of an object in this value
        for name, sent in choice.sent.items():
            self._sent[name] = sent
            self.owned.pop(name, None)

    def record_changes(
        self,
        choice: VariablesToSend,
        assigned: Iterable[str],
        deleted: Iterable[str],
        plain: Mapping[str, str],
    ) -> None:
        """Record the variables that a cell assigned and deleted on a rank.

        Assigned names belong to the ranks from now on. Deleted names are forgotten.

        Args:
            plain: Digests (`plain_digest`) of those assigned values that are plain.
        """
        for name in deleted:
            for known in (self.owned, self._sent, self._reads):
                known.pop(name, None)
        for name in assigned:
            self.owned[name] = plain.get(name, "")
            self._sent.pop(name, None)
            self._returned.pop(name, None)
            self._reads[name] = choice.reads.get(name, frozenset())

    def record_returned(self, values: Mapping[str, Any]) -> None:
        """Record that the notebook received the ranks' values of these names (`--out`)."""
        self._returned |= {name: id(value) for name, value in values.items()}

    def _is_at_ranks(self, name: str, sent: SentValue) -> bool:
        known = self._sent.get(name)
        return known is not None and known.digest == sent.digest

    def _must_tell_user(self, name: str, value: Any) -> bool:
        """Return whether to tell the user that the notebook's value differs from the ranks' value.

        Later calls with the same value return False. Also False for a module, for an object that
        `--out` returned, and for a plain value that is equal at the ranks.
        """
        if _is_module(value) or self._returned.get(name) == id(value):
            return False
        digest = plain_digest(value)
        if digest and digest == self.owned[name]:
            return False
        seen = digest or id(value)
        is_news = self._announced.get(name) != seen
        self._announced[name] = seen
        return is_news

    def _notes(
        self, choice: VariablesToSend, kept: list[str], namespace: dict[str, Any], forced: set[str]
    ) -> list[str]:
        """Return notes for the user about variables that are not sent, or are sent again.

        Args:
            kept: Names that belong to the ranks, but have a new value in the notebook.
            forced: Names in `--send`; there are no notes about them.
        """
        notes = []
        if kept:
            values = "its value" if len(kept) == 1 else "their values"
            notes.append(
                f"cells of this session assigned {_listed(kept)}, so the ranks keep {values}; "
                f"`--send {','.join(kept)}` sends the notebook's"
            )
        again = [
            name
            for name in choice.why
            if name in self._sent and name not in forced and not _is_module(namespace[name])
        ]
        if again:
            notes.append(f"changed in the notebook and sent again: {_listed(again)}")
        return notes


def _pickle_value(
    name: str, namespace: dict[str, Any], to: Destination
) -> tuple[SentValue, list[str]]:
    """Pickle one variable on its own, for its digest and the names that it needs.

    Raises:
        CaptureError: An object in the value cannot be sent.
    """
    pickler = ValuePickler(namespace, to)
    pickler.coming[name] = namespace[name]
    pickler.pickle_variable(name, namespace[name])
    loaders = [packed.payload for packed in pickler.replaced.values()]
    digest = _digest_of(pickler.pickled(), loaders)
    return SentValue(digest, frozenset(pickler.shared_ids())), list(pickler.needs)


def _pickled(value: Any) -> Pickled:
    pickler = ValuePickler({})
    pickler.add(value)
    return pickler.pickled()


def _digest_of(pickled: Pickled, more: Iterable[bytes] = ()) -> bytes:
    found = hashlib.sha256(pickled.data)
    for buffer in pickled.buffers:
        found.update(buffer.raw())
    for part in more:
        found.update(part)
    return found.digest()


def _with_sharers(names: set[str], sent: Mapping[str, SentValue]) -> set[str]:
    """Return `names`, and the names of all values that share an object with the values of `names`.

    Values are sent together so that the ranks' values share the object, too. Sharing may be
    indirect: `a` with `b`, and `b` with `c`.
    """
    found = set(names)
    while True:
        held = frozenset[int]().union(*(sent[name].shared for name in found))
        more = {name for name, one in sent.items() if name not in found and one.shared & held}
        if not more:
            return found
        found |= more


def _is_module(value: Any) -> bool:
    return isinstance(value, ModuleType)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(f"`{name}`" for name in names[:_LISTED]) + more
