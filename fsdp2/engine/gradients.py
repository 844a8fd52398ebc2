"""A group's gradients in backward: which chunk is reduced when, and which wait for a later backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from fsdp2 import _trace
from fsdp2._torch.autograd import graph_task_id, will_accumulate
from fsdp2._torch.hooks import skipped_by_dynamo
from fsdp2.autograd.hooks import hook_gradient
from fsdp2.comm.context import CommContext
from fsdp2.comm.reduce import Finished, ReducePlan, reduce_chunk
from fsdp2.engine.collective import AS_COMPUTED, Collective, Launch, ObservedGroup, lacking
from fsdp2.engine.gradient_plan import GradientPlan
from fsdp2.engine.param import FSDPParam, accumulate_gradients, have_gradients, take_gradients
from fsdp2.engine.phase import Phase, PhaseTracker
from fsdp2.engine.unreduced import Unreduced
from fsdp2.sharding.mesh import Axis

__all__ = ["GroupGradients", "ReducingPass"]

_NEVER = (-1, -1)  # no generation and no revision of full parameters
# A unit of this size or more computes for milliseconds on any device, so that the host runs ahead.
_LATE_BYTES = 64 << 20
# A gradient of less than this part of its unit (of a norm or a bias) may be finished before compute has got anywhere.
_SMALL_PART = 16


class ReducingPass(Protocol):
    """A pass that may reduce gradients, as far as these have to know one (``passes.Pass``)."""

    over: bool  # autograd's backward has ended

    def launch(self, collective: Collective, start: Callable[[], None], *, optional: bool = False) -> bool:
        """Show ``collective`` to the observer and call ``start``, or leave an ``optional`` one for later."""


@dataclass
class _Backward:
    """One backward through the group, from its entry until ``reduce_rest``."""

    task: int  # autograd's number of this backward
    plan: GradientPlan
    run: ReducingPass
    end: Callable[[], None]
    final: bool  # no unit is known to follow
    # Parameters whose gradients are still to come: those of each streamed chunk; those before ``end`` is called (None
    # if the inputs tell when backward is done); those before the postponed gather starts.
    chunks_wait: list[set[int]]
    end_waits: set[int] | None
    gather_waits: set[int]
    offered: int = 0  # streamed chunks that were launched, or left for later with their gradients on the parameters
    arrived: set[int] = field(default_factory=set)  # parameters with new gradients, where earlier ones have accumulated

    def params_offered(self) -> set[int]:
        """Return the parameters in these chunks."""
        return {i for chunk in self.plan.chunks.streamed[: self.offered] for i in chunk}


class GroupGradients:
    """Streams the gradients of one group: chunks of large ones are reduced as they are finished, the others at the end.

    Chunks have one fixed order, so every rank launches the same collectives in the same order, in whatever order
    autograd finishes the gradients.
    """

    def __init__(
        self,
        group: ObservedGroup,
        phases: PhaseTracker,
        axis: Axis,
        comm: CommContext,
        notice_backward: Callable[[], None],
    ) -> None:
        """Reduce over ``axis``: the shard axis, or one of the same ranks with another communicator.

        ``notice_backward`` is called if a gradient is finished although no backward has entered the group.
        """
        self.axis = axis
        self.comm = comm
        # A lambda, because the group may get another ``comm``.
        self.unreduced = Unreduced(group.store, self._in_use, lambda: self.comm.reductions.finish())
        self._group = group
        self._phases = phases
        self._notice_backward = notice_backward
        self._store = group.store
        self._plan: GradientPlan | None = None  # None before the first use
        self._backward: _Backward | None = None
        self._watched = _NEVER  # generation and revision of the full parameters whose gradients are hooked
        self._hooked: dict[int, torch.Tensor] = {}  # the full parameters that have our hook, by index
        # What full parameters expect: gradients that are reduced at once (True), or that accumulate, and then which of
        # them have some; None: not yet set.
        self._expects: bool | list[bool] | None = None
        self._at_once = False  # backward finishes all gradients together
        self._completes = False  # ``complete`` runs: reduce over both axes, whatever the options say

    def _in_use(self) -> bool:
        # Not in a forward: an interrupt may have left that, and it makes no gradients.
        return self._phases.phase in (Phase.BACKWARD, Phase.REDUCED) or self._completes

    def use_axis(self, axis: Axis) -> None:
        """Send gradients over ``axis`` from now on, the same ranks as the shard axis."""
        self.axis = axis
        self._store.note_change()

    def _current_plan(self) -> GradientPlan:
        """Return the plan; make a new one if parameters, dtypes or options changed."""
        if self._plan is None or self._plan.revision != self._store.revision:
            self._plan = GradientPlan(self._store, self.axis, self.comm, self.unreduced.sums)
            self._expects = None  # rounding may differ, and new full parameters have no dtype for gradients yet
        return self._plan

    def _hook(self, i: int) -> None:
        """Call ``_arrives`` when the gradient of parameter ``i`` is finished. Each full parameter is hooked once."""
        full = self._store.params[i].full
        assert full is not None
        if self._hooked.get(i) is full:
            return
        self._hooked[i] = full
        # A weak reference: the hook lives as long as the full parameter, which a user may keep.
        hook_gradient(full, partial(self._arrives, weakref.ref(self), i))

    # ---- one backward ----

    @property
    def gathers_later(self) -> bool:
        """True if the next gather in this backward is best started when this group's gradients are finished."""
        return self._backward is not None and bool(self._backward.gather_waits)

    def expect_from(self, nodes: int) -> None:
        """Note how many autograd ``nodes`` the forward made: fewer than weights if a compiled block has one for all.

        Then all gradients appear together, so nothing computes beside their chunks, and a chunk that waits for an
        earlier one would only idle. Ranks may decide differently, because collectives are the same either way. Nodes of
        units below count as well; a compiled block has no such units.
        """
        self._at_once = nodes < len(self._current_plan().reduced)

    def begin_backward(self, run: ReducingPass, end: Callable[[], None], *, count: bool, final: bool) -> None:
        """Enter the group's backward in ``run``; with ``count``, call ``end`` when the last gradient is finished.

        ``final``: no other group is known to follow.
        """
        self.watch_all()
        plan = self._current_plan()
        self.comm.reductions.memory.expect_unit(plan.nbytes)
        if self._store.options.reduce_gradients and not self.unreduced.accumulated:
            self._expect(True, rounded=plan.is_rounded)
        else:
            self._expect(have_gradients(self._store.params))
        # The backward of a small unit takes less time than the host needs for it: the gather would start too late.
        gathers_later = self._store.full_bytes >= _LATE_BYTES and self.comm.lanes.on_streams
        self._backward = _Backward(
            graph_task_id(),
            plan,
            run,
            end,
            final,
            chunks_wait=[set(chunk) for chunk in plan.chunks.streamed],
            end_waits=self._expected() if count else None,
            gather_waits=set(plan.reduced) if gathers_later else set(),
        )

    def watch_all(self) -> None:
        """Hook all gradients, so that a backward is noticed even if it does not enter through the module's outputs.

        Raises:
            RuntimeError: The shards are on another device than the gradients will be.
        """
        store = self._store
        if self._watched == (store.generation, store.revision):
            return
        computed = self._computed()
        store.refuse_gradients_elsewhere(computed)
        for i in computed:
            self._hook(i)
        self._watched = (store.generation, store.revision)

    def _expected(self) -> set[int] | None:
        expected = set()
        for i in self._computed():
            full = self._store.params[i].full  # None if this rank has never used the unit
            if full is not None and will_accumulate(full):
                expected.add(i)
        return expected or None  # an empty set would never call ``end``

    def _computed(self) -> list[int]:
        """Return the parameters of the plan that train. Others were frozen while a gradient was still to be reduced."""
        return [i for i in self._current_plan().reduced if self._store.params[i].requires_grad]

    @staticmethod
    @skipped_by_dynamo
    def _arrives(gradients: weakref.ref[GroupGradients], i: int, full: torch.Tensor) -> None:
        """Launch the chunks that gradient ``i``, just finished, completes; stage 7 of the life of a parameter."""
        self = gradients()
        if self is None:
            return
        backward = self._backward
        if backward is None or backward.run.over:  # one that is over may still wait for ``finalize_backward``
            self._notice_backward()
            return
        self.comm.lanes.compute.catch_up()
        plan, memory = backward.plan, self.comm.reductions.memory
        if i not in plan.reduced:
            return  # it was frozen after the forward: autograd calls its hooks, but makes no gradient
        if self.unreduced.accumulated:
            backward.arrived.add(i)
        if memory.packed and full.nbytes * _SMALL_PART >= self._store.full_bytes:
            memory.drop_packed()  # of the previous unit: the pack lane has copied them beside this unit's compute
        if backward.gather_waits:
            backward.gather_waits.discard(i)
            if not backward.gather_waits:
                self.comm.start_postponed()  # now at the latest: backward may leave the unit much later
        if i in plan.streamed_in and self._store.options.reduce_gradients:  # reduce_rest launches the other chunks
            chunks = backward.chunks_wait
            chunks[plan.streamed_in[i]].discard(i)
            while backward.offered < len(chunks) and not chunks[backward.offered]:
                backward.offered += 1
                indices, first = plan.chunks.streamed[backward.offered - 1], backward.offered == 1
                # If it is left for later, the gradients stay on the parameters, and reduce_rest sends them.
                self._launch(plan, indices, backward.run.launch, "early", first=first)
        # Not in a backward inside this one (reentrant checkpointing), which may still add to the gradient.
        if backward.end_waits is not None and graph_task_id() == backward.task:
            backward.end_waits.discard(i)
            if not backward.end_waits:
                backward.end_waits = None
                backward.end()

    def _awaited(self, backward: _Backward | None) -> set[int]:
        """Return the parameters that may have gradients of earlier backwards, but expect those of this one.

        They are sent when these have come, as on ranks that have no earlier ones: backward comes to a unit that is
        called twice before it has finished any of its gradients.
        """
        if backward is None or backward.run.over or not self.unreduced.accumulated:
            return set()
        return (self._expected() or set()) - backward.arrived

    def reduce_rest(self, launch: Launch) -> None:
        """Reduce every gradient that was not reduced yet, and end the backward through the group."""
        backward, self._backward = self._backward, None
        offered = set() if backward is None else backward.params_offered()
        # Unless a unit follows, nothing computes beside which these gradients could be copied.
        finished: Finished = "early" if backward is None or backward.final or backward.run.over else "last"
        params, unused = self._store.params, self._store.options.reduce_unused
        for param in params if unused else ():
            if param.requires_grad and param.reduce_dtype is None:
                raise ValueError(
                    f"{param.name}: Reducing unused parameters with grad_dtype=None requires an explicit "
                    "MixedPrecisionPolicy.reduce_dtype, since all ranks must make zeros of one dtype; set it to the "
                    "dtype that its gradients have"
                )
        there = have_gradients(params)
        if not unused and True not in there and not self.unreduced.sums:
            self.unreduced.accumulated.clear()  # no backward has left any, or somebody has dropped them
            # As if its gradients were sent: what is in flight would otherwise stay in memory beside the next unit.
            self.comm.reductions.make_room(self._store.full_bytes)
            return
        awaited = set() if unused else self._awaited(backward)
        plan, first, left = self._current_plan(), not offered, bool(awaited)
        for chunk in plan.chunks.chunks:
            wanted = [i for i in chunk if there[i] or (i not in offered and (unused or self._must_flush(i)))]
            present = [i for i in wanted if i not in awaited] if awaited else wanted
            if present:
                lacks = sorted({*chunk}.difference(present)) if len(present) < len(chunk) else ()
                left |= not self._launch(plan, tuple(present), launch, finished, first=first, lacks=lacks)
                first = False
        if not left:
            self.unreduced.accumulated.clear()

    def complete(self, launch: Launch) -> None:
        """Reduce over both axes the gradients that backwards have left unreduced."""
        self._completes = True
        try:
            self.reduce_rest(launch)
        finally:
            self._completes = False

    def will_come(self) -> bool:
        """Return whether the running backward will finish a gradient of the group."""
        return self._plan is not None and bool(self._expected())

    def left_over(self) -> bool:
        """Return whether autograd has finished a gradient after the last reduction, too late to be part of it."""
        return self._store.options.reduce_gradients and True in have_gradients(self._store.params)

    def _must_flush(self, i: int) -> bool:
        return self._all_reduces and self._store.params[i] in self.unreduced.sums

    @property
    def _all_reduces(self) -> bool:
        return self._completes or self._store.options.all_reduce_gradients

    def leave_unreduced(self) -> None:
        """Leave the gradients unreduced for a later backward."""
        self._backward = None
        self.unreduced.accumulated.update(param for param in self._store.params if param.requires_grad)
        self.unreduced.register()
        self._expects = None  # look again also if the same ones have some: these may be new, in another dtype
        self._expect(have_gradients(self._store.params))

    def _expect(self, expects: bool | list[bool], *, rounded: bool = False) -> None:
        """Let autograd make gradients that are reduced at once (True), or that accumulate, of those which have some."""
        if expects == self._expects:
            return
        self._expects = expects
        for param in self._store.params:
            if param.requires_grad:
                param.expect_gradients(reduced=expects is True, rounded=rounded)

    def zero(self, params: Collection[FSDPParam], *, set_to_none: bool) -> None:
        """Drop the gradients of ``params``, unreduced ones too; without ``set_to_none``, zero those of shards."""
        self.unreduced.forget(params)
        for param in params:
            param.drop_gradient(to_zeros=not set_to_none)

    def reset(self) -> None:
        """Drop all gradients, reduced ones too: they may be those of the iteration that failed."""
        self.unreduced.forget(self._store.params)
        self._backward = self._expects = None
        for param in self._store.params:
            param.drop_gradient()

    # ---- one chunk ----

    def _launch(
        self,
        plan: GradientPlan,
        indices: tuple[int, ...],
        launch: Launch,
        finished: Finished,
        *,
        first: bool,
        lacks: Collection[int] = (),
    ) -> bool:
        """Reduce the gradients of these parameters, in one collective of the pass if there are other ranks.

        It is the ``first`` chunk of the group in this backward, or a later one, and ``lacks`` the gradients of some.
        Return False if other ranks launch it later: then the gradients stay on the parameters.
        """
        store = self._store
        if self._at_once:
            finished = "together"
            if first:
                self.comm.reductions.memory.make_room(store.full_bytes + store.reduce_bytes)
        # Collectives run in the order of their launch, and the gathered parameters are needed before these gradients.
        self.comm.start_postponed()
        reduce = partial(self._reduce, plan, indices, finished)
        if store.mesh.shard.size == store.mesh.replicate.size == 1:
            reduce()
            return True
        dtypes = plan.dtypes[indices[0]]
        # On every rank, gradients that have accumulated have the dtype of the sum.
        part = indices if self.unreduced.accumulated or dtypes.wire == dtypes.reduce else (*indices, AS_COMPUTED)
        return launch(Collective("reduce", self._group, (*part, *map(lacking, lacks)) if lacks else part), reduce)

    def _reduce(self, plan: GradientPlan, indices: tuple[int, ...], finished: Finished) -> None:
        store = self._store
        params = [store.params[i] for i in indices]
        grads = take_gradients(params, store.mesh.device)
        deliver = partial(accumulate_gradients, params)
        earlier = self.unreduced.sums
        sums = [earlier[param][0] for param in params if param in earlier] if earlier else []
        reduction = plan.reduction(indices, (*grads, *sums), accumulated=bool(self.unreduced.accumulated))
        del sums
        if _trace.recording:
            _trace.emit("reduce", self._group, sum(grad.numel() for grad in grads) * reduction.reduce_dtype.itemsize)
        row = plan.row(indices)
        if not row.numel:  # only empty parameters: no rank has anything to send
            deliver([torch.empty(p.spec.shard_shape, dtype=reduction.out_dtype, device=p.local.device) for p in params])
            return
        defers = store.mesh.replicate.size > 1 and (earlier or not self._all_reduces)
        defer_or_reduce = self._defer_or_reduce(params, reduction) if defers else None
        memory = self.comm.reductions.memory
        operation = reduce_chunk(grads, row, reduction, memory, deliver, defer_or_reduce, finished=finished)
        del grads
        # As computed, although this rank's may be wider, because they have accumulated: what is in flight decides the
        # order of the collectives, where a reduction has several on one process group.
        nbytes = row.full_numel * plan.dtypes[indices[0]].computed.itemsize
        self.comm.reductions.add(operation, nbytes, self._group, plan.nbytes)

    def _defer_or_reduce(self, params: list[FSDPParam], reduction: ReducePlan) -> Callable[[list[torch.Tensor]], bool]:
        """Return a function that adds earlier sums to those over the shard axis, and returns whether to all-reduce now.

        Earlier sums have another divisor if a setter was called between micro-batches.
        """
        all_reduce, divided, unreduced = self._all_reduces, reduction.divided_over_shards, self.unreduced

        def defer_or_reduce(pieces: list[torch.Tensor]) -> bool:
            for param, piece in zip(params, pieces):
                earlier, divisor = unreduced.sums.pop(param, (None, divided))
                if earlier is not None:
                    piece += earlier if divisor == divided else earlier * (divisor / divided)
                if not all_reduce:
                    unreduced.sums[param] = piece, divided
                    unreduced.register()
            return all_reduce

        return defer_or_reduce
