"""What random programs can say: every pair of features that docs/compositions.md has no test for, but those listed."""

from __future__ import annotations

import contextlib
from itertools import combinations

import pytest
from hypothesis import Phase, given, seed, settings

from tests.support import fuzz
from tests.support.composition import FEATURES
from tests.support.docs import script
from tests.support.trees import Node, Plan

OUT_OF_REACH = {
    "tensor parallel",
    "sequence parallel",
    "loss parallel",
    "named dimensions",
    "several meshes",
    "pipeline",
    "zero bubble",
    "compile",
    "Muon",
    "optimizer in backward",
    "GradScaler",
    "saved elsewhere",
    "async save",
}
"""Features that no random program has: they want models, meshes, schedules or processes that a tree of small modules on
the processes of a test has not."""
EXCLUSIVE = [
    {"hybrid sharding", "over replicas"},
    {"reshard to int", "over replicas"},
    {"SGD", "Adam"},
    {"Adam", "LR schedule"},
]
"""Of these a program has one: a mesh, an optimizer."""


class Enough(Exception):
    """Every pair has come up."""


def _all(nodes: tuple[Node, ...]) -> list[Node]:
    return [one for node in nodes for one in (node, *_all(node.children))]


def features_of(program: fuzz.Fuzz) -> set[str]:
    """Return the features that a program combines."""
    plan: Plan = program.plan
    nodes = _all(plan.nodes)
    steps = {step[0] for step in program.steps}
    ways = {node.recompute for node in nodes}
    has = {
        "hybrid sharding": plan.mesh == "hybrid",
        "over replicas": plan.mesh == "over replicas",
        "uneven": any(node.kind in ("uneven", "single", "norm", "odd") for node in nodes),
        "shard dim": plan.placement != "first",
        "experts": plan.experts,
        "divide factor": plan.divide,
        "reshard to int": plan.mesh != "over replicas" and 2 in (plan.root_reshard, *(n.reshard for n in nodes)),
        "mixed precision": plan.policy != "plain",
        "CPU offload": plan.offload,
        "accumulation": bool(steps & {"sync", "sync_unit", "all_reduce", "uneven"}),
        "recomputation": bool(ways & {"around", "inside"}),
        "reentrant recomputation": "reentrant" in ways,
        "selective recomputation": "selective" in ways,
        "activations on the CPU": "on the CPU" in ways,
        "used twice": any(node.twice and node.unit for node in nodes),
        "SGD": not program.optimizer.startswith("Adam"),
        "Adam": program.optimizer.startswith("Adam"),
        "LR schedule": program.optimizer == "scheduled",
        "averaged model": "average" in steps,
        "clipping": True,
    }
    return {feature for feature, there in has.items() if there}


@pytest.mark.slow
def test_random_programs_combine_what_no_test_does():
    """Each such pair comes up within three thousand programs, none of which has to run for that."""
    table = script("make_compositions")
    tested = table.pairs(table.everything())
    possible = [feature for feature in FEATURES if feature not in OUT_OF_REACH]
    wanted = {frozenset(pair) for pair in combinations(possible, 2)} - tested - {*map(frozenset, EXCLUSIVE)}
    seen: set[frozenset[str]] = set()

    @seed(1)
    @settings(max_examples=3000, phases=[Phase.generate], database=None)
    @given(program=fuzz.programs())
    def look(program: fuzz.Fuzz) -> None:
        seen.update(map(frozenset, combinations(features_of(program), 2)))
        if wanted <= seen:
            raise Enough

    with contextlib.suppress(Enough):
        look()
    assert not wanted - seen, f"no program combines {sorted(map(sorted, wanted - seen))}"
