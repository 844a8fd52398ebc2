"""What the asynchronous methods of ``FSDPModule`` return, to wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp2.policies import GradientReductionHandle, UnshardHandle

if TYPE_CHECKING:
    from fsdp2.engine.group import FSDPParamGroup
    from fsdp2.engine.root import RootContext

__all__ = ["GradientReduction", "Unsharding"]


class Unsharding(UnshardHandle):
    """A gather in flight."""

    def __init__(self, groups: list[FSDPParamGroup]) -> None:
        self._groups = groups

    def wait(self) -> None:
        """Wait until the full parameters may be used; they are then shown on the module."""
        groups, self._groups = self._groups, []
        for group in groups:
            group.wait_for_unshard()


class GradientReduction(GradientReductionHandle):
    """The reductions that one ``finalize_backward`` started."""

    def __init__(self, root: RootContext | None) -> None:
        self._root = root

    def wait(self) -> None:
        """Wait until the gradients are there; once is enough.

        Raises:
            RuntimeError: ``reset_iter_state`` dropped them.
        """
        if self._root is None:
            return
        if self._root.comm.finalizing is not self:
            raise RuntimeError("This gradient reduction was dropped by reset_iter_state; start the iteration anew")
        self._root.comm.finalizing = None
        root, self._root = self._root, None
        root.finish_backward()

    def belongs_to(self, root: RootContext) -> bool:
        """Whether ``root`` started it."""
        return self._root is root
