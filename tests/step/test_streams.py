"""No wait between streams can be left out, and what the host waits for, on a simulated device with streams.

That none is missing ``test_scenarios.py`` finds. The numbers of a device show a missing wait only now and then; here
every order that it may choose counts.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

import fsdp2
from fsdp2.comm import streams
from fsdp2.sharding.platform import simulated, using
from tests.support import api
from tests.support.fake import fake_mesh
from tests.support.scenarios import (
    Program,
    Training,
    allocated_by_the_group,
    changed_by_hand,
    hook_raises,
    hooks,
    host_state,
    replaced_in_forward,
    resharded_before_backward,
    skipping,
    taught,
    training,
    watched,
    whole_matrices,
    written_in_forward,
)
from tests.support.streams import Device, Mistake

pytestmark = api.fsdp2_only

WAITS: dict[tuple[str, str], tuple[tuple[str, str], Program, str, str]] = {
    ("gather", "RootContext.begin_forward"): (
        ("gather_after_compute", "begin_forward"),
        training,
        "over replicas",
        "packed",
    ),
    ("gather", "FSDPState.pre_forward"): (
        ("gather_after_compute", "pre_forward"),
        written_in_forward,
        "kept",
        "direct",
    ),
    ("gather", "by_hand._start"): (("gather_after_compute", "_start"), changed_by_hand, "hybrid", "direct"),
    ("gather", "FSDPModule.reshard"): (
        ("gather_after_compute", "reshard"),
        resharded_before_backward,
        "fp32",
        "direct",
    ),
    ("gather", "Residency._take_in_replaced"): (
        ("gather_after_compute", "_take_in_replaced"),
        replaced_in_forward,
        "hybrid",
        "direct",
    ),
    ("replicate", "Portions.start_gather"): (("start_gather", "_launch_portions"), training, "over replicas", "direct"),
    ("gather", "Portions.let_read"): (("finish_gather", "let_read"), training, "over replicas", "direct"),
    ("compute", "Portions.end_pass"): (("let_write", "end_pass"), skipping, "over replicas", "packed"),
    ("compute", "Residency.before_write"): (
        ("let_write", "before_write"),
        replaced_in_forward,
        "over replicas",
        "direct",
    ),
    ("gather", "Residency._free_full"): (("_free_full", "_free"), training, "fp32", "packed"),
    ("copy", "HostCopies.start_copy"): (("after", "start_copy"), training, "copied from the host", "direct"),
    ("gather", "gather.start_gather"): (("after", "start_gather"), training, "copied from the host", "direct"),
    ("copy", "HostCopies._drop"): (("_drop", "hold"), training, "copied from the host", "direct"),
    ("compute", "gather.finish_gather"): (("finish_gather", "_ready"), training, "fp32", "packed"),
    ("pack", "reduce._inputs"): (("after", "_inputs"), training, "mixed", "direct"),
    ("reduce", "_CustomReduceScatter.start"): (("after", "start"), allocated_by_the_group, "mixed", "packed"),
    ("pack, reduce", "_EncodedExchange.start"): (("after", "start"), training, "compressed", "packed"),
    ("reduce", "_OverShards.start"): (("after", "start"), training, "mixed", "direct"),
    ("compute", "Retained.make_room"): (("_drop_oldest", "make_room"), training, "mixed", "direct"),
    ("compute", "Retained.drop"): (("_drop_oldest", "drop"), training, "hybrid, bfloat16", "direct"),
    ("compute", "Retained.drop_packed"): (("_drop_oldest", "drop_packed"), training, "mixed", "direct"),
    ("replicate", "_AllReduceOverReplicas.reduce"): (("after", "reduce"), training, "hybrid", "packed"),
    ("replicate, hook", "reduce.reduce_chunk"): (("after", "reduce_chunk"), hooks, "mixed", "packed"),
    ("reduce", "Retained.drop_sums"): (("_drop_oldest", "drop_sums"), training, "hybrid, bfloat16", "direct"),
    ("compute", "Reductions.finish"): (("drop_all", "finish"), training, "bfloat16", "packed"),
    ("compute", "Reductions.abandon"): (("drop_all", "abandon"), hook_raises, "hybrid", "direct"),
    ("compute", "Staging.use"): (("use", "lend"), host_state, "mixed", "packed"),
    ("outward", "Staging.send_back"): (("after", "send_back"), host_state, "mixed", "packed"),
    ("inward", "Staging.send_back"): (("send_back", "take_back"), host_state, "mixed", "packed"),
    ("exchange", "Layout.send"): (("after", "send"), whole_matrices, "mixed", "packed"),
    ("compute", "Arriving.wait"): (("wait", "deliver"), whole_matrices, "mixed", "packed"),
}
"""For each ``wait`` of fsdp2/comm/streams.py: the functions that it is called from, and a program that needs it.

Where it can be, that is one which a test above has run in the same setup.
"""

ELSEWHERE = {
    ("compute", "GroupExtensions.decode"),  # tests/unit/engine/test_extension.py
    ("gather", "GroupExtensions.decode"),
    ("compute", "GroupGradients._arrives"),  # tests/unit/comm/test_streams.py: autograd's own streams are needed
    # tests/unit/comm/test_reductions.py: here compute, which packing follows, has waited for a plain chunk
    ("pack", "Retained.drop_encoded"),
    ("inward", "Staging.begin"),  # tests/nullgpu/test_ordered.py: here compute does not use again what it has freed
}
"""Waits that no program here needs."""


@functools.cache
def mistakes(program: Program, setup: str, transfer: str, ignored: Any = None) -> list[str]:
    """Return what ``program`` does too early on a device that ignores the waits of ``ignored``."""
    with watched(setup, ignored=ignored) as (mesh, device), contextlib.suppress(Mistake):
        program(Training(mesh, device, setup, transfer))
    return device.mistakes


@pytest.mark.parametrize("wait", WAITS, ids=" ".join)
def test_no_wait_can_be_left_out(wait):
    """Without any one of them something goes wrong, and is noticed."""
    callers, program, setup, transfer = WAITS[wait]
    assert not mistakes(program, setup, transfer)
    assert mistakes(program, setup, transfer, ("wait", *callers))


def offloaded(mesh: Any, device: Device, setup: str, *, pinned: bool = True) -> Training:
    """Return a model in bfloat16 whose shards are in memory of the host."""
    run = Training(mesh, device, setup, "packed")
    run.model.bfloat16()
    run.evaluate()
    for parameter in run.model.parameters():
        device.on_host(parameter.to_local(), pinned=pinned)
    return run


@pytest.mark.parametrize("setup", ["copied from the host", "compressed"])
def test_the_host_does_not_wait_for_copies_of_shards(setup):
    """Shards in page-locked memory are copied while the host goes on. Where they were encoded (compression), the host
    waited for each copy, and so for the gathers that the copy waits for."""
    with mock.patch("fsdp2.comm.gather._on_host", return_value=True), fake_mesh(8) as mesh, Device() as device:
        offloaded(mesh, device, setup).evaluate()
    assert not device.host_waits and not device.mistakes


def test_the_host_waits_for_copies_of_pageable_shards():
    """``CPUOffloadPolicy(pin_memory=False)``: no copy from there can be queued."""
    with mock.patch("fsdp2.comm.gather._on_host", return_value=True), fake_mesh(8) as mesh, Device() as device:
        offloaded(mesh, device, "copied from the host", pinned=False).evaluate()
    assert len(device.host_waits) >= 4


def test_the_host_waits_for_gradients_that_are_copied_to_it():
    """It may read and change them as soon as backward has ended."""
    with fake_mesh(8) as mesh, Device() as device:

        def to_host(out: Tensor, plan: Any) -> Tensor:
            host = torch.empty_like(out)
            device.on_host(host)
            return host.copy_(out, non_blocking=True)

        run = Training(mesh, device, "offloaded", "packed")
        with mock.patch("fsdp2.comm.reduce._deliverable", to_host):
            run.backward()
        for parameter in run.model.parameters():
            parameter.grad.to_local().mul_(0.5)
    assert not device.mistakes


def test_a_first_forward_that_updates_a_teacher_over_replicas():
    """Its portions are gathered when the forward begins, and nobody knows yet that it writes to their shards first."""
    assert not mistakes(taught, "over replicas", "packed")


@pytest.mark.parametrize("setup", ["fp32", "kept", "mixed", "hybrid", "compressed", "copied from the host"])
def test_a_forward_that_writes_to_shards_before_it_gathers_them(setup):
    """Gathers waited for what was written before the forward, and when a unit was freed. So those of the first units,
    and all of them where none is freed, read old values or half of the new ones, without a word. torch's first gather
    does so too."""
    assert not mistakes(written_in_forward, setup, "direct")


def test_gathers_wait_for_a_named_event_alone():
    """``set_post_optim_event`` promises that nothing writes to shards behind it; else each unit's forward waits."""
    gather = streams.Lanes.gather_after_compute
    with watched("fp32") as (mesh, device):
        run = Training(mesh, device, "fp32", "packed")
        run.step(2)
        for event in (device.current_stream().record_event(), None):
            if event is not None:
                run.model.set_post_optim_event(event)
            with mock.patch.object(streams.Lanes, "gather_after_compute", autospec=True, side_effect=gather) as waited:
                run.backward()
            given = [call.args[1:] for call in waited.call_args_list]
            assert given == ([(event,)] if event is not None else [(None,), *[()] * 4])  # the root's, and four units'


def test_the_host_waits_for_state_that_moves_to_it():
    """An optimizer has moments already when its state is offloaded, and whoever saves them next reads them at once."""
    with watched("fp32") as (mesh, device):
        run = Training(mesh, device, "fp32", "packed")
        run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.1)
        run.step()
        fsdp2.offload_optimizer_state(run.optimizer)
        for entry in run.optimizer.state.values():
            moment = entry["exp_avg"].to_local()
            device.on_host(moment)
            moment.mul_(0.5)
    assert not device.mistakes


def steps_on(device: Device, run: Training, first: Any, second: Any) -> None:
    """Run a step on one compute stream, one on another that waits for the first, and one on the first again."""
    for stream, before in ((first, None), (second, first), (first, second)):
        if before is not None:
            stream.wait_event(before.record_event())
        with device.stream(stream):
            run.backward()
            run.optimizer.zero_grad()


@pytest.mark.parametrize("setup", ["fp32", "hybrid, mixed"])
def test_another_compute_stream(setup, monkeypatch):
    """Warming up on one stream and going on on another, as graphs are captured, leaves nothing behind on the first.

    Autograd runs a node on the stream that it was made on. So nodes that somebody kept from the first iteration call
    hooks on a stream that no longer computes anything.
    """
    with watched(setup) as (mesh, device):
        monkeypatch.setattr("fsdp2.engine.gradients.hook_gradient", on_the_stream_of_its_node(device))
        run = Training(mesh, device, setup, "direct")
        steps_on(device, run, device.compute, device.Stream())
    assert not device.mistakes


def on_the_stream_of_its_node(device: Device) -> Any:
    """Return a ``hook_gradient`` that keeps nodes; its hooks run where a device runs them, on the node's stream."""
    from fsdp2.autograd.hooks import hook_gradient

    kept: list[Any] = []

    def hook(full: Tensor, ready: Any) -> Any:
        def called(tensor: Tensor) -> None:
            kept.append(get_gradient_edge(full).node)
            with device.stream(kept[-1].metadata.setdefault("stream", device.current_stream())):
                ready(tensor)

        return hook_gradient(full, called)

    return hook


def test_no_node_is_kept_over_iterations():
    """Each forward makes the nodes that its backward goes through."""
    with watched("fp32") as (mesh, device):
        run = Training(mesh, device, "fp32", "packed")
        fulls: list[Tensor] = []
        for part in run.model.modules():
            part.register_forward_hook(lambda part, *_: fulls.extend(part.parameters(recurse=False)))
        for _ in range(3):
            fulls.clear()
            loss = run.forward()
            nodes = [get_gradient_edge(full).node for full in fulls]
            assert nodes and not any(node.metadata for node in nodes)
            for node in nodes:
                node.metadata["iteration"] = "an earlier one"
            loss.backward()
            del loss, node, nodes


def by_their_shards(run: Training) -> None:
    """Average weights on the host."""
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.to_local().mul_(0.5)


def from_a_file(run: Training) -> None:
    """Load values, after a forward whose backward never comes."""
    run.forward()
    run.model.load_state_dict({name: value.clone() for name, value in run.model.state_dict().items()})


@pytest.mark.parametrize("setup", ["fp32", "mixed", "kept"])
def test_two_streams_of_the_caller_evaluate_without_order(setup):
    """The second found the weights gathered by the first, and read them without waiting for that gather. An evaluation
    leaves nothing in memory now, so each one gathers for itself, and waits for that."""
    with using(simulated("nccl")), fake_mesh(8) as mesh, Device() as device:
        run = Training(mesh, device, setup, "packed")
        run.evaluate()
        for stream in (device.Stream(), device.Stream()):
            with device.stream(stream):
                run.evaluate()
    assert not device.mistakes


@pytest.mark.parametrize("write", [by_their_shards, from_a_file])
def test_the_host_writes_to_shards_behind_an_evaluation(write):
    """The host is ahead of the device. What it wrote to shards on the host could overtake the copies of the forward
    before, which then computed with the new values. After an evaluation the host waits for the last copy; a backward
    ends with gradients that it waits for in any case."""
    with mock.patch("fsdp2.comm.gather._on_host", return_value=True), fake_mesh(8) as mesh, Device() as device:
        run = offloaded(mesh, device, "copied from the host")
        run.evaluate()
        write(run)
        run.evaluate()
    assert not device.mistakes


def test_the_host_writes_to_shards_behind_a_backward_that_reduces_nothing():
    """No gradient made it wait, so what it wrote to shards could overtake their copies of that backward."""
    with mock.patch("fsdp2.comm.gather._on_host", return_value=True), fake_mesh(8) as mesh, Device() as device:
        run = offloaded(mesh, device, "copied from the host")
        run.model.set_requires_gradient_sync(False)
        run.backward()
        by_their_shards(run)
        run.evaluate()
    assert not device.mistakes


def test_every_wait_is_left_out_once():
    """The table of waits and the tests of them are about the same."""
    rows = [line.strip("|").split("|") for line in (streams.__doc__ or "").splitlines() if line.startswith("| ")][1:]
    assert {(row[0].strip(), row[3].strip()) for row in rows} == set(WAITS) | ELSEWHERE
