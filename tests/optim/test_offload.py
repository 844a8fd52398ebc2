"""``offload_optimizer_state``: steps are those of the same optimizer without it, and its state lies on the host.

A CPU has no memory apart from the host's. So that there is something to copy, ``host_apart`` says that it has.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

import fsdp2
from fsdp2.comm.staging import Staging, host_memory
from fsdp2.optim.host_state import HOST_STATE
from tests.optim import test_full_params as whole
from tests.optim.stepping import (
    BUCKET,
    OPTIMIZERS,
    Make,
    assert_equal,
    assert_same_training,
    batch,
    build,
    host_apart,
    local,
    make,
    on_host,
    train,
)
from tests.support import api
from tests.support.composition import composes
from tests.support.counting import Operators
from tests.support.packages import needs
from tests.support.parity import mesh_1d
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


def pair(make: Make, mesh: Any = None, *, bucket_mb: float = BUCKET, **options: Any) -> tuple[list[Any], list[Any]]:
    """Return two equal sharded models and their optimizers, both on local shards, the second with its state offloaded.

    Options of ``offload_optimizer_state`` go to it, the others to ``fully_shard``.
    """
    own = {name: options.pop(name) for name in ("device_budget_bytes", "elementwise") if name in options}
    modules = [build(mesh, **options) for _ in range(2)]
    first, second = (make(module.parameters()) for module in modules)
    fsdp2.use_local_shards(first, elementwise=own.get("elementwise", False))
    assert fsdp2.offload_optimizer_state(second, bucket_mb=bucket_mb, **own) is second
    return modules, [first, second]


WAYS = [(name, way) for name, (kind, _) in OPTIMIZERS.items() for way in ("plain", "foreach", "fused")]
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


@composes("state on the host", "Adam", "uneven")
@composes("state on the host", "SGD", "uneven")
@on_ranks(2, 4)
@pytest.mark.parametrize(("name", "way"), [one for one in WAYS if one[1] != "fused" or one[0].split()[0] in FUSED])
def test_steps_are_those_without(rank, world, name, way):
    """Every elementwise optimizer of torch, as a loop, on lists and fused: parameters and state, bit for bit."""
    with host_apart():
        modules, optimizers = pair(make(name, way))
        # torch's fused SGD takes no list in which some parameters have momentum and others not yet: none is rare
        steps = [0, 2, 3] if (name[:3], way) == ("SGD", "fused") else range(3)
        for module, optimizer in zip(modules, optimizers, strict=True):
            train(module, optimizer, steps)
        assert_same_training(modules, optimizers)
        moments = [v for entry in optimizers[1].state.values() for v in entry.values() if isinstance(v, DTensor)]
        nbytes = sum(local(moment).nbytes for moment in moments if moment.dim())
        assert nbytes <= on_host(optimizers[1]) <= nbytes + 16 * len(moments)


@on_ranks(2)
def test_a_cpu_copies_nothing(rank, world):
    """Without another device nothing is staged, and a step goes over all parameters at once."""
    modules, optimizers = pair(make("AdamW", "foreach"))
    for module, optimizer in zip(modules, optimizers, strict=True):
        train(module, optimizer)
    assert_same_training(modules, optimizers)
    host = optimizers[1].__dict__[HOST_STATE]
    assert on_host(optimizers[1]) == 0 and not host._staging
    assert len(host.turns(modules[1].parameters(), skip=False)) == 1
    for param in modules[1].parameters():
        param.grad = torch.zeros_like(param)
    optimizers[1].step()  # which makes state for the one that had no gradient
    with Operators(
        lambda func, args: func if any(isinstance(arg, DTensor) for arg in tree_leaves(args)) else None
    ) as on:
        optimizers[1].step()
    assert not on.seen  # as with state elsewhere, it steps on the local shards


@on_ranks(1)
def test_moments_are_copied_and_bounded(rank, world):
    """A step finds moments in other memory than between steps; three buckets of it, which are gone afterwards."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(16)))
    for layer in module:
        fsdp2.fully_shard(layer, mesh=mesh_1d())
    seen: list[dict[Tensor, Tensor]] = []

    class Noting(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            seen.append({param: entry["exp_avg"] for param, entry in self.state.items()})
            super().step()

    of_one = 2 * module[0].weight.to_local().nbytes
    with host_apart():
        optimizer = Noting(module.parameters(), lr=0.1, foreach=False)
        fsdp2.offload_optimizer_state(optimizer, bucket_mb=2 * of_one / 2**20, elementwise=True)
        sizes: list[list[int]] = []

        def begin(staging: Staging, pieces: Any, begin: Any = Staging.begin) -> None:
            begin(staging, pieces)
            sizes.append([slot.nbytes for slot in staging._slots])

        for _ in range(3):
            module(torch.randn(4, 128)).square().mean().backward()
            seen.clear()
            with mock.patch.object(Staging, "begin", begin):
                optimizer.step()
        (staging,) = optimizer.__dict__[HOST_STATE]._staging.values()
    assert len(seen) == 8 and all(len(part) == 2 for part in seen)
    slots = {moment.untyped_storage().data_ptr() for part in seen for moment in part.values()}
    shown = {local(entry["exp_avg"]).untyped_storage().data_ptr() for entry in optimizer.state.values()}
    assert len(slots) == 3 and len(shown) == 16 and not slots & shown
    assert sizes == [[2 * of_one] * 3] * 2 and not staging._slots


@on_ranks(1)
@pytest.mark.parametrize("pin_memory", [True, False])
def test_memory_is_page_locked_if_asked_for(rank, world, pin_memory):
    """``pin_memory`` decides; without an accelerator there is no such memory."""
    asked: list[bool] = []

    def memory(nbytes: int, *, pin: bool) -> Tensor:
        asked.append(pin)
        return host_memory(nbytes, pin=pin)

    module = build()
    with host_apart(), mock.patch("fsdp2.optim.host_state.host_memory", memory):
        optimizer = make("AdamW")(module.parameters())
        fsdp2.offload_optimizer_state(optimizer, bucket_mb=BUCKET, pin_memory=pin_memory)
        train(module, optimizer, [0])
    assert asked and set(asked) == {pin_memory}


@on_ranks(2, 4)
def test_a_budget(rank, world):
    """Moments stay on the device as far as they fit; a larger budget keeps more, and results are the same.

    All ranks keep those of the same parameters, also where some ranks have fewer elements, or none.
    """
    kept = []
    with host_apart():
        for budget in (0, 300, 1 << 20):
            modules, optimizers = pair(make("AdamW", "foreach"), device_budget_bytes=budget)
            for module, optimizer in zip(modules, optimizers, strict=True):
                train(module, optimizer, [0])
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                train(module, optimizer, [1, 2])
            assert_same_training(modules, optimizers)
            kept.append(sum(optimizers[1].__dict__[HOST_STATE]._kept.values()))
            stays, moved = (getattr(optimizers[1].__dict__[HOST_STATE], name) for name in ("_kept", "_held"))
            assert kept[-1] <= budget and bool(moved) is (budget < 1 << 20)
            everybodys = [None] * world
            dist.all_gather_object(everybodys, [name for name, p in modules[1].named_parameters() if p in stays])
            assert all(names == everybodys[0] for names in everybodys)
    assert kept[0] == 0 < kept[1] < kept[2]


# ---- everybody else ----


@on_ranks(2)
@pytest.mark.parametrize("stepped", [False, True])
def test_built_before_sharding(rank, world, stepped):
    """An optimizer that was built, and had stepped, before its parameters were sharded: its state is cut."""
    optimizers, modules = [], []
    with host_apart():
        for use in range(2):
            torch.manual_seed(1)
            module: Any = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
            optimizer = make("AdamW", "foreach")(module.parameters())
            if use:
                fsdp2.offload_optimizer_state(optimizer, bucket_mb=BUCKET)
            if stepped:
                module(torch.ones(2, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            fsdp2.fully_shard(module, mesh=mesh_1d())
            fsdp2.use_local_shards(optimizer)
            for step in range(2):
                module(batch(step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            modules.append(module)
            optimizers.append(optimizer)
        assert_same_training(modules, optimizers)
        assert on_host(optimizers[1])


class Sign(torch.optim.Optimizer):
    """Follows the sign of an average that it replaces by another tensor, and counts its steps in its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step."""
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if state:
                        state.pop("first", None)
                    else:
                        state["first"] = torch.ones_like(param)
                    before = state.get("average", torch.zeros_like(param))
                    state["average"] = before * 0.9 + param.grad
                    state["nested"] = [state["average"] * 2, {"seen": group["steps"]}]
                    param.sub_(state["average"].sign() * group["lr"] / group["steps"] + state["nested"][0] * 0.01)


@on_ranks(2)
def test_other_classes_that_are_elementwise(rank, world):
    """State may be replaced and dropped in a step, and nested; options of groups change once a step."""
    with host_apart():
        modules, optimizers = pair(Sign, elementwise=True)
        for module, optimizer in zip(modules, optimizers, strict=True):
            train(module, optimizer)
            assert optimizer.param_groups[0]["steps"] == 3
        assert_same_training(modules, optimizers)
        held = optimizers[1].__dict__[HOST_STATE]._held
        assert all(len(one.places) == 2 + ("first" in one.entry) for one in held.values())


class Pairs(torch.optim.Optimizer):
    """Keeps two averages of a parameter in one tensor of a subclass, as quantized optimizers keep codes and scales."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step."""
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            state = self.state[param]
            if not state:
                state["averages"] = TwoTensor(torch.zeros_like(param), torch.ones_like(param))
            averages: Any = state["averages"]
            averages.a.mul_(0.9).add_(param.grad)
            averages.b.mul_(0.9).add_(param.grad.square())
            param.sub_(averages.a / averages.b.sqrt() * 0.1)


@on_ranks(2)
def test_state_in_tensor_subclasses(rank, world):
    """What they are made of is moved."""
    with host_apart():
        modules, optimizers = pair(Pairs, elementwise=True)
        for module, optimizer in zip(modules, optimizers, strict=True):
            train(module, optimizer)
        assert_equal(modules[0].state_dict(), modules[1].state_dict())
        for one, other in zip(*(module.parameters() for module in modules), strict=True):
            if one in optimizers[0].state:
                found = [local(o.state[p]["averages"]) for o, p in zip(optimizers, (one, other), strict=True)]
                assert torch.equal(found[0].a, found[1].a) and torch.equal(found[0].b, found[1].b)
        assert on_host(optimizers[1])


@needs("torchao")
@on_ranks(2)
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_few_bits_of_torchao(rank, world, name):
    """Its moments are codes and scales, in a subclass inside a DTensor; its step is compiled for each parameter. With
    torch 2.13, only the first one of these steps on DTensors by itself; all do on local shards."""
    kind = getattr(importlib.import_module("torchao.optim"), name)
    with host_apart():
        modules: list[Any] = []
        for _ in range(2):
            torch.manual_seed(0)
            module: Any = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
            fsdp2.fully_shard(module, mesh=mesh_1d())
            modules.append(module)
        optimizers = [kind(module.parameters(), lr=0.01) for module in modules]
        if name != "AdamW8bit":
            fsdp2.use_local_shards(optimizers[0], elementwise=True)
        fsdp2.offload_optimizer_state(optimizers[1], bucket_mb=0.01, elementwise=True)
        for step in range(2):
            for module, optimizer in zip(modules, optimizers, strict=True):
                module(torch.randn(4, 128, generator=torch.Generator().manual_seed(step))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_equal(modules[0].state_dict(), modules[1].state_dict())
        assert on_host(optimizers[1])


# ---- what others do to the state ----


@on_ranks(2)
def test_state_that_is_changed_replaced_and_dropped(rank, world):
    """What ``optimizer.state`` has when a step begins is what it uses."""
    with host_apart():
        modules, optimizers = pair(make("AdamW", "foreach"))
        for module, optimizer in zip(modules, optimizers, strict=True):
            train(module, optimizer, [0])
            one, two = module.one.weight, module.two.weight
            optimizer.state[one]["exp_avg"].to_local().mul_(0.5)
            optimizer.state[two]["exp_avg"] = optimizer.state[two]["exp_avg"] * 0.25
            train(module, optimizer, [1])
            optimizer.state[one] = {**optimizer.state[one]}
            del optimizer.state[two]
            train(module, optimizer, [2])
            optimizer.state.clear()
            train(module, optimizer, [3])
        assert_same_training(modules, optimizers)
        assert on_host(optimizers[1])


@on_ranks(2)
def test_a_step_after_one_that_failed(rank, world):
    """It uses moments that are fetched for it, and not what the failed one was lent."""
    with host_apart():
        modules, optimizers = pair(make("SGD with momentum"))
        for module, optimizer in zip(modules, optimizers, strict=True):
            train(module, optimizer, [0])
            module(batch(1)).square().mean().backward()
            (group,) = optimizer.param_groups
            for param in group["params"]:
                param.grad = param.grad if param.ndim == 2 else None  # the state of others is not lent
            momentum, group["momentum"] = group["momentum"], None
            with pytest.raises(TypeError):
                optimizer.step()
            group["momentum"] = momentum
            optimizer.zero_grad()
            train(module, optimizer, [1, 2])
        assert_same_training(modules, optimizers)


# ---- checkpoints ----


@on_ranks(2)
def test_distributed_checkpoints(rank, world, tmp_path):
    """DCP saves from memory of the host and loads into it, in place."""
    with host_apart():
        modules, optimizers = pair(make("AdamW", "foreach"))
        for module, optimizer in zip(modules, optimizers, strict=True):
            train(module, optimizer, [0, 1])
        dcp.save({"optimizer": get_optimizer_state_dict(modules[1], optimizers[1])}, checkpoint_id=tmp_path)
        train(modules[1], optimizers[1], [2])
        places = {param: entry["exp_avg"] for param, entry in optimizers[1].state.items()}
        state = {"optimizer": get_optimizer_state_dict(modules[1], optimizers[1])}
        dcp.load(state, checkpoint_id=tmp_path)
        set_optimizer_state_dict(modules[1], optimizers[1], state["optimizer"])
        assert_equal(optimizers[0].state_dict(), optimizers[1].state_dict())
        assert all(optimizers[1].state[param]["exp_avg"] is moment for param, moment in places.items())
        assert on_host(optimizers[1])


@on_ranks(2, 4)
@pytest.mark.parametrize("budget", [0, 300])
def test_a_whole_state_dict(rank, world, budget):
    """torch gathers the state of one parameter after the other, in the order in which a rank's optimizer has them.

    Ranks with elements of a parameter moved them to the host, and noted them last; the others noted them first. So
    ranks gathered different moments together: the process died, or moments of equal sizes were mixed up silently.
    """
    with host_apart():
        modules, optimizers = pair(make("AdamW", "foreach"), device_budget_bytes=budget)
        whole = []
        for module, optimizer in zip(modules, optimizers, strict=True):
            train(module, optimizer)  # a parameter gets its first gradient in the second step
            options = StateDictOptions(full_state_dict=True)
            whole.append(get_optimizer_state_dict(module, optimizer, options=options)["state"])
        assert_equal(*whole)
        names = [name for name, param in modules[1].named_parameters() if param.requires_grad]
        assert list(whole[1]) == list(whole[0]) == sorted(names, key=lambda name: name == "rare")


@on_ranks(2)
def test_a_saved_state_is_kept(rank, world):
    """``load_state_dict`` copies it to where the state is, so the next steps do not change it."""
    with host_apart():
        modules, optimizers = pair(make("AdamW"))
        for module, optimizer in zip(modules, optimizers, strict=True):
            train(module, optimizer, [0, 1])
            state = copy.deepcopy(optimizer.state_dict())
            moments = [entry["exp_avg"] for entry in state["state"].values() if entry["exp_avg"].numel() > 1]
            before = copy.deepcopy(moments)
            train(module, optimizer, [2])
            optimizer.load_state_dict(state)
            train(module, optimizer, [3])
            if optimizer is optimizers[1]:
                assert_equal(moments, before)
        assert_same_training(modules, optimizers)
        assert on_host(optimizers[1])


def test_loading_puts_nothing_on_the_device() -> None:
    """torch moves loaded state to the device of its parameter; what is to lie on the host stays there."""
    seen: list[str] = []
    param = nn.Parameter(torch.ones(64))
    with host_apart():
        optimizer = fsdp2.offload_optimizer_state(make("AdamW")([param]))
        param.grad = torch.ones(64)
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.register_load_state_dict_post_hook(
            lambda o: seen.extend(type(v).__name__ for v in o.state[param].values())
        )

        class Moved(torch.Tensor):
            def to(self, *args: Any, **kwargs: Any) -> Any:
                raise AssertionError("moved")

        state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].as_subclass(Moved)
        with pytest.raises(AssertionError, match="moved"):
            make("AdamW")([param]).load_state_dict(state)
        state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].as_subclass(torch.Tensor)
        optimizer.load_state_dict(state)
    assert seen == ["Tensor"] * 3


# ---- whole parameters ----


@composes("state on the host", "Muon", "uneven")
@on_ranks(2, 4)
@pytest.mark.parametrize("name", ["Muon", "Adafactor", "Shampoo"])
@pytest.mark.parametrize("budget", [0, 400])
def test_whole_parameters(rank, world, name, budget):
    """The owners' state lies on the host: momentum, rows and columns, lists of factors. Results are one process's."""
    with host_apart():
        module, optimizer, reference, plain = whole.pair(name, bucket_mb=400 / 2**20)
        fsdp2.offload_optimizer_state(optimizer, device_budget_bytes=budget, bucket_mb=BUCKET)
        whole.train(module, optimizer, reference, plain, range(3))
        state = copy.deepcopy(optimizer.state_dict())
        whole.assert_same_state(optimizer.state_dict(), plain.state_dict())
        whole.train(module, optimizer, reference, plain, [3])
        optimizer.load_state_dict(state)
        whole.assert_same_state(optimizer.state_dict(), state)
        whole.set_gradients(module, reference, 4)
        optimizer.step()
        host = optimizer.__dict__[HOST_STATE]
        assert sum(host._kept.values()) <= budget
        held = torch.tensor([on_host(optimizer)])
        torch.distributed.all_reduce(held)
        assert held.item() > 0 or budget


@on_ranks(1, 2)
@pytest.mark.parametrize("budget", [0, 300])
def test_a_group_of_whole_parameters_that_is_left_out_for_a_step(rank, world, budget):
    """Its state has the form of shards meanwhile. Where a rank has a parameter alone, owners were given that form back
    with the next step, and no later step or state dict worked."""
    modules = [build() for _ in range(2)]
    optimizers = []
    for module in modules:
        matrices = {"params": [param for param in module.parameters() if param.ndim == 2]}
        others = {"params": [param for param in module.parameters() if param.ndim != 2]}
        optimizers.append(fsdp2.use_full_params(torch.optim.AdamW([matrices, others], lr=0.1)))
    with host_apart():
        fsdp2.offload_optimizer_state(optimizers[1], device_budget_bytes=budget, bucket_mb=BUCKET)
        for step in range(4):
            for module, optimizer in zip(modules, optimizers, strict=True):
                group = optimizer.param_groups.pop(0) if step == 1 else None
                train(module, optimizer, [step])
                if group is not None:
                    optimizer.param_groups.insert(0, group)
        assert_same_training(modules, optimizers)


# ---- refused ----


def test_optimizers_and_options_that_cannot_work() -> None:
    """Each is named, with what to do."""
    params = [nn.Parameter(torch.ones(2, 2))]
    offload: Any = fsdp2.offload_optimizer_state
    with pytest.raises(TypeError, match=r"got dict; pass the optimizer that a wrapper holds"):
        offload({})
    with pytest.raises(ValueError, match=r"offload_optimizer_state: LBFGS cannot .* products over all elements"):
        offload(torch.optim.LBFGS(params))
    with pytest.raises(ValueError, match=r"offload_optimizer_state: Muon cannot .* Call fsdp2.use_full_params on it"):
        offload(torch.optim.Muon(params))
    with pytest.raises(ValueError, match=r"offload_optimizer_state: it is not known whether .*Sign is elementwise"):
        offload(Sign(params))
    for budget in (-1, 1.5, True):
        with pytest.raises(ValueError, match=r"device_budget_bytes must be a number of bytes >= 0, got"):
            offload(torch.optim.SGD(params), device_budget_bytes=budget)
    for size in (0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"bucket_mb must be a positive, finite number of MiB, got {size}"):
            offload(torch.optim.SGD(params), bucket_mb=size)
    differentiable = offload(torch.optim.Adam(params, differentiable=True))
    with pytest.raises(ValueError, match=r"Adam.step: group 0 has differentiable=True, expected False"):
        differentiable.step()
    whole_first = offload(torch.optim.AdamW(params))
    with pytest.raises(ValueError, match=r"offload_optimizer_state was called .* Call use_full_params first"):
        fsdp2.use_full_params(whole_first)
    fsdp2.offload_optimizer_state(fsdp2.use_full_params(torch.optim.AdamW(params))).step()


def test_twice_is_once() -> None:
    """A second call returns the optimizer as it is."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    fsdp2.offload_optimizer_state(optimizer)
    step = optimizer.step
    assert fsdp2.offload_optimizer_state(optimizer) is optimizer and optimizer.step == step


def test_a_compiled_step() -> None:
    """torch.compile leaves the step as it is."""
    params = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    with host_apart():
        optimizers = [torch.optim.AdamW([param], lr=0.1) for param in params]
        fsdp2.offload_optimizer_state(optimizers[1])
        step = torch.compile(optimizers[1].step, backend="eager")
        for number in range(3):
            for param in params:
                param.grad = torch.full((4,), float(number))
            optimizers[0].step()
            step()
    torch._dynamo.reset()
    assert torch.equal(*params) and on_host(optimizers[1])


def test_slots_are_for_pieces_in_turn() -> None:
    """Five pieces pass through three slots: all arrive in their order, and changes come back."""
    pieces = [[torch.full((16,), i, dtype=torch.uint8), torch.full((4,), i, dtype=torch.uint8)] for i in range(5)]
    staging = Staging(torch.device("cpu"))
    staging.begin(pieces)
    for i in range(5):
        slot = staging.use()[:20]
        assert slot.eq(i).all()
        slot.add_(10)
        staging.send_back()
    staging.end()
    assert all(part.eq(10 + i).all() for i, piece in enumerate(pieces) for part in piece)
