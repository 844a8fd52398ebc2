"""What must be right is right, and each kind of defect is reported by the check that is there for it."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp2.tools.check import strict
from fsdp2.tools.check.cases import CASES, run_case
from fsdp2.tools.check.place import Place
from fsdp2.tools.check.strict import STRICT
from fsdp2.tools.check.tasks import chosen
from fsdp2.tools.check.trial import compare
from tests.support import api
from tests.support.pool import on_ranks
from tests.tools.check import planted

pytestmark = api.fsdp2_only
QUICK = [name for name in CASES if name != "compiled blocks"]
RUNS = {**{name: (lambda place, case=case: run_case(case, place)) for name, case in CASES.items()}, **STRICT}


_uses = itertools.count()


def place(rank: int, world: int, **options: object) -> Place:
    """Return this rank."""
    store = dist.PrefixStore(f"check {next(_uses)}", dist.distributed_c10d._get_default_store())
    return Place(rank, world, rank, torch.device("cpu"), store, **options)


@on_ranks(2, pytest.param(4, marks=pytest.mark.slow))
@pytest.mark.parametrize("name", [*QUICK, "freed memory", "memory left"])
def test_all_is_well(rank, world, name):
    """Nothing differs by more than it may."""
    outcome = RUNS[name](place(rank, world))
    assert outcome.verdict == "right", outcome.text
    assert name == "memory left" or outcome.comparisons


@pytest.mark.slow
@on_ranks(2)
def test_compiled_blocks(rank, world):
    """torch.compile takes its time."""
    assert RUNS["compiled blocks"](place(rank, world)).verdict == "right"


@on_ranks(2, pytest.param(4, marks=pytest.mark.slow))
@pytest.mark.parametrize(
    ("name", "defect", "said"),
    [
        ("plain", "wrong_gradient", "differs from torch's own"),
        ("mixed precision", "lost_gradient", "is missing beside one process"),
        ("memory left", "kept_memory", "bytes more are allocated after a step"),
        ("freed memory", "used_again", "differs from memory as it is"),
    ],
)
def test_defects_are_reported(rank, world, name, defect, said):
    """A gradient that is a thousandth too small, one that is lost, memory that is kept, and memory that is read before
    it is written, which usually holds the right values by luck."""
    here = place(rank, world)
    soon = mock.patch.object(strict, "FREED_SECONDS", 0.1)  # what is kept on purpose is never freed
    with planted.every_unit(planted.DEFECTS[defect], here), soon:
        outcome = RUNS[name](here)
    assert outcome.verdict == "wrong"
    assert said in outcome.text
    if name == "plain":
        assert RUNS[name](here).verdict == "right"  # nothing of it stays


@on_ranks(2)
def test_without_torchs_own(rank, world):
    """``--against none`` compares with one process alone."""
    outcome = RUNS["plain"](place(rank, world, against_torch=False))
    assert [one.against for one in outcome.comparisons] == ["one process"]


@on_ranks(2)
def test_a_checkpoint_on_hosts_that_share_no_folder(rank, world):
    """It goes through memory."""
    outcome = RUNS["checkpoint"](place(rank, world, hosts=2))
    assert outcome.verdict == "right" and outcome.comparisons[0].same_bits


def test_what_cannot_run_is_skipped():
    """The reason is said."""
    alone = Place(0, 1, 0, torch.device("cpu"), dist.HashStore())
    assert run_case(CASES["hybrid"], alone).text == "needs an even number of ranks"
    assert STRICT["streams"](alone).verdict == "skipped"
    asked, all_of_a_cpu = (chosen(only, quick=False, cuda=False) for only in (["streams"], []))
    assert "streams" in [task.name for task in asked], "with --only streams the report said that nothing was checked"
    assert "streams" not in [task.name for task in all_of_a_cpu]


def test_differences():
    """The largest difference beside what it may be counts; what is not a number, missing or of another shape never is
    allowed."""
    one, nearly = {"weight a": torch.ones(3), "weight b": torch.ones(3)}, torch.tensor([1.0, 1.0, 1.0 + 1e-6])
    assert compare("it", one, one, 0.0, exact=True).right
    close = compare("it", {**one, "weight b": nearly}, one, 1e-5)
    assert close.right and not close.same_bits and close.what == "weight b" and close.bound == pytest.approx(1e-5)
    assert not compare("it", {**one, "weight b": nearly}, one, 1e-5, exact=True).right
    for wrong in (torch.full((3,), torch.nan), None, torch.ones(2)):
        assert not compare("it", {**one, "weight a": wrong}, one, 1.0).right
    assert not compare("it", {"weight a": torch.ones(3)}, one, 1.0).right


def test_memory_is_filled_and_left_alone_afterwards():
    """New memory, and memory that a storage gets back, is not a number inside of the block alone."""
    tensor = torch.ones(8)
    with strict.filled_memory():
        assert torch.empty(8).isnan().all()
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(32)
        assert tensor.isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(32)
    assert "filled_memory" not in torch.UntypedStorage.resize_.__qualname__
