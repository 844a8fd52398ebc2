"""``clip_grad_norm_``: one norm on every rank, whatever mix of meshes the parameters are on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

import fsdp2
from tests.optim.stepping import ROWS, WIDTH, batch, build
from tests.support.composition import composes
from tests.support.counting import Collectives
from tests.support.parity import full, mesh_1d, mesh_2d, mesh_of
from tests.support.pool import on_ranks

INF = float("inf")


def whole(params: Iterable[Tensor]) -> list[nn.Parameter]:
    """Return plain copies of parameters with their whole gradients."""
    copies = []
    for param in params:
        copy = nn.Parameter(full(param), param.requires_grad)
        copy.grad = None if param.grad is None else full(param.grad).clone()
        copies.append(copy)
    return copies


def assert_clipped(
    params: list[Any], reference: list[nn.Parameter], norm_type: float, max_norm: float, **options: Any
) -> Tensor:
    """Clip and assert that norm and gradients are a single process's, and that all ranks have the same norm."""
    total = fsdp2.clip_grad_norm_(iter(params), max_norm, norm_type, **options)
    expected = torch.nn.utils.clip_grad_norm_(reference, max_norm, norm_type)
    assert type(total) is Tensor and total.shape == ()
    torch.testing.assert_close(total, expected.to(total.dtype), rtol=2e-6, atol=0)
    for param, one in zip(params, reference, strict=True):
        assert (param.grad is None) == (one.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(full(param.grad), one.grad, rtol=2e-6, atol=1e-9)
    assert_same_everywhere(total)
    return total


def assert_same_everywhere(total: Tensor) -> None:
    """Assert that every rank has these very bits."""
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, total.double().numpy().tobytes())
    assert len(set(everybodys)) == 1


@composes("clipping", "CPU offload")
@on_ranks(1, 2, 4)
@pytest.mark.parametrize("offload", [OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)], ids=["here", "offloaded"])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [1.0, 2, 3.0, 0.5, INF, "inf"])
def test_norms_are_those_of_a_single_process(rank, world, norm_type, foreach, offload):
    """Of any order, by any implementation; some gradients are missing, some shards are empty, one is a scalar."""
    for max_norm in (0.01, 1e6):
        module = build(offload_policy=offload)
        module(batch(0)).square().mean().backward()
        params = list(module.parameters())
        assert_clipped(params, whole(params), float(norm_type), max_norm, foreach=foreach)


@on_ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_one_reduction_for_each_group_that_parameters_are_cut_over(rank, world, norm_type):
    """One on one mesh, two over tensor parallelism; none for what is cut nowhere.

    Two with replicas: other ranks may have experts, and then the mean over all ranks is taken.
    """
    for mesh, count in ((mesh_1d(), 1), (mesh_2d(), 2)):
        module = build(mesh)
        module(batch(0)).square().mean().backward()
        params = list(module.parameters())
        reference = whole(params)
        with Collectives() as seen:
            fsdp2.clip_grad_norm_(params, 1.0, norm_type)
        assert dict(seen.counts) == {"reduction": count}
        module.zero_grad()
        module(batch(0)).square().mean().backward()
        assert_clipped(params, reference, norm_type, 0.01)
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    with Collectives() as seen:
        fsdp2.clip_grad_norm_(plain.parameters(), 1.0, norm_type)
    assert not seen.counts


@composes("clipping", "tensor parallel", "several meshes", "hybrid sharding", "shard dim", "uneven")
@on_ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, 3.0, INF])
def test_any_mix_of_meshes(rank, world, norm_type):
    """Strided shards, tensor parallelism alone, experts on another mesh, hybrid sharding, and plain parameters."""
    mesh = mesh_2d("dp", "tp")
    torch.manual_seed(5)
    dense = nn.Sequential(nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH), nn.Linear(WIDTH, WIDTH))
    parallelize_module(dense, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel()})
    for unit in dense[:2]:
        fsdp2.fully_shard(unit, mesh=mesh["dp"])
    experts = nn.ModuleList(nn.Linear(WIDTH, size, bias=False) for size in (3, 5))
    place = lambda p: fsdp2.ShardPlacementResult(Shard(1), mesh_2d()) if p is experts[0].weight else None
    head = nn.Sequential(*experts[:1], nn.Linear(3, 1))
    ignored = head[1].bias
    fsdp2.fully_shard(head, mesh=mesh_1d(), shard_placement_fn=place, ignored_params={ignored})
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    (dense(x).square().mean() + head(x).square().mean()).backward()
    params = [*dense.parameters(), *head.parameters()]
    assert len({(p.device_mesh, p.placements) for p in params if isinstance(p, DTensor)}) >= 5
    reference = whole(params)
    with Collectives() as seen:
        fsdp2.clip_grad_norm_(params, 1e9, norm_type)
    assert dict(seen.counts) == {"reduction": 5}  # tp; shards of the hybrid mesh; dp and tp; all ranks
    assert_clipped(params, reference, norm_type, 0.01)


@on_ranks(2, 4)
def test_plain_gradients_that_differ(rank, world):
    """Ranks agree on the norm also where gradients of plain parameters were never reduced."""
    for norm_type in (2.0, INF):
        module = build()
        module(batch(0)).square().mean().backward()
        plain = nn.Parameter(torch.ones(3))
        plain.grad = torch.ones(3) * rank
        total = fsdp2.clip_grad_norm_([plain, *module.parameters()], 0.01, norm_type)
        assert_same_everywhere(total)


@on_ranks(2, 4)
@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_ignored_parameters_alone(rank, world, norm_type):
    """Without a sharded one among them nothing told over which ranks; each had a norm, and scaling, of its own."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    ignored = list(module[1].parameters())
    fsdp2.fully_shard(module, mesh=mesh_1d(), ignored_params=set(ignored))
    module(batch(rank)).square().mean().backward()
    powers = torch.stack([torch.linalg.vector_norm(param.grad, norm_type) for param in ignored])
    mine = torch.linalg.vector_norm(powers, norm_type).double()
    everybodys: list[Any] = [None] * world
    dist.all_gather_object(everybodys, mine)
    together = torch.stack(everybodys)
    expected = together.max() if norm_type == INF else together.pow(2).mean().sqrt()
    assert len({float(norm) for norm in everybodys}) > 1
    total = fsdp2.clip_grad_norm_(ignored, 0.01, norm_type)
    torch.testing.assert_close(total.double(), expected, rtol=2e-6, atol=0)
    assert_same_everywhere(total)
    alone = nn.Parameter(torch.ones(3))  # of no sharded module: nobody else is asked
    alone.grad = torch.full((3,), float(rank + 1))
    with Collectives() as seen:
        assert fsdp2.clip_grad_norm_(alone, 0.01, INF) == rank + 1
    assert not seen.reductions


@on_ranks(2, 4)
@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_ranks_without_gradients_take_part(rank, world, norm_type):
    """On one rank, on all but one, on all: nobody waits forever, and what is not there counts as nothing."""
    for having in ([0], range(1, world), []):
        module = build()
        module(batch(0)).square().mean().backward()
        if rank not in having:
            module.zero_grad()
        params = [p for p in module.parameters() if p.placements == (Shard(0),)]
        pieces = [torch.zeros(1), *(p.grad.to_local().flatten() for p in params if p.grad is not None)]
        everybodys: list[Any] = [None] * world
        dist.all_gather_object(everybodys, torch.cat(pieces))
        expected = torch.linalg.vector_norm(torch.cat(everybodys), norm_type)
        total = fsdp2.clip_grad_norm_(params, 0.01, norm_type)
        torch.testing.assert_close(total, expected)
        assert_same_everywhere(total)
        assert (total == 0) == (not having)


@on_ranks(2)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
@pytest.mark.parametrize("value", [float("nan"), INF, -INF])
def test_what_is_not_finite(rank, world, norm_type, value):
    """One such element on one rank: every rank knows, and raises before it scales if asked."""
    for where in range(world):
        module = build()
        module(batch(0)).square().mean().backward()
        if rank == where:
            module.one.weight.grad.to_local()[0, 0] = value
        params = list(module.parameters())
        before = [None if p.grad is None else p.grad.to_local().clone() for p in params]
        with pytest.raises(RuntimeError, match=r"total norm of order .* of the gradients is (nan|inf), expected"):
            fsdp2.clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
        for param, old in zip(params, before, strict=True):
            assert old is None or torch.equal(param.grad.to_local().nan_to_num(7), old.nan_to_num(7))
        total = fsdp2.clip_grad_norm_(params, 1.0, norm_type)
        assert total.isnan() if value != value else total.isinf()


@on_ranks(2)
def test_dtypes(rank, world):
    """Half precision has a float32 norm that does not overflow; float64 has its own; gradients keep their dtype."""
    for dtypes, expected in (
        ((torch.bfloat16, torch.float32), torch.float32),
        ((torch.float16, torch.float16), torch.float32),
        ((torch.bfloat16, torch.float64), torch.float64),
        ((torch.complex64, torch.float32), torch.float32),
    ):
        params = []
        for number, dtype in enumerate(dtypes):
            param = nn.Parameter(distribute_tensor(torch.zeros(5, 3, dtype=dtype), mesh_1d(), [Shard(0)]))
            param.grad = distribute_tensor(torch.full((5, 3), 2.0e4 + number, dtype=dtype), mesh_1d(), [Shard(0)])
            params.append(param)
        exact = torch.cat([full(p.grad).to(torch.complex128).flatten() for p in params]).abs().norm()
        total = fsdp2.clip_grad_norm_(params, 1.0)
        assert total.dtype == expected and total.item() == pytest.approx(exact.item(), rel=1e-6)
        assert [p.grad.dtype for p in params] == list(dtypes)
        again = torch.cat([full(p.grad).to(torch.complex128).flatten() for p in params]).abs().norm()
        assert again.item() == pytest.approx(1.0, rel=1e-2)


WHOLE = torch.arange(12.0).view(6, 2)
PLACED: dict[str, tuple[Placement | None, Callable[[], Tensor]]] = {
    "partial sums of a shard": (
        Shard(0),
        lambda: DTensor.from_local(WHOLE * (dist.get_rank() + 1), mesh_1d(), [Partial()]),
    ),
    "partial sums of a copy": (
        Replicate(),
        lambda: DTensor.from_local(WHOLE * (dist.get_rank() + 1), mesh_1d(), [Partial()]),
    ),
    "copies of a shard": (Shard(0), lambda: DTensor.from_local(WHOLE.clone(), mesh_1d(), [Replicate()])),
    "plain, of a shard": (Shard(0), WHOLE.clone),
    "a shard, of a plain parameter": (None, lambda: distribute_tensor(WHOLE, mesh_1d(), [Shard(0)])),
}
"""Where a parameter lies (None: it is plain), and its gradient."""


@on_ranks(2)
@pytest.mark.parametrize("kind", PLACED)
@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_gradients_placed_otherwise(rank, world, norm_type, kind):
    """The norm of a partial sum is that of the sum, and a whole gradient counts once, also a plain one of a shard,
    which counted once a rank; each is scaled as it is. A usual one beside it counts, too."""
    params = []
    for placement, grad in (PLACED[kind], (Shard(0), lambda: distribute_tensor(WHOLE, mesh_1d(), [Shard(0)]))):
        value = torch.ones(6, 2)
        params.append(nn.Parameter(value if placement is None else distribute_tensor(value, mesh_1d(), [placement])))
        params[-1].grad = grad()
    placed = getattr(params[0].grad, "placements", None)
    assert_clipped(params, whole(params), norm_type, 0.5)
    assert getattr(params[0].grad, "placements", None) == placed


@on_ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_pipeline_stages(rank, world, norm_type):
    """The norm of all stages, on all of them, also on one whose parameters have no gradients or that has none."""
    mesh = mesh_of(2, 2, names=("pp", "dp"))
    stage = rank // 2
    torch.manual_seed(7)
    models = [nn.Linear(WIDTH, 5), nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, 2))]
    alone = [nn.Linear(WIDTH, 5), nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, 2))]
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    for mine, other in zip(models, alone, strict=True):
        other.load_state_dict(mine.state_dict())
        other(x).square().mean().backward()
    model = models[stage]
    fsdp2.fully_shard(model, mesh=mesh["dp"])
    model(x).square().mean().backward()
    reference = [p for other in alone for p in other.parameters()]
    expected = torch.nn.utils.clip_grad_norm_(reference, 0.01, norm_type)
    total = fsdp2.clip_grad_norm_(model.parameters(), 0.01, norm_type, pp_mesh=mesh["pp"])
    torch.testing.assert_close(total, expected)
    assert_same_everywhere(total)
    for param, one in zip(model.parameters(), alone[stage].parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), one.grad)
    if stage == 0:
        model.zero_grad()
    first = fsdp2.clip_grad_norm_(model.parameters(), INF, norm_type, pp_mesh=mesh["pp"])
    second = fsdp2.clip_grad_norm_([] if stage == 0 else model.parameters(), INF, norm_type, pp_mesh=mesh["pp"])
    assert torch.equal(first, second) and first > 0
    with pytest.raises(ValueError, match="pp_mesh must have one dimension"):
        fsdp2.clip_grad_norm_(model.parameters(), 1.0, pp_mesh=mesh)


@on_ranks(4)
def test_ranks_with_parameters_in_another_order(rank, world):
    """Groups are reduced over in one order, so ranks do not wait for each other in a circle."""
    lines = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    params = []
    for name in ("a", "b"):
        param = nn.Parameter(distribute_tensor(torch.zeros(4), lines[name], [Shard(0)]))
        param.grad = distribute_tensor(torch.ones(4), lines[name], [Shard(0)])
        params.append(param)
    total = fsdp2.clip_grad_norm_(params if rank % 2 else reversed(params), 1.0)
    assert total.item() == pytest.approx(8**0.5)
    assert_same_everywhere(total)


@on_ranks(2)
def test_parameters_that_are_shown_unsharded(rank, world):
    """Their gradients are elsewhere, so a norm of what is shown would be silently wrong."""
    module = build()
    module.set_reshard_after_backward(False)
    module(batch(0)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"parameter 0, of shape .*, is shown unsharded.*reshard\(\)"):
        fsdp2.clip_grad_norm_(module.parameters(), 1.0)
    for one in (module.one, module):
        one.reshard()
    params = list(module.parameters())
    assert_clipped(params, whole(params), 2.0, 0.01)


@composes("clipping", "several meshes")
@on_ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
@pytest.mark.parametrize("dense", ["one dimension", "hybrid", "with plain parameters"])
def test_experts_that_only_some_ranks_have(rank, world, norm_type, dense):
    """Two ranks shard one expert, two others another one of another size, and all of them the rest.

    Each expert counts once. Half of each counted: the mean over all ranks of what each of them has.
    """
    torch.manual_seed(5)
    head, experts = nn.Linear(WIDTH, 3), [nn.Linear(3, 7, bias=False), nn.Linear(3, 5, bias=False)]
    plain = nn.Parameter(torch.ones(3))
    alone = copy.deepcopy([head, *experts, plain])
    mine = experts[rank // 2]
    fsdp2.fully_shard(mine, mesh=mesh_of(2, 2, names=("experts", "shard"))["shard"])
    fsdp2.fully_shard(head, mesh=mesh_2d() if dense == "hybrid" else mesh_1d())
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    mine(head(x) * plain).square().mean().backward()
    params = [*head.parameters(), *mine.parameters()]
    reference = [*alone[0].parameters()]
    for param, other in zip(params, reference, strict=False):
        other.grad = full(param.grad)
    if dense == "with plain parameters":
        dist.all_reduce(plain.grad)
        params.append(plain)
        reference.append(alone[3])
        alone[3].grad = plain.grad.clone()
    for index, expert in enumerate(alone[1:3]):
        grad = full(mine.weight.grad) if rank // 2 == index else torch.zeros_like(expert.weight)
        dist.all_reduce(grad)
        expert.weight.grad = grad / 2
        reference.append(expert.weight)
    expected = torch.nn.utils.clip_grad_norm_(reference, 0.01, norm_type)
    total = fsdp2.clip_grad_norm_(params, 0.01, norm_type)
    torch.testing.assert_close(total, expected, rtol=2e-6, atol=0)
    assert_same_everywhere(total)
    torch.testing.assert_close(full(mine.weight.grad), alone[1 + rank // 2].weight.grad, rtol=2e-6, atol=1e-9)
    torch.testing.assert_close(full(head.weight.grad), alone[0].weight.grad, rtol=2e-6, atol=1e-9)


@composes("clipping", "several meshes")
@on_ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, INF])
@pytest.mark.parametrize("dense", ["one dimension", "hybrid"])
def test_experts_that_some_ranks_do_not_have_at_all(rank, world, norm_type, dense):
    """Two ranks share an expert, and the others have none. Beside hybrid sharding those with an expert summed over the
    replicas too, which the others, who saw one mesh alone, did not: they waited for ever."""
    torch.manual_seed(5)
    head, expert = nn.Linear(WIDTH, 3), nn.Linear(3, 3)
    mesh = mesh_of(2, 2, names=("experts", "shard"))["shard"]
    fsdp2.fully_shard(head, mesh=mesh_2d() if dense == "hybrid" else mesh_1d())
    output = head(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)))
    if rank < 2:
        fsdp2.fully_shard(expert, mesh=mesh)
        output = expert(output)
    output.square().mean().backward()
    params = [*head.parameters(), *(expert.parameters() if rank < 2 else [])]
    reference = whole(head.parameters())
    for param in expert.parameters():
        grad = full(param.grad) if rank < 2 else torch.zeros(param.shape)
        dist.all_reduce(grad)
        reference.append(nn.Parameter(torch.zeros(param.shape)))
        reference[-1].grad = grad / 2
    expected = torch.nn.utils.clip_grad_norm_(reference, 0.01, norm_type)
    total = fsdp2.clip_grad_norm_(params, 0.01, norm_type)
    torch.testing.assert_close(total, expected, rtol=2e-6, atol=0)
    assert_same_everywhere(total)


@composes("clipping", "tensor parallel", "several meshes")
@on_ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, INF])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_layer_that_tensor_parallelism_leaves_alone(rank, world, norm_type, everywhere):
    """It is on the data-parallel mesh alone, and the ranks of the other dimension have copies: it counts once.

    So it is where another layer is sharded over all ranks.
    """
    mesh = mesh_2d("dp", "tp")
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fsdp2.fully_shard(model[3], mesh=mesh_1d() if everywhere else mesh["dp"])
    fsdp2.fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank // 2))
    model(x).square().mean().backward()
    params = list(model.parameters())
    assert_clipped(params, whole(params), norm_type, 0.01)


@on_ranks(1)
def test_what_is_no_tensor_is_named(rank, world):
    """While somebody held a parameter from before sharding, the error was that a float cannot be referenced weakly."""
    module = nn.Linear(4, 4)
    original = module.weight
    fsdp2.fully_shard(module)
    with pytest.raises(TypeError, match="parameters must be tensors, got float at index 1"):
        fsdp2.clip_grad_norm_([original, 1.0], max_norm=1.0)


def test_a_norm_from_a_file():
    """YAML reads 1e-3 as a text, which torch's clipping takes: "unsupported operand type(s)"."""
    param = nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    read: Any = "1e-3"
    assert fsdp2.clip_grad_norm_(param, read) == 2.0
    assert param.grad.norm().item() == pytest.approx(1e-3, rel=1e-4)


@on_ranks(1, 2)
@pytest.mark.parametrize("foreach", [False, None])
@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_a_sparse_gradient_beside_shards(rank, world, norm_type, foreach):
    """An ignored embedding may have sparse gradients, with a row for each use of a token. That raised "Cannot access
    storage of SparseTensorImpl"; torch's clipping computes no norms of them."""
    grads = []
    for sparse in (True, False):
        torch.manual_seed(7)
        module = nn.Sequential(nn.Embedding(6, WIDTH, sparse=sparse), nn.Linear(WIDTH, 3))
        fsdp2.fully_shard(module, mesh=mesh_1d(), ignored_params={module[0].weight})
        module(torch.tensor([1, 4, 1])).square().sum().backward()
        params = list(module.parameters())
        norm = fsdp2.clip_grad_norm_(params, 0.1, norm_type, foreach=foreach)
        grads.append([norm, *(full(param.grad) for param in params)])
    sparse, dense = grads
    assert sparse[0] > 0.1 and sparse[1].is_sparse
    for one, other in zip([sparse[0], sparse[1].to_dense(), *sparse[2:]], dense, strict=True):
        torch.testing.assert_close(one, other)
