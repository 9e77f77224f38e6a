"""Tests that ranks other than 0 cannot change the project store, whichever function they use."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from taas_magic.store import guard
from taas_magic.store.guard import StoreProtection
from tests.children import attempts
from tests.rig import protected
from tests.rig.protected import ProtectedProcess, Raised, Setting, hash_of

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="mounts and Landlock are Linux's"),
    pytest.mark.usefixtures("forkserver"),
]

User = tuple[int, int] | None


@pytest.fixture(scope="module")
def ordinary_user() -> Iterator[tuple[int, int]]:
    """Create a system user and yield its uid and gid; remove it after the tests."""
    name = f"taas-test-{os.getpid()}"
    subprocess.run(["useradd", "--no-create-home", name], check=True)
    try:
        ids = [int(subprocess.check_output(["id", flag, name])) for flag in ("-u", "-g")]
        yield ids[0], ids[1]
    finally:
        subprocess.run(["userdel", name], check=True)


@pytest.fixture(params=["root", "ordinary user"])
def user(request: pytest.FixtureRequest) -> User:
    if os.geteuid() != 0:
        if request.param == "root":
            pytest.skip("needs root")
        return None
    return None if request.param == "root" else request.getfixturevalue("ordinary_user")


@pytest.fixture
def base(user: User) -> Iterator[Path]:
    with protected.new_store(user) as folder:
        yield folder


def protection_of(user: User, which: str) -> StoreProtection:
    root = user is None and os.geteuid() == 0
    return guard.possible_protections(0 if root else 1)[0 if which == "mount" else 1]


@contextmanager
def protected_rank(
    base: Path, user: User, protection: StoreProtection, **more: Any
) -> Iterator[ProtectedProcess]:
    setting = Setting(str(base / "store"), str(base / "scratch"), protection, user=user, **more)
    with protected.protected_process(setting) as rank:
        if rank.protection is not protection:
            pytest.skip(f"this system offers no {protection.value}")
        yield rank


def refused_of(rank: ProtectedProcess, tried: list[Callable[[], None]], store: Path) -> list[str]:
    """Run attempts to write, and return the names of the attempts that raised an exception.

    Check that no attempt changes the store.
    """
    before, refused = hash_of(store), []
    for attempt in tried:
        try:
            rank.call(attempt)
        except Raised:
            refused.append(attempt.__name__)
        assert hash_of(store) == before, attempt.__name__
    return refused


def names(tried: list[Callable[[], None]]) -> list[str]:
    return [attempt.__name__ for attempt in tried]


@pytest.mark.parametrize("which", ["mount", "landlock"])
def test_discard_lets_python_go_on_and_the_system_refuses_the_rest(
    base: Path, user: User, which: str
) -> None:
    tried = [*attempts.PYTHON, *attempts.SYSTEM]
    with protected_rank(base, user, protection_of(user, which)) as rank:
        assert refused_of(rank, tried, base / "store") == names(attempts.SYSTEM)


@pytest.mark.parametrize("which", ["mount", "landlock"])
def test_with_refuse_all_writes_raise(base: Path, user: User, which: str) -> None:
    tried = [*attempts.PYTHON, *attempts.SYSTEM]
    with protected_rank(base, user, protection_of(user, which), writes="refuse") as rank:
        assert refused_of(rank, tried, base / "store") == names(tried)


@pytest.mark.fault(42)
@pytest.mark.parametrize("which", ["mount", "landlock"])
def test_the_system_alone_refuses_all(base: Path, user: User, which: str) -> None:
    """The system's protection refuses all writes, even if Python's functions are not redirected."""
    exempt = [attempts.chmod, attempts.utime] if which == "landlock" else []
    tried = [it for it in [*attempts.PYTHON, *attempts.SYSTEM] if it not in exempt]
    with protected_rank(base, user, protection_of(user, which), writes="none") as rank:
        assert refused_of(rank, tried, base / "store") == names(tried)


@pytest.mark.parametrize("writes", ["discard", "refuse"])
def test_python_alone_refuses_writes_of_python(base: Path, user: User, writes: str) -> None:
    with protected_rank(base, user, StoreProtection.PYTHON, writes=writes) as rank:
        refused = refused_of(rank, attempts.PYTHON, base / "store")
    assert refused == (names(attempts.PYTHON) if writes == "refuse" else [])


def test_a_mount_also_protects_attributes(base: Path, user: User) -> None:
    with protected_rank(base, user, protection_of(user, "mount")) as rank:
        refused = refused_of(rank, attempts.ATTRIBUTES, base / "store")
    assert refused == names(attempts.ATTRIBUTES)


@pytest.mark.parametrize("which", ["mount", "landlock"])
def test_caches_stay_writable_when_the_store_is_the_home_folder(
    base: Path, user: User, which: str
) -> None:
    home = base / "store"
    shared = (str(home / "hf/cache"),)
    with protected_rank(
        base, user, protection_of(user, which), home=str(home), shared=shared
    ) as rank:
        rank.call(attempts.writes_caches, str(home))
        with pytest.raises(Raised):
            rank.call(attempts.by_libc)
    assert (home / ".cache/probe").exists() and (home / "hf/cache/probe").exists()


@pytest.mark.parametrize("which", ["mount", "landlock"])
def test_a_cache_folder_that_cannot_be_made_does_not_weaken_the_protection(
    base: Path, user: User, which: str
) -> None:
    home = base / "store"
    (home / ".cache").write_text("a file where the cache folder would be")
    shared = (str(home / ".cache" / "torch"),)
    wanted = protection_of(user, which)
    with protected_rank(base, user, wanted):
        pass  # skips the test if this system does not offer the protection
    setting = Setting(
        str(home), str(base / "other"), wanted, home=str(home), shared=shared, user=user
    )
    with protected.protected_process(setting) as rank:
        assert rank.protection is wanted


@pytest.mark.parametrize("which", ["mount", "landlock"])
def test_a_shared_folder_is_open_to_all(base: Path, user: User, which: str) -> None:
    shared = (str(base / "store" / "folder"),)
    with protected_rank(base, user, protection_of(user, which), shared=shared) as rank:
        rank.call(attempts.pathlib_write)
        assert rank.call(protected.kept_out) == []
        with pytest.raises(Raised):
            rank.call(attempts.by_libc)
    assert (base / "store/folder/inner.txt").read_text() == "mine"


def test_a_shard_of_a_checkpoint_that_would_be_lost_raises(base: Path, user: User) -> None:
    with (
        protected_rank(base, user, StoreProtection.PYTHON) as rank,
        pytest.raises(Raised) as caught,
    ):
        rank.call(attempts.writes_a_shard)
    assert caught.value.etype == "PermissionError"
    assert "rank 1" in caught.value.text and "--shared-writes folder" in caught.value.text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_mounts_in_the_store_are_read_only_too(base: Path) -> None:
    inner = base / "store" / "with space"
    inner.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nosuid", "none", inner], check=True)
    try:
        with (
            protected_rank(base, None, StoreProtection.MOUNT, writes="none") as rank,
            pytest.raises(Raised) as caught,
        ):
            rank.call(Path(inner, "new").write_text, "mine")
    finally:
        subprocess.run(["umount", inner], check=True)
    assert "Read-only file system" in caught.value.text


def test_protection_leaves_no_mount_and_keeps_the_parent_death_signal(
    base: Path, user: User
) -> None:
    before = mounts_in(base)
    with protected_rank(base, user, protection_of(user, "mount")) as rank:
        assert rank.call(attempts.parent_death_signal) == signal.SIGKILL
        assert rank.call(os.getuid) == (user[0] if user else os.getuid())
        assert mounts_in(base) == before


def mounts_in(folder: Path) -> list[str]:
    """Return the lines of this process's mount table for mounts in a folder."""
    return [
        line
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if str(folder) in line
    ]


def test_the_strongest_protection_is_found_by_trying() -> None:
    found = guard.strongest_protection()
    assert found in guard.possible_protections(os.geteuid())
    assert guard.strongest_protection() is found


def test_a_second_thread_would_not_be_protected(tmp_path: Path) -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="second thread"):
            guard.protect(str(tmp_path), [], StoreProtection.LANDLOCK)
    finally:
        ended.set()
        thread.join()


def test_a_refusal_names_rank_path_and_rule(base: Path, user: User) -> None:
    with (
        protected_rank(base, user, protection_of(user, "mount"), writes="refuse", rank=3) as rank,
        pytest.raises(Raised) as caught,
    ):
        rank.call(attempts.torch_save_zip)
    assert caught.value.etype == "PermissionError"
    for part in ("rank 3", "only rank 0", "--store-writes refuse", str(base / "store" / "zip.pt")):
        assert part in caught.value.text
