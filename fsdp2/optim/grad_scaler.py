"""Loss scaling that makes the same decision about infinite gradients on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp2.comm.collectives import all_reduce
from fsdp2.optim.copies import scaled_together
from fsdp2.optim.prebuilt import repair
from fsdp2.optim.runs import unscale
from fsdp2.optim.unseen import refuse_unreduced
from fsdp2.sharding.mesh import Axis
from fsdp2.sharding.spec import on_this_rank

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for sharded, replicated and plain parameters together.

    torch's own scaler reduces the found infinities over ranks only if the first gradient is sharded. If that gradient
    is replicated (a scalar, a NO_SHARD unit), each rank steps or skips on its own, and a rank without gradients makes
    the others hang. This scaler checks all gradients on each rank, and one all-reduce over ``process_group`` (default:
    all ranks) combines the results. It also unscales gradients of float16 parameters.

    Args:
        device: The type of device, "cuda" for example.
        init_scale: The first scale.
        backoff_factor: The factor for the scale after a step with infinite gradients.
        growth_factor: The factor for the scale after ``growth_interval`` steps without any.
        growth_interval: The number of steps between increases of the scale.
        enabled: False makes all methods do nothing.
        process_group: The ranks that must make the same decision.

    Example:
        ```python
        scaler = fsdp2.ShardedGradScaler()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        ```
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale gradients in place; return numbers by device, in sum 1 if a gradient on any rank is not finite."""
        # The step does this too late: the optimizer must hold the shards whose gradients are unscaled.
        repair(optimizer)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        refuse_unreduced(params, "ShardedGradScaler.unscale_")
        grads: list[torch.Tensor] = []
        for param in params:
            grad: Any = param.grad
            if grad is None:
                continue
            values = on_this_rank(grad)
            if values.is_sparse:  # of an ignored parameter: unscaled here, and a copy of its values is checked below
                values = values.mul_(inv_scale.to(values.device)).coalesce().values().clone()
            grads.append(values)
        with scaled_together(params, lambda copies: unscale(copies, torch.zeros_like(found_inf), inv_scale)):
            found = unscale(grads, found_inf, inv_scale)
        total = sum((one.to(found_inf.device) for one in found.values()), torch.zeros_like(found_inf)).view(1)
        if dist.is_initialized():
            ranks = self.process_group or dist.group.WORLD
            assert ranks is not None
            axis = Axis.of_group(ranks, total.device.type)
            all_reduce(total, axis, average=False, async_op=False)
        # The scaler adds up what is returned, and a fused step is skipped where that is 1, not where it is more.
        for one in found.values():
            one.zero_()
        found_inf.copy_(total.clamp(max=1).view(found_inf.shape))
        return found
