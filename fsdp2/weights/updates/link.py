"""Where buckets go: a function, or a process group of one sender and its receivers.

What is said in a group, in this order: all say who they are and which version they have; the sender describes the
update; receivers say whether they can take it; the sender sends buckets; receivers say whether they have written them.
What a side cannot do, it says where the others expect to hear from it, so no one waits in vain, and every one raises.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from fsdp2._torch.collectives import group_on_store
from fsdp2.comm.collectives import broadcast, gather_bytes, share_bytes
from fsdp2.sharding.mesh import Axis
from fsdp2.sharding.platform import device_of
from fsdp2.weights.updates.bucket import Update, WeightBucket, from_plain, to_plain

__all__ = ["At", "FromGroup", "Link", "ToFunction", "ToGroup", "weight_sync_group"]

At = tuple[str, int] | None
"""The session and the version of the weights that somebody has; None: none, or parts of several."""


class Link:
    """The way from the sender's first rank to its receivers."""

    def meet(self, at: At) -> bool:
        """Return whether all receivers have the version ``at``, as far as they can say."""
        return True

    def begin(self, update: Update) -> None:
        """Describe the update. Raises RuntimeError if a receiver cannot take it."""

    def deliver(self, bucket: WeightBucket) -> None:
        """Deliver one bucket."""
        raise NotImplementedError

    def end(self) -> None:
        """End the update. Raises RuntimeError if a receiver has not written it."""

    def abort(self, problem: BaseException) -> None:
        """Tell receivers that the rest of the update does not come."""


class ToFunction(Link):
    """Calls a function with each bucket."""

    def __init__(self, function: Callable[[WeightBucket], object]) -> None:
        self._function = function

    def deliver(self, bucket: WeightBucket) -> None:
        """Deliver one bucket."""
        self._function(bucket)


class _InGroup:
    """What both sides of a process group need."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        config = dist.get_backend_config(group)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        on_cpu = accelerator is None or config in ("gloo", "mpi", "fake") or f"{accelerator.type}:gloo" in config
        kind = "cpu" if on_cpu or accelerator is None else accelerator.type
        self.axis = Axis.of_group(group, kind)
        self.device = device_of(kind)
        self.source = 0

    def gather(self, value: Any) -> list[Any]:
        """Return everyone's value, in the order of the group."""
        return [json.loads(data) for data in gather_bytes(json.dumps(value).encode(), self.axis, self.device)]

    def meet(self, where: str, role: str, at: At) -> list[At]:
        """Say who this is; return the versions of all receivers."""
        said = self.gather([role, at])
        senders = [rank for rank, (other, _) in enumerate(said) if other == "sender"]
        if len(senders) != 1:
            raise RuntimeError(
                f"{where}: got senders on the ranks {senders} of the group, expected one; call WeightSender.send on "
                "one rank of the group, and WeightReceiver.receive on the others"
            )
        self.source = senders[0]
        return [at and (at[0], at[1]) for other, at in said if other == "receiver"]

    def agree(self, what: str, problem: BaseException | None) -> None:
        """Raise RuntimeError on all members if one has a problem; ``what`` says what they did."""
        said = self.gather(None if problem is None else f"{type(problem).__name__}: {problem}")
        failed = [f"rank {rank} of the group: {text}" for rank, text in enumerate(said) if text is not None]
        if failed:
            raise RuntimeError(f"{what} by {'; '.join(failed)}") from problem

    def say(self, kind: str, value: Any = None) -> None:
        """Send a message to all receivers."""
        share_bytes(json.dumps([kind, value], separators=(",", ":")).encode(), self.axis, self.source, self.device)

    def hear(self) -> tuple[str, Any]:
        """Return the sender's next message."""
        kind, value = json.loads(share_bytes(b"", self.axis, self.source, self.device))
        return kind, value


class ToGroup(Link):
    """Broadcasts buckets in a process group, whose other members call ``WeightReceiver.receive``."""

    WHERE = "WeightSender.send"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = _InGroup(group)
        self._heard = False
        """True while receivers wait for this side's next message."""

    def meet(self, at: At) -> bool:
        """Return whether all receivers have the version ``at``."""
        versions = self._group.meet(self.WHERE, "sender", at)
        self._heard = True
        return all(version == at for version in versions)

    def begin(self, update: Update) -> None:
        """Describe the update; receivers of changes know the tensors."""
        self._group.say("update", to_plain(update, tensors=update.base is None))
        self._agree("refused")

    def deliver(self, bucket: WeightBucket) -> None:
        """Broadcast one bucket."""
        buffer = bucket.buffer.to(self._group.device)  # which may not fit: receivers do not wait for it yet
        self._heard = False  # until the buffer is sent, they do
        self._group.say("bucket", bucket.header)
        broadcast(buffer, self._group.axis, self._group.source)
        self._heard = True

    def end(self) -> None:
        """End the update, and hear from all receivers that they have written it."""
        self._group.say("end")
        self._agree("not received")
        self._heard = False

    def _agree(self, what: str) -> None:
        self._heard = False
        self._group.agree(f"{self.WHERE}: {what}", None)
        self._heard = True

    def abort(self, problem: BaseException) -> None:
        """Tell receivers that the rest of the update does not come, if they wait for it."""
        if self._heard:
            self._group.say("abort", f"{type(problem).__name__}: {problem}")


class FromGroup:
    """The receiver's side of ``ToGroup``."""

    WHERE = "WeightReceiver.receive"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = _InGroup(group)
        self._received = False

    def begin(self, at: At, known: Update | None) -> Update:
        """Say which version this is; return the update that the sender describes, relative to that or whole."""
        self._group.meet(self.WHERE, "receiver", at)
        return from_plain(self._next(), known)

    def accept(self, problem: Exception | None) -> None:
        """Say whether the update can be taken. Raises RuntimeError on all members if one cannot."""
        self._group.agree(f"{self.WHERE}: refused", problem)

    def buckets(self, update: Update) -> Iterator[WeightBucket]:
        """Yield the buckets of ``update``."""
        for _ in range(update.buckets):
            header = self._next()
            buffer = torch.empty(header["nbytes"], dtype=torch.uint8, device=self._group.device)
            broadcast(buffer, self._group.axis, self._group.source)
            self._received = True
            yield WeightBucket.from_header(header, update, buffer)

    def end(self, problem: Exception | None) -> None:
        """Say whether all was written. Raises RuntimeError on all members if one has not."""
        self._next()
        self._group.agree(f"{self.WHERE}: not received", problem)

    def _next(self) -> Any:
        kind, value = self._group.hear()
        if kind == "abort":
            got, left = "nothing", "Nothing was written; the next update will"
            if self._received:
                got, left = "a part", "Tensors may be of two versions until another is received, which will"
            raise RuntimeError(
                f"{self.WHERE}: the sender stopped ({value}); got {got} of the update, expected all of it. {left} be "
                "whole"
            )
        return value


def weight_sync_group(
    address: str, rank: int, world_size: int, *, backend: str = "gloo", timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Return a process group of a training job's first rank and the processes of an inference engine.

    The processes need not belong to one job: the group is no part of the default process group of either side, and a
    process needs none. When a receiver has restarted, all members make a new group, at another address.

    Args:
        address: "host:port" of rank 0 of this group, where the members meet; the port must be free.
        rank: This process's rank in the group. The sender is usually rank 0.
        world_size: The number of members.
        backend: "gloo" for CPUs, "nccl" for GPUs.
        timeout: How long a member waits for the others. Default: that of torch for the backend. A receiver waits in
            ``receive`` for the next update, so allow for the time between two of them.

    Raises:
        ValueError: ``address`` has no port, or ``rank`` is not below ``world_size``.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # of IPv6, as torchrun takes it too
    if not host or not port.isdigit():
        raise ValueError(f'weight_sync_group: address must be "host:port", got {address!r}')
    if not 0 <= rank < world_size:
        raise ValueError(f"weight_sync_group: rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}")
    limit = timeout or default_pg_timeout
    store = dist.TCPStore(host, int(port), is_master=rank == 0, wait_for_workers=False, timeout=limit)
    if rank == 0:
        store.set("name", f"fsdp2_weight_sync_{uuid.uuid4().hex}")
    return group_on_store(store, store.get("name").decode(), rank, world_size, backend, timeout)
