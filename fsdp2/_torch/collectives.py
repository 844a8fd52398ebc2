"""Collectives of a process group, their options, and the store of the process group."""

from __future__ import annotations

import operator
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

# The options: the checks of the public collectives in Python take longer than a small collective, and a group's methods
# have none. The others: dist.new_group takes no name, see named_group and group_on_store.
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    Backend,
    ReduceScatterOptions,
    _get_default_timeout,
    _new_process_group_helper,
)

# Ranks compare themselves through the store that the process group was made with.
from torch.distributed.distributed_c10d import _get_default_store as default_store

# Collectives on buffers from a process group's allocator or from symmetric memory, used unchanged.
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

# The interfaces of set_custom_all_gather and set_custom_reduce_scatter, which torch does not export.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
)

# One collective belongs to no training step: it identifies the incarnation of the job. Users' modes must not count it.
from torch.utils._python_dispatch import _disable_current_modes as without_modes

__all__ = [
    "TORCH_COMMS",
    "AllGather",
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceOptions",
    "ProcessGroupAllocAllGather",
    "ProcessGroupAllocReduceScatter",
    "ReduceScatter",
    "ReduceScatterOptions",
    "SymmMemAllGather",
    "SymmMemReduceScatter",
    "default_store",
    "group_all_gather",
    "group_all_gather_coalesced",
    "group_all_reduce",
    "group_all_to_all",
    "group_on_store",
    "group_reduce_scatter",
    "group_reduce_scatter_coalesced",
    "group_timeout",
    "launched_collectives",
    "named_group",
    "without_modes",
]


# Looked up on the group, not on its class: a group written in Python (torch's threaded one, fault-tolerant ones)
# overrides these methods. torch 2.13 renamed all but the last.
def _group_method(name: str, before: str) -> Callable[[dist.ProcessGroup | None], Callable[..., Any]]:
    return operator.attrgetter(name if hasattr(dist.ProcessGroup, name) else before)


group_all_gather = _group_method("all_gather_single", "_allgather_base")

group_all_gather_coalesced = _group_method("all_gather_single_coalesced", "allgather_into_tensor_coalesced")

group_reduce_scatter = _group_method("reduce_scatter_single", "_reduce_scatter_base")

# One launch reduces several gradients without copying them. No public function takes a list of whole tensors:
# dist.reduce_scatter takes one tensor for each rank, and the coalescing manager needs more calls than it saves.
group_reduce_scatter_coalesced = _group_method("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")

group_all_to_all = _group_method("all_to_all_single", "alltoall_base")

group_all_reduce = _group_method("allreduce", "allreduce")


def named_group(ranks: list[int], name: str) -> dist.ProcessGroup:
    """Return a new process group of ``ranks``, in this order. They alone call this, with a ``name`` not used before.

    The ranks of a group find each other in the store by its name. ``dist.new_group`` derives the name from the number
    of groups that this process has made or is in. If that differs between ranks, they wait for each other forever.
    """
    world = dist.group.WORLD
    assert world is not None
    if hasattr(world, "new_group"):  # a group written in Python, which makes groups of its kind
        group: Any = dist.new_group(ranks, use_local_synchronization=True, group_desc=name)
        return group
    groups = distributed_c10d._world  # looked up now: torch's tests on threads put another one there
    kind, store = groups.pg_map[world]
    backend = Backend(kind)
    group, _ = _new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        backend,
        store,
        name,  # type: ignore[arg-type]  # a NewType of str
        timeout=_get_default_timeout(backend),
        device_id=world.bound_device_id,
        group_desc=name,
    )
    groups.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group


def group_on_store(
    store: dist.Store, name: str, rank: int, size: int, backend: str, timeout: timedelta | None
) -> dist.ProcessGroup:
    """Return a new process group whose members meet in ``store``, and may belong to jobs of their own, or to none.

    The public functions make the default process group, or groups of its ranks. This is what they call.
    """
    kind = Backend(backend)
    group, _ = _new_process_group_helper(
        size,
        rank,
        [],
        kind,
        store,
        name,  # type: ignore[arg-type]  # a NewType of str
        timeout=timeout or _get_default_timeout(kind),
        group_desc=name,
    )
    distributed_c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
    return group


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout of the collectives of ``group``.

    There is no public function for it, and the store's timeout differs. A backend written in Python has no options.
    """
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", default_pg_timeout)


def launched_collectives() -> int:
    """Return how many collectives this process has launched on all of its process groups.

    It shows whether a thread that is where it was seconds ago still waits for the same collective. No public function
    counts them. A group written in Python may not, either.
    """
    return sum(_count(group) for group in list(distributed_c10d._world.pg_map))


def _count(group: dist.ProcessGroup) -> int:
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]  # not in the stubs
    except (AttributeError, NotImplementedError, RuntimeError):
        return 0


# Symmetric memory for collectives; torch 2.11 lacks it.
SymmMemAllGather: Any = getattr(_fsdp_collectives, "SymmMemAllGather", None)
SymmMemReduceScatter: Any = getattr(_fsdp_collectives, "SymmMemReduceScatter", None)

_comms = (ProcessGroupAllocAllGather, ProcessGroupAllocReduceScatter, SymmMemAllGather, SymmMemReduceScatter)
TORCH_COMMS = tuple(comm for comm in _comms if comm is not None)
