"""The snippets of docs/state_dicts.md run, one after the other, and do what the text says."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.fsdp1.state_dict.kinds import assert_equal, build, shard, train, trained, whole
from tests.support import api
from tests.support.docs import snippets
from tests.support.parity import mesh_of
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


def path_for_all() -> str:
    """Return a file name that all ranks agree on, in a folder of its own."""
    holder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(holder)
    return os.path.join(str(holder[0]), "checkpoint")


@on_ranks(4)
def test_snippets(rank, world):
    """Save on one rank and load everywhere; one file per rank and half as many ranks."""
    model, optimizer = trained()
    expected = whole(model)
    other_model = shard(build(seed=9), mesh_of(2, 2, names=("pair", "within"))["within"])
    other_optimizer = torch.optim.AdamW(other_model.parameters(), lr=1.0)
    names: dict[str, Any] = {
        **{"model": model, "optimizer": optimizer, "rank": rank, "path": path_for_all(), "plain_model": build(seed=8)},
        **{"other_model": other_model, "other_optimizer": other_optimizer},
    }
    first, second = snippets("state_dicts.md")
    exec(first, names)
    assert_equal(names["plain_model"].state_dict(), expected)
    assert_equal(whole(model), expected)
    exec(second, names)
    assert_equal(whole(other_model), expected)
    assert_equal(whole(model), expected)
    losses = [train(m, o, range(2, 4)) for m, o in ((model, optimizer), (other_model, other_optimizer))]
    torch.testing.assert_close(*losses)
    dist.barrier()
    if rank == 0:
        for file in Path(names["path"]).parent.iterdir():
            file.unlink()
        Path(names["path"]).parent.rmdir()
