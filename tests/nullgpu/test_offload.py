"""``offload_optimizer_state``: bytes of torch's CUDA allocator, and counts of copies, with the state on the host."""

from __future__ import annotations

import contextlib
import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import fsdp2
from tests.nullgpu.device import Counts
from tests.nullgpu.jobs import run
from tests.nullgpu.programs import ranks
from tests.nullgpu.test_bytes import LLAMA, model_of

MIB = 1 << 20
MOMENTS = ("exp_avg", "exp_avg_sq")


class Stepping:
    """Four blocks on one of eight ranks in float32, and the bytes and counts of a step of AdamW, the third."""

    def __init__(self, **options: Any) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        with ranks(8) as mesh:
            model = model_of(mesh)
            self.moments = 2 * sum(parameter.to_local().nbytes for parameter in model.parameters())
            optimizer = torch.optim.AdamW(model.parameters(), fused=options.pop("fused", None))
            if not options:
                fsdp2.use_local_shards(optimizer)
            else:
                fsdp2.offload_optimizer_state(optimizer, **options)
            for _ in range(3):
                rows = torch.empty(1, 256, LLAMA.width, dtype=torch.bfloat16, device="cuda")
                model(rows).backward(torch.empty_like(rows))
                torch.cuda.synchronize()
                gc.collect()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                with Counts() as self.counts:
                    optimizer.step()
                self.peak = torch.cuda.max_memory_allocated() - before
                optimizer.zero_grad()
            self.between = torch.cuda.memory_allocated()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            self.loading = torch.cuda.max_memory_allocated() - before


def test_moments_are_off_the_device():
    """Between steps there are none, in a step three buckets, and loading takes none: only counts are there.

    Each bucket is one copy in each direction and, if fused, one kernel more; the host waits for two streams at the end.
    """
    plain, offloaded = Stepping(fused=True), Stepping(fused=True, bucket_mb=64)
    largest = 2 * 4 * LLAMA.hidden * LLAMA.width // 8  # a bucket is one of these matrices, or several of the others
    assert abs(plain.between - offloaded.between - plain.moments) < MIB
    assert plain.peak == 0 and largest <= offloaded.peak <= 3 * 64 * MIB + MIB
    buckets = offloaded.counts["memcpys"] // 2
    assert offloaded.moments / (64 * MIB) <= buckets <= 2 * offloaded.moments / (64 * MIB)
    assert offloaded.counts["host_waits"] == 2 and offloaded.counts["kernels"] == plain.counts["kernels"] * buckets
    assert plain.loading >= plain.moments and offloaded.loading < MIB


def test_a_budget_of_moments_stays():
    """As many as fit, and the others pass through."""
    budget = 300 * MIB
    all_off, some_off = Stepping(fused=True, bucket_mb=64), Stepping(fused=True, device_budget_bytes=budget)
    assert 0.8 * budget < some_off.between - all_off.between <= budget
    assert some_off.counts["memcpys"] < 0.75 * all_off.counts["memcpys"]


def test_temporary_tensors_of_a_step():
    """A loop or lists of tensors need some as large as all parameters, or as a bucket of them."""
    plain, offloaded = Stepping(), Stepping(bucket_mb=64)
    assert plain.peak >= plain.moments // 2 and offloaded.peak < 4 * 64 * MIB


def test_pageable_moments():
    """``pin_memory=False``: the host waits for every copy, as CUDA does with such memory; nothing else differs."""
    pinned, pageable = Stepping(fused=True, bucket_mb=64), Stepping(fused=True, pin_memory=False)
    assert pinned.peak == pageable.peak and pinned.counts["memcpys"] == pageable.counts["memcpys"]


def test_loading_whole_moments():
    """Whole tensors on the host are cut there: nothing of them comes to the device, where they were all at once."""
    found = []
    for offloads in (False, True):
        gc.collect()
        with ranks(8) as mesh:
            model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
            fsdp2.fully_shard(model, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            if offloads:
                fsdp2.offload_optimizer_state(optimizer, bucket_mb=1)
            state = {"step": torch.tensor(1.0), **{name: torch.empty(1024, 1024, device="cpu") for name in MOMENTS}}
            groups = optimizer.state_dict()["param_groups"]
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            optimizer.load_state_dict({"state": {index: dict(state) for index in range(8)}, "param_groups": groups})
            found.append(torch.cuda.max_memory_allocated() - before)
            moments = [entry[name] for entry in optimizer.state.values() for name in MOMENTS]
            assert {moment.to_local().device.type for moment in moments} == {"cpu" if offloads else "cuda"}
            assert all(moment.to_local().shape == (128, 1024) for moment in moments)
    assert found[0] >= 8 * 2 * 1024 * 1024 * 4 // 8 and found[1] < 64 << 10


def whole_state(rank: int, world: int, budget: int, from_rank_0: bool) -> None:
    """Load a full state dict where a rank has nothing of a weight, and a bias has one element."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).cuda()
    for layer in model:
        fsdp2.fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    fsdp2.offload_optimizer_state(optimizer, device_budget_bytes=budget)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
    for _ in range(2):
        model(torch.empty(2, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = [entry[name] for entry in optimizer.state.values() for name in MOMENTS]
        where = [moment.device.type for moment in shown]
        kept = 2 if budget else 0  # moments, those of the first weight
        assert where == ["cuda"] * kept + ["cpu"] * (len(shown) - kept), where
        saved = optimizer.state_dict()["state"].values()
        assert {entry[name].device.type for entry in saved for name in MOMENTS} == {"cpu"}
        after = [entry[name] for entry in optimizer.state.values() for name in MOMENTS]
        assert all(one is other for one, other in zip(after, shown, strict=True))
        state = get_optimizer_state_dict(model, optimizer, options=options)
        set_optimizer_state_dict(model, optimizer, state if rank == 0 or not from_rank_0 else {}, options=options)


@pytest.mark.parametrize("from_rank_0", [False, True])
@pytest.mark.parametrize("budget", [0, 256])
def test_a_whole_state_is_loaded(budget, from_rank_0):
    """All ranks show moments on the host, also those of which they have none, and a state dict shows no others.

    torch loads a full state dict into one device: some ranks raised an error, and the others waited for them.
    """
    job = run(2, whole_state, budget, from_rank_0, backend="cpu:gloo,cuda:nccl")
    assert job.right, job


def loaded_by_other_means(rank: int, world: int, whole: bool) -> None:
    """Load what torch refuses with two errors, as the page on what goes wrong says."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).cuda()
    policy = fsdp2.CPUOffloadPolicy()
    for layer in model:
        fsdp2.fully_shard(layer, offload_policy=policy if whole else {"*weight": policy})
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.empty(2, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    full = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=full)
    with pytest.raises(ValueError, match="Multiple devices found"):
        set_model_state_dict(model, weights, options=full)
    fsdp2.broadcast_from_rank0(model, weights if rank == 0 else None)
    model.load_state_dict(weights)
    state = get_optimizer_state_dict(model, optimizer, options=full)
    with contextlib.nullcontext() if whole else pytest.raises(ValueError, match="Device mismatch"):
        set_optimizer_state_dict(model, optimizer, state, options=full)
    optimizer.load_state_dict(fsdp2.optim_state_dict_to_load(model, optimizer, state))
    for name, parameter in model.named_parameters():
        device = "cpu" if whole or name.endswith("weight") else "cuda"
        assert {parameter.device.type, optimizer.state[parameter]["exp_avg"].device.type} == {device}, name
    step()


@pytest.mark.parametrize("whole", [True, False])
def test_whole_states_on_two_devices(whole):
    """Weights and optimizer state are loaded where torch takes one device, and stay where shards are."""
    job = run(2, loaded_by_other_means, whole, backend="cpu:gloo,cuda:nccl")
    assert job.right, job
