"""``padding_report`` lists the padding of each unit's shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from fsdp2.engine.casts import compute_dtype
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.index import groups_below
from fsdp2.sharding.layout import ShardLayout
from fsdp2.sharding.packing import PlannedParam, plan_flat

__all__ = ["PaddingReport", "UnitPadding", "padding_report"]

_NOTABLE = 0.05  # parameters with at least this share of padding are named


class UnitPadding(NamedTuple):
    """The bytes of a unit's parameters and of their padding, on all ranks that share them together.

    These are the ranks of a shard dimension, or with ``shard_over_replicas`` those of all replicas.
    """

    unit: str
    ranks: int
    parameters: int
    padding: int


class PaddingReport(list[UnitPadding]):
    """One entry for each unit and mesh. As text it is a table that also names the parameters with much padding."""

    def __init__(self, units: Iterable[UnitPadding], text: str) -> None:
        super().__init__(units)
        self._text = text

    def __str__(self) -> str:
        return self._text


def padding_report(module: nn.Module) -> PaddingReport:
    """Return the bytes of padding in the shards below ``module``; ``print`` shows them as a table.

    The pieces on all ranks are as large as the first one, and every piece ends on a multiple of 16 bytes. If the
    sharded dimension is not a multiple of the number of ranks, part of the last pieces is padding. Another dimension
    may need less; ``shard_placement_fn="auto"`` chooses it. Gathers send the padding, too. With
    ``shard_over_replicas``, each piece for the shard dimension is cut into equal parts, and the parts are padded
    instead.

    The function does not communicate, and parameters may be on the meta device.

    Raises:
        ValueError: No parameter of ``module`` is sharded.

    Example:
        ```python
        print(fsdp2.padding_report(model))
        ```
    """
    groups = groups_below(module, required_by="padding_report")
    names: dict[object, str] = {param: name for name, param in module.named_parameters()}
    units, lines = [], []
    for group in groups:
        prefix = next((name for name, inner in module.named_modules() if inner is group.modules[0]), "")
        unit = UnitPadding(prefix, group.mesh.shard.size * group.mesh.parts, *_bytes(group))
        units.append(unit)
        lines.append(_line(prefix or "(root)", unit))
        for param in group.params:
            if _share(param.spec.layout, group.mesh.parts) >= _NOTABLE:
                lines.append(_remedy(names.get(param.sharded, param.name), param.spec.layout, group.mesh.parts))
    return PaddingReport(units, "\n".join([f"{'unit':<28}{'ranks':>6}{'parameters':>15}{'padding':>22}", *lines]))


def _bytes(group: FSDPParamGroup) -> tuple[int, int]:
    """Return the bytes of parameters and of padding on the ranks that share them; whole parameters count once."""
    ranks, parts = group.mesh.shard.size, group.mesh.parts
    items = [
        PlannedParam(p.spec.layout, p.dtype, compute_dtype(p.dtype, p.policy), form=p.formats.gather)
        for p in group.params
    ]
    if not group.mesh.has_portions:
        held = ranks * _held(items, group)
    else:  # the last pieces for the shard axis are smaller, and so are their parts
        held = sum(
            parts * _held([replace(item, layout=item.layout.within(rank, parts), form=None) for item in items], group)
            for rank in range(ranks)
        )
    own = sum(item.layout.numel * item.dtype.itemsize for item in items)
    return own, held - own


def _held(items: list[PlannedParam], group: FSDPParamGroup) -> int:
    """Return the bytes that one rank holds of ``items``."""
    return plan_flat(items, group.store.options.sizes).shard_bytes


def _share(layout: ShardLayout, parts: int) -> float:
    """Return the padding of uneven pieces as a share of the parameter."""
    return _padding(layout, parts) / layout.numel if layout.numel else 0.0


def _padding(layout: ShardLayout, parts: int) -> int:
    """Return the elements that all ranks hold beyond the parameter's own."""
    if parts == 1:
        return layout.padding_numel
    return parts * sum(layout.within(rank, parts).slot_numel for rank in range(layout.ranks)) - layout.numel


def _line(name: str, unit: UnitPadding) -> str:
    share = unit.padding / unit.parameters if unit.parameters else 0.0
    return f"{name:<28}{unit.ranks:>6}{_mib(unit.parameters):>15}{_mib(unit.padding):>13} {share:>8.1%}"


def _remedy(name: str, layout: ShardLayout, parts: int) -> str:
    dim = ShardLayout.least_padded(layout.shape, layout.stride, layout.ranks * parts).dim  # as "auto" chooses
    best = replace(layout, dim=dim)
    better = _padding(best, parts) < _padding(layout, parts)
    other = f"; Shard({dim}) would pad {_share(best, parts):.1%}" if better else ""
    return f"  {name} {tuple(layout.shape)}: Shard({layout.dim}) pads {_share(layout, parts):.1%}{other}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.2f} MiB"
