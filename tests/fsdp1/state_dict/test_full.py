"""Full state dicts: the plain model's names and whole tensors, at any time, on all ranks or on the first."""

from __future__ import annotations

import io
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecisionPolicy, StateDictType
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from tests.fsdp1.state_dict.kinds import (
    FULL,
    Mixed,
    assert_equal,
    build,
    rows,
    save,
    shard,
    train,
    trained,
    using,
    whole,
)
from tests.support import api
from tests.support.counting import Collectives
from tests.support.parity import mesh_1d, mesh_2d, mesh_of, stack
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


@on_ranks(1, 2, 4)
def test_at_any_time(rank, world):
    """Unsharded, inside forward and backward, after them, in evaluation: always the values of the shards."""
    module, optimizer = trained(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    expected = whole(module)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    seen = []
    take = lambda *_: seen.append(save(module, "full"))
    handles = [module.last.register_forward_hook(take), module.last.register_full_backward_hook(take)]
    module.unshard()
    take()
    module.reshard()
    module.eval()
    loss = module(rows()).square().mean()
    take()
    loss.backward()
    take()
    assert len(seen) == 5
    for state in seen:
        assert list(state) == list(expected)
        for name in parameters:
            assert torch.equal(state[name], expected[name]) and state[name].dtype == torch.float32, name
    for handle in handles:
        handle.remove()
    train(module, optimizer, range(2, 3))  # goes on
    assert not torch.equal(save(module, "full")["tied.weight"], expected["tied.weight"])


@on_ranks(1, 2)
def test_is_a_copy(rank, world):
    """Training goes on without changing a full state dict, buffers included; a sharded one is live."""
    module, optimizer = trained()
    full, sharded = save(module, "full"), save(module, "sharded")
    before = {name: value.clone() for name, value in full.items()}
    train(module, optimizer, range(2, 3))
    assert_equal(full, before)
    live = whole(module)
    for name, value in sharded.items():
        assert torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, live[name])
    assert not torch.equal(live["middle.calls"], before["middle.calls"])
    assert not torch.equal(live["last.weight"], before["last.weight"])


@on_ranks(1, 2)
def test_names_of_one_tensor_share_it(rank, world):
    """Tied parameters and shared modules take memory once, in the dictionary and in a file."""
    state = save(shard(build()), "full")
    assert state["tied.weight"] is state["last.weight"]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_equal(loaded, state)
    assert loaded["tied.weight"].data_ptr() == loaded["last.weight"].data_ptr()
    for value in state.values():
        assert value.untyped_storage().nbytes() == value.nbytes  # no padding, no neighbours


def tensor_parallel(width: int = 8, out: int = 6) -> nn.Sequential:
    """Return layers cut by tensor parallelism over two ranks, the second dimension of a (ranks / 2, 2) mesh."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, out), nn.Linear(out, 3))
    mesh = mesh_of(torch.distributed.get_world_size() // 2, 2, names=("dp", "tp"))
    return parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


@on_ranks(2)
@pytest.mark.parametrize("kind", ["full", "full_on_rank0", "sharded", "local"])
def test_prefixes_and_parents(rank, world, kind):
    """Prefixes, destinations, plain parents and single children give the names that plain modules give."""
    parent = nn.Module()
    parent.own, parent.child = nn.Linear(3, 3), shard(build())
    names = list(parent.state_dict())
    empty = kind == "full_on_rank0" and rank > 0
    assert list(save(parent, kind)) == ([] if empty else names)
    assert list(save(parent.child, kind, prefix="deep.down.")) == (
        [] if empty else [f"deep.down.{name}" for name in build().state_dict()]
    )
    assert list(save(parent.child.first, kind)) == ([] if empty else list(build().first.state_dict()))
    with using(parent, kind):
        assert list(parent.child.middle.state_dict()) == ([] if empty else ["weight", "calls"])
        state = parent.state_dict(destination={"before": 1}, prefix="x.")
        assert list(state) == ["before"] + ([] if empty else [f"x.{name}" for name in names])
    with using(parent.child, kind):  # nothing was set for the parent itself
        state = parent.state_dict()
        assert list(state) == (["own.weight", "own.bias"] if empty else names)
        assert type(state["own.weight"]) is torch.Tensor
        value = state.get("child.last.weight")
        expected = {"full": torch.Tensor, "sharded": DTensor, "local": dict}
        assert empty or type(value) is expected.get(kind, torch.Tensor)


@on_ranks(2)
def test_settings_of_parts(rank, world):
    """Each sharded module follows its own setting, in one call of the parent's state_dict."""
    module = shard(build())
    fsdp2.set_state_dict_type(module.first, FULL)
    state = module.state_dict()
    for name, value in state.items():
        plain = name.startswith("first") or name == "middle.calls"
        assert isinstance(value, DTensor) != plain, name
    assert_equal({k: v for k, v in state.items() if k.startswith("first.")}, build().first.state_dict(prefix="first."))
    fsdp2.set_state_dict_type(module, FULL, FullStateDictConfig(rank0_only=True))
    fsdp2.set_state_dict_type(module.first, StateDictType.SHARDED_STATE_DICT)
    state = module.state_dict()
    assert len(state) == (0 if rank else len(build().state_dict()))


@on_ranks(2)
def test_after_a_state_dict_that_raised(rank, world):
    """A state_dict that raised in the middle does not spoil the next one."""
    module = shard(build())
    broken = module.middle.register_state_dict_post_hook(_fail)
    with using(module, "full"):
        with pytest.raises(KeyError):
            module.state_dict()
        broken.remove()
        assert_equal(module.first.state_dict(), build().first.state_dict())
        assert_equal(module.state_dict(), build().state_dict())


def _fail(*unused: object) -> None:
    raise KeyError("the user's own")


class Handing(nn.Module):
    """Has the state dict of the module inside it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def state_dict(self, *args, **kwargs):
        return self.inner.state_dict(*args, **kwargs)


@on_ranks(2)
def test_a_state_dict_inside_another(rank, world):
    """One that a module hands on to the module inside it, or that a hook makes on the way, is whole as well."""
    outer = Handing(shard(build()))
    assert_equal(save(outer, "full"), build().state_dict())
    inside = []
    outer.inner.last.register_state_dict_post_hook(lambda *unused: inside.append(outer.inner.first.state_dict()))
    assert_equal(save(outer.inner, "full"), build().state_dict())
    assert_equal(inside[0], build().first.state_dict())


@on_ranks(2)
def test_hooks_and_extra_state(rank, world):
    """Hooks of the user's see shards, may rename, and what is no tensor passes as it is."""

    class Odd(Mixed):
        def get_extra_state(self):
            return {"version": 7}

        def set_extra_state(self, state):
            self.version = state["version"]

    torch.manual_seed(3)
    module = shard(Odd())
    kinds = []
    module.middle.register_state_dict_post_hook(lambda m, s, p, _: kinds.append(type(s[p + "weight"])))
    module.first.register_state_dict_post_hook(lambda m, s, p, _: s.update({p + "renamed": s.pop(p + "0.weight")}))
    state = save(module, "full")
    assert kinds == [DTensor]
    assert torch.equal(state["first.renamed"], build().first[0].weight) and state["_extra_state"] == {"version": 7}
    assert type(state["first.renamed"]) is torch.Tensor


@on_ranks(2)
def test_meta_device(rank, world):
    """A model without memory has a state dict without memory."""
    with torch.device("meta"):
        module = stack()
    fsdp2.fully_shard(module, mesh=mesh_1d())
    state = save(module, "full")
    assert all(
        value.is_meta and value.shape in ((8, 8), (8,)) and type(value) is torch.Tensor for value in state.values()
    )


@on_ranks(2)
def test_replicated_only(rank, world):
    """Parameters that are cut on no axis."""
    mesh = mesh_of(2, 1, names=("replicate", "shard"))
    module = shard(build(), mesh)
    assert module.last.weight.placements == (Replicate(), Shard(0))
    assert_equal(save(module, "full"), build().state_dict())
    module.load_state_dict(build(seed=4).state_dict())
    assert_equal(save(module, "full"), build(seed=4).state_dict())


@on_ranks(4)
def test_parameters_kept_by_some_ranks(rank, world):
    """Between forward and backward with ``reshard_after_forward=2``."""
    module = shard(build(), reshard_after_forward=2)
    loss = module(rows()).square().mean()
    state = save(module, "full")
    loss.backward()
    for name, parameter in build().named_parameters():
        assert torch.equal(state[name], parameter) and (parameter.requires_grad or name.startswith("first.0"))
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad)


@on_ranks(2)
def test_names_that_the_first_rank_lacks(rank, world):
    """Each rank has an expert under a name of its own. ``rank0_only`` returned rank 0's, and the others were lost."""
    module = nn.ModuleDict({"dense": nn.Linear(3, 2), f"expert{rank}": nn.Linear(2, 4)})
    fsdp2.fully_shard(module[f"expert{rank}"], mesh=mesh_of(world, 1, names=("owner", "shard"))["shard"])
    fsdp2.fully_shard(module["dense"], mesh=mesh_1d())
    with pytest.raises(RuntimeError, match=r"rank 0, .*lacks what rank 1 has; got \['expert1.bias', 'expert1.we"):
        save(module, "full_on_rank0")
    assert list(save(module, "full")) == list(module.state_dict())


@on_ranks(2)
def test_many_small_parameters(rank, world):
    """A collective for each of thousands of small tensors took seconds: buckets were no larger than the largest tensor,
    and now hold 1 MiB at least."""
    module = nn.Identity()
    for number in range(200):
        module.register_parameter(f"p{number}", nn.Parameter(torch.full((4,), number * 1.0)))
    fsdp2.fully_shard(module, mesh=mesh_1d())
    with Collectives() as seen:
        state = save(module, "full")
    assert seen.gathers <= 4 and all(torch.equal(state[f"p{n}"], torch.full((4,), n * 1.0)) for n in range(200))


@on_ranks(4)
def test_pieces_of_other_sizes_on_another_axis(rank, world):
    """Two ranks of the expert axis share one expert, so that one holds none of it. How much a rank gathered at once of
    the dense layers depended on its largest tensor on any axis: ranks disagreed, and gloo aborted."""
    mesh = mesh_2d("dp", "ep")
    torch.manual_seed(1)
    module = nn.Sequential(OrderedDict(dense=nn.Sequential(*(nn.Linear(600, 600) for _ in range(4)))))
    module.register_parameter("experts", nn.Parameter(torch.randn(1, 600, 600)))
    expected = {name: value.detach().clone() for name, value in module.named_parameters()}
    module.register_parameter(
        "experts", nn.Parameter(distribute_tensor(module.experts.detach(), mesh["ep"], [Shard(0)]))
    )
    fsdp2.fully_shard(module.dense, mesh=mesh_1d())
    fsdp2.fully_shard(module, mesh=mesh["dp"])
    state = save(module, "full")
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    with fsdp2.summon_full_params(module):
        assert all(torch.equal(value, expected[name]) for name, value in module.named_parameters())
