"""Functions over all units below a module, with the names that they have in FullyShardedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from fsdp2._naming import check_module, class_name
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.index import units_below
from fsdp2.engine.options import GroupOptions
from fsdp2.engine.unit import FSDPState, get_state
from fsdp2.module import FSDPModule

__all__ = ["fsdp_modules", "no_sync"]


def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FSDPModule]:
    """Return the FSDPModules in ``module``, itself included, in the order of ``module.modules()``.

    Args:
        module: Any module.
        root_only: Return only those that are not below another one, in ``module`` or in the tree of an earlier forward.
    """
    check_module(module, "fsdp_modules")
    found: list[FSDPModule] = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    if not root_only:
        return found
    below = {inner for unit in found for inner in unit.modules() if inner is not unit}  # type: ignore[attr-defined]  # a Module
    return [unit for unit in found if unit not in below and unit._get_fsdp_state().is_root is not False]


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate full gradients without communication in backwards inside a ``with`` block.

    The first backward after the block reduces their sum. Each unit's setting is restored at the end; blocks may be
    nested. Without units in ``module`` the block does nothing, so the same script also runs unsharded.

    Raises:
        ValueError: ``module`` is part of a unit above it, which reduces the gradients.

    Example:
        ```python
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with contextlib.nullcontext() if last else fsdp2.no_sync(model):
                model(batch).sum().backward()
        ```
    """
    check_module(module, "no_sync")
    units = units_below(module)
    if not units and module.__dict__.get("_is_fsdp_managed_module"):
        raise ValueError(
            f"no_sync: {class_name(module)} is part of a unit whose FSDPModule is above it; pass that module, or "
            "the whole model"
        )
    groups = {group: _sync(group.store.options) for unit in units for group in unit.groups}
    to_come = {unit: _sync(unit.made_by.options) for unit in units}
    try:
        for group in groups:
            _set_sync(group, (False, False))
        for unit in units:
            _set_sync_of_groups_to_come(unit, (False, False))
        yield
    finally:
        for unit, setting in to_come.items():
            _set_sync_of_groups_to_come(unit, setting)
        for made in [group for unit in units for group in unit.groups if group not in groups]:
            owner = get_state(made.modules[0])
            if owner is not None and owner in to_come:  # else a parameter of a unit elsewhere was tied
                groups[made] = to_come[owner]
        for group, setting in groups.items():
            _set_sync(group, setting)


_Sync = tuple[bool, bool]
"""Whether a group reduces its gradients, and whether it does so over the replicate axis."""


def _sync(options: GroupOptions) -> _Sync:
    return options.reduce_gradients, options.all_reduce_gradients


def _with_sync(options: GroupOptions, setting: _Sync) -> GroupOptions:
    reduces, all_reduces = setting
    return replace(options, reduce_gradients=reduces, all_reduce_gradients=all_reduces, may_accumulate=True)


def _set_sync(group: FSDPParamGroup, setting: _Sync) -> None:
    options = group.store.options
    if setting != _sync(options):
        group.set_options(_with_sync(options, setting))


def _set_sync_of_groups_to_come(unit: FSDPState, setting: _Sync) -> None:
    unit.made_by = unit.made_by.with_options(_with_sync(unit.made_by.options, setting))
