"""The tensors of an engine, made of those of a model: renamed, left out, joined or split along their first dimension.

A rule is an entry of a mapping, from names of the model to names of the engine. The first rule that fits counts.

    "model.*": "*"                                          renamed
    "*.rotary.scale": None                                  left out
    ("*.q.weight", "*.k.weight", "*.v.weight"): "*.qkv.weight"             joined, in this order
    "*.qkv.weight": (("*.q.weight", 64), ("*.k.weight", 16), ("*.v.weight", 16))   split, by rows
    "*.gate_up.weight": ("*.gate.weight", "*.up.weight")    split evenly
    "*.experts.up": "*.experts.{}.up.weight"                a tensor for each entry of a stack, numbered
    "*.experts.gate_up": ("*.experts.{}.gate.weight", "*.experts.{}.up.weight")    each entry split as above

A ``*`` stands for any characters; in the engine's name it stands for what it stood for in the model's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp2.policies import fits
from fsdp2.sharding.boxes import Box, intersect
from fsdp2.weights.buckets import Entry
from fsdp2.weights.transfer import check_cast

__all__ = ["Dtypes", "Names", "Rows", "Target", "checked_dtypes", "checked_names", "targets_of"]

Names = Mapping[Any, Any] | Callable[[str], str | None] | None
Dtypes = torch.dtype | Mapping[str, torch.dtype] | None
_NUMBER = "{}"


@dataclass(frozen=True)
class Rows:
    """``count`` rows of a tensor of the model, from ``start`` on, and where they go: to row ``to`` of the target.

    If the tensor is a stack, they are one entry of it. ``part`` (start, length) of the entry's rows go into the target;
    None: all of them.
    """

    source: int
    start: int
    count: int
    to: int
    part: tuple[int, int] | None = None


@dataclass(frozen=True)
class Target:
    """A tensor of the engine, and the rows that it is made of.

    One that is made of an entry of a stack (``of_stack``) lacks the stack's first dimension.
    """

    name: str
    entry: Entry
    rows: tuple[Rows, ...]
    of_stack: bool = False

    def common(self, rows: Rows, box: Box) -> tuple[Box, Box] | None:
        """Return what a rank that holds ``box`` of the rows' source has of them: the box there, and in the target."""
        if not box:  # a scalar
            return box, box
        wanted = ((rows.start, rows.count), *box[1:])
        if rows.part is not None:
            wanted = (wanted[0], rows.part, *box[2:])
        at = intersect(box, wanted)
        if at is None:
            return None
        (start, length), *rest = at
        if not self.of_stack:
            return at, ((start - rows.start + rows.to, length), *rest)
        if rows.part is not None:
            rest[0] = (rest[0][0] - rows.part[0], rest[0][1])
        return at, tuple(rest)


@dataclass(frozen=True)
class _Rule:
    """A checked entry of the mapping. ``parts`` are names of the engine with their rows; None: an even share."""

    names: tuple[str, ...]
    parts: tuple[tuple[str, int | None], ...]


def checked_dtypes(where: str, given: Dtypes) -> dict[str, torch.dtype]:
    """Return the dtypes by pattern.

    Raises:
        TypeError: ``given`` is neither a floating-point dtype, nor a mapping from names or patterns to such, nor None.
    """
    dtypes = {} if given is None else dict(given) if isinstance(given, Mapping) else {"*": given}
    for pattern, dtype in dtypes.items():
        if not isinstance(pattern, str) or dtype is None:
            raise TypeError(
                f"{where}: dtype must be a floating-point torch.dtype, or a mapping from names or patterns to such, "
                f"got {pattern!r}: {dtype!r}"
            )
        check_cast(where, dtype)
    return dtypes


def checked_names(where: str, given: Names) -> Callable[[str], str | None] | list[_Rule]:
    """Return the function, or the rules of the mapping.

    Raises:
        TypeError: ``given`` is neither a mapping nor a function, or it has keys or values that are not names.
        ValueError: A rule has more stars on one side than on the other, or joins and splits at once.
    """
    if given is None:
        return []
    if callable(given):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{where}: mapping must be a mapping from the model's names to the engine's, or a function of a name, got "
            f"{type(given).__name__}"
        )
    return [_rule(where, key, value) for key, value in given.items()]


def _rule(where: str, key: object, value: object) -> _Rule:
    names = key if isinstance(key, tuple) else (key,)
    parts = value if isinstance(value, (tuple, list)) else () if value is None else (value,)
    pairs: list[Any] = [tuple(part) if isinstance(part, (tuple, list)) else (part, None) for part in parts]
    right = bool(names) and all(isinstance(name, str) for name in names)
    right = right and all(len(pair) == 2 and isinstance(pair[0], str) for pair in pairs)
    right = right and all(rows is None or (type(rows) is int and rows > 0) for _, rows in pairs)
    if not right or (value is not None and not pairs):
        raise TypeError(
            f"{where}: got the rule {key!r}: {value!r}, expected a name or a tuple of names, and for it a name, a "
            "tuple of names or of (name, rows), or None"
        )
    if len(names) > 1 and pairs and (len(pairs) != 1 or pairs[0][1] is not None):
        raise ValueError(
            f"{where}: the rule {key!r}: {value!r} joins {len(names)} tensors, expected one name for them; join to one "
            "tensor, or split one"
        )
    numbered = [name for name, _ in pairs if _NUMBER in name]
    if numbered and (len(names) > 1 or len(numbered) < len(pairs)):
        raise ValueError(
            f"{where}: the rule {key!r}: {value!r} numbers the tensors of a stack; expected one name of the model, and "
            f"{_NUMBER} in each of the engine's"
        )
    stars = {name.count("*") for name in (*names, *(name for name, _ in pairs))}
    if len(stars) > 1:
        raise ValueError(
            f"{where}: the rule {key!r}: {value!r} has {sorted(stars)} stars in its names, expected as many in each: a "
            "star of the engine's name stands for what that of the model's stands for"
        )
    if len(pairs) > 1 and len({rows is None for _, rows in pairs}) > 1:
        raise ValueError(f"{where}: the rule {key!r}: {value!r} has rows for some parts; expected them for all or none")
    return _Rule(tuple(names), tuple(pairs))


def targets_of(
    where: str,
    tensors: Sequence[tuple[tuple[str, ...], Entry]],
    names: Callable[[str], str | None] | list[_Rule],
    dtypes: Mapping[str, torch.dtype],
) -> list[Target]:
    """Return the engine's tensors in the order of the model's; ``tensors`` are those, with all names of each.

    Raises:
        TypeError: The function for names returns no string.
        ValueError: A rule or a dtype fits no tensor, tensors that are to be joined are missing or do not fit together,
            a tensor has too few rows to split, or two of the engine's have one name.
    """
    made = _renamed(where, tensors, names) if callable(names) else _Maker(where, tensors, names).made()
    found: dict[str, Target] = {}
    for target in made:
        if found.setdefault(target.name, target) is not target:
            raise ValueError(
                f"{where}: the mapping gives the name {target.name} to two tensors; got "
                f"{_sources(found[target.name], tensors)} and {_sources(target, tensors)}, expected one; rename one"
            )
    if not made:
        raise ValueError(f"{where}: the mapping leaves out every tensor; expected some to send; remove a rule")
    for pattern in dtypes:
        if not any(fits(name, pattern) for name in found):
            raise ValueError(
                f"{where}: dtype has {pattern!r}, which is no name of the engine's and fits none; got names such as "
                f"{list(found)[:3]}, expected one that fits; remove it"
            )
    return [_cast(target, dtypes) for target in made]


def _cast(target: Target, dtypes: Mapping[str, torch.dtype]) -> Target:
    """Return ``target`` in the engine's dtype; what is not floating-point keeps its own."""
    dtype = next((dtype for pattern, dtype in dtypes.items() if fits(target.name, pattern)), None)
    if dtype is None or not target.entry.dtype.is_floating_point:
        return target
    return Target(target.name, Entry(target.entry.shape, dtype), target.rows, target.of_stack)


def _sources(target: Target, tensors: Sequence[tuple[tuple[str, ...], Entry]]) -> str:
    return " + ".join(tensors[rows.source][0][0] for rows in target.rows)


def _all_of(name: str, source: int, entry: Entry) -> Target:
    return Target(name, entry, (Rows(source, 0, entry.shape[0] if entry.shape else 1, 0),))


def _renamed(
    where: str, tensors: Sequence[tuple[tuple[str, ...], Entry]], rename: Callable[[str], str | None]
) -> list[Target]:
    targets = []
    for source, (names, entry) in enumerate(tensors):
        name = rename(names[0])
        if name is not None and not isinstance(name, str):
            raise TypeError(
                f"{where}: mapping returned {name!r} for {names[0]}, expected the engine's name, or None to leave it "
                "out"
            )
        if name is not None:
            targets.append(_all_of(name, source, entry))
    return targets


class _Maker:
    """Applies rules to tensors. A tied tensor counts under its first name, and under those that a rule names."""

    def __init__(self, where: str, tensors: Sequence[tuple[tuple[str, ...], Entry]], rules: list[_Rule]) -> None:
        self.where = where
        self.tensors = tensors
        self.rules = rules
        literal = {name for rule in rules for name in rule.names}
        self.sources: dict[str, int] = {}
        for source, (names, _) in enumerate(tensors):
            for name in (names[0], *(name for name in names[1:] if name in literal)):
                self.sources[name] = source
        self.joined: set[tuple[_Rule, str]] = set()
        """Rules that have joined tensors, each with their names."""

    def made(self) -> list[Target]:
        """Return the targets."""
        targets: list[Target] = []
        fitting: set[int] = set()
        for name, source in self.sources.items():
            number, stars = self._fitting(name)
            if number is None:
                targets.append(_all_of(name, source, self.tensors[source][1]))
                continue
            fitting.add(number)
            if (self.rules[number], name) not in self.joined:
                targets += self._apply(self.rules[number], name, stars)
        for number, rule in enumerate(self.rules):
            if number not in fitting:
                raise ValueError(
                    f"{self.where}: the mapping has {_shown(rule.names)}, which is no name of the model's and fits "
                    f"none; got names such as {list(self.sources)[:3]}, expected one that fits and that no earlier "
                    "rule fits; remove it, or put it first"
                )
        return targets

    def _fitting(self, name: str) -> tuple[int | None, tuple[str, ...]]:
        """Return the first rule that fits ``name``, and what its stars stand for."""
        for number, rule in enumerate(self.rules):
            for pattern in rule.names:
                found = re.fullmatch("(.*)".join(re.escape(part) for part in pattern.split("*")), name, re.S)
                if found is not None:
                    return number, found.groups()
        return None, ()

    def _apply(self, rule: _Rule, name: str, stars: tuple[str, ...]) -> list[Target]:
        if not rule.parts:
            return []
        if len(rule.names) > 1:
            return [self._join(rule, stars)]
        source = self.sources[name]
        entry, (first, _) = self.tensors[source][1], rule.parts[0]
        if _NUMBER in first:
            return self._unstack(rule, stars, source, entry)
        if len(rule.parts) == 1 and rule.parts[0][1] is None:
            return [_all_of(_filled(first, stars), source, entry)]
        return self._split(rule, stars, source, entry)

    def _join(self, rule: _Rule, stars: tuple[str, ...]) -> Target:
        joined = [_filled(name, stars) for name in rule.names]
        missing = [name for name in joined if name not in self.sources]
        target = _filled(rule.parts[0][0], stars)
        if missing:
            raise ValueError(
                f"{self.where}: {target} is to be joined of {joined}, and the model has no {missing}; expected all of "
                "them; correct the names of the rule"
            )
        self.joined.update((rule, name) for name in joined)
        entries = [self.tensors[self.sources[name]][1] for name in joined]
        if len({(entry.shape[1:], entry.dtype) for entry in entries}) > 1 or not all(entry.shape for entry in entries):
            raise ValueError(
                f"{self.where}: {target} is to be joined of {joined}; got {[_described(one) for one in entries]}, "
                "expected one dtype, and shapes that differ in the first dimension alone"
            )
        rows, end = [], 0
        for name, entry in zip(joined, entries):
            rows.append(Rows(self.sources[name], 0, entry.shape[0], end))
            end += entry.shape[0]
        return Target(target, Entry((end, *entries[0].shape[1:]), entries[0].dtype), tuple(rows))

    def _split(self, rule: _Rule, stars: tuple[str, ...], source: int, entry: Entry) -> list[Target]:
        return [
            Target(_filled(name, stars), Entry((size, *entry.shape[1:]), entry.dtype), (Rows(source, start, size, 0),))
            for name, start, size in self._parts(rule, source, entry)
        ]

    def _parts(self, rule: _Rule, source: int, entry: Entry) -> list[tuple[str, int, int]]:
        """Return the names, the first rows and the numbers of rows of the parts of ``entry``."""
        total = entry.shape[0] if entry.shape else 0
        sizes = [total // len(rule.parts) if rows is None else rows for _, rows in rule.parts]
        if not total or sum(sizes) != total:
            even, count = rule.parts[0][1] is None, len(sizes)
            parts = f"{count} equal parts" if even else f"{sizes} rows"
            expected = f"a number of rows that {count} divides" if even else f"{sum(sizes)} rows in all"
            raise ValueError(
                f"{self.where}: {self.tensors[source][0][0]} is to be split into {parts}; got {_described(entry)}, "
                f"expected {expected}; correct the rows of the rule"
            )
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [(name, start, size) for (name, _), start, size in zip(rule.parts, starts, sizes)]

    def _unstack(self, rule: _Rule, stars: tuple[str, ...], source: int, entry: Entry) -> list[Target]:
        if len(entry.shape) < 2:
            raise ValueError(
                f"{self.where}: {self.tensors[source][0][0]} is to be taken apart into "
                f"{_filled(rule.parts[0][0], stars)}; got {_described(entry)}, expected a stack, of two dimensions or "
                "more"
            )
        one = Entry(entry.shape[1:], entry.dtype)
        whole = len(rule.parts) == 1 and rule.parts[0][1] is None
        parts = [(rule.parts[0][0], 0, one.shape[0])] if whole else self._parts(rule, source, one)
        return [
            Target(
                _filled(name, stars).replace(_NUMBER, str(number)),
                Entry((size, *one.shape[1:]), one.dtype),
                (Rows(source, number, 1, 0, None if whole else (start, size)),),
                of_stack=True,
            )
            for number in range(entry.shape[0])
            for name, start, size in parts
        ]


def _filled(pattern: str, stars: tuple[str, ...]) -> str:
    pieces = pattern.split("*")
    return "".join(piece + star for piece, star in zip(pieces, (*stars, "")))


def _shown(names: tuple[str, ...]) -> str:
    return repr(names[0] if len(names) == 1 else names)


def _described(entry: Entry) -> str:
    return f"{entry.dtype} of shape {entry.shape}"
