"""``policy="auto"``: the repeated blocks of a model.

A block is a member of an ``nn.ModuleList`` or ``nn.Sequential`` that has parameters and whose class occurs there more
than once. Only the outermost blocks are taken: repeated modules inside a block (an MLP's layers, experts) belong to the
block. A plain Sequential that contains blocks is not a block itself, because it always calls all of them in turn.
Blocks have submodules with parameters; single layers count only if nothing larger repeats.

Everything else stays with the root: embedding, final norm and head. A model may read their weights without calling the
module (a tied head, a loss computed in pieces from ``head.weight``), and only the root's forward runs around all such
uses. Backward also needs the head first, and the root keeps it from forward to backward. Lists of experts outside a
block stay with the root too: ranks may call different experts, and a gather waits for every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import nn

from fsdp2.engine.unit import get_state
from fsdp2.grouping.walk import children_to_plan, has_forward, has_parameters

__all__ = ["repeated_blocks"]


def repeated_blocks(root: nn.Module, ignored: Collection[nn.Module] = ()) -> list[nn.Module]:
    """Return the blocks below ``root`` in the order of ``named_modules``, including blocks that are already sharded."""
    found: list[nn.Module] = []
    visited = {root, *ignored}

    def visit(module: nn.Module) -> None:
        kinds = _repeated(module)
        for name, child in children_to_plan(module):
            if child in visited or "expert" in name.lower():
                continue
            visited.add(child)
            if type(child) in kinds and has_parameters(child) and not _is_sequence_of_blocks(child):
                found.append(child)
            elif get_state(child) is None:
                visit(child)

    visit(root)
    return [block for block in found if _has_parts(block)] or found


def _repeated(module: nn.Module) -> set[type[nn.Module]]:
    """Return the classes that occur more than once among the members of a ModuleList or Sequential."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return set()
    kinds = Counter(type(child) for child in module.children() if has_parameters(child))
    return {kind for kind, count in kinds.items() if count > 1}


def _is_sequence_of_blocks(child: nn.Module) -> bool:
    """Return True for a ModuleList, which is never called, and for a plain Sequential of blocks."""
    if not has_forward(child):
        return True
    if not isinstance(child, nn.Sequential) or type(child).forward is not nn.Sequential.forward:
        return False
    kinds = _repeated(child)
    return any(type(member) in kinds and _has_parts(member) for member in child)


def _has_parts(module: nn.Module) -> bool:
    return any(map(has_parameters, module.children()))
