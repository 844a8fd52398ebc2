"""Every form of a policy makes the units that one would make by hand; answers that make no sense change nothing."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    _recursive_wrap,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from tests.grouping.models import BLOCKS, Block, Net, names_of_units
from tests.support import api
from tests.support.counting import gathers
from tests.support.fake import fake_mesh
from tests.support.inside import options_of
from tests.support.parity import assert_parity, mesh_1d, shard_each, stack
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only

is_block = lambda module: isinstance(module, Block)


class Counts:
    """A callable object that is asked recursively, as FSDP1 asks."""

    def __call__(self, module: nn.Module, recurse: bool, unwrapped: int) -> bool:
        return recurse or (isinstance(module, Block) and unwrapped > 0)


POLICIES = {
    "ModuleWrapPolicy": ModuleWrapPolicy({Block}),
    "CustomPolicy": CustomPolicy(is_block),
    "CustomPolicy with arguments": CustomPolicy(
        lambda module: {"reshard_after_forward": True} if is_block(module) else {}
    ),
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=150),
    "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "lambda": functools.partial(lambda_auto_wrap_policy, lambda_fn=is_block),
    "or": functools.partial(_or_policy, policies=[functools.partial(lambda_auto_wrap_policy, lambda_fn=is_block)]),
    "object": Counts(),
    "function": is_block,
    "function with arguments": lambda module: {"reshard_after_forward": True} if is_block(module) else False,
    "set": {Block},
    "list": [Block],
    "class": Block,
    "container": {nn.ModuleList},
    "auto": "auto",
}


@pytest.mark.parametrize("form", POLICIES)
def test_forms(form):
    """Units are the blocks and the root, however the policy says so, and each is gathered; that such units train right
    is shown below, and in ``test_auto.py``."""
    with fake_mesh(2) as mesh:
        module = fsdp2.fully_shard(Net(), policy=POLICIES[form], mesh=mesh)
        assert names_of_units(module) == ["", *BLOCKS]
        assert gathers(lambda: module(torch.ones(2, 8))) == 4


def test_plans_need_no_processes():
    """Names and sizes of all units, children first, the root last; nothing is sharded, nothing materialized."""
    for form, policy in POLICIES.items():
        with torch.device("meta"):
            module = Net(tied=True)
        plan = fsdp2.plan_units(module, policy)
        assert [name for name, _ in plan] == [*BLOCKS, ""], form
        numels = [sum(p.numel() for p in block.parameters()) for block in module.blocks]
        assert dict(plan) == {**dict(zip(BLOCKS, numels, strict=True)), "": 64 + 8 + 16 + 8}
        lines = str(plan).splitlines()
        assert lines[0] == "4 units" and lines[1].startswith("blocks.0: Block, 211 parameters, 0.00 MiB")
        assert lines[-1].startswith("(root): Net, 96 parameters") and lines[-1].endswith(": stem, norm, head")
        assert names_of_units(module) == [] and all(p.is_meta for p in module.parameters())
    assert fsdp2.plan_units(Net(), {nn.Linear}, ignored_modules=[module.stem]) == fsdp2.plan_units(Net(), {nn.Linear})
    module = Net()
    ignored = fsdp2.plan_units(module, {nn.Linear}, ignored_modules=[module.blocks], ignored_params={module.head.bias})
    assert ignored == [("stem", 72), ("head", 64), ("", 16)]


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_what_is_chosen_is_logged(caplog, level):
    """The logger "fsdp2" says it at INFO."""
    module = Net()
    expected = str(fsdp2.plan_units(module, "auto"))
    with fake_mesh(2) as mesh, caplog.at_level(level, "fsdp2"):
        fsdp2.fully_shard(module, policy="auto", mesh=mesh)
    assert caplog.messages == ([expected] if level == "INFO" else [])


class Deep(nn.Module):
    """A nested matching class, a shared module, a list in a list, and a part that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(Block(), nn.Sequential(Block(), nn.Tanh()))
        self.lists = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8), nn.ReLU()]), nn.Linear(8, 8)])
        self.first, self.second = nn.Sequential(self.lists[1]), self.lists[1]
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = self.lists[0][1](self.lists[0][0](self.outer(x)))
        x = self.second(self.first(x))[:, None]
        return self.attention(x, x, x, need_weights=False)[0].flatten(1)


@on_ranks(2)
def test_nesting_sharing_and_parts_nobody_calls(rank, world):
    """Children come before parents, a shared module once, lists give way to what they hold."""
    everything = lambda module: True
    expected = {
        (nn.Sequential, Block): ["outer.0", "outer.1.0", "outer.1", "outer", "first"],
        (nn.ModuleList,): ["lists.0.0", "lists.1"],
        (nn.Linear,): [*(f"outer.{i}.{part}" for i in ("0", "1.0") for part in ("up", "down")), "lists.0.0", "lists.1"],
        (nn.MultiheadAttention,): ["attention"],
    }
    for classes, names in expected.items():
        run = assert_parity(
            lambda module, fsdp, classes=classes: fsdp.fully_shard(module, policy=set(classes), mesh=mesh_1d()),
            build=Deep,
            against=("alone",),
        )
        assert [name for name, _ in fsdp2.plan_units(Deep(), set(classes))] == [*names, ""]
        assert sorted(names_of_units(run.module)) == sorted(["", *names])
    for policy in (everything, always_wrap_policy, CustomPolicy(everything)):
        assert_parity(
            lambda module, fsdp, policy=policy: fsdp.fully_shard(module, policy=policy, mesh=mesh_1d()),
            build=Deep,
            against=("alone",),
        )


@on_ranks(2)
def test_what_is_sharded_already_is_left(rank, world):
    """A block sharded by hand keeps its options, and nothing below it becomes a unit."""

    def prepare(module, fsdp):
        fsdp.fully_shard(module.blocks[1], mesh=mesh_1d(), reshard_after_forward=False)
        fsdp.fully_shard(module, policy={Block, nn.Linear}, mesh=mesh_1d(), reshard_after_forward=True)

    run = assert_parity(prepare, build=Net, against=("alone",))
    inner = [f"blocks.{i}.{part}" for i in (0, 2) for part in ("up", "down")]
    assert sorted(names_of_units(run.module)) == sorted(["", "stem", "head", *BLOCKS, *inner])
    assert options_of(run.module.blocks[1]).reshard_after_forward is False
    module = Net()
    for block in module.blocks:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(module, policy=functools.partial(size_based_auto_wrap_policy, min_num_params=200))
    assert names_of_units(module) == ["", *BLOCKS]


def test_several_modules_with_a_policy():
    """A grouped call makes its units below each of its modules."""
    module = nn.Sequential(Net(), Net(), nn.Linear(8, 8))
    with fake_mesh(2) as mesh:
        fsdp2.fully_shard([module[0], module[1]], policy={Block}, mesh=mesh)
        fsdp2.fully_shard(module, mesh=mesh)
        assert len(names_of_units(module)) == 1 + 2 + 6
        module(torch.ones(2, 8)).sum().backward()
        assert all(parameter.grad is not None for parameter in module.parameters())


def test_a_module_that_refers_to_the_one_around_it():
    """That one is of the call, and no unit below itself."""
    with fake_mesh(2) as mesh:
        module = stack()
        module[1].around = module
        fsdp2.fully_shard(module, policy={nn.Linear, nn.Sequential}, mesh=mesh)
        assert names_of_units(module) == ["", "0", "1", "2"]


def tree(generator: random.Random, depth: int) -> nn.Module:
    """Return a random tree of modules that can all be called."""
    if depth == 0 or generator.random() < 0.2:
        return generator.choice([lambda: nn.Linear(generator.randint(1, 9), 4), nn.Tanh, lambda: nn.LayerNorm(5)])()
    parts = [tree(generator, depth - 1) for _ in range(generator.randint(1, 4))]
    return nn.MultiheadAttention(4, 1) if generator.random() < 0.1 else nn.Sequential(*parts)


@pytest.mark.parametrize("seed", range(40))
def test_sizes_are_asked_as_torch_does(seed):
    """The units of a size-based policy are those that FSDP1 would wrap, with leaves and exclusions."""
    generator = random.Random(seed)
    module = nn.Sequential(*(tree(generator, 4) for _ in range(3)))
    exclude = {nn.Linear} if seed % 3 == 0 else None
    policy = functools.partial(
        size_based_auto_wrap_policy, min_num_params=generator.choice([1, 20, 60, 200]), exclude_wrap_modules=exclude
    )
    ignored = {part for part in module.modules() if isinstance(part, nn.LayerNorm) and generator.random() < 0.5}
    names = {part: name for name, part in module.named_modules()}
    wrapped: list[str] = []

    def wrap(part: nn.Module) -> nn.Module:
        wrapped.append(names[part])
        return part

    params = {parameter for part in ignored for parameter in part.parameters()}
    _recursive_wrap(module, policy, wrap, ignored, params, only_wrap_children=True)
    if wrapped:
        assert [name for name, _ in fsdp2.plan_units(module, policy, ignored_modules=ignored)] == [*wrapped, ""]
    else:
        with pytest.raises(ValueError, match="matches nothing"):
            fsdp2.plan_units(module, policy, ignored_modules=ignored)


# ---- arguments of single units ----


def test_arguments_of_single_units():
    """A dict overrides the call's arguments by our names; what is ignored or replicated adds up."""
    low = MixedPrecisionPolicy(torch.bfloat16)
    module = Net()
    own = {
        module.blocks[0]: {
            "reshard_after_forward": False,
            "mp_policy": low,
            "ignored_params": {module.blocks[0].norm.bias},
        },
        module.blocks[1]: {"strategy": ShardingStrategy.NO_SHARD, "offload_policy": CPUOffloadPolicy(pin_memory=False)},
        module.blocks[2]: {
            "replicated_params": {module.blocks[2].up.bias},
            "shard_placement_fn": lambda p: Shard(p.ndim - 1),
        },
    }
    both = {module.blocks[0].norm.weight, module.norm.weight}
    options = {"ignored_params": both, "reshard_after_forward": True}
    with fake_mesh(2) as mesh:
        fsdp2.fully_shard(module, policy=lambda part: own.get(part, False), mesh=mesh, **options)
    plain = {name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)}
    assert plain == {"norm.weight", "blocks.0.norm.weight", "blocks.0.norm.bias"}
    found = [options_of(block) for block in module.blocks]
    assert [option.reshard_after_forward for option in found] == [False, None, True]
    assert found[0].mp_policy == low and found[1].mp_policy == MixedPrecisionPolicy()
    assert isinstance(found[1].offload_policy, CPUOffloadPolicy)
    assert [str(module.blocks[i].up.weight.placements[0]) for i in range(3)] == ["S(0)", "R", "S(1)"]
    assert str(module.blocks[2].up.bias.placements[0]) == "R"


@on_ranks(2)
def test_dtypes_by_the_names_in_the_whole_module(rank, world):
    """Patterns mean names in the module that was passed; only it has the output dtype."""
    low = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    module = Net()
    for part in module.modules():
        if isinstance(part, nn.LayerNorm):
            part.register_forward_pre_hook(lambda part, args: (args[0].to(part.weight.dtype),))
            part.register_forward_hook(lambda part, args, output: output.bfloat16())
    names = {"": low, "blocks.1.up.*": MixedPrecisionPolicy(torch.bfloat16), "*norm.*": MixedPrecisionPolicy()}
    fsdp2.fully_shard(module, policy={Block}, mp_policy=names)
    seen = {}
    for name, part in module.named_modules():
        part.register_forward_hook(lambda part, args, output, name=name: seen.update({name: output.dtype}))
    module.blocks[1].unshard()
    assert module.blocks[1].up.bias.dtype == torch.bfloat16 and module.blocks[1].norm.bias.dtype == torch.float32
    module(torch.ones(2, 8)).sum().backward()
    assert seen["blocks.0"] == torch.bfloat16 and seen[""] == torch.float32
    assert all(parameter.grad.dtype == torch.float32 for parameter in module.parameters())


@on_ranks(2)
def test_names_of_the_old_arguments(rank, world):
    """What FSDP1 called otherwise is translated; what has no meaning for one unit is refused by name."""
    mesh = mesh_1d()
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    cases = [
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, "reshard_after_forward", False),
        ({"mixed_precision": mixed}, "mp_policy", MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
        ({"mixed_precision": None}, "mp_policy", MixedPrecisionPolicy()),
        ({"cpu_offload": CPUOffload(offload_params=True)}, "offload_policy", CPUOffloadPolicy()),
        ({"device_mesh": mesh}, "reshard_after_forward", True),
    ]
    for given, option, expected in cases:
        module = Net()
        fsdp2.fully_shard(
            module,
            policy=CustomPolicy(lambda part, given=given: given if is_block(part) else False),
            mp_policy=MixedPrecisionPolicy(torch.float16),
            reshard_after_forward=True,
        )
        assert getattr(options_of(module.blocks[0]), option) == expected
    module = Net()
    states = lambda part: {"ignored_states": [part.norm]} if is_block(part) else False
    fsdp2.fully_shard(module, policy=CustomPolicy(states))
    assert {type(block.norm.weight) for block in module.blocks} == {nn.Parameter}
    refused = [
        ("backward_prefetch", None, "set_modules_to_backward_prefetch"),
        ("forward_prefetch", True, "set_modules_to_forward_prefetch"),
        ("limit_all_gathers", True, "one unit ahead"),
        ("use_orig_params", True, "keep their names"),
        ("sync_module_states", True, "once the whole model is sharded"),
        ("param_init_fn", None, "meta device"),
        ("device_id", 0, "the mesh's device"),
        ("process_group", None, "DeviceMesh.from_group"),
        ("auto_wrap_policy", None, "the policy of the call"),
        ("policy", None, "the policy of the call"),
        ("mixed_precision", torch.bfloat16, "expected a MixedPrecision"),
        ("cpu_offload", 3, "expected a CPUOffload"),
        ("ignored_states", [1], "expected parameters or modules"),
        ("bogus", 1, "expected one of mesh, reshard_after_forward"),
        ("mixed_precision", MixedPrecision(buffer_dtype=torch.bfloat16), "buffers are not cast"),
        ("mixed_precision", MixedPrecision(keep_low_precision_grads=True), "keep_low_precision_grads"),
    ]
    module = Net()
    for key, value, match in refused:
        answer = lambda part, key=key, value=value: {key: value} if part is module.blocks[2] else is_block(part)
        with pytest.raises(TypeError, match=f"(?s)policy: blocks.2: .*{key}.*{match}|{key}: {match}"):
            fsdp2.fully_shard(module, policy=answer)
        assert names_of_units(module) == []


# ---- what is refused ----


def test_a_policy_that_matches_nothing():
    """The error names the policy, the classes that exist, and the largest size."""
    huge = functools.partial(size_based_auto_wrap_policy, min_num_params=10**9)
    for policy in ({nn.Conv2d}, ModuleWrapPolicy({nn.Conv2d}), CustomPolicy(lambda m: False), lambda m: {}, huge):
        for call in (fsdp2.plan_units, lambda module, policy: fsdp2.fully_shard(module, policy=policy)):
            with fake_mesh(2), pytest.raises(ValueError, match="matches nothing below Net") as error:
                call(Net(), policy)
            for part in ("Linear (8)", "LayerNorm (4)", "Block (3)", "ModuleList (1)", "blocks, has 633 parameters"):
                assert part in str(error.value)
    with pytest.raises(ValueError, match="found no repeated block below Linear, which has: no submodule"):
        fsdp2.plan_units(nn.Linear(2, 2), "auto")
    assert fsdp2.plan_units(Block(), {Block}) == fsdp2.plan_units(Block(), None) == [("", 211)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ignored_modules": nn.Linear(2, 2)}, "ignored_modules must be a set of nn.Module, got Linear"),
        ({"ignored_modules": [nn.Parameter(torch.ones(2))]}, "ignored_modules must be a set of nn.Module"),
        ({"ignored_params": nn.Parameter(torch.ones(2))}, "ignored_params must be a set of nn.Parameter"),
        ({"ignored_params": "blocks.0"}, "ignored_params must be a set of nn.Parameter, got 'blocks.0'"),
    ],
)
def test_what_cannot_be_ignored(arguments, text):
    """A plan refuses it as the call does; it raised "not iterable", or took a name for something to ignore."""
    with pytest.raises(TypeError, match=f"plan_units: {text}"):
        fsdp2.plan_units(Net(), {Block}, **arguments)
    with fake_mesh(2), pytest.raises(TypeError, match=f"fully_shard: {text}"):
        fsdp2.fully_shard(Net(), policy={Block}, **arguments)


def test_a_plan_is_of_one_module():
    """A list of modules, which ``fully_shard`` takes for one unit, raised "unhashable type"."""
    with pytest.raises(TypeError, match=r"plan_units: expected an nn.Module, got list"):
        fsdp2.plan_units([nn.Linear(2, 2)])


@pytest.mark.parametrize("policy", ["auto", {Block}, None, lambda part, recurse, nonwrapped_numel: recurse])
def test_a_plan_of_a_lazy_module(policy):
    """It raises the error of the call, which names the parameter; it raised torch's, which does not."""
    module = Net()
    module.blocks[1].up = nn.LazyLinear(4)
    with pytest.raises(ValueError, match=r"fully_shard: blocks\.1\.up\.weight of LazyLinear has no shape yet; .*Run a"):
        fsdp2.plan_units(module, policy)
    fsdp2.plan_units(module, {Block}, ignored_modules=[module.blocks[1].up])


def test_what_is_no_policy():
    """Wrong types, wrong signatures and wrong answers are told apart. A module in the place of its class was called
    with each module, and raised what its forward did."""
    for policy in (3, "automatic", lambda: True, lambda a, b: True, object(), Block()):
        with pytest.raises(TypeError, match="expected a ModuleWrapPolicy, a CustomPolicy, a set of nn.Module classes"):
            fsdp2.plan_units(Net(), policy)
    for policy in (set(), {int}, [Block, "Block"], int, ModuleWrapPolicy):
        with pytest.raises(TypeError, match="expected nn.Module classes"):
            fsdp2.plan_units(Net(), policy)
    with pytest.raises(TypeError, match=r"for blocks.1 \(Block\) it returned None; expected True, False, or a dict"):
        fsdp2.plan_units(module := Net(), lambda part: None if part is module.blocks[1] else False)


@on_ranks(2)
def test_nothing_is_sharded_when_an_argument_is_wrong(rank, world):
    """The last unit's wrong argument is found before the first is sharded; so is torch's own fully_shard below."""
    module = Net()
    wrong = {module.blocks[2]: {"mp_policy": 1}, module.blocks[0]: True}
    with pytest.raises(TypeError, match="mp_policy must be a MixedPrecisionPolicy.*, got 1"):
        fsdp2.fully_shard(module, policy=lambda part: wrong.get(part, False))
    assert names_of_units(module) == []
    shard_each(other := stack(), api.theirs, mesh=mesh_1d())
    module.blocks[2].up = other[2]
    with pytest.raises(ValueError, match="cannot mix"):
        fsdp2.fully_shard(module, policy={Block})
    assert names_of_units(module) == []
    fsdp2.fully_shard(again := Net(), policy={Block})
    with pytest.raises(AssertionError, match="already been applied"):
        fsdp2.fully_shard(again, policy={Block})
    asked = []

    def place(parameter):
        asked.append(parameter)
        return "nowhere" if parameter is last else None

    last = list((third := Net()).parameters())[-1]
    with pytest.raises(ValueError, match="Invalid shard_placement_fn result: 'nowhere'"):
        fsdp2.fully_shard(third, policy={Block}, shard_placement_fn=place)
    assert names_of_units(third) == [] and len(asked) > 3
    assert not any(isinstance(parameter, DTensor) for parameter in third.parameters())


class Final(type):
    """The class of a class that may have no subclasses."""

    def __new__(mcs, name, bases, namespace):
        if any(isinstance(base, mcs) for base in bases):
            raise TypeError("it may have no subclasses")
        return super().__new__(mcs, name, bases, namespace)


class FinalNet(Net, metaclass=Final):
    """A model whose blocks may be units, and which may not."""


def test_nothing_is_sharded_when_a_class_cannot_be_made():
    """The blocks were sharded by then, and no call could shard the rest."""
    module = FinalNet()
    with fake_mesh(2) as mesh, pytest.raises(TypeError, match="may have no subclasses"):
        fsdp2.fully_shard(module, mesh=mesh, policy={Block})
    assert names_of_units(module) == [] and not any(isinstance(p, DTensor) for p in module.parameters())


def test_placements_are_asked_for_once():
    """A call with a policy asked twice: a function that counts placed parameters otherwise than in calls one by one."""
    with fake_mesh(2) as mesh:
        shard_all(one := Net(), mesh, first := Alternating())
        fsdp2.fully_shard(other := Net(), mesh=mesh, policy={Block}, shard_placement_fn=(second := Alternating()))
    assert first.asked == second.asked
    for parameter, like in zip(other.parameters(), one.parameters(), strict=True):
        assert parameter.placements == like.placements


class Alternating:
    """Cuts every other matrix along its columns."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, parameter: nn.Parameter) -> Shard:
        self.asked += 1
        return Shard(self.asked % parameter.ndim)


def shard_all(module: Net, mesh: object, placement: Alternating) -> None:
    """Shard the blocks, then the rest."""
    for unit in (*module.blocks, module):
        fsdp2.fully_shard(unit, mesh=mesh, shard_placement_fn=placement)
