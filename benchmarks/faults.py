"""Faults planted on purpose: does the suite notice them?

Single faults are drawn from all of geomon/: a comparison, an operator, a constant, a condition, the
order of two arguments, a call or a statement that is left out, a result that is None, a tag or a
name. Each meets tests that run its line, until the first one fails.

A process imports the libraries, and a child of it collects the whole suite. Each fault is planted
in a fork of this child: the functions of the module get the code that the compiler makes of the
faulty text, and the tests run there, with nothing to import. The fault is in the file, too, for
programs that tests start. What the import runs itself, as tables and defaults, cannot be exchanged:
such a fault meets a fork of the first process, which imports the faulty file and collects the files
of its tests.

coverage.py says which test runs which line. That is counted once for each content of geomon/ and of
the test's file, and kept.

What no test notices is shown to the type checker, which `make check` runs: a list where a tuple is
declared is no fault that could be committed. What survives both is listed.

The same seed draws the same faults as long as their functions stay as they are: the draw goes by a
hash of the fault and not by its place in the file.
"""

import ast
import contextlib
import functools
import gc
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.pool import Pool
from pathlib import Path
from types import CodeType, FunctionType
from typing import Annotated, Any, NamedTuple

import coverage
import pytest
import typer

ROOT = Path(__file__).resolve().parent.parent
# Imported before anything of the project.
LIBRARIES = (
    "torch", "scipy.stats", "faiss", "lightning", "transformers", "accelerate", "pandas",
    "sklearn.datasets", "tensorboard", "hypothesis", "jsonargparse", "requests",
)  # fmt: skip
# The tests of a fault take so many seconds, by the count, at most.
BUDGET = 60.0
# A test that takes this many times as long as the slowest of its file hangs, after so many seconds.
SLOWER, LEAST_SECONDS = 5, 60.0
# The suite is counted by its own limits of time.
COUNTING_SECONDS = 1800.0
UNNOTICED = ("survived", "not run")
# A line that names a fault, in what this program prints.
NAMED = re.compile(r"(geomon/\S+\.py):(\d+) (\(\w+\) .*)")

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr, ast.BitXor: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
# Calls whose arguments are sentences for a person: their words are not behaviour.
SPEAKING = {"warn", "warning", "info", "debug", "error", "print", "echo", "Option", "Note"}
# Keywords and setters that only set the looks of a drawing: no number is the right one.
LOOKS = {
    "alpha", "aspect", "borderaxespad", "color", "dpi", "figsize", "fontsize", "framealpha", "ha",
    "handlelength", "labelsize", "length", "ls", "lw", "ms", "pad", "s", "va", "xytext", "zorder",
}  # fmt: skip
# Functions of which an exchange of two arguments changes nothing, or is a TypeError at once.
SYMMETRIC = {
    "max",
    "min",
    "hypot",
    "isinstance",
    "issubclass",
    "maximum",
    "minimum",
    "suppress",
    "transpose",
    "swapaxes",
}


@dataclass(frozen=True)
class Fault:
    """One change of one expression or statement.

    Attributes:
        path: File, relative to the project.
        line: Line of the change.
        kind: What was done.
        span: First and last place of the change in the file's bytes.
        before: Code that was there.
        after: Code that stands there instead.
        owner: Name of the function or class around it.
        lines: First and last line of the statement; None where the import runs it.
    """

    path: str
    line: int
    kind: str
    span: tuple[int, int]
    before: str
    after: str
    owner: str
    lines: tuple[int, int] | None

    @property
    def key(self) -> str:
        """Everything that tells the fault from others but its place in the file."""
        return "\0".join((self.path, self.owner, self.kind, self.before, self.after))

    @property
    def words(self) -> str:
        """The fault for a reader, without its place."""
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"({self.owner}) {self.kind}: {before}  ->  {after}"

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.words}"

    def has_line(self, line: int) -> bool:
        """Tell whether a line that runs may be the fault's."""
        return self.lines is None or self.lines[0] <= line <= self.lines[1]

    def planted(self, data: bytes) -> bytes:
        """Return the content of the file with the fault in it."""
        begin, end = self.span
        return data[:begin] + self.after.encode() + data[end:]


Lines = tuple[int, int] | None


def swap(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the kind and the new code of each fault that can be planted at a node."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            new = ast.Compare(node.left, [COMPARISONS[type(op)]()], node.comparators)
            yield "comparison", f"({ast.unparse(new)})"
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            words = (ast.JoinedStr, ast.Constant)  # a path or a sentence: a TypeError at once
            if not any(isinstance(end, words) and _is_text(end) for end in (node.left, node.right)):
                new = ast.BinOp(node.left, OPERATORS[type(op)](), node.right)
                yield "operator", f"({ast.unparse(new)})"
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "condition", f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "sign", f"({ast.unparse(operand)})"
        case ast.Constant(value=bool() as value):
            yield "constant", str(not value)
        case ast.Constant(value=int() as value):
            yield "constant", str(value + 1)
        case ast.Constant(value=float() as value):
            yield "constant", repr(value * 2 or 1.0)
        case ast.Constant(value=str() as value) if value.replace("_", "").isalnum():
            yield "name", repr(value + "_x")
        case ast.Call(func=function, args=[first, second, *rest], keywords=named):
            starred = any(isinstance(arg, ast.Starred) for arg in (first, second))
            if not starred and _name_of(function) not in SYMMETRIC:
                new = ast.Call(function, [second, first, *rest], named)
                if ast.unparse(first) != ast.unparse(second):
                    yield "arguments", ast.unparse(new)
        case ast.Call(args=[only], keywords=[]) if not isinstance(only, ast.Starred):
            if not isinstance(only, ast.GeneratorExp):
                yield "call left out", f"({ast.unparse(only)})"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "statement left out", "pass"
        case ast.Return(value=ast.expr() as value):
            if not (isinstance(value, ast.Constant) and value.value in (None, False)):
                yield "result", "return None"


def _is_text(node: ast.expr) -> bool:
    return not isinstance(node, ast.Constant) or isinstance(node.value, str | bytes)


def _name_of(function: ast.expr) -> str:
    return str(getattr(function, "id", getattr(function, "attr", "")))


def conditions(node: ast.AST) -> list[ast.expr]:
    """List the conditions of a node that can be negated."""
    match node:
        case ast.If() | ast.While() | ast.IfExp():
            return [node.test]
        case ast.comprehension():
            return node.ifs
    return []


def silent(node: ast.AST) -> list[ast.AST]:
    """The parts of a node in which no fault changes behaviour: hints, docstrings, sentences."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Module():
            parts: list[ast.AST | None] = [getattr(node, "returns", None)]
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                parts.append(first)
            return [part for part in parts if part]
        case ast.arg() | ast.AnnAssign():
            return [node.annotation] if node.annotation else []
        case ast.Raise():
            return [node]
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return [node]
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return [node]
        case ast.keyword(arg=str() as name) if name in LOOKS:
            return [node]
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))):
            return [node] if name.removeprefix("set_") in LOOKS else []
        case ast.Dict():
            looks = [isinstance(key, ast.Constant) and key.value in LOOKS for key in node.keys]
            pairs = zip(node.keys, node.values, looks, strict=True)
            return [part for key, value, look in pairs if look for part in (key, value) if part]
        case ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return [node]
        case ast.Call(func=ast.Name(id="zip"), keywords=[ast.keyword(value=ast.Constant(True))]):
            return [*node.keywords]  # that lengths are equal is an assertion, as a Raise is
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            if name in SPEAKING:
                return [*node.args, *node.keywords]
            if name in ("cast", "TypeVar", "isinstance"):
                return node.args[:1] if name == "cast" else list(node.args)
    return []


def faults_of(path: str, text: str) -> list[Fault]:
    """Every fault that can be planted in a file, in the order of the file."""
    data = text.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Fault] = []

    def add(node: ast.expr | ast.stmt, kind: str, after: str, owner: str, lines: Lines) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = data[begin:end].decode()
        found.append(Fault(path, node.lineno, kind, (begin, end), before, after, owner, lines))

    def walk(node: ast.AST, owner: str, lines: Lines) -> None:
        bodies = {id(part) for part in getattr(node, "body", ())} if is_function(node) else set()
        for child in ast.iter_child_nodes(node):
            if any(child is part for part in silent(node)) or child in silent(child):
                continue
            at = lines
            if isinstance(child, ast.stmt) and (lines or id(child) in bodies):
                at = lines_of(child)
            if isinstance(child, ast.expr | ast.stmt):
                for kind, after in swap(child):
                    add(child, kind, after, owner, at)
            for test in conditions(child):
                add(test, "condition", f"(not ({ast.unparse(test)}))", owner, at)
            scope = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            walk(child, child.name if isinstance(child, scope) else owner, at)

    walk(ast.parse(text), "module", None)
    return found


def is_function(node: ast.AST) -> bool:
    """Tell whether a node is a function: what its body does, no import runs."""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def lines_of(statement: ast.stmt) -> tuple[int, int]:
    """Return the first and last line of a statement, without the statements in it."""
    inner = [part.lineno for part in ast.walk(statement) if isinstance(part, ast.stmt)]
    inner = [line for line in inner if line > statement.lineno]
    end = statement.end_lineno or statement.lineno
    return statement.lineno, min([end, *(line - 1 for line in inner)])


def folder_of(path: str) -> str:
    """Return the folder of a file."""
    return str(Path(path).parent)


def folders() -> list[str]:
    """List the folders over which faults are spread evenly."""
    found = {file.parent.relative_to(ROOT) for file in (ROOT / "geomon").rglob("*.py")}
    return sorted(map(str, found))


def faults_in(folder: str) -> list[Fault]:
    """Every fault that can be planted in the files of a folder."""
    files = sorted((ROOT / folder).glob("*.py"))
    return [each for file in files for each in faults_of(f"{folder}/{file.name}", file.read_text())]


def draw(seed: int, count: int, only: str) -> list[Fault]:
    """Draw faults with a quota per folder, cycling over kinds."""
    heads = [name.rstrip("/") for name in only.split(",")]
    chosen = [
        name for name in folders() if any(f"{name}/".startswith(f"{head}/") for head in heads)
    ]
    if not chosen:
        raise SystemExit(f"--only: expected some of {', '.join(folders())}, got {only}")
    drawn: list[Fault] = []
    for number, folder in enumerate(chosen):
        quota = count // len(chosen) + (number < count % len(chosen))
        repeats: Counter[str] = Counter()
        ranked: dict[Fault, str] = {}
        for fault in faults_in(folder):
            repeats[fault.key] += 1
            word = f"{seed}\0{repeats[fault.key]}\0{fault.key}"
            ranked[fault] = hashlib.sha256(word.encode()).hexdigest()
        kinds: Counter[str] = Counter()
        turns = {}
        for fault in sorted(ranked, key=lambda fault: ranked[fault]):
            kinds[fault.kind] += 1
            turns[fault] = kinds[fault.kind]
        drawn += sorted(ranked, key=lambda fault: (turns[fault], ranked[fault]))[:quota]
    return drawn


def listed_in(text: str) -> list[Fault]:
    """Return the faults that a text names, wherever their lines are by now."""
    found: dict[Fault, None] = {}
    for path, line, words in NAMED.findall(text):
        known = faults_of(path, (ROOT / path).read_text()) if (ROOT / path).exists() else []
        alike = [fault for fault in known if fault.words == words.strip()]
        if alike:
            found[min(alike, key=lambda fault: abs(fault.line - int(line)))] = None
        else:
            print(f"gone: {path}:{line} {words}")
    return list(found)


def test_files() -> list[str]:
    """List the files with tests: those of the suite, and modules with doctests."""
    suite = sorted((ROOT / "tests").rglob("test_*.py"))
    doctests = [
        file for file in sorted((ROOT / "geomon").rglob("*.py")) if ">>>" in file.read_text()
    ]
    return [str(file.relative_to(ROOT)) for file in [*suite, *doctests]]


@dataclass
class Account:
    """What the suite runs.

    Attributes:
        tests: Tests, or files of which a process of their own ran the line, by file and line.
        imported: Lines that the import of geomon and of the tests runs, by file.
        seconds: How long each test takes; those that fail without a fault are absent.
    """

    tests: dict[str, dict[int, set[str]]] = field(
        default_factory=lambda: defaultdict(partial(defaultdict, set))
    )
    imported: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, seconds: Mapping[str, float], ran: Mapping[str, Mapping[str, list[int]]]) -> None:
        """Add what was counted in one process: of each file, which test ran which lines."""
        self.seconds |= seconds
        for path, by_test in ran.items():
            for test, lines in by_test.items():
                if not test:
                    self.imported[path].update(lines)
                    continue
                for line in lines:
                    self.tests[path][line].add(test)

    def is_imported(self, fault: Fault) -> bool:
        """Tell whether the import runs the fault."""
        return fault.lines is None or any(map(fault.has_line, self.imported[fault.path]))

    def of(self, fault: Fault) -> dict[str, float]:
        """List the tests that run a fault, in their order, each with the seconds it may take."""
        found = set[str]().union(
            *(tests for line, tests in self.tests[fault.path].items() if fault.has_line(line))
        ) or (set(self.seconds) if fault.lines is None else set())
        by_file = defaultdict[str, list[str]](list)
        for test in sorted(self.seconds, key=self.seconds.__getitem__):
            by_file[test.partition("::")[0]].append(test)
        # Those of the module's own folder, one of each other file, then a second one of each: those
        # of one file are much alike.
        folder = Path("tests", *Path(fault.path).parts[1:-1])
        turns: list[tuple[int, float, str]] = []
        limits = {}
        for file, tests in by_file.items():
            own = file == fault.path or Path(file).parent == folder
            limits[file] = max(LEAST_SECONDS, SLOWER * self.seconds[tests[-1]])
            chosen = [test for test in tests if test in found or file in found]
            turns += [
                (0 if own else turn, self.seconds[test], test)
                for turn, test in enumerate(chosen, start=1)
            ]
        turns.sort()
        spent = itertools.accumulate(seconds for _, seconds, _ in turns)
        within = [
            test
            for (_, _, test), seconds in zip(turns, spent, strict=True)
            if seconds <= BUDGET or test == turns[0][2]
        ]
        files = dict.fromkeys(test.partition("::")[0] for test in within)
        return {
            test: limits[file] for file in files for test in within if test.startswith(f"{file}::")
        }


Say = Callable[[str, str], None]
Functions = Mapping[str, list[FunctionType]]


class Job(NamedTuple):
    """Tests that a fork runs.

    Attributes:
        tests: The tests, in their order, and the seconds that each may take.
        fresh: Whether the fork imports the project itself; otherwise it was collected before.
        fault: The fault that is planted.
        kept: File in which is kept what the tests run; then no failure ends the fork.
    """

    tests: dict[str, float]
    fresh: bool = False
    fault: Fault | None = None
    kept: Path | None = None

    def run(self, say: Say, session: pytest.Session | None, functions: Functions) -> None:
        """Run the tests in this process, which ends with them."""
        if self.fault is not None:
            file = Path(self.fault.path)
            data = file.read_bytes()
            file.write_bytes(self.fault.planted(data))
            if session and not exchange(self.fault, data, functions[self.fault.path]):
                say("not planted", "")
                return
        tests = list(self.tests)
        plugin = Tests(tests, say) if self.kept is None else Counting(tests, say, self.kept)
        if session is None:
            collect(plugin, sorted({test.partition("::")[0] for test in tests}))
        else:
            session.config.pluginmanager.register(plugin)
            plugin.pytest_runtestloop(session)

    def watch(self, session: pytest.Session | None, functions: Functions) -> tuple[str, str]:
        """Run the tests in a fork until it says its end, is late with a test, or dies."""
        here, there = multiprocessing.Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            here.close()
            self.run(lambda *words: there.send(words), session, functions)
            os._exit(0)
        there.close()
        how, why = "begins", "the import"
        while how == "begins":
            least = LEAST_SECONDS if self.kept is None else COUNTING_SECONDS
            if not here.poll(self.tests.get(why, least)):
                how = "timed out"
            else:
                try:
                    how, why = here.recv()
                except EOFError:
                    how, why = "noticed", f"{why} ends the process"
        with contextlib.suppress(ProcessLookupError):  # what the tests started goes with them
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return how, why


def collect(plugin: "Tests", files: list[str]) -> None:
    """Import and collect files of tests in this process, which the plugin ends.

    Args:
        plugin: What is done when they are collected.
        files: The files; none for the whole suite.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    # Plugins of pytest are loaded already where a library that was imported before needs them.
    warnings = ("pytest.PytestAssertRewriteWarning", "coverage.exceptions.CoverageWarning")
    options = [part for warning in warnings for part in ("-W", f"ignore::{warning}")]
    pytest.main([*options, f"--basetemp={Path.cwd()}_temporary", *files], [plugin])
    os._exit(1)


class Tests:
    """A plugin of pytest that runs some of the tests, until the first one fails."""

    def __init__(self, tests: list[str], say: Say) -> None:
        self._tests = tests
        self._say = say

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Notice a file that cannot be imported."""
        if report.failed:
            self._end("noticed", reason(report))

    def pytest_internalerror(self, excrepr: object) -> None:
        """Notice an error in pytest or in a plugin."""
        self._end("noticed", str(excrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notice a failure."""
        if report.failed:
            self._end("noticed", reason(report))

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests; that one is not there any more is noticed."""
        items = defaultdict[str, list[pytest.Item]](list)
        for item in session.items:
            items[item.nodeid].append(item)
            items[item.nodeid.partition("::")[0]].append(item)
        if gone := [test for test in self._tests if test not in items]:
            self._end("noticed", f"{gone[0]} is not collected")
        chosen = [item for test in self._tests for item in items[test]]
        for item, following in itertools.zip_longest(chosen, chosen[1:]):
            self._say("begins", item.nodeid)
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        self._end("survived", "")
        return True

    def _end(self, how: str, why: str) -> None:
        self._say(how, why)
        os._exit(0)


def reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Return which test failed, and the first line of why."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return f"{report.nodeid} {crash.message.splitlines()[0][:120] if crash else ''}"


class Counting(Tests):
    """Runs all tests of a file; keeps which of them runs which line, and for how long."""

    def __init__(self, tests: list[str], say: Say, kept: Path) -> None:
        super().__init__(tests, say)
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        self._kept = kept
        self._folder = Path(tempfile.mkdtemp())
        (self._folder / "ini").write_text(
            "[run]\nsource = geomon\nrelative_files = true\npatch = subprocess, _exit, fork\n"
        )
        # What is not a test's own is run by a process or by a thread.
        context = tests[0].partition("::")[0] if tests else None
        self._cover = self._open(data_suffix=True, context=context)
        self._cover.start()

    def _open(self, **options: Any) -> coverage.Coverage:
        return coverage.Coverage(
            self._folder / "lines", config_file=str(self._folder / "ini"), **options
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run a test in a context of its own."""
        self._cover.switch_context(item.nodeid)
        self._seconds[item.nodeid] = 0.0
        try:
            return (yield)
        finally:
            self._cover.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep how a part of a test went."""
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.add(report.nodeid)

    def _end(self, how: str, why: str) -> None:
        self._cover.stop()
        self._cover.save()
        whole = self._open()
        whole.combine([str(self._folder)])
        data = whole.get_data()
        ran: dict[str, dict[str, list[int]]] = {}
        for path in data.measured_files():
            by_test = ran[path] = defaultdict(list)
            for line, names in data.contexts_by_lineno(path).items():
                for name in names:
                    by_test[name.partition("|")[2] or name].append(line)
        passed = {test: self._seconds[test] for test in self._seconds if test not in self._failed}
        self._kept.write_text(json.dumps((passed, ran)))
        shutil.rmtree(self._folder)
        super()._end(how, f"fail without a fault: {self._failed}" if self._failed else "")


class Collected(Tests):
    """Watches a fork for every job, once the whole suite is collected."""

    def __init__(self, channel: Connection) -> None:
        super().__init__([], lambda *words: channel.send(words))
        self._channel = channel

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Do jobs until there are no more."""
        functions = functions_here()
        gc.freeze()  # no fork need search what was imported for garbage
        self._say("collected", "")
        with contextlib.suppress(EOFError):
            while True:
                self._say(*self._channel.recv().watch(session, functions))
        os._exit(0)


def functions_here() -> Functions:
    """List the functions of the project that there are in this process, by file."""
    found = defaultdict[str, list[FunctionType]](list)
    here = f"{Path.cwd()}/"
    gc.unfreeze()
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename.startswith(here):
            found[each.__code__.co_filename.removeprefix(here)].append(each)
    return found


def codes_in(code: CodeType, counts: Counter[str]) -> Iterator[tuple[str, CodeType]]:
    """Yield the codes that a code holds, each with a name that no other has."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            counts[inner.co_qualname] += 1
            yield f"{inner.co_qualname} {counts[inner.co_qualname]}", inner
            yield from codes_in(inner, counts)


def exchange(fault: Fault, data: bytes, functions: list[FunctionType]) -> bool:
    """Give functions of a module the code of its faulty text; tells whether they could take it."""
    before, after = (
        dict(codes_in(compile(text, Path(fault.path).resolve(), "exec"), Counter()))
        for text in (data, fault.planted(data))
    )
    names = {code: name for name, code in before.items()}
    changed = 0
    for function in functions:
        code = after.get(names.get(function.__code__, ""))
        if code is None or len(code.co_freevars) != len(function.__code__.co_freevars):
            return False
        changed += code != function.__code__
        function.__code__ = code
    return changed > 0


def copy_project(folder: Path) -> Path:
    """Copy what git keeps or would keep of the project into a new folder in a folder."""
    tree = Path(tempfile.mkdtemp(dir=folder.resolve()))
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\n")  # fmt: skip
    for name in filter(None, listed):
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


@contextlib.contextmanager
def restored(file: Path) -> Iterator[bytes]:
    """Give a file its content back behind a context, which gets it."""
    data = file.read_bytes()
    try:
        yield data
    finally:
        file.write_bytes(data)


def enter_copy(folder: Path) -> None:
    """Make a copy of the project in which this process, and all that it starts, are from now on."""
    tree = copy_project(folder)
    os.chdir(tree)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
    sys.modules.pop("benchmarks", None)


@functools.cache
def collected() -> Connection:
    """Start the process that collects the whole suite of this process's copy."""
    here, there = multiprocessing.Pipe()
    if os.fork() == 0:
        here.close()
        collect(Collected(there), [])
    there.close()
    how, why = here.recv()
    if how != "collected":
        raise RuntimeError(f"the suite cannot be collected: {why}")
    return here


def do(job: Job) -> tuple[Job, str, str, float]:
    """Do a job in this process's copy; returns how it ended, why, and after how many seconds."""
    began = time.monotonic()
    how, why = "not planted", ""
    if job.fault and not job.tests:
        return job, "not run", why, 0.0
    with restored(Path(job.fault.path)) if job.fault else contextlib.nullcontext():
        if not job.fresh:
            collected().send(job)
            how, why = collected().recv()
    with restored(Path(job.fault.path)) if job.fault else contextlib.nullcontext():
        if how == "not planted":
            how, why = job.watch(None, {})
    return job, how, why, time.monotonic() - began


def sources_of(file: Path) -> list[Path]:
    """List a file of tests and those beside it that it imports, one through another."""
    helpers = [each for each in (ROOT / "tests").glob("*.py") if not each.match("test_*")]
    found = [file, *(ROOT / "tests").rglob("conftest.py")]
    for each in found:
        words = set(re.findall(r"\w+", each.read_text()))
        found += [other for other in helpers if other.stem in words and other not in found]
    return sorted(found)


def take_account(pool: Pool, folder: Path) -> Account:
    """Count which test runs which line, unless it was counted before.

    Args:
        pool: Workers.
        folder: Folder of what is counted; what was counted of the same code is used again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    code = sorted((ROOT / "geomon").rglob("*.py"))
    suite = sorted((ROOT / "tests").rglob("*.py"))

    def kept(name: str, files: list[Path]) -> Path:
        content = hashlib.sha256(b"".join(file.read_bytes() for file in [*code, *files]))
        return folder.resolve() / f"{name.replace('/', '.')}.{content.hexdigest()[:16]}.json"

    jobs = {kept("import", suite): Job({}, fresh=True)} | {
        kept(name, sources_of(ROOT / name)): Job({name: COUNTING_SECONDS}) for name in test_files()
    }
    missing = [job._replace(kept=file) for file, job in jobs.items() if not file.exists()]
    for job, how, why, seconds in pool.imap_unordered(do, missing):
        print(f"{seconds:5.1f} s  {', '.join(job.tests) or 'the import'}: {how} {why}", flush=True)
    account = Account()
    for file in jobs:
        account.add(*json.loads(file.read_text()))
    return account


def refused(folder: Path, faults: list[Fault]) -> list[Fault]:
    """List the faults that the type checker refuses."""
    tree = copy_project(folder)
    found = []
    for fault in faults:
        with restored(tree / fault.path) as data:
            (tree / fault.path).write_bytes(fault.planted(data))
            checker = [sys.executable, "-m", "mypy", "--no-error-summary"]
            if subprocess.run(checker, check=False, cwd=tree, capture_output=True).returncode:
                found.append(fault)
    return found


def main(
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
    count: Annotated[int, typer.Option(help="Faults, spread over the folders.")] = 220,
    only: Annotated[
        str, typer.Option(help="Folders, such as geomon/show,geomon/record.")
    ] = "geomon",
    faults: Annotated[Path | None, typer.Option(help="File that names the faults.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes at a time.")] = 2,
    counted: Annotated[Path, typer.Option(help="Folder of which test runs which line.")] = Path(
        "runs/coverage"
    ),
    list_: Annotated[bool, typer.Option("--list", help="Print the faults, plant none.")] = False,
) -> None:
    """Draw faults, plant each, and print what survived.

    What is printed names faults as `--faults` reads them.
    """
    drawn = listed_in(faults.read_text()) if faults else draw(seed, count, only)
    if list_:
        print(*drawn, sep="\n")
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in LIBRARIES:
        importlib.import_module(name)
    ends: dict[Fault, str] = {}
    times = []
    forks = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="faults_") as folder:
        with forks.Pool(jobs, enter_copy, (Path(folder),)) as pool:
            account = take_account(pool, counted)
            planted = [Job(account.of(each), account.is_imported(each), each) for each in drawn]
            for job, how, why, seconds in pool.imap_unordered(do, planted):
                assert job.fault
                ends[job.fault] = how
                times.append(seconds)
                print(f"{len(ends):4d} {how:9s} {seconds:5.1f} s  {job.fault}", flush=True)
                print(f"{' ' * 24}{why or f'{len(job.tests)} tests'}", flush=True)
        unnoticed = [fault for fault in drawn if ends[fault] in UNNOTICED]
        ends |= dict.fromkeys(refused(Path(folder), unnoticed), "refused")
    print(f"\n{len(ends)} faults, {statistics.median(times):.1f} s each (median), by folder:")
    for name in folders():
        those = Counter(end for fault, end in ends.items() if folder_of(fault.path) == name)
        if those:
            words = ", ".join(f"{number} {end}" for end, number in sorted(those.items()))
            print(f"  {name:25s} {words}")
    survivors = [fault for fault in drawn if ends[fault] in UNNOTICED]
    total = max(len(ends), 1)
    print(f"{1 - len(unnoticed) / total:.1%} noticed by a test (one that hangs, too)")
    print(f"{1 - len(survivors) / total:.1%} by a test or the type checker")
    print(*(["survivors:"] if survivors else []), *survivors, sep="\n  ")


if __name__ == "__main__":
    typer.run(main)
