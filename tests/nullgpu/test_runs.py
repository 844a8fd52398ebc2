"""Every public name, setter and option of fsdp2 runs on device "cuda" with NCCL's process group, and in order.

Values mean nothing here. CUDA, NCCL and torch must take every call, and the recorder of ``ordering.py`` must find
nothing. What torch's own ``fully_shard`` can do too runs in ``test_torch.py``, with both.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.nullgpu.ordering import Ordering
from tests.nullgpu.programs import ranks
from tests.step.test_communication import Gather, Scatter
from tests.support.processes import free_port

WIDTH = 256
MIXED = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """Two linear layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to ``x``."""
        return x + self.down(torch.relu(self.up(self.norm(x))))

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        """Another method that computes with the parameters."""
        return self(self(x))


def sharded(mesh: DeviceMesh, model: Any = None, **options: Any) -> Any:
    """Shard the children of a model of three blocks, and the model."""
    model = nn.Sequential(*(Block() for _ in range(3))) if model is None else model
    for unit in (*model.children(), model):
        fsdp2.fully_shard(unit, mesh=mesh, **options)
    return model


def train(model: Any, steps: int = 2, optimizer: Any = None) -> Any:
    """Train; return the model."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(torch.randn(8, WIDTH, requires_grad=True)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def trained(mesh: DeviceMesh, **options: Any) -> Any:
    """Shard a model and train it."""
    return train(sharded(mesh, **options))


def over_copies(mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks as two replicas of four."""
    return init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))


# ---- public names ----


def without_options(mesh: DeviceMesh) -> None:
    """Train with what is the default."""
    trained(mesh)


def unsharded_handle(mesh: DeviceMesh) -> None:
    """Gather ahead of a forward."""
    model = trained(mesh)
    handle = model[1].unshard(async_op=True)
    assert isinstance(handle, fsdp2.UnshardHandle)
    handle.wait()
    train(model, 1)


def finalized(mesh: DeviceMesh) -> None:
    """End backwards by hand."""
    model = trained(mesh)
    model.set_manual_backward_finalization(True)
    for _ in range(2):
        model(torch.randn(8, WIDTH)).sum().backward()
        handle = model.finalize_backward(async_op=True)
        assert isinstance(handle, fsdp2.GradientReductionHandle)
        handle.wait()


def scaled(mesh: DeviceMesh) -> None:
    """Scale losses."""
    model, scaler = sharded(mesh), fsdp2.ShardedGradScaler(device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        scaler.scale(model(torch.randn(8, WIDTH)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def placed_on_meshes(mesh: DeviceMesh) -> None:
    """Give parameters of one unit meshes of their own."""
    both = over_copies(mesh)

    def place(parameter: nn.Parameter) -> Any:
        return fsdp2.ShardPlacementResult(Shard(0), both["shard"] if parameter.ndim == 1 else mesh)

    with contextlib.suppress(ValueError, AssertionError):  # meshes that the placement does not fit are refused
        trained(mesh, shard_placement_fn=place)


def clipped(mesh: DeviceMesh) -> None:
    """Clip gradients, ours and torch's."""
    model = sharded(over_copies(mesh))
    for clip in (fsdp2.clip_grad_norm_, nn.utils.clip_grad_norm_):
        model(torch.randn(8, WIDTH)).sum().backward()
        clip(model.parameters(), 1.0)


def saved_and_loaded(mesh: DeviceMesh, folder: Path) -> None:
    """Write a file of whole weights and read it."""
    model = trained(mesh)
    fsdp2.save_safetensors(model, folder / "model.safetensors")
    fsdp2.load_safetensors(model, folder / "model.safetensors")


def broadcast(mesh: DeviceMesh) -> None:
    """Send rank 0's values to a model on the meta device."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(3)))
    whole = {name: torch.zeros(value.shape, device="cpu") for name, value in model.state_dict().items()}
    model = sharded(mesh, model)
    fsdp2.broadcast_from_rank0(model, whole)
    train(model)


def optimizer_states(mesh: DeviceMesh) -> None:
    """Collect and load a full state of an optimizer."""
    model = sharded(mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer=optimizer)
    state = fsdp2.optim_state_dict(model, optimizer)
    optimizer.load_state_dict(fsdp2.optim_state_dict_to_load(model, optimizer, state))


def state_dicts(mesh: DeviceMesh) -> None:
    """FSDP1's kinds of state dicts."""
    model = trained(mesh)
    fsdp2.get_state_dict_type(model)
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
        with fsdp2.state_dict_type(model, kind):
            model.load_state_dict(model.state_dict())
    fsdp2.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(ValueError, match="pieces that overlap"):  # there is no other rank to have the others
        fsdp2.merge_local_state_dicts([model.state_dict()] * 8)


def forecasted(mesh: DeviceMesh) -> None:
    """Forecast needs no device; beside a live process group it runs in a process of its own (tests/forecast)."""
    assert callable(fsdp2.forecast)


def recorded(mesh: DeviceMesh) -> None:
    """Record steps: events with times, on lanes."""
    model = trained(mesh)
    with fsdp2.record_steps(model) as record:
        train(model)
    assert record is not None


def registered(mesh: DeviceMesh) -> None:
    """Another method of the module gathers too."""
    model = sharded(mesh)
    fsdp2.register_fsdp_forward_method(model[0], "twice")
    model[0].twice(torch.randn(8, WIDTH)).sum().backward()


def installed(mesh: DeviceMesh) -> None:
    """torch's name is ours meanwhile."""
    fsdp2.install()
    try:
        from torch.distributed.fsdp import fully_shard

        train(fully_shard(Block(), mesh=mesh))
    finally:
        fsdp2.uninstall()


def shared(mesh: DeviceMesh) -> None:
    """Two roots on one set of lanes."""
    both = [sharded(mesh), sharded(mesh)]
    fsdp2.share_comm_ctx(both)
    for model in both:
        train(model)


def summoned(mesh: DeviceMesh) -> None:
    """Full parameters between steps, and in a loss."""
    model = trained(mesh)
    with fsdp2.summon_full_params(model), torch.no_grad():
        model[0].up.weight.mul_(0.5)
    with fsdp2.use_weights(model[0]):
        model[0].up.weight.sum()
    for _ in fsdp2.iter_full_params(model):
        pass
    train(model)


def sent(mesh: DeviceMesh) -> None:
    """Weights for an engine; shards on the CPU and on the device."""
    for options in ({}, {"offload_policy": fsdp2.CPUOffloadPolicy()}):
        model = trained(mesh, **options)
        receiver = fsdp2.WeightReceiver()
        # No delta: what has changed on a device that computes nothing is a random number.
        sender = fsdp2.WeightSender(model, dtype=torch.bfloat16, delta=False)
        for _ in range(2):
            report = sender.send(receiver.apply)
            assert isinstance(report, fsdp2.SentWeights)
            train(model)
        assert len(receiver.tensors) == len(list(model.parameters()))


def grouped(mesh: DeviceMesh) -> None:
    """A group of this process alone, of NCCL, which belongs to no mesh."""
    group = fsdp2.weight_sync_group(f"127.0.0.1:{free_port()}", 0, 1, backend="nccl")
    fsdp2.WeightSender(trained(mesh)).send(group)
    torch.distributed.destroy_process_group(group)


def full_steps(mesh: DeviceMesh) -> None:
    """Optimizers that need whole matrices, and those that step on plain shards."""
    model = sharded(mesh)
    train(model, optimizer=fsdp2.use_full_params(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))
    train(model, optimizer=fsdp2.use_local_shards(torch.optim.AdamW(model.parameters())))
    early = fsdp2.use_full_params(torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=0.01, overlap_backward=True)
    for _ in range(3):
        train(model, optimizer=early)


def state_on_the_host(mesh: DeviceMesh) -> None:
    """Moments on the host, of shards and of whole parameters; those of shards are saved and loaded there."""
    model = sharded(mesh)
    adamw = fsdp2.offload_optimizer_state(torch.optim.AdamW(model.parameters()), bucket_mb=0.1)
    whole = fsdp2.use_full_params(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    fsdp2.offload_optimizer_state(whole, bucket_mb=0.1)
    for optimizer in (adamw, whole):
        train(model, optimizer=optimizer)
        if optimizer is adamw:
            for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
                state = get_optimizer_state_dict(model, optimizer, options=options)
                set_optimizer_state_dict(model, optimizer, state, options=options)
        train(model, optimizer=optimizer)
        moments = [value for entry in optimizer.state.values() for value in entry.values() if value.numel() > 1]
        assert moments and all((m.to_local() if isinstance(m, DTensor) else m).is_pinned() for m in moments)


def without_sync(mesh: DeviceMesh) -> None:
    """Micro-batches."""
    model = trained(mesh)
    with fsdp2.no_sync(model):
        model(torch.randn(8, WIDTH)).sum().backward()
    train(model)


def by_budget(mesh: DeviceMesh) -> None:
    """Some parameters on the host."""
    model = nn.Sequential(*(Block() for _ in range(3)))
    train(sharded(mesh, model, offload_policy=fsdp2.cpu_offload_by_budget(model, 100_000)))


def looked_at(mesh: DeviceMesh) -> None:
    """Functions that compute nothing."""
    model = nn.Sequential(*(Block() for _ in range(3)))
    fsdp2.plan_units(model)
    model = sharded(mesh, model)
    assert len(fsdp2.fsdp_modules(model)) == 4 and fsdp2.padding_report(model) is not None
    fsdp2.set_rank_checks(False)
    fsdp2.sync_module_states(model)


def on_one_mesh(mesh: DeviceMesh) -> None:
    """Parameters are DTensors on a mesh that has all dimensions."""
    both = over_copies(mesh)
    model = distribute_module(nn.Sequential(*(Block() for _ in range(3))), both)
    sharded(both, model, dp_mesh_dims=fsdp2.DataParallelMeshDims(shard="shard", replicate="replicate"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        rows = DTensor.from_local(torch.randn(8, WIDTH), both, [Replicate(), Replicate()], run_check=False)
        model(rows).to_local().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


NAMES: dict[str, Callable[..., None]] = {
    "CPUOffloadPolicy": lambda mesh: trained(mesh, offload_policy=fsdp2.CPUOffloadPolicy()),
    "CompressionPolicy": lambda mesh: trained(
        mesh, compression=fsdp2.CompressionPolicy(torch.int8, "int4", "int4", min_numel=1024)
    ),
    "DataParallelMeshDims": on_one_mesh,
    "FSDPModule": without_options,
    "GradientReductionHandle": finalized,
    "MixedPrecisionPolicy": lambda mesh: trained(mesh, mp_policy=MIXED),
    "OffloadPolicy": lambda mesh: trained(mesh, offload_policy=fsdp2.OffloadPolicy()),
    "ShardPlacementResult": placed_on_meshes,
    "ShardedGradScaler": scaled,
    "UnshardHandle": unsharded_handle,
    "SentWeights": sent,
    "WeightBucket": sent,
    "WeightReceiver": sent,
    "WeightSender": sent,
    "weight_sync_group": grouped,
    "broadcast_from_rank0": broadcast,
    "clip_grad_norm_": clipped,
    "cpu_offload_by_budget": by_budget,
    "forecast": forecasted,
    "fsdp_modules": looked_at,
    "fully_shard": without_options,
    "get_state_dict_type": state_dicts,
    "install": installed,
    "iter_full_params": summoned,
    "load_safetensors": saved_and_loaded,
    "merge_local_state_dicts": state_dicts,
    "no_sync": without_sync,
    "offload_optimizer_state": state_on_the_host,
    "optim_state_dict": optimizer_states,
    "optim_state_dict_to_load": optimizer_states,
    "padding_report": looked_at,
    "plan_units": looked_at,
    "record_steps": recorded,
    "register_fsdp_forward_method": registered,
    "save_safetensors": saved_and_loaded,
    "set_rank_checks": looked_at,
    "set_state_dict_type": state_dicts,
    "share_comm_ctx": shared,
    "state_dict_type": state_dicts,
    "summon_full_params": summoned,
    "sync_module_states": looked_at,
    "uninstall": installed,
    "use_full_params": full_steps,
    "use_local_shards": full_steps,
    "use_weights": summoned,
}


# ---- methods ----

Setting = Callable[[Any], object]
METHODS: dict[str, Setting] = {
    "finalize_backward": lambda model: model.set_manual_backward_finalization(False),
    "get_pending_gradients": lambda model: model.get_pending_gradients(),
    "reset_iter_state": lambda model: model.reset_iter_state(),
    "reshard": lambda model: (model.unshard(), model.reshard()),
    "set_all_reduce_hook": lambda model: model[0].set_all_reduce_hook(lambda g: g.mul_(1), stream=torch.cuda.Stream()),
    "set_allocate_memory_from_process_group_for_comm": lambda model: (
        model.set_allocate_memory_from_process_group_for_comm(True)
    ),
    "set_compression": lambda model: model.set_compression(fsdp2.CompressionPolicy(torch.int8, min_numel=1024)),
    "set_custom_all_gather": lambda model: model[0].set_custom_all_gather(Gather()),
    "set_custom_reduce_scatter": lambda model: model[0].set_custom_reduce_scatter(Scatter()),
    "set_force_sum_reduction_for_comms": lambda model: model.set_force_sum_reduction_for_comms(True),
    "set_gradient_divide_factor": lambda model: model.set_gradient_divide_factor(3.0),
    "set_is_last_backward": lambda model: model.set_is_last_backward(True),
    "set_keep_unsharded_storage": lambda model: model.set_keep_unsharded_storage(True),
    "set_manual_backward_finalization": lambda model: model.set_manual_backward_finalization(False),
    "set_modules_to_backward_prefetch": lambda model: model[2].set_modules_to_backward_prefetch([model[1], model[0]]),
    "set_modules_to_forward_prefetch": lambda model: model[0].set_modules_to_forward_prefetch([model[1], model[2]]),
    "set_post_optim_event": lambda model: model.set_post_optim_event(torch.cuda.current_stream().record_event()),
    "set_reduce_scatter_divide_factor": lambda model: model.set_reduce_scatter_divide_factor(2.0),
    "set_reduce_scatter_max_input_buffers": lambda model: model.set_reduce_scatter_max_input_buffers(2),
    "set_reduce_scatter_unused_params": lambda model: model.set_reduce_scatter_unused_params(True),
    "set_requires_all_reduce": lambda model: model.set_requires_all_reduce(True),
    "set_requires_gradient_sync": lambda model: model.set_requires_gradient_sync(True),
    "set_reshard_after_backward": lambda model: model.set_reshard_after_backward(False),
    "set_reshard_after_forward": lambda model: model.set_reshard_after_forward(False),
    "set_separate_reduce_scatter_group": lambda model: model.set_separate_reduce_scatter_group(True),
    "set_symm_mem_for_comm": lambda model: model.set_symm_mem_for_comm(),
    "set_deterministic_reduction": lambda model: model.set_deterministic_reduction(True),
    "set_transfer_sizes": lambda model: model.set_transfer_sizes(direct_param_bytes=1024, chunk_bytes=65536),
    "set_unshard_in_backward": lambda model: model[2].set_unshard_in_backward(True),
    "synchronize_gradients": lambda model: model.synchronize_gradients(),
    "unshard": lambda model: model.unshard(),
    "state_dict": lambda model: model.state_dict(),
    "zero_grad": lambda model: model.zero_grad(),
}

OPTIONS: dict[str, Callable[[DeviceMesh], Any]] = {
    "mesh": lambda mesh: trained(over_copies(mesh)),
    "reshard_after_forward": lambda mesh: [trained(mesh, reshard_after_forward=value) for value in (True, False, 2)],
    "shard_placement_fn": lambda mesh: trained(mesh, shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1)),
    "mp_policy": NAMES["MixedPrecisionPolicy"],
    "offload_policy": lambda mesh: trained(mesh, offload_policy={"*up*": fsdp2.CPUOffloadPolicy()}),
    "ignored_params": lambda mesh: trained(mesh, ignored_params=set()),
    "dp_mesh_dims": NAMES["DataParallelMeshDims"],
    "policy": lambda mesh: train(
        fsdp2.fully_shard(nn.Sequential(*(Block() for _ in range(3))), mesh=mesh, policy={Block})
    ),
    "strategy": lambda mesh: train(fsdp2.fully_shard(Block(), mesh=mesh, strategy=ShardingStrategy.SHARD_GRAD_OP)),
    "replicated_params": lambda mesh: trained_with_replicated(mesh),
    "ignored_modules": lambda mesh: trained(mesh, ignored_modules=[]),
    "compression": NAMES["CompressionPolicy"],
    "shard_over_replicas": lambda mesh: trained(over_copies(mesh), shard_over_replicas=True),
}


def trained_with_replicated(mesh: DeviceMesh) -> Any:
    """Train with norms that are whole on every rank."""
    model = nn.Sequential(*(Block() for _ in range(3)))
    return train(sharded(mesh, model, replicated_params={p for block in model for p in block.norm.parameters()}))


# ---- what fsdp2 is used with ----


def hybrid(mesh: DeviceMesh) -> None:
    """Copies of four ranks, reduced in two ways."""
    for reduce in (None, torch.bfloat16):
        trained(over_copies(mesh), mp_policy=fsdp2.MixedPrecisionPolicy(torch.bfloat16, reduce))


def tensor_parallel(mesh: DeviceMesh) -> None:
    """Two dimensions."""
    both = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        parallelize_module(block, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    train(sharded(both["dp"], model, mp_policy=MIXED))


def recomputed(mesh: DeviceMesh) -> None:
    """Both kinds of checkpointing."""
    for reentrant in (False, True):
        model = sharded(mesh)
        for block in model:
            block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=reentrant)  # noqa: B023
        train(model)


def compiled(mesh: DeviceMesh) -> None:
    """Blocks that Inductor compiles."""
    model = nn.Sequential(*(Block() for _ in range(2)))
    for block in model:
        block.compile()
    train(sharded(mesh, model, mp_policy=MIXED), 3)


def pipelined(mesh: DeviceMesh) -> None:
    """The first of two stages; the other is pretended."""
    both = init_device_mesh("cuda", (2, 4), mesh_dim_names=("pp", "dp"))
    model = sharded(both["dp"])
    stage = PipelineStage(model, 0, 2, torch.device("cuda"), group=both.get_group("pp"))
    schedule, optimizer = Schedule1F1B(stage, 4), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        schedule.step(torch.randn(8, WIDTH))
        optimizer.step()
        optimizer.zero_grad()


def checkpointed(mesh: DeviceMesh, folder: Path) -> None:
    """torch.distributed.checkpoint, as one rank that does not ask the others."""
    import torch.distributed.checkpoint as dcp

    model = trained(mesh)
    with torch.device("cpu"):  # torch computes where shards begin on the default device
        dcp.save(model.state_dict(), checkpoint_id=folder / "checkpoint", no_dist=True)
        dcp.load(model.state_dict(), checkpoint_id=folder / "checkpoint", no_dist=True)


WITH = [hybrid, tensor_parallel, recomputed, compiled, pipelined, checkpointed]


# ---- what torch has too, and the rest ----

METHODS_OF_TORCH = [name for name in METHODS if hasattr(torchs.FSDPModule, name)]
OPTIONS_OF_TORCH = {
    name: NAMES["CPUOffloadPolicy"] if name == "offload_policy" else run  # for all parameters of a unit, or none
    for name, run in OPTIONS.items()
    if name in inspect.signature(torchs.fully_shard).parameters
    and name != "dp_mesh_dims"  # torch's refuses a mesh of the same ranks that an earlier test has made
}
RUNS: dict[str, Callable[..., Any]] = {
    **{run.__name__ if run.__name__ != "<lambda>" else name: run for name, run in NAMES.items()},
    **{f"option {name}": run for name, run in OPTIONS.items() if run not in NAMES.values()},
}
OWN_RUNS = [name for name, run in RUNS.items() if run not in OPTIONS_OF_TORCH.values()]
OWN_METHODS = [name for name in METHODS if name not in METHODS_OF_TORCH]


def ran(run: Callable[..., Any], *arguments: Any) -> None:
    """Run something as one of eight ranks, and see that it was in order."""
    torch.manual_seed(0)
    with warnings.catch_warnings(), ranks(8) as mesh, Ordering() as ordering:
        warnings.simplefilter("ignore")
        run(mesh, *arguments)
        torch.cuda.synchronize()
    assert not (races := ordering.races()), races[0]


@pytest.mark.parametrize("name", OWN_RUNS)
def test_runs(name, tmp_path):
    """It runs, in order."""
    takes_folder = len(inspect.signature(RUNS[name]).parameters) == 2
    ran(RUNS[name], *([tmp_path] if takes_folder else []))


def between_steps(name: str, mesh: DeviceMesh) -> None:
    """Call a method between steps."""
    model = trained(mesh)
    METHODS[name](model)
    train(model)


@pytest.mark.parametrize("name", OWN_METHODS)
def test_methods(name):
    """A method is called between steps, and training goes on."""
    ran(partial(between_steps, name))


def test_nothing_is_missing():
    """Every public name, method and option is here: new ones have to be added."""
    assert set(NAMES) == set(fsdp2.__all__)
    own = {name for kind in fsdp2.FSDPModule.__mro__ if kind.__module__.startswith("fsdp2") for name in vars(kind)}
    assert set(METHODS) == {name for name in own if not name.startswith("_")}
    assert set(OPTIONS) == set(inspect.signature(fsdp2.fully_shard).parameters) - {"module"}


def fail(*unused: Any, **named: Any) -> Any:
    """Raise what only a caller raises."""
    raise KeyError("of the caller")


class FailingGather(Gather):
    """Raises instead of gathering."""

    __call__ = fail


class FailingScatter(Scatter):
    """Raises instead of reducing."""

    __call__ = fail


FAILS: dict[str, Callable[[DeviceMesh, Any], object]] = {
    "set_all_reduce_hook": lambda mesh, model: model[1].set_all_reduce_hook(fail),
    "set_custom_all_gather": lambda mesh, model: model[1].set_custom_all_gather(FailingGather()),
    "set_custom_reduce_scatter": lambda mesh, model: model[1].set_custom_reduce_scatter(FailingScatter()),
    "a hook of a gradient": lambda mesh, model: model[1].up.weight.register_hook(fail),
    "a hook of forward": lambda mesh, model: model[1].register_forward_pre_hook(fail),
    "a hook of backward": lambda mesh, model: model[1].up.register_full_backward_hook(fail),
    "shard_placement_fn": lambda mesh, model: sharded(mesh, shard_placement_fn=fail),
    "mp_policy": lambda mesh, model: sharded(mesh, mp_policy=fail),
    "policy": lambda mesh, model: fsdp2.fully_shard(Block(), mesh=mesh, policy=fail),
}


@pytest.mark.parametrize("name", FAILS)
def test_an_exception_in_an_option_is_not_lost(name):
    """A function that the caller gave raises, in backward on autograd's thread, under the recorder: torch's stream
    sanitizer loses it. After ``reset_iter_state()`` the model goes, and another one trains in its memory, in order."""

    def run(mesh: DeviceMesh) -> None:
        model = sharded(mesh)
        with pytest.raises(KeyError, match="of the caller"):
            FAILS[name](mesh, model)
            train(model, 1)
        model.reset_iter_state()
        del model
        trained(mesh)

    ran(run)
