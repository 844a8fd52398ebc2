"""``plan_units`` lists the units that a policy would make, before anything is sharded."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from fsdp2._naming import check_module, class_name
from fsdp2.engine.param import is_managed_tensor
from fsdp2.grouping.collect import check_set, collect
from fsdp2.grouping.policy import PlannedUnit, Policy, choose_units

__all__ = ["Plan", "describe", "plan_units"]

_SHOWN = 12


class Plan(list[tuple[str, int]]):
    """(Name, elements of its own parameters) of each unit in the order of sharding. The root is last, with the name "".

    As text it is a table with the class of each unit, its bytes, and the modules that stay with the root.
    """

    def __init__(self, units: Iterable[tuple[str, int]], text: str) -> None:
        super().__init__(units)
        self._text = text

    def __str__(self) -> str:
        return self._text


def plan_units(
    module: nn.Module,
    policy: Policy = "auto",
    *,
    ignored_modules: Iterable[nn.Module] | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> Plan:
    """Return the units that ``fully_shard(module, policy=policy)`` would make; ``print`` shows them as a table.

    The function changes nothing and does not communicate, so it works in a single process and on the meta device.

    Args:
        module: The module to plan for.
        policy: The argument of ``fully_shard``. None makes a single unit.
        ignored_modules: The argument of ``fully_shard``.
        ignored_params: The argument of ``fully_shard``.

    Raises:
        TypeError, ValueError: As in ``fully_shard``.

    Example:
        ```python
        print(fsdp2.plan_units(model))
        ```
    """
    check_module(module, "plan_units")
    ignored = check_set("plan_units", "ignored_modules", ignored_modules, nn.Module)
    left_alone = check_set("plan_units", "ignored_params", ignored_params, nn.Parameter)
    below_ignored = {param for one in ignored for param in one.parameters()}
    collect((module,), left_alone | below_ignored, ignored)  # raises the errors of fully_shard, of a lazy module say
    units = [] if policy is None else choose_units((module,), policy, ignored, left_alone)
    return describe((module,), units, ignored, left_alone)


def describe(
    roots: tuple[nn.Module, ...],
    units: list[PlannedUnit],
    ignored_modules: Iterable[nn.Module],
    ignored_params: Iterable[nn.Parameter],
) -> Plan:
    """Return the plan of ``units`` below ``roots``."""
    taken = {*ignored_params, *(param for module in ignored_modules for param in module.parameters())}
    plan, lines = [], []
    for name, modules, overrides in [(u.name, (u.module,), u.overrides) for u in units] + [("", roots, {})]:
        own: dict[nn.Parameter, str] = {}
        for module in modules:
            for below, param in module.named_parameters():
                if param not in taken and not is_managed_tensor(param):
                    own.setdefault(param, below)
        taken.update(own)
        numel, nbytes = sum(p.numel() for p in own), sum(p.numel() * p.element_size() for p in own)
        plan.append((name, numel))
        kinds = ", ".join(class_name(module) for module in modules)
        line = f"{name or '(root)'}: {kinds}, {numel:,} parameters, {nbytes / (1 << 20):.2f} MiB"
        if overrides:
            line += ", " + ", ".join(f"{key}={value!r}" for key, value in overrides.items())
        if not name and own:
            parts = list(dict.fromkeys(below.rpartition(".")[0] or below for below in own.values()))
            line += f": {', '.join(parts[:_SHOWN])}{' ...' if len(parts) > _SHOWN else ''}"
        lines.append(line)
    return Plan(plan, "\n".join([f"{len(lines)} unit{'s' if units else ''}", *lines]))
