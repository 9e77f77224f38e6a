"""Parsing of flags, and the one-line message for each mistake."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taas_magic.config import Config, PoolConfig
from taas_magic.errors import UsageError
from taas_magic.notebook.flags import FLAGS, HELP, parse, parse_count, parse_ranks
from taas_magic.plan import Flags, Prefill

NO_FILE = Config()
TWO_POOLS = Config(
    pools={"local": PoolConfig("local"), "c1.4": PoolConfig("c1.4")}, source=Path("taas.toml")
)


def test_all_flags() -> None:
    line = (
        "--gpus 8 --cpus 4 --units 20M --pool g2.8 --out model,history --name 'first try' "
        "--max-restarts 2 --timeout 2h --env A=1 --env B='x y' --logs 0,2-4 --dry-run"
    )
    assert parse(line, NO_FILE) == Flags(
        gpus=8,
        cpus=4,
        units=20_000_000,
        pool="g2.8",
        out=("model", "history"),
        name="first try",
        max_restarts=2,
        timeout_s=7200,
        env={"A": "1", "B": "x y"},
        log_ranks=frozenset({0, 2, 3, 4}),
        dry_run=True,
    )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("500MB", Prefill(500_000_000, "bytes")),
        ("2GiB", Prefill(2 << 30, "bytes")),
        ("200", Prefill(200, "batches")),
        ("2K", Prefill(2000, "batches")),
        ("all", Prefill(0, "all")),
    ],
)
def test_prefill_takes_bytes_batches_or_all(text: str, wanted: Prefill) -> None:
    assert parse(f"--gpus 2 --cpus 2 --units 5 --prefill {text}", NO_FILE).prefill == wanted


@pytest.mark.parametrize(
    ("line", "batches"),
    [
        ("--gpus 2", 0),
        ("--gpus 2 --rehearse", 3),
        ("--rehearse --gpus 2", 3),
        ("--rehearse 5 --gpus 2", 5),
        ("--gpus 2 --rehearse=1", 1),
    ],
)
def test_rehearse_has_a_number_of_batches_or_none(line: str, batches: int) -> None:
    assert parse(line, NO_FILE).rehearse == batches


HUGE = "9" * 400


def test_help_shows_that_gpus_is_required() -> None:
    assert "%taas --gpus N [--cpus M]" in " ".join(HELP.split())


def test_flags_that_are_not_given_have_the_defaults_of_a_plan() -> None:
    assert parse("--gpus 2", NO_FILE) == Flags(gpus=2)


@pytest.mark.parametrize(
    "line", ["--gpus=2", " --gpus  2 ", "--gpus 2 # two of them", "--gpus 2 #don't --cpus 3"]
)
def test_equivalent_spellings_of_flags(line: str) -> None:
    assert parse(line, NO_FILE) == Flags(gpus=2)


def test_a_number_sign_begins_a_comment_only_where_a_word_begins() -> None:
    line = """--gpus 2 --name "#1 try" --env C=#fff --env 'D'=\\#0 --out '' # --gpus 3"""
    with pytest.raises(UsageError, match="--out needs"):  # '' counts as a word
        parse(line, NO_FILE)
    found = parse(line.replace("--out ''", ""), NO_FILE)
    assert (found.gpus, found.name, found.env) == (2, "#1 try", {"C": "#fff", "D": "#0"})


def test_each_field_of_flags_has_a_flag() -> None:
    named = {flag.field for flag in FLAGS}
    assert named == set(Flags.__struct_fields__) - {"federated"}


@pytest.mark.fault(58)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "--gpus is missing"),
        ("--pool g2.8", "--gpus is missing"),
        ("--gpus 0", '--gpus needs a number above 0, such as 2; got "0"'),
        ("--gpus -1", '--gpus needs a number above 0, such as 2; got "-1"'),
        ("--gpus NaN", '--gpus needs a number above 0, such as 2; got "NaN"'),
        ("--gpus 1e9", '--gpus needs a number above 0, such as 2; got "1e9"'),
        ("--gpus 8:16", '--gpus needs a number above 0, such as 2; got "8:16"'),
        ("--gpus 99999999999", 'got "99999999999"'),
        ("--gpus", "--gpus needs a number above 0, such as 2"),
        ("--gpus --cpus 2", "--gpus needs a number above 0, such as 2"),
        ("--gpus {n}", "a name that the notebook does not have"),
        ("--gpu 2", 'No flag --gpu (did you mean "--gpus"?). The flags are: --gpus --cpus'),
        ("--gpus 2 -x", "No flag -x. The flags are: --gpus --cpus"),
        ("8", '"8" is not a flag. The flags are: --gpus'),
        *(
            (f"{flag} 2", f'No flag {flag} (did you mean "--gpus"?)')
            for flag in (
                "--GPUS",
                "-n",
                "-np",
                "--np",
                "--nproc_per_node",
                "--num-processes",
                "--world-size",
            )
        ),
        ("--name my run --gpus 2", "A value with spaces needs quotes: --name 'my run'"),
        ("--gpus 2 --name=run run 8", "A value with spaces needs quotes: --name 'run run 8'"),
        ("--gpus 2 --store my results", "A value with spaces needs quotes: --store 'my results'"),
        ("--gpus 2 8", '"8" is not a flag. The flags are: --gpus'),
        ("--gpus 2 --env A=1 B=2", '"B=2" is not a flag. The flags are: --gpus'),
        *(
            (f"--gpus 2 {given}", f"The value of {given[:5]} must have no spaces: write {wanted}")
            for given, wanted in (
                ("--out model, history", "--out model,history"),
                ("--out model history --cpus 1", "--out model,history"),
                ("--out=model , history@last", "--out model,history@last"),
                ("--out a b gpus=2", "--out a,b"),
            )
        ),
        ("--session x --ranks 0, 1", "must have no spaces: write --ranks 0,1"),
        ("--session x --send lr, data", "must have no spaces: write --send lr,data"),
        ("--gpus 2 --logs 0 2-3", "must have no spaces: write --logs 0,2-3"),
        ("--session my exp --gpus 2", "must have no spaces: write --session my_exp"),
        *(
            (f"--gpus 2 --out {text}", "Assign the value to a variable, and give its name to --out")
            for text in ("model.state_dict()", "history[-1]", "f(x, y)", "'a, f(x)'")
        ),
        ("--gpus 2 --out model —cpus 1", '"—cpus" is not a flag. Write it with two'),
        ("—gpus 2", '"—gpus" is not a flag. Write it with two hyphens: --gpus. The flags are'),
        ("\u2013max_restarts=2", "Write it with two hyphens: --max-restarts 2. The flags are"),
        ("gpus=2", '"gpus=2" is not a flag. Write it with two hyphens: --gpus 2. The flags are'),
        ("--gpus 2 --name run cpus=2", '"cpus=2" is not a flag. Write it with two hyphens: --cpus'),
        ("--gpus 2 name='first try'", "Write it with two hyphens: --name 'first try'. The flags"),
        ("--gpus 2 --name run — later", "A value with spaces needs quotes: --name 'run — later'"),
        ("--gpus 2 pool g2.8", '"pool" is not a flag. Write it with two hyphens: --pool. The'),
        *(
            (f"--gpus 2 {flag} x", f'No flag {flag} (did you mean "--out"?)')
            for flag in ("--output", "--return", "-o")
        ),
        ("--session 'my exp'", "--session needs a name such as exp: a letter or _, then up to 63"),
        ("--session my/exp", 'letters, digits, _, . or -; got "my/exp"'),
        ("--gpus 2 --gpus 3", "--gpus was given twice"),
        ("--gpus 2 --foo 1", "No flag --foo. The flags are: --gpus"),
        ("--gpus 2 --out x,x", "--out needs names of variables, each once"),
        ("--gpus 2 --env RANK=5", "--env RANK=5: taas-magic sets RANK for each rank"),
        ("--gpus 2 --env MASTER_PORT=1", "taas-magic sets MASTER_PORT for each rank"),
        (f"--gpus {HUGE}", "--gpus needs a number"),
        (f"--gpus 2 --units {HUGE}", "--units needs a number"),
        (f"--gpus 2 --units {HUGE}T", "--units needs a number"),
        (f"--gpus 2 --timeout {HUGE}", "--timeout needs a time"),
        (f"--gpus 2 --cpus 1 --prefill {HUGE}B", "--prefill needs a size"),
        (f"--gpus 2 --cpus 1 --prefill {HUGE}", "--prefill needs a size"),
        (f"--gpus 2 --logs {HUGE}", "--logs needs ranks"),
        (
            "--gpus 2 --units 0",
            '--units needs a number such as 20480000, 20_480_000, 20M or 1.5G; got "0"',
        ),
        ("--gpus 2 --units 1.5", 'got "1.5"'),
        ("--gpus 2 --units -5", 'got "-5"'),
        ("--gpus 2 --cpus -1", '--cpus needs a number such as 4; got "-1"'),
        ("--gpus 2 --max-restarts x", '--max-restarts needs a number such as 2; got "x"'),
        (
            "--gpus 2 --timeout 0",
            '--timeout needs a time above 0, such as 90s, 5m or 2h; got "0"',
        ),
        ("--gpus 2 --timeout soon", 'got "soon"'),
        ("--gpus 2 --env A", "--env needs KEY=VALUE"),
        ("--gpus 2 --env 1A=2", 'got "1A=2"'),
        ("--gpus 2 --out a-b", "--out needs names of variables"),
        ("--gpus 2 --out class", 'got "class"'),
        ("--gpus 2 --logs 5-2", '--logs needs ranks such as 0,2-5, or all; got "5-2"'),
        ("--gpus 2 --logs 2", "--logs 2: --gpus 2 has ranks 0 to 1"),
        (
            "--gpus 2 --store-writes overlay",
            '--store-writes needs discard or refuse; got "overlay"',
        ),
        ("--gpus 2 --dry-run=1", "--dry-run takes no value"),
        ("--gpus 2 --name 'x", "a quote is not closed"),
        ("--gpus 2 \\", "flags cannot continue on the next line"),
        ("--gpus 2 --rehearse 0", '--rehearse needs a number of batches such as 3; got "0"'),
        ("--gpus 2 --rehearse --rehearse 4", "--rehearse was given twice"),
        *(
            (f"--gpus 2 --rehearse {flag}", f"--rehearse cannot be combined with {flag.split()[0]}")
            for flag in (
                *("--session x", "--ranks 1", "--send x", "--detach", "--max-restarts 1"),
                *("--profile 2", "--dry-run"),
            )
        ),
        ("--gpus 2 --prefill all", "--prefill all needs a limit on the data: add --units"),
        ("--gpus 2 --prefill 20", "--prefill needs processes that prepare the data: add --cpus"),
        (
            "--gpus 2 --cpus 2 --prefill 3GB",
            "2 fetchers can hold 2,147,483,648 bytes; you requested 3,000,000,000",
        ),
        ("--gpus 2 --prefill lots", "--prefill needs a size such as 500MB"),
        ("--gpus 2 --data-pool nowhere", 'No pool "nowhere"'),
        (
            "--gpus 2 --pool nowhere",
            'No pool "nowhere". There is no taas.toml, so only "local" (this machine) exists.',
        ),
    ],
)
def test_a_mistake_gets_one_line(line: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(line, NO_FILE)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_pool_lists_the_pools() -> None:
    with pytest.raises(UsageError, match=r'No pool "c1.5".*did you mean "c1.4".*: c1.4, local'):
        parse("--gpus 2 --pool c1.5", TWO_POOLS)


def test_with_a_taas_toml_a_pool_must_be_in_it() -> None:
    with pytest.raises(UsageError, match=r'No pool "g2.8" in taas.toml'):
        parse("--gpus 2 --pool g2.8", TWO_POOLS)


@given(st.integers(1, 10**15))
def test_a_count_is_exact_with_and_without_underscores(number: int) -> None:
    assert parse_count(str(number)) == parse_count(f"{number:_}") == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("20M", 20_000_000),
        ("1.5G", 1_500_000_000),
        ("1k", 1000),
        ("0.5K", 500),
        ("1.001K", 1001),  # as a float, 1.001 * 1000 is not whole
    ],
)
def test_counts_with_units(text: str, number: int) -> None:
    assert parse_count(text) == number


@given(st.sets(st.integers(0, 50), min_size=1))
def test_a_list_of_ranks_is_parsed(wanted: set[int]) -> None:
    assert parse_ranks(",".join(map(str, wanted))) == frozenset(wanted)


@given(st.text(max_size=40))
def test_any_text_is_flags_or_a_usage_error(line: str) -> None:
    try:
        assert isinstance(parse(line, NO_FILE), Flags)
    except UsageError as error:
        assert str(error)


def test_the_help_has_every_flag_with_an_example() -> None:
    words = " ".join(HELP.split()).replace("- ", "-")  # argparse also breaks lines after hyphens
    for flag in FLAGS:
        assert flag.name in words
        assert not flag.metavar or f"Example: {flag.name} {flag.examples[0]}" in words


def test_the_docs_have_every_flag() -> None:
    text = (Path(__file__).parents[2] / "docs" / "magic.md").read_text()
    assert [flag.name for flag in FLAGS if f"| `{flag.name}" not in text] == []
