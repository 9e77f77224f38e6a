"""What must be done so that one tree becomes like another. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from taas_magic.travel.manifest import Entry, Manifest


@dataclass(frozen=True)
class Have:
    """What lies in the tree.

    Attributes:
        files: Entries of its regular files.
        folders: Its folders, outer ones first.
        odd: Paths of what is neither.
    """

    files: Mapping[str, Entry]
    folders: Sequence[str]
    odd: Sequence[str] = ()


@dataclass(frozen=True)
class Difference:
    """Steps, in the order of the fields.

    Attributes:
        blocking: To remove: they lie where a folder is to be.
        folders: To make; outer ones first.
        copies: Files whose content is in the tree already, with the path it is at.
        remove: What else the other tree has not.
        remove_folders: The same of folders; inner ones first.
        fetch: Files whose content must travel.
    """

    blocking: Sequence[str]
    folders: Sequence[str]
    copies: Sequence[tuple[Entry, str]]
    remove: Sequence[str]
    remove_folders: Sequence[str]
    fetch: Sequence[Entry]


def difference(have: Have, want: Manifest) -> Difference:
    """From what there is to what is wanted."""
    had, folders = set(have.folders), set(want.folders)
    at = {entry.sha256: path for path, entry in have.files.items()}
    wanted = [entry for entry in want.files.values() if not _is_there(entry, have)]
    copied = [entry.sha256 in at and entry.path not in had for entry in wanted]
    gone = [path for path in have.files if path not in want.files] + list(have.odd)
    return Difference(
        blocking=[path for path in gone if path in folders],
        folders=[path for path in want.folders if path not in had],
        copies=[(e, at[e.sha256]) for e, is_copy in zip(wanted, copied, strict=True) if is_copy],
        remove=[path for path in gone if path not in folders],
        remove_folders=[path for path in reversed(have.folders) if path not in folders],
        fetch=[entry for entry, is_copy in zip(wanted, copied, strict=True) if not is_copy],
    )


def _is_there(entry: Entry, have: Have) -> bool:
    mine = have.files.get(entry.path)
    return mine is not None and (mine.sha256, mine.executable) == (entry.sha256, entry.executable)
