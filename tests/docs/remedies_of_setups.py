"""Remedies of errors about arguments, files, optimizers and other implementations, each tried as it is written.

``remedies.py`` says what a case is.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.docs.remedies import Call, finalizes, goes_on, layers, loss, model, remedy
from tests.support.parity import mesh_1d


def hybrid() -> DeviceMesh:
    """Return a mesh of two replicas of one rank."""
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Set variables of the environment, or remove them for None."""
    with mock.patch.dict(os.environ, {name: value for name, value in values.items() if value is not None}):
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
        yield


# ---- passes ----


@remedy("reset_iter_state() on the root module, start the iteration anew, and replace or tie parameters")
def replaced_before_backward(rank: int) -> Iterator[Call]:
    """ "Put it back" was never tried: autograd had gone through a part of the graph by then."""
    module = model()
    result = loss(module)
    module[0].weight = nn.Parameter(module[0].weight.detach().clone())
    yield result.backward
    module.reset_iter_state()
    module[0].weight = nn.Parameter(module[0].weight.detach().clone())
    goes_on(module)
    module[0].weight = nn.Parameter(module[0].weight.detach().clone())
    goes_on(module)


@remedy("was dropped by reset_iter_state; start the iteration anew")
def a_handle_of_a_dropped_iteration(rank: int) -> Iterator[Call]:
    """The next iteration is a whole one."""
    module = model()
    module.set_manual_backward_finalization(True)
    loss(module).backward()
    handle = module.finalize_backward(async_op=True)
    module.reset_iter_state()
    yield handle.wait
    loss(module).backward()
    module.finalize_backward(async_op=True).wait()
    assert all(p.grad is not None for p in module.parameters())


@remedy("finalize_backward requires all-reduce; call set_requires_all_reduce(True) before it")
def finalize_without_the_all_reduce(rank: int) -> Iterator[Call]:
    """The call that is named, before the same call."""
    module = layers()
    for unit in (*module, module):
        fully_shard(unit, mesh=hybrid())
    module.set_manual_backward_finalization(True)
    module.set_requires_gradient_sync(False)
    loss(module).backward()
    module.set_requires_gradient_sync(True)
    module.set_requires_all_reduce(False)
    yield module.finalize_backward
    module.set_requires_all_reduce(True)
    module.finalize_backward()
    assert all(p.grad is not None for p in module.parameters())


@remedy("backward, where it was called; call it before the forward")
def the_mode_is_changed_in_backward(rank: int) -> Iterator[Call]:
    """It is called before a forward."""
    module = model()
    hook = module[0].weight.register_hook(lambda grad: module.set_manual_backward_finalization(True))
    yield lambda: loss(module).backward()
    hook.remove()
    module.reset_iter_state()
    finalizes(module)


@remedy("MixedPrecisionPolicy.reduce_dtype, since all ranks must make zeros of one dtype; set it")
def unused_parameters_of_any_dtype(rank: int) -> Iterator[Call]:
    """The policy gets the dtype of the gradients."""
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.float32)):
        module = layers()
        for param in module.parameters():
            param.grad_dtype = None
        for unit in (*module, module):
            fully_shard(unit, mesh=mesh_1d(), mp_policy=policy)
        module.set_reduce_scatter_unused_params(True)
        if policy.reduce_dtype is None:
            yield lambda: loss(module).backward()  # noqa: B023  # it is called at once
            module.reset_iter_state()
        else:
            goes_on(module)


@remedy("argument, changed by operators that keep its shape")
def a_hook_that_returns_something_else(rank: int) -> Iterator[Call]:
    """It returns its argument, changed."""
    module = model()
    hook = module[1].weight.register_hook(lambda grad: torch.ones(3, 3))
    yield lambda: loss(module).backward()
    hook.remove()
    module.reset_iter_state()
    module[1].weight.register_hook(lambda grad: grad * 0.5)
    goes_on(module)


@remedy(": got a write to a part of a DTensor that is sharded along the dimension of that part. It")
def a_hook_that_writes_to_a_row(rank: int) -> Iterator[Call]:
    """What is multiplied by a mask has the same rows set to zero."""
    module = model()

    def clear(grad: torch.Tensor) -> torch.Tensor:
        grad[0].zero_()
        return grad

    hook = module[1].weight.register_hook(clear)
    yield lambda: loss(module).backward()
    hook.remove()
    module.reset_iter_state()
    module.zero_grad()
    mask = torch.ones(8, 8)
    mask[0] = 0
    module[1].weight.register_hook(lambda grad: grad * mask)
    loss(module).backward()
    grad = module[1].weight.grad.full_tensor()
    assert not grad[0].any() and grad[1:].any()


@remedy("runs or raised, expected none; call it between iterations, and reset_iter_state() on the")
def synchronized_in_a_forward(rank: int) -> Iterator[Call]:
    """Values are sent between iterations."""
    module = model()
    hook = module[1].register_forward_hook(lambda *_: fsdp2.sync_module_states(module))
    yield lambda: loss(module)
    hook.remove()
    module.reset_iter_state()
    fsdp2.sync_module_states(module)
    goes_on(module)


# ---- arguments ----


@remedy("must be a set of nn.")
def an_ignored_name(rank: int) -> Iterator[Call]:
    """A set of parameters."""
    module = layers()
    yield lambda: fully_shard(module, mesh=mesh_1d(), ignored_params="0.weight")
    fully_shard(module, mesh=mesh_1d(), ignored_params={module[0].weight})
    assert not isinstance(module[0].weight, DTensor)
    loss(module).backward()


@remedy("ModuleWrapPolicy, a CustomPolicy, a set of nn.Module classes, 'auto', a function (module)")
def a_policy_that_is_none(rank: int) -> Iterator[Call]:
    """Several that are named."""
    yield lambda: fully_shard(layers(), mesh=mesh_1d(), policy=lambda: True)
    for policy in (ModuleWrapPolicy({nn.Linear}), {nn.Linear}, lambda module: isinstance(module, nn.Linear)):
        module = layers()
        fully_shard(module, mesh=mesh_1d(), policy=policy)
        assert isinstance(module[0], fsdp2.FSDPModule)
        goes_on(module)
    fully_shard(module := layers(), mesh=mesh_1d(), policy="auto")
    goes_on(module)


@remedy("; use mp_policy for other classes")
def the_policy_of_the_other_argument(rank: int) -> Iterator[Call]:
    """The argument that is named takes it."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def shard(**options: Any) -> nn.Module:
        units = lambda module: options if isinstance(module, nn.Linear) else False
        return fully_shard(layers(), mesh=mesh_1d(), policy=CustomPolicy(units), mp_policy=policy)

    yield lambda: shard(mixed_precision=policy)
    goes_on(shard(mp_policy=policy))
    goes_on(shard(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)))


@remedy(", or no mesh to shard within each node")
def a_hybrid_strategy_on_a_flat_mesh(rank: int) -> Iterator[Call]:
    """The mesh that is named, and none."""
    strategy = ShardingStrategy.HYBRID_SHARD
    yield lambda: fully_shard(layers(), mesh=mesh_1d(), strategy=strategy)
    with environment(LOCAL_WORLD_SIZE="2"):
        for mesh in (init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")), None):
            module = layers()
            fully_shard(module, mesh=mesh, strategy=strategy)
            goes_on(module)


@remedy("known: LOCAL_WORLD_SIZE is not set and there is no accelerator; start with torchrun, or")
def a_node_of_unknown_size(rank: int) -> Iterator[Call]:
    """torchrun sets that variable; or the mesh."""
    module, strategy = layers(), ShardingStrategy.HYBRID_SHARD
    with environment(LOCAL_WORLD_SIZE=None):
        yield lambda: fully_shard(module, strategy=strategy)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(module, strategy=strategy, mesh=mesh)
        goes_on(module)
    with environment(LOCAL_WORLD_SIZE="2"):
        fully_shard(other := layers(), strategy=strategy)
        goes_on(other)


@remedy("DeviceMesh, got process groups; make one of them with DeviceMesh.from_group(shard_group,")
def a_group_in_the_place_of_a_mesh(rank: int) -> Iterator[Call]:
    """The calls that are named."""
    shard, alone = dist.group.WORLD, [dist.new_group([0]), dist.new_group([1])]
    yield lambda: fully_shard(layers(), mesh=shard, strategy=ShardingStrategy.FULL_SHARD)
    assert shard is not None
    groups, ranks = [alone[rank], shard], torch.tensor([[0, 1]])
    for strategy, mesh in (
        (ShardingStrategy.FULL_SHARD, DeviceMesh.from_group(shard, "cpu")),
        (
            ShardingStrategy.HYBRID_SHARD,
            DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("replicate", "shard")),
        ),
    ):
        module = layers()
        fully_shard(module, mesh=mesh, strategy=strategy)
        goes_on(module)


@remedy("At least one of shard or replicate must be set in DataParallelMeshDims")
def no_dimension_is_named(rank: int) -> Iterator[Call]:
    """One is."""
    yield lambda: fsdp2.DataParallelMeshDims()
    fsdp2.DataParallelMeshDims(shard="shard")


@remedy("; call fully_shard only on the ranks of the mesh")
def a_rank_outside_of_the_mesh(rank: int) -> Iterator[Call]:
    """The other rank leaves the call out, and both go on."""
    module, first = layers(), DeviceMesh("cpu", [0])
    if rank == 0:
        fully_shard(module, mesh=first)
        goes_on(module)
        return
    yield lambda: fully_shard(module, mesh=first)
    if rank in first.mesh:
        fully_shard(module, mesh=first)
    loss(module).backward()


@remedy("present default process group: make it with init_device_mesh after init_process_group")
def a_mesh_without_groups(rank: int) -> Iterator[Call]:
    """The function that is named."""
    module = layers()
    yield lambda: fully_shard(module, mesh=DeviceMesh("cpu", torch.arange(2), _init_backend=False))
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    goes_on(module)


@remedy("; leave it out, or use set_custom_all_gather")
def symmetric_memory_without_nccl(rank: int) -> Iterator[Call]:
    """It is left out."""
    module = model()
    yield lambda: module[0].set_symm_mem_for_comm()
    goes_on(module)


@remedy("; shard it, or a module around it, first")
def weights_of_a_plain_module(rank: int) -> Iterator[Call]:
    """It is sharded, or a module around it is."""
    module = layers()
    yield lambda: fsdp2.use_weights(module[0]).__enter__()
    for sharded in (module[0], module):
        fully_shard(sharded, mesh=mesh_1d())
        with fsdp2.use_weights(module[0]):
            assert module[0].weight.shape == (8, 8) and not isinstance(module[0].weight, DTensor)


# ---- other implementations ----


@remedy("one module tree cannot mix them. Use fsdp2.fully_shard for the whole tree, or call")
def torchs_around_ours(rank: int) -> Iterator[Call]:
    """One function for the whole tree, or torch's name is ours."""
    module = layers()
    fully_shard(module[0], mesh=mesh_1d())
    yield lambda: torch_fully_shard(module, mesh=mesh_1d())
    goes_on(model())
    fsdp2.install()
    try:
        from torch.distributed.fsdp import fully_shard as installed

        other = layers()
        installed(other[0], mesh=mesh_1d())
        installed(other, mesh=mesh_1d())
        goes_on(other)
    finally:
        fsdp2.uninstall()


@remedy("mix it with fsdp2.fully_shard. Use one of them for the whole tree")
def ours_around_torchs(rank: int) -> Iterator[Call]:
    """Ours for all of it."""
    module = layers()
    torch_fully_shard(module[0], mesh=mesh_1d())
    yield lambda: fully_shard(module, mesh=mesh_1d())
    module = model()
    goes_on(module)


@remedy("fsdp2.fully_shard manages this module; use")
def a_function_of_fsdp1(rank: int) -> Iterator[Call]:
    """The functions that are named, with the same arguments."""
    module = model()

    def summoned(summon: Any) -> None:
        with summon(module, writeback=False):
            assert module[0].weight.shape == (8, 8) and not isinstance(module[0].weight, DTensor)

    yield lambda: summoned(FullyShardedDataParallel.summon_full_params)
    summoned(fsdp2.summon_full_params)
    with fsdp2.state_dict_type(module, StateDictType.FULL_STATE_DICT):
        assert not isinstance(module.state_dict()["0.weight"], DTensor)
    goes_on(module)


@remedy("; call set_state_dict_type on the outermost module")
def settings_that_differ(rank: int) -> Iterator[Call]:
    """Of the outermost module, they hold for all."""
    module = model()
    fsdp2.set_state_dict_type(module[0], StateDictType.FULL_STATE_DICT)
    yield lambda: fsdp2.get_state_dict_type(module)
    fsdp2.set_state_dict_type(module, StateDictType.FULL_STATE_DICT)
    assert fsdp2.get_state_dict_type(module).state_dict_type is StateDictType.FULL_STATE_DICT
    assert not isinstance(module.state_dict()["0.weight"], DTensor)


@remedy("set_state_dict_type: Expected")
def settings_of_another_kind(rank: int) -> Iterator[Call]:
    """The class that is named, and None."""
    module, kind = model(), StateDictType.SHARDED_STATE_DICT
    yield lambda: fsdp2.set_state_dict_type(module, kind, FullStateDictConfig())
    for config in (ShardedStateDictConfig(), None):
        fsdp2.set_state_dict_type(module, kind, config)
        assert isinstance(module.state_dict()["0.weight"], DTensor)


# ---- optimizers ----


def trained(module: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return ``optimizer`` after a step."""
    loss(module).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@remedy("; pass the model whose parameters the optimizer was given")
def the_optimizer_of_another_model(rank: int) -> Iterator[Call]:
    """The model that it trains."""
    module, other = model(), model()
    optimizer = trained(other, torch.optim.Adam(other.parameters()))
    yield lambda: fsdp2.optim_state_dict(module, optimizer)
    assert set(fsdp2.optim_state_dict(other, optimizer)["state"]) == {name for name, _ in other.named_parameters()}


@remedy("as in the optimizer; pass the state dict of this optimizer, or none")
def the_state_of_another_optimizer(rank: int) -> Iterator[Call]:
    """Its own, and none."""
    module = model()
    other = trained(module, torch.optim.Adam([{"params": list(module[0].parameters())}]))
    optimizer = trained(module, torch.optim.Adam(module.parameters()))
    yield lambda: fsdp2.optim_state_dict(module, optimizer, other.state_dict())
    own = fsdp2.optim_state_dict(module, optimizer, optimizer.state_dict())
    assert set(own["state"]) == set(fsdp2.optim_state_dict(module, optimizer)["state"])
    goes_on(module)


@remedy("Pass an optimizer's state dict, as fsdp2.optim_state_dict returns it")
def what_is_no_state_of_an_optimizer(rank: int) -> Iterator[Call]:
    """What the function returns."""
    module = model()
    optimizer = trained(module, torch.optim.Adam(module.parameters()))
    yield lambda: fsdp2.optim_state_dict_to_load(module, optimizer, {"optimizer": optimizer.state_dict()})
    saved = fsdp2.optim_state_dict(module, optimizer)
    optimizer.load_state_dict(fsdp2.optim_state_dict_to_load(module, optimizer, saved))
    goes_on(module)


@remedy("with different hyperparameters; build the optimizer with groups like the saved ones")
def groups_that_are_one_now(rank: int) -> Iterator[Call]:
    """The optimizer gets the groups that were saved."""
    module = model()
    groups = lambda: [{"params": list(module[0].parameters()), "lr": 0.1}, {"params": list(module[1:].parameters())}]
    saved = fsdp2.optim_state_dict(module, trained(module, torch.optim.Adam(groups(), lr=0.2)))
    one, like = torch.optim.Adam(module.parameters()), torch.optim.Adam(groups())
    yield lambda: fsdp2.optim_state_dict_to_load(module, one, saved)
    like.load_state_dict(fsdp2.optim_state_dict_to_load(module, like, saved))
    assert [group["lr"] for group in like.param_groups] == [0.1, 0.2]


@remedy("; load sharded or local state without rank0_only, on every rank")
def sharded_state_from_one_rank(rank: int) -> Iterator[Call]:
    """On every rank, without the option."""
    module = model()
    optimizer = trained(module, torch.optim.Adam(module.parameters()))
    saved = fsdp2.optim_state_dict(module, optimizer)

    def load(kind: StateDictType, **options: bool) -> None:
        config = torch.distributed.fsdp.FullOptimStateDictConfig(**options) if options else None
        with fsdp2.state_dict_type(module, kind, None, config):
            optimizer.load_state_dict(fsdp2.optim_state_dict_to_load(module, optimizer, saved))

    yield lambda: load(StateDictType.FULL_STATE_DICT, rank0_only=True)
    load(StateDictType.SHARDED_STATE_DICT)
    goes_on(module)


@remedy("as the parameter; load the state of the same model")
def state_of_another_shape(rank: int) -> Iterator[Call]:
    """The state of the same model."""
    module, wide = model(), layers(width=8)
    optimizer = torch.optim.Adam(module.parameters())
    other = torch.optim.Adam(wide.parameters())
    trained(wide, other)
    state = fsdp2.optim_state_dict(wide, other)
    wrong = {**state, "state": {name: {**one, "exp_avg": torch.ones(3, 3)} for name, one in state["state"].items()}}
    yield lambda: fsdp2.optim_state_dict_to_load(module, optimizer, wrong)
    optimizer.load_state_dict(fsdp2.optim_state_dict_to_load(module, optimizer, state))
    goes_on(module)


@remedy("; pass the optimizer that a wrapper holds")
def an_optimizer_in_a_wrapper(rank: int) -> Iterator[Call]:
    """What it holds."""

    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    for use in (fsdp2.use_local_shards, fsdp2.use_full_params):
        module = model()
        wrapper = Wrapper(torch.optim.Adam(module.parameters()))
        if use is fsdp2.use_local_shards:
            yield lambda: fsdp2.use_local_shards(wrapper)  # noqa: B023
        trained(module, use(wrapper.optimizer))


@remedy("; build the optimizer after fully_shard, or, if it updates each parameter independently,")
def state_that_cannot_be_cut(rank: int) -> Iterator[Call]:
    """Both that are named, for an optimizer that factors its state."""
    module = layers()
    optimizer = trained(module, torch.optim.Adafactor(module.parameters()))
    for unit in (*module, module):
        fully_shard(unit, mesh=mesh_1d())
    loss(module).backward()
    yield optimizer.step
    fsdp2.use_full_params(optimizer)
    optimizer.step()
    optimizer.zero_grad()
    goes_on(module)
    after = model()
    trained(after, fsdp2.use_full_params(torch.optim.Adafactor(after.parameters())))


@remedy("optimizer that takes batches of matrices. Leave batched out")
def batches_for_muon(rank: int) -> Iterator[Call]:
    """It is left out."""
    module = model()
    matrices = [param for param in module.parameters() if param.ndim == 2]
    yield lambda: fsdp2.use_full_params(torch.optim.Muon(matrices), batched=True)
    trained(module, fsdp2.use_full_params(torch.optim.Muon(matrices)))


@remedy("optimizer's state and load a full state dict with torch.distributed.checkpoint.state_dict.")
def state_that_is_not_sharded(rank: int) -> Iterator[Call]:
    """The function that is named."""
    module = model()
    optimizer = fsdp2.use_local_shards(torch.optim.Adam(module.parameters()))
    trained(module, optimizer)
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True)
    full = get_optimizer_state_dict(module, optimizer, options=options)
    first = optimizer.param_groups[0]["params"][0]
    optimizer.state[first]["exp_avg"] = optimizer.state[first]["exp_avg"].full_tensor()
    loss(module).backward()
    yield optimizer.step
    optimizer.zero_grad()
    optimizer.state.clear()
    set_optimizer_state_dict(module, optimizer, full, options=options)
    assert isinstance(optimizer.state[first]["exp_avg"], DTensor)
    goes_on(module)


@remedy("that holds a piece, or on none. Build the same optimizer on all ranks, and set or clear")
def gradients_that_one_rank_lacks(rank: int) -> Iterator[Call]:
    """Gradients are cleared in the same way, and the optimizer, in which nothing was changed, goes on."""
    module = model()
    optimizer = fsdp2.use_full_params(torch.optim.Adam(module.parameters()))
    loss(module).backward()
    if rank == 1:
        module[0].weight.grad = None
    yield optimizer.step
    assert not optimizer.state
    optimizer.zero_grad()
    trained(module, optimizer)


@remedy("Add and remove the same ones on every rank before a step or a state dict")
def a_group_that_one_rank_adds(rank: int) -> Iterator[Call]:
    """The other rank adds it too."""
    module = model()
    optimizer = fsdp2.use_full_params(torch.optim.Adam(module[0].parameters()))
    trained(module, optimizer)
    added = {"params": [module[-1].weight]}
    if rank == 1:
        optimizer.add_param_group(added)
    yield optimizer.state_dict
    if rank == 0:
        optimizer.add_param_group(added)
    optimizer.state_dict()
    trained(module, optimizer)


@remedy("; pass a slice of it")
def clipped_on_two_dimensions(rank: int) -> Iterator[Call]:
    """A slice."""
    module = model()
    loss(module).backward()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    yield lambda: fsdp2.clip_grad_norm_(module.parameters(), 1.0, pp_mesh=mesh)
    fsdp2.clip_grad_norm_(module.parameters(), 1.0, pp_mesh=mesh["pp"])


class Counting(torch.optim.SGD):
    """Keeps a number for each matrix: by default not in a tensor."""

    keep: Any = float

    def step(self, closure: Any = None) -> None:
        """Note the largest element of each gradient."""
        for param in self.param_groups[0]["params"]:
            self.state[param]["largest"] = self.keep(param.grad.abs().max())


@remedy("Keep such values in tensors, or give every matrix a parameter of its own", ranks=1)
def a_number_for_each_matrix(rank: int) -> Iterator[Call]:
    """It is kept in a tensor; and every matrix is a parameter."""

    def step(param: nn.Parameter, keep: Any, shape: tuple[int, ...]) -> dict[str, Any]:
        module = nn.ParameterDict({"weight": param})
        fully_shard(module, mesh=mesh_1d())
        optimizer = fsdp2.use_full_params(Counting(module.parameters(), lr=0.1), stacked=lambda p: p.ndim == 3)
        optimizer.keep = keep
        grad = torch.arange(8.0).view(2, 2, 2)[: shape[0]] if len(shape) == 3 else torch.arange(4.0).view(2, 2)
        module["weight"].grad = distribute_tensor(grad, mesh_1d(), [Shard(0)])
        optimizer.step()
        optimizer.state_dict()
        return optimizer.state[module["weight"]]

    stack = (2, 2, 2)
    yield lambda: step(nn.Parameter(torch.zeros(stack)), float, stack)
    step(nn.Parameter(torch.zeros(stack)), torch.Tensor.clone, stack)
    assert step(nn.Parameter(torch.zeros(2, 2)), float, (2, 2))["largest"] == 3.0


@remedy("parameter that is not sharded; pass fsdp2.merge_local_state_dicts(the list of all ranks'")
def pieces_for_a_plain_parameter(rank: int) -> Iterator[Call]:
    """The merged ones."""
    module, plain = model(), layers()
    fully_shard(plain, mesh=mesh_1d(), ignored_params={*plain[0].parameters()})
    optimizer = trained(module, torch.optim.Adam(module.parameters()))
    with fsdp2.state_dict_type(module, StateDictType.LOCAL_STATE_DICT):
        own = fsdp2.optim_state_dict(module, optimizer)
    other = torch.optim.Adam(plain.parameters())
    yield lambda: fsdp2.optim_state_dict_to_load(plain, other, own)
    everybodys: list[Any] = [None, None]
    dist.all_gather_object(everybodys, own)
    merged = fsdp2.merge_local_state_dicts(everybodys)
    other.load_state_dict(fsdp2.optim_state_dict_to_load(plain, other, merged))
    assert other.state[plain[0].weight]["exp_avg"].shape == (8, 8)


# ---- files and weights ----


@contextmanager
def without(package: str) -> Iterator[None]:
    """Let imports of ``package`` fail, as where it is not installed."""
    gone = {name: None for name in [package, *sys.modules] if name == package or name.startswith(f"{package}.")}
    with mock.patch.dict(sys.modules, gone):
        yield


@contextmanager
def saved() -> Iterator[Path]:
    """Give a folder of this rank with the weights in one file."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        save_file(layers().state_dict(), Path(folder, "model.safetensors"))
        yield Path(folder)


def loaded(path: Path, **options: Any) -> None:
    """Load weights into another model, and train."""
    module = model()
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    fsdp2.load_safetensors(module, path, **options)
    torch.testing.assert_close(module[0].weight.full_tensor(), layers()[0].weight)
    goes_on(module)


@remedy("safetensors, which is not installed; pip install safetensors")
def without_safetensors(rank: int) -> Iterator[Call]:
    """It is installed. Saving does without."""
    with saved() as folder:
        with without("safetensors"):
            fsdp2.save_safetensors(model(), folder / "saved")
            yield lambda: loaded(folder)
        loaded(folder)


@remedy("tqdm, which is not installed; pip install tqdm, or pass a function of (bytes, total)")
def without_tqdm(rank: int) -> Iterator[Call]:
    """The function."""
    seen: list[tuple[int, int]] = []
    with saved() as folder, without("tqdm"):
        yield lambda: loaded(folder, progress=True)
        loaded(folder, progress=lambda done, total: seen.append((done, total)))
    assert rank or seen[-1][0] == seen[-1][1] > 0


@remedy("; pass one of them")
def several_files(rank: int) -> Iterator[Call]:
    """One of them."""
    with saved() as folder:
        for name in ("a.safetensors", "b.safetensors"):
            Path(folder, name).write_bytes(Path(folder, "model.safetensors").read_bytes())
        Path(folder, "model.safetensors").unlink()
        yield lambda: loaded(folder)
        loaded(folder / "b.safetensors")


@remedy("weight_map from names to files; write it again")
def a_broken_index(rank: int) -> Iterator[Call]:
    """The index is written again, as the text describes it."""
    with saved() as folder:
        index = folder / "model.safetensors.index.json"
        index.write_text("{")
        yield lambda: loaded(folder)
        index.write_text(json.dumps({"weight_map": dict.fromkeys(layers().state_dict(), "model.safetensors")}))
        loaded(folder)


@remedy(", which the index lists; write both again")
def an_index_of_other_weights(rank: int) -> Iterator[Call]:
    """Both are written again."""
    with saved() as folder:
        index = folder / "model.safetensors.index.json"
        names = [*layers().state_dict(), "another"]
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
        yield lambda: loaded(folder)
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names[:-1], "model.safetensors")}))
        loaded(folder)


@remedy("the bytes that it lists; copy or write it again")
def a_file_that_was_cut_off(rank: int) -> Iterator[Call]:
    """The file is copied again."""
    with saved() as folder:
        file = folder / "model.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-100])
        yield lambda: loaded(folder)
        file.write_bytes(whole)
        loaded(folder)


@remedy("of the plain model, expected one; remove one of them")
def two_names_of_one_weight(rank: int) -> Iterator[Call]:
    """One of them is removed."""
    with tempfile.TemporaryDirectory() as folder:
        from safetensors.torch import save_file

        state = layers().state_dict()
        save_file({**state, "_orig_mod.0.weight": torch.ones(8, 8)}, file := Path(folder, "model.safetensors"))
        yield lambda: loaded(file)
        save_file(state, file)
        loaded(file)


@remedy("as on the first rank; build the same module on every rank")
def modules_that_differ(rank: int) -> Iterator[Call]:
    """The same module is built."""
    yield lambda: fsdp2.sync_module_states(nn.Linear(8, 8 + rank))
    module = nn.Linear(8, 8)
    fsdp2.sync_module_states(module)
    fully_shard(module, mesh=mesh_1d())
    goes_on(module)


@remedy("; pass the local state dicts of all ranks from one save")
def the_pieces_of_one_rank(rank: int) -> Iterator[Call]:
    """The pieces of all ranks."""
    module = model()
    with fsdp2.state_dict_type(module, StateDictType.LOCAL_STATE_DICT):
        own = module.state_dict()
    yield lambda: fsdp2.merge_local_state_dicts([own])
    everybodys: list[Any] = [None, None]
    dist.all_gather_object(everybodys, own)
    layers().load_state_dict(fsdp2.merge_local_state_dicts(everybodys))


@remedy("the same names on every rank. Pass rank0_only=False and save every rank's state dict")
def names_of_each_rank(rank: int) -> Iterator[Call]:
    """Without the option, each rank has what is its own."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("owner", "shard"))
    module = nn.ModuleDict({"dense": nn.Linear(3, 2), f"expert{rank}": nn.Linear(2, 4)})
    fully_shard(module[f"expert{rank}"], mesh=mesh["shard"])
    fully_shard(module["dense"], mesh=mesh_1d())

    def save(rank0_only: bool) -> dict[str, torch.Tensor]:
        config = FullStateDictConfig(rank0_only=rank0_only)
        with fsdp2.state_dict_type(module, StateDictType.FULL_STATE_DICT, config):
            return module.state_dict()

    yield lambda: save(rank0_only=True)
    assert f"expert{rank}.weight" in save(rank0_only=False)


@remedy("fully_shard with its sharding. Register it before fully_shard, or create it from full")
def a_parameter_of_another_placement(rank: int) -> Iterator[Call]:
    """It is created from full values."""
    module = layers()
    full = module[0].weight
    replicated = DTensor.from_local(full.detach(), mesh_1d(), [Replicate()])
    module[0].weight = nn.Parameter(replicated)
    yield lambda: fully_shard(module, mesh=mesh_1d())
    module[0].weight = nn.Parameter(replicated.full_tensor())
    fully_shard(module, mesh=mesh_1d())
    goes_on(module)


@remedy("Create it from full values, or leave a piece of it out of replicated_params")
def a_piece_that_is_to_be_whole(rank: int) -> Iterator[Call]:
    """One is created from full values, another stays a shard."""
    module, other = layers(), fully_shard(layers(), mesh=mesh_1d())
    for name in ("first", "second"):
        module[0].register_parameter(name, nn.Parameter(torch.ones_like(other[0].weight)))
    yield lambda: fully_shard(module, mesh=mesh_1d(), replicated_params={module[0].first, module[0].second})
    module[0].first = nn.Parameter(module[0].first.full_tensor())
    fully_shard(module, mesh=mesh_1d(), replicated_params={module[0].first})
    assert module[0].first.placements == (Replicate(),) and module[0].second.placements == (Shard(0),)
    goes_on(module)
