"""``summon_full_params``: for the length of a block, modules show full plain parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.engine.param import FSDPParam, proxy
from fsdp2.engine.passes import backward_runs
from fsdp2.engine.unit import FSDPState, get_state, live_states
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.select import Selection, ranks_of, select
from fsdp2.weights.whole import Source, check_gatherable, check_same, gather_whole

__all__ = ["summon_full_params"]


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """A block in which ``module`` has full plain parameters, as the unsharded model would.

    They are gathered from the shards in the shards' dtype, also with mixed precision; names, order, ties,
    ``requires_grad`` and attributes are the original ones. Tensor parallelism is undone too. Parameters that were kept
    unsharded before the block are untouched in it and kept after it. Every rank that holds the parameters must enter.

    Inside the block the whole parameters (and gradients) take additional memory, and entering it takes as much again
    as the largest parameter. With ``rank0_only`` other ranks need at most twice the largest parameter, and only while
    the block is entered.

    Under ``torch.no_grad()``, forward in the block computes with the full parameters, in their dtype, without
    communication.

    Args:
        module: Any module: a unit, a part of one, or one that contains units.
        recurse: Also the parameters of units below ``module``.
        writeback: At the end of the block copy each rank's pieces of the full parameters into its shards; replicas
            write their own. Otherwise changes are lost, those of ``requires_grad`` too. Nothing is written if the block
            raises.
        rank0_only: Only the first rank (the lowest of the module's largest mesh) has full parameters; others keep
            shards.
        offload_to_cpu: Put the full parameters on the CPU, whatever the mesh's device.
        with_grads: Also show full ``.grad`` where there is a reduced one; None stays None. With ``writeback`` changes
            to gradients are written back, too. Gradients that are not reduced yet are neither shown nor lost.

    Raises:
        NotImplementedError: ``rank0_only`` with ``writeback``; a tensor subclass with an all-gather extension whose
            elements cannot be found.
        RuntimeError: inside a forward or backward, or inside another such block for the same parameters; parameters on
            the meta device; a gradient that only some ranks have; parameters of another shape at the end of the block.
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
    summoned = _Summoned(selection, _states(module, selection, recurse), shows, rank0_only, offload_to_cpu)
    try:
        with torch.inference_mode(False), torch.no_grad():
            summoned.start(gradients)
        yield
        if writeback:
            summoned.read(with_grads)
    finally:
        with torch.inference_mode(False), torch.no_grad():
            summoned.end()


def _check_outside(selection: Selection) -> None:
    """Refuse where full parameters are in use, or shown already."""
    selection.refuse_summoned("summon_full_params")
    inside = backward_runs()
    for group, params in selection.groups.items():
        state = get_state(group.modules[0])
        if inside or not group.is_idle or (state is not None and state.root.running is not None):
            raise RuntimeError(
                f"{selection.managed[params[0]].name}: summon_full_params cannot unshard parameters during "
                "forward/backward; expected outside of both. Call it before or after; if an earlier one raised, "
                "call reset_iter_state() on the root module first"
            )


def _states(module: nn.Module, selection: Selection, recurse: bool) -> list[FSDPState]:
    """The states that drive the groups of ``selection``, and those without parameters whose modules are in it."""
    groups, inside = selection.groups, set(module.modules()) if recurse else set()
    return [
        state
        for state in live_states()
        if any(group in groups for group in state.groups) or (not state.groups and not inside.isdisjoint(state.modules))
    ]


class _Summoned:
    """One block: what is shown, what is to be written, and how it ends."""

    def __init__(
        self, selection: Selection, states: list[FSDPState], shows: bool, rank0_only: bool, offload: bool
    ) -> None:
        self.selection = selection
        self.shows = shows  # on this rank
        self.rank0_only = rank0_only
        self.offload = offload
        self.shown: dict[FSDPParam, nn.Parameter] = {}
        self.values: dict[FSDPParam, torch.Tensor] = {}
        self.gradients = False  # whether those of values are written as well
        self.ending = False  # after which reset_iter_state() may recover from an interrupt
        self._before = {state: state.summoned for state in states}

    def start(self, gradients: dict[FSDPParam, Source]) -> None:
        """Gather and show; ranks that show nothing take part and keep nothing."""
        for group, params in self.selection.groups.items():
            group.residency.summon(params, self)
        for state in self._before:
            state.summoned = self._why_no_forward(state)
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
        for param, shown in self.shown.items():
            for slot in param.slots:
                slot.show(shown)

    def read(self, with_grads: bool) -> None:
        """Note what is shown now; it is written when the block has ended.

        Raises:
            RuntimeError: something else than a tensor of the parameter's shape is shown.
        """
        for param, shown in self.shown.items():
            places = [slot.module._parameters.get(slot.name) for slot in param.slots]
            now = next((found for found in places if found is not shown), shown)  # one that was replaced has the say
            shape = self.selection.managed[param].shape
            if now is None or isinstance(now, DTensor) or tuple(now.shape) != shape:
                self.values.clear()
                got = "nothing" if now is None else f"a {type(now).__name__} of shape {tuple(now.shape)}"
                raise RuntimeError(
                    f"{self.selection.managed[param].name}: cannot be written back; the module shows {got}, expected a "
                    f"plain tensor of shape {shape}. Change values in place, or pass writeback=False"
                )
            self.values[param] = now
        self.gradients = with_grads

    def end(self) -> None:
        """Write what was read, and show what was shown before; the second also if the first fails."""
        self.ending = True
        for state, reason in self._before.items():
            state.summoned = reason
        with ExitStack() as stack:
            for group, params in self.selection.groups.items():
                values = {param: self.values[param] for param in params if param in self.values}
                stack.callback(group.residency.dismiss, params, values)
            for param, value in self.values.items():
                assert param.sharded is not None
                param.sharded.requires_grad_(value.requires_grad)
                if self.gradients:
                    param.set_gradient(value.grad)
        for shown in self.shown.values():
            shown.__dict__.pop("_fsdp2_managed", None)

    def _why_no_forward(self, state: FSDPState) -> str:
        """Why ``state`` cannot compute with what is shown; "" if it can."""
        params = [param for group in state.groups for param in group.params]
        if self.rank0_only:
            return "rank0_only shows full parameters on one rank"
        if any(param not in self.selection.managed for param in params):
            return "only some of its parameters are shown in full; summon the whole unit"
        if any(param.spec.full is not None for param in params):
            return "its tensor-parallel parameters are shown as plain tensors"
        return "its parameters are shown on the CPU" if self.offload and state.device.type != "cpu" else ""
