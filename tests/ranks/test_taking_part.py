"""With ``set_reduce_scatter_unused_params`` a rank takes part in the units it skips, and gradients are the mean."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.parity import assert_gradients, beside_one_process, mesh_2d
from tests.support.pool import on_ranks


class Tower(nn.Module):
    """Blocks after an entry of their own: a unit with units below, whose input needs no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.entry = nn.Parameter(torch.randn(width))
        self.blocks = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x + self.entry)


class Seeing(nn.Module):
    """A model of text that may come with an image."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tower = Tower(width)
        self.embed = nn.Embedding(5, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        if image is not None:
            x = x + self.tower(image)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return self.head(x).square().mean()


def parts(model: Seeing) -> list[nn.Module]:
    """Every part is a unit."""
    return [model.tower.blocks[0], model.tower.blocks[2], model.tower, model.embed, *model.layers, model.head]


PLANS = {
    "all_then_some": [{0, 1, 2, 3}, {0}, {1, 2}, {0, 1, 2, 3}],
    "some_from_the_start": [{0}, {1}, {0, 1, 2, 3}, {0}],
    "none_once_known": [{0, 1, 2, 3}, set(), {0, 1, 2, 3}, {1}],
}


@on_ranks(2, 4)
@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("plan", PLANS)
def test_ranks_without_an_image(rank, world, plan, reshard):
    model, whole = beside_one_process(Seeing, parts, reshard_after_forward=reshard)
    model.set_reduce_scatter_unused_params(True)
    model.set_transfer_sizes(direct_param_bytes=128, direct_group_bytes=0, chunk_bytes=64)  # stream what there is
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, whole)]
    for step, seeing in enumerate(PLANS[plan]):
        batches = []
        for r in range(world):
            generator = torch.Generator().manual_seed(100 * step + r)
            tokens = torch.randint(5, (4,), generator=generator)
            batches.append((tokens, torch.randn(4, 8, generator=generator) if r in seeing else None))
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(*batches[rank]).backward()
        (sum(whole(*batch) for batch in batches) / world).backward()
        for (name, param), reference in zip(model.named_parameters(), whole.parameters()):
            expected = torch.zeros_like(reference) if reference.grad is None else reference.grad
            torch.testing.assert_close(param.grad.full_tensor(), expected, msg=f"{step} {name}")
            reference.grad = expected
        for optimizer in optimizers:
            optimizer.step()


@on_ranks(4)
def test_replicas_without_an_image(rank, world):
    model, whole = beside_one_process(Seeing, parts, mesh=mesh_2d())
    model.set_reduce_scatter_unused_params(True)
    for step, seeing in enumerate([{0, 1}, {3}, {0, 1, 2, 3}]):
        batches = [(torch.tensor([r, 1]), torch.full((2, 8), r + 0.5) if r in seeing else None) for r in range(4)]
        model.zero_grad()
        whole.zero_grad()
        model(*batches[rank]).backward()
        (sum(whole(*batch) for batch in batches) / world).backward()
        assert_gradients(model, whole, step)


STREAMED = {"direct_param_bytes": 0, "direct_group_bytes": 0, "chunk_bytes": 1}
"""Transfer sizes with which each gradient is sent when it is there."""


class Choosing(nn.Module):
    """Uses one of its parts, or none: then its output needs no gradient. A frozen parameter keeps backward inside."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.order = nn.Parameter(torch.arange(8), requires_grad=False)

    def forward(self, x: torch.Tensor, part: int | None) -> torch.Tensor:
        return x if part is None else self.parts[part](x)[:, self.order]


class Outer(nn.Module):
    """A layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.choosing, self.last = Choosing(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, part: int | None) -> torch.Tensor:
        return self.last(self.choosing(x, part))


@on_ranks(2)
def test_a_part_of_a_unit_that_one_rank_uses(rank, world):
    """One rank has sent the gradients of the part it used and is inside of the unit until its backward ends; there it
    has to send what is left as soon as the other one, which never entered, sends all of it."""
    model, whole = beside_one_process(Outer, lambda model: (model.choosing,))
    model.set_reduce_scatter_unused_params(True)
    model.choosing.set_transfer_sizes(**STREAMED)
    for parts in ((1, None), (None, 0), (0, 1)):
        model(torch.ones(2, 8), parts[rank]).sum().backward()
        (sum(whole(torch.ones(2, 8), part).sum() for part in parts) / world).backward()
    assert_gradients(model, whole)


@on_ranks(2)
def test_a_unit_that_nobody_has_used_yet(rank, world):
    """Its zeros are sent although it was never gathered; later its gradients leave like any other's."""
    model, _ = beside_one_process(Outer, lambda model: model.choosing.parts)
    model.set_reduce_scatter_unused_params(True)
    model.set_transfer_sizes(**STREAMED)
    for step, part in enumerate((0, 1, 1)):
        model.zero_grad()
        model(torch.ones(2, 8), part).sum().backward()
        used = [bool(layer.weight.grad.full_tensor().any()) for layer in model.choosing.parts]
        assert used == [part == 0, part == 1], step


class Often(nn.Module):
    """Uses a layer and a frozen one so many times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = self.frozen(torch.tanh(self.first(x)))
        return self.last(x)


@on_ranks(2, 4)
@pytest.mark.parametrize("reshard", [True, False, 2])
def test_a_unit_that_others_use_several_times(rank, world, reshard):
    """They gather it again each time. A rank that skips it still held the first gather, and refused the second."""
    units = lambda model: (model.first, model.frozen)
    model, whole = beside_one_process(Often, units, reshard_after_forward=reshard)
    model.set_reduce_scatter_unused_params(True)
    times = (2, 0, 3, 1)[:world]
    sum(model(torch.ones(2, 8) + i, times[rank]).sum() for i in range(2)).backward()
    (sum(whole(torch.ones(2, 8) + i, n).sum() for n in times for i in range(2)) / world).backward()
    assert_gradients(model, whole)
