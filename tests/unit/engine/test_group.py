"""A group's way through forward, backward and recovery, on a mesh whose collectives move nothing."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard, summon_full_params
from fsdp2.engine import residency as residencies
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.phase import Phase
from fsdp2.engine.residency import Level
from tests.support.api import torch_since
from tests.support.counting import events
from tests.support.nccl import too_with_nccl
from tests.support.parity import shard_each

pytestmark = too_with_nccl


def group_of(module: nn.Module) -> FSDPParamGroup:
    """Return the only group of a unit."""
    (group,) = module._get_fsdp_state().groups
    return group


def state_of(module: nn.Module) -> tuple[type, Phase]:
    """Return where a unit's parameters and the unit are."""
    group = group_of(module)
    return group.residency.level, group.phases.phase


def full_bytes(module: nn.Module) -> int:
    """Return how much memory the full parameters of a unit take now."""
    full = group_of(module).params[0].full
    return 0 if full is None else full.untyped_storage().size()


def test_what_is_written_while_summoned_reaches_all_that_is_kept(mesh: DeviceMesh) -> None:
    """The shards, the full parameter that a forward kept or the pieces of a few ranks, and the gradients."""
    for reshard in (True, False, 2):
        module = fully_shard(nn.Linear(8, 8), mesh=mesh, reshard_after_forward=reshard)
        module(torch.ones(2, 8)).sum().backward()
        module(torch.ones(2, 8))
        with summon_full_params(module, with_grads=True), torch.no_grad():
            module.weight.fill_(3)
            module.weight.grad.fill_(7)
        shown, sharded = module.weight, group_of(module).params[0].sharded
        assert isinstance(shown, DTensor) == (reshard is not False)
        for tensor, value in ((shown, 3), (sharded, 3), (sharded.grad, 7)):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            assert local.numel() and bool((local == value).all()), (reshard, value, local)
        if reshard == 2:
            pieces = shown.to_local().untyped_storage()
            module.reshard()
            assert pieces.size() == 0


def test_pieces_of_shards_that_changed_are_not_gathered_ahead(mesh: DeviceMesh) -> None:
    """The forward would have to gather once more, from the shards."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shard_each(module, fsdp2, mesh=mesh, reshard_after_forward=2)
    for _ in range(2):
        module(torch.ones(2, 8))
    with torch.no_grad():
        for unit in module:
            for param in group_of(unit).params:
                param.sharded.mul_(0.5)
    gathered = [name for event, name in events(lambda: module(torch.ones(2, 8))) if event == "unshard"]
    assert sorted(gathered) == ["0", "1"]


def test_a_grouped_call_is_through_when_all_its_members_are(mesh: DeviceMesh) -> None:
    """The inputs of the second are the outputs of the first, whose backward still needs the parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard([*model], mesh=mesh)
    fully_shard(model, mesh=mesh)
    seen = [event for event, _ in events(model(torch.ones(2, 4, requires_grad=True)).sum().backward)]
    assert seen.count("post_backward") == 1 and model[0].weight.grad is not None


class Given:
    """An argument of a class of its own."""


def test_a_grouped_call_without_one_of_its_members_keeps_no_arguments(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].forward = lambda x, given: x
    fully_shard([*model], mesh=mesh)
    fully_shard(model, mesh=mesh)
    given = Given()
    model.forward = lambda given: model[0](torch.ones(2, 4), given)
    with torch.no_grad():
        model(given)
    reference = weakref.ref(given)
    del given
    assert reference() is None


def test_pieces_are_cut_from_what_was_gathered_last(mesh: DeviceMesh) -> None:
    """Also where that has other memory than before, because the model was cast."""
    with torch.no_grad():
        module = fully_shard(nn.Linear(8, 8), mesh=mesh, reshard_after_forward=2)
        module.register_forward_pre_hook(lambda layer, args: layer.weight.data.fill_(3))
        for dtype in (torch.float32, torch.float64):
            module.reshard()
            module.to(dtype)
            with torch.enable_grad():
                module(torch.ones(2, 8, dtype=dtype))
            piece = module.weight.to_local()
            assert piece.dtype == dtype and bool((piece == 3).all())


def test_a_forward_out_of_order_gathers_nothing(mesh: DeviceMesh) -> None:
    module = fully_shard(nn.Linear(4, 4), mesh=mesh)
    group_of(module).phases.phase = Phase.BACKWARD
    with pytest.raises(RuntimeError, match="pre_forward out of order"):
        launch = lambda collective, start, **options: start() or True
        run: Any = SimpleNamespace(launch=launch, is_running=True, in_backward=False, is_compared=True)
        group_of(module).pre_forward(run, first=True)
    assert state_of(module)[0] is Level.SHARDS


def test_full_parameters_that_a_forward_has_made_anew_were_not_written_to(mesh: DeviceMesh) -> None:
    """The ones before were, between two forwards."""
    module = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh)
    module.unshard()
    with torch.no_grad():
        module.weight.add_(1)

    def cast(layer: Any, args: object) -> None:
        layer.reshard()
        layer.double()
        layer.unshard()

    module.register_forward_pre_hook(cast)
    with pytest.warns(UserWarning, match="weight: values were written"):
        assert module(torch.ones(2, 4, dtype=torch.float64)).dtype is torch.float64


def test_a_gather_that_is_left_for_later_takes_no_memory(mesh: DeviceMesh) -> None:
    module = fully_shard(nn.Linear(4, 4), mesh=mesh)
    group_of(module).unshard(False, lambda step, start, optional: False, optional=True)
    assert state_of(module)[0] is Level.SHARDS and full_bytes(module) == 0


# Without a dtype to reduce in, torch from 2.15 on reduces in the parameter's.
@pytest.mark.parametrize(("reduce", "expected"), [(None, 4 if torch_since("2.15") else 2), (torch.float32, 4)])
def test_gradients_in_flight_are_counted_as_they_are_summed(
    mesh: DeviceMesh, reduce: torch.dtype | None, expected: int
) -> None:
    """So many bytes may be held, which is what the user's limit and the forecast are about."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    module = fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=policy)
    module(torch.ones(2, 4)).sum().backward()
    assert group_of(module).store.reduce_bytes == 20 * expected


def test_a_chosen_gradient_dtype_widens_the_sums_of_weights_of_its_own_dtype_alone(mesh: DeviceMesh) -> None:
    module = nn.Linear(4, 4).to(torch.bfloat16)
    module.bias = nn.Parameter(module.bias.detach().float())
    fully_shard(module, mesh=mesh)
    module.bias.grad_dtype = torch.float64
    module.unshard()
    group = group_of(module)
    reduced = {group.params[i].name: dtypes.reduce for i, dtypes in group.gradients._current_plan().dtypes.items()}
    assert reduced == {"weight": torch.bfloat16, "bias": torch.float64}


def test_what_was_gathered_for_other_ranks_is_waited_for_before_it_is_kept(mesh: DeviceMesh) -> None:
    module = fully_shard(nn.Linear(4, 4), mesh=mesh)
    group_of(module).unshard()
    group_of(module).release(False)
    assert state_of(module)[0] is Level.FULL


def test_pieces_are_freed_when_what_they_are_of_is_gathered(mesh: DeviceMesh) -> None:
    module = fully_shard(nn.Linear(8, 8), mesh=mesh, reshard_after_forward=2)
    module(torch.ones(2, 8))
    pieces = module.weight.to_local().untyped_storage()
    assert pieces.size() > 0
    module.unshard()
    assert pieces.size() == 0 and full_bytes(module) > 0


@pytest.mark.parametrize("trainable", [True, False])
def test_what_becomes_trainable_while_summoned_has_gradients_from_then_on(mesh: DeviceMesh, trainable: bool) -> None:
    """Chunks of gradients were planned without it, or with it."""
    module = fully_shard(nn.Linear(4, 4), mesh=mesh)
    module.weight.requires_grad_(not trainable)
    module(torch.ones(2, 4)).sum().backward()
    module.weight.grad = None
    with summon_full_params(module):
        module.weight.requires_grad_(trainable)
    module(torch.ones(2, 4)).sum().backward()
    assert (module.weight.grad is not None) == trainable and module.bias.grad is not None


def test_the_text_of_a_group_says_what_it_is_and_where(mesh: DeviceMesh) -> None:
    module = fully_shard(nn.Linear(4, 4), mesh=mesh)
    text = repr(group_of(module))
    assert text.startswith("FSDPParamGroup(root: shards in memory, shows shards, idle, 2 parameters, ")
    assert text.endswith("4 ranks)")


# ---- defects there were ----


def test_a_gather_that_failed_is_recovered_from(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout, or an extension's fsdp_post_all_gather that raises."""

    def fail(*args: Any) -> None:
        raise ConnectionError("timed out")

    module = fully_shard(nn.Linear(4, 4), mesh=mesh)
    with monkeypatch.context() as patched:
        patched.setattr(residencies, "finish_gather", fail)
        with pytest.raises(ConnectionError):
            module(torch.ones(2, 4))
    module.reset_iter_state()
    assert state_of(module) == (Level.SHARDS, Phase.IDLE)


class Detaching(nn.Module):
    """Reads its weight in backward after the weight's own gradient is finished."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scaled twice, the first time by a constant."""
        return (x @ self.weight.detach()) @ self.weight


def test_gradients_are_counted_only_while_no_input_needs_one(mesh: DeviceMesh) -> None:
    """When they were counted although an input needed a gradient, weights that backward still read were freed."""
    module = fully_shard(Detaching(), mesh=mesh)
    module(torch.ones(2, 4)).sum().backward()
    x = torch.ones(2, 4, requires_grad=True)
    module(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 4), 4.0))
