"""A forward that raised is over: the caller may handle the exception and go on, without ``reset_iter_state()``."""

from __future__ import annotations

import contextlib
import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp2
from tests.support import api
from tests.support.counting import in_memory
from tests.support.models import Layers
from tests.support.parity import WIDTH, Run, assert_parity, batch, mesh_1d, mesh_of, on_one_axis, sharded
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


class Fragile(nn.Module):
    """Layers of which one refuses a batch of three rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        if len(x) == 3:
            raise ValueError("a broken sample")
        return self.last(x) * self.scale

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """The same as a method of its own."""
        return self.forward(x)


def broken(module: Any, method: str = "forward") -> None:
    """Run a forward whose second layer is never reached."""
    call = module if method == "forward" else getattr(module, method)
    with pytest.raises(ValueError, match="a broken sample"):
        call(torch.ones(3, WIDTH))


def assert_no_forward_runs(module: Any) -> None:
    """Assert that nothing is refused as inside a forward, and that the module shows shards."""
    assert isinstance(module.scale, DTensor)
    module.synchronize_gradients()
    with fsdp2.summon_full_params(module):
        assert module.first.weight.shape == (WIDTH, WIDTH)


def skip_a_batch(method: str, run: Run) -> None:
    """Train; in each iteration a batch is broken, and what was accumulated is dropped."""
    if run.fsdp is not None and method != "forward":
        fsdp2.register_fsdp_forward_method(run.module, method)
    for step in range(3):
        run.backward(step)
        broken(run.module, method)
        run.module.zero_grad()
        run.backward(step)
        broken(run.module, method)
        run.update()


@on_ranks(1, 2)
@pytest.mark.parametrize("method", ["forward", "encode"])
@pytest.mark.parametrize("reshard", [None, False])
def test_a_batch_is_skipped(rank, world, method, reshard):
    """``zero_grad()`` skipped the units that the exception had left in forward, among them the root, whose next
    gradients were twice as large. With torch's own the gradients after a skipped batch are wrong too."""
    prepare = partial(on_one_axis, reshard_after_forward=reshard)
    assert_parity(prepare, build=Fragile, program=partial(skip_a_batch, method), against=("alone",))


@on_ranks(2)
def test_what_is_called_next_is_in_no_forward(rank, world):
    """``unshard()`` was taken for a prefetch, which the next forward frees; ``summon_full_params`` and
    ``synchronize_gradients`` said that a forward runs; and a layer called by itself joined a pass that was over."""
    module = sharded(Fragile)
    for _ in range(2):
        module(torch.ones(2, WIDTH)).sum().backward()
    broken(module)
    assert_no_forward_runs(module)
    module.first.unshard()
    with torch.no_grad():
        module(torch.ones(2, WIDTH))
    assert in_memory(module) == ["first"]
    broken(module)
    assert module.last(torch.ones(2, WIDTH)).shape == (2, WIDTH)


@on_ranks(2)
def test_a_call_that_handles_an_exception_goes_on(rank, world):
    """A module that calls itself, or a method that calls forward, may handle what the inner call raised."""

    class Careful(Fragile):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) != 4:
                return super().forward(x)
            with pytest.raises(ValueError, match="a broken sample"):
                self(x[:3])
            return super().forward(x[:2])

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(ValueError, match="a broken sample"):
                self(x[:3])
            return self(x[:2])

    def program(run: Run) -> None:
        if run.fsdp is not None:
            fsdp2.register_fsdp_forward_method(run.module, "encode")
        for step in range(3):
            for call in (run.module, run.module.encode):
                run.note_loss(call(batch(step)[0][:4]).square().mean()).backward()
            run.update()

    assert_parity(on_one_axis, build=Careful, program=program, against=("alone",))


@on_ranks(2)
def test_activations_of_a_broken_forward_are_freed(rank, world):
    """Who handles "out of memory" wants them back. The pass stayed until the next forward, with the arguments of calls
    that had not come to their end."""
    module = sharded(Fragile)
    seen: list[weakref.ref[torch.Tensor]] = []
    module.first.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    broken(module)
    assert seen.pop()() is None


@on_ranks(2)
def test_a_unit_below_the_root_that_is_called_by_itself(rank, world):
    """Only the root told of an exception, so the forward of a unit that was called directly never ended: later calls of
    other units joined it, what they recorded grew, and the unit stayed in memory."""
    module = Fragile()
    model = nn.Sequential(module)
    for unit in (module.first, module.last, module, model):
        fsdp2.fully_shard(unit, mesh=mesh_1d())
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()
    broken(module)
    module.last(torch.ones(2, WIDTH)).sum().backward()
    assert not in_memory(module)


@on_ranks(2)
def test_a_call_that_is_tried_again_keeps_nothing(rank, world):
    """A caller handles what a unit raises, and calls it again: the first call's arguments, a cache and all activations
    in it, stayed until the unit's next forward."""

    class Cache(list[torch.Tensor]):
        pass

    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            cache.append(self.inner(x))
            if len(cache) == 1:
                raise ValueError("once more")
            return cache[-1]

    class Patient(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.picky = Picky()

        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            with pytest.raises(ValueError, match="once more"):
                self.picky(x, cache)
            return self.picky(x, cache)

    module = sharded(Patient)
    cache = Cache()
    kept = weakref.ref(cache)
    module(torch.ones(2, WIDTH), cache).sum().backward()
    del cache
    gc.collect()
    assert kept() is None


@on_ranks(2)
@pytest.mark.parametrize("goes_on", ["by a forward without the unit", "by reset_iter_state"])
def test_a_model_that_was_interrupted_is_freed(rank, world, goes_on):
    """An interrupt leaves the arguments of calls behind, whose graph refers to the units. Units that no later forward
    used kept theirs, and through the graph, which Python's garbage collector cannot look into, the whole model."""

    def interrupt(*unused: object) -> None:
        raise KeyboardInterrupt

    module = sharded(Layers)
    handle = module[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        module(torch.ones(2, 8))
    handle.remove()
    if goes_on == "by reset_iter_state":
        module.reset_iter_state()
    else:
        module(torch.ones(2, 8), used=(0, 2)).sum().backward()
    kept = weakref.ref(module)
    del module, handle
    gc.collect()
    assert kept() is None


@on_ranks(2)
def test_a_recovery_that_is_refused_changes_nothing(rank, world):
    """``reset_iter_state`` inside ``summon_full_params`` dropped gradients of the groups before the summoned one."""
    module = sharded(Fragile)
    module(torch.ones(2, WIDTH)).sum().backward()
    with fsdp2.summon_full_params(module.last), pytest.raises(RuntimeError, match="reset_iter_state while summon_full"):
        module.reset_iter_state()
    assert all(parameter.grad is not None for parameter in module.parameters())


@on_ranks(2)
def test_a_hook_that_raises_after_the_module_has_computed(rank, world):
    """A forward hook of the user (a check of the output, say) raised. The forward was not taken to be over, because
    the module had an output: until the next forward, ``synchronize_gradients`` and others said that one runs."""
    module = Fragile()
    refused = [False]

    def check(inner: nn.Module, args: Any, output: torch.Tensor) -> None:
        if refused[0]:
            raise ValueError("a broken sample")

    module.register_forward_hook(check)
    on_one_axis(module, api.ours)
    for refused[0] in (False, True):
        with pytest.raises(ValueError, match="a broken sample") if refused[0] else contextlib.nullcontext():
            module(torch.ones(2, WIDTH)).sum().backward()
    assert_no_forward_runs(module)


@on_ranks(2)
@pytest.mark.parametrize("method", ["forward", "encode"])
def test_an_output_that_is_refused(rank, world, method):
    """What happens after a registered method raised, and not the method: its forward was not taken to be over."""

    class Deep(Fragile):
        def forward(self, x: torch.Tensor) -> Any:
            output: Any = super().forward(x)
            for _ in range(65):
                output = [output]
            return output

    module = sharded(Deep)
    if method != "forward":
        fsdp2.register_fsdp_forward_method(module, method)
    with pytest.raises(RuntimeError, match="nested deeper than 64 levels"):
        (module if method == "forward" else getattr(module, method))(torch.ones(2, WIDTH))
    assert_no_forward_runs(module)


@on_ranks(2)
@pytest.mark.parametrize("waits", ["gradients", "sums"])
def test_recovery_drops_what_the_iteration_has_left(rank, world, waits):
    """Gradients that were reduced, for nobody can tell which of them belong to the iteration that failed, and those
    (or sums over the shard axis) that wait for a later backward."""
    mesh = mesh_of(world, 1, names=("replicate", "shard"))
    model, rows = sharded(mesh=mesh), torch.ones(2, WIDTH)
    wait = model.set_requires_gradient_sync if waits == "gradients" else model.set_requires_all_reduce

    def gradients() -> list[torch.Tensor]:
        model(rows).square().sum().backward()
        return [parameter.grad.full_tensor().clone() for parameter in model.parameters()]

    expected = gradients()
    wait(False)
    model(rows).square().sum().backward()
    model.reset_iter_state()
    assert all(parameter.grad is None for parameter in model.parameters())
    wait(True)
    for got, want in zip(gradients(), expected):
        torch.testing.assert_close(got, want)
