"""``cpu_offload_by_budget`` chooses the parameters to keep on the CPU, up to a number of bytes."""

from __future__ import annotations

from torch import nn

from fsdp2._naming import check_module
from fsdp2.policies import CPUOffloadPolicy, OffloadPolicy

__all__ = ["cpu_offload_by_budget"]


def cpu_offload_by_budget(module: nn.Module, budget_bytes: int, *, pin_memory: bool = True) -> dict[str, OffloadPolicy]:
    """Choose the largest parameters of ``module`` to keep on the CPU, for ``fully_shard(offload_policy=)``.

    It takes parameters from the largest to the smallest, equal ones by name, until the next would exceed the budget; a
    larger budget only adds parameters. It does not communicate, and parameters may be on the meta device. Names are
    those in ``module``: pass the result to ``fully_shard`` for this module, with ``policy=`` if blocks become units.

    Args:
        module: A module, before or after ``fully_shard``.
        budget_bytes: The largest total size of the chosen parameters, counted whole. Each rank keeps its shards of them
            on the CPU, with their gradients and optimizer state.
        pin_memory: Keep them in page-locked memory, for faster copies.

    Returns:
        ``CPUOffloadPolicy(pin_memory)`` by the name of each chosen parameter. The others stay on the device.

    Raises:
        ValueError: ``budget_bytes`` is not a number of bytes.
    """
    check_module(module, "cpu_offload_by_budget")
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes < 0:
        raise ValueError(f"cpu_offload_by_budget: budget_bytes must be a number of bytes >= 0, got {budget_bytes!r}")
    sizes = {name: param.numel() * param.element_size() for name, param in module.named_parameters()}
    chosen: dict[str, OffloadPolicy] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        budget_bytes -= sizes[name]
        if budget_bytes < 0:
            break
        chosen[name] = CPUOffloadPolicy(pin_memory=pin_memory)
    return chosen
