"""Train torchtitan's small Llama, sharded by torchtitan's own function, for a few steps with clipping.

``--fsdp2``: after ``fsdp2.install()``. The loop is ours, not its trainer's, and attention is torchtitan's plain one in
place of the one that it compiles.
"""

from __future__ import annotations

import json
import sys

if "--fsdp2" in sys.argv:
    import fsdp2

    fsdp2.install()

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder, disable_fsdp_gradient_division
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

STEPS, TOKENS = 4, 16


def build() -> torch.nn.Module:
    """Two layers of the model that torchtitan debugs with."""
    torch.manual_seed(0)
    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def main() -> None:
    """Train and print one line of JSON on the first process."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    apply_fsdp_to_decoder(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
    disable_fsdp_gradient_division(model)
    if "--fsdp2" not in sys.argv:
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.set_force_sum_reduction_for_comms(True)  # with a divide factor torch's own cannot use gloo
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    positions = torch.arange(TOKENS).expand(2, TOKENS)
    losses = []
    for step in range(STEPS):
        rows = torch.randint(2048, (world, 2, TOKENS + 1), generator=torch.Generator().manual_seed(step))[rank]
        logits = model(rows[:, :-1], positions).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / world
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    units = sorted(type(unit).__mro__[1].__module__ + "." for unit in model.modules() if isinstance(unit, FSDPModule))
    if rank == 0:
        print("\n" + json.dumps({"units": units, "losses": losses}), flush=True)


if __name__ == "__main__":
    main()
