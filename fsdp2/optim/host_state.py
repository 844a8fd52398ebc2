"""The state of an optimizer in memory of the host, lent to the device for the part of a step that needs it.

The state of a parameter is a tree, mostly a dictionary. Its tensors with dimensions, its *moments*, lie side by side in
memory of the host, and those of a few parameters fill one *segment*. Numbers, such as a count of steps, stay where the
optimizer has put them. ``optimizer.state`` shows the moments on the host; during a part of a step the optimizer finds
copies on the device in their place.

All ranks move the moments of the same parameters, also those of which they have no elements: collectives run where a
tensor is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch.tensors import inner_tensors, with_inner_tensors
from fsdp2.autograd.trees import PLAIN
from fsdp2.comm.pieces import part_of
from fsdp2.comm.staging import Staging, has_host, host_memory
from fsdp2.optim.alike import is_counter, shown_state
from fsdp2.optim.leaves import take_apart
from fsdp2.sharding.packing import align, in_buckets
from fsdp2.sharding.platform import platform
from fsdp2.sharding.spec import cut_dim, dense_strides, dtensor_like, on_this_rank

__all__ = ["HOST_STATE", "HostState", "is_moment"]

HOST_STATE = "_fsdp2_host_state"
"""An attribute of optimizers whose state lies in memory of the host: a ``HostState``."""
_MOMENTS = 2
"""The number of moments that a parameter is expected to have, before it has any."""


def is_moment(leaf: Any) -> bool:
    """Return whether ``leaf`` of a parameter's state is a tensor with dimensions, however many elements a rank has."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


class _Slot:
    """Memory of the device that moments are lent in."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._by_dtype: dict[torch.dtype, torch.Tensor] = {}

    def view(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor like ``like`` from byte ``start`` on."""
        dtype = like.dtype
        if dtype not in self._by_dtype:
            self._by_dtype[dtype] = self.memory.view(dtype)
        return self._by_dtype[dtype].as_strided(like.shape, like.stride(), start // dtype.itemsize)


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a moment lies: a dense tensor, or the inner tensors of one of a subclass."""

    shown: torch.Tensor  # on the host, a DTensor if the parameter is one
    offsets: tuple[int, ...]  # in bytes, from where those of its parameter begin
    inner: tuple[torch.Tensor, ...]

    def fits(self, moment: Any, *, whole: bool) -> bool:
        """Return whether ``moment`` can be copied here, and what is shown here takes its place.

        A plain tensor is the local tensor of a DTensor, unless the state is that of ``whole`` parameters.
        """
        mine, other = on_this_rank(self.shown), on_this_rank(moment)
        shown_sharded, sharded = isinstance(self.shown, DTensor), isinstance(moment, DTensor)
        if type(mine) is not type(other) or sharded > shown_sharded or (whole and sharded < shown_sharded):
            return False
        pairs = zip(self.inner, inner_tensors(other), strict=True)
        return mine.shape == other.shape and all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)

    def copy(self, moment: torch.Tensor) -> None:
        """Copy the values of ``moment`` here."""
        for mine, other in zip(self.inner, inner_tensors(on_this_rank(moment)), strict=True):
            mine.copy_(other, non_blocking=True)

    def on_device(self, slot: _Slot, start: int) -> torch.Tensor:
        """Return the moment in ``slot``, where those of its parameter begin at byte ``start``."""
        local = on_this_rank(self.shown)
        if local is self.inner[0]:
            return slot.view(start + self.offsets[0], local)
        pairs = zip(self.offsets, self.inner)  # subclasses may expect tensors that begin where their storage does
        views = [part_of(slot.memory, start + at, one.dtype, one.shape, one.stride()) for at, one in pairs]
        made: torch.Tensor = with_inner_tensors(local, views)
        return made


class _Held:
    """The state of a parameter whose moments lie on the host: bytes ``start`` to ``end`` of a segment."""

    def __init__(
        self, entry: Any, tree: _Tree, places: dict[int, _Place], memory: tuple[torch.Tensor, int, int, torch.device]
    ) -> None:
        """``entry`` is what optimizer.state has for the parameter, and ``places`` are by the index of its leaf."""
        self.entry, self.tree, self.places = entry, tree, places
        self.segment, self.start, self.end, self.device = memory
        self.at = 0  # in a step: where the moments begin in their slot
        self.views: dict[int, torch.Tensor] = {}  # in a step: the moments in the slot
        # Most states are dictionaries without containers, and without other DTensors. A step is faster with them.
        rest = [leaf for i, leaf in enumerate(tree.leaves) if i not in places]
        self.simple = tree.flat and not any(isinstance(leaf, DTensor) for leaf in rest)
        self._named = [(tree.names[i], i, place) for i, place in places.items()]
        self._rest = [name for i, name in enumerate(tree.names) if i not in places]

    def is_in(self, entry: Any) -> bool:
        """Return whether ``entry`` is known, and has the moments that it is known to have."""
        if entry is not self.entry:
            return False
        if self.simple:
            alike = [entry.get(name) is place.shown for name, _, place in self._named]
            return len(entry) == len(self.tree.names) and all(alike)
        tree = _Tree(entry)
        return tree.names == self.tree.names and all(tree.leaves[i] is place.shown for i, place in self.places.items())

    def lend(self, slot: _Slot) -> Any:
        """Return the entry with moments in ``slot``."""
        self.views = {i: place.on_device(slot, self.at) for i, place in self.places.items()}
        if not self.simple:
            tree = _Tree(self.entry)
            return tree.with_leaves([self.views.get(i, on_this_rank(leaf)) for i, leaf in enumerate(tree.leaves)])
        lent = dict(self.entry)
        for name, i, _ in self._named:
            lent[name] = self.views[i]
        return lent

    def take_back(self, after: Any) -> bool:
        """Take numbers from ``after`` over; return False if a step has done more than to write into what was lent."""
        if not self.simple or len(after) != len(self.entry):
            return False
        if not all([after.get(name) is self.views[i] for name, i, _ in self._named]):
            return False
        for name in self._rest:
            value = after.get(name)
            if value is not self.entry[name]:
                if is_moment(value):
                    return False
                self.entry[name] = value
        return True


class _Tree:
    """The leaves of a parameter's state, and the name of each in the dictionary that it is, or lies, in.

    It is ``flat`` if it is a dictionary without containers in it.
    """

    def __init__(self, entry: Any) -> None:
        self.flat = isinstance(entry, dict) and all(
            isinstance(value, torch.Tensor) or type(value) in PLAIN for value in entry.values()
        )
        self.leaves: list[Any]
        self._rebuild: Callable[[Iterable[Any]], Any]
        if self.flat:
            self.names, self.leaves = list(entry), list(entry.values())
        elif isinstance(entry, dict):
            self.names = [name for name, value in entry.items() for _ in take_apart(value)[0]]
            self.leaves, self._rebuild = take_apart(list(entry.values()))
            self._keys = list(entry)
        else:
            self.leaves, self._rebuild = take_apart(entry)
            self.names = [None] * len(self.leaves)
        self._is_dict = isinstance(entry, dict)

    def with_leaves(self, leaves: Sequence[Any]) -> Any:
        """Return the same tree with other leaves; a dictionary is a new one."""
        if self.flat:
            return dict(zip(self.names, leaves))
        return dict(zip(self._keys, self._rebuild(leaves))) if self._is_dict else self._rebuild(leaves)


class HostState:
    """The state of one optimizer: on the host what does not fit on the device, and how a step gets at it.

    A step calls ``settle``, ``begin`` with the parameters of its parts, ``lend`` and ``take_back`` for each part in
    this order, and ``end``, also after an error.
    """

    def __init__(self, *, budget_bytes: int, bucket_bytes: int, pin: bool, whole: bool) -> None:
        """``whole``: the state is that of whole parameters on their owners, and so a plain tensor."""
        self._budget_bytes, self._bucket_bytes, self._pin, self._whole = budget_bytes, bucket_bytes, pin, whole
        self._held: dict[torch.Tensor, _Held] = {}
        self._kept: dict[torch.Tensor, int] = {}  # bytes of moments that stay on the device, on the rank with most
        self._hosts: dict[torch.device, bool] = {}  # which devices have memory apart from the host's
        self._staging: dict[torch.device, Staging] = {}
        self._slots: dict[torch.device, _Slot] = {}  # of the part of a step that runs
        self._lent: list[_Held] = []
        self._moving: set[torch.device] = set()  # where copies to the host may be on their way

    # ---- between steps ----

    def settle(self, params: Iterable[torch.Tensor], state: Any, *, loaded: bool = False) -> None:
        """Move the moments of ``params`` in ``state`` to the host, as far as they are not there.

        ``loaded``: they come from a state dict, whatever device they are on.
        """
        for known in (self._held, self._kept):
            for param in [param for param in known if param not in state]:
                del known[param]
        new = []
        for param in params:
            entry, held = state.get(param), self._held.get(param)
            if not entry or (held is not None and held.is_in(entry)) or (param in self._kept and not loaded):
                continue
            tree = _Tree(entry)
            if held is None or not self._take_in(param, held, entry, tree):
                new.append((param, tree, loaded or held is not None))
        for some in in_buckets(new, lambda item: sum(map(_nbytes, item[1].leaves)), self._bucket_bytes):
            self._move(some, state)
        self._wait_for_moves()

    def _take_in(self, param: torch.Tensor, held: _Held, entry: Any, tree: _Tree) -> bool:
        """Copy moments that were replaced to where the others lie; return False if they do not fit there."""
        if tree.names != held.tree.names:
            return False
        found = {i: tree.leaves[i] for i in held.places}
        if not all(held.places[i].fits(leaf, whole=self._whole) for i, leaf in found.items()):
            return False
        for i, leaf in found.items():
            if leaf is not held.places[i].shown:
                held.places[i].copy(leaf)
                self._moving.add(held.device)
                tree.leaves[i] = held.places[i].shown
        memory = held.segment, held.start, held.end, held.device
        entry = _written(entry, tree.with_leaves(tree.leaves))
        self._held[param] = _Held(entry, tree, held.places, memory)
        return True

    def _move(self, items: Sequence[tuple[torch.Tensor, _Tree, bool]], state: Any) -> None:
        """Move moments to a segment of their own, or leave them on the device while the budget lasts."""
        chosen: list[tuple[torch.Tensor, _Tree, list[int], torch.device]] = []
        total = 0
        for param, tree, anywhere in items:
            # Here, in the order of parameters: what moves is written last, and ranks may differ in what stays if
            # moments are made of other tensors. torch gathers a whole state dict in the order of each rank's state.
            state.setdefault(param, {})
            self._held.pop(param, None)
            self._kept.pop(param, None)
            moments = [i for i, leaf in enumerate(tree.leaves) if self._can_move(leaf, param, anywhere)]
            if moments:
                device = self._device_of(tree.leaves[moments[0]], param)
                nbytes = sum(_most_bytes(tree.leaves[i]) for i in moments)
                if not self._budget_bytes or sum(self._kept.values()) + nbytes > self._budget_bytes:
                    chosen.append((param, tree, moments, device))
                    total += sum(_nbytes(tree.leaves[i]) for i in moments)
                    continue
                self._kept[param] = nbytes
                for i in moments:
                    tree.leaves[i] = _on_device(tree.leaves[i], device)
            state[param] = _written(state.get(param), tree.with_leaves(tree.leaves))
        segment, end = host_memory(total, pin=self._pin), 0
        for param, tree, moments, device in chosen:
            start, places = end, {}
            for i in moments:
                places[i], end = _place(tree.leaves[i], segment, start, end)
                tree.leaves[i] = places[i].shown
            entry = state[param] = _written(state.get(param), tree.with_leaves(tree.leaves))
            self._held[param] = _Held(entry, tree, places, (segment, start, end, device))
            self._moving.add(device)

    def _wait_for_moves(self) -> None:
        """Wait for copies of moments that have moved to the host, or are replaced there."""
        for device in self._moving:
            self._staging_of(device).wait()
        self._moving.clear()

    def _staging_of(self, device: torch.device) -> Staging:
        if device not in self._staging:
            self._staging[device] = Staging(device)
        return self._staging[device]

    def _can_move(self, leaf: Any, param: torch.Tensor, anywhere: bool) -> bool:
        if not is_moment(leaf) or leaf.layout is not torch.strided:
            return False
        device = self._device_of(leaf, param)
        if not self.moves_from(device):
            return False
        return on_this_rank(leaf).device == device or (anywhere and leaf.shape == param.shape)

    def _device_of(self, leaf: torch.Tensor, param: torch.Tensor) -> torch.device:
        """Return the device that computes with ``leaf``, a part of the state of ``param``."""
        return on_this_rank(leaf if self._whole else param).device

    def moves_from(self, device: torch.device) -> bool:
        """Return whether moments of ``device`` move to the host, which is other memory."""
        if device not in self._hosts:
            self._hosts[device] = has_host(device)
        return self._hosts[device]

    def saved(self, entry: Any) -> Any:
        """Return ``entry``, the state of a parameter, with copies on the host of moments that stay on the device.

        A state dict is on one device then. torch loads a full one into no other.
        """
        tree, host = _Tree(entry), torch.device(platform().host)
        stays = [is_moment(leaf) and self.moves_from(on_this_rank(leaf).device) for leaf in tree.leaves]
        if not any(stays):
            return entry
        return tree.with_leaves([_on_device(leaf, host) if on else leaf for leaf, on in zip(tree.leaves, stays)])

    # ---- a step ----

    def turns(self, params: Iterable[torch.Tensor], *, skip: bool) -> list[list[torch.Tensor]]:
        """Return ``params`` in parts whose moments are on the device at the same time.

        ``skip``: the optimizer does nothing with parameters that have no gradient.
        """
        stays: list[torch.Tensor] = []
        new: list[torch.Tensor] = []
        by_segment: dict[int, list[torch.Tensor]] = {}
        for param in params:
            held = self._held.get(param)
            if held is not None:
                by_segment.setdefault(id(held.segment), []).append(param)
            elif param in self._kept or not self.moves_from(on_this_rank(param).device):
                stays.append(param)
            else:
                new.append(param)
        buckets = in_buckets(new, lambda param: _MOMENTS * on_this_rank(param).nbytes, self._bucket_bytes)
        found = [stays, *buckets, *by_segment.values()]
        return [turn for turn in found if turn and not (skip and all(param.grad is None for param in turn))]

    def begin(self, turns: Iterable[Sequence[torch.Tensor]]) -> None:
        """Start a step that lends the state of these parameters, in this order."""
        pieces: dict[torch.device, list[list[torch.Tensor]]] = {}
        for turn in turns:
            of_turn: dict[torch.device, list[_Held]] = {}
            for held in map(self._held.get, turn):
                if held is not None:
                    of_turn.setdefault(held.device, []).append(held)
            for device, some in of_turn.items():
                pieces.setdefault(device, []).append(_piece(some))
        for device, of_device in pieces.items():
            self._staging_of(device).begin(of_device)

    def lend(self, params: Sequence[torch.Tensor], state: Mapping[Any, Any]) -> dict[torch.Tensor, Any]:
        """Return the state of ``params``, with plain tensors on the device, for kernels of the compute stream."""
        found: dict[torch.Tensor, Any] = {}
        for param in params:
            held = self._held.get(param)
            if held is not None:
                if held.device not in self._slots:
                    self._slots[held.device] = _Slot(self._staging[held.device].use())
                found[param] = held.lend(self._slots[held.device])
                self._lent.append(held)
            elif param in state:
                tree = _Tree(state[param])
                found[param] = tree.with_leaves([on_this_rank(leaf) for leaf in tree.leaves])
        return found

    def take_back(self, params: Sequence[torch.Tensor], after: Mapping[torch.Tensor, Any], state: Any) -> None:
        """Write ``after``, the state of ``params`` that this part of the step has left, to ``state`` and the host."""
        new = []
        for param in params:
            entry, held = after.get(param), self._held.get(param)
            if entry is None:
                state.pop(param, None)
            elif held is None or not held.take_back(entry):
                tree = _Tree(entry)
                if not self._keeps(param, tree, state.get(param)):
                    new.append((param, tree, False))
                    continue
                state[param] = _written(state.get(param), tree.with_leaves(tree.leaves))
        if new:
            self._move(new, state)
        for device in self._slots:
            self._staging[device].send_back()
        self._drop_lent()

    def _drop_lent(self) -> None:
        """Let go of what a part of the step was lent, or its memory would stay."""
        for held in self._lent:
            held.views = {}
        self._lent, self._slots = [], {}

    def _keeps(self, param: torch.Tensor, tree: _Tree, before: Any) -> bool:
        """Put what ``optimizer.state`` shows into ``tree``, which a step has left; return False if it needs a place."""
        held = self._held.get(param)
        places, views = ({}, {}) if held is None else (held.places, held.views)
        shown = _Tree({} if before is None else before)
        lent = [views.get(i, on_this_rank(leaf)) for i, leaf in enumerate(shown.leaves)]
        known = {id(leaf): i for i, leaf in enumerate(lent) if isinstance(leaf, torch.Tensor)}
        leaves = tree.leaves
        fits = shown.names == tree.names and all(p.fits(leaves[i], whole=self._whole) for i, p in places.items())
        for i, leaf in enumerate(leaves):
            at = known.get(id(leaf))
            if fits and i in places:
                if at != i:  # another tensor than the one that was lent
                    for mine, other in zip(inner_tensors(lent[i]), inner_tensors(leaf), strict=True):
                        mine.copy_(other)
                leaves[i] = places[i].shown
            elif at is not None and at not in places:
                leaves[i] = shown.leaves[at]
            else:  # what was lent lies in memory that the next part of the step gets
                leaves[i] = self._shown(leaf if at is None else leaf.clone(), param, tree.names[i])
        return fits and (held is not None or param in self._kept)

    def _shown(self, leaf: Any, param: torch.Tensor, name: Any) -> Any:
        return leaf if self._whole or is_counter(name) else shown_state(leaf, param)

    def end(self) -> None:
        """End a step: what it has changed is on the host when this returns."""
        self._drop_lent()
        for staging in self._staging.values():
            staging.end()
        self._wait_for_moves()


def _piece(some: Sequence[_Held]) -> list[torch.Tensor]:
    """Return the bytes of moments on the host that are copied together, neighbours at once; note where they begin."""
    parts: list[tuple[torch.Tensor, int, int]] = []
    total = 0
    for held in some:
        held.at = total
        total += held.end - held.start
        if parts and parts[-1][0] is held.segment and parts[-1][2] == held.start:
            parts[-1] = held.segment, parts[-1][1], held.end
        else:
            parts.append((held.segment, held.start, held.end))
    return [segment[start:end] for segment, start, end in parts]


def _written(entry: Any, values: Any) -> Any:
    """Make ``entry`` have ``values``, if both are dictionaries; return what has them."""
    if not isinstance(entry, dict) or not isinstance(values, dict):
        return values
    if entry.keys() != values.keys():
        entry.clear()
    for name, value in values.items():
        if entry.get(name) is not value:
            entry[name] = value
    return entry


def _nbytes(leaf: Any) -> int:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return 0
    return sum(align(inner.nbytes) for inner in inner_tensors(on_this_rank(leaf)))


def _most_bytes(moment: torch.Tensor) -> int:
    """Return the bytes of ``moment`` on the rank that has most of it; of one made of other tensors, on this rank."""
    local = on_this_rank(moment)
    if not isinstance(moment, DTensor) or local is not inner_tensors(local)[0]:
        return _nbytes(moment)
    shape = list(moment.shape)
    for placement, ranks in zip(moment.placements, moment.device_mesh.shape, strict=True):
        if (dim := cut_dim(placement)) is not None:
            shape[dim] = -(-shape[dim] // ranks)
    return align(math.prod(shape) * local.itemsize)


def _on_device(moment: torch.Tensor, device: torch.device) -> torch.Tensor:
    local = on_this_rank(moment)
    if local.device == device:
        return moment
    return dtensor_like(moment, local.to(device)) if isinstance(moment, DTensor) else local.to(device)


def _place(moment: torch.Tensor, segment: torch.Tensor, start: int, end: int) -> tuple[_Place, int]:
    """Copy ``moment`` to byte ``end`` of ``segment``; return its place, with offsets from ``start``, and its end."""
    local = on_this_rank(moment)
    offsets, inner = [], []
    for tensor in inner_tensors(local):
        offsets.append(end - start)
        stride = dense_strides(tensor)
        inner.append(part_of(segment, end, tensor.dtype, tensor.shape, stride))
        end += align(math.prod(tensor.shape) * tensor.itemsize)
    shown: torch.Tensor = with_inner_tensors(local, inner)
    place = _Place(dtensor_like(moment, shown) if isinstance(moment, DTensor) else shown, tuple(offsets), tuple(inner))
    place.copy(moment)
    return place, end
