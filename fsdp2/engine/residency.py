"""Residency: what of one group's parameters is in memory, what its modules show, and every move between.

This is the only place that knows. ``level`` says what is in memory beside the shards, and ``kept`` how much of that
outlives its use; ``_MOVES`` says which level may follow which. Everyone else uses these verbs:

* ``start``: start gathering;
* ``ready``: wait for the gather, so that compute may read the full parameters;
* ``keep``: let what is in memory outlive its use;
* ``lower``: free what is above a level, except what is kept;
* ``free``: keep the shards alone.

A pass that gathers lowers to the shards when its use, or the pass, is over, and need not know who else needs the
memory. What is kept is what a backward will need, what ``set_reshard_after_backward(False)`` keeps for the next
forward, or what the caller asked for with ``unshard()``. What can be used later has a ``Stamp`` of the shards that it
was made of: a forward that finds others gathers anew.

The modules show what is in memory, with two exceptions: while a state dict or a deep copy is made they show shards, so
that this neither frees nor gathers, and those of a unit that stays in memory for a backward alone show shards until
then. ``summoned`` suspends all of it for ``summon_full_params``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import NamedTuple, Protocol

import torch

from fsdp2 import _trace
from fsdp2._warn import warn
from fsdp2.comm.context import CommContext
from fsdp2.comm.gather import GatherBuffers, Gathering, finish_gather, start_gather
from fsdp2.engine.buffers import ShardStore
from fsdp2.engine.collective import Collective, Launch, ObservedGroup
from fsdp2.engine.param import FSDPParam, Shown, shows
from fsdp2.engine.stamp import UNSEEN, Stamp
from fsdp2.engine.subgroup import SubgroupShards
from fsdp2.policies import AllGather
from fsdp2.sharding.mesh import Axis

__all__ = ["Level", "Residency", "Summoning"]


class Level(IntEnum):
    """What of a group is in memory beside its shards."""

    SHARDS = 0  # nothing
    PIECES = 1  # pieces on a few neighbouring ranks, under ``reshard_after_forward=<int>``
    GATHERING = 2  # memory that a gather writes, and the pieces that it reads, if it does
    FULL = 3  # full parameters, and the pieces that they were gathered from, if these are kept


_MOVES: dict[Level, tuple[Level, ...]] = {
    Level.SHARDS: (Level.GATHERING,),
    Level.PIECES: (Level.SHARDS, Level.GATHERING),
    Level.GATHERING: (Level.SHARDS, Level.PIECES, Level.FULL),  # the first two: a prefetch that was not used
    Level.FULL: (Level.SHARDS, Level.PIECES),
}
_REMEDY = "call reshard() on the unit of the parameter after such a write"


class _Source(NamedTuple):
    """What a gather reads, and over which axis."""

    buffers: GatherBuffers
    axis: Axis
    custom: AllGather | None


class Summoning(Protocol):
    """A block of ``summon_full_params``."""

    ending: bool  # the block is over, perhaps interrupted while it ended, so that a recovery may clear it


class Residency:
    """The parameters of one group: what of them is in memory, and what its modules show."""

    def __init__(self, group: ObservedGroup, store: ShardStore, comm: CommContext) -> None:
        self.store = store
        self.comm = comm
        self._group = group  # whose gathers these are, for the observer
        self.level = Level.SHARDS
        self.shown: Shown = "shards"  # what the modules show, unless others have put something there
        self.gathering: Gathering | None = None  # the gather, while there is one
        self._pieces: SubgroupShards | None = None
        # While summon_full_params shows some of the parameters, nothing is gathered or freed: what is in memory stays
        # there, and is shown again afterwards.
        self.summoned: dict[FSDPParam, Summoning] = {}
        # Of the latest forward: the generation of the full parameters before it, their versions, and whether it trains.
        self._before_forward: tuple[int, list[int], bool] | None = None
        self._forget_memory()
        store.show(store.params, "shards", over_others=True)

    def _forget_memory(self) -> None:
        """Forget what is known of what was in memory: it is freed."""
        self.kept = Level.SHARDS  # the level to which memory falls when those that use it are done
        self._stamp: Stamp | None = None  # of the shards that it was made of, if it may be used later
        self._loud = False  # it was gathered ahead by a use that was not quiet: a quiet one may come behind an update
        # The versions of the full parameters when they were left to later uses, and whether the caller asked for that.
        self._versions_left: list[int] | None = None
        self._by_hand = False
        # The modules hold other shards than ours, perhaps for a single forward (``functional_call``), which must free
        # what is gathered from them.
        self.adopted = False

    def __del__(self) -> None:
        """Let what gathers read outlast a model that is dropped behind an exception, for which nobody waits."""
        portions = self.store.portions
        if portions is not None and portions.arriving is not None:
            portions.arriving.let_outlast()
        if self.gathering is not None:
            self.gathering.let_outlast()
            if portions is not None:  # its lane has waited for the gather of the portions, and compute has not
                self.gathering.lane.keep(portions.gather_buffers.source)

    def __repr__(self) -> str:
        kept = f", {self.kept.name.lower()} kept" if self.kept else ""
        return f"{self.level.name.lower()} in memory{kept}, shows {'summoned' if self.summoned else self.shown}"

    def _move(self, level: Level) -> None:
        if level not in _MOVES[self.level]:
            raise RuntimeError(
                f"{self.name or 'the root'}: got a move from {self.level.name} to {level.name}, expected one of: "
                f"{', '.join(allowed.name for allowed in _MOVES[self.level])}"
            )
        self.level = level

    @property
    def name(self) -> str:
        """The group's name."""
        return self._group.name

    # ---- questions ----

    @property
    def is_full(self) -> bool:
        """True if the full parameters are in memory and ready."""
        return self.level is Level.FULL

    @property
    def is_gathering(self) -> bool:
        """True if a gather is in flight."""
        return self.level is Level.GATHERING

    @property
    def in_memory(self) -> bool:
        """True if anything beside the shards is in memory, or on its way there."""
        return self.level is not Level.SHARDS

    @property
    def needs_gather(self) -> bool:
        """True if ``start`` would start a gather."""
        return self.level < Level.GATHERING and not self.summoned

    def is_outdated(self, *, quiet: bool = False) -> bool:
        """Return whether what is in memory, or on its way, must not be used any more: the shards changed.

        All ranks that compute with the group ask this at the same places, so they gather anew alike. A ``quiet`` use,
        without gradients inside a forward with gradients, trusts no gather that started before the first such use.

        Raises:
            RuntimeError: somebody put others in the place of full parameters.
        """
        if self.summoned:
            return False
        if not self.kept:
            loud = self.level is Level.GATHERING and self._loud
            return (quiet and loud) or (self._stamp is not None and self._stamp.changed)
        if shows(self.store.params, self.shown):
            return self._stamp is None or self._stamp.changed
        if self.shown != "shards":
            # To free the group would put the shards in their place, and lose them.
            raise RuntimeError(
                f"{self.store.params[0].name}: its module shows other parameters than the full ones that unshard() or "
                "an earlier forward left there; expected these. Call reshard() on the module before you replace "
                "parameters or use functional_call"
            )
        return True  # shards were put in the place of shards: the next gather takes them in

    def free_rewritten(self, *, compared: bool) -> bool:
        """Free what was made of shards that have other values now; return whether so. Ask ``is_outdated`` first.

        On a CPU this finds writes that no counter shows (see ``Stamp``).

        Raises:
            RuntimeError: There are some in a pass that is not ``compared``. Whether to gather again depends on values
                that ranks may see differently, and there nobody would notice that they part. Or somebody assigned
                ``.data``, which has no effect on a shard.
        """
        if self.summoned:
            return False  # what is shown belongs to that block, and nothing was gathered
        stamps = []
        if self._stamp is not None:
            self.store.refuse_assigned_data()  # a gather would, but what is in memory needs none
            stamps.append(self._stamp)
        portions = self.store.portions
        if portions is not None and portions.stamp is not None and not portions.outdated:
            stamps.append(portions.stamp)
        names = list(dict.fromkeys(param.name for stamp in stamps for param in stamp.unlike()))
        if not names:
            return False
        found = f"{', '.join(names[:8])}: the sharded parameter was written after it was gathered, {UNSEEN}"
        if not compared and self.store.mesh.gathers_from_others:
            raise RuntimeError(
                f"{found}; got a forward that would compute with the old values, expected those of the shards. To "
                f"gather again would need ranks that are compared: {_REMEDY}"
            )
        warn(
            f"{found}. It is gathered again. On a GPU the forward would compute with the old values, and a later one "
            f"would raise an error: {_REMEDY}"
        )
        self.free()
        self.forget_portions()
        return True

    def _new_stamp(self) -> Stamp:
        """Return a stamp of the shards, with a sample of them unless a device may write them just now."""
        return Stamp(self.store.params, None if self.comm.lanes.on_streams else self.store.sample)

    def refuse_summoned(self, what: str) -> None:
        """Raise RuntimeError if ``summon_full_params`` shows parameters of the group, in the name of ``what``."""
        self.refuse_interrupted(what)
        if self.summoned:
            raise RuntimeError(
                f"{self.name or 'the root'}: {what} while summon_full_params shows its parameters; expected outside "
                "of that context. Leave it first, or summon fewer modules"
            )

    def refuse_unended(self, what: str) -> None:
        """Raise RuntimeError inside a block of ``summon_full_params``. One whose end was interrupted is over."""
        if not all(block.ending for block in self.summoned.values()):
            self.refuse_summoned(what)

    def refuse_interrupted(self, what: str) -> None:
        """Raise RuntimeError if a block of ``summon_full_params`` was interrupted at its end, and still shows."""
        if self.summoned and all(block.ending for block in self.summoned.values()):
            raise RuntimeError(
                f"{self.name or 'the root'}: {what} after the end of summon_full_params was interrupted; got the full "
                "parameters that it showed, expected shards. Call reset_iter_state() on the root module first"
            )

    # ---- start ----

    def start(self, launch: Launch, *, optional: bool = False, in_backward: bool = False) -> None:
        """Start gathering, unless the full parameters are there or on their way.

        An ``optional`` gather, a prefetch, may be left for later by ``launch``.
        """
        if self.level is Level.GATHERING or self.summoned:
            return
        if self.is_full and self.shown != "full" and in_backward and self.store.replaced(in_backward=True):
            # It stayed for this backward alone, and the modules show other shards than it was made of. Gather these, so
            # that ``FSDPParamGroup.pre_backward`` finds and refuses them. (A forward has asked ``is_outdated``.)
            self.reconcile(lasting=False)
        if not self.is_full:
            self._start_gather(launch, optional, in_backward)
        elif self.shown != "full":
            self.show("full")

    def note_gathered(self, *, loud: bool = False) -> None:
        """Stamp what a forward has gathered ahead, or will leave: meanwhile it may step an optimizer, or write itself.

        ``loud``: it was gathered ahead by a use that was not quiet.
        """
        if self._stamp is None and self.level is not Level.SHARDS:
            self._stamp, self._loud = self._new_stamp(), loud

    @_trace.profiled("all_gather")
    def _start_gather(self, launch: Launch, optional: bool, in_backward: bool) -> None:
        store, pieces = self.store, self._pieces
        if pieces is not None:
            # Over neighbours alone: other ranks have pieces of the same values.
            source = _Source(pieces.gather_buffers, pieces.axis, None)
        else:
            self._take_in_replaced(in_backward=in_backward)
            buffers = store.gather_buffers or store.make_gather_buffers(self.comm.lanes)
            if buffers.from_host:
                self._refuse_capture()
            if not self._have_portions(launch, optional=optional, in_backward=in_backward):
                return  # other ranks gather them later
            source = _Source(buffers, store.mesh.shard, store.options.custom_gather)
        start: Callable[[], None] = partial(self._launch, source, in_backward)
        sent: tuple[int, ...] | None = ()  # by extensions; None if that is not known yet
        if store.extensions is not None:
            sent = store.extensions.sent
            start = partial(self._encode, launch, start, source.axis, sent)
        if source.axis.size == 1 or sent is None:
            start()  # on one rank nothing is communicated, so nobody need know, and even a prefetch starts at once
        else:
            launch(Collective("gather", self._group, (*store.formats_digest, *sent)), start, optional=optional)

    def _refuse_capture(self) -> None:
        """Raise RuntimeError if a graph would capture copies of shards that are on the host, which waits for these.

        Ask before the gather is launched: ranks that capture nothing would wait for it.
        """
        if self.comm.lanes.compute.captured:
            raise RuntimeError(
                f"{self.name or 'the root'}: got a gather that is captured in a CUDA graph, expected one outside of a "
                "capture: CPUOffloadPolicy keeps the shards on the host, which waits for copies of them. Shard without "
                "offload_policy, or do not capture"
            )

    def _encode(self, launch: Launch, start: Callable[..., None], axis: Axis, expected: tuple[int, ...] | None) -> None:
        """Encode tensors with all-gather extensions, which decide themselves what is sent, and ``start`` with these.

        The ranks must agree on sizes and dtypes. The observer has been asked about those of the gather before, which
        are ``expected``. The first time, or if they have changed since, it is asked about these.
        """
        store, extensions = self.store, self.store.extensions
        assert extensions is not None
        extras = extensions.encode(axis.size, self.comm.lanes.gather)
        if axis.size == 1 or extensions.sent == expected:
            start(extras)
            return
        part = (*store.formats_digest, *(extensions.sent or ()))
        try:
            launch(Collective("gather", self._group, part), partial(start, extras))
        except BaseException:
            extensions.free()  # what was encoded would stay in memory until the next gather
            raise

    def _launch(self, source: _Source, in_backward: bool, extras: Sequence[torch.Tensor] = ()) -> None:
        if _trace.recording:
            _trace.emit("unshard", self, sum(item.full_bytes for item in source.buffers.items))
        gathering = start_gather(source.buffers, source.axis, self.comm.copies, custom=source.custom, extras=extras)
        self._move(Level.GATHERING)
        self.gathering, self._loud = gathering, False
        if in_backward:
            self.kept = Level.SHARDS  # pieces were kept for this backward, which frees them
        if not self.kept:
            self._stamp = None  # what is gathered now is used now

    def _take_in_replaced(self, *, in_backward: bool) -> None:
        if self.store.replaced(in_backward=in_backward):
            self.store.check_ties()
            self.adopt()
            self.comm.lanes.gather_after_compute()  # compute wrote the shards that were just taken in

    # ---- portions, if parameters are sharded over replicas too ----

    @property
    def portions_outdated(self) -> bool:
        """True if a forward that starts now gathers portions over the replicate axis.

        It does if none outlived a pass, or if shards were written since. As any stamp, all ranks see that alike.
        """
        store, stamp = self.store, self._stamp
        if not store.mesh.has_portions or self.summoned:
            return False
        if self.in_memory:  # it is freed when the group is used
            return bool(self.kept) and (stamp is None or stamp.changed)
        return store.portions is None or store.portions.outdated or store.replaced(in_backward=False)

    def gather_portions(self, launch: Launch) -> None:
        """Start gathering portions, which are outdated, ahead of the gathers over the shard axis that read them."""
        if not self.in_memory:
            self._take_in_replaced(in_backward=False)
        if self.store.portions is None:
            self.store.make_gather_buffers(self.comm.lanes)
        self._start_portions(launch)

    def _start_portions(self, launch: Launch, *, optional: bool = False) -> bool:
        portions = self.store.portions
        if portions is not None and portions.gather_buffers.from_host:
            self._refuse_capture()
        return launch(Collective("gather over replicas", self._group), self._launch_portions, optional=optional)

    def _have_portions(self, launch: Launch, *, optional: bool, in_backward: bool) -> bool:
        """Let the gather lane read portions, gathered anew if needed; return False if other ranks do that later.

        A backward computes with the portions that its forward left.
        """
        portions = self.store.portions
        if portions is not None and (not portions.filled if in_backward else portions.outdated):
            if not self._start_portions(launch, optional=optional):
                return False
        if portions is not None:
            portions.let_read(self.comm.lanes.gather)
        return True

    @_trace.profiled("all_gather_over_replicas")
    def _launch_portions(self) -> None:
        portions = self.store.portions
        assert portions is not None
        portions.start_gather(self.comm.lanes, self.store.mesh.replicate, self.comm.copies, self._new_stamp())

    def drop_passing_portions(self) -> None:
        """Begin a forward or a gather by hand: forget portions of a pass that did not reach its end."""
        if self.store.portions is not None:
            self.store.portions.forget_unless_lasting()

    def end_portions(self, *, keep: bool) -> None:
        """End a forward or a gather by hand.

        With ``keep``, its portions serve the rest of the iteration; otherwise only earlier ones stay.
        """
        if self.store.portions is not None:
            self.store.portions.end_pass(self.comm.lanes, keep=keep)

    def forget_portions(self) -> None:
        """Let the next forward gather anew: gradients were reduced over the replicate axis, so shards will change."""
        if self.store.portions is not None:
            self.store.portions.forget()

    # ---- ready ----

    def ready(self) -> None:
        """Wait for the gather in flight, if there is one, and show the full parameters."""
        if self.gathering is not None:
            self._ready(self.gathering)

    @_trace.profiled("all_gather_copy_out")
    def _ready(self, gathering: Gathering) -> None:
        rows = finish_gather(gathering, self.comm.lanes.compute)
        if self.store.extensions is not None:
            self.store.extensions.decode(rows, gathering.lane, self.comm.lanes.compute)
        if self.kept is not Level.PIECES:
            self._free_pieces()  # the gather has read them, and is over
        self.store.note_full()
        self._move(Level.FULL)
        self.gathering = None
        self.show("full")

    def compare_on_device(self) -> None:
        """In some forwards, let the device compare the full parameters with the shards; a later forward raises.

        This finds writes that no counter shows (see ``Stamp``) to shards on the device, for which the host would have
        to wait. Full parameters that the caller asked for are left out: the caller may have written to them.
        """
        checks = self.comm.checks
        if self.comm.lanes.on_streams and checks.are_due and not self.summoned and not self._by_hand:
            for counts, differ in self.store.comparison.on_device():
                checks.add([(param.name, count) for param, count in counts], differ)

    # ---- a forward, which must not write to full parameters ----

    def note_forward(self, *, first: bool) -> None:
        """Note what the full parameters are before a forward.

        If it is not the ``first`` that is under way, as that of a further member of a grouped call, what was noted
        before counts: they may have been written since. Unless that was without gradients.
        """
        before = self._before_forward
        if first or before is None or not before[2]:
            self._before_forward = self.store.generation, self.store.full_versions(), torch.is_grad_enabled()

    def refuse_written_in_forward(self) -> None:
        """End a forward that ``note_forward`` has begun.

        Raises:
            RuntimeError: it has gradients, and has changed full parameters in place.
        """
        if self._before_forward is None:
            return
        generation, versions, trains = self._before_forward
        if trains and generation == self.store.generation and self.store.full_versions() != versions:
            raise RuntimeError(
                f"{', '.join(self.store.changed_since(versions))}: the forward changed it in place, as "
                "nn.Embedding(max_norm=...) does. This would be lost: the full parameter is a copy that is freed after "
                "forward, and each rank changes it for its own batch. Take the write out of forward "
                "(embedding.max_norm = None) and change the shards after each optimizer step instead (under "
                "torch.no_grad(): local = weight.to_local(); local.copy_(torch.renorm(local, 2, 0, max_norm))), or "
                "keep what forward updates in a buffer"
            )

    def leave_to_caller(self, *, kept: bool) -> None:
        """Note that an interrupt has ended a pass: the caller may have written to full parameters that are shown.

        Unless ``kept`` ones are freed now too, the next use of these refuses that.
        """
        if self.shown != "full" or self._before_forward is None:
            return
        generation, versions, _ = self._before_forward
        if generation == self.store.generation and (kept or not self.kept):
            self._versions_left, self._by_hand = self._versions_left or versions, True

    # ---- keep ----

    def keep(self, *, by_hand: bool = False) -> None:
        """Let what is in memory or in flight outlive its use, as long as the shards do not change.

        The caller who asked for it ``by_hand`` may write to it, which is lost when it is freed.
        """
        if self.level is Level.SHARDS:
            return
        self.kept = Level.PIECES if self.level is Level.PIECES else Level.FULL
        if self.level is Level.FULL:
            self._free_pieces()  # full parameters stay instead
        self._by_hand |= by_hand
        self.note_left()

    def note_left(self) -> None:
        """Note that what is in memory is left to later uses, which the pass may make or which ``keep`` allows.

        Then it is stamped with the shards that it was made of, and a write to full parameters is noticed.
        """
        if self.level is Level.SHARDS:
            return
        if self._stamp is None:
            self._stamp = self._new_stamp()
        if self._versions_left is None and self.level is not Level.PIECES:
            self._versions_left = self.store.full_versions()

    def unkeep(self) -> None:
        """Let the next forward free what is kept."""
        self.kept = Level.SHARDS

    def refuse_written(self) -> None:
        """Begin a use of what earlier ones have left, if they have: it must be as they left it.

        Raises:
            RuntimeError: full parameters were written since. (The caller may write to those that it asked for.)
        """
        if self._versions_left is None or self._by_hand:
            return
        versions, self._versions_left = self._versions_left, None
        if self.store.full_versions() != versions:
            raise RuntimeError(
                f"{', '.join(self.store.changed_since(versions))}: written in place after a forward or backward that "
                "left full parameters in memory. This would be lost: they are copies, which are freed. If the program "
                "means to: call reshard() on the module, and write to its shards with `with torch.no_grad(): "
                "param.copy_(value)`"
            )

    def _written_by_hand(self) -> list[str]:
        """Return the names of full parameters that were left to the caller, who has written to them."""
        versions = self._versions_left
        return self.store.changed_since(versions) if self._by_hand and versions is not None else []

    # ---- lower, free ----

    def lower(self, level: Level = Level.SHARDS, *, ranks: int = 0) -> None:
        """Free what is above ``level`` and is not kept. While ``summon_full_params`` shows parameters, that is nothing.

        If full parameters stay, they are ready afterwards: a rank that skips a unit only started the gather, for the
        others' sake. Pieces lie on groups of ``ranks`` neighbours.
        """
        if self.summoned:
            return
        stays = max(level, self.kept)
        if level is Level.FULL:
            self.ready()
        elif stays is Level.PIECES and self.level > Level.PIECES:
            self._lower_to_pieces(ranks)
        elif stays is Level.SHARDS and self.in_memory:
            self._free()

    @_trace.profiled("reshard")
    def _lower_to_pieces(self, ranks: int) -> None:
        if self.kept is Level.PIECES:
            self._drop_gather()  # back to the pieces that it reads
        else:
            self.ready()  # which frees pieces that are not kept
            self._pieces = self.store.pieces_on(ranks)
            self._pieces.copy_from_full()
        self._move(Level.PIECES)
        self.show("pieces")
        self._free_full()

    def free(self) -> None:
        """Free everything but the shards, and show these. A gather in flight is waited for and dropped.

        Raises:
            RuntimeError: ``summon_full_params`` shows parameters of the group.
        """
        if self.level is Level.SHARDS:
            return
        if self.summoned:
            self.refuse_summoned("reshard")
        self._free()

    @_trace.profiled("reshard")
    def _free(self) -> None:
        if _trace.recording and self.gathering is None:  # no event for what was never ready
            _trace.emit("reshard", self, self.store.full_bytes)
        self._drop_gather()
        # Even if shards are shown already: this carries a change of requires_grad to the other tensors, on ranks that
        # skip the unit as on those that use it.
        self.show("shards")
        lost = self._written_by_hand()
        if self.kept:
            self.store.reclaim_full()  # the caller may have assigned to .data of kept parameters
        self._free_full()
        self._free_pieces()
        self._move(Level.SHARDS)
        self._forget_memory()
        if lost:  # last, because this raises if warnings are errors
            warn(
                f"{', '.join(lost)}: values were written to the full parameters that unshard(), use_weights or an "
                "interrupted pass left there. They are lost, because these are copies of the shards, and are freed "
                "now. Write inside summon_full_params, which copies new values to the shards; after an interrupt, call "
                "reset_iter_state() on the root module first"
            )

    def _drop_gather(self) -> None:
        """Wait for the gather in flight, if there is one.

        On a CPU its memory must not go while it is written. On streams compute waits too, since it may write to the
        shards or pieces that the gather reads.
        """
        if self.gathering is not None:
            finish_gather(self.gathering, self.comm.lanes.compute)
            self.gathering = None

    def _free_pieces(self) -> None:
        if self._pieces is not None:
            self._pieces.free()
            self._pieces = None

    def _free_full(self) -> None:
        # Memory goes back to the lane that it came from, so that lane waits until compute has read it.
        self.comm.lanes.gather.wait(self.comm.lanes.compute)
        self.store.free_full()

    def follow_options(self) -> None:
        """Free storage that ``set_keep_unsharded_storage(True)`` has kept, if that was taken back."""
        if not self.in_memory:
            self._free_full()

    # ---- show ----

    def show(self, which: Shown) -> None:
        """Make the modules show these tensors."""
        self.shown = which
        self.store.show(self.store.params, which)

    def show_shards(self) -> None:
        """Make the modules show shards and free nothing.

        A rank may save or copy alone, so it must not gather anew; and what stays for backward alone is not shown.
        """
        if not self.summoned and self.shown != "shards":
            self.show("shards")

    def show_full(self) -> None:
        """Undo ``show_shards`` if full parameters are in memory."""
        if not self.summoned and self.is_full:
            self.show("full")

    # ---- summon_full_params, which decides for a while what the modules show ----

    def summon(self, params: Iterable[FSDPParam], block: Summoning) -> None:
        """Show the shards of the group, and let ``block`` decide from now on what the modules show of ``params``."""
        self.ready()
        if not self.summoned:
            # Even if they are shown: requires_grad may have been changed on them. ``shown`` stays for the block's end.
            self.store.show(self.store.params, "shards")
        self.summoned.update(dict.fromkeys(params, block))

    def dismiss(self, params: Iterable[FSDPParam], values: Mapping[FSDPParam, torch.Tensor]) -> None:
        """End ``summon`` for ``params``: write new whole ``values`` to the shards and to what is in memory.

        Show what the modules showed before. Memory that was kept and up to date stays kept: it got the same values as
        the shards.
        """
        extended = self.store.extended
        current = self._stamp is not None and not self._stamp.changed
        try:
            for param, value in values.items():
                param.write(value, full=self.is_full and param not in extended)
            if self._pieces is not None:
                self._pieces.write(values)
            if current and values:
                self._stamp = self._new_stamp()
            if self._versions_left is not None:
                self._versions_left = self.store.full_versions()
        finally:
            self.store.show(params, "shards", over_others=True)
            for param in params:  # last: recovery from an interrupt asks for them
                self.summoned.pop(param, None)
            if not self.summoned:
                self.store.show(self.store.params, self.shown)
        if not self.summoned and not extended.isdisjoint(values):
            self.free()  # an extension's full parameters can only be made by a gather

    # ---- shards that others put in place ----

    def reconcile(self, *, lasting: bool) -> None:
        """Take in what others have put on the modules in the place of ours, since that is the truth.

        Everyone who reads or writes the parameters calls this first. ``lasting``: no call is under way for which it may
        have been put there.
        """
        if self.summoned:
            return
        if self.in_memory and not shows(self.store.params, self.shown):
            self.free()  # it was made of other shards; what was put on the modules stays there
        self.adopt(lasting=lasting)

    def adopt(self, *, lasting: bool = False) -> None:
        """Take in parameters that were replaced on the modules, moved, cast or loaded, while these show shards.

        ``lasting``: they are there to stay. Another rank may have copied the same values in place.
        """
        if self.in_memory or self.summoned:
            return
        if self.store.adopt(self.before_write, lasting=lasting) and not lasting:
            self.adopted = True

    def before_write(self) -> None:
        """Let whoever writes to shards next wait for what still reads them: copies from the host, and portions."""
        self.comm.copies.wait()
        if self.store.portions is not None:
            self.store.portions.let_write(self.comm.lanes.compute)

    def use(self, store: ShardStore, comm: CommContext) -> None:
        """Use another store, of fewer parameters, for which the group must be sharded, or another context."""
        if self.store.portions is not None:
            self.store.portions.let_read(self.comm.lanes.gather)  # other lanes know nothing of them
        self.comm.copies.give_back(self.store.gather_buffers)  # the same
        self.store, self.comm = store, comm

    def reset(self) -> None:
        """Free everything but the shards, in whatever state an error left the group (recovery).

        The caller has asked ``refuse_unended``.
        """
        self.summoned.clear()
        self.leave_to_caller(kept=True)
        self.free()
        # A gather that raised while it was being started has left memory allocated, although the level is still the
        # one before it.
        self.show("shards")
        self._free_full()
        if self.store.portions is not None:
            self.store.portions.reset(self.comm.lanes)
