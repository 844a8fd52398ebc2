"""Gradients that go to the owners of their parameters while backward runs.

A hook on each shard runs when its gradient is reduced, in the same order on all ranks that reduce it together. In the
first backward after a step, a few gradients at a time are sent to their owners; they stay on the shards as well. A step
uses what has arrived, if the gradients on the shards are still those that were sent. It compares *fingerprints* of
them, because no version counter shows a write through ``.data`` or by ``torch._foreach_*``, which torch's own clipping
uses. Others are sent again by the step.

Ranks along a dimension of tensor parallelism do not reduce together. If their pieces have different sizes, so have the
chunks, and the order of hooks may be another. So the step alone sends gradients that travel between such ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch.hooks import skipped_by_dynamo
from fsdp2.autograd.hooks import hook_gradient
from fsdp2.comm.streams import current_stream
from fsdp2.engine.index import param_of
from fsdp2.optim import copies
from fsdp2.optim.alike import local_gradient
from fsdp2.optim.whole.exchange import Arriving, Layout
from fsdp2.optim.whole.fingerprint import fingerprint
from fsdp2.optim.whole.ownership import Owned, RankSet
from fsdp2.sharding.mesh import listed_ranks
from fsdp2.sharding.spec import on_this_rank

__all__ = ["EarlyGradients"]

_PART = 8
"""What is sent at once is this part of a bucket: it is small beside a unit, and on many ranks has many matrices."""
_LAYOUTS = 64


@dataclass
class _Sent:
    """A gradient that was sent: its fingerprint, and whether it was found to be another one since (a flag, 0-d)."""

    fingerprint: torch.Tensor
    changed: torch.Tensor

    def compare(self, grad: torch.Tensor) -> None:
        """Note whether ``grad`` is another one."""
        self.changed += fingerprint(grad) != self.fingerprint


class EarlyGradients:
    """The gradients of the parameters of ``ranks`` that are at their owners before the step."""

    def __init__(self, ranks: RankSet, bucket_bytes: int) -> None:
        """Hook the shards. Every rank of ``ranks`` must call this."""
        self._ranks = ranks
        self._part = ranks.new_part("owners in backward")
        self._limit = bucket_bytes // _PART * self._part.axis.size  # of whole gradients: each rank sends so much
        # By the stream that they are on, with the dtypes that they have come in, which are the same on all ranks.
        self._waiting: dict[Any, dict[Any, torch.dtype]] = {}
        self._sends = False  # in the first backward after a step
        self._came: set[Any] = set()  # in it
        self._expected: set[Any] = set()  # to come in a backward: those of the last step
        self._sent: dict[Any, _Sent | None] = {}  # None: this rank had no gradient to send
        self._wholes: dict[torch.Tensor, torch.Tensor] = {}
        self._layouts: dict[Any, tuple[list[Owned], Layout]] = {}
        self._arriving: tuple[Arriving, list[Owned], list[torch.Tensor | None]] | None = None
        # Alive as long as the parameters: who drops an optimizer leaves it to the garbage collector, which runs at
        # another time on each rank, and until then one rank would send, and the others not.
        arrives = partial(self._arrives, weakref.ref(self))
        self._hooked = {param for param in ranks.params if self._comes_alike(ranks, param)}
        self._handles = [hook_gradient(param, arrives) for param in ranks.params if param in self._hooked]
        for param in self._hooked:
            self._companions_of(param).add(self)
        copies.keep(self)

    @staticmethod
    def _comes_alike(ranks: RankSet, param: Any) -> bool:
        """Return whether the ranks that send pieces of ``param`` reduce it together, and whether there are any.

        A frozen one takes no hooks.
        """
        shard = param_of(param) if param.requires_grad and ranks.is_sent(param) else None
        if shard is None:
            return False
        return {ranks.ranks[index] for index in ranks.part.places}.issubset(listed_ranks(shard.group.mesh.mesh))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        for param in self._hooked:
            self._companions_of(param).discard(self)

    @staticmethod
    def _companions_of(param: Any) -> set[object]:
        shard = param_of(param)
        return set() if shard is None else shard.companions  # None: it is no longer a model's

    # ---- in backward ----

    @staticmethod
    @skipped_by_dynamo
    def _arrives(early: weakref.ref[EarlyGradients], param: Any) -> None:
        """Send the gradients that have come, if that of ``param`` completes what is sent at once."""
        self = early()
        if self is None or param not in self._ranks.owned_of:  # a deep copy has the hook as well
            return
        if not self._sends or param in self._came:
            # Another backward before the step, which sends the sums. Perhaps no step comes: the optimizer was dropped.
            self._sends = False
            self._forget()
            return
        waiting = self._waiting.setdefault(current_stream(self._ranks.device), {})
        grad = param.grad  # None if another hook has dropped it, perhaps on this rank alone: the order stays as it is
        waiting[param] = grad.dtype if grad is not None else param.grad_dtype or param.dtype
        self._came.add(param)
        complete = self._came >= self._expected
        if complete or sum([one.numel() * dtype.itemsize for one, dtype in waiting.items()]) >= self._limit:
            params, dtypes = [*waiting], [*waiting.values()]
            waiting.clear()
            self._send(params, dtypes)
        self._sends = not complete

    def _forget(self) -> None:
        """Drop what was sent, and what waits to be sent."""
        self._finish()
        self._waiting.clear()
        self._sent.clear()
        self._wholes.clear()

    @torch.no_grad()
    def _send(self, params: list[Any], dtypes: list[torch.dtype]) -> None:
        """Send the gradients of ``params`` to their owners, behind what is on the current stream.

        A rank whose gradient was dropped or replaced meanwhile sends anything.
        """
        self._finish()
        grads = [
            local_gradient(param.grad, param) if isinstance(param.grad, DTensor) and param.grad.dtype == dtype else None
            for param, dtype in zip(params, dtypes)
        ]
        key = (*params, *dtypes)
        if key not in self._layouts:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = self._lay_out(params, dtypes)
        owned, layout = self._layouts[key]
        here = {
            param: torch.empty_like(on_this_rank(param), dtype=dtype) if grad is None else grad
            for param, grad, dtype in zip(params, grads, dtypes)
        }
        wholes = [one.empty(dtype) if one.mine else None for one, dtype in zip(owned, layout.dtypes)]
        arriving = layout.send([one.of(here[one.param]) for one in owned], [one.here for one in owned])
        self._arriving = arriving, owned, wholes
        for param, grad in zip(params, grads):
            self._sent[param] = None if grad is None else _Sent(fingerprint(grad), _zero(grad.device))
        if self._part.axis.backend != "gloo":
            self._finish()

    def _lay_out(self, params: Sequence[Any], dtypes: Sequence[torch.dtype]) -> tuple[list[Owned], Layout]:
        owned = [(one, dtype) for param, dtype in zip(params, dtypes) for one in self._ranks.owned_of[param]]
        layout = Layout(
            [one.route for one, _ in owned],
            [dtype for _, dtype in owned],
            self._part,
            self._ranks.device,
            to_owner=True,
        )
        return [one for one, _ in owned], layout

    def _finish(self) -> None:
        """Wait for what is on its way, and put the gradients together; on a stream it is queued behind the sending."""
        if self._arriving is not None:
            arriving, owned, wholes = self._arriving
            self._arriving = None
            arriving.deliver(wholes, [one.whole for one in owned])
            self._wholes.update({one.key: whole for one, whole in zip(owned, wholes) if whole is not None})

    # ---- from backward to the step ----

    def compare(self, params: Collection[int]) -> None:
        """See ``copies.GradientCopies``."""
        self._finish()
        for param, sent in self._sent.items():
            if sent is not None and id(param) in params and isinstance(param.grad, DTensor):
                sent.compare(local_gradient(param.grad, param))

    def scale(self, params: Collection[int], scale: Callable[[list[torch.Tensor]], object]) -> None:
        """See ``copies.GradientCopies``."""
        alike: dict[torch.dtype, list[torch.Tensor]] = {}
        for param, sent in self._sent.items():
            if id(param) not in params or not isinstance(param.grad, DTensor):
                continue
            if sent is not None:
                sent.fingerprint = fingerprint(local_gradient(param.grad, param))
            for owned in self._ranks.owned_of[param]:
                if owned.mine:
                    whole = self._wholes[owned.key]
                    alike.setdefault(whole.dtype, []).append(whole)
        for wholes in alike.values():
            scale(wholes)

    def begin_step(self) -> tuple[list[int], torch.Tensor]:
        """Return two flags for each parameter: whether its gradient was not sent, and whether it was changed since.

        The second ones are on the device.
        """
        self._finish()
        self._came.clear()
        missing, changed = [], []
        for param in self._ranks.params:
            sent = self._sent.get(param) if isinstance(param.grad, DTensor) else None  # a plain one is refused
            missing.append(int(sent is None))
            if sent is None or param.grad is None:
                changed.append(_zero(self._ranks.device))
            else:
                sent.compare(local_gradient(param.grad, param))
                changed.append(sent.changed.to(self._ranks.device))
        return missing, torch.stack(changed)

    def take(self, owned: Owned) -> torch.Tensor | None:
        """Return the whole gradient of ``owned`` on its owner, and let go of it."""
        return self._wholes.pop(owned.key, None)

    def end_step(self, used: Collection[Any]) -> None:
        """Drop all gradients, after a step that all ranks took with those of ``used``, of which the next is likely."""
        self._expected = {param for param in used if param in self._hooked}
        self._sends = True
        self._forget()


def _zero(device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int32, device=device)
