"""Before the first forward: do all ranks have the same units, and did they start from the same values?"""

from __future__ import annotations

import json
import warnings
import zlib
from typing import Any

from fsdp2.engine.group import FSDPParamGroup
from fsdp2.ranks.board import Board

__all__ = ["compare"]

_PLAN, _VALUES = 1, 2  # the meetings that follow where the first one, 0, finds a difference


def compare(board: Board, groups: list[FSDPParamGroup], error: RuntimeError | None) -> int:
    """Compare ``groups`` on all ranks, and return how often these met; warn where only values differ.

    Raises:
        RuntimeError: on every rank: parameters or options differ, or some rank comes with an ``error``.
    """
    if error is not None:
        text = str(error)
        try:
            board.fail(text if text.startswith("rank ") else f"rank {board.rank}: {text}", 0)
        except RuntimeError:
            raise error from None
    plan = _Plan([line for group in groups for line in _describe(group)])
    values = [[group.params[0].name, group.initial[0]] for group in groups if group.initial[1] == group.store.stamp()]
    seen = zlib.crc32(repr(values).encode())
    if board.meet(0, f"{plan.digests(0, 0)} {seen}", plan) is not None:
        return 1
    board.look(plan, shows=False)  # it may have ended because a rank failed
    if board.meet(_PLAN, str(plan.digests(0, 0)), plan) is None:
        board.settle(plan)
    want = json.dumps(values)
    text = board.choose(_VALUES, want, plan, _other_values)
    if text and board.rank == board.ranks[0]:
        warnings.warn(text, stacklevel=2)
    return _VALUES + 1


class _Plan:
    """What one rank was given, as lines of (what, how it is)."""

    def __init__(self, lines: list[list[str]]) -> None:
        self._lines = [*lines, ["nothing", "more"]]

    def position(self) -> tuple[int, int]:
        """Nobody did anything yet."""
        return 0, 0

    def digests(self, epoch: int, number: int, *, shown: bool = False) -> list[int]:
        """A number for each line."""
        return [zlib.crc32(repr(line).encode()) for line in self._lines]

    def text(self, epoch: int, number: int, index: int) -> str:
        """One line."""
        return " is ".join(self._lines[index])

    def refuse(self, texts: dict[int, str]) -> str:
        """The error, given one line of each rank."""
        first = min(texts, default=0)
        other = next((rank for rank in sorted(texts) if texts[rank] != texts[first]), None)
        where = "" if other is None else f": rank {other}: {texts[other]}, rank {first}: {texts[first]}"
        return (
            f"ranks were given different models{where}. Expected: the same parameters, in the same order and with the "
            "same options, on every rank; build the model alike everywhere"
        )


def _describe(group: FSDPParamGroup) -> list[list[str]]:
    options, mesh = group.options, group.mesh
    policy = options.mp_policy
    lines = [
        [
            f"the unit {group.name!r}" if group.name else "the root",
            f"on {mesh.replicate.size} x {mesh.shard.size} ranks with param_dtype={policy.param_dtype}, "
            f"reduce_dtype={policy.reduce_dtype}, reshard_after_forward={options.reshard_after_forward}",
        ]
    ]
    for param in group.params:
        layout = param.spec.layout
        trains = "" if param.requires_grad else ", frozen"
        lines.append([param.name, f"{tuple(layout.shape)} {param.dtype} cut along {layout.dim}{trains}"])
    return lines


def _other_values(values: dict[int, Any]) -> str | None:
    """The warning, given the name of a parameter of each group and its first values, of one rank for all like it."""
    first = min(values)
    for name, ours in values[first]:
        # By name: a rank that has changed a shard since has no values to show for it.
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
