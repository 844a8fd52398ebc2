"""Several modules in one call, of which the model's forward runs some and the training loop the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tests.support import api
from tests.support.cases import TRANSFERS
from tests.support.composition import composes
from tests.support.parity import Run, assert_parity, mesh_1d, mesh_2d
from tests.support.pool import on_ranks

SINCE = api.against("2.13")
"""Before, torch's own ran the hooks of a grouped call once for all members, and lost what a forward left out."""


class Chunked(nn.Module):
    """A model whose forward ends with the norm; the loss calls the head on one piece of the rows after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.body(x)))


@dataclass
class Options:
    """How the model is sharded."""

    reshard: bool | None = True
    policy: MixedPrecisionPolicy | None = None
    hybrid: bool = False
    transfer: str = "packed"

    def __call__(self, module, fsdp) -> None:
        options = {"mesh": mesh_2d() if self.hybrid else mesh_1d(), "reshard_after_forward": self.reshard}
        if self.policy is not None:
            options["mp_policy"] = self.policy
        for unit in (module.body, [module.norm, module.head], module):
            fsdp.fully_shard(unit, **options)
        if fsdp is api.ours and api.name == "fsdp2":
            module.set_transfer_sizes(**TRANSFERS[self.transfer])


WAYS = ("one backward", "one each", "after two forwards")


def chunked_loss(run: Run, step: int, way: str) -> None:
    """Run forward, then the head and the loss on each of two pieces; one of the ways adds a second forward."""
    features = run.module(run.inputs(step))
    if way == "one each":
        leaf = features.detach().requires_grad_()
        for piece in leaf.chunk(2):
            (run.module.head(piece).float().square().mean() / 2).backward()
        features.backward(leaf.grad)
        return
    losses = [run.module.head(piece).float().square().mean() / 2 for piece in features.chunk(2)]
    if way == "after two forwards":
        losses.append(run.module.head(run.module(run.inputs(step + 10))).float().square().mean())
    torch.stack(losses).sum().backward()


def program(way: str, run: Run) -> None:
    """Train three steps."""
    for step in range(3):
        chunked_loss(run, step, way)
        run.update()


@on_ranks(2, 4)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_chunked_loss(rank, world, transfer, way, reshard):
    """The head's calls gather, and their gradients add up, with one backward for all pieces or one for each."""
    assert_parity(Options(reshard, transfer=transfer), build=Chunked, program=partial(program, way), against=SINCE)


@composes("hybrid sharding", "accumulation")
@on_ranks(4)
@pytest.mark.parametrize("way", WAYS)
def test_chunked_loss_with_a_replicate_axis(rank, world, way):
    """The same on a mesh of two axes."""
    assert_parity(Options(hybrid=True), build=Chunked, program=partial(program, way), against=SINCE)


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_chunked_loss_in_mixed_precision(rank, world, way):
    """Each member casts its inputs and outputs itself, also where it is called alone."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)

    def look(run):
        if run.fsdp is not None:
            features = run.module(run.inputs(0))
            assert features.dtype == run.module.head(features).dtype == torch.float32
            run.configure(lambda module, fsdp: module.reset_iter_state())
        program(way, run)

    assert_parity(Options(policy=policy), build=Chunked, program=look, against=SINCE, tolerance=0.05)


@on_ranks(2)
def test_members_share_everything(rank, world):
    """One unit: ``reshard`` and setters through either member act on both; a list comes back."""
    module = Chunked()
    both = [module.norm, module.head]
    assert api.ours.fully_shard(both, mesh=mesh_1d()) is both
    api.ours.fully_shard(module, mesh=mesh_1d())
    module.norm.unshard()
    assert not isinstance(module.head.weight, DTensor)
    module.head.reshard()
    assert isinstance(module.norm.weight, DTensor)
    module.head.set_reshard_after_forward(False)
    module.head(module(torch.ones(2, 8)))
    assert not isinstance(module.norm.weight, DTensor)


@on_ranks(2)
def test_a_member_left_out(rank, world):
    """A forward that leaves a member out, without grad or with, frees the group and leaves no gradient on it."""
    run = assert_parity(Options(), build=Chunked, program=lambda run: (run.backward(0), run.update()), against=SINCE)
    module = run.module
    assert all(isinstance(parameter, DTensor) for parameter in module.norm.parameters())
    with torch.no_grad():
        module(torch.ones(2, 8))
    assert isinstance(module.head.weight, DTensor)
    assert next(value for name, value in run.seen.items() if name.startswith("gradient of head.weight")) is None


@api.fsdp2_only
@on_ranks(2)
def test_a_member_listed_twice(rank, world):
    """A list that has a module under two names raised torch's "Inserting ... more than once" after it was cut."""

    def prepare(module, fsdp):
        fsdp.fully_shard([module.norm, module.head, module.norm], mesh=mesh_1d())
        fsdp.fully_shard(module, mesh=mesh_1d())

    assert_parity(prepare, build=Chunked, against=("alone",))


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("reduced", [True, False])
def test_zero_grad_of_one_member(rank, world, reduced):
    """``zero_grad()`` of one module of a grouped call dropped the gradients of the others, reduced or not."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    api.ours.fully_shard(list(model), mesh=mesh_1d())
    api.ours.fully_shard(model, mesh=mesh_1d())
    model.set_requires_gradient_sync(reduced)
    model(torch.ones(1, 4)).sum().backward()
    model[0].zero_grad()
    model.synchronize_gradients()
    assert model[0].weight.grad is None
    torch.testing.assert_close(model[1].bias.grad.full_tensor(), torch.ones(4))


@api.fsdp2_only
@on_ranks(1, 2)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_member_that_writes_to_its_weight(rank, world, order):
    """``nn.Embedding(max_norm=...)`` was refused as the last member of a forward alone: the next one looked at the
    weights anew, and the write was lost with the full parameter."""
    module = nn.ModuleList([nn.Embedding(4, 8, max_norm=0.1), nn.Linear(8, 8)])
    root = nn.Sequential(module)
    root.forward = lambda: [module[i](torch.arange(2) if i == 0 else torch.ones(2, 8)) for i in order]
    api.ours.fully_shard([*module], mesh=mesh_1d())
    api.ours.fully_shard(root, mesh=mesh_1d())
    with pytest.raises(RuntimeError, match=r"0\.0\.weight: the forward changed it in place"):
        root()
