"""Policy classes: torch's own, re-exported so that ``isinstance`` works with both packages, and fsdp2's.

``MixedPrecisionPolicy`` is torch's class here, and every policy is an instance of it. Users get
``PublicMixedPrecisionPolicy`` under that name: the same class, or a subclass if torch's lacks a field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
)
from torch.distributed.tensor import Shard

from fsdp2._torch.collectives import AllGather, ReduceScatter

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "CompressionPolicy",
    "DataParallelMeshDims",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadOf",
    "OffloadPolicy",
    "PolicyOf",
    "PublicMixedPrecisionPolicy",
    "ReduceScatter",
    "ShardPlacementResult",
    "UnshardHandle",
    "check_dtypes",
    "offload_by_name",
    "policy_by_name",
    "policy_for",
]


@dataclass
class _DataParallelMeshDims:
    """The names of the data-parallel dimensions of a mesh, for torch versions without the class of that name.

    Attributes:
        shard: The dimension or dimensions that parameters are sharded over.
        replicate: The dimension or dimensions that hold copies.

    Raises:
        ValueError: Neither is given.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("At least one of shard or replicate must be set in DataParallelMeshDims")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The dimensions that parameters are sharded over."""
        return (self.shard,) if isinstance(self.shard, str) else tuple(self.shard or ())

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The dimensions that hold copies."""
        return (self.replicate,) if isinstance(self.replicate, str) else tuple(self.replicate or ())


_DataParallelMeshDims.__name__ = _DataParallelMeshDims.__qualname__ = "DataParallelMeshDims"


class _GradientReductionHandle:
    """The handle of ``finalize_backward(async_op=True)``, for torch versions without the class of that name."""

    def wait(self) -> None:
        """Wait until the gradients are reduced."""


_GradientReductionHandle.__name__ = _GradientReductionHandle.__qualname__ = "GradientReductionHandle"


@dataclass(frozen=True)
class _MixedPrecisionPolicy(MixedPrecisionPolicy):
    """torch's policy with a field of torch 2.15, for earlier versions.

    Attributes:
        param_dtype_override_fn: A function of a parameter that returns the dtype to compute it with: ``param_dtype``,
            the parameter's own dtype, or None for ``param_dtype``.
    """

    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None


# The name that users see, and under which it is pickled.
_MixedPrecisionPolicy.__name__ = _MixedPrecisionPolicy.__qualname__ = "MixedPrecisionPolicy"
_MixedPrecisionPolicy.__module__ = "fsdp2"

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims

    GradientReductionHandle = _GradientReductionHandle
    PublicMixedPrecisionPolicy = _MixedPrecisionPolicy
else:
    _OVERRIDES = hasattr(MixedPrecisionPolicy, "param_dtype_override_fn")
    PublicMixedPrecisionPolicy = MixedPrecisionPolicy if _OVERRIDES else _MixedPrecisionPolicy
    DataParallelMeshDims = getattr(torch_fsdp, "DataParallelMeshDims", _DataParallelMeshDims)
    GradientReductionHandle = getattr(torch_fsdp, "GradientReductionHandle", _GradientReductionHandle)


def check_dtypes(policy: MixedPrecisionPolicy) -> None:
    """Raise ValueError if ``policy`` has a dtype that is not a floating-point one."""
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"mp_policy.{name}: expected a floating-point torch.dtype or None, got {dtype!r}; gradients and mixed "
                "precision exist for floating-point types only"
            )


def policy_for(param: nn.Parameter, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return ``policy`` with the ``param_dtype`` that its ``param_dtype_override_fn`` chooses for ``param``.

    Raises:
        ValueError: The function returned neither None, nor ``param_dtype``, nor the dtype of the parameter.
    """
    override = getattr(policy, "param_dtype_override_fn", None)
    dtype = None if override is None else override(param)
    if dtype is None:
        return policy
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"param_dtype_override_fn must return a torch.dtype or None, got {dtype!r}")
    if dtype not in (policy.param_dtype, param.dtype):
        raise ValueError(
            f"param_dtype_override_fn must return None, param_dtype ({policy.param_dtype}), or the parameter's dtype "
            f"({param.dtype}), got {dtype}"
        )
    return policy if dtype is policy.param_dtype else replace(policy, param_dtype=dtype)


PolicyOf = Callable[[str], MixedPrecisionPolicy]


def policy_by_name(given: object) -> PolicyOf:
    """Return ``mp_policy`` as a function of a parameter's name in the unit; the empty name stands for the unit itself.

    Raises:
        TypeError: ``given`` is not a policy, a mapping of names or patterns to policies, or a function, or it has
            something other than a policy for a name.
        ValueError: A dtype in a policy is not a floating-point one.
    """

    def checked(name: str, found: object) -> MixedPrecisionPolicy:
        if isinstance(found, MixedPrecisionPolicy):
            check_dtypes(found)
            return found
        raise TypeError(
            "fully_shard: mp_policy must be a MixedPrecisionPolicy, a mapping from names or patterns to policies, or a "
            f"function from a name to a policy, got {found!r}{f' for {name!r}' if name else ''}"
        )

    if isinstance(given, Mapping):
        default = checked("", given.get("", MixedPrecisionPolicy()))
        patterns = {pattern: checked(pattern, policy) for pattern, policy in given.items() if pattern}
        return lambda name: next((p for pattern, p in patterns.items() if name and fnmatch(name, pattern)), default)
    if isinstance(given, MixedPrecisionPolicy):
        return lambda name: given
    if not callable(given) or isinstance(given, type):
        checked("", given)

    def ask(name: str) -> MixedPrecisionPolicy:
        found = given(name)  # type: ignore[operator]  # it is callable
        return ask("") if found is None and name else checked(name, found)

    return ask


OffloadOf = Callable[[str], OffloadPolicy]


def offload_by_name(given: object) -> OffloadOf:
    """Return ``offload_policy`` as a function of a parameter's name in the unit; "" stands for all others.

    Raises:
        TypeError: ``given`` is not a policy, a mapping of names or patterns to policies, or a function, or it has
            something other than a policy for a name.
    """

    def checked(name: str, found: object) -> OffloadPolicy:
        if isinstance(found, OffloadPolicy):
            return found
        raise TypeError(
            "fully_shard: offload_policy must be an OffloadPolicy, a mapping from names or patterns to policies, or a "
            f"function from a name to a policy, got {found!r}{f' for {name!r}' if name else ''}"
        )

    if isinstance(given, Mapping):
        default = checked("", given.get("", OffloadPolicy()))
        patterns = {pattern: checked(pattern, policy) for pattern, policy in given.items() if pattern}
        return lambda name: next((p for pattern, p in patterns.items() if name and fnmatch(name, pattern)), default)
    if isinstance(given, OffloadPolicy) or not callable(given) or isinstance(given, type):
        policy = checked("", given)
        return lambda name: policy
    return lambda name: checked(name, given(name))


@dataclass(frozen=True)
class ShardPlacementResult:
    """A result of ``shard_placement_fn`` that puts a parameter on a mesh of its own, such as that of an expert.

    Attributes:
        placement: The dimension to shard; None for the first.
        mesh_info: The 1D or 2D mesh to shard over, with the meaning of ``mesh`` in ``fully_shard``.
    """

    placement: Shard | None
    mesh_info: DeviceMesh


@dataclass(frozen=True)
class CompressionPolicy:
    """Compresses collectives of a unit to elements of eight or four bits, in blocks with one scale each.

    Shards, optimizers and checkpoints keep the original values. Compression makes steps faster if they wait for the
    network.

    Attributes:
        gather: The format of parameters, rounded to nearest: int8 or float8_e4m3fn. Forward and backward of an
            iteration compute with the same values. None sends them uncompressed.
        reduce: The format of gradients on the shard dimension: int8, float8_e5m2 or "int4". The receiving rank decodes
            and sums them in float32. None sends them uncompressed.
        replicate: The format of gradients on the replicate dimension of hybrid sharding, like ``reduce``.
        block: The number of elements that share a scale, a multiple of 16.
        stochastic: Round gradients stochastically, so that sums are unbiased; False rounds to nearest.
        min_numel: Parameters with fewer elements (norms, biases) are sent uncompressed.
        skip: A function of a parameter's name in the unit and the parameter; if it returns True, the parameter is sent
            uncompressed.

    Raises:
        ValueError: A format, ``block`` or ``min_numel`` is not supported.
        TypeError: ``stochastic`` or ``skip`` has the wrong type.

    Example:
        ```python
        fsdp2.fully_shard(model, compression=fsdp2.CompressionPolicy(gather=torch.int8, reduce=torch.int8))
        ```
    """

    gather: torch.dtype | None = None
    reduce: torch.dtype | Literal["int4"] | None = None
    replicate: torch.dtype | Literal["int4"] | None = None
    block: int = 256
    stochastic: bool = True
    min_numel: int = 1 << 14
    skip: Callable[[str, nn.Parameter], bool] | None = None

    def __post_init__(self) -> None:
        gradients = (None, torch.int8, torch.float8_e5m2, "int4")
        parameters = (None, torch.int8, torch.float8_e4m3fn)
        for name, known in (("gather", parameters), ("reduce", gradients), ("replicate", gradients)):
            value: Any = getattr(self, name)
            if value not in known:
                raise ValueError(f"compression.{name}: expected one of {known}, got {value!r}")
        for name, least, multiple in (("block", 16, 16), ("min_numel", 0, 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least or value % multiple:
                raise ValueError(
                    f"compression.{name}: expected a multiple of {multiple}, at least {least}, got {value!r}"
                )
        if not isinstance(self.stochastic, bool):
            raise TypeError(f"compression.stochastic must be a bool, got {self.stochastic!r}")
        if self.skip is not None and not callable(self.skip):
            raise TypeError(f"compression.skip: expected a function of a name and a parameter, got {self.skip!r}")
