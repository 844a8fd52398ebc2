"""The policy that users pass as ``compression``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

__all__ = ["CompressionPolicy"]


@dataclass(frozen=True)
class CompressionPolicy:
    """Compresses collectives of a unit to elements of eight or four bits, in blocks with one scale each.

    Shards, optimizers and checkpoints keep the original values. Compression makes steps faster if they wait for the
    network.

    Attributes:
        gather: The format of parameters, rounded to nearest: int8 or float8_e4m3fn. Forward and backward of an
            iteration compute with the same values. None sends them uncompressed.
        reduce: The format of gradients on the shard dimension: int8, float8_e5m2 or "int4". The receiving rank decodes
            and sums them in float32. None sends them uncompressed.
        replicate: The format of gradients on the replicate dimension of hybrid sharding, like ``reduce``.
        block: The number of elements that share a scale, a multiple of 16.
        stochastic: Round gradients stochastically, so that sums are unbiased; False rounds to nearest.
        min_numel: Parameters with fewer elements (norms, biases) are sent uncompressed.
        skip: A function of a parameter's name in the unit and the parameter; if it returns True, the parameter is sent
            uncompressed.

    Raises:
        ValueError: A format, ``block`` or ``min_numel`` is not supported.
        TypeError: ``stochastic`` or ``skip`` has the wrong type.

    Example:
        ```python
        fsdp2.fully_shard(model, compression=fsdp2.CompressionPolicy(gather=torch.int8, reduce=torch.int8))
        ```
    """

    gather: torch.dtype | None = None
    reduce: torch.dtype | Literal["int4"] | None = None
    replicate: torch.dtype | Literal["int4"] | None = None
    block: int = 256
    stochastic: bool = True
    min_numel: int = 1 << 14
    skip: Callable[[str, nn.Parameter], bool] | None = None

    def __post_init__(self) -> None:
        gradients = (None, torch.int8, torch.float8_e5m2, "int4")
        parameters = (None, torch.int8, torch.float8_e4m3fn)
        for name, known in (("gather", parameters), ("reduce", gradients), ("replicate", gradients)):
            value: Any = getattr(self, name)
            if value not in known:
                raise ValueError(f"compression.{name}: expected one of {known}, got {value!r}")
        for name, least, multiple in (("block", 16, 16), ("min_numel", 0, 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least or value % multiple:
                raise ValueError(
                    f"compression.{name}: expected a multiple of {multiple}, at least {least}, got {value!r}"
                )
        if not isinstance(self.stochastic, bool):
            raise TypeError(f"compression.stochastic must be a bool, got {self.stochastic!r}")
        if self.skip is not None and not callable(self.skip):
            raise TypeError(f"compression.skip: expected a function of a name and a parameter, got {self.skip!r}")
