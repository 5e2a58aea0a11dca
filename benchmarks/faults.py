"""Faults planted on purpose: does the suite notice them?

Single faults are drawn from all of geomon/: a comparison, an operator, a constant, a condition, the
order of two arguments, a call or a statement that is left out, a result that is None, a tag or a
name. Each meets tests that run its line, until the first one fails.

A process imports all packages that the project imports, once, and nothing of the project. Each
fault is planted in the file of a copy, and a fork of the process collects and runs the tests.

coverage.py says which test runs which line. That is counted once for each content of geomon/ and of
the test's file, and kept.

Faults that no test notices are shown to the type checker, which `make check` runs: a list in place
of a declared tuple could never be committed. Faults that survive both are listed.

The same seed draws the same faults as long as their functions stay as they are: the draw goes by a
hash of the fault and not by its place in the file.
"""

import ast
import contextlib
import gc
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, NamedTuple

import coverage
import pytest
import typer

ROOT = Path(__file__).resolve().parent.parent
# The tests of a fault take so many seconds, by the count, at most.
BUDGET = 100.0
# Seconds of a test that make its file a costly one.
COSTLY = 15.0
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
        kind: Kind of the change.
        span: First and last place of the change in the file's bytes.
        before: Code that was there.
        after: Code that stands there instead.
        owner: Name of the function or class around it.
        lines: First and last line of the statement; None if the import runs it.
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

    def add(
        node: ast.expr | ast.stmt, kind: str, after: str, owner: str, lines: tuple[int, int] | None
    ) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = data[begin:end].decode()
        found.append(Fault(path, node.lineno, kind, (begin, end), before, after, owner, lines))

    def walk(node: ast.AST, owner: str, lines: tuple[int, int] | None) -> None:
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)  # what their bodies do, no import runs
        bodies = {id(part) for part in node.body} if isinstance(node, functions) else set()
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
            is_scope = isinstance(child, (*functions, ast.ClassDef))
            walk(child, child.name if is_scope else owner, at)

    walk(ast.parse(text), "module", None)
    return found


def lines_of(statement: ast.stmt) -> tuple[int, int]:
    """Return the first and last line of a statement, without the statements in it."""
    inner = [part.lineno for part in ast.walk(statement) if isinstance(part, ast.stmt)]
    inner = [line for line in inner if line > statement.lineno]
    end = statement.end_lineno or statement.lineno
    return statement.lineno, min([end, *(line - 1 for line in inner)])


def draw(seed: int, count: int, only: str) -> list[Fault]:
    """Draw faults with a quota per folder, cycling over kinds."""
    heads = tuple(f"{name.rstrip('/')}/" for name in only.split(","))
    by_folder = defaultdict[Path, list[Fault]](list)
    for file in sorted((ROOT / "geomon").rglob("*.py")):
        path = file.relative_to(ROOT)
        if f"{path.parent}/".startswith(heads):
            by_folder[path.parent] += faults_of(str(path), file.read_text())
    if not by_folder:
        raise SystemExit(f"--only: expected folders such as geomon/show, got {only}")
    drawn: list[Fault] = []
    for number, folder in enumerate(sorted(by_folder, key=str)):
        quota = count // len(by_folder) + (number < count % len(by_folder))
        repeats: Counter[str] = Counter()
        ranked: dict[Fault, str] = {}
        for fault in by_folder[folder]:
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
    """List the files with tests: the suite's files, and modules with doctests."""
    suite = sorted((ROOT / "tests").rglob("test_*.py"))
    doctests = [
        file for file in sorted((ROOT / "geomon").rglob("*.py")) if ">>>" in file.read_text()
    ]
    return [str(file.relative_to(ROOT)) for file in [*suite, *doctests]]


class Account(NamedTuple):
    """Lines that the suite runs.

    Attributes:
        lines: Lines that each test runs, by file; lines that processes run are listed under the
            name of the file of tests.
        seconds: How long each test takes; those that fail without a fault are absent.
    """

    lines: dict[str, dict[str, list[int]]]
    seconds: dict[str, float]

    def who(self, fault: Fault) -> Set[str]:
        """Return what runs a fault; what the import runs, all tests of the file meet."""
        ran = self.lines.get(fault.path, {})
        if fault.lines is None:
            return ran.keys() or self.seconds.keys()
        there = set(range(fault.lines[0], fault.lines[1] + 1))
        return {test for test, lines in ran.items() if not there.isdisjoint(lines)}

    def job(self, fault: Fault) -> "Job":
        """Choose tests that run a fault, and their order."""
        who, folder = self.who(fault), Path("tests", *Path(fault.path).parts[1:-1])
        # Those of the module's own folder, one of each other file, then a second one of each: those
        # of one file are much alike.
        turns, slowest = Counter[str](), dict[str, float]()
        ranked = []
        for test, seconds in sorted(self.seconds.items(), key=lambda each: each[1]):
            file = file_of(test)
            slowest[file] = seconds
            if test in who or file in who:
                turns[file] += file != fault.path and Path(file).parent != folder
                ranked.append((turns[file], seconds, test))
        ranked.sort()
        spent = itertools.accumulate(seconds for _, seconds, _ in ranked)
        count = max(1, sum(seconds <= BUDGET for seconds in spent))
        chosen = {test for _, _, test in ranked[:count]}
        # In their own order, since tests of a file share what is costly; costly files come last.
        order = [test for test in self.seconds if test in chosen]
        order.sort(key=lambda test: slowest[file_of(test)] > COSTLY)
        limits = {test: max(LEAST_SECONDS, SLOWER * slowest[file_of(test)]) for test in order}
        return Job(limits, fault)


def file_of(test: str) -> str:
    """Return the file of a test."""
    return test.partition("::")[0]


class Job(NamedTuple):
    """Tests that a fork runs.

    Attributes:
        tests: Tests or files of them, in their order, and the seconds that each may take.
        fault: The fault that is planted.
        kept: File in which is kept what the tests run; then no failure ends the fork.
    """

    tests: dict[str, float]
    fault: Fault | None = None
    kept: Path | None = None

    def run(self, channel: Connection) -> None:
        """Run the tests in this process, which ends with them."""
        plugin = Counting(self, self.kept, channel) if self.kept else Tests(self, channel)
        # Plugins of pytest were imported before it could rewrite their assertions.
        warnings = ("pytest.PytestAssertRewriteWarning", "coverage.exceptions.CoverageWarning")
        options = [part for warning in warnings for part in ("-W", f"ignore::{warning}")]
        files = sorted(set(map(file_of, self.tests)))
        pytest.main([*options, f"--basetemp={Path.cwd()}_temporary", *files], [plugin])

    def watch(self) -> tuple[str, str]:
        """Run the tests in a fork until it says its end, is late with a test, or dies."""
        here, there = multiprocessing.Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            here.close()
            self.run(there)
            os._exit(1)
        there.close()
        how, why = "begins", "the import"
        try:
            while how == "begins":
                how = "timed out"
                if here.poll(self.tests.get(why, COUNTING_SECONDS if self.kept else LEAST_SECONDS)):
                    how, why = here.recv()
        except EOFError:
            how, why = "noticed", f"{why} ends the process"
        finally:  # what the tests started goes with them, also where this process is ended
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return how, why


class Tests:
    """A plugin of pytest that runs tests until the first one fails."""

    def __init__(self, job: Job, channel: Connection) -> None:
        self._job = job
        self._channel = channel

    def pytest_exception_interact(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        """Notice a failure, or that a file cannot be imported."""
        crash = getattr(report.longrepr, "reprcrash", None)
        self._end("noticed", f"{report.nodeid} {crash.message if crash else report.longrepr}")

    def pytest_internalerror(self, excrepr: object) -> None:
        """Notice an error in pytest or in a plugin."""
        self._end("noticed", str(excrepr))

    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Run the tests; that one is not there any more is noticed."""
        items = defaultdict[str, list[pytest.Item]](list)
        for item in session.items:
            items[item.nodeid].append(item)
            items[file_of(item.nodeid)].append(item)
        for test in self._job.tests:
            if test not in items:
                self._end("noticed", f"{test} is not collected")
        chosen = [item for test in self._job.tests for item in items[test]]
        for item, following in itertools.zip_longest(chosen, chosen[1:]):
            self._channel.send(("begins", item.nodeid))
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        self._end("survived", f"{len(chosen)} tests")

    def _end(self, how: str, why: str) -> None:
        self._channel.send((how, why.partition("\n")[0][:200]))
        os._exit(0)


class Counting(Tests):
    """Runs all tests of a file; keeps which of them runs which line, and for how long."""

    def __init__(self, job: Job, kept: Path, channel: Connection) -> None:
        super().__init__(job, channel)
        self._kept = kept
        self._seconds = defaultdict[str, float](float)
        self._failed = dict[str, None]()
        self._folder = tempfile.mkdtemp()
        # Lines that a process or a thread of a test runs are counted for its file.
        Path(self._folder, "ini").write_text(
            f"[run]\ndata_file = {self._folder}/lines\ncontext = {''.join(job.tests)}\n"
            "source = geomon\nrelative_files = true\nparallel = true\n"
            "patch = subprocess, _exit, fork\n"
        )
        self._cover = coverage.Coverage(config_file=f"{self._folder}/ini")

    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Count from here on: the lines that an import runs are no test's."""
        self._cover.start()
        super().pytest_runtestloop(session)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run a test in a context of its own."""
        self._cover.switch_context(item.nodeid)
        result = yield
        self._cover.switch_context("")
        return result

    def pytest_exception_interact(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        """Keep what fails without a fault, or cannot be imported again."""
        self._failed[report.nodeid] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep how long a part of a test took."""
        self._seconds[report.nodeid] += report.duration

    def _end(self, how: str, why: str) -> None:
        self._cover.stop()
        self._cover.save()
        self._cover.combine([self._folder])
        data = self._cover.get_data()
        ran: dict[str, dict[str, list[int]]] = {}
        for path in data.measured_files():
            ran[path] = defaultdict(list)
            for line, names in data.contexts_by_lineno(path).items():
                for name in names:
                    ran[path][name.partition("|")[2] or name].append(line)
        shutil.rmtree(self._folder)
        if self._failed:
            why = f"without a fault fails {', '.join(self._failed)}"
        self._kept.write_text(json.dumps((self._seconds | self._failed, ran)))
        super()._end(how, why)


def import_packages() -> None:
    """Import the packages that modules of the project import."""
    modules = [file for name in ("geomon", "tests") for file in (ROOT / name).rglob("*.py")]
    found = (re.findall(r"^(?:from|import) ([\w.]+)", file.read_text(), re.M) for file in modules)
    for name in sorted(set(itertools.chain(*found))):
        if name.partition(".")[0] not in ("geomon", "benchmarks", "recipes"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    gc.freeze()  # no fork need search them for garbage


def work(jobs: list[Job], folder: Path, kept: Path) -> None:
    """Do jobs in a copy of the project, print how each ended, and keep that in a file."""
    tree = copy_project(folder)
    os.chdir(tree)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
    sys.modules.pop("benchmarks", None)
    import_packages()
    terminal, ends = os.fdopen(os.dup(1), "w"), []
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    for job in jobs:
        began = time.monotonic()
        with planted(job.fault, Path()):
            how, why = job.watch()
        seconds = time.monotonic() - began
        ends.append((job.fault, how, seconds))
        text = f"{how:9s} {seconds:6.1f} s  {job.fault or ', '.join(job.tests)}\n{' ' * 20}{why}"
        print(text, file=terminal, flush=True)
    kept.write_bytes(pickle.dumps(ends))


def share(jobs: list[Job], number: int) -> list[tuple[Fault | None, str, float]]:
    """Do jobs in a number of processes, which end with this one; returns how each job ended."""
    forks = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="faults_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        kept = [folder / f"{part}.ends" for part in range(min(number, len(jobs)))]
        workers = [
            forks.Process(target=work, args=(jobs[part::number], folder, file))
            for part, file in enumerate(kept)
        ]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        finally:
            for worker in workers:
                if worker.pid is not None:
                    worker.terminate()
                    worker.join()
        ends = [end for file in kept if file.exists() for end in pickle.loads(file.read_bytes())]
    if len(ends) < len(jobs):
        raise SystemExit("a process has died")
    return ends


@contextlib.contextmanager
def planted(fault: Fault | None, tree: Path) -> Iterator[None]:
    """Plant a fault in the file of a copy for as long as the context lasts."""
    if fault is None:
        yield
        return
    file, (begin, end) = tree / fault.path, fault.span
    data = file.read_bytes()
    file.write_bytes(data[:begin] + fault.after.encode() + data[end:])
    yield
    file.write_bytes(data)


def copy_project(folder: Path) -> Path:
    """Copy what git keeps or would keep of the project into a new folder in a folder."""
    tree = Path(tempfile.mkdtemp(dir=folder.resolve()))
    ignored = shutil.ignore_patterns(
        ".git", *(ROOT / ".gitignore").read_text().replace("/", "").split()
    )
    return shutil.copytree(ROOT, tree, ignore=ignored, dirs_exist_ok=True)


def sources_of(file: Path) -> list[Path]:
    """List a file of tests and the files of tests/support that it imports, directly or not."""
    support = sorted((ROOT / "tests" / "support").glob("*.py"))
    found = [file, *(ROOT / "tests").rglob("conftest.py")]
    for each in found:
        words = set(re.findall(r"\w+", " ".join(re.findall(r".*\bsupport\b.*", each.read_text()))))
        found += [other for other in support if other.stem in words and other not in found]
    return sorted(found)


def refused(faults: list[Fault], cache: Path) -> list[Fault]:
    """List the faults that the type checker refuses."""
    checker = [sys.executable, "-m", "mypy", "--cache-dir", str(cache.resolve())]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_project(Path(folder))
        for fault in faults:
            with planted(fault, tree):
                if subprocess.run(checker, check=False, cwd=tree, capture_output=True).returncode:
                    found.append(fault)
    return found


def take_account(processes: int, folder: Path, faults: list[Fault]) -> Account:
    """Count which test runs which line, unless that is kept in a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    code = sorted((ROOT / "geomon").rglob("*.py"))

    def kept(name: str, files: list[Path]) -> Path:
        content = hashlib.sha256(b"".join(file.read_bytes() for file in [*code, *files]))
        return folder.resolve() / f"{name.replace('/', '.')}.{content.hexdigest()[:16]}.json"

    jobs = [
        Job({name: COUNTING_SECONDS}, kept=kept(name, sources_of(ROOT / name)))
        for name in test_files()
    ]
    share([job for job in jobs if job.kept and not job.kept.exists()], processes)
    account = Account(defaultdict(dict), {})
    for job in jobs:
        seconds, ran = json.loads(Path(str(job.kept)).read_text())
        account.seconds.update(
            {test: spent for test, spent in seconds.items() if spent is not None}
        )
        for path in {fault.path for fault in faults}:
            account.lines[path].update(ran.get(path, {}))
    return account


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

    The output names faults as `--faults` reads them.
    """
    drawn = listed_in(faults.read_text()) if faults else draw(seed, count, only)
    if list_:
        print(*drawn, sep="\n")
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Ended from outside, it ends its processes, and what the tests in them have started.
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, lambda number, frame: sys.exit(f"ended by signal {number}"))
    account = take_account(jobs, counted, drawn)
    done = share([job for job in map(account.job, drawn) if job.tests], jobs)
    ends = dict.fromkeys(drawn, "not run") | {fault: how for fault, how, _ in done}
    unnoticed = [fault for fault in drawn if ends[fault] in UNNOTICED]
    ends |= dict.fromkeys(refused(unnoticed, counted / "mypy"), "refused")
    median = statistics.median(seconds for *_, seconds in done)
    print(f"\n{len(ends)} faults, {median:.1f} s each (median), by folder:")
    by_folder = defaultdict[str, Counter[str]](Counter)
    for fault, how in ends.items():
        by_folder[str(Path(fault.path).parent)][how] += 1
    for name, hows in sorted(by_folder.items()):
        print(f"  {name:25s} {', '.join(f'{number} {how}' for how, number in hows.items())}")
    survivors = [fault for fault in drawn if ends[fault] in UNNOTICED]
    print(f"{1 - len(unnoticed) / len(ends):.1%} noticed by a test (one that hangs, too)")
    print(f"{1 - len(survivors) / len(ends):.1%} by a test or the type checker")
    print(*(["survivors:"] if survivors else []), *survivors, sep="\n  ")


if __name__ == "__main__":
    typer.run(main)
