"""The snippets of docs/loading.md run, one after the other, as they are printed."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

import fsdp2
from tests.support.docs import snippets
from tests.support.models import Transformer
from tests.support.parity import mesh_1d
from tests.support.pool import on_ranks
from tests.weights.models import assert_holds, plain, values_of


@on_ranks(1, 2)
def test_every_snippet(rank, world, tmp_path):
    """A model is loaded from rank 0, saved, loaded and synchronised."""
    first, second, third = snippets("loading.md")
    values = values_of(plain("transformer"))
    path = tmp_path / "weights.pt"
    if rank == 0:
        torch.save(values, path)
    names = {"Model": Transformer, "fsdp2": fsdp2, "torch": torch, "dist": dist, "path": path, "folder": tmp_path}
    names["fully_shard"] = functools.partial(fsdp2.fully_shard, mesh=mesh_1d())  # a GPU there may not serve gloo
    exec(first, names)
    assert_holds(names["model"], values)
    exec(second, names)
    assert_holds(names["model"], {key: value.to(torch.bfloat16) for key, value in values.items()})
    torch.manual_seed(rank)
    exec(third, names)
    torch.manual_seed(0)
    assert_holds(names["model"], Transformer().state_dict())
