"""The only helper outside of ``tests/unit`` that reads the engine: options of units, how shards
lie, and what explains an error.

Results do not show them all, such as ``offload_policy`` where there is no device. What a test can see from outside
(placements, gathers, memory) it should.
"""

from __future__ import annotations

from typing import Any

from torch import nn

import fsdp2


def options_of(unit: Any) -> Any:
    """Return the options of a unit's parameters, or of the first where they differ."""
    return unit._get_fsdp_state().groups[0].store.options


def shard_bytes(unit: Any) -> int:
    """Return the bytes of the memory that this rank's shards lie in."""
    return sum(group.store.shard_bytes for group in unit._get_fsdp_state().groups)


def explain(module: Any, error: BaseException) -> None:
    """Add to an error what is added where nobody catches it (before Python 3.12 not before)."""
    module._get_fsdp_state().explain(error)


def options_by_name(module: nn.Module) -> dict[str, Any]:
    """Return the options of each parameter of a module that shows shards."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = [group for unit in fsdp2.fsdp_modules(module) for group in unit._get_fsdp_state().groups]
    return {names[param.sharded]: group.store.options for group in groups for param in group.params}
