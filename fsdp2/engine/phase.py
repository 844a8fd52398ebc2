"""Where a group is in the iteration, and which phase may follow which."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Phase", "PhaseTracker"]


class Phase(IntEnum):
    """Where a group is in the iteration."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2
    REDUCED = 3


_NEXT = {
    "pre_forward": {
        Phase.IDLE: Phase.FORWARD,
        Phase.FORWARD: Phase.FORWARD,
        Phase.REDUCED: Phase.FORWARD,  # recomputed for another use after the first one's gradients left
    },
    "post_forward": {Phase.FORWARD: Phase.IDLE, Phase.IDLE: Phase.IDLE},
    "pre_backward": {
        Phase.IDLE: Phase.BACKWARD,
        Phase.BACKWARD: Phase.BACKWARD,
        Phase.REDUCED: Phase.BACKWARD,
        Phase.FORWARD: Phase.BACKWARD,
    },
    "post_backward": {
        Phase.BACKWARD: Phase.REDUCED,
        Phase.FORWARD: Phase.REDUCED,  # a grouped call whose forward ran only some of its modules
        Phase.IDLE: Phase.REDUCED,  # unused in this backward
        Phase.REDUCED: Phase.REDUCED,
    },
    "defer_backward": dict.fromkeys(Phase, Phase.IDLE),  # the rest waits for finalize_backward
    "end_backward": {Phase.REDUCED: Phase.IDLE, Phase.IDLE: Phase.IDLE},
}


class PhaseTracker:
    """The phase of one group; an illegal step raises and changes nothing."""

    __slots__ = ("name", "phase")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.phase = Phase.IDLE

    def enter(self, step: str) -> bool:
        """Change the phase by ``step``; return whether it was another one before.

        Raises:
            RuntimeError: ``step`` is not allowed in the present phase.
        """
        allowed, before = _NEXT[step], self.phase
        if before not in allowed:
            expected = ", ".join(sorted(phase.name.lower() for phase in allowed))
            raise RuntimeError(
                f"{self.name or 'the root'}: {step} out of order; the group is {before.name.lower()}, expected one of: "
                f"{expected}. If an earlier forward or backward raised, call reset_iter_state() on the root module "
                "before the next one"
            )
        self.phase = allowed[before]
        return self.phase is not before

    @property
    def in_forward(self) -> bool:
        """Whether a forward is inside the group."""
        return self.phase is Phase.FORWARD

    @property
    def in_backward(self) -> bool:
        """Whether a backward is inside the group."""
        return self.phase is Phase.BACKWARD

    def reset(self) -> None:
        """Return to IDLE from anywhere (recovery)."""
        self.phase = Phase.IDLE
