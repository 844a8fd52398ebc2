"""Clipping, loss scaling, activation checkpointing and torch's memory tracker."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.tensor import DTensor

from tests.support import api
from tests.support.composition import composes
from tests.support.parity import assert_parity, mesh_1d, on_one_axis, on_two_axes, stack
from tests.support.pool import on_ranks


@composes("clipping", "SGD")
@composes("clipping", "hybrid sharding", "SGD")
@on_ranks(2, 4)
@pytest.mark.parametrize("prepare", [on_one_axis, on_two_axes])
@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
def test_clip_grad_norm(rank, world, norm, prepare):
    """The norm is that of all ranks, a DTensor; clipped gradients train as in a single process."""

    def program(run):
        for step in range(2):
            run.backward(step)
            total = torch.nn.utils.clip_grad_norm_(run.module.parameters(), 0.05, norm_type=norm)
            assert isinstance(total, DTensor) == (run.fsdp is not None)
            run.seen[f"norm {step}"] = total.full_tensor() if isinstance(total, DTensor) else total
            run.update()

    assert_parity(prepare, program=program)


class Blocks(nn.Sequential):
    """Blocks of two layers."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)))

    def forward(self, x):
        return super().forward(x.detach().requires_grad_())  # which reentrant checkpointing needs


@composes("recomputation", "SGD")
@composes("reentrant recomputation", "SGD")
@on_ranks(2)
@pytest.mark.parametrize("order", ["wrapped first", "sharded first", "composable"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_wrapper(rank, world, order, reentrant):
    """Activation checkpointing inside, around and beside fully_shard; names keep their prefix."""
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT

    def prepare(module, fsdp):
        for index, block in enumerate(module):
            if order == "composable":
                checkpoint(block)
                fsdp.fully_shard(block, mesh=mesh_1d())
            elif order == "wrapped first":
                module[index] = fsdp.fully_shard(checkpoint_wrapper(block, kind), mesh=mesh_1d())
            else:
                module[index] = checkpoint_wrapper(fsdp.fully_shard(block, mesh=mesh_1d()), kind)
        fsdp.fully_shard(module, mesh=mesh_1d())

    run = assert_parity(prepare, build=Blocks, against=("torch",))
    prefix = "" if order == "composable" else "_checkpoint_wrapped_module."
    names = [name.replace("_checkpoint_wrapped_module.", "") for name, _ in run.module.named_parameters()]
    assert "0.0.weight" in names
    assert order == "composable" or any(prefix in name for name, _ in run.module.named_parameters())


@on_ranks(2)
def test_log(rank, world):
    """Every line that TORCH_LOGS=+fsdp shows of torch's, it shows of ours, and the bytes of what moves or is freed."""
    logger, handler = logging.getLogger("torch.distributed.fsdp.fully_shard"), logging.Handler()

    def lines(fsdp: Any) -> set[str]:
        seen: set[str] = set()
        handler.emit = lambda record: seen.add(record.getMessage())
        module = stack()
        on_one_axis(module, fsdp)
        module(torch.ones(1, 8)).sum().backward()
        return seen

    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        theirs, ours = lines(torch.distributed.fsdp), lines(api.ours)
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    assert "FSDP::post_backward (0)" in theirs
    assert theirs <= ours, theirs - ours
    if api.name == "fsdp2":  # a layer of 8 by 8 weights and 8 biases
        assert {f"FSDP::{event} (0): 288 bytes" for event in ("unshard", "reduce")} <= ours
        assert any(line.startswith("FSDP::reshard (0): ") for line in ours)
