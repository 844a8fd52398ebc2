"""``WeightSender`` sends the weights of a sharded model to inference engines."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from fsdp2._naming import check_module
from fsdp2.sharding.packing import bucket_bytes, in_buckets
from fsdp2.weights.offers import Mine
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.select import ranks_of
from fsdp2.weights.updates.bucket import Update, WeightBucket
from fsdp2.weights.updates.collect import Collector
from fsdp2.weights.updates.link import Link, ToFunction, ToGroup
from fsdp2.weights.updates.mapping import Dtypes, Names, checked_dtypes, checked_names
from fsdp2.weights.updates.plan import held, make_plan

__all__ = ["SentWeights", "WeightSender"]

_WHERE = "WeightSender"


@dataclass(frozen=True)
class SentWeights:
    """What an update sent.

    ``nbytes`` counts the buffers and the headers of all buckets, and ``full_nbytes`` the whole tensors in the engine's
    dtypes. ``changed`` is the number of elements that had other values than before, of ``numel``; in a full update it
    is None, since nothing was compared.
    """

    version: int
    full: bool
    buckets: int
    nbytes: int
    full_nbytes: int
    changed: int | None
    numel: int


class WeightSender:
    """Sends the weights of a model, sharded or not, to inference engines: all of them, or what changed since.

    Every rank of the model must make it, and call ``send``. Tensors are gathered on the first rank, bucket by bucket,
    and delivered there. Tensor parallelism, replicas, and experts on meshes of their own are joined to whole tensors.

    Args:
        model: A module. It may be trained, loaded and changed between two updates.
        mapping: The engine's names, if they are not those of ``named_parameters``: a function from name to name (None:
            not sent), or a mapping with these rules, of which the first that fits a name counts. ``*`` stands for any
            characters; a name without a rule is kept.

            * ``"model.*": "*"`` renames, and ``"*.scale": None`` leaves out.
            * ``("*.q.weight", "*.k.weight", "*.v.weight"): "*.qkv.weight"`` joins along the first dimension.
            * ``"*.gate_up.weight": ("*.gate.weight", "*.up.weight")`` splits evenly along the first dimension;
              ``(("*.q.weight", 512), ("*.kv.weight", 128))`` splits by rows.
            * ``"*.experts.up": "*.experts.{}.up.weight"`` makes a tensor of each entry of a stack, numbered from 0;
              a tuple of such names also splits each entry.

            A tied parameter is sent once, under the first of its names, and under others that a rule names in full.
        dtype: The dtype of floating-point tensors, or a mapping from the engine's names or patterns to dtypes; the
            first that fits counts. Default: that of the shards.
        bucket_mb: The largest size of a bucket in MiB. A larger tensor has a bucket of its own.
        buffers: Also send persistent buffers. A plain one (running statistics, say) is the first rank's.
        delta: Send only what changed since the last update. Each rank keeps a copy of its shards in the engine's
            dtypes and compares bits, so receivers end bit for bit with what a full update sends.

    Raises:
        TypeError, ValueError: An argument is wrong. Every rank raises the error.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mapping: Names = None,
        dtype: Dtypes = None,
        bucket_mb: float = 256,
        buffers: bool = False,
        delta: bool = False,
    ) -> None:
        self._model = model
        self._ranks = (ranks_of(model) or Ranks.alone()).on_one_axis()
        with self._ranks.agreed():
            check_module(model, _WHERE)
            limit = bucket_bytes(_WHERE, bucket_mb)
            self._names = checked_names(_WHERE, mapping)
            self._dtypes = checked_dtypes(_WHERE, dtype)
        # The first rank's count: with others, ranks would misread each other's bytes.
        shared = self._ranks.share((limit, buffers, delta, uuid.uuid4().hex))
        self._limit, self._buffers, self._delta, self._session = shared
        self._collector: Collector | None = None
        self._version: int | None = None
        """What receivers have and the collector remembers; None at first, and after an update that was interrupted."""
        self._count = 0
        """The last version: two updates never have the same, even if receivers got but a part of one."""

    def send(
        self, to: Callable[[WeightBucket], object] | dist.ProcessGroup | None = None, *, full: bool = False
    ) -> SentWeights:
        """Send an update. Call it on every rank of the model, between two steps; it only reads the shards.

        The first update is full, and so is one after an interrupted update, after the model's tensors or the ranks
        that hold them have changed, and, over a process group, if a receiver lacks the version before.

        Args:
            to: On the first rank: a function that is called with each ``WeightBucket``, or a process group of this rank
                and of receivers, which call ``WeightReceiver.receive``. Other ranks need not pass it.
            full: Send all weights, not only what changed. The first rank's counts.

        Returns:
            The number of bytes, and what they would have been in full, on every rank.

        Raises:
            TypeError: The first rank's ``to`` is neither a function nor a process group.
            RuntimeError: Values are on the meta device, ``summon_full_params`` shows parameters, ranks have different
                tensors of one name, or a receiver cannot take the update. Nothing has been sent.
            ValueError: ``mapping`` or ``dtype`` does not fit the model. Nothing has been sent.
            Exception: That of the function, or of a receiver. Receivers may have a part; the next update is full.

        Every rank raises these errors.
        """
        ranks = self._ranks
        link = Link()
        with ranks.agreed():
            if ranks.first:
                link = _link(to)
            mine, digest = held(_WHERE, self._model, buffers=self._buffers)
        collector = self._collector_of(mine, digest)
        base = self._version if self._delta and not full else None
        try:
            with ranks.agreed():
                at = None if base is None else (self._session, base)
                base = base if link.meet(at) else None
            return self._send(collector, link, ranks.share(base))
        except BaseException as error:
            self._version = None
            if isinstance(error, Exception):
                link.abort(error)
            raise

    def _collector_of(self, mine: Mine, digest: bytes) -> Collector:
        """Return the collector for what ranks hold now: that of the last update, or a new one if it has changed."""
        known = self._collector
        if all(self._ranks.gather(known is not None and known.plan.digest == digest)):
            assert known is not None
            known.plan = known.plan.with_places(mine)
            return known
        self._version = self._collector = None
        plan = make_plan(_WHERE, mine, digest, self._ranks, self._names, self._dtypes, tracked=self._delta)
        self._collector = Collector(plan, self._ranks, tracked=self._delta)
        return self._collector

    def _send(self, collector: Collector, link: Link, base: int | None) -> SentWeights:
        ranks, plan, differing = self._ranks, collector.plan, None
        if base is None:
            forms, make = collector.whole(), collector.tensors
        else:
            forms, differing = collector.compared()
            make = collector.changes
        sizes = collector.sizes(forms)
        sent = [target for target, size in enumerate(sizes) if size or base is None]
        buckets = [*in_buckets(sent, sizes.__getitem__, self._limit)]
        self._count += bool(buckets)  # without a bucket, a receiver behind a function would not learn of a version
        version = self._count if base is None or buckets else base
        names, entries = tuple(target.name for target in plan.targets), tuple(target.entry for target in plan.targets)
        update = Update(self._session, version, base, self._delta, len(buckets), names, entries)
        nbytes = 0
        with ranks.agreed():
            link.begin(update)
        for number, targets in enumerate(buckets):
            bucket = make(forms, targets, update, number)
            with ranks.agreed():
                if bucket is not None:
                    nbytes += bucket.nbytes
                    link.deliver(bucket)
            del bucket  # not in memory while the next one is made
        with ranks.agreed():
            link.end()
        self._version = version
        return SentWeights(
            version=version,
            full=base is None,
            buckets=len(buckets),
            nbytes=ranks.share(nbytes),
            full_nbytes=sum(entry.nbytes for entry in entries),
            changed=differing,
            numel=sum(math.prod(entry.shape) for entry in entries),
        )


def _link(to: object) -> Link:
    """Return the way to receivers that ``WeightSender.send`` was given."""
    if isinstance(to, dist.ProcessGroup):
        return ToGroup(to)
    if callable(to):
        return ToFunction(to)
    raise TypeError(
        f"WeightSender.send: expected a function or a process group on the first rank of the model, got {to!r}; pass "
        "what is to happen with each bucket, or the group of this rank and the receivers"
    )
