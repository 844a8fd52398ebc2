"""A group's gradients on their way out: which chunk leaves when, and what is left for a later backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch

from fsdp2 import _trace
from fsdp2._torch.autograd import graph_task_id, will_accumulate
from fsdp2.autograd.hooks import hook_gradient
from fsdp2.comm.context import CommContext
from fsdp2.comm.reduce import Finished, ReducePlan, reduce_chunk
from fsdp2.engine.buffers import ShardStore
from fsdp2.engine.gradient_plan import GradientPlan
from fsdp2.engine.observer import AS_COMPUTED, Collective, Launch
from fsdp2.engine.param import FSDPParam, accumulate_gradients, take_gradients
from fsdp2.engine.phase import Phase
from fsdp2.sharding.mesh import Axis

__all__ = ["GroupGradients", "drop_left_open", "left_open_params", "may_be_left_open"]

_NEVER = (-1, -1)
# From here on a unit computes for milliseconds on any device, while the host goes ahead.
_LATE_BYTES = 64 << 20


_open: weakref.WeakSet[GroupGradients] = weakref.WeakSet()  # that may have left something open


def may_be_left_open() -> bool:
    """Return whether some backward has left gradients open, of whatever parameters."""
    return len(_open) > 0


def left_open_params(held: Collection[int]) -> list[FSDPParam]:
    """Return the parameters with shards of these ids whose gradients backwards left open; alike on all ranks."""
    found = []
    for gradients in list(_open):
        found += [param for i, param in gradients.find_left_open() if id(param.sharded) in held]
    return found


def drop_left_open(held: Collection[int]) -> None:
    """Drop what backwards left open of parameters with shards of these ids."""
    for gradients in list(_open):
        gradients.drop_left_open(held)


@dataclass
class _Backward:
    """One backward through the group, from its entry until the rest of its gradients left."""

    task: int
    plan: GradientPlan
    waiting: list[set[int]]  # of each chunk that leaves early, what is not finished
    awaited: set[int] | None  # gradients after the last of which ``end`` is called, if anything
    end: Callable[[], None]
    launch: Launch
    unfinished: set[int]  # where the next gather waits for the last gradient
    final: bool  # no unit is known to follow
    launched: int = 0

    def sent(self) -> set[int]:
        """Return the parameters whose gradients have left."""
        return {i for chunk in self.plan.chunks.streamed[: self.launched] for i in chunk}


class GroupGradients:
    """Streams the gradients of one group: chunks of large ones leave as they are finished, the rest at the end.

    Chunks leave in one fixed order, so every rank launches the same collectives in the same order whatever the order
    in which autograd finishes the gradients.
    """

    def __init__(self, store: ShardStore, axis: Axis, comm: CommContext, notice_backward: Callable[[], None]) -> None:
        """Gradients travel over ``axis``: the shard axis, or one of the same ranks with a communicator of its own.

        ``notice_backward`` is called when a gradient is finished although no backward entered the group.
        """
        self.axis = axis
        self.comm = comm
        self._notice_backward = notice_backward
        self._watched = _NEVER  # generation and revision of the full parameters whose gradients are hooked
        self._store = store
        self._plan: GradientPlan | None = None  # None before the first use
        self._backward: _Backward | None = None
        self._hooked: dict[int, torch.Tensor] = {}
        # Parameters whose gradients a backward left unreduced, in the reduce dtype, on whichever ranks have them. Alike
        # on all ranks, as they run the same backwards.
        self._unreduced: set[int] = set()
        # Whether autograd makes gradients that are reduced at once (True) or that accumulate; None before either.
        self._expects_reduced: bool | None = None
        self._at_once = False  # backward finishes all gradients together
        # Sums over the shard axis that were not all-reduced yet, by parameter, each with what it was divided by.
        self._partial: dict[int, tuple[torch.Tensor, float]] = {}
        self._completes = False  # what is left open is reduced now, whatever the options say of backwards

    def use_axis(self, axis: Axis) -> None:
        """Send gradients over ``axis`` from now on, the same ranks as the shard axis."""
        self.axis = axis
        self._store.note_change()

    def _current_plan(self) -> GradientPlan:
        """Return how the gradients travel, planned anew where parameters, dtypes or options changed."""
        if self._plan is None or self._plan.revision != self._store.revision:
            self._plan = GradientPlan(self._store, self.axis, self.comm, self._partial)
            self._expects_reduced = None
        return self._plan

    def _hook(self, i: int) -> None:
        """Learn when parameter ``i``'s gradient is finished; once per full parameter."""
        full = self._store.params[i].full
        assert full is not None
        if self._hooked.get(i) is full:
            return
        self._hooked[i] = full
        reference = weakref.ref(self)

        def ready(tensor: torch.Tensor) -> None:
            gradients = reference()
            if gradients is not None:
                gradients._finished(i)

        hook_gradient(full, ready)

    # ---- one backward ----

    @property
    def gathers_later(self) -> bool:
        """True if the gather of what follows in backward is best started when this group's gradients are finished.

        A unit with few bytes computes for less time than the host needs for it, so its gather would come too late.
        """
        is_late = self._store.full_bytes >= _LATE_BYTES
        return is_late and self.comm.lanes.on_streams and bool(self._current_plan().chunk_of)

    def expect_from(self, nodes: int) -> None:
        """Note how many autograd nodes the forward made. Fewer than weights: a compiled block, where one makes all.

        Its gradients appear at once, so nothing computes beside their chunks, and to wait for one of them before the
        next leaves would only idle. This rank alone may find that: collectives are the same either way.
        """
        self._at_once = nodes < len(self._current_plan().chunk_of)

    def begin_backward(self, launch: Launch, end: Callable[[], None], *, count: bool, final: bool = False) -> None:
        """Backward enters the group; with ``count``, ``end`` is called when the last gradient is finished.

        ``final``: no other group is known to follow.
        """
        self.watch_all()
        plan = self._current_plan()
        reduced = self._store.options.reduce_gradients and not self._unreduced
        if reduced is not self._expects_reduced:
            self._expects_reduced = reduced
            for param in self._store.params:
                if param.requires_grad:
                    param.expect_gradients(reduced=reduced, rounded=plan.is_rounded)
        waiting = [set(chunk) for chunk in plan.chunks.streamed]
        awaited = self._expected() if count else None
        unfinished = set(plan.chunk_of) if self.gathers_later else set()
        self._backward = _Backward(graph_task_id(), plan, waiting, awaited, end, launch, unfinished, final)

    def watch_all(self) -> None:
        """Notice every gradient from now on, also in a backward that does not enter by the module's outputs."""
        store = self._store
        if self._watched == (store.generation, store.revision):
            return
        self._current_plan()
        for i in self._computed():
            self._hook(i)
        self._watched = (store.generation, store.revision)

    def _expected(self) -> set[int] | None:
        expected = set()
        for i in self._computed():
            full = self._store.params[i].full
            assert full is not None
            if will_accumulate(full):
                expected.add(i)
        return expected or None

    def _computed(self) -> list[int]:
        """Return the parameters of the plan whose gradients autograd computes.

        The others were frozen while a gradient of theirs was still to be reduced.
        """
        return [i for i in self._current_plan().chunk_of if self._store.params[i].requires_grad]

    def _finished(self, i: int) -> None:
        """Autograd has finished parameter ``i``'s gradient; stage 7 of the life of a parameter."""
        backward = self._backward
        if backward is None:
            self._notice_backward()
            return
        plan, waiting = backward.plan, backward.waiting
        if i not in plan.chunk_of:
            return  # it was frozen since the forward: autograd calls hooks, but makes no gradient
        chunk = plan.chunk_of[i]
        if self.comm.reductions.packed:  # of the unit before: compute has come far enough for them to be copied
            self.comm.reductions.drop_packed()
        if backward.unfinished:
            backward.unfinished.discard(i)
            if not backward.unfinished:
                self.comm.gather_now()  # at the latest: backward may be done with the unit's inputs much later
        if waiting and chunk < len(waiting) and self._store.options.reduce_gradients:
            waiting[chunk].discard(i)
            while backward.launched < len(waiting) and not waiting[backward.launched]:
                backward.launched += 1
                chunk_indices, first = plan.chunks.streamed[backward.launched - 1], backward.launched == 1
                self._launch(plan, chunk_indices, backward.launch, "early", first=first)
        # What a backward inside this one finishes (reentrant checkpointing) may be added to outside of it.
        if backward.awaited is not None and graph_task_id() == backward.task:
            backward.awaited.discard(i)
            if not backward.awaited:
                backward.awaited = None
                backward.end()

    def reduce_rest(self, launch: Launch) -> None:
        """Reduce every gradient that is there and has not left; that ends the backward through the group."""
        backward, self._backward = self._backward, None
        sent = set() if backward is None else backward.sent()
        finished: Finished = "early" if backward is None or backward.final else "last"
        params, unused = self._store.params, self._store.options.reduce_unused
        for param in params if unused else ():
            if param.requires_grad and param.reduce_dtype is None:
                raise ValueError(
                    f"{param.name}: Reducing unused parameters with grad_dtype=None requires an explicit "
                    "MixedPrecisionPolicy.reduce_dtype, since all ranks must make zeros of one dtype; set it to the "
                    "dtype that its gradients have"
                )
        there = self._there()
        if not unused and True not in there and not self._partial:
            self._unreduced.clear()  # nothing was left, or it is gone
            return
        plan, first, left = self._current_plan(), not sent, False
        for chunk in plan.chunks.chunks:
            present = [i for i in chunk if there[i] or (i not in sent and (unused or self._must_flush(i)))]
            if present:
                left |= not self._launch(plan, tuple(present), launch, finished, first=first)
                first = False
        if not left:
            self._unreduced.clear()

    @property
    def left_open(self) -> bool:
        """True if backwards left gradients unreduced, or sums that were not all-reduced; alike on all ranks."""
        return bool(self._unreduced or self._partial)

    def note_open(self) -> None:
        """Remember that gradients are left to be reduced later, for those who would not see them on the shards."""
        _open.add(self)

    def find_left_open(self) -> list[tuple[int, FSDPParam]]:
        """Return the parameters whose gradients were left open, by number; none while they are being reduced.

        Where ranks may skip units, these are all parameters, since the ranks that have none send zeros.
        """
        params, unused = self._store.params, self._store.options.reduce_unused
        if self._in_use():
            return []
        there = self._there()
        found = [
            (i, param)
            for i, param in enumerate(params)
            if there[i] or i in self._partial or (unused and i in self._unreduced and param.requires_grad)
        ]
        if not found and not self.left_open:
            _open.discard(self)
        return found

    def _in_use(self) -> bool:
        """Return whether a pass computes with the group, or reduces its gradients."""
        params = self._store.params
        return not params or params[0].group.phases.phase is not Phase.IDLE or self._completes

    def drop_left_open(self, held: Collection[int]) -> None:
        """Drop what was left open of parameters with shards of these ids, unless a pass uses it."""
        if self._in_use():
            return
        for i, param in enumerate(self._store.params):
            if id(param.sharded) in held:
                self._partial.pop(i, None)
                self._unreduced.discard(i)
                param.drop_unreduced_gradient()

    def complete(self, launch: Launch) -> None:
        """Reduce what backwards left open, over both axes."""
        self._completes = True
        try:
            self.reduce_rest(launch)
        finally:
            self._completes = False

    def will_come(self) -> bool:
        """Return whether the backward that runs will finish a gradient of the group."""
        return self._plan is not None and bool(self._expected())

    def left_over(self) -> bool:
        """Return whether autograd finished a gradient after the last reduction, which should have been part of it."""
        return self._store.options.reduce_gradients and True in self._there()

    def _there(self) -> list[bool]:
        """Return for each parameter whether there is a gradient that was not reduced yet."""
        return [param.full is not None and param.full.grad is not None for param in self._store.params]

    def _must_flush(self, i: int) -> bool:
        return i in self._partial and self._all_reduces

    @property
    def _all_reduces(self) -> bool:
        return self._completes or self._store.options.all_reduce_gradients

    def leave_unreduced(self) -> None:
        """Leave the gradients unreduced for a later backward."""
        self._backward, self._expects_reduced = None, False
        self._unreduced.update(i for i, param in enumerate(self._store.params) if param.requires_grad)
        self.note_open()
        for param in self._store.params:
            if param.requires_grad:
                param.expect_gradients(reduced=False, rounded=False)

    def zero(self, *, set_to_none: bool) -> None:
        """Have no gradients, or zeros on the shards that have one; none that is still to be reduced in any case."""
        self._partial.clear()
        self._unreduced.clear()
        for param in self._store.params:
            param.drop_gradient(to_zeros=not set_to_none)

    def reset(self) -> None:
        """Drop all gradients, also those that were reduced: they may be of the iteration that failed."""
        self._partial.clear()
        self._unreduced.clear()
        self._backward = self._expects_reduced = None
        for param in self._store.params:
            param.drop_gradient()

    # ---- one chunk ----

    def _launch(
        self, plan: GradientPlan, indices: tuple[int, ...], launch: Launch, finished: Finished, *, first: bool
    ) -> bool:
        """Reduce the gradients of these parameters, in one collective of the pass if other ranks take part.

        It is the ``first`` chunk of the group in this backward, or a later one. Returns False if other ranks come to it
        later; then the gradients stay where they are.
        """
        store = self._store
        if self._at_once:
            finished = "together"
            if first:
                self.comm.reductions.make_room(store.full_bytes + store.reduce_bytes)
        self.comm.gather_now()  # needed before these gradients are, and collectives run in the order of their launch
        reduce = partial(self._reduce, plan, indices, finished)
        if store.mesh.shard.size == store.mesh.replicate.size == 1:
            reduce()
            return True
        dtypes = plan.dtypes[indices[0]]
        part = indices if self._unreduced or dtypes.wire == dtypes.reduce else (*indices, AS_COMPUTED)
        return launch(Collective("reduce", store.params[indices[0]].group, part), reduce)

    def _reduce(self, plan: GradientPlan, indices: tuple[int, ...], finished: Finished) -> None:
        store = self._store
        params = [store.params[i] for i in indices]
        group = params[0].group
        taken = take_gradients(params)
        grads = [_zeros(p, store.mesh.device) if grad is None else grad for p, grad in zip(params, taken)]
        del taken
        deliver = partial(accumulate_gradients, params)
        sums = [self._partial[i][0] for i in indices if i in self._partial]
        reduction = plan.reduction(indices, (*grads, *sums), accumulated=bool(self._unreduced))
        del sums
        if _trace.recording:
            _trace.emit("reduce", group.name, sum(grad.numel() for grad in grads) * reduction.reduce_dtype.itemsize)
        row = plan.row(indices)
        if not row.numel:  # empty parameters: nothing to send, on any rank
            deliver([torch.empty(p.spec.shard_shape, dtype=reduction.out_dtype, device=p.local.device) for p in params])
            return
        defer_or_reduce = self._defer_or_reduce(indices, reduction) if store.mesh.replicate.size > 1 else None
        reductions = self.comm.reductions
        operation = reduce_chunk(grads, row, reduction, reductions, deliver, defer_or_reduce, finished=finished)
        nbytes = sum([grad.nbytes for grad in grads])
        del grads
        if _trace.recorder is not None:
            operation = _trace.owned(group.name, operation)
        reductions.add(operation, nbytes)

    def _defer_or_reduce(self, indices: tuple[int, ...], reduction: ReducePlan) -> Callable[[list[torch.Tensor]], bool]:
        """Return what joins sums over the shard axis with earlier ones, to be all-reduced then (True) or later (False).

        Earlier ones may have been divided by something else, where a setter was called between micro-batches.
        """
        all_reduce, divided = self._all_reduces, reduction.divided_over_shards

        def defer_or_reduce(pieces: list[torch.Tensor]) -> bool:
            for i, piece in zip(indices, pieces):
                earlier, divisor = self._partial.pop(i, (None, divided))
                if earlier is not None:
                    piece += earlier if divisor == divided else earlier * (divisor / divided)
                if not all_reduce:
                    self._partial[i] = piece, divided
                    self.note_open()
            return all_reduce

        return defer_or_reduce


def _zeros(param: FSDPParam, device: torch.device) -> torch.Tensor:
    """The gradient of a parameter that took no part, for ranks on which it did."""
    layout = param.spec.layout
    return torch.zeros(layout.shape, dtype=param.compute_dtype, device=device).as_strided(layout.shape, layout.stride)
