"""Compare three training steps of a small model with fsdp2, with torch's own fully_shard and in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import fsdp2
from fsdp2.tools.check.models import Small
from fsdp2.tools.check.place import Comparison, Outcome, Place

__all__ = [
    "ALONE",
    "LOW",
    "MIXED",
    "TORCH",
    "FullyShard",
    "Seen",
    "Skip",
    "Trial",
    "compare",
    "gradients",
    "loss_of",
    "sgd",
    "shard",
    "weights",
    "whole",
]

MIXED = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SEED, STEPS, ROWS = 5, 3, 4
EXACT, LOW = 2e-5, 2e-2
"""The largest allowed differences as parts of the largest value: in float32, and after rounding to bfloat16."""
TORCH, ALONE = "torch's own", "one process"
FullyShard = Callable[..., Any]
Prepare = Callable[[Any, FullyShard], object]
Seen = dict[str, Tensor | None]


class Skip(Exception):
    """A case cannot run here; the text says why."""


class Trial:
    """A case on one rank. ``data`` is (the index of this rank's part of each batch, the number of parts)."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.data = (place.rank, place.world)
        self.comparisons: list[Comparison] = []

    # ---- meshes ----

    def mesh(self, *sizes: int, names: tuple[str, ...] = ("shard",)) -> DeviceMesh:
        """Return a mesh over all ranks."""
        return init_device_mesh(self.place.device.type, sizes or (self.place.world,), mesh_dim_names=names)

    @property
    def exact(self) -> bool:
        """True if results must have the bits of torch's own: sums of more than two numbers depend on their order."""
        return self.place.world <= 2

    # ---- running ----

    def rows(self, step: int, width: int) -> Tensor:
        """Return the whole batch of a step."""
        generator = torch.Generator().manual_seed(100 + step)
        return torch.randn(ROWS * self.data[1], width, generator=generator).to(self.place.device)

    def build(self, make: Callable[[], nn.Module]) -> Any:
        """Return the model, with the same values on every rank."""
        torch.manual_seed(SEED)
        return make().to(self.place.device)

    def sharded(self, make: Callable[[], nn.Module], prepare: Prepare, fully_shard: FullyShard | None = None) -> Any:
        """Return the model, sharded by ``prepare`` with ``fully_shard`` (default: fsdp2's)."""
        model = self.build(make)
        prepare(model, fully_shard or fsdp2.fully_shard)
        return model

    def train(self, model: Any, who: str, steps: Iterable[int] = range(STEPS), optimizer: Any = None) -> Seen:
        """Train a sharded model on this rank's rows; return losses, whole gradients and whole weights."""
        seen: Seen = {}
        optimizer = optimizer or sgd(model)
        part, parts = self.data
        for step in steps:
            self.place.doing(f"{who}: forward of step {step + 1}")
            loss = loss_of(model(self.rows(step, model.width).chunk(parts)[part]))
            self.place.doing(f"{who}: backward of step {step + 1}")
            loss.backward()
            seen[f"loss {step + 1}"] = loss.detach().clone()
            self.place.doing(f"{who}: gathering the gradients of step {step + 1}")
            seen |= gradients(model, step)
            optimizer.step()
            optimizer.zero_grad()
        self.place.doing(f"{who}: gathering the weights")
        return seen | weights(model)

    def train_alone(
        self,
        make: Callable[[], nn.Module],
        dtype: torch.dtype | None = None,
        configure: Callable[[Any, int], object] | None = None,
    ) -> Seen:
        """Train an unsharded model on all rows; return whole gradients and weights.

        It computes in ``dtype``. With ``configure(model, rank)``, the parts of all ranks run one after the other.
        """
        model, seen = self.build(make), Seen()
        optimizer, parts = sgd(model), self.data[1] if configure else 1
        for step in range(STEPS):
            self.place.doing(f"one process: step {step + 1}")
            for part, rows in enumerate(self.rows(step, model.width).chunk(parts)):
                if configure:
                    configure(model, part)
                (loss_of(_forward(model, rows, dtype)) / parts).backward()
            seen |= gradients(model, step)
            optimizer.step()
            optimizer.zero_grad()
        return seen | weights(model)

    def against(
        self,
        prepare: Prepare,
        make: Callable[[], nn.Module] = Small,
        *,
        dtype: torch.dtype | None = None,
        tolerance: float = EXACT,
        exact: bool | None = None,
        torch_too: bool = True,
    ) -> None:
        """Train with fsdp2, with torch's own unless ``torch_too`` is False, and in one process; compare them."""
        ours = self.train(self.sharded(make, prepare), "fsdp2")
        if torch_too and self.place.against_torch:
            theirs = self.train(self.sharded(make, prepare, torch_fsdp.fully_shard), "torch's own")
            self.compare(TORCH, ours, theirs, tolerance, exact=self.exact if exact is None else exact)
        alone = self.train_alone(make, dtype)
        self.compare(ALONE, ours, alone, LOW if dtype else tolerance)

    # ---- comparing ----

    def compare(self, against: str, got: Seen, expected: Seen, tolerance: float, *, exact: bool = False) -> None:
        """Add the comparison of two runs."""
        self.comparisons.append(compare(against, got, expected, tolerance, exact=exact))

    def outcome(self) -> Outcome:
        """Return the verdict."""
        wrong = [one for one in self.comparisons if not one.right]
        text = "; ".join(
            f"{one.what} {'is missing beside' if math.isinf(one.difference) else 'differs from'} {one.against}"
            for one in wrong
        )
        return Outcome("wrong" if wrong else "right", text, self.comparisons)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that is linear in the gradients, so that small errors stay small.

    torch's grouped kernels cannot mix meshes, so parameters are stepped one by one.
    """
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)


def loss_of(output: Any) -> Tensor:
    """Return the usual loss."""
    return (output.full_tensor() if isinstance(output, DTensor) else output).float().square().mean()  # type: ignore[no-any-return]  # a tensor


def shard(model: Any, fully_shard: FullyShard, **options: Any) -> None:
    """Make every block a unit, and the rest the root unit."""
    for unit in (*model.blocks, model):
        fully_shard(unit, **options)


def whole(tensor: Tensor | None) -> Tensor | None:
    """Return a copy of the whole tensor. Every rank must call it. Shards on the host are sent from the device."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    local, mesh = tensor.to_local(), tensor.device_mesh
    if local.device.type != mesh.device_type:
        tensor = DTensor.from_local(
            local.to(mesh.device_type), mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        )
    return tensor.full_tensor().clone()


def gradients(model: nn.Module, step: int) -> Seen:
    """Return the whole gradients."""
    return {f"gradient {step + 1} of {name}": whole(p.grad) for name, p in model.named_parameters()}


def weights(model: nn.Module) -> Seen:
    """Return the whole weights."""
    for unit in fsdp2.fsdp_modules(model):
        unit.reshard()
    return {f"weight {name}": whole(parameter) for name, parameter in model.named_parameters()}


def compare(against: str, got: Seen, expected: Seen, tolerance: float, *, exact: bool = False) -> Comparison:
    """Return the largest difference in proportion to its bound: ``tolerance`` times the tensor's largest value.

    A small sum of large rounded numbers has the rounding error of these. So the bound is at least ``tolerance`` times a
    hundredth of the largest value of any tensor of its kind, or a third of that value if few bits are kept.
    """
    floors: dict[str, float] = {}
    for name, value in expected.items():
        kind = name.split()[0]
        floors[kind] = max(floors.get(kind, 0.0), _largest(value) * (0.01 if tolerance < LOW else 0.3))
    found = Comparison(against, "everything", 0.0, 0.0, exact, True)
    same, most = True, -1.0
    for name, value in expected.items():
        difference = _difference(got.get(name), value)
        same &= _same_bits(got.get(name), value)
        bound = tolerance * max(_largest(value), floors[name.split()[0]])
        share = difference / bound if bound else (0.0 if difference == 0 else math.inf)
        if not share <= most:  # also if it is NaN
            most = math.inf if math.isnan(share) else share
            found = Comparison(against, name, difference, bound, exact, False)
    return replace(found, same_bits=same)


def _largest(value: Tensor | None) -> float:
    return 0.0 if value is None or not value.numel() else value.double().abs().max().item()


def _difference(got: Tensor | None, expected: Tensor | None) -> float:
    if got is None or expected is None:
        return 0.0 if got is expected else math.inf
    if got.shape != expected.shape:
        return math.inf
    return (got.double() - expected.double()).abs().max().item() if got.numel() else 0.0


def _same_bits(got: Tensor | None, expected: Tensor | None) -> bool:
    if got is None or expected is None:
        return got is expected
    return got.dtype == expected.dtype and torch.equal(got, expected)


def _forward(model: nn.Module, rows: Tensor, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return model(rows)
    cast: Mapping[str, Tensor] = {n: p.to(dtype) for n, p in model.named_parameters()}
    return functional_call(model, dict(cast), (rows.to(dtype),))
