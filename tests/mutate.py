"""Measures what the tests notice: breaks the package in one place, by rule, and runs the tests until one fails.

    python tests/mutate.py            # break, test, write tests/mutation.md; goes on where it was interrupted
    python tests/mutate.py --list     # the places, without running anything
    python tests/mutate.py --only reduce.py --again
    python tests/mutate.py --shuffle 7 # in an order by chance, so that what there is time for is a sample
    python tests/mutate.py --folders engine comm

A rule finds places in the syntax tree, so it survives a restructuring. Each mutant is a copy of the tree. The tests
that enter the broken function are asked, and no others: the one that the table names first, then quick ones and those
that are about the same file or folder. ``runs/entered.json`` knows which enter what; files that changed are run for
that first. The first failure finishes a place, and so does the last test; places that take long wait until the others
are finished. A failure counts if the test fails alone as well, and passes without the mutant. Results are kept in
``runs/mutation.jsonl``, by the text of the broken function: what has changed since is run again. It may be interrupted
at any time.

Each run of pytest is a fork of this process, which has imported torch but nothing of the package or of its tests. So
many places are broken at once as there are processors.

A busy machine makes no test fail here: one that ran out of time runs again without the mutant, and then with it for as
long as ten times that took.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import repeat
from multiprocessing import forkserver, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, ENTERED, TABLE = (
    ROOT / "runs" / "mutation.jsonl",
    ROOT / "runs" / "entered.json",
    ROOT / "tests" / "mutation.md",
)
FOLDERS = ("autograd", "comm", "compression", "engine", "fsdp1", "grouping", "optim", "ranks", "sharding", "weights")
DIAGNOSTIC = ("engine/hints",)
"""Files that word what is wrong."""
PLACES = 7
"""How many places of each rule are broken in a folder: a sample by chance that other places' changes leave as it is."""
FIRST_SECONDS = 60
"""How long tests are asked about one place before the other places are broken."""
RUN_SECONDS = 3
"""How long the first run of pytest may take; each of the next may take three times as long as the one before."""
FILES = 6
"""How many files are asked at once what their tests enter."""
LIMIT_SECONDS = 30
"""How long one test may take before it is looked at whether it hangs."""
SLOWER = 10
"""How many times longer than without the mutant it takes then, at least."""
OUT_OF_TIME = re.compile(r"the test takes more than|no answer: hung or died|TimeoutError|TimeoutExpired|timed out")
"""What tests say that ran out of time, if not that they fail."""
STAGE_SECONDS = 2400
"""How long a run of tests may take; one that takes longer shows nothing."""
WARM = (
    "hypothesis.strategies",
    "numpy",
    "pytest",
    "safetensors.torch",
    "torch.distributed._composable",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.parallel",
    "torch.optim.swa_utils",
    "torch.testing._internal.distributed.fake_pg",
)
"""What tests import that is not ours: once, by the process that runs of pytest are forks of."""
SPARED = re.compile(
    r"check|refuse|explain|describe|message|error|warn|log|emit|fail|repr|name|trace|compare|append|hook_(saving|loading)|given"
)
"""Functions and calls that word or raise errors, which have tests for each text, and calls whose order is nobody's."""

EQUIVALENT: dict[str, str] = json.loads((ROOT / "tests" / "equivalent.json").read_text())
"""Why nothing can notice a mutant, by its place, the rule, and what is broken there."""
STARTING = threading.Lock()
"""Held while a process starts: its parent has a pipe meanwhile that another one must not keep open."""
RUNNING: set[BaseProcess] = set()
"""The runs of pytest that are under way."""
FAILING: list[str] = []
"""Tests that fail without a mutant as well."""
PASSING: set[str] = set()
"""Tests that were seen to pass without one."""
Tests = dict[str, tuple[float, list[str]]]
"""Of each test that passes how many seconds it takes, and the functions that it enters."""
Edit = tuple[Any, str]
"""A node, or the first and the last of several, and the text that replaces it."""


@dataclass(frozen=True)
class Mutant:
    """One place that is broken: where it is, and what it was and is."""

    path: str
    function: str
    rule: str
    line: int
    start: int
    was: str
    now: str
    key: str

    @property
    def place(self) -> str:
        """How the table names it."""
        return f"{self.path.removeprefix('fsdp2/')}: {self.function}"

    @property
    def row(self) -> str:
        """How its row of the table begins."""
        return f"| {self.place} | {self.rule} | {cell(self.was)} | {cell(self.now)} |"

    @property
    def folder(self) -> str:
        """The folder of the package."""
        return self.path.split("/")[1]

    @property
    def title(self) -> str:
        """How ``tests/equivalent.json`` names it."""
        return f"{self.place}: {self.rule}: {' '.join(self.was.split())}"

    @property
    def equivalent(self) -> str:
        """Why nothing can notice it; "" if something can. It is not run."""
        return EQUIVALENT.get(self.title, "")

    def source(self, text: str) -> str:
        """Return the broken file."""
        assert text[self.start :].startswith(self.was)
        return text[: self.start] + self.now + text[self.start + len(self.was) :]


# ---- rules: each yields edits for one statement or expression of a function ----


def _called(node: ast.AST) -> str:
    """Return the name that a statement calls, "" if it is no call."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return ""
    function = node.value.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _left_out(pattern: str, spare: str = "$^") -> Callable[[ast.AST], Iterator[Edit]]:
    def rule(node: ast.AST) -> Iterator[Edit]:
        name = _called(node)
        if name and re.search(pattern, name) and not re.search(spare, name) and not SPARED.search(name):
            yield node, "pass"

    return rule


WAITS, WRITES = "wait|synchroni|record", "copy|write|set_|add_"
FREES = "free|release|reshard|drop|discard|clear|resize_|forget"
ORDERED = re.compile(
    f"{WAITS}|free|release|reshard|gather|reduce|show|launch|move|allocate|begin|end|enter|leave|write"
)
"""Calls whose order matters."""


def wrong_divisor(node: ast.AST) -> Iterator[Edit]:
    """Divide by one more, or not at all."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv)):
        yield node.right, f"({ast.unparse(node.right)} + 1)"
    if _called(node) in ("div_", "mul_", "foreach_mul", "foreach_div"):
        yield node, "pass"


def swapped_order(node: ast.AST) -> Iterator[Edit]:
    """Swap neighbouring calls, or go through a sequence from its other end."""
    body = node.body if isinstance(getattr(node, "body", None), list) else []
    for one, other in zip(body, body[1:]):
        names = _called(one), _called(other)
        if all(name and not SPARED.search(name) for name in names) and any(map(ORDERED.search, names)):
            yield (one, other), f"{ast.unparse(other)}; {ast.unparse(one)}"
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "reversed" and len(node.args) == 1:
        yield node, f"list({ast.unparse(node.args[0])})"


def stale_cache(node: ast.AST) -> Iterator[Edit]:
    """Keep what was to be forgotten, or use what is remembered whether it is current or not."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        value = node.value
        empty = isinstance(value, (ast.List, ast.Dict)) and not ast.unparse(value)[1:-1]
        if empty or (isinstance(value, ast.Constant) and value.value in (None, False, 0)):
            yield node, "pass"
    if isinstance(node, ast.Compare) and re.search(r"version|stamp|current|generation|epoch", ast.unparse(node)):
        yield node, "True"


def condition_turned_round(node: ast.AST) -> Iterator[Edit]:
    """Do it in the other case."""
    if isinstance(node, (ast.If, ast.IfExp)):
        yield node.test, f"(not ({ast.unparse(node.test)}))"


def and_or(node: ast.AST) -> Iterator[Edit]:
    """One condition suffices, or both are needed."""
    if isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield node, "(" + word.join(f"({ast.unparse(value)})" for value in node.values) + ")"


def off_by_one(node: ast.AST) -> Iterator[Edit]:
    """Start, end or compare one too far."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        if isinstance(node.right, ast.Constant) and node.right.value == 1:
            yield node, f"({ast.unparse(node.left)})"
    swapped = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
    small = isinstance(node, ast.Compare) and not re.search(r"bytes|BYTES|seconds|limit|least", ast.unparse(node))
    if small and len(node.ops) == 1 and type(node.ops[0]) in swapped:
        yield node, f"{ast.unparse(node.left)} {swapped[type(node.ops[0])]} {ast.unparse(node.comparators[0])}"


RULES: dict[str, Callable[[ast.AST], Iterator[Edit]]] = {
    "a wait left out": _left_out(WAITS),
    "a skipped free": _left_out(FREES),
    "a write left out": _left_out(WRITES, spare="setattr"),
    "a call left out": _left_out(".", spare=f"{WAITS}|{FREES}|{WRITES}"),
    "a wrong divisor": wrong_divisor,
    "a swapped order": swapped_order,
    "a stale cache": stale_cache,
    "a condition turned round": condition_turned_round,
    "and for or": and_or,
    "off by one": off_by_one,
}


def _raises(node: ast.If) -> bool:
    return any(isinstance(one, ast.Raise) for one in node.body)


# ---- the places ----


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield every outermost function of a file with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{prefix}{node.name}", node


def mutants_of(path: Path, root: Path = ROOT) -> Iterator[Mutant]:
    """Yield every mutant of one file."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    for name, function in functions(ast.parse(text)):
        if SPARED.search(name.rsplit(".", 1)[-1]) or name.endswith("__init__"):
            continue
        body = text[slice(*(_offset(lines, *place) for place in _ends(function)))]
        checks = [node for node in ast.walk(function) if isinstance(node, ast.If) and _raises(node)]
        spared = {id(node) for check in checks for node in (check, *ast.walk(check.test))}
        for rule, find in RULES.items():
            edits = (edit for node in ast.walk(function) if id(node) not in spared for edit in find(node))
            for index, (at, now) in enumerate(edits):
                node, last = at if isinstance(at, tuple) else (at, at)
                start = _offset(lines, node.lineno, node.col_offset)
                was = text[start : _offset(lines, last.end_lineno, last.end_col_offset)]
                where = f"{path.relative_to(root).as_posix()} {name} {rule} {index}"
                key = hashlib.sha1(f"{where} {body}".encode()).hexdigest()[:16]
                yield Mutant(path.relative_to(root).as_posix(), name, rule, node.lineno, start, was, now, key)


def _ends(node: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (line, column) where the source of ``node`` begins and ends."""
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _offset(lines: list[str], line: int, column: int) -> int:
    """Return where in a file a place is that the syntax tree gives in lines and bytes."""
    return sum(len(one) for one in lines[: line - 1]) + len(lines[line - 1].encode()[:column].decode())


def files_of(folder: str) -> list[Path]:
    """Return the files of a folder of the package, and of the folders in it, that are broken."""
    package = ROOT / "fsdp2"
    files = sorted((package / folder).rglob("*.py"))
    return [path for path in files if path.relative_to(package).with_suffix("").as_posix() not in DIAGNOSTIC]


def places(count: int = PLACES) -> list[Mutant]:
    """Return the places that are broken: of each folder so many of each rule, those with the smallest keys."""
    chosen: list[Mutant] = []
    for folder in FOLDERS:
        found = sorted((one for path in files_of(folder) for one in mutants_of(path)), key=lambda mutant: mutant.key)
        for rule in RULES:
            chosen += [mutant for mutant in found if mutant.rule == rule][:count]
    return chosen


# ---- the tests ----


def test_files(folder: Path) -> list[str]:
    """Return the test files that are about what the package does."""
    files = [path.relative_to(folder).as_posix() for path in (folder / "tests").rglob("test_*.py")]
    skipped = ("tests/demo", "tests/docs", "tests/benchmarks", "tests/test_architecture", "tests/support")
    return sorted(path for path in files if not path.startswith(skipped))


def entered(whole: Path) -> Tests:
    """Return which functions of the package each test enters, and how long it takes.

    Files that changed since they were last asked are run. Tests of an unchanged package are known to pass.
    """
    known = json.loads(ENTERED.read_text()) if ENTERED.exists() else {}
    files = {name: digest([whole / name]) for name in test_files(whole)}
    package = digest(sorted((whole / "fsdp2").rglob("*.py")))
    changed = [name for name in files if known.get(name, {}).get("text") != files[name]]
    if changed:
        print(f"asking which functions the tests of {len(changed)} files enter", flush=True)
    parts = [changed[i : i + FILES] for i in range(0, len(changed), FILES)]
    with workers() as pool:
        for part, tests in zip(parts, pool.map(_asked, repeat(whole), parts), strict=True):
            for name in part:
                of_file = {test: value for test, value in tests.items() if test.split("::")[0] == name}
                known[name] = {"text": files[name], "package": package, "tests": of_file}
            ENTERED.parent.mkdir(exist_ok=True)
            ENTERED.write_text(json.dumps(known))
    PASSING.update(test for name in files if known[name]["package"] == package for test in known[name]["tests"])
    return {test: value for name in files for test, value in known[name]["tests"].items()}


def _asked(whole: Path, files: list[str]) -> Tests:
    with temporary_folder() as folder:
        found = folder / "entered.json"
        pytest_in(whole, ["-p", "tests.support.entered", f"--entered={found}", f"--limit={2 * LIMIT_SECONDS}", *files])
        tests: Tests = json.loads(found.read_text())
        return tests


def digest(paths: list[Path]) -> str:
    """Return a short text that differs where files do."""
    return hashlib.sha1(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def order(mutant: Mutant, tests: Tests, named: str = "") -> dict[str, float]:
    """Return the tests that enter the broken function, and their seconds, in the order in which they are likely to
    notice in little time: ``named``, and of each file those that enter little else, quick and near ones first."""
    function = f"{mutant.path} {mutant.function}"
    folder, stem = Path(mutant.path).parent.relative_to("fsdp2").as_posix(), Path(mutant.path).stem
    of_files: dict[str, list[tuple[int, float, str]]] = {}
    for test, (took, also) in tests.items():
        if function in also or test == named:
            of_files.setdefault(test.split("::")[0], []).append((len(also), took, test))
    chosen = []
    for name, of_file in of_files.items():
        near = name.startswith((f"tests/unit/{folder}/", f"tests/{folder}/"))
        likely = 1 + 3 * near + 6 * (near and name.endswith(f"test_{stem}.py"))
        start = 0.05 if name.startswith("tests/unit/") else 1.0  # what a test takes beside its own seconds
        for number, (_, took, test) in enumerate(sorted(of_file), 1):
            chosen.append((test != named, number**0.5 * (start + took) / likely, test, took))
    return {test: took for _, _, test, took in sorted(chosen)}


def batches(tests: dict[str, float]) -> Iterator[list[str]]:
    """Yield the tests in runs of pytest: a few before many, since each starts anew and ends with its first failure."""
    run: list[str] = []
    spent, until = 0.0, float(RUN_SECONDS)
    for test, took in tests.items():
        if run and spent + took > until:
            yield run
            run, spent, until = [], 0.0, 3 * until
        spent += took
        run.append(test)
    if run:
        yield run


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder. Those of ``tempfile`` would be removed when a fork of this process ends."""
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def copy_tree(target: Path) -> None:
    """Copy what git knows of, as it is now."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in listed.stdout.split():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@dataclass(frozen=True)
class Failure:
    """The first test that failed; ``late`` if all that it says is that it ran out of time."""

    test: str
    late: bool


def first_failure(folder: Path, files: list[str], *options: str, limit: float = LIMIT_SECONDS) -> Failure | None:
    """Run tests until one fails, or takes longer than ``limit``; None if none does.

    Raises ``TimeoutError`` if they do not end.
    """
    arguments = ["-x", f"--limit={limit}", *options, *(f"--deselect={test}" for test in FAILING), *files]
    status, output = pytest_in(folder, arguments)
    if status in (0, 5):
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+(?: [^-]\S*)*)", output, re.MULTILINE)
    if status == 1 and not failed:
        raise RuntimeError(f"pytest did not run: {output}")
    late = OUT_OF_TIME.search(output) is not None
    return Failure(failed[1] if failed else f"pytest ends with {status}", late)


def pytest_in(folder: Path, arguments: list[str]) -> tuple[int | None, str]:
    """Run pytest in a copy of the tree; return its exit status and what it wrote.

    Raises ``TimeoutError`` if it does not end.
    """
    with tempfile.NamedTemporaryFile("r", errors="replace") as log:
        process = multiprocessing.get_context("fork").Process(target=_pytest, args=(folder, arguments, log.name))
        with STARTING:
            process.start()
        RUNNING.add(process)
        process.join(STAGE_SECONDS)
        if hangs := process.exitcode is None:
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        RUNNING.discard(process)
        if hangs:
            raise TimeoutError(f"the tests took more than {STAGE_SECONDS} seconds")
        return process.exitcode, log.read()


def _pytest(folder: Path, arguments: list[str], log: str) -> None:
    """Be ``python -m pytest`` in ``folder``."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile everything
    sys.dont_write_bytecode = False
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "tests"))]
    if not all(argument.startswith(("-", "tests/unit/")) for argument in arguments):
        _start_fork_server()
    sys.modules["__main__"] = importlib.import_module("pytest.__main__")
    sys.argv = ["pytest"]
    import pytest

    status = pytest.main(["-q", "-p", "no:cacheprovider", *arguments])
    sys.stdout.flush()
    os._exit(status)  # what else runs at the end of a process is about threads that this one does not have


def _start_fork_server() -> None:
    """Start the server that ranks are forks of (tests/support/processes.py) as a fork of this process, which has
    imported torch already. A Python of its own would take as long as many tests."""
    from tests.support.processes import PRELOADED

    util.spawnv_passfds = _fork  # type: ignore[attr-defined]
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED])
    forkserver.ensure_running()


def _fork(path: object, arguments: list[bytes | str], descriptors: list[int]) -> int:
    """Run the program that Python was to be started with, ``python -c PROGRAM``, with no other ``descriptors``."""
    if number := os.fork():
        return number
    try:
        for descriptor in {int(name) for name in os.listdir("/dev/fd")} - {0, 1, 2, *descriptors}:
            with contextlib.suppress(OSError):  # that of the folder itself
                os.close(descriptor)
        exec(arguments[-1], {})
    finally:
        os._exit(0)


def warm_up() -> None:
    """Import what is not ours."""
    os.environ["OMP_NUM_THREADS"] = "1"  # as tests/conftest.py says
    for name in WARM:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    ours = [name for name in sys.modules if name.split(".")[0] in ("fsdp2", "tests")]
    assert not ours, f"runs would test what is imported: {ours}"


def noticed_by(folder: Path, whole: Path, files: list[str], *options: str) -> str:
    """Return the first test that fails in ``folder`` and not in the ``whole`` tree, "" if there is none."""
    while True:
        failure = first_failure(folder, files, *options)
        if failure is None or "::" not in failure.test:
            return failure.test if failure else ""
        by, seconds = failure.test, 0.0
        if by not in PASSING or failure.late:
            start = time.monotonic()
            passes = first_failure(whole, [by], limit=STAGE_SECONDS / SLOWER) is None
            seconds = time.monotonic() - start
            PASSING.add(by) if passes else PASSING.discard(by)
        if by not in PASSING:
            FAILING.append(by)
        elif first_failure(folder, [by], limit=max(LIMIT_SECONDS, SLOWER * seconds)):
            return by
        else:  # what ran before it makes it fail, in an order that no other run has; or the machine was busy
            options = (*options, f"--deselect={by}")


def run(mutant: Mutant, whole: Path, tests: dict[str, float], limit: float) -> tuple[str, dict[str, float], float]:
    """Ask ``tests``, whose seconds they have, about one mutant, and begin no run of pytest after ``limit`` seconds.

    Returns which noticed it ("" if none did), those that were not asked, and the seconds that it took.
    """
    start, by = time.monotonic(), ""
    with temporary_folder() as folder:
        shutil.copytree(whole, folder, copy_function=os.link, dirs_exist_ok=True)  # with what is compiled already
        broken = folder / mutant.path
        text = broken.read_text()
        broken.unlink()
        broken.write_text(mutant.source(text))
        for some in batches(tests):
            by = noticed_by(folder, whole, some)
            if by and "::" not in by and first_failure(whole, [*some, "--collect-only"]):  # there are no such tests
                by = noticed_by(folder, whole, [*dict.fromkeys(test.split("::")[0] for test in some)])
            tests = {test: took for test, took in tests.items() if test not in some}
            if by or time.monotonic() - start > limit:
                break
    return by, tests, time.monotonic() - start


# ---- the table ----


def table(chosen: list[Mutant], results: dict[str, dict[str, object]]) -> str:
    """Return the table of what ran, now and earlier."""
    none: dict[str, object] = {"noticed": False, "by": ""}
    done = [(m, none if m.equivalent else results[m.key]) for m in chosen if m.equivalent or m.key in results]
    lines = [
        "# What the tests notice",
        "",
        "Written by `python tests/mutate.py`; do not edit. Each row is the package broken in one place, and the first",
        "test that failed.",
        "",
        f"On commit {commit()}:",
        "",
        "| folder | places | noticed | not noticed | nothing can notice | not finished |",
        "|---|---|---|---|---|---|",
    ]
    for folder in FOLDERS:
        there = [mutant for mutant in chosen if mutant.folder == folder]
        noticed = [bool(result["noticed"]) for mutant, result in done if mutant in there and not mutant.equivalent]
        equivalent = sum(bool(mutant.equivalent) for mutant in there)
        counts = (len(there), sum(noticed), len(noticed) - sum(noticed), equivalent)
        lines.append(f"| {folder} | {' | '.join(map(str, (*counts, len(there) - len(noticed) - equivalent)))} |")
    lines.append("")
    if len(done) < len(chosen):
        lines += [
            f"{len(done)} of {len(chosen)} places are finished. The others were not run, or not against all tests",
            "that enter what is broken. Where there are such places, these numbers are no share of all.",
            "",
        ]
    for title, wanted in (("Not noticed", False), ("Noticed", True)):
        rows = [(mutant, result) for mutant, result in done if bool(result["noticed"]) is wanted]
        if rows:
            lines += [f"## {title}", "", "| place | rule | was | became | by |", "|---|---|---|---|---|"]
        for mutant, result in rows:
            by = result["by"] or mutant.equivalent or "**nothing**"
            lines.append(f"{mutant.row} {by} |")
        lines += [""] if rows else []
    return "\n".join(lines)


def named() -> dict[str, str]:
    """Return the test that noticed each place, by the beginning of its row in the table that is there."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = [line.removesuffix(" |").rpartition("| ") for line in lines if "::" in line]
    return {row + "|": test for row, _, test in rows}


def commit() -> str:
    """Return the commit whose tree was broken."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def cell(text: str) -> str:
    """Return code for a cell of a table."""
    line = " ".join(text.split())
    return "`" + (line if len(line) <= 60 else line[:57] + "...").replace("|", "\\|") + "`"


def main() -> int:
    """Run what has not been run, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the places and run nothing")
    parser.add_argument("--only", default="", metavar="TEXT", help="places or rules that have this in their names")
    parser.add_argument("--again", action="store_true", help="run what has been run as well")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="in an order by chance")
    parser.add_argument("--places", type=int, default=PLACES, help="how many places of each rule in a folder")
    parser.add_argument("--folders", nargs="+", default=FOLDERS, metavar="FOLDER", help="of the package, to be broken")
    options = parser.parse_args()
    chosen = places(options.places)
    results, earlier = kept_results(), named()
    wanted: dict[str, Mutant] = {}  # by title
    for number, mutant in enumerate(chosen, 1):
        title = f"{number:3} {mutant.place} line {mutant.line}: {mutant.rule}: {cell(mutant.was)} -> {cell(mutant.now)}"
        known = mutant.equivalent or (mutant.key in results and not options.again)
        if mutant.folder in options.folders and options.only in title and (options.list or not known):
            wanted[title] = mutant
    titles = [*wanted]
    if options.shuffle is not None:
        random.Random(options.shuffle).shuffle(titles)
    if options.list:
        print("\n".join(titles))
        return 0
    warm_up()
    with temporary_folder() as whole:
        copy_tree(whole)
        tests = entered(whole)
        left = {title: order(wanted[title], tests, earlier.get(wanted[title].row, "")) for title in titles}
        try:
            with workers() as pool:
                for limit in (FIRST_SECONDS, STAGE_SECONDS):
                    jobs = {pool.submit(run, wanted[title], whole, left[title], limit): title for title in left}
                    for job in as_completed(jobs):
                        title = jobs[job]
                        try:
                            by, left[title], seconds = job.result()
                        except (TimeoutError, RuntimeError) as error:
                            print(f"{title}\n    {error}", flush=True)
                            continue
                        if by or not left[title]:
                            keep({**asdict(wanted[title]), "noticed": bool(by), "by": by, "seconds": round(seconds)})
                            del left[title]
                        print(f"{title}\n    {by or _not_noticed(left.get(title))} ({seconds:.0f} s)", flush=True)
        finally:  # also when it is interrupted
            TABLE.write_text(table(chosen, kept_results()))
    return 0


@contextlib.contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """Yield as many threads as there are processors; what they run ends with the block."""
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in [*RUNNING]:
            os.killpg(process.pid or 0, signal.SIGKILL)
        pool.shutdown()


def _not_noticed(left: Collection[str] | None) -> str:
    return f"not noticed so far; {len(left)} tests are left" if left else "NOT NOTICED"


def kept_results() -> dict[str, dict[str, object]]:
    """Return the results that are kept, by the key of the place."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {str(one["key"]): one for one in map(json.loads, lines)}


def keep(result: dict[str, object]) -> None:
    """Add a result to the file of them."""
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    sys.exit(main())
