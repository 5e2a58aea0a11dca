"""Faults planted on purpose: does the suite notice them?

Single faults are drawn from all of geomon/: a comparison, an operator, a constant, a condition, the
order of two arguments, a call or a statement that is left out, a result that is None, a tag or a
name. The whole suite is run once, by coverage.py, which tells the tests that run each line. Each
fault is written into a copy of the project in a temporary folder, and the tests that run its line,
those of all the module where the line is run by the import, run there until the first one fails.
What no test notices is shown to the type checker, which `make check` runs: a list where a tuple is
declared is no fault that could be committed. What survives both is listed.

The same seed draws the same faults as long as their functions stay as they are: the draw goes by a
hash of the fault and not by its place in the file.
"""

import ast
import bisect
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import coverage
import pytest
import typer

ROOT = Path(__file__).resolve().parent.parent
# Imported once, before the first fault: half of a short test run is the import of torch.
PRELOADED = ["pytest", "torch", "scipy.stats", "faiss", "lightning", "transformers"]
# A fault that makes its tests this many times slower than they are hangs.
SLOWER = 5
LEAST_SECONDS = 90.0

# Of the tests that run a fault as many are run as take so many seconds; where none of them notices
# it, as many as take the second number.
BUDGETS = (100.0, 400.0)
UNNOTICED = ("survived", "not run")

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

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.path}:{self.line} ({self.owner}) {self.kind}: {before}  ->  {after}"


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


def draw(seed: int, count: int, only: str | None) -> list[Fault]:
    """Draw faults with a quota per folder, cycling over kinds."""
    chosen = [name for name in folders() if only is None or name == only.rstrip("/")]
    if not chosen:
        raise SystemExit(f"--only: expected one of {', '.join(folders())}, got {only}")
    drawn: list[Fault] = []
    for number, folder in enumerate(chosen):
        quota = count // len(chosen) + (number < count % len(chosen))
        everything = [
            fault
            for file in sorted((ROOT / folder).glob("*.py"))
            for fault in faults_of(f"{folder}/{file.name}", file.read_text())
        ]
        repeats: Counter[str] = Counter()
        ranked: dict[Fault, str] = {}
        for fault in everything:
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


def test_files() -> list[str]:
    """List the files with tests: those of the suite, and modules with doctests."""
    suite = sorted((ROOT / "tests").rglob("test_*.py"))
    doctests = [
        file for file in sorted((ROOT / "geomon").rglob("*.py")) if ">>>" in file.read_text()
    ]
    return [str(file.relative_to(ROOT)) for file in [*suite, *doctests]]


class Contexts:
    """Tells coverage.py which test runs, and keeps how long each took; None where it failed."""

    def __init__(self, cover: coverage.Coverage) -> None:
        self.seconds: dict[str, float | None] = {}
        self._cover = cover

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run a test in a context of its own."""
        self._cover.switch_context(item.nodeid)
        self.seconds[item.nodeid] = 0.0
        try:
            return (yield)
        finally:
            self._cover.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep how a part of a test went."""
        spent = self.seconds[report.nodeid]
        if spent is not None:
            self.seconds[report.nodeid] = None if report.failed else spent + report.duration


def run_tests(tree: str, tests: list[str], log: str, data: str | None) -> None:
    """Run tests in a copy of the project and exit with pytest's code; a child process.

    Args:
        tree: Folder of the copy.
        tests: Names of tests or of files of tests.
        log: File of the output.
        data: File in which coverage.py keeps which test runs which line; None for no account.
    """
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": tree, "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:] = [tree, *(entry for entry in sys.path if entry not in ("", str(ROOT), tree))]
    for name in [name for name in sys.modules if name.split(".")[0] in ("geomon", "recipes")]:
        del sys.modules[name]
    plain = ["-q", "-p", "no:cacheprovider", "--no-header", f"--basetemp={tree}_temporary"]
    # Its plugins are loaded already where a library that was imported before needs them.
    plain += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    if data is not None:
        plain += ["-W", "ignore::coverage.exceptions.CoverageWarning"]
        cover = coverage.Coverage(
            data, data_suffix=True, context=tests[0], config_file=f"{data}.ini"
        )
        contexts = Contexts(cover)
        cover.start()
        end = pytest.main([*plain, *tests], [contexts])
        cover.stop()
        cover.save()
        seconds_file(data, tests[0]).write_text(json.dumps(contexts.seconds))
        os._exit(int(end))
    # Doctests load their module a second time, so that what other tests replace in it would not be
    # what runs: they come last, by themselves.
    doctests = [test for test in tests if not test.startswith("tests")]
    others = [test for test in tests if test not in doctests]
    end = pytest.main([*plain, "-x", *others]) if others else pytest.ExitCode.OK
    os._exit(int(end or pytest.main([*plain, "-x", *doctests])) if doctests else int(end))


def seconds_file(data: str | Path, tests: str) -> Path:
    """Return the file in which the seconds of a file of tests are kept."""
    return Path(data).parent / f"{tests.replace('/', '.')}.json"


@dataclass(frozen=True)
class Account:
    """What the suite runs.

    Attributes:
        tests: Tests, or files of which a process of their own ran the line, by file and line.
        seconds: How long each of them takes; those that fail without a fault are absent.
    """

    tests: dict[str, dict[int, set[str]]]
    seconds: dict[str, float]

    def of(self, fault: Fault, budget: float) -> list[str]:
        """List the tests that run the statement of a fault; cheap ones, of all files.

        Args:
            fault: The fault.
            budget: Seconds that they take together, at most.
        """
        by_line = self.tests.get(fault.path, {})
        found: set[str] = set()
        for line, tests in by_line.items():
            if fault.lines is None or fault.lines[0] <= line <= fault.lines[1]:
                found |= tests
        if fault.lines is None:  # every file imports the module: who runs its functions matters
            found = {test for test in found if "::" in test} or found
        by_file = defaultdict[str, list[str]](list)
        for test in sorted(found & self.seconds.keys(), key=self.seconds.__getitem__):
            by_file[test.partition("::")[0]].append(test)
        # Those of the module's own folder, one of each other file, then a second one of each: those
        # of one file are much alike.
        folder = Path("tests", *Path(fault.path).parts[1:-1])
        turns = [
            (0 if file == fault.path or Path(file).parent == folder else turn + 1, test)
            for file, tests in by_file.items()
            for turn, test in enumerate(tests)
        ]
        turns.sort(key=lambda each: (each[0], self.seconds[each[1]]))
        spent = list(itertools.accumulate(self.seconds[test] for _, test in turns))
        count = max(1, bisect.bisect_right(spent, budget))
        chosen = {test for _, test in turns[:count]}
        kept = [[test for test in tests if test in chosen] for tests in by_file.values()]
        kept = [
            [file] if file in tests else tests for file, tests in zip(by_file, kept, strict=True)
        ]
        kept.sort(key=lambda tests: sum(self.seconds[test] for test in tests))
        return [test for tests in kept for test in tests]


class Tree:
    """A copy of the project in which one fault at a time is planted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log = str(folder.with_suffix(".log"))
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.split("\n")  # fmt: skip
        for name in filter(None, listed):
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    @contextlib.contextmanager
    def plant(self, fault: Fault) -> Iterator[None]:
        """Plant a fault for as long as the context lasts."""
        file = self.folder / fault.path
        data = file.read_bytes()
        begin, end = fault.span
        file.write_bytes(data[:begin] + fault.after.encode() + data[end:])
        try:
            yield
        finally:
            file.write_bytes(data)

    def refused(self) -> bool:
        """Tell whether the type checker refuses the tree."""
        checker = [sys.executable, "-m", "mypy", "--no-error-summary"]
        with open(self._log, "w") as log:
            done = subprocess.run(checker, check=False, cwd=self.folder, stdout=log)
        return done.returncode != 0

    def why(self) -> str:
        """Return the line of the last run that names the test that failed."""
        lines = [*filter(None, Path(self._log).read_text(errors="replace").splitlines()), ""]
        return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-2:][0])

    def run(self, tests: list[str], limit: float, data: str | None = None) -> str:
        """Run tests: how they ended."""
        context = multiprocessing.get_context("forkserver")
        child = context.Process(target=run_tests, args=(str(self.folder), tests, self._log, data))
        child.start()
        child.join(limit)
        late = child.is_alive()
        assert child.pid is not None
        with contextlib.suppress(ProcessLookupError):  # what the tests started goes with them
            os.killpg(child.pid, signal.SIGKILL)
        child.join()
        if late:
            return "timed out"
        passed = child.exitcode in (0, 5)  # 5: a module without a doctest
        return "survived" if passed else "noticed"


@contextlib.contextmanager
def trees(jobs: int) -> Iterator[tuple[SimpleQueue[Tree], ThreadPoolExecutor]]:
    """Make copies of the project, and a thread for each."""
    with tempfile.TemporaryDirectory(prefix="faults_") as folder, ThreadPoolExecutor(jobs) as pool:
        free: SimpleQueue[Tree] = SimpleQueue()
        for job in range(jobs):
            free.put(Tree(Path(folder).resolve() / f"tree_{job}"))
        yield free, pool


def take_account(jobs: int, folder: Path, say: Callable[[str], None]) -> Account:
    """Run the whole suite once and keep which test runs which line.

    Args:
        jobs: Processes at a time.
        folder: Folder of what is counted; what lies there is used again.
        say: What is done with each line of progress.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = folder.resolve() / "lines"
    Path(f"{data}.ini").write_text(
        "[run]\nsource = geomon\nrelative_files = true\npatch = subprocess, _exit, fork\n"
    )

    def count(free: SimpleQueue[Tree], file: str) -> None:
        if seconds_file(data, file).exists():
            return
        tree, began = free.get(), time.monotonic()
        end = tree.run([file], 3600, str(data))
        why = "" if end == "survived" else tree.why()
        free.put(tree)
        say(f"{time.monotonic() - began:4.0f} s  {file} {why}")

    with trees(jobs) as (free, pool):
        list(pool.map(lambda file: count(free, file), test_files()))
    whole = coverage.Coverage(str(data), config_file=f"{data}.ini")
    whole.combine([str(folder)], keep=True)
    counted, seconds = whole.get_data(), {}
    for file in test_files():
        each = json.loads(seconds_file(data, file).read_text())
        seconds |= {test: spent for test, spent in each.items() if spent is not None}
        if None not in each.values():
            seconds[file] = sum(each.values())
    tests: dict[str, dict[int, set[str]]] = {}
    for path in counted.measured_files():
        by_line = counted.contexts_by_lineno(path)
        tests[path] = {
            # What is not a test's own was run by the import, by a process or by a thread.
            line: {name.partition("|")[2] or name for name in names if name}
            for line, names in by_line.items()
        }
    return Account(tests, seconds)


def campaign(
    faults: list[Fault], account: Account, jobs: int, say: Callable[[str], None]
) -> dict[Fault, str]:
    """Run the tests of each fault: "noticed", "timed out", "refused" (types), or UNNOTICED."""
    ends: dict[Fault, str] = {}

    def plant(free: SimpleQueue[Tree], fault: Fault) -> None:
        began, run = time.monotonic(), set[str]()
        tree = free.get()
        with tree.plant(fault):
            ends[fault] = "not run"
            for budget in BUDGETS:
                tests = [test for test in account.of(fault, budget) if test not in run]
                limit = max(LEAST_SECONDS, SLOWER * sum(account.seconds[test] for test in tests))
                if tests and ends[fault] in UNNOTICED:
                    ends[fault] = tree.run(tests, limit)
                    run.update(tests)
            if ends[fault] in UNNOTICED and tree.refused():
                ends[fault] = "refused"
            why = tree.why() if ends[fault] in ("noticed", "refused") else ""
        free.put(tree)
        seconds = time.monotonic() - began
        say(f"{len(ends):4d} {ends[fault]:9s} {seconds:4.0f} s, {len(run)} tests  {fault}  {why}")

    with trees(jobs) as (free, pool):
        list(pool.map(lambda fault: plant(free, fault), faults))
    return ends


def main(
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
    count: Annotated[int, typer.Option(help="Faults, spread over the folders.")] = 220,
    only: Annotated[str | None, typer.Option(help="One folder, such as geomon/show.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes at a time.")] = 2,
    counted: Annotated[Path, typer.Option(help="Folder of which test runs which line.")] = Path(
        "runs/coverage"
    ),
    list_: Annotated[bool, typer.Option("--list", help="Print the faults, plant none.")] = False,
) -> None:
    """Draw faults, plant each, and print what survived."""
    faults = draw(seed, count, only)
    if list_:
        print(*faults, sep="\n")
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    say = partial(print, flush=True)
    ends = campaign(faults, take_account(jobs, counted, say), jobs, say)
    print(f"\nseed {seed}: {len(ends)} faults")
    for folder in folders():
        those = Counter(end for fault, end in ends.items() if folder_of(fault.path) == folder)
        if those:
            words = ", ".join(f"{number} {end}" for end, number in sorted(those.items()))
            print(f"  {folder:25s} {words}")
    survivors = [fault for fault in faults if ends[fault] in UNNOTICED]
    refused = sum(end == "refused" for end in ends.values())
    total = max(len(ends), 1)
    print(f"{1 - (len(survivors) + refused) / total:.1%} noticed by a test (one that hangs, too)")
    print(f"{1 - len(survivors) / total:.1%} by a test or the type checker")
    print(*(["survivors:"] if survivors else []), *survivors, sep="\n  ")


if __name__ == "__main__":
    typer.run(main)
