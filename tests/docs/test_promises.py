"""Every promise of the pages and docstrings has a test; the ones that have no other place are here."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import StateDictType

import fsdp2
from fsdp2 import _trace
from fsdp2._torch.collectives import launched_collectives
from tests.docs.promises import NO_PROMISE, PROMISES
from tests.docs.test_pages import DOCS
from tests.ranks.apart import run_apart
from tests.support import ROOT, api
from tests.support.parity import full, mesh_1d
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only

PROMISING = re.compile(
    r"\b(never|always|bit for bit|same bits|on every rank|every rank raises?|all ranks raise|at most|unchanged"
    r"|raises? (?:an? )?(?:error|\w+Error)|raise errors?"
    r"|nothing is communicated|without communication|costs nothing|before anything is \w+|is repaired|exactly)\b",
    re.I,
)
GENERATED = {"api.md", "benchmarks.md", "comparison.md", "compositions.md"}
"""Pages that scripts write from what tests found, or that only include another file."""


def statements(text: str) -> Iterator[str]:
    """Yield the sentences, list items and table rows of a text, without code blocks and comments, one line each."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.M | re.S)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )|\n(?=#)|(?<=\|)\n(?=\|)", text):
        line = " ".join(block.split())
        if line.startswith("|"):
            yield line
        else:
            yield from re.split(r"(?<=[.:!?])\s+(?=[A-Z`*\[])", line)


def texts() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page, and of the docstring of each public name and method."""
    for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        if path.name not in GENERATED:
            yield path.relative_to(ROOT).as_posix(), path.read_text()
    public: dict[str, Any] = {f"fsdp2.{name}": getattr(fsdp2, name) for name in fsdp2.__all__}
    methods = {name: method for name, method in vars(fsdp2.FSDPModule).items() if not name.startswith("_")}
    public |= {f"fsdp2.FSDPModule.{name}": method for name, method in methods.items()}
    for name, value in public.items():
        if (getattr(value, "__module__", None) or "").startswith("fsdp2"):
            yield name, inspect.getdoc(value) or ""


def test_every_promise_is_listed():
    """A new "every rank raises" fails here until a test is named for it in promises.py."""
    unknown = []
    for where, text in texts():
        known = (*PROMISES.get(where, ()), *NO_PROMISE.get(where, ()))
        for statement in filter(PROMISING.search, statements(text)):
            if not any(says in statement for says in known):
                unknown.append(f"{where}: {statement}")
    assert not unknown, "\n".join(unknown)


def test_every_listed_promise_is_still_made():
    """What a page no longer says is taken off the list."""
    said = {where: " ".join(text.split()) for where, text in texts()}
    gone = [f"{where}: {says}" for where, all_of in PROMISES.items() for says in all_of if says not in said[where]]
    gone += [f"{where}: {says}" for where, all_of in NO_PROMISE.items() for says in all_of if says not in said[where]]
    assert not gone, "\n".join(gone)


@functools.cache
def functions_of(path: Path) -> frozenset[str]:
    """Return the names of the test functions in a file, none if it does not exist."""
    if not path.is_file():
        return frozenset()
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def test_every_named_test_exists():
    """By file and name."""
    named = {test for all_of in PROMISES.values() for tests in all_of.values() for test in tests}
    missing = sorted(test for test in named if test.split("::")[1] not in functions_of(ROOT / test.split("::")[0]))
    assert not missing, "\n".join(missing)
    assert all(tests for all_of in PROMISES.values() for tests in all_of.values())


def test_what_is_a_statement():
    """Sentences, items and rows are told apart; code is none."""
    text = (
        "# Never\n\nA `b` raises.\nNot the last.\n\n* one\n* two,\n  always\n\n| a |\n|---|\n| b |\n```\nraise\n```\n"
    )
    found = [one for one in statements(text) if one]
    assert found == ["# Never", "A `b` raises.", "Not the last.", "* one", "* two, always", "| a |", "|---|", "| b |"]


# ---- promises without another place ----


def layers() -> nn.Sequential:
    """Return layers of several sizes and kinds, some of them uneven, with a frozen bias."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24), nn.LayerNorm(24)) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(17, 24), *blocks, nn.Linear(24, 17))
    model[1][0].bias.requires_grad_(False)
    return model


@on_ranks(2)
def test_nothing_is_sent_where_pages_say_so(rank, world):
    """Collectives are counted, and ranks do the same a different number of times, which would hang."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = copy.deepcopy(plain)
    for unit in (*model, model):
        fsdp2.fully_shard(unit, mesh=mesh_1d())
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.ones(2, 8)

    def launched(action: Callable[[], object], times: int = 1) -> int:
        before = launched_collectives()
        for _ in range(times):
            action()
        return launched_collectives() - before

    assert launched(lambda: model(x).sum().backward()) > 0  # they are counted
    assert launched(optimizer.step, rank + 1) == 0
    with fsdp2.summon_full_params(model, writeback=False), torch.no_grad():
        assert launched(lambda: model(x), rank + 1) == 0
    with fsdp2.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = fsdp2.optim_state_dict(model, optimizer)
        assert launched(lambda: fsdp2.optim_state_dict_to_load(model, optimizer, state), rank + 1) == 0
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    with fsdp2.no_sync(model):
        model(x).sum().backward()
        assert launched(lambda: model(x).sum().backward()) == 0
    model(x).sum().backward()
    with fsdp2.record_steps(model):
        assert _trace.recorder is not None
    assert _trace.recorder is None and not _trace.recording


@on_ranks(2)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("reduce", [None, torch.float32], ids=str)
@pytest.mark.parametrize("compute", [None, torch.bfloat16], ids=str)
def test_results_are_torchs_bit_for_bit(rank, world, compute, reduce, optimizer):
    """Losses and weights after some steps with micro-batches, where two ranks leave no order to sum in. torch's needs
    gradients of one dtype in a unit, and even sizes are not needed along the first dimension."""
    seen = []
    for implementation in (api.ours, api.theirs):
        model, policy = layers(), api.theirs.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
        for unit in (*model[1:-1], model):
            implementation.fully_shard(unit, mesh=mesh_1d(), mp_policy=policy)
        trained = [p for p in model.parameters() if p.requires_grad]
        steps, losses = optimizer(trained, lr=0.05), []
        data = torch.Generator().manual_seed(rank)
        for number in range(6):
            model.set_requires_gradient_sync(number % 2 == 1)
            tokens = torch.randint(17, (5, 7), generator=data)
            loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())
            loss.backward()
            losses.append(loss.detach())
            if number % 2 == 1:
                steps.step()
                steps.zero_grad()
        seen.append([*losses, *(full(p.detach()) for p in model.parameters())])
    for ours, theirs in zip(*seen, strict=True):
        assert torch.equal(ours, theirs)


@on_ranks(4)
@pytest.mark.parametrize("size", [64, 512])
def test_in_which_dtype_gloo_sums_chunks(rank, world, size):
    """Chunks of 256 KiB or more in float32, smaller ones in ``reduce_dtype``; ``exchange_bytes`` moves the border. With
    ``reduce_dtype`` unset, gradients in bfloat16 of four ranks are summed in bfloat16."""
    torch.manual_seed(0)
    original = nn.Linear(size, size, bias=False)
    inputs = [torch.randn(8, size, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    low = copy.deepcopy(original).bfloat16()
    grads = []
    for x in inputs:
        low.zero_grad()
        low(x.bfloat16()).square().sum().backward()
        grads.append(low.weight.grad.clone())
    exact = torch.stack(grads).float().sum(0) / world
    for border, in_float32 in ((None, size * size * 2 >= 256 << 10), (1, True), (1 << 40, False)):
        model = copy.deepcopy(original)
        policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fsdp2.fully_shard(model, mesh=mesh_1d(), mp_policy=policy)
        model.set_transfer_sizes(exchange_bytes=border)
        model(inputs[rank]).square().sum().backward()
        assert torch.equal(full(model.weight.grad), exact) == in_float32, (border, in_float32)


@on_ranks(2)
@pytest.mark.parametrize("ignored", [False, True])
def test_a_sharded_module_is_copied_but_not_pickled(rank, world, ignored):
    """docs/migration.md says so of ``torch.save``; whatever is sharded, and before and after a step."""
    model = layers()
    options = {"ignored_params": set(model[0].parameters())} if ignored else {}
    fsdp2.fully_shard(model, policy={nn.LayerNorm}, mesh=mesh_1d(), **options)
    for _ in range(2):
        with pytest.raises(Exception, match="state_dict"):
            pickle.dumps(model)
        twin = copy.deepcopy(model)
        assert all(torch.equal(full(a), full(b)) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        model(torch.randint(17, (2, 3))).sum().backward()


class Chosen(nn.ModuleList):
    """Layers that run in the order that the caller gives."""

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        return functools.reduce(lambda y, index: self[index](y), order, x)


def run_in_another_order(rank: int, world: int, any_order: bool) -> None:
    """Use the layers in one order on both ranks, and then in another one on rank 0."""
    torch.manual_seed(0)
    model = Chosen(nn.Linear(6, 6) for _ in range(3))
    for unit in (*model, model):
        fsdp2.fully_shard(unit, mesh=mesh_1d())
    model.set_reduce_scatter_unused_params(True)
    for layer in model if any_order else ():
        layer.set_reduce_scatter_unused_params(True, any_order=True)
    x = torch.randn(2, 6)
    for _ in range(3):
        model(x, (0, 1, 2)).sum().backward()
    for _ in range(3):
        model(x, (0, 1, 2) if rank else (2, 1, 0)).sum().backward()


def test_marked_units_in_another_order_raise_on_every_rank():
    """docs/multimodal.md: experts by their score, not by their index, where the ranks have used them alike before; and
    what the error advises.

    In processes of its own: a rank may have launched a collective that the other does not."""
    for ended in run_apart(functools.partial(run_in_another_order, any_order=False), 2):
        assert "ranks do not do the same" in ended.error, ended
        assert ".set_reduce_scatter_unused_params(True, any_order=True)` for each of them" in ended.error
    for ended in run_apart(functools.partial(run_in_another_order, any_order=True), 2):
        assert ended.status == 0, ended


@on_ranks(2)
def test_each_micro_batch_is_a_recorded_step(rank, world):
    """Three micro-batches of one optimizer step, of which the last reduces; an evaluation after it begins another."""
    model = layers()
    for unit in (*model[1:-1], model):
        fsdp2.fully_shard(unit, mesh=mesh_1d())
    tokens = torch.randint(17, (2, 5))
    with fsdp2.record_steps(model) as record:
        for number in range(3):
            model.set_requires_gradient_sync(number == 2)
            model(tokens).sum().backward()
        with torch.no_grad():
            model(tokens)
    reductions = [sum("reduce" in span.kind for span in step.spans) > 0 for step in record.steps]
    assert reductions == [False, False, True, False]
