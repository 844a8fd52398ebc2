"""Reports of users as programs of ``(rank, world, fsdp)``: each is a test of fsdp2 and a row of docs/comparison.md.

    @report("What the user does")
    def test_something(rank, world, fsdp):
        '''The story, in two or three sentences.'''

``fsdp`` is the implementation that the program runs on, fsdp2 or ``torch.distributed.fsdp``. The program tests it by
``check``, ``thrifty``, ``same``, ``agrees`` and ``refused``. If an implementation fails, their text becomes its cell of
the table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import ROOT, api
from tests.support.parity import Build, Prepare, Program, Run, fulls, mesh_1d, play, shard_each, stack, train
from tests.support.pool import Pool, on_ranks

__all__ = [
    "Absent",
    "Accepted",
    "Report",
    "Unhelpful",
    "Wasteful",
    "Wrong",
    "agrees",
    "all_reports",
    "check",
    "full_grads",
    "offered",
    "refused",
    "report",
    "same",
    "thrifty",
]


class Wrong(AssertionError):
    """A wrong result without an error; the text says what is wrong."""


class Accepted(Wrong):
    """No error where there should be one; the text says what happens instead."""


class Wasteful(AssertionError):
    """Right results with more work or memory than necessary; the text says how much."""


class Unhelpful(AssertionError):
    """An error in the right place that says too little; the text is the error's."""


class Absent(AssertionError):
    """The implementation offers nothing of this kind."""


@dataclass(frozen=True)
class Report:
    """One report: its title, what fsdp2 does, the program, and how it is run.

    ``fresh`` programs leave a process group behind that nobody can use, so they get processes of their own; ranks in
    ``dying`` end in their course.
    """

    title: str
    promise: str
    program: Callable[[int, int, Any], None]
    worlds: tuple[int, ...]
    limit: float
    fresh: bool
    dying: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the test."""
        return self.program.__name__


def report(
    title: str,
    *worlds: int,
    promise: str = "works",
    limit: float = 120.0,
    fresh: bool = False,
    dying: tuple[int, ...] = (),
) -> Callable[[Callable[[int, int, Any], None]], Any]:
    """Return a decorator that makes a program a report, tested on these world sizes (2 and 4 if none is given)."""

    def decorate(program: Callable[[int, int, Any], None]) -> Any:
        one = Report(title, promise, program, worlds or (2, 4), limit, fresh, dying)

        def on_rank(rank: int, world: int) -> None:
            program(rank, world, api.ours)

        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(on_rank, name, getattr(program, name))
        test: Any = _in_fresh_processes(on_rank, one) if fresh else on_ranks(*one.worlds, limit=limit)(on_rank)
        test.report = one
        return api.fsdp2_only(test)

    return decorate


def _in_fresh_processes(on_rank: Callable[[int, int], None], one: Report) -> Any:
    def test(world: int) -> None:
        pool, problem = Pool(grace=one.limit), ""
        try:
            outcomes = pool.outcomes(world, on_rank, {}, one.limit)
            for rank, outcome in enumerate(outcomes):
                if rank not in one.dying and (outcome is None or outcome.traceback):
                    problem = pool.recover(outcomes)
                    break
        finally:
            pool.close(patience=0)  # with the process group that they have, some never end by themselves
        if problem:
            pytest.fail(problem, pytrace=False)

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(test, name, getattr(on_rank, name))
    test.rank_function = on_rank
    # Processes of its own take seconds to start, and what they show on two ranks they show on more.
    first, *more = one.worlds
    worlds = [first, *(pytest.param(world, marks=pytest.mark.slow) for world in more)]
    return pytest.mark.parametrize("world", worlds)(test)


def all_reports() -> dict[str, list[Report]]:
    """Return every report by the heading of its file: the first line of the file's docstring, in alphabetical order."""
    found: dict[str, list[Report]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "\n@report(" not in path.read_text():
            continue
        module: ModuleType = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        mine = [value.report for value in vars(module).values() if isinstance(getattr(value, "report", None), Report)]
        found.setdefault((module.__doc__ or "").split("\n")[0].split(":")[0].rstrip("."), []).extend(mine)
    return dict(sorted(found.items()))


# ---- what must hold ----


def check(right: object, wrong: str) -> None:
    """Raise ``Wrong`` with the text unless ``right``."""
    if not right:
        raise Wrong(wrong)


def thrifty(right: object, wasted: str) -> None:
    """Raise ``Wasteful`` with the text unless ``right``."""
    if not right:
        raise Wasteful(wasted)


def same(got: Tensor | None, expected: Tensor | None, what: str, tolerance: float = 1e-5) -> None:
    """Raise ``Wrong`` unless the tensors, whole on every rank, agree."""
    if got is None or expected is None:
        check(got is expected, f"{what} is {'missing' if got is None else 'there, which it should not be'}")
        return
    check(got.shape == expected.shape, f"{what} has shape {tuple(got.shape)} instead of {tuple(expected.shape)}")
    check(torch.allclose(got.double(), expected.double(), rtol=tolerance, atol=tolerance), f"{what} is wrong")


def agrees(
    fsdp: Any,
    prepare: Prepare | None = None,
    build: Build = stack,
    program: Program = train,
    tolerance: float = 1e-5,
) -> Run:
    """Run a program of ``tests.support.parity`` on ``fsdp`` and return that run, which sees what one process sees.

    ``prepare`` shards; without one every child and the whole become units.
    """
    run = play(fsdp, prepare or (lambda module, fsdp: shard_each(module, fsdp, mesh=mesh_1d())), build, program)
    alone = play(None, lambda module, fsdp: None, build, program)
    assert list(run.seen) == list(alone.seen)
    for name, value in alone.seen.items():
        same(run.seen[name], value, name.rstrip(" 0123456789") if name[0] in "lg" else name, tolerance)
    return run


def full_grads(module: nn.Module) -> dict[str, Tensor | None]:
    """Return copies of all gradients, whole on every rank."""
    return fulls({name: parameter.grad for name, parameter in module.named_parameters()})


def offered(fsdp: Any, name: str) -> Any:
    """Return what ``fsdp`` calls so; raise ``Absent`` where there is no such thing."""
    if not hasattr(fsdp, name):
        raise Absent
    return getattr(fsdp, name)


@contextmanager
def refused(*words: str, otherwise: str = "accepted without a word") -> Iterator[None]:
    """Expect an exception whose text has all these words."""
    try:
        yield
    except (Wrong, Wasteful, Absent):
        raise
    except Exception as error:
        if any(word not in str(error) for word in words):
            raise Unhelpful(f"{type(error).__name__}: {error}") from error
        return
    raise Accepted(otherwise)
