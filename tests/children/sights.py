"""File operations that all ranks perform in the project store, their working directory."""

import glob
import importlib
import io
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any
from unittest import mock

import numpy
import torch


def saves(path: str | pathlib.Path, value: float) -> None:
    torch.save({"weight": torch.full((4,), value)}, path)


def loads(path: str | pathlib.Path) -> float:
    return float(torch.load(path, weights_only=True)["weight"][0])


def changes(path: str) -> None:
    with open(path, "r+b") as file:
        file.write(b"mine")


def begins_with(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(4)


def writes_by_torch(path: str) -> None:
    torch._C.PyTorchFileWriter(path)


def saves_under_a_name_beyond_ascii() -> None:
    # Older versions of torch write such a file by io.FileIO.
    with mock.patch.object(torch.serialization, "open", io.FileIO, create=True):
        saves("größe.pt", 3.0)
    assert loads("größe.pt") == 3.0


def saves_and_finds() -> None:
    for path in ("m.pt", "out/deep/m.pt", os.path.abspath("out/n.pt")):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        saves(path, 3.0)
        assert os.path.exists(path) and os.path.isfile(path) and os.path.getsize(path) > 100
        assert pathlib.Path(path).exists() and os.access(path, os.R_OK | os.W_OK)
        assert loads(path) == 3.0
    assert shutil.disk_usage("out").total > 0
    numpy.save("out/array.npy", numpy.arange(3))
    assert numpy.load("out/array.npy").tolist() == [0, 1, 2]
    assert numpy.load("out/array.npy", mmap_mode="r")[1] == 1
    numpy.savetxt("out/rows.txt", [7])
    assert numpy.loadtxt("out/rows.txt") == 7
    os.remove("out/rows.txt")
    assert sorted(os.listdir("out")) == ["array.npy", "deep", "n.pt"]
    assert sorted(glob.glob("**/*.pt", recursive=True)) == ["m.pt", "out/deep/m.pt", "out/n.pt"]
    found = sorted(map(str, pathlib.Path(".").rglob("*.pt")))
    assert found == ["m.pt", "out/deep/m.pt", "out/n.pt"]
    with open("log.txt", "a") as log:
        log.write("one\n")
    with open("log.txt", "a") as log:
        log.write("two\n")
    assert pathlib.Path("log.txt").read_text() == "one\ntwo\n"


def walks_both() -> None:
    pathlib.Path("folder/mine.txt").write_text("mine")
    assert sorted(os.listdir("folder")) == ["inner.txt", "mine.txt"]
    assert sorted(os.listdir(b"folder")) == [b"inner.txt", b"mine.txt"]
    assert os.listdir() == os.listdir(None) == os.listdir(".")
    walked = {root: sorted(files) for root, _, files in os.walk(".")}
    assert walked == {
        ".": ["data.bin", "numbers.bin"],
        "./folder": ["inner.txt", "mine.txt"],
    }
    shutil.copytree("folder", "copied")
    assert sorted(os.listdir("copied")) == ["inner.txt", "mine.txt"]
    assert pathlib.Path("copied/inner.txt").read_text() == "rank 0's"


def rotates_checkpoints() -> None:
    for step in range(3):
        os.makedirs("tmp", exist_ok=False)
        saves("tmp/m.pt", step)
        os.rename("tmp", f"step-{step}")
        if step:
            shutil.rmtree(f"step-{step - 1}")
    assert loads("step-2/m.pt") == 2.0
    assert not os.path.exists("step-1") and not os.path.exists("tmp")


def maps_tensors() -> None:
    numbers = torch.from_file("data.bin", shared=True, size=4, dtype=torch.uint8)
    before = numbers.tolist()
    numbers.fill_(7)
    assert torch.from_file("data.bin", shared=True, size=4, dtype=torch.uint8).tolist() == before
    torch.from_file("mine.bin", shared=True, size=4, dtype=torch.uint8).fill_(7)
    assert torch.from_file("mine.bin", shared=True, size=4, dtype=torch.uint8).tolist() == [7] * 4
    assert torch.from_file("mine.bin", size=4, dtype=torch.uint8).tolist() == [7] * 4
    saves("mapped.pt", 3.0)
    assert torch.load("mapped.pt", mmap=True, weights_only=True)["weight"].tolist() == [3.0] * 4


def saves_with_libraries() -> None:
    """Save and load with libraries that open files in C, C++ and Rust."""
    sys.modules["tensorflow"] = None  # type: ignore[assignment]  # blocks the import of a module
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer, models

    names = ("dataset", "feather", "parquet")
    dataset, feather, parquet = (importlib.import_module(f"pyarrow.{name}") for name in names)
    pyarrow, pandas = map(importlib.import_module, ("pyarrow", "pandas"))
    jit: Any = torch.jit
    os.makedirs("out", exist_ok=True)
    save_file({"weight": torch.ones(3)}, "out/m.safetensors")
    assert load_file("out/m.safetensors")["weight"].tolist() == [1.0] * 3
    with safe_open("out/m.safetensors", framework="pt") as file:
        assert file.keys() == ["weight"]
    Tokenizer(models.BPE()).save("tokenizer.json")
    assert Tokenizer.from_file("tokenizer.json").get_vocab_size() == 0
    vocabulary = models.WordLevel({"a": 0}, unk_token="a")
    assert [os.path.basename(it) for it in vocabulary.save("folder")] == ["vocab.json"]
    assert "vocab.json" in os.listdir("folder")
    script = jit.script(torch.nn.Linear(2, 3))
    jit.save(script, "script.pt")
    jit.trace(torch.nn.Linear(2, 3), torch.ones(1, 2)).save("out/traced.pt")
    for name in ("script.pt", "out/traced.pt"):
        assert jit.load(name)(torch.ones(1, 2)).shape == (1, 3)
    jit.save(jit.trace(torch.sin, torch.ones(1)), "out/function.pt")
    assert jit.load("out/function.pt")(torch.zeros(1)) == 0
    exported = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))
    torch.export.save(exported, "m.pt2")
    torch.export.load("m.pt2")
    frame = pandas.DataFrame({"a": [1, 2], "b": [3, 4]})
    frame.to_parquet("frame.parquet")
    frame.to_parquet("parts", partition_cols=["a"])
    frame.to_feather("frame.feather")
    assert (
        len(pandas.read_parquet("frame.parquet")) == len(pandas.read_feather("frame.feather")) == 2
    )
    table = pyarrow.table({"a": [1]})
    parquet.write_table(table, pathlib.Path("table.parquet"))
    assert parquet.ParquetFile("table.parquet").metadata.num_rows == 1
    dataset.write_dataset(table, "dataset", format="parquet")
    assert dataset.dataset("dataset").count_rows() == 1
    feather.write_feather(table, "out/table.feather")
    assert feather.read_table("out/table.feather").num_rows == 1
    assert parquet.read_schema("table.parquet").names == ["a"]
    assert parquet.read_metadata("table.parquet").num_rows == 1
    assert parquet.ParquetDataset("dataset").read().num_rows == 1
    datasets = importlib.import_module("datasets")
    datasets.Dataset.from_dict({"a": [1, 2]}).save_to_disk("words")
    mapped = datasets.load_from_disk("words").map(lambda row: {"b": row["a"] + 1})
    assert sorted(mapped.shuffle(seed=0)["b"]) == [2, 3]


def is_refused_in_a_subprocess() -> str:
    """Copy a file into the store by the program `cp`. Return the error that users see, or ""."""
    from taas_magic.host.tracebacks import message_of

    try:
        subprocess.run(["cp", "/proc/version", "version"], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        return message_of(error)
    return ""


def is_refused_by_the_system() -> list[str]:
    """Write files by C code, and to /proc. Return the errors that users see."""
    import sqlite3

    from taas_magic.host.tracebacks import message_of

    def saves_for_mobiles() -> None:
        script: Any = torch.jit.script(torch.nn.Linear(2, 2))
        script._save_for_lite_interpreter("m.ptl")

    def saves_a_database() -> None:
        sqlite3.connect("a.db").execute("create table t(a)")

    told = []
    for save in (saves_for_mobiles, saves_a_database):
        try:
            save()
        except Exception as error:  # each library raises its own type
            told.append(message_of(error))
    try:
        pathlib.Path("/proc/version").write_text("x")
    except OSError as error:
        told.append(message_of(error))
    return told
