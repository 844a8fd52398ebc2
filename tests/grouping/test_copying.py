"""Copies of sharded modules and of their state, shallow and deep."""

from __future__ import annotations

import copy
import functools
import gc
import io
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

import fsdp2
from tests.grouping.models import Shifted
from tests.support import api
from tests.support.models import mlp
from tests.support.parity import mean_output, mesh_1d, mesh_of, on_one_axis, sharded, stack, trains_like_one_process
from tests.support.pool import on_ranks


@on_ranks(1)
def test_classes_made_in_a_function_are_freed(rank, world):
    """The sharded classes were remembered for good, each with the class it was made of, and that with all its methods
    can reach: a model that a class in a notebook or a function refers to was never freed."""

    def build() -> nn.Module:
        class Local(nn.Linear):
            def forward(self, x):
                return super().forward(x) + 0 * len(list(model.children()))

        model = api.ours.fully_shard(Local(4, 4), mesh=mesh_of(world))
        return model

    module = build()
    original = type(module).__bases__[1]
    again = api.ours.fully_shard(original(2, 2), mesh=mesh_of(world))
    assert type(again) is type(module) and issubclass(type(module), original)
    freed = weakref.ref(original)
    del original, again
    del module
    for _ in range(2):
        gc.collect()
    assert freed() is None


@on_ranks(1, 2)
def test_saving_and_copying_a_sharded_state_dict(rank, world):
    """All shards of a unit but the first lie at an offset in its buffer. torch tells a DTensor from a tensor with
    memory by its address, which is the offset, so ``torch.save`` and ``copy.deepcopy`` of a state dict died with
    "invalid python storage"."""
    module = api.ours.fully_shard(mlp(4, 6, 3), mesh=mesh_of(world))
    state = module.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for other in (copy.deepcopy(state), torch.load(file, weights_only=True)):
        for name, value in other.items():
            assert isinstance(value, DTensor) and torch.equal(value.to_local(), state[name].to_local())
            assert value.to_local().data_ptr() != state[name].to_local().data_ptr() or not value.to_local().numel()
    assert file.getbuffer().nbytes < 20_000  # no other rank's, no other parameter's bytes
    before = module(torch.ones(2, 4))
    module.reshard()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.to_local().mul_(2)  # the memory is still the unit's own
    assert not torch.equal(module(torch.ones(2, 4)), before)


@on_ranks(1, 2)
def test_saving_a_parameter_without_elements(rank, world):
    """Its shard began where that of the next parameter does, and ``torch.save`` refuses two dtypes at one address."""
    module = nn.ParameterDict({"none": torch.empty(0, 4), "rounded": torch.ones(4, 2, dtype=torch.bfloat16)})
    api.ours.fully_shard(module, mesh=mesh_of(world))
    state, file = module.state_dict(), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other = torch.load(file, weights_only=True)
    assert {name: (value.shape, value.dtype) for name, value in other.items()} == {
        "none": ((0, 4), torch.float32),
        "rounded": ((4, 2), torch.bfloat16),
    }
    module.load_state_dict(other)
    assert torch.equal(module["rounded"].full_tensor(), torch.ones(4, 2, dtype=torch.bfloat16))


@on_ranks(1, 2)
def test_copying_a_part_of_a_unit(rank, world):
    """The hooks of a module inside a unit led ``copy.deepcopy`` to the unit's full parameters, whose memory is freed,
    and from there to "invalid python storage" or a crash."""
    module = api.ours.fully_shard(mlp(4, 6, 3), mesh=mesh_of(world))
    module(torch.ones(2, 4)).sum().backward()
    module.zero_grad()
    with pytest.raises(NotImplementedError, match=r"0.weight: a part of a sharded unit cannot be deep-copied"):
        copy.deepcopy(module[0])
    copy.deepcopy(nn.Sequential(module))


@on_ranks(2)
def test_a_copy_that_fails_leaves_the_model_as_it_was(rank, world):
    """An attribute that cannot be copied (a lock) ended ``copy.deepcopy`` while units showed shards to be copied. Full
    parameters that ``unshard()`` had gathered were hidden for good."""
    module = api.ours.fully_shard(mlp(4, 6, 3), mesh=mesh_of(world))
    module.unshard()
    shown = list(module.parameters())
    module[-1].lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        copy.deepcopy(module)
    assert all(after is before for after, before in zip(module.parameters(), shown, strict=True))


@on_ranks(1, 2)
def test_hooks_on_parameters_stay_with_the_original(rank, world):
    """A copy of a plain parameter has no hooks. A sharded one's had: a teacher that was copied from a model with an
    optimizer in its hooks stepped that optimizer, and so the model, in its own backward."""
    seen: list[Tensor] = []
    model = api.ours.fully_shard(nn.Linear(4, 4), mesh=mesh_of(world))
    model.weight.register_hook(lambda grad: grad * 3)
    model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter))
    clone = copy.deepcopy(model)
    for module in (model, clone):
        module(torch.ones(2, 4)).sum().backward()
    assert torch.equal(clone.weight.grad.full_tensor(), torch.full((4, 4), 2.0))
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 6.0))
    assert len(seen) == 1 and seen[0] is model.weight


@on_ranks(1, 2)
def test_a_copy_adopts_what_is_added_to_it(rank, world):
    """A copy did not know with which arguments its units had been made: parameters added to it (adapters on a reference
    model) stayed outside of every unit, their gradients were each rank's own."""
    torch.manual_seed(0)
    original = nn.Sequential(Shifted(4, 6), nn.Linear(6, 3))
    original.scale = nn.Parameter(torch.ones(()))
    whole = copy.deepcopy(original)
    api.ours.fully_shard(original[0], mesh=mesh_of(world))
    api.ours.fully_shard(original, mesh=mesh_of(world), ignored_params={original.scale})
    clone = copy.deepcopy(original)
    for module in (clone, whole):
        torch.manual_seed(1)
        module[0].register_parameter("shift", nn.Parameter(torch.randn(6)))
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    clone(batch.chunk(world)[rank]).square().mean().backward()
    whole(batch).square().mean().backward()
    names = {name: parameter for name, parameter in clone.named_parameters() if isinstance(parameter, DTensor)}
    assert set(names) == {name for name, _ in whole.named_parameters()} - {"scale"}
    for name, parameter in names.items():
        torch.testing.assert_close(parameter.grad.full_tensor(), whole.get_parameter(name).grad)
    assert not hasattr(original[0], "shift") and clone.scale is not original.scale


@on_ranks(2)
def test_a_copy_of_a_compiled_module(rank, world):
    """``module.compile()`` keeps what it made on the module, and a deep copy took it over: the copy computed with the
    weights of the original, and its own got no gradients."""
    module = stack(4, layers=2)
    module[0].compile(backend="eager")
    on_one_axis(module, api.ours)
    clone = copy.deepcopy(module)
    clone(torch.ones(1, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in clone.parameters())
    assert all(parameter.grad is None for parameter in module.parameters())


def through_a_copy(module: nn.Module, inputs: Tensor) -> Tensor:
    """The loss of a shallow copy, which is in another mode for a while."""
    other = copy.copy(module).eval()
    assert module.training and not other.training and isinstance(other, type(module))
    return mean_output(other.train(), inputs)


@on_ranks(2)
def test_a_shallow_copy_of_a_model(rank, world):
    """``copy.copy`` of a model, for another mode, was refused as pickling is; torch's fully_shard allows it."""
    trains_like_one_process(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), through_a_copy)


@on_ranks(2)
def test_a_model_that_is_copied_behind_its_optimizer(rank, world):
    """The copy of the optimizer made the parameters, and DTensors are copied with their gradients. Those of a copied
    model have none."""
    module = sharded(lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(2, 8)).sum().backward()
    copied, clone = copy.deepcopy((optimizer, module))
    assert copied.param_groups[0]["params"] == [*clone.parameters()]
    assert all(parameter.grad is None for parameter in clone.parameters())


@on_ranks(2)
def test_a_shallow_copy_of_a_unit(rank, world):
    """The copy shares parameters and gathers with the unit, and its forward ends what it began."""
    module = sharded(lambda: stack(layers=2), reshard_after_forward=True)
    expected = module[0](torch.ones(2, 8)).detach()
    other = copy.copy(module[0])
    for _ in range(2):
        torch.testing.assert_close(other(torch.ones(2, 8)).detach(), expected)
        assert isinstance(other.weight, DTensor)
    other.unshard()
    assert other.weight is module[0].weight and not isinstance(other.weight, DTensor)
    module[0].reshard()
    assert isinstance(other.weight, DTensor)


@on_ranks(2)
def test_copying_units_that_share_a_layer(rank, world):
    """Hooks on the layer referred to the group that the first unit had before the second one took part: "cannot pickle
    ProcessGroup"."""
    layer = nn.Linear(4, 4)
    module = sharded(lambda: nn.Sequential(nn.Sequential(layer), nn.Sequential(layer), nn.Linear(4, 2)))
    clone = copy.deepcopy(module)
    for one in (module, clone):
        one(torch.ones(2, 4)).sum().backward()
    assert clone[0][0].weight is clone[1][0].weight and clone[0][0].weight is not layer.weight
    for got, want in zip(clone.parameters(), module.parameters()):
        assert torch.equal(got.grad.full_tensor(), want.grad.full_tensor())


class Adapter(nn.Module):
    """It wraps a module, and looks up there what it has not itself, as PEFT's models do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.more = inner, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.more(x)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


@on_ranks(1, 2)
@pytest.mark.parametrize("wrap", [Adapter, checkpoint_wrapper, functools.partial(torch.compile, backend="eager")])
@pytest.mark.parametrize("root", [False, True])
def test_a_wrapper_around_a_unit(rank, world, wrap, root):
    """A wrapper that looks up attributes in its module found the unit's ``__deepcopy__``: the copy was one of the unit
    alone, without the adapter, and nobody said so."""
    inner = nn.Linear(8, 8)
    fsdp2.fully_shard(inner, mesh=mesh_1d())
    module = wrap(inner)
    if root:
        module = nn.Sequential(module)
        fsdp2.fully_shard(module, mesh=mesh_1d())
    x = torch.ones(2, 8)
    expected = module(x)
    copied = copy.deepcopy(module)
    names, copies = ([name for name, _ in one.named_modules()] for one in (module, copied))
    assert type(copied) is type(module) and copies == names
    torch.testing.assert_close(copied(x), expected)
