"""What a training loop may do, by name, in every setup that puts other work on lanes: for whoever watches it.

    with watched("hybrid") as (mesh, device):
        recomputed(Training(mesh, device, "hybrid", "packed"))

``tests/step/test_scenarios.py`` watches all of them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.tools.check.on_streams import hook_raises
from tests.support.cases import TRANSFERS
from tests.support.fake import fake_mesh
from tests.support.models import Transformer
from tests.support.nccl import strict_nccl
from tests.support.parity import LocalSGD
from tests.support.streams import Device

RANKS = 8
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


class Branches(nn.Module):
    """Queries, keys and values by matrices of their own, in any order; so their gradients are finished."""

    def __init__(self, width: int, order: Random) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.order = order.sample(range(3), 3)

    def forward(self, x: Tensor) -> Tensor:
        found = {index: self.parts[index](x) for index in self.order}
        return torch.cat([found[index] for index in range(3)], -1)


class Training:
    """A model of units under a root on one of eight ranks, and its optimizer.

    With an ``order``, each layer has branches that are run in an order of this rank's own.
    """

    def __init__(self, mesh: Any, device: Device, setup: str, transfer: str, order: Random | None = None) -> None:
        options = dict(SETUPS[setup])
        if options.pop("hybrid", False) or options.get("shard_over_replicas"):
            mesh = init_device_mesh(mesh.device_type, (2, 4), mesh_dim_names=("replicate", "shard"))
        self.model: Any = Transformer(layers=3, width=32)
        for block in self.model.blocks if order else ():
            block.qkv = Branches(32, order)
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


def written_in_forward(run: Training) -> None:
    """A forward that writes to the shards of its second unit before it computes with the first."""

    def write(*unused: object) -> None:
        with torch.no_grad():
            for parameter in run.model.blocks[1].parameters():
                parameter.clamp_(-0.5, 0.5)

    run.model.register_forward_pre_hook(write)
    run.step(3)


def resharded_before_backward(run: Training) -> None:
    """Writes that no counter shows, behind a forward that has freed the unit."""
    loss = run.forward()
    written = run.model.blocks[-1]
    for parameter in written.parameters():
        parameter.data.mul_(0.5)
    written.reshard()
    loss.backward()


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
        run.model.set_post_optim_event(run.device.current_stream().record_event())
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
    for unit in (*run.model.blocks, run.model):
        unit.set_allocate_memory_from_process_group_for_comm(True)
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


Program = Callable[[Training], None]
PROGRAMS: list[Program] = [
    *(accumulation, evaluation, by_hand, changed_by_hand, lists, hooks, gradients, replaced_in_forward, states),
    *(outside, recomputed, unused, raising, hook_raises, finalized, ahead_of_the_step, skipping, captured),
    *(synchronization, allocated_by_the_group, taught, host_state, whole_matrices),
]


def can_run(program: Program, setup: str) -> bool:
    """Whether a program is possible in a setup."""
    name = program.__name__
    if name == "captured" and ("offloaded" in setup or "host" in setup):
        return False  # the host waits for copies
    if "offloaded" in setup and name == "gradients":
        return False  # torch's clip_grad_norm_ needs a backend for tensors on the host, as with gloo beside NCCL
    if "compressed" in setup and name == "allocated_by_the_group":
        return False  # refused: it is a custom reduction, which compression is too
    return not (setup == "partly offloaded" and name in ("hooks", "hook_raises"))  # refused: two groups in a unit


@contextmanager
def watched(setup: str, rank: int = 0, *, ignored: Any = None, watches: bool = True) -> Iterator[tuple[Any, Device]]:
    """Yield a mesh whose process groups are as strict as NCCL, and a device, which ignores the waits of ``ignored``."""
    torch.manual_seed(0)
    with ExitStack() as stack:
        # Not a mock: it would keep what it is called with, the shards of models that are gone.
        stack.enter_context(mock.patch("fsdp2.comm.gather._on_host", lambda *given: setup == "copied from the host"))
        stack.enter_context(mock.patch("fsdp2.engine.gradients._LATE_BYTES", 0))  # as with units of a usual size
        stack.enter_context(strict_nccl())
        mesh = stack.enter_context(fake_mesh(RANKS, rank=rank))
        yield mesh, stack.enter_context(Device(ignored, watches=watches))
