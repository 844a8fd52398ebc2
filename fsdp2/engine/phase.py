"""The phases of a group in an iteration, and the table of which may follow which."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Phase", "PhaseTracker"]


class Phase(IntEnum):
    """Where a group is in the iteration."""

    IDLE = 0  # nothing computes with it
    FORWARD = 1  # a forward is inside it
    BACKWARD = 2  # a backward is inside it
    REDUCED = 3  # the backward is done with it and has sent its gradients, and goes on below other groups


# For each hook of a group: the phases in which it may be called, and the phase after it. A hook in any other phase is a
# defect of ours, or follows an error after which ``reset_iter_state`` was not called. So these are refused: a forward
# that begins inside the group's own backward (a recomputation does not call this hook), a forward that ends inside or
# after it, and the end of a backward that has not reduced.
_NEXT = {
    "pre_forward": {
        Phase.IDLE: Phase.FORWARD,
        Phase.FORWARD: Phase.FORWARD,  # several calls of the module, or the modules of a grouped call
        Phase.REDUCED: Phase.FORWARD,  # recomputed for another use after the first one's gradients left
    },
    "post_forward": {Phase.FORWARD: Phase.IDLE, Phase.IDLE: Phase.IDLE},  # IDLE: the forward called reset_iter_state
    "pre_backward": {
        Phase.IDLE: Phase.BACKWARD,
        Phase.BACKWARD: Phase.BACKWARD,  # a further one of several outputs or calls
        Phase.REDUCED: Phase.BACKWARD,  # its gradients have left, and backward reaches another call
        Phase.FORWARD: Phase.BACKWARD,  # a backward inside a forward; a grouped call that was recomputed in part
    },
    "post_backward": {
        Phase.BACKWARD: Phase.REDUCED,
        Phase.FORWARD: Phase.REDUCED,  # a grouped call whose forward ran only some of its modules
        Phase.IDLE: Phase.REDUCED,  # unused in this backward
        Phase.REDUCED: Phase.REDUCED,
    },
    "defer_backward": dict.fromkeys(Phase, Phase.IDLE),  # finalize_backward will reduce
    "end_backward": {Phase.REDUCED: Phase.IDLE, Phase.IDLE: Phase.IDLE},
}


class PhaseTracker:
    """The phase of one group. A hook that is out of order raises and changes nothing."""

    __slots__ = ("name", "phase")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.phase = Phase.IDLE

    def enter(self, hook: str) -> bool:
        """Change the phase as ``hook`` does; return whether it is another one now.

        Raises:
            RuntimeError: ``hook`` is not allowed in the present phase.
        """
        allowed, before = _NEXT[hook], self.phase
        if before not in allowed:
            expected = ", ".join(sorted(phase.name.lower() for phase in allowed))
            raise RuntimeError(
                f"{self.name or 'the root'}: {hook} out of order; the group is {before.name.lower()}, expected one of: "
                f"{expected}. If an earlier forward or backward raised, call reset_iter_state() on the root module "
                "before the next one"
            )
        self.phase = allowed[before]
        return self.phase is not before

    @property
    def in_forward(self) -> bool:
        """Return whether a forward is inside the group."""
        return self.phase is Phase.FORWARD

    @property
    def in_backward(self) -> bool:
        """Return whether a backward is inside the group."""
        return self.phase is Phase.BACKWARD

    def reset(self) -> None:
        """Return to IDLE from any phase, after an error."""
        self.phase = Phase.IDLE
