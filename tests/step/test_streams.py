"""Whether everything that runs on a stream waits for what it must, on a simulated device with streams.

The numbers of a device show a missing wait only now and then; here every order that it may choose counts.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.comm import streams
from fsdp2.sharding.platform import simulated, using
from tests.support import api
from tests.support.cases import TRANSFERS
from tests.support.fake import fake_mesh
from tests.support.models import Transformer
from tests.support.parity import LocalSGD
from tests.support.streams import Device, Mistake

pytestmark = api.fsdp2_only

MIXED = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16 = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
PINNED = torch.cuda.is_available()
INT8 = fsdp2.CompressionPolicy(torch.int8, torch.int8, torch.int8, block=16, min_numel=512)
SETUPS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "mixed": {"mp_policy": MIXED},
    "bfloat16": {"mp_policy": BF16},
    "kept": {"reshard_after_forward": False},
    "kept, mixed": {"reshard_after_forward": False, "mp_policy": MIXED},
    "in pairs": {"reshard_after_forward": 2, "mp_policy": MIXED},
    "last dimension": {"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)},
    "offloaded": {"offload_policy": fsdp2.CPUOffloadPolicy(pin_memory=PINNED)},
    "partly offloaded": {"offload_policy": {"*up*": fsdp2.CPUOffloadPolicy(pin_memory=PINNED)}},
    "copied from the host": {"mp_policy": MIXED},
    "hybrid": {"hybrid": True},
    "hybrid, bfloat16": {"hybrid": True, "mp_policy": BF16},
    "hybrid, mixed": {"hybrid": True, "mp_policy": MIXED},
    "over replicas": {"shard_over_replicas": True},
    "over replicas, mixed": {"shard_over_replicas": True, "mp_policy": MIXED, "reshard_after_forward": True},
    "over replicas, offloaded": {"shard_over_replicas": True, "offload_policy": fsdp2.CPUOffloadPolicy(PINNED)},
    "compressed": {"compression": INT8},
    "compressed, hybrid": {"compression": INT8, "hybrid": True, "mp_policy": MIXED},
    "compressed, over replicas": {"compression": INT8, "shard_over_replicas": True, "mp_policy": MIXED},
}


class Training:
    """A model of units under a root on one of eight ranks, and its optimizer."""

    def __init__(self, mesh: Any, device: Device, setup: str, transfer: str) -> None:
        options = dict(SETUPS[setup])
        if options.pop("hybrid", False) or options.get("shard_over_replicas"):
            mesh = init_device_mesh(mesh.device_type, (2, 4), mesh_dim_names=("replicate", "shard"))
        self.model: Any = Transformer(layers=3, width=32)
        for unit in (*self.model.blocks, self.model):
            fsdp2.fully_shard(unit, mesh=mesh, **options)
        self.model.set_transfer_sizes(**TRANSFERS[transfer])
        self.device = device
        self.optimizer: torch.optim.Optimizer = LocalSGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def forward(self) -> Tensor:
        """Return the loss of some tokens."""
        return self.model(torch.randint(11, (2, 5))).float().square().mean()

    def evaluate(self) -> None:
        """Run without gradients."""
        with torch.no_grad():
            self.forward()

    def backward(self) -> None:
        """Add to the gradients."""
        self.forward().backward()

    def through_unit(self, unit: int) -> None:
        """Add to the gradients of one unit, run by itself."""
        self.model.blocks[unit](torch.randn(2, 5, 32)).float().sum().backward()

    def update(self) -> None:
        """Step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, times: int = 1) -> None:
        """Train."""
        for _ in range(times):
            self.backward()
            self.update()


def training(run: Training) -> None:
    """Steps, and one of two batches in one backward."""
    run.step(2)
    (run.forward() + run.forward()).backward()
    run.update()


def accumulation(run: Training) -> None:
    """Backwards that do not reduce, do not all-reduce, or keep full parameters."""
    for setter in (run.model.set_requires_gradient_sync, run.model.set_requires_all_reduce):
        for last in (False, True, False, True):
            setter(last)
            run.model.set_reshard_after_backward(last)
            run.backward()
        run.update()


def synchronization(run: Training) -> None:
    """Reductions of accumulated gradients without a backward."""
    for setter in (run.model.set_requires_gradient_sync, run.model.set_requires_all_reduce):
        setter(False)
        for _ in range(2):
            run.backward()
        run.model.synchronize_gradients()
        run.update()
        setter(True)


def evaluation(run: Training) -> None:
    """Forwards without backwards between steps."""
    for _ in range(2):
        with torch.no_grad():
            run.forward()
        run.step()
    with torch.no_grad():
        run.forward()


def by_hand(run: Training) -> None:
    """Units gathered before the root has run, before its forward, and all at once."""
    run.model.blocks[1].unshard(async_op=True)
    for _ in range(2):
        run.model.blocks[0].unshard(async_op=True)
        run.model.blocks[2].unshard()
        run.step()
        run.model.unshard(recurse=True)
        for parameter in run.model.parameters():
            parameter.sum()
        run.model.reshard(recurse=True)


def changed_by_hand(run: Training) -> None:
    """Shards change just before they are gathered by hand."""
    run.step()
    with torch.no_grad():
        run.model.blocks[0].up.weight.mul_(0.5)
    run.model.blocks[0].unshard()
    run.model.blocks[0].up.weight.sum()


def lists(run: Training) -> None:
    """Units that are told what to gather ahead."""
    first, second, third = run.model.blocks
    run.model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    run.step(3)


def hooks(run: Training) -> None:
    """An all-reduce hook, on a stream of its own where that is possible, and steps made by hooks of gradients."""
    stream = None
    if run.model.embed.weight.device_mesh.ndim == 1:
        stream = run.device.Stream()
    run.model.set_all_reduce_hook(lambda gradient: gradient.mul_(1.0), stream=stream)
    run.step(2)
    for parameter in run.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    run.step(2)


def gradients(run: Training) -> None:
    """Everything that looks at gradients before the step."""
    for clip in (nn.utils.clip_grad_norm_, fsdp2.clip_grad_norm_):
        run.backward()
        clip(run.model.parameters(), 1.0)
        run.update()
    run.optimizer = fsdp2.use_local_shards(torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9))
    run.step(2)


def replaced_in_forward(run: Training) -> None:
    """A hook of one unit gives a later one other parameters."""

    def replace(*unused: object) -> None:
        later = run.model.blocks[2].up
        later.weight = nn.Parameter(later.weight.detach() * 0.5)

    run.model.blocks[0].register_forward_pre_hook(replace)
    run.backward()
    run.backward()


def resharded_in_forward(run: Training) -> None:
    """A hook of one unit writes to the shards of a later one, and reshards it.

    Gathers also wait whenever a unit is freed.
    """

    def write(*unused: object) -> None:
        later = run.model.blocks[2]
        for parameter in later.parameters():
            parameter.data.mul_(0.5)
        later.reshard()

    run.model.blocks[0].register_forward_pre_hook(write)
    run.step(2)


def taught(run: Training) -> None:
    """A forward that updates two units, behind another one, and runs them without gradients."""
    layers, teacher = run.model.blocks[:1], run.model.blocks[1:]
    run.model.blocks, run.model.teacher = layers, teacher

    def teach(*unused: object) -> None:
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.mul_(0.5)
            for unit in teacher:
                unit(torch.randn(2, 5, 32))

    layers[0].register_forward_hook(teach)
    run.step(3)


def states(run: Training) -> None:
    """Full parameters, state dicts and copies between steps."""
    run.step()
    with fsdp2.summon_full_params(run.model, writeback=True):
        for parameter in run.model.parameters():
            parameter.data.mul_(0.5)
    run.step()
    run.model.load_state_dict({name: value.clone() for name, value in run.model.state_dict().items()})
    run.step()
    copied = copy.deepcopy(run.model)
    copied(torch.randint(11, (2, 5))).float().sum().backward()
    run.step()


def outside(run: Training) -> None:
    """Weights used in the loss, and units that run before and beside their root."""
    run.through_unit(0)
    run.step()
    for _ in range(2):
        loss = run.forward()
        with fsdp2.use_weights(run.model.blocks[0]):
            loss = loss + run.model.blocks[0].up.weight.float().square().sum()
        loss.backward()
        run.through_unit(1)
        run.update()


def recomputed(run: Training) -> None:
    """Units that backward runs again."""
    for block in run.model.blocks:
        block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)
    run.step(3)


def unused(run: Training) -> None:
    """Units that do not run take part in reductions; frozen ones do not."""
    run.model.set_reduce_scatter_unused_params(True)
    run.model.blocks[1].requires_grad_(False)
    run.step()
    run.through_unit(0)
    run.update()
    run.model.blocks[1].requires_grad_(True)
    run.step(2)


def raising(run: Training) -> None:
    """A forward that does not come to its end."""
    run.step()
    handle = run.model.blocks[1].register_forward_pre_hook(lambda *unused: {}["nothing"])
    with contextlib.suppress(KeyError):
        run.forward()
    handle.remove()
    run.model.reset_iter_state()
    run.step(2)


def hook_raises(run: Training) -> None:
    """A hook of a reduction raises: what the reduction has put on lanes still reads gradients and sums."""

    def fail(gradient: Tensor) -> None:
        gradient.mul_(1.0)
        raise KeyError("nothing")

    run.step()
    run.model.blocks[1].set_all_reduce_hook(fail)
    with contextlib.suppress(KeyError):
        run.backward()
    run.model.reset_iter_state()
    run.model.blocks[1].set_all_reduce_hook(lambda gradient: gradient.mul_(1.0))
    run.update()
    run.step(2)


def finalized(run: Training) -> None:
    """Gradients that are waited for when the caller says so."""
    run.model.set_manual_backward_finalization(True)
    for _ in range(2):
        run.backward()
        reduction = run.model.finalize_backward(async_op=True)
        torch.zeros(3).add_(1)
        reduction.wait()
        run.update()


def ahead_of_the_step(run: Training) -> None:
    """Gathers that wait for the optimizer alone, not for what was put on the compute stream after it."""
    for _ in range(3):
        run.step()
        run.model._get_fsdp_state().root.post_optim_event = run.device.current_stream().record_event()
        torch.zeros(3).add_(1)


def skipping(run: Training) -> None:
    """Evaluations that do without the last units, the shards of which are written meanwhile."""
    run.step()
    run.model.skipped = blocks = run.model.blocks  # they stay below the root
    run.model.blocks = blocks[:1]
    for _ in range(3):
        with torch.no_grad():
            run.forward()
            blocks[2].up.weight.mul_(0.5)
    run.model.blocks = blocks
    run.step()


def allocated_by_the_group(run: Training) -> None:
    """Gradients are packed into memory of the process group."""
    run.model.set_allocate_memory_from_process_group_for_comm(True)
    run.step(2)


def captured(run: Training) -> None:
    """Whole steps in a graph: all lanes begin behind its first kernel and end before its last."""
    run.step(2)
    for _ in range(2):
        with run.device.capturing():
            run.step()
    run.model.set_keep_unsharded_storage(True)
    run.step(2)
    with run.device.capturing():
        run.model.set_requires_gradient_sync(False)
        run.backward()
        run.model.set_requires_gradient_sync(True)
        run.step()


def host_state(run: Training) -> None:
    """Steps with the optimizer's state on the host, which the host reads and writes between them."""
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.1, foreach=True)
    fsdp2.offload_optimizer_state(run.optimizer, bucket_mb=8192 / 2**20)
    for _ in range(3):
        run.step()
        for entry in run.optimizer.state.values():
            for moment in (entry["exp_avg"].to_local(), entry["exp_avg_sq"].to_local()):
                if isinstance(run.device, Device):
                    run.device.on_host(moment)
                moment.mul_(0.5)


def whole_matrices(run: Training) -> None:
    """Steps of whole matrices at their owners, bucket by bucket; gradients are sent in backward, then by the step.

    On one axis, whatever the setup: torch's fake backend refuses a rank that only receives.
    """
    mesh = init_device_mesh(next(run.model.parameters()).device_mesh.device_type, (8,))
    run = Training(mesh, run.device, "mixed", "packed")
    matrices = [param for param in run.model.parameters() if param.ndim == 2]
    for overlap, nbytes in ((True, 32768), (False, 8192)):
        run.optimizer = torch.optim.Muon(matrices, lr=0.1)
        options = {"cost": lambda param: 1.0, "bucket_mb": nbytes / 2**20, "overlap_backward": overlap}
        fsdp2.use_full_params(run.optimizer, **options)
        run.step(3)


PROGRAMS: list[Callable[[Training], None]] = [
    *(accumulation, evaluation, by_hand, changed_by_hand, lists, hooks, gradients, replaced_in_forward, states),
    *(outside, recomputed, unused, raising, hook_raises, finalized, ahead_of_the_step, skipping, captured),
    *(synchronization, allocated_by_the_group, taught, host_state, whole_matrices),
]


@functools.cache
def mistakes(program: Callable[[Training], None], setup: str, transfer: str, ignored: Any = None) -> list[str]:
    """Return what ``program`` does too early on a device that ignores the waits of ``ignored``."""
    torch.manual_seed(0)
    on_host = mock.patch("fsdp2.comm.gather._on_host", return_value=setup == "copied from the host")
    late = mock.patch("fsdp2.engine.gradients._LATE_BYTES", 0)  # as with units of a usual size
    with on_host, late, using(simulated("nccl")), fake_mesh(8) as mesh, Device(ignored) as device:
        with contextlib.suppress(Mistake):
            program(Training(mesh, device, setup, transfer))
    return device.mistakes


IN_TURN = [*zip(SETUPS, itertools.cycle(TRANSFERS), strict=False)]


@pytest.mark.parametrize(
    ("setup", "transfer"),
    [
        pytest.param(*one, marks=[] if one in IN_TURN else pytest.mark.slow)
        for one in itertools.product(SETUPS, TRANSFERS)
    ],
)
def test_training(setup, transfer):
    """Nothing is read before it is there, and no memory is used again too early."""
    assert not mistakes(training, setup, transfer)


def each_with_one() -> list[Any]:
    """Return every program with one setup and the next with the other, and as slow tests the other way round."""
    setups = [("mixed", "packed"), ("hybrid", "direct")]
    cases = []
    for index, program in enumerate(PROGRAMS):
        for number, setup in enumerate(setups):
            marks = [] if index % 2 == number else [pytest.mark.slow]
            cases.append(pytest.param(program, *setup, marks=marks, id=f"{program.__name__}-{'-'.join(setup)}"))
    return cases


@pytest.mark.parametrize(("program", "setup", "transfer"), each_with_one())
def test_programs(program, setup, transfer):
    """The same where more happens than forward, backward and step."""
    assert not mistakes(program, setup, transfer)


WAITS: dict[tuple[str, str], tuple[tuple[str, str], Callable[[Training], None], str, str]] = {
    ("gather", "RootContext.begin_forward"): (("gather_after_compute", "begin_forward"), training, "fp32", "packed"),
    ("gather", "by_hand._start"): (("gather_after_compute", "_start"), changed_by_hand, "hybrid", "direct"),
    ("gather", "FSDPModule.reshard"): (
        ("gather_after_compute", "reshard"),
        resharded_in_forward,
        "kept",
        "direct",
    ),
    ("gather", "Residency._take_in_replaced"): (
        ("gather_after_compute", "_take_in_replaced"),
        replaced_in_forward,
        "hybrid",
        "direct",
    ),
    ("gather", "FSDPParamGroup.pre_forward"): (("gather_after_compute", "pre_forward"), taught, "hybrid", "direct"),
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
    ("copy", "HostCopies._drop_oldest"): (("_drop_oldest", "start_copy"), training, "copied from the host", "direct"),
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


@pytest.mark.parametrize("wait", WAITS, ids=" ".join)
def test_no_wait_can_be_left_out(wait):
    """Without any one of them something goes wrong, and is noticed."""
    callers, program, setup, transfer = WAITS[wait]
    assert not mistakes(program, setup, transfer)
    assert mistakes(program, setup, transfer, ("wait", *callers))


def test_the_host_is_read_while_the_gather_before_is_on_its_way():
    """With shards on the host a unit's copy waits for no gather but the one before the last."""
    waits: list[Any] = []
    with mock.patch("fsdp2.comm.gather._on_host", return_value=True), fake_mesh(8) as mesh, Device() as device:
        run = Training(mesh, device, "copied from the host", "packed")
        run.step(2)
        comm = run.model._get_fsdp_state().root.comm

        def note(before: Any) -> None:
            waits.append((before, [event for _, event in comm.copies._sent]))

        with mock.patch.object(comm.lanes.copy, "wait", side_effect=note):
            run.forward()
    gathers = [before for before, _ in waits if before not in (None, comm.lanes.shards_written)]
    assert len(gathers) == 4 and not any(before in under_way for before, under_way in waits)


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
