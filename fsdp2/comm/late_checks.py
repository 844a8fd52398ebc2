"""Checks that a device makes, and whose results the host reads later, when they have arrived: it waits for nothing."""

from __future__ import annotations

from collections import deque

import torch

from fsdp2._torch.autograd import lasting_tensors
from fsdp2.comm.streams import ComputeLane

__all__ = ["LateChecks"]

_CHECKED = (1, 2)
_EVERY = 17
"""Checks cost a few small kernels for each group. The second and the third forward are checked, since the first one
gathers nothing ahead, and then every so many. That is a prime number: where evaluations, several roots or micro-batches
take turns, it comes to each of them."""
_FAILED = 0x5EED_0F_0DD_1135
"""How the device writes that a check has failed: a number that no memory has by chance.

A device that computes nothing, on which programs are measured, copies to the host what its memory has.
"""


class LateChecks:
    """Checks in forwards whose groups communicate on the same lanes."""

    def __init__(self, compute: ComputeLane) -> None:
        self._compute = compute
        self._forwards = 0  # that are over
        # Of the forward that runs: names and how many results each has, and the results, on the device.
        self._names: list[tuple[str, int]] = []
        self._results: list[torch.Tensor] = []
        # Results that were sent to the host, and when they are there.
        self._sent: deque[tuple[list[tuple[str, int]], torch.Tensor, torch.Event]] = deque()

    @property
    def are_due(self) -> bool:
        """True if the forward that runs is checked. A graph would repeat its checks, and nobody would read them."""
        number = self._forwards
        due = number in _CHECKED or (number > 0 and number % _EVERY == 0)
        return due and not self._compute.captured

    def add(self, names: list[tuple[str, int]], failed: torch.Tensor) -> None:
        """Add checks: names, how many results each has, and on the device the results, whether they have ``failed``."""
        self._names += names
        self._results.append(failed)

    def end_forward(self) -> None:
        """Send the results of the forward that ends to the host."""
        self._forwards += 1
        names, results, self._names, self._results = self._names, self._results, [], []
        if not results or self._compute.captured:  # an exception has left a forward before the capture
            return
        with lasting_tensors():
            failed = torch.cat(results) * _FAILED
            host = torch.zeros(failed.shape, dtype=failed.dtype, device="cpu", pin_memory=failed.device.type != "cpu")
            host.copy_(failed, non_blocking=True)
        sent = self._compute.event()
        assert sent is not None  # a CPU has no late checks
        self._sent.append((names, host, sent))

    def failed(self) -> list[str]:
        """Return the names of those that have failed, as far as results have arrived; each is returned once."""
        if not self._sent or self._compute.captured:  # a capture forbids to ask for an event that is not part of it
            return []
        failed = []
        while self._sent and self._sent[0][2].query():
            names, results, _ = self._sent.popleft()
            lists = results.split([count for _, count in names])
            failed += [name for (name, _), some in zip(names, lists) if _FAILED in some.tolist()]
        return list(dict.fromkeys(failed))
