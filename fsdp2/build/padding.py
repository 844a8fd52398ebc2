"""``padding_report`` lists the padding of each unit's shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from fsdp2.engine.casts import compute_dtype
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.index import groups_below
from fsdp2.engine.param import FSDPParam
from fsdp2.sharding.layout import ShardLayout
from fsdp2.sharding.packing import Item, plan_flat

__all__ = ["PaddingReport", "UnitPadding", "padding_report"]

_NOTABLE = 0.05  # parameters with at least this share of padding are named


class UnitPadding(NamedTuple):
    """The bytes of a unit's parameters and of their padding, on all ranks of a shard axis together."""

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
    may need less; ``shard_placement_fn="auto"`` chooses it. Gathers send the padding, too.

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
        unit = UnitPadding(prefix, group.mesh.shard.size, *_bytes(group))
        units.append(unit)
        lines.append(_line(prefix or "(root)", unit))
        for param in group.params:
            if _share(param.spec.layout) >= _NOTABLE:
                lines.append(_remedy(names.get(param.sharded, param.name), param))
    return PaddingReport(units, "\n".join([f"{'unit':<28}{'ranks':>6}{'parameters':>15}{'padding':>22}", *lines]))


def _bytes(group: FSDPParamGroup) -> tuple[int, int]:
    """Return the bytes of parameters and of padding on all ranks; a whole parameter counts on every rank."""
    ranks = group.mesh.shard.size
    items = [
        Item(p.spec.layout, p.dtype, compute_dtype(p.dtype, p.policy), form=p.formats.gather) for p in group.params
    ]
    held = ranks * plan_flat(items, group.options.sizes).shard_bytes
    own = sum(item.layout.numel * item.dtype.itemsize * (ranks if item.layout.dim is None else 1) for item in items)
    return own, held - own


def _share(layout: ShardLayout) -> float:
    """Return the padding of uneven pieces as a share of the parameter."""
    return layout.padding_numel / layout.numel if layout.dim is not None and layout.numel else 0.0


def _line(name: str, unit: UnitPadding) -> str:
    share = unit.padding / unit.parameters if unit.parameters else 0.0
    return f"{name:<28}{unit.ranks:>6}{_mib(unit.parameters):>15}{_mib(unit.padding):>13} {share:>8.1%}"


def _remedy(name: str, param: FSDPParam) -> str:
    layout = param.spec.layout
    best = ShardLayout.least_padded(layout.shape, layout.stride, layout.ranks)
    other = f"; Shard({best.dim}) would pad {_share(best):.1%}" if best.padding_numel < layout.padding_numel else ""
    return f"  {name} {tuple(layout.shape)}: Shard({layout.dim}) pads {_share(layout):.1%}{other}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.2f} MiB"
