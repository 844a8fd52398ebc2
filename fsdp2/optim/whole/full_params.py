"""``use_full_params`` lets an optimizer step on whole matrices, each on one rank, its owner.

A step goes bucket by bucket. One all-to-all sends the pieces of gradients and parameters to the owners. Every owner
runs the optimizer's own step on plain, whole tensors. Another all-to-all sends pieces of the new values back, and they
are written to the shards. The next bucket is sent while one is computed.
"""

from __future__ import annotations

import types
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from fsdp2.comm.collectives import exchange_objects, max_over_ranks
from fsdp2.comm.streams import Lane
from fsdp2.engine.param import lend_gradient, parameter_like, resemble, take_assigned
from fsdp2.optim.alike import STEPS_ON_LOCAL, STEPS_ON_WHOLE, about_plain_gradient, local_gradient
from fsdp2.optim.host_state import HOST_STATE, HostState
from fsdp2.optim.partial import PartialGroups, replace_step, step_of
from fsdp2.optim.prebuilt import repair
from fsdp2.optim.whole.early import EarlyGradients
from fsdp2.optim.whole.exchange import Arriving, Layout
from fsdp2.optim.whole.full_state import OwnedState, keep_owned, names_in, shown_at_holders
from fsdp2.optim.whole.kept import KeptParams
from fsdp2.optim.whole.lending import Alone, Lending, Matrices, batches_of
from fsdp2.optim.whole.owners import default_cost, mesh_ranks
from fsdp2.optim.whole.ownership import Owned, Ownership, RankSet, digest_of
from fsdp2.optim.whole.stacks import Stacks
from fsdp2.sharding.packing import bucket_bytes
from fsdp2.sharding.spec import on_this_rank

__all__ = ["kept_params", "use_full_params"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
_PLANS = 16
"""The number of plans that are remembered: which experts have gradients may differ in each step."""


@dataclass(frozen=True)
class _Gradient:
    """The dtype of a gradient, whether the step has to send it, and whether it has to send the parameter."""

    dtype: torch.dtype
    late: bool
    param_late: bool


_NO_GRADIENT, _NOTHING_HERE, _FEWEST = -1, -2, -(1 << 20)


def use_full_params(
    optimizer: optim.Optimizer,
    *,
    cost: Callable[[torch.Tensor], float] | None = None,
    bucket_mb: float = 64.0,
    stacked: Callable[[torch.Tensor], bool] | None = None,
    overlap_backward: bool = False,
    keep_full_params: bool = False,
    batched: bool = False,
    over_replicas: bool = True,
) -> optim.Optimizer:
    """Let ``optimizer`` compute with whole parameters, each on the one rank that owns it, and return ``optimizer``.

    Use it for optimizers that need whole matrices: Muon, Shampoo, SOAP, Adafactor. Each parameter is updated
    independently, so the results are those of the same step on whole tensors in one process. Learning rates, parameter
    groups, hooks, ``zero_grad`` and gradient scalers work as before. The owner holds a parameter's state. All ranks
    must call ``state_dict`` and ``load_state_dict``, which convert the state to and from DTensors. Each step sends
    about three times the shards' bytes, and on an accelerator the host waits once. Plain parameters are stepped on
    every rank.

    Args:
        optimizer: An optimizer that updates each parameter independently and whose ``step`` takes no closure.
        cost: A function that returns the cost of a (sharded) parameter for its owner, the same on all ranks. Default:
            rows x columns x the smaller of the two for matrices, else the number of elements.
        bucket_mb: MiB of gradients and parameters that an owner computes with at a time. If a parameter exceeds it,
            other owners compute with as many bytes meanwhile.
        stacked: A function that returns True for a (sharded) parameter of three dimensions which is a stack of
            matrices, as the experts of a layer often are. The optimizer then steps on each matrix as on a parameter of
            its own. Default: with ``torch.optim.Muon``, which takes matrices alone, every parameter of three dimensions
            that is no convolution's; with other optimizers none. torch's Muon checks what it is built with, so give it
            stacks by ``add_param_group``.
        overlap_backward: From the second step on, send gradients to their owners while backward runs, so that a step
            sends a third less. Results are the same. The owners' copies of gradients take as much memory as the
            gradients of shards until the step. What changes gradients between backward and step, except
            ``fsdp2.clip_grad_norm_`` and ``fsdp2.ShardedGradScaler``, makes the step send them again.
        keep_full_params: Owners keep the whole parameters from one step to the next, so that a step does not send them.
            Results are the same. They take as much memory as the shards of these parameters. What writes to shards
            between steps, such as loading a checkpoint, is noticed, and the step sends the parameters again.
        batched: Give the optimizer all matrices of one shape in a bucket as one parameter of three dimensions. For
            optimizers that step on each matrix of a batch by itself; torch's Muon refuses batches.
        over_replicas: With hybrid sharding, one rank of all replicas owns a parameter, and its new values travel to
            the other replicas. False: each replica has an owner of its own. Then each rank has more to compute, and a
            step sends nothing between replicas, which is faster if the network between them is slow. Results are the
            same, if the replicas' devices compute the same.

    Raises:
        TypeError: ``optimizer`` is not a torch.optim.Optimizer.
        ValueError: ``optimizer`` needs a closure or sparse gradients, or already steps on local shards; or
            ``bucket_mb`` is not positive and finite.

    Example:
        ```python
        fsdp2.fully_shard(model)
        optimizer = fsdp2.use_full_params(torch.optim.Muon(matrices, lr=0.02))
        ```
    """
    if not isinstance(optimizer, optim.Optimizer):
        raise TypeError(
            f"use_full_params: expected a torch.optim.Optimizer, got {type(optimizer).__name__}; pass the optimizer "
            "that a wrapper holds"
        )
    limit = bucket_bytes("use_full_params", bucket_mb)
    if STEPS_ON_WHOLE in optimizer.__dict__:
        return optimizer
    _check_kind(optimizer)
    if batched and isinstance(optimizer, optim.Muon):
        raise ValueError(
            "use_full_params: batched=True, but torch.optim.Muon orthogonalizes one matrix at a time; expected an "
            "optimizer that takes batches of matrices. Leave batched out"
        )
    stacks = Stacks(optimizer, stacked)
    options = {"overlap": overlap_backward, "keep": keep_full_params, "batched": batched}
    ownership = partial(Ownership, cost=cost or default_cost, stacks=stacks, over_replicas=over_replicas)
    steps = _FullParams(optimizer, ownership, limit, stacks, **options)
    steps.take_over()
    optimizer.__dict__[STEPS_ON_WHOLE] = steps
    return optimizer


def kept_params(optimizer: object) -> list[torch.Tensor]:
    """Return the whole parameters that this rank keeps for ``optimizer`` between steps."""
    steps = getattr(optimizer, STEPS_ON_WHOLE, None)
    return [] if steps is None else [whole for kept in steps.kept for whole in kept.wholes]


def _check_kind(optimizer: optim.Optimizer) -> None:
    reason = ""
    if isinstance(optimizer, optim.LBFGS):
        reason = "it takes products over all elements of all parameters, and its step needs a closure"
        remedy = "Unchanged, it steps on DTensors if all ranks' pieces of each parameter have the same size"
    elif isinstance(optimizer, optim.SparseAdam):
        reason = "it needs sparse gradients, and those of shards are dense"
        remedy = "Leave its parameters out of sharding (ignored_params of fully_shard), or use Adam"
    elif HOST_STATE in optimizer.__dict__:
        reason = "offload_optimizer_state was called on it, which lets it compute with shards"
        remedy = "Call use_full_params first, on a new optimizer, then offload_optimizer_state"
    elif STEPS_ON_LOCAL in optimizer.__dict__:
        reason = "use_local_shards was called on it, and it computes either with whole parameters or with shards"
        remedy = "Call one of the two on a new optimizer"
    if reason:
        raise ValueError(
            f"use_full_params: {type(optimizer).__name__} cannot step on whole parameters, because {reason}; expected "
            f"an optimizer that updates each parameter independently, such as Muon. {remedy}"
        )


@dataclass
class _Bucket:
    """Parameters that are computed at the same time, and the layouts of the all-to-alls for them."""

    owned: list[Owned]
    early: EarlyGradients | None  # has the gradients that ``inward`` has not
    kept: KeptParams | None  # has the parameters that ``inward`` has not
    inward: Layout  # gradients of those in ``late``, then parameters of those in ``late_params``
    late: list[Owned]
    late_params: list[Owned]
    outward: Layout
    grads: list[torch.Tensor | None] = field(default_factory=list)
    fulls: list[torch.Tensor | None] = field(default_factory=list)
    arriving: Arriving | None = None
    leaving: Arriving | None = None


class _FullParams:
    """The replaced step and state dicts of one optimizer."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        ownership: Callable[[list[Any]], Ownership],
        bucket_bytes: int,
        stacks: Stacks,
        *,
        overlap: bool,
        keep: bool,
        batched: bool,
    ) -> None:
        self._optimizer = optimizer
        self._overlap, self._keep, self._batched = overlap, keep, batched
        self._lanes: dict[torch.device, Lane] = {}
        self._early: dict[RankSet, EarlyGradients] = {}
        self._kept: dict[RankSet, KeptParams] = {}
        self._stacks = stacks
        self._ownership_of, self._bucket_bytes = ownership, bucket_bytes
        self._ownership = ownership([])
        self._proxies: dict[torch.Tensor, nn.Parameter] = {}
        self._buckets: dict[tuple[Any, ...], list[_Bucket]] = {}
        self._load_as_torch = optimizer.load_state_dict
        self._save_as_torch = optimizer.state_dict
        self._step_as_torch = step_of(optimizer)

    @property
    def kept(self) -> Iterable[KeptParams]:
        """The whole parameters that stay with this rank."""
        return self._kept.values()

    def take_over(self) -> None:
        """Replace the optimizer's ``step``, ``state_dict`` and ``load_state_dict``."""
        optimizer = self._optimizer
        replace_step(optimizer, self._step)
        optimizer.state_dict = types.MethodType(self._state_dict, optimizer)  # type: ignore[method-assign]  # of this one alone
        optimizer.load_state_dict = types.MethodType(self._load_state_dict, optimizer)  # type: ignore[method-assign]  # likewise
        # copy.deepcopy calls it too. A copy would have neither this step nor the state of other owners.
        optimizer.__reduce_ex__ = types.MethodType(_refuse_copying, optimizer)  # type: ignore[method-assign]  # likewise

    # ---- one step ----

    @torch.no_grad()
    def _step(self, optimizer: optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Send, compute and write all buckets in order.

        Raises:
            RuntimeError: Only some ranks have a gradient of a parameter, or the optimizer raised an error on another
                rank. Every rank raises one.
        """
        if closure is not None:
            raise ValueError(
                f"{type(optimizer).__name__}.step: got a closure, expected none: whole parameters exist only during "
                "the step; call backward() before step()"
            )
        if (now := self._other_params()) is not None:
            self._agree_on_gradients(now)  # under the owners so far, as ranks do whose parameters are the same
        self._refresh()
        found = self._agree_on_gradients()
        groups = _Groups(optimizer, self._stacks, batched=self._batched)
        sets = [self._buckets_of(ranks, found[ranks]) for ranks in self._ownership.sets]
        groups.begin([owned.key for owned in bucket.owned if owned.mine] for buckets in sets for bucket in buckets)
        stepped = False
        try:
            used = [one for ranks in found for one, known in zip(ranks.params, found[ranks]) if known]
            error = self._compute_all(sets, groups) or groups.step_idle(used, self._step_as_torch)
            stepped = error is None
        finally:
            groups.end()
            for ranks in self._ownership.sets:
                self._end_of(ranks, [one for one, known in zip(ranks.params, found[ranks]) if known], stepped=stepped)
        self._end_together(error, groups)
        self._state.stepped = True

    def _end_of(self, ranks: RankSet, used: list[Any], *, stepped: bool) -> None:
        if ranks in self._early:
            self._early[ranks].end_step(used)
        if ranks in self._kept and stepped:
            self._kept[ranks].end_step(used)
        elif ranks in self._kept:
            self._kept[ranks].drop()

    def _compute_all(self, sets: list[list[_Bucket]], groups: _Groups) -> Exception | None:
        """Send, compute and write all buckets; return the first error of the optimizer on this rank."""
        error: Exception | None = None
        before: _Bucket | None = None
        for buckets in sets:
            for i, bucket in enumerate(buckets):
                if i == 0:
                    self._send(bucket)
                self._assemble(bucket)
                if i + 1 < len(buckets):
                    self._send(buckets[i + 1])
                if error is None:
                    error = self._compute(bucket, groups)
                self._return(bucket)
                if before is not None:
                    self._write(before)
                before = bucket
        if before is not None:
            self._write(before)
        if error is None:
            error = groups.step({param: param for param in groups.plain}, self._step_as_torch)
        return error

    def _present_params(self) -> list[Any]:
        """Return the sharded parameters that the optimizer has now."""
        repair(self._optimizer)  # a step has done so already, but a state dict may be requested before any step
        return [p for group in self._optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)]

    def _other_params(self) -> list[Any] | None:
        """Return the present parameters if they are not those of the owners so far; None if they are, or at first."""
        params = self._present_params()
        return params if self._ownership.sets and not self._ownership.is_of(params) else None

    def _refresh(self) -> None:
        """Take over newly sharded parameters, changed parameter groups, and state that the caller has replaced.

        That sends state, so all ranks must have compared the parameters before, if they have owners. Whatever ends
        this before its end, an interrupt or an error: the next call begins again with the same state.
        """
        params = self._present_params()
        optimizer = self._optimizer
        if not self._ownership.is_of(params):
            for param in params:
                self._stacks.has(param)  # the caller's function may be wrong, which all ranks see here
            ownership = self._ownership_of(params)
            self._buckets.clear()
            self._proxies.clear()
            self._stacks.keep([param for group in optimizer.param_groups for param in group["params"]])
            for early in self._early.values():
                early.close()
            if self._overlap:
                self._early = {ranks: EarlyGradients(ranks, self._bucket_bytes) for ranks in ownership.sets}
            if self._keep:
                self._kept = {ranks: KeptParams(ranks) for ranks in ownership.sets}
            self._ownership = ownership
        state: Any = optimizer.state
        if not isinstance(state, OwnedState) or state.ownership is not self._ownership:
            if isinstance(state, OwnedState):
                state = shown_at_holders(state, state.ownership)  # other ranks may own it from now on
            optimizer.state = keep_owned(state, self._ownership)  # type: ignore[assignment]  # torch needs no more than a dictionary
        if HOST_STATE in optimizer.__dict__:
            optimizer.__dict__[HOST_STATE].settle([*optimizer.state], optimizer.state)

    @property
    def _state(self) -> OwnedState:
        """The state of the optimizer, after ``_refresh``."""
        return self._optimizer.state  # type: ignore[return-value]  # as above

    def _agree_on_gradients(self, now: list[Any] | None = None) -> dict[RankSet, list[_Gradient | None]]:
        """Return what is known of each parameter's gradient (None without one) after checking that all ranks have the
        same, and the same parameters in the same order.

        Sets of fewer ranks come first, so that an error in one of them reaches all ranks before anything is sent.

        ``now`` are the optimizer's parameters if they are not those of the owners so far. Then only these are compared:
        a rank that alone took them over would wait for exchanges that no other rank starts.
        """
        found: dict[RankSet, list[_Gradient | None]] = {}
        wrong = ""
        plain: RuntimeError | None = None
        for sets in reversed(self._ownership.on_same_ranks):
            params = [param for ranks in sets for param in ranks.params]
            codes = [_code(param) for param in params]
            if now is None:
                plain = next(filter(None, map(about_plain_gradient, params)), plain)
            least = [_FEWEST if code == _NOTHING_HERE else -code for code in codes]
            digest = self._digest(sets, now)
            mine = [*codes, *least, digest, -digest, bool(wrong or plain), now is not None]
            there = [kind[ranks].begin_step() for kind in (self._early, self._kept) for ranks in sets if ranks in kind]
            missing = [flag for flags, _ in there for flag in flags]
            written = torch.cat([flags for _, flags in there]) if there else None
            agreed = max_over_ranks([*mine, *missing], sets[0].axis, sets[0].device, written)
            (*most, largest, smallest, elsewhere, changed), flags = agreed[: len(mine)], agreed[len(mine) :]
            if largest != -smallest and not wrong:
                wrong = self._about_params(now, changed=bool(changed))
            most, least = most[: len(codes)], most[len(codes) :]
            for param, code, high, low in zip(params, codes, most, least):
                if now is None and not changed and high > _NOTHING_HERE and high != -low:
                    here = str(_DTYPES[code]) if code >= 0 else "none"
                    wrong = f"ranks have different gradients of {self._name(param)} (here: {here})"
            if elsewhere and not wrong:
                wrong = "some ranks lack a gradient, or have it in another form; the errors of other ranks name it"
            sends = [*map(any, zip(flags[: len(missing)], flags[len(missing) :]))]
            late = [sends.pop(0) for _ in codes] if self._overlap else [True] * len(codes)
            late_params = sends if self._keep else [True] * len(codes)
            known = [
                _Gradient(_DTYPES[high], *of_param) if high >= 0 else None
                for high, *of_param in zip(most, late, late_params)
            ]
            for ranks in sets:
                found[ranks], known = known[: len(ranks.params)], known[len(ranks.params) :]
        if plain:
            raise plain
        if wrong:
            raise RuntimeError(
                f"use_full_params: {wrong}; expected the same parameters in the same order, and a gradient of one "
                "dtype on every rank that holds a piece, or on none. Build the same optimizer on all ranks, and set or "
                "clear gradients in the same way. Nothing was changed"
            )
        return found

    @staticmethod
    def _digest(sets: Sequence[RankSet], now: Sequence[Any] | None) -> int:
        """Return a number for the parameters of ``sets``, which lie on the same ranks, or for those ``now`` there."""
        if now is None:
            return zlib.crc32(repr([ranks.digest for ranks in sets]).encode()) >> 1
        there = [param for param in now if mesh_ranks(param) == sets[0].ranks]
        return zlib.crc32(f"now {digest_of(there)}".encode()) >> 1

    def _about_params(self, now: Sequence[Any] | None, *, changed: bool) -> str:
        """Say how the parameters of this rank differ from those of others; ``changed``: since the last step."""
        if not changed:
            return "ranks have the parameters in different orders"
        if now is None:
            return "other ranks gave their optimizer other parameters since the last step, and this one did not"
        before = {id(param) for ranks in self._ownership.sets for param in ranks.params}
        names = ", ".join([self._name(param) for param in now if id(param) not in before][:8]) or "none is new"
        return f"this rank's optimizer has other parameters than before ({names}), and not all ranks' have"

    def _agree_on_params(self) -> None:
        """Compare the parameters of all ranks before ``_refresh`` outside of a step.

        Raises:
            RuntimeError: They differ. Every rank raises it.
        """
        now, wrong = self._other_params(), ""
        for sets in reversed(self._ownership.on_same_ranks):
            digest = self._digest(sets, now)
            mine = [digest, -digest, bool(wrong), now is not None]
            largest, smallest, elsewhere, changed = max_over_ranks(mine, sets[0].axis, sets[0].device)
            if (largest != -smallest or elsewhere) and not wrong:
                wrong = self._about_params(now, changed=bool(changed))
        if wrong:
            raise RuntimeError(
                f"use_full_params: {wrong}; expected the same parameters in the same order on all ranks. Add and "
                "remove the same ones on every rank before a step or a state dict. Nothing was changed"
            )

    def _buckets_of(self, ranks: RankSet, gradients: list[_Gradient | None]) -> list[_Bucket]:
        key = (ranks, *gradients)
        if key not in self._buckets:
            if len(self._buckets) >= _PLANS:
                del self._buckets[next(iter(self._buckets))]  # the oldest
            of_param = dict(zip(ranks.params, gradients))
            used = [(owned, known.dtype) for owned in ranks.owned if (known := of_param[owned.param]) is not None]
            late = {param for param, known in of_param.items() if known is not None and known.late}
            late_params = {param for param, known in of_param.items() if known is not None and known.param_late}
            there = self._early.get(ranks), self._kept.get(ranks)
            buckets = ranks.buckets(used, self._bucket_bytes)
            self._buckets[key] = [_plan_bucket(ranks, bucket, late, late_params, there) for bucket in buckets]
        return self._buckets[key]

    def _send(self, bucket: _Bucket) -> None:
        sources = [*map(_gradient_of, bucket.late), *map(_shard_of, bucket.late_params)]
        origins = [owned.here for owned in (*bucket.late, *bucket.late_params)]
        bucket.arriving = bucket.inward.send(sources, origins, self._lane_of(bucket))

    def _assemble(self, bucket: _Bucket) -> None:
        """Wait for a bucket's pieces, and assemble the gradients and parameters that this rank owns."""
        entries, count = [*bucket.late, *bucket.late_params], len(bucket.late)
        wholes = [owned.empty(dtype) if owned.mine else None for owned, dtype in zip(entries, bucket.inward.dtypes)]
        assert bucket.arriving is not None
        bucket.arriving.deliver(wholes, [owned.whole for owned in entries])
        bucket.arriving = None
        bucket.grads = _completed(bucket.owned, dict(zip(bucket.late, wholes)), bucket.early)
        bucket.fulls = _completed(bucket.owned, dict(zip(bucket.late_params, wholes[count:])), bucket.kept)

    def _compute(self, bucket: _Bucket, groups: _Groups) -> Exception | None:
        """Run the optimizer's own step on this rank's parameters of ``bucket``; return the error that it raised.

        The error is not raised here: the other ranks continue and would wait for this rank's collectives.
        """
        lent: dict[torch.Tensor, torch.Tensor] = {}
        memory: list[torch.Tensor] = []
        for owned, grad, full in zip(bucket.owned, bucket.grads, bucket.fulls):
            if full is not None:
                proxy = lent[owned.key] = self._proxy(owned)
                memory.append(full)
                proxy.data = full
                lend_gradient(proxy, grad)
        bucket.grads = []
        try:
            return groups.step(lent, self._step_as_torch)
        finally:
            for returned, full in zip(lent.values(), memory):
                take_assigned(returned, full)
                lend_gradient(returned, None)
                returned.data = returned.data.new_empty(0)

    def _proxy(self, owned: Owned) -> Any:
        """Return the plain parameter that the step works on in place of ``owned``, the same object in every step."""
        key: Any = owned.key
        if owned.index is None and key not in self._proxies:
            self._proxies[key] = parameter_like(key, on_this_rank(key).new_empty(0))
        proxy = key if owned.index is not None else self._proxies[key]
        resemble(proxy, owned.param)
        return proxy

    def _lane_of(self, bucket: _Bucket) -> Lane:
        """Return the lane on which pieces travel beside the optimizer's kernels."""
        device = bucket.inward.device
        if device not in self._lanes:
            self._lanes[device] = Lane(device)
        return self._lanes[device]

    def _return(self, bucket: _Bucket) -> None:
        wholes = [owned.whole for owned in bucket.owned]
        bucket.leaving = bucket.outward.send(bucket.fulls, wholes, self._lane_of(bucket))
        for owned, full in zip(bucket.owned, bucket.fulls):
            if bucket.kept is not None and full is not None:
                bucket.kept.keep(owned, full)
        bucket.fulls = []

    def _write(self, bucket: _Bucket) -> None:
        assert bucket.leaving is not None
        bucket.leaving.deliver([*map(_shard_of, bucket.owned)], [owned.here for owned in bucket.owned])
        bucket.leaving = None

    def _end_together(self, error: Exception | None, groups: _Groups) -> None:
        """Raise an error on every rank if the optimizer raised one on any; else exchange changed options and names.

        Raises:
            RuntimeError: The optimizer raised an error on another rank. Other parameters are already updated.
        """
        for sets in reversed(self._ownership.on_same_ranks):
            ranks, axis, device = sets[0].ranks, sets[0].axis, sets[0].device
            owned = [one for some in sets for one in some.owned]
            names = self._new_names(owned)
            mine = [0 if error is None else axis.rank + 1, bool(groups.changed), bool(names)]
            failed, changed, named = max_over_ranks(mine, axis, device)
            if error is None and failed:
                where = f"{type(self._optimizer).__name__} raised on rank {ranks[failed - 1]} during this step"
                error = RuntimeError(
                    f"use_full_params: {where}; its log shows the error. Parameters that other ranks own have been "
                    "updated. Resume from a checkpoint"
                )
            if changed and not failed:
                for theirs in exchange_objects(groups.changed, axis, device):
                    for index, options in theirs.items():
                        self._optimizer.param_groups[index].update(options)
            if named and not failed:
                for theirs in exchange_objects(names, axis, device):
                    self._state.names.update({owned[i].param: found for i, found in theirs.items()})
        if error is not None:
            raise error

    def _new_names(self, owned: Sequence[Owned]) -> dict[int, list[Any]]:
        """Return the names of state entries that changed, mostly at a first step, by the index in ``owned``."""
        found = {i: names_in(self._state.get(one.key)) for i, one in enumerate(owned) if one.mine}
        known = self._state.names
        return {i: names for i, names in found.items() if names != known.get(owned[i].param, [])}

    def _name(self, param: torch.Tensor) -> str:
        for g, group in enumerate(self._optimizer.param_groups):
            for i, other in enumerate(group["params"]):
                if other is param:
                    return group["param_names"][i] if "param_names" in group else f"parameter {i} of group {g}"
        return f"a parameter of shape {tuple(param.shape)}"

    # ---- state dicts ----

    def _state_dict(self, optimizer: optim.Optimizer) -> dict[str, Any]:
        self._agree_on_params()
        self._refresh()
        owned = self._state
        optimizer.state = shown_at_holders(owned, self._ownership)
        try:
            return self._save_as_torch()
        finally:
            optimizer.state = owned  # type: ignore[assignment]  # as above

    def _load_state_dict(self, optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> None:
        self._agree_on_params()
        self._refresh()
        self._load_as_torch(state_dict)
        self._refresh()


def _refuse_copying(optimizer: optim.Optimizer, protocol: Any) -> Any:
    kind = type(optimizer).__name__
    raise TypeError(
        f"cannot copy or pickle {kind} after use_full_params: its state lies on the ranks that own the parameters, and "
        f"a copy would step on shards. Build another {kind} on the parameters of the copied model, call "
        "use_full_params on it, then load_state_dict(optimizer.state_dict()) on every rank; to save it, save its "
        "state_dict()"
    )


def _plan_bucket(
    ranks: RankSet,
    used: list[tuple[Owned, torch.dtype]],
    late: Collection[Any],
    late_params: Collection[Any],
    there: tuple[EarlyGradients | None, KeptParams | None],
) -> _Bucket:
    """Plan a bucket of ``used``, with the dtypes of their gradients.

    It sends the gradients of ``late`` and the parameters in ``late_params``; the others are ``there``.
    """
    owned = [one for one, _ in used]
    grads = [(one, dtype) for one, dtype in used if one.param in late]
    params = [(one, one.param.dtype) for one in owned if one.param in late_params]
    routes, dtypes = [one.route for one, _ in (*grads, *params)], [dtype for _, dtype in (*grads, *params)]
    inward = Layout(routes, dtypes, ranks.part, ranks.device, to_owner=True)
    routes, dtypes = [one.route for one in owned], [one.param.dtype for one in owned]
    outward = Layout(routes, dtypes, ranks.part, ranks.device, to_owner=False)
    return _Bucket(owned, *there, inward, [one for one, _ in grads], [one for one, _ in params], outward)


def _completed(
    owned: Sequence[Owned], arrived: dict[Owned, torch.Tensor | None], there: EarlyGradients | KeptParams | None
) -> list[torch.Tensor | None]:
    """Return what has arrived of each of ``owned`` in this step, or before it."""
    return [arrived[one] if one in arrived or there is None else there.take(one) for one in owned]


def _code(param: Any) -> int:
    """Return the dtype of this rank's gradient as an index of ``_DTYPES``, or ``_NO_GRADIENT`` or ``_NOTHING_HERE``.

    A parameter without elements has nothing on any rank. Its gradient counts, so that it gets state, as torch expects.
    """
    if param.numel() and not on_this_rank(param).numel():
        return _NOTHING_HERE
    return _NO_GRADIENT if param.grad is None else _DTYPES.index(param.grad.dtype)


def _shard_of(owned: Owned) -> torch.Tensor | None:
    return owned.of(on_this_rank(owned.param))


def _gradient_of(owned: Owned) -> torch.Tensor | None:
    grad = owned.param.grad
    return None if grad is None else owned.of(local_gradient(grad, owned.param))


class _Groups:
    """The parameter groups of an optimizer during one step, which runs the optimizer's own step for each bucket."""

    def __init__(self, optimizer: optim.Optimizer, stacks: Stacks, *, batched: bool) -> None:
        self._optimizer = optimizer
        self._stacks, self._batched = stacks, batched
        self._host: HostState | None = optimizer.__dict__.get(HOST_STATE)
        self._groups = PartialGroups(optimizer)
        self.changed, self.plain = self._groups.changed, self._groups.plain

    def begin(self, turns: Iterable[list[torch.Tensor]]) -> None:
        """Start a step with the parameters of ``turns``, one call of ``step`` for each of them that has any."""
        if self._host is not None:
            self._host.begin(turn for turn in (*turns, self.plain) if turn)

    def end(self) -> None:
        """End a step."""
        if self._host is not None:
            self._host.end()

    def step(self, lent: dict[torch.Tensor, torch.Tensor], step: Callable[..., Any]) -> Exception | None:
        """Call ``step`` with the groups and state of the parameters in ``lent``; return the error that it raised.

        ``lent`` maps each parameter, or what stands for a matrix of it, to the plain tensor that the step works on.
        """
        if not lent:
            return None
        optimizer, kept = self._optimizer, self._optimizer.state
        state: Any = defaultdict(dict)
        parts: defaultdict[torch.Tensor, list[Any]] = defaultdict(list)
        left: dict[torch.Tensor, Any] = {}
        lendings: list[Lending] = []
        try:
            entries = kept if self._host is None else self._host.lend([*lent], kept)
            lendings.extend(self._lendings(lent, entries))
            for one in lendings:
                parts[one.param] += one.seen
                state.update(zip(one.seen, one.states))
            with self._groups.only(parts, state):
                step(optimizer)
            for one in lendings:
                left.update(one.take_back([state[seen] for seen in one.seen if seen in state]))
            if self._host is None:
                kept.update(left)
            else:
                self._host.take_back([*lent], left, kept)
        except Exception as error:
            return error
        finally:
            for one in lendings:
                one.end()
        return None

    def step_idle(self, used: Iterable[Any], step: Callable[..., Any]) -> Exception | None:
        """Call ``step`` with the groups in which no rank has a gradient; return the error that it raised.

        An optimizer that counts steps in the options of a group counts there too. ``used`` have gradients.
        """
        idle = self._groups.of_groups_without(used)
        if not idle:
            return None
        lent = {param: [parameter_like(param, on_this_rank(param).new_empty(0))] for param in idle}
        try:
            with self._groups.only(lent, defaultdict(dict)):
                step(self._optimizer)
        except Exception as error:
            return error
        return None

    def _lendings(self, lent: dict[torch.Tensor, torch.Tensor], entries: Mapping[Any, Any]) -> Iterator[Lending]:
        """Yield what the optimizer sees in place of ``lent``; ``entries`` has the states by key."""
        stacks = self._stacks
        if self._batched and lent.keys().isdisjoint(self.plain):
            yield from batches_of(lent, entries, stacks.stack_of, self._groups.group_of)
            return
        for key, seen in lent.items():
            param, states = stacks.stack_of(key), [entries[key]] if key in entries else []
            if param is key and not isinstance(param, DTensor) and stacks.has(param):
                yield Matrices(param, stacks, states)
            else:
                yield Alone(param, key, seen, states)
