"""Remedies of what ranks are told that differ, or that wait for each other, each tried as it is written.

In processes of their own: ranks that differ end. ``remedies.py`` says what a case is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import StateDictType

import fsdp2
from fsdp2 import fully_shard, hints
from tests.docs.remedies import Call, layers, loss, remedy
from tests.ranks.apart import run_apart, until_logged
from tests.support.parity import mesh_1d


def trained() -> nn.Sequential:
    """Return sharded layers after two steps."""
    module = layers()
    for unit in (*module, module):
        fully_shard(unit)
    for _ in range(2):
        loss(module).backward()
    return module


def apart(program: Callable[[bool, int, int], None]) -> Iterator[Call]:
    """Try ``program`` in two processes, first not as the remedy says, then so."""

    def call() -> None:
        raise RuntimeError(run_apart(partial(program, False), 2)[1].error)

    yield call
    assert [ended.status for ended in run_apart(partial(program, True), 2)] == [0, 0]


def evaluates(on_all: bool, rank: int, world: int) -> None:
    """Evaluate in the middle of a step, on rank 0 or on all ranks."""
    module = trained()
    training = loss(module)
    if on_all or rank == 0:
        loss(module)
    training.backward()


@remedy("outside of `if rank == 0:`", "every rank must run the same units in the same order, after the same", ranks=0)
def evaluation_on_one_rank(rank: int) -> Iterator[Call]:
    """The model is called on all ranks."""
    yield from apart(evaluates)


def skips_a_bad_batch(all_agree: bool, rank: int, world: int) -> None:
    """Train on what each rank can compute with, or on what all ranks can."""
    module = trained()
    for step in range(3):
        x = torch.ones(2, 8 if step != 1 or rank == 1 else 3)
        can = torch.tensor(float(x.shape[1] == 8))
        if all_agree:
            dist.all_reduce(can, dist.ReduceOp.MIN)
        if all_agree and not can:
            continue
        with contextlib.suppress(RuntimeError if rank == 0 and step == 1 else ()):
            module(x).sum().backward()


@remedy("let all ranks agree before the pass that each of them can run it", ranks=0)
def a_batch_that_one_rank_skips(rank: int) -> Iterator[Call]:
    """All ranks skip it."""
    yield from apart(skips_a_bad_batch)


def two_models(in_one_order: bool, rank: int, world: int) -> None:
    """Train two models, in one order on all ranks or not."""
    models = [trained(), trained()]
    for _ in range(2):
        for model in models if in_one_order or rank == 0 else models[::-1]:
            loss(model).backward()


@remedy("run the forwards and backwards of all models in one order on all ranks", ranks=0)
def models_in_another_order(rank: int) -> Iterator[Call]:
    """They run in one order."""
    yield from apart(two_models)


def gathers(on_all: bool, rank: int, world: int) -> None:
    """Gather a weight, on rank 0 or on all ranks, and come to a barrier."""
    module = trained()
    if not on_all:
        until_logged("waits for other ranks", range(world))
    if on_all or rank == 0:
        module[0].weight.full_tensor()
    dist.barrier()


@remedy("A full tensor, a full state dict, an evaluation and a barrier need all ranks: call them outside of", ranks=0)
def full_tensor_on_one_rank(rank: int) -> Iterator[Call]:
    """It is called on all ranks."""

    def call() -> None:
        raise RuntimeError(run_apart(partial(gathers, False), 2)[1].output)

    yield call
    assert [ended.status for ended in run_apart(partial(gathers, True), 2)] == [0, 0]


# ---- shards where full parameters are needed ----


class Encoder(nn.Module):
    """It has a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Compute with a parameter of this unit."""
        return self.layer(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


def encoder() -> Encoder:
    """Return a sharded one, the same on each rank."""
    torch.manual_seed(0)
    return fully_shard(Encoder(), mesh=mesh_1d())


@remedy("call fsdp2.register_fsdp_forward_method(module, ")
def method_beside_forward(rank: int) -> Iterator[Call]:
    """The method is registered, or its parameter is used inside use_weights."""
    x = torch.ones(2, 8)
    expected = encoder()(x)
    yield _explained(lambda: encoder().encode(x))
    module = encoder()
    fsdp2.register_fsdp_forward_method(module, "encode")
    torch.testing.assert_close(module.encode(x), expected)
    module = encoder()
    with fsdp2.use_weights(module):
        torch.testing.assert_close(module.encode(x), expected)


@remedy("use it inside `with fsdp2.use_weights(module):`, where module is the one")
def weight_outside_of_forward(rank: int) -> Iterator[Call]:
    """It is used inside use_weights, or its module is called."""
    x = torch.ones(2, 8)
    expected, module = encoder()(x), encoder()
    yield _explained(lambda: F.linear(x, module.layer.weight))
    with fsdp2.use_weights(module):
        torch.testing.assert_close(F.linear(x, module.layer.weight, module.layer.bias).tanh(), expected)
    torch.testing.assert_close(module(x), expected)


@remedy("write inside `with fsdp2.summon_full_params(module, with_grads=True):`, which copies new values")
def whole_tensor_written_to_a_shard(rank: int) -> Iterator[Call]:
    """It is written inside summon_full_params; inside use_weights, which the error advised, the values were lost."""
    module, values, mask = encoder(), torch.full((8, 8), 3.0), torch.zeros(8, 8)
    module(torch.ones(2, 8)).sum().backward()

    def write(weight: torch.Tensor) -> None:
        with torch.no_grad():
            weight.copy_(values)

    yield _explained(lambda: write(module.layer.weight))
    with fsdp2.summon_full_params(module, with_grads=True):
        write(module.layer.weight)
        module.layer.weight.grad.mul_(mask)
    assert torch.equal(module.layer.weight.full_tensor(), values)
    assert not module.layer.weight.grad.full_tensor().any()


@remedy("on which DTensor cannot compute this operator")
def operator_on_a_shard(rank: int) -> Iterator[Call]:
    """It gets the full tensor."""
    module = encoder()
    yield _explained(lambda: torch.histogram(module.layer.weight.detach(), 4))
    counts = torch.histogram(module.layer.weight.full_tensor().detach(), 4).hist
    assert counts.sum() == 64
    with fsdp2.summon_full_params(module):
        assert torch.equal(torch.histogram(module.layer.weight.detach(), 4).hist, counts)


@remedy("a collective of torch.distributed got a shard")
def collective_on_a_shard(rank: int) -> Iterator[Call]:
    """Ranks are made equal before sharding, and the whole values are sent."""
    module = encoder()
    yield _explained(lambda: dist.broadcast(module.layer.weight.data, 0))
    torch.manual_seed(rank)
    module = Encoder()
    fsdp2.sync_module_states(module)
    plain = module.layer.weight.detach().clone()
    whole = fully_shard(module, mesh=mesh_1d()).layer.weight.full_tensor().detach()
    dist.broadcast(whole, 0)
    assert torch.equal(whole, plain)


@remedy("load_state_dict got shards for the plain parameters of ")
def shards_loaded_into_a_plain_model(rank: int) -> Iterator[Call]:
    """The state dict is made inside state_dict_type, so it is whole."""
    module, plain = encoder(), Encoder()
    yield _explained(lambda: plain.load_state_dict(module.state_dict()))
    with fsdp2.state_dict_type(module, StateDictType.FULL_STATE_DICT):
        plain.load_state_dict(module.state_dict())
    assert torch.equal(plain.layer.weight, module.layer.weight.full_tensor())


def _explained(call: Call) -> Call:
    """Return ``call``, whose error is explained: before Python 3.12 nobody does so until it is shown."""

    def explained() -> None:
        try:
            call()
        except RuntimeError as error:
            hints.explain(error, hints._all_groups())
            raise

    return explained
