"""``policy="auto"``: the repeated blocks of a model.

A block is a member of an ``nn.ModuleList`` or ``nn.Sequential`` in which its class occurs more than once, with
parameters. The outermost ones are taken: what repeats inside a block (an MLP's layers, experts) belongs to it. Only a
plain Sequential is looked into when it holds blocks itself, because it always calls all of them in turn. Blocks are
modules with parts of their own; single layers count where nothing larger repeats.

Everything else stays with the root: embedding, final norm and head. Their weights are the ones that a model reads
without calling the module (a tied head, a loss computed in pieces from ``head.weight``), which needs a unit whose
forward runs around all of them; and backward needs the head first, so the root keeps it from forward to backward. Lists
of experts outside a block stay, too: ranks may call different ones, and a gather waits for every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import nn

from fsdp2.build.walk import children_to_plan, has_forward, has_parameters
from fsdp2.engine.unit import get_state

__all__ = ["repeated_blocks"]


def repeated_blocks(root: nn.Module, ignored: Collection[nn.Module] = ()) -> list[nn.Module]:
    """The blocks below ``root`` in the order of ``named_modules``, those sharded already included."""
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
    """The classes that occur more than once among the members of a list or sequence."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return set()
    kinds = Counter(type(child) for child in module.children() if has_parameters(child))
    return {kind for kind, count in kinds.items() if count > 1}


def _is_sequence_of_blocks(child: nn.Module) -> bool:
    """Whether ``child`` is a list, which nobody calls, or calls blocks in turn and does nothing else."""
    if not has_forward(child):
        return True
    if not isinstance(child, nn.Sequential) or type(child).forward is not nn.Sequential.forward:
        return False
    kinds = _repeated(child)
    return any(type(member) in kinds and _has_parts(member) for member in child)


def _has_parts(module: nn.Module) -> bool:
    return any(map(has_parameters, module.children()))
