"""Whether the ranks of a job called NCCL alike: read from the files of their communicators when the job has ended.

Each rank must make the same collectives in the same order on each communicator, and each send must meet a receive of
the same size. Also the order between communicators is compared: where ranks launch the collectives of two communicators
in opposite orders, each may wait for the other for ever, whatever NCCL's own streams allow today.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["differences"]

OPS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all", "gather", "split")
OPS += ("send", "receive")
TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")
TYPES += ("float8_e4m3", "float8_e5m2")
RANKS, CALLS, DATA = 16, 16384, 64 << 20  # as in device/nccl.c
ENTRY = struct.Struct("8q")
RANK_BYTES, CHANNEL_BYTES = 24 + DATA, 8 + CALLS * ENTRY.size
CHANNELS = 16 + RANKS * RANK_BYTES


class Call(NamedTuple):
    """One call of NCCL, as a rank made it."""

    op: int
    type: int
    n: int
    how: int
    launch: int

    def __str__(self) -> str:
        return f"{OPS[self.op]} of {self.n:,} x {TYPES[self.type]}"

    @property
    def compared(self) -> tuple[int, ...]:
        """What must be the same on all ranks."""
        return self[:3] if OPS[self.op] == "split" else self[:4]


class Communicator:
    """What the ranks of one communicator called."""

    def __init__(self, path: Path) -> None:
        self.name = path.name[:18]
        with path.open("rb") as self._file:
            (self.ranks,) = struct.unpack("q", self._read(0, 8))
            self.collectives = [self._channel(rank) for rank in range(self.ranks)]
            pairs = [(a, b) for a in range(self.ranks) for b in range(self.ranks) if a != b]
            first = RANKS
            self.sent = {pair: self._channel(first + pair[0] * RANKS + pair[1]) for pair in pairs}
            first += RANKS * RANKS
            self.received = {pair: self._channel(first + pair[0] * RANKS + pair[1]) for pair in pairs}
            self.processes = [struct.unpack("q", self._read(16 + r * RANK_BYTES, 8))[0] for r in range(self.ranks)]

    def _read(self, at: int, size: int) -> bytes:
        self._file.seek(at)
        return self._file.read(size)

    def _channel(self, index: int) -> list[Call]:
        at = CHANNELS + index * CHANNEL_BYTES
        (calls,) = struct.unpack("q", self._read(at, 8))
        return [Call(*entry[:5]) for entry in ENTRY.iter_unpack(self._read(at + 8, calls * ENTRY.size))]

    def differences(self) -> Iterator[str]:
        """Yield the first difference of each rank from rank 0, and of each pair that sends."""
        for rank, calls in enumerate(self.collectives[1:], 1):
            for index, (first, own) in enumerate(zip(self.collectives[0], calls)):
                if first.compared != own.compared:
                    yield f"{self.name}, call {index}: rank 0 calls {first}, rank {rank} calls {own}"
                    break
            else:
                counts = len(self.collectives[0]), len(calls)
                if counts[0] != counts[1]:
                    more, fewer = (0, rank) if counts[0] > counts[1] else (rank, 0)
                    call = self.collectives[more][min(counts)]
                    yield f"{self.name}, call {min(counts)}: rank {more} waits in {call}, rank {fewer} never calls it"
        for (a, b), sends in self.sent.items():
            receives = self.received[a, b]
            for index in range(max(len(sends), len(receives))):
                send, receive = (some[index] if index < len(some) else None for some in (sends, receives))
                if send is None or receive is None or send[1:3] != receive[1:3]:
                    text = f"rank {a} calls {send or 'nothing'}, rank {b} calls {receive or 'nothing'}"
                    yield f"{self.name}, number {index} from rank {a} to rank {b}: {text}"
                    break


def differences(folder: Path) -> list[str]:
    """Return where ranks called NCCL differently; nothing if they did not."""
    communicators = [Communicator(path) for path in sorted(folder.glob("communicator-*"))]
    found = [text for communicator in communicators for text in communicator.differences()]
    return found or _opposite_orders(communicators)


def _opposite_orders(communicators: list[Communicator]) -> list[str]:
    """Return two collectives of different communicators that two processes launch in opposite orders."""
    order: dict[int, list[tuple[int, tuple[int, int]]]] = {}  # of each process: (launch, (communicator, index))
    for number, communicator in enumerate(communicators):
        for process, calls in zip(communicator.processes, communicator.collectives):
            order.setdefault(process, []).extend((call.launch, (number, i)) for i, call in enumerate(calls))
    sequences = [[what for _, what in sorted(launches)] for launches in order.values()]
    for (a, one), (b, other) in itertools.combinations(zip(order, sequences), 2):
        common = set(one) & set(other)
        pair = ([what for what in sequence if what in common] for sequence in (one, other))
        for first, second in zip(*pair):
            if first != second:
                texts = [f"{communicators[number].name}, call {index}" for number, index in (first, second)]
                return [f"process {a} launches {texts[0]} where process {b} launches {texts[1]}"]
    return []
