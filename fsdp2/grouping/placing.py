"""Choose the mesh and the dimension for each parameter, or recognize one that is already sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp2._torch.tensors import FakeTensor
from fsdp2._warn import warn
from fsdp2.engine.casts import statistics_dtype
from fsdp2.engine.extension import has_extension, refuse_portions, sends_itself
from fsdp2.engine.param import copy_of
from fsdp2.grouping.collect import Found
from fsdp2.policies import MixedPrecisionPolicy, OffloadPolicy, ShardPlacementResult, policy_for
from fsdp2.sharding.mesh import DataParallelMesh, listed_ranks
from fsdp2.sharding.spec import ShardedSpec, on_this_rank

__all__ = ["Placed", "PlacementFn", "place", "policy_of_param"]

PlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None] | Literal["auto"]


@dataclass
class Placed:
    """A parameter to manage, its spec, the mesh that it is sharded over, and its dtypes.

    With ``is_piece``, the parameter is sharded already: its local tensor is this rank's piece.
    """

    found: Found
    spec: ShardedSpec
    mesh: DataParallelMesh
    policy: MixedPrecisionPolicy
    is_piece: bool = False
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)

    @property
    def piece(self) -> torch.Tensor:
        """This rank's part of the parameter."""
        plain = _plain(self.found.param)
        return plain if self.is_piece else self.spec.cut(plain)


def place(
    found: Found, placement_fn: PlacementFn | None, mesh: DataParallelMesh, policy: MixedPrecisionPolicy, whole: bool
) -> Placed:
    """Choose the mesh and the spec of one parameter by ``placement_fn`` or by default; ``whole`` leaves it uncut.

    Raises:
        ValueError, AssertionError: ``placement_fn`` returned an invalid placement, or a DTensor lies on ``mesh`` in
            another way than a shard does.
    """
    policy = policy_of_param(found, policy)
    _warn_of_lost_class(found, mesh)
    result: object = None
    if isinstance(placement_fn, str):
        # The inputs of an extension are rows, so shard the first dimension.
        result = None if has_extension(_plain(found.param)) else ShardedSpec.least_padded(found.param, mesh)
    elif placement_fn is not None:
        result = placement_fn(found.param)
    if result is None or isinstance(result, Shard):
        placement = result
    elif hasattr(result, "placement") and hasattr(result, "mesh_info"):  # ours or torch's, which holds a mesh inside
        placement, info = result.placement, result.mesh_info
        own = info if isinstance(info, DeviceMesh) else getattr(info, "mesh", info)
        if own is not mesh.mesh and own != mesh.mesh:
            has_portions, mesh = mesh.has_portions, DataParallelMesh.from_mesh(own)
            mesh = mesh.over_replicas() if has_portions and mesh.mesh.ndim == 2 else mesh
    else:
        even = ' For even pieces of experts pass shard_placement_fn="auto"' if _merges_dims(result) else ""
        raise ValueError(
            f"{found.name}: Invalid shard_placement_fn result: {result!r}; return Shard(d), a ShardPlacementResult or "
            f"None.{even}"
        )
    if isinstance(found.param, DTensor) and mesh.spmd is None and _shares_ranks(found.param, mesh):
        if whole:
            raise ValueError(
                f"{found.name}: in replicated_params, got a DTensor on {found.param.device_mesh} placed as "
                f"{found.param.placements}; expected a plain parameter, or a tensor-parallel one on a mesh of its own. "
                "Create it from full values, or leave a piece of it out of replicated_params"
            )
        spec = ShardedSpec.of_shard(found.param, mesh)
        if spec is None:
            raise ValueError(
                f"{found.name}: got a DTensor on {found.param.device_mesh} placed as {found.param.placements}; "
                "expected a plain parameter, a tensor-parallel one on a mesh of its own, or one on the mesh of "
                "fully_shard with its sharding. Register it before fully_shard, or create it from full values"
            )
        return _check_piece(Placed(found, spec, mesh, policy, is_piece=True))
    # All ranks hold a scalar. In a reduce-scatter each would sum its copy's gradient in another order than the others,
    # and the copies would drift apart.
    mesh = mesh.replicated() if whole or not found.param.ndim else mesh
    if mesh.has_portions and has_extension(_plain(found.param)):
        refuse_portions(found.name, _plain(found.param))
    return _check_piece(Placed(found, ShardedSpec.of(found.param, placement, mesh, found.name), mesh, policy))


def _warn_of_lost_class(found: Found, mesh: DataParallelMesh) -> None:
    """Warn if the parameter has a tensor class of its own that does not say how its shards are sent."""
    plain = _plain(found.param)
    if not _has_class(plain) or sends_itself(plain):
        return
    if has_extension(plain) and mesh.mesh.size() == 1 and not found.param.requires_grad:
        return  # it gives a view of its own memory
    kind = type(plain).__name__
    warn(
        f"{found.name} is a {kind}, which has no fsdp_pre_all_gather and fsdp_post_all_gather. Its values are sharded "
        f"as a plain tensor of {plain.dtype}, with which forward computes: what {kind} does differently is lost."
        " Define both methods, or leave the parameter out with ignored_params"
    )


def _has_class(plain: torch.Tensor) -> bool:
    """Return whether ``plain`` has a tensor class of its own."""
    return type(plain) is not torch.Tensor and not isinstance(plain, FakeTensor)


def _check_piece(entry: Placed) -> Placed:
    """Return ``entry`` if its tensor class can be cut, and the piece copied, which every unit does with its shards.

    Raises:
        NotImplementedError: It cannot. Nothing has changed then.
    """
    plain = _plain(entry.found.param)
    if not _has_class(plain):
        return entry
    try:
        with torch.no_grad():
            piece = entry.piece
            if has_extension(piece):
                copy_of(piece)
            elif not piece.is_meta:
                torch.empty(piece.shape, dtype=piece.dtype, device=piece.device).copy_(piece)
    except Exception as error:  # of any type: it is another package's
        raise NotImplementedError(
            f"{entry.found.name}: got a {type(plain).__name__} of shape {tuple(plain.shape)}, which cannot be cut into "
            f"shards and copied ({type(error).__name__}: {error}); expected a tensor class with torch.chunk, new_zeros "
            "and copy_, and with fsdp_pre_all_gather and fsdp_post_all_gather. Leave it out with ignored_params (each "
            "rank then keeps all of it), or quantize after training"
        ) from error
    return entry


def _merges_dims(placement: object) -> bool:
    """Return True if ``placement`` is torch's for merged dimensions, which only newer versions have."""
    return type(placement).__name__ == "BlockShard"


def policy_of_param(found: Found, asked: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return the policy ``asked`` for, but compute a batch norm in the dtype of its statistics: its kernels need it."""
    policy, dtype = policy_for(found.param, asked), statistics_dtype(found.sites[0].module)
    return policy if dtype is None or policy.param_dtype is None else replace(policy, param_dtype=dtype)


def _shares_ranks(param: DTensor, mesh: DataParallelMesh) -> bool:
    """Return True if ``param`` lies on several ranks of ``mesh``: it was made of shards, not by tensor parallelism.

    With one rank, return True if the meshes are the same.
    """
    theirs, ours = param.device_mesh, mesh.mesh
    both = set(listed_ranks(theirs)) & set(listed_ranks(ours))
    return len(both) > 1 or (ours.size() == 1 and theirs == ours)


def _plain(param: nn.Parameter) -> torch.Tensor:
    return on_this_rank(param).detach()
