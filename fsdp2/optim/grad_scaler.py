"""Loss scaling whose verdict on infinite gradients is the same on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp2.comm.collectives import all_reduce
from fsdp2.optim.prebuilt import repair
from fsdp2.optim.runs import unscale
from fsdp2.sharding.mesh import Axis
from fsdp2.sharding.spec import on_this_rank

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for sharded, replicated and plain parameters together.

    torch's own decides by the first gradient alone whether to reduce the found infinities over ranks: if that is
    replicated (a scalar, a NO_SHARD unit), each rank steps or skips on its own, and a rank without gradients makes the
    others hang. Here each rank checks all its gradients, and one all-reduce over ``process_group`` (None: all ranks)
    combines the results. Gradients of float16 parameters are unscaled, too.
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
        """Unscale gradients in place; by device, whether any rank found one that is not finite (more than 0)."""
        repair(optimizer)  # the step would: too late for gradients of shards that it does not hold yet
        grads: list[torch.Tensor] = []
        for group in optimizer.param_groups:
            for param in group["params"]:
                grad: Any = param.grad
                if grad is None:
                    continue
                values = on_this_rank(grad)
                if values.is_sparse:  # of an ignored parameter; a copy of its values is only looked at
                    values = values.mul_(inv_scale.to(values.device)).coalesce().values().clone()
                grads.append(values)
        found = unscale(grads, found_inf, inv_scale)
        total = sum((one.to(found_inf.device) for one in found.values()), torch.zeros_like(found_inf)).view(1)
        if dist.is_initialized():
            ranks = self.process_group or dist.group.WORLD
            assert ranks is not None
            axis = Axis.of_group(ranks, total.device.type)
            for work in all_reduce(total, axis, average=False, async_op=False):
                work.wait()
        for one in found.values():
            one.copy_(total.view(found_inf.shape))
        return found
