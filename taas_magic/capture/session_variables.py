"""Choose the notebook's variables to send to the ranks of a session.

If a cell of the session has assigned a name, the name *belongs to the ranks*: the kernel does not
send the notebook's value of this name, except by `--send`. Every other name belongs to the
notebook. The kernel sends a value of the notebook again if the digest of its pickle has changed.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from taas_magic.capture import process_state
from taas_magic.capture.culprit import Destination
from taas_magic.capture.digest import simple_digest
from taas_magic.capture.home import came_with_result
from taas_magic.capture.modules import ModuleSource
from taas_magic.capture.names import THE_CELL, UsedNames, reason_used_by
from taas_magic.capture.pickling import Pickled, ValuePickler, group_sharers
from taas_magic.errors import CaptureError, listed

_HASH_BYTES = hashlib.sha256().digest_size
_MAX_LISTED = 5
_DELETED = object()


@dataclass(frozen=True)
class SentValue:
    """Record of a value that was sent to the ranks.

    Attributes:
        digest: Digest of the value's pickle.
        number: Number of the cell for which the value was sent. If two values were sent for the
            same cell, they share objects in the ranks, as they do in the notebook.
    """

    digest: bytes
    number: int


@dataclass(frozen=True)
class _Candidate:
    """A notebook variable that a cell of a session needs.

    The kernel sends the variable only if its digest differs from the digest that was sent last.

    Attributes:
        digest: Digest of the value's pickle.
        why: Reason why the cell needs the variable, for messages.
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
        state: Process state of the notebook.
        changed_state: The settings in `state` that the ranks do not have yet. Only these are sent.
        notes: Notes for the user about variables.
        announced: Values of the notebook about which `notes` tells the user, by name of the
            variable. Each entry is the digest or the id of the value, or `_DELETED` if the notebook
            has deleted the variable.
        at_ranks: Names of the functions and classes that are not sent because the ranks have them,
            by id of the function or class.
        dragged: Unchanged variables that are sent again because they share objects with changed
            variables. Each entry has the names of the changed and of the unchanged variables.
        updated: Ids of the classes that are sent. The ranks set the attributes of these classes.
        digests: Digests of the sent values, by name.
        reads: Names that the functions and classes of the cell read when their code runs, by name
            of the function or class.
        needs: Names that the sent values and the lambdas of the cell read when their code runs,
            each with the reason why a later cell may need the variable.
        modules: Sources of the project's modules that are sent, by name.
    """

    why: dict[str, str] = field(default_factory=dict)
    state: process_state.State = field(default_factory=dict)
    changed_state: process_state.State = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    announced: dict[str, object] = field(default_factory=dict)
    digests: dict[str, bytes] = field(default_factory=dict)
    at_ranks: dict[int, str] = field(default_factory=dict)
    dragged: list[tuple[list[str], list[str]]] = field(default_factory=list)
    updated: set[int] = field(default_factory=set)
    reads: Mapping[str, frozenset[str]] = field(default_factory=dict)
    needs: dict[str, str] = field(default_factory=dict)
    modules: Mapping[str, ModuleSource] = field(default_factory=dict)


class RankVariables:
    """The kernel's record of the variables that a session's ranks have.

    Attributes:
        owned: Variables that cells of the session have assigned: the digest (`simple_digest`) of
            each variable by name, or "" if the value is not simple. If several ranks reported
            a digest, this is the digest of the lowest rank.
        modules: Sources of the project's modules that the ranks got from this kernel, by name.
    """

    def __init__(self) -> None:
        self.owned: dict[str, str] = {}
        self.modules: dict[str, ModuleSource] = {}
        self._sent: dict[str, SentValue] = {}
        """Values of the notebook that the ranks have, by name."""

        self._state: process_state.State = {}
        """Process state of the notebook that the ranks have."""

        self._n_cells = 0
        """Number of cells for which values were sent."""

        self._reads: dict[str, frozenset[str]] = {}
        """Names that each function or class of an earlier cell reads when its code runs."""

        self._needs: dict[str, str] = {}
        """Names that sent values and lambdas of earlier cells read when their code runs.

        Each name has the reason why a later cell may need the variable, for messages.
        """

        self._announced: dict[str, object] = {}
        """Values about which a note has told the user, as in `VariablesToSend.announced`.

        The user gets no second note about the same value.
        """

        self._returned: dict[str, int] = {}
        """Ids of the notebook's objects that `--out` returned from the ranks, by name."""

        self._code: set[str] = set()
        """Names of functions, classes and modules that the ranks had before this kernel's cells."""

    @property
    def all(self) -> set[str]:
        """All names that the ranks have."""
        return {*self.owned, *self._code, *self._sent}

    @property
    def has_functions(self) -> bool:
        """Whether cells have defined functions or classes in the ranks."""
        return bool(self._reads or self._code)

    def assume_state(self, state: process_state.State) -> None:
        """Record that the ranks have this process state: only later changes are sent."""
        self._state = state

    def take_over(self, variables: Mapping[str, str], code: Iterable[str]) -> None:
        """Record the variables of the ranks when this kernel takes over another kernel's session.

        Args:
            variables: Digests of the ranks' variables, as in `owned`.
            code: Names of the ranks' functions, classes and modules, which have no digests. If a
                cell uses such a name, and the notebook has a variable of this name, this kernel
                sends the variable. The variable then replaces the function, class or module in the
                ranks.
        """
        self.owned |= variables
        self._code = set(code)

    def choose(
        self,
        used: UsedNames,
        namespace: dict[str, Any],
        state: process_state.State,
        *,
        send: Iterable[str],
        to: Destination,
        is_user_variable: Callable[[str], bool],
        refuse: Callable[[CaptureError], None],
    ) -> VariablesToSend:
        """Choose the variables of the notebook to send for a cell.

        The candidates are the variables that the cell uses, the names in `send`, and the variables
        that candidates need. If the cell uses a variable that an earlier cell has assigned, the
        variables that code in the ranks reads are candidates, too (`_needed_names`).

        A variable that a cell of the session has assigned is no candidate unless it is in `send`. A
        candidate is sent if the ranks lack it, if its value has changed, if it is a module, or if
        it is in `send`.

        Candidates that share an object are sent together if one of them is sent. They are also sent
        together if they were last sent for different cells, because the ranks then have several
        copies of the object. Changed settings of the process state are sent, too.

        The result also has the digests of the sent values, the functions and classes that the ranks
        have already, and notes for the user. Each sent value is pickled again for its digest,
        because the first pickling may have changed the value. When the ranks have received the
        variables, the caller must call `record_sent`.

        Args:
            send: Names whose values are sent although cells have assigned them (`--send`).
            is_user_variable: Returns whether a name is a variable of the user. Other names are
                skipped.
            refuse: Called with the error of each value that cannot be sent.
        """
        changed_state = process_state.changes(self._state, state)
        choice = VariablesToSend(state=state, changed_state=changed_state, reads=used.definitions)
        forced = set(send)
        wanted = self._needed_names(used, forced)
        needed, kept = self._pickle_needed(wanted, forced, namespace, to, is_user_variable, refuse)
        changed = {
            name
            for name, one in needed.items()
            if name in forced
            or not self._is_at_ranks(name, one.digest)
            or _is_module(namespace[name])
        }
        for group in group_sharers(_shared_ids(needed, namespace)):
            causes = [name for name in group if name in changed]
            others = [name for name in group if name not in changed]
            if others and (causes or len({self._sent[name].number for name in others}) > 1):
                choice.dragged.append((causes, others))
                changed.update(others)
        choice.why = {name: needed[name].why for name in reversed(needed) if name in changed}
        choice.needs = dict.fromkeys(used.lambdas, "a lambda uses it")
        for name in choice.why:
            choice.needs |= dict.fromkeys(needed[name].needs, reason_used_by(name))
        for name in choice.why:
            # The first pickling may have changed the value, for example by filling a cache.
            again = _pickle_value(name, namespace, to, "", hashes_buffers=False)
            choice.digests[name] = again.digest[:_HASH_BYTES] + needed[name].digest[_HASH_BYTES:]
        for name in needed:
            if isinstance(namespace[name], type | FunctionType) and name not in changed:
                choice.at_ranks[id(namespace[name])] = name
            elif isinstance(namespace[name], type):
                choice.updated.add(id(namespace[name]))
        deleted = self._deleted(wanted, namespace)
        choice.announced = {**kept, **dict.fromkeys(deleted, _DELETED)}
        choice.notes = self._notes(choice, list(kept), deleted, namespace, forced)
        return choice

    def _needed_names(self, used: UsedNames, forced: set[str]) -> dict[str, str]:
        """Return the names of the variables that the cell needs, each with the reason.

        The result has the names in `--send`, and the names that the cell reads.

        A variable that a cell has assigned may lead to any function in the ranks: it may be a
        function of an earlier cell, or an instance of a class of the notebook. So if the cell reads
        such a variable, the result also has the names that all these functions read.
        """
        wanted = {**dict.fromkeys(forced, THE_CELL), **used.why}
        if any(name in self.owned for name in used.why):
            by_cells = {
                read: reason_used_by(name) for name, reads in self._reads.items() for read in reads
            }
            for read, why in {**by_cells, **self._needs}.items():
                wanted.setdefault(read, why)
        return wanted

    def _pickle_needed(
        self,
        wanted: dict[str, str],
        forced: set[str],
        namespace: dict[str, Any],
        to: Destination,
        is_user_variable: Callable[[str], bool],
        refuse: Callable[[CaptureError], None],
    ) -> tuple[dict[str, _Candidate], dict[str, object]]:
        """Pickle the wanted variables of the notebook, and the variables that their values need.

        Each variable is pickled on its own, only for its digest. A variable that a cell of the
        session has assigned is not pickled unless it is in `forced`. Names that are no variables of
        the user are skipped. If a value cannot be sent, the error goes to `refuse`.

        Args:
            wanted: Names of the variables that the cell needs, with the reasons.
            forced: Names in `--send`.

        Returns:
            Two dicts. The first has a record of each pickled variable, in the order of pickling.
            The second is for a note to the user. It has the variables that cells have assigned, if
            the notebook has another value and there was no note about this value yet. Each entry is
            the digest or the id of the notebook's value.
        """
        needed: dict[str, _Candidate] = {}
        kept: dict[str, object] = {}
        waiting = dict(wanted)
        while waiting:
            name = next(iter(waiting))
            why = waiting.pop(name)
            if name in needed or not is_user_variable(name):
                continue
            if name in self.owned and name not in forced:
                if news := self._news(name, namespace[name]):
                    kept[name] = news
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
        """Record that all ranks have received the variables, settings and modules in `choice`.

        From now on, the names of these variables belong to the notebook: the kernel sends a
        variable again when its value in the notebook changes. Also record which notes the user has
        got.
        """
        self._n_cells += 1
        self._announced |= choice.announced
        self.modules |= choice.modules
        self._state = choice.state
        self._needs |= choice.needs
        for name, digest in choice.digests.items():
            self._sent[name] = SentValue(digest, self._n_cells)
            self.owned.pop(name, None)
            self._announced.pop(name, None)

    def record_changes(
        self,
        choice: VariablesToSend,
        assigned: Collection[str],
        deleted: Iterable[str],
        digests: Mapping[str, str],
    ) -> None:
        """Record the variables that a cell assigned on a rank, and those that no rank has any more.

        First remove the deleted names from this record. From now on, the assigned names belong to
        the ranks: the kernel does not send the notebook's values of these names. If an assigned
        variable is a function or class of the cell, also record which names its code reads.

        Args:
            choice: The variables that were sent for this cell.
            deleted: Names that the cell deleted on this rank, and that no other rank has.
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
            self._reads.pop(name, None)
        self._reads |= {name: choice.reads[name] for name in assigned if name in choice.reads}

    def record_returned(self, values: Mapping[str, Any]) -> None:
        """Record values that `--out` returned: from now on, their names belong to the ranks.

        If the names did not belong to the ranks, the kernel would send the returned value back to
        all ranks. Each rank would lose its own value, and a returned model would no longer belong
        to its optimizer.

        For these names, the user gets no note that the notebook's value differs from the ranks'
        values.
        """
        self._returned |= {name: id(value) for name, value in values.items()}
        for name in values:
            if self._sent.pop(name, None) is not None:
                self.owned[name] = ""

    def _is_at_ranks(self, name: str, digest: bytes) -> bool:
        known = self._sent.get(name)
        return known is not None and known.digest == digest

    def _deleted(self, wanted: Iterable[str], namespace: Mapping[str, Any]) -> list[str]:
        """Return those names in `wanted` that the notebook has deleted after they were sent.

        Leave out a name if a note has told the user so after the name's value was sent last.
        """
        return [
            name
            for name in wanted
            if name in self._sent
            and name not in namespace
            and self._announced.get(name) is not _DELETED
        ]

    def _news(self, name: str, value: Any) -> object:
        """Return the digest or id of the notebook's value, to tell the user that the ranks differ.

        Return None if the user needs no note. This is the case for these values:

        - a module;
        - an object that `--out` returned, or that came with a result that uses it;
        - a simple value that equals the value in the ranks;
        - the value of the last note about this name.
        """
        is_returned = self._returned.get(name) == id(value) or came_with_result(name, value)
        if _is_module(value) or is_returned:
            return None
        digest = simple_digest(value)
        if digest and digest == self.owned[name]:
            return None
        seen = digest or id(value)
        return seen if self._announced.get(name) != seen else None

    def _notes(
        self,
        choice: VariablesToSend,
        kept: list[str],
        deleted: list[str],
        namespace: dict[str, Any],
        forced: set[str],
    ) -> list[str]:
        """Return notes about variables that are not sent, were deleted, or are sent again.

        Args:
            kept: Names that belong to the ranks, but have a new value in the notebook.
            deleted: Names that the notebook has deleted, but that the ranks have.
            forced: Names in `--send`; no note says that they are sent again.
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
        dragged = {name for _, others in choice.dragged for name in others}
        again = [
            name
            for name in choice.why
            if name in self._sent
            and name not in forced | dragged
            and not _is_module(namespace[name])
        ]
        if again:
            notes.append(f"changed in the notebook and sent again: {_quoted(again)}")
        for causes, others in choice.dragged:
            shares = "it shares" if len(others) == 1 else "they share"
            it = "it" if len(others) == 1 else "them"
            partners = f" with {_quoted(causes)}" if causes else ""
            notes.append(
                f"sent again because {shares} objects{partners}: {_quoted(others)}; changes that "
                f"the ranks made to {it} are lost"
            )
        return notes


def _pickle_value(
    name: str,
    namespace: dict[str, Any],
    to: Destination,
    why: str,
    *,
    hashes_buffers: bool = True,
) -> _Candidate:
    """Pickle one variable on its own, and return a record with its digest; drop the pickle.

    The digest also depends on the registered loaders in the value.

    Args:
        why: Reason why the cell needs the variable, for messages.
        hashes_buffers: Whether the digest depends on the memory of arrays and tensors. Hashing this
            memory takes long.

    Raises:
        CaptureError: An object in the value cannot be sent.
    """
    pickler = ValuePickler(namespace, to)
    pickler.is_digest = True
    pickler.pending_values[name] = namespace[name]
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

    Candidates with a common id are sent together. The pickle of a candidate also contains the
    objects of the classes and functions that the candidate needs, such as its own class. If such a
    class or function is itself a candidate, the ids of its objects do not count for the candidates
    that need it. Otherwise, all instances of a class would have to be sent together. This is not
    necessary: in the ranks, all instances have the same class, even if they were sent for different
    cells.

    Returns:
        The ids, by the name of the candidate. For a candidate that is a class or function, all ids
        in its pickle count.
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


def _digest_of(pickled: Pickled, more: Iterable[bytes] = ()) -> bytes:
    """Return two SHA-256 digests as one string: of the data and `more`, then of the buffers."""
    data, buffers = hashlib.sha256(pickled.data), hashlib.sha256()
    for part in more:
        data.update(part)
    for buffer in pickled.buffers:
        buffers.update(buffer.raw())
    return data.digest() + buffers.digest()


def _is_module(value: Any) -> bool:
    return isinstance(value, ModuleType)


def _quoted(names: Sequence[str]) -> str:
    return listed([f"`{name}`" for name in names], _MAX_LISTED)
