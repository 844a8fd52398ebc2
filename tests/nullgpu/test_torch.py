"""The programs of ``test_runs.py`` with torch's own ``fully_shard`` too: both take the same, and leave the same.

Each step of an optimizer shows the parameters and gradients that a program has made: shapes, dtypes, placements and
devices, which are real on a device without values.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fsdp2
from tests.nullgpu.device import Counts
from tests.nullgpu.test_runs import (
    METHODS_OF_TORCH,
    OPTIONS_OF_TORCH,
    WIDTH,
    WITH,
    Block,
    between_steps,
    ran,
    sharded,
)


@contextlib.contextmanager
def torchs_own() -> Iterator[None]:
    """Let the programs find torch's own where they look for the names that torch has too."""
    with contextlib.ExitStack() as stack:
        for name in fsdp2.__all__:
            if hasattr(torchs, name):
                stack.enter_context(mock.patch.object(fsdp2, name, getattr(torchs, name)))
        yield


def described(tensor: torch.Tensor | None) -> Any:
    """Return what a tensor is, but for its values."""
    if isinstance(tensor, DTensor):
        return tuple(tensor.shape), str(tensor.placements), tensor.device_mesh.shape, described(tensor.to_local())
    return tensor if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type)


def steps_of(run: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a program, in order, and return what each of its optimizers' steps found."""
    found: list[Any] = []

    def look(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found.append([(described(p), p.requires_grad, described(p.grad)) for p in parameters])

    hook = register_optimizer_step_pre_hook(look)
    try:
        ran(run, *arguments)
    finally:
        hook.remove()
    assert found, "the program makes no step"
    return found


def both(run: Callable[..., Any], *arguments: Any) -> None:
    """Compare the steps of a program with those that it makes with torch's own."""
    with torchs_own():
        theirs = steps_of(run, *arguments)
    assert steps_of(run, *arguments) == theirs


@pytest.mark.parametrize("name", METHODS_OF_TORCH)
def test_methods(name):
    """A method that torch has too, called between steps."""
    both(partial(between_steps, name))


@pytest.mark.parametrize("name", OPTIONS_OF_TORCH)
def test_options(name):
    """An option that torch has too."""
    both(OPTIONS_OF_TORCH[name])


@pytest.mark.parametrize("run", WITH)
def test_with(run, tmp_path):
    """Hybrid and tensor-parallel meshes, checkpointing, compilation, pipelines, checkpoints."""
    both(run, *([tmp_path] if len(inspect.signature(run).parameters) == 2 else []))


# ---- what torch's own leaves out ----


def frozen_first(mesh: Any) -> None:
    """Backward never comes to the first block, whose parameters were gathered ahead for it."""
    model = nn.Sequential(*(Block() for _ in range(3)))
    model[0].requires_grad_(False)
    sharded(mesh, model)
    for _ in range(3):
        model(torch.randn(8, WIDTH)).sum().backward()


def test_a_gather_ahead_that_is_not_used():
    """torch lets the compute stream wait for it with ``torch.accelerator.current_stream().wait_event(event)``, which
    does nothing with an event of ``torch.cuda``: the memory is written again while NCCL may still be writing to it.

    Where this fails because torch's own waits: delete the row in docs/differences.md.
    """
    ran(frozen_first)
    with (
        torchs_own(),
        pytest.raises(AssertionError, match=r"all_gather_copy_in.* does not wait for .*_allgather_base_"),
    ):
        ran(frozen_first)


def test_what_a_stream_of_either_class_waits_for():
    """The cause, without a library: the event of ``torch.cuda`` is not waited for, and nothing is said."""
    event = torch.cuda.Stream().record_event()
    for stream, waits in ((torch.cuda.current_stream(), 1), (torch.accelerator.current_stream(), 0)):
        with Counts() as counts:
            stream.wait_event(event)
        assert counts["stream_waits"] == waits
