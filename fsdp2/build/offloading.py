"""``cpu_offload_by_budget``: which parameters live on the CPU, up to a number of bytes."""

from __future__ import annotations

from torch import nn

from fsdp2.policies import CPUOffloadPolicy, OffloadPolicy

__all__ = ["cpu_offload_by_budget"]


def cpu_offload_by_budget(module: nn.Module, budget_bytes: int, *, pin_memory: bool = True) -> dict[str, OffloadPolicy]:
    """Choose the largest parameters of ``module`` to live on the CPU, for ``fully_shard(offload_policy=)``.

    They are taken from the largest to the smallest, by name where they are equal, until the next one would exceed the
    budget; a larger budget only adds some. It does not communicate, and parameters may be on the meta device. Names are
    those in ``module``: pass the result to ``fully_shard`` for this module, with ``policy=`` if blocks become units.

    Args:
        module: Before or after ``fully_shard``.
        budget_bytes: Bytes of whole parameters, as they are kept; each rank holds its share of them on the CPU, and its
            gradients and optimizer state with it.
        pin_memory: Keep them in page-locked memory, for faster copies.

    Returns:
        ``CPUOffloadPolicy(pin_memory)`` by the name of each chosen parameter. The others stay on the device.

    Raises:
        ValueError: ``budget_bytes`` is no number of bytes.
    """
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
