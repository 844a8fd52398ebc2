"""Tensors that a forward leaves on modules or in its arguments, through which backward enters as through outputs."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from fsdp2.autograd.side_outputs import SideOutputs
from tests.support import api
from tests.support.counting import gathers
from tests.support.fake import fake_mesh
from tests.support.inside import explain
from tests.support.parity import (
    assert_gradients,
    beside_one_process,
    mean_output,
    mesh_of,
    sharded,
    trains_like_one_process,
)
from tests.support.pool import on_ranks
from tests.support.shapes import Result, Slots, tensors

NESTED = (
    *("list of pairs", "dict of lists", "set", "object", "slots", "function", "named tuple", "ordered dict"),
    *("default dict", "list of dataclasses", "attribute of a dict"),
)


class NamedLoss(NamedTuple):
    """What a router adds to the loss, with its name."""

    name: str
    value: Tensor


class Output(dict):
    """A dict that may have attributes, as the outputs of many models."""

    balance: Tensor


class Routed(nn.Module):
    """Keeps what its router adds to the loss, computed after the output or before it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.router, self.kind = nn.Linear(8, 8), nn.Linear(8, 2), kind
        self.kept: object = 0.0
        self.about = [torch.strided]  # neither plain data nor a tensor

    def forward(self, x):
        before = self.keep(x) if self.kind == "before" else None
        y = self.layer(x).tanh()
        self.kept = before if before is not None else self.keep(y)
        return x if self.kind == "nothing else" else y

    def keep(self, x: Tensor) -> object:
        """What the router adds to the loss, plain or in a container."""
        one = self.router(x).softmax(-1).square().mean()
        makers: dict[str, Any] = {
            "list": lambda: [one, *[0.0] * 63],  # 64 items are searched
            "dict": lambda: {"balance": one},
            "list of pairs": lambda: [("balance", one), ("z", 0.0)],
            "dict of lists": lambda: {"balance": [one]},
            "set": lambda: {one},
            "named tuple": lambda: NamedLoss("balance", one),
            "ordered dict": lambda: OrderedDict(balance=one),
            "default dict": lambda: defaultdict(list, balance=[one]),
            "list of dataclasses": lambda: [Result(one, "balance")],
            "attribute of a dict": lambda: set_balance(Output(), one),
            "object": lambda: SimpleNamespace(about="the router", losses=[one]),
            "slots": lambda: Slots(one),
            "function": lambda: lambda: one,
        }
        return makers.get(self.kind, lambda: one)()


def set_balance(losses: Output, value: Tensor) -> Output:
    """Return the dict itself, with an attribute."""
    losses.balance = value
    return losses


def and_what_was_kept(module: nn.Module, inputs: Tensor) -> Tensor:
    """The loss with what each router kept, which is taken away."""
    total = mean_output(module, inputs)
    for routed in module.modules():
        if isinstance(routed, Routed):
            kept, routed.kept = routed.kept, None
            if isinstance(kept, (SimpleNamespace, Output)):
                kept = vars(kept)
            total = total + sum(tensors([kept() if callable(kept) else kept]))
    return total


class Renamed(nn.Module):
    """Keeps its auxiliary loss under another name in each forward, and those before it as well unless it ``drops``."""

    def __init__(self, *, drops: bool) -> None:
        super().__init__()
        self.layer, self.name, self.drops = nn.Linear(8, 8), "kept_0", drops
        self.kept_0 = torch.zeros(())

    def forward(self, x):
        if self.drops:
            delattr(self, self.name)
        self.name = f"kept_{int(self.name[-1]) + 1}"
        setattr(self, self.name, self.layer(self.layer(x)).square().mean())
        return x


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("drops", [True, False])
def test_a_side_output_of_another_name_in_each_forward(rank, world, drops):
    """There are as many attributes as before, so nobody looked for new ones: from the second step on backward read
    freed weights."""

    def loss(module: nn.Module, inputs: Tensor) -> Tensor:
        return mean_output(module, inputs) + getattr(module[0], module[0].name)

    trains_like_one_process(lambda: nn.Sequential(Renamed(drops=drops), nn.Linear(8, 8), nn.Linear(8, 8)), loss)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["before", "after", "list", "dict", "nothing else", *NESTED])
def test_a_loss_kept_on_a_module(rank, world, kind):
    """Routers leave their auxiliary loss on themselves. Backward enters by it before it enters by the output if it was
    computed after it, and only then if the output is not used: "out of bounds for storage of size 0" (torch's fails
    likewise). So it was, whatever was used, inside two containers, a set, an object or the closure of a function."""
    build = lambda: nn.Sequential(Routed(kind), Routed(kind))
    trains_like_one_process(build, and_what_was_kept, reshard_after_forward=True)


class RoutedBlock(nn.Module):
    """A unit with a unit in it that keeps something."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.routed = nn.Linear(8, 8), Routed("nothing else")

    def forward(self, x):
        self.routed(self.layer(x))
        return x


@on_ranks(2)
def test_a_loss_kept_on_a_module_inside_of_a_unit_in_a_unit(rank, world):
    """Through the inner unit backward comes to the outer one, whose own output is not used either."""
    build = lambda: nn.Sequential(RoutedBlock(), RoutedBlock())
    units = lambda module: [block.routed for block in module] + [*module]
    trains_like_one_process(build, and_what_was_kept, units, reshard_after_forward=True)


@on_ranks(2)
def test_a_kept_tensor_does_not_keep_its_module(rank, world):
    """A hook on it that held the module, which holds it, would be a cycle that no collection finds; the pool looks for
    modules that outlive this test."""
    module = api.ours.fully_shard(Routed("before"), mesh=mesh_of(world), reshard_after_forward=True)
    module(torch.ones(2, 8))
    assert isinstance(module.kept, Tensor)


class Indexed(nn.Module):
    """Saves a whole frozen parameter for backward, where it uses its layer, and keeps a loss in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(8).flip(0), requires_grad=False)
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.randn(8))
        self.kept: object = 0.0

    def forward(self, x, used):
        y = self.layer(x)[:, self.order] if used else x.tanh()
        self.kept = (y * self.scale).square().mean()
        return y


@on_ranks(2)
@pytest.mark.parametrize("first", [0, 1])
def test_a_loss_kept_on_a_module_whose_parameters_stay(rank, world, first):
    """``reshard_after_forward=False`` keeps them until the first backward, on another forward: the second one read
    freed memory, and wrote gradients made of whatever was there."""
    module, alone = beside_one_process(Indexed, lambda module: (), reshard_after_forward=False)
    for one in (alone, module):
        losses = []
        for used in (True, False):
            losses.append(one(torch.ones(2, 8), used).mean() + one.kept)
            one.kept = None
        losses[first].backward()
        losses[1 - first].backward()
    assert_gradients(module, alone)


class Features:
    """The loss of what a forward hook on a layer inside of a unit saw; the outputs are not used."""

    def __init__(self, layer: str) -> None:
        self.layer = layer

    def __call__(self, module: nn.Module, inputs: Tensor) -> Tensor:
        seen = []
        handle = module.get_submodule(self.layer).register_forward_hook(lambda *call: seen.append(call[2]))
        module(inputs)
        handle.remove()
        return seen[0].square().mean()


def stem() -> nn.Sequential:
    """A layer of the root's own before a unit."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def first_unit() -> nn.Sequential:
    """A unit that the inputs go into."""
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize(("build", "layer"), [(stem, "0"), (first_unit, "0.0")])
def test_features_that_only_a_hook_saw(rank, world, build, layer, reshard):
    """No unit's outputs are reached, so no backward was known to run: gradients stayed full, on parameters that no
    optimizer holds, and training went on without them (torch loses them still). The backward of a first layer reads no
    weights, so nothing else fails."""
    units = lambda module: [module[-1]]
    trains_like_one_process(build, Features(layer), units, reshard_after_forward=reshard)


def unit_in_a_unit() -> nn.Sequential:
    """A unit whose backward reads weights before and after those of a unit inside it."""
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)))


@api.fsdp2_only
@on_ranks(2)
def test_features_of_a_unit_in_a_unit_that_only_a_hook_saw(rank, world):
    """Backward entered the inner unit alone, and read the freed weights of the outer one: an error about a storage of
    size 0 (so does torch's)."""
    units = lambda module: [module[1][1], module[1]]
    trains_like_one_process(unit_in_a_unit, Features("1.1"), units, reshard_after_forward=True)


def test_what_is_searched_for_side_outputs():
    """A shared module once, no attribute that is neither a tensor nor a container, and containers three levels deep."""
    shared = nn.Linear(2, 2)
    top = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    top.config = object()
    outputs = SideOutputs((top,), lambda module: False, set())
    assert outputs._find() == [] and [*outputs._modules()].count(shared) == 1
    top.near, top.far = [[[torch.ones(1)]]], [[[[torch.ones(1)]]]]
    assert [name for _, name in SideOutputs((top,), lambda module: False, set())._find()] == ["near"]


class Collects(nn.Module):
    """A block that appends to a list, and sets, replaces and removes entries of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, seen: list[Any], named: dict[str, Any]) -> torch.Tensor:
        x = torch.tanh(self.layer(x))
        seen[0] = seen[0] * 1.5
        seen.append([x])
        seen[-2][0] = seen[-2][0] + x
        named.clear()
        named[len(seen)] = x * 2
        return x


class WritesToArguments(nn.Module):
    """Blocks that write to a list and a dict that they are given beside their input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Collects() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[Any] = [x, [x]]
        named = {"first": x}
        for block in self.blocks:
            x = block(x, seen, named)
        assert len(seen) == 5 and list(named) == [5]
        return x + seen[0] + sum(one for (one,) in seen[1:]) + named[5]


@on_ranks(1, 2)
def test_blocks_that_write_to_their_arguments(rank, world):
    """Containers with tensors that need gradients are given to a module as copies, so what it wrote to them was lost,
    silently, as with torch."""
    trains_like_one_process(WritesToArguments, units=lambda module: module.blocks, reshard_after_forward=True)


class Step:
    """A node that torch's pytree knows, and that has a note which is no child."""

    def __init__(self, value: Any, note: Any = None) -> None:
        self.value, self.note = value, note


pytree.register_pytree_node(
    Step,
    lambda step: ([step.value], step.note),
    lambda values, note: Step(*values, note),
    serialized_type_name="tests.step.test_side_outputs.Step",
)


class WritesOnePart(nn.Module):
    """A block that returns nothing, and writes its result to the only argument, a container of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(8, 8), kind

    def forward(self, passed: Any) -> None:
        if self.kind in ("list", "deque"):
            passed.append(torch.tanh(self.layer(passed[-1])))
            passed.reverse()
            passed.reverse()
        elif self.kind == "dict":
            passed["more"] = torch.tanh(self.layer(passed.get("more", passed["x"])))
        else:
            passed.value = torch.tanh(self.layer(passed.value))
            passed.note = "written"


class GivesKeywords(nn.Module):
    """Blocks that are called with one keyword argument, or with one positional one."""

    def __init__(self, kind: str, by_keyword: bool) -> None:
        super().__init__()
        self.kind, self.by_keyword = kind, by_keyword
        self.blocks = nn.ModuleList(WritesOnePart(kind) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        makers: dict[str, Any] = {
            "list": lambda: [x],
            "deque": lambda: deque([x], maxlen=2),
            "dict": lambda: {"x": x},
            "dataclass": lambda: Result(x, "a note"),
            "pytree": lambda: Step(x),
            "object": lambda: SimpleNamespace(value=x),
        }
        passed = makers[self.kind]()
        for block in self.blocks:
            block(passed=passed) if self.by_keyword else block(passed)
        assert getattr(passed, "note", "written") == "written"
        if self.kind == "list":
            assert len(passed) == 4 and passed[0] is x
        return passed["more"] if self.kind == "dict" else passed[-1] if self.kind in ("list", "deque") else passed.value


@on_ranks(2)
@pytest.mark.parametrize("by_keyword", [True, False])
@pytest.mark.parametrize("kind", ["list", "deque", "dict", "dataclass", "pytree", "object"])
def test_blocks_that_write_to_their_only_argument(rank, world, kind, by_keyword):
    """What a unit wrote to a list, a dict or a dataclass was lost, silently; so it was in a deque or a node of pytree.
    What it wrote to an object of another class was seen, but backward did not gather the unit for it: "out of bounds
    for storage of size 0"."""
    build = lambda: GivesKeywords(kind, by_keyword)
    trains_like_one_process(build, units=lambda module: module.blocks, reshard_after_forward=True)


@on_ranks(2)
def test_what_a_block_wrote_is_in_the_dtype_of_computation(rank, world):
    """Mixed precision casts what is in a container, in a copy; the caller's own tensors stay as they are."""
    model, seen = Collects(), [torch.ones(2, 8), [torch.ones(2, 8)]]
    api.ours.fully_shard(model, mesh=mesh_of(world), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model(torch.ones(2, 8), seen, {})
    assert [one.dtype for one in (seen[0], seen[1][0], seen[2][0])] == [torch.bfloat16] * 3
    given = [torch.ones(2, 8), [torch.ones(2, 8)]]
    model.forward = lambda x, given: given.append(x)
    model(torch.ones(2, 8), given)
    assert [one.dtype for one in (given[0], given[1][0], given[2])] == [torch.float32, torch.float32, torch.bfloat16]


class Lazy(nn.Module):
    """Returns a function or a generator of its result."""

    def __init__(self, generator: bool) -> None:
        super().__init__()
        self.layer, self.scale, self.generator = nn.Linear(8, 8), nn.Parameter(torch.randn(8)), generator

    def forward(self, x):
        if not isinstance(x, Tensor):
            x = next(x) if self.generator else x()
        y = self.layer(x).tanh() * self.scale
        return iter([y]) if self.generator else lambda: y


@on_ranks(2)
@pytest.mark.parametrize("generator", [False, True])
def test_outputs_that_no_hook_can_reach(rank, world, generator):
    """Backward entered such units without a gather: "storage of size 0", or a segmentation fault by ``* self.scale``.
    They stay in memory for it."""

    def loss(module: nn.Module, inputs: Tensor) -> Tensor:
        result = module(inputs)
        return (next(result) if generator else result()).square().mean()

    trains_like_one_process(lambda: nn.Sequential(Lazy(generator), Lazy(generator)), loss, reshard_after_forward=True)


class Scaled(nn.Module):
    """A parametrization whose backward reads its own weight and the original."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8, 1) + 0.5)

    def forward(self, weight):
        return (weight * self.scale).tanh()


class Parametrized(nn.Module):
    """A layer whose weight is computed, once for all calls inside ``parametrize.cached()``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        parametrize.register_parametrization(self.layer, "weight", Scaled())

    def forward(self, x):
        return self.layer(x).tanh()


@on_ranks(2)
@pytest.mark.parametrize("used", ["first", "second", "both"])
def test_a_weight_that_is_cached_around_two_calls(rank, world, used):
    """The gradients of the second call's inputs ended the unit's backward, but the weight's graph belongs to the first
    call, which nobody had entered: it read freed memory, and the process died with a segmentation fault (so does
    torch's)."""

    def loss(module: nn.Module, inputs: Tensor) -> Tensor:
        with parametrize.cached():
            first, second = module(inputs), module(inputs * 2)
        one = {"first": first, "second": second, "both": first + second}[used]
        return one.square().mean()

    build = lambda: nn.Sequential(nn.Linear(8, 8), Parametrized(), nn.Linear(8, 8))
    trains_like_one_process(build, loss, reshard_after_forward=True)


@api.fsdp2_only
def test_a_cached_weight_is_an_output_of_the_call_that_computed_it():
    """Not of later calls in the block: backward would enter their units again by it, and gather them once more."""
    with fake_mesh(2) as mesh:
        build = lambda: nn.Sequential(Parametrized(), nn.Linear(8, 8), nn.Linear(8, 8))
        module = sharded(build, api.ours, lambda module: [*module], mesh=mesh, reshard_after_forward=True)
        with parametrize.cached():
            loss = module(torch.ones(2, 8)).sum()
        assert gathers(loss.backward) == 3


KEPT_ELSEWHERE: list[Tensor] = []


class LeavesItsLossElsewhere(nn.Module):
    """Appends an auxiliary loss to a list that belongs to no module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.rand(8))

    def forward(self, x):
        y = self.layer(x)
        KEPT_ELSEWHERE.append((y * self.scale).square().mean())
        return y


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_a_loss_kept_where_nobody_looks(rank, world, reshard):
    """Backward enters the unit unseen, and many kernels do not check that memory is there: the process died with a
    segmentation fault. Now autograd refuses, and the explanation names the parameter and a remedy, which works."""
    KEPT_ELSEWHERE.clear()
    build = lambda: nn.Sequential(nn.Linear(8, 8), LeavesItsLossElsewhere(), nn.Linear(8, 8))
    module, alone = beside_one_process(build, lambda module: [*module], reshard_after_forward=True)
    if not reshard:
        module.set_reshard_after_forward(False)
        module.set_reshard_after_backward(False)
    losses = []
    for one in (alone, module):
        one(torch.ones(2, 8))
        losses.append(KEPT_ELSEWHERE.pop())
    losses[0].backward()
    if not reshard:
        losses[1].backward()
        for unit in (*module, module):
            unit.reshard()
        assert_gradients(module, alone)
        return
    with pytest.raises(RuntimeError, match="is at version 1073") as caught:
        losses[1].backward()
    explain(module, caught.value)
    assert "1.scale (unit '1'): got a backward through it while it is sharded" in str(caught.value)
    assert "set_reshard_after_forward(False) and set_reshard_after_backward(False)" in str(caught.value)
    module.reset_iter_state()


class Exposes(nn.Module):
    """Hands out its weight, or a view of it, in one of several ways, and returns nothing else that needs a gradient."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how, self.kept = nn.Linear(8, 8), how, None

    def forward(self, x, passed):
        weight = self.layer.weight
        if self.how == "list":
            passed.append(weight)
        elif self.how == "object":
            passed.value = [weight]
        elif self.how == "view in a dict":
            passed["weight"] = (weight.t(), 1)
        else:
            self.kept = SimpleNamespace(view=[weight.t()])
        return self.layer(x).detach() * 1.0


@on_ranks(2)
@pytest.mark.parametrize("how", ["list", "object", "view in a dict", "module"])
def test_a_weight_that_a_module_hands_out(rank, world, how):
    """Only in what a forward returns was the unit's own weight copied. Elsewhere the caller found memory that was gone:
    "its data is not allocated yet", or the process ended."""

    def loss(module: nn.Module, inputs: Tensor) -> Tensor:
        passed: Any = {"list": [inputs], "object": SimpleNamespace(), "view in a dict": {"x": [inputs]}}.get(how)
        module[1](module[0](inputs), passed)
        found = passed[-1] if how == "list" else passed.value[0] if how == "object" else None
        found = passed["weight"][0] if how == "view in a dict" else found
        if how == "module":
            (found,), module[1].kept = module[1].kept.view, None
        return (found * found).sum()

    trains_like_one_process(lambda: nn.Sequential(nn.Linear(8, 8), Exposes(how)), loss, reshard_after_forward=True)


class LeavesItsLoss(nn.Module):
    """Returns a result, and leaves a loss that it computes afterwards in an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.router = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, losses):
        y = self.layer(x).tanh()
        loss = (self.router(y).softmax(-1) * self.router.bias).mean()
        if isinstance(losses, list):
            losses.append((loss, "balance"))
        elif isinstance(losses, dict):
            losses.setdefault("balance", []).append(loss)
        else:
            losses.kept = [*losses.kept, loss]
        return y


class Losses(nn.Module):
    """Layers with a place for their losses among the arguments."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.blocks = kind, nn.ModuleList(LeavesItsLoss() for _ in range(2))

    def forward(self, x):
        losses: Any = {"list": [], "dict": {}, "object": SimpleNamespace(kept=[])}[self.kind]
        for block in self.blocks:
            x = block(x, losses=losses)
        return x, [*tensors([losses.kept if self.kind == "object" else losses])]


@on_ranks(2)
@pytest.mark.parametrize("used", ["all", "losses alone"])
@pytest.mark.parametrize("kind", ["list", "dict", "object"])
def test_a_loss_that_a_block_leaves_in_an_argument(rank, world, kind, used):
    """A container without tensors that need gradients is not copied, and nobody looked for what was added to it as long
    as the block returned something: backward entered the block unseen, and read freed memory."""

    def loss(module: nn.Module, inputs: Tensor) -> Tensor:
        y, losses = module(inputs)
        assert len(losses) == 2
        return sum(losses) + (y.square().mean() if used == "all" else 0.0)

    trains_like_one_process(lambda: Losses(kind), loss, units=lambda module: module.blocks, reshard_after_forward=True)
