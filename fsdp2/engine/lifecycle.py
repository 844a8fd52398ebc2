"""Which steps may follow which: two tables and one holder per group. It checks order and decides nothing."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Lifecycle", "Phase", "Residency"]


class Residency(IntEnum):
    """Where a group's parameters are."""

    SHARDED = 0
    GATHERING = 1
    UNSHARDED = 2
    SUBGROUP = 3
    SUMMONED = 4  # somebody else decides what the modules show; nothing is gathered or freed meanwhile


class Phase(IntEnum):
    """Where a group is in the iteration."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2
    REDUCED = 3


_RESIDENCY = {
    "start_gather": {
        Residency.SHARDED: Residency.GATHERING,
        Residency.SUBGROUP: Residency.GATHERING,
        Residency.GATHERING: Residency.GATHERING,
    },
    "finish_gather": {Residency.GATHERING: Residency.UNSHARDED, Residency.UNSHARDED: Residency.UNSHARDED},
    "reshard": {
        Residency.UNSHARDED: Residency.SHARDED,
        Residency.SUBGROUP: Residency.SHARDED,
        Residency.SHARDED: Residency.SHARDED,
    },
    "reshard_to_subgroup": {Residency.UNSHARDED: Residency.SUBGROUP, Residency.SUBGROUP: Residency.SUBGROUP},
    "abandon": {Residency.GATHERING: Residency.SHARDED},
    "summon": {
        Residency.SHARDED: Residency.SUMMONED,
        Residency.UNSHARDED: Residency.SUMMONED,
        Residency.SUBGROUP: Residency.SUMMONED,
    },
}

_PHASE = {
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
    "defer_backward": dict.fromkeys(Phase, Phase.IDLE),  # what is left waits for finalize_backward
    "end_backward": {Phase.REDUCED: Phase.IDLE, Phase.IDLE: Phase.IDLE},
}


class Lifecycle:
    """The residency and the phase of one group; an illegal step raises and changes nothing."""

    __slots__ = ("beneath", "name", "phase", "residency")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.residency = Residency.SHARDED
        self.phase = Phase.IDLE
        self.beneath = Residency.SHARDED  # what it was when it became SUMMONED, and is again when that ends

    def changes(self, step: str) -> bool:
        """Whether ``step`` of the first table may be taken and leads elsewhere."""
        table, residency = _RESIDENCY[step], self.residency
        return residency in table and table[residency] is not residency

    def move(self, step: str) -> bool:
        """Change the residency by ``step`` of the first table; whether it was another one."""
        table, before = _RESIDENCY[step], self.residency
        if before not in table:
            raise RuntimeError(self._refusal(step, before, table))
        self.residency = table[before]
        return self.residency is not before

    def summon(self) -> None:
        """Become SUMMONED, if it is not already."""
        if not self.summoned:
            self.beneath = self.residency
            self.move("summon")

    def dismiss(self) -> None:
        """Be what it was before."""
        self.residency = self.beneath

    def enter(self, step: str) -> bool:
        """Change the phase by ``step`` of the second table; whether it was another one."""
        table, before = _PHASE[step], self.phase
        if before not in table:
            raise RuntimeError(self._refusal(step, before, table))
        self.phase = table[before]
        return self.phase is not before

    @property
    def in_forward(self) -> bool:
        """Whether a forward is inside the group."""
        return self.phase is Phase.FORWARD

    @property
    def in_backward(self) -> bool:
        """Whether a backward is inside the group."""
        return self.phase is Phase.BACKWARD

    @property
    def summoned(self) -> bool:
        """Whether ``summon_full_params`` decides what the modules show."""
        return self.residency is Residency.SUMMONED

    def refuse_summoned(self, step: str) -> None:
        """Raise RuntimeError if ``summon_full_params`` shows parameters of the group, in the name of ``step``."""
        if self.summoned:
            raise RuntimeError(
                f"{self.name or 'the root'}: {step} while summon_full_params shows its parameters; expected outside "
                "of that context. Leave it first, or summon fewer modules"
            )

    def reset(self) -> None:
        """Back to SHARDED and IDLE from anywhere (recovery)."""
        self.residency, self.phase = Residency.SHARDED, Phase.IDLE

    def _refusal(self, step: str, got: IntEnum, table: dict) -> str:
        self.refuse_summoned(step)
        allowed = ", ".join(sorted(state.name.lower() for state in table))
        return (
            f"{self.name or 'the root'}: {step} out of order; the group is {got.name.lower()}, expected one of: "
            f"{allowed}. If an earlier forward or backward raised, call reset_iter_state() on the root module before "
            "the next one"
        )
