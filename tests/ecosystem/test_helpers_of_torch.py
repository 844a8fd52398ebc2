"""torch.testing._internal.common_fsdp, with which torch tests its own, works against ours through ``install()``."""

from __future__ import annotations

import copy
import unittest
import warnings
from typing import Any

import pytest
import torch

import fsdp2
from tests.support import api
from tests.support.composition import composes
from tests.support.parity import mesh_1d, mesh_of
from tests.support.pool import on_ranks

pytest.importorskip("expecttest", reason="torch's test helpers need expecttest")
pytestmark = api.fsdp2_only


class Asserting(unittest.TestCase):
    """The assertions that ``check_sharded_parity`` calls."""

    def assertEqual(self, first: Any, second: Any, msg: Any = None) -> None:
        if isinstance(first, torch.Tensor):
            torch.testing.assert_close(first, second, msg=msg)
        else:
            super().assertEqual(first, second, msg)


def helpers() -> Any:
    """Return the module, imported while torch's names are ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.testing._internal.common_fsdp as common

    return common


def shards(model: torch.nn.Module) -> torch.nn.Module:
    """Shard the children and the model with what torch's module calls ``fully_shard``."""
    from torch.distributed.fsdp import fully_shard

    for unit in (*model.children(), model):
        fully_shard(unit, mesh=mesh_1d(), reshard_after_forward=True)
    return model


def step(model: torch.nn.Module, seed: int = 0, width: int = 16) -> None:
    """Run one iteration on rows that are the same on all ranks."""
    model(torch.randn(4, width, generator=torch.Generator().manual_seed(seed))).sum().backward()


@on_ranks(2, 4, limit=120)
def test_models_and_parity(rank, world):
    """The models are sharded by ours, and ``check_sharded_parity`` finds shards and gradients as they must be."""
    with fsdp2.install():
        common = helpers()
        assert common.fully_shard is fsdp2.fully_shard
        torch.manual_seed(1)
        reference = common.MLPStack(16)
        model = shards(copy.deepcopy(reference))
        assert isinstance(model, fsdp2.FSDPModule)
        for seed in range(2):
            for one in (reference, model):
                one.zero_grad()
                step(one, seed)
            common.check_sharded_parity(Asserting(), reference, model)
        assert type(model[0]).__name__ == "FSDPMLP"


@composes("tensor parallel", "recomputation")
@on_ranks(4, limit=120)
def test_tensor_parallel_stack(rank, world):
    """``MLPStack.parallelize``: tensor parallelism, then fully_shard, with activation checkpointing."""
    with fsdp2.install():
        common, mesh = helpers(), mesh_of(2, 2, names=("dp", "tp"))
        torch.manual_seed(1)
        reference = common.MLPStack(16)
        model = copy.deepcopy(reference).parallelize(mesh["tp"], mesh["dp"], True)
        for one in (reference, model):
            step(one)
        for (name, whole), mine in zip(reference.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), whole.grad, msg=lambda text, n=name: f"{n}: {text}")


@on_ranks(2, limit=120)
@pytest.mark.parametrize("name", ["patch_unshard", "patch_reshard", "patch_post_backward"])
def test_patched_methods_of_groups(rank, world, name):
    """What is patched into the class of groups is called for ours, in order, and taken out again."""
    with fsdp2.install():
        common = helpers()
        method = name.removeprefix("patch_")
        original = getattr(common.FSDPParamGroup, method)
        model, calls = shards(common.MLPStack(16)), []

        def patched(self, *args, **kwargs):
            calls.append(self._module_fqn)
            return original(self, *args, **kwargs)

        with getattr(common, name)(patched):
            step(model)
        seen = list(calls)
        step(model)
        assert calls == seen and getattr(common.FSDPParamGroup, method) is original
        if method == "post_backward":
            assert [fqn for fqn in dict.fromkeys(calls) if fqn] == ["2", "1", "0"]
        else:
            assert [fqn for fqn in dict.fromkeys(calls) if fqn] == ["0", "1", "2"]


@on_ranks(2, limit=120)
def test_torchs_own_groups_keep_their_methods(rank, world):
    """``replicate`` in torch uses the same class of groups, and its groups go on working while ours are installed."""
    theirs = torch.distributed.fsdp.fully_shard
    with fsdp2.install():
        torch.manual_seed(1)
        reference = torch.nn.Linear(16, 16)
        model = copy.deepcopy(reference)
        theirs(model, mesh=mesh_1d())
        for one in (model, reference):
            step(one)
        torch.testing.assert_close(model.weight.grad.full_tensor(), reference.weight.grad)
