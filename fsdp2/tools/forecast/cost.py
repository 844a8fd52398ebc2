"""Estimate the time of kernels and collectives on a machine with given constants."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

__all__ = ["DEVICES", "H100", "Hardware", "Link", "nbytes_of", "tensors_in"]


def _check(constants: Any) -> None:
    """Check that every constant is a positive number, and a whole one where ranks are counted. A latency may be 0.

    A name is a text, and links are Links.
    """
    for field in fields(constants):
        value = getattr(constants, field.name)
        if field.name == "name":
            if not isinstance(value, str):
                raise ValueError(f"name={value!r}: expected a text")
            continue
        if field.name == "links":
            if not isinstance(value, (list, tuple)) or not all(isinstance(link, Link) for link in value):
                raise ValueError(f"links={value!r}: expected a tuple of Links")
            continue
        whole, least = field.type == "int", "of at least 0" if field.name == "seconds" else "above 0"
        kind = numbers.Integral if whole else numbers.Real
        right = not isinstance(value, bool) and isinstance(value, kind) and 0 <= float(value) < math.inf
        if not right or (value == 0 and field.name != "seconds"):
            raise ValueError(f"{field.name}={value!r}: expected {'a whole' if whole else 'a'} number {least}")


@dataclass(frozen=True)
class Link:
    """The cost of a collective among ``ranks``: the seconds until the first byte arrives, and bytes per second.

    Raises:
        ValueError: A constant is not a positive number; the latency may be 0.
    """

    ranks: int
    seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        """Check the constants."""
        _check(self)


@dataclass(frozen=True)
class Hardware:
    """The constants of a machine.

    The time of a kernel is that of its arithmetic or of its memory traffic, whichever is longer. The time of a
    collective is the latency of its link and the time for the bytes that pass a rank; both are interpolated between
    the sizes of ``links``. Between nodes, a group has ``network_bytes_per_second`` for each of its ranks there; other
    groups have the rest. A ring uses the shares of all its ranks in a node together, and in an all-to-all each rank
    uses its own. Host time, contention for multiprocessors and congestion are not modeled.

    Raises:
        ValueError: A constant is not a positive number, or ``links`` are no Links, or there is none, or more than one
            for a number of ranks.
    """

    name: str = "h100"
    flops_per_second: float = 450e12
    """The rate of matrix products with elements of two bytes; other rates are in proportion to the element size."""
    memory_bytes_per_second: float = 2.4e12
    ranks_per_node: int = 8
    network_bytes_per_second: float = 37.5e9
    """The rate of one rank to other nodes."""
    links: tuple[Link, ...] = (
        Link(8, 35e-6, 360e9),
        Link(64, 0.3e-3, 300e9),
        Link(256, 1.2e-3, 300e9),
        Link(1024, 4e-3, 300e9),
    )
    host_bytes_per_second: float = 50e9
    """The rate between a device and its host, in each direction."""

    def __post_init__(self) -> None:
        """Check the constants, and sort the links."""
        _check(self)
        ranks = sorted(link.ranks for link in self.links)
        if not ranks or len(set(ranks)) < len(ranks):
            raise ValueError(f"links for {ranks} ranks; expected at least one link, and one for each number of ranks")
        object.__setattr__(self, "links", tuple(sorted(self.links, key=lambda link: link.ranks)))

    def __str__(self) -> str:
        """Return every constant on a line of its own."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "links"}
        lines = [
            f"{name} = {value:g}" if isinstance(value, float) else f"{name} = {value}" for name, value in values.items()
        ]
        lines += [
            f"{link.ranks} ranks: {link.seconds * 1e3:g} ms, {link.bytes_per_second:g} B/s" for link in self.links
        ]
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write the constants to a JSON file, which ``load`` and ``--hardware`` read."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Hardware:
        """Read the constants from a file; missing ones are those of an H100.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file is not JSON, or has an unknown constant or one that is not a positive number.
        """
        example = '{"memory_bytes_per_second": 2.4e12, "links": [{"ranks": 8, "seconds": 3.5e-5, ...}]}'
        try:
            values = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error}); expected constants such as {example}") from error
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) - known:
            got = sorted(set(values) - known) if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"{path}: got {got}; expected an object with some of {sorted(known)}")
        try:
            given = values.pop("links", [asdict(link) for link in cls().links])
            links = tuple(Link(one["ranks"], one["seconds"], one["bytes_per_second"]) for one in given)
            return cls(**values, links=links)
        except (KeyError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else error
            raise ValueError(f"{path}: {what}; expected constants such as {example}") from error

    def link(self, ranks: int) -> Link:
        """Return latency and bandwidth of a group of that size, interpolated on a logarithmic scale."""
        below = [link for link in self.links if link.ranks <= ranks]
        above = [link for link in self.links if link.ranks >= ranks]
        if not below or not above:
            nearest = (below or above[:1])[-1]
            return Link(ranks, nearest.seconds * ranks / nearest.ranks, nearest.bytes_per_second)
        low, high = below[-1], above[0]
        part = 0.0 if low is high else math.log(ranks / low.ranks) / math.log(high.ranks / low.ranks)

        def between(first: float, second: float) -> float:
            return first ** (1 - part) * second**part

        return Link(ranks, between(low.seconds, high.seconds), between(low.bytes_per_second, high.bytes_per_second))

    def collective_seconds(self, nbytes: float, ranks: Sequence[int], kind: str = "all_gather") -> float:
        """Return the seconds of a collective of ``ranks`` (global ones) that goes round a ring, as NCCL's do.

        The ring enters and leaves each node once, so the ranks of a node share its network for what goes over one
        edge of the ring. These are the bytes of an edge, of ``nbytes``, the whole tensor, among n ranks:

        * all_gather, reduce_scatter: each edge passes the pieces of all ranks but one, (n - 1) / n of the bytes
        * all_reduce: both, one after the other
        * broadcast, reduce: each edge passes everything
        * gather, scatter: there is no ring; the root exchanges pieces with the others

        The latency is that of n ranks, one after the other. That of all_reduce and barrier may be less: it goes up and
        down a binary tree, with the latency of two ranks at every level.

        The factors are those of "busbw" in the documentation of nccl-tests (PERFORMANCE.md), and which algorithm has
        which number of steps is in NCCL's src/graph/tuning.cc.
        """
        size = len(ranks)
        if size < 2:
            return 0.0
        link = self.link(size)
        latency = link.seconds
        if kind in ("all_reduce", "barrier", "monitored_barrier"):
            latency = min(latency, 2 * math.log2(size) * self.link(2).seconds)
        if kind in ("gather", "scatter"):
            pieces = [nbytes / size] * size
            return self.exchange_seconds(pieces, pieces, ranks, 0)
        edge = {"all_reduce": 2 * (size - 1) / size, "broadcast": 1.0, "reduce": 1.0}.get(kind, (size - 1) / size)
        return latency + nbytes * edge / self._ring_speed(ranks)

    def exchange_seconds(
        self, received: Sequence[float], sent: Sequence[float], ranks: Sequence[int], rank: int
    ) -> float:
        """Return the seconds of an all-to-all of ``ranks`` on the one at index ``rank``.

        ``received`` and ``sent`` are the bytes from and to each of them. What it exchanges with ranks of its node goes
        over the links inside the node. Beside that, the rest goes over this rank's own share of the node's network: of
        even rows among n ranks, g of them in the node, (n - g) / n of the bytes. That is g times what a rank of a ring
        puts on the network. Both directions are used at once, so the larger one counts.

        The latency is that of a ring of as many ranks: there are as many messages as it has steps, and torch sends
        empty ones too. NCCL starts several at a time, so on many ranks this is an upper limit.
        """
        if len(ranks) < 2:
            return 0.0
        node = [other // self.ranks_per_node == ranks[rank] // self.ranks_per_node for other in ranks]
        near, far = 0.0, 0.0
        for rows in (received, sent):
            others = [(row, here) for i, (row, here) in enumerate(zip(rows, node)) if i != rank]
            near = max(near, sum(row for row, here in others if here))
            far = max(far, sum(row for row, here in others if not here))
        nodes = len({other // self.ranks_per_node for other in ranks})
        share = self._ring_speed(ranks) * nodes / len(ranks)
        inside = self.link(max(sum(node), 2)).bytes_per_second
        return self.link(len(ranks)).seconds + max(near / inside, far / share if far else 0.0)

    def message_seconds(self, nbytes: float, ranks: tuple[int, int]) -> float:
        """Return the seconds of a message from one rank to another: over their node's links, or the sender's share of
        its node's network, with the latency of two ranks."""
        return self.link(2).seconds + nbytes / self._ring_speed(ranks)

    def _ring_speed(self, ranks: Sequence[int]) -> float:
        """Return the bytes per second over each edge of a ring of ``ranks``."""
        speed = self.link(len(ranks)).bytes_per_second
        nodes = len({rank // self.ranks_per_node for rank in ranks})
        return speed if nodes == 1 else min(speed, self.network_bytes_per_second * len(ranks) / nodes)

    def kernel_seconds(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        """Return the seconds of one operator."""
        touched = [*tensors_in((args, kwargs)), *tensors_in(out)]
        if not touched:
            return 0.0
        if len({tensor.is_meta for tensor in touched}) > 1:
            return nbytes_of(touched[0]) / self.host_bytes_per_second
        flops = _flops(func)
        seconds = sum(map(nbytes_of, touched)) / self.memory_bytes_per_second
        if flops is None:
            return seconds
        rate = self.flops_per_second * 2 / max(touched[0].itemsize, 1)
        return max(seconds, flops(*args, **kwargs, out_val=out) / rate)


H100 = Hardware()
DEVICES = {"h100": H100, "h200": replace(H100, name="h200", memory_bytes_per_second=3.4e12)}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors in nested lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for one in value for tensor in tensors_in(one)]


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements of ``tensor``; expanded ones count once."""
    numel = math.prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride)
    return numel * tensor.itemsize if tensor.numel() else 0


def _attention(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


def _flops(func: Any) -> Callable[..., int] | None:
    packet = func.overloadpacket
    if packet in flop_registry or "scaled_dot_product" not in str(packet):
        return flop_registry.get(packet)
    # torch's own counter lacks some attention kernels, such as those for CPUs.
    return _attention_backward if "backward" in str(packet) else _attention
