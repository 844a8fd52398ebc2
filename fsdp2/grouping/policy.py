"""Choose the submodules that become units, by a policy of any form that torch accepts."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fsdp2._naming import class_name
from fsdp2._torch.modules import run_policy
from fsdp2.engine.param import is_managed_tensor
from fsdp2.engine.unit import get_state
from fsdp2.grouping.blocks import repeated_blocks
from fsdp2.grouping.walk import children_to_plan, has_forward, has_parameters

__all__ = ["PlannedUnit", "Policy", "choose_units"]

Policy = Any
"""A ``ModuleWrapPolicy`` or ``CustomPolicy``, a function for FSDP1's ``auto_wrap_policy``, ``(module) -> bool | dict``,
module classes, or "auto"."""

Matches = dict[nn.Module, dict[str, Any]]


@dataclass(frozen=True)
class PlannedUnit:
    """A module that will become a unit, its name below the root, and the arguments that the policy gives it."""

    name: str
    module: nn.Module
    overrides: dict[str, Any] = field(default_factory=dict)


def choose_units(
    roots: tuple[nn.Module, ...],
    policy: Policy,
    ignored_modules: Collection[nn.Module] = (),
    ignored_params: Collection[nn.Parameter] = (),
) -> list[PlannedUnit]:
    """Return the submodules of ``roots`` that ``policy`` matches, in the order of sharding: children first.

    The roots are not included. A shared module is returned once. Modules that are already sharded, everything below
    them, and modules that are never called are left out. If a module without a forward (``nn.ModuleList``) matches, its
    children are returned instead.

    Raises:
        TypeError: The policy has an unknown form, or returned something other than a bool or a dict.
        ValueError: The policy matches nothing.
    """
    ignored = {below for module in ignored_modules for below in module.modules()}
    names: dict[nn.Module, str] = {}
    visited, matches = set(ignored), Matches()
    for root in roots:
        matches.update(_match(root, policy, ignored, ignored_params))
        for name, module in root.named_modules():
            names.setdefault(module, name)
            if get_state(module) is not None:
                visited.update(module.modules())
    if not matches and visited == ignored:
        raise ValueError(_no_match(roots, policy))
    visited.update(roots)
    found: list[PlannedUnit] = []

    def visit(module: nn.Module, inherited: dict[str, Any] | None) -> None:
        for _, child in children_to_plan(module):
            if child in visited:
                continue
            visited.add(child)
            own = matches.get(child, inherited if has_parameters(child) else None)
            if has_forward(child):
                visit(child, None)
                if own is not None:
                    found.append(PlannedUnit(names[child], child, own))
            else:
                visit(child, own)

    for root in roots:
        visit(root, None)
    return found


# ---- the forms of a policy ----


def _match(
    root: nn.Module, policy: Policy, ignored: set[nn.Module], ignored_params: Collection[nn.Parameter]
) -> Matches:
    """Return the modules below ``root``, itself included, that ``policy`` matches, each with its own arguments."""
    answered = None if isinstance(policy, type) else run_policy(policy, root, ignored)
    if answered is not None:
        return answered
    if isinstance(policy, str) and policy == "auto":
        return {module: {} for module in repeated_blocks(root, ignored)}
    classes = _classes(policy)
    if classes:
        return {module: {} for module in root.modules() if isinstance(module, classes)}
    if _asks_recursively(policy):
        recursion = _Recursion(policy, root, ignored, ignored_params)
        recursion.ask(root)
        return recursion.matches
    found = Matches()
    for name, module in root.named_modules():
        answer = False if module in ignored else policy(module)
        if not isinstance(answer, (bool, dict)):
            raise TypeError(
                f"policy: for {name or 'the root'} ({class_name(module)}) it returned {answer!r}; expected True, "
                "False, or a dict of fully_shard's arguments"
            )
        if answer:
            found[module] = {} if answer is True else answer
    return found


def _classes(policy: Policy) -> tuple[type[nn.Module], ...]:
    """Return the classes of a policy that consists of classes, else an empty tuple.

    Raises:
        TypeError: Not all of them are module classes.
    """
    given = [policy] if isinstance(policy, type) else policy
    if not isinstance(given, (set, frozenset, list, tuple)):
        return ()
    if not given or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in given):
        raise TypeError(f"policy: expected nn.Module classes, at least one, got {policy!r}")
    return tuple(given)


def _asks_recursively(policy: Policy) -> bool:
    """Return True if a function takes the arguments of FSDP1's ``auto_wrap_policy``, False if it takes a module.

    Raises:
        TypeError: It takes neither.
    """
    try:
        if isinstance(policy, nn.Module):  # its class was meant; it could be called with a module
            raise TypeError
        signature = inspect.signature(policy)
        if "recurse" in signature.parameters:
            return True
        signature.bind(None)
    except ValueError:  # a built-in function has no signature
        return False
    except TypeError:
        raise TypeError(
            f"policy: got {policy!r}; expected a ModuleWrapPolicy, a CustomPolicy, a set of nn.Module classes, 'auto', "
            "a function (module) -> bool | dict, or one (module, recurse, nonwrapped_numel) -> bool such as "
            "functools.partial(size_based_auto_wrap_policy, min_num_params=1_000_000)"
        ) from None
    return False


class _Recursion:
    """Calls a policy like FSDP1: first to decide about recursion, then about the module without the units below it."""

    def __init__(
        self,
        policy: Callable[..., bool],
        root: nn.Module,
        ignored: Collection[nn.Module],
        ignored_params: Iterable[nn.Parameter],
    ) -> None:
        self._policy = policy
        self._root = root
        self._visited = set(ignored)
        self._taken = {*ignored_params, *(param for module in ignored for param in module.parameters())}
        self.matches = Matches()

    def ask(self, module: nn.Module) -> None:
        """Call the policy for ``module`` and the modules below it. The root is always a unit."""
        self._visited.add(module)
        if not self._policy(module, True, self._numel(module)):
            return
        for _, child in children_to_plan(module):
            if child not in self._visited and get_state(child) is None:
                self.ask(child)
        if module is not self._root and self._policy(module, False, self._numel(module)):
            self.matches[module] = {}
            self._taken.update(module.parameters())

    def _numel(self, module: nn.Module) -> int:
        """Return the number of elements of the parameters below ``module`` that no unit has yet."""
        return sum(p.numel() for p in module.parameters() if p not in self._taken and not is_managed_tensor(p))


def _no_match(roots: tuple[nn.Module, ...], policy: Policy) -> str:
    below = {module: name for root in roots for name, module in root.named_modules() if name}
    sizes = {name: sum(p.numel() for p in module.parameters()) for module, name in below.items()}
    kinds = Counter(class_name(module) for module in below)
    there = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common()) or "no submodule"
    largest = max(sizes, key=sizes.__getitem__, default=None)
    size = "" if largest is None else f"; the largest of them, {largest}, has {sizes[largest]:,} parameters"
    what = "found no repeated block" if isinstance(policy, str) else "matches nothing"
    return (
        f"fully_shard: policy {policy!r} {what} below {class_name(roots[0])}, which has: {there}{size}. Use "
        "classes or sizes that exist, or leave policy out to make one unit of the whole module"
    )
