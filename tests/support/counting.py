"""Counting collectives, whatever they are called: what runs under the mode is counted by what it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2 import FSDPModule
from fsdp2._torch.forecast import operator_schema, unboxed_group
from fsdp2._trace import listening

GATHERS = ("allgather", "_allgather", "all_gather")
REDUCTIONS = ("_reduce_scatter", "reduce_scatter", "alltoall", "allreduce")


def events(run: Callable[[], object]) -> list[tuple[str, str]]:
    """Return what groups do in ``run``: each event, with the name of its group."""
    heard: list[tuple[str, str]] = []
    with listening(lambda event, name: heard.append((event, name))):
        run()
    return heard


def gathers(run: Callable[[], object]) -> int:
    """Return how many groups ``run`` gathers."""
    return [event for event, _ in events(run)].count("unshard")


def in_memory(model: nn.Module) -> list[str]:
    """Return the names of the units whose full parameters are in memory or on their way, and free those of all units.

    ``unshard()`` gathers nothing for them, and ``reshard()`` frees something. Every rank must ask.
    """
    found = []
    for name, unit in model.named_modules():
        if isinstance(unit, FSDPModule):
            heard = {event for event, _ in events(lambda unit=unit: [unit.unshard(), unit.reshard()])}
            found += [name] if heard == {"reshard"} else []
    return found


class Collectives(TorchDispatchMode):
    """Counts gathers, reductions and everything else that moves data between ranks while it is active.

    Without reduce-scatter in a backend an all-to-all takes its part, so that one counts as a reduction.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.groups: dict[str, list[ProcessGroup]] = {}  # those of "gather", "reduction", ..., in order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind = kind_of(func.__name__)
            self.counts[kind] += 1
            self.groups.setdefault(kind, []).append(group_of(func, args))
        return func(*args, **(kwargs or {}))

    @property
    def gathers(self) -> int:
        """Gathers since the last ``reset``."""
        return self.counts["gather"]

    @property
    def reductions(self) -> int:
        """Reductions since the last ``reset``."""
        return self.counts["reduction"]

    def reset(self) -> None:
        """Count from zero again."""
        self.counts.clear()
        self.groups.clear()


class Operators(TorchDispatchMode):
    """While it is active, notes in ``seen`` what ``note(func, args)`` returns of each operator, unless that is None.

    Without ``note`` it notes the operators' names.
    """

    def __init__(self, note: Callable[[Any, Any], Any] = lambda func, args: str(func)) -> None:
        super().__init__()
        self.note, self.seen = note, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (noted := self.note(func, args)) is not None:
            self.seen.append(noted)
        return func(*args, **(kwargs or {}))


def group_of(func: Any, args: Any) -> ProcessGroup:
    """Return the process group of a collective."""
    place = [argument.name for argument in operator_schema(func).arguments].index("process_group")
    return unboxed_group(args[place])


def kind_of(name: str) -> str:
    """Return what an operator of torch.distributed does."""
    if name.startswith(GATHERS):
        return "gather"
    return "reduction" if name.startswith(REDUCTIONS) else name
