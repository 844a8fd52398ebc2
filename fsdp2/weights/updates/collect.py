"""Buckets on the first rank, made of what the ranks hold: whole tensors, or changes as each rank found them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fsdp2.sharding.boxes import narrow, numel
from fsdp2.sharding.packing import align, in_buckets
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.updates.bucket import Part, Update, WeightBucket, whole_part
from fsdp2.weights.updates.delta import Form, changed, counted, encode, nbytes_of, smallest
from fsdp2.weights.updates.plan import Plan

__all__ = ["Collector", "Forms"]

Forms = list[tuple[int, int]]
"""The form in which each piece of a rank is sent, and how many of its elements are sent."""
_STEPS = 8
"""Whole tensors arrive in about so many steps a bucket, because what arrives is in memory beside the bucket."""


@dataclass
class Collector:
    """Collects what the ranks of ``plan`` hold. With ``tracked``, it keeps each piece of this rank as sent last."""

    plan: Plan
    ranks: Ranks
    tracked: bool
    sent: dict[int, torch.Tensor] = field(default_factory=dict)

    def whole(self) -> list[Forms]:
        """Return the forms in which all ranks, in rank order, send everything."""
        return [[(Form.WHOLE, numel(box)) for _, box in pieces] for pieces in self.plan.everyones]

    def compared(self) -> tuple[list[Forms], int]:
        """Return the forms in which all ranks send what has changed, and the number of elements that have."""
        counts: list[torch.Tensor] = []
        with self.ranks.agreed():
            for i, piece in enumerate(self.plan.pieces):
                for count in counted(changed(piece.read(), self.sent[i])):
                    counts.append(count.to(self.ranks.device))
            numbers = torch.stack(counts).tolist() if counts else []  # the host waits once
        forms = [
            smallest(marked, reached, piece.numel, piece.dtype.itemsize)
            for piece, marked, reached in zip(self.plan.pieces, numbers[::2], numbers[1::2])
        ]
        everyones = self.ranks.gather(([(int(form), count) for form, count in forms], sum(numbers[::2])))
        return [one for one, _ in everyones], sum(marked for _, marked in everyones)

    def sizes(self, forms: list[Forms]) -> list[int]:
        """Return the bytes that all ranks send of each target."""
        sizes = [0] * len(self.plan.targets)
        for pieces, chosen in zip(self.plan.everyones, forms):
            for (target, box), (form, count) in zip(pieces, chosen):
                sizes[target] += align(self._nbytes(target, form, count, numel(box)))
        return sizes

    def changes(self, forms: list[Forms], targets: list[int], update: Update, number: int) -> WeightBucket | None:
        """Return the bucket of changes of ``targets`` on the first rank, and None on the others."""
        buffer, parts = self._gather(forms, targets)
        parts.sort(key=lambda part: part.tensor)
        return WeightBucket(buffer, tuple(parts), update, number) if self.ranks.first else None

    def tensors(self, forms: list[Forms], targets: list[int], update: Update, number: int) -> WeightBucket | None:
        """Return the bucket of the whole ``targets`` on the first rank, and None on the others."""
        whole: dict[int, Part] = {}
        end = 0
        for target in targets:
            whole[target] = whole_part(target, update.entries[target], end)
            end += align(update.entries[target].nbytes)
        with self.ranks.agreed():
            buffer = torch.empty(end if self.ranks.first else 0, dtype=torch.uint8, device=self.ranks.device)
        sizes = self.sizes(forms)
        for step in in_buckets(targets, sizes.__getitem__, sum(sizes[target] for target in targets) // _STEPS):
            received, parts = self._gather(forms, step)
            for part in parts if self.ranks.first else ():
                entry, at = update.entries[part.tensor], whole[part.tensor].offset
                target_view = buffer[at : at + entry.nbytes].view(entry.dtype).view(entry.shape)
                data = received[part.offset : part.offset + part.count * entry.dtype.itemsize].view(entry.dtype)
                narrow(target_view, part.box).copy_(data.view([length for _, length in part.box]))
        return WeightBucket(buffer, tuple(whole.values()), update, number) if self.ranks.first else None

    def _nbytes(self, target: int, form: int, count: int, elements: int) -> int:
        return nbytes_of(form, count, elements, self.plan.targets[target].entry.dtype.itemsize)

    def _gather(self, forms: list[Forms], targets: Sequence[int]) -> tuple[torch.Tensor, list[Part]]:
        """Return all ranks' pieces of ``targets`` on the first rank (nothing on the others), and where they are."""
        wanted, parts, sizes, start = set(targets), [], [], 0
        for pieces, chosen in zip(self.plan.everyones, forms):
            end = start
            for (target, box), (form, count) in zip(pieces, chosen):
                if target in wanted and form != Form.NOTHING:
                    parts.append(Part(target, box, form, count, end))
                    end += align(self._nbytes(target, form, count, numel(box)))
            sizes.append(end - start)
            start = end
        here = self.ranks.lines[0][0].rank if self.ranks.lines else 0
        with self.ranks.agreed():
            mine = self._encoded(forms[here], wanted, sizes[here])
        return self.ranks.to_first(mine, sizes), parts

    @torch.no_grad()
    def _encoded(self, forms: Forms, wanted: set[int], size: int) -> torch.Tensor:
        """Return the bytes of this rank's pieces of the ``wanted`` targets."""
        message = torch.empty(size, dtype=torch.uint8, device=self.ranks.device)
        end = 0
        for i, (piece, (form, count)) in enumerate(zip(self.plan.pieces, forms)):
            if piece.target not in wanted or form == Form.NOTHING:
                continue
            new = piece.read()
            nbytes = self._nbytes(piece.target, form, count, piece.numel)
            into = message[end : end + nbytes]
            encoded = into if into.device == new.device else torch.empty_like(into, device=new.device)
            encode(Form(form), new, None if form == Form.WHOLE else changed(new, self.sent[i]), encoded)
            if encoded is not into:  # shards on the CPU
                into.copy_(encoded)
            if self.tracked:
                self.sent[i] = new
            end += align(nbytes)
        return message
