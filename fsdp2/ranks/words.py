"""Collectives in words, for errors that name what each rank did and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from fsdp2.engine.collective import AS_COMPUTED, BROKEN_OFF, Collective, ObservedGroup, PassKind
from fsdp2.engine.root import RootContext

__all__ = ["ELSEWHERE", "Words", "refuse"]

_REMEDY = "every rank must run the same units in the same order, after the same calls of setters and of unshard()"
ELSEWHERE = "a pass of another root"
_REMEDY_FOR_ROOTS = "; run the forwards and backwards of all models in one order on all ranks"
_BROKE_OFF = "broke off (an exception, or reset_iter_state)"
_REMEDY_FOR_EXCEPTIONS = (
    "; let all ranks agree before the pass that each of them can run it (by an all_reduce, say), or let an exception "
    "of one rank end the job"
)
_REMEDY_FOR_PASSES = "; call the model and its methods equally often on all ranks, outside of `if rank == 0:`"


class _Did(NamedTuple):
    """A collective of one rank in words, and the name of its unit (None for the end of a pass)."""

    text: str
    unit: str | None = None
    order: tuple[bool, int] = (False, 0)  # gathers, which are prefetched, before reductions; then as in the pass
    may_skip: bool = False  # the unit has set_reduce_scatter_unused_params(True)


class Words:
    """The words of one rank about the collectives under a ``root``."""

    def __init__(self, root: RootContext) -> None:
        self._root = root
        self.forward_positions: dict[Any, int] = {}  # the order of the groups in the last forward

    def order(self, kind: PassKind | None, group: ObservedGroup) -> int:
        """Return a number that grows along the pass: in the order of groups in a forward, in reverse in a backward."""
        groups: Sequence[ObservedGroup] = self._root.groups
        number = groups.index(group)
        backward = kind is not None and kind.is_backward
        return -self.forward_positions.get(group, number) if backward else number

    def did(self, kind: PassKind | None, collective: Collective) -> str:
        """Return a collective as JSON, for ``refuse`` on another rank."""
        group, text = collective.group, self._text(kind, collective)
        if group is None:
            return json.dumps(_Did(text))
        order = (collective.kind == "reduce", self.order(kind, group))
        return json.dumps(_Did(text, group.name, order, group.store.options.reduce_unused))

    def _text(self, kind: object, collective: Collective) -> str:
        group = collective.group
        if group is None:
            return f"{kind} {_BROKE_OFF}" if collective == BROKEN_OFF else f"the end of {kind}"
        text = f"{collective.kind} {group.name or 'the root'!r} in {kind}"
        if collective.kind == "stay":
            return f"{group.name or 'the root'!r} is gathered since forward in {kind}"
        if collective.kind == "reduce":
            names = _names(group, [i for i in collective.part if i >= 0])
            missing = f", without {_names(group, lacks)}" if (lacks := collective.lacks) else ""
            return f"{text} ({names}{' as computed' if AS_COMPUTED in collective.part else ''}{missing})"
        sent = collective.part[len(group.store.formats_digest) :]
        if group.store.formats_digest:
            encoded = {str(param.formats): param.name for param in group.params if any(param.formats)}
            text += f" with {'; '.join(f'{name}: {formats}' for formats, name in encoded.items())}"
        if sent and group.store.extensions is not None:
            return f"{text} ({group.store.extensions.describe(sent)})"
        several = sum(other.name == group.name for other in self._root.groups) > 1
        return f"{text} ({group.params[0].name}{', ...' if len(group.params) > 1 else ''})" if several else text


def _names(group: ObservedGroup, indices: list[int]) -> str:
    return ", ".join(group.params[i].name for i in indices[:3]) + (", ..." if len(indices) > 3 else "")


def refuse(texts: dict[int, str]) -> str:
    """Return the error text for ranks that differ."""
    did = {rank: _Did(*json.loads(text)) if text.startswith("[") else text for rank, text in texts.items()}
    by_text: dict[str, list[int]] = {}
    for rank, one in did.items():
        by_text.setdefault(one if isinstance(one, str) else one.text, []).append(rank)
    parts = [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items()]
    if ELSEWHERE in by_text:
        remedy = _REMEDY_FOR_ROOTS
    elif any(text.endswith(_BROKE_OFF) for text in by_text):
        remedy = _REMEDY_FOR_EXCEPTIONS
    else:
        remedy = _skipping(list(did.values())) or _REMEDY_FOR_PASSES
    return f"ranks do not do the same: {'; '.join(parts)}. Expected: {_REMEDY}{remedy}"


def _skipping(did: list[_Did | str]) -> str:
    """Return the remedy if some ranks skip a unit or a part of it, given each rank's collective; a str is none."""
    collectives = [one for one in did if isinstance(one, _Did)]
    units = [one for one in collectives if one.unit is not None]
    if not units or len(collectives) < len(did):
        return ""
    same = len({one.unit for one in collectives}) == 1
    if same and not all(one.order[0] for one in units):  # one has a gather: they differ in more than gradients
        return ""
    first = min(units, key=lambda one: one.order)  # ranks that are further on have skipped this unit
    name = repr(first.unit) if first.unit else "the root"
    if first.may_skip:
        line = f"{_in_python(first.unit or '')}.set_reduce_scatter_unused_params(True, any_order=True)"
        return (
            f"; some ranks may skip {name}, but ranks that have used such units alike must go on to use them in one "
            "order, each as often as before: loop over experts by their index, not by their score, or call "
            f"`{line}` for each of them, on all ranks, which takes more memory"
        )
    line = "{}.set_reduce_scatter_unused_params(True)"
    unit = line.format(_in_python(first.unit or ""))
    every = f", or {line.format('model')} for every unit of the root" if first.unit else ""
    # They reduce one unit: some ranks have gradients that others have not, as of experts that get no token.
    skipped = f"all parameters of {name}, or, if ranks may skip some" if same else f"{name}, or, if ranks may skip it"
    return f"; give each rank some input for {skipped}, call `{unit}`{every}, on all ranks"


def _in_python(name: str) -> str:
    """Return a Python expression for the module of a unit below ``model``; for the first one of several."""
    text = "model"
    for part in name.split(", ")[0].split(".") if name else ():
        text += f"[{part}]" if part.isdigit() else f".{part}"
    return text
