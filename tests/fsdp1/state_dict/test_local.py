"""Local state dicts: pieces that know where they belong, for as many ranks or for others."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp2
from tests.fsdp1.state_dict.kinds import LOCAL, assert_equal, build, rows, save, shard, train, trained, whole
from tests.support import api
from tests.support.parity import mesh_2d, mesh_of
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


def from_all(value: Any) -> list[Any]:
    """Return what every rank has, sent as a file is."""
    file = io.BytesIO()
    torch.save(value, file)
    files: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(files, file.getvalue())
    return [torch.load(io.BytesIO(one), weights_only=True) for one in files]


@on_ranks(2)
def test_representation(rank, world):
    """What is documented: the piece, which shares memory with the shard, the whole shape, and where it starts."""
    module = shard(build())
    value = save(module, "local")["first.0.weight"]
    assert set(value) == {"piece", "shape", "offset"}
    assert value["shape"] == (5, 8) and value["offset"] == (3 * rank, 0)
    assert value["piece"].shape == (3 - rank, 8)
    assert value["piece"].data_ptr() == module.first[0].weight.to_local().data_ptr()
    assert type(save(module, "local")["middle.calls"]) is torch.Tensor


@on_ranks(4)
def test_from_four_ranks_to_two(rank, world):
    """Model and optimizer, trained on four ranks, go on on two as if nothing had happened."""
    module, optimizer = trained()
    with fsdp2.state_dict_type(module, LOCAL):
        model_state = fsdp2.merge_local_state_dicts(from_all(module.state_dict()))
        optimizer_state = fsdp2.merge_local_state_dicts(from_all(fsdp2.optim_state_dict(module, optimizer)))
    pair = mesh_of(2, 2, names=("pair", "within"))["within"]
    other = shard(build(seed=9), pair)
    other.load_state_dict(model_state)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.05)
    fsdp2.optim_state_dict_to_load(other, other_optimizer, optimizer_state, load_directly=True)
    assert other.last.weight.to_local().shape == (3, 6) and module.last.weight.to_local().shape[0] in (0, 2)
    for one, two in zip(train(module, optimizer, range(2, 4)), train(other, other_optimizer, range(2, 4)), strict=True):
        torch.testing.assert_close(one, two)
    torch.testing.assert_close(whole(module), whole(other))


@on_ranks(4)
def test_hybrid_sharding(rank, world):
    """Replicas hold equal pieces, and half of the ranks is enough."""
    module = shard(build(), mesh_2d())
    states = from_all(save(module, "local"))
    for chosen in (states, states[:2], states[2:], [states[0], states[3]]):
        assert_equal(fsdp2.merge_local_state_dicts(chosen), build().state_dict())
    module.load_state_dict(states[(rank + 2) % 4])  # the other replica's
    assert_equal(whole(module), build().state_dict())


@on_ranks(2)
def test_what_is_refused(rank, world):
    """Pieces of other ranks, of other tensors, missing ones: by name, with what to do, and nothing is loaded."""
    module = shard(build())
    states = from_all(save(module, "local"))
    before = whole(module)
    with pytest.raises(
        RuntimeError, match=r"first.0.weight is the piece of shape .* pass fsdp2.merge_local_state_dicts"
    ):
        module.load_state_dict(states[1 - rank])
    assert_equal(whole(module), before)
    other = dict(states[rank], **{"last.weight": {**states[rank]["last.weight"], "shape": (7, 6)}})
    with pytest.raises(
        RuntimeError, match=r"size mismatch for last.weight: copying a param with shape torch.Size\(\[7, 6\]"
    ):
        module.load_state_dict(other)
    with pytest.raises(ValueError, match=r"first.0.weight: the pieces hold \d+ elements, expected the 40 of shape"):
        fsdp2.merge_local_state_dicts(states[:1])
    with pytest.raises(ValueError, match="must have the same keys"):
        fsdp2.merge_local_state_dicts([states[0], {}])
    with pytest.raises(ValueError, match=r"last.weight: a piece in one state dict, something else in another"):
        fsdp2.merge_local_state_dicts([states[0], dict(states[1], **{"last.weight": torch.ones(1)})])
    with pytest.raises(ValueError, match=r"last.weight: pieces of different tensors"):
        fsdp2.merge_local_state_dicts([states[1 - rank], other] if rank else [states[1], other])
    for wrong in (states[0], [], None, [1]):
        with pytest.raises(TypeError, match="expected a list of all ranks' state dicts"):
            fsdp2.merge_local_state_dicts(wrong)
    with pytest.raises(RuntimeError):
        build().load_state_dict(states[rank])  # a plain model takes merged ones
    torch.testing.assert_close(module.eval()(rows()), build().eval()(rows()))
