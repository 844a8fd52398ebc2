"""Parameters tied across units: an embedding and a head that share a weight, each in a unit of its own.

The first ``fully_shard`` call that meets the weight makes it part of its group. A later call that meets it again, in
another module, gives it a group of its own that both calls drive: whoever needs it first gathers it, it stays until the
last of them is through, and its gradient, which autograd finishes once, is reduced once.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp2.collect import Found
from fsdp2.runtime.param import FSDPParam, show
from fsdp2.runtime.param_group import FSDPParamGroup
from fsdp2.runtime.state import FSDPState, get_state
from fsdp2.sharding.mesh import DataParallelMesh

__all__ = ["join_ties", "remember_managed"]

_managed: WeakIdKeyDictionary = WeakIdKeyDictionary()  # original or sharded parameter -> (weak FSDPParam, weak group)


def remember_managed(originals: list[nn.Parameter], group: FSDPParamGroup) -> None:
    """Note that ``group`` took the place of ``originals``, in the order of its parameters."""
    for original, param in zip(originals, group.params):
        for tensor in (original, param.sharded):
            _managed[tensor] = (weakref.ref(param), weakref.ref(group))


def _find(found: Found) -> tuple[FSDPParam, FSDPParamGroup] | None:
    """The managed parameter that ``found`` is a tie to, and its group."""
    references = _managed.get(found.param)
    if references is None:
        return None
    param, group = references[0](), references[1]()
    if param is None or group is None or get_state(group.modules[0]) is None:
        return None
    return param, group


def join_ties(found: list[Found], mesh: DataParallelMesh, state: FSDPState) -> list[Found]:
    """Let ``state`` drive the groups of parameters that other calls manage already; the others are returned.

    Raises:
        ValueError: the tie crosses meshes or dtypes of computation.
    """
    own = []
    for entry in found:
        tied = _find(entry)
        if tied is None:
            own.append(entry)
        else:
            _check(entry, *tied, mesh, state)
            group = _group_of_its_own(*tied)
            param = tied[0]
            param.set_slots(param.slots + [slot for slot in entry.slots if slot not in param.slots])
            show([param], "sharded")
            if group not in state.groups:
                state.groups.append(group)
    return own


def _check(entry: Found, param: FSDPParam, group: FSDPParamGroup, mesh: DataParallelMesh, state: FSDPState) -> None:
    ours, theirs = state.mp_policy.param_dtype, group.options.mp_policy.param_dtype
    if group.mesh.mesh != mesh.mesh:
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
    for tensor in [key for key, references in _managed.items() if references[0]() is param]:
        _managed[tensor] = (weakref.ref(param), weakref.ref(alone))
    return alone
