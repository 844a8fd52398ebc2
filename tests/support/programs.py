"""Which random programs there are: a plan, and steps that a training script may do in any order, as plain data.

``fuzz.py`` executes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from unittest import mock

import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.engine import ConjectureRunner

from tests.support.stores import STORES
from tests.support.trees import MESHES, PLACEMENTS, Plan, plans, some_of

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Fuzz:
    """A plan, and steps: the name of a method of ``Execution`` and its arguments.

    ``store``: where ranks compare themselves. ``early``: the optimizer is built before the model is sharded.
    ``optimizer``: a key of ``OPTIMIZERS``, or plain SGD. ``host``: its state is kept on the host. ``whole``: a key of
    ``WHOLE`` if it steps on whole parameters. ``scaled``: losses are scaled.
    """

    plan: Plan
    steps: tuple[tuple[Any, ...], ...]
    store: str = "pool"
    early: bool = False
    optimizer: str = ""
    host: bool = False
    whole: str = ""
    scaled: bool = False


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.AdamW(params, lr=0.01, eps=0.1),
    "Adam, foreach": lambda params: torch.optim.AdamW(params, lr=0.01, eps=0.1, foreach=True),
    "scheduled": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}
"""Beside plain SGD. A large ``eps`` lets small gradients make small steps, so errors stay as small as they are."""

WHOLE: dict[str, dict[str, bool]] = {
    "at the step": {},
    "in backward": {"overlap_backward": True},
    "kept": {"keep_full_params": True},
    "kept and in backward": {"overlap_backward": True, "keep_full_params": True},
}
"""Options with which each parameter is stepped on by one rank."""

SETTERS: dict[str, st.SearchStrategy[Any]] = {
    "set_deterministic_reduction": st.booleans(),
    "set_force_sum_reduction_for_comms": st.booleans(),
    "set_keep_unsharded_storage": st.booleans(),
    "set_reduce_scatter_max_input_buffers": st.integers(1, 4),
    "set_separate_reduce_scatter_group": st.booleans(),
}
"""Setters that change how ranks communicate and not what they compute, at any time, and their argument."""
SIZES = (1, 100, 1000, 1 << 20)
"""Numbers of bytes, some smaller than a parameter of most parts, and one larger than all but the large ones."""
FSDP1_TYPES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT")

number, truth = st.integers(0, 5), st.booleans()
ORDINARY_STEPS: dict[str, st.SearchStrategy[Any]] = {
    "train": st.tuples(number),
    "forward": st.tuples(number),
    "backward": st.tuples(number, truth),
    "evaluate": st.just(("no_grad",)),
    "sync": st.tuples(truth),
    "after_forward": st.tuples(truth),
    "after_backward": st.tuples(truth),
    "unshard": st.tuples(number, st.just(False)),
    "reshard": st.tuples(number),
    "freeze": st.tuples(number, truth, st.just(True)),
    "state_dict": st.just(()),
    "reload": st.just(("shards",)),
    "restore": st.tuples(st.sampled_from(["files", "whole"])),
    "update": st.just((True,)),
}
STEPS: dict[str, st.SearchStrategy[Any]] = {
    **ORDINARY_STEPS,
    "evaluate": st.tuples(st.sampled_from(["no_grad", "inference"])),
    "unshard": st.tuples(number, truth),
    "freeze": st.tuples(number, st.sampled_from([False, False, True]), truth),
    "update": st.tuples(truth),
    "reload": st.tuples(st.sampled_from(["shards", "rank 0", "safetensors"])),
    "restore": st.tuples(st.sampled_from(["files", "whole", "beside training"])),
    "move": st.tuples(st.sampled_from(MESHES), st.sampled_from(sorted(PLACEMENTS)), truth),
    "sync_unit": st.tuples(number, truth),
    "all_reduce": st.tuples(truth),
    "skip": st.tuples(number, truth),
    "lone": st.tuples(number, number),
    "input_gradient": st.tuples(number),
    "penalty": st.tuples(number),
    "twin": st.tuples(number),
    "average": st.tuples(number),
    "stumble": st.tuples(st.integers(0, 20), number, truth, truth),
    "break_off": st.tuples(st.integers(0, 20), number, truth, truth),
    "uneven": st.tuples(number),
    "send": st.just(()),
    "look_at": st.tuples(st.sampled_from(["deepcopy", "summon", "iterate", "use", "move", "pending"])),
    "synchronize": st.just(()),
    "slow": st.tuples(st.integers(0, 20), number),
    "sleep": st.just(()),
    "reset": st.just(()),
}
"""What a program may do, and with which arguments."""
BESIDES: dict[str, st.SearchStrategy[Any]] = {
    "two_losses": st.tuples(number, number),
    "use": st.tuples(number, truth),
    "write": st.tuples(st.sampled_from(["weights", "nothing", "gradients"]), number),
    "substitute": st.tuples(number),
    "halve": st.tuples(number),
    "finalize": st.tuples(number, truth, truth),
    "prefetch": st.tuples(number, number, truth),
    "configure": st.sampled_from([*SETTERS]).flatmap(lambda name: st.tuples(st.just(name), SETTERS[name])),
    "resize": st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)),
    "rebuild": st.tuples(st.sampled_from(["", "host", "local", "whole"])),
    "restore_fsdp1": st.tuples(st.sampled_from(FSDP1_TYPES)),
    "cast": st.just(()),
}
"""What it may do besides: calls that belong to no theme, as they may fail with any other.

They are in none, because each step more in a theme is one that its others come together with less often.
"""
THEMES: dict[str, list[str]] = {
    "anything": [*STEPS],
    "gradients": ["sync", "sync_unit", "all_reduce", "freeze", "update", "synchronize", "look_at"],
    "sums that wait": ["all_reduce", "freeze", "synchronize"],
    "copies": ["twin", "average", "state_dict", "reload", "send", "sync", "restore", "move"],
    "memory": [
        "after_forward",
        "after_backward",
        "unshard",
        "reshard",
        "evaluate",
        "forward",
        "input_gradient",
        "reload",
        "look_at",
    ],
    "other passes": ["evaluate", "lone", "input_gradient", "penalty", "uneven", "skip", "forward", "send"],
    "trouble": ["stumble", "break_off", "reset", "sleep", "forward", "freeze", "evaluate", "slow", "look_at"],
}
"""Steps that concern the same things, of which two may only fail together."""
MESHES_OF = {"sums that wait": ("hybrid", "copies")}
"""Where the steps of a theme mean something, if not everywhere."""
LONGEST = 16


@st.composite
def programs(draw: st.DrawFn, *, ordinary: bool = False) -> Fuzz:
    """Draw a program of up to ``LONGEST`` steps, or one that torch's fully_shard does right.

    A program has few kinds of steps, for the reason that ``plans`` gives.
    """
    known = ORDINARY_STEPS if ordinary else STEPS
    theme = "" if ordinary else draw(st.sampled_from([*THEMES]))
    kinds = ["train", *draw(some_of(THEMES.get(theme, known), 2, 4))]
    if "forward" in kinds:
        kinds.append("backward")
    if not ordinary:
        known = {**known, **BESIDES}
        kinds += draw(some_of(BESIDES, 0, 2))
    step = st.sampled_from(kinds).flatmap(lambda name: known[name].map(lambda given: (name, *given)))
    size = draw(st.integers(1, LONGEST))
    steps = tuple(draw(st.lists(step, min_size=size, max_size=size)))
    plan = draw(plans(ordinary=ordinary, meshes=MESHES_OF.get(theme, MESHES)))
    if ordinary:
        return Fuzz(plan, steps)
    store = draw(st.sampled_from(["pool", "pool", *STORES]))
    kind = draw(st.sampled_from(["", *OPTIMIZERS]))
    how = {"host": True, "whole": draw(st.sampled_from([*WHOLE]))}
    chosen = {name: how[name] for name in draw(some_of(how, 0, 2))}
    return Fuzz(plan, steps, store, early=draw(truth), optimizer=kind, scaled=draw(truth), **chosen)


def drawn_anew(test: F) -> F:
    """Let Hypothesis draw every example of a test by itself.

    It would make five of six by repeating parts of the one before, which says little about models and orders of calls
    that are all plain data, and there is no setting for that.
    """

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> Any:
        with mock.patch.object(ConjectureRunner, "generate_mutations_from", lambda *unused: None):
            return test(*arguments, **named)

    return cast(F, run)


def drawn(number: int, count: int) -> list[Fuzz]:
    """Return ``count`` programs, the same for the same number."""
    found: list[Fuzz] = []

    @drawn_anew
    @seed(number)
    @settings(max_examples=count, phases=[Phase.generate], database=None, deadline=None)
    @given(program=programs())
    def note(program: Fuzz) -> None:
        found.append(program)

    note()
    return found
