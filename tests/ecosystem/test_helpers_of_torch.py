"""torch.testing._internal.common_fsdp, with which torch tests its own, works against ours through ``install()``."""

from __future__ import annotations

import copy
import functools
import inspect
import unittest
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

import fsdp2
from tests.support import api
from tests.support.composition import composes
from tests.support.parity import mesh_1d, mesh_of
from tests.support.pool import on_ranks

pytest.importorskip("expecttest", reason="torch's test helpers need expecttest")
pytestmark = api.fsdp2_only
CASE = unittest.TestCase()
THEIRS = {name: getattr(_fsdp_collectives, name) for name in ("foreach_all_gather", "foreach_reduce")}
# By the names under which torch's groups call them; torch 2.13 renamed the first two.
PUBLIC = {
    "all_gather": "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor",
    "all_reduce": "all_reduce",
}


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
@pytest.mark.parametrize(("name", "times", "group_at"), [("foreach_all_gather", 6, 1), ("foreach_reduce", 3, 2)])
@pytest.mark.parametrize("home", ["_fsdp_collectives", "_fsdp_param_group"])
def test_patched_collectives(rank, world, name, times, group_at, home):
    """What replaces torch's gather and reduction of a group is called with torch's arguments, once per unit."""
    with fsdp2.install():
        common = helpers()
        original = getattr(getattr(torch.distributed.fsdp._fully_shard, home), name)
        torch.manual_seed(1)
        reference = common.MLPStack(16)
        model, calls = shards(copy.deepcopy(reference)), []
        wanted = len(inspect.signature(THEIRS[name]).parameters)

        def patched(*args):
            calls.append((len(args), args[group_at]))
            return original(*args)

        with getattr(common, f"patch_{name}")(patched):
            step(model)
        step(reference)
        assert calls == times * [(wanted, mesh_1d().get_group())]
        common.check_sharded_parity(Asserting(), reference, model)
    assert getattr(getattr(torch.distributed.fsdp._fully_shard, home), name) is THEIRS[name]
    dist.barrier()


@on_ranks(4, limit=120)
@pytest.mark.parametrize("width", [16, 256])  # at 256 two ranks would swap what they have instead of these
def test_replaced_public_collectives(rank, world, width):
    """What replaces torch's public collectives is called with torch's arguments, whatever we would call instead."""
    with fsdp2.install():
        common, mesh = helpers(), mesh_of(2, 2, names=("replicate", "shard"))
        torch.manual_seed(1)
        reference = common.MLPStack(width)
        model = copy.deepcopy(reference)
        policy = fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float64)
        for unit in (*model.children(), model):
            torch.distributed.fsdp.fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        numel = sum(param.to_local().numel() for param in model.parameters())
        gathered, scattered, summed = [], [], []

        def gather(output_tensor, input_tensor, group=None, async_op=False):
            assert output_tensor.numel() == 2 * input_tensor.numel() and group is mesh["shard"].get_group()
            assert input_tensor.dtype == torch.float32
            gathered.append(input_tensor.numel())
            return public["all_gather"](output_tensor, input_tensor, group=group, async_op=async_op)

        def scatter(output):
            assert output.dtype == torch.float64
            scattered.append(output.numel())

        def reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
            assert tensor.dtype == torch.float64 and group is mesh["replicate"].get_group()
            summed.append(tensor.numel())
            return public["all_reduce"](tensor, op=op, group=group, async_op=async_op)

        public = {name: getattr(dist, spelled) for name, spelled in PUBLIC.items()}
        scatter_by = functools.partial(
            common.reduce_scatter_with_assert, Asserting(), public["reduce_scatter"], scatter
        )
        with common.patch_all_gather(gather), common.patch_reduce_scatter(scatter_by), common.patch_all_reduce(reduce):
            step(model, width=width)
        step(reference, width=width)
        assert sum(gathered) == 2 * numel and sum(scattered) == sum(summed) == numel
        common.check_sharded_parity(Asserting(), reference, model)
        step(model, width=width)
        assert sum(gathered) == 2 * numel and sum(scattered) == sum(summed) == numel
    dist.barrier()


@on_ranks(2, limit=120)
@pytest.mark.parametrize("method", ["unshard", "reshard", "post_backward"])
def test_methods_taken_from_torchs_class_do_ours(rank, world, method):
    """torch's own tests wrap the method they find on torch's class; with our groups it does what ours does."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    before = getattr(FSDPParamGroup, method)
    with fsdp2.install():
        common, original = helpers(), getattr(FSDPParamGroup, method)
        torch.manual_seed(1)
        reference = common.MLPStack(16)
        model, calls = shards(copy.deepcopy(reference)), []

        def patched(self, *args, **kwargs):
            calls.append(self._module_fqn)
            return original(self, *args, **kwargs)

        with getattr(common, f"patch_{method}")(patched):
            step(model)
        step(reference)
        assert calls
        common.check_sharded_parity(Asserting(), reference, model)
    assert getattr(FSDPParamGroup, method) is before


@on_ranks(2, limit=120)
def test_patched_ends_of_backward(rank, world):
    """Who counts the calls by which autograd ends a group's backward counts ours: all but the first, which has none."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction

    with fsdp2.install():
        common, original, calls = helpers(), RegisterPostBackwardFunction.backward, []
        torch.manual_seed(1)
        reference = common.MLPStack(16)
        model = shards(copy.deepcopy(reference))

        def counting(*args, **kwargs):
            calls.append(1)
            return original(*args, **kwargs)

        with common.patch_register_post_backward_hook_backward(counting):
            step(model)
        step(reference)
        assert len(calls) == 2
        common.check_sharded_parity(Asserting(), reference, model)


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
