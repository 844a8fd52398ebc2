"""What every way of gathering, loading and saving costs for the demo's model, in bytes beside its shards."""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, StateDictType

import fsdp2
from fsdp2.check.strict import LiveBytes
from tests.support import ROOT, api
from tests.support.parity import mesh_1d
from tests.support.pool import on_ranks

sys.path.append(str(ROOT / "examples"))  # also in the processes of the pool
from gpt.model import GPT
from gpt.options import Settings

pytestmark = api.fsdp2_only
BUCKET_MB = 0.25
BUCKET = int(BUCKET_MB * 2**20)
SLACK = 64 << 10
"""Norms and counters."""


def demo() -> GPT:
    """The model of ``make demo``, block by block, of half the depth."""
    torch.manual_seed(0)
    model = GPT(Settings(layers=3).model)
    for unit in (*model.blocks, model):
        fsdp2.fully_shard(unit, mesh=mesh_1d())
    return model


def sizes(model: GPT) -> tuple[int, int, int]:
    """(The whole model, its largest unit, its largest parameter) in bytes."""
    units = [sum(p.numel() * 4 for p in block.parameters()) for block in model.blocks]
    return sum(p.numel() * 4 for p in model.parameters()), max(units), max(p.numel() * 4 for p in model.parameters())


def cost(model: GPT, action: Callable[[], Any], *known: torch.Tensor) -> int:
    """Return the bytes alive at most beside the shards (and ``known``) while ``action`` runs on all ranks.

    They are the least of three runs: gloo's threads hold the tensors of a finished collective until they run again.
    """
    peaks = []
    for _ in range(3):
        gc.collect()
        dist.barrier()
        with LiveBytes([*model.parameters(), *model.buffers(), *known]) as live:
            before = live.now
            result = action()
        del result
        peaks.append(live.peak - before)
    return min(peaks)


@on_ranks(2)
def test_showing_and_exporting(rank, world):
    model = demo()
    whole, unit, largest = sizes(model)

    def show(**options: Any) -> None:
        with fsdp2.summon_full_params(model, **options):
            pass

    def export() -> None:
        for _ in fsdp2.iter_full_params(model, bucket_mb=BUCKET_MB):
            pass

    assert whole <= cost(model, show) <= whole + 2 * largest + SLACK
    elsewhere = cost(model, lambda: show(rank0_only=True, writeback=False))
    assert elsewhere <= (whole if rank == 0 else 0) + 2 * largest + SLACK < whole + unit
    assert cost(model, export) <= 2 * max(BUCKET, largest) + SLACK < whole


@on_ranks(2)
def test_state_dicts(rank, world):
    model = demo()
    whole, unit, _ = sizes(model)
    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    for kind, settings, kept in (
        (StateDictType.FULL_STATE_DICT, None, whole),
        (StateDictType.FULL_STATE_DICT, config, whole if rank == 0 else 0),
        (StateDictType.SHARDED_STATE_DICT, None, 0),
    ):
        with fsdp2.state_dict_type(model, kind, settings):
            assert kept <= cost(model, model.state_dict) <= kept + unit + SLACK
    values = {name: torch.ones(param.shape) for name, param in model.named_parameters()}
    assert cost(model, lambda: model.load_state_dict(values, strict=False), *values.values()) <= SLACK


@on_ranks(2)
def test_files_and_broadcasts(rank, world):
    model = demo()
    _, unit, largest = sizes(model)
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    save = lambda: fsdp2.save_safetensors(model, folder[0], bucket_mb=BUCKET_MB)
    assert cost(model, save) <= 2 * BUCKET + SLACK < unit
    load = lambda: fsdp2.load_safetensors(model, folder[0])
    assert cost(model, load) <= largest + SLACK < unit
    values = {name: torch.ones(param.shape) for name, param in model.named_parameters()} if rank == 0 else {}
    send = lambda: fsdp2.broadcast_from_rank0(model, values or None, strict=False, bucket_mb=BUCKET_MB)
    assert cost(model, send, *values.values()) <= 2 * BUCKET + SLACK < unit
