"""Backwards that end when ``finalize_backward`` says so, and memory that full parameters keep.

torch's has all of it since 2.15; ours has the methods on every torch.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp2
from tests.support import api
from tests.support.counting import Collectives, in_memory
from tests.support.parity import (
    Run,
    assert_gradients,
    assert_parity,
    beside_one_process,
    fulls,
    mesh_1d,
    on_one_axis,
    on_two_axes,
    setting,
    sharded,
    stack,
)
from tests.support.pool import on_ranks

AGAINST = api.against("2.15")


def manual(run: Run, *, async_op: bool = False, batches: int = 1) -> None:
    """Train with backwards that the program ends, of which all reduce, or none where there are several."""
    run.configure(lambda module, fsdp: module.set_manual_backward_finalization(True))
    for step in range(3):
        run.configure(lambda module, fsdp: module.set_requires_gradient_sync(batches == 1))
        run.configure(lambda module, fsdp: module.set_reshard_after_backward(batches == 1))
        for part in range(batches):
            run.backward(step * batches + part)
        run.configure(lambda module, fsdp: module.set_requires_gradient_sync(True))
        run.configure(lambda module, fsdp: module.set_reshard_after_backward(True))
        if run.fsdp is not None:
            handle = run.module.finalize_backward(async_op=async_op)
            assert isinstance(handle, fsdp2.GradientReductionHandle if async_op else type(None))
            if handle is not None:
                handle.wait()
                handle.wait()
        run.update()


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("prepare", [on_one_axis, on_two_axes])
@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("async_op", [False, True])
def test_finalize_backward(rank, world, prepare, batches, async_op):
    """Gradients are those of backwards that end by themselves, whether one call ends one or several."""
    prepare = on_one_axis if world == 1 else prepare
    assert_parity(prepare, program=lambda run: manual(run, async_op=async_op, batches=batches), against=AGAINST)


@api.fsdp2_only
@on_ranks(2)
def test_what_autograd_leaves_waits(rank, world):
    """What backwards kept unreduced is reduced by the call, and not before."""
    module, alone = beside_one_process(partial(stack, layers=2))
    module.set_manual_backward_finalization(True)
    module.set_requires_gradient_sync(False)
    with Collectives() as seen:
        module(torch.ones(2, 8)).square().mean().backward()
    assert not seen.reductions
    module.reshard(recurse=True)
    assert all(p.grad is None for p in module.parameters())
    module.set_requires_gradient_sync(True)
    with Collectives() as seen:
        module.finalize_backward()
    assert seen.reductions == 2
    alone(torch.ones(2, 8)).square().mean().backward()
    assert_gradients(module, alone)
    module.finalize_backward()  # nothing is left


def backward(module: nn.Module) -> None:
    """Run forward and backward on the same rows everywhere."""
    module(torch.ones(2, 8)).square().mean().backward()


@api.fsdp2_only
@on_ranks(2)
def test_calls_that_make_no_sense(rank, world):
    """Each is refused with what to do; before the first forward there is nothing to end."""
    module = sharded()
    module.finalize_backward()
    module.finalize_backward(async_op=True).wait()
    module.set_manual_backward_finalization(True)
    backward(module)
    for call in (lambda: module[0].set_manual_backward_finalization(True), module[0].finalize_backward):
        with pytest.raises(RuntimeError, match="must be called on the root"):
            call()
    handle = module.finalize_backward(async_op=True)
    with pytest.raises(RuntimeError, match="waited on before finalizing"):
        module.finalize_backward()
    handle.wait()
    module.set_manual_backward_finalization(False)
    backward(module)  # ends by itself again
    with pytest.raises(TypeError, match="enabled must be a bool"):
        module.set_manual_backward_finalization(1)


@api.fsdp2_only
@on_ranks(1, 2)
def test_a_call_inside_a_forward(rank, world):
    """It would free what that forward computes with. It was noticed at the end only, when gradients had left, and the
    iteration had to begin anew."""
    module, alone = beside_one_process(partial(stack, layers=2))
    module.set_manual_backward_finalization(True)
    backward(module)
    handle = module[0].register_forward_pre_hook(lambda *unused: module.finalize_backward())
    with pytest.raises(RuntimeError, match="was called inside of a forward"):
        backward(module)
    handle.remove()
    backward(module)
    module.finalize_backward()
    for _ in range(2):
        backward(alone)
    assert_gradients(module, alone)


@api.fsdp2_only
@on_ranks(1, 2)
def test_a_gather_by_hand_while_reductions_are_under_way(rank, world):
    """The backward is over, so the caller's gather is no part of it, and stays until ``reshard()``."""
    module = fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh_1d())
    module.set_manual_backward_finalization(True)
    module(torch.ones(2, 4)).sum().backward()
    handle = module.finalize_backward(async_op=True)
    module.unshard()
    handle.wait()
    with torch.no_grad():
        module(torch.ones(2, 4))
    assert not isinstance(module.weight, DTensor)
    module.reshard()
    assert isinstance(module.weight, DTensor)


@on_ranks(1, 2)
@pytest.mark.parametrize("keep", [True, False])
def test_keep_unsharded_storage(rank, world, keep):
    """Full parameters come back at the same addresses, and their memory is not given back in between."""
    program = setting(lambda module, fsdp: module.set_keep_unsharded_storage(keep), "before")
    assert_parity(on_one_axis, program=program, against=AGAINST)


@api.fsdp2_only
@on_ranks(2)
def test_kept_storage_stays_where_it_is(rank, world):
    """Only of the units asked for, until it is taken back."""
    module = sharded()
    module[0].set_keep_unsharded_storage(True, recurse=False)
    module.unshard(recurse=True)
    weights = [unit.weight for unit in module]
    places = [weight.data_ptr() for weight in weights]
    module.reshard(recurse=True)
    assert [weight.untyped_storage().size() > 0 for weight in weights] == [True, False, False]
    for _ in range(2):
        backward(module)
        assert weights[0].data_ptr() == places[0]
    module.set_keep_unsharded_storage(False)
    assert [weight.untyped_storage().size() for weight in weights] == [0, 0, 0]
    backward(module)
    assert [weight.untyped_storage().size() for weight in weights] == [0, 0, 0]


@api.fsdp2_only
@on_ranks(2)
def test_recovery_of_a_root_leaves_what_another_has_in_flight(rank, world):
    """Roots that share lanes (``share_comm_ctx``): recovery of one threw away gradients that the other had sent, whose
    ``finalize_backward`` then returned without a word."""
    expected, other, failing = (nn.Linear(8, 8, bias=False) for _ in range(3))
    other.load_state_dict(expected.state_dict())
    for module in (expected, other, failing):
        fsdp2.fully_shard(module, mesh=mesh_1d())
        module.set_manual_backward_finalization(True)
        module(torch.ones(2, 8))  # roots from here on
        module.reset_iter_state()
    fsdp2.share_comm_ctx([other, failing])
    expected(torch.ones(2, 8)).sum().backward()
    expected.finalize_backward()
    other(torch.ones(2, 8)).sum().backward()
    broken = failing(torch.ones(2, 8))
    broken.register_hook(lambda grad: [][0])
    with pytest.raises(IndexError):
        broken.sum().backward()
    failing.reset_iter_state()
    other.finalize_backward()
    assert torch.equal(other.weight.grad.to_local(), expected.weight.grad.to_local())


class Trouble(Exception):
    """What a hook under test raises."""


def fail(*unused: object) -> None:
    """Be a hook of the user's that raises."""
    raise Trouble


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("where", ["backward", "finalization", "wait"])
def test_training_goes_on_after_an_exception(rank, world, where):
    """A hook raises in a backward or in ``finalize_backward``, or somebody interrupts the wait for its gradients. The
    next call said to wait for a handle that nobody had got, or went on with the gradients of half an iteration. It is
    refused with what to do."""
    module = sharded()
    module.set_manual_backward_finalization(True)
    backward(module)
    module.finalize_backward()
    expected = [p.grad.full_tensor() for p in module.parameters()]
    module.zero_grad()
    if where == "backward":
        broken = module(torch.ones(2, 8))
        broken.register_hook(fail)
        with pytest.raises(Trouble):
            broken.square().mean().backward()
    elif where == "wait":
        backward(module)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("fsdp2.comm.reductions.Reductions.finish", fail)
            with pytest.raises(Trouble):
                module.finalize_backward()
    else:
        module.set_requires_gradient_sync(False)
        backward(module)
        module.set_requires_gradient_sync(True)
        module[1].set_all_reduce_hook(fail)
        with pytest.raises(Trouble):
            module.finalize_backward()
        module[1].set_all_reduce_hook(lambda gradient: None)
    for call in (module.finalize_backward, lambda: module(torch.ones(2, 8))):
        with pytest.raises(RuntimeError, match=r"did not end .*call reset_iter_state\(\)"):
            call()
    module.reset_iter_state()
    module.zero_grad()
    backward(module)
    module.finalize_backward()
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad.full_tensor(), gradient)


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("marked", [False, True])
def test_what_ranks_may_skip_is_freed(rank, world, marked):
    """Units that some ranks skip do not stay until the next forward, whatever ``set_reshard_after_backward`` says: a
    rank that gathers one tells the others so. ``finalize_backward`` left a unit in memory that no backward had used."""
    model = sharded(reshard_after_forward=False)
    model[1].set_reduce_scatter_unused_params(marked)
    model.set_reshard_after_backward(False)
    model.set_manual_backward_finalization(True)
    model(torch.ones(2, 8))
    model.finalize_backward()
    assert in_memory(model) == (["0", "2"] if marked else ["0", "1", "2"])


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("reader", ["clip", "step", "foreach step"])
@pytest.mark.parametrize("sync", [True, False])
def test_gradients_that_wait_for_finalization(rank, world, sync, reader):
    """The backward has started every reduction but that of the first unit, or none. Until ``finalize_backward`` the
    norm was of some gradients only, and a step changed some of the parameters; every rank says so, and changes
    nothing."""
    module, alone = beside_one_process(stack)
    module.set_manual_backward_finalization(True)
    module.set_requires_gradient_sync(sync)
    before = fulls(dict(module.named_parameters()))
    for model in (module, alone):
        model(torch.ones(2, 8)).square().mean().backward()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=reader == "foreach step")
    with pytest.raises(RuntimeError, match=r"not reduced .*finalize_backward\(\)"):
        if reader == "clip":
            fsdp2.clip_grad_norm_(module.parameters(), 1.0)
        else:
            optimizer.step()
    for name, value in fulls(dict(module.named_parameters())).items():
        assert value is not None and torch.equal(value, before[name]), name
    module.set_requires_gradient_sync(True)
    module.finalize_backward()
    assert_gradients(module, alone)
    norms = [fsdp2.clip_grad_norm_(module.parameters(), 1e6), nn.utils.clip_grad_norm_(alone.parameters(), 1e6)]
    torch.testing.assert_close(*norms)
    optimizer.step()
    assert all(not torch.equal(value, before[name]) for name, value in fulls(dict(module.named_parameters())).items())


@api.fsdp2_only
@on_ranks(2)
def test_dropped_before_finalization(rank, world):
    """``zero_grad`` between the backward and its finalization drops all of its gradients, as in a single process."""
    module, alone = beside_one_process(stack)
    module.set_manual_backward_finalization(True)
    for model in (module, alone):
        model(torch.ones(2, 8)).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    module.finalize_backward()
    assert_gradients(module, alone)
