"""No kernel, copy or collective uses bytes that another stream, or the host, may still be using.

The streams, events, allocator and process group are torch's own.

The programs are those of ``tests/support/scenarios.py``. Every wait of ``fsdp2/comm/streams.py`` is left out once.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.comm import streams
from tests.nullgpu.ordering import Ordering
from tests.nullgpu.programs import Cuda, ranks
from tests.step.test_extensions import Halves
from tests.step.test_streams import WAITS
from tests.support.cases import TRANSFERS
from tests.support.scenarios import PROGRAMS, SETUPS, Program, Training, can_run, host_state, training

wait_event = torch.cuda.Stream.wait_event


@contextmanager
def without(callers: tuple[str, ...] | None) -> Iterator[list[None]]:
    """Leave out the waits that come from ``callers``, functions, innermost first; the list grows with each."""
    skipped: list[None] = []

    def wait(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        frame, names = sys._getframe(1), []
        while frame is not None and len(names) < len(callers or ()):
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        if callers is not None and tuple(names) == callers:
            skipped.append(None)
        else:
            wait_event(stream, event)

    with mock.patch.object(torch.cuda.Stream, "wait_event", wait):
        yield skipped


@contextmanager
def not_entered_twice() -> Iterator[None]:
    """Let no stream be entered within itself: early versions of torch refuse that, since it keeps what was before."""
    inside: list[torch.cuda.Stream] = []
    enter, leave = torch.cuda.Stream.__enter__, torch.cuda.Stream.__exit__

    def entering(stream: torch.cuda.Stream) -> torch.cuda.Stream:
        assert not any(stream is one for one in inside), "a stream is entered within itself"
        inside.append(stream)
        return enter(stream)

    def leaving(stream: torch.cuda.Stream, *error: Any) -> None:
        assert inside.pop() is stream, "streams are not left in the order in which they were entered"
        leave(stream, *error)

    with mock.patch.multiple(torch.cuda.Stream, create=True, __enter__=entering, __exit__=leaving):
        yield


def races(program: Program, setup: str, transfer: str, ignored: tuple[str, ...] | None = None) -> list[str]:
    """Return what ``program`` does without order where the waits of ``ignored`` are left out."""
    torch.manual_seed(0)
    with ExitStack() as stack:
        mesh = stack.enter_context(ranks(8))
        stack.enter_context(mock.patch("fsdp2.engine.gradients._LATE_BYTES", 0))  # as with units of a usual size
        ordering = stack.enter_context(Ordering())
        skipped = stack.enter_context(without(ignored))
        stack.enter_context(not_entered_twice())
        program(Training(mesh, Cuda(), setup, transfer))
    assert bool(skipped) is (ignored is not None), f"{ignored} waits for nothing in this program"
    return ordering.races()


def every_program() -> list[Any]:
    """Return every program in every setup, with the transfers in turn."""
    cases = []
    for index, program in enumerate(PROGRAMS):
        for number, setup in enumerate(SETUPS):
            if can_run(program, setup):
                transfer = list(TRANSFERS)[(index + number) % len(TRANSFERS)]
                cases.append(pytest.param(program, setup, transfer, id=f"{program.__name__}-{setup}-{transfer}"))
    return cases


@pytest.mark.parametrize(("setup", "transfer"), [*itertools.product(SETUPS, TRANSFERS)])
def test_training(setup, transfer):
    """Steps of each setup."""
    assert not races(training, setup, transfer)


@pytest.mark.parametrize(("program", "setup", "transfer"), every_program())
def test_programs(program, setup, transfer):
    """Everything else that a program does between its steps."""
    assert not races(program, setup, transfer)


@pytest.mark.parametrize("kind", [torch.cuda.Stream, torch.Stream])
def test_a_hook_may_have_a_stream_of_either_class(kind):
    """``torch.Stream("cuda").wait_event`` does nothing, and says nothing, where the event is one of ``torch.cuda``: a
    hook on such a stream ran before the sum was there."""

    def hooked(run: Training) -> None:
        run.model.set_all_reduce_hook(lambda gradient: gradient.mul_(1.0), stream=kind("cuda"))
        run.step(2)

    assert not races(hooked, "mixed", "packed")


# ---- every wait is needed ----


class Released(Halves):
    """What was gathered is decoded into memory of its own, and goes at once."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        """Say so."""
        return True


def extended(run: Training) -> None:
    """Parameters that say themselves what of them travels."""
    mesh = run.model.embed.weight.device_mesh
    layers = [nn.Linear(64, 64, bias=False) for _ in range(4)]
    for layer in layers:
        layer.weight = nn.Parameter(Released(layer.weight.detach()))
        fsdp2.fully_shard(layer, mesh=mesh)
    model = fsdp2.fully_shard(nn.Sequential(*layers), mesh=mesh)
    for _ in range(3):
        model(torch.randn(4, 64)).sum().backward()
        model.zero_grad()


def with_a_hook_of_another_stream(run: Training) -> None:
    """Autograd runs hooks of a gradient on the stream on which its node was made, and somebody kept the node."""
    kept: list[Any] = []
    aside = torch.cuda.Stream()

    def keep(module: Any, arguments: Any) -> None:
        if len(kept) < sum(1 for block in run.model.blocks for _ in block.parameters()):
            with torch.cuda.stream(aside):
                kept.extend(p.expand_as(p).grad_fn.next_functions[0][0] for p in module.parameters())
            for parameter in module.parameters():
                parameter.register_hook(lambda gradient: gradient * 2)

    for block in run.model.blocks:
        block.register_forward_pre_hook(keep)
    run.step(3)


def written_by_the_device(run: Training) -> None:
    """New values for shards on the host come from the device, and the host does not wait for them."""
    run.step(2)
    with torch.no_grad():
        for parameter in run.model.parameters():
            shard = parameter.to_local()
            shard.copy_(torch.ones(shard.shape, device="cuda"), non_blocking=True)
    run.backward()


ROWS: dict[tuple[str, str], tuple[tuple[str, ...], Program, str, str]] = {
    **{
        row: (("wait", *callers), program, "offloaded" if setup == "copied from the host" else setup, transfer)
        for row, (callers, program, setup, transfer) in WAITS.items()
    },
    ("copy", "HostCopies.start_copy"): (("wait", "after", "start_copy"), written_by_the_device, "offloaded", "direct"),
    ("pack", "Retained.drop_encoded"): (
        ("wait", "_drop_oldest", "drop_encoded"),
        training,
        "compressed, hybrid",
        "direct",
    ),
    ("inward", "Staging.begin"): (("wait", "begin"), host_state, "mixed", "packed"),
    ("compute", "GroupExtensions.decode"): (("wait", "decode"), extended, "fp32", "packed"),
    ("gather", "GroupExtensions.decode"): (("wait", "after", "decode"), extended, "fp32", "packed"),
    ("compute", "GroupGradients._arrives"): (
        ("catch_up", "_arrives"),
        with_a_hook_of_another_stream,
        "mixed",
        "direct",
    ),
}
"""For each wait of fsdp2/comm/streams.py: the functions that it is called from, and a program that needs it."""


@pytest.mark.parametrize("wait", ROWS, ids=" ".join)
def test_no_wait_can_be_left_out(wait):
    """Without any one of them two accesses are not ordered, and that is seen."""
    callers, program, setup, transfer = ROWS[wait]
    assert not races(program, setup, transfer)
    assert races(program, setup, transfer, callers)


def test_every_row_of_the_table_is_left_out_once():
    """The table of waits and the programs are about the same."""
    rows = [line.strip("|").split("|") for line in (streams.__doc__ or "").splitlines() if line.startswith("| ")][1:]
    assert {(row[0].strip(), row[3].strip()) for row in rows} == set(ROWS)


# ---- a model that nobody ends ----


def fail(*unused: Any) -> None:
    """Raise what only a caller raises."""
    raise KeyError("of the caller")


@pytest.mark.parametrize("raises", ["forward", "backward"])
@pytest.mark.parametrize("setup", ["fp32", "mixed", "over replicas", "compressed"])
def test_a_model_is_dropped_behind_an_exception(raises, setup):
    """Nobody waits for what is on its way: the model's memory went to the next kernel while it was read."""

    def drops(mesh: DeviceMesh) -> None:
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        for unit in (*model, model):
            fsdp2.fully_shard(unit, mesh=mesh, **SETUPS[setup])
        for step in range(3):
            if step == 2 and raises == "forward":
                model[1].register_forward_hook(fail)
            elif step == 2:
                model[1].weight.register_hook(fail)
            with pytest.raises(KeyError) if step == 2 else contextlib.nullcontext():
                model(torch.randn(4, 256)).float().sum().backward()
            model.zero_grad()

    names = ("replicate", "shard") if "over replicas" in setup else ("shard",)
    with ranks(8, *names, shape=(2, 4) if len(names) == 2 else ()) as mesh, Ordering() as ordering:
        drops(mesh)
        gc.collect()
        kept = [
            torch.zeros(numel, device="cuda") for numel in (8192, 8224, 8256, 16448, 65536, 65792) for _ in range(6)
        ]
    assert not ordering.races() and kept


# ---- the recorder itself ----


@contextlib.contextmanager
def two_streams() -> Iterator[tuple[torch.cuda.Stream, torch.Tensor, Ordering]]:
    """Yield another stream, a tensor of this one, and the recorder."""
    with Ordering() as ordering:
        yield torch.cuda.Stream(), torch.zeros(1024, device="cuda"), ordering


def test_a_missing_wait_is_seen():
    """And none with the wait."""
    for waits in (True, False):
        with two_streams() as (other, tensor, ordering):
            if waits:
                other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                tensor.add_(1)
        assert bool(ordering.races()) is not waits


def test_memory_that_was_freed_is_still_read():
    """Its address is given out again while another stream reads it: torch's sanitizer forgets it."""
    with two_streams() as (other, tensor, ordering):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            doubled = tensor * 2
        address = tensor.data_ptr()
        del tensor
        again = torch.zeros(1024, device="cuda")
        assert again.data_ptr() == address
    assert len(ordering.races()) == 1 and doubled is not None


def test_a_range_that_begins_elsewhere_is_seen():
    """Two views of one memory: torch's sanitizer knows first bytes."""
    with two_streams() as (other, tensor, ordering):
        with torch.cuda.stream(other):
            tensor[512:].add_(1)
    assert ordering.races()


def test_a_new_tensor_that_is_filled_is_seen():
    """What ``ones_like`` writes is read on another stream; the tensor whose shape it takes is not read."""
    for waits in (True, False):
        with two_streams() as (other, tensor, ordering):
            tensor.add_(1)
            with torch.cuda.stream(other):
                made = torch.ones_like(tensor)
            if waits:
                torch.cuda.current_stream().wait_stream(other)
            made.add_(1)
        assert bool(ordering.races()) is not waits


def test_the_host_waits_before_it_reads():
    """A copy to page-locked memory is read too early, or after the host has waited."""
    for waits in (True, False):
        with two_streams() as (_, tensor, ordering):
            host = torch.empty(1024, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            if waits:
                torch.cuda.current_stream().synchronize()
            host.add_(1)
        assert bool(ordering.races()) is not waits


def test_kernels_of_triton_are_seen():
    """By their arguments: what Inductor compiles is no operator."""
    compiled = torch.compile(lambda x: torch.sin(x) * 2 + 1)
    tensor = torch.zeros(1 << 16, device="cuda")
    compiled(tensor)
    other = torch.cuda.Stream()
    for waits in (True, False):
        with Ordering() as ordering:
            tensor.add_(1)
            if waits:
                other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                compiled(tensor)
        assert any(name.startswith("triton::") for name in ordering.seen)
        assert bool(ordering.races()) is not waits


@pytest.mark.parametrize("setup", ["offloaded", "over replicas, offloaded", "compressed"])
def test_the_default_device_is_the_gpu(setup):
    """``torch.set_default_device("cuda")``: gradients that went to the host were made on the GPU, and compression drew
    random numbers there with a generator of the CPU, where no backward, but the caller, reduces them."""

    def synchronizes(run: Training) -> None:
        run.model.set_requires_gradient_sync(False)
        run.backward()
        run.model.synchronize_gradients()
        assert {p.grad.device for p in run.model.parameters()} == {p.device for p in run.model.parameters()}

    assert not races(synchronizes, setup, "packed")
