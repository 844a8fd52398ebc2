"""Errors: what is refused and how, and that training goes on after an exception."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2.ranks.process import _monitors
from tests.support import api, processes
from tests.support.cases import CASES, TRANSFERS, build, build_sharded
from tests.support.models import mlp
from tests.support.parity import assert_gradients, beside_one_process, mesh_of, sharded, stack
from tests.support.pool import on_ranks
from tests.support.shapes import loss_of


class Trouble(Exception):
    """What a module under test raises."""


class Raises(nn.Module):
    """Raises in forward or in backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.where = ""

    def forward(self, x):
        if self.where == "forward":
            raise Trouble
        y = self.linear(x)
        if self.where == "backward" and y.requires_grad:
            y.register_hook(self.fail)
        return y

    def fail(self, grad):
        raise Trouble


def tree() -> nn.Sequential:
    """Return units around and between ones that may raise."""
    return nn.Sequential(mlp(6, 7, 6), Raises(), mlp(6, 6), Raises(), nn.Linear(6, 3))


def data(step: int) -> torch.Tensor:
    """Return a whole batch."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


@on_ranks(2)
@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("unit", [1, 3])
def test_training_goes_on_after_an_exception(rank, world, unit, where, reshard, transfer):
    """``reset_iter_state`` on the root makes the next iteration a clean one, from the first iteration on."""
    module, reference = beside_one_process(tree, reshard_after_forward=reshard)
    if api.name == "fsdp2":
        module.set_transfer_sizes(**TRANSFERS[transfer])
    count = 8 // world
    for step in range(3):
        rows = data(step)[rank * count : (rank + 1) * count]
        module[unit].where = where
        with pytest.raises(Trouble):
            module(rows).square().mean().backward()
        module[unit].where = ""
        module.reset_iter_state()
        module.zero_grad()
        reference.zero_grad()
        module(rows).square().mean().backward()
        reference(data(step)).square().mean().backward()
        assert_gradients(module, reference)


@api.fsdp2_only  # torch's goes on
@on_ranks(1, 2)
def test_a_backward_that_is_tried_again(rank, world):
    """Nothing ended the second backward of a graph whose first one had raised: some units got no gradient, and a step
    used those of the others. Only the next forward raised."""
    module, reference = beside_one_process(tree)
    raises = [True]

    def fail(grad: torch.Tensor) -> None:
        if raises[0]:
            raise Trouble

    hook = module[1].register_forward_hook(lambda inner, args, output: (output.register_hook(fail), None)[1])
    loss = module(data(0)).square().mean()
    hook.remove()
    with pytest.raises(Trouble):
        loss.backward(retain_graph=True)
    raises[0] = False
    with pytest.raises(RuntimeError, match="a backward starts, but its last backward did not end"):
        loss.backward(retain_graph=True)
    module.reset_iter_state()
    loss.backward()
    reference(data(0)).square().mean().backward()
    assert_gradients(module, reference)


@on_ranks(1)
def test_reset_below_the_root(rank, world):
    """Only the root can reset."""
    module = build_sharded("mlp", world)
    module(torch.randn(2, 4))
    with pytest.raises(RuntimeError, match="reset_iter_state must be called on the root FSDP module"):
        module[0].reset_iter_state()


@on_ranks(1)
def test_grouped_modules_as_root(rank, world):
    """A group of modules has no single forward that could be the root's."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    api.ours.fully_shard([module[0], module[1]], mesh=mesh_of(world))
    with pytest.raises(RuntimeError, match="FSDP requires a single root module but got"):
        module(torch.ones(1, 2))


@on_ranks(2)
def test_submodule_after_the_root(rank, world):
    """A submodule may run alone once the root is known, for evaluation or for training."""
    module, reference = build_sharded("nested", world), build(CASES["nested"])
    inputs = CASES["nested"].inputs(0)
    for one in (module, reference):
        loss_of(one(*inputs)).backward()
        loss_of(one[0](*inputs)).backward()
        with torch.no_grad():
            one[1](*inputs)
    module[0].reshard()
    module[1].reshard()
    assert_gradients(module, reference)


@api.fsdp2_only
@on_ranks(1, 2)
def test_a_refused_first_forward_is_looked_at_again(rank, world):
    """The second forward ran without the comparison of ranks that the first was refused by; and while somebody held the
    error, a collective that took long raised it again, on one rank alone."""
    module = sharded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta")))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"meta device.*1\.weight.*1\.bias") as held:
            module(torch.ones(1, 4))
        assert not [monitor for monitor in _monitors() if monitor.board.failure is not None]
    module[1].to_empty(device="cpu")
    nn.init.ones_(module[1].weight), nn.init.zeros_(module[1].bias)
    module(torch.ones(1, 4)).sum().backward()
    assert bool(_monitors()) == (world > 1)
    assert held.value is not None
    del held


class Modulated(nn.Module):
    """A diffusion transformer's block: its embedding of the time is of use to others too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedder, self.linear = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedder(inputs))


class Borrowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Modulated() for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.blocks[0].embedder(inputs)


@on_ranks(2)
def test_the_error_names_the_weight_that_failed(rank, world):
    """diffusers' DiT calls a submodule of its first block after the blocks. The error arises in ``nn.Linear``, whose
    line reads ``F.linear(input, self.weight, self.bias)``: every parameter called ``linear.weight`` was blamed for it,
    and not the one that failed."""
    module = sharded(Borrowing, units=lambda module: module.blocks)
    with pytest.raises(RuntimeError) as caught:
        module(torch.ones(2, 4))
    _, _, explained = str(caught.value).partition("\n")
    names, _, _ = explained.partition(": got a shard")
    assert names == "blocks.0.embedder.weight (unit 'blocks.0'), blocks.0.embedder.bias (unit 'blocks.0')"


STEPPING = """
import torch, torch.distributed as dist, fsdp2
from torch import nn

class Rows(torch.optim.Optimizer):
    def step(self):
        for param in self.param_groups[0]["params"]:
            {computed}

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Sequential(nn.Linear(4, 4))
fsdp2.fully_shard(model)
optimizer = Rows(model.parameters(), {})
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize("computed", ["param.grad.mean(-1).add_(torch.zeros(4))", "param.grad[param > 0] = 0"])
def test_an_optimizer_that_fails_on_shards(computed) -> None:
    """The Adafactor of transformers mixes plain state with shards. The explanation told its users to step inside
    ``use_weights``, where the optimizer still holds shards. torch's Rprop and Adafactor were not explained at all."""
    status, written = processes.ended(STEPPING.replace("{computed}", computed))
    assert status == 1 and "Rows: its step got shards" in written, written
    assert "build it as fsdp2.use_full_params(Rows(...))" in written and "use_weights" not in written, written


CAUGHT = """
import sys, torch, torch.distributed as dist
from torch import nn
import fsdp2

class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("a gradient that cannot be used")

class Model(nn.Sequential):
    def forward(self, x):
        return self[1](Broken.apply(self[0](x)))

store = dist.TCPStore("127.0.0.1", {port}, is_master=False)
dist.init_process_group("gloo", store=store, rank={rank}, world_size=2)
model = Model(nn.Linear(8, 8), nn.Linear(8, 8))
for unit in (*model, model):
    fsdp2.fully_shard(unit)
try:
    model(torch.ones(2, 8)).sum().backward()
except ValueError as error:
    print(error)
    sys.exit(3)
"""


def test_a_process_ends_after_an_exception_that_it_caught() -> None:
    """The usual end of a trainer: log the error, call ``sys.exit``. The interpreter ended by waiting for collectives of
    the backward that had raised, for ever: the launcher saw a job that runs."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (CAUGHT.format(port=store.port, rank=rank) for rank in range(2))
    cold = subprocess.Popen([sys.executable, "-c", first], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        other = processes.ended(second)  # which of the ranks starts an interpreter of its own makes no difference
        written = cold.communicate(timeout=100)[0].decode()
    finally:
        cold.kill()
        cold.wait()
    assert cold.returncode == 3 and "a gradient that cannot be used" in written, written
    assert other[0] == 3 and "a gradient that cannot be used" in other[1], other


@api.fsdp2_only
@on_ranks(2)
def test_lazy_modules(rank, world):
    """torch's error told to call ``forward`` before "accessing attributes", and named no parameter."""
    module = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"0.weight of LazyLinear has no shape yet.*Run a forward"):
        api.ours.fully_shard(module, mesh=mesh_of(world))
    module(torch.ones(2, 3))
    api.ours.fully_shard(module, mesh=mesh_of(world))
    module(torch.ones(2, 3)).sum().backward()


@api.fsdp2_only
@on_ranks(2)
def test_a_forward_that_writes_to_its_weight(rank, world):
    """``nn.Embedding(max_norm=...)`` writes to its weight in forward. The write was lost with the full parameter,
    without a word, as with torch. With the remedy, training is that of one process."""
    build = lambda: nn.Sequential(nn.Embedding(6, 4, max_norm=0.5), nn.Linear(4, 2))
    module, alone = beside_one_process(build, lambda module: ())
    tokens = torch.arange(6).view(2, 3)
    with pytest.raises(RuntimeError, match=r"0\.weight: the forward changed it in place.*max_norm = None\) and change"):
        module(tokens[rank])
    module[0].max_norm = None
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, alone)]
    for _ in range(3):
        with torch.no_grad():
            local = module[0].weight.to_local()
            local.copy_(torch.renorm(local, 2, 0, 0.5))
        for one, batch, optimizer in zip((module, alone), (tokens[rank], tokens), optimizers, strict=True):
            optimizer.zero_grad()
            one(batch).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(module[0].weight.full_tensor(), alone[0].weight)


class Broken(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        raise ValueError("a gradient that cannot be used")


@on_ranks(2)
@pytest.mark.parametrize("ours", [True, False])
def test_a_forward_after_a_backward_that_raised(rank, world, ours):
    """torch's goes on: units that the backward had entered show full parameters ever after, so no gradient reaches the
    optimizer, without a word. Ours raises until ``reset_iter_state``, and then trains as before."""
    module = sharded(stack, api.ours if ours else api.theirs)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    held = [param for group in optimizer.param_groups for param in group["params"]]
    module.forward = lambda x: module[2](module[1](Broken.apply(module[0](x))))
    with pytest.raises(ValueError, match="cannot be used"):
        module(torch.ones(2, 8)).sum().backward()
    del module.forward
    optimizer.zero_grad()
    if not ours:
        module(torch.ones(2, 8)).sum().backward()
        assert [param.grad for param in held] == [None] * 6
        return
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"last backward did not end.*reset_iter_state\(\)"):
            module(torch.ones(2, 8))
    module.reset_iter_state()
    module(torch.ones(2, 8)).sum().backward()
    assert all(param.grad is not None for param in held)
