"""torch.compile of blocks before or after fully_shard: the losses of what is not compiled, and no recompilation."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from tests.grouping.models import Net
from tests.step.test_tensor_parallel import language, llama, sharded
from tests.support import api
from tests.support.composition import composes, refuses
from tests.support.parity import WIDTH, Run, accumulate, assert_same, mesh_1d, mesh_2d, mesh_of, on_one_axis, play
from tests.support.pool import on_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def model(recompute: bool | None = None) -> Net:
    """Return a model of two blocks of even width, which may be recomputed in backward."""
    return Net(count=2, hidden=6, recompute=recompute)


def in_place_before(module: Any, shard: Callable[..., Any], **options: Any) -> None:
    """``block.compile()``, then shard it."""
    for block in module.blocks:
        block.compile(fullgraph=True, **options)
        shard(block)


def in_place_after(module: Any, shard: Callable[..., Any], **options: Any) -> None:
    """Shard the block, then ``block.compile()``."""
    for block in module.blocks:
        shard(block).compile(fullgraph=True, **options)


def wrapped_before(module: Any, shard: Callable[..., Any], **options: Any) -> None:
    """Shard what ``torch.compile(block)`` returns."""
    for index, block in enumerate(module.blocks):
        module.blocks[index] = shard(torch.compile(block, fullgraph=True, **options))


def wrapped_after(module: Any, shard: Callable[..., Any], **options: Any) -> None:
    """``torch.compile`` what is sharded."""
    for index, block in enumerate(module.blocks):
        module.blocks[index] = torch.compile(shard(block), fullgraph=True, **options)


def forward_only(module: Any, shard: Callable[..., Any], **options: Any) -> None:
    """Compile the method alone."""
    for block in module.blocks:
        shard(block)
        block.forward = torch.compile(block.forward, fullgraph=True, **options)


def whole(module: Any, shard: Callable[..., Any], **options: Any) -> None:
    """Shard the blocks, compile the model; its graph breaks at every block."""
    for block in module.blocks:
        shard(block)
    module.compile(**options)


FOUR = pytest.param(4, marks=pytest.mark.slow)
"""Each rank compiles: a usual run has two of them, one to replicate or to compute a half of each matrix."""
WAYS = (in_place_before, in_place_after, wrapped_before, wrapped_after, forward_only, whole)


def compiled(way: Callable[..., None], backend: str, **options: Any) -> Callable[[Any, Any], None]:
    """Return the function that shards and compiles."""

    def prepare(module: Any, fsdp: Any) -> None:
        torch._dynamo.reset()
        shard = partial(fsdp.fully_shard, **{"mesh": mesh_1d(), **options})
        way(module, shard, backend=backend, dynamic=False)
        shard(module)

    return prepare


def train(run: Run) -> None:
    """Train; from the third step on nothing is compiled any more."""
    for step in range(2):
        run.backward(step)
        run.update()
    before = compilations()
    with torch._dynamo.config.patch(error_on_recompile=run.fsdp is api.ours):
        for step in range(2, 4):
            run.backward(step)
            run.update()
    if run.fsdp is api.ours:
        assert compilations() == before > 0


def compilations() -> int:
    """How many graphs were compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def assert_same_training(
    prepare: Callable[[Any, Any], None], *, build: Callable[[], nn.Module] = model, against: str = "both", **how: Any
) -> None:
    """Assert that training shows what torch's shows compiled, and what a single process shows that is not compiled."""
    program, part, tolerance = how.get("program", train), how.get("part"), how.get("tolerance", 2e-5)
    ours = play(api.ours, prepare, build, program, part)
    if against != "alone":
        assert_same(ours.seen, play(api.theirs, prepare, build, program, part).seen, "torch's", tolerance)
    if against != "torch":
        names = {name.replace("_orig_mod.", ""): value for name, value in ours.seen.items()}
        assert_same(names, play(None, prepare, build, program).seen, "a single process's", tolerance)


@composes("compile", "SGD")
@on_ranks(2, limit=180)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_way(rank, world, way, reshard):
    """Compiled before or after sharding, in place or wrapped, each block as one graph."""
    # torch's own is compiled too in one way; to compile is what takes so long.
    against = "both" if way is in_place_before else "alone"
    assert_same_training(compiled(way, "aot_eager", reshard_after_forward=reshard), against=against)


@composes("compile", "SGD")
@pytest.mark.slow
@on_ranks(2, limit=240)
@pytest.mark.parametrize("way", [in_place_before, wrapped_before])
def test_inductor(rank, world, way):
    """The default backend generates code for the CPU."""
    assert_same_training(compiled(way, "inductor"), against="alone", tolerance=1e-4)


class TwoInputs(nn.Linear):
    """A block whose backward is watched at several inputs."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * scale


class Mixed(nn.Module):
    """Blocks of one input and of two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(WIDTH, WIDTH), TwoInputs(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x), self.scale(x))


def whole_step(run: Run) -> None:
    """Train by a function that is compiled with its backward."""

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = run.module(x).square().mean()
        loss.backward()
        return loss

    torch._dynamo.reset()
    compiled_step = torch.compile(step, backend="eager")
    for number in range(2):
        run.note_loss(compiled_step(run.inputs(number)))
        run.update()


@on_ranks(2, limit=180)
@composes("compile")
def test_a_backward_inside_a_compiled_function(rank, world):
    """Dynamo traced dozens of frames of ours in such a backward, and one in the first forward of any compiled program,
    and warned of builtins that it does not know, with the advice to report them to PyTorch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same_training(on_one_axis, build=Mixed, program=whole_step, against="alone")
    assert not [str(one.message) for one in caught if "Dynamo" in str(one.message)]
    codes = [code() for code in torch._dynamo.convert_frame.input_codes.seen]
    files = {code.co_filename for code in codes if code is not None}
    assert files and not [file for file in files if Path(file).is_relative_to(Path(api.ours.__file__).parent)]


def clipped(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A norm of gradients after a backward."""
    model(x).square().mean().backward()
    return fsdp2.clip_grad_norm_(model.parameters(), 0.1)


def fused(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss that uses a weight outside forward."""
    hidden = model(x)
    with fsdp2.use_weights(model):
        loss = nn.functional.linear(hidden, model.second.weight).square().mean()
    loss.backward()
    return loss.detach()


def summoned(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """An evaluation with full parameters."""
    with torch.no_grad(), fsdp2.summon_full_params(model):
        model.second.weight.mul_(2)
        return model(x)


def exported(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The sum of all weights."""
    return sum(weight.square().sum() for _, weight in fsdp2.iter_full_params(model)) + 0 * x.sum()


def gathered(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """An evaluation with parameters that are gathered before and freed after it."""
    with torch.no_grad():
        handle = model.unshard(async_op=True)
        y = model(x)
        handle.wait()
        y = nn.functional.linear(y, model.second.weight)
        model.reshard()
        return y


@on_ranks(2, limit=180)
@composes("compile")
@pytest.mark.parametrize("called", [clipped, fused, summoned, exported, gathered])
def test_what_a_compiled_function_calls(rank, world, called):
    """A step or an evaluation that is compiled calls functions of ours. Dynamo traced them into meshes and collectives,
    and raised errors of its own: "'dict' object has no attribute 'node'", in a file of ours."""
    torch.manual_seed(0)
    eager = Mixed()
    compiled = copy.deepcopy(eager)
    for model in (eager, compiled):
        fsdp2.fully_shard(model)
    x = torch.ones(2, WIDTH) * (rank + 1)
    torch._dynamo.reset()
    function = torch.compile(called, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(function(compiled, x), called(eager, x))
    for one, other in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one.grad, other.grad)
    codes = [code() for code in torch._dynamo.convert_frame.input_codes.seen]
    files = {code.co_filename for code in codes if code is not None}
    assert files and not [file for file in files if Path(file).is_relative_to(Path(api.ours.__file__).parent)]


@refuses("compile", by="both", reason="`fullgraph=True` for the whole model: the graph breaks at the hooks of blocks")
@on_ranks(1)
def test_the_whole_model_is_not_one_graph(rank, world):
    """Gathering is not compiled, so a graph ends where a unit begins."""
    module = model()
    for block in module.blocks:
        api.ours.fully_shard(block, mesh=mesh_1d())
    module.compile(backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        module(torch.ones(2, WIDTH))
    torch._dynamo.reset()


@composes("compile", "recomputation")
@composes("compile", "mixed precision")
@composes("compile", "accumulation")
@on_ranks(2, limit=180)
@pytest.mark.parametrize("kind", ["recomputed", "cast", "accumulated"])
def test_with_one_more(rank, world, kind):
    """Compiled blocks that are recomputed, compute in another dtype, or accumulate gradients."""
    options = {"mp_policy": BF16} if kind == "cast" else {}
    assert_same_training(
        compiled(in_place_before, "aot_eager", **options),
        build=lambda: model(False if kind == "recomputed" else None),
        program=accumulate if kind == "accumulated" else train,
        against="torch" if kind == "cast" else "alone",
    )


class Branches(nn.Module):
    """A block with a higher-order operator, whose branches compute with several parameters."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.operator = operator
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.operator == "cond":
            return torch.cond(x.square().sum() > 0, lambda x: self.up(x), lambda x: self.down(x), (x,))
        if self.operator == "scan":
            return scan(lambda carry, row: (self.up(carry).tanh(), self.down(row)), x[0], x)[1] + x
        return self._region(self._region(x))

    @torch.compiler.nested_compile_region
    def _region(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


class WithBranches(nn.Module):
    """Two such blocks."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branches(operator) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


differentiates_scans = pytest.mark.skipif(
    not api.torch_since("2.13"), reason="torch 2.11 cannot differentiate this scan, with its own fully_shard either"
)


def not_compiled(module: Any, shard: Callable[..., Any], **options: Any) -> None:
    """Leave compilation to the operator, which compiles its branches."""
    for block in module.blocks:
        shard(block)


@on_ranks(2, limit=180)
@composes("compile")
@pytest.mark.parametrize(
    ("operator", "way"),
    [
        ("cond", not_compiled),
        ("nested_compile_region", in_place_after),
        pytest.param("cond", in_place_before, marks=pytest.mark.slow),
        pytest.param("scan", whole, marks=[pytest.mark.slow, differentiates_scans]),
    ],
)
def test_higher_order_operators(rank, world, operator, way):
    """Dynamo refuses inputs of them that share a storage, as all full parameters of a unit do."""

    def program(run: Run) -> None:
        for step in range(2):
            run.backward(step)
            run.update()

    build = partial(WithBranches, operator)
    assert_same_training(compiled(way, "aot_eager"), build=build, program=program, against="alone")


@composes("compile", "hybrid sharding")
@composes("compile", "over replicas")
@composes("compile", "tensor parallel")
@on_ranks(2, FOUR, limit=180)
@pytest.mark.parametrize(
    "kind",
    [
        "hybrid",
        pytest.param("tp", marks=pytest.mark.slow),
        pytest.param("over replicas", marks=[pytest.mark.slow, api.fsdp2_only]),
    ],
)
def test_on_two_axes(rank, world, kind):
    """Compiled blocks on hybrid and tensor-parallel meshes."""
    mesh = mesh_2d("dp", "tp")

    def prepare(module, fsdp):
        if kind != "tp":
            over = {"shard_over_replicas": True} if kind == "over replicas" and fsdp is api.ours else {}
            return compiled(in_place_before, "aot_eager", mesh=mesh_2d(), **over)(module, fsdp)
        for block in module.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        compiled(in_place_before, "aot_eager", mesh=mesh["dp"])(module, fsdp)

    assert_same_training(prepare, part=None if kind != "tp" else (mesh.get_local_rank("dp"), 2))


@composes("compile", "tensor parallel", "sequence parallel", "loss parallel")
@refuses("compile", "tensor parallel", "sequence parallel", by="torch", reason="the embedding's gradient is zero")
@on_ranks(2, FOUR, limit=180)
def test_language_model(rank, world):
    """The block of a llama as one graph, its input still on its way when it is called.

    AOT autograd takes such an input for one that needs no gradient; under torch's own the embedding does not learn.
    """
    mesh = mesh_of(world // 2, 2, names=("dp", "tp"))

    def prepare(module, fsdp):
        torch._dynamo.reset()
        for block in module.blocks:
            block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
        sharded(mesh["dp"], mesh["tp"])(module, fsdp)

    part = (mesh.get_local_rank("dp"), world // 2)
    assert_same_training(prepare, build=llama, program=language, part=part, against="alone")
