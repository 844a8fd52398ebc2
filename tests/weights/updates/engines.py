"""An inference engine's side of a test, and what it should have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from tests.weights.models import cleaned

WAIT = 60
"""Seconds after which a member of a group gives up, where a test would hang."""


def nudged(module: nn.Module, step: int) -> None:
    """Change some elements of each parameter and buffer in place, others not, alike on every rank."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            local: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
            if local.numel() and (number + step) % 3:
                flat = torch.arange(local.numel()).view(local.shape)
                local.add_(((flat + step) % 5 == 0).to(local.dtype))
        for buffer in module.buffers():
            buffer.add_(step)


def bitwise(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) if tensor.ndim else tensor.detach().cpu()


def assert_received(receiver: fsdp2.WeightReceiver, module: nn.Module, **options: Any) -> None:
    """Assert that a receiver on the first rank has what ``iter_full_params`` yields, bit for bit."""
    expected = {cleaned(name): value for name, value in fsdp2.iter_full_params(module, **options)}
    if dist.get_rank() == 0:
        assert_equal(receiver.tensors, expected)


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert that two dictionaries have the same tensors, bit for bit."""
    assert set(got) == set(expected)
    for name, want in expected.items():
        assert (got[name].dtype, got[name].shape) == (want.dtype, want.shape), name
        assert torch.equal(bitwise(got[name]), bitwise(want)), name


class Recorded(fsdp2.WeightReceiver):
    """A receiver that keeps the sizes of buckets, and passes each through JSON and another buffer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.buckets: list[fsdp2.WeightBucket] = []

    def apply(self, bucket: fsdp2.WeightBucket) -> None:
        """Write one bucket that has come a long way."""
        bucket = fsdp2.WeightBucket.from_metadata(bucket.metadata, bucket.buffer.clone())
        self.buckets.append(bucket)
        super().apply(bucket)


@contextmanager
def group_with(rank: int, members: list[int], port: int, size: int | None = None) -> Iterator[dist.ProcessGroup | None]:
    """Yield a group of some ranks of the test (and of others, if it has ``size`` members); None on the other ranks."""
    group = None
    if rank in members:
        place = members.index(rank)
        group = fsdp2.weight_sync_group(
            f"127.0.0.1:{port}", place, size or len(members), timeout=timedelta(seconds=WAIT)
        )
    yield group
    if group is not None:
        dist.destroy_process_group(group)


def raised(call: Callable[[], object]) -> str:
    """Return the error that a call raises as text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
