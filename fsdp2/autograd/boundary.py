"""The boundary of one forward call of a unit: what goes into it, and all the ways by which results leave it.

Backward enters a unit through the results of its calls, and is done with it when it has the gradients of their inputs.
Only tensors that are found here can be hooked; ``autograd.trees`` says where they are searched for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdp2._torch.autograd import is_made_since, needs_gradient
from fsdp2.autograd import hooks
from fsdp2.autograd.side_outputs import SideOutputs
from fsdp2.autograd.trees import Tree

__all__ = ["Boundary"]

Tensors = list[torch.Tensor]


class Boundary:
    """The boundary of one call: each member of the unit enters and leaves, and the call ends once."""

    def __init__(
        self, outlasting: Callable[[Tensors], Tensors], side_outputs: SideOutputs, device: torch.device
    ) -> None:
        """``outlasting`` returns tensors with copies of those whose memory is freed when the call ends.

        The unit computes on ``device``.
        """
        # A forward with gradients makes autograd nodes of this sequence number or a higher one; the first is number 0.
        self.first_node = -1
        self._outlasting = outlasting
        self._device = device
        self._side_outputs = side_outputs
        self._copied: list[Tree] = []  # arguments in which the module got copies of the caller's containers
        self._writable: list[Any] = []  # arguments in which the module may leave results
        self._given: list[tuple[torch.Tensor, Any]] = []  # what the module may change in place, with its node before
        self._known: dict[int, torch.Tensor] = {}  # tensors that were in these before the call, by id, kept alive
        self._left: Tensors = []  # results that the module has left in these
        self._at_end: list[Callable[[], None]] = []  # hold inputs

    # ---- into the call ----

    def watch_inputs(self, given: Tree, done: Callable[[], None], starting: Callable[[torch.Tensor], None]) -> bool:
        """Call ``done`` when backward has the gradients of all tensors that were ``given``.

        A backward through these gradients calls ``starting`` first. Return whether no input requires a gradient.

        Hidden inputs, such as a cache that earlier layers have filled, cannot be hooked, and need no hook beside other
        inputs: autograd runs the newest of the ready nodes, and the node on these inputs is the oldest of the call. So
        it runs after all that the call has computed with hidden ones.
        """
        needing = [tensor for tensor in given.tensors if needs_gradient(tensor)]
        if not needing:
            return not any([needs_gradient(tensor) for tensor in given.hidden])
        watched, at_end = hooks.watch_inputs(needing, done, starting, self._device)
        if at_end is not None:
            self._at_end.append(at_end)
        if len(needing) < len(given.tensors):
            new = iter(watched)
            watched = [next(new) if needs_gradient(tensor) else tensor for tensor in given.tensors]
        given.tensors = watched
        return False

    def enter(self, given: Tree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> hooks.Arguments:
        """Return ``args`` and ``kwargs``, the values of ``given``, with the tensors that it has now."""
        # Only for a call that ``end`` is asked about. One that is recomputed need not end, because its checkpoint stops
        # when it has what it needs. Its inputs would then keep all that was computed until the whole backward ends.
        if self.first_node >= 0:
            self._given += [(tensor, tensor.grad_fn) for tensor in given.found]
        if given.writable:
            self._writable += given.writable
            self._known.update((id(tensor), tensor) for tensor in (*given.found, *given.hidden))
        values = given.rebuilt()
        if given.copies:
            self._copied.append(given)
        if not kwargs:
            return (*values,), kwargs
        return (*values[: len(args)],), dict(zip(kwargs, values[len(args) :]))

    # ---- out of it ----

    def leave(self, result: Tree) -> None:
        """Copy results that would not outlast the call, and write the module's changes to the caller's containers."""
        result.tensors = self._outlasting(result.tensors)
        while self._copied:
            self._copied.pop().carry_back()  # as if the module had written to the caller's containers
        if self._writable and torch.is_grad_enabled():
            written = Tree(self._writable, results=True)
            new = [tensor for tensor in written.tensors if id(tensor) not in self._known]
            kept = dict(zip(map(id, new), self._outlasting(new)))
            written.tensors = [kept.get(id(tensor), tensor) for tensor in written.tensors]
            written.rebuilt(in_place=True)
            self._left = [tensor for tensor in written.tensors if is_made_since(tensor.grad_fn, self.first_node)]

    def end(self) -> None:
        """Find out which inputs the call has changed in place.

        The node of such an input does not tell when backward is done, and backward may enter the unit through it.
        """
        while self._at_end:
            self._at_end.pop()()
        for tensor, node in self._given:
            if tensor.grad_fn is not node and is_made_since(tensor.grad_fn, self.first_node):
                self._left.append(tensor)

    def watch_results(
        self,
        result: Tree,
        starting: Callable[[torch.Tensor], None],
        starting_from_sides: Callable[[], list[Callable[[torch.Tensor], None]]] | None = None,
    ) -> bool:
        """Call ``starting`` before backward enters through a result; return whether any requires a gradient.

        With ``starting_from_sides``, tensors that the modules keep as attributes are hooked too: it returns the
        functions to call before backward enters through one of these.
        """
        watched, result.tensors = hooks.watch_outputs(result.tensors, starting, self.first_node, self._device)
        if self._left:
            watched |= hooks.watch_outputs(self._left, starting, self.first_node, self._device)[0]
        if starting_from_sides is not None:
            watched |= self._side_outputs.watch(self.first_node, self._device, starting_from_sides, self._outlasting)
        return watched
