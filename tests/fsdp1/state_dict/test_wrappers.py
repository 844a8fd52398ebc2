"""Names are those of the plain model under activation checkpointing and compilation, in source, target or both."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fsdp2
from tests.fsdp1.state_dict.kinds import assert_equal, build, rows, save, shard, using, whole
from tests.support import api
from tests.support.models import Recurrent
from tests.support.parity import mesh_1d
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


compiled = partial(torch.compile, backend="eager")
"""Names do not depend on the backend, and the default one takes a second to import."""


def wrapped(how: str, seed: int = 3) -> Any:
    """Return the model, sharded and wrapped: parts or all of it, before or after."""
    module: Any = build(seed)
    if how == "before":
        module.first = checkpoint_wrapper(module.first)
        module.last = checkpoint_wrapper(module.last)
    if how == "inside":
        module.first[0] = checkpoint_wrapper(module.first[0])
    if how == "compiled first":
        module.first = compiled(module.first)
    shard(module)
    if how == "after":
        module.first = checkpoint_wrapper(module.first)
        module.tied = checkpoint_wrapper(module.tied)
    if how == "compiled":
        module.first = compiled(module.first)
        module.tied = compiled(module.tied)
    if how == "both":
        module.first = compiled(checkpoint_wrapper(module.first))
        module.last = checkpoint_wrapper(compiled(module.last))
    if how == "around":
        module = checkpoint_wrapper(module)
    if how == "compiled around":
        module = compiled(module)
    return module


HOWS = ("plain", "before", "inside", "after", "compiled", "compiled first", "both", "around", "compiled around")


@on_ranks(2)
@pytest.mark.parametrize("kind", ["full", "full_on_rank0", "sharded", "local"])
@pytest.mark.parametrize("how", HOWS)
def test_names(rank, world, how, kind):
    """The same for every kind and every wrapper, the versions of modules beside them included."""
    names = list(build().state_dict())
    state = save(wrapped(how), kind)
    assert sorted(state) == ([] if kind == "full_on_rank0" and rank else sorted(names))
    if kind == "full":
        plain = build(seed=9)
        plain.load_state_dict(state)
        assert_equal(plain.state_dict(), build().state_dict())
        assert not any("_orig_mod" in name for name in state._metadata)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["full", "local"])
@pytest.mark.parametrize("target", HOWS)
@pytest.mark.parametrize("source", ["plain", "before", "after", "compiled", "around"])
def test_into_each_other(rank, world, source, target, kind):
    """What any of them saves every other loads."""
    state = save(wrapped(source, seed=4), kind)
    module = wrapped(target)
    with using(module, kind):
        result = module.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    assert torch.equal(save(module, "full")["first.0.weight"], build(seed=4).first[0].weight)
    assert_equal(dict(sorted(save(module, "full").items())), dict(sorted(build(seed=4).state_dict().items())))


@on_ranks(2)
@pytest.mark.parametrize("target", [how for how in HOWS if "around" not in how])
def test_without_a_setting(rank, world, target):
    """A plain model's state dict loads under wrappers although nothing is set."""
    module = wrapped(target)
    module.load_state_dict(build(seed=4).state_dict())
    assert torch.equal(save(module, "full")["tied.bias"], build(seed=4).tied.bias)
    module.load_state_dict(module.state_dict())  # by torch's own names


@on_ranks(2)
@pytest.mark.parametrize("strict", [True, False])
def test_plain_names_outside_of_a_compiled_model(rank, world, strict):
    """The same names came up as missing and as unexpected. The error says where to load them; both ways work."""
    state = build(seed=9).state_dict()
    module = wrapped("compiled around")
    with pytest.raises(RuntimeError) as error:
        module.load_state_dict(state, strict=strict)
    text = str(error.value)
    assert "names without '_orig_mod.', such as 'first.0.weight', expected '_orig_mod.first.0.weight'" in text
    if strict:
        assert (
            'Missing key(s) in state_dict: "_orig_mod.' in text and 'Unexpected key(s) in state_dict: "first.' in text
        )
    assert_equal(whole(module._orig_mod), build().state_dict())
    module._orig_mod.load_state_dict(state)
    assert_equal(whole(module._orig_mod), state)
    module = wrapped("compiled around")
    with using(module, "full"):
        module.load_state_dict(state)
    assert_equal(whole(module._orig_mod), state)


@on_ranks(2)
@pytest.mark.parametrize("how", HOWS)
def test_names_that_do_not_match(rank, world, how):
    """Missing and unexpected keys come back without what the wrappers add."""
    module = wrapped(how)
    state = build(seed=4).state_dict()
    for name in ("first.0.weight", "last.weight", "tied.bias"):
        del state[name]
    state["first.more"] = state["last.more"] = torch.ones(1)
    with using(module, "full"):
        result = module.load_state_dict(state, strict=False)
        assert sorted(result.missing_keys) == ["first.0.weight", "last.weight", "tied.bias"]
        assert sorted(result.unexpected_keys) == ["first.more", "last.more"]
        with pytest.raises(RuntimeError, match=r'Missing key.*"last.weight"') as error:
            module.load_state_dict(state)
        assert "_checkpoint_wrapped_module" not in str(error.value) and "_orig_mod" not in str(error.value)
        state = build(seed=4).state_dict() | {"first.2.weight": torch.ones(2, 2)}
        before = save(module, "full")
        with pytest.raises(RuntimeError, match=r"size mismatch for first.2.weight"):
            module.load_state_dict(state)
        assert_equal(save(module, "full"), before)


@on_ranks(2)
def test_sharded_wrappers(rank, world):
    """The wrapper itself may be what was sharded, in either order."""
    for make in (checkpoint_wrapper, torch.compile):
        module = build()
        module.first = make(module.first)
        for unit in (module.first, module):
            fsdp2.fully_shard(unit, mesh=mesh_1d())
        module.load_state_dict(build(seed=4).state_dict())
        assert_equal(save(module, "full"), build(seed=4).state_dict())
        assert list(save(module.first, "full")) == list(build().first.state_dict())
        module.first.load_state_dict(build(seed=5).first.state_dict())
        assert torch.equal(whole(module.last)["weight"], build(seed=4).last.weight)
        assert_equal(save(module.first, "full"), build(seed=5).first.state_dict())


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", ["full", "sharded", "local"])
def test_shared_modules(rank, world, kind):
    """A module with two names is saved and loaded under both, and trained as one."""
    torch.manual_seed(1)
    plain, module = Recurrent(), Recurrent()
    module.load_state_dict(plain.state_dict())
    for unit in (module.cell, module):
        fsdp2.fully_shard(unit, mesh=mesh_1d())
    state = save(module, kind)
    assert list(state) == list(plain.state_dict())
    if kind == "full":
        assert_equal(state, plain.state_dict())
        assert state["cell.0.weight"] is state["alias.0.weight"]
    other = Recurrent()
    for unit in (other.cell, other):
        fsdp2.fully_shard(unit, mesh=mesh_1d())
    other.load_state_dict(state)
    assert other.cell is other.alias and torch.equal(other(rows()[:, :6]), plain(rows()[:, :6]))


def test_torchs_names_of_wrapped_modules():
    """The infixes are what torch calls them."""
    assert [name for name, _ in checkpoint_wrapper(nn.Linear(2, 2)).named_children()] == ["_checkpoint_wrapped_module"]
    assert [name for name, _ in compiled(nn.Linear(2, 2)).named_children()] == ["_orig_mod"]
