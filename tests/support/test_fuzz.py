"""What random programs can say: each pair of features that no test of docs/compositions.md combines, unless one of them
is out of their reach."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import Phase, given, seed, settings

from tests.support.composition import FEATURES, OUT_OF_REACH
from tests.support.docs import script
from tests.support.programs import Fuzz, drawn_anew, programs

EXCLUSIVE = [
    {"hybrid sharding", "over replicas"},
    {"experts", "tensor parallel"},
    {"reshard to int", "over replicas"},
    {"SGD", "Adam"},
    {"Adam", "LR schedule"},
]
"""Of these a program has one: a mesh, an optimizer."""


def kinds(program: Fuzz) -> set[str]:
    """Return the kinds of modules in a program's model."""
    return {node.kind for node in program.plan.all_nodes()}


def recomputed(program: Fuzz) -> set[str]:
    """Return the ways in which parts of a program's model recompute."""
    return {node.recompute for node in program.plan.all_nodes()}


def steps(program: Fuzz) -> set[str]:
    """Return the names of a program's steps."""
    return {step[0] for step in program.steps}


def reshards_to_int(program: Fuzz) -> bool:
    """Whether a unit asks for it; over replicas, where it is refused, ``Plan.shard`` asks for something else."""
    plan = program.plan
    return plan.mesh != "over replicas" and 2 in (plan.root_reshard, *(node.reshard for node in plan.all_nodes()))


IN_REACH: dict[str, Callable[[Fuzz], bool]] = {
    "hybrid sharding": lambda program: program.plan.mesh == "hybrid",
    "over replicas": lambda program: program.plan.mesh == "over replicas",
    "uneven": lambda program: bool(kinds(program) & {"uneven", "single", "norm", "odd"}),
    "shard dim": lambda program: program.plan.placement != "first",
    "experts": lambda program: program.plan.experts,
    "tensor parallel": lambda program: program.plan.across(4) > 1,
    "compile": lambda program: bool(program.plan.compiled) and any(node.unit for node in program.plan.all_nodes()),
    "divide factor": lambda program: program.plan.divide,
    "deterministic reduction": lambda program: program.plan.deterministic,
    "reshard to int": reshards_to_int,
    "mixed precision": lambda program: program.plan.policy != "plain",
    "CPU offload": lambda program: program.plan.offload,
    "accumulation": lambda program: bool(steps(program) & {"sync", "sync_unit", "all_reduce", "uneven"}),
    "recomputation": lambda program: bool(recomputed(program) & {"around", "inside"}),
    "reentrant recomputation": lambda program: "reentrant" in recomputed(program),
    "selective recomputation": lambda program: "selective" in recomputed(program),
    "activations on the CPU": lambda program: "on the CPU" in recomputed(program),
    "used twice": lambda program: any(node.twice and node.unit for node in program.plan.all_nodes()),
    "SGD": lambda program: not program.optimizer.startswith("Adam"),
    "Adam": lambda program: program.optimizer.startswith("Adam"),
    "state on the host": lambda program: program.host,
    "sent in backward": lambda program: "in backward" in program.whole,
    "kept by owners": lambda program: "kept" in program.whole,
    "GradScaler": lambda program: program.scaled,
    "LR schedule": lambda program: program.optimizer == "scheduled",
    "averaged model": lambda program: "average" in steps(program),
    "clipping": lambda program: True,
    "saved elsewhere": lambda program: "move" in steps(program),
    "async save": lambda program: ("restore", "beside training") in program.steps,
    "weight sync": lambda program: "send" in steps(program),
}
"""The features that are not ``OUT_OF_REACH``, and which programs have them."""


class Enough(Exception):
    """Every pair has come up."""


def features_of(program: Fuzz) -> set[str]:
    """Return the features that a program combines."""
    return {feature for feature, has in IN_REACH.items() if has(program)}


def test_every_feature_is_in_reach_or_not():
    """A new row of docs/compositions.md is drawn by random programs, or listed as one that they cannot have."""
    assert not set(OUT_OF_REACH) & IN_REACH.keys()
    assert {*OUT_OF_REACH, *IN_REACH} == set(FEATURES)


@pytest.mark.slow
def test_random_programs_combine_what_no_test_does():
    """Each such pair comes up within five thousand programs, none of which has to run for that."""
    table = script("make_compositions")
    tested = table.pairs(table.everything())
    wanted = {frozenset(pair) for pair in combinations(IN_REACH, 2)} - tested - {*map(frozenset, EXCLUSIVE)}
    seen: set[frozenset[str]] = set()

    @drawn_anew
    @seed(1)
    @settings(max_examples=5000, phases=[Phase.generate], database=None)
    @given(program=programs())
    def look(program: Fuzz) -> None:
        seen.update(map(frozenset, combinations(features_of(program), 2)))
        if wanted <= seen:
            raise Enough

    with contextlib.suppress(Enough):
        look()
    assert not wanted - seen, f"no program combines {sorted(map(sorted, wanted - seen))}"
