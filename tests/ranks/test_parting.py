"""Where ranks do not do the same, every rank raises instead of waiting, and names what each of them was about to do."""

from __future__ import annotations

import gc
import os
import re
import sys
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DistributedSampler

import fsdp2
from fsdp2._torch.collectives import default_store
from tests.ranks.apart import Ended, run_apart
from tests.support.counting import Collectives
from tests.support.parity import assert_gradients, beside_one_process
from tests.support.pool import on_ranks


class Branches(nn.Module):
    """Three units of which the second can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, use_b: bool = True, use_c: bool = True) -> torch.Tensor:
        x = self.a(x)
        if use_b:
            x = x + self.b(x)
        return x + self.c(x) if use_c else x


def sharded(seed: int = 0, *, replicates: bool = False) -> Branches:
    """The model with three units and a root; if it ``replicates``, biases are whole on every rank."""
    torch.manual_seed(seed)
    model = Branches()
    for unit in (model.a, model.b, model.c):
        fsdp2.fully_shard(unit, replicated_params={unit.bias} if replicates else None)
    return fsdp2.fully_shard(model)


def train(model: nn.Module, **branches: bool) -> None:
    """One forward and backward."""
    model(torch.ones(2, 8), **branches).sum().backward()


def skip_first(rank: int, world: int) -> None:
    """The last rank leaves a unit out in the first iteration."""
    train(sharded(), use_b=rank != world - 1)


def skip_later(rank: int, world: int) -> None:
    """The last rank leaves a unit out once all know the order, so that the others do not ask before they go on."""
    model = sharded()
    for step in range(4):
        train(model, use_b=step < 3 or rank != world - 1)


def skip_last_unit_later(rank: int, world: int) -> None:
    """The last rank ends its forward while the others start the gather of one more unit."""
    model = sharded()
    for step in range(4):
        train(model, use_c=step < 3 or rank != world - 1)


def no_gradient(rank: int, world: int, *, accumulates: bool = False) -> None:
    """The output of a unit takes part in the loss of all ranks but the last."""
    model = sharded()
    model.b.register_forward_hook(lambda module, args, output: output.detach() if detach else None)
    for step in range(4):
        detach = step == 3 and rank == world - 1
        if accumulates:
            accumulate(model)
            model.synchronize_gradients()
        else:
            train(model)


def evaluates(rank: int, world: int, *, replicates: bool = False) -> None:
    """The last rank evaluates where the others train."""
    model = sharded(replicates=replicates)
    for _ in range(2):
        train(model)
    with torch.set_grad_enabled(rank != world - 1):
        loss = model(torch.ones(2, 8)).sum()
    if rank != world - 1:
        loss.backward()
    train(model)


def evaluates_with_replicated(rank: int, world: int) -> None:
    """The same where some parameters need no gather: the others do, so no rank can evaluate alone."""
    evaluates(rank, world, replicates=True)


def stops_early(rank: int, world: int) -> None:
    """The last rank has one batch less and goes on to something else, an evaluation."""
    model = sharded()
    for _ in range(4 if rank != world - 1 else 3):
        train(model)
    with torch.no_grad():
        model(torch.ones(2, 8))


def another_is_marked(rank: int, world: int) -> None:
    """The last rank leaves a unit out, and the option is set for another one."""
    model = sharded()
    model.c.set_reduce_scatter_unused_params(True)
    train(model, use_b=rank != world - 1)


def accumulate(model: nn.Module, **branches: bool) -> None:
    """One forward and backward that reduces nothing."""
    model.set_requires_gradient_sync(False)
    train(model, **branches)


def synchronizes_at_first(rank: int, world: int, *, steps: int = 1) -> None:
    """All ranks but the last one reduce what they have accumulated; the last one trains on."""
    model = sharded()
    for step in range(steps):
        accumulate(model)
        if step < steps - 1 or rank != world - 1:
            model.synchronize_gradients()
    train(model)


def synchronizes_later(rank: int, world: int) -> None:
    """The same in an iteration in which every rank knows what the others do, so that they start without a word."""
    synchronizes_at_first(rank, world, steps=4)


def synchronizes_other_gradients(rank: int, world: int) -> None:
    """The output of a unit takes part in no loss of the last rank, so it has no gradients to reduce."""
    no_gradient(rank, world, accumulates=True)


def goes_on_after_an_error(rank: int, *, backward: bool = False, elsewhere: bool = False) -> None:
    """On the last rank, or ``elsewhere`` on each at another unit, an error ends a forward or a ``backward``, and the
    caller goes on with the next batch."""
    model = sharded()
    for step in range(5):
        raises = step == 3 and (elsewhere or rank > 0)
        unit = model.a if elsewhere and rank == 0 else model.b
        hook = unit.register_full_backward_pre_hook if backward else unit.register_forward_pre_hook
        handle = hook(lambda *_: 1 / 0) if raises else None
        try:
            train(model)
        except ZeroDivisionError:
            if backward:
                model.reset_iter_state()
        if handle is not None:
            handle.remove()


def goes_on_after_an_error_in_backward(rank: int, world: int) -> None:
    """The others wait in a reduction of the backward that the last rank has left."""
    goes_on_after_an_error(rank, backward=True)


def errors_at_different_units(rank: int, world: int) -> None:
    """Each rank has launched other gathers: that of one would meet one of the other's next forward."""
    goes_on_after_an_error(rank, elsewhere=True)


def errors_at_different_units_in_backward(rank: int, world: int) -> None:
    """The same in a backward."""
    goes_on_after_an_error(rank, backward=True, elsewhere=True)


APART = {
    skip_first: "model.b",
    skip_later: "model.b",
    skip_last_unit_later: "model.c",
    no_gradient: "model.b",
    another_is_marked: "model.b",
    evaluates: "",
    evaluates_with_replicated: "",
    stops_early: "",
    goes_on_after_an_error_in_backward: "",
    errors_at_different_units: "",
    errors_at_different_units_in_backward: "",
    synchronizes_at_first: "",
    synchronizes_later: "",
    synchronizes_other_gradients: "model.b",
}
"""Programs, and the unit for which the option for skipped units helps, if one does."""


def told(ended: list[Ended]) -> list[str]:
    """What each rank raised; fails if one hung or crashed."""
    for rank, one in enumerate(ended):
        assert one.status == 1, f"rank {rank} ended with {one.status}\n{one.output}"
    return [one.error for one in ended]


@pytest.mark.parametrize("program", APART, ids=lambda program: program.__name__)
def test_every_rank_raises_and_names_what_each_does(program):
    """The error names the line that helps where a rank skips a unit, and none where the ranks run different passes."""
    errors = told(run_apart(program, 2))
    assert len(set(errors)) == 1 and errors[0].startswith("RuntimeError: ranks do not do the same: ")
    assert "rank 0: " in errors[0] and "rank 1: " in errors[0]
    option, unit = "set_reduce_scatter_unused_params(True)", APART[program]
    lines = f"call `{unit}.{option}`, or model.{option} for every unit of the root, on all ranks"
    assert lines in errors[0] if unit else option not in errors[0], errors[0]


def trains_on_batches(drop_last: bool, later: bool, rank: int, world: int) -> None:
    """Train on the batches of a dataset that does not divide: without drop_last the first rank has one more."""
    whole = torch.ones(2 * world + 1, 8)
    sampler: Any = DistributedSampler(whole, world, rank, drop_last=True)
    own = [*sampler] if drop_last else range(len(whole))[rank::world]
    assert len(own) == (2 if drop_last or rank else 3)
    model = sharded()
    for _ in range(2 if later else 0):
        train(model)
    for index in own:
        model(whole[index : index + 1]).sum().backward()
    sys.exit()  # as a program ends: it tells the others


@pytest.mark.parametrize("later", [False, True])
def test_a_rank_with_fewer_batches(later):
    """The others said "rank 1 ended" and nothing more. They say what both do, and the remedy, which helps."""
    waits, ended = run_apart(partial(trains_on_batches, False, later), 2)
    assert ended.status == 0 and waits.status == 1, (ended, waits)
    assert re.fullmatch(
        r"RuntimeError: rank 1 ended, after the end of backward.*; rank 0 waits for it in (gather .* in )?forward\. "
        r"Expected: every rank runs as many forwards and backwards as the others\. Give all ranks the same number of "
        r"batches \(drop_last=True of DistributedSampler and DataLoader\), or stop all ranks with the first",
        waits.error,
    ), waits.error
    done = run_apart(partial(trains_on_batches, True, later), 2)
    assert [one.status for one in done] == [0, 0], done


class Layers(nn.Module):
    """Layers of which one can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, left_out: int | None) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == left_out else torch.tanh(layer(x))
        return x


def with_line(line: str, rank: int, world: int) -> None:
    """The last rank leaves a layer out; ``line`` is run before the first forward."""
    model, alone = beside_one_process(Layers, lambda model: model.layers)
    exec(line, {"model": model})
    x = torch.ones(2, 8)
    for _ in range(3):
        model.zero_grad()
        model(x, 1 if rank == world - 1 else None).sum().backward()
    sum(alone(x, 1 if one == world - 1 else None).sum() / world for one in range(world)).backward()
    assert_gradients(model, alone)


def test_the_line_that_the_error_names_helps():
    """The line can be copied. Where the option was set for the skipped unit alone, ranks that prefetched the next one
    instead of it parted from the others again, in backward."""
    (error,) = set(told(run_apart(partial(with_line, ""), 2)))
    (line,) = re.findall("call `(.*?)`", error)
    assert line == "model.layers[1].set_reduce_scatter_unused_params(True)"
    ended = run_apart(partial(with_line, line), 2)
    assert [one.status for one in ended] == [0, 0], ended


class Experts(nn.Module):
    """Two experts in one unit, which get the rows of a batch by their sign."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [x[x[:, 0] < 0], x[x[:, 0] >= 0]]
        routed = [expert(own) for expert, own in zip(self.experts, rows) if len(own)]
        return x + 0.01 * (self.before(x) + torch.cat(routed))


def no_rows_for_an_expert(line: str, rank: int, world: int) -> None:
    """In the first step, the last rank has no rows for an expert of each layer, so no gradients of it."""
    model, alone = beside_one_process(lambda: nn.Sequential(*(Experts() for _ in range(6))), list)
    exec(line, {"model": model})
    inputs = [torch.ones(4, 32) for _ in range(world)]
    for own in inputs[:-1]:
        own[:2] *= -1
    model(inputs[rank]).sum().backward()
    sum(alone(own).sum() / world for own in inputs).backward()
    assert_gradients(model, alone)


def test_ranks_with_other_gradients_in_the_first_backward():
    """Nobody knows yet what the others send, and some send more of a unit than others wait for: gloo aborted the
    process in the first step of mixtures of experts. The remedy did not say that parts of units can be skipped, and
    the first names of a longer list do not say what differs."""
    (error,) = set(told(run_apart(partial(no_rows_for_an_expert, ""), 2)))
    assert re.search(r"rank 0: reduce '5'.*rank 1: reduce '5'.*, \.\.\., without 5\.experts\.0\.weight, ", error)
    (line,) = re.findall("parameters of '5', or, if ranks may skip some, call `.*?`, or (.*?) for every unit", error)
    ended = run_apart(partial(no_rows_for_an_expert, line), 2)
    assert [one.status for one in ended] == [0, 0], ended


def sees_alone(rank: int, world: int, *, checks: bool) -> None:
    """The forward clamps a unit that was gathered ahead; rank 0 alone has a value that this changes."""
    fsdp2.set_rank_checks(checks)
    model = sharded()
    if rank == 0:
        with torch.no_grad():
            model.b.weight.to_local()[0, 0] = 5
    for _ in range(2):
        train(model)
    shard = model.b.weight

    def clamp(*unused: object) -> None:
        shard.data.clamp_(max=1)

    model.a.register_forward_hook(clamp)
    train(model)


def test_a_write_that_one_rank_alone_can_see():
    """No version counter shows it. Rank 0 gathers again, so all ranks raise; without checks it would wait for ever, so
    it raises instead of computing with the values from before, and ends the others."""
    (error,) = set(told(run_apart(partial(sees_alone, checks=True), 2)))
    assert "rank 0: gather 'b' in forward; rank 1: gather 'c' in forward" in error
    ended = run_apart(partial(sees_alone, checks=False), 2)
    assert [one.status for one in ended] == [1, 1], ended
    assert "would compute with the old values" in ended[0].error, ended


def dies_early(rank: int, world: int) -> None:
    """The last rank is killed before its first forward."""
    model = sharded()
    if rank == world - 1:
        os._exit(9)
    train(model)


def test_a_rank_that_dies_before_its_first_forward_is_noticed():
    """Which one it was the launcher reports; there is nothing yet that the others could compare."""
    ended = run_apart(dies_early, 3)
    assert [one.status for one in ended] == [1, 1, 9], [one.output for one in ended]
    text = "a rank ended before it came to the first forward"
    assert all(text in one.error for one in ended[:2]), [one.output for one in ended]


def fails_in_backward(rank: int, world: int) -> None:
    """A backward raises on one rank when gradients are on their way that the other rank never sends; then the model is
    dropped, as before another attempt with a smaller batch."""
    model = sharded()
    model.set_reshard_after_forward(False)
    for _ in range(3):
        train(model)

    def broken(grad: torch.Tensor) -> None:
        raise ValueError("a broken hook")

    store = default_store().clone()
    if rank == 0:
        model.b.register_forward_hook(lambda module, args, output: output.register_hook(broken) and None)
        with pytest.raises(ValueError, match="a broken hook"), Collectives() as sent:
            train(model)
        assert sent.reductions  # which the other rank never joins
        del model
        gc.collect()
        store.set("collected", "")
    else:
        model(torch.ones(2, 8))
        store.wait(["collected"])


def test_the_garbage_collector_waits_for_no_other_rank():
    """What a failed backward had sent was waited for when the model was garbage, for as long as the process group's
    timeout: nobody compared ranks any more, since the model was gone."""
    ended = run_apart(fails_in_backward, 2)
    assert [one.status for one in ended] == [0, 0], ended


def on_meta(rank: int, world: int) -> None:
    """One rank forgot to give its parameters values."""
    with torch.device("meta" if rank == 1 else "cpu"):
        model = Branches()
    fsdp2.fully_shard(model)
    train(model)


def policy(**formats: object) -> fsdp2.CompressionPolicy:
    """One for small parameters."""
    return fsdp2.CompressionPolicy(block=16, min_numel=16, **formats)


def other_policy(rank: int, world: int) -> None:
    """One rank was told to compress gathers."""
    model = sharded()
    model.set_compression(policy(gather=torch.int8) if rank == 1 else None)
    train(model)


def policy_later(rank: int, world: int) -> None:
    """One rank is told otherwise after a step, how gradients are reduced alone."""
    model = sharded()
    for one in (policy(reduce=torch.int8), policy(reduce="int4") if rank == 1 else policy(reduce=torch.int8)):
        model.set_compression(one)
        train(model)


def test_another_policy_later_is_noticed_before_its_first_gather():
    text = "gather 'a' in forward with a.weight: reduce="
    errors = told(run_apart(policy_later, 2))
    assert all(f"{text}int4" in error and f"{text}torch.int8" in error for error in errors), errors


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (on_meta, "should be materialized from meta device"),
        (
            other_policy,
            "rank 1: a.weight is (8, 8) torch.float32 sharded along 0, gather=torch.int8 in blocks of 16, rank 0",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_different_models_are_told_apart_at_the_first_forward(program, text):
    errors = told(run_apart(program, 2))
    assert all(text in error for error in errors), errors


def of_one_seed(rank: int) -> Branches:
    """Ranks built the model alike."""
    return sharded()


def of_other_seeds(rank: int) -> Branches:
    """Ranks built it from different seeds."""
    return sharded(seed=rank)


def loaded(rank: int) -> Branches:
    """So they did, but then they loaded weights."""
    model = sharded(seed=rank)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    return model


def synced(rank: int) -> Branches:
    """So they did, but made it equal before they sharded it."""
    torch.manual_seed(rank)
    model = Branches()
    fsdp2.sync_module_states(model)
    return fsdp2.fully_shard(model)


def written(rank: int) -> Branches:
    """Ranks built it alike, and then one wrote to its own shard, so that it has no first values to show."""
    model = sharded()
    if rank == 1:
        model.a.weight.to_local().detach().mul_(0.5)
    return model


@on_ranks(2)
@pytest.mark.parametrize("build", [of_one_seed, of_other_seeds, loaded, synced, written], ids=lambda one: one.__name__)
def test_different_seeds_are_warned_of(rank, world, build):
    """Rank 0 alone warns, and points to the user's line: it pointed to one of fsdp2."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(build(rank))
    told = [one for one in caught if "other values" in str(one.message)]
    assert len(told) == (rank == 0 and build is of_other_seeds), told
    for one in told:
        assert one.filename == __file__
        assert re.match(
            r"a\.weight: rank 1 started from other values than rank 0 \(on rank 1 it begins with .*"
            r"torch\.manual_seed with the same seed on every rank",
            str(one.message),
        )


def other_seed_strictly(rank: int, world: int) -> None:
    """Ranks built the model from different seeds where warnings are errors."""
    warnings.simplefilter("error")
    train(of_other_seeds(rank))


def test_where_that_warning_is_an_error():
    """Rank 0, which alone shows it, raised it, and the other waited for that rank in the first gather."""
    ended = run_apart(other_seed_strictly, 2)
    text = "UserWarning: a.weight: rank 1 started from other values than rank 0"
    assert all(one.status == 1 and text in one.output for one in ended), ended


def other_groups(rank: int, world: int) -> None:
    """Some ranks have made groups that others know nothing of."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    if rank < 2:
        DeviceMesh("cpu", [0, 1])
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    torch.manual_seed(0)
    model, alone = (nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2))) for _ in range(2))
    alone.load_state_dict(model.state_dict())
    fsdp2.fully_shard(model[0], mesh=pairs)  # whose ranks get a group by use_full_params
    fsdp2.fully_shard(model, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"), reshard_after_forward=2)
    model.set_separate_reduce_scatter_group(True)
    optimizers = [fsdp2.use_full_params(torch.optim.Muon(model.parameters())), torch.optim.Muon(alone.parameters())]
    for _ in range(2):
        for one, optimizer in zip((model, alone), optimizers):
            one(torch.eye(8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected)


def test_ranks_have_made_different_process_groups():
    """The ranks of a new group find each other in the store by a name, which torch makes of the number of groups that a
    process has made or is in. Where these numbers differed, all hung. With ``reshard_after_forward=<int>`` two pipeline
    stages hung even where the numbers were equal, because each made its groups under the same names."""
    ended = run_apart(other_groups, 4)
    assert [one.status for one in ended] == [0] * 4, ended
