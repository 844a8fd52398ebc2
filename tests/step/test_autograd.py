"""Every way to go through forward and backward that an ordinary training script may choose."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support import api
from tests.support.cases import Setup, assert_case, parametrize_cases
from tests.support.counting import Operators
from tests.support.models import Three
from tests.support.parity import (
    STEPS,
    WIDTH,
    Run,
    accumulate,
    assert_gradients,
    beside_one_process,
    step_alike,
    trains_like_one_process,
)
from tests.support.pool import on_ranks
from tests.support.shapes import KINDS, loss_of

BOTH, ALONE = ("torch", "alone"), ("alone",)
reshards = pytest.mark.parametrize("reshard", [None, True, False])


@on_ranks(1, 2)
@parametrize_cases(*(f"wrapping_{kind}" for kind in KINDS), "keywords", "no_arguments", "mlp_input_grad")
def test_tensors_in_any_container(rank, world, case):
    """Tensors in and out of units, and of the root, may hide in containers and come by keyword."""
    assert_case(case, Setup(True))


@on_ranks(2)
@parametrize_cases(*(f"wrapping_{kind}" for kind in KINDS if kind not in ("object", "slots", "set")), "keywords")
def test_containers_are_cast(rank, world, case):
    """Input and output casts reach the tensors in containers and rebuild them; plain objects are left as they are."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    found_by_torch = case not in ("wrapping_frozen_dataclass",)
    setup = Setup(True, policy, units_cast_outputs=True)
    assert_case(case, setup, against=BOTH if found_by_torch else ALONE)


@on_ranks(2, 4)
@reshards
@parametrize_cases("used_several_times", "tied", "skipping", "view_in_place")
def test_unusual_forwards(rank, world, case, reshard):
    """A unit used several times, tied, left out of an iteration, or whose returned view is changed in place."""
    assert_case(case, Setup(reshard))


class Attends(nn.Module):
    """Self-attention, whose module asks whether query, key and value are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


@api.fsdp2_only
@on_ranks(1, 2)
@pytest.mark.parametrize("mp_policy", [None, MixedPrecisionPolicy(torch.bfloat16)])
def test_one_tensor_as_several_arguments(rank, world, mp_policy):
    """It stays one: three copies made the attention project each by a product of its own. torch's makes them. The
    gradient of the input is added up in the same order as without sharding, so it has the same bits."""
    module, alone = beside_one_process(Attends, **({} if mp_policy is None else {"mp_policy": mp_policy}))
    if mp_policy is not None:
        alone.to(mp_policy.param_dtype)
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    products, outputs, gradients = [], [], []
    for one in (module, alone):
        leaf = x.to(next(alone.parameters()).dtype).requires_grad_()
        with Operators(lambda func, args: str(func) if "mm" in str(func) else None) as operators:
            outputs.append(one(leaf * 1))
        products.append(operators.seen)
        outputs[-1].float().square().sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*outputs) and torch.equal(*gradients)
    assert products[0] == products[1]


class AddsTo(nn.Module):
    """Adds to a tensor that it is given, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, total, x=None):
        total.add_(self.second(torch.tanh(self.first(total.clone() if x is None else x))))


@api.fsdp2_only
@on_ranks(1, 2)
@reshards
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("alone_given", [False, True])
def test_a_unit_that_writes_to_an_argument(rank, world, reshard, part, alone_given):
    """Backward enters by what the unit has written, be it its only input or a tensor without a gradient so far, or a
    part of one. It raised "modified by an inplace operation". torch's calls the input a view that must not be changed,
    or raises "storage of size 0"."""
    module, alone = beside_one_process(lambda: nn.Sequential(AddsTo(), AddsTo()), reshard_after_forward=reshard)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    losses = []
    for one in (module, alone):
        leaf = x.clone().requires_grad_()
        results = []
        for unit in one:
            whole = leaf * 2 if alone_given else torch.zeros(4, WIDTH)
            unit(whole[:2] if part else whole, *(() if alone_given else (leaf[:2] if part else leaf,)))
            results.append(whole)
        losses.append(torch.cat([(results[0] * results[1]).flatten(), leaf.flatten()]).square().sum())
        losses[-1].backward()
        losses.append(leaf.grad)
    torch.testing.assert_close(losses[:2], losses[2:])
    assert_gradients(module, alone)


class InLayout(nn.Module):
    """Two layers, between which values are in a layout other than that of a plain tensor."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Multiplies() if layout == "sparse" else Projects()

    def forward(self, x):
        if self.layout == "sparse":
            return self.second(self.first(x).relu().to_sparse())
        layout = torch.jagged if self.layout == "jagged" else torch.strided
        rows = torch.nested.as_nested_tensor([x[:1], x[1:]], layout=layout)
        return torch.cat(self.second(self.first(rows), rows).unbind())


class Projects(nn.Linear):
    """A linear layer with a residual, both nested."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x, residual):
        return super().forward(x) + residual


class Multiplies(nn.Module):
    """A weight that a sparse matrix is multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return x @ self.weight


@api.fsdp2_only
@on_ranks(2)
@reshards
@pytest.mark.parametrize("layout", ["nested", "jagged", "sparse"])
def test_inputs_of_other_layouts(rank, world, layout, reshard):
    """A nested tensor that requires gradients and calls itself strided, the default of ``torch.nested``, raised
    "Internal error: NestedTensorImpl doesn't support sizes", as it does with torch's."""
    options = {} if reshard is None else {"reshard_after_forward": reshard}
    trains_like_one_process(lambda: InLayout(layout), **options)


def two_forwards_one_backward(run: Run) -> None:
    """Add two losses before the backward."""
    for step in range(STEPS):
        (run.loss(step) + run.loss(step + 10)).backward()
        run.update()


def two_forwards_two_backwards(run: Run) -> None:
    """Two forwards, then their backwards in either order, accumulating."""
    for step in range(4):
        losses = [run.loss(step), run.loss(step + 10)]
        for loss in losses if step % 2 else reversed(losses):
            loss.backward()
        run.update()


def several_backwards(run: Run) -> None:
    """Three backwards through one graph."""
    for step in range(STEPS):
        loss = run.loss(step)
        loss.backward(retain_graph=True)
        run.record()
        loss.backward(retain_graph=True)
        loss.backward()
        run.update()


def accumulate_with_sync(run: Run) -> None:
    """Two backwards add their reduced gradients."""
    for step in range(STEPS):
        for part in range(2):
            run.loss(step + 10 * part).backward()
        run.update()


def accumulate_without_sync(run: Run) -> None:
    """Only the last of three backwards communicates."""
    accumulate(run, batches=3)


def accumulate_into_zeros(run: Run) -> None:
    """The gradients are zeroed in place and added to."""
    for step in range(STEPS):
        run.loss(step).backward()
        run.record()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)


def evaluate_at_any_time(run: Run) -> None:
    """no_grad, eval and inference_mode forwards come first and between the others."""
    modes = [torch.no_grad, torch.inference_mode, torch.no_grad, torch.inference_mode]
    for step, mode in enumerate(modes):
        run.module.eval()
        with mode():
            run.loss(step)
        run.module.train()
        loss = run.loss(step)
        with mode():
            run.loss(step + 10)
        loss.backward()
        with mode():
            run.loss(step + 20)
        run.update()


def inference_first(run: Run) -> None:
    """The very first forward is in inference mode."""
    with torch.inference_mode():
        run.loss(0)
    for step in range(STEPS):
        run.loss(step).backward()
        run.update()


def no_backward(run: Run) -> None:
    """A forward whose graph is dropped without a backward."""
    for step in range(STEPS):
        run.loss(step + 10)
        run.loss(step).backward()
        run.update()


def gradient_of_inputs_only(run: Run) -> None:
    """``torch.autograd.grad`` of the inputs leaves no gradient on parameters; training goes on."""
    for step in range(STEPS):
        inputs = run.arguments(step)
        (gradient,) = torch.autograd.grad(loss_of(run.module(*inputs)), inputs)
        run.note_loss(gradient.square().sum() / run.part[1])
        run.record()
        run.loss(step).backward()
        run.update()


def train_on_half_the_width(run: Run) -> None:
    """The loss uses half of the output's last dimension."""
    for step in range(STEPS):
        run.note_loss(run.forward(step)[..., ::2].square().mean()).backward()
        run.update()


PROGRAMS = (
    *(two_forwards_one_backward, two_forwards_two_backwards, several_backwards),
    *(accumulate_with_sync, accumulate_without_sync, accumulate_into_zeros),
    *(evaluate_at_any_time, inference_first, no_backward),
)
TORCH_FAILS = (evaluate_at_any_time, inference_first)
"""Programs in which torch's fully_shard updates an inference tensor in place, depending on what is kept unsharded."""
judges = lambda program: ALONE if program in TORCH_FAILS else BOTH
programs = pytest.mark.parametrize(
    "program", [pytest.param(one, marks=[api.fsdp2_only] if one in TORCH_FAILS else []) for one in PROGRAMS]
)


@on_ranks(2)
@reshards
@programs
@parametrize_cases("transformer", "frozen")
def test_program(rank, world, case, program, reshard):
    """The situation computes the same as in a single process and with torch's fully_shard."""
    assert_case(case, Setup(reshard), program, against=judges(program))


@on_ranks(1, 4)
@programs
def test_program_on_other_worlds(rank, world, program):
    """The same on one and four ranks."""
    assert_case("mlp", Setup(True), program, against=judges(program))


@on_ranks(2)
@pytest.mark.parametrize("program", [accumulate_without_sync, accumulate_with_sync, two_forwards_two_backwards])
@pytest.mark.parametrize("reduce", [None, torch.float32, torch.bfloat16])
def test_program_in_mixed_precision(rank, world, program, reduce):
    """Accumulation with a reduce dtype that is, and is not, the compute dtype."""
    setup = Setup(True, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce))
    assert_case("mlp", setup, program)


@on_ranks(2)
def test_gradient_of_inputs_only(rank, world):
    """See the program."""
    assert_case("mlp_input_grad", Setup(True), gradient_of_inputs_only)


@on_ranks(2)
@parametrize_cases("mlp", "transformer")
def test_part_of_the_output(rank, world, case):
    """Gradients flow from a part of an output only."""
    assert_case(case, Setup(True), train_on_half_the_width)


@api.fsdp2_only  # torch's own gets other gradients
@on_ranks(2)
@reshards
def test_autocast(rank, world, reshard):
    """Autocast keeps the casts of full parameters until its block ends, which holds an evaluation and two forwards.

    All ranks have the same batch, so that a mean over ranks is what one process computes in bfloat16."""
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    both = beside_one_process(Three, reshard_after_forward=reshard)

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                model(batch)
            return model(batch).square().mean() + model(batch / 2).square().mean()

    for step in range(3):
        step_alike(*both, loss, step)
