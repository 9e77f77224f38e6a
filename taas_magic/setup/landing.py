"""Puts packages into a folder of a host's cache. Runs on the host, as text on standard input.

So it needs nothing but the standard library of Python 3.8, and nothing else of this package.

A folder appears whole, by one rename, under a name that says what is in it: a transfer that broke
leaves nothing that would be used, and of several hosts that share a home and install the same
thing at once, one is first and the others throw theirs away.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from typing import Any

_ABANDONED_AFTER_S = 24 * 3600
_SAID_CHARS = 2000


def main(
    folder: str, pins: Sequence[str] = (), bundle: str = "", sha256: str = "", limit_s: float = 60
) -> dict[str, Any]:
    """Makes a folder, by pip or from a bundle; says whether it is there and else why not.

    Args:
        folder: The folder, which is made whole or not at all.
        pins: What the host's own pip shall put there, such as `zict==3.0.0`.
        bundle: Instead of them: a zip file with all that belongs there; it is removed.
        sha256: Of the bundle.
        limit_s: How long pip may take.
    """
    try:
        error = "" if os.path.isdir(folder) else _make(folder, pins, bundle, sha256, limit_s)
    except (OSError, zipfile.BadZipFile) as problem:
        error = str(problem)
    finally:
        _remove(bundle)
    return {"done": not error, "error": error}


def _make(folder: str, pins: Sequence[str], bundle: str, sha256: str, limit_s: float) -> str:
    parent = os.path.dirname(folder)
    os.makedirs(parent, mode=0o700, exist_ok=True)
    _sweep(parent)
    aside = tempfile.mkdtemp(prefix=".new-", dir=parent)
    try:
        error = _unpack(bundle, sha256, aside) if bundle else _pip(pins, aside, limit_s)
        if not error:
            _publish(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return error


def _publish(aside: str, folder: str) -> None:
    try:
        os.rename(aside, folder)
    except OSError:
        if not os.path.isdir(folder):  # else another one was first
            raise


def _unpack(bundle: str, sha256: str, into: str) -> str:
    with open(bundle, "rb") as file:
        seen = hashlib.sha256(file.read()).hexdigest()
    if seen != sha256:
        return f"{bundle} did not arrive as it was sent"
    with zipfile.ZipFile(bundle) as archive:
        archive.extractall(into)
    return ""


def _pip(pins: Sequence[str], into: str, limit_s: float) -> str:
    """Runs the host's own pip; returns what went wrong.

    One short attempt for each file: where no index can be reached, that shall show at once.
    """
    words = ["--target", into, "--no-deps", "--only-binary=:all:", "--no-compile", "--quiet"]
    words += ["--no-input", "--disable-pip-version-check", "--retries", "0", "--timeout", "5"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", *words, *pins],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"pip was not done after {limit_s:.0f} s"
    said = done.stdout.decode(errors="replace").strip()
    return said[-_SAID_CHARS:] or f"exit code {done.returncode}" if done.returncode else ""


def _sweep(parent: str) -> None:
    """Removes what an attempt that was cut off long ago has left."""
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        if name.startswith(".new-") and _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
            _remove(path)


def _is_abandoned(path: str) -> bool:
    try:
        return time.time() - os.stat(path).st_mtime > _ABANDONED_AFTER_S
    except OSError:
        return False  # another host of the same home has just put it into its place


def _remove(path: str) -> None:
    try:
        os.remove(path)
    except OSError:
        return
