"""The table of all tasks, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fsdp2.tools.check.cases import CASES, run_case
from fsdp2.tools.check.environment import environment
from fsdp2.tools.check.forecasted import forecast_step
from fsdp2.tools.check.measure import MEASURES
from fsdp2.tools.check.place import Outcome, Place
from fsdp2.tools.check.strict import STRICT

__all__ = ["ENVIRONMENT", "FORECAST", "RATES", "TASKS", "Task", "chosen"]

ENVIRONMENT, FORECAST, RATES = "environment", "forecast", "rates"
_NEEDED = (RATES, "step time")
"""What a forecast is fitted to."""
_NOT_QUICK = ("large parameters", "compiled blocks", "streams", *MEASURES, FORECAST)


@dataclass(frozen=True)
class Task:
    """A function that every rank runs, or only rank 0 (``rank0_only``).

    ``part`` is the section of the report: "here", "right" or "good". A task runs ``apart``, in new processes, if it has
    lasting effects or makes a process group of its own.
    """

    name: str
    part: str
    about: str
    run: Callable[[Place], Outcome]
    apart: bool = False
    rank0_only: bool = False


def _about(function: Callable[..., object]) -> str:
    return " ".join((function.__doc__ or "").split())


def _tasks() -> dict[str, Task]:
    listed = [Task(ENVIRONMENT, "here", _about(environment), environment)]
    listed += [Task(name, "right", _about(case), partial(run_case, case)) for name, case in CASES.items()]
    listed += [Task(name, "right", _about(run), run, apart=name == "streams") for name, run in STRICT.items()]
    listed += [Task(name, "good", _about(run), run) for name, run in MEASURES.items()]
    listed.append(Task(FORECAST, "good", _about(forecast_step), forecast_step, apart=True, rank0_only=True))
    return {task.name: task for task in listed}


TASKS = _tasks()


def chosen(only: list[str], *, quick: bool, cuda: bool) -> list[Task]:
    """Return the tasks to run, with those that they need. The environment is part of every report."""
    wanted = {ENVIRONMENT, *only, *(_NEEDED if FORECAST in only else ())}
    names = [name for name in TASKS if name in wanted] if only else list(TASKS)
    if quick and not only:
        names = [name for name in names if name not in _NOT_QUICK]
    if not cuda:
        names = [name for name in names if name != "streams" or name in only]  # which then says that it is skipped
    return [TASKS[name] for name in names]
