"""What ranks agree on if some of them may skip units: which collective all launch next.

Only models with such units (``set_reduce_scatter_unused_params``) need an agreement. In all others each rank knows by
itself what comes next, and an observer raises if ranks differ.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from fsdp2.engine.collective import Collective

__all__ = ["Agreement", "Answer", "CanJoin", "NoAgreement"]


class Answer(Enum):
    """What ranks have agreed on. Instead there may be another collective, which the pass has to launch first."""

    LAUNCH = 0  # start it now
    LATER = 1  # start it later; only an optional one gets this: a prefetch, or a reduction in a backward that runs


CanJoin = Callable[[Collective, bool], bool]
"""Whether a pass can *join* a collective, that is launch it because other ranks need it (``Joining.can_join``).

Called with the collective, and with True if a known pass has it here and not once more later."""


class Agreement(Protocol):
    """Knows what other ranks need. Each method may raise, and then the pass does not go on."""

    def next(self, collective: Collective, *, optional: bool, can_join: CanJoin) -> Answer | Collective:
        """Decide about ``collective``, which a pass is about to launch.

        Returns:
            LAUNCH, LATER, or a collective that ``can_join`` accepts and that the pass must launch first, as others do.
        """

    def next_before_end(self, can_join: CanJoin) -> Collective | None:
        """Return the next collective that other ranks launch before a backward ends, if ``can_join`` accepts it."""


class NoAgreement:
    """No agreement: there is no other rank, or ranks are not compared."""

    def next(self, collective: Collective, *, optional: bool, can_join: CanJoin) -> Answer | Collective:
        """Let every collective be launched at once."""
        return Answer.LAUNCH

    def next_before_end(self, can_join: CanJoin) -> Collective | None:
        """Return None."""
        return None
