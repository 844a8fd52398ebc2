"""Passes that end early, and what comes between them, on a mesh whose collectives move nothing."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import fully_shard
from fsdp2.comm.gather import Gathering, start_gather
from fsdp2.engine import portions
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.passes import Pass
from fsdp2.engine.root import RootContext
from fsdp2.engine.unit import FSDPState
from tests.support.fake import fake_mesh
from tests.support.parity import shard_each
from tests.support.streams import Device


def test_recovery_ends_what_the_backward_left_on_its_own_stream() -> None:
    """The next work on the stream that the backward ran on takes the memory of gradients that were being reduced."""
    with Device() as device:
        unit = SimpleNamespace(name="", groups=[], reconcile=lambda: None)
        root: RootContext[Any] = RootContext(torch.device("cpu"), unit)
        lanes, reductions, stream = root.comm.lanes, root.comm.reductions, device.Stream()
        with device.stream(stream):
            lanes.compute.enter_backward()
            gradients = torch.ones(3)
            with lanes.reduce.after(lanes.compute) as done:
                gradients.add(1)
            reductions.memory.retain_inputs(done.event, [gradients], gradients.nbytes)
            reductions.memory.use(lanes.reduce)
        del gradients
        root.reset()
        with device.stream(stream):
            torch.ones(3)
    assert not device.mistakes


def test_recovery_forgets_a_reduction_under_way(mesh: DeviceMesh) -> None:
    """Nobody will wait for it any more, and the next iteration does not ask for that."""
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    model.set_manual_backward_finalization(True)
    for recovers in (True, False):
        model(torch.ones(2, 4)).sum().backward()
        model.finalize_backward(async_op=recovers)
        if recovers:
            model.reset_iter_state()
    assert model.weight.grad is not None


class Trying(nn.Module):
    """Calls its unit with too few columns, and then, where that raises, with all."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.unit(x[:, :3])
        except RuntimeError:
            return self.unit(x)


def test_recovery_forgets_what_backward_wanted_to_gather(mesh: DeviceMesh) -> None:
    """A gather was postponed until the gradients of the unit before, in a backward that raised. The next backward may
    begin with a gradient that is used outside of the model, and started it in a pass that was over."""
    module = fully_shard(nn.Linear(4, 4), mesh=mesh)
    module(torch.ones(1, 4)).sum().backward()
    comm, started = module._get_fsdp_state().root.comm, []
    comm.postpone_gather(None, lambda: started.append("gather"))
    module.reset_iter_state()
    comm.start_postponed()
    assert not started


def test_a_unit_that_raised_may_be_called_again_in_the_same_forward(mesh: DeviceMesh) -> None:
    """The second call is one like any other: backward gathers for it, and its gradients are reduced."""
    model = Trying()
    shard_each(model, fsdp2, mesh=mesh, reshard_after_forward=True)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        assert model.unit.weight.grad is not None
        model.zero_grad()


class Interrupted(nn.Linear):
    """A layer in which the user hits ctrl-C at the first batch."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 3:
            raise KeyboardInterrupt
        return super().forward(x)


def test_a_forward_that_was_interrupted_is_forgotten_with_the_next(mesh: DeviceMesh) -> None:
    """No hook tells of it. What it kept for its backward must not be held by the calls that it did not end."""
    model = fully_shard(Interrupted(4, 4), mesh=mesh)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(3, 4))
    aborted = weakref.ref(model._get_fsdp_state().root.forward)
    model(torch.ones(2, 4)).sum().backward()
    gc.collect()
    assert aborted() is None


@pytest.mark.parametrize("leaves", [False, True])
def test_ranks_are_compared_before_reductions_are_waited_for(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """Ranks that have launched different reductions would wait for each other, and none would say that they differ.

    This holds for a backward, and where backwards leave gradients, for the synchronization that reduces them.
    """
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    loss = model(torch.ones(2, 4)).sum()
    if leaves:
        model.set_requires_gradient_sync(False)
        loss.backward()
    root, seen = model._get_fsdp_state().root, mock.Mock()
    seen.finish.side_effect = root.comm.reductions.finish
    monkeypatch.setattr(root, "observer", seen.observer)
    monkeypatch.setattr(root.comm.reductions, "finish", seen.finish)
    if leaves:
        model.synchronize_gradients()
    else:
        loss.backward()
    calls = [call[0] for call in seen.method_calls]
    assert calls[: calls.index("finish")][-2:] == ["observer.before", "observer.end"]
    assert model.weight.grad is not None


def test_a_first_forward_that_was_interrupted_prepares_all_units_again(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The units behind the one where the interrupt came have not taken in what happened to their parameters."""
    prepared: list[FSDPState] = []

    def prepare(unit: FSDPState) -> None:
        prepared.append(unit)
        if len(prepared) == 1:
            raise KeyboardInterrupt
        original(unit)

    original = FSDPState._prepare
    monkeypatch.setattr(FSDPState, "_prepare", prepare)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    units = [fully_shard(module, mesh=mesh)._get_fsdp_state() for module in (*model, model)]
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 4))
    model(torch.ones(2, 4))
    assert set(prepared[1:]) == set(units)


def test_what_is_not_sharded_does_not_change_what_ranks_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one rank has all of a unit, nothing is gathered, whether it stays in memory for backward or not. So from
    the second iteration on, when it does, the backward is the same to other ranks."""
    observer = mock.Mock()
    with fake_mesh(2, 1, names=("replicate", "shard")) as mesh:
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=mesh)), mesh=mesh)
        model(torch.ones(2, 4)).sum().backward()
        monkeypatch.setattr(model._get_fsdp_state().root, "observer", observer)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    kinds = [call.args[0] for call in observer.begin.call_args_list if call.args[0].name == "backward"]
    assert [kind.stayed for kind in kinds] == [(), ()]


def test_the_host_waits_for_portions_that_no_unit_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are gathered for all units as a forward begins. The host may write to shards as soon as it has ended, and
    collectives that the host itself waits for would still be sending them."""
    works: list[mock.Mock] = []

    def start(*args: Any, **kwargs: Any) -> Gathering:
        gathering = start_gather(*args, **kwargs)
        gathering.works = (mock.Mock(),)
        works.extend(gathering.works)
        return gathering

    monkeypatch.setattr(portions, "start_gather", start)
    with fake_mesh(2, 2, names=("replicate", "shard")) as mesh:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        shard_each(model, fsdp2, mesh=mesh, shard_over_replicas=True)
        model.forward = lambda x: model[0](x)  # does without the second
        with torch.no_grad():
            model(torch.ones(2, 4))
    assert [work.wait.call_count for work in works] == [1, 1]


@pytest.mark.parametrize("asked", [False, True])
def test_backward_gathers_ahead_from_the_last_group_on(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """The groups of a unit are asked for in reverse, whether by the caller's list or by the order of the forward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, mesh=mesh, replicated_params={layer.weight})
    fully_shard(model, mesh=mesh)
    if asked:
        model[1].set_modules_to_backward_prefetch([model[0]])
    loss = model(torch.ones(2, 4, requires_grad=True)).sum()
    ahead: list[Any] = []
    monkeypatch.setattr(Pass, "prefetch", lambda run, group: ahead.append(group))
    loss.backward()
    first, second = model[0]._get_fsdp_state().groups
    assert ahead[:2] == [second, first]


class Opaque(nn.Module):
    """Returns an object that nobody can look into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        hidden = self.linear(x).sum()
        return hidden.backward


def test_a_backward_that_is_heard_of_at_its_inputs_alone_ends(mesh: DeviceMesh) -> None:
    """Nothing told that it enters the unit, which keeps its parameters; the next iteration is one like any other."""
    model = fully_shard(Opaque(), mesh=mesh)
    for _ in range(2):
        model(torch.ones(2, 4, requires_grad=True))()
        assert model.linear.weight.grad is not None and model._get_fsdp_state().root.running is None
        model.zero_grad()


@pytest.mark.parametrize("recurse", [True, False])
@pytest.mark.parametrize("buffers", [2, 7])
def test_as_many_chunks_are_in_flight_as_were_asked_for(mesh: DeviceMesh, buffers: int, recurse: bool) -> None:
    """By all units of the root: here it has no parameters of its own, so without ``recurse`` nothing is asked for."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shard_each(model, fsdp2, mesh=mesh)
    limits = []
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        limits.append(model._get_fsdp_state().root.comm.reductions.limit)
        model.set_reduce_scatter_max_input_buffers(buffers, recurse=recurse)
    model(torch.ones(2, 4)).sum().backward()
    assert model._get_fsdp_state().root.comm.reductions.limit == (buffers if recurse else limits[0])


@pytest.mark.parametrize("trained", [False, True])
def test_limits_of_communication_follow_added_parameters(mesh: DeviceMesh, trained: bool) -> None:
    """As many bytes may be in flight as the largest unit has. A larger one that came later was not counted."""
    module, whole = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 64))
    limits = []
    for model in (module, whole):
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        if model is module:
            if trained:
                model(torch.ones(2, 8)).sum().backward()
            model.append(nn.Linear(8, 64))
        model(torch.ones(2, 8)).sum().backward()
        comm = model._get_fsdp_state().root.comm
        limits.append((comm.largest_bytes, comm.reductions.limit, comm.reductions.memory.limit_bytes))
    assert limits[0] == limits[1]


def test_roots_that_share_their_communication(mesh: DeviceMesh) -> None:
    """The same lanes, and one window of chunks in flight; the larger root's limit holds for both."""
    layers: list[Any] = [fully_shard(nn.Linear(4, width), mesh=mesh) for width in (4, 8, 16)]
    fsdp2.share_comm_ctx([layers[0], layers[2]])
    fsdp2.share_comm_ctx([])
    for layer in layers:
        layer(torch.ones(1, 4)).sum().backward()
    first, second, third = (layer._get_fsdp_state().root.comm for layer in layers)
    assert first is third is not second
    assert [comm.largest_bytes for comm in (first, second)] == [4 * 16 * 5, 4 * 8 * 5]


class Held(list[Any]):
    """An argument that somebody may hold."""


class Failing(nn.Linear):
    """Raises when it is recomputed."""

    def forward(self, x: Tensor, held: Held) -> Tensor:  # type: ignore[override]
        held.append(x)
        if len(held) > 1:
            raise ValueError("recomputed")
        return super().forward(x)


def test_recovery_forgets_the_calls_of_a_backward_that_raised(mesh: DeviceMesh) -> None:
    """A call that was recomputed held its arguments, and all that was computed of them, until the unit's next one."""
    unit = fully_shard(Failing(4, 4), mesh=mesh)
    model = fully_shard(nn.Sequential(unit), mesh=mesh)
    model.forward = lambda x, held: checkpoint(unit, x, held, use_reentrant=False).sum()
    held = Held()
    watched = weakref.ref(held)
    loss = model(torch.ones(2, 4), held)
    with pytest.raises(ValueError, match="recomputed"):
        loss.backward()
    model.reset_iter_state()
    del held, loss
    gc.collect()
    assert watched() is None


def test_recovery_ends_the_passes_even_if_it_raises(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a group waits for may fail once more. The next recovery found the passes that this one had to drop."""
    model = fully_shard(Opaque(), mesh=mesh)
    model(torch.ones(2, 4))
    root = model._get_fsdp_state().root
    backward = root.enter_backward()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="again"):
        patch.setattr(FSDPParamGroup, "reset", mock.Mock(side_effect=RuntimeError("again")))
        model.reset_iter_state()
    assert root.running is None and not backward.is_running


def test_weights_are_freed_if_the_wait_for_them_is_interrupted(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stayed in memory for ever, as if the caller had asked for them."""
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    with monkeypatch.context() as patch, torch.no_grad(), pytest.raises(KeyboardInterrupt):
        patch.setattr(FSDPParamGroup, "wait_for_unshard", mock.Mock(side_effect=KeyboardInterrupt))
        with fsdp2.use_weights(model):
            pass
    assert not any(group.residency.in_memory for group in model._get_fsdp_state().groups)


def test_a_deferred_backward_does_not_take_the_gradients_of_the_next(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With backwards that the caller ends, a unit waits for that end. The next backward may begin with a gradient, and
    that was taken for one of the backward before, so that nobody noticed it."""

    class SometimesOpaque(Opaque):
        def __init__(self) -> None:
            super().__init__()
            self.below = fully_shard(nn.Linear(4, 4), mesh=mesh)  # so backward is done with the root when it ends

        def forward(self, x: Tensor, opaque: bool) -> Any:  # type: ignore[override]
            hidden = self.below(self.linear(x)).sum()
            return hidden.backward if opaque else hidden

    model = fully_shard(SometimesOpaque(), mesh=mesh)
    model.set_manual_backward_finalization(True)
    model.set_reshard_after_backward(False)
    model(torch.ones(2, 4), False).backward()
    group = model._get_fsdp_state().groups[0]
    full = group.params[0].full
    assert full is not None
    started: list[object] = []
    start = RootContext.start_backward
    monkeypatch.setattr(RootContext, "start_backward", lambda root: started.append(root) or start(root))
    full.sum().backward()
    assert started
    model.finalize_backward()
    model.reshard()
    assert model.linear.weight.grad is not None


def test_portions_of_an_evaluation_are_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a method switches gradients off by itself, so that they are on again when it ends: no version counter
    shows a write to a local tensor on ranks without elements."""

    class Generating(nn.Linear):
        @torch.no_grad()
        def generate(self, x: Tensor) -> Tensor:
            return self(self(x))

    with fake_mesh(2, 2, names=("replicate", "shard")) as mesh:
        model: Any = fully_shard(Generating(4, 4), mesh=mesh, shard_over_replicas=True)
        fsdp2.register_fsdp_forward_method(model, "generate")
        for _ in range(2):
            model.generate(torch.ones(2, 4))
            group = model._get_fsdp_state().groups[0]
            assert group.residency.portions_outdated


def test_portions_whose_gather_did_not_start_are_gathered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have written a part of them, so the backward of an earlier forward must not compute with what is there."""
    started: list[bool] = []

    def start(*args: Any, **kwargs: Any) -> Gathering:
        started.append(raises)
        if raises:
            raise MemoryError("no memory")
        return start_gather(*args, **kwargs)

    monkeypatch.setattr(portions, "start_gather", start)
    with fake_mesh(2, 2, names=("replicate", "shard")) as mesh:
        raises, options = False, {"shard_over_replicas": True, "reshard_after_forward": True}
        model = fully_shard(nn.Linear(4, 4), mesh=mesh, **options)
        loss = model(torch.ones(2, 4, requires_grad=True)).sum()
        with torch.no_grad():
            model.weight.mul_(2)  # the next forward gathers again
        raises = True
        with pytest.raises(MemoryError):
            model(torch.ones(2, 4))
        raises = False
        loss.backward()
    assert started == [False, True, False]
