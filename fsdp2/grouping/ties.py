"""Parameters tied across units: an embedding and a head that share a weight, each in a unit of its own.

The first ``fully_shard`` call that finds the weight puts it into its group. A later call that finds it again, in
another module, gives it a group of its own that both units share. The unit that needs it first gathers it, it stays
until the last unit has used it, and its gradient, which autograd accumulates once, is reduced once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp2._naming import class_name
from fsdp2.engine.casts import compute_dtype
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.index import param_of, remember_originals
from fsdp2.engine.param import FSDPParam, Site, show
from fsdp2.engine.unit import FSDPState, get_state
from fsdp2.grouping.collect import Found
from fsdp2.grouping.placing import policy_of_param
from fsdp2.policies import MixedPrecisionPolicy, PolicyOf
from fsdp2.sharding.mesh import DataParallelMesh, listed_ranks

__all__ = [
    "Tie",
    "check_tie",
    "find_ties",
    "follow_sites",
    "follow_tie",
    "give_up",
    "is_gone",
    "join_ties",
    "replaced_by",
]


@dataclass(frozen=True)
class Tie:
    """A found parameter, and the managed parameter of another call that it is tied to."""

    found: Found
    param: FSDPParam


def find_ties(found: list[Found], mesh: DataParallelMesh, policy_of: PolicyOf) -> tuple[list[Found], list[Tie]]:
    """Return the parameters that no other call manages, and the ties to those of other calls; this changes nothing.

    ``mesh`` and ``policy_of`` are arguments of the call that has found them.

    Raises:
        ValueError: Tied parameters have different meshes or compute dtypes.
    """
    own, ties = [], []
    for entry in found:
        param = param_of(entry.param)
        if param is None or get_state(param.group.modules[0]) is None:
            own.append(entry)
        else:
            policy = policy_of_param(entry, policy_of(entry.name))
            check_tie(entry, mesh, policy, param, param.group.mesh, param.policy)
            ties.append(Tie(entry, param))
    return own, ties


def join_ties(ties: list[Tie], unit: FSDPState) -> None:
    """Let ``unit`` share the groups of tied parameters with the units of the other calls."""
    for tie in ties:
        param, group = tie.param, _group_of_its_own(tie.param)
        param.set_sites(param.sites + [site for site in tie.found.sites if site not in param.sites])
        show([param], "shards", over_others=True)
        if group not in unit.groups:
            unit.add_shared(group)


def follow_sites(known: Mapping[Any, FSDPParam], found: Iterable[Found]) -> list[FSDPParam]:
    """Let the parameters of a unit have the sites that show them now; return those that have others than before.

    ``known`` are the tensors of its parameters, and ``found`` is what its modules show. A parametrization that is
    registered or removed moves a parameter to another module, and modules may be tied or untied.
    """
    places: dict[FSDPParam, dict[Site, None]] = {param: {} for param in known.values()}
    for entry in found:
        if entry.param in known:
            places[known[entry.param]].update(dict.fromkeys(entry.sites))
    moved = []
    for param, here in places.items():
        # Below other units, or taken out of this one; what is left behind may still show the parameter too.
        elsewhere = param.group.shared or not here
        kept = [s for s in param.sites if s in here or _is_lent(s) or (elsewhere and _shows(param, s))]
        new = [site for site in here if site not in kept]
        lost = [site for site in param.sites if site not in kept]
        if not (new or lost) or any(map(_is_taken, lost)):
            continue
        if not kept and not new:
            kept = _of_first(param)
        elif not (new or any(_shows(param, site) for site in kept)):
            continue
        if kept + new != param.sites:
            param.set_sites(kept + new)
            moved.append(param)
    return moved


def _of_first(param: FSDPParam) -> list[Site]:
    """Return the sites that show what the first one shows, if ``param`` was replaced everywhere.

    Where several have replaced a tied one, the tie has ended: the value of the first goes into the shard, as that of
    one that replaces an untied parameter does, and the others are new.
    """
    first = param.sites[0].shown
    return [s for s in param.sites if s.shown is first] if isinstance(first, nn.Parameter) else param.sites


def _shows(param: FSDPParam, site: Site) -> bool:
    shown = site.shown
    return shown is not None and (param.has(shown) or shown is param.own)


def _is_lent(site: Site) -> bool:
    """Return whether ``site`` shows what is no parameter, which somebody has put there for a call."""
    return site.shown is not None and not isinstance(site.shown, nn.Parameter)


def _is_taken(site: Site) -> bool:
    """Return whether pruning or the like has put there what it has computed of the shard, which nobody can gather."""
    return site.name in vars(site.module)


def replaced_by(found: Found, shown_by: Mapping[Site, FSDPParam], below: Container[nn.Module]) -> set[FSDPParam]:
    """Return the managed parameters that ``found`` has replaced on all modules that are still ``below`` the unit.

    ``found`` is managed, or shown by another module, too, as an embedding that was put in the place of a smaller one,
    with the head that is tied to it. Return none if one of ``below`` still shows one of them, or several units share
    it: the next gather raises an error that names it.
    """
    tensor, shown = found.param, [shown_by.get(site) for site in found.sites]
    others = {one for one in shown if one is not None and not one.has(tensor)}
    if not others:  # as for almost all of thousands
        return set()
    param = param_of(tensor)
    others.discard(param)  # type: ignore[arg-type]  # None is in no set of parameters
    if param is None and None not in shown:  # _take_over decides whether the value fits
        return set()
    remaining = {site for other in others for site in other.sites if site.module in below}
    return others if remaining <= {*found.sites} and not any(other.group.shared for other in others) else set()


def follow_tie(found: Found, others: set[FSDPParam]) -> None:
    """Stop managing ``others``, which ``found`` has replaced."""
    touched = [p for one in (param_of(found.param), *others) if one for p in one.group.params if p.full is not None]
    # An optimizer may hold full parameters, if it was built after unshard().
    remember_originals([p.full for p in touched], touched)
    give_up(others)


def give_up(params: Iterable[FSDPParam]) -> None:
    """Stop managing ``params``."""
    for param in params:
        param.group.reshard()
        param.group.drop(param)  # hooks refer to the group, so it stays, even without parameters
        param.release()  # a module that still shows it may come back, and it is taken in as any other parameter


def is_gone(param: FSDPParam, below: Container[nn.Module]) -> bool:
    """Return whether all modules of ``param`` were taken out of its unit, and show it no more.

    ``below`` are the modules that are still there. A layer that was replaced may be parametrized, or give its memory
    back.
    """
    return not param.group.shared and not any(site.module in below or _shows(param, site) for site in param.sites)


def check_tie(
    entry: Found,
    mesh: DataParallelMesh,
    policy: MixedPrecisionPolicy,
    first: Found | FSDPParam,
    first_mesh: DataParallelMesh,
    first_policy: MixedPrecisionPolicy,
) -> None:
    """Raise ValueError unless ``entry`` can be tied to ``first``, which another call manages or is going to.

    ``mesh`` and ``policy`` are those of the call that has found ``entry``.
    """
    dtype = (first.param if isinstance(first, Found) else first).dtype
    if first_mesh.mesh != mesh.mesh and _ranks(first_mesh) != _ranks(mesh):
        got, expected = f"the mesh {mesh.mesh}", f"{first_mesh.mesh}"
    elif compute_dtype(dtype, policy) != compute_dtype(dtype, first_policy):
        got, expected = f"mp_policy.param_dtype={policy.param_dtype}", f"{first_policy.param_dtype}"
    else:
        return
    raise ValueError(
        f"{_described(entry)} is shared with {_described(first)}, which is already managed by another FSDP group: got "
        f"{got}, expected {expected} as in that group. Use the same for both, or fully_shard([module_a, module_b]) to "
        "place them in one unit"
    )


def _described(param: Found | FSDPParam) -> str:
    """Return the name with the class of the module, since names are those in a unit before the first forward."""
    return f"{param.name} of {class_name(param.sites[0].module)}"


def _ranks(mesh: DataParallelMesh) -> list[int]:
    """Return the ranks that gradients are averaged over, sorted."""
    return sorted(listed_ranks(mesh.mesh))


@torch.no_grad()
def _group_of_its_own(param: FSDPParam) -> FSDPParamGroup:
    """Return a shared group that contains only ``param``, split off its first group if necessary."""
    group: FSDPParamGroup = param.group
    if group.shared:
        return group
    group.reshard()
    if len(group.params) == 1:  # keep this group: hooks on its modules refer to it
        group.shared = True
        return group
    owner = get_state(group.modules[0])
    assert owner is not None
    owner.add_shared(group.split_off(param))
    return owner.groups[-1]
