"""Find the names and modules that a cell uses, without running it.

The order of statements counts: if the cell sets a name before it reads the name, the cell does not
need the notebook's value.
"""

import ast
import difflib
import dis
import re
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import CO_OPTIMIZED
from types import CodeType, FunctionType
from typing import Any

from taas_magic.capture.syntax import parse, without_warnings
from taas_magic.errors import listed

_READS = {
    "LOAD_NAME",
    "LOAD_GLOBAL",
    "DELETE_NAME",
    "DELETE_GLOBAL",
    "LOAD_FROM_DICT_OR_GLOBALS",
}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_STORES = {"STORE_GLOBAL", "DELETE_GLOBAL"}
_CODE_MAGICS = {"time", "timeit", "prun", "capture", "memit", "mprun", "lprun", "debug"}
_CODE_MAGICS |= {"pinfo", "pinfo2", "pdef", "pdoc", "psource"}
"""Magics whose argument is Python code. `f?` is the magic `pinfo`, and `f??` is `pinfo2`."""

_DOLLAR = re.compile(r"(?<!\$)\$([A-Za-z_]\w*)")
"""A variable in a shell command: `$name`."""


@dataclass(frozen=True)
class CodeUse:
    """Names and modules that a code object and the code nested in it use.

    Attributes:
        now: Global names that are read when the code itself runs.
        later: Global names that are read when a function that the code defines is called.
        imports: Modules that the code imports; `from x import y` gives both `x` and `x.y`.
        attributes: Attribute names that the code looks up on any object.
        stores: Global names that the code, or a function defined in it, sets or deletes.
        lambdas: Global names that lambdas in the code read; these names are also in `now` or
            `later`.
    """

    now: frozenset[str]
    later: frozenset[str]
    imports: frozenset[str]
    attributes: frozenset[str]
    stores: frozenset[str]
    lambdas: frozenset[str]

    @property
    def names(self) -> frozenset[str]:
        """All global names that are read: the names in `now` and in `later`."""
        return self.now | self.later


@lru_cache(maxsize=1024)
def code_use(code: CodeType) -> CodeUse:
    """Find the names and modules that the bytecode instructions of `code` use.

    The result also has the names in the code of functions and classes that `code` defines:

    - Names that class bodies, lambdas and comprehensions read are in `now`, because their code may
      run when `code` runs. If a class body sets a name before it reads the name, the name does not
      count as read.
    - Names that functions read are in `later`.

    The result also has names in the text of IPython's magics and shell commands. The result is
    cached.
    """
    now: set[str] = set()
    later: set[str] = set()
    imports: set[str] = set()
    attributes: set[str] = set()
    stored: set[str] = set()
    stores: set[str] = set()
    lambdas: set[str] = set()
    is_module = code.co_name == "<module>"
    is_class_body = not code.co_flags & CO_OPTIMIZED and not is_module
    before: object = None
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        value = instruction.argval
        if name in _STORES or (is_module and name in ("STORE_NAME", "DELETE_NAME")):
            stores.add(value)
        if name in _READS:
            if not (is_class_body and value in stored):
                now.add(value)
        elif name == "STORE_NAME":
            stored.add(value)
        elif name in _ATTRIBUTES:
            attributes.add(value)
        elif name == "IMPORT_NAME":
            imports.update(_names_bound_by_import(value, before))
        before = value
    for nested in nested_codes(code):
        use = code_use(nested)
        later |= use.later
        runs_at_once = not nested.co_flags & CO_OPTIMIZED or nested.co_name.startswith("<")
        (now if runs_at_once else later).update(use.now)
        imports |= use.imports
        attributes |= use.attributes
        stores |= use.stores
        lambdas |= use.names if nested.co_name == "<lambda>" else use.lambdas
    if "get_ipython" in code.co_names:
        texts = [constant for constant in code.co_consts if isinstance(constant, str)]
        now |= _shell_names(texts)
        stores.update(*(_names(text, stored=True) for text in texts))
    found = (now, later, imports, attributes, stores, lambdas)
    return CodeUse(*map(frozenset, found))


def nested_codes(code: CodeType) -> Iterator[CodeType]:
    """Return an iterator over the code of functions, classes, lambdas, ... directly in `code`."""
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _all_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in nested_codes(code):
        yield from _all_codes(inner)


def _names_bound_by_import(module: str, from_names: object) -> Iterator[str]:
    yield module
    if isinstance(from_names, tuple):
        yield from (f"{module}.{name}" for name in from_names if name != "*")


def _shell_names(texts: list[str]) -> set[str]:
    """Return the variables in magics and shell commands, such as `!command {x} $y` or `%time f(x)`.

    IPython turns magics and shell commands into string constants, and evaluates the strings when
    the cell runs. The result has the names in `$name` and `{expression}`. If one of the strings is
    the name of a magic in `_CODE_MAGICS`, the other strings may be Python code. The result then
    also has the variables in this code; options at the beginning of a string are ignored.

    Args:
        texts: All string constants of the code.
    """
    runs_code = not _CODE_MAGICS.isdisjoint(texts)
    found: set[str] = set()
    for text in texts:
        found.update(_DOLLAR.findall(text))
        for expression in _braced(text):
            found |= _names(expression)
        if runs_code and text not in _CODE_MAGICS:
            found |= _names(re.sub(r"^(\s*-\w+(\s*\d+)?)+\s", "", text))
    return found


def _braced(text: str) -> list[str]:
    try:
        return [field for _, field, _, _ in string.Formatter().parse(text) if field]
    except ValueError:  # IPython leaves a string with unbalanced braces as it is
        return []


def _names(source: str, stored: bool = False) -> set[str]:
    """Return the names of all variables in `source`; an empty set if `source` is not Python.

    Args:
        stored: Whether to return only the variables that the source sets or deletes.
    """
    try:
        tree = parse(source.strip())
    except (SyntaxError, ValueError):
        return set()
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return {node.id for node in names if not (stored and isinstance(node.ctx, ast.Load))}


THE_CELL = "the cell uses it"
_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_SWALLOWING = {"suppress"}
"""Names of context managers that swallow exceptions."""

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@without_warnings()
def used_names(source: str, filename: str = "<cell>") -> "UsedNames":
    """Find the notebook names that a cell may read.

    Args:
        source: The cell as Python, after IPython's transformers; top-level `await` is allowed.

    Raises:
        SyntaxError: The cell is not Python.
    """
    code = compile(source, filename, "exec", _FLAGS, dont_inherit=True)
    found = UsedNames(code_use(code).stores)
    found.walk(parse(source, filename).body)
    return found


def reason_used_by(owner: str) -> str:
    """Return the reason for a capture, as text for the user: code of `owner` reads the variable."""
    return f"`{owner}` uses it"


class UsedNames:
    """Record of the notebook names that a cell uses, made in one pass over its statements.

    A name is used if a statement may read it before the cell has certainly assigned it. The names
    that the cell has certainly assigned are in `_defined`.

    The names that a function's code reads are used as soon as a statement reads the function's
    name, because the function may be called from then on. Until then, these names are in `_later`.

    The called function may itself call a function that the cell defines only afterwards. So the
    names that the called function reads are added to `_awaited`. If the cell then defines a
    function whose name is in `_awaited`, the names that the new function reads are used at once.

    Attributes:
        why: Reason for the capture of each used name, for messages.
        imports: Modules that the cell imports; `from x import y` gives both `x` and `x.y`.
        attributes: Attribute names that the cell looks up on any object.
        stores: Global names that the cell, or a function defined in it, sets or deletes.
        updates: Names that one statement both reads and sets, as in `total += 1`.
        assigned: Names that assignments outside of functions and classes set, and that the cell
            does not delete afterwards. Each name has the assigned expressions, and None for an
            assignment such as `total += 1`. Loop variables and imports do not count.
        definitions: Names that the functions and classes of the cell read when their code runs, by
            name of the function or class. In a session, a later cell may call the function.
        lambdas: Names that lambdas of the cell read. In a session, a later cell may call a lambda.
    """

    def __init__(self, stores: frozenset[str]) -> None:
        self.stores = stores
        self.updates: set[str] = set()
        self.assigned: dict[str, list[ast.expr | None]] = {}
        self.why: dict[str, str] = {}
        self.imports: set[str] = set()
        self.attributes: set[str] = set()
        self._defined: set[str] = set()
        self._later: dict[str, frozenset[str]] = {}
        self._awaited: set[str] = set()
        self.definitions: dict[str, frozenset[str]] = {}
        self.lambdas: set[str] = set()

    def assigns_new_value(self, name: str, value: Any) -> bool:
        """Return whether the cell may assign another value than `value` to a public variable.

        The cell assigns the same value if it assigns only a constant that equals `value`.
        """
        return not name.startswith("_") and not all(
            isinstance(it, ast.Constant) and type(it.value) is type(value) and it.value == value
            for it in self.assigned.get(name, [])
        )

    def walk(self, statements: Sequence[ast.stmt]) -> None:
        """Record the names that statements read and set; the statements run one after the other."""
        for statement in statements:
            self._statement(statement)

    def _branch(self, statements: Sequence[ast.stmt], bound: set[str] | None = None) -> set[str]:
        """Record the names in a block that may not run, such as the body of an `if`.

        The block may not have run. So after this call, `_defined` has no names that only the block
        sets, and `_later` and `definitions` still have the functions that the block called or
        replaced.

        Args:
            bound: Names that are set before the block runs, such as loop variables.

        Returns:
            The names that are certainly set if the block has run to its end. They include the names
            that were set before the block.
        """
        outside, self._defined = self._defined, self._defined | (bound or set())
        later, definitions = dict(self._later), dict(self.definitions)
        self.walk(statements)
        inside, self._defined = self._defined, self._defined & outside
        for by_name, before in ((self._later, later), (self.definitions, definitions)):
            for name, reads in before.items():
                by_name[name] = reads | by_name.get(name, frozenset())
        return inside

    def _statement(self, node: ast.stmt) -> None:
        """Record the names that a statement reads, and the names that it certainly sets.

        An `if` certainly sets the names that both branches set; a loop certainly sets none. Other
        kinds of statements are handled by methods of their own.
        """
        match node:
            case ast.If():
                self._evaluate(node.test)
                both = self._branch(node.body) & self._branch(node.orelse)
                self._defined |= both
            case ast.While():
                self._evaluate(node.test)
                self._branch(node.body)
                self._branch(node.orelse)
            case ast.For() | ast.AsyncFor():
                self._evaluate(node.iter)
                self._loads(node.target)
                self._branch(node.body, _bound(node.target))
                self._branch(node.orelse)
            case ast.With() | ast.AsyncWith():
                self._with(node)
            case ast.Match():
                self._match(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self._define(node)
            case ast.Pass() | ast.Break() | ast.Continue() | ast.Global() | ast.Nonlocal():
                pass
            case _ if hasattr(node, "finalbody"):
                self._try(node)
            case _:
                self._simple(node)

    def _simple(self, node: ast.stmt) -> None:
        """Record the names that a statement without blocks reads, assigns and deletes.

        The names that the statement both reads and assigns, as in `n += 1`, are added to `updates`.
        The names that the statement certainly assigns are added to `_defined`. If such a name was a
        function of the cell until now, the records about this function are removed. The names that
        the statement deletes are removed from `_defined`.
        """
        use = self._compiled(node)
        self.updates |= use.names & use.stores
        self._record_reads(use.names)
        for name in _assigned(node):
            self._defined.add(name)
            self._later.pop(name, None)
            self.definitions.pop(name, None)
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                value = None if isinstance(node, ast.AugAssign) else node.value
                self.assigned.setdefault(name, []).append(value)
        if isinstance(node, ast.Delete):
            for name in {n for target in node.targets for n in _bound(target)}:
                self._defined.discard(name)
                self.assigned.pop(name, None)

    def _define(self, node: _Definition) -> None:
        """Record the names that a function or class definition reads and sets.

        The definition's own name now counts as certainly set. Other names that the definition both
        reads and sets are added to `updates`.

        Python reads names in default values, decorators and class bodies when the definition runs,
        so these names are used at once. Names that Python reads only when the function is called
        are stored in `_later` and `definitions`. The names of an earlier definition with the same
        function name stay there, too.

        In two cases, the names in the function's code are also used at once. First, the definition
        has a decorator, which may call the function. Second, a function that may have run already
        calls this function (`_awaited`).
        """
        use = self._compiled(node)
        self.updates |= (use.names & use.stores) - {node.name}
        reads_at_once = use.names if node.decorator_list else use.now
        self._record_reads(reads_at_once)
        self._defined.add(node.name)
        for by_name in (self._later, self.definitions):
            by_name[node.name] = use.later | by_name.get(node.name, frozenset())
        if node.name in self._awaited:
            self._record_reads({node.name})

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        """Record the names of a `with` statement.

        If a context manager may swallow exceptions, the body may end early, so the names that the
        body sets do not count as certainly set.
        """
        for item in node.items:
            self._evaluate(item.context_expr)
            if item.optional_vars is not None:
                self._loads(item.optional_vars)
                self._defined.update(_bound(item.optional_vars))
        inside = self._branch(node.body)
        if not any(_may_swallow(item.context_expr) for item in node.items):
            self._defined |= inside

    def _try(self, node: ast.stmt) -> None:
        """Record the names of a `try` statement.

        An exception may end the `try`, `except` and `else` blocks early. So after the statement,
        only the names that the `finally` block sets count as certainly set.
        """
        assert isinstance(node, ast.Try) or type(node).__name__ == "TryStar"
        block: ast.Try = node  # type: ignore[assignment]
        done = self._branch(block.body)
        for handler in block.handlers:
            if handler.type is not None:
                self._evaluate(handler.type)
            self._branch(handler.body, {handler.name} if handler.name else None)
        self._branch(block.orelse, done)
        self.walk(block.finalbody)

    def _match(self, node: ast.Match) -> None:
        self._evaluate(node.subject)
        for case in node.cases:
            self._loads(case.pattern)
            bound = set(_captured(case.pattern))
            guard = [] if case.guard is None else [_statement_of(case.guard)]
            self._branch([*guard, *case.body], bound)

    def _evaluate(self, expression: ast.expr) -> None:
        self._record_reads(self._compiled(_statement_of(expression)).names)

    def _loads(self, node: ast.AST) -> None:
        found = (each for each in ast.walk(node) if isinstance(each, ast.Name))
        self._record_reads({each.id for each in found if isinstance(each.ctx, ast.Load)})

    def _compiled(self, node: ast.stmt) -> CodeUse:
        use = code_use(compile(ast.Module([node], []), "<cell>", "exec", _FLAGS, dont_inherit=True))
        self.imports |= use.imports
        self.attributes |= use.attributes
        self.lambdas |= use.lambdas
        return use

    def _record_reads(self, names: Iterable[str], why: str = THE_CELL) -> None:
        """Record that a statement reads these names.

        Skip a name that the cell has certainly set before. If a name refers to a function of the
        cell, the function may be called from now on. So also record the names that the function's
        code reads, and add these names to `_awaited`.

        Args:
            names: The names that the statement reads.
            why: Reason for the capture of the names, for messages.
        """
        for name in sorted(names):
            if name not in self._defined:
                self.why.setdefault(name, why)
            body = self._later.pop(name, frozenset())
            self._awaited |= body
            self._record_reads(body, reason_used_by(name))


def _statement_of(expression: ast.expr) -> ast.stmt:
    return ast.copy_location(ast.Expr(expression), expression)


def _assigned(node: ast.stmt) -> Iterator[str]:
    """Yield the names that an assignment or an import certainly sets; none for other statements."""
    match node:
        case ast.Assign():
            for target in node.targets:
                yield from _bound(target)
        case ast.AugAssign() | ast.AnnAssign() if node.value is not None:
            yield from _bound(node.target)
        case ast.Import():
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        case ast.ImportFrom():
            yield from (alias.asname or alias.name for alias in node.names if alias.name != "*")


def _bound(target: ast.expr) -> set[str]:
    names = (node for node in ast.walk(target) if isinstance(node, ast.Name))
    return {node.id for node in names if not isinstance(node.ctx, ast.Load)}


def _captured(pattern: ast.pattern) -> Iterator[str]:
    for node in ast.walk(pattern):
        if isinstance(node, ast.MatchAs | ast.MatchStar | ast.MatchMapping):
            name = node.rest if isinstance(node, ast.MatchMapping) else node.name
            yield from [name] if name else []


def _may_swallow(context: ast.expr) -> bool:
    """Return whether a context manager has a name in `_SWALLOWING`."""
    called = context.func if isinstance(context, ast.Call) else context
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in _SWALLOWING


@without_warnings()
def assigned_names(source: str | ast.Module) -> set[str]:
    """Return the variable names that a cell, or a function that the cell defines, may set."""
    code = compile(source, "<cell>", "exec", _FLAGS, dont_inherit=True)
    stored = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_NAME"}
    return stored | _set_by_global(code)


_SETS_ANY_NAME = {"exec", "globals", "locals", "push", "user_ns", "__main__"}
_SETS_ANY_NAME |= {"run_cell_magic", "run_line_magic"}
"""Names of functions and objects by which code can set variables whose names it does not contain.

An example is `exec`. These names also count if they are in a string.
"""

_FIND_MODULES = {"modules", "import_module", "__import__"}
"""Names with which code can get the module `__main__` by a string."""

_MAX_LISTED = 12


@without_warnings()
def unknown_result_message(
    names: Sequence[str],
    source: str,
    known: Collection[str],
    namespace: Mapping[str, Any],
    functions: Iterable[FunctionType] = (),
) -> str | None:
    """Return a message about the first name of `--out` that no rank will have at the work's end.

    Return None if each name may exist, or if the cell or one of `functions` may set any name, for
    example by `exec` or a star import.

    Args:
        names: Names in `--out`.
        source: Text of the cell; "" for the call of a function.
        known: Names of the variables that the ranks get, and that functions on the ranks set.
        namespace: Namespace of the notebook.
        functions: Functions that the ranks of a session may already have, and that may set names.
    """
    code = compile(source, "<cell>", "exec", _FLAGS, dont_inherit=True)
    codes = [code, *(function.__code__ for function in functions)]
    if not names or _has_star_import(source) or any(map(may_set_any_name, codes)):
        return None
    has = {*assigned_names(source), *known}.union(*map(_set_by_global, codes))
    missing = [name for name in names if name not in has]
    what = "cell" if source else "function"
    is_in_notebook = bool(missing) and missing[0] in namespace
    return _unknown_result_message(missing[0], has, what, is_in_notebook) if missing else None


def _unknown_result_message(
    name: str, has: Collection[str], what: str, is_in_notebook: bool
) -> str:
    """Return the message about a name in `--out` that no rank will have.

    The message suggests names in `has` that are similar to `name`. If no name is similar, the
    message lists the names in `has`.

    Args:
        has: Names that the ranks will have.
        what: Kind of the work: "cell" or "function".
        is_in_notebook: Whether the notebook has a variable of this name.
    """
    near = difflib.get_close_matches(name, has, n=3, cutoff=0.6)
    if near:
        possible = f"did you mean {' or '.join(near)}?"
    else:
        shown = sorted(each for each in has if not each.startswith("_"))
        possible = f"it has: {listed(shown, _MAX_LISTED) or 'none'}"
    why = f"the {what} does not set this variable"
    if is_in_notebook:
        why = f"the {what} neither sets nor uses it, so no rank has it"
    return f"--out {name}: {why}; {possible}"


def _has_star_import(source: str) -> bool:
    imports = (node for node in ast.walk(parse(source)) if isinstance(node, ast.ImportFrom))
    return any(alias.name == "*" for node in imports for alias in node.names)


def may_set_any_name(code: CodeType) -> bool:
    """Return whether code may set variables whose names it does not contain, for example by `exec`.

    Return True if the code, or the code nested in it, has a name or string in `_SETS_ANY_NAME`.
    Exception: the string "__main__" counts only if the same code can find a module by a string
    (`_FIND_MODULES`). Otherwise, the usual line `if __name__ == "__main__":` would count.
    """
    for each in _all_codes(code):
        names, texts = {*each.co_names}, {*each.co_consts}
        if names.isdisjoint(_FIND_MODULES):
            texts.discard("__main__")
        if not _SETS_ANY_NAME.isdisjoint(names | texts):
            return True
    return False


def _set_by_global(code: CodeType) -> set[str]:
    steps = (step for each in _all_codes(code) for step in dis.get_instructions(each))
    return {step.argval for step in steps if step.opname == "STORE_GLOBAL"}


def functions_of(namespace: Mapping[str, Any]) -> list[FunctionType]:
    """Return all functions in the notebook's namespace, and the methods of the classes in it."""
    # Another thread of the notebook may add a variable meanwhile.
    classes = [vars(value) for value in list(namespace.values()) if isinstance(value, type)]
    found = [value for names in (namespace, *classes) for value in list(names.values())]
    return [value for value in found if isinstance(value, FunctionType)]
