"""Other ways to differentiate than ``loss.backward()``: ``torch.autograd.grad``, ``torch.func``, compiled blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support import api
from tests.support.models import mlp
from tests.support.parity import (
    Case,
    assert_gradients,
    batch,
    beside_one_process,
    full,
    mesh_1d,
    mesh_2d,
    step_alike,
    trains_like_one_process,
)
from tests.support.pool import on_ranks


def layers() -> nn.Sequential:
    """Return two layers with an activation between them."""
    return mlp(4, 4, 4)


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("given", ["captured", "captured needing a gradient", "dual"])
def test_backward_through_a_jvp(rank, world, given, reshard):
    """Inside ``torch.func.jvp`` outputs say that they need no gradient, so nothing was hooked to them: backward outside
    found freed parameters, or left gradients full. A single input that was captured and needs a gradient failed at
    once, its view having no node. Found by torch's own tests. The first forward is inside as well: the buffers of its
    gather were functorch's wrappers without a storage."""
    module, alone = beside_one_process(layers, reshard_after_forward=reshard)
    before, tangent = nn.Linear(4, 4), torch.full((2, 4), 0.5)
    for _ in range(2):
        results = []
        for one in (alone, module):
            source = torch.ones(2, 4, requires_grad=True)
            captured = before(source) if "needing" in given else torch.ones(2, 4)
            function = one if given == "dual" else lambda _, one=one, captured=captured: one(captured)
            output, out_tangent = torch.func.jvp(function, (torch.ones(2, 4),), (tangent,))
            (output.sum() + out_tangent.sum()).backward()
            results.append((output, out_tangent, source.grad))
        assert (results[0][2] is None) == ("needing" not in given)
        torch.testing.assert_close(*results)
        assert_gradients(module, alone)


@on_ranks(4)
@pytest.mark.parametrize("setup", ["pieces", "portions"])
def test_memory_that_outlives_a_jvp(rank, world, setup):
    """MeanFlow takes every forward inside ``torch.func.jvp``. What is made there for later uses (pieces that stay after
    forward, portions) became functorch's wrappers: "Cannot access storage of TensorWrapper"."""
    options = {
        "pieces": lambda: {"mesh": mesh_1d(), "reshard_after_forward": 2},
        "portions": lambda: {"mesh": mesh_2d(), "shard_over_replicas": True},
    }
    module, alone = beside_one_process(layers, **options[setup]())
    inputs, tangent = torch.ones(2, 4), torch.full((2, 4), 0.5)
    for _ in range(2):
        for one in (alone, module):
            output, out_tangent = torch.func.jvp(one, (inputs,), (tangent,))
            (output - out_tangent.detach()).square().sum().backward()
        assert_gradients(module, alone)


class Rate(nn.Module):
    """Applies its first layer, and then a transform of ``torch.func`` to the second one."""

    def __init__(self, transform: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.transform = transform

    def forward(self, x):
        x = self.first(x).tanh()
        if self.transform == "jvp":
            return torch.func.jvp(lambda y: self.second(y).tanh(), (x,), (x,))[1]
        return torch.vmap(self.second)(x).tanh()


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("inner", ["jvp", "vmap"])
@pytest.mark.parametrize("outer", ["jvp", "grad", "both"])
def test_transforms_inside_transforms(rank, world, outer, inner, reshard):
    """Views of a unit that first ran inside two transforms were theirs: "level.has_value() ... escaped?". And inside
    ``torch.func.grad`` a backward asked autograd for nodes that the transform hides: an AttributeError."""
    module, alone = beside_one_process(lambda: Rate(inner), reshard_after_forward=reshard)
    inputs, tangent = torch.ones(2, 4), torch.full((2, 4), 0.5)
    for _ in range(3):
        results = []
        for one in (alone, module):
            result: list[Tensor] = []
            if outer != "grad":
                result += torch.func.jvp(one, (inputs,), (tangent,))
            if outer != "jvp":
                result.append(torch.func.grad(lambda x, one=one: one(x).square().sum())(inputs))
            results.append([*result, one(inputs)])
        torch.testing.assert_close(*results)


@on_ranks(2)
@pytest.mark.parametrize("entered", ["tangent", "both"])
def test_backward_through_dual_numbers(rank, world, entered):
    """The tangent of a dual number has a graph of its own, in which no hook was: a loss on it met freed weights, and
    autograd said that they were modified by an inplace operation."""
    module, alone = beside_one_process(layers)
    inputs, tangent = torch.ones(2, 4), torch.full((2, 4), 0.5)
    for _ in range(2):
        for one in (alone, module):
            with forward_ad.dual_level():
                output, out_tangent = forward_ad.unpack_dual(one(forward_ad.make_dual(inputs, tangent)))
                loss = out_tangent.square().sum()
                (loss if entered == "tangent" else loss + output.square().sum()).backward()
        for gradient in (parameter.grad for parameter in alone.parameters()):
            assert entered == "tangent" or gradient is not None
        if entered == "both":
            assert_gradients(module, alone)
        else:
            got = [None if p.grad is None else p.grad.full_tensor() for p in module.parameters()]
            torch.testing.assert_close(got, [p.grad for p in alone.parameters()])


def penalized(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """The norm of the gradient by the inputs, and then another forward: WGAN-GP."""
    inputs.requires_grad_()
    (gradient,) = torch.autograd.grad(module(inputs).tanh().sum(), inputs, create_graph=True)
    return gradient.square().mean() + module(inputs.detach()).square().mean()


def penalized_by_curvature(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """The norm of a product with the Hessian, which is differentiated for a third time, and then another forward."""
    along = torch.ones_like(inputs)
    _, product = torch.autograd.functional.hvp(lambda x: module(x).tanh().sum(), inputs, along, create_graph=True)
    return product.square().mean() + module(inputs.detach()).square().mean()


def penalized_with_func(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """WGAN-GP with ``torch.func.grad``, in which hooks on tensors see no backward outside."""
    gradient = torch.func.grad(lambda x: module(x).tanh().sum())(inputs)
    return gradient.square().mean() + module(inputs).square().mean()


def penalized_in_grad_of_grad(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """A gradient of the norm of a gradient, both of ``torch.func``."""
    inner = lambda x: torch.func.grad(lambda y: module(y).tanh().sum())(x).square().sum()
    return torch.func.grad(inner)(inputs).square().mean() + module(inputs).square().mean()


def penalized_by_hessians(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """The Hessian of each row, forward over reverse, as physics-informed networks take it."""
    hessian = torch.func.hessian(lambda row: module(row[None]).tanh().sum())
    return torch.vmap(hessian)(inputs).square().mean() + module(inputs).square().mean()


def penalized_in_reverse_twice(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """A directional derivative as the derivative of the pullback, which enters units by their outputs' gradients."""
    output, pull = torch.func.vjp(module, inputs)
    along = torch.func.grad(lambda grad: (pull(grad)[0] * inputs).sum())(torch.ones_like(output))
    return along.square().mean() + module(inputs * 2).square().mean()


def with_an_auxiliary_output(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """The output that ``torch.func.grad`` returns beside a gradient that nobody uses."""

    def summed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = module(x)
        return output.sum(), output

    _, output = torch.func.grad(summed, has_aux=True)(inputs)
    return output.square().mean() + module(inputs * 2).square().mean()


DIFFERENTIATED = [
    penalized,
    penalized_by_curvature,
    penalized_with_func,
    penalized_in_grad_of_grad,
    penalized_by_hessians,
    penalized_in_reverse_twice,
    with_an_auxiliary_output,
]


def deep() -> nn.Sequential:
    """Return units of several layers with curvature inside and between them."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 8)) for _ in "123"])


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("loss", DIFFERENTIATED)
def test_another_forward_before_the_backward_of_a_backward(rank, world, loss, reshard):
    """A forward between a differentiable backward and the backward of it freed the weights that the latter reads, and
    nothing gathered them: the process died of a null pointer, or of "setStorage ... storage of size 0" (so does
    torch's). Its way into a unit is the gradient that came out of the unit's input, and so on at each order. In double
    precision: each order multiplies what was rounded.

    In transforms of ``torch.func`` inside each other, hooks were on the tensors of the innermost one, and backwards of
    the others met freed weights, also with units that stay after forward: "modified by an inplace operation"."""
    case = Case(lambda: deep().double(), lambda step: (batch(step)[0].double(),))
    trains_like_one_process(case, loss, reshard_after_forward=reshard)


class Means(nn.Module):
    """Returns a view of the second output of an autograd node."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.var_mean(self.layer(x).tanh().unflatten(-1, (4, 2)), -1, keepdim=True)[1].squeeze(-1)


@api.fsdp2_only
@on_ranks(2)
def test_a_view_of_the_second_output_of_a_node(rank, world):
    """The hook on the node of the view's base passed on the gradient of the node's first output, which there is none of
    here. A backward with ``create_graph=True`` failed on that None."""
    trains_like_one_process(lambda: nn.Sequential(Means(), nn.Linear(4, 1)), penalized)


class Pair(nn.Module):
    """Return one of two inputs as it is, and a function of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, pair):
        return pair[0], self.inner(pair[1]).tanh()


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Pair(), Pair()

    def forward(self, inputs):
        return self.second(self.first((inputs, inputs * 2)))[1]


@on_ranks(2)
@pytest.mark.parametrize("loss", [penalized, penalized_by_hessians])
def test_gradient_penalty_with_an_output_that_is_not_used(rank, world, loss):
    """Both inputs of a unit go through one autograd function, so a hook on the output that the loss does not use runs
    in backward as well, without a gradient. A differentiable backward died of an AttributeError there."""
    trains_like_one_process(Pairs, loss)


class InPlace(nn.Module):
    """Writes to its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x.mul_(0.5).tanh())


def tangent(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """The change of the output along the inputs."""
    return torch.func.jvp(module, (inputs,), (inputs,))[1].square().mean() + module(inputs * 2).square().mean()


def each_row(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """The output of each row by itself."""
    return torch.vmap(module)(inputs).square().mean() + module(inputs * 2).square().mean()


class Spectrum(nn.Module):
    """Return complex numbers, or their magnitudes if it is given some."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x.abs()) if x.is_complex() else torch.fft.fft(self.inner(x)) * self.inner.weight.sum()


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("loss", [each_row, tangent, penalized_with_func])
def test_complex_outputs_in_transforms(rank, world, loss):
    """Only real results were watched inside a transform: backward through complex ones met freed weights."""
    trains_like_one_process(lambda: nn.Sequential(nn.Linear(8, 8), Spectrum(), Spectrum()), loss)


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("loss", [each_row, tangent, penalized_with_func, penalized_in_grad_of_grad])
def test_units_that_write_to_their_inputs_in_transforms(rank, world, loss):
    """What a unit returned inside a transform could not be written to: it was a view of what the unit had computed,
    made by an autograd function of ours."""
    trains_like_one_process(lambda: nn.Sequential(nn.Linear(8, 8), InPlace(), InPlace()), loss)


@api.fsdp2_only
@on_ranks(1)
def test_differentiation_by_other_values_is_refused(rank, world):
    """Meta-learning computes new weights from the model's own, per-sample gradients are those of ``torch.func.grad`` by
    detached ones. The error was one about ``grad_dtype``, or advised ``load_state_dict``."""
    module = api.ours.fully_shard(nn.Linear(4, 4), mesh=mesh_1d())
    call = lambda values: torch.func.functional_call(module, values, (torch.ones(2, 4),)).sum()
    parameters = dict(module.named_parameters())
    for differentiate in (call, torch.func.grad(call)):
        values = {name: parameter * 2 for name, parameter in parameters.items()}
        with pytest.raises(RuntimeError, match="weight: replaced .* expected the module's own parameter.*not sharded"):
            differentiate(values)
    module(torch.ones(2, 4)).sum().backward()
    assert module.weight is parameters["weight"] and module.weight.grad is not None


@on_ranks(2)
def test_gradients_asked_of_autograd_itself(rank, world):
    """``torch.autograd.grad`` with respect to full parameters died inside a hook: the engine will not say of a leaf
    that it was asked for whether it will be reached."""
    module, alone = beside_one_process(layers, lambda module: (), reshard_after_forward=False)
    inputs = torch.full((2, 4), rank + 1.0)
    got = torch.autograd.grad(module(inputs).sum(), list(module.parameters()))
    expected = torch.autograd.grad(alone(inputs).sum(), list(alone.parameters()))
    for mine, whole in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, whole)
    assert all(parameter.grad is None for parameter in module.parameters())


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_parameters_looked_up_between_forward_and_backward(rank, world, reshard):
    """A zero-bubble pipeline asks the module for its parameters after forward and differentiates with respect to them,
    in two parts. Units that reshard after forward showed shards, which are not in the graph: their weights got no
    gradient at all, without a word (torch's fully_shard loses them still)."""
    module, alone = beside_one_process(layers, reshard_after_forward=reshard)
    inputs = torch.arange(8.0).view(2, 4)
    losses = [module(inputs * scale).sum() for scale in (1, 2)]  # the second forward reshards again
    module.set_is_last_backward(False)
    for loss in losses:
        module.set_reshard_after_backward(False)
        parameters = list(module.parameters())
        grads = torch.autograd.grad(loss, parameters)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
    module.set_is_last_backward(True)
    module.set_reshard_after_backward(True)
    api.ours.fully_shard.state(module)._root_post_backward_final_callback()  # as torch's schedules do
    (alone(inputs).sum() + alone(inputs * 2).sum()).backward()
    assert_gradients(module, alone)


class Equilibrium(nn.Module):
    """A fixed point, whose gradient a hook on the output solves for with the weights (deep equilibrium models)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            point = x
            for _ in range(8):
                point = self.inner(point).tanh() * 0.3 + x
        point = self.inner(point).tanh() * 0.3 + x
        before = point.detach().requires_grad_()
        after = self.inner(before).tanh() * 0.3 + x

        def solve(grad: torch.Tensor) -> torch.Tensor:
            found = grad
            for _ in range(8):
                found = torch.autograd.grad(after, before, found, retain_graph=True)[0] + grad
            return found

        point.register_hook(solve)
        return point


@api.fsdp2_only  # torch's own gathers after the hook as well
@on_ranks(1, 2)
@pytest.mark.parametrize("inner", [False, True])
def test_a_hook_on_the_output_computes_with_weights(rank, world, inner):
    """Hooks run in the order in which they were registered, and the one that gathers came after the module's own: the
    weights were sharded. ``inner``: the layer that the hook differentiates is a unit of its own."""
    units = lambda model: [*([model[0].inner, model[1].inner] if inner else []), *model]
    both = beside_one_process(lambda: nn.Sequential(Equilibrium(), Equilibrium()), units)
    for step in range(3):
        step_alike(*both, lambda model: model(torch.full((2, 4), 0.5)).square().sum(), step)


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_gradients_are_clipped_behind_a_backward_that_creates_a_graph(rank, world, reshard):
    """Its groups stay in memory for a backward of the backward, and their modules showed full parameters, which have no
    gradients: ``torch.nn.utils.clip_grad_norm_`` clipped nothing. What stays can still be differentiated."""
    both = beside_one_process(layers, reshard_after_forward=reshard)
    for step in range(2):
        for model in both:
            x = torch.full((2, 4), 0.5 + step, requires_grad=True)
            model(x).tanh().sum().backward(create_graph=True)
            if step == 1:
                x.grad.square().sum().backward()
            x.grad = None  # its graph holds ``x``, which holds it
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert_gradients(*both, step)
        for model in both:
            torch.optim.SGD(model.parameters(), 0.1).step()
            model.zero_grad()


@on_ranks(2)
@pytest.mark.xfail(
    strict=True, reason="torch's layers that are cut over ranks lose a sum over these in a second backward"
)
def test_torch_differentiates_what_is_cut_over_ranks_twice(rank, world):
    """Without any ``fully_shard``. Until torch does, no random program asks for it (``penalty`` in ``fuzz.py``)."""

    def gradients(cut: bool) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        if cut:
            parallelize_module(module, mesh_1d(), {"0": ColwiseParallel(output_layouts=Replicate())})
        x = torch.randn(2, 8, requires_grad=True)
        (gradient,) = torch.autograd.grad(module(x).square().sum(), [x], create_graph=True)
        gradient.square().sum().backward()
        return [full(parameter.grad) for parameter in module.parameters()]

    for got, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(got, expected)
