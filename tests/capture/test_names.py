"""Tests of `used_names`: the notebook's names that a cell may read, by kind of statement."""

import builtins
import contextlib
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taas_magic.capture.names import used_names


def reads(source: str) -> set[str]:
    return (
        set(used_names(textwrap.dedent(source)).why)
        - set(vars(builtins))
        - {"__name__", "__annotations__"}
    )


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x = 1\nx", set()),
        ("x\nx = 1", {"x"}),
        ("x += 1", {"x"}),
        ("x: int = y\nx", {"y"}),
        ("x: y", {"y"}),
        ("a, (b, *c) = d\na, b, c", {"d"}),
        ("a.x = 1\nb[c] = 2", {"a", "b", "c"}),
        ("del x", {"x"}),
        ("x = 1\ndel x\nx", {"x"}),
        ("import a.b, c as d\na, d", set()),
        ("from a import b as c\nc, b", {"b"}),
        ("from a import *\nb", {"b"}),
        ("if a: x = 1\nx", {"a", "x"}),
        ("if a: x = 1\nelse: x = 2\nx", {"a"}),
        ("if a: x = 1\nelif b: x = 2\nelse: x = 3\nx", {"a", "b"}),
        ("for i in n: x = i\nx, i", {"n", "x", "i"}),
        ("for i in n: x = i; x", {"n"}),
        ("for i in n:\n    y\n    y = i", {"n", "y"}),
        ("while a: x = 1\nelse: y = 2\nx, y", {"a", "x", "y"}),
        ("try: x = 1\nexcept E as e: x = e\nx", {"E", "x"}),
        ("try: import x\nfinally: y = 1\ny", set()),
        ("try: x = 1\nexcept E: pass\nelse: x", {"E"}),
        ("with a as b, b.c as d: x = d\nx, b, d", {"a"}),
        ("with suppress(E): x = 1\nx", {"suppress", "E", "x"}),
        ("with contextlib.suppress(E): x = 1\nx", {"contextlib", "E", "x"}),
        ("match a:\n    case P(q=r) if r > s: r\n    case {'k': v, **w}: v, w\nr", None),
        ("[i for i in x if i > y]", {"x", "y"}),
        ("f'{x:{w}} {y!r}'", {"x", "y", "w"}),
        ("lambda a, b=c: a + b + d", {"c", "d"}),
        ("await x", {"x"}),
        ("async for i in x: pass", {"x"}),
        ("global x\nx", {"x"}),
        ("(x := y) + x", {"x", "y"}),
    ],
)
def test_statements(source: str, names: set[str] | None) -> None:
    assert reads(source) == ({"a", "P", "s", "r"} if names is None else names)


def test_names_in_a_function_body_count_when_the_function_is_used() -> None:
    assert reads("def f(): return x") == set()
    assert reads("def f(): return x\nf()") == {"x"}
    assert reads("def f(): return x\nx = 1\nf()") == set()
    assert reads("def f(): return x\ncallback(f)\nx = 1") == {"x", "callback"}


def test_names_in_a_body_count_if_another_function_uses_it() -> None:
    assert reads("def f(): return g()\ndef g(): return x\nf()") == {"x"}
    assert reads("def f(): return g()\ny = f\ndef g(): return x\ny()") == {"g", "x"}
    assert reads("def f(n): return f(n - 1) + x\nf(1)") == {"x"}
    assert used_names("def f(): return x\nf()").why == {"x": "`f` uses it"}


@pytest.mark.parametrize("block", ["if a:", "while a:", "for i in a:", "with suppress(a):", "try:"])
@pytest.mark.parametrize("statements", ["x = 1; f()", "f = a"])
def test_names_in_a_body_count_if_a_block_that_may_not_run_uses_it(
    block: str, statements: str
) -> None:
    after = "except a: pass\n" if block == "try:" else ""
    source = f"def f(): return x\n{block}\n    {statements}\n{after}f()"
    assert reads(source) - {"suppress"} == {"a", "x"}


def test_a_function_that_a_block_defines_again_may_still_be_the_first_one() -> None:
    source = "def f(): return x\nif a:\n    x = 1\n    f()\n    def f(): return y\nf()"
    assert reads(source) == {"a", "x", "y"}
    used = used_names("def f(): return x\nif a: f = a")
    assert used.definitions == {"f": {"x"}}


def test_names_in_decorated_functions_and_lambdas_count_at_once() -> None:
    assert reads("@register\ndef f(): return x") == {"register", "x"}
    assert reads("f = lambda: x") == {"x"}


def test_names_in_defaults_bases_and_class_bodies_count_at_once() -> None:
    source = """
        class A(Base, metaclass=Meta):
            size = SIZE
            half = size // 2
            def f(self, n=N): return later
    """
    assert reads(source) == {"Base", "Meta", "SIZE", "N"}
    assert reads(source + "\n        A") == {"Base", "Meta", "SIZE", "N", "later"}


def test_global_in_a_function() -> None:
    assert reads("def f():\n    global n\n    n += 1\nf()") == {"n"}
    assert reads("def f():\n    global n\n    n = 1\nf()") == set()


@pytest.mark.parametrize(
    ("call", "names"),
    [
        ("system('echo {a.b[0]} $c $$d {e!r:>{w}}')", {"a", "c", "e"}),
        ("getoutput('ls $folder')", {"folder"}),
        ("system('awk {print $x')", {"x"}),
        ("run_line_magic('time', 'train(model)')", {"train", "model"}),
        ("run_line_magic('timeit', '-n 10 -r3 train(model)')", {"train", "model"}),
        ("run_cell_magic('time', '', 'y = f(x)\\n')", {"y", "f", "x"}),
        ("run_line_magic('matplotlib', 'inline')", set()),
    ],
)
def test_names_in_shell_commands_and_magics(call: str, names: set[str]) -> None:
    assert reads(f"get_ipython().{call}") - {"get_ipython"} == names


def test_imports_and_attributes() -> None:
    used = used_names("import a.b\ndef f():\n    from c.d import e\n    import g as h\nx.y.z()")
    assert used.imports == {"a.b", "c.d", "c.d.e", "g"}
    assert {"y", "z"} <= used.attributes


def test_a_cell_that_is_not_python_uses_no_names() -> None:
    with pytest.raises(SyntaxError) as caught:
        used_names("x = 1\nif:", "cell.py")
    assert (caught.value.filename, caught.value.lineno) == ("cell.py", 2)


NAMES = ["a", "b"]
EXPRESSIONS = st.sampled_from(["0", *NAMES, "[c for c in (a, b)]", "f()", "(a := b)"])
CONSTANTS = st.sampled_from(["0", "1"])
SIMPLE = st.one_of(
    st.builds("{} = {}".format, st.sampled_from(NAMES), EXPRESSIONS),
    st.builds("{} += {}".format, st.sampled_from(NAMES), EXPRESSIONS),
    st.builds("del {}".format, st.sampled_from(NAMES)),
    st.builds("def f(): return {}".format, EXPRESSIONS),
    st.builds("use({})".format, EXPRESSIONS),
    st.builds("use({})".format, st.sampled_from(NAMES)),
)


def _block(statements: list[str]) -> str:
    return textwrap.indent("\n".join(statements), "    ")


def _nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    body = st.lists(inner, min_size=1, max_size=3).map(_block)
    return st.one_of(
        st.builds("if {}:\n{}\nelse:\n{}".format, CONSTANTS, body, body),
        st.builds("for a in range({}):\n{}".format, CONSTANTS, body),
        st.builds("try:\n{}\nexcept NameError:\n{}".format, body, body),
        st.builds("with context() as b:\n{}".format, body),
    )


class _Watched(dict[str, object]):
    """Namespace that records which of its initial variables were read or deleted."""

    def __init__(self, values: dict[str, object]) -> None:
        super().__init__(values)
        self.outside = set(values)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> object:
        if name in self.outside:
            self.read.add(name)
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: object) -> None:
        self.outside.discard(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        if name in self.outside:
            self.read.add(name)
            self.outside.discard(name)
        super().__delitem__(name)


class _Context:
    def __enter__(self) -> int:
        return 1

    def __exit__(self, *error: object) -> None:
        return None


STATEMENTS = st.one_of(SIMPLE, _nested(SIMPLE), _nested(st.one_of(SIMPLE, _nested(SIMPLE))))


@settings(max_examples=300, deadline=None)
@given(st.lists(STATEMENTS, max_size=5))
def test_no_read_is_missed(statements: list[str]) -> None:
    """Run random cells: each name that a cell reads from the notebook must be in `used_names`."""
    source = "\n".join(statements)
    helpers: dict[str, object] = {"use": lambda value: value, "context": _Context}
    notebook = _Watched({**helpers, "f": lambda: 0, **dict.fromkeys(NAMES, 0)})
    with contextlib.suppress(NameError, TypeError, RecursionError):
        exec(compile(source, "<cell>", "exec"), notebook)
    assert notebook.read <= set(used_names(source).why)
