"""Every snippet of docs/full_parameters.md runs, in order, and does what the text around it says."""

from __future__ import annotations

import torch

import fsdp2
from tests.support import api
from tests.support.docs import snippets
from tests.support.models import Transformer
from tests.support.parity import mesh_of
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only
SNIPPETS = snippets("full_parameters.md")


@on_ranks(1, 2)
def test_snippets(rank, world, tmp_path):
    """One after the other, in one namespace."""
    model = Transformer()
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    for unit in (*model.blocks, model.head, model):
        fsdp2.fully_shard(unit, mesh=mesh_of(world))
    received: dict[str, torch.Tensor] = {}
    path = tmp_path / f"{rank}.pt"
    names = {
        "model": model,
        "torch": torch,
        "inputs": torch.randint(11, (2, 5)),
        "path": path,
        "receive": received.__setitem__,
    }
    assert len(SNIPPETS) == 6
    for snippet in SNIPPETS:
        exec(compile(snippet, "docs/full_parameters.md", "exec"), names)
    with torch.no_grad():
        torch.testing.assert_close(names["program"].module()(names["inputs"]), model(names["inputs"]))
    weight = model.head.weight.full_tensor()
    torch.testing.assert_close(weight.T @ weight, torch.eye(8))  # 11 x 8, orthogonal
    grad = model.head.weight.grad.full_tensor()
    assert grad.abs().max() == min(names["largest"], 0.1)
    if rank == 0:
        fresh = Transformer()
        fresh.head.weight = torch.nn.Parameter(torch.empty(11, 8))
        fresh.load_state_dict(torch.load(path))
        assert torch.equal(fresh.head.weight, weight)
        with torch.no_grad():
            torch.testing.assert_close(names["outputs"], fresh(names["inputs"]))
    assert path.exists() == (rank == 0)
    assert list(received) == [name for name, _ in model.named_parameters()]
    assert torch.equal(received["head.weight"], weight.bfloat16())
