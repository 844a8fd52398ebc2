"""Make groups of the parameters that communicate together, and shard parameters that are added later."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fsdp2._torch.tensors import memory_of
from fsdp2._warn import warn
from fsdp2.engine.buffers import ShardStore
from fsdp2.engine.extension import has_extension
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.options import GroupOptions
from fsdp2.engine.param import FSDPParam, Site, is_managed_tensor, show
from fsdp2.engine.stamp import Stamp
from fsdp2.engine.unit import FoundBelow, FSDPState
from fsdp2.grouping.collect import Found, Managed, collect, move_to
from fsdp2.grouping.placing import Placed, PlacementFn, place, policy_of_param
from fsdp2.grouping.shared_memory import note_memory
from fsdp2.grouping.ties import check_tie, find_ties, follow_sites, follow_tie, give_up, is_gone, join_ties, replaced_by
from fsdp2.optim.prebuilt import follow_parameters, repair_holders
from fsdp2.policies import CPUOffloadPolicy, OffloadOf, PolicyOf
from fsdp2.sharding.mesh import DataParallelMesh, regroup
from fsdp2.weights.handed import why_unreadable

__all__ = ["CallOptions", "warn_of_gradients"]

logger = logging.getLogger("fsdp2")


@dataclass(frozen=True)
class CallOptions:
    """The checked arguments of one call. It makes groups for the unit, now and when parameters are added later.

    ``hook_group`` registers hooks that show a new group's shards to ``state_dict`` and ``load_state_dict``. The sets of
    ignored parameters grow: loading with ``assign=True`` puts others in their places.
    """

    mesh: DataParallelMesh
    options: GroupOptions
    placement_fn: PlacementFn | None
    ignored: set[nn.Parameter]
    policy_of: PolicyOf
    offload_of: OffloadOf
    hook_group: Callable[[FSDPParamGroup], None]
    ignored_modules: frozenset[nn.Module] = frozenset()
    replicated: set[nn.Parameter] = field(default_factory=set)
    ignored_sites: set[Site] = field(default_factory=set)

    def manage(
        self, unit: FSDPState, managed: Managed, checked: dict[nn.Parameter, Placed] | None = None
    ) -> list[Found]:
        """Put ``managed`` parameters into groups of ``unit``; share the groups of parameters that other calls manage.

        What ``check`` returned before is taken out of ``checked``, so that ``shard_placement_fn`` is called once.
        All checks run first, so that an error leaves everything unchanged. Returns those whose gradients are dropped.
        """
        hooked = list(unit.groups)
        sites = (Site(m, name) for m in managed.modules for name, p in m._parameters.items() if p in self.ignored)
        self.ignored_sites.update(sites)
        own, ties = find_ties(managed.params, self.mesh, self.policy_of)
        placed = self.place(own, checked)
        parts = _together(placed, self.options)
        for found in own:  # before it is moved, which gives each parameter memory of its own
            found.memory = memory_of(found.param) if type(found.param) is nn.Parameter else None
        stay = [entry.found for entry in placed if not isinstance(entry.offload, CPUOffloadPolicy)]
        move_to(self.mesh.device, stay, managed.buffers)
        join_ties(ties, unit)
        unit.groups[:0] = [self._make_group(part, unit) for part in parts]
        _mark(managed.modules)
        for group in unit.groups:
            if group not in hooked:
                self.hook_group(group)
        return [found for found in own if found.param.grad is not None]

    def _make_group(self, part: list[Placed], unit: FSDPState) -> FSDPParamGroup:
        """Return a new group of ``unit``, with the settings of the call, or what setters have made of them."""
        mesh, groups = part[0].mesh, [group for group in unit.groups if not group.shared]
        alike = next((group for group in groups if group.mesh == mesh), None)
        options = self.options
        if alike is not None:
            options = alike.store.options
        elif groups:  # a collective that was set is of the process groups of its own mesh
            options = replace(groups[0].store.options, all_gather=None, reduce_scatter=None)
        made = _make_group(part, options, unit)
        if alike is not None:
            made.gradients.use_axis(alike.gradients.axis)  # which set_separate_reduce_scatter_group may have changed
        return made

    def check(self, params: list[Found], before: dict[nn.Parameter, Placed]) -> list[Placed]:
        """Raise the errors with which ``manage`` would refuse ``params``, and change nothing; return the new ones.

        ``before`` are parameters that calls with other arguments will manage by then.
        """
        own, _ = find_ties(params, self.mesh, self.policy_of)
        for found in own:
            if (first := before.get(found.param)) is not None:
                policy = policy_of_param(found, self.policy_of(found.name))
                check_tie(found, self.mesh, policy, first.found, first.mesh, first.policy)
        return self.place([found for found in own if found.param not in before])

    def place(self, params: Iterable[Found], checked: dict[nn.Parameter, Placed] | None = None) -> list[Placed]:
        """Return the mesh and the spec of each of ``params``; this changes nothing but ``checked``: see ``manage``.

        Raises:
            ValueError, AssertionError: ``shard_placement_fn`` returned an invalid placement.
        """
        policies, placed = self.policy_of, []
        for found in params:
            if checked and (known := checked.pop(found.param, None)) is not None:
                placed.append(replace(known, found=found))
                continue
            whole = found.param in self.replicated
            entry = place(found, self.placement_fn, self.mesh, policies(found.name), whole)
            entry.offload = self.offload_of(found.name)
            placed.append(entry)
        return placed

    def with_options(self, options: GroupOptions) -> CallOptions:
        """Return the same arguments with what setters have made of the options, for a unit that has no group yet."""
        return replace(self, options=options)

    def copied(self, memo: dict[int, Any]) -> CallOptions:
        """Return the same arguments for copied modules; ``memo`` of ``copy.deepcopy`` has the copied parameters."""

        def new(originals: Collection[Any]) -> set[Any]:
            return {memo.get(id(original), original) for original in originals}

        return replace(
            self,
            ignored=new(self.ignored),
            ignored_modules=frozenset(new(self.ignored_modules)),
            replicated=new(self.replicated),
            ignored_sites={Site(memo.get(id(site.module), site.module), site.name) for site in self.ignored_sites},
        )

    def ignored_now(self) -> set[nn.Parameter]:
        """Return the parameters that the call leaves as they are. Loading with ``assign=True`` replaces them."""
        for site in self.ignored_sites:
            shown = site.shown
            if shown is not None and not is_managed_tensor(shown):
                self.ignored.add(shown)
        for module in self.ignored_modules:
            self.ignored.update(param for param in module.parameters() if not is_managed_tensor(param))
        return self.ignored

    def adopt_added(self, unit: FSDPState) -> FoundBelow:
        """Shard parameters that were added below the modules of ``unit`` (LoRA adapters, say), and follow new ties."""
        managed = collect(unit.modules, self.ignored_now(), self.ignored_modules)
        params = [param for group in unit.groups for param in group.params]
        known: dict[Any, FSDPParam] = {
            tensor: param for param in params for tensor in (param.sharded, param.own, param.full, param.piece)
        }
        shown_by = _by_site(params)
        below = {*managed.modules, *managed.others}
        tied = [(found, others) for found in managed.params if (others := replaced_by(found, shown_by, below))]
        followed = {found.param for found, _ in tied}
        if unit.root.running is None:  # else they may have been put there for the call that runs
            for param in follow_sites(known, [found for found in managed.params if found.param not in followed]):
                self.hook_group(param.group)
            give_up([param for param in params if is_gone(param, below) and not unit.root.pending.expects(param.group)])
            shown_by = _by_site(params)
        unknown = [found for found in managed.params if found.param not in followed and found.param not in known]
        added = [found for found, _ in tied]
        added += [found for found in unknown if not any(site in shown_by for site in found.sites)]
        self.check(added, {})
        for found, others in tied:
            follow_tie(found, others)
        dropped = []
        for found in unknown:
            for param in {shown_by[site] for site in found.sites if site in shown_by}:
                if _take_over(found, param) and found.param.grad is not None:
                    dropped.append(found)
        repair_holders()
        if added:
            dropped += self._adopt(unit, replace(managed, params=added))
        else:
            _mark(managed.modules)  # parameters may be added below modules that have none yet
        warn_of_gradients([found.name for found in dropped])
        removed = [group for group in unit.groups if not _is_below(group, below)]
        return FoundBelow(managed.others, managed.ignores, removed)

    def _adopt(self, unit: FSDPState, added: Managed) -> list[Found]:
        """Manage parameters that were ``added``, and return those whose gradients are dropped."""
        names = ", ".join(found.name for found in added.params)
        logger.info("%s: adopted parameters added after fully_shard: %s", unit.name or "the root", names)
        before = len(unit.groups)
        dropped = self.manage(unit, added)
        unit.include(unit.groups[: len(unit.groups) - before])
        return dropped


def _by_site(params: Iterable[FSDPParam]) -> dict[Site, FSDPParam]:
    """Return which parameter of a unit is at each site.

    Where a tied one has come to a site, another unit may have seen that first: the unit's own is the one replaced.
    """
    return {site: param for param in sorted(params, key=lambda one: not one.group.shared) for site in param.sites}


def _is_below(group: FSDPParamGroup, below: Collection[nn.Module]) -> bool:
    return any(site.module in below for param in group.params for site in param.sites)


def warn_of_gradients(names: list[str]) -> None:
    """Warn that the gradients of the parameters with these names are dropped, if there are any; call it last.

    They are not kept as unreduced ones: nobody could tell whether they are a rank's own or were averaged already, and
    those of a trial run before sharding would be added to the first step's.
    """
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warn(
            f"fully_shard: {', '.join(names[:3])}{more}: got a gradient from before the call, expected none; it is "
            "dropped, because it is that of this rank alone. Run that backward after fully_shard, or, if you do not "
            "need the gradient, call zero_grad() before fully_shard"
        )


def _mark(modules: Iterable[nn.Module]) -> None:
    """Set the flags on which Dynamo guards, and by which registrations on these modules are counted."""
    for module in modules:
        # Not by setattr: a module may override it, and refuse names that it does not know.
        module.__dict__.update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)


def _take_over(found: Found, param: FSDPParam) -> bool:
    """Copy the value of a whole, plain parameter that has replaced ``param`` on all its modules into the shard.

    A parameter that does not fit stays (False). The next gather raises an error that names it.

    Raises:
        RuntimeError: The memory of the new parameter was freed.
    """
    new, group = found.param, param.group
    fits = type(new) is nn.Parameter and param.spec.full is None and tuple(new.shape) == param.spec.layout.shape
    if not fits or new.dtype != param.dtype or new.is_meta or set(param.sites) != set(found.sites):
        return False
    if problem := why_unreadable(new):
        raise RuntimeError(f"{param.name}: replaced on its module, but {problem}")
    if group.store.lends(new):  # a full parameter, which resharding frees
        new.data = new.detach().clone()
    group.reshard()
    param.take_value(new, group.store.home)
    show([param], "shards", over_others=True)
    group.store.note_change()
    follow_parameters([new], [param])
    logger.info("%s: took over the value of the parameter that replaced it", param.name)
    return True


def _together(placed: list[Placed], options: GroupOptions) -> list[list[Placed]]:
    """Return lists of parameters that communicate together: those of one mesh whose shards are on one device.

    Parameters with an extension get a list of their own if ``reshard_after_forward`` keeps pieces on a subgroup, which
    is impossible for them.
    """
    subgroup = not isinstance(options.reshard_after_forward, (bool, type(None)))
    groups: dict[object, list[Placed]] = {}
    for entry in placed:
        alone = subgroup and has_extension(entry.piece)
        mesh, home = entry.mesh, repr(entry.offload)
        key = (mesh.shard.group, mesh.replicate.group, mesh.has_portions, alone, home)
        groups.setdefault(key, []).append(entry)
    return list(groups.values())


def _first_values(param: nn.Parameter) -> list[float]:
    """Return the first values of the whole parameter, to compare ranks; none on the meta device or of a subclass."""
    if param.is_meta or type(param) is not nn.Parameter or not param.is_floating_point():
        return []
    return param.detach().flatten()[:4].float().tolist()


@torch.no_grad()
def _make_group(placed: list[Placed], options: GroupOptions, unit: FSDPState) -> FSDPParamGroup:
    mesh = placed[0].mesh
    params = [FSDPParam(p.found.param, p.spec, p.found.sites, p.found.name, p.policy) for p in placed]
    pieces = [p.piece for p in placed]
    for entry, param in zip(placed, params):
        note_memory(param, entry.found.memory)
        param.formats = param.choose_formats(options.formats_of, entry.found.param)
    options = replace(options, offload_policy=placed[0].offload)
    if not isinstance(size := options.reshard_after_forward, (bool, type(None))):
        # A mesh of its own may have as many ranks, where pieces are shards, or a number that ``size`` does not divide.
        if has_extension(pieces[0]) or mesh.shard.size % size or mesh.shard.size == size:
            options = replace(options, reshard_after_forward=True)
        else:
            regroup(mesh.mesh, size)  # makes process groups here, because every rank calls fully_shard
    store = ShardStore(params, mesh, pieces, options)
    initial = None if mesh.mesh.size() == 1 else (_first_values(placed[0].found.param), Stamp(params))
    group = FSDPParamGroup(store, unit.modules, unit.root.comm, unit.notice_backward, initial=initial)
    originals = [p.found.param for p in placed]
    follow_parameters(originals, params)
    return group
