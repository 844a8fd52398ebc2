"""Graphs: what autograd may be asked to do with outputs, inputs and weights of sharded modules."""

from __future__ import annotations

import warnings
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.support import api
from tests.support.cases import CASES
from tests.support.counting import events
from tests.support.fake import fake_mesh
from tests.support.models import Layers
from tests.support.parity import Run, beside_one_process, mesh_1d, on_one_axis, shard_each, sharded, stack
from tests.support.report import agrees, check, full_grads, refused, report, same

freed = partial(on_one_axis, reshard_after_forward=True)


@report("What a unit returns, a view, is changed in place", 1, 2, 4)
def test_view_changed_in_place(rank, world, fsdp):
    """A residual connection written ``y += x`` on a slice or reshape that a unit returns. Autograd then goes around the
    hook on the view, so backward never learns that it enters the unit."""
    agrees(fsdp, build=CASES["view_in_place"])


class ThreeDimensional(nn.Module):
    """Plain linear layers on 3-D input; what they return is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.one(x[:, None].expand(-1, 3, -1))
        y += 1
        return self.two(y).relu_().mean(1)


@report("x += 1 after a plain nn.Linear on 3-D input warns", 1, 2, 4)
def test_no_warning_for_linear(rank, world, fsdp):
    """The output of ``nn.Linear`` on 3-D input is a view of a product; changing it in place must neither warn nor lose
    gradients."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        agrees(fsdp, build=ThreeDimensional)
    texts = [str(w.message) for w in caught if "view" in str(w.message) or "hook" in str(w.message)]
    check(not texts, f"warns: {texts[0].splitlines()[0] if texts else ''}")


class Scales(nn.Module):
    """Changes its only input in place before it computes with it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x.mul_(0.5))


@api.fsdp2_only
def test_a_unit_that_changes_its_only_input_is_freed_in_time():
    """Autograd goes around what tells that its gradient is there, so it stayed in memory to the end of backward."""
    model = nn.Sequential(nn.Linear(8, 8), *(Scales() for _ in range(3)))
    with fake_mesh(2) as mesh:
        for unit in (*model, model):
            fsdp2.fully_shard(unit, mesh=mesh)
        for _ in range(2):
            seen = events(lambda: model(torch.ones(2, 8)).sum().backward())
    for number in (3, 2):
        assert seen.index(("post_backward", f"{number}")) < seen.index(("pre_backward", f"{number - 2}"))


@report("A unit returns a plain object with tensors in it", 1, 2, 4)
def test_plain_objects(rank, world, fsdp):
    """Model outputs of libraries are classes of their own. Backward through a tensor in one must gather the unit."""
    agrees(fsdp, freed, CASES["wrapping_object"])


def curved() -> nn.Sequential:
    """Return layers with curvature between them."""
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def penalty(run: Run) -> None:
    """Train on the norm of the gradient of the output by the input."""
    for step in range(3):
        x = run.inputs(step).requires_grad_()
        output = run.module(x).square().sum(1)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (output.mean() + gradient.square().sum(1).mean()).backward()
        run.update()


@report("Gradient penalty: create_graph=True and backward through it", 1, 2, 4)
def test_gradient_penalty(rank, world, fsdp):
    """WGAN-GP and physics-informed training differentiate the gradient by the input once more. The second backward
    needs weights that the first has freed."""
    agrees(fsdp, build=curved, program=penalty)


@report("Gradient penalty with everything freed after forward", 1, 2, 4)
def test_gradient_penalty_resharding(rank, world, fsdp):
    """The same with ``reshard_after_forward=True`` everywhere, the root included."""
    agrees(fsdp, freed, curved, penalty)


class Detached(nn.Module):
    """Uses one weight by itself, detached, and as data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        weight = self.linear.weight
        x = F.linear(torch.tanh(F.linear(x, weight.detach())), weight.data)
        return torch.tanh(F.linear(x, weight)) @ weight.detach() + self.linear(x)


@report("A weight used through detach() and .data", 1, 2, 4)
def test_detached_weights(rank, world, fsdp):
    """Stop-gradients and straight-through estimators read a weight that backward needs again after the weight's own
    gradient is finished, below a unit whose input needs a gradient and at the bottom of the model."""
    agrees(fsdp, build=lambda: nn.Sequential(Detached(), nn.Linear(8, 8), Detached()))


@report("A unit is skipped by the micro-batch that reduces", 1, 2, 4)
def test_skipped_while_accumulating(rank, world, fsdp):
    """The first micro-batches use a unit without communicating; the last one, which communicates, leaves it out. What
    was accumulated must not be lost."""

    def program(run: Run) -> None:
        for step in range(2):
            for part in range(3):
                run.configure(lambda module, fsdp, part=part: module.set_requires_gradient_sync(part == 2))
                run.module.used = (0, 2) if part == 2 else (0, 1, 2)
                run.backward(3 * step + part)
            run.update()

    agrees(fsdp, build=Layers, program=program)


class Reentrant(nn.Module):
    """Units recomputed in backward, of the reentrant kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))

    def forward(self, x):
        x = x.detach().requires_grad_()
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=True)
        return x


@report("Reentrant checkpointing with explicit forward prefetch", 1, 2, 4)
def test_reentrant_checkpointing(rank, world, fsdp):
    """The recomputation inside backward runs the forward hooks again, and with them the prefetch of units whose
    backward is over."""

    def prepare(module, fsdp):
        layers = list(module.layers)
        for unit in (*layers, module):
            fsdp.fully_shard(unit, mesh=mesh_1d())
        for i, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])

    run = agrees(fsdp, prepare, Reentrant)
    run.backward(0)
    kept = [i for i, layer in enumerate(run.module.layers) if not isinstance(layer[0].weight, DTensor)]
    check(not kept, f"layer {kept} is left gathered after backward")


@report("torch.autograd.grad for some tensors of the graph, then training", 1, 2, 4)
def test_grad_of_a_subset(rank, world, fsdp):
    """An activation's gradient is asked for alone: only the units above it go through backward, and no parameter gets
    a gradient. The iterations that follow must not notice."""

    def program(run: Run) -> None:
        for step in range(3):
            caught = []
            handle = run.module[1].register_forward_hook(lambda m, args, y, caught=caught: caught.append(y))
            loss = run.module(run.inputs(step)).square().mean()
            handle.remove()
            (gradient,) = torch.autograd.grad(loss, caught, retain_graph=step == 1)
            run.seen[f"squared gradient of the activation {step}"] = run_mean(run, gradient.square().sum(0))
            if step == 1:
                loss.backward()
            run.backward(step)
            run.update()

    agrees(fsdp, program=program, tolerance=1e-5)


def run_mean(run: Run, value: torch.Tensor) -> torch.Tensor:
    """Return ``value``, a sum over this rank's rows of squares of gradients of its mean, as of the whole batch."""
    if run.fsdp is not None:
        torch.distributed.all_reduce(value)
        value = value / run.part[1] ** 2
    return value


@report("torch.func.functional_call with the model's own parameters", 1, 2, 4)
def test_functional_call(rank, world, fsdp):
    """Libraries call ``functional_call(model, dict(model.named_parameters()), ...)`` throughout."""

    def program(run: Run) -> None:
        for step in range(3):
            output = functional_call(run.module, dict(run.module.named_parameters()), (run.inputs(step),))
            output.square().mean().backward()
            run.update()

    agrees(fsdp, freed, program=program)


@report("torch.func.functional_call with other sharded values", 1, 2, 4)
def test_functional_call_with_other_values(rank, world, fsdp):
    """Evaluating with averaged weights by ``functional_call(model, averaged, ...)`` computes with the values given, and
    with the model's own again afterwards."""
    module, alone = beside_one_process(stack, fsdp=fsdp)
    data = torch.randn(4, 8)
    for factor in (1.0, 2.0, 0.5):
        with torch.no_grad():
            got = functional_call(module, {n: p.detach() * factor for n, p in module.named_parameters()}, (data,))
            expected = functional_call(alone, {n: p * factor for n, p in alone.named_parameters()}, (data,))
        same(got, expected, f"the output with weights times {factor}")
        same(module(data), alone(data), "the output with the model's own weights")
        module.zero_grad()
        module(data).sum().backward()
        alone.zero_grad()
        alone(data).sum().backward()
        for unit in (*module, module):
            unit.reshard()
        for name, gradient in full_grads(module).items():
            same(gradient, alone.get_parameter(name).grad, f"gradient of {name} afterwards")


@report(
    "Backward through functional_call with other sharded values", promise="refused: the values are gone by backward"
)
def test_functional_call_with_other_values_in_training(rank, world, fsdp):
    """Meta-learning code goes back through a ``functional_call`` with updated weights. By then the module shows its own
    again, and gathering those would give the gradient of another function."""
    module = sharded(stack, fsdp)
    values = {name: (parameter.detach() * 2).requires_grad_() for name, parameter in module.named_parameters()}
    with refused("2.weight", "between forward and backward", otherwise="the gradient of other weights"):
        functional_call(module, values, (torch.ones(2, 8),)).sum().backward()


def doubling(calls: list[str], name: str):
    """Return a tensor hook that doubles the gradient and notes its call."""

    def hook(gradient):
        calls.append(name)
        return gradient * 2

    return hook


def check_hooks(rank, world, fsdp, when: str) -> None:
    """Register both kinds of hooks on a weight before or after sharding; they act once per backward."""
    torch.manual_seed(0)
    module, alone, calls = stack(), stack(), []
    alone.load_state_dict(module.state_dict())

    def register(model, notes):
        model[1].weight.register_hook(doubling(notes, "gradient"))
        model[1].weight.register_post_accumulate_grad_hook(lambda p: notes.append("accumulated"))

    if when == "before":
        register(module, calls)
    shard_each(module, fsdp, mesh=mesh_1d(), reshard_after_forward=True)
    if when == "after":
        register(module, calls)
    register(alone, [])
    data = torch.randn(4, 8)
    for step in range(1, 3):
        module(data).square().sum().backward()
        alone(data).square().sum().backward()
        check(calls.count("gradient") == step, f"the tensor hook ran {calls.count('gradient')} times in {step}")
        check(calls.count("accumulated") == step, "the post-accumulate hook did not run once per backward")
    for name, gradient in full_grads(module).items():
        same(gradient, alone.get_parameter(name).grad, f"gradient of {name}")


@report("Hooks registered on parameters before sharding", 1, 2, 4)
def test_hooks_before_sharding(rank, world, fsdp):
    """Gradient clipping and logging by ``register_hook``, optimizers in backward by post-accumulate hooks: set up when
    the model is built, they must outlive ``fully_shard``."""
    check_hooks(rank, world, fsdp, "before")


@report("Hooks registered on sharded parameters", 1, 2, 4)
def test_hooks_after_sharding(rank, world, fsdp):
    """The same hooks, registered on what ``named_parameters`` gives after sharding."""
    check_hooks(rank, world, fsdp, "after")
