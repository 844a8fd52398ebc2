"""``WeightReceiver`` writes what a ``WeightSender`` sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from fsdp2._naming import class_name
from fsdp2.weights.buckets import Entry
from fsdp2.weights.updates.bucket import Update, WeightBucket
from fsdp2.weights.updates.link import At, FromGroup

__all__ = ["WeightReceiver"]

Load = Callable[[list[tuple[str, torch.Tensor]]], object]


class WeightReceiver:
    """Writes the buckets of a ``WeightSender``, in an inference engine's process.

    With ``tensors``, values are written to these, in place. With ``load``, the function is called for each bucket with
    a list of (name, whole tensor) of what is in it, as ``load_weights`` of vLLM expects; if the sender sends changes
    only, the receiver keeps a copy of all tensors to make them whole. With neither, it keeps the tensors in
    ``receiver.tensors``.

    After an update that was not received to its end, or in a process that restarted, ``version`` is None, and only a
    full update is taken. Over a process group the sender learns that by itself and sends all; with a function of your
    own, call ``WeightSender.send(to, full=True)``.

    Args:
        tensors: The engine's tensors by the names that the sender gives them, such as
            ``dict(engine.named_parameters())``. They must be exactly those that are sent, with their shapes and dtypes,
            and with ``delta`` nobody else may write to them.
        load: A function that copies whole tensors into the engine.
        device: The device of tensors that the receiver keeps. Default: where a bucket arrives.

    Raises:
        TypeError: Both ``tensors`` and ``load`` are given, or one of them is something else.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        load: Load | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if tensors is not None and load is not None:
            raise TypeError("WeightReceiver: got both tensors and load, expected one of them or neither")
        if load is not None and not callable(load):
            raise TypeError(f"WeightReceiver: load= must be a function of a list of (name, tensor), got {load!r}")
        self.tensors = {} if tensors is None else _checked(tensors)
        self._given = tensors is not None
        self._load = load
        self._device = device
        self._at: At = None
        self._update: Update | None = None
        self._next = 0

    @property
    def version(self) -> int | None:
        """The version of the weights, which counts the sender's updates; None if none was received to its end."""
        return None if self._at is None else self._at[1]

    def receive(self, group: dist.ProcessGroup) -> int | None:
        """Wait for an update, receive it, and return its version.

        The sender and all receivers are the members of ``group``.

        Raises:
            RuntimeError: A member cannot take the update, has not written all of it, or has stopped. Every member
                raises the error; the next update is whole.
        """
        link = FromGroup(group)
        update = link.begin(self._at, self._update)
        problem: Exception | None = None
        try:
            self._check(update)
        except Exception as error:
            problem = error
        link.accept(problem)
        for bucket in link.buckets(update):
            if problem is None:
                try:
                    self._apply(bucket)
                except Exception as error:  # the other receivers go on, so this one does, too
                    self._at, problem = None, error
        try:
            link.end(problem)
        except BaseException:
            self._at = None
            raise
        return self.version

    def apply(self, bucket: WeightBucket) -> None:
        """Write one bucket; pass all buckets of an update, in their order.

        Raises:
            RuntimeError: The bucket does not follow those before, its changes are relative to a version that this
                receiver does not have, or the tensors are others than those of the receiver. Nothing is written.
            TypeError: ``bucket`` is no bucket.
        """
        if not isinstance(bucket, WeightBucket):
            raise TypeError(
                f"WeightReceiver.apply: expected a WeightBucket, got {type(bucket).__name__}; make one with "
                "WeightBucket.from_metadata(metadata, buffer)"
            )
        if bucket.number == 0:
            self._check(bucket.update)
        self._apply(bucket)

    def _apply(self, bucket: WeightBucket) -> None:
        update = bucket.update
        same = self._update is not None and (self._update.session, self._update.version) == (
            update.session,
            update.version,
        )
        if bucket.number != 0 and not (same and bucket.number == self._next):
            self._at = None
            raise RuntimeError(
                f"WeightReceiver: got bucket {bucket.number} of update {update.version}, expected bucket "
                f"{self._next if same else 0}: buckets of an update are written in their order, each once. Call "
                "WeightSender.send(to, full=True)"
            )
        self._at = None  # until the last one is written
        self._update, self._next = update, bucket.number + 1
        with torch.no_grad():
            self._write(bucket)
        if bucket.last:
            self._at = (update.session, update.version)

    def _write(self, bucket: WeightBucket) -> None:
        update = bucket.update
        if bucket.full and self._load is not None:
            self._load(list(bucket.tensors()))
            if not update.tracked:  # nothing will be relative to these, so no copy is kept
                self.tensors.clear()
                return
        if bucket.full and bucket.number == 0 and not self._given:
            self.tensors = {name: tensor for name, tensor in self.tensors.items() if name in set(update.names)}
        for part in bucket.parts:
            bucket.write(part, self._kept(update.names[part.tensor], update.entries[part.tensor], bucket.buffer.device))
        if not bucket.full and self._load is not None:
            self._load([(name, self.tensors[name]) for name in bucket.names])

    def _kept(self, name: str, entry: Entry, device: torch.device) -> torch.Tensor:
        """Return the tensor to write to; allocate it if the receiver keeps it and it is new or has changed."""
        tensor = self.tensors.get(name)
        if tensor is None or (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
            tensor = torch.empty(entry.shape, dtype=entry.dtype, device=self._device or device)
            self.tensors[name] = tensor
        return tensor

    def _check(self, update: Update) -> None:
        """Raise RuntimeError if ``update`` cannot be taken."""
        if update.base is not None and self._at != (update.session, update.base):
            has = "no complete version" if self._at is None else f"version {self._at[1]}"
            if self._at is not None and self._at[0] != update.session:
                has += " of another sender"
            raise RuntimeError(
                f"WeightReceiver: got changes relative to version {update.base}, and has {has}; expected that version, "
                "or whole tensors. Call WeightSender.send(to, full=True)"
            )
        if not self._given or update.base is not None:
            return
        sent = dict(zip(update.names, update.entries))
        wrong = [
            f"{name} (got {_described(sent.get(name))}, expected {_described(_entry_of(self.tensors.get(name)))})"
            for name in dict.fromkeys([*sent, *self.tensors])
            if sent.get(name) != _entry_of(self.tensors.get(name))
        ]
        if wrong:
            raise RuntimeError(
                f"WeightReceiver: the tensors sent are not those of the receiver: {', '.join(wrong[:4])}"
                f"{f' and {len(wrong) - 4} more' if len(wrong) > 4 else ''}. Give the sender a mapping and a dtype, or "
                "leave tensors that are not sent out of WeightReceiver(tensors)"
            )


def _checked(tensors: object) -> dict[str, torch.Tensor]:
    """Return the tensors by their names; raise TypeError for anything else."""
    try:
        found = dict(tensors)  # type: ignore[call-overload]  # or it raises
    except (TypeError, ValueError):
        found, got = None, class_name(tensors)
    else:
        got = next((f"{name!r}: {one!r:.60}" for name, one in found.items() if not isinstance(one, torch.Tensor)), "")
    if got:
        raise TypeError(
            f"WeightReceiver: tensors must be a mapping from names to tensors, got {got}; pass "
            "dict(module.named_parameters()), or a function as load="
        )
    return found  # type: ignore[return-value]  # not None


def _entry_of(tensor: torch.Tensor | None) -> Entry | None:
    return None if tensor is None else Entry(tuple(tensor.shape), tensor.dtype)


def _described(entry: Entry | None) -> str:
    return "none" if entry is None else f"{entry.dtype} of shape {entry.shape}"
