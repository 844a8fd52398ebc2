"""The table of correctness checks. Each function trains small models and compares them.

The docstring of a function describes its row in the report.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2.tools.check.models import Small, tied
from fsdp2.tools.check.place import Outcome, Place
from fsdp2.tools.check.trial import ALONE, MIXED, FullyShard, Seen, Skip, Trial, loss_of, sgd, shard, whole

__all__ = [
    "CASES",
    "checkpoint",
    "compiled_blocks",
    "compression",
    "cpu_offload",
    "hybrid",
    "kept_after_forward",
    "large_parameters",
    "mixed_precision",
    "plain",
    "recomputation",
    "run_case",
    "skipped_unit",
    "state_on_the_host",
    "tensor_parallel",
    "tied_parameters",
    "uneven_parameters",
    "weight_sync",
    "whole_matrix_optimizer",
]

EIGHT_BITS = 0.05
"""The largest difference between training with eight bits and one process, as a part of the largest value.

Each weight and gradient has a rounding error of up to a 254th of its block's largest value, over three steps.
"""


def plain(trial: Trial) -> None:
    """float32, every block a unit"""
    trial.against(partial(shard, mesh=trial.mesh()))


def mixed_precision(trial: Trial) -> None:
    """computed in bfloat16, summed in float32"""
    trial.against(partial(shard, mesh=trial.mesh(), mp_policy=MIXED), dtype=torch.bfloat16)


def kept_after_forward(trial: Trial) -> None:
    """reshard_after_forward=False"""
    trial.against(partial(shard, mesh=trial.mesh(), reshard_after_forward=False))


def large_parameters(trial: Trial) -> None:
    """matrices large enough to be sent by themselves"""
    width = 2048 if trial.place.cuda else 256
    make = partial(Small, width=width, inner=2 * width, blocks=2)
    trial.against(partial(shard, mesh=trial.mesh()), make, tolerance=1e-4)


def hybrid(trial: Trial) -> None:
    """two replicas, each sharded over half of the ranks"""
    if trial.place.world % 2:
        raise Skip("needs an even number of ranks")
    mesh = trial.mesh(2, trial.place.world // 2, names=("replicate", "shard"))
    trial.against(partial(shard, mesh=mesh))


def tensor_parallel(trial: Trial) -> None:
    """matrices sharded over pairs of ranks, shards over the rest"""
    if trial.place.world % 2:
        raise Skip("needs an even number of ranks")
    mesh = trial.mesh(trial.place.world // 2, 2, names=("shard", "tensor"))
    trial.data = (trial.place.rank // 2, trial.place.world // 2)

    def prepare(model: Any, fully_shard: FullyShard) -> None:
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        shard(model, fully_shard, mesh=mesh["shard"])

    trial.against(prepare)


def recomputation(trial: Trial) -> None:
    """activation checkpointing around every block"""

    def prepare(model: Any, fully_shard: FullyShard) -> None:
        model.recomputed = True
        shard(model, fully_shard, mesh=trial.mesh())

    trial.against(prepare)


def compiled_blocks(trial: Trial) -> None:
    """torch.compile on every block"""
    backend = "inductor" if trial.place.cuda and importlib.util.find_spec("triton") else "aot_eager"

    def prepare(model: Any, fully_shard: FullyShard) -> None:
        for block in model.blocks:
            block.compile(backend=backend)
        shard(model, fully_shard, mesh=trial.mesh())

    trial.against(prepare, tolerance=1e-4, exact=False)


def cpu_offload(trial: Trial) -> None:
    """shards and optimizer on the host"""
    policy = CPUOffloadPolicy(pin_memory=trial.place.cuda)
    trial.against(partial(shard, mesh=trial.mesh(), offload_policy=policy))


def uneven_parameters(trial: Trial) -> None:
    """sizes that no number of ranks divides"""
    make = partial(Small, width=13, inner=7, outputs=3)
    trial.against(partial(shard, mesh=trial.mesh()), make, exact=False)


def tied_parameters(trial: Trial) -> None:
    """one matrix in two units"""
    trial.against(partial(shard, mesh=trial.mesh()), tied, torch_too=False)


def skipped_unit(trial: Trial) -> None:
    """every second rank skips one block"""
    if trial.place.world < 2:
        raise Skip("needs two ranks")

    def leave_out(model: Any, rank: int) -> None:
        model.skipped = (1,) if rank % 2 else ()

    def prepare(model: Any, fully_shard: FullyShard) -> None:
        leave_out(model, trial.place.rank)
        shard(model, fully_shard, mesh=trial.mesh())
        model.set_reduce_scatter_unused_params(True)

    ours = trial.train(trial.sharded(Small, prepare), "fsdp2")
    trial.compare(ALONE, ours, trial.train_alone(Small, configure=leave_out), 2e-5)


def compression(trial: Trial) -> None:
    """eight bits for each weight and gradient that is sent"""
    policy = fsdp2.CompressionPolicy(gather=torch.int8, reduce=torch.int8, block=64, min_numel=1024)
    prepare = partial(shard, mesh=trial.mesh(), compression=policy)
    trial.against(prepare, tolerance=EIGHT_BITS, torch_too=False)


def checkpoint(trial: Trial) -> None:
    """saved after two steps, loaded into another model"""
    if importlib.util.find_spec("numpy") is None:
        raise Skip("torch.distributed.checkpoint needs numpy, which is not installed")
    make = partial(trial.sharded, Small, partial(shard, mesh=trial.mesh()))
    model = make()
    optimizer = sgd(model)
    trial.train(model, "before saving", range(2), optimizer)
    resumed = make()
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.zero_()  # so only loaded values can be right
    other = sgd(resumed)
    if trial.place.hosts == 1:
        _through_files(trial.place, model, optimizer, resumed, other)
    else:  # there may be no folder that all hosts share
        _through_memory(model, optimizer, resumed, other)
    expected = trial.train(model, "not interrupted", [2], optimizer)
    trial.compare("not interrupted", trial.train(resumed, "resumed", [2], other), expected, 0.0, exact=True)


def _through_files(place: Place, model: Any, optimizer: Any, resumed: Any, other: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="fsdp2-check-") as own:  # only rank 0's folder is used
        folder = Path(place.from_rank0("checkpoint", lambda: own))
        place.doing("saving a checkpoint")
        dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer))), checkpoint_id=folder)
        place.doing("loading a checkpoint")
        state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(resumed, other)))
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(resumed, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        place.meet("checkpoint is loaded")  # before rank 0 removes the folder


def _through_memory(model: Any, optimizer: Any, resumed: Any, other: Any) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)  # whole values, on rank 0 alone
    weights, state = get_state_dict(model, optimizer, options=options)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # Not by set_state_dict: on ranks with empty weights it would load the optimizer alone, and these ranks would not
    # take part in the broadcast of the weights.
    set_model_state_dict(resumed, weights, options=options)
    set_optimizer_state_dict(resumed, other, state, options=options)


def whole_matrix_optimizer(trial: Trial) -> None:
    """Muon by use_full_params, compared with the same steps on whole matrices"""
    model = trial.sharded(Small, partial(shard, mesh=trial.mesh()))
    reference = trial.build(Small)
    optimizers = [*_muon(model, fsdp2.use_full_params), *_muon(reference, lambda optimizer: optimizer)]
    part, parts = trial.data
    for step in range(3):
        trial.place.doing(f"fsdp2: step {step + 1}")
        loss_of(model(trial.rows(step, model.width).chunk(parts)[part])).backward()
        for mine, plainly in zip(model.parameters(), reference.parameters()):
            gradient = whole(mine.grad)
            plainly.backward(gradient=gradient)  # so both step with the same gradients
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    got, expected = (_weights(one) for one in (model, reference))
    trial.compare("whole matrices", got, expected, 0.0, exact=True)


def state_on_the_host(trial: Trial) -> None:
    """AdamW by offload_optimizer_state, compared with the same steps without it"""
    seen = []
    offload = partial(fsdp2.offload_optimizer_state, bucket_mb=1e-3)
    for where, wrap in (("device", fsdp2.use_local_shards), ("host", offload)):
        model = trial.sharded(Small, partial(shard, mesh=trial.mesh()))
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True))
        seen.append(trial.train(model, f"state on the {where}", optimizer=optimizer))
    trial.compare("state on the device", seen[1], seen[0], 0.0, exact=True)


def weight_sync(trial: Trial) -> None:
    """weights sent to a receiver after each step by what has changed, compared with weights gathered at the end"""
    model = trial.sharded(Small, partial(shard, mesh=trial.mesh()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    receiver = fsdp2.WeightReceiver()
    sender = fsdp2.WeightSender(model, dtype=torch.bfloat16, bucket_mb=1e-2, delta=True)
    for step in range(3):
        trial.train(model, "fsdp2", [step], optimizer)
        trial.place.doing(f"sending the weights of step {step + 1}")
        sender.send(receiver.apply)
    gathered: Seen = {f"weight {name}": value for name, value in fsdp2.iter_full_params(model, dtype=torch.bfloat16)}
    received: Seen = {f"weight {name}": value for name, value in receiver.tensors.items()}  # on the first rank
    trial.compare("weights gathered", received or gathered, gathered, 0.0, exact=True)


def _muon(model: Any, wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [wrap(torch.optim.Muon(matrices, lr=0.02)), torch.optim.SGD(rest, lr=0.05, foreach=False)]


def _weights(model: nn.Module) -> Seen:
    return {f"weight {name}": whole(parameter) for name, parameter in model.named_parameters()}


CASES: dict[str, Callable[[Trial], None]] = {
    "plain": plain,
    "mixed precision": mixed_precision,
    "kept after forward": kept_after_forward,
    "hybrid": hybrid,
    "tensor parallel": tensor_parallel,
    "recomputation": recomputation,
    "CPU offload": cpu_offload,
    "compression": compression,
    "uneven parameters": uneven_parameters,
    "tied parameters": tied_parameters,
    "skipped unit": skipped_unit,
    "checkpoint": checkpoint,
    "whole-matrix optimizer": whole_matrix_optimizer,
    "state on the host": state_on_the_host,
    "weight sync": weight_sync,
    "large parameters": large_parameters,
    "compiled blocks": compiled_blocks,
}


def run_case(case: Callable[[Trial], None], place: Place) -> Outcome:
    """Run a case on this rank."""
    trial = Trial(place)
    try:
        case(trial)
    except Skip as reason:
        return Outcome("skipped", str(reason))
    return trial.outcome()
