"""Loading: whole tensors, shards and pieces into sharded models; names, strictness, shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp2
from tests.fsdp1.state_dict.kinds import KINDS, assert_equal, build, rows, save, shard, train, trained, using, whole
from tests.support import api
from tests.support.cases import CASES, build_sharded
from tests.support.parity import full, mesh_1d, mesh_2d, mesh_of
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only
EVERYWHERE = [kind for kind in KINDS if kind != "full_on_rank0"]


@on_ranks(2, 4)
@pytest.mark.parametrize("missing", ["last.weight", "tied.weight", ""])
def test_meta_device(rank, world, missing):
    """``assign=True`` fills a model on the meta device with whole tensors; each rank keeps its shard alone. A tied
    parameter may come under either of its names, and stays tied."""
    with torch.device("meta"):
        module = build()
    shard(module)
    values = {name: value for name, value in build().state_dict().items() if name != missing}
    module.load_state_dict(values, strict=not missing, assign=True)
    module.middle.shift = build().middle.shift  # not persistent
    assert module.tied.weight is module.last.weight
    assert len(list(module.parameters())) == len(list(build().parameters()))
    other = shard(build())
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.05) for one in (module, other)]
    losses = [train(one, optimizer, range(3)) for one, optimizer in zip((module, other), optimizers, strict=True)]
    assert losses[0] == losses[1]
    module.reshard()
    for parameter in module.parameters():
        assert parameter.to_local().untyped_storage().nbytes() == parameter.to_local().nbytes


@on_ranks(2)
def test_dtypes(rank, world):
    """Copying converts to the model's dtype, assigning takes the state dict's."""
    low = {name: value.to(torch.bfloat16) for name, value in build().state_dict().items() if value.is_floating_point()}
    for assign, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        module = shard(build(seed=9))
        module.load_state_dict(low, strict=False, assign=assign)
        for name, parameter in module.named_parameters():
            assert parameter.dtype == parameter.to_local().dtype == dtype
            assert torch.equal(parameter.full_tensor().bfloat16(), low[name])


@on_ranks(2)
@pytest.mark.parametrize("wide", [False, True])
def test_names_that_do_not_match(rank, world, wide):
    """Missing and unexpected keys are reported by the plain model's names, and are no error without ``strict``."""
    module = shard(build())
    if wide:
        parent = nn.Module()
        parent.child = module
        module, prefix = parent, "child."
    else:
        prefix = ""
    state = {f"{prefix}{name}": value for name, value in build(seed=9).state_dict().items()}
    del state[f"{prefix}first.0.weight"], state[f"{prefix}middle.calls"]
    state[f"{prefix}last.wight"] = state[f"{prefix}nowhere.weight"] = torch.ones(2)
    with pytest.raises(RuntimeError) as error:
        module.load_state_dict(state)
    missing = [f"{prefix}first.0.weight", f"{prefix}middle.calls"]
    unexpected = [f"{prefix}last.wight", f"{prefix}nowhere.weight"]
    assert all(f'"{name}"' in str(error.value) for name in missing + unexpected)
    result = module.load_state_dict(state, strict=False)
    assert sorted(result.missing_keys) == missing and sorted(result.unexpected_keys) == sorted(unexpected)


@on_ranks(2)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_wrong_shapes(rank, world, strict, assign):
    """All of them are named with both shapes, as torch does, and nothing has been loaded."""
    module = shard(build())
    before = whole(module)
    state = build(seed=9).state_dict()
    state["last.weight"], state["tied.bias"] = torch.ones(6, 5), torch.ones(1)
    with pytest.raises(RuntimeError) as error:
        module.load_state_dict(state, strict=strict, assign=assign)
    with pytest.raises(RuntimeError) as torchs:
        build().load_state_dict(state, strict=strict, assign=assign)
    lines = [line.strip() for line in str(torchs.value).splitlines() if "size mismatch" in line]
    assert len(lines) == 2 and all(line in str(error.value) for line in lines)
    assert_equal(whole(module), before)
    state["last.weight"] = state["tied.weight"]
    state["tied.bias"] = "no tensor"
    with pytest.raises(RuntimeError, match=r"tied.bias.*expected torch.Tensor"):
        module.load_state_dict(state, strict=strict, assign=assign)


@on_ranks(2)
def test_wrong_shapes_of_modules_that_convert(rank, world):
    """A module that reshapes what it is given is left to do so, and torch reports what is of no use then."""

    class Converting(nn.Linear):
        def _load_from_state_dict(self, state_dict, prefix, *args):
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].view(self.weight.shape)
            super()._load_from_state_dict(state_dict, prefix, *args)

    module = nn.Sequential(Converting(4, 6), nn.Linear(6, 6))
    cut = lambda m, state, prefix, *_: state.update({f"{prefix}bias": state[f"{prefix}bias"][:6]})
    module[1].register_load_state_dict_pre_hook(cut)
    for unit in (module[0], module):
        fsdp2.fully_shard(unit, mesh=mesh_1d())
    state = {"0.weight": torch.rand(24), "0.bias": torch.rand(6), "1.weight": torch.rand(6, 6), "1.bias": torch.rand(8)}
    module.load_state_dict(state)
    expected = {**state, "0.weight": state["0.weight"].view(6, 4), "1.bias": state["1.bias"][:6]}
    assert_equal(save(module, "full"), expected)
    with pytest.raises(RuntimeError, match=r"size mismatch for 1.weight"):
        module.load_state_dict({**state, "1.weight": torch.rand(3, 3)})


@on_ranks(2, 4)
def test_shards_that_lie_otherwise(rank, world):
    """DTensors of another mesh or placement are moved to where the shards are."""
    module, other = shard(build()), build(seed=9).state_dict()
    mesh = mesh_of(world, names=("shard",))
    values = {
        name: distribute_tensor(value, mesh, [Shard(value.ndim - 1) if value.ndim else Replicate()])
        for name, value in other.items()
    }
    values["middle.calls"] = other["middle.calls"]
    module.load_state_dict(values)
    assert_equal(whole(module), other)
    hybrid = shard(build(seed=3), mesh_2d())
    hybrid.load_state_dict(save(module, "sharded"))
    assert_equal(whole(hybrid), other)
    module.load_state_dict(save(hybrid, "sharded"))
    assert_equal(whole(module), other)


@on_ranks(2)
@pytest.mark.parametrize("case", ["mlp_root_only", "mlp_grouped"])
def test_parts_of_a_unit(rank, world, case):
    """A plain module inside a unit, and one of several modules of a unit, load and save whole tensors, too."""
    module, other = build_sharded(case, world), CASES[case].build()[2]
    before = whole(module[0])
    nn.init.ones_(other.weight)
    module[2].load_state_dict(other.state_dict())
    with using(module, "full"):
        assert_equal(module[2].state_dict(), other.state_dict())
    assert_equal(whole(module[0]), before)


@on_ranks(2)
def test_parameters_stay_what_they_were(rank, world):
    """Loading keeps the parameter objects, their memory and requires_grad; an optimizer goes on."""
    module, optimizer = trained()
    before = [(p, p.to_local().data_ptr(), p.requires_grad) for p in module.parameters()]
    module.load_state_dict(build(seed=9).state_dict())
    after = [(p, p.to_local().data_ptr(), p.requires_grad) for p in module.parameters()]
    assert all(one[0] is two[0] and one[1:] == two[1:] for one, two in zip(before, after, strict=True))
    held = save(module, "full")
    train(module, optimizer, range(1))
    assert not torch.equal(whole(module)["last.weight"], held["last.weight"])


@on_ranks(2)
def test_more_than_one_parameter_swap(rank, world):
    """torch's swapping of parameters while loading works on whole tensors as well."""
    module, other = shard(build()), build(seed=9)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.load_state_dict(other.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_equal(whole(module), other.state_dict())
    assert torch.equal(module(rows()), other(rows()))


class Adapted(nn.Module):
    """A linear layer, later with a low-rank adapter beside it and a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def add(self) -> None:
        """Add the adapter."""
        self.adapter = nn.Sequential(nn.Linear(8, 3, bias=False), nn.Linear(3, 6, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.adapter(x)


def adapted(seed: int, wrapper: bool, added: bool) -> nn.Module:
    """Return a sharded model whose adapters come after sharding, inside of a module that is not sharded or not."""
    torch.manual_seed(seed)
    module = nn.Sequential(Adapted(), nn.Tanh(), nn.Linear(6, 8), Adapted())
    for unit in (module[0], *(() if wrapper else (module,))):
        fsdp2.fully_shard(unit, mesh=mesh_1d())
    if wrapper:
        fsdp2.fully_shard(module[3], mesh=mesh_1d())
    for layer in (module[0], module[3]) if added else ():
        layer.add()
    return module


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", [kind for kind in EVERYWHERE if "cpu" not in kind])
@pytest.mark.parametrize("wrapper", [False, True])
def test_adapters_added_after_sharding(rank, world, kind, wrapper):
    """LoRA layers that are added to a sharded model were plain until the first forward, so that a state dict of shards
    or pieces, saved after training, did not load into a freshly built model."""
    module = adapted(1, wrapper, True)
    module(rows()).square().mean().backward()
    state = save(module, kind)
    fresh = adapted(2, wrapper, True)
    with using(fresh, kind):
        fresh.load_state_dict(state)
    assert_equal(whole(fresh), whole(module))
    module.zero_grad()
    outputs = [one(rows()) for one in (fresh, module)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().mean().backward()
    for got, expected in zip(fresh.parameters(), module.parameters(), strict=True):
        assert torch.equal(full(got.grad), full(expected.grad))


@on_ranks(2)
@pytest.mark.parametrize("kind", ["sharded", "local"])
def test_a_parameter_added_to_the_module_itself(rank, world, kind):
    """That one is sharded by the first forward alone. The error says so, and what to do, before anything is loaded."""
    states = []
    for step in range(2):
        module = fsdp2.fully_shard(nn.Linear(8, 6), mesh=mesh_1d())
        module.register_parameter("scale", nn.Parameter(torch.full((6,), 1.0 + step)))
        before = whole(module)
        if states:
            with pytest.raises(RuntimeError, match="scale is not sharded here; got a .*run one before loading"):
                module.load_state_dict(states[0])
            assert_equal(whole(module), before)
        module(rows()).sum().backward()
        states.append(save(module, kind))
    module.load_state_dict(states[0])
    assert whole(module)["scale"].tolist() == [1.0] * 6
