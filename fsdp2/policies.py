"""Policy classes: torch's own, re-exported so that ``isinstance`` works with both packages, and fsdp2's.

``MixedPrecisionPolicy`` is torch's class here, and every policy is an instance of it. Users get
``PublicMixedPrecisionPolicy`` under that name: the same class, or a subclass if torch's lacks a field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

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
    "DataParallelMeshDims",
    "FormatOf",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadOf",
    "OffloadPolicy",
    "PolicyOf",
    "PublicMixedPrecisionPolicy",
    "ReduceScatter",
    "ShardPlacementResult",
    "UnshardHandle",
    "WireFormat",
    "check_dtypes",
    "fits",
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


Tied = Mapping[str, Sequence[str]]
"""All names of each parameter that has several, by each of them."""
_Policy = TypeVar("_Policy")


def fits(name: str, pattern: str) -> bool:
    """Return whether ``pattern`` stands for ``name``: it is the name, which may have brackets, or it matches it."""
    return name == pattern or fnmatchcase(name, pattern)


def _by_pattern(policies: Mapping[str, _Policy], default: _Policy, tied: Tied) -> Callable[[str], _Policy]:
    """Return the first of ``policies`` whose pattern matches a name of the parameter, as a function of any of them."""
    patterns = {pattern: policy for pattern, policy in policies.items() if pattern}

    def of(name: str) -> _Policy:
        names = tied.get(name, (name,) if name else ())
        found = (p for pattern, p in patterns.items() if any(fits(one, pattern) for one in names))
        return next(found, default)

    return of


PolicyOf = Callable[[str], MixedPrecisionPolicy]


def policy_by_name(given: object, tied: Tied) -> PolicyOf:
    """Return ``mp_policy`` as a function of a parameter's name in the unit; the empty name stands for the unit itself.

    A mapping may have any of the names of a ``tied`` parameter.

    Raises:
        TypeError: ``given`` is not a policy, a mapping of names or patterns to policies, or a function, or it has
            something other than a policy for a name.
        ValueError: A dtype in a policy is not a floating-point one.
    """

    def checked(name: str, found: object) -> MixedPrecisionPolicy:
        if isinstance(found, MixedPrecisionPolicy) and isinstance(name, str):
            check_dtypes(found)
            return found
        raise TypeError(
            "fully_shard: mp_policy must be a MixedPrecisionPolicy, a mapping from names or patterns to policies, or a "
            f"function from a name to a policy, got {found!r}{f' for {name!r}' if name else ''}"
        )

    if isinstance(given, Mapping):
        policies = {pattern: checked(pattern, policy) for pattern, policy in given.items()}
        return _by_pattern(policies, policies.get("", MixedPrecisionPolicy()), tied)
    if isinstance(given, MixedPrecisionPolicy):
        return lambda name: given
    if not callable(given) or isinstance(given, type):
        checked("", given)

    def ask(name: str) -> MixedPrecisionPolicy:
        found = given(name)  # type: ignore[operator]  # it is callable
        return ask("") if found is None and name else checked(name, found)

    return ask


OffloadOf = Callable[[str], OffloadPolicy]


def offload_by_name(given: object, tied: Tied) -> OffloadOf:
    """Return ``offload_policy`` as a function of a parameter's name in the unit; "" stands for all others.

    A mapping may have any of the names of a ``tied`` parameter.

    Raises:
        TypeError: ``given`` is not a policy, a mapping of names or patterns to policies, or a function, or it has
            something other than a policy for a name.
    """

    def checked(name: str, found: object) -> OffloadPolicy:
        if isinstance(found, OffloadPolicy) and isinstance(name, str):
            return found
        raise TypeError(
            "fully_shard: offload_policy must be an OffloadPolicy, a mapping from names or patterns to policies, or a "
            f"function from a name to a policy, got {found!r}{f' for {name!r}' if name else ''}"
        )

    if isinstance(given, Mapping):
        policies = {pattern: checked(pattern, policy) for pattern, policy in given.items()}
        return _by_pattern(policies, policies.get("", OffloadPolicy()), tied)
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


class WireFormat(Protocol):
    """A form in which elements are sent: the interface of what ``format_of`` of a custom collective returns.

    Rows of elements become rows of bytes and elements again. Collectives encode and decode in runs: parameters with
    equal formats (``==``) that lie side by side are one row, and gradients with equal formats are sent together.

    A format that keeps something from one call to the next, like random numbers, has a method ``new_state`` as well. It
    gets a number, and returns what ``encode`` gets as ``state``; there is one for each class of formats and stream, and
    the number is 0 for the shard dimension and 1 for the replicate dimension. A gather's is None.
    """

    @property
    def block(self) -> int:
        """The number of elements that are encoded together; rows have a multiple of it."""

    def nbytes(self, numel: int) -> int:
        """Return how many bytes ``numel`` elements take, a multiple of ``block``."""

    def encode(self, values: torch.Tensor, sent: torch.Tensor, state: Any) -> None:
        """Write ``values`` (rows, elements), which may be on the host, to ``sent`` (rows, bytes)."""

    def decode(self, sent: torch.Tensor, numel: int, values: torch.Tensor, first: int) -> None:
        """Write elements of ``sent`` (rows, bytes), which has ``numel`` in each row, to ``values`` (rows, elements).

        They begin at ``first``, a multiple of ``block``, and may end within a block.
        """

    def add(self, sent: torch.Tensor, total: torch.Tensor, divisor: int) -> None:
        """Add all rows of ``sent`` to ``total`` (elements, float32), then divide it by ``divisor``."""


FormatOf = Callable[[str, nn.Parameter, int, int], WireFormat | None]
"""Chooses the format of a parameter by its name in the unit, the parameter itself, the number of its elements that the
ranks of the unit hold together, and that of the largest piece. None: it is sent as it is."""
