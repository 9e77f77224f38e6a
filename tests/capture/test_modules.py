"""Tests of how capture finds the project's modules, and of how a rank imports them."""

import ast
import importlib
import linecache
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from taas_magic.capture import modules
from taas_magic.capture.modules import find_local_modules, install_modules, is_local, local_folders
from taas_magic.errors import CaptureError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "alone.py": "import json\nvalue = 1\n",
        "uses_alone.py": "def f():\n    import alone\n    return alone.value\n",
        "pack/__init__.py": "",
        "pack/one.py": "from . import two\nfrom .deep.three import x\n",
        "pack/two.py": "from ..broken import y\n",
        "pack/unused.py": "",
        "pack/deep/__init__.py": "from .three import x\n",
        "pack/deep/three.py": "x = 3\n",
        "spaces/inner.py": "import alone\n",
        "pack/no_init/inner.py": "from .deeper import low\n",
        "pack/no_init/deeper/low.py": "y = 4\n",
        ".venv/lib/site-packages/installed_one.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def clean_imports() -> Iterator[None]:
    path, finders, loaded = sys.path[:], sys.meta_path[:], set(sys.modules)
    yield
    sys.path[:], sys.meta_path[:] = path, finders
    for name in set(sys.modules) - loaded:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["alone"], {"alone"}),
        (["uses_alone", "uses_alone.f"], {"uses_alone", "alone"}),
        (["pack.unused"], {"pack", "pack.unused"}),
        (["pack.one"], {"pack", "pack.one", "pack.two", "pack.deep", "pack.deep.three"}),
        (["spaces.inner"], {"spaces", "spaces.inner", "alone"}),
        (
            ["pack.no_init.inner"],
            {"pack", "pack.no_init", "pack.no_init.inner"}
            | {"pack.no_init.deeper", "pack.no_init.deeper.low"},
        ),
        (["json", "sys", "numpy", "pytest", "no_such_module", "taas_magic.errors"], set()),
    ],
)
def test_imported_modules_are_collected(
    project: Path, names: list[str], expected: set[str]
) -> None:
    assert set(find_local_modules(names, project)) == expected


def test_the_source_on_disk_counts_not_the_imported_module(
    project: Path, monkeypatch: pytest.MonkeyPatch, clean_imports: None
) -> None:
    monkeypatch.syspath_prepend(str(project))
    assert importlib.import_module("alone").value == 1
    (project / "alone.py").write_text("value = 2\n")
    assert find_local_modules(["alone"], project)["alone"].source == "value = 2\n"


def test_a_module_from_another_folder_on_the_path(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path_factory.mktemp("library")
    (library / "shared_code.py").write_text("import alone\n")
    assert find_local_modules(["shared_code"], project) == {}
    monkeypatch.syspath_prepend(str(library))
    found = find_local_modules(["shared_code"], project)
    assert found["shared_code"].path == str(library / "shared_code.py")
    assert set(found) == {"shared_code", "alone"}


def test_packages_that_pip_installed_on_the_path_do_not_belong_to_the_project(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "mine.py").write_text("")
    for name, file in {"single": "single.py", "large": "large/__init__.py"}.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text("")
        about = folder / f"{name}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        (about / "RECORD").write_text(f"{file},,\n{about.name}/METADATA,,\n../../bin/{name},,\n")
    monkeypatch.syspath_prepend(str(folder))
    assert set(find_local_modules(["mine", "single", "large"], project)) == {"mine"}


def test_a_project_of_many_modules_is_parsed_once(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        (project / f"many{number}.py").write_text(f"import many{number + 1}\n")
    parsed: list[str] = []
    parse = modules._tree

    def counted(text: str) -> ast.Module:
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr(modules, "_tree", counted)

    def capture() -> int:
        parsed.clear()
        found = find_local_modules(["many0"], project)
        modules.notes_on_constants(found, "")
        modules.needed_modules("", [], found, [])
        return len([text for text in parsed if "many" in text])

    assert capture() == 300
    assert capture() == 0
    (project / "many7.py").write_text("import many9\n")
    assert capture() == 1


def test_a_module_in_another_encoding(project: Path) -> None:
    (project / "latin.py").write_bytes("# coding: latin-1\ntext = 'é'\n".encode("latin-1"))
    assert "é" in find_local_modules(["latin"], project)["latin"].source


def test_a_module_that_is_not_text_is_named(project: Path) -> None:
    (project / "binary.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CaptureError, match="`binary`"):
        find_local_modules(["binary"], project)


def test_an_environment_inside_the_project_is_not_local(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = local_folders(project)
    assert folders[0] == project
    assert is_local(project / "alone.py", folders)
    assert not is_local(project / ".venv/lib/site-packages/installed_one.py", folders)
    monkeypatch.setattr(modules, "_SYSTEM", (project / "python",))
    assert not is_local(project / "python/lib/json.py", folders)
    assert is_local(project / "pack/one.py", folders)


def test_a_project_below_the_folder_of_python_is_found(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "_SYSTEM", (project.parent,))
    assert is_local(project / "alone.py", local_folders(project))


def test_a_rank_imports_the_shipped_text(project: Path, clean_imports: None) -> None:
    shipped = find_local_modules(["pack.one", "uses_alone"], project)
    shipped["pack.two"] = modules.ModuleSource(
        "pack.two", str(project / "pack/two.py"), "def fail():\n    raise ValueError\n", False
    )
    (project / "alone.py").write_text("value = 'edited since'\n")
    install_modules(shipped)
    assert importlib.import_module("uses_alone").f() == 1
    one = importlib.import_module("pack.one")
    assert (one.x, one.__package__, one.__file__) == (3, "pack", str(project / "pack/one.py"))
    with pytest.raises(ValueError) as caught:
        one.two.fail()
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.filename, frame.line) == (str(project / "pack/two.py"), "raise ValueError")
    assert not list(project.rglob("__pycache__"))


def test_data_files_of_a_package_are_found(project: Path, clean_imports: None) -> None:
    from importlib import resources

    (project / "pack/table.txt").write_text("rows")
    install_modules(find_local_modules(["pack"], project))
    importlib.import_module("pack")
    assert resources.files("pack").joinpath("table.txt").read_text() == "rows"


def test_installing_again_replaces_what_was_installed(project: Path, clean_imports: None) -> None:
    before = len(sys.meta_path)
    install_modules(find_local_modules(["alone"], project))
    install_modules({})
    assert len(sys.meta_path) == before + 1
    with pytest.raises(ImportError):
        importlib.import_module("alone")
    linecache.checkcache()


def test_a_stale_bytecode_file_never_wins(project: Path, tmp_path: Path) -> None:
    """If a source file changes but keeps its time and size, Python's import uses old bytecode.

    A rank must import the new source nevertheless.
    """
    source = """
        import os, sys
        from pathlib import Path
        from taas_magic.capture.modules import find_local_modules, install_modules
        project = Path(sys.argv[1])
        sys.path.insert(0, str(project))
        import alone
        file = project / "alone.py"
        stat = file.stat()
        file.write_text("import json\\nvalue = 2\\n")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        del sys.modules["alone"]
        import alone
        fooled = alone.value
        del sys.modules["alone"]
        install_modules(find_local_modules(["alone"], project))
        import alone
        print(fooled, alone.value)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), str(project)],
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONPYCACHEPREFIX": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == ["1", "2"]
