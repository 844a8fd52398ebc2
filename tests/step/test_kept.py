"""What stays in memory beyond a pass: weights between micro-batches, and what ``unshard()`` asked for.

Whether it may be used again decides whether a collective runs. A decision that only one rank can see makes the ranks
part ways, or, where nobody compares them, wait for each other for ever. An evaluation leaves nothing.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.ranks.apart import run_apart
from tests.support import api
from tests.support.counting import in_memory
from tests.support.models import children, mlp
from tests.support.parity import assert_gradients, beside_one_process, mesh_1d, shard_each, stack, step_alike
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


def models(**options) -> tuple[nn.Module, nn.Module]:
    """A model whose root has parameters of its own, and the same without sharding."""
    # 3 rows over 2 or 4 ranks: the last shard is smaller, or empty
    return beside_one_process(partial(mlp, 3, 4, 3), lambda module: module[:-1], **options)


def inputs(step: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(step))


def evaluate(module: nn.Module, alone: nn.Module) -> None:
    with torch.no_grad():
        torch.testing.assert_close(module(inputs()), alone(inputs()))


def train(module: nn.Module, alone: nn.Module) -> None:
    """One step of both, in which all ranks have the same data."""
    step_alike(module, alone, lambda one: one(inputs(1)).square().mean())


def shards(module: nn.Module) -> list[nn.Parameter]:
    """The root's parameters, where it shows shards."""
    found = list(children(module)[-1].parameters())
    assert all(isinstance(shard, DTensor) for shard in found)
    return found


# ---- what one rank alone does while full parameters are kept ----


def a_probe_is_stepped(module: nn.Module, alone: nn.Module) -> None:
    """An optimizer that has nothing to do with the model, and is freed at once: a probe on its activations, say."""
    probe = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(probe.parameters())
    probe(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def a_state_dict_is_looked_at(module: nn.Module, alone: nn.Module) -> None:
    """It prints how many entries there are."""
    assert len(module.state_dict()) == len(alone.state_dict())


def a_copy_is_made(module: nn.Module, alone: nn.Module) -> None:
    """It keeps its shards for a comparison later on."""
    copy.deepcopy(module)


LONE = [a_probe_is_stepped, a_state_dict_is_looked_at, a_copy_is_made]


@on_ranks(2)
@pytest.mark.parametrize("kept_by", ["backward", "unshard"])
@pytest.mark.parametrize("act", LONE, ids=lambda act: act.__name__)
def test_what_one_rank_does_alone(rank, world, act: Callable[..., None], kept_by):
    """Rank 0 then gathered anew what the others still had: "ranks do not do the same". The count of optimizer steps was
    one of the process, what an optimizer had held was looked up when it was perhaps freed, and ``state_dict`` freed
    what was kept."""
    module, alone = models()
    module.set_reshard_after_backward(kept_by != "backward")
    for _ in range(3):
        if kept_by == "unshard":
            module.unshard(recurse=True)
        if rank == 0:
            act(module, alone)
        output = module(inputs())
        torch.testing.assert_close(output, alone(inputs()))
        output.sum().backward()


def one_shard_written(rank: int, world: int) -> None:
    """Rank 0 writes to its shard while ``unshard()`` keeps the full parameters on all ranks."""
    module, alone = models()
    written = shards(module)[0]
    module.unshard(recurse=True)
    evaluate(module, alone)
    if rank == 0:
        written.to_local().detach().mul_(0.5)
    evaluate(module, alone)
    train(module, alone)


def test_one_shard_written_while_full_parameters_are_held():
    """One rank alone wrote to its shard. No other can know, so it alone gathers anew, and all raise: they never compute
    with different weights."""
    for ended in run_apart(one_shard_written, 2):
        assert re.search("rank 0: evaluation.*; rank 1: backward", ended.error), ended


# ---- writes ----


@on_ranks(2)
@pytest.mark.parametrize("freed_by", ["reshard", "training"])
def test_values_written_to_full_parameters_are_lost_with_a_warning(rank, world, freed_by):
    """``unshard()``, ``nn.init``, ``reshard()``: the model kept its old values without a word, as with torch."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shard_each(model, fsdp2, mesh=mesh_1d())
    model(torch.ones(1, 8))  # names are known from now on
    model.unshard(recurse=True)
    with fsdp2.summon_full_params(model):
        nn.init.ones_(model[0].weight)  # not lost
    with pytest.warns(UserWarning, match=r"1\.bias: values were written.*Write inside summon_full_params"):
        nn.init.ones_(model[1].bias)
        if freed_by == "reshard":
            model.reshard(recurse=True)
        else:
            model(torch.ones(1, 8)).sum().backward()
    model.unshard(recurse=True)
    assert (model[0].weight == 1).all() and not (model[1].bias == 1).any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(1, 8)).sum().backward()
        model.reshard(recurse=True)


@on_ranks(2)
def test_where_that_warning_is_an_error(rank, world):
    """It was raised before the parameters were freed, so each further ``reshard()`` and forward raised it again."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shard_each(model, fsdp2, mesh=mesh_1d())
    model.unshard(recurse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.init.ones_(model[1].bias)
        with pytest.raises(UserWarning, match=r"bias: values were written"):
            model[1].reshard()
        assert in_memory(model[1]) == []
        model.reshard(recurse=True)
        model(torch.ones(1, 8)).sum().backward()
    assert not (model[1].bias.full_tensor() == 1).any()


@on_ranks(1, 2)
@pytest.mark.parametrize("trained", [False, True])
def test_data_assigned_to_shards(rank, world, trained):
    """``p.data = p.data - lr * p.grad``, or SAM's way back to where it was, is ignored by DTensors: training went on
    without it and without a word (torch's still does)."""
    module, alone = models()
    if trained:
        train(module, alone)
    for parameter in module.parameters():
        parameter.data = parameter.data  # the same memory: nothing to lose
    train(module, alone)
    weight = module.get_parameter("2.weight")
    weight.data = weight.data * 0.5
    text = r"^2\.weight: a tensor was assigned to \.data .* `with torch.no_grad\(\): .* or .* inside summon_full_params"
    with pytest.raises(RuntimeError, match=text):
        module(inputs())
    train(module, alone)
    with api.ours.summon_full_params(module):  # as DoRA's merge_adapter does it
        for one in (module, alone):
            one.get_parameter("2.weight").data = one.get_parameter("2.weight").data * 0.5
    train(module, alone)


class TiedHead(nn.Module):
    """A language model's ends: an embedding, a layer, and a head with the embedding's weight and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 5)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tokens that the positive inputs are."""
        return self.head(self.norm(self.layer(self.embedding((x > 0).long()))))

    def tie_weights(self) -> None:
        """Do what transformers does, which pads the bias to the rows of the weight."""
        self.head.weight = self.embedding.weight
        missing = self.head.weight.shape[0] - self.head.bias.shape[0]
        self.head.bias.data = nn.functional.pad(self.head.bias.data, (0, missing))


@on_ranks(1, 2)
@pytest.mark.parametrize("trained", [False, True])
def test_data_of_a_tied_heads_bias(rank, world, trained):
    """``init_weights`` of transformers, and accelerate when it has loaded a sharded model, end with ``tie_weights``,
    which assigns a bias to its own ``.data``. The next forward of a BERT or a ModernBERT raised for that; torch's
    trains. Nothing is lost, so it warns."""
    module, alone = beside_one_process(TiedHead, lambda module: [module.layer])
    if trained:
        train(module, alone)
    for one in (module, alone):
        one.tie_weights()
    with pytest.warns(UserWarning, match=r"^head\.bias: a tensor was assigned to \.data .* If it was tie_weights\(\)"):
        train(module, alone)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* assigned to")
        train(module, alone)  # one warning for each assignment
    for parameter in (module.norm.bias, module.head.bias):
        parameter.data = parameter.data * 0.5
    with pytest.raises(RuntimeError, match=r"^norm\.bias, head\.bias: a tensor was assigned to \.data"):
        module(inputs())


@on_ranks(1, 2)
@pytest.mark.parametrize("evaluated", [False, True])
def test_full_parameters_written_after_the_backward_that_left_them(rank, world, evaluated):
    """The next forward computed with the written values, and then they were gone."""
    module, _ = models()
    module.set_reshard_after_backward(False)
    module(inputs()).sum().backward()
    with torch.no_grad():
        if evaluated:
            module(inputs())
        module.get_submodule("0").weight.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"^0\.weight: written in place .* call reshard\(\) on the module"):
        module(inputs())


@on_ranks(2)
@pytest.mark.parametrize("by_hand", [False, True])
def test_full_parameters_written_before_a_step(rank, world, by_hand):
    """What gathers ahead of a use, or by hand, found them outdated, and freed the written values without a word."""
    module, _ = beside_one_process(partial(mlp, 3, 4, 3), lambda module: module[::2], reshard_after_forward=False)
    module(inputs())
    with torch.no_grad():
        module.get_submodule("2").weight.mul_(0.5)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match=r"^2\.weight: written in place .* call reshard\(\) on the module"):
        module.get_submodule("2").unshard() if by_hand else module(inputs())


# ---- the unit that forward ends with, which stays in memory from the second iteration on ----


@on_ranks(1, 2)
def test_shards_between_forward_and_backward(rank, world):
    """The unit that forward ended with showed full parameters from the second iteration on. ``zero_grad()`` of a module
    around the model left its gradients, weights written there were lost, and a teacher that follows its student got
    plain tensors among DTensors."""
    module, alone = models(reshard_after_forward=True)
    pairs = [(one, nn.Sequential(one), torch.optim.SGD(one.parameters(), lr=0.1)) for one in (module, alone)]
    for step in range(3):
        for one, parent, optimizer in pairs:
            loss = one(inputs(step)).square().mean()
            assert one is alone or all(isinstance(parameter, DTensor) for parameter in one.parameters())
            parent.zero_grad()
            loss.backward()
            optimizer.step()
        evaluate(module, alone)
        unused = module(inputs(step))  # a forward that no backward follows
        with torch.no_grad():
            for one, _, _ in pairs:
                for parameter in one.parameters():
                    parameter.mul_(0.5)
        del unused
        evaluate(module, alone)


@on_ranks(2)
@pytest.mark.parametrize("look", ["evaluate", "use_weights", "summon"])
def test_what_stays_for_backward_alone_is_not_shown(rank, world, look):
    """After an evaluation or ``summon_full_params``, the unit that forward had ended with showed plain full parameters:
    an average of weights got these for one unit, and shards for the others."""
    module, alone = models()
    for _ in range(2):
        train(module, alone)
    losses = [one(inputs(1)).square().mean() for one in (module, alone)]
    shown = [type(param) for param in module.parameters()]
    assert isinstance(module[0].weight, DTensor)
    if look == "evaluate":
        evaluate(module, alone)
    else:
        with fsdp2.use_weights(module) if look == "use_weights" else fsdp2.summon_full_params(module):
            assert not any(isinstance(param, DTensor) for param in module.parameters())
    assert [type(param) for param in module.parameters()] == shown
    for loss in losses:
        loss.backward()
    assert_gradients(module, alone)


@on_ranks(2)
@pytest.mark.parametrize("before", ["nothing", "a forward", "a step"])
def test_weights_used_without_gradients_are_freed(rank, world, before):
    """They stayed in memory for good, because the block took what it held itself for something the caller had asked
    for: every unit that a metric looked at was whole from then on."""
    module, alone = models()
    if before == "a step":
        train(module, alone)
    elif before == "a forward":
        evaluate(module, alone)
    with torch.no_grad(), fsdp2.use_weights(module):
        assert not any(isinstance(param, DTensor) for param in module.parameters())
    assert all(isinstance(param, DTensor) for param in module.parameters())
    assert not in_memory(module)
    train(module, alone)


@on_ranks(2)
def test_weights_of_two_models_of_which_one_has_run(rank, world):
    """They were gathered under the root of the first one, which from then on took the other's units for its own: its
    ``reset_iter_state()`` dropped the other's gradients."""
    module, alone = models()
    train(module, alone)
    module(inputs(1)).sum().backward()
    unused, _ = models()
    with torch.no_grad(), fsdp2.use_weights(nn.ModuleList([unused, module])):
        pass
    unused.reset_iter_state()
    assert all(param.grad is not None for param in module.parameters())


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_teacher_in_a_recomputed_loss(rank, world, reentrant):
    """A loss in a checkpoint asks a teacher, which then runs inside the student's backward. No pass freed it:
    the whole teacher stayed in memory until its next forward."""
    student, alone = models()
    teacher, reference = models()
    for one in (teacher, reference):
        one.requires_grad_(False)

    def distance(y: torch.Tensor, x: torch.Tensor, like: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            target = like(x) + 1
        return nn.functional.mse_loss(y, target)

    for _ in range(2):
        for one, like in ((student, teacher), (alone, reference)):
            checkpoint(distance, one(inputs(1)), inputs(1), like, use_reentrant=reentrant).backward()
        assert all(isinstance(param, DTensor) for param in teacher.parameters())
        assert not in_memory(teacher)
    assert_gradients(student, alone)


SHOWN = pytest.mark.xfail(strict=True, reason="full parameters are shown, as with torch; docs/differences.md says so")


@on_ranks(2)
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("reshard", [None, True, pytest.param(False, marks=SHOWN)])
def test_parameters_listed_after_an_unused_forward(rank, world, named, reshard):
    """A plain list of parameters, taken between a training forward without a backward (a warm-up, a shape check) and
    the next one, gets the gradients. Only the list of an optimizer did, which is repaired."""
    module, alone = beside_one_process(stack, lambda module: [*module], reshard_after_forward=reshard)
    module(torch.ones(2, 8))
    listed = [parameter for _, parameter in module.named_parameters()] if named else [*module.parameters()]
    for model in (module, alone):
        model(torch.ones(2, 8)).square().mean().backward()
    for parameter, expected in zip(listed, alone.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


@on_ranks(2)
@pytest.mark.parametrize("when", ["before the forward", "after reshard"])
def test_parameters_listed_while_shards_are_shown(rank, world, when):
    """What docs/differences.md says: the list is made before the forward, or after ``reshard``."""
    module, alone = beside_one_process(stack, lambda module: [*module], reshard_after_forward=False)
    listed = [*module.parameters()]
    module(torch.ones(2, 8))
    if when == "after reshard":
        module.reshard(recurse=True)
        listed = [*module.parameters()]
    for model in (module, alone):
        model(torch.ones(2, 8)).square().mean().backward()
    for parameter, expected in zip(listed, alone.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
