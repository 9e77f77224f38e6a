"""Tests of `update_mirror`, which copies changed files of the project store to a host."""

import os
import socket
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taas_magic.errors import StoreError
from taas_magic.store.ignore import IgnoreRules
from taas_magic.store.manifest import Manifest, ManifestEntry
from taas_magic.store.mirror import reserve, update_mirror
from taas_magic.store.requests import FileRequest, ListFiles, ReadFiles
from taas_magic.store.tree import Tree
from tests.store.travel_rig import Travel, descriptors, files_of, folder, tree_of, wired


class Counted:
    """Callable that sends requests to a store server, and records the paths that are read."""

    def __init__(self, travel: Travel) -> None:
        self._ask = wired(travel.store_server)
        self.read: list[str] = []

    def __call__(self, request: FileRequest[Any]) -> Any:
        if isinstance(request, ReadFiles):
            self.read += [path for path, _, _ in request.parts]
        return self._ask(request)


@pytest.fixture
def travel(tmp_path: Path) -> Travel:
    return Travel(tmp_path)


def fill(store: Path) -> None:
    (store / "src" / "deep").mkdir(parents=True)
    (store / "empty").mkdir()
    (store / "src" / "model.py").write_text("x = 1\n" * 1000)
    (store / "src" / "deep" / "data.bin").write_bytes(os.urandom(5_000_000))
    (store / "run.sh").write_text("#!/bin/sh\n")
    (store / "run.sh").chmod(0o755)
    (store / "nothing").touch()
    (store / "größe.txt").write_text("ü")


def test_a_mirror_equals_the_store(travel: Travel) -> None:
    fill(travel.store)
    before = descriptors()
    mirror, manifest = travel.mirrored()
    assert tree_of(Path(mirror.path)) == tree_of(travel.store)
    assert os.access(f"{mirror.path}/run.sh", os.X_OK)
    assert not os.access(f"{mirror.path}/nothing", os.X_OK)
    assert (
        os.stat(f"{mirror.path}/run.sh").st_mtime_ns == (travel.store / "run.sh").stat().st_mtime_ns
    )
    assert not manifest.skipped and not os.listdir(f"{mirror.path}/../arriving")
    mirror.close()
    assert descriptors() <= before


def test_only_what_changed_travels(travel: Travel) -> None:
    fill(travel.store)
    travel.mirrored()[0].close()
    (travel.store / "src" / "model.py").write_text("x = 2")
    (travel.store / "new.txt").write_text("new")
    (travel.store / "src" / "deep").rename(travel.store / "moved")
    (travel.store / "run.sh").unlink()
    ask, mirror = Counted(travel), travel.host()
    travel.look_again()
    update_mirror(mirror, ask)
    assert sorted(ask.read) == ["new.txt", "src/model.py"]
    assert tree_of(Path(mirror.path)) == tree_of(travel.store)


def test_changed_files_of_a_mirror_are_restored(travel: Travel) -> None:
    """docs/faults.md 40: hashes show which files of a mirror are damaged; only these are copied."""
    fill(travel.store)
    mirror, _ = travel.mirrored()
    mirror.close()
    tree = Path(mirror.path)
    with open(tree / "src/deep/data.bin", "r+b") as file:
        file.write(b"flip")
    os.utime(
        tree / "src/deep/data.bin", ns=(0, (travel.store / "src/deep/data.bin").stat().st_mtime_ns)
    )
    (tree / "nothing").unlink()
    (tree / "nothing").mkdir()
    (tree / "nothing" / "below").touch()
    (tree / "run.sh").unlink()
    (tree / "run.sh").symlink_to("/etc/passwd")
    os.mkfifo(tree / "fifo")
    (tree / os.fsdecode(b"bad-\xff")).touch()
    ask, mirror = Counted(travel), travel.host()
    update_mirror(mirror, ask)
    assert tree_of(tree) == tree_of(travel.store)
    assert set(ask.read) == {"nothing", "run.sh", "src/deep/data.bin"}


def test_a_file_to_which_a_program_appends_is_copied_as_it_was_listed(
    travel: Travel, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, open_file = travel.store / "run.log", Tree.open_file
    log.write_text("first\n")

    def append_and_open(tree: Tree, path: str) -> FileIO:
        if path == "run.log":
            with log.open("a") as file:
                file.write("next\n")
        return open_file(tree, path)

    with monkeypatch.context() as program:
        program.setattr(Tree, "open_file", append_and_open)
        mirror, _ = travel.mirrored()
    assert (Path(mirror.path) / "run.log").read_text() == "first\n"
    assert log.read_text().startswith("first\nnext\n")
    travel.look_again()
    update_mirror(mirror, wired(travel.store_server))
    assert tree_of(Path(mirror.path)) == tree_of(travel.store)


@pytest.mark.fault(40)
def test_what_is_flipped_on_its_way_is_asked_for_again(travel: Travel) -> None:
    """docs/faults.md 40: a file that is damaged on its way to the host is requested again.

    If it is always damaged, an error names the file.
    """
    fill(travel.store)
    ask, flips = wired(travel.store_server), 1

    def flipping(request: FileRequest[Any]) -> Any:
        nonlocal flips
        answer = ask(request)
        if isinstance(request, ReadFiles) and flips and len(answer[-1]) > 1000:
            flips -= 1
            return [*answer[:-1], b"flip" + answer[-1][4:]]
        return answer

    mirror = travel.host()
    update_mirror(mirror, flipping)
    assert tree_of(Path(mirror.path)) == tree_of(travel.store) and flips == 0
    with open(travel.store / "src/deep/data.bin", "ab") as file:
        file.write(b"more")
    travel.look_again()
    flips = 1000
    with pytest.raises(
        StoreError, match=r"src/deep/data\.bin of the project store could not be copied"
    ):
        update_mirror(mirror, flipping)
    assert not os.listdir(f"{mirror.path}/../arriving")


@pytest.mark.fault(53)
def test_hostile_names_stay_behind_and_are_named(travel: Travel, tmp_path: Path) -> None:
    """docs/faults.md 53: links, special files and hostile names in the store are not copied."""
    store = travel.store
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("secret")
    (store / "link").symlink_to(tmp_path / "secret")
    (store / "folder-link").symlink_to(tmp_path / "outside")
    os.mkfifo(store / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(store / "socket"))
    (store / os.fsdecode(b"\xff.txt")).touch()
    (store / "Model.py").write_text("kept")
    (store / "model.py").write_text("clash")
    (store / "Lib").mkdir()
    (store / "lib").mkdir()
    (store / "lib" / "x").touch()
    mirror, manifest = travel.mirrored()
    assert set(tree_of(Path(mirror.path))) == {"Model.py", "Lib"}
    assert manifest.skipped == {
        "link": "a symbolic link",
        "folder-link": "a symbolic link",
        "fifo": "a FIFO",
        "socket": "a socket",
        "\\udcff.txt": "its name is not UTF-8",
        "model.py": "its name differs from Model.py only by case",
        "lib": "its name differs from Lib only by case",
    }


def test_a_hostile_list_writes_nothing_outside(travel: Travel, tmp_path: Path) -> None:
    """docs/faults.md 53: a host skips hostile names in the list of files that it receives."""
    bad = ["../out", "/tmp/out", "a/../../out", "", "a//b", "nul\0", "x" * 300, "ok"]
    entries = [ManifestEntry(path, 1, "0" * 64) for path in bad]
    answers: dict[type[object], object] = {
        ListFiles: Manifest([*entries, *map(folder, ["../folder", "fine"])], {}),
        ReadFiles: [b"x"],
    }
    mirror = travel.host()

    def ask(request: FileRequest[Any]) -> Any:
        return answers[type(request)]

    with pytest.raises(StoreError, match="ok of the project store could not be copied"):
        update_mirror(mirror, ask)
    assert set(tree_of(Path(mirror.path))) == {"fine"}
    assert not (tmp_path / "out").exists() and not (tmp_path / "host-0" / "folder").exists()


def test_paths_that_the_user_leaves_out_are_not_copied(travel: Travel) -> None:
    store = travel.store
    (store / ".taasignore").write_text("*.ckpt\n/data/\n!keep.ckpt\n")
    for path in (
        ".git/config",
        "pkg/__pycache__/a.pyc",
        "data/big",
        "a.ckpt",
        "keep.ckpt",
        "pkg/data/x",
    ):
        (store / path).parent.mkdir(parents=True, exist_ok=True)
        (store / path).write_text(path)
    _, manifest = travel.mirrored()
    assert files_of(manifest) == {".taasignore", "keep.ckpt", "pkg/data/x"}
    assert not manifest.skipped


def test_a_whitelist_copies_what_it_names_but_no_secrets_or_caches(
    travel: Travel,
) -> None:
    store = travel.store
    stay = (".ssh/id_rsa", ".kaggle/kaggle.json", ".env", ".venv/x.py", ".git/hooks/x.py")
    files = ("src/a.py", "src/b.bin", "src/sub/c.py", "d.json", *stay)
    make(store, dict.fromkeys(files, b"x"))
    lines = ("*", "!*/", "!.*", "!*.py", "!*.json")
    (store / ".taasignore").write_text("\n".join(lines))
    _, manifest = travel.mirrored()
    assert files_of(manifest) == {".taasignore", "d.json", "src/a.py", "src/sub/c.py"}
    assert [path for path in SECRETS if not IgnoreRules(lines).is_secret(path)] == []
    (store / ".taasignore").write_text("\n".join((*lines, "!.venv/", "!.kaggle/")))
    travel.look_again()
    _, manifest = travel.mirrored()
    assert {".venv/x.py", ".kaggle/kaggle.json"} < files_of(manifest)
    assert not {".env", ".git/hooks/x.py"} & files_of(manifest)


def test_a_store_beyond_the_limit_is_refused_and_its_big_folders_are_named(tmp_path: Path) -> None:
    travel = Travel(tmp_path, limit_bytes=1 << 20)
    (travel.store / "data").mkdir()
    (travel.store / "data" / "big.bin").write_bytes(bytes(3 << 20))
    (travel.store / "small.py").write_text("x")
    with pytest.raises(StoreError) as caught:
        travel.mirrored()
    said = str(caught.value)
    assert "data/ 3.0 MiB" in said and ".taasignore" in said and "1.0 MiB" in said


def test_only_listed_files_can_be_read(travel: Travel, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (travel.store / "a").write_text("a")
    ask = wired(travel.store_server)
    travel.look_again()
    (travel.store / "later").write_text("not in the list")
    answer = ask(ReadFiles([("../secret", 0, 6), ("later", 0, 6), ("a", 0, 1), ("a", -1, 1)]))
    assert answer == [None, None, b"a", None]


def test_two_runs_at_once_have_separate_mirrors(travel: Travel) -> None:
    fill(travel.store)
    first, second = travel.mirrored()[0], travel.mirrored()[0]
    assert first.path != second.path
    assert tree_of(Path(first.path)) == tree_of(Path(second.path)) == tree_of(travel.store)
    first.close()
    assert reserve(travel.rule.path, "me", travel.folder / "host-0").path == first.path


def test_a_mirror_that_was_unused_for_long_is_removed(travel: Travel) -> None:
    fill(travel.store)
    old, _ = travel.mirrored()
    cache = travel.folder / "host-0"
    lock = Path(old.path).parent / "lock"
    os.utime(lock, (1, 1))
    reserve("/another", "me", cache).close()
    assert lock.exists(), "it is in use"
    old.close()
    os.utime(lock, (1, 1))
    reserve("/another", "me", cache).close()
    assert [folder.name.split("-")[0] for folder in cache.iterdir()] == ["another"]


NAMES = st.sampled_from(["a", "b", "c", "a/x", "a/y", "b/x", "b/x/z", "c/d/e"])
TREES = st.dictionaries(NAMES, st.binary(max_size=3), max_size=6)


@given(trees=st.lists(TREES, min_size=2, max_size=4))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_mirror_follows_any_change_of_the_store(
    trees: list[dict[str, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    travel = Travel(tmp_path_factory.mktemp("any"))
    mirror = travel.host()
    for wanted in trees:
        make(travel.store, wanted)
        travel.look_again()
        update_mirror(mirror, wired(travel.store_server))
        assert tree_of(Path(mirror.path)) == tree_of(travel.store)
    mirror.close()
    travel.store_server.close()


def make(store: Path, files: dict[str, bytes]) -> None:
    """Replace all files of a store by `files`.

    Args:
        store: Folder of the store.
        files: Contents by path. A path is skipped if it is also the folder of another path.
    """
    for path in sorted(store.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    for name, content in files.items():
        if not any(other.startswith(f"{name}/") for other in files):
            (store / name).parent.mkdir(parents=True, exist_ok=True)
            (store / name).write_bytes(content)


SECRETS = (
    ".ssh/id_ed25519",
    ".aws/credentials",
    ".gnupg/key",
    ".kube/config",
    ".netrc",
    ".env",
    ".ENV.production",
    "sub/.env",
    "sub/.Git-Credentials",
    ".config/gcloud/credentials.db",
    ".cache/huggingface/token",
    "keys/id_rsa",
)


@pytest.mark.fault(75)
def test_secrets_stay_and_the_first_is_named(travel: Travel) -> None:
    """docs/faults.md 75: files that may hold secrets are not copied to hosts."""
    make(travel.store, dict.fromkeys((*SECRETS, "train.py", "environment.yml"), b"x"))
    mirror, manifest = travel.mirrored()
    assert files_of(manifest) == {"train.py", "environment.yml"}
    files = {str(path.relative_to(mirror.path)) for path in Path(mirror.path).rglob("*.*")}
    assert files == {"train.py", "environment.yml", ".config", ".cache"}
    [(first, why)] = manifest.skipped.items()
    assert first == ".ENV.production" and "may hold a secret, like" in why
    assert "!.ENV.production in .taasignore" in why


def test_a_secret_that_the_user_names_is_copied(travel: Travel) -> None:
    make(travel.store, {".env": b"x", ".aws/credentials": b"x", ".env.local": b"x"})
    (travel.store / ".taasignore").write_text("!.env\n!.aws/\n")
    _, manifest = travel.mirrored()
    assert files_of(manifest) == {".env", ".aws/credentials", ".taasignore"}


def test_secrets_cannot_be_read_by_a_host_that_asks_for_them(travel: Travel) -> None:
    make(travel.store, {".env": b"secret", "train.py": b"code"})
    travel.mirrored()
    answer = wired(travel.store_server)(ReadFiles([(".env", 0, 6), ("train.py", 0, 4)]))
    assert answer == [None, b"code"]
