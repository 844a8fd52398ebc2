"""One pass under a root, which shows its collectives to the root's observer.

A gather by hand is a plain ``Pass``; the other kinds have classes of their own. A pass holds what is true only while it
runs, and is dropped when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from torch import nn

from fsdp2._torch.autograd import graph_task_id
from fsdp2._torch.hooks import dispatch_modes
from fsdp2.autograd.boundary import Boundary
from fsdp2.engine.collective import END, Collective, PassKind
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.joining import Joining, ranks_may_skip
from fsdp2.engine.observer import Observer, Unobserved

__all__ = ["Call", "CallKind", "Pass", "Unit", "backward_runs"]


def backward_runs() -> bool:
    """Return whether this is called from inside a backward of autograd, on its thread."""
    return graph_task_id() != -1


class Unit(Protocol):
    """A unit, as far as a root has to know one: its name, its modules, and the groups that it drives."""

    name: str
    modules: tuple[nn.Module, ...]
    groups: list[FSDPParamGroup]
    why_no_forward: str | None

    def reconcile(self) -> None:
        """Take in what others have put on the modules."""

    def forget_calls(self, run: Pass) -> None:
        """Forget calls that ``run`` has left unended."""


class CallKind(Enum):
    """The kind of a forward call of a unit; it is settled at its entry."""

    NORMAL = 0
    RECOMPUTED = 1  # inside the unit's own backward: parameters are there or gathered, nothing else happens
    RECURSIVE = 2  # inside a call of the same module, part of which it is


@dataclass
class Call:
    """One forward call of a unit, or of all members of a grouped one, from its entry to its end."""

    kind: CallKind
    run: Pass
    boundary: Boundary
    depth: int = 0  # of a recursive one: how many calls of the module are on the stack
    members: set[nn.Module] = field(default_factory=set)  # that have not run yet


class Pass:
    """One pass under a root, or the base of one."""

    in_backward = False
    is_running = True  # of a forward: until it ends, or breaks off
    in_forward = False  # it is a forward, or lies inside one, which may write to shards
    over = False  # autograd's backward has ended, so no group waits for a gradient any more
    quietly = False  # the latest use of a group was quiet, as ``itinerary.Stop`` says
    outermost: Any = None  # the unit that a forward entered first
    joins: type[Joining] = Joining  # how it takes part in what only other ranks need

    def __init__(self, groups: list[FSDPParamGroup], observer: Observer) -> None:
        self.groups = groups
        self.observer = observer
        # The latest call of each unit that has not ended. What is left when the outermost ends are grouped calls whose
        # other members did not run, and calls that raised.
        self.entered: dict[Any, Call] = {}
        self.is_compared = not isinstance(observer, Unobserved)  # ranks that do not do the same raise
        self.outer_modes = dispatch_modes()  # around the pass; others may belong to a checkpoint inside it
        self._begin_part()
        self._users: dict[FSDPParamGroup, set[Any]] = {}  # of a group that several units share, those that use it now

    # ---- collectives ----

    def _begin_part(self) -> None:
        """Begin what the observer and the itinerary see as one pass, without knowledge of what was joined before."""
        # How it takes part in collectives of units that ranks may skip, if there are such units.
        self.joining = self.joins(self.observer.agreement) if ranks_may_skip(self.groups) else None
        # Whether the itinerary remembers it. Ranks may run different numbers of passes that launch no collective; but
        # with units that ranks may skip all run the same ones, and without gathers from others nothing depends on it.
        gathers = any(group.mesh.gathers_from_others for group in self.groups)
        self.is_remembered = self.joining is not None or not gathers

    def launch(self, collective: Collective, start: Callable[[], None], *, optional: bool = False) -> bool:
        """Show ``collective`` to the observer, which raises if ranks differ, and call ``start``.

        If some ranks may skip units, all of them agree on the next collective instead: this rank may launch others
        first, and an ``optional`` one may be left for later. Then the result is False.
        """
        if self.joining is not None:
            return self.joining.launch(self, collective, start, optional=optional)
        self.observer.before(collective)
        self.is_remembered |= collective is not END
        start()
        return True

    def begin(self, kind: PassKind) -> None:
        """Tell the observer that the pass begins."""
        self.observer.begin(kind, agrees=self.joining is not None)

    def prefetch(self, group: FSDPParamGroup) -> None:
        """Start gathering what is needed later in the pass; if ranks may skip units, it may be left for later."""
        group.start_unshard(self.launch, in_backward=self.in_backward, optional=True)
        if self.in_forward:
            group.residency.note_gathered(loud=not self.quietly)

    def end(self) -> None:
        """End the pass. This rank may first have to join collectives that other ranks wait for."""
        if self.shows_end:
            self.launch(END, lambda: None)
        self.observer.end()
        if self.joining is not None:
            self.joining.end(self)

    @property
    def shows_end(self) -> bool:
        """True if the observer is shown the end, and raises where other ranks launch a collective in the pass."""
        return True

    def join_before_end(self) -> None:
        """Launch what other ranks need before the pass ends."""
        if self.joining is not None:
            self.joining.join_before_end(self)

    @property
    def used_by_some(self) -> Iterable[FSDPParamGroup]:
        """The groups that ranks may skip, and that the pass has gathered since some rank uses them; on all alike."""
        return () if self.joining is None else self.joining.gathered

    def post_backward(self, group: FSDPParamGroup) -> None:
        """Free ``group`` and reduce its gradients."""
        group.post_backward(self.launch)

    # ---- groups that several units share, because they tie a parameter ----

    def enter_shared(self, group: FSDPParamGroup, unit: object) -> bool:
        """Note that ``unit`` uses a shared group, and return whether it is the only one now."""
        users = self._users.setdefault(group, set())
        users.add(unit)
        return len(users) == 1

    def uses_shared(self, group: FSDPParamGroup) -> bool:
        """Return whether a unit uses a shared group now."""
        return bool(self._users.get(group))

    def leave_shared(self, group: FSDPParamGroup, unit: object) -> bool:
        """Note that ``unit`` uses a shared group no more, and return whether nobody does."""
        users = self._users.get(group, set())
        users.discard(unit)
        return not users
