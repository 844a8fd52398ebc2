"""Optimizer state by the names of parameters: saved, loaded, and training goes on as if nothing had happened."""

from __future__ import annotations

import io
import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullOptimStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils import _pytree as pytree

import fsdp2
from tests.fsdp1.state_dict.kinds import KINDS, build, rows, save, shard, train, trained, using, whole
from tests.fsdp1.state_dict.test_full import tensor_parallel
from tests.support import api
from tests.support.parity import mesh_1d, mesh_2d, mesh_of
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.05, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.05, centered=True),
    "capturable": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.05), foreach=False),
}


def saved(module: nn.Module, optimizer: torch.optim.Optimizer, kind: str, weights_only: bool = True) -> Any:
    """Return the optimizer's state of a kind, after a trip through a file."""
    with using(module, kind):
        state = fsdp2.optim_state_dict(module, optimizer)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def load(module: nn.Module, optimizer: torch.optim.Optimizer, state: Any, kind: str = "sharded") -> None:
    """Load it."""
    with using(module, kind):
        optimizer.load_state_dict(fsdp2.optim_state_dict_to_load(module, optimizer, state))


@on_ranks(1, 2, 4)
@pytest.mark.parametrize(
    ("kind", "make"), [*((kind, "adamw") for kind in KINDS), *((k, m) for m in MAKERS for k in ("full", "local"))]
)
def test_training_goes_on(rank, world, kind, make):
    """A run that is saved and loaded into a new model and optimizer goes on as the run that was not."""
    module, optimizer = trained(MAKERS[make])
    state = saved(module, optimizer, kind)
    model = save(module, "full")
    other = shard(build(seed=9))
    other.load_state_dict(model)
    other_optimizer = MAKERS[make](other.parameters())
    load(other, other_optimizer, state, kind)
    losses = [train(one, o, range(2, 5)) for one, o in ((module, optimizer), (other, other_optimizer))]
    assert losses[0] == losses[1]
    for (name, one), two in zip(module.named_parameters(), other.parameters(), strict=True):
        one_state, two_state = optimizer.state[one], other_optimizer.state[two]
        assert one_state.keys() == two_state.keys(), name
        for key, value in one_state.items():
            if isinstance(value, Tensor):
                assert type(value) is type(two_state[key]) and value.dtype == two_state[key].dtype, (name, key)
                assert not isinstance(value, DTensor) or value.placements == two_state[key].placements


def plain_run(make: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the plain model and its optimizer after two iterations."""
    module = build()
    optimizer = MAKERS[make](module.parameters())
    train(module, optimizer, range(2))
    return module, optimizer


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("make", ["momentum", "adamw"])
def test_full_state_is_the_plain_optimizers(rank, world, make):
    """Names, keys and whole tensors; a plain run can be loaded into a sharded one and the other way round."""
    plain, plain_optimizer = plain_run(make)
    module, optimizer = trained(MAKERS[make])
    with using(module, "full"):
        got = fsdp2.optim_state_dict(module, optimizer)
    expected = fsdp2.optim_state_dict(plain, plain_optimizer)
    names = [name for name, _ in plain.named_parameters()]
    assert got["param_groups"] == expected["param_groups"] and got["param_groups"][0]["params"] == names
    assert list(got["state"]) == list(expected["state"]) == [n for n, p in plain.named_parameters() if p.requires_grad]
    for name, state in expected["state"].items():
        for key, value in state.items():
            assert type(got["state"][name][key]) is type(value)
            if isinstance(value, Tensor):
                torch.testing.assert_close(got["state"][name][key], value)
    module.load_state_dict(plain.state_dict())
    load(module, optimizer, expected)
    other = build()
    other.load_state_dict(plain.state_dict())
    other_optimizer = MAKERS[make](other.parameters())
    load(other, other_optimizer, expected)
    losses = [
        train(m, o, range(2, 4)) for m, o in ((plain, plain_optimizer), (module, optimizer), (other, other_optimizer))
    ]
    torch.testing.assert_close(losses[0], losses[1])
    assert losses[0] == losses[2]


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_forms(rank, world, kind):
    """Full: plain tensors; sharded: DTensors; local: pieces; on other ranks nothing where only the first asked."""
    module, optimizer = trained()
    held = optimizer.state[module.first[2].weight]["exp_avg"]
    full = held.full_tensor()
    with using(module, kind):
        state = fsdp2.optim_state_dict(module, optimizer)
    if kind == "full_on_rank0" and rank:
        assert state == {}
        return
    value = state["state"]["first.2.weight"]["exp_avg"]
    expected = {"full": Tensor, "shar": DTensor, "loca": dict}[kind[:4]]
    assert type(value) is expected
    if expected is Tensor:
        assert torch.equal(value, full)
        assert type(state["state"]["first.2.weight"]["step"]) is Tensor
    elif expected is dict:
        assert torch.equal(value["piece"], held.to_local()) and value["offset"] == (3 * rank, 0)
    else:
        assert value.to_local().data_ptr() == held.to_local().data_ptr()


@on_ranks(2, 4)
@pytest.mark.parametrize("hybrid", [False, True])
def test_only_the_first_rank_has_it(rank, world, hybrid):
    """With rank0_only others load what the first rank gives, whatever they give; mistakes reach every rank."""
    mesh = mesh_2d() if hybrid else mesh_1d()
    module, optimizer = trained(mesh=mesh)
    state = saved(module, optimizer, "full_on_rank0")
    other = shard(build(seed=9), mesh)
    other.load_state_dict(save(module, "full"))
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1.0)
    load(other, other_optimizer, state if rank == 0 else None, "full_on_rank0")
    assert other_optimizer.param_groups[0]["lr"] == 0.05
    assert train(module, optimizer, range(2, 4)) == train(other, other_optimizer, range(2, 4))
    with pytest.raises(TypeError, match="expected a dictionary with 'state', .* got a NoneType"):
        load(other, other_optimizer, None, "full_on_rank0")
    sharded = saved(module, optimizer, "sharded")
    with pytest.raises(TypeError, match="the first rank must give whole tensors, got a DTensor"):
        load(other, other_optimizer, sharded, "full_on_rank0")


@on_ranks(4)
def test_each_half_of_the_ranks_has_a_model_of_its_own(rank, world):
    """As each stage of a pipeline has. The first rank of a model's mesh gives what is loaded, not that of the job."""
    mesh = mesh_of(2, 2, names=["half", "shard"])["shard"]
    half = rank // 2
    module, optimizer = trained(mesh=mesh)
    train(module, optimizer, range(2, 3 + half))  # so halves differ
    state = saved(module, optimizer, "full_on_rank0")
    assert bool(state) == (rank % 2 == 0)
    other = shard(build(seed=9), mesh)
    other.load_state_dict(save(module, "full"))
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1.0)
    load(other, other_optimizer, state if rank % 2 == 0 else None, "full_on_rank0")
    assert train(module, optimizer, range(4, 6)) == train(other, other_optimizer, range(4, 6))


@on_ranks(2)
@pytest.mark.parametrize("kind", ["full", "full_on_rank0", "sharded", "local"])
def test_mappings_of_other_kinds(rank, world, kind):
    """What is given need not be dictionaries, at any level: whatever maps is looked into."""
    module, optimizer = trained()
    state = UserDict(saved(module, optimizer, kind))
    if "state" in state:
        state["state"] = UserDict({name: UserDict(values) for name, values in state["state"].items()})
    other = shard(build(seed=9))
    other.load_state_dict(save(module, "full"))
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1.0)
    load(other, other_optimizer, state, kind)
    assert train(module, optimizer, range(2, 4)) == train(other, other_optimizer, range(2, 4))


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_groups_and_subsets(rank, world, kind):
    """Groups keep their hyperparameters by name, in any order; an optimizer of some parameters has theirs alone."""
    module = shard(build())
    rest = [p for name, p in module.named_parameters() if not name.startswith("first")]
    groups = lambda m, rest: [{"params": list(m.first.parameters()), "lr": 0.01, "betas": (0.5, 0.6)}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups(module, rest), lr=0.1, weight_decay=0.3)
    train(module, optimizer, range(2))
    state = saved(module, optimizer, kind)
    if state:
        assert [len(group["params"]) for group in state["param_groups"]] == [6, 3]
        assert state["param_groups"][0]["params"][0] == "first.0.weight" and state["param_groups"][0]["lr"] == 0.01
    turned = torch.optim.AdamW(groups(module, rest)[::-1], lr=0.5)
    load(module, turned, state, kind)
    assert [group["lr"] for group in turned.param_groups] == [0.1, 0.01]
    assert turned.param_groups[1]["betas"] == (0.5, 0.6) and turned.param_groups[0]["weight_decay"] == 0.3
    some = torch.optim.AdamW(rest, lr=0.7)
    load(module, some, state, kind)
    assert some.param_groups[0]["lr"] == 0.1 and len(some.state) == 3
    for parameter in rest:
        assert torch.equal(some.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
    state = saved(module, some, kind)
    assert not state or set(state["state"]) == {"middle.weight", "last.weight", "tied.bias"}
    mixed = torch.optim.AdamW([{"params": list(module.parameters())}], lr=0.1)
    with pytest.raises(ValueError, match=r"group 0 of the optimizer holds .* different hyperparameters"):
        load(module, mixed, saved(module, optimizer, "full"))


@on_ranks(2)
@pytest.mark.parametrize("how", ["before", "after", "compiled"])
def test_names_under_wrappers(rank, world, how):
    """Names are the plain model's on both sides."""

    def wrapped() -> Any:
        module = build()
        if how == "before":
            module.first = checkpoint_wrapper(module.first)
        shard(module)
        if how == "after":
            module.first = checkpoint_wrapper(module.first)
        if how == "compiled":
            module.first = torch.compile(module.first, backend="eager")
        return module

    module = wrapped()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    for parameter in module.parameters():
        parameter.grad = parameter.detach().clone() if parameter.requires_grad else None
    optimizer.step()
    state = saved(module, optimizer, "full")
    assert state["param_groups"][0]["params"] == [name for name, _ in build().named_parameters()]
    for target in (wrapped(), shard(build()), build()):
        other = torch.optim.AdamW(target.parameters(), lr=0.1)
        load(target, other, state)
        assert len(other.state) == len(optimizer.state)


@on_ranks(1, 2)
def test_state_that_is_no_tensor_of_the_parameter(rank, world):
    """None, numbers, nested tensors, other shapes and state of nobody pass; ``param_groups`` may be absent."""
    module, optimizer = trained()
    for number, parameter in enumerate(module.parameters()):
        optimizer.state[parameter].update(nothing=None, count=number, small=torch.tensor([1.0, 2.0]).view(1, 2, 1))
        optimizer.state[parameter]["nested"] = {"deep": [torch.zeros_like(parameter), 3]}
    given = optimizer.state_dict()
    given["state"]["of nobody"] = 5
    del given["param_groups"]
    with using(module, "full"):
        state = fsdp2.optim_state_dict(module, optimizer, given)
    assert state["state"]["of nobody"] == 5 and "param_groups" not in state
    entry = state["state"]["first.2.weight"]
    assert entry["nothing"] is None and entry["count"] == 4 and entry["small"].shape == (1, 2, 1)
    assert type(entry["nested"]["deep"][0]) is Tensor and entry["nested"]["deep"][0].shape == (6, 5)
    result = fsdp2.optim_state_dict_to_load(module, optimizer, state)
    assert result["state"]["of nobody"] == 5 and "param_groups" not in result
    deep = result["state"][4]["nested"]["deep"]
    assert isinstance(deep[0], DTensor) and deep[1] == 3 and result["state"][4]["nothing"] is None
    state["state"]["frist.2.weight"] = state["state"].pop("first.2.weight")
    with pytest.warns(UserWarning, match=r"no parameters of the model have the names \['frist.2.weight'\]"):
        fsdp2.optim_state_dict_to_load(module, optimizer, state)


@on_ranks(2)
@pytest.mark.parametrize("what", ["parameters", "entries"])
def test_state_in_another_order_on_one_rank(rank, world, what):
    """What ranks gather together is found by name. Parameters in another order (one rank loaded a file of its own) had
    each other's moments in the full state, without a word; entries were refused, by numbers."""
    module, optimizer = trained(MAKERS["adam"])
    with using(module, "full"):
        expected = fsdp2.optim_state_dict(module, optimizer)["state"]
    if rank == 1:
        for entries in [optimizer.state] if what == "parameters" else optimizer.state.values():
            items = [*entries.items()]
            entries.clear()
            entries.update(reversed(items))
    with using(module, "full"):
        found = fsdp2.optim_state_dict(module, optimizer)["state"]
    assert found.keys() == expected.keys()
    for name, entry in expected.items():
        assert found[name].keys() == entry.keys()
        assert all(torch.equal(found[name][key], value) for key, value in entry.items()), name


@on_ranks(2)
def test_what_is_refused(rank, world):
    """Foreign parameters and pieces, by name."""
    module, optimizer = trained()
    stranger = torch.optim.SGD([*module.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(
        ValueError, match=r"a parameter of shape \(3,\) in group 0 of the optimizer is not a parameter of"
    ):
        fsdp2.optim_state_dict(module, stranger)
    with pytest.raises(TypeError, match="expected a module and its optimizer"):
        fsdp2.optim_state_dict(module, module)
    local = saved(module, optimizer, "local")
    local["state"]["first.2.weight"]["exp_avg"]["offset"] = (3 - 3 * rank, 0)
    with pytest.raises(ValueError, match=r"first.2.weight: exp_avg is the piece of .*merge_local_state_dicts"):
        load(module, optimizer, local)


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_another_optimizer_is_not_converted(rank, world, kind):
    """Its numbers stood for this optimizer's parameters, in this optimizer's order, or stayed in the result."""
    module, optimizer = trained()
    params = list(module.parameters())
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    other = torch.optim.AdamW(groups, lr=0.05)
    train(module, other, range(1))
    with using(module, kind):
        with pytest.raises(ValueError, match=r"groups of \[1, \d\] parameters, expected \[\d\] as in the optimizer"):
            fsdp2.optim_state_dict(module, optimizer, other.state_dict())
        fsdp2.optim_state_dict(module, optimizer, optimizer.state_dict())


@on_ranks(2)
def test_what_is_no_state_dict(rank, world):
    """Errors were Python's own: KeyError: 'params'."""
    module, optimizer = trained()
    own = optimizer.state_dict()
    for wrong, got in (
        ([1], "a list"),
        ({}, r"the keys \[\]"),
        ({"state": [1]}, r"'state' that is \[1\]"),
        ({**own, "param_groups": None}, "'param_groups' that are None"),
        ({**own, "param_groups": [{"lr": 1}]}, r"'param_groups' that are \[\{'lr': 1\}\]"),
    ):
        for convert in (
            lambda wrong: fsdp2.optim_state_dict(module, optimizer, wrong),
            lambda wrong: fsdp2.optim_state_dict_to_load(module, optimizer, wrong),
        ):
            with pytest.raises(TypeError, match=f"expected a dictionary with 'state', .* got {got}"):
                convert(wrong)


@on_ranks(2)
def test_an_optimizer_that_fits_on_one_rank_only(rank, world):
    """Every rank raises where ranks send each other values; the others waited."""
    module, optimizer = trained()
    config = FullOptimStateDictConfig(rank0_only=True)
    mine = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1) if rank == 1 else optimizer
    with fsdp2.state_dict_type(module, StateDictType.FULL_STATE_DICT, None, config):
        state = fsdp2.optim_state_dict(module, optimizer)
        with pytest.raises(ValueError, match=r"on rank 1: optim_state_dict: a parameter of shape \(3,\) in group 0"):
            fsdp2.optim_state_dict(module, mine)
        with pytest.raises(ValueError, match=r"on rank 1: optim_state_dict_to_load: a parameter of shape \(3,\)"):
            fsdp2.optim_state_dict_to_load(module, mine, state)
        optimizer.load_state_dict(fsdp2.optim_state_dict_to_load(module, optimizer, state))


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_state_of_a_dtensor_that_no_unit_manages(rank, world, kind):
    """Its pieces were saved, and then refused as those of a parameter that is not sharded."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = build()
        linear = module.first[0]
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh_1d(), [Shard(0)]))
        fsdp2.fully_shard(module, mesh=mesh_1d(), ignored_params={linear.weight})
        return module, torch.optim.AdamW(module.parameters(), lr=0.05, foreach=False)

    (module, optimizer), (other, new) = made(), made()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter) * rank
    optimizer.step()
    state = saved(module, optimizer, kind, weights_only=False)
    load(other, new, state, kind)
    loaded = new.state[other.first[0].weight]["exp_avg"]
    assert torch.equal(loaded.to_local(), optimizer.state[module.first[0].weight]["exp_avg"].to_local())
    assert loaded.placements == (Shard(0),) and loaded.shape == (5, 8)
    if kind == "local":
        state["state"]["first.0.weight"]["exp_avg"]["offset"] = (3 - 3 * rank, 0)
        with pytest.raises(ValueError, match=r"first.0.weight: exp_avg is the piece of .*merge_local_state_dicts"):
            load(other, new, state, kind)


@on_ranks(2)
def test_loaded_state_is_a_copy(rank, world):
    """What was loaded shares nothing with what it was loaded from, so two runs may go on from one state."""
    module, optimizer = trained()
    for kind in ("full", "sharded", "local"):
        with using(module, kind):
            state = fsdp2.optim_state_dict(module, optimizer)
        other = torch.optim.AdamW(module.parameters(), lr=0.05)
        load(module, other, state)
        given = {value.untyped_storage().data_ptr() for value in tensors(state) if value.numel()}
        assert not given & {
            value.untyped_storage().data_ptr() for value in tensors(other.state_dict()) if value.numel()
        }


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a state, DTensors as their local ones."""
    found = [value for value in pytree.tree_leaves(tree) if isinstance(value, Tensor)]
    return [value.to_local() if isinstance(value, DTensor) else value for value in found]


@on_ranks(1, 2)
def test_optimizer_built_before_sharding(rank, world):
    """Its state has names before it has stepped on shards, and can be loaded."""
    plain, plain_optimizer = plain_run("adamw")
    module = build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0)
    shard(module)
    load(module, optimizer, fsdp2.optim_state_dict(plain, plain_optimizer))
    module.load_state_dict(plain.state_dict())
    assert list(saved(module, optimizer, "full")["state"]) == [
        n for n, p in plain.named_parameters() if p.requires_grad
    ]
    torch.testing.assert_close(train(module, optimizer, range(2, 4)), train(plain, plain_optimizer, range(2, 4)))


@on_ranks(4)
@pytest.mark.parametrize("kind", ["full", "full_on_rank0", "sharded", "local"])
def test_tensor_parallelism(rank, world, kind):
    """State of parameters that lie on two meshes."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fsdp2.fully_shard(tensor_parallel(10), mesh=mesh_of(2, 2, names=("dp", "tp"))["dp"])
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        loss = model(rows()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model, optimizer = make()
    step(model, optimizer)
    state = saved(model, optimizer, kind, weights_only=kind != "sharded")  # torch 2.11 does not know interleaved shards
    if kind == "full":
        assert state["state"]["0.weight"]["exp_avg"].shape == (10, 8)
    other, other_optimizer = make()
    other.load_state_dict(save(model, "full"))
    load(other, other_optimizer, state, kind)
    for _ in range(2):
        assert torch.equal(step(model, optimizer), step(other, other_optimizer))


@on_ranks(2)
def test_fsdp1_understands_it(rank, world):
    """A full state of the wrapper class loads here, and ours loads there.

    With momentum: of two tensors for one parameter the wrapper class returns the second one twice on a CPU.
    """
    warnings.simplefilter("ignore")
    wrapper = FullyShardedDataParallel(build(), use_orig_params=True, device_id=torch.device("cpu"))
    wrapper_optimizer = MAKERS["momentum"](wrapper.parameters())
    train(wrapper, wrapper_optimizer, range(2))
    with FullyShardedDataParallel.state_dict_type(wrapper, StateDictType.FULL_STATE_DICT):
        model, state = wrapper.state_dict(), FullyShardedDataParallel.optim_state_dict(wrapper, wrapper_optimizer)
    module, plain = shard(build(seed=9)), build(seed=9)
    optimizers = [torch.optim.SGD(one.parameters(), lr=1.0, momentum=0.1) for one in (module, plain)]
    for one, optimizer in zip((module, plain), optimizers, strict=True):
        one.load_state_dict(model)
        load(one, optimizer, state)
    losses = [train(one, optimizer, range(2, 4)) for one, optimizer in zip((module, plain), optimizers, strict=True)]
    torch.testing.assert_close(losses[0], losses[1])
    ours = saved(module, optimizers[0], "full")
    assert set(save(module, "full")) == set(model) and set(ours["state"]) == set(state["state"])
    assert ours["param_groups"][0]["params"] == state["param_groups"][0]["params"]
    with FullyShardedDataParallel.state_dict_type(wrapper, StateDictType.FULL_STATE_DICT):
        wrapper.load_state_dict(save(module, "full"))
        converted = FullyShardedDataParallel.optim_state_dict_to_load(wrapper, wrapper_optimizer, ours)
        wrapper_optimizer.load_state_dict(converted)
        again = FullyShardedDataParallel.optim_state_dict(wrapper, wrapper_optimizer)
    for name, values in ours["state"].items():
        assert torch.equal(values["momentum_buffer"], again["state"][name]["momentum_buffer"]), name
    assert torch.equal(train(wrapper, wrapper_optimizer, range(1))[0], train(plain, optimizers[1], range(1))[0])


@on_ranks(2)
def test_named_optimizers_and_loading_directly(rank, world):
    """``is_named_optimizer`` keeps names, ``load_directly`` loads; other DTensors stay cut as they are."""
    module = build()
    bias = nn.Parameter(distribute_tensor(module.tied.bias.detach(), mesh_1d(), [torch.distributed.tensor.Shard(0)]))
    module.tied.bias = bias
    fsdp2.fully_shard(module, mesh=mesh_1d(), ignored_params={bias})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    state = saved(module, optimizer, "full")
    named = fsdp2.optim_state_dict_to_load(module, optimizer, state, is_named_optimizer=True)
    assert list(named["state"]) == list(state["state"]) == named["param_groups"][0]["params"]
    other = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.1)
    fsdp2.optim_state_dict_to_load(module, other, state, load_directly=True)
    assert other.param_groups[0]["momentum"] == 0.9
    for parameter in module.parameters():
        one, two = optimizer.state[parameter]["momentum_buffer"], other.state[parameter]["momentum_buffer"]
        assert one.placements == two.placements and torch.equal(one.to_local(), two.to_local())
    assert whole(module).keys() == build().state_dict().keys()


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", ["sharded", "full_on_rank0"])
@pytest.mark.parametrize("named", [False, True])
def test_the_state_dict_of_a_plain_optimizer(rank, world, kind, named):
    """Its numbers stand for parameters in the order of the groups, or for the names that the groups hold.

    They were passed on, and so whole tensors where the optimizer needs shards.
    """
    plain = build()
    modules = [plain, shard(build())]
    optimizers = []
    for module in modules:
        entries = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        groups = [entries[:3], entries[3:]]
        if named and module is plain:
            groups = [groups[0][::-1], groups[1]]  # names count, not places
        pick = lambda group: group if named else [p for _, p in group]
        optimizers.append(
            torch.optim.AdamW([{"params": pick(group), "lr": lr} for group, lr in zip(groups, (0.05, 0.02))])
        )
    train(plain, optimizers[0], range(2))
    state = optimizers[0].state_dict()
    if kind == "full_on_rank0" and rank:
        state = {}
    modules[1].load_state_dict(plain.state_dict())
    load(modules[1], optimizers[1], state, kind)
    assert all(isinstance(entry["exp_avg"], DTensor) for entry in optimizers[1].state.values())
    torch.testing.assert_close(train(modules[1], optimizers[1], range(2, 4)), train(plain, optimizers[0], range(2, 4)))


@on_ranks(2)
def test_numbers_that_fit_no_parameters(rank, world):
    """More or fewer parameters in a group, other groups, numbers of nothing: refused, as torch refuses them."""
    module, optimizer = trained()
    plain = build()
    for count, groups, got in ((3, 1, r"groups of \[3\] parameters"), (4, 2, r"groups of \[4, 3\] parameters")):
        params = [p for p in plain.parameters() if p.requires_grad]
        parts = [params[:count]] if groups == 1 else [params[:count], params[count:]]
        other = torch.optim.AdamW([{"params": part} for part in parts])
        train(plain, other, range(1))
        with pytest.raises(ValueError, match=rf"numbers as names, in {got}, expected .*fsdp2.optim_state_dict"):
            load(module, optimizer, other.state_dict())
    state = optimizer.state_dict()
    state["state"][99] = {}
    with pytest.raises(ValueError, match=r"the numbers \[99\] in the state belong to no parameter"):
        load(module, optimizer, state)


@on_ranks(2)
@pytest.mark.parametrize("shape", [(30,), (5, 6, 1), (1, 5), (6, 1), (7, 5)])
def test_moments_of_another_shape(rank, world, shape):
    """Refused by name: they stayed whole and plain, and the step failed, or worked with other elements."""
    module, optimizer = trained()
    state = saved(module, optimizer, "full")
    state["state"]["first.2.weight"]["exp_avg"] = torch.ones(shape)
    with pytest.raises(ValueError, match=r"first.2.weight: exp_avg has shape .*, expected \(6, 5\)"):
        load(module, optimizer, state)
    bias = state["state"]["first.2.bias"]
    state = saved(module, optimizer, "full")
    state["state"]["first.2.bias"]["exp_avg_sq"] = bias["exp_avg_sq"][None]
    with pytest.raises(ValueError, match=r"first.2.bias: exp_avg_sq has shape \(1, 6\), expected \(6,\)"):
        load(module, optimizer, state)
