"""Remedies that errors name, each tried: a program that raises the error, does what its text says, and goes on.

A case is a generator. It yields the call that is to raise; the test checks that the error has the case's text, and lets
the generator go on, which does what the text says, as it is written, and trains.
"""

from __future__ import annotations

import copy
import functools
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fsdp2.sharding.platform import simulated, using
from tests.optim.test_offload import Pairs
from tests.step.test_teachers import Momentum, by_method, units
from tests.support.parity import mesh_1d
from tests.support.streams import Device

__all__ = ["CASES", "Call", "finalizes", "goes_on", "layers", "loss", "model", "on", "remedy", "try_case"]

Call = Callable[[], object]
Case = Callable[[int], Iterator[Call]]
CASES: dict[str, Case] = {}
"""By the piece of the error's text that is the remedy."""
RANKS: dict[Case, int | None] = {}
"""On how many ranks a case is tried; 0: in a process without ranks; None: on a device (``remedies_of_devices.py``)."""


def remedy(*texts: str, ranks: int | None = 2) -> Callable[[Case], Case]:
    """Register a case for the errors whose texts have these pieces; the first is the one that it raises."""

    def register(case: Case) -> Case:
        for text in texts:
            assert text not in CASES, text
            CASES[text] = case
        RANKS[case] = ranks
        return case

    return register


def on(ranks: int | None) -> list[str]:
    """Return the texts of the cases that are tried on so many ranks."""
    return [text for text, case in CASES.items() if RANKS[case] == ranks]


def try_case(text: str, rank: int = 0) -> None:
    """Raise the error, which has the remedy; done as written, it helps."""
    case = CASES[text](rank)
    call = next(case, None)
    if call is None:
        return  # not on this machine
    with pytest.raises(Exception) as raised:
        call()
    first = next(name for name, other in CASES.items() if other is CASES[text])
    assert first in str(raised.value), str(raised.value)
    for _ in case:
        raise AssertionError("a case yields once")


def layers(count: int = 3, width: int = 8) -> nn.Sequential:
    """Return plain layers, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def model(**options: Any) -> nn.Sequential:
    """Return layers that are units, in a root."""
    made = layers()
    for unit in (*made, made):
        fully_shard(unit, mesh=mesh_1d(), **options)
    return made


def loss(module: nn.Module) -> torch.Tensor:
    """Return the loss of a forward."""
    return module(torch.ones(2, 8)).square().mean()


def goes_on(module: nn.Module) -> None:
    """Train a step: every trainable parameter gets a gradient, and changes."""
    module.zero_grad()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    loss(module).backward()
    optimizer.step()
    optimizer.zero_grad()
    changed = [p.detach() - old for p, old in zip(optimizer.param_groups[0]["params"], before, strict=True)]
    total = sum(float((d.full_tensor() if isinstance(d, DTensor) else d).abs().sum()) for d in changed)
    assert total > 0


def finalizes(module: nn.Module) -> None:
    """Run a backward that the caller ends: every parameter gets a gradient."""
    module.zero_grad()
    module.set_manual_backward_finalization(True)
    loss(module).backward()
    module.finalize_backward()
    assert all(p.grad is not None for p in module.parameters())


# ---- parameters ----


@remedy("write them in place instead, with `with torch.no_grad(): param.copy_(value)`")
def data_of_a_shard(rank: int) -> Iterator[Callable[[], object]]:
    """The assignment went unnoticed, since DTensor ignores it."""
    module = model()
    param, value = module[0].weight, torch.ones_like(module[0].weight)
    param.data = value
    yield lambda: loss(module)
    with torch.no_grad():
        param.copy_(value)
    goes_on(module)


def momentum() -> Any:
    """Return a student, and a teacher that its forward writes to without a trace, each layer a unit."""
    module = Momentum("by_data", graph=True, reshards=False)
    for unit in (*units(module), module):
        fully_shard(unit, mesh=mesh_1d())
    module.keep_weights()
    return module


def train_momentum(module: nn.Module) -> None:
    """Run some backwards."""
    for _ in range(4):
        module(torch.ones(2, 4)).mean().backward()


@remedy("Call reshard() on the unit of the parameter after such a write, or write with in-place methods")
def old_values_on_a_device(rank: int) -> Iterator[Callable[[], object]]:
    """Each of the two ways helps."""
    with Device() as device, using(simulated("streams", device)):
        module, another = momentum(), momentum()
        yield functools.partial(train_momentum, module)
        module.reshards = True
        train_momentum(module)
        with pytest.raises(RuntimeError, match="computed with old values"):
            train_momentum(another)
        another.write = by_method
        train_momentum(another)


@remedy("call reshard() on the unit of the parameter after such a write")
def old_values_that_ranks_do_not_compare(rank: int) -> Iterator[Callable[[], object]]:
    """It is not gathered again, since ranks might part."""
    fsdp2.set_rank_checks(False)
    module = momentum()
    yield functools.partial(train_momentum, module)
    module.reset_iter_state()
    module.reshards = True
    train_momentum(module)


@remedy("parameter.to_local().detach().clone().share_memory_()")
def memory_that_processes_share(rank: int) -> Iterator[Callable[[], object]]:
    """The process ended with a segmentation fault, also if the model was below another module."""
    module = model()
    yield nn.Sequential(module).share_memory
    copies = [parameter.to_local().detach().clone().share_memory_() for parameter in module.parameters()]
    assert all(copied.is_shared() for copied in copies)
    goes_on(module)


@remedy("whose communication it cannot change; call fsdp2.share_comm_ctx(modules) instead")
def torchs_share_comm_ctx(rank: int) -> Iterator[Call]:
    """fsdp2's own is called."""
    modules = [model(), model()]
    yield lambda: torch.distributed.fsdp.share_comm_ctx(modules)
    fsdp2.share_comm_ctx(modules)
    for module in modules:
        loss(module).backward()


@remedy("Call the setters of FSDPModule, such as set_requires_gradient_sync")
def a_name_of_torchs_that_is_set(rank: int) -> Iterator[Callable[[], object]]:
    """A new attribute would have no effect."""
    module = model()
    group = module[0]._get_fsdp_state()._fsdp_param_group
    yield lambda: setattr(group, "reduce_grads", False)
    module[0].set_requires_gradient_sync(False)
    assert not group.reduce_grads
    module[0].set_requires_gradient_sync(True)
    goes_on(module)


@remedy("Load values with load_state_dict or copy_ them into the sharded parameter")
def a_parameter_of_another_shape(rank: int) -> Iterator[Callable[[], object]]:
    """The shard is put back, and gets values."""
    module = model()
    shard = module[0].weight
    module[0].weight = nn.Parameter(torch.ones(3, 5))
    yield lambda: loss(module)
    module[0].weight = shard
    with torch.no_grad():
        shard.copy_(torch.ones_like(shard))
    goes_on(module)


@remedy("Put a parameter back that was deleted or set to None")
def a_parameter_that_was_deleted(rank: int) -> Iterator[Callable[[], object]]:
    """The same shard is put back."""
    module = model()
    shard = module[0].weight
    del module[0].weight
    yield lambda: loss(module)
    module[0].register_parameter("weight", shard)
    goes_on(module)


@remedy("in the place of this one, or replace parameters before fully_shard")
def a_parameter_that_was_cut(rank: int) -> Iterator[Callable[[], object]]:
    """Hidden units were pruned; modules of the new size are sharded at the next forward."""
    module = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8))
    for unit in (*module, module):
        fully_shard(unit, mesh=mesh_1d())
    module[0].weight = nn.Parameter(torch.ones(5, 8))
    yield lambda: loss(module)
    module[0], module[1] = nn.Linear(8, 5), nn.Linear(5, 8)
    loss(module).backward()  # they are sharded from now on
    goes_on(module)
    assert isinstance(module[0].weight, DTensor)


@remedy("To go on without it, put a new module in the place of this one")
def a_bias_that_was_taken_away(rank: int) -> Iterator[Callable[[], object]]:
    """A new module is sharded at the next forward."""
    module = model()
    module[0].bias = None
    yield lambda: loss(module)
    old = module[0].weight
    module[0] = nn.Linear(old.shape[1], old.shape[0], bias=False)
    loss(module).backward()  # it is sharded from now on
    goes_on(module)
    assert isinstance(module[0].weight, DTensor)


@remedy("For example, call module.to_empty(device) to materialize to device and call module.reset_parameters()")
def parameters_on_the_meta_device(rank: int) -> Iterator[Callable[[], object]]:
    """As the text says."""
    with torch.device("meta"):
        module = layers()
    for unit in (*module, module):
        fully_shard(unit, mesh=mesh_1d())
    yield lambda: loss(module)
    module.to_empty(device="cpu")
    for layer in module:
        layer.reset_parameters()
    goes_on(module)


@remedy("Take the write out of forward (embedding.max_norm = None)")
def a_forward_that_writes(rank: int) -> Iterator[Callable[[], object]]:
    """Done as written, it raised again: the module went on writing."""
    torch.manual_seed(0)
    embedding, max_norm = nn.Embedding(8, 8, max_norm=0.5), 0.5
    module = nn.Sequential(embedding, nn.Linear(8, 8))
    for unit in (*module, module):
        fully_shard(unit, mesh=mesh_1d())
    tokens = torch.arange(4)
    yield lambda: module(tokens)
    embedding.max_norm = None
    weight = embedding.weight
    module(tokens).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    with torch.no_grad():
        local = weight.to_local()
        local.copy_(torch.renorm(local, 2, 0, max_norm))
    assert weight.full_tensor().norm(dim=1).max() <= 0.5001
    module(tokens).sum().backward()


@remedy("so what the forward saved is gone; do so before the forward, and call reset_iter_state() on the root module")
def cast_between_forward_and_backward(rank: int) -> Iterator[Callable[[], object]]:
    """The iteration is given up, and the next one computes in the new dtype."""
    module = model()
    result = loss(module)
    module.double()
    yield result.backward
    module.reset_iter_state()
    module.float()
    goes_on(module)


@remedy("Make it one again, or call zero_grad() before backward")
def a_gradient_of_another_placement(rank: int) -> Iterator[Callable[[], object]]:
    """It is made one again, or dropped."""
    module = model()
    weight = module[0].weight

    def make_whole() -> None:
        loss(module).backward()
        weight.grad = weight.grad.redistribute(placements=[Replicate()])

    make_whole()
    yield lambda: loss(module).backward()
    module.reset_iter_state()
    make_whole()
    weight.grad = weight.grad.redistribute(placements=weight.placements)
    make_whole()
    module.zero_grad()
    goes_on(module)


@remedy("expected a dense one; use sparse=False in the module")
def a_sparse_gradient(rank: int) -> Iterator[Callable[[], object]]:
    """The module is told so."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8))
    fully_shard(module, mesh=mesh_1d())
    tokens = torch.arange(4)
    yield lambda: module(tokens).sum().backward()
    module.reset_iter_state()
    module.zero_grad()
    module[0].sparse = False
    module(tokens).sum().backward()
    assert module[0].weight.grad is not None


@remedy("means to: call reshard() on the module, and write to its shards with")
def a_write_between_two_forwards(rank: int) -> Iterator[Callable[[], object]]:
    """The shards are written instead, and the next forward computes with the new values."""
    module = model()
    module.set_reshard_after_forward(False)
    loss(module)
    with torch.no_grad():
        module[0].weight.mul_(0)
    yield lambda: loss(module)
    module.reset_iter_state()
    module.reshard(recurse=True)
    with torch.no_grad():
        module[0].weight.mul_(0)
        module[0].bias.mul_(0)
    torch.testing.assert_close(module[0](torch.ones(2, 8)), torch.zeros(2, 8))
    module.reshard(recurse=True)
    goes_on(module)


# ---- passes ----


class Raises(torch.autograd.Function):
    """A backward that raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken")


@remedy("earlier forward or backward raised, call reset_iter_state() on the root module before the")
def a_hook_out_of_order(rank: int) -> Iterator[Callable[[], object]]:
    """A hook of ours that comes at a wrong time, as a program makes it that calls hooks by itself."""
    module = model()
    group = module[1]._get_fsdp_state().groups[0]
    hook = module[1].register_forward_pre_hook(lambda *_: group.phases.enter("end_backward"))
    yield lambda: loss(module)
    hook.remove()
    module.reset_iter_state()
    goes_on(module)


@remedy("call reset_iter_state() on the root module first; that backward's gradients are discarded")
def after_a_backward_that_raised(rank: int) -> Iterator[Callable[[], object]]:
    """The text names one call."""
    module = model()
    hidden = module[1](module[0](torch.ones(2, 8)))
    del hidden
    try:
        inner = torch.ones(2, 8, requires_grad=True)
        module[0].register_forward_hook(lambda m, args, out: Raises.apply(out))
        module(inner).sum().backward()
    except ValueError:
        module[0]._forward_hooks.popitem()
    yield lambda: loss(module)
    module.reset_iter_state()
    goes_on(module)


@remedy("Call reshard() on the module before you replace parameters or use functional_call")
def other_weights_while_full_ones_are_shown(rank: int) -> Iterator[Callable[[], object]]:
    """Full parameters were asked for by hand."""
    module = model()
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    module.unshard(recurse=True)
    with torch.no_grad():
        yield lambda: torch.func.functional_call(module, values, torch.ones(2, 8))
        module.reshard(recurse=True)
        torch.func.functional_call(module, values, torch.ones(2, 8))
    goes_on(module)


@remedy("expected outside of that context. Leave it first, or summon fewer modules")
def cast_while_summoned(rank: int) -> Iterator[Callable[[], object]]:
    """The context is left."""
    module = model()
    with fsdp2.summon_full_params(module):
        yield module.double
    module.double().float()
    goes_on(module)


@remedy(
    "The previous gradient reduction must be waited on before forward: call wait() on what",
    "the previous gradient reduction must be waited on before finalizing backward again: call wait() on what",
)
def a_forward_before_the_wait(rank: int) -> Iterator[Callable[[], object]]:
    """The handle is waited on."""
    module = model()
    module.set_manual_backward_finalization(True)
    loss(module).backward()
    handle = module.finalize_backward(async_op=True)
    yield lambda: loss(module)
    handle.wait()
    loss(module).backward()
    module.finalize_backward()
    module.set_manual_backward_finalization(False)
    goes_on(module)


@remedy("expected a call between steps. Call wait() on what finalize_backward(async_op=True) returned first")
def sharing_before_a_reduction_has_ended(rank: int) -> Iterator[Callable[[], object]]:
    """It is waited for first."""
    module, other = model(), model()
    module.set_manual_backward_finalization(True)
    loss(module).backward()
    handle = module.finalize_backward(async_op=True)
    yield lambda: fsdp2.share_comm_ctx([other, module])
    handle.wait()
    fsdp2.share_comm_ctx([other, module])
    finalizes(module)
    goes_on(other)


@remedy("finalize_backward requires manual backward finalization; call set_manual_backward_finalization(True)")
def finalize_without_the_mode(rank: int) -> Iterator[Callable[[], object]]:
    """The mode is switched on before the next forward."""
    module = model()
    loss(module).backward()
    yield module.finalize_backward
    finalizes(module)


@remedy("cannot change mode after backward starts, and one that started has not been ended; call finalize_backward()")
def the_mode_is_changed_too_early(rank: int) -> Iterator[Callable[[], object]]:
    """The backward is ended first."""
    module = model()
    module.set_manual_backward_finalization(True)
    loss(module).backward()
    yield lambda: module.set_manual_backward_finalization(False)
    module.finalize_backward()
    module.set_manual_backward_finalization(False)
    goes_on(module)


@remedy("a backward with manual finalization was not ended; call finalize_backward() on the root module first")
def synchronize_before_the_end(rank: int) -> Iterator[Callable[[], object]]:
    """The backward is ended first."""
    module = model()
    module.set_manual_backward_finalization(True)
    module.set_requires_gradient_sync(False)
    loss(module).backward()
    yield module.synchronize_gradients
    handle = module.finalize_backward(async_op=True)
    handle.wait()
    module.synchronize_gradients()
    assert all(p.grad is not None for p in module.parameters())


@remedy("Call synchronize_gradients() on the root module first")
def a_step_before_the_reduction(rank: int) -> Iterator[Callable[[], object]]:
    """What micro-batches left is reduced."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.set_requires_gradient_sync(False)
    loss(module).backward()
    yield optimizer.step
    module.synchronize_gradients()
    optimizer.step()
    module.set_requires_gradient_sync(True)
    goes_on(module)


@remedy(", or leave the context first")
def a_training_forward_while_summoned(rank: int) -> Iterator[Callable[[], object]]:
    """Outside it trains."""
    module = model()
    with fsdp2.summon_full_params(module, writeback=False):
        yield lambda: loss(module)
    goes_on(module)


@remedy("expected a call between two steps. Call it after the last backward")
def a_setter_between_forward_and_backward(rank: int) -> Iterator[Callable[[], object]]:
    """It is called after backward."""
    module = model()
    result = loss(module)
    yield lambda: module.set_compression(fsdp2.CompressionPolicy(gather=torch.int8))
    result.backward()
    module.set_compression(fsdp2.CompressionPolicy(gather=torch.int8))
    goes_on(module)


# ---- arguments ----


class Own:
    """A reduce-scatter of the user's."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, **how: Any
    ) -> None:
        rows = torch.empty_like(input_tensor)
        dist.all_to_all_single(rows, input_tensor, group=group)
        total = rows.view(group.size(), -1).sum(0)
        output_tensor.copy_(total / group.size() if op == dist.ReduceOp.AVG else total)


@remedy("Pass True, or leave any_order out")
def an_order_of_units_that_nobody_skips(rank: int) -> Iterator[Callable[[], object]]:
    """Both ways."""
    module: Any = model()
    yield lambda: module.set_reduce_scatter_unused_params(False, any_order=True)
    module.set_reduce_scatter_unused_params(False)
    goes_on(module)
    module.set_reduce_scatter_unused_params(True, any_order=True)
    goes_on(module)


@remedy("which sum by themselves; leave one of the two out")
def compressed_and_in_one_order(rank: int) -> Iterator[Callable[[], object]]:
    """Either alone."""
    module: Any = model(compression=fsdp2.CompressionPolicy(reduce=torch.int8))
    yield lambda: module.set_deterministic_reduction(True)
    module.set_compression(None)
    module.set_deterministic_reduction(True)
    goes_on(module)


@remedy("and only one of them would send it; leave one of the two out")
def a_custom_reduction_with_compression(rank: int) -> Iterator[Callable[[], object]]:
    """Only gathers are compressed then."""
    module = model()
    module.set_custom_reduce_scatter(Own(), recurse=True)
    yield lambda: module.set_compression(fsdp2.CompressionPolicy(reduce=torch.int8))
    module.set_compression(fsdp2.CompressionPolicy(gather=torch.int8))
    goes_on(module)


@remedy("Call fully_shard on each module in it, or pass them as a list to make one unit of them")
def a_list_of_layers(rank: int) -> Iterator[Callable[[], object]]:
    """Both ways."""
    root = nn.Module()
    root.layers = nn.ModuleList(layers())
    root.forward = lambda x: root.layers[2](root.layers[1](root.layers[0](x)))
    yield lambda: fully_shard(root.layers, mesh=mesh_1d())
    fully_shard(root.layers[0], mesh=mesh_1d())
    fully_shard(list(root.layers[1:]), mesh=mesh_1d())
    fully_shard(root, mesh=mesh_1d())
    goes_on(root)


@remedy("remove it from ignored_modules, or do not call fully_shard on it")
def the_root_is_ignored(rank: int) -> Iterator[Callable[[], object]]:
    """It is taken off the list."""
    module = layers()
    yield lambda: fully_shard(module, mesh=mesh_1d(), ignored_modules=[module, module[0]])
    fully_shard(module, mesh=mesh_1d(), ignored_modules=[module[0]])
    goes_on(module)


@remedy("remove them from one of the two: gradients of ignored parameters are not reduced")
def ignored_and_replicated(rank: int) -> Iterator[Callable[[], object]]:
    """From one of the two."""
    module = layers()
    bias = {module[0].bias}
    yield lambda: fully_shard(module, mesh=mesh_1d(), ignored_params=bias, replicated_params=bias)
    fully_shard(module, mesh=mesh_1d(), replicated_params=bias)
    goes_on(module)


@remedy("Use names relative to the module that you pass, or pass policy=")
def names_of_the_whole_model(rank: int) -> Iterator[Callable[[], object]]:
    """Both ways."""
    module = layers()
    cpu = {"0.weight": CPUOffloadPolicy()}
    yield lambda: fully_shard(module[0], mesh=mesh_1d(), offload_policy=cpu)
    fully_shard(module[0], mesh=mesh_1d(), offload_policy={"weight": CPUOffloadPolicy()})
    goes_on(fully_shard(module, mesh=mesh_1d()))
    goes_on(fully_shard(layers(), mesh=mesh_1d(), policy={nn.Linear}, offload_policy=cpu))


@remedy("to change the number of ranks parameters stay on after forward, pass an int to fully_shard")
def an_int_for_the_setter(rank: int) -> Iterator[Callable[[], object]]:
    """It is an argument."""
    module = model()
    yield lambda: module.set_reshard_after_forward(2)
    goes_on(model(reshard_after_forward=2))


@remedy("; pass [module] for one")
def one_module_for_a_list(rank: int) -> Iterator[Callable[[], object]]:
    """As a list."""
    module = model()
    yield lambda: fsdp2.share_comm_ctx(module)
    fsdp2.share_comm_ctx([module])
    goes_on(module)


@remedy("; call fully_shard on it first")
def a_module_that_is_not_sharded(rank: int) -> Iterator[Callable[[], object]]:
    """It is sharded first."""
    module = layers()
    yield lambda: fsdp2.share_comm_ctx([module])
    fully_shard(module, mesh=mesh_1d())
    fsdp2.share_comm_ctx([module])
    goes_on(module)


@remedy("Use the same for both, or fully_shard([module_a, module_b]) to place them in one unit")
def tied_with_other_options(rank: int) -> Iterator[Callable[[], object]]:
    """In one unit."""
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    module = layers()
    module[1].weight = module[0].weight
    fully_shard(module[0], mesh=mesh_1d())
    yield lambda: fully_shard(module[1], mesh=mesh_1d(), mp_policy=low)
    fully_shard(module[1], mesh=mesh_1d())
    goes_on(fully_shard(module, mesh=mesh_1d()))
    module = layers()
    module[1].weight = module[0].weight
    fully_shard([module[0], module[1]], mesh=mesh_1d(), mp_policy=low)
    goes_on(fully_shard(module, mesh=mesh_1d(), mp_policy=low))


@remedy(
    "or pass a slice of it such as mesh['dp']", "name the data-parallel dimensions of a larger one with dp_mesh_dims"
)
def a_mesh_of_three_dimensions(rank: int) -> Iterator[Callable[[], object]]:
    """A slice of it."""
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    module = layers()
    yield lambda: fully_shard(module, mesh=mesh)
    goes_on(fully_shard(module, mesh=mesh["dp"]))


@remedy("make one with torch.distributed.device_mesh.init_device_mesh")
def a_group_for_a_mesh(rank: int) -> Iterator[Callable[[], object]]:
    """One is made."""
    module = layers()
    yield lambda: fully_shard(module, mesh=dist.group.WORLD)
    goes_on(fully_shard(module, mesh=init_device_mesh("cpu", (2,))))


@remedy("or leave shard_over_replicas out")
def replicas_of_one_dimension(rank: int) -> Iterator[Callable[[], object]]:
    """A mesh of two dimensions, as in the text; or without."""
    module = layers()
    yield lambda: fully_shard(module, mesh=mesh_1d(), shard_over_replicas=True)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    goes_on(fully_shard(module, mesh=mesh, shard_over_replicas=True))
    goes_on(fully_shard(layers(), mesh=mesh_1d()))


@remedy("pass a mesh of a device that it has, such as init_device_mesh('cpu', ...)")
def a_mesh_of_a_missing_device(rank: int) -> Iterator[Callable[[], object]]:
    """The CPU is there."""
    if torch.cuda.is_available():
        return
    mesh = init_device_mesh("cpu", (2,))
    mesh._device_type = "cuda"
    module = layers()
    yield lambda: fully_shard(module, mesh=mesh)
    goes_on(fully_shard(module, mesh=init_device_mesh("cpu", (2,))))


@remedy("from shard_placement_fn")
def a_dimension_that_is_not_there(rank: int) -> Iterator[Callable[[], object]]:
    """A dimension that every parameter has."""
    module = layers()
    yield lambda: fully_shard(module, mesh=mesh_1d(), shard_placement_fn=lambda p: Shard(1))
    goes_on(fully_shard(module, mesh=mesh_1d(), shard_placement_fn=lambda p: Shard(p.ndim - 1)))


@remedy("; pass that module, or the whole model")
def no_sync_of_a_part(rank: int) -> Iterator[Callable[[], object]]:
    """The whole model."""
    module = layers()
    fully_shard(module, mesh=mesh_1d())
    yield lambda: fsdp2.no_sync(module[0]).__enter__()
    with fsdp2.no_sync(module):
        loss(module).backward()
    loss(module).backward()
    goes_on(module)


@remedy("then build the model, shard it and call load_state_dict(); copy.deepcopy makes a copy in this process")
def pickled(rank: int) -> Iterator[Callable[[], object]]:
    """Both ways."""
    module = model()
    yield lambda: pickle.dumps(module)
    state = pickle.loads(pickle.dumps({name: value.to_local() for name, value in module.state_dict().items()}))
    assert state.keys() == module.state_dict().keys()
    other = model()
    other.load_state_dict(module.state_dict())
    goes_on(other)
    goes_on(copy.deepcopy(module))


# ---- optimizers ----


@remedy("Call fsdp2.use_local_shards(optimizer), or make a group of plain ones")
def a_list_of_shards_and_plain_ones(rank: int) -> Iterator[Callable[[], object]]:
    """Both ways."""
    module = layers()
    fully_shard(module, mesh=mesh_1d(), ignored_params={module[0].bias})
    loss(module).backward()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=True)
    yield optimizer.step
    fsdp2.use_local_shards(optimizer).step()
    groups = [[module[0].bias], [p for p in module.parameters() if p is not module[0].bias]]
    torch.optim.SGD([{"params": group} for group in groups], lr=0.1, foreach=True).step()


@remedy("use_local_shards(optimizer, elementwise=True) on a new one in place of use_full_params")
def a_state_of_other_tensors(rank: int) -> Iterator[Callable[[], object]]:
    """The optimizer steps on shards, and its state is saved."""
    module = model()
    optimizer = fsdp2.use_full_params(Pairs(module.parameters()))
    loss(module).backward()
    optimizer.step()
    yield optimizer.state_dict
    optimizer = fsdp2.use_local_shards(Pairs(module.parameters()), elementwise=True)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


@remedy("Pass error_if_nonfinite=False to scale the gradients by it anyway")
def a_norm_that_is_infinite(rank: int) -> Iterator[Callable[[], object]]:
    """As written."""
    module = model()
    (loss(module) * torch.inf).backward()
    yield lambda: fsdp2.clip_grad_norm_(module.parameters(), 1.0, error_if_nonfinite=True)
    fsdp2.clip_grad_norm_(module.parameters(), 1.0, error_if_nonfinite=False)
    goes_on(module)


@remedy("and its reduced gradient is on its shard; call reshard() on its module before model.parameters()")
def clipping_what_is_shown(rank: int) -> Iterator[Callable[[], object]]:
    """Shards are clipped."""
    module = model()
    loss(module).backward()
    module.unshard(recurse=True)
    yield lambda: fsdp2.clip_grad_norm_(module.parameters(), 1.0)
    module.reshard(recurse=True)
    fsdp2.clip_grad_norm_(module.parameters(), 1.0)
    goes_on(module)


@remedy("whole parameters exist only during the step; call backward() before step()")
def a_closure_for_whole_matrices(rank: int) -> Iterator[Callable[[], object]]:
    """Without one."""
    module = model()
    optimizer = fsdp2.use_full_params(torch.optim.SGD(module.parameters(), lr=0.1))
    yield lambda: optimizer.step(lambda: loss(module))
    loss(module).backward()
    optimizer.step()


@remedy("only the owner can read it here. Call optimizer.state_dict() on all ranks to get it")
def the_state_of_another_owner(rank: int) -> Iterator[Callable[[], object]]:
    """Each rank reads what the other owns, which raises on both."""
    module = model()
    optimizer = fsdp2.use_full_params(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    loss(module).backward()
    optimizer.step()

    def read() -> None:
        for param in module.parameters():
            optimizer.state[param]["momentum_buffer"]

    yield read
    state = optimizer.state_dict()["state"]
    assert all(isinstance(entry["momentum_buffer"], DTensor) for entry in state.values())


class Rule(torch.optim.Optimizer):
    """An elementwise rule of the user's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad.sign(), alpha=0.01)


@remedy("Pass elementwise=True if no element's update depends on other elements or on the shape")
def an_optimizer_that_nobody_knows(rank: int) -> Iterator[Callable[[], object]]:
    """As written."""
    module = model()
    optimizer = Rule(module.parameters())
    yield lambda: fsdp2.use_local_shards(optimizer)
    fsdp2.use_local_shards(optimizer, elementwise=True)
    loss(module).backward()
    optimizer.step()


@remedy("Build the optimizer with differentiable=False, or leave offload_optimizer_state out")
def a_differentiable_step_with_state_on_the_host(rank: int) -> Iterator[Callable[[], object]]:
    """Both ways."""
    param = nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    yield fsdp2.offload_optimizer_state(torch.optim.Adam([param], differentiable=True)).step
    fsdp2.offload_optimizer_state(torch.optim.Adam([param], differentiable=False)).step()
    result = param.clone()  # torch's own step goes through no leaf
    result.grad = torch.ones(4)
    torch.optim.Adam([result], differentiable=True).step()
    assert result.requires_grad


@remedy("Capture forward and backward, and call step() after the replay, or leave offload_optimizer_state out")
def a_captured_step_with_state_on_the_host(rank: int) -> Iterator[Callable[[], object]]:
    """A CPU captures nothing, so it says that it does; tests/nullgpu/test_captured.py has a graph."""
    module = model()
    loss(module).backward()
    optimizer = fsdp2.offload_optimizer_state(torch.optim.Adam(module.parameters()))

    def step() -> None:
        with mock.patch("fsdp2.comm.streams.ComputeLane.captured", True):
            optimizer.step()

    yield step
    optimizer.step()


@remedy("expected parameters that are not. Leave DistributedDataParallel out")
def ddp_over_shards(rank: int) -> Iterator[Callable[[], object]]:
    """Without it; and with replicas, as in the text."""
    module = model()
    yield lambda: nn.parallel.DistributedDataParallel(module)
    goes_on(module)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    goes_on(fully_shard(layers(), mesh=mesh))


# ---- whole weights ----


@remedy("On all ranks, export inside `with torch.no_grad(), fsdp2.summon_full_params(model, writeback=False):`")
def exports(rank: int) -> Iterator[Callable[[], object]]:
    """As in the text, with two functions; the error comes before other ranks are asked for anything."""
    module, data = model(), torch.randn(2, 8)
    if rank == 0:
        with pytest.raises(RuntimeError, match="which cannot record how parameters are gathered"):
            torch.jit.trace(module, data)
    yield lambda: torch.jit.trace(module, data)
    with torch.no_grad(), fsdp2.summon_full_params(module, writeback=False):
        exported = [torch.export.export(module, (data,)).module(), torch.jit.trace(module, data)]
        exported.append(make_fx(lambda x: module(x))(data))
        output, _ = torch.func.linearize(module, data)
    expected = module(data)
    torch.testing.assert_close(output, expected)
    for function in exported:
        torch.testing.assert_close(function(data), expected)
    goes_on(module)


@remedy("expected shards. Call reset_iter_state() on the root module first")
def a_block_that_was_interrupted_at_its_end(rank: int) -> Iterator[Callable[[], object]]:
    """Ctrl-C comes while it writes back."""
    module = model()
    with mock.patch("fsdp2.engine.residency.Residency.dismiss", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt), fsdp2.summon_full_params(module):
            pass
    yield lambda: loss(module)
    module.reset_iter_state()
    goes_on(module)


@remedy("got a backward inside summon_full_params, whose gradient would be lost at the end of the block")
def a_backward_inside(rank: int) -> Iterator[Callable[[], object]]:
    """Both ways."""
    module = model()
    with fsdp2.summon_full_params(module):
        yield lambda: module[0].weight.square().sum().backward()
    with fsdp2.summon_full_params(module, with_grads=True):
        module[0].weight.square().sum().backward()
    assert module[0].weight.grad is not None
    with fsdp2.summon_full_params(module):
        (gradient,) = torch.autograd.grad(module[0].weight.square().sum(), module[0].weight)
        assert gradient.shape == (8, 8)
    goes_on(module)


@remedy("other ranks would not see the changes; pass writeback=False, or leave rank0_only out")
def one_rank_that_writes(rank: int) -> Iterator[Callable[[], object]]:
    """Both ways."""
    module = model()
    yield lambda: fsdp2.summon_full_params(module, rank0_only=True).__enter__()
    with fsdp2.summon_full_params(module, rank0_only=True, writeback=False):
        pass
    with fsdp2.summon_full_params(module):
        pass
    goes_on(module)


@remedy("Change values in place, or pass writeback=False")
def another_shape_inside(rank: int) -> Iterator[Callable[[], object]]:
    """Both ways."""
    module = model()

    def enter(writeback: bool, value: torch.Tensor) -> None:
        with fsdp2.summon_full_params(module, writeback=writeback):
            module[0].weight = nn.Parameter(value)

    yield lambda: enter(True, torch.ones(2, 2))
    enter(False, torch.ones(2, 2))
    with torch.no_grad(), fsdp2.summon_full_params(module):
        module[0].weight.fill_(0.5)
    assert (module[0].weight.full_tensor() == 0.5).all()
    goes_on(module)


@remedy("untie them before fully_shard, or pass strict=False to take the last")
def ties_of_two_values(rank: int) -> Iterator[Callable[[], object]]:
    """The last one."""
    module = layers()
    module[1].weight = module[0].weight
    for unit in (*module, module):
        fully_shard(unit, mesh=mesh_1d())
    values = {name: torch.full(p.shape, float(i)) for i, (name, p) in enumerate(layers().named_parameters())}
    given = values if rank == 0 else None
    yield lambda: fsdp2.broadcast_from_rank0(module, given)
    fsdp2.broadcast_from_rank0(module, given, strict=False)
    goes_on(module)


@remedy("Materialize it first: module.to_empty(device=...) and load or initialize it")
def a_shard_without_memory(rank: int) -> Iterator[Callable[[], object]]:
    """As written."""
    with torch.device("meta"):
        module = layers()
    fully_shard(module, mesh=mesh_1d())
    yield lambda: list(fsdp2.iter_full_params(module))
    module.to_empty(device="cpu")
    for layer in module:
        layer.reset_parameters()
    assert len(list(fsdp2.iter_full_params(module))) == 6
    goes_on(module)


@remedy("expected values on the first rank that holds them; load them with broadcast_from_rank0 or load_safetensors")
def nothing_to_copy(rank: int) -> Iterator[Callable[[], object]]:
    """Rank 0 sends them."""
    with torch.device("meta"):
        module = layers()
    fully_shard(module, mesh=mesh_1d())
    yield lambda: fsdp2.sync_module_states(module)
    fsdp2.broadcast_from_rank0(module, layers().state_dict() if rank == 0 else None)
    goes_on(module)


@remedy("pass the full state dict of the plain model there")
def no_mapping_on_rank_0(rank: int) -> Iterator[Callable[[], object]]:
    """It is given."""
    module = model()
    yield lambda: fsdp2.broadcast_from_rank0(module, None)
    fsdp2.broadcast_from_rank0(module, layers().state_dict() if rank == 0 else None)
    goes_on(module)


def sent(module: nn.Module, **options: Any) -> fsdp2.WeightReceiver:
    """Return a receiver of all weights; on ranks but the first it has received nothing."""
    receiver = fsdp2.WeightReceiver()
    fsdp2.WeightSender(module, **options).send(receiver.apply)
    return receiver


@remedy("pass what is to happen with each bucket, or the group of this rank and the receivers")
def weights_to_nobody(rank: int) -> Iterator[Callable[[], object]]:
    """A function."""
    module = model()
    sender = fsdp2.WeightSender(module)
    yield lambda: sender.send()
    receiver = fsdp2.WeightReceiver()
    sender.send(receiver.apply if rank == 0 else None)
    assert len(receiver.tensors) == (6 if rank == 0 else 0)
    goes_on(module)


@remedy("expected one; call WeightSender.send on one rank of the group, and WeightReceiver.receive on the others")
def two_receivers_alone(rank: int) -> Iterator[Callable[[], object]]:
    """One of them sends."""
    alone, receiver = layers(1), fsdp2.WeightReceiver()
    yield lambda: receiver.receive(dist.group.WORLD)
    if rank == 0:
        fsdp2.WeightSender(alone).send(dist.group.WORLD)
    else:
        receiver.receive(dist.group.WORLD)
        assert torch.equal(receiver.tensors["0.weight"], alone[0].weight)
    goes_on(alone)


@remedy("Write it to tensors with WeightReceiver.apply, or read changes()")
def changes_are_not_whole(rank: int) -> Iterator[Callable[[], object]]:
    """Both, for the same values."""
    module, receiver = model(), fsdp2.WeightReceiver()
    sender = fsdp2.WeightSender(module, delta=True)
    sender.send(receiver.apply)
    with torch.no_grad():
        module[0].bias.add_(1)
    buckets: list[fsdp2.WeightBucket] = []
    sender.send(buckets.append)
    bucket = fsdp2.WeightBucket.from_metadata(*meet([(buckets[0].metadata, buckets[0].buffer)] if buckets else []))
    yield lambda: list(bucket.tensors())
    whole = module[0].bias.full_tensor()
    found = torch.cat([values for _, _, values in bucket.changes()])
    assert torch.equal(found, whole)
    if rank == 0:
        receiver.apply(bucket)
        assert torch.equal(receiver.tensors["0.bias"], whole)
    goes_on(module)


def meet(values: list[Any]) -> Any:
    """Return the first rank's only value on every rank."""
    shared = values or [None]
    dist.broadcast_object_list(shared)
    return shared[0]


@remedy("or whole tensors. Call WeightSender.send(to, full=True)", "each once. Call WeightSender.send(to, full=True)")
def a_receiver_that_is_new(rank: int) -> Iterator[Callable[[], object]]:
    """As written."""
    module, receiver = model(), fsdp2.WeightReceiver()
    sender = fsdp2.WeightSender(module, delta=True)
    sender.send(lambda bucket: None)
    with torch.no_grad():
        module[0].weight.add_(1)
    yield lambda: sender.send(receiver.apply)
    sender.send(receiver.apply, full=True)
    assert len(receiver.tensors) == (6 if rank == 0 else 0)
    goes_on(module)


@remedy("make one with WeightBucket.from_metadata(metadata, buffer)")
def a_bucket_in_two_parts(rank: int) -> Iterator[Callable[[], object]]:
    """It is made again."""
    module, receiver = model(), fsdp2.WeightReceiver()
    buckets: list[fsdp2.WeightBucket] = []
    fsdp2.WeightSender(module).send(buckets.append)
    metadata, buffer = meet([(buckets[0].metadata, buckets[0].buffer)] if buckets else [])
    yield lambda: receiver.apply((metadata, buffer))  # type: ignore[arg-type]
    receiver.apply(fsdp2.WeightBucket.from_metadata(metadata, buffer))
    assert len(receiver.tensors) == 6
    goes_on(module)


@remedy("dict(module.named_parameters()), or a function as load=")
def a_receiver_of_a_module(rank: int) -> Iterator[Callable[[], object]]:
    """Both."""
    module, engine, loaded = model(), layers(), []
    yield lambda: fsdp2.WeightReceiver(engine)  # type: ignore[arg-type]
    fsdp2.WeightSender(module).send(fsdp2.WeightReceiver(dict(engine.named_parameters())).apply)
    fsdp2.WeightSender(module).send(fsdp2.WeightReceiver(load=loaded.extend).apply)
    assert len(loaded) == (6 if rank == 0 else 0)
    whole = module[0].weight.full_tensor()
    assert rank or torch.equal(engine[0].weight, whole)
    goes_on(module)


@remedy("Give the sender a mapping and a dtype, or leave tensors that are not sent out of WeightReceiver(tensors)")
def other_tensors_than_those_sent(rank: int) -> Iterator[Callable[[], object]]:
    """All three."""
    module = model()
    engine = {f"engine.{name}": value.detach().bfloat16() for name, value in layers().named_parameters()}
    receiver = fsdp2.WeightReceiver({**engine, "rotary": torch.ones(2)})
    yield lambda: fsdp2.WeightSender(module).send(receiver.apply)
    receiver = fsdp2.WeightReceiver(engine)
    fsdp2.WeightSender(module, mapping={"*": "engine.*"}, dtype=torch.bfloat16).send(receiver.apply)
    whole = module[0].weight.full_tensor()
    assert rank or torch.equal(engine["engine.0.weight"], whole.bfloat16())
    goes_on(module)


@remedy("leave it out by mapping={name: None}, or pass delta=False")
def elements_of_sixteen_bytes(rank: int) -> Iterator[Callable[[], object]]:
    """Both."""
    module = model()
    module.register_buffer("table", torch.ones(2, dtype=torch.complex128))
    yield lambda: sent(module, buffers=True, delta=True)
    left = sent(module, buffers=True, delta=True, mapping={"table": None})
    whole = sent(module, buffers=True)
    assert rank or set(whole.tensors) - set(left.tensors) == {"table"}
    goes_on(module)


@remedy("; expected some to send; remove a rule")
def nothing_to_send(rank: int) -> Iterator[Callable[[], object]]:
    """One of two rules."""
    module = model()
    yield lambda: sent(module, mapping={"*.bias": None, "*": None})
    received = sent(module, mapping={"*.bias": None})
    assert rank or len(received.tensors) == 3
    goes_on(module)


@remedy(", which is no name of the engine's and fits none; got names such as")
def a_dtype_for_no_tensor(rank: int) -> Iterator[Callable[[], object]]:
    """It is removed."""
    module = model()
    yield lambda: sent(module, dtype={"*.norm": torch.float32, "*": torch.bfloat16})
    received = sent(module, dtype={"*": torch.bfloat16})
    assert rank or received.tensors["0.bias"].dtype == torch.bfloat16
    goes_on(module)


@remedy(", expected the engine's name, or None to leave it out")
def a_name_that_is_none(rank: int) -> Iterator[Callable[[], object]]:
    """None."""
    module = model()
    yield lambda: sent(module, mapping=lambda name: name if "bias" in name else False)
    received = sent(module, mapping=lambda name: name if "bias" in name else None)
    assert rank or len(received.tensors) == 3
    goes_on(module)


@remedy(", expected one that fits and that no earlier rule fits; remove it, or put it first")
def a_rule_that_comes_too_late(rank: int) -> Iterator[Callable[[], object]]:
    """It is put first, or removed."""
    module = model()
    yield lambda: sent(module, mapping={"*.bias": "*.b", "0.bias": None})
    sent(module, mapping={"*.bias": "*.b"})
    received = sent(module, mapping={"0.bias": None, "*.bias": "*.b"})
    assert rank or "0.b" not in received.tensors
    goes_on(module)


@remedy("must be a full plain tensor, got")
def shards_on_rank_0(rank: int) -> Iterator[Callable[[], object]]:
    """They are gathered first."""
    module = model()
    shards = module.state_dict()
    yield lambda: fsdp2.broadcast_from_rank0(module, shards if rank == 0 else None)
    full = {name: value.full_tensor() for name, value in shards.items()}
    fsdp2.broadcast_from_rank0(module, full if rank == 0 else None)
    goes_on(module)


@remedy("; expected parameters that are not summoned. Leave that context first")
def summoned_twice(rank: int) -> Iterator[Callable[[], object]]:
    """One after the other."""
    module = model()
    with fsdp2.summon_full_params(module):
        yield lambda: fsdp2.summon_full_params(module[0]).__enter__()
    with fsdp2.summon_full_params(module[0]):
        pass
    goes_on(module)


@remedy("computes a gradient of, which would not flow through the gather; expected the module's own parameter")
def functional_call_with_gradients(rank: int) -> Iterator[Callable[[], object]]:
    """Detached values under no_grad, and other values on a copy that is not sharded."""
    module = model()
    values = {name: p.detach().clone().requires_grad_() * 1 for name, p in module.named_parameters()}
    yield lambda: torch.func.functional_call(module, values, torch.ones(2, 8)).sum().backward()
    module.reset_iter_state()
    with torch.no_grad():
        detached = {name: value.detach() for name, value in values.items()}
        torch.func.functional_call(module, detached, torch.ones(2, 8))
    plain = layers()
    whole = {name: p.detach().clone().requires_grad_() for name, p in plain.named_parameters()}
    torch.func.functional_call(plain, whole, torch.ones(2, 8)).sum().backward()
    assert all(value.grad is not None for value in whole.values())
    goes_on(module)


@remedy("from a hook or an autograd function; call it after loss.backward() returned")
def the_end_inside_a_backward(rank: int) -> Iterator[Callable[[], object]]:
    """As written."""
    module = model()
    module.set_manual_backward_finalization(True)
    x = torch.ones(2, 8, requires_grad=True)
    handle = x.register_hook(lambda grad: module.finalize_backward())
    yield lambda: module(x).sum().backward()
    handle.remove()
    module.reset_iter_state()
    module(x).sum().backward()
    module.finalize_backward()
    assert all(p.grad is not None for p in module.parameters())


@remedy(
    "summon_full_params cannot unshard parameters during forward/backward; expected outside of both. Call it before"
)
def summoned_in_a_forward(rank: int) -> Iterator[Callable[[], object]]:
    """Before and after."""
    module = model()
    inside = module[1].register_forward_hook(lambda *_: fsdp2.summon_full_params(module).__enter__())
    yield lambda: loss(module)
    inside.remove()
    with fsdp2.summon_full_params(module):
        pass
    goes_on(module)
    with fsdp2.summon_full_params(module):
        pass


@remedy("has no values; got the meta device, expected memory; load or initialize it first")
def saved_without_values(rank: int) -> Iterator[Callable[[], object]]:
    """Initialized first. The folder is one of this machine's."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    with torch.device("meta"):
        module = layers()
    fully_shard(module, mesh=mesh_1d())
    yield lambda: fsdp2.save_safetensors(module, folder[0])
    module.to_empty(device="cpu")
    for layer in module:
        layer.reset_parameters()
    fsdp2.save_safetensors(module, folder[0])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


@remedy("call use_full_params on it, then load_state_dict(optimizer.state_dict()) on every rank")
def a_copy_of_an_optimizer_of_whole_matrices(rank: int) -> Iterator[Callable[[], object]]:
    """As written."""
    module = model()
    optimizer = fsdp2.use_full_params(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    loss(module).backward()
    optimizer.step()
    yield lambda: copy.deepcopy(optimizer)
    twin = copy.deepcopy(module)
    other = fsdp2.use_full_params(torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9))
    other.load_state_dict(optimizer.state_dict())
    loss(twin).backward()
    other.step()


@remedy("; pass those of one save")
def pieces_of_two_saves(rank: int) -> Iterator[Callable[[], object]]:
    """Of one."""
    piece = {"piece": torch.ones(2), "shape": (4,), "offset": (0,)}
    other = {"piece": torch.ones(2), "shape": (4,), "offset": (2,)}
    yield lambda: fsdp2.merge_local_state_dicts([{"w": piece}, {"w": torch.ones(4)}])
    assert torch.equal(fsdp2.merge_local_state_dicts([{"w": piece}, {"w": other}])["w"], torch.ones(4))


@remedy("Pass the local state dicts of all ranks from one save")
def a_piece_is_missing(rank: int) -> Iterator[Callable[[], object]]:
    """All of them."""
    piece = {"piece": torch.ones(2), "shape": (4,), "offset": (0,)}
    other = {"piece": torch.ones(2), "shape": (4,), "offset": (2,)}
    yield lambda: fsdp2.merge_local_state_dicts([{"w": piece}, {}])
    assert torch.equal(fsdp2.merge_local_state_dicts([{"w": piece}, {"w": other}])["w"], torch.ones(4))


@remedy("expected a call between them. Call it after loss.backward()")
def synchronized_inside_a_forward(rank: int) -> Iterator[Callable[[], object]]:
    """After backward."""
    module = model()
    module.set_requires_gradient_sync(False)
    inside = module[1].register_forward_hook(lambda *_: module.synchronize_gradients())
    yield lambda: loss(module)
    inside.remove()
    module.reset_iter_state()
    loss(module).backward()
    module.synchronize_gradients()
    assert all(p.grad is not None for p in module.parameters())


@remedy("expected a call between two steps. Call it after backward, after reset_iter_state()")
def a_setter_inside_a_forward(rank: int) -> Iterator[Callable[[], object]]:
    """After backward."""
    module, policy = layers(), fsdp2.CompressionPolicy(gather=torch.int8)
    inside = module[1].register_forward_pre_hook(lambda *_: module.set_compression(policy))
    fully_shard(module, mesh=mesh_1d())
    yield lambda: loss(module)
    inside.remove()
    module.reset_iter_state()
    module.set_compression(policy)
    goes_on(module)


@remedy("Replace it in all places, or untie it between two steps")
def a_tie_replaced_in_one_place(rank: int) -> Iterator[Callable[[], object]]:
    """In both, and between two steps."""
    module = layers()
    module[1].weight = module[0].weight
    for unit in (*module, module):
        fully_shard(unit, mesh=mesh_1d())
    value = {"0.weight": module[0].weight.detach() * 2}
    once = functools.partial(torch.func.functional_call, module, value, torch.ones(2, 8))
    with torch.no_grad():
        yield lambda: once(tie_weights=False)
        once()
    module[0].weight = nn.Parameter(torch.ones(8, 8))
    loss(module)  # it is a shard from now on
    goes_on(module)


@remedy("memory until backward. Call set_reshard_after_forward(False) on the root module before the")
def saved_tensors_that_may_be_mutated(rank: int) -> Iterator[Callable[[], object]]:
    """Units stay in memory, so that nothing that is freed is copied; the gradients are those outside of the block."""
    module = model()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        yield lambda: loss(module)
        module.set_reshard_after_forward(False)
        for _ in range(2):
            loss(module).backward()
    gradient = module[0].weight.grad.full_tensor()
    module.zero_grad()
    for _ in range(2):
        loss(module).backward()
    torch.testing.assert_close(module[0].weight.grad.full_tensor(), gradient)
    goes_on(module)


@remedy("or leave it unsharded: ignored_modules={the_module}")
def a_module_without_a_name(rank: int) -> Iterator[Callable[[], object]]:
    """The class shows all of its modules; or the hidden one is not sharded."""

    class Hides(nn.Sequential):
        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            return ((name, one) for name, one in super().named_modules(*args, **kwargs) if name != "1")

    hiding = lambda kind: kind(nn.Linear(8, 8), nn.Linear(8, 8))
    yield lambda: fully_shard(hiding(Hides), mesh=mesh_1d())
    goes_on(fully_shard(hiding(nn.Sequential), mesh=mesh_1d()))
    module = hiding(Hides)
    goes_on(fully_shard(module, mesh=mesh_1d(), ignored_modules={module[1]}))


@remedy("cannot show a shard in its place; expected an nn.Module. Call fully_shard on the module that was")
def a_scripted_module(rank: int) -> Iterator[Callable[[], object]]:
    """The module that was scripted is sharded; or the parameters of the scripted one are left alone."""
    plain, scripted = nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8))
    module = nn.Sequential(nn.Linear(8, 8), scripted)
    yield lambda: fully_shard(module, mesh=mesh_1d())
    goes_on(fully_shard(nn.Sequential(nn.Linear(8, 8), plain), mesh=mesh_1d()))
    goes_on(fully_shard(module, mesh=mesh_1d(), ignored_params=set(scripted.parameters())))


@remedy("compute with memory that nobody wrote; expected fake parameters. Leave the mode, or call")
def a_forward_that_is_faked(rank: int) -> Iterator[Callable[[], object]]:
    """Outside of the mode the program goes on with the values that it had. (Forecasts have tests of their own.)"""
    module = model()
    loss(module).backward()
    module.zero_grad()
    before = loss(module).detach()
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield lambda: loss(module)
    torch.testing.assert_close(loss(module).detach(), before)
    goes_on(module)
