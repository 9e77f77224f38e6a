"""Send results from ranks to the notebook: the variables of `--out`, and the value of the work.

The value of the work is the value of the cell's last expression, or the function's return value.

A rank writes its values to archives. Each archive is one file:

    <run folder>/results/<attempt>-<rank>-<number>

Values that share objects, such as a model and its optimizer, are in the same archive, so that they
also share the objects in the notebook. If an archive cannot be written or loaded, only the values
of this archive are missing.

If all values of an archive are plain data (`capture/plain.py`), the notebook reads the archive
without running code. Otherwise the values are pickled. A pickle can run arbitrary code of its
sender when it is loaded, so the notebook loads pickles only from trusted pools.
"""

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec import Struct

from taas_magic.capture import pickling
from taas_magic.capture.culprit import find_culprit, make_capture_error, type_name
from taas_magic.capture.home import RankNamespace, ResultPickler, ResultsReader
from taas_magic.capture.pickling import Pickled, group_sharers
from taas_magic.capture.plain import PlainWriter, read_plain
from taas_magic.capture.work import VALUE
from taas_magic.host import rendezvous
from taas_magic.host.spec import HOST
from taas_magic.messages import from_json, to_json
from taas_magic.plan import ALL, requests_value_of, split_name, variable_name

_ERROR_CHARS = 300
_MAX_LISTED = 12
_FILE = re.compile(r"(\d+)-(\d+)-\d+", re.ASCII)

VALUE_LIMIT_BYTES = 1_000_000
"""Maximum size of the last expression's value that rank 0 sends to the notebook as `run.result`.

A larger value is not sent. If a cell ends in a large value, the user usually only wants to see the
value, and its text is sent as a display anyway. The value of a function call has no limit.
"""

_TOO_LARGE = (
    "it is larger than 1 MB; assign it to a variable, and name the variable in --out, which has no "
    "limit"
)

_ONLY_ON_RANK_0 = (
    "a sharded model is gathered only on rank 0; request it without `@all`, or without gather=True"
)

GATHER = (
    "on all ranks and before the process group is closed: `.full_tensor()` of a tensor, "
    "get_model_state_dict or get_optimizer_state_dict of torch.distributed.checkpoint.state_dict "
    "with StateDictOptions(full_state_dict=True, cpu_offload=True) of a model or an optimizer"
)


@dataclass
class ReceivedResults:
    """The results of a run that the notebook has received from the ranks.

    Attributes:
        values: Values by name. The value of the work itself has the name `VALUE`.
        missing: Names of `--out` whose values were not received, each with the reason.
        notes: Notes for the user about received values.
        why_no_value: Reason why the value of a cell's last expression was not received; "" if it
            was received, or if the cell has no such value.
    """

    values: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    why_no_value: str = ""


class ResultsHeader(Struct):
    """The metadata of one archive of results.

    Attributes:
        names: Names of the values in the archive.
        missing: Names of values that the rank could not write, each with the reason.
        is_plain: Whether the values are plain data and not pickled.
    """

    names: list[str] = []
    missing: dict[str, str] = {}
    is_plain: bool = False


class _ShardedNames(Struct):
    """Message of a rank to the other ranks before they gather sharded values.

    Attributes:
        names: Names of `--out` whose values are sharded on the rank.
        failed: Whether the work failed on the rank, so that the rank gathers nothing.
    """

    names: list[str]
    failed: bool


@dataclass(frozen=True)
class ResultCriteria:
    """Criteria by which the kernel accepts or refuses results.

    Attributes:
        attempt: Number of the run's last attempt. Results of earlier attempts are ignored.
        world_size: Number of ranks in the last attempt.
        untrusted_pool: Name of the run's pool if the pool is not trusted. The kernel then refuses
            pickles. "" if the pool is trusted.
        ranks: Ranks of `--ranks`, in ascending order; empty if all ranks run the work.
    """

    attempt: int
    world_size: int
    untrusted_pool: str = ""
    ranks: Sequence[int] = ()


def _refusal(where: str, pool: str) -> str:
    """Return a message for the user: why a pickled value is refused, and what the user can do.

    Args:
        where: Sender of the value, such as "rank 3".
        pool: Name of the sender's pool, which is not trusted.
    """
    return (
        f'loading it would run code from {where}, and pool "{pool}" is not trusted. Return plain '
        "data (tensors, arrays, numbers, strings, and containers of them, such as "
        "model.state_dict()), or set trusted = true for the pool in taas.toml"
    )


def receive(
    folder: Path, out: Sequence[str], sources: ResultCriteria, namespace: dict[str, Any]
) -> ReceivedResults:
    """Load the results of a run in the kernel, archive by archive.

    From rank 0's archives, the kernel reads the value of the work and all names of `--out`. The
    reason is that rank 0 writes gathered sharded models, even if `--out` requests them from other
    ranks. From the archives of any other rank, the kernel reads only the names that `--out`
    requests from this rank. Archives of earlier attempts are ignored.

    The result for `NAME@all` is a list with one value for each rank that runs the work. If one
    rank's value did not arrive, `NAME` is missing. Each missing name gets a reason.

    Args:
        folder: Folder with the archives (`RunFolder.results`). The name of its parent is the id of
            the run.
        out: Values of `--out`, such as "loss@all".
        sources: Attempt, number of ranks, and trust in the pool.
        namespace: The notebook's variables, which become the globals of loaded functions.
    """
    named = ((_FILE.fullmatch(path.name), path) for path in folder.glob("*"))
    found = sorted((int(it[1]), int(it[2]), path) for it, path in named if it is not None)
    received, by_rank = ReceivedResults(), dict[str, dict[int, Any]]()
    reader = ResultsReader(folder.parent.name, namespace)
    working = sources.ranks or range(sources.world_size)
    for attempt, rank, path in found:
        if attempt != sources.attempt or not rank < sources.world_size:
            continue
        theirs = [it for it in out if rank == 0 or requests_value_of(it, rank, working)]
        expected = {variable_name(text) for text in theirs} | ({VALUE} if rank == 0 else set())
        if expected:
            own = ReceivedResults()
            _load_archive(path, rank, own, expected, sources, reader)
            for name in [variable_name(text) for text in theirs if split_name(text)[1] == ALL]:
                if name in own.values:
                    by_rank.setdefault(name, {})[rank] = own.values.pop(name)
            received.values |= own.values
            received.missing |= own.missing
            received.notes += own.notes
    for name, values in by_rank.items():
        if values.keys() == set(working):
            received.values[name] = [values[rank] for rank in sorted(values)]
    names = [variable_name(text) for text in out]
    missing = [name for name in names if name not in received.values]
    return ReceivedResults(
        {name: received.values[name] for name in (*names, VALUE) if name in received.values},
        {name: received.missing.get(name, "it did not arrive") for name in missing},
        received.notes,
        "" if VALUE in (*names, *received.values) else received.missing.get(VALUE, ""),
    )


def _load_archive(
    path: Path,
    rank: int,
    received: ReceivedResults,
    expected: Collection[str],
    sources: ResultCriteria,
    reader: ResultsReader,
) -> None:
    """Load one archive of results, and add its expected values to `received`.

    Plain data is read without pickle; other values are unpickled. If the rank could not write an
    expected value, the rank's reason is added to `received.missing`. If loading fails, or if
    pickled values come from an untrusted pool, `received.missing` gets a reason for each expected
    name in the archive.
    """
    names = list(expected)
    try:
        mapped = pickling.read_archive(path)
        about = from_json(mapped.meta, ResultsHeader)
        missing = about.missing
        received.missing |= {name: missing[name] for name in expected if name in missing}
        names = [name for name in about.names if name in expected]
        if not names:
            return
        if about.is_plain:
            loaded = read_plain(mapped.pickle(), mapped.buffers)
        elif sources.untrusted_pool:
            why = _refusal(f"rank {rank}", sources.untrusted_pool)
            received.missing |= dict.fromkeys(names, why)
            return
        else:
            found = reader.load(mapped.stream(), mapped.buffers, expected)
            loaded = found.values
            received.notes += found.notes
        received.values |= {name: loaded[name] for name in names}
    except Exception as error:  # unpickling runs the user's code: anything may be raised
        why = f"it arrived, but loading it in the notebook raised {_error_text(error)}"
        received.missing |= dict.fromkeys(names, why)


class _TorchResultPickler(ResultPickler):
    """A pickler for the results of a rank, with special rules for some objects of torch.

    - Pickles the wrapped model instead of a DistributedDataParallel.
    - Pickles a reference to the notebook's registered loader instead of a remote loader.
    - Raises TypeError for a sharded tensor or model, because this rank has only a part of it.

    Attributes:
        unwrapped: Whether the pickler has replaced a DistributedDataParallel by its model.
    """

    def __init__(self, scope: RankNamespace) -> None:
        super().__init__(scope)
        self.unwrapped = False
        self._sharded = _sharded_types()

    def probe(self, value: Any) -> None:
        _TorchResultPickler(self.scope).dump(value)

    def reducer_override(self, obj: Any) -> Any:
        """Apply the special rules of this class to an object; else the rules of `ResultPickler`.

        Set `unwrapped` if a DistributedDataParallel is replaced.

        Raises:
            TypeError: The object is a sharded tensor or model.
        """
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.nn.parallel.DistributedDataParallel):
            self.unwrapped = True
            return _itself, (obj.module,)
        loaders = sys.modules.get("taas_magic.data.loader")
        if loaders is not None and isinstance(obj, loaders.RemoteLoader):
            return loaders.notebooks_loader, (obj.name,)
        if isinstance(obj, self._sharded):
            raise TypeError(f"this rank has only a part of the {type(obj).__name__}")
        return super().reducer_override(obj)


def _itself(value: Any) -> Any:
    return value


class ResultWriter:
    """Writer of one rank's results. Writes values that share objects to the same archive.

    Args:
        folder: Folder for the archives (`RunFolder.results`).
        environ: Environment of the rank with torchrun's variables.
        note: Function that sends a note to the user.
        scope: Namespace of the rank, with the variables that a returned function may use.
        untrusted_pool: Name of the run's pool if the kernel does not load pickles from this pool.
            The writer then writes only plain data. "" if the kernel loads pickles.
        working_ranks: Ranks that run the work, in ascending order; empty for all ranks.
    """

    def __init__(
        self,
        folder: Path,
        environ: Mapping[str, str],
        note: Callable[[str], None],
        scope: RankNamespace,
        untrusted_pool: str = "",
        working_ranks: Sequence[int] = (),
    ) -> None:
        self._folder, self._note, self._untrusted_pool = folder, note, untrusted_pool
        self._scope = scope
        self._environ = dict(environ)
        self._host = environ.get(HOST, "?")
        self._rank = int(environ["RANK"])
        self._working_ranks = working_ranks or range(int(environ["WORLD_SIZE"]))
        self._attempt = environ["TORCHELASTIC_RESTART_COUNT"]
        self._failed = self._needs_value = False
        self._written = 0
        self._missing: dict[str, str] = {}

    def write(
        self, namespace: Mapping[str, Any], out: Sequence[str], *, value: Any, failed: bool
    ) -> None:
        """Write the values of `--out` and the value of the work to archives, after the work.

        Every rank must call this method, even a rank that sends nothing, because sharded values are
        gathered by a collective. If a value cannot be sent, the user gets a note; no exception is
        raised.

        1. Write the values that are not sharded.
        2. Gather and write the sharded values that all ranks of their meshes have. Only rank 0
           writes a gathered model.
        3. Write the reasons for missing values, to an archive without values.

        Args:
            namespace: Variables of the rank.
            out: Values of `--out`, such as "loss@all".
            value: Value of the work. If `out` has the name `VALUE`, this value is sent like a
                variable. Otherwise, only rank 0 sends the value, and the user gets no note if it
                cannot be sent. In this case, None and larger values than `VALUE_LIMIT_BYTES`
                are not sent.
            failed: Whether the work failed on this rank. If so, this rank sends no notes about
                missing values, and gathers no sharded values, because other ranks may not take part
                in the collective.
        """
        names = [variable_name(text) for text in out]
        self._failed, self._needs_value = failed, VALUE in names
        sent = [text for text in out if requests_value_of(text, self._rank, self._working_ranks)]
        mine = [variable_name(text) for text in sent]
        own = namespace if failed else {**namespace, VALUE: value}
        there = {name: own[name] for name in names if name in own}
        sharded = {name: held for name, held in there.items() if is_sharded(held)}
        plain = {name: there[name] for name in mine if name in there and name not in sharded}
        if self._rank == 0 and value is not None and not self._needs_value:
            plain[VALUE] = value
        for name in mine:
            if name not in there:
                self._record_missing(name, self._why_missing(namespace))
        self._write_values(plain)
        ungathered = self._find_ungathered(sharded) if names else {}
        for name, held in sharded.items():
            keeps = self._rank == 0 if _has_model(held) else name in mine
            if _has_model(held) and self._is_of_many(name, out):
                if self._rank == 0:
                    self._record_missing(name, _ONLY_ON_RANK_0)
            elif name not in ungathered:
                self._gather_and_write(name, held, keeps)
            elif keeps or name in mine:
                self._record_missing(name, ungathered[name])
        if self._missing:
            try:
                self._write_archive(Pickled(b"", ()), ResultsHeader(missing=self._missing))
            except OSError as error:
                self._note(f"writing into the run's folder raised {_error_text(error)}")

    def _is_of_many(self, name: str, out: Sequence[str]) -> bool:
        """Return whether `out` requests a variable from more than one rank."""
        return len(self._working_ranks) > 1 and (name, ALL) in map(split_name, out)

    def _why_missing(self, namespace: Mapping[str, Any]) -> str:
        if self._failed:
            return f"rank {self._rank} had not set it when it failed"
        have = [name for name in namespace if not name.startswith("_")]
        more = f" and {len(have) - _MAX_LISTED} more" if len(have) > _MAX_LISTED else ""
        listed = ", ".join(have[-_MAX_LISTED:]) or "none"
        return f"rank {self._rank} has no such variable; it has: {listed}{more}"

    def _record_missing(self, name: str, why: str) -> None:
        """Record why a value cannot be sent. Also send the user a note, except in two cases.

        Send no note if the work has failed on this rank. Send no note about the value of a cell's
        last expression, because the user did not request this value. If the user reads
        `Run.result`, a warning gives the recorded reason.
        """
        self._missing[name] = why
        if not self._failed and (name != VALUE or self._needs_value):
            self._note(f"{_listed([name])} could not be returned: {why}")

    def _write_values(self, values: Mapping[str, Any]) -> None:
        """Group values that share objects, and write each group to an archive.

        First encode each value alone, to find values that cannot be sent. Three kinds of values are
        left out and recorded as missing:

        - a value that cannot be pickled
        - if the pool is not trusted, a value that is not plain data
        - a value of the cell's last expression that is too large (`_is_too_large`)
        """
        shared: dict[str, dict[int, Any]] = {}
        for name, value in values.items():
            pickler = _TorchResultPickler(self._scope)
            try:
                plain = _as_plain({name: value})
                if plain is None and self._untrusted_pool:
                    self._record_missing(name, _refusal(f"host {self._host}", self._untrusted_pool))
                    continue
                if plain is None:
                    pickler.add_results({name: value})
                if name == VALUE and self._is_too_large(plain or pickler):
                    self._record_missing(name, _TOO_LARGE)
                    continue
            except Exception as error:  # pickling runs the user's code: anything may be raised
                self._record_missing(name, _unpicklable(name, value, pickler, error))
            else:
                shared[name] = (plain or pickler).shared_objects()
        for names in group_sharers(shared):
            self._write_group({name: values[name] for name in names})

    def _is_too_large(self, encoded: PlainWriter | _TorchResultPickler) -> bool:
        """Return whether the value of the work is larger than `VALUE_LIMIT_BYTES`.

        If the work is a function call (`taas.run`), return False, because its value has no limit.

        Args:
            encoded: Pickler or plain-data writer that has encoded the value.
        """
        if self._needs_value:
            return False
        if isinstance(encoded, PlainWriter):
            size_bytes = Pickled(encoded.data, encoded.buffers).size_bytes
        else:
            size_bytes = encoded.pickled().size_bytes
        return size_bytes > VALUE_LIMIT_BYTES

    def _write_group(self, values: Mapping[str, Any]) -> None:
        """Write `values`, which share objects, to one archive.

        If all values are plain data, they are written as plain data. Otherwise, all of them are
        pickled. If writing fails, all of them are recorded as missing.

        A note tells the user if a DistributedDataParallel was replaced by its model. Notes also
        tell the user about problems that the pickler has found, unless the archive has only the
        value of a cell's last expression.
        """
        pickler = _TorchResultPickler(self._scope)
        try:
            plain = _as_plain(dict(values))
            if plain is not None:
                written = Pickled(plain.data, tuple(plain.buffers))
            else:
                pickler.add_results(values)
                written = pickler.pickled()
            self._write_archive(
                written, ResultsHeader(names=list(values), is_plain=plain is not None)
            )
        except Exception as error:  # the disk is full, or the second pickling raised
            for name in values:
                self._record_missing(name, f"writing it raised {_error_text(error)}")
            return
        is_required = self._needs_value or values.keys() != {VALUE}
        for problem in pickler.problems.values() if is_required else ():
            self._note(problem)
        if pickler.unwrapped:
            self._note(f"{_listed(values)}: a DistributedDataParallel is returned as its `.module`")

    def _find_ungathered(self, sharded: Mapping[str, Any]) -> dict[str, str]:
        """Return the sharded values that cannot be gathered, each with the reason.

        A collective would wait forever for a rank that lacks the value or has failed. So tell the
        other ranks which sharded values this rank has, and wait until the ranks whose shards are
        needed do the same. If the work has failed on this rank, only tell the other ranks.
        """
        if self._environ["WORLD_SIZE"] == "1" or not _sharded_types():
            return {}
        needed = {name: [] if self._failed else _ranks_of(it) for name, it in sharded.items()}
        run = self._folder.parent.name
        mine = to_json(_ShardedNames(list(sharded), self._failed))
        try:
            found = rendezvous.exchange(
                self._environ, f"taas/sharded/{run}", mine, {*chain(*needed.values())}
            )
        except RuntimeError as error:  # the key-value store has ended with its host
            return dict.fromkeys(sharded, f"it is sharded, and {_error_text(error)}")
        told = {rank: from_json(it, _ShardedNames) for rank, it in found.items()}
        ungathered = {}
        for name, rank in [(name, rank) for name, ranks in needed.items() for rank in ranks]:
            if told[rank].failed:
                ungathered[name] = f"it is sharded, and rank {rank} failed before it was gathered"
            elif name not in told[rank].names:
                ungathered[name] = (
                    f"it is sharded, and rank {rank} has no such sharded variable; assign it on "
                    "every rank"
                )
        return ungathered

    def _gather_and_write(self, name: str, value: Any, keeps: bool) -> None:
        """Gather a sharded value by a collective of all ranks, and write the whole value.

        If the work has failed on this rank, gather nothing. If the value was not gathered, record
        it as missing. A note tells the user when a model is returned as its state_dict.

        Args:
            keeps: True if this rank must write the gathered value, or record it as missing. False
                if this rank only takes part in the collective.
        """
        whole, why = None, "it is sharded, and the rank failed before it was gathered"
        if not self._failed:
            try:
                whole, why = _gather(value, keeps), ""
            except Exception as error:  # a collective may raise any type of exception
                raised = _error_text(error)
                why = f"it is sharded, and gathering it raised {raised}; gather it {GATHER}"
        if keeps and why:
            self._record_missing(name, why)
        elif keeps:
            if _has_model(value):
                self._note(
                    f"{_listed([name])}: a sharded model is returned as its full state_dict()"
                )
            self._write_values({name: whole})

    def _write_archive(self, pickled: Pickled, about: ResultsHeader) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / f"{self._attempt}-{self._rank}-{self._written}"
        pickling.write_archive(path, pickled, about)
        self._written += 1


def is_sharded(value: Any) -> bool:
    """Return whether a value is a sharded tensor or module, or contains one."""
    kinds = _sharded_types()
    return bool(kinds) and any(isinstance(each, kinds) for each in _leaves(value))


def _ranks_of(value: Any) -> list[int]:
    """Return the ranks that have shards of a value, and so must take part when it is gathered.

    The result is empty if torch does not know the ranks, because a process group is closed.
    """
    import torch.distributed as dist

    kinds, ranks = _sharded_types(), set[int]()
    sharded: list[Any] = [each for each in _leaves(value) if isinstance(each, kinds)]
    try:
        for each in sharded:
            if is_model(each):
                ranks |= {*dist.get_process_group_ranks(each.process_group)}
            else:
                ranks |= {*each.device_mesh.mesh.flatten().tolist()}
    except Exception:  # torch's type of the error depends on its version
        return []
    return sorted(ranks)


def _has_model(value: Any) -> bool:
    return any(map(is_model, _leaves(value)))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the elements of nested dicts, lists and tuples, and the parts of models in them.

    The parts of a model are the model itself and its submodules, parameters and buffers. If `value`
    is neither a container nor a model, yield `value` itself.
    """
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if is_model(each):
            yield from (*each.modules(), *each.parameters(), *each.buffers())
        elif not isinstance(each, dict | list | tuple):
            yield each
        elif id(each) not in seen:
            seen.add(id(each))
            waiting += dict.values(each) if isinstance(each, dict) else each


def _gather(value: Any, keeps: bool) -> Any:
    """Gather the shards of a value in CPU memory by collectives. All ranks must call this function.

    Args:
        value: The sharded value, or a container of sharded and other values.
        keeps: Whether this rank needs the gathered tensors. If False, the result has None in place
            of each of them, which saves memory.

    Returns:
        The value with whole tensors. Elements that are not sharded stay unchanged. In place of a
        sharded model, the result has the model's full state_dict on rank 0, and an empty dict on
        other ranks.
    """
    import torch

    if not is_sharded(value):
        return value
    if isinstance(value, dict):
        return {key: _gather(each, keeps) for key, each in value.items()}
    if isinstance(value, list | tuple):
        make = getattr(value, "_make", type(value))  # the constructor of a named tuple
        return make([_gather(each, keeps) for each in value])
    if not is_model(value):
        with torch.no_grad():
            whole = value.full_tensor()
        return whole.detach().cpu() if keeps else None
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(
        value, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )


def _sharded_types() -> tuple[type, ...]:
    """Return torch's classes of sharded tensors and models, if their modules are imported."""
    tensor = sys.modules.get("torch.distributed.tensor")  # since torch 2.5
    tensor = tensor or sys.modules.get("torch.distributed._tensor")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    found = (getattr(tensor, "DTensor", None), getattr(fsdp, "FullyShardedDataParallel", None))
    return tuple(kind for kind in found if kind is not None)


def is_model(value: Any) -> bool:
    """Return whether a value is a torch module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _as_plain(values: dict[str, Any]) -> PlainWriter | None:
    """Encode `values` as plain data. Return None if at least one value is not plain data."""
    writer = PlainWriter()
    try:
        writer.write_value(values)
    except Exception:  # NotPlainError, or a tensor without storage: the pickler reports the latter
        return None
    return writer


def _listed(names: Iterable[str]) -> str:
    """Return the names of results as text for the user, such as "--out a, b".

    The name `VALUE` is left out. If no other name is given, return "run.result".
    """
    listed = ", ".join(name for name in names if name != VALUE)
    return f"--out {listed}" if listed else "run.result"


def _unpicklable(name: str, value: Any, pickler: _TorchResultPickler, error: Exception) -> str:
    """Return a message for the user: why a value cannot be pickled, and what to send instead."""
    name = "run.result" if name == VALUE else name
    path, offender = find_culprit(name, value, pickler.probe)
    if isinstance(offender, _sharded_types()):
        kind = type_name(offender)
        return f"`{path}` is a {kind}, and each rank has only a part of it; gather it {GATHER}"
    return str(make_capture_error(name, value, pickler.probe, error, to="notebook"))


def _error_text(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_ERROR_CHARS]}"
