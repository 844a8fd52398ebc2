"""Training on watched streams: does every kernel, copy and collective wait for what it must?

Each wait of ``comm/streams.py`` is needed by one of the programs here, so that one that is missing is noticed. Waits of
autograd itself, in C++, are not seen, so no program may need one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp2._torch.forecast import operator_schema
from fsdp2._torch.tensors import wrapper_of
from fsdp2.compression.policy import CompressionPolicy
from fsdp2.fully_shard import fully_shard
from fsdp2.optim.offload import offload_optimizer_state
from fsdp2.optim.whole.full_params import use_full_params
from fsdp2.tools.check.models import Small
from fsdp2.tools.check.ordering import Ordering
from fsdp2.tools.check.place import Outcome, Place
from fsdp2.tools.check.trial import MIXED, Trial, loss_of, shard

__all__ = ["hook_raises", "streams", "watched"]

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
INT8 = CompressionPolicy(torch.int8, torch.int8, torch.int8, block=16, min_numel=512)


def streams(place: Place) -> Outcome:
    """no kernel uses memory that another stream still uses"""
    return watched(place, Ordering) if place.cuda else Outcome("skipped", "needs a GPU")


def watched(place: Place, watcher: Callable[[], Any]) -> Outcome:
    """Run the programs in contexts whose ``mistakes`` name what is not ordered."""
    trial = Trial(place)
    for program in PROGRAMS:
        if (program.needs_gpu and not place.cuda) or (program.needs_pairs and place.world % 2):
            continue
        if place.cuda:
            torch.cuda.empty_cache()  # or blocks of earlier programs would be used instead of what is freed
        run = _Run(trial, program)
        with watcher() as watching:
            program.do(run)
            place.wait()
        if watching.mistakes:
            return Outcome("wrong", f"{program.name}: {watching.mistakes[0]}")
    return Outcome("right")


# ---- what the programs do ----


class _Run:
    """A program under way: a model whose blocks are units, and its optimizer."""

    def __init__(self, trial: Trial, program: _Program) -> None:
        self.trial, self.name = trial, program.name
        options, world = dict(program.options), trial.place.world
        copies = options.pop("copies", 1)
        mesh = trial.mesh() if copies == 1 else trial.mesh(copies, world // copies, names=("replicate", "shard"))
        self.options = {"mesh": mesh, **options}
        with trial.place.device:  # large units are made faster there
            self.model = trial.sharded(partial(Small, *program.sizes), partial(shard, **self.options))
        if copies > 1:
            self.model.set_transfer_sizes(direct_param_bytes=0)  # as parameters of a usual size
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.model.parameters(), lr=1e-3, momentum=0.9, foreach=False
        )
        # Here, because a copy from memory that is not page-locked makes the host wait, behind which all is in order.
        part, parts = trial.data
        self.rows = trial.rows(0, self.model.width).chunk(parts)[part]

    def backward(self) -> None:
        """Add to the gradients."""
        loss_of(self.model(self.rows)).backward()

    def update(self) -> None:
        """Step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, times: int = 1) -> None:
        """Train."""
        for step in range(times):
            self.trial.place.doing(f"{self.name}, step {step + 1}")
            self.backward()
            self.update()

    def evaluate(self) -> None:
        """Run without gradients."""
        with torch.no_grad():
            self.model(self.rows)


def _trains(run: _Run) -> None:
    """Steps and evaluations in turn."""
    for _ in range(3):
        run.step()
        run.evaluate()


def _steps_with_state_on_the_host(run: _Run) -> None:
    """The state of the optimizer comes in several buckets."""
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-3, foreach=True)
    offload_optimizer_state(run.optimizer, bucket_mb=1 / 1024)
    _trains(run)


def _steps_on_whole_matrices(run: _Run) -> None:
    """Gradients go to the owners of their matrices in backward; a step exchanges what is left, in several buckets."""
    matrices = [parameter for parameter in run.model.parameters() if parameter.ndim == 2]
    for overlap in (True, False):
        run.optimizer = torch.optim.Muon(matrices, lr=1e-3)
        use_full_params(run.optimizer, cost=lambda parameter: 1.0, bucket_mb=1 / 128, overlap_backward=overlap)
        run.step(3)


def _gathers_by_hand(run: _Run) -> None:
    """Shards are written just before their unit is gathered."""
    run.step()
    block = run.model.blocks[0]
    with torch.no_grad():
        block.up.weight.mul_(0.5)
    block.unshard()
    block.up.weight.sum()
    block.reshard()


def _replaces(run: _Run) -> None:
    """The forward of one unit gives a later one another parameter."""
    first, later = run.model.blocks[0], run.model.blocks[2].up
    forward = first.forward

    def replacing(x: Tensor) -> Tensor:
        later.weight = nn.Parameter(later.weight.detach() * 0.5)
        return forward(x)  # type: ignore[no-any-return]  # a module's attribute

    first.forward = replacing
    for _ in range(2):
        run.backward()


def _reshards(run: _Run) -> None:
    """The last unit is written and resharded between a forward, which has freed it, and its backward."""
    loss = loss_of(run.model(run.rows))
    last = run.model.blocks[-1]
    last.up.weight.data.mul_(0.5)
    last.reshard()
    loss.backward()


def _teaches(run: _Run) -> None:
    """A forward updates units, which it then runs without gradients."""
    teacher = run.model.blocks[1:]
    run.model.skipped = (1, 2)

    forward = run.model.blocks[0].forward

    def teaching(x: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.mul_(0.5)
            for unit in teacher:
                unit(run.rows)
        return forward(x)  # type: ignore[no-any-return]  # a module's attribute

    run.model.blocks[0].forward = teaching
    for _ in range(3):
        run.backward()
        run.model.zero_grad()


def _skips(run: _Run) -> None:
    """Evaluations leave out a unit whose shards are written meanwhile."""
    run.step()
    run.model.skipped = (1, 2)
    for _ in range(3):
        run.evaluate()
        with torch.no_grad():
            run.model.blocks[2].up.weight.mul_(0.5)
    run.model.skipped = ()
    run.step()


def _hooks_the_sums(run: _Run) -> None:
    """A hook changes summed gradients on a stream of its own."""
    run.model.set_all_reduce_hook(lambda gradient: gradient.mul_(1.0), stream=torch.cuda.Stream())
    run.step(2)


def _writes_from_the_device(run: _Run) -> None:
    """New values for shards on the host come from a stream, and the host does not wait for them."""
    run.step(2)
    with torch.no_grad():
        for parameter in run.model.parameters():
            shard = parameter.to_local()
            shard.copy_(torch.ones(shard.shape, device=run.trial.place.device), non_blocking=True)
    run.step()


class _Ones(torch.autograd.Function):
    """A gradient of ones, which does not depend on the one that comes in."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, kept: list[Any]) -> Tensor:
        """Return ``weight``; the memory of its gradient will be in ``kept``."""
        ctx.kept = kept
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return ones."""
        made = torch.ones_like(gradient)
        ctx.kept.append(made.untyped_storage())  # not the tensor, which autograd would copy if somebody else had it
        return made, None


class _Aside(nn.Linear):
    """A layer that makes its weight's gradient on a stream of its own.

    It reads nothing there for which autograd waits in C++, unseen, and what it has made is never written again.
    """

    aside: torch.cuda.Stream
    kept: list[Any]

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        with torch.cuda.stream(self.aside):
            weight = _Ones.apply(self.weight, self.kept)
        return nn.functional.linear(x, weight)


def _computes_aside(run: _Run) -> None:
    """Gradients are made on another stream than compute."""
    layers = [_Aside(64, 64, bias=False, device=run.trial.place.device) for _ in range(2)]
    for layer in layers:
        layer.aside, layer.kept = torch.cuda.Stream(), []
        fully_shard(layer, **run.options)
    model: Any = fully_shard(nn.Sequential(*layers), **run.options)
    for _ in range(3):
        loss_of(model(run.rows)).backward()
        model.zero_grad()


def hook_raises(run: Any) -> None:
    """A hook of a reduction raises: what is on lanes still reads gradients and sums.

    ``run`` is a `_Run`, or what tests have in its place.
    """

    def fail(gradient: Tensor) -> None:
        gradient.mul_(1.0)
        raise KeyError("nothing")

    run.step()
    run.model.blocks[1].set_all_reduce_hook(fail)
    with contextlib.suppress(KeyError):
        run.backward()
    run.model.reset_iter_state()
    run.model.blocks[1].set_all_reduce_hook(lambda gradient: gradient.mul_(1.0))
    run.update()
    run.step(2)


class _Halves(Tensor):
    """A float32 tensor that is sent as two tensors: in bfloat16, and what that leaves of it."""

    _tensor: Tensor

    @staticmethod
    def __new__(cls, tensor: Tensor) -> _Halves:
        return wrapper_of(cls, tensor)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch calls it so
        """Run the operator on what is inside; copies and views are such tensors again."""
        out = func(*_inside(args), **{name: _inside(value) for name, value in (kwargs or {}).items()})
        if operator_schema(func).name.endswith("_"):
            return args[0]
        if operator_schema(func).name not in _KEEPS_CLASS:
            return out
        return [cls(part) for part in out] if isinstance(out, list) else cls(out)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        """Return what is sent."""
        upper = self._tensor.to(torch.bfloat16)
        return (upper, (self._tensor - upper.float()).to(torch.float16)), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the full tensor and the memory that it lies in, or write it again to ``out``."""
        full = gathered[0].float() + gathered[1].float()
        if out is None:
            return full, (full,)
        out.data.copy_(full)  # as any gather, it is no change of the weight for autograd
        return None

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        """Return True: what was gathered goes at once."""
        return True


def _inside(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_inside(one) for one in value]
    return value._tensor if isinstance(value, _Halves) else value


_KEEPS_CLASS = {
    f"aten::{name}"
    for name in ("detach", "clone", "slice", "split", "view", "as_strided", "new_zeros", "empty_like", "_to_copy")
}


def _decodes(run: _Run) -> None:
    """Parameters say themselves what of them is sent."""
    layers = [nn.Linear(64, 64, bias=False, device=run.trial.place.device) for _ in range(4)]
    for layer in layers:
        layer.weight = nn.Parameter(_Halves(layer.weight.detach()))
        fully_shard(layer, **run.options)
    model: Any = fully_shard(nn.Sequential(*layers), **run.options)
    for _ in range(3):
        loss_of(model(run.rows)).backward()
        model.zero_grad()


# ---- the programs ----


@dataclass(frozen=True)
class _Program:
    """What a model does, with which options; ``copies`` is the number of replicas, ``sizes`` are those of ``Small``."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    do: Callable[[_Run], None] = _trains
    sizes: tuple[int, ...] = ()
    needs_gpu: bool = False

    @property
    def needs_pairs(self) -> bool:
        """True if the number of ranks has to be even."""
        return "copies" in self.options or self.options.get("reshard_after_forward") == 2


HYBRID = {"copies": 2, "mp_policy": MIXED}
OVER_REPLICAS = {**HYBRID, "shard_over_replicas": True}
PROGRAMS = [
    _Program("float32"),
    _Program("mixed", {"mp_policy": MIXED}),
    _Program("bfloat16", {"mp_policy": BF16}),
    _Program("in pairs", {"reshard_after_forward": 2, "mp_policy": MIXED}),
    _Program("compressed", {"compression": INT8}),
    # On a CPU, shards and state are on the host in any case.
    _Program("offloaded", {"offload_policy": CPUOffloadPolicy()}, needs_gpu=True),
    _Program("written on the host", {"offload_policy": CPUOffloadPolicy()}, _writes_from_the_device, needs_gpu=True),
    _Program("state on the host", {"mp_policy": MIXED}, _steps_with_state_on_the_host, needs_gpu=True),
    _Program("whole matrices", {"mp_policy": MIXED}, _steps_on_whole_matrices, needs_gpu=True),
    _Program("hybrid", HYBRID),
    _Program("hybrid, bfloat16", {"copies": 2, "mp_policy": BF16}),
    _Program("hybrid, compressed", {**HYBRID, "compression": INT8}),
    _Program("over replicas", OVER_REPLICAS),
    # Units of 64 MiB are reduced and gathered in another order than small ones.
    _Program("large units", {"copies": 2, "mp_policy": BF16}, sizes=(4096, 4096), needs_gpu=True),
    _Program("large units, compressed", {**HYBRID, "compression": INT8}, sizes=(4096, 4096), needs_gpu=True),
    _Program("gathered by hand", do=_gathers_by_hand),
    _Program("replaced parameters", do=_replaces),
    _Program("replaced parameters, over replicas", OVER_REPLICAS, _replaces),
    _Program("resharded by hand", do=_reshards),
    _Program("a teacher", do=_teaches),
    _Program("a unit that an evaluation leaves out", OVER_REPLICAS, _skips),
    _Program("a hook on sums", {"mp_policy": MIXED}, _hooks_the_sums, needs_gpu=True),
    _Program("gradients of another stream", {"mp_policy": MIXED}, _computes_aside, needs_gpu=True),
    _Program("a hook that raises", HYBRID, hook_raises),
    _Program("a tensor class", do=_decodes),
]
