"""What a training run showed, and when two runs count as equal.

Every rank keeps and compares its own pieces, which by contract are those of ``torch.chunk``, so comparing needs no
communication.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

Pieces = dict[str, Tensor | None]


@dataclass
class Trace:
    """What one run showed on this rank: losses, pieces of gradients whenever recorded, in the end the pieces of the
    weights and the buffers. ``cut`` says on which dimension a parameter is cut, if it is."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Pieces] = field(default_factory=list)
    weights: Pieces = field(default_factory=dict)
    buffers: Pieces = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)

    def record(self, module: nn.Module) -> None:
        """Append this rank's piece of every gradient."""
        grads = {name: None if p.grad is None else piece(p.grad) for name, p in module.named_parameters()}
        self.gradients.append(grads)

    def finish(self, module: nn.Module, sharded: bool) -> Trace:
        """Add what the module holds in the end, make the losses means over ranks, and return the trace."""
        self.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        for name, parameter in module.named_parameters():
            assert isinstance(parameter, DTensor) == sharded, name
            self.weights[name] = piece(parameter)
            if isinstance(parameter, DTensor) and isinstance(parameter.placements[0], Shard):
                self.cut[name] = parameter.placements[0].dim
        if sharded:
            total = torch.tensor(self.losses, dtype=torch.float64)
            dist.all_reduce(total)
            self.losses = (total / dist.get_world_size()).tolist()
        return self

    def cut_like(self, sharded: Trace, rank: int, world: int) -> Trace:
        """Return this trace of an unsharded run cut as the sharded run is cut."""
        dims = sharded.cut

        def cut(pieces: Pieces) -> Pieces:
            return {n: chunk(t, dims[n], rank, world) if n in dims and t is not None else t for n, t in pieces.items()}

        return Trace(self.losses, [cut(step) for step in self.gradients], cut(self.weights), self.buffers, dims)


def piece(tensor: Tensor) -> Tensor:
    """Return a copy of what this rank has of a tensor."""
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def chunk(tensor: Tensor, dim: int, rank: int, world: int) -> Tensor:
    """Return the piece of a whole tensor that a rank should have."""
    pieces = tensor.chunk(world, dim)
    return pieces[rank] if rank < len(pieces) else tensor.narrow(dim, 0, 0)


def assert_close(actual: Tensor | None, expected: Tensor | None, what: str, allowed: float) -> None:
    """Assert that no element is off by more than ``allowed``; None equals only None."""
    if actual is None or expected is None:
        got = "None" if actual is None else f"a tensor of norm {actual.double().norm():.3g}"
        assert actual is None and expected is None, f"{what}: got {got}, expected the opposite of it"
        return
    assert actual.shape == expected.shape, f"{what}: got shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: got {actual.dtype}, expected {expected.dtype}"
    error = (actual.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
    assert error <= allowed, f"{what}: off by {error:.3g}, allowed {allowed:.3g}\ngot {actual}\nexpected {expected}"


def magnitudes(pieces: Pieces, floor: float) -> dict[str, float]:
    """Return the largest magnitude in each tensor, but at least ``floor`` times the largest of all of them."""
    sizes = {n: 0.0 if t is None or not t.numel() else t.double().abs().max().item() for n, t in pieces.items()}
    largest = max(sizes.values(), default=0.0)
    return {name: max(size, floor * largest) for name, size in sizes.items()}


@dataclass(frozen=True)
class Tolerance:
    """What counts as equal: ``relative`` to the largest magnitude in a whole tensor, which counts as at least
    ``floor`` times the largest of all tensors (a small sum of large rounded numbers is not more exact than they)."""

    relative: float
    floor: float

    @staticmethod
    def of(low_precision: bool) -> Tolerance:
        """Return summation order in fp32, and a few roundings where 8 bits are kept."""
        return Tolerance(0.05, 0.3) if low_precision else Tolerance(2e-5, 0.01)

    def check(self, kind: str, actual: Pieces, expected: Pieces, whole: Pieces) -> None:
        """Assert that the pieces agree, as measured by the whole tensors."""
        assert actual.keys() == expected.keys(), f"{kind}: got {sorted(actual)}, expected {sorted(expected)}"
        sizes = magnitudes(whole, self.floor)
        for name, value in expected.items():
            assert_close(actual[name], value, f"{kind} of {name}", self.relative * sizes[name])


def assert_traces_agree(actual: Trace, expected: Trace, whole: Trace, whose: str, tolerance: Tolerance) -> None:
    """Assert that losses, gradients, weights and buffers agree; ``whole`` tells the magnitudes."""
    assert len(actual.losses) == len(expected.losses)
    for index, (loss, reference) in enumerate(zip(actual.losses, expected.losses, strict=True)):
        allowed = tolerance.relative * max(abs(reference), 1e-3)
        assert abs(loss - reference) <= allowed, f"{whose}: loss {index}: got {loss}, expected {reference}"
    for index, pieces in enumerate(zip(actual.gradients, expected.gradients, whole.gradients, strict=True)):
        tolerance.check(f"{whose}: record {index}: gradient", *pieces)
    tolerance.check(f"{whose}: weight", actual.weights, expected.weights, whole.weights)
    tolerance.check(f"{whose}: buffer", actual.buffers, expected.buffers, whole.buffers)
    assert actual.cut == expected.cut
