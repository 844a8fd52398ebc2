"""The ideas whose worth `ablation.py` measures, and how each is switched off: by the public API where it has a switch,
else by replacing one function of the package for as long as the candidate runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _common import FullyShard
from torch import nn

import fsdp2
from fsdp2 import _trace
from fsdp2._torch.collectives import group_all_gather_coalesced
from fsdp2.comm import collectives, gather, reduce
from fsdp2.comm.gather import Buffer
from fsdp2.engine import buffers as shards
from fsdp2.engine import itinerary
from fsdp2.engine.gradients import GroupGradients

NEVER = 1 << 62
"""A size in bytes that no transfer reaches."""


@dataclasses.dataclass(frozen=True)
class Idea:
    """Something that can be left out.

    `off` is active while its candidate is built and runs, `change` is applied to each unit after `fully_shard`.
    `where`: what it can have an effect on, `fake` (memory and host work), `gloo` (the training step) or both.
    `side_by_side`: on memory only where units see the data itself.
    """

    title: str
    how: str
    off: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    change: Callable[[Any], None] | None = None
    where: str = "fake gloo"
    local_step: bool = True
    local_clip: bool = True
    side_by_side: bool = False

    def fully_shard(self, module: nn.Module, **options: Any) -> None:
        """`fsdp2.fully_shard` without the idea; to be called inside `off`."""
        fsdp2.fully_shard(module, **options)
        if self.change is not None:
            self.change(module)


def replaced(owner: Any, name: str, value: Callable[[Any], Any]) -> Callable[[], AbstractContextManager[object]]:
    """A context in which `owner.name` is `value(what it was)`."""
    return functools.partial(mock.patch.object, owner, name, value(getattr(owner, name)))


@contextlib.contextmanager
def together(*contexts: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def without_advice(visit: Callable[..., Any]) -> Callable[..., None]:
    """Note which group runs, but do not say which one comes next."""

    def silent(self: Any, group: Any, **how: Any) -> None:
        visit(self, group, **how)

    return silent


def waiting_at_once(works: Callable[..., Any]) -> Callable[..., Any]:
    """Collectives that are over when the call returns, as torch's are on a CPU."""
    return lambda work, axis, async_op, **limits: works(work, axis, False)


def coalesced(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """Several gathers as the one call for all of them that the backend offers."""

    def gather_all(outputs: list[Any], inputs: list[Any], axis: Any, *, async_op: bool, custom: Any = None) -> Any:
        if custom is not None or len(outputs) < 2 or axis.backend != "gloo":
            return all_gather(outputs, inputs, axis, async_op=async_op, custom=custom)
        options = collectives._gather_options(async_op)
        work = group_all_gather_coalesced(axis.group)(outputs, inputs, options)
        return collectives._works(work, axis, async_op)

    return gather_all


def public_gather(method: Any) -> Callable[..., Any]:
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return lambda group: lambda out, piece, options: call(out, piece, group=group, async_op=options.asyncOp)


def public_scatter(method: Any) -> Callable[..., Any]:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda group: (
        lambda out, rows, options: call(out, rows, op=options.reduceOp, group=group, async_op=options.asyncOp)
    )


def public_exchange(method: Any) -> Callable[..., Any]:
    return lambda group: (
        lambda out, rows, outs, ins, options: dist.all_to_all_single(
            out, rows, outs or None, ins or None, group=group, async_op=options.asyncOp
        )
    )


@contextlib.contextmanager
def without_rank_checks() -> Iterator[None]:
    fsdp2.set_rank_checks(False)
    try:
        yield
    finally:
        fsdp2.set_rank_checks(True)


public_functions = functools.partial(
    together,
    replaced(collectives, "group_all_gather", public_gather),
    replaced(collectives, "group_reduce_scatter", public_scatter),
    replaced(collectives, "group_all_to_all", public_exchange),
)


class ManyStorages(Buffer):
    """A buffer each of whose views has a storage of its own, to be resized one by one."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__(0, device)
        self.parts: dict[int, Buffer] = {}

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if offset not in self.parts:
            self.parts[offset] = Buffer(numel * dtype.itemsize, self.bytes.device)
        return self.parts[offset].view(0, numel, dtype)

    def allocate(self) -> None:
        for part in self.parts.values():
            part.allocate()

    def free(self) -> None:
        for part in self.parts.values():
            part.free()


def not_counting(begin_backward: Callable[..., None]) -> Callable[..., None]:
    """Post-backward waits for the end of the backward where no input of the group requires grad."""
    return lambda self, launch, end, *, count, final: begin_backward(self, launch, end, count=False, final=final)


WHOLE = Idea("(nothing: everything on)", "")
IDEAS = (
    Idea("(nothing, once more)", "how far two equal candidates lie apart"),
    Idea(
        "large parameters are gathered straight into their place",
        "`set_transfer_sizes` packs all",
        change=lambda unit: unit.set_transfer_sizes(direct_param_bytes=NEVER, recurse=False),
    ),
    Idea(
        "gradients leave in chunks while backward runs",
        "`set_transfer_sizes`: one chunk per unit",
        change=lambda unit: unit.set_transfer_sizes(chunk_bytes=NEVER, recurse=False),
    ),
    Idea(
        "gradients are sent from where autograd left them",
        "all are packed",
        replaced(reduce, "_lies_as", lambda old: lambda *unused: False),
    ),
    Idea(
        "the next unit is gathered ahead, in recorded order",
        "the orders give no advice",
        functools.partial(
            together,
            replaced(itinerary.ForwardRoute, "visit", without_advice),
            replaced(itinerary.BackwardRoute, "visit", without_advice),
        ),
    ),
    Idea(
        "collectives are waited for late",
        "waited for at once",
        replaced(collectives, "_works", waiting_at_once),
        where="gloo",
    ),
    Idea(
        "several chunks of gradients are in flight on gloo",
        "`set_reduce_scatter_max_input_buffers(1)`",
        change=lambda unit: unit.set_reduce_scatter_max_input_buffers(1, recurse=False),
        where="gloo",
    ),
    Idea(
        "all-to-all and a local float32 sum on gloo",
        "gloo's reduce-scatter",
        replaced(reduce, "prefers_all_to_all", lambda old: lambda axis, nbytes, asked=None: False),
        where="gloo",
    ),
    Idea(
        "two ranks swap pieces on gloo",
        "gloo's all-gather",
        replaced(collectives, "prefers_all_to_all", lambda old: lambda axis, nbytes, asked=None: False),
        where="gloo",
    ),
    Idea(
        "a unit's gathers are several calls on gloo",
        "one coalesced call",
        replaced(gather, "all_gather", coalesced),
        where="gloo",
    ),
    Idea(
        "a unit without inputs that need gradients ends by counting its own",
        "it waits for the end of backward",
        replaced(GroupGradients, "begin_backward", not_counting),
        where="fake",
        side_by_side=True,
    ),
    Idea(
        "one storage for all full parameters of a unit",
        "one for each parameter",
        replaced(shards, "Buffer", lambda old: ManyStorages),
    ),
    Idea(
        "process groups are called directly",
        "torch.distributed's functions",
        public_functions,
    ),
    Idea(
        "profiler ranges only while a profiler runs",
        "always",
        replaced(_trace, "profiler_running", lambda old: lambda: True),
    ),
    Idea(
        "ranks compare their steps (what this safety costs)",
        "no comparison",
        without_rank_checks,
        where="gloo",
    ),
    Idea("the optimizer steps on local shards", "AdamW on DTensors", where="gloo", local_step=False),
    Idea("clipping on local shards", "torch's clip_grad_norm_", where="gloo", local_clip=False),
)


def as_candidate(idea: Idea) -> FullyShard:
    """`fully_shard` without the idea, for the functions of other benchmarks."""
    return idea.fully_shard
