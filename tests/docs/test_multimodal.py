"""The model of docs/multimodal.md trains as one process does, whichever ranks have images in a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support import api
from tests.support.docs import snippets
from tests.support.parity import assert_weights
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only

BOTH, FIRST, SECOND, NEITHER = (True, True), (True, False), (False, True), (False, False)


def loss_of(model: nn.Module, step: int, rank: int, has_images: bool) -> torch.Tensor:
    """Return the loss of one rank's batch of a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(64, (2, 9), generator=generator)
    images = torch.randn(2, 3, 8, 8, generator=generator) if has_images else None
    return nn.functional.cross_entropy(model(tokens[:, :-1], images).flatten(0, 1), tokens[:, 1:].flatten())


@on_ranks(2)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((BOTH, FIRST, SECOND, SECOND, BOTH), id="then-some"),
        pytest.param((FIRST, SECOND, BOTH), id="some-first"),
        pytest.param((BOTH, NEITHER, FIRST, NEITHER, NEITHER, SECOND), id="none-between"),
    ],
)
def test_as_one_process(rank, world, steps, frozen):
    """The gradient of the encoder is the mean over all ranks; a rank without images counts as one with zeros."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(snippets("multimodal.md")[0], names)
    torch.manual_seed(0)
    alone = names["VisionLanguage"]()
    model = names["model"]
    for one in (alone, model):
        one.vision.requires_grad_(not frozen)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (alone, model)]
    for step, has_images in enumerate(steps):
        loss_of(model, step, rank, has_images[rank]).backward()
        for other in range(world):
            (loss_of(alone, step, other, has_images[other]) / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_weights(model, alone)
    names.clear()
