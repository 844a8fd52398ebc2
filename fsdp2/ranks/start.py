"""Before the first forward, compare the units, options and initial values of all ranks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from fsdp2._warn import warn
from fsdp2.engine.collective import PassKind
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.root import RootContext
from fsdp2.ranks.board import Board
from fsdp2.sharding.mesh import listed_ranks

__all__ = ["Line", "all_say", "compare", "options_of", "shared_groups", "trained_of"]

_START = (0, 0)  # the position before all passes
_FIRST_PASS = "its first pass is "
_PLAN, _VALUES = 1, 2  # meetings that follow if the first one, 0, finds a difference


class Line(NamedTuple):
    """A property that must be the same on all ranks: the text to compare, and the text to show in an error."""

    compared: str
    text: str


def options_of(root: RootContext[Any]) -> list[Line]:
    """Return the options of each unit of ``root`` that influence communication and are not part of a collective."""
    numbers = {unit: number for number, unit in enumerate(root.all_states)}
    lines = []
    for unit, number in numbers.items():
        options = list(dict.fromkeys(group.store.options.describe_compared() for group in unit.groups))
        compared, shown = [str(number), *options], [text for text in options if text]
        for when, ahead in (("forward", unit.forward_prefetch), ("backward", unit.backward_prefetch)):
            # By number, not by name: names of experts often contain a number that only their rank has.
            compared.append(str([numbers.get(other) for other in ahead]))
            if ahead:
                names = ", ".join(repr(other.name) for other in ahead)
                shown.append(f"{names} gathered ahead in {when} (set_modules_to_{when}_prefetch)")
        lines.append(Line(" ".join(compared), f"{_name(unit.name)} with {'; '.join(shown) or 'default options'}"))
    return lines


def shared_groups(root: RootContext[Any], ranks: Collection[int]) -> list[FSDPParamGroup]:
    """Return the groups of ``root`` that all ``ranks`` have.

    Those on a smaller mesh (experts) may differ between ranks in number, shape and values, and in which of them train.
    """
    return [group for group in root.groups if set(listed_ranks(group.mesh.mesh)) == set(ranks)]


def trained_of(groups: Iterable[FSDPParamGroup]) -> list[Line]:
    """Return which parameters of each of ``groups`` train, where a backward reduces their gradients."""
    lines = []
    for group in groups:
        if group.store.options.reduce_gradients:
            trains = [param.requires_grad for param in group.params]
            names = ", ".join(param.name for param, train in zip(group.params, trains) if train)
            lines.append(Line(str(trains), f"{_name(group.name)} trains {names or 'nothing'}"))
    return lines


def compare(
    board: Board,
    root: RootContext[Any],
    shared: list[FSDPParamGroup],
    kind: PassKind,
    error: Exception | None,
    *,
    with_values: bool = True,
) -> int:
    """Compare the units of ``root`` at the first pass, of ``kind``; all ranks have the groups ``shared``.

    If ``with_values``, warn if only initial values differ. Return the number of meetings.

    Raises:
        RuntimeError: Parameters or options differ, or another rank passes an ``error``. Every rank raises it.
        Exception: The ``error`` of this rank.
    """
    if error is not None:
        text = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
        try:
            board.fail(text if text.startswith("rank ") else f"rank {board.rank}: {text}", 0)
        except RuntimeError:
            raise error from None
    plan = _Plan(
        [
            Line(str(kind), f"{_FIRST_PASS}{kind}"),
            *(line for group in shared for line in _describe(group)),
            *options_of(root),
        ]
    )
    first = [(group.params[0].name, group.initial) for group in shared if group.initial is not None and with_values]
    values = [[name, values] for name, (values, stamp) in first if not stamp.changed]
    seen = zlib.crc32(repr(values).encode())
    if board.meet(0, f"{plan.lines()} {seen}", plan) is not None:
        return 1
    board.look(plan, shows=False)  # the meeting may have ended because a rank failed
    if board.meet(_PLAN, str(plan.lines()), plan) is None:
        board.raise_difference(plan)
    want = json.dumps(values)
    text = board.choose(_VALUES, want, plan, _other_values)
    if text:
        warn(text, here=board.rank == board.ranks[0])
    return _VALUES + 1


def all_say(board: Board, epoch: int, yes: bool) -> bool:
    """Return, on all ranks, whether every one of them says ``yes``; their meeting is number ``epoch``."""
    return bool(board.choose(epoch, json.dumps(yes), _Plan([]), lambda said: all(said.values())))


class _Plan:
    """The units and options of one rank as a `History`, with one line instead of each collective."""

    def __init__(self, lines: list[Line]) -> None:
        self._lines = [*lines, Line("", "nothing more")]

    def position(self) -> tuple[int, int]:
        """Return the position before all collectives."""
        return _START

    def digests(self, epoch: int, number: int, *, shown: bool = False) -> list[int] | None:
        """Return a number for each line; None later, where a rank may be that has left the meeting before this one."""
        if (epoch, number) != _START:
            return None
        return self.lines()

    def lines(self) -> list[int]:
        """Return a number for each line."""
        return [zlib.crc32(line.compared.encode()) for line in self._lines]

    def text(self, epoch: int, number: int, index: int) -> str:
        """Return one line."""
        return self._lines[index].text

    def turns(self) -> tuple[bool, bool]:
        """Return that no rank has been elsewhere."""
        return False, False

    def refuse(self, texts: dict[int, str]) -> str:
        """Return the error text, given one line of each rank."""
        first = min(texts, default=0)
        other = next((rank for rank in sorted(texts) if texts[rank] != texts[first]), None)
        where = "" if other is None else f": rank {other}: {texts[other]}, rank {first}: {texts[first]}"
        if other is not None and texts[first].startswith(_FIRST_PASS):
            return (
                f"ranks do not do the same{where}. Expected: the same on every rank; call the model and its methods "
                "equally often on all ranks, outside of `if rank == 0:`"
            )
        return (
            f"ranks were given different models{where}. Expected: the same parameters, in the same order and with the "
            "same options, on every rank; build the model alike everywhere"
        )


def _name(name: str) -> str:
    return f"the unit {name!r}" if name else "the root"


def _describe(group: FSDPParamGroup) -> list[Line]:
    options, mesh = group.store.options, group.mesh
    policy = options.mp_policy
    texts = [
        f"{_name(group.name)} is on {mesh.replicate.size} x {mesh.shard.size} ranks"
        f"{', sharded over both axes,' if mesh.has_portions else ''} with "
        f"param_dtype={policy.param_dtype}, reduce_dtype={policy.reduce_dtype}, "
        f"reshard_after_forward={options.reshard_after_forward}"
    ]
    for param in group.params:
        layout = param.spec.layout
        trains = "" if param.requires_grad else ", frozen"
        encoded = f", {param.formats}" if any(param.formats) else ""
        texts.append(f"{param.name} is {tuple(layout.shape)} {param.dtype} sharded along {layout.dim}{trains}{encoded}")
    return [Line(text, text) for text in texts]


def _other_values(values: dict[int, Any]) -> str | None:
    """Return the warning, or None. ``values`` are pairs of a name and first values, of one rank for each variant."""
    first = min(values)
    for name, ours in values[first]:
        # By name: a rank that has changed a shard since fully_shard has no entry for it.
        others = {rank: dict(theirs).get(name, ours) for rank, theirs in sorted(values.items())}
        differing = [rank for rank, theirs in others.items() if _shown(theirs) != _shown(ours)]
        if differing:
            ranks = ", ".join(map(str, differing[:8])) + (", ..." if len(differing) > 8 else "")
            return (
                f"{name}: {'rank' if len(differing) == 1 else 'ranks'} {ranks} started from other values than rank "
                f"{first} (on rank {differing[0]} it begins with {_shown(others[differing[0]])}, on rank {first} with "
                f"{_shown(ours)}), so the shards are pieces of different initial values. Expected: the same values on "
                "every rank when fully_shard is called. Call torch.manual_seed with the same seed on every rank before "
                "the model is built, or fsdp2.sync_module_states(model) before fully_shard, or "
                "fsdp2.broadcast_from_rank0(model, state_dict) after it"
            )
    return None


def _shown(values: list[float]) -> str:
    return ", ".join(f"{value:.8g}" for value in values) or "no values"
