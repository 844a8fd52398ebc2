"""Exactly which collectives run, on one rank of sixty-four."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from tests.support import api
from tests.support.cases import TRANSFERS
from tests.support.counting import Operators
from tests.support.fake import fake_mesh
from tests.support.models import Transformer
from tests.support.nccl import too_with_nccl
from tests.support.parity import sharded

GATHER = torch.ops.c10d._allgather_base_
REDUCE = torch.ops.c10d._reduce_scatter_base_
LAYERS = 4


@pytest.fixture
def mesh():
    """Return a mesh of sixty-four fake ranks."""
    with fake_mesh(64) as mesh:
        yield mesh


def build(mesh, **options) -> nn.Module:
    """Return a transformer of units under a root with parameters of its own."""
    build = partial(Transformer, layers=LAYERS, width=64)
    return sharded(build, units=lambda module: module.blocks, mesh=mesh, **options)


def tokens() -> torch.Tensor:
    """Return a small batch."""
    return torch.randint(11, (2, 5))


def counts(run) -> dict[str, int]:
    """Return how many gathers and reductions ``run`` makes; fail if it makes any other collective."""
    with CommDebugMode() as seen:
        run()
    found = dict(seen.get_comm_counts())
    result = {"gather": found.pop(GATHER, 0), "reduce": found.pop(REDUCE, 0)}
    assert not any(found.values()), found
    return result


@pytest.mark.parametrize("reshard", [None, True, False])
def test_one_gather_and_one_reduction_per_unit(mesh, reshard):
    """N + 1 gathers in forward, one more for each unit that was freed in backward, and N + 1 reductions.

    From the second iteration on the unit that forward ends with stays until its backward: one gather less.
    """
    module = build(mesh, reshard_after_forward=reshard)
    for step in range(3):
        stays = step > 0
        again = {None: LAYERS - stays, True: LAYERS + 1 - stays, False: 0}[reshard]
        loss = []
        assert counts(lambda: loss.append(module(tokens()).sum())) == {"gather": LAYERS + 1, "reduce": 0}  # noqa: B023
        assert counts(loss[0].backward) == {"gather": again, "reduce": LAYERS + 1}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_accumulation(mesh, micro_batches, keep):
    """Without sync nothing is reduced; parameters kept after backward are not gathered for the next forward."""
    module = build(mesh, reshard_after_forward=not keep)
    totals = {"gather": 0, "reduce": 0}
    for index in range(micro_batches):
        last = index == micro_batches - 1
        module.set_requires_gradient_sync(last)
        module.set_reshard_after_backward(last or not keep)
        for name, count in counts(lambda: module(tokens()).sum().backward()).items():
            totals[name] += count
    units, stays = LAYERS + 1, micro_batches - 1  # the unit that forward ends with, from the second batch on
    assert totals == {"gather": units if keep else 2 * units * micro_batches - stays, "reduce": units}


@too_with_nccl
def test_evaluation(mesh):
    """Without gradients each unit is gathered once, whatever it was asked to keep; after ``unshard()`` none is."""
    module = build(mesh)
    with torch.no_grad():
        for reshard in (True, False):
            module.set_reshard_after_forward(reshard)
            for _ in range(2):
                assert counts(lambda: module(tokens())) == {"gather": LAYERS + 1, "reduce": 0}
        assert counts(lambda: module.unshard(recurse=True)) == {"gather": LAYERS + 1, "reduce": 0}
        assert counts(lambda: module(tokens())) == {"gather": 0, "reduce": 0}


def test_frozen_units_are_not_reduced(mesh):
    """A unit without trainable parameters reduces nothing; one with some sends only those."""
    module = build(mesh)
    module.blocks[0].requires_grad_(False)
    module.blocks[1].qkv.weight.requires_grad_(False)
    assert counts(lambda: module(tokens()).sum().backward())["reduce"] == LAYERS
    with Operators(lambda func, args: args[1].numel() if func.overloadpacket is REDUCE else None) as sent:
        module(tokens()).sum().backward()
    block = module.blocks[1]
    trainable = sum(padded(parameter) for parameter in block.parameters() if parameter.requires_grad)
    assert trainable in sent.seen and len(sent.seen) == LAYERS


def padded(parameter: torch.Tensor) -> int:
    """Return how many elements of a parameter travel when its first dimension is cut for sixty-four ranks."""
    first, rest = parameter.shape[0], parameter.numel() // parameter.shape[0]
    return -(-first // 64) * 64 * rest


@api.fsdp2_only
def test_direct_transfers(mesh):
    """Above the sizes each parameter is gathered by itself if 16 bytes divide its shards, the rest of a unit together;
    gradients leave in chunks."""
    module = build(mesh, reshard_after_forward=True)
    module.set_transfer_sizes(**TRANSFERS["direct"])
    gathers = 0
    for parameters in (
        *(list(block.parameters()) for block in module.blocks),
        [module.embed.weight, module.norm.weight],
    ):
        direct = [padded(parameter) // 64 * 4 % 16 == 0 for parameter in parameters]
        gathers += sum(direct) + (not all(direct))
    seen = counts(lambda: module(tokens()).sum().backward())
    assert seen["gather"] == 2 * gathers
    assert LAYERS + 1 < seen["reduce"] <= len(list(module.parameters()))


def test_a_single_rank_communicates_nothing():
    """On a mesh of one no collective runs at all."""
    with fake_mesh(1) as mesh:
        module = build(mesh)
        for _ in range(2):
            with CommDebugMode() as seen:
                module(tokens()).sum().backward()
            assert seen.get_total_counts() == 0
