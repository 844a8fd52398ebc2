"""All settings of a group, validated once and frozen; a setter is one ``dataclasses.replace``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

import torch

from fsdp2.comm.collectives import is_torchs_own, needs_one_buffer
from fsdp2.comm.streams import Lane
from fsdp2.policies import (
    AllGather,
    FormatOf,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
    check_dtypes,
)
from fsdp2.sharding.packing import NO_LIMIT, TransferSizes

__all__ = ["FormatsOf", "GroupOptions"]

_COMPARED = (
    "sizes",
    "force_sum",
    "reduce_unused",
    "any_order",
    "in_pairs",
    "all_gather",
    "reduce_scatter",
    "all_reduce_hook",
)
_values_compared = attrgetter(*_COMPARED)


class FormatsOf(NamedTuple):
    """Functions that choose formats: of parameters in gathers, of gradients on each axis; None: sent as they are."""

    gather: FormatOf | None = None
    reduce: FormatOf | None = None
    replicate: FormatOf | None = None


@dataclass(frozen=True)
class GroupOptions:
    """The settings of one group, made by ``fully_shard`` and by setters.

    With ``reshard_after_forward=None``, every unit except the root frees its parameters after forward: backward needs
    the root first. ``divide_factor=None`` means the number of data-parallel ranks. ``may_accumulate`` is set once a
    setter said whether backwards reduce: then any rank may have gradients of several micro-batches, summed in the dtype
    of the reduction. ``reduce_inputs`` is the number of chunks of gradients that may be in flight; None: the backend's
    default. ``all_gather`` and ``reduce_scatter`` may choose formats in place of ``compression``: see ``formats_of``.
    """

    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    keep_full_storage: bool = False
    reduce_gradients: bool = True
    all_reduce_gradients: bool = True
    may_accumulate: bool = False
    reduce_unused: bool = False
    any_order: bool = False  # of units that some ranks skip
    divide_factor: float | None = None
    force_sum: bool = False
    in_pairs: bool = False  # gradients are summed in one order of ranks, whatever the backend
    reduce_inputs: int | None = None
    sizes: TransferSizes = field(default_factory=TransferSizes)
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_lane: Lane | None = None
    compression: FormatsOf = field(default_factory=FormatsOf)

    @property
    def gather_sizes(self) -> TransferSizes:
        """The transfer sizes of gathers alone; the others are defaults. A custom all-gather gets all in one buffer."""
        if self.custom_gather is not None:
            return TransferSizes(direct_group_bytes=NO_LIMIT)
        return TransferSizes(self.sizes.direct_param_bytes, self.sizes.direct_group_bytes)

    @property
    def layout_settings(self) -> tuple[object, ...]:
        """The settings that determine the layout of shards in memory, because they are sent from there."""
        return self.gather_sizes, self.formats_of

    @property
    def formats_of(self) -> FormatsOf:
        """The functions that choose formats: methods of the custom collectives, otherwise ``compression``."""
        if self.all_gather is None and self.reduce_scatter is None:
            return self.compression
        gather, reduce, replicate = self.compression
        return FormatsOf(
            getattr(self.all_gather, "format_of", gather),
            getattr(self.reduce_scatter, "format_of", reduce),
            getattr(self.reduce_scatter, "replica_format_of", replicate),
        )

    @property
    def custom_gather(self) -> AllGather | None:
        """The custom collective that gathers; None if fsdp2 gathers, in formats that ``all_gather`` may choose."""
        return self.all_gather if callable(self.all_gather) else None

    @property
    def custom_scatter(self) -> ReduceScatter | None:
        """The custom collective that reduces gradients without a format; None if fsdp2 reduces them."""
        return self.reduce_scatter if callable(self.reduce_scatter) else None

    @property
    def compared(self) -> tuple[object, ...]:
        """The settings that ranks compare: they decide what is sent, and no collective contains them.

        ``divide_factor`` must be equal too, but it may change with every batch, so it is not compared.
        """
        return _values_compared(self)

    def describe_compared(self) -> str:
        """Describe those settings that must be equal on all ranks (``divide_factor`` too) and are not the default."""
        default = GroupOptions()
        found = []
        for name in ("divide_factor", *_COMPARED):
            if (value := getattr(self, name)) != getattr(default, name):
                found.append(f"{name}={value if isinstance(value, (bool, float, TransferSizes)) else _name(value)}")
        return ", ".join(found)

    @property
    def exchange_bytes(self) -> int | None:
        """The size from which on ranks exchange gradients and sum them themselves; None: the backend's default."""
        return 0 if self.in_pairs else self.sizes.exchange_bytes

    @property
    def chunk_sizes(self) -> TransferSizes:
        """The transfer sizes for gradients.

        An all-reduce hook gets all gradients of the group at once, which is torch's contract. All ranks set up
        symmetric memory together for each new address, so there is one buffer per group. Both need a single chunk.
        """
        at_once = self.all_reduce_hook is not None or self._symmetric
        return replace(self.sizes, chunk_bytes=NO_LIMIT) if at_once else self.sizes

    @property
    def _symmetric(self) -> bool:
        return needs_one_buffer(self.reduce_scatter)

    def with_comms(self, method: str, gather: AllGather | None, scatter: ReduceScatter | None) -> GroupOptions:
        """Return the same with these collectives of torch's, or the default ones for None, on behalf of ``method``.

        Raises:
            AssertionError: the user set a custom one.
        """
        for kind, comm in (("all gather", self.all_gather), ("reduce scatter", self.reduce_scatter)):
            if comm is not None and not is_torchs_own(comm):
                raise AssertionError(f"cannot call {method}() when {kind} comm is custom: {type(comm).__name__}")
        return replace(self, all_gather=gather, reduce_scatter=scatter)

    def __post_init__(self) -> None:
        check_dtypes(self.mp_policy)
        for name in ("all_gather", "reduce_scatter"):
            comm = getattr(self, name)
            communicates = callable(comm) and hasattr(comm, "allocate")
            formats = hasattr(comm, "format_of") and not callable(comm)
            if comm is not None and not communicates and not formats:
                raise TypeError(
                    f"{name}: expected a callable with an allocate method, or an object with a method format_of, got "
                    f"{comm!r}; derive it from torch's {'AllGather' if name == 'all_gather' else 'ReduceScatter'} "
                    "interface"
                )
        custom = self.all_gather if hasattr(self.all_gather, "format_of") else None, self.reduce_scatter
        for name, comm in zip(("gather", "reduce"), custom):
            if comm is not None and getattr(self.compression, name) is not None:
                kind = "all-gather" if name == "gather" else "reduce-scatter"
                raise ValueError(
                    f"compression.{name}: expected the collectives of fsdp2, got a custom {kind} "
                    f"({type(comm).__name__}), and only one of them would send it; leave one of the two out"
                )
        sums_itself = self.custom_scatter is not None or self.formats_of[1:] != (None, None)
        if self.in_pairs and sums_itself:
            raise ValueError(
                "set_deterministic_reduction: expected the collectives of fsdp2, got a custom reduce-scatter or "
                "compressed gradients, which sum by themselves; leave one of the two out"
            )
        if self.all_reduce_hook is not None and not callable(self.all_reduce_hook):
            raise TypeError(f"all_reduce_hook: expected a callable of one tensor, got {self.all_reduce_hook!r}")
        if self._symmetric and (self.reduce_inputs or 1) > 1:
            raise ValueError(
                f"set_reduce_scatter_max_input_buffers: expected 1 with symmetric memory, got {self.reduce_inputs}; "
                "its pool has one buffer. Keep 1, or leave set_symm_mem_for_comm out"
            )


def _name(value: object) -> str:
    """Return the name of a function or of an object's class. It is equal on all ranks; a repr may have an address."""
    return getattr(value, "__qualname__", type(value).__qualname__)
