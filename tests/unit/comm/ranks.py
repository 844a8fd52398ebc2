"""N ranks in one process: axes whose collectives exchange data between objects, as late and as strict as gloo's.

Data moves when a work is waited for, so that a buffer which was changed or freed too early is noticed, and only if all
ranks of the axis sent the same kind of message of the same size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fsdp2.comm import collectives, gather, reduce
from fsdp2.sharding.mesh import Axis


@dataclass
class Message:
    """What one rank sent and where it wants the answer."""

    kind: str
    output: Tensor
    sent: Tensor
    average: bool = False
    done: bool = False


@dataclass
class Group:
    """The ranks of one axis. ``messages[rank]`` are those that this rank sent, in order."""

    size: int
    messages: list[list[Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = [[] for _ in range(self.size)]

    def post(self, rank: int, message: Message) -> list[Any]:
        """Send ``message`` and return the works to wait for."""
        self.messages[rank].append(message)
        return [Work(self, len(self.messages[rank]) - 1)]

    def complete(self, index: int) -> None:
        """Answer the messages that every rank sent as its ``index``-th."""
        messages = [sent[index] for sent in self.messages]
        assert len({(m.kind, m.sent.nbytes, m.sent.dtype, m.average) for m in messages}) == 1, messages
        if messages[0].done:
            return
        answers = _ANSWERS[messages[0].kind]([m.sent for m in messages], messages[0].average)
        for message, answer in zip(messages, answers):
            message.output.copy_(answer.view(message.output.shape))
            message.done = True


@dataclass
class Work:
    """A collective in flight."""

    group: Group
    index: int

    def wait(self) -> bool:
        """Make the output valid."""
        self.group.complete(self.index)
        return True


def _gathered(sent: list[Tensor], average: bool) -> list[Tensor]:
    return [torch.cat(sent)] * len(sent)


def _exchanged(sent: list[Tensor], average: bool) -> list[Tensor]:
    rows = [tensor.reshape(len(sent), -1) for tensor in sent]
    return [torch.cat([row[rank] for row in rows]) for rank in range(len(sent))]


def _swapped(sent: list[Tensor], average: bool) -> list[Tensor]:
    ranks = range(len(sent))
    rows = [tensor.reshape(len(sent) - 1, -1) for tensor in sent]
    return [torch.cat([rows[other][rank - (rank > other)] for other in ranks if other != rank]) for rank in ranks]


def _reduced(sent: list[Tensor], average: bool) -> list[Tensor]:
    total = torch.stack(sent).sum(0, dtype=sent[0].dtype)
    return [total / len(sent) if average else total] * len(sent)


def _scattered(sent: list[Tensor], average: bool) -> list[Tensor]:
    total = _reduced(sent, average)[0].reshape(len(sent), -1)
    return list(total)


_ANSWERS = {
    "all_gather": _gathered,
    "all_to_all": _exchanged,
    "swap": _swapped,
    "all_reduce": _reduced,
    "reduce_scatter": _scattered,
}


def axes(size: int, backend: str = "simulated") -> list[Axis]:
    """Return one axis as each of its ranks sees it."""
    group = Group(size) if size > 1 else None
    return [Axis(group, size, rank, backend) for rank in range(size)]


def sent(axis: Axis) -> list[Message]:
    """Return what this rank sent on its axis."""
    assert isinstance(axis.group, Group)
    return axis.group.messages[axis.rank]


def _all_gather(outputs: list[Tensor], inputs: list[Tensor], axis: Axis, *, custom: Any = None, **rest: Any) -> Any:
    if axis.size == 1:
        return collectives.all_gather(outputs, inputs, axis, custom=custom, **rest)
    pairs = zip(outputs, inputs)
    return [work for out, one in pairs for work in axis.group.post(axis.rank, Message("all_gather", out, one))]


def _all_to_all(output: Tensor, rows: Tensor, axis: Axis, *, async_op: bool, with_own: bool = True) -> Any:
    return axis.group.post(axis.rank, Message("all_to_all" if with_own else "swap", output, rows))


def _reduce_scatter(output: Tensor, rows: Tensor, axis: Axis, *, average: bool, **rest: Any) -> Any:
    if axis.size == 1:
        return collectives.reduce_scatter(output, rows, axis, average=average, **rest)
    return axis.group.post(axis.rank, Message("reduce_scatter", output, rows, average))


def _reduce_scatter_together(outputs: list[Tensor], rows: list[Tensor], axis: Axis, **options: Any) -> Any:
    return [work for pair in zip(outputs, rows) for work in _reduce_scatter(*pair, axis, **options)]


def _all_reduce(tensor: Tensor, axis: Axis, *, average: bool, async_op: bool) -> Any:
    return axis.group.post(axis.rank, Message("all_reduce", tensor, tensor, average))


@contextmanager
def simulated(*, exchange: bool = False) -> Iterator[None]:
    """Let gathering and reducing use simulated collectives; ``exchange`` chooses all-to-all for reducing."""
    with (
        mock.patch.object(gather, "all_gather", _all_gather),
        mock.patch.object(reduce, "all_gather", _all_gather),
        mock.patch.object(reduce, "all_to_all", _all_to_all),
        mock.patch.object(reduce, "reduce_scatter", _reduce_scatter),
        mock.patch.object(reduce, "reduce_scatter_together", _reduce_scatter_together),
        mock.patch.object(reduce, "all_reduce", _all_reduce),
        mock.patch.object(reduce, "prefers_all_to_all", lambda axis, nbytes, asked: exchange and axis.size > 1),
    ):
        yield
