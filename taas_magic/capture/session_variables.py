"""Choose the notebook's variables to send to the ranks of a session.

If a cell of the session has assigned a name, the name *belongs to the ranks*: the kernel does not
send the notebook's value of this name, except by `--send`. Every other name belongs to the
notebook. The kernel sends a value of the notebook again if the digest of its pickle has changed.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from taas_magic.capture.culprit import Destination
from taas_magic.capture.digest import simple_digest
from taas_magic.capture.modules import ModuleSource
from taas_magic.capture.names import THE_CELL, UsedNames, reason_used_by
from taas_magic.capture.pickling import Pickled, ValuePickler, group_sharers
from taas_magic.errors import CaptureError, listed

_STATE = "<state of the process>"
_HASH_BYTES = hashlib.sha256().digest_size
_LISTED = 5
_DELETED = object()


@dataclass(frozen=True)
class SentValue:
    """Record of a value that was sent to the ranks.

    Attributes:
        number: Number of the cell for which the value was sent. Values that were sent for the same
            cell share the same objects in the ranks as in the notebook.
    """

    digest: bytes
    number: int


@dataclass(frozen=True)
class _Candidate:
    """A pickled variable of the notebook, which the ranks may already have.

    Attributes:
        why: Reason why the variable is needed.
        needs: Names of the variables, functions and classes that the value needs.
        shared: Objects in the value that other variables may also contain, by id.
    """

    digest: bytes
    why: str
    needs: Sequence[str]
    shared: Mapping[int, Any]


@dataclass
class VariablesToSend:
    """Variables and settings of the notebook that are sent for one cell of a session.

    Attributes:
        why: Reason for each name that is sent.
        state: Process state of the notebook; empty if the ranks have it already.
        at_ranks: Names of functions and classes that are not sent because the ranks have them, by
            id.
        updated: Ids of the classes that are sent.
        digests: Digests of the sent values, by name, and of the process state if it is sent.
        reads: Names that the code of each function or class of the cell reads, by function or
            class.
        modules: Sources of the project's modules that are sent, by name.
    """

    why: dict[str, str] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    digests: dict[str, bytes] = field(default_factory=dict)
    at_ranks: dict[int, str] = field(default_factory=dict)
    updated: set[int] = field(default_factory=set)
    reads: Mapping[str, frozenset[str]] = field(default_factory=dict)
    modules: Mapping[str, ModuleSource] = field(default_factory=dict)


class RankVariables:
    """The kernel's record of the variables that a session's ranks have.

    Attributes:
        owned: Digest (`simple_digest`) of each variable that a cell assigned, by name; "" for a
            variable that is not simple. If several ranks reported the variable, the lowest rank
            counts.
        modules: Sources of the project's modules that the ranks got from this kernel, by name.
    """

    def __init__(self) -> None:
        self.owned: dict[str, str] = {}
        self.modules: dict[str, ModuleSource] = {}
        self._sent: dict[str, SentValue] = {}
        """Values of the notebook that the ranks have, by name."""

        self._n_cells = 0
        """Number of cells for which values were sent."""

        self._reads: dict[str, frozenset[str]] = {}
        """Names that each function or class of an earlier cell reads when its code runs."""

        self._announced: dict[str, object] = {}
        """The last value that a note reported for each variable, by name.

        The digest or id of the notebook's value; `_DELETED` if the notebook deleted the variable.
        """

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
        self._sent[_STATE] = SentValue(_digest_of(_pickled(state)), 0)

    def take_over(self, variables: Mapping[str, str], code: Iterable[str]) -> None:
        """Record the variables of the ranks when this kernel takes over another kernel's session.

        Args:
            variables: Digests of the ranks' variables, as in `owned`.
            code: Names of the ranks' functions, classes and modules, which have no digests. If a
                cell uses such a name and the notebook has an object of this name, this kernel sends
                its object, which replaces the object of the ranks.
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

        The candidates are the variables that the cell uses, and the variables that these need.
        Names that belong to the ranks are no candidates unless they are in `send`. A candidate is
        sent if the ranks lack it, if its value has changed, or if it is a module or in `send`. A
        group of candidates that share an object is sent as a whole if one of them is sent, or if
        they were sent for different cells: the ranks then have several copies of the object. A
        changed process state is sent, too. When the ranks have received the result, the caller must
        call `record_sent`.

        Args:
            send: Names whose values are sent although cells have assigned them (`--send`).
            is_user_variable: Returns whether a name is a variable of the user. Other names are
                skipped.
            refuse: Called with the error of each value that cannot be sent.
        """
        choice = VariablesToSend(reads=used.definitions)
        forced = set(send)
        wanted = self._wanted(used, forced)
        needed, kept = self._pickle_needed(wanted, forced, namespace, to, is_user_variable, refuse)
        changed = {
            name
            for name, one in needed.items()
            if name in forced
            or not self._is_at_ranks(name, one.digest)
            or _is_module(namespace[name])
        }
        for group in group_sharers(_shared_ids(needed, namespace)):
            is_changed = not changed.isdisjoint(group)
            if is_changed or len({self._sent[name].number for name in group}) > 1:
                changed.update(group)
        choice.why = {name: needed[name].why for name in reversed(needed) if name in changed}
        for name in choice.why:
            # The first pickling may have changed the value, for example by filling a cache.
            again = _pickle_value(name, namespace, to, "", hashes_buffers=False)
            choice.digests[name] = again.digest[:_HASH_BYTES] + needed[name].digest[_HASH_BYTES:]
        for name in needed:
            if isinstance(namespace[name], type | FunctionType) and name not in changed:
                choice.at_ranks[id(namespace[name])] = name
            elif isinstance(namespace[name], type):
                choice.updated.add(id(namespace[name]))
        state_digest = _digest_of(_pickled(state))
        if not self._is_at_ranks(_STATE, state_digest):
            choice.state, choice.digests[_STATE] = state, state_digest
        deleted = self._deleted(wanted, namespace)
        choice.notes = self._notes(choice, kept, deleted, namespace, forced)
        return choice

    def _wanted(self, used: UsedNames, forced: set[str]) -> dict[str, str]:
        """Return the names that the cell needs, each with the reason for the need.

        These are the names in `--send`, and the names that the cell reads. The cell may call
        functions that earlier cells have defined in the ranks. So if the cell reads any name that
        belongs to the ranks, also return the names that these functions read.
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
    ) -> tuple[dict[str, _Candidate], list[str]]:
        """Pickle the wanted variables of the notebook, and the variables that these need.

        Each variable is pickled on its own, only for its digest. A variable that belongs to the
        ranks is not pickled unless it is in `forced`. The errors go to `refuse`.

        Returns:
            The record and the reason of each pickled variable, by name, in the order of pickling.
            And the names that belong to the ranks, but have a new value in the notebook.
        """
        needed: dict[str, _Candidate] = {}
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
                needed[name] = _pickle_value(name, namespace, to, why)
            except CaptureError as error:
                refuse(error)
                continue
            needs = needed[name].needs
            waiting |= {need: reason_used_by(name) for need in needs if need not in waiting}
        return needed, kept

    def record_sent(self, choice: VariablesToSend) -> None:
        """Record that all ranks have received the variables and modules in `choice`.

        The variables' names belong to the notebook from now on.
        """
        self._n_cells += 1
        self.modules |= choice.modules
        for name, digest in choice.digests.items():
            self._sent[name] = SentValue(digest, self._n_cells)
            self.owned.pop(name, None)
            self._announced.pop(name, None)

    def record_changes(
        self,
        choice: VariablesToSend,
        assigned: Iterable[str],
        deleted: Iterable[str],
        digests: Mapping[str, str],
    ) -> None:
        """Record the variables that a cell assigned and deleted on a rank.

        From now on, the assigned names belong to the ranks, and the kernel does not send its own
        values of these names. The deleted names are forgotten.

        Args:
            digests: Digest (`simple_digest`) of each assigned variable that has a simple value, by
                name.
        """
        for name in deleted:
            for known in (self.owned, self._sent, self._reads):
                known.pop(name, None)
        for name in assigned:
            self.owned[name] = digests.get(name, "")
            self._sent.pop(name, None)
            self._returned.pop(name, None)
            self._reads[name] = choice.reads.get(name, frozenset())

    def record_returned(self, values: Mapping[str, Any]) -> None:
        """Record that the notebook received the ranks' values of these names (`--out`)."""
        self._returned |= {name: id(value) for name, value in values.items()}

    def _is_at_ranks(self, name: str, digest: bytes) -> bool:
        known = self._sent.get(name)
        return known is not None and known.digest == digest

    def _deleted(self, wanted: Iterable[str], namespace: Mapping[str, Any]) -> list[str]:
        """Return the wanted names that were sent and that the notebook has deleted since.

        Later calls do not return a name again until its value has been sent again.
        """
        found = [
            name
            for name in wanted
            if name in self._sent
            and name not in namespace
            and self._announced.get(name) is not _DELETED
        ]
        self._announced |= dict.fromkeys(found, _DELETED)
        return found

    def _must_tell_user(self, name: str, value: Any) -> bool:
        """Return whether to tell the user that the notebook's value differs from the ranks' value.

        Later calls with the same value return False. Also False for a module, for an object that
        `--out` returned, and for a simple value that is equal at the ranks.
        """
        if _is_module(value) or self._returned.get(name) == id(value):
            return False
        digest = simple_digest(value)
        if digest and digest == self.owned[name]:
            return False
        seen = digest or id(value)
        is_news = self._announced.get(name) != seen
        self._announced[name] = seen
        return is_news

    def _notes(
        self,
        choice: VariablesToSend,
        kept: list[str],
        deleted: list[str],
        namespace: dict[str, Any],
        forced: set[str],
    ) -> list[str]:
        """Return notes for the user about variables that are not sent, or are sent again.

        Args:
            kept: Names that belong to the ranks, but have a new value in the notebook.
            deleted: Names that the notebook has deleted, but that the ranks have.
            forced: Names in `--send`; there are no notes about them.
        """
        notes = []
        if kept:
            values = "its value" if len(kept) == 1 else "their values"
            notes.append(
                f"cells of this session assigned {_quoted(kept)}, so the ranks keep {values}; "
                f"`--send {','.join(kept)}` sends the notebook's"
            )
        if deleted:
            them = "it" if len(deleted) == 1 else "them"
            notes.append(
                f"deleted in the notebook, but not in the ranks: {_quoted(deleted)}; "
                f"`del {', '.join(deleted)}` in a cell of this session deletes {them} there, too"
            )
        again = [
            name
            for name in choice.why
            if name in self._sent and name not in forced and not _is_module(namespace[name])
        ]
        if again:
            notes.append(f"changed in the notebook and sent again: {_quoted(again)}")
        return notes


def _pickle_value(
    name: str,
    namespace: dict[str, Any],
    to: Destination,
    why: str,
    *,
    hashes_buffers: bool = True,
) -> _Candidate:
    """Pickle one variable on its own, and return its record.

    Args:
        why: Reason why the variable is needed.
        hashes_buffers: Whether the digest includes the memory of arrays and tensors.

    Raises:
        CaptureError: An object in the value cannot be sent.
    """
    pickler = ValuePickler(namespace, to)
    pickler.is_digest = True
    pickler.coming[name] = namespace[name]
    pickler.pickle_variable(name, namespace[name])
    loaders = [packed.payload for packed in pickler.replaced.values()]
    pickled = pickler.pickled()
    buffers = pickled.buffers if hashes_buffers else ()
    digest = _digest_of(Pickled(pickled.data, buffers), loaders)
    return _Candidate(digest, why, list(pickler.needs), pickler.shared_objects())


def _shared_ids(
    needed: Mapping[str, _Candidate], namespace: Mapping[str, Any]
) -> dict[str, set[int]]:
    """Return the ids of the objects in each candidate that other variables may also contain.

    The pickle of a value includes the functions and classes that the value needs. Their objects are
    left out, because all instances of a class would share them. Instances in the ranks have one
    class even if they were sent for different cells (`reducers.reduce_by_value`).
    """
    definitions = {
        name: set(one.shared)
        for name, one in needed.items()
        if isinstance(namespace[name], type | FunctionType)
    }
    return {
        name: set(one.shared).difference(*(definitions.get(need, ()) for need in one.needs))
        if name not in definitions
        else definitions[name]
        for name, one in needed.items()
    }


def _pickled(value: Any) -> Pickled:
    pickler = ValuePickler({})
    pickler.add(value)
    return pickler.pickled()


def _digest_of(pickled: Pickled, more: Iterable[bytes] = ()) -> bytes:
    """Return two hashes of a pickle: of its data and `more`, and of its buffers."""
    data, buffers = hashlib.sha256(pickled.data), hashlib.sha256()
    for part in more:
        data.update(part)
    for buffer in pickled.buffers:
        buffers.update(buffer.raw())
    return data.digest() + buffers.digest()


def _is_module(value: Any) -> bool:
    return isinstance(value, ModuleType)


def _quoted(names: Sequence[str]) -> str:
    return listed([f"`{name}`" for name in names], _LISTED)
