"""Which managed parameters lie below a module, in the order in which ``named_parameters`` gives them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fsdp2.comm.collectives import all_gather
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.index import managed_slots
from fsdp2.engine.lifecycle import Residency
from fsdp2.engine.param import FSDPParam, Slot
from fsdp2.engine.unit import FSDPState, get_state, live_states
from fsdp2.sharding.mesh import Axis

__all__ = ["Selection", "agree", "select"]

_META, _GRADIENT, _OPAQUE = 1, 2, 4


@dataclass(frozen=True)
class Selection:
    """Parameters with their groups, their names below the module, and the states that drive these groups.

    States without parameters belong to it where all units below them do.
    """

    params: dict[FSDPParam, FSDPParamGroup]
    names: dict[FSDPParam, str]
    states: list[FSDPState]

    @property
    def groups(self) -> dict[FSDPParamGroup, list[FSDPParam]]:
        """The parameters of each group, in order."""
        groups: dict[FSDPParamGroup, list[FSDPParam]] = {}
        for param, group in self.params.items():
            groups.setdefault(group, []).append(param)
        return groups

    def refuse_lent(self, what: str) -> None:
        """Raise RuntimeError if ``summon_full_params`` shows one of the parameters."""
        for param, group in self.params.items():
            if param in group.lifecycle.lent:
                raise RuntimeError(
                    f"{self.names[param]}: {what}, but summon_full_params already shows it; expected parameters that "
                    "are not summoned. Leave that context first"
                )


def select(module: nn.Module, *, recurse: bool = True) -> Selection:
    """What is managed at or below ``module``; without ``recurse`` not what belongs to units below it.

    Shards that were replaced on their modules since (loaded, moved or cast) are taken in first.
    """
    inside = _modules(module, recurse)
    live = live_states()
    slots = managed_slots(live)
    states: dict[FSDPState, None] = {}
    driven_by: dict[FSDPParamGroup, list[FSDPState]] = {}
    for state in live:
        if recurse and not state.groups and any(own in inside for own in state.modules):
            states[state] = None
        for group in state.groups:
            driven_by.setdefault(group, []).append(state)
    params: dict[FSDPParam, FSDPParamGroup] = {}
    names: dict[FSDPParam, str] = {}
    for inner, prefix in inside.items():
        for name in inner._parameters:
            if Slot(inner, name) in slots:
                param, group = slots[Slot(inner, name)]
                params[param] = group
                names.setdefault(param, f"{prefix}.{name}" if prefix else name)
    states.update(dict.fromkeys(state for group in params.values() for state in driven_by[group]))
    selection = Selection(params, names, list(states))
    for group in selection.groups:
        if group.lifecycle.residency is Residency.SHARDED and not group.lifecycle.lent:
            group.adopt_shards()
    return selection


def _modules(module: nn.Module, recurse: bool) -> dict[nn.Module, str]:
    """``module`` and those below it with their names; without ``recurse`` not those of other units."""
    if recurse:
        return {inner: name for name, inner in module.named_modules()}
    found: dict[nn.Module, str] = {}
    own = get_state(module)

    def visit(inner: nn.Module, name: str) -> None:
        found[inner] = name
        for key, child in inner.named_children():
            if child not in found and get_state(child) in (None, own):
                visit(child, f"{name}.{key}" if name else key)

    visit(module, "")
    return found


def agree(selection: Selection, *, with_grads: bool = False) -> None:
    """Compare with the other ranks what there is to gather, so that what one cannot do is refused on all.

    One small collective for each shard axis.

    Raises:
        RuntimeError: parameters are on the meta device, or have a gradient on some ranks only.
        NotImplementedError: a tensor subclass keeps its elements where only itself can find them.
    """
    by_axis: dict[Axis, list[FSDPParam]] = {}
    devices: dict[Axis, torch.device] = {}
    for param, group in selection.params.items():
        by_axis.setdefault(group.mesh.shard, []).append(param)
        devices[group.mesh.shard] = group.mesh.device
    for axis, members in by_axis.items():
        mine = torch.tensor([_code(param, with_grads) for param in members], dtype=torch.uint8)
        codes = mine.to(devices[axis]).new_empty(axis.size, len(members))
        all_gather([codes.view(-1)], [mine.to(devices[axis])], axis, async_op=False)
        for param, seen in zip(members, zip(*codes.tolist())):
            _check(param, selection.names[param], seen)


def _code(param: FSDPParam, with_grads: bool) -> int:
    if param.local.is_meta:
        return _META
    if param.data is None:
        return _OPAQUE
    return _GRADIENT if with_grads and param.gradient is not None else 0


def _check(param: FSDPParam, name: str, seen: tuple[int, ...]) -> None:
    ranks = [rank for rank, code in enumerate(seen) if code]
    if _META in seen:
        raise RuntimeError(
            f"{name}: on the meta device on ranks {[r for r, code in enumerate(seen) if code == _META]} of its "
            "shard axis; expected values. Materialize it first: module.to_empty(device=...) and load or initialize it"
        )
    if _OPAQUE in seen:
        raise NotImplementedError(
            f"{name}: its shard is a {type(param.local).__name__} that does not keep its elements in one tensor "
            "of the same shape and dtype; expected one that does, or a plain tensor. module.unshard() shows what "
            "forward computes with"
        )
    if ranks and len(ranks) < len(seen):
        raise RuntimeError(
            f"{name}: has a gradient on ranks {ranks} of its shard axis, none on the others; expected one on all "
            "or on none. Clear it everywhere, or leave with_grads out"
        )
