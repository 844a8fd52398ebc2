"""Bad input: an error at the call, on every rank, that says where, what, got, expected and what to do."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, StateDictType
from torch.distributed.tensor import Shard

import fsdp2
from tests.support.parity import mesh_1d, mesh_2d, mesh_of, shard_each, sharded, stack
from tests.support.pool import on_ranks
from tests.support.report import Accepted, Unhelpful, check, refused, report


def untouched(right: bool, what: str) -> None:
    """Raise unless a refused call left everything as it was."""
    if not right:
        raise Accepted(f"refused, but {what}")


def refuses(fsdp, *words: str, module=None, otherwise: str = "accepted without a word", **options) -> None:
    """Expect that ``fully_shard`` refuses these options with these words and leaves the module as it was."""
    module = stack() if module is None else module
    before = dict(module.named_parameters())
    classes = [type(one) for one in module.modules()]
    hooks = [(len(one._forward_hooks), len(one._forward_pre_hooks), set(vars(one))) for one in module.modules()]
    with refused(*words, otherwise=otherwise):
        fsdp.fully_shard(module, **({"mesh": mesh_1d()} | options))
    untouched(classes == [type(one) for one in module.modules()], "the module's class is changed")
    untouched(all(p is before[n] for n, p in module.named_parameters()), "parameters are replaced")
    after = [(len(one._forward_hooks), len(one._forward_pre_hooks), set(vars(one))) for one in module.modules()]
    untouched(hooks == after, "hooks or attributes stay on the module")
    module(torch.ones(1, 8)).sum().backward()


PROMISE = "refused, module unchanged"


@report("Arguments of the wrong type", 1, 2, 4, promise=PROMISE)
def test_wrong_types(rank, world, fsdp):
    """A dtype where a policy is expected, a name where a parameter is: the error names the argument, what was got and
    what is expected."""
    refuses(fsdp, "mp_policy", "MixedPrecisionPolicy", "torch.bfloat16", mp_policy=torch.bfloat16)
    refuses(fsdp, "offload_policy", "OffloadPolicy", "True", offload_policy=True)
    refuses(fsdp, "shard_placement_fn", "callable", shard_placement_fn=Shard(0))
    refuses(fsdp, "ignored_params", "nn.Parameter", "weight", ignored_params={"weight"})
    refuses(fsdp, "ignored_params", "nn.Parameter", ignored_params=nn.Parameter(torch.ones(2)))
    refuses(fsdp, "dp_mesh_dims", "DataParallelMeshDims", "shard", dp_mesh_dims="shard")
    refuses(fsdp, "mesh", "DeviceMesh", "ProcessGroup", mesh=dist.group.WORLD)
    refuses(fsdp, "reshard_after_forward", "bool", "'yes'", reshard_after_forward="yes")
    refuses(fsdp, "reshard_after_forward", "bool", "1.0", reshard_after_forward=1.0)
    for wrong in (None, "model", 3, [], [stack(), "head"]):
        with refused("nn.Module", otherwise=f"{wrong!r} is accepted"):
            fsdp.fully_shard(wrong, mesh=mesh_1d())


@report("An int for reshard_after_forward that is no factor of the ranks", 2, 4, promise=PROMISE)
def test_wrong_subgroup(rank, world, fsdp):
    """Parameters kept after forward are cut over so many neighbours; three of four ranks cannot share pieces evenly."""
    for wrong in (0, -1, 3, world + 1):
        refuses(fsdp, "factor", str(world), str(wrong), reshard_after_forward=wrong)


@report("shard_placement_fn returns nonsense for one of many parameters", 1, 2, 4, promise=PROMISE)
def test_wrong_placements(rank, world, fsdp):
    """A rule written for matrices meets a bias after most of the model was looked at. The error names the parameter,
    and nothing is sharded yet."""
    last = lambda result: lambda parameter: result if parameter.ndim == 1 else None
    refuses(fsdp, "0.bias", "Shard dim 1", shard_placement_fn=last(Shard(1)))
    refuses(fsdp, "0.bias", "Shard", shard_placement_fn=last("rows"))

    def raises(parameter):
        if parameter.ndim == 1:
            raise KeyError("no rule")

    refuses(fsdp, "no rule", shard_placement_fn=raises)


@report("A call fails in a module that is tied to a sharded one", 1, 2, promise="refused, the other unit unchanged")
def test_failing_call_over_a_tie(rank, world, fsdp):
    """The head shares its weight with the embedding, which is a unit already; sharding the head fails because of its
    bias. The tie must not be half made: the embedding trains on, and a second call succeeds."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module[1].weight = module[0].weight
    fsdp.fully_shard(module[0], mesh=mesh_1d())
    with refused("bias", "Shard dim 1"):
        fsdp.fully_shard(module[1], mesh=mesh_1d(), shard_placement_fn=lambda p: Shard(1) if p.ndim == 1 else None)
    module[0](torch.ones(1, 8)).sum().backward()
    module[0].reshard()
    fsdp.fully_shard(module[1], mesh=mesh_1d())
    fsdp.fully_shard(module, mesh=mesh_1d())
    module(torch.ones(1, 8)).sum().backward()
    check(module[1].weight is module[0].weight, "the tie is lost")


@report("Dtypes in the policy that are not floating-point", 1, 2, promise=PROMISE)
def test_wrong_dtypes(rank, world, fsdp):
    """``reduce_dtype=torch.int8`` for compressed gradients would truncate them to nothing."""
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        for wrong in (torch.int8, "bfloat16"):
            policy = MixedPrecisionPolicy(**{name: wrong})
            refuses(fsdp, name, "floating-point", mp_policy=policy)


@on_ranks(1, 2)
def test_scripted(rank, world):
    """``torch.jit.script`` keeps parameters where Python cannot replace them. The error came from torch's hooks, after
    parameters were cut. It names the parameter, and its remedy works, as a scripted module without parameters does:
    the first forward failed in "contains(): incompatible function arguments"."""
    module = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Tanh()), torch.jit.script(nn.Linear(8, 8)))
    refuses(fsdp2, "2.weight", "scripted", "ignored_params", module=module)
    fsdp2.fully_shard(module, mesh=mesh_1d(), ignored_params=set(module[2].parameters()))
    module(torch.ones(1, 8)).sum().backward()
    check(module[2].weight.grad is not None, "the ignored weight has no gradient")
    for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.FULL_STATE_DICT):
        with fsdp2.state_dict_type(module, kind):
            names = list(module.state_dict())
        check(names == ["0.weight", "0.bias", "2.weight", "2.bias"], "the state dict lacks names")


BOOL = "must be a bool, got"
PREFETCH = "FSDPModule"
SETTERS = {
    "set_is_last_backward": (BOOL, (1,)),
    "set_requires_gradient_sync": (BOOL, (1, "no", None)),
    "set_requires_all_reduce": (BOOL, (0,)),
    "set_reshard_after_forward": ("reshard_after_forward should be a bool", (2, None, "yes")),
    "set_reshard_after_backward": (BOOL, (1,)),
    "set_unshard_in_backward": (BOOL, (1, "no")),
    "set_gradient_divide_factor": (
        "factor must be a positive number",
        (0, -1.0, "2", True, None, float("nan"), float("inf")),
    ),
    "set_force_sum_reduction_for_comms": (BOOL, (1,)),
    "set_reduce_scatter_unused_params": (BOOL, (1,)),
    "set_reduce_scatter_max_input_buffers": ("max_input_buffers must be a", (0, 2.5, True, "many")),
    "set_modules_to_forward_prefetch": (PREFETCH, ([nn.Linear(2, 2)], nn.Linear(2, 2), 3)),
    "set_modules_to_backward_prefetch": (PREFETCH, ([nn.Linear(2, 2)], nn.Linear(2, 2), 3)),
    "set_custom_all_gather": ("all_gather: expected a callable", (3, print)),
    "set_custom_reduce_scatter": ("reduce_scatter: expected a callable", (3, print)),
    "set_all_reduce_hook": ("all_reduce_hook: expected a callable", (3, "sum")),
    "set_post_optim_event": ("event must be a torch.Event", (3, True)),
    "set_separate_reduce_scatter_group": (BOOL, (1,)),
    "set_allocate_memory_from_process_group_for_comm": (BOOL, (1,)),
    "_set_unshard_async_op": (BOOL, (1,)),
}
"""What the error of each setter says, and values that it cannot mean."""


@report("Wrong values for setters", 1, 2, promise="refused, setting unchanged")
def test_wrong_values_of_setters(rank, world, fsdp):
    """What a setter cannot mean is refused when it is set, not found out by a hang or a strange error in backward."""
    module = sharded(stack, fsdp)
    module(torch.ones(1, 8)).sum().backward()
    for name, (words, values) in SETTERS.items():
        for value in values:
            try:
                getattr(module[0], name)(value)
            except (TypeError, ValueError, AssertionError) as error:
                if words not in str(error):
                    raise Unhelpful(f"{type(error).__name__}: {error} ({name}({value!r}))") from error
            except AttributeError as error:
                raise Unhelpful(f"AttributeError: {error} ({name}({value!r}))") from error
            else:
                raise Accepted(f"{name}({value!r}) is accepted")
    for name in ("set_requires_gradient_sync", "set_reshard_after_forward", "set_requires_all_reduce"):
        with refused("recurse", otherwise=f"{name}(True, recurse='no') is accepted"):
            getattr(module[0], name)(True, recurse="no")
    module(torch.ones(1, 8)).sum().backward()


@report("A mesh of three dimensions, or of two without names", 4, promise=PROMISE)
def test_wrong_mesh_ranks(rank, world, fsdp):
    """Which dimension is sharded and which replicated cannot be guessed."""
    refuses(fsdp, "1D or 2D", "dp_mesh_dims", mesh=mesh_of(1, 2, 2, names=("a", "b", "c")))
    refuses(fsdp, "mesh_dim_names", mesh=mesh_of(2, 2))


@report("A mesh of a device that this machine lacks", 1, 2, promise=PROMISE)
def test_wrong_device(rank, world, fsdp):
    """The mesh says cuda on a machine without, and the parameters cannot go there."""
    if torch.cuda.is_available():
        return
    mesh = mesh_1d()
    other = DeviceMesh("cuda", mesh.mesh, _init_backend=False, _rank=rank)
    other._dim_group_names = mesh._dim_group_names
    refuses(fsdp, "mesh", "for cuda", mesh=other)


@report("A mesh that this rank is not in", 4, promise=PROMISE)
def test_mesh_without_this_rank(rank, world, fsdp):
    """A submesh is passed on all ranks. Those outside are told, and those inside go on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    ranks = mesh.mesh[0]
    other = DeviceMesh("cpu", ranks)
    if rank in ranks.tolist():
        module = stack()
        fsdp.fully_shard(module, mesh=other)
        module(torch.ones(1, 8)).sum().backward()
    else:
        refuses(fsdp, f"rank {rank}", "mesh", mesh=other)


@report("A mesh made without, or before, the process group", 2, 4, promise=PROMISE)
def test_mesh_of_another_process_group(rank, world, fsdp):
    """Elastic restarts and notebooks initialise the process group again, and a mesh made before lives on in some
    module. Its process groups are gone; the error must say so, at the call."""
    refuses(fsdp, "mesh", "init_process_group", mesh=DeviceMesh("cpu", list(range(world)), _init_backend=False))
    stale = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
    where = [tempfile.mktemp() if rank == 0 else None]
    dist.broadcast_object_list(where)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{where[0]}", rank=rank, world_size=world)
    refuses(fsdp, "mesh", "init_process_group", mesh=stale)


@report("fully_shard twice on one module", 1, 2, promise="refused, still trains")
def test_twice(rank, world, fsdp):
    """A helper shards what was sharded already, or a list that contains it. What is sharded trains on."""
    module = sharded(stack, fsdp)
    for again in (module, module[0], [module[0], module[1]]):
        with refused("already", otherwise="sharded again"):
            fsdp.fully_shard(again, mesh=mesh_1d())
    module(torch.ones(1, 8)).sum().backward()
    for unit in (*module, module):
        unit.reshard()
    check(all(p.grad is not None for p in module.parameters()), "a gradient is missing")


@report("Parameters left on the meta device", 1, 2, 4, promise="error at the first forward that names them")
def test_left_on_meta(rank, world, fsdp):
    """One module was forgotten when the model was materialised, among many that were not. What is fine stays so, and
    after materialising the rest the model runs."""
    module = stack()
    with torch.device("meta"):
        module.append(nn.Linear(8, 8))
    shard_each(module, fsdp, mesh=mesh_1d())
    with refused("3.weight", "meta", "to_empty"):
        module(torch.ones(1, 8))
    module[3].to_empty(device="cpu")
    module[3].reset_parameters()
    module(torch.ones(1, 8)).sum().backward()


@report("Parameters of one unit on several devices, meta among them", 1, 2, promise="error that names them")
def test_mixed_devices(rank, world, fsdp):
    """A unit was materialised in part: its weight is real, its bias is still on meta."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module[1].bias = nn.Parameter(torch.empty(8, device="meta"))
    shard_each(module, fsdp, mesh=mesh_1d())
    with refused("1.bias", "meta"):
        module(torch.ones(1, 8))


@report("An extension sends another size on one rank", fresh=True, promise="error on every rank that names it")
def test_extension_of_other_sizes(rank, world, fsdp):
    """``fsdp_pre_all_gather`` of a quantised weight appends a scale on some ranks only. What arrives is shifted."""
    module = sharded(lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8)), fsdp)
    local = module[0].weight._local_tensor

    def before(mesh):
        flat = local.detach().flatten()
        return (torch.cat([flat, torch.ones(4)]) if rank == 1 else flat,), None

    def after(outputs, metadata, dtype, *, out=None):
        full = outputs[0][:64].view(8, 8)
        if out is not None:
            return None
        return full, (outputs[0],)

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = before, after
    with refused("0.weight sends", "rank 1", otherwise="silently wrong: computes with shifted weights"):
        module(torch.ones(1, 8))


@report("A hybrid mesh and reshard_after_forward of the wrong size", 4, promise=PROMISE)
def test_wrong_subgroup_of_hybrid(rank, world, fsdp):
    """Of a (2, 2) mesh only the two ranks of the shard axis can share pieces."""
    refuses(fsdp, "factor of 2", "4", mesh=mesh_2d(), reshard_after_forward=4)
