"""``summon_full_params`` shows full plain parameters for the length of a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._torch.hooks import outside_dynamo, skipped_by_dynamo
from fsdp2.autograd.hooks import hook_gradient
from fsdp2.engine.param import FSDPParam, lend_gradient, proxy
from fsdp2.engine.passes import backward_runs
from fsdp2.engine.unit import FSDPState, get_state, live_units
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.select import Selection, ranks_of, select
from fsdp2.weights.whole import Source, check_gatherable, check_same, gather_whole

__all__ = ["summon_full_params"]


@outside_dynamo
@contextmanager
@skipped_by_dynamo
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Show full plain parameters on ``module`` inside a ``with`` block, like those of the unsharded model.

    The parameters are gathered from the shards in the dtype of the shards, even with mixed precision. Names, order,
    ties, ``requires_grad`` and attributes are those of the original parameters. Tensor parallelism is undone too.
    Parameters that were unsharded before the block are not changed by it and stay unsharded after it. Every rank that
    holds the parameters must enter the block.

    The full parameters (and gradients) take additional memory inside the block, and entering it takes the size of the
    largest parameter besides. With ``rank0_only``, other ranks need at most twice the largest parameter, and only while
    they enter the block.

    Under ``torch.no_grad()``, a forward inside the block computes with the full parameters, in their dtype, without
    communication.

    Args:
        module: Any module: a unit, a part of one, or one that contains units.
        recurse: Also show the parameters of units below ``module``.
        writeback: At the end of the block, copy each rank's pieces of the full parameters into its shards; each replica
            writes its own values. With False all changes are lost, also those of ``requires_grad``. Where the block
            raises an error, nothing is written; other ranks do not wait for that rank, and write theirs.
        rank0_only: Only the first rank (the lowest of the module's largest mesh) has full parameters. Other ranks keep
            shards.
        offload_to_cpu: Put the full parameters on the CPU, whatever the mesh's device.
        with_grads: Also show the full ``.grad`` of each parameter that has a reduced gradient; None stays None. With
            ``writeback``, changes to gradients are written back too. Unreduced gradients are not shown and not lost.
            Without it, a backward that gives a shown parameter a gradient raises RuntimeError.

    Raises:
        NotImplementedError: ``rank0_only`` is combined with ``writeback``, or a tensor subclass has an all-gather
            extension and its elements cannot be found.
        RuntimeError: The block is entered inside a forward or backward, or inside another such block for the same
            parameters; parameters are on the meta device; only some ranks have a gradient; or a parameter has another
            shape at the end of the block.

    Example:
        ```python
        with fsdp2.summon_full_params(model, writeback=False):
            print(model.embed.weight.norm())
        ```
    """
    if rank0_only and writeback:
        raise NotImplementedError(
            "summon_full_params: writeback=True with rank0_only=True is not supported: other ranks would not see the "
            "changes; pass writeback=False, or leave rank0_only out"
        )
    ranks = ranks_of(module, managed=True) or Ranks.alone()
    with ranks.agreed():
        selection = select(module, "summon_full_params", recurse=recurse)
        _check_outside(selection)
    check_gatherable(selection, ranks)
    pieces = ((param, param.gradient) for param in selection.managed if with_grads)
    gradients = {param: Source.of(piece, param) for param, piece in pieces if piece is not None}
    named = {f"{selection.managed[param].name}.grad": source for param, source in gradients.items()}
    check_same(named, selection.groups, ranks)
    shows = ranks.first or not rank0_only
    summoned = _Summoned(selection, _units(module, selection, recurse), shows, rank0_only, offload_to_cpu, with_grads)
    try:
        with torch.inference_mode(False), torch.no_grad():
            summoned.start(gradients)
        yield
        if writeback:
            summoned.read()
    finally:
        summoned.ending = True  # first of all: no interrupt may come before it
        with torch.inference_mode(False), torch.no_grad():
            summoned.end()


def _check_outside(selection: Selection) -> None:
    """Raise RuntimeError if full parameters are in use or already shown."""
    selection.refuse_summoned("summon_full_params")
    inside = backward_runs()
    for group, params in selection.groups.items():
        unit = get_state(group.modules[0])
        if inside or group.is_entered or (unit is not None and unit.root.running is not None):
            raise RuntimeError(
                f"{selection.managed[params[0]].name}: summon_full_params cannot unshard parameters during "
                "forward/backward; expected outside of both. Call it before or after; if an earlier one raised, "
                "call reset_iter_state() on the root module first"
            )


def _units(module: nn.Module, selection: Selection, recurse: bool) -> list[FSDPState]:
    """Return the units whose groups are in ``selection``, and the units without parameters below ``module``."""
    groups, inside = selection.groups, set(module.modules()) if recurse else set()
    return [
        unit
        for unit in live_units()
        if any(group in groups for group in unit.groups) or (not unit.groups and not inside.isdisjoint(unit.modules))
    ]


def _refuse_gradient(name: str, full: torch.Tensor) -> None:
    """Refuse a backward that has just given a shown parameter a gradient, which nobody would write to the shard."""
    lend_gradient(full, None)
    raise RuntimeError(
        f"{name}: got a backward inside summon_full_params, whose gradient would be lost at the end of the block; "
        "expected none, or with_grads=True. Pass with_grads=True, which shows gradients and writes them back, or use "
        "torch.autograd.grad"
    )


class _Summoned:
    """One ``with`` block: the parameters that it shows, and the values that it writes back."""

    def __init__(
        self,
        selection: Selection,
        units: list[FSDPState],
        shows: bool,
        rank0_only: bool,
        offload: bool,
        with_grads: bool,
    ) -> None:
        self.selection = selection
        self.with_grads = with_grads
        self.shows = shows  # on this rank
        self.rank0_only = rank0_only
        self.offload = offload
        self.shown: dict[FSDPParam, nn.Parameter] = {}
        self.values: dict[FSDPParam, torch.Tensor] = {}
        self.ending = False  # True: reset_iter_state() may now recover from an interrupt
        self._before = {unit: unit.why_no_forward for unit in units}

    def start(self, gradients: dict[FSDPParam, Source]) -> None:
        """Gather and show the parameters. Ranks that show nothing take part in the gathers and keep nothing."""
        for group, params in self.selection.groups.items():
            group.residency.summon(params, self)
        for unit in self._before:
            unit.why_no_forward = self._why_no_forward(unit)
        sources = []
        for param in self.selection.managed:
            assert param.data is not None  # just checked
            sources += [Source.of(param.data, param), *([gradients[param]] if param in gradients else [])]
        device = torch.device("cpu") if self.offload else None
        tensors = gather_whole(sources, keep=self.shows, device=device)
        for param in self.selection.managed:
            value = next(tensors)
            grad = next(tensors) if param in gradients else None
            if value is not None:
                self.shown[param] = proxy(param, value, grad)
                if param.requires_grad and not self.with_grads:
                    hook_gradient(self.shown[param], partial(_refuse_gradient, self.selection.managed[param].name))
        for param, shown in self.shown.items():
            for site in param.sites:
                site.show(shown)

    def read(self) -> None:
        """Record the values that are shown now. ``end`` writes them.

        Raises:
            RuntimeError: A module shows something other than a plain tensor of the parameter's shape.
        """
        for param, shown in self.shown.items():
            places = [site.shown for site in param.sites]
            now = next((found for found in places if found is not shown), shown)  # a replaced parameter counts
            shape = self.selection.managed[param].shape
            if now is None or isinstance(now, DTensor) or tuple(now.shape) != shape:
                self.values.clear()
                got = "nothing" if now is None else f"a {type(now).__name__} of shape {tuple(now.shape)}"
                raise RuntimeError(
                    f"{self.selection.managed[param].name}: cannot be written back; the module shows {got}, expected a "
                    f"plain tensor of shape {shape}. Change values in place, or pass writeback=False"
                )
            self.values[param] = now

    def end(self) -> None:
        """Write the recorded values, and restore what the modules showed before, even if writing fails."""
        try:
            with ExitStack() as stack:
                for group, params in self.selection.groups.items():
                    values = {param: self.values[param] for param in params if param in self.values}
                    stack.callback(group.residency.dismiss, params, values)
                for param, value in self.values.items():
                    assert param.sharded is not None
                    param.sharded.requires_grad_(value.requires_grad)
                    if self.with_grads:
                        param.set_gradient(value.grad)
        finally:
            for unit, reason in self._before.items():
                if not any(self in group.residency.summoned.values() for group in unit.groups):  # else: interrupted
                    unit.why_no_forward = reason
        for shown in self.shown.values():
            shown.__dict__.pop("_fsdp2_managed", None)

    def _why_no_forward(self, unit: FSDPState) -> str:
        """Return why ``unit`` cannot compute with the shown parameters, and what to do, or "" if it can."""
        params = [param for group in unit.groups for param in group.params]
        if self.rank0_only:
            return "rank0_only shows full parameters on one rank; leave it out"
        if any(param not in self.selection.managed for param in params):
            return "only some of its parameters are shown in full; summon the whole unit"
        if any(param.spec.full is not None for param in params):
            return "its tensor-parallel parameters are shown as plain tensors; use them without calling it"
        if self.offload and unit.device.type != "cpu":
            return "its parameters are shown on the CPU; leave offload_to_cpu out"
        return ""
