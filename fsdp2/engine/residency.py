"""Residency: what of one group's parameters is in memory, what its modules show, and every move between.

This is the only place that knows. The states are values that carry their data, ``_MOVES`` says which may follow which,
and everyone else uses four verbs:

* ``start``: start gathering;
* ``ready``: wait for the gather, so that compute may read the full parameters;
* ``free``: keep the shards alone (or, with ``keep_pieces``, pieces on a few neighbouring ranks);
* ``show``: choose what the modules show.

A pass frees what it gathered. What has to stay in memory beyond its end is *held*: full parameters or pieces that a
backward will need, that ``set_reshard_after_backward(False)`` keeps for the next forward, or that the caller asked for
with ``unshard()``. What can be used later has a ``Stamp`` of the shards that it was made of: a forward that finds
others gathers anew.

Beside the state there are three more fields. ``shown`` differs from what a state shows by default while a state dict is
taken, so that saving neither frees nor gathers, and if a unit stays in memory for backward alone. ``summoned``
suspends all of it for ``summon_full_params``. ``_by_hand`` tells if the caller wrote to what ``unshard()`` gathered.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from fsdp2 import _trace
from fsdp2.comm.context import CommContext
from fsdp2.comm.gather import GatherBuffers, Gathering, finish_gather, start_gather
from fsdp2.engine.buffers import ShardStore
from fsdp2.engine.observer import Collective, Launch, ObservedGroup
from fsdp2.engine.param import FSDPParam, Shown, show, shows
from fsdp2.engine.stamp import Stamp
from fsdp2.engine.subgroup import SubgroupShards
from fsdp2.policies import AllGather
from fsdp2.sharding.mesh import Axis

__all__ = ["Full", "InFlight", "Pieces", "Residency", "Sharded", "Summoning"]


# ---- states ----


@dataclass(eq=False)
class Sharded:
    """Only the shards are in memory: no ``pieces``, and nothing that could be ``held``.

    ``adopted``: the modules hold other shards than ours, perhaps for a single forward (``functional_call``), which
    must free what is gathered from them. The states that follow inherit it.
    """

    adopted: bool = False
    held: bool = False
    stamp: None = None
    pieces: None = None


@dataclass(eq=False)
class InFlight:
    """A gather was started. It reads the shards or ``pieces``, which stay in memory until it is over.

    It ``keeps_pieces`` in a forward that finds some which are held for a backward: they stay in memory beside what is
    gathered from them, and are what is ``held``. Otherwise that is what is gathered.
    """

    work: Gathering
    pieces: SubgroupShards | None = None
    keeps_pieces: bool = False
    adopted: bool = False
    held: bool = False
    stamp: Stamp | None = None
    loud: bool = False  # started ahead by a use that was not quiet: a quiet one may come behind an update


@dataclass(eq=False)
class Full:
    """The full parameters are in memory, beside the ``pieces`` that they were gathered from if these were held."""

    adopted: bool = False
    held: bool = False
    stamp: Stamp | None = None
    pieces: SubgroupShards | None = None


@dataclass(eq=False)
class Pieces:
    """Pieces on a few neighbouring ranks are in memory, under ``reshard_after_forward=<int>``."""

    pieces: SubgroupShards
    adopted: bool = False
    held: bool = False
    stamp: Stamp | None = None


State = Sharded | InFlight | Full | Pieces

_MOVES: dict[type[State], tuple[type[State], ...]] = {
    Sharded: (InFlight,),
    InFlight: (Full, Pieces, Sharded),  # the last two: a prefetch that was not used
    Full: (Pieces, Sharded),  # the first: also back to pieces that are held, after an evaluation
    Pieces: (InFlight, Sharded),
}
_SHOWN: dict[type[State], Shown] = {Sharded: "sharded", InFlight: "sharded", Full: "full", Pieces: "subgroup"}
"""The tensors that modules show in a state by default. Some show shards all the same, until the group is used next."""


class Summoning(Protocol):
    """A block of ``summon_full_params``."""

    ending: bool  # the block is over, perhaps interrupted while it ended, so that a recovery may clear it


# ---- the one object ----


class Residency:
    """The parameters of one group: what of them is in memory, and what its modules show."""

    def __init__(self, group: ObservedGroup, store: ShardStore, comm: CommContext) -> None:
        self.store = store
        self.comm = comm
        self.state: State = Sharded()
        self.shown: Shown = "sharded"
        # While summon_full_params shows some of the parameters, nothing is gathered or freed: what the state says is in
        # memory stays there, and is shown again afterwards.
        self.summoned: dict[FSDPParam, Summoning] = {}
        self._by_hand: list[int] | None = None  # versions of the full parameters that the caller asked for
        self._group = group  # whose gathers these are, for the observer
        show(store.params, "sharded", over_others=True)

    def __repr__(self) -> str:
        held = ", held" if self.held else ""
        return f"{type(self.state).__name__.lower()}{held}, shows {'summoned' if self.summoned else self.shown}"

    def _move(self, state: State) -> None:
        if type(state) not in _MOVES[type(self.state)]:
            raise RuntimeError(
                f"{self.name or 'the root'}: got a move from {type(self.state).__name__} to {type(state).__name__}, "
                f"expected one of: {', '.join(allowed.__name__ for allowed in _MOVES[type(self.state)])}"
            )
        self.state = state

    @property
    def name(self) -> str:
        """The group's name."""
        return self._group.name

    # ---- questions ----

    @property
    def is_full(self) -> bool:
        """True if the full parameters are in memory and ready."""
        return type(self.state) is Full

    @property
    def is_gathering(self) -> bool:
        """True if a gather is in flight."""
        return type(self.state) is InFlight

    @property
    def in_memory(self) -> bool:
        """True if anything beside the shards is in memory, or on its way there."""
        return type(self.state) is not Sharded

    @property
    def needs_gather(self) -> bool:
        """True if ``start`` would start a gather."""
        return type(self.state) in (Sharded, Pieces) and not self.summoned

    @property
    def adopted(self) -> bool:
        """True if the shards may be another's, put on the modules for one forward."""
        return self.state.adopted

    @property
    def held(self) -> bool:
        """True if what is in memory outlives its pass."""
        return self.state.held

    def is_outdated(self, *, quiet: bool = False) -> bool:
        """Return whether what is in memory, or on its way, must not be used any more: the shards changed.

        All ranks that compute with the group ask this at the same places, so they gather anew alike. A ``quiet`` use,
        without gradients inside a forward with gradients, trusts no gather that started before the first such use.

        Raises:
            RuntimeError: somebody put others in the place of full parameters.
        """
        state = self.state
        if self.summoned:
            return False
        if not state.held:
            loud = type(state) is InFlight and state.loud
            return (quiet and loud) or (state.stamp is not None and state.stamp.changed)
        if shows(self.store.params, self.shown):
            return state.stamp is None or state.stamp.changed
        if self.shown != "sharded":
            # To free the group would put the shards in their place, and lose them.
            raise RuntimeError(
                f"{self.store.params[0].name}: its module shows other parameters than the full ones that unshard() or "
                "an earlier forward left there; expected these. Call reshard() on the module before you replace "
                "parameters or use functional_call"
            )
        return True  # shards were put in the place of shards: the next gather takes them in

    def refuse_summoned(self, what: str) -> None:
        """Raise RuntimeError if ``summon_full_params`` shows parameters of the group, in the name of ``what``."""
        if self.summoned:
            raise RuntimeError(
                f"{self.name or 'the root'}: {what} while summon_full_params shows its parameters; expected outside "
                "of that context. Leave it first, or summon fewer modules"
            )

    def refuse_unended(self, what: str) -> None:
        """Raise RuntimeError inside a block of ``summon_full_params``. One whose end was interrupted is over."""
        if not all(block.ending for block in self.summoned.values()):
            self.refuse_summoned(what)

    # ---- start ----

    def start(self, launch: Launch, *, optional: bool = False, in_backward: bool = False) -> None:
        """Start gathering, unless the full parameters are there or on their way.

        An ``optional`` gather, a prefetch, may be left for later by ``launch``.
        """
        kind = type(self.state)
        if kind is InFlight or self.summoned:
            return
        if kind is Full and self.shown != "full" and in_backward and self.store.replaced(in_backward=True):
            self.reconcile(lasting=False)  # a forward has asked is_outdated()
            kind = type(self.state)
        if kind is not Full:
            self._start_gather(launch, optional, in_backward)
        elif self.shown != "full":
            self.show("full")

    def note_ahead(self, *, loud: bool) -> None:
        """Stamp a gather that a forward started ahead: before its use it may update a teacher, or step an optimizer.

        ``loud``: it was started by a use that was not quiet.
        """
        state = self.state
        if type(state) is InFlight and state.stamp is None:
            state.stamp, state.loud = Stamp(self.store.params), loud

    @_trace.profiled("all_gather")
    def _start_gather(self, launch: Launch, optional: bool, in_backward: bool) -> None:
        store, lanes = self.store, self.comm.lanes
        pieces = self.state.pieces
        if pieces is not None:
            axis = pieces.axis  # neighbours alone: other ranks have pieces of the same values
            stays = self.state.held and not in_backward  # a backward frees them
            gather = partial(self._launch, pieces.gather, axis, None, pieces, stays)
        else:
            self._take_in_replaced(in_backward=in_backward)
            buffers = store.gather_buffers or store.make_gather_buffers(lanes)
            if not self._have_portions(launch, optional=optional, in_backward=in_backward):
                return  # other ranks gather them later
            axis = store.mesh.shard
            gather = partial(self._launch, buffers, axis, store.options.gather, None, False)
        if store.extensions is not None:
            self._start_extended(launch, gather, axis, optional)
        elif axis.size == 1:
            gather()  # nothing is communicated, so other ranks need not know, and even a prefetch starts at once
        else:
            launch(Collective("gather", self._group, store.formats_digest), gather, optional=optional)

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
        store, state = self.store, self.state
        if store.mesh.sharded_twice is None or self.summoned:
            return False
        if type(state) is not Sharded:
            # What is in memory is freed when the group is used.
            return state.held and (state.stamp is None or state.stamp.changed)
        return store.portions is None or store.portions.outdated or store.replaced(in_backward=False)

    def gather_portions(self, launch: Launch) -> None:
        """Start gathering portions, which are outdated, ahead of the gathers over the shard axis that read them."""
        if type(self.state) is Sharded:
            self._take_in_replaced(in_backward=False)
        if self.store.portions is None:
            self.store.make_gather_buffers(self.comm.lanes)
        self._start_portions(launch)

    def _start_portions(self, launch: Launch, *, optional: bool = False) -> bool:
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
        portions.start_gather(self.comm.lanes, self.store.mesh.replicate, self.comm.copies, Stamp(self.store.params))

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

    def _start_extended(self, launch: Launch, gather: Callable[..., None], axis: Axis, optional: bool) -> None:
        """Start a gather of tensors that decide by themselves what travels.

        The ranks must agree on its sizes and dtypes. They are known from the gather before. The first time, or if they
        have changed since, the observer sees them after the tensors were encoded.
        """
        store, extensions, lane = self.store, self.store.extensions, self.comm.lanes.gather
        assert extensions is not None
        expected = extensions.sent

        def encode_and_gather() -> None:
            extras = extensions.encode(axis.size, lane)
            if axis.size == 1 or extensions.sent == expected:
                gather(extras)
                return
            try:
                launch(collective(extensions.sent), partial(gather, extras))
            except BaseException:
                extensions.free()  # what was encoded would stay in memory until the next gather
                raise

        def collective(sent: tuple[int, ...] | None) -> Collective:
            return Collective("gather", self._group, (*store.formats_digest, *(sent or ())))

        if axis.size == 1 or expected is None:
            encode_and_gather()
        else:
            launch(collective(expected), encode_and_gather, optional=optional)

    def _launch(
        self,
        buffers: GatherBuffers,
        axis: Axis,
        custom: AllGather | None,
        pieces: SubgroupShards | None,
        stays: bool,
        extras: Sequence[torch.Tensor] = (),
    ) -> None:
        if _trace.recording:
            _trace.emit("unshard", self, sum(item.full_bytes for item in buffers.items))
        work = start_gather(buffers, axis, self.comm.copies, custom=custom, extras=extras)
        stamp = self.state.stamp if stays else None
        self._move(InFlight(work, pieces, stays, self.state.adopted, stays, stamp))

    # ---- ready ----

    def ready(self) -> None:
        """Wait for the gather in flight, if there is one, and show the full parameters."""
        if type(self.state) is InFlight:
            self._ready(self.state)

    @_trace.profiled("all_gather_copy_out")
    def _ready(self, state: InFlight) -> None:
        rows = finish_gather(state.work, self.comm.lanes.compute)
        if self.store.extensions is not None:
            self.store.extensions.decode(rows, state.work.lane, self.comm.lanes.compute)
        if state.pieces is not None and not state.keeps_pieces:
            state.pieces.free()  # the gather has read them, and is over
        self.store.note_full()
        self._move(Full(state.adopted, state.held, state.stamp, state.pieces if state.keeps_pieces else None))
        self.show("full")

    # ---- free ----

    def free(self) -> None:
        """Free everything but the shards, and show these. A gather in flight is waited for and dropped.

        Raises:
            RuntimeError: ``summon_full_params`` shows parameters of the group.
        """
        if type(self.state) is Sharded:
            return
        if self.summoned:
            self.refuse_summoned("reshard")
        self._free()

    @_trace.profiled("reshard")
    def _free(self) -> None:
        state = self.state
        if type(state) is InFlight:
            # On a CPU its memory must not go while it is written. On streams compute waits too, since it may write to
            # the shards or pieces that the gather reads. There is no "reshard" event for what was never ready.
            finish_gather(state.work, self.comm.lanes.compute)
        elif _trace.recording:
            _trace.emit("reshard", self, self.store.full_bytes)
        # Even if shards are shown already: this carries a change of requires_grad to the other tensors, on ranks that
        # skip the unit as on those that use it.
        self.show("sharded")
        if state.held:
            self._warn_of_writes()
            self.store.reclaim_full()  # the caller may have assigned to .data of held parameters
        self._free_full()
        if state.pieces is not None:
            state.pieces.free()
        self._move(Sharded())

    def _warn_of_writes(self) -> None:
        before, self._by_hand = self._by_hand, None
        if written := [] if before is None else self.store.changed_since(before):
            warnings.warn(
                f"{', '.join(written)}: values were written to the full parameters that unshard() or use_weights "
                "gathered. They are lost, because these are copies of the shards, and are freed now. Write inside "
                "summon_full_params, which copies new values to the shards",
                stacklevel=2,
            )

    def follow_options(self) -> None:
        """Free storage that ``set_keep_unsharded_storage(True)`` has kept, if that was taken back."""
        if not self.in_memory:
            self._free_full()

    def _free_full(self) -> None:
        # Memory goes back to the lane that it came from, so that lane waits until compute has read it.
        self.comm.lanes.gather.wait(self.comm.lanes.compute)
        self.store.free_full()

    def keep_pieces(self, size: int) -> None:
        """Keep pieces on groups of ``size`` neighbouring ranks, show them, and free the full parameters."""
        if type(self.state) is Full and not self.summoned:
            self._forget_pieces(self.state)
            pieces = self.store.subgroup(size)
            pieces.copy_from_full()
            self._move(Pieces(pieces, self.state.adopted, stamp=self.state.stamp))
            self.show("subgroup")
            self._free_full()

    @staticmethod
    def _forget_pieces(state: Full) -> None:
        if state.pieces is not None:
            state.pieces.free()
            state.pieces = None

    def return_to_pieces(self) -> None:
        """Free full parameters, or a gather of them, and show the held pieces that they were gathered from, if any."""
        state = self.state
        kept = type(state) is Full or (type(state) is InFlight and state.keeps_pieces)
        if state.pieces is None or not kept or self.summoned:
            return
        if type(state) is InFlight:
            finish_gather(state.work, self.comm.lanes.compute)  # its memory must not go while it is written
        self._move(Pieces(state.pieces, state.adopted, state.held, state.stamp))
        self.show("subgroup")
        self._free_full()

    def hold(self, *, by_hand: bool = False) -> None:
        """Let what is in memory or in flight outlive the pass, as long as the shards do not change.

        The caller who asked for it ``by_hand`` may write to it, which is lost when it is freed.
        """
        if isinstance(self.state, InFlight):
            self.state.keeps_pieces = False  # what is gathered stays instead
        if isinstance(self.state, Full):
            self._forget_pieces(self.state)
        if not isinstance(self.state, Sharded):
            self.state.held = True
            self._by_hand = self.store.full_versions() if by_hand else None
            self.note_made()

    def note_made(self) -> None:
        """Stamp what is in memory, which will be used again, with the shards that it was made of."""
        if not isinstance(self.state, Sharded) and self.state.stamp is None:
            self.state.stamp = Stamp(self.store.params)

    def unhold(self) -> None:
        """Let the next forward free what is held."""
        self.state.held = False

    # ---- show ----

    def show(self, which: Shown) -> None:
        """Make the modules show these tensors."""
        self.shown = which
        if show(self.store.params, which):
            self.store.note_change()

    def show_shards(self) -> None:
        """Make the modules show shards and free nothing.

        A rank may save or copy alone, so it must not gather anew; and what stays for backward alone is not shown.
        """
        if not self.summoned and self.shown != "sharded":
            self.show("sharded")

    def show_memory(self) -> None:
        """Undo ``show_shards``: make the modules show what is in memory."""
        if not self.summoned and self.shown != _SHOWN[type(self.state)]:
            self.show(_SHOWN[type(self.state)])

    # ---- summon_full_params, which decides for a while what the modules show ----

    def summon(self, params: Iterable[FSDPParam], block: Summoning) -> None:
        """Show the shards of the group, and let ``block`` decide from now on what the modules show of ``params``."""
        self.ready()
        if not self.summoned:
            self.show("sharded")  # even if they are shown: requires_grad may have been changed on them
        self.summoned.update(dict.fromkeys(params, block))

    def dismiss(self, params: Iterable[FSDPParam], values: Mapping[FSDPParam, torch.Tensor]) -> None:
        """End ``summon`` for ``params``: write new whole ``values`` to the shards and what is in memory, and show that.

        Memory that was held and up to date stays held: it got the same values as the shards.
        """
        extended, state = self.store.extended, self.state
        current = state.stamp is not None and not state.stamp.changed
        try:
            for param, value in values.items():
                param.write(value, full=isinstance(state, Full) and param not in extended)
            if state.pieces is not None:
                state.pieces.write(values)
            if current and values:
                state.stamp = Stamp(self.store.params)
                if self._by_hand is not None:
                    self._by_hand = self.store.full_versions()
        finally:
            for param in params:
                self.summoned.pop(param, None)
            if show(list(params), "sharded", over_others=True):
                self.store.note_change()
            self.shown = "sharded"
            self.show_memory()
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
        if type(self.state) is not Sharded and not shows(self.store.params, self.shown):
            self.free()  # it was made of other shards; what was put on the modules stays there
        self.adopt(lasting=lasting)

    def adopt(self, *, lasting: bool = False) -> None:
        """Take in parameters that were replaced on the modules, moved, cast or loaded, while these show shards.

        ``lasting``: they are there to stay. Another rank may have copied the same values in place.
        """
        if not isinstance(self.state, Sharded) or self.summoned:
            return
        if self.store.adopt(self.comm.copies.wait, lasting=lasting) and not lasting:
            self.state.adopted = True

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
        self.free()
        # A gather that raised while it was being started has left memory allocated, although the state is still the
        # one before it.
        self.show("sharded")
        self._free_full()
        if self.store.portions is not None:
            self.store.portions.reset(self.comm.lanes)
