"""``use_full_params`` lets an optimizer step on whole matrices, each on one rank, its owner.

A step goes bucket by bucket. One all-to-all sends the pieces of gradients and parameters to the owners. Every owner
runs the optimizer's own step on plain, whole tensors. Another all-to-all sends pieces of the new values back, and they
are written to the shards. The next bucket is sent while one is computed.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from fsdp2._torch.hooks import outside_dynamo
from fsdp2.comm.collectives import exchange_objects, max_over_ranks
from fsdp2.engine.param import lend_gradient, parameter_like
from fsdp2.optim.alike import STEPS_ON_LOCAL, STEPS_ON_WHOLE, local_gradient
from fsdp2.optim.host_state import HOST_STATE, HostState
from fsdp2.optim.partial import PartialGroups, step_of
from fsdp2.optim.prebuilt import repair
from fsdp2.optim.whole.exchange import Arriving, Layout
from fsdp2.optim.whole.full_state import OwnedState, keep_owned, names_in, shown_at_holders
from fsdp2.optim.whole.owners import default_cost
from fsdp2.optim.whole.ownership import Owned, Ownership, RankSet
from fsdp2.optim.whole.stacks import Stacks
from fsdp2.sharding.spec import on_this_rank

__all__ = ["use_full_params"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
_PLANS = 16
"""The number of plans that are remembered: which experts have gradients may differ in each step."""
_NO_GRADIENT, _NOTHING_HERE, _FEWEST = -1, -2, -(1 << 20)


def use_full_params(
    optimizer: optim.Optimizer,
    *,
    cost: Callable[[torch.Tensor], float] | None = None,
    bucket_mb: float = 64.0,
    stacked: Callable[[torch.Tensor], bool] | None = None,
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
        bucket_mb: MiB of gradients and parameters that an owner computes with at a time; one parameter may exceed it.
        stacked: A function that returns True for a (sharded) parameter of three dimensions which is a stack of
            matrices, as the experts of a layer often are. The optimizer then steps on each matrix as on a parameter of
            its own. Default: with ``torch.optim.Muon``, which takes matrices alone, every parameter of three dimensions
            that is no convolution's; with other optimizers none. torch's Muon checks what it is built with, so give it
            stacks by ``add_param_group``.

    Raises:
        TypeError: ``optimizer`` is not a torch.optim.Optimizer.
        ValueError: ``optimizer`` needs a closure or sparse gradients, or already steps on local shards; or
            ``bucket_mb`` is not positive.

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
    if bucket_mb <= 0:
        raise ValueError(f"use_full_params: expected bucket_mb > 0, got {bucket_mb}")
    if STEPS_ON_WHOLE in optimizer.__dict__:
        return optimizer
    _check_kind(optimizer)
    optimizer.__dict__[STEPS_ON_WHOLE] = True
    stacks = Stacks(optimizer, stacked)
    _FullParams(optimizer, cost or default_cost, int(bucket_mb * (1 << 20)), stacks).take_over()
    return optimizer


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
    inward: Layout  # gradients, then parameters
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
        cost: Callable[[torch.Tensor], float],
        bucket_bytes: int,
        stacks: Stacks,
    ) -> None:
        self._optimizer = optimizer
        self._stacks = stacks
        self._cost, self._bucket_bytes = cost, bucket_bytes
        self._ownership = Ownership([], cost)
        self._state = OwnedState(self._ownership)  # replaced by the optimizer's own state at the first use
        self._proxies: dict[torch.Tensor, nn.Parameter] = {}
        self._buckets: dict[tuple[Any, ...], list[_Bucket]] = {}
        self._load_as_torch = optimizer.load_state_dict
        self._save_as_torch = optimizer.state_dict
        self._step_as_torch = step_of(optimizer)

    def take_over(self) -> None:
        """Replace the optimizer's ``step``, ``state_dict`` and ``load_state_dict``."""
        optimizer = self._optimizer
        step = optim.Optimizer.profile_hook_step(outside_dynamo(self._step))
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]  # of this one alone
        optimizer.state_dict = types.MethodType(self._state_dict, optimizer)  # type: ignore[method-assign]
        optimizer.load_state_dict = types.MethodType(self._load_state_dict, optimizer)  # type: ignore[method-assign]
        # copy.deepcopy calls it too. A copy would have neither this step nor the state of other owners.
        optimizer.__reduce_ex__ = types.MethodType(_refuse_copying, optimizer)  # type: ignore[method-assign]

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
        self._refresh()
        dtypes = self._agree_on_gradients()
        groups = _Groups(optimizer, self._stacks)
        sets = [self._buckets_of(ranks, dtypes[ranks]) for ranks in self._ownership.sets]
        groups.begin([owned.param for owned in bucket.owned if owned.mine] for buckets in sets for bucket in buckets)
        try:
            error = self._compute_all(sets, groups)
        finally:
            groups.end()
        self._end_together(error, groups)
        self._state.stepped = True

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
                before = None
        if error is None:
            error = groups.step({param: param for param in groups.plain}, self._step_as_torch)
        return error

    def _refresh(self) -> None:
        """Take over newly sharded parameters, changed parameter groups, and state that the caller has replaced."""
        repair(self._optimizer)  # a step has done so already, but a state dict may be requested before any step
        params = [p for group in self._optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)]
        optimizer, state = self._optimizer, self._optimizer.state
        if not self._ownership.is_of(params):
            if state is self._state:
                state = shown_at_holders(state, self._ownership)  # other ranks may own it from now on
            for param in params:
                self._stacks.has(param)  # the caller's function may be wrong, which all ranks see here
            self._ownership = Ownership(params, self._cost)
            self._buckets.clear()
        if state is not self._state:
            self._state = keep_owned(state, self._ownership)
            optimizer.state = self._state  # type: ignore[assignment]  # torch needs no more than a dictionary
        if HOST_STATE in optimizer.__dict__:
            optimizer.__dict__[HOST_STATE].settle([*self._state], self._state)

    def _agree_on_gradients(self) -> dict[RankSet, list[torch.dtype | None]]:
        """Return the dtype of each parameter's gradient (None without one) after checking that all ranks have the same,
        and the same parameters in the same order.

        Sets of fewer ranks come first, so that an error in one of them reaches all ranks before anything is sent.
        """
        found: dict[RankSet, list[torch.dtype | None]] = {}
        wrong = ""
        for ranks in reversed(self._ownership.sets):
            codes = [_code(owned) for owned in ranks.owned]
            least = [_FEWEST if code == _NOTHING_HERE else -code for code in codes]
            mine = [*codes, *least, ranks.digest, -ranks.digest, bool(wrong)]
            *most, largest, smallest, elsewhere = max_over_ranks(mine, ranks.axis, ranks.device)
            if largest != -smallest and not wrong:
                wrong = "ranks have the parameters in different orders"
            most, least = most[: len(codes)], most[len(codes) :]
            for owned, code, high, low in zip(ranks.owned, codes, most, least):
                if high > _NOTHING_HERE and high != -low:
                    here = str(_DTYPES[code]) if code >= 0 else "none"
                    wrong = f"ranks have different gradients of {self._name(owned.param)} (here: {here})"
            if elsewhere and not wrong:
                wrong = "some ranks lack a gradient, or have it in another dtype; the errors of other ranks name it"
            found[ranks] = [_DTYPES[high] if high >= 0 else None for high in most]
        if wrong:
            raise RuntimeError(
                f"use_full_params: {wrong}; expected the same parameters in the same order, and a gradient of one "
                "dtype on every rank that holds a piece, or on none. Build the same optimizer on all ranks, and set or "
                "clear gradients in the same way. Nothing was changed"
            )
        return found

    def _buckets_of(self, ranks: RankSet, dtypes: list[torch.dtype | None]) -> list[_Bucket]:
        key = (ranks, *(-1 if dtype is None else _DTYPES.index(dtype) for dtype in dtypes))
        if key not in self._buckets:
            if len(self._buckets) >= _PLANS:
                del self._buckets[next(iter(self._buckets))]  # the oldest
            used = [(owned, dtype) for owned, dtype in zip(ranks.owned, dtypes) if dtype is not None]
            self._buckets[key] = [_plan_bucket(ranks, bucket) for bucket in ranks.buckets(used, self._bucket_bytes)]
        return self._buckets[key]

    def _send(self, bucket: _Bucket) -> None:
        params = [owned.param for owned in bucket.owned]
        grads = [None if p.grad is None else local_gradient(p.grad, p) for p in params]
        here = [owned.here for owned in bucket.owned]
        bucket.arriving = bucket.inward.start([*grads, *map(on_this_rank, params)], [*here, *here])

    def _assemble(self, bucket: _Bucket) -> None:
        """Wait for a bucket's pieces, and assemble the gradients and parameters that this rank owns."""
        dtypes, count = bucket.inward.dtypes, len(bucket.owned)
        wholes = [
            owned.empty(dtype) if owned.mine else None for owned, dtype in zip((*bucket.owned, *bucket.owned), dtypes)
        ]
        origins = [owned.whole for owned in bucket.owned]
        assert bucket.arriving is not None
        bucket.arriving.deliver(wholes, [*origins, *origins])
        bucket.arriving = None
        bucket.grads, bucket.fulls = wholes[:count], wholes[count:]

    def _compute(self, bucket: _Bucket, groups: _Groups) -> Exception | None:
        """Run the optimizer's own step on this rank's parameters of ``bucket``; return the error that it raised.

        The error is not raised here: the other ranks continue and would wait for this rank's collectives.
        """
        lent: dict[torch.Tensor, torch.Tensor] = {}
        for owned, grad, full in zip(bucket.owned, bucket.grads, bucket.fulls):
            if full is not None:
                proxy = lent[owned.param] = self._proxy(owned.param)
                proxy.data = full
                lend_gradient(proxy, grad)
        bucket.grads = []
        try:
            return groups.step(lent, self._step_as_torch)
        finally:
            for returned in lent.values():
                lend_gradient(returned, None)
                returned.data = returned.data.new_empty(0)

    def _proxy(self, param: torch.Tensor) -> nn.Parameter:
        """Return the plain parameter that replaces ``param`` in a step; it is the same object in every step."""
        if param not in self._proxies:
            self._proxies[param] = parameter_like(param, on_this_rank(param).new_empty(0))
        return self._proxies[param]

    def _return(self, bucket: _Bucket) -> None:
        bucket.leaving = bucket.outward.start(bucket.fulls, [owned.whole for owned in bucket.owned])
        bucket.fulls = []

    def _write(self, bucket: _Bucket) -> None:
        assert bucket.leaving is not None
        shards: list[torch.Tensor | None] = [on_this_rank(owned.param) for owned in bucket.owned]
        bucket.leaving.deliver(shards, [owned.here for owned in bucket.owned])
        bucket.leaving = None

    def _end_together(self, error: Exception | None, groups: _Groups) -> None:
        """Raise an error on every rank if the optimizer raised one on any; else exchange changed options and names.

        Raises:
            RuntimeError: The optimizer raised an error on another rank. Other parameters are already updated.
        """
        for ranks in reversed(self._ownership.sets):
            names = self._new_names(ranks)
            mine = [0 if error is None else ranks.axis.rank + 1, bool(groups.changed), bool(names)]
            failed, changed, named = max_over_ranks(mine, ranks.axis, ranks.device)
            if error is None and failed:
                where = f"{type(self._optimizer).__name__} raised on rank {ranks.ranks[failed - 1]} during this step"
                error = RuntimeError(
                    f"use_full_params: {where}; its log shows the error. Parameters that other ranks own have been "
                    "updated. Resume from a checkpoint"
                )
            if changed and not failed:
                for theirs in exchange_objects(groups.changed, ranks.axis, ranks.device):
                    for index, options in theirs.items():
                        self._optimizer.param_groups[index].update(options)
            if named and not failed:
                for theirs in exchange_objects(names, ranks.axis, ranks.device):
                    self._state.names.update({ranks.owned[i].param: found for i, found in theirs.items()})
        if error is not None:
            raise error

    def _new_names(self, ranks: RankSet) -> dict[int, list[Any]]:
        """Return the names of state entries that changed, mostly at a first step, by the index of the parameter."""
        found = {i: names_in(self._state.get(owned.param)) for i, owned in enumerate(ranks.owned) if owned.mine}
        known = self._state.names
        return {i: names for i, names in found.items() if names != known.get(ranks.owned[i].param, [])}

    def _name(self, param: torch.Tensor) -> str:
        for g, group in enumerate(self._optimizer.param_groups):
            for i, other in enumerate(group["params"]):
                if other is param:
                    return group["param_names"][i] if "param_names" in group else f"parameter {i} of group {g}"
        return f"a parameter of shape {tuple(param.shape)}"

    # ---- state dicts ----

    def _state_dict(self, optimizer: optim.Optimizer) -> dict[str, Any]:
        self._refresh()
        owned = optimizer.state
        optimizer.state = shown_at_holders(self._state, self._ownership)
        try:
            return self._save_as_torch()
        finally:
            optimizer.state = owned

    def _load_state_dict(self, optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> None:
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


def _plan_bucket(ranks: RankSet, used: list[tuple[Owned, torch.dtype]]) -> _Bucket:
    owned, routes = [owned for owned, _ in used], [owned.route for owned, _ in used]
    grads, params = [dtype for _, dtype in used], [owned.param.dtype for owned, _ in used]
    inward = Layout([*routes, *routes], [*grads, *params], ranks.axis, ranks.device, to_owner=True)
    return _Bucket(owned, inward, Layout(routes, params, ranks.axis, ranks.device, to_owner=False))


def _code(owned: Owned) -> int:
    """Return the dtype of this rank's gradient as an index of ``_DTYPES``, or ``_NO_GRADIENT`` or ``_NOTHING_HERE``."""
    if owned.holds_nothing:
        return _NOTHING_HERE
    grad = owned.param.grad
    return _NO_GRADIENT if grad is None else _DTYPES.index(grad.dtype)


class _Groups:
    """The parameter groups of an optimizer during one step, which runs the optimizer's own step for each bucket."""

    def __init__(self, optimizer: optim.Optimizer, stacks: Stacks) -> None:
        self._optimizer = optimizer
        self._stacks = stacks
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

        ``lent`` maps each parameter to the plain tensor that the step works on.
        """
        if not lent:
            return None
        optimizer, kept = self._optimizer, self._optimizer.state
        state: Any = defaultdict(dict)
        parts: dict[torch.Tensor, list[Any]] = {}
        left: dict[torch.Tensor, Any] = {}
        try:
            entries = kept if self._host is None else self._host.lend([*lent], kept)
            for param, seen in lent.items():
                stack = self._stacks.has(param)
                parts[param] = list(self._stacks.lend(param, seen)) if stack else [seen]
                for i, part in enumerate(parts[param]) if param in entries else ():
                    state[part] = self._stacks.cut_state(entries[param], i) if stack else entries[param]
            with self._groups.only(parts, state):
                step(optimizer)
            for param, own in parts.items():
                if own[0] in state and self._stacks.has(param):
                    left[param] = self._stacks.join_states([state[part] for part in own])
            left.update({param: state[own[0]] for param, own in parts.items() if own[0] in state and param not in left})
            if self._host is None:
                kept.update(left)
            else:
                self._host.take_back([*lent], left, kept)
        except Exception as error:
            return error
        finally:
            for param in parts:
                if self._stacks.has(param):
                    self._stacks.take_back(param)
        return None
