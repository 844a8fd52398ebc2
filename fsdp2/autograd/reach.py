"""Test if a backward through a module leads to certain tensors, by a walk over the nodes that the module made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fsdp2._torch.autograd import accumulate_grad_node, node_sequence_number

__all__ = ["Targets", "is_made_since"]


def is_made_since(node: Any, since: int) -> bool:
    """Return True if ``node`` is an autograd node that was made at or after the sequence number ``since``."""
    return node is not None and node_sequence_number(node) >= since


class Targets:
    """Tensors that a module may compute with, by their autograd nodes from before the module ran."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        # Hold the nodes, not the tensors: a tensor that the module changes in place gets another node. Nodes are
        # compared by identity, which is stable only while their Python objects are referenced.
        self._nodes = [accumulate_grad_node(t) if t.grad_fn is None else t.grad_fn for t in tensors]

    def reached_from(self, outputs: Iterable[torch.Tensor], since: int) -> bool:
        """Return True if backward from ``outputs`` reaches one of them through nodes not older than number ``since``.

        Older nodes were made before the module ran, so the walk ends there.
        """
        ends = {id(node) for node in self._nodes}
        waiting: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.requires_grad]
        seen: dict[int, Any] = {}  # hold the nodes: the id of a freed object may be used again
        while waiting:
            node = waiting.pop()
            if node is None or id(node) in seen:
                continue
            if id(node) in ends:
                return True
            seen[id(node)] = node
            if node_sequence_number(node) >= since:
                waiting += [following for following, _ in node.next_functions]
        return False
