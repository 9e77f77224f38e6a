"""Brings a host's mirror up to date with the project store, before a run's ranks start."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress

from taas_magic.errors import StoreError
from taas_magic.travel.arrival import Arrival, DamagedError
from taas_magic.travel.ask import Ask, ask_at_pace
from taas_magic.travel.chunks import Pace, batches, unpack
from taas_magic.travel.difference import Have, difference
from taas_magic.travel.hashes import blocks
from taas_magic.travel.manifest import Entry, Manifest
from taas_magic.travel.mirror import Mirror

ATTEMPTS = 3
"""How often a file is asked for that arrived damaged or changed meanwhile."""

_ASK_AGAIN_S = 0.05
_BLOCK_BYTES = 1 << 20


def bring_in(mirror: Mirror, ask: Ask, fresh: bool = False) -> Manifest:
    """Makes the mirror what the store is; only what is not in it travels.

    Args:
        mirror: This host's.
        ask: Asks the desk.
        fresh: The store as it is now; else as it was when the first host of the run asked.

    Returns:
        What lies in it now.

    Raises:
        StoreError: The disk is full, or a file was damaged on its way again and again.
    """
    damaged: list[str] = []
    for attempt in range(ATTEMPTS):
        want = _ask_list(ask, fresh=fresh or attempt > 0)
        try:
            damaged = _become(mirror, want, ask)
        except OSError as error:
            where = f"{mirror.path}: {error.strerror} ({error.filename or 'its disk'})"
            raise StoreError(f"the project store cannot be copied to {where}") from error
        if not damaged:
            mirror.hashes.keep_only(set(want.files))
            mirror.hashes.save()
            mirror.folders = set(want.folders)
            return want
    raise StoreError(
        f"of the project store, {', '.join(damaged[:5])} did not arrive whole in {ATTEMPTS} "
        "attempts: it is damaged on its way, or is being written all the time"
    )


def _ask_list(ask: Ask, fresh: bool) -> Manifest:
    """What the store is; waits while it is being looked through."""
    listed = ask("list", fresh=fresh)
    while listed is None:
        time.sleep(_ASK_AGAIN_S)
        listed = ask("list")
    return Manifest.from_wire(listed)


def _become(mirror: Mirror, want: Manifest, ask: Ask) -> list[str]:
    """Takes the steps to what is wanted; returns which files did not arrive whole."""
    steps = difference(_look(mirror, want), want)
    tree = mirror.tree
    for path in steps.blocking:
        tree.remove(path)
    for path in steps.folders:
        with suppress(OSError):  # it is made when what blocks it is gone
            tree.make_folder(path)
    not_copied = [entry for entry, source in steps.copies if not _copy(mirror, entry, source)]
    for path in steps.remove:
        tree.remove(path)
    for path in steps.remove_folders:
        tree.remove_folder(path)
    for path in steps.folders:
        tree.make_folder(path)
    return fetch(mirror, [*steps.fetch, *not_copied], ask)


def _look(mirror: Mirror, want: Manifest) -> Have:
    """What lies in the mirror; only what may stay or be of use is hashed."""
    files: dict[str, Entry] = {}
    folders, odd = [], []
    for seen in mirror.tree.walk():
        if seen.is_folder:
            folders.append(seen.path)
        elif seen.oddity or not (seen.path in want.files or seen.path in mirror.hashes):
            odd.append(seen.path)
        else:
            try:
                files[seen.path] = Entry.of(seen, mirror.hashes.of(mirror.tree, seen))
            except OSError:
                odd.append(seen.path)
    return Have(files, folders, odd)


def _copy(mirror: Mirror, entry: Entry, source: str) -> bool:
    """Makes a file from one of the mirror that has its content; False if that is gone."""
    try:
        descriptor = mirror.tree.open_file(source)
    except OSError:
        return False
    arrival = Arrival(mirror.staging)
    try:
        for block in blocks(descriptor, _BLOCK_BYTES):
            arrival.write(block)
        settle(mirror, arrival, entry)
    except DamagedError:
        return False
    finally:
        os.close(descriptor)
        arrival.discard()
    return True


def fetch(mirror: Mirror, entries: Sequence[Entry], ask: Ask) -> list[str]:
    """Gets files from the desk; returns those that did not arrive whole."""
    sizes = {entry.path: entry for entry in entries}
    damaged: dict[str, None] = {}
    arrivals: dict[str, Arrival] = {}
    pace = Pace()
    try:
        for batch in batches(entries, pace):
            parts = unpack(ask_at_pace(ask, pace, "read", parts=batch))
            for (path, offset, size), part in zip(batch, parts, strict=True):
                arrival = arrivals.get(path) or arrivals.setdefault(path, Arrival(mirror.staging))
                arrival.write(part or b"")
                if offset + size == sizes[path].size:
                    try:
                        settle(mirror, arrivals.pop(path), sizes[path])
                    except DamagedError:
                        damaged[path] = None
    finally:
        for arrival in arrivals.values():
            arrival.discard()
    return list(damaged)


def settle(mirror: Mirror, arrival: Arrival, entry: Entry) -> None:
    """Puts a file that has arrived into its place in the mirror, and takes down that it is known.

    Raises:
        DamagedError: It is not what was sent; it is discarded.
    """
    try:
        arrival.verify(entry.path, entry.size, entry.sha256)
        arrival.date(entry.mtime_ns)
        # known before it is there, so that nobody takes its appearance for a rank's doing
        mirror.hashes.remember(entry.path, arrival.status(), entry.sha256)
        arrival.place(mirror.tree, entry.path, executable=entry.executable)
    finally:
        arrival.discard()
    status = mirror.tree.status(entry.path)
    if status is not None:
        mirror.hashes.remember(entry.path, status, entry.sha256)
