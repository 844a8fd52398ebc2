"""What is gathered ahead of its use, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2._trace import listening
from fsdp2.engine.group import FSDPParamGroup
from tests.support import api
from tests.support.counting import events, in_memory
from tests.support.fake import fake_mesh
from tests.support.models import mlp
from tests.support.parity import beside_one_process, mesh_of, on_one_axis, sharded, stack
from tests.support.pool import on_ranks


@contextmanager
def gathers_asked_for() -> Iterator[list[str]]:
    """Yield the names of groups whose ``unshard`` is called while they are sharded and no gather is under way."""
    asked: list[str] = []
    unshard = FSDPParamGroup.unshard

    def noting(group: FSDPParamGroup, *args: bool) -> None:
        if group.is_sharded and group._all_gather_result is None:
            asked.append(group._module_fqn)
        unshard(group, *args)

    with mock.patch.object(FSDPParamGroup, "unshard", noting):
        yield asked


@on_ranks(2)
def test_prefetch_lists_of_some_units(rank, world):
    """Units with prefetch lists of their own were left out of the recorded order, so the units before them took the
    next one without a list for their successor: the root gathered the last layer first. Found by torch's own tests."""
    module = stack(4, layers=4).append(nn.Tanh())  # the first and the last are the root's own
    layers = module[1:4]
    for unit in (*layers, module):
        api.ours.fully_shard(unit, mesh=mesh_of(world), reshard_after_forward=True)
    for layer, following in zip(layers, layers[1:]):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
    with gathers_asked_for() as started:
        for step in range(3):
            started.clear()
            module(torch.ones(2, 4)).sum().backward()
            last = [] if step else ["3"]  # stays for backward from the second iteration on
            assert started == ["", "1", "2", "3", "", *last, "2", "1"]


@api.fsdp2_only
@pytest.mark.parametrize(("outputs", "stays"), [(31, True), (32, False)])
def test_the_last_unit_does_not_stay_below_a_large_loss(outputs, stays):
    """A model whose last matrix has at least four times more outputs than inputs has a loss that takes more memory than
    a unit. What its first matrix is does not matter."""
    with fake_mesh(2) as mesh:
        build = lambda: nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, outputs))
        model = sharded(build, fsdp2, lambda module: module[1:2], mesh=mesh)
        for _ in range(2):
            loss = model(torch.zeros(2, dtype=torch.int64)).sum()
            with gathers_asked_for() as asked:
                loss.backward()
    assert asked == ([] if stays else ["1"])


@api.fsdp2_only
def test_backward_gathers_ahead_behind_weights_that_the_loss_uses():
    """It begins with them, and the last unit of the forward comes next."""
    with fake_mesh(2) as mesh:
        model = sharded(stack, fsdp2, mesh=mesh, reshard_after_forward=True)
        hidden = model(torch.ones(2, 8))
        with fsdp2.use_weights(model[0]):
            loss = nn.functional.linear(hidden, model[0].weight).sum()
        seen = events(loss.backward)
    assert seen.index(("unshard", "2")) < seen.index(("pre_backward", "2"))


@api.fsdp2_only
def test_a_teacher_on_replicas_gathers_ahead():
    """One replica may evaluate alone, so other forwards must not follow its evaluation. The next evaluation
    did not either, so a teacher, which is only evaluated, waited for each gather."""
    with fake_mesh(2, 2, names=("replicate", "shard")) as mesh:
        model = sharded(partial(stack, 4), fsdp2, lambda module: module[:2], mesh=mesh)
        events: list[str] = []
        with torch.no_grad(), listening(lambda event, name: events.append(f"{event} {name}")):
            for _ in range(2):
                events.clear()
                model(torch.ones(2, 4))
    assert events.index("unshard 1") < events.index("post_forward 0")


class Distilled(nn.Module):
    """A student with a teacher that computes without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = stack(4, layers=2), stack(4, layers=3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return how far the two are apart."""
        found = self.student(x)
        with torch.no_grad():
            wanted = self.teacher(x)
        return (found - wanted).square()


@api.fsdp2_only
def test_a_teacher_is_gathered_once():
    """The first of its units waits for its gather, as the forward may have updated it just before. The others are
    gathered ahead by that one, and not once more when they are used."""
    with fake_mesh(2) as mesh:
        model = sharded(Distilled, fsdp2, lambda module: [*module.student, *module.teacher], mesh=mesh)
        for _ in range(3):
            found = events(lambda: model(torch.ones(2, 4)))
    names = ["student.0", "student.1", "teacher.0", "teacher.1", "teacher.2"]
    assert [name for event, name in found if event == "unshard"] == names
    assert found.index(("unshard", "teacher.2")) < found.index(("post_forward", "teacher.1"))


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_gathers_asked_for_once(rank, world, reshard):
    """Who wraps ``unshard`` of groups to record it, as torch's own tests do, saw it called twice for the first layer of
    a second forward before backward: once ahead of time and in vain, since the last forward had gathered the kept root
    before, and once for the layer's forward."""
    module = stack(4)
    for unit in (*module[:2], module):
        api.ours.fully_shard(unit, mesh=mesh_of(world), reshard_after_forward=reshard)
    with gathers_asked_for() as asked:
        for _ in range(3):
            module(torch.ones(2, 4))
    # No backward comes, so no forward keeps the unit that it ends with.
    expected = {
        True: ["", "0", "1"] * 3,
        None: ["", "0", "1", "0", "1", "0", "1"],
        False: ["", "0", "1"],
    }
    assert asked == expected[reshard], asked


class Branches(nn.Module):
    """Two outputs that share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trunk(x)
        return self.left(x), self.right(x)


@api.fsdp2_only
@on_ranks(2)
def test_a_gather_for_the_next_of_several_backwards(rank, world):
    """The first of two backwards on one forward gathers the branch that it meets next in reverse, which only the second
    one uses. It was dropped at the end of the first, to be gathered again by the second, and that one's other gathers
    were never started ahead of time: each was another order than the last backward's."""
    module = sharded(Branches)
    inputs, events = torch.full((2, 4), rank + 1.0), []

    def backward(output: torch.Tensor, *, last: bool) -> list[tuple[str, str]]:
        module.set_is_last_backward(last)
        events.clear()
        output.sum().backward(retain_graph=not last)
        return [event for event in events if event[0] in ("unshard", "post_backward")]

    with listening(lambda event, name: events.append((event, name))):
        for step in range(3):
            left, right = module(inputs)
            first = [("unshard", "right"), ("unshard", "left"), ("post_backward", "right"), ("unshard", "trunk")]
            first = first[step > 0 :]  # from the second iteration on the right one, which runs last, stays
            assert backward(right, last=False)[: len(first)] == first
            assert backward(left, last=True)[:2] == [("unshard", "trunk"), ("post_backward", "left")]
        backward(module(inputs)[1], last=False)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)  # what was gathered for a backward that never comes is not what a forward wants
    weight, bias = module.left.weight.full_tensor(), module.left.bias.full_tensor()
    trunk = nn.functional.linear(inputs, module.trunk.weight.full_tensor(), module.trunk.bias.full_tensor())
    torch.testing.assert_close(module(inputs)[0], nn.functional.linear(trunk, weight, bias))


def _units() -> nn.Sequential:
    return sharded(lambda: nn.Sequential(*[mlp(4, 4) for _ in range(5)]))


def _iteration(module: nn.Module) -> list[tuple[str, str]]:
    events: list[tuple[str, str]] = []
    with listening(lambda event, name: events.append((event, name))):
        module(torch.ones(2, 4)).sum().backward()
    return events


@on_ranks(2)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_prefetch_set_between_iterations(rank, world, direction):
    """Units were told what to prefetch after the first iteration, and never did so: a gather that starts earlier than
    in the last pass was left for later, as one that other ranks may not have come to, in every pass from then on. Only
    what was set before the first forward counted. The setters have the ranks agree on the order of gathers anew."""

    def prefetch_others(module):  # the one after the next first, so that the order of gathers is another
        units = list(module) if direction == "forward" else list(module)[::-1]
        for unit, after, last in zip(units, units[1:], units[2:], strict=False):
            setter = getattr(unit, f"set_modules_to_{direction}_prefetch")
            setter([last, after])

    early, late = _units(), _units()
    prefetch_others(early)
    _iteration(early)
    _iteration(late)
    before = _iteration(late)
    expected = _iteration(early)
    prefetch_others(late)
    assert _iteration(late) == expected != before
    prefetch_others(late)  # nothing new: the ranks go on as they agreed
    assert _iteration(late) == expected


@on_ranks(2)
def test_the_event_of_a_stream_of_the_cpu(rank, world):
    """Scripts that run on any device record the event after the optimizer's step with the current stream of theirs. A
    stream of a CPU records None, which ``set_post_optim_event`` refused."""
    module = _units()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.register_step_post_hook(
        lambda *_: module.set_post_optim_event(torch.get_device_module("cpu").current_stream().record_event())
    )
    losses = []
    for _ in range(2):
        loss = module(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]


@api.fsdp2_only
@pytest.mark.parametrize("second", ["whole", "added before the first forward", "added behind it"])
def test_all_groups_of_the_next_unit_are_gathered_ahead(second):
    """Only its first was, behind which the second was waited for; and in backward each group of a unit had a gather for
    later between it and the next, on a communicator that takes one after the other. Where parameters were added to a
    unit (adapters), they were the first, and all others came late."""
    with fake_mesh(8) as mesh:
        module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        for unit in (*module, module):
            whole = {unit.weight} if isinstance(unit, nn.Linear) and second == "whole" else set()
            fsdp2.fully_shard(unit, mesh=mesh, replicated_params=whole, reshard_after_forward=True)
        if second == "added behind it":
            module(torch.ones(1, 8)).sum().backward()
        for layer in module if second != "whole" else ():
            layer.adapter = nn.Parameter(torch.ones(8))
        seen: list[str] = []
        for _ in range(2):
            seen.clear()
            with listening(lambda event, name: seen.append(f"{event} {name}")):
                module(torch.ones(1, 8)).sum().backward()
    gathers = [one for one in seen if one.split()[0] in ("unshard", "pre_forward", "pre_backward")]
    for phase, order in (("pre_forward", (0, 1, 2, 3)), ("pre_backward", (3, 2, 1, 0))):
        for unit, following in zip(order, order[1:]):
            entered = [i for i, one in enumerate(gathers) if one == f"{phase} {unit}"]
            ahead = [i for i, one in enumerate(gathers) if one == f"unshard {following}"]
            ahead = [i for i in ahead if entered[0] < i]
            left = gathers.index(f"{phase} {following}", entered[-1])
            assert len(entered) == 2 and entered[-1] < ahead[0] < ahead[1] < left


@on_ranks(2)
def test_a_gather_that_backward_does_not_use_is_dropped(rank, world):
    """A list names a unit that backward is through with."""
    first, last = module = stack(layers=2)
    on_one_axis(module, fsdp2)
    first.set_modules_to_backward_prefetch([last])
    seen: list[str] = []
    with listening(lambda event, name: seen.append(f"{event} {name}")):
        module(torch.ones(2, 8)).sum().backward()
    assert seen.count("unshard 1") == 3 and "1" not in in_memory(module)


@api.fsdp2_only
@on_ranks(1, 2)
@pytest.mark.parametrize("async_op", [False, True])
def test_what_a_hook_gathers_in_backward_is_freed(rank, world, async_op):
    """``unshard()`` of a unit that backward was through with left it in memory behind the backward. Its modules showed
    full parameters, which have no gradient: ``clip_grad_norm_(model.parameters())`` left those of its shards out."""
    module = stack(layers=2)
    on_one_axis(module, fsdp2)
    for _ in range(2):
        inputs = torch.ones(2, 8, requires_grad=True)
        inputs.register_hook(lambda grad: module[1].unshard(async_op) and None)
        module(inputs).sum().backward()
        assert all(parameter.grad is not None for parameter in module.parameters())
        assert not in_memory(module)


@api.fsdp2_only
@on_ranks(2)
def test_a_list_names_units_of_another_root(rank, world):
    """A layer of one model names the first layer of the next. The gather was shown to the first model's observer, which
    raised ``KeyError: FSDPParamGroup``. The same list is followed once both run under one root."""
    first, last = parts = nn.Sequential(_units(), _units())
    first[-1].set_modules_to_forward_prefetch([last[0]])
    last[0].set_modules_to_backward_prefetch([first[-1]])
    for _ in range(2):
        last(first(torch.ones(2, 4))).sum().backward()
    api.ours.fully_shard(parts, mesh=mesh_of(world))
    _iteration(parts)
    events = _iteration(parts)
    assert events.index(("unshard", "1.0")) < events.index(("post_forward", "0.4"))


class Manual(nn.Module):
    """Steps its optimizer inside its forward: after a unit, or after a backward that ends there, and clips weights."""

    def __init__(self, *, backward: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.backward, self.optimizer = backward, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.backward:
            self.second(hidden.detach()).square().mean().backward()
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.clamp_(-0.4, 0.4)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.second(self.first(x) if self.backward else hidden)


@on_ranks(1, 2)
@pytest.mark.parametrize("backward", [False, True])
def test_an_optimizer_steps_inside_a_forward(rank, world, backward):
    """What the forward, or the backward inside it, had gathered ahead was used after the step: the old weights."""
    both = beside_one_process(partial(Manual, backward=backward))
    for _ in range(4):
        outputs = [model(torch.ones(2, 4)) for model in both]
        torch.testing.assert_close(*outputs)
        for output, model in zip(outputs, both):
            output.square().mean().backward()
            model.optimizer = torch.optim.SGD(model.parameters(), 0.5, foreach=True)


class Extra(nn.Module):
    """Layers of which a training forward uses one more than an evaluation, between the others or behind them."""

    def __init__(self, *, between: bool, trains: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.layers, self.extra = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 4)
        self.between, self.trains = between, trains

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.layers
        layers = [first, self.extra, *others] if self.between else [first, *others, self.extra]
        for layer in layers if self.trains(self) else self.layers:
            x = torch.tanh(layer(x))
        return x


def ahead(run: Callable[[], object]) -> list[str]:
    """Return the names of the units whose gather ``run`` starts before the unit before them has computed."""
    found, started, entered = [], set[str](), ""
    for event, name in events(run):
        if event == "unshard":
            started.add(name)
        elif event == "pre_forward":
            entered = name
        elif event == "post_forward" and name == entered:
            found += [other for other in sorted(started) if other != name]
        if event in ("pre_forward", "reshard"):
            started.discard(name)
    return list(dict.fromkeys(found))


MODES: dict[str, Callable[[nn.Module], bool]] = {
    "module.training": lambda module: module.training,
    "grad mode": lambda module: torch.is_grad_enabled(),
}


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("evaluations", [1, 2])
@pytest.mark.parametrize("trains", MODES)
def test_training_and_evaluation_each_keep_their_order(rank, world, between, evaluations, trains):
    """Steps alternate with evaluations that leave a unit out. Each kept neither its own order nor the other's, and
    nearly nothing was gathered ahead, for ever."""
    module = sharded(
        lambda: Extra(between=between, trains=MODES[trains]),
        units=lambda module: [*module.layers, module.extra],
        reshard_after_forward=True,
    )
    inputs = torch.ones(2, 4)

    def evaluate() -> None:
        with torch.no_grad():
            module.eval()(inputs)
            module.train()

    for step in range(4):
        for _ in range(evaluations):
            seen = ahead(evaluate)
            assert step < 2 or seen == ["layers.1", "layers.2"]
        training = ["extra", "layers.1", "layers.2"] if between else ["layers.1", "layers.2", "extra"]
        seen = ahead(lambda: module(inputs).sum().backward())
        assert step < 2 or seen == training


class Twice(nn.Module):
    """The same blocks without gradients, for a target, and with them, in this order or the other."""

    def __init__(self, *, target_first: bool) -> None:
        super().__init__()
        self.blocks, self.target_first = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)]), target_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = []
        for graph in (False, True) if self.target_first else (True, False):
            with torch.set_grad_enabled(graph):
                results.append(self.blocks(x))
        return (results[0] - results[1]).square()


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("target_first", [True, False])
def test_blocks_run_without_and_with_gradients_in_one_forward(rank, world, target_first):
    """Each call but the first of the forward finds its gather under way. Whether a unit was taken for a teacher was
    kept with the unit, not with the call, so four of ten gathers waited, for ever."""
    module = sharded(
        lambda: Twice(target_first=target_first), units=lambda module: [*module.blocks], reshard_after_forward=True
    )
    for _ in range(3):
        seen = events(lambda: module(torch.ones(2, 4)).sum().backward())
    forward = [(event, name) for event, name in seen if event in ("unshard", "pre_forward", "post_forward")]
    forward = forward[: [i for i, one in enumerate(forward) if one[0] == "post_forward"][9] + 1]
    late = 0
    for place, (event, name) in enumerate(forward):
        if event == "pre_forward" and name:
            since = next((i for i in range(place, 0, -1) if forward[i][0] == "post_forward"), 0)
            late += ("unshard", name) in forward[since:place]
    assert late <= 1, forward
