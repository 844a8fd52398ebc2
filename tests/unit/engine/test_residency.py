"""Residency and phase: what may follow what, what stays in memory beyond a pass, and what the modules show."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import fully_shard, summon_full_params
from fsdp2.engine.phase import Phase, PhaseTracker
from fsdp2.engine.residency import Level, Residency
from tests.support.counting import gathers
from tests.support.nccl import too_with_nccl
from tests.support.parity import shard_each
from tests.unit.engine.test_group import full_bytes, group_of

pytestmark = too_with_nccl
ONES = torch.ones(2, 8)


def residency(module: nn.Module) -> Residency:
    """Return where the parameters of a unit are."""
    return group_of(module).residency


def test_the_levels_in_turn(mesh: DeviceMesh) -> None:
    module = fully_shard(nn.Linear(8, 8), mesh=mesh, reshard_after_forward=2)
    states, needs = [residency(module).level], [residency(module).needs_gather]
    for move in (
        lambda: group_of(module).unshard(),
        lambda: residency(module).ready(),
        lambda: residency(module).lower(Level.PIECES, ranks=2),
        lambda: group_of(module).unshard(),
        lambda: residency(module).free(),
        lambda: residency(module).free(),
    ):
        move()
        states.append(residency(module).level)
        needs.append(residency(module).needs_gather)
    assert needs == [state in (Level.SHARDS, Level.PIECES) for state in states]
    assert states == [
        Level.SHARDS,
        Level.GATHERING,
        Level.FULL,
        Level.PIECES,
        Level.GATHERING,
        Level.SHARDS,
        Level.SHARDS,
    ]
    assert full_bytes(module) == 0 and isinstance(module.weight, DTensor)


def test_a_move_that_is_not_allowed_changes_nothing(mesh: DeviceMesh) -> None:
    module = fully_shard(nn.Linear(8, 8), mesh=mesh)
    with pytest.raises(RuntimeError, match="got a move from SHARDS to FULL, expected one of: GATHERING"):
        residency(module)._move(Level.FULL)
    assert residency(module).level is Level.SHARDS


def test_a_phase_that_is_out_of_order_changes_nothing() -> None:
    phases = PhaseTracker("layers.0")
    with pytest.raises(RuntimeError, match=r"^layers\.0: end_backward out of order; the group is forward, expected"):
        phases.enter("pre_forward")
        phases.enter("end_backward")
    assert phases.in_forward
    for step in ("post_forward", "pre_backward", "post_backward", "end_backward"):
        phases.enter(step)
    assert phases.phase is Phase.IDLE


@pytest.mark.parametrize("reshard", [None, True, False, 2])
def test_an_evaluation_leaves_nothing_in_memory(mesh: DeviceMesh, reshard: bool | int | None) -> None:
    """The root stayed full after an evaluation, and with ``reshard_after_forward=False`` the whole model: averages of
    weights, clipping and ``.grad`` between an evaluation and a step needed a recipe each."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for unit in (module[0], module):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            module(ONES)
        assert [residency(unit).level for unit in (module[0], module)] == [Level.SHARDS, Level.SHARDS]
        assert all(isinstance(param, DTensor) for param in module.parameters())
    module(ONES).sum().backward()
    assert all(isinstance(param.grad, DTensor) for param in module.parameters())


def test_a_prefetch_by_hand_inside_an_evaluation_is_freed_with_the_rest(mesh: DeviceMesh) -> None:
    """``unshard(async_op=True)`` on the next block is how torch's users overlap by hand."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shard_each(module, fsdp2, mesh=mesh, reshard_after_forward=False)
    module[0].register_forward_pre_hook(lambda *unused: module[1].unshard(async_op=True) and None)
    with torch.no_grad():
        module(ONES)
    assert not any(map(full_bytes, module))


def test_an_evaluation_between_forward_and_backward_leaves_what_backward_needs(mesh: DeviceMesh) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for unit in (module[0], module):
        fully_shard(unit, mesh=mesh, reshard_after_forward=False)
    loss = module(ONES).sum()

    def evaluate() -> None:
        with torch.no_grad():
            module(ONES)

    assert gathers(evaluate) == 0
    assert gathers(loss.backward) == 0
    assert not full_bytes(module) and not full_bytes(module[0])


@pytest.mark.parametrize("change", ["in place", "local", "optimizer", "load"])
def test_what_is_held_is_gathered_anew_when_the_shards_changed(mesh: DeviceMesh, change: str) -> None:
    module = fully_shard(nn.Linear(8, 8), mesh=mesh)
    module.unshard()
    shards = [param.sharded for param in group_of(module).params]
    assert gathers(lambda: module(ONES).sum().backward()) == 0  # as unsharded before the forward
    module.unshard()
    with torch.no_grad():
        if change == "in place":
            shards[0].mul_(0.5)
        elif change == "local":
            shards[0].to_local().mul_(0.5)
        elif change == "optimizer":
            torch.optim.SGD(shards, lr=0.1).step()
        else:
            module.load_state_dict(module.state_dict())
        assert gathers(lambda: module(ONES)) == 1


def test_a_state_dict_shows_shards_and_keeps_what_is_in_memory(mesh: DeviceMesh) -> None:
    """Perhaps one rank alone makes it, to print its length: the next forward must gather on all ranks or on none."""
    module = fully_shard(nn.Linear(8, 8), mesh=mesh)
    module.unshard()
    assert all(isinstance(value, DTensor) for value in module.state_dict().values())
    assert isinstance(module.weight, DTensor) and full_bytes(module)  # optimizers and DCP look for shards
    with torch.no_grad():
        assert gathers(lambda: module(ONES)) == 0
    assert not isinstance(module.weight, DTensor)


def test_data_assigned_to_a_full_parameter_does_not_outlive_it(mesh: DeviceMesh) -> None:
    """``p.data = x`` gave a full parameter other memory, which no gather wrote to any more."""
    module = fully_shard(nn.Linear(8, 8), mesh=mesh)
    module.unshard()
    module.weight.data = torch.zeros(8, 8)
    module.reshard()
    module.unshard()
    full = group_of(module).params[0].full
    assert (
        full is module.weight
        and full.untyped_storage().data_ptr() == residency(module).store._full_buffer.bytes.data_ptr()
    )


def test_an_interrupt_while_a_summoning_ends_can_be_recovered_from(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group stayed summoned: ``reset_iter_state`` told the user to leave a block that was left."""
    module = fully_shard(nn.Linear(8, 8), mesh=mesh)
    with monkeypatch.context() as patched:
        patched.setattr(Residency, "dismiss", lambda *unused: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), summon_full_params(module):
            with pytest.raises(RuntimeError, match="Leave it first"):
                module.reset_iter_state()
    module.reset_iter_state()
    module(ONES).sum().backward()
    assert isinstance(module.weight.grad, DTensor)


def test_the_unit_that_forward_ends_with_stays_for_backward(mesh: DeviceMesh) -> None:
    """From the second iteration on: freed and gathered again at once, its gather waited for the forward to end."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    for unit in (module[0], module[1], module):
        fully_shard(unit, mesh=mesh)
    for step, expected in enumerate((3 + 2, 3 + 1, 3 + 1)):
        assert gathers(lambda: module(ONES).sum().backward()) == expected, step
    module(ONES)  # no backward comes
    assert full_bytes(module[1]) and not full_bytes(module[0])
    with torch.no_grad():
        assert gathers(lambda: module(ONES)) == 1
    module.reshard(recurse=True)
    assert not full_bytes(module[1])


class Again(nn.Module):
    """Calls its first unit, without a backward, before it calls both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(x).detach())
        return self.first(hidden)


def test_what_backward_gathered_ahead_in_vain_is_freed_with_its_end(mesh: DeviceMesh) -> None:
    """The unit was used twice, and backward came to one of its calls only: it was freed, and gathered once more."""
    module = Again()
    shard_each(module, fsdp2, mesh=mesh, reshard_after_forward=True)
    module.second.set_modules_to_backward_prefetch([module.first])
    assert gathers(module(ONES).sum().backward) == 3
    assert residency(module.first).level is Level.SHARDS


def test_what_a_forward_broke_off_is_not_held(mesh: DeviceMesh) -> None:
    """Other ranks came less far in it, and hold other units: the next forward gathers all on all of them."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shard_each(module, fsdp2, mesh=mesh, reshard_after_forward=False)
    handle = module[1].register_forward_pre_hook(lambda layer, args: args[0].view(3, 3) and None)
    with pytest.raises(RuntimeError, match="invalid for input"):
        module(ONES)
    handle.remove()
    assert gathers(lambda: module(ONES)) == 2
