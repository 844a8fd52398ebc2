"""Parameters tied across units: an embedding and a head that share a weight, each in a unit of its own.

The first ``fully_shard`` call that meets the weight makes it part of its group. A later call that meets it again, in
another module, gives it a group of its own that both calls drive: whoever needs it first gathers it, it stays until the
last of them is through, and its gradient, which autograd finishes once, is reduced once.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp2.build.collect import Found
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.param import FSDPParam, is_managed_tensor, show
from fsdp2.engine.unit import FSDPState, get_state
from fsdp2.sharding.mesh import DataParallelMesh

__all__ = ["Tie", "find_ties", "join_ties", "remember_group", "remember_managed"]

_groups: weakref.WeakKeyDictionary[FSDPParam, weakref.ref[FSDPParamGroup]] = weakref.WeakKeyDictionary()
# Originals only: torch cannot swap a tensor that has a weak reference, and Module.to swaps the sharded ones.
_originals: WeakIdKeyDictionary = WeakIdKeyDictionary()  # original parameter -> weak FSDPParam


def remember_managed(originals: list[nn.Parameter], group: FSDPParamGroup) -> None:
    """Note that ``group`` took the place of ``originals``, in the order of its parameters."""
    for original, param in zip(originals, group.params):
        _originals[original] = weakref.ref(param)
    remember_group(group)


def remember_group(group: FSDPParamGroup) -> None:
    """Note which group manages its parameters."""
    for param in group.params:
        _groups[param] = weakref.ref(group)


def _find(found: Found) -> tuple[FSDPParam, FSDPParamGroup] | None:
    """The managed parameter that ``found`` is a tie to, and its group."""
    if is_managed_tensor(found.param):
        param = next((p for p in _groups if p.sharded is found.param), None)
    else:
        param = _originals.get(found.param, lambda: None)()
    group = None if param is None or param not in _groups else _groups[param]()
    if param is None or group is None or get_state(group.modules[0]) is None:
        return None
    return param, group


@dataclass(frozen=True)
class Tie:
    """A parameter that another call manages already: where it was found, what it is a tie to, and that one's group."""

    found: Found
    param: FSDPParam
    group: FSDPParamGroup


def find_ties(found: list[Found], mesh: DataParallelMesh, state: FSDPState) -> tuple[list[Found], list[Tie]]:
    """The parameters that no other call manages, and the ties to those that another does; changes nothing.

    Raises:
        ValueError: a tie crosses meshes or dtypes of computation.
    """
    own, ties = [], []
    for entry in found:
        tied = _find(entry)
        if tied is None:
            own.append(entry)
        else:
            _check(entry, *tied, mesh, state)
            ties.append(Tie(entry, *tied))
    return own, ties


def join_ties(ties: list[Tie], state: FSDPState) -> None:
    """Let ``state`` drive the groups of parameters that other calls manage already, together with those."""
    for tie in ties:
        param, group = tie.param, _group_of_its_own(tie.param, tie.group)
        param.set_slots(param.slots + [slot for slot in tie.found.slots if slot not in param.slots])
        show([param], "sharded")
        if group not in state.groups:
            state.groups.append(group)


def _check(entry: Found, param: FSDPParam, group: FSDPParamGroup, mesh: DataParallelMesh, state: FSDPState) -> None:
    ours, theirs = state.mp_policy.param_dtype, param.policy.param_dtype
    if group.mesh.mesh != mesh.mesh and _ranks(group.mesh) != _ranks(mesh):
        got, expected = f"the mesh {mesh.mesh}", f"{group.mesh.mesh}"
    elif ours != theirs:
        got, expected = f"mp_policy.param_dtype={ours}", f"{theirs}"
    else:
        return
    raise ValueError(
        f"{entry.name} is shared with {param.name}, which is already managed by another FSDP group: got {got}, "
        f"expected {expected} as there. Use the same for both, or fully_shard([module_a, module_b]) to place them in "
        "one unit"
    )


def _ranks(mesh: DataParallelMesh) -> list[int]:
    """The ranks gradients are the mean of, however parameters are spread over them."""
    return sorted(mesh.mesh.mesh.flatten().tolist())


@torch.no_grad()
def _group_of_its_own(param: FSDPParam, group: FSDPParamGroup) -> FSDPParamGroup:
    """The group of ``param`` alone, split off its first one if need be."""
    if group.shared:
        return group
    group.reshard()
    alone = FSDPParamGroup([param], [param.local], group.modules, group.mesh, group.options, group.root)
    alone.shared, alone.in_root = True, group.in_root
    owner = get_state(group.modules[0])
    assert owner is not None
    owner.groups.append(alone)
    if len(group.params) > 1:
        group.drop(param)
    else:
        owner.groups.remove(group)
    _groups[param] = weakref.ref(alone)
    return alone
