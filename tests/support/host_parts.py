"""Models whose parts compute on the host, beside others on the device: autograd has a thread for each.

On a CPU all of them compute on one device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

WIDTH = 8
LATE_SECONDS = 0.1


class Left:
    """What a layer leaves for the next one, as in a cache."""

    value: Tensor


class Beside(nn.Module):
    """A layer with a second result, which lies on the host: one that it returns, leaves in an object, or keeps."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.how = how

    def forward(self, x: Tensor, left: Left) -> tuple[Tensor, Tensor | None]:
        """Return the first result, and the other one if it is returned."""
        side = torch.tanh(self.side(x).cpu() * 2)
        if self.how == "leaves":
            left.value = side
        if self.how == "keeps":
            self.kept = side
        return self.main(x), side if self.how == "returns" else None


class Reads(nn.Module):
    """A layer that computes with such a result; in backward, the "host" or the "device" may be ``late``."""

    def __init__(self, late: str) -> None:
        super().__init__()
        self.main, self.side, self.late = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), late

    def forward(self, x: Tensor, left: Left) -> Tensor:
        """Add to a result what is made of the other one."""
        host, device = left.value + 1, self.main(x)
        for where, tensor in ("host", host), ("device", device):
            if where == self.late:
                tensor.register_hook(lambda grad: time.sleep(LATE_SECONDS))
        return torch.tanh(device) + self.side(host.to(x.device))


class HostResults(nn.Module):
    """Pairs of these."""

    def __init__(self, how: str, late: str = "") -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.ModuleList([Beside(how), Reads(late)]) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Run the pairs."""
        for beside, reads in self.pairs:
            left = Left()
            x, side = beside(x, left)
            if not hasattr(left, "value"):
                left.value = vars(beside).pop("kept") if side is None else side
            x = reads(x, left)
        return x


class FromHost(nn.Module):
    """A layer that is given a tensor on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Compute with it on the device."""
        return self.inner(x.to(self.inner.weight.device))


class HostInputs(nn.Module):
    """Layers that are given what the host has computed, beside layers of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.pairs = nn.ModuleList(nn.ModuleList([FromHost(), nn.Linear(WIDTH, WIDTH)]) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of their results."""
        x = self.first(x)
        host = torch.tanh(x.cpu())
        return sum((given(host) + layer(torch.tanh(x)) for given, layer in self.pairs), 0 * x)


def made(how: str, late: str = "") -> nn.Module:
    """Return the model with inputs on the host ("given"), or with such results, left as ``how`` says."""
    return HostInputs() if how == "given" else HostResults(how, late)


def units(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of all pairs, and the model."""
    for pair in model.pairs:  # type: ignore[union-attr]  # a ModuleList
        yield from pair
    yield model


HOW = ("given", "returns", "leaves", "keeps")
