"""A group's memory: one flat buffer for its shards, one for its full parameters, and the views that connect them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

from fsdp2._naming import class_name
from fsdp2._torch.autograd import functorch_active, lasting_tensors
from fsdp2._torch.tensors import address_of, set_versions, storages_of, versions_of
from fsdp2._warn import warn
from fsdp2.comm.comparison import Comparison
from fsdp2.comm.gather import Buffer, GatherBuffers
from fsdp2.comm.pieces import has_memory, part_of
from fsdp2.comm.sample import Sample
from fsdp2.comm.streams import Lanes
from fsdp2.engine.casts import compute_dtype
from fsdp2.engine.extension import GatherExtension, GroupExtensions, has_extension, refuse_portions
from fsdp2.engine.formats import ENCODED, digest
from fsdp2.engine.options import GroupOptions
from fsdp2.engine.param import FSDPParam, Shown, copy_of, have_locals, show
from fsdp2.engine.portions import Portions, portion_items
from fsdp2.engine.registry import Registry
from fsdp2.engine.subgroup import SubgroupShards
from fsdp2.policies import CPUOffloadPolicy
from fsdp2.sharding.mesh import DataParallelMesh
from fsdp2.sharding.packing import FlatPlan, PlannedParam, plan_flat
from fsdp2.sharding.spec import on_this_rank

__all__ = ["ShardStore", "live_stores"]

# Version counters of full parameters without memory: no tensor is changed in place so often, and each gets another one.
_gone = itertools.count(1 << 30)

_live: Registry[ShardStore] = Registry()


def live_stores() -> list[ShardStore]:
    """Return the memory of every group of the process."""
    return list(_live)


class ShardStore:
    """The memory of the shards and full parameters of one group.

    Shards lie in one flat buffer, except those with an all-gather extension, which are separate tensors. As long as a
    parameter is on the meta device, all shards are separate tensors.
    """

    def __init__(
        self,
        params: list[FSDPParam],
        mesh: DataParallelMesh,
        pieces: Sequence[torch.Tensor],
        options: GroupOptions,
    ) -> None:
        self.params = params
        self.mesh = mesh
        self.options = options
        self.extensions: GroupExtensions | None = None
        self._plain: list[FSDPParam] = []  # those in the flat buffer
        # While the full parameters have no memory, their version counters are ``_gone``; these are their own ones.
        self._own_versions: list[int] | None = None
        self._gone: list[int] = []
        self._full_params: list[torch.Tensor] = []
        self._flat: torch.Tensor | None = None
        self._plan: FlatPlan | None = None
        self._items: list[PlannedParam] = []  # the shards of ``_plain``
        self._gathered_items: list[PlannedParam] = []  # gathered over the shard axis: ``_items``, or portions
        self.full_bytes = 0  # of the full parameters in the dtype of computation; kept, since each backward reads it
        self._placed: dict[FSDPParam, torch.Tensor] = {}  # the local tensor that each shard was given
        self._storages: list[int] = []  # of the DTensors around these
        self.borrows = False  # modules may show a shard for one call only, which may be over
        self._full_buffer: Buffer | None = None
        self._plain_fulls: list[torch.Tensor] = []  # the plain full tensors of ``_plain`` in it
        # Of parameters that are sent unchanged: whether this rank's part of the full one is like its shard.
        self._comparison: Comparison[FSDPParam] | None = None
        self._sample: Sample[FSDPParam] | None = None  # of the shards, if the host may read them
        self.gather_buffers: GatherBuffers | None = None  # made for the first gather
        self.portions: Portions | None = None  # with shard_over_replicas; made with gather_buffers
        self._subgroup: SubgroupShards | None = None
        self.formats_digest = self._digest()  # compared between ranks
        # Grows when the full parameters are replaced, because shards were cast, moved or laid out again: views of the
        # old ones that autograd has saved can no longer be gathered.
        self.generation = 0
        # Grows when parameters, their dtypes or requires_grad, or options change: then reductions are planned again.
        self.revision = 0
        self._place(pieces)
        _live.add(self)

    def for_params(self, params: list[FSDPParam]) -> ShardStore:
        """Return a separate store for some of the parameters, or for copies of them."""
        store = ShardStore(params, self.mesh, [param.local for param in params], self.options)
        store.generation = self.generation + 1  # autograd may have saved views of full parameters of this one
        return store

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shards, padding included."""
        return sum(local.nbytes for local in self._placed.values()) if self._plan is None else self._plan.shard_bytes

    @property
    def reduce_bytes(self) -> int:
        """Bytes of the full gradients in the dtype of their sum."""
        pairs = zip(self._plain, self._gathered_items)
        dtypes = [(item.layout.numel, param.reduce_dtype or item.wire_dtype) for param, item in pairs]
        return sum(numel * dtype.itemsize for numel, dtype in dtypes)

    @property
    def offloads(self) -> bool:
        """True if shards and their gradients live on the CPU whatever the mesh's device."""
        return isinstance(self.options.offload_policy, CPUOffloadPolicy)

    @property
    def home(self) -> torch.device:
        """The device of shards that are not on the meta device."""
        return torch.device("cpu") if self.offloads else self.mesh.device

    @property
    def pins(self) -> bool:
        """True if shards on the CPU live in page-locked memory, which is useful only with an accelerator."""
        policy = self.options.offload_policy
        return isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and torch.accelerator.is_available()

    @property
    def extended(self) -> set[FSDPParam]:
        """The parameters that have an all-gather extension."""
        return set() if self.extensions is None else self.extensions.params

    def set_options(self, options: GroupOptions) -> None:
        """Follow ``options``; if they change how shards are sent, move the shards to a new buffer."""
        moved = options.gather_sizes != self.options.gather_sizes
        if options.formats_of != self.options.formats_of:
            # Choose all formats before setting the first: the user's function may raise.
            chosen = [param.choose_formats(options.formats_of, param.sharded) for param in self.params]
            for param, formats in zip(self.params, chosen):
                moved |= formats.gather != param.formats.gather
                param.formats = formats
            self.formats_digest = self._digest()
        self.options, self._comparison = options, None
        self.note_change()
        if moved:
            self.move_shards()

    def move_shards(self) -> None:
        """Move shards to a new buffer, because they are sent in another way now."""
        self._plan = None
        self._place([param.local for param in self.params])
        self.note_change()

    def note_change(self) -> None:
        """Let reductions be planned again: parameters, their dtypes, requires_grad or options changed."""
        self.revision += 1

    def _digest(self) -> tuple[int, ...]:
        return digest((param.name_in_unit, param.formats) for param in self.params)

    # ---- what modules show ----

    def show(self, params: Iterable[FSDPParam], which: Shown, *, over_others: bool = False) -> None:
        """Make the modules show one of the tensors of each of ``params``, and follow changes of their requires_grad."""
        if show(params, which, over_others=over_others):
            self.note_change()

    def follow_requires_grad(self) -> None:
        """Carry changes of requires_grad from the tensors that the modules show to the others."""
        if any([param.sync_requires_grad() for param in self.params]):
            self.note_change()

    # ---- shards ----

    def adopt(self, before_writing: Callable[[], object], *, lasting: bool = False) -> bool:
        """Take in shards that were replaced or whose local tensors changed; return whether others replace our own.

        ``before_writing`` waits for what still reads shards. ``lasting``: the shards were not put there for a single
        call.

        Raises:
            RuntimeError: a parameter was removed from its module, or replaced by something that is no such shard.
        """
        changed = replaced = False
        for param, placed in self._placed.items():
            shown = param.sites[0].shown
            if shown is not None and (shown is param.full or shown is param.piece):
                # Somebody put other values there for one call, and restored what it had found, which has no memory now.
                shown = param.own
            if shown is param.sharded and param.local is placed:
                self.show([param], "shards")
                continue
            _check_replacement(param, shown)
            replaced |= shown is not param.sharded and shown is not param.own  # not if our own come back
            if shown is param.sharded and param in self._plain:
                # The same DTensor got another local tensor (swap_tensors). The old one may belong to another DTensor
                # now, and its place in the flat buffer gets the new values, so it gets other memory. ``adopt_shard``
                # does the same for a DTensor that was replaced.
                placed.data = placed.detach().clone()
            param.adopt_shard(shown, lasting=lasting)  # type: ignore[arg-type]  # just checked
            self.show([param], "shards", over_others=True)  # on all modules that it is tied to
            changed = True
        if changed:
            before_writing()
            self._place([param.local for param in self.params])
            self.note_change()
        self.borrows = any([param.own is not param.sharded for param in self.params])
        return replaced

    def replaced(self, *, in_backward: bool) -> bool:
        """Return whether a module shows another parameter than its shard, or the shard has another local tensor.

        ``swap_tensors`` does the second. Every gather asks this: it is one pass in C over the local tensors, and no
        call for a site.

        Raises:
            RuntimeError: somebody assigned ``.data``, which has no effect on a shard; not ``in_backward``.
        """
        shards = [param.sharded for param in self._placed]
        same = have_locals(shards, self._placed.values())
        # Only storages show an assignment to .data.
        if same and not in_backward and (storages := storages_of(shards)) != self._storages:
            self._refuse_assigned_data(storages)
        for param in self.params:
            sharded = param.sharded
            for site in param.sites:
                shown = site.module._parameters
                if site.name not in shown or shown[site.name] is not sharded:  # removed, or another one
                    return True
            if not same and param.local is not self._placed[param]:
                return True
        return False

    def check_ties(self) -> None:
        """Raise RuntimeError if modules that share a parameter show different ones: only one could be used."""
        for param in self.params:
            found = [(site, site.shown) for site in param.sites]
            first, shown = found[0]
            for site, other in found[1:]:
                if other is not shown and other is not None:  # None: it was removed there, and is put back
                    raise RuntimeError(
                        f"{param.name}: the sharded parameter is tied, and its modules show different ones: got one as "
                        f"{first.name!r} of {class_name(first.module)} and another as {site.name!r} of "
                        f"{class_name(site.module)}; expected the same. Replace it in all places, or untie it "
                        "between two steps"
                    )

    def _refuse_assigned_data(self, storages: list[int]) -> None:
        before, self._storages = self._storages, storages  # to raise once for each assignment
        assigned = [param for param, old, new in zip(self._placed, before, storages) if old != new]
        names = ", ".join([param.name for param in assigned[:8]])
        if all(map(self._is_bias_of_tied, assigned)):
            warn(
                f"{names}: a tensor was assigned to .data of the sharded parameter, which DTensors ignore. If it was "
                "tie_weights() of a transformers model, nothing is lost: it assigns the values that are there. Other "
                "values are lost; assign them inside summon_full_params"
            )
            return
        raise RuntimeError(
            f"{names}: a tensor was assigned to .data of the sharded parameter, which DTensors ignore: "
            "got the values from before, expected the assigned ones; write them in place instead, with "
            "`with torch.no_grad(): param.copy_(value)`, or assign inside summon_full_params"
        )

    def _is_bias_of_tied(self, param: FSDPParam) -> bool:
        """Return whether ``param`` is the bias of a layer whose weight is tied.

        transformers' ``tie_weights`` pads such a bias to the rows of its weight, which adds nothing where it has as
        many, and assigns the result to ``.data``. ``init_weights`` calls it, and so does accelerate when it has loaded
        a sharded model. The assigned values are gone before anybody could compare them.
        """
        weights = [site for other in self.params if len(other.sites) > 1 for site in other.sites]
        tied = {site.module for site in weights if site.name == "weight"}
        return any(site.name == "bias" and site.module in tied for site in param.sites)

    def check_ready(self) -> None:
        """Raise RuntimeError that names parameters still on the meta device or, when offloading, not on the CPU.

        Also move the shards if their local tensors have got or lost all-gather extensions.
        """
        names = [param.name for param in self.params if param.local.is_meta]
        if names:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the following were still "
                f"on meta device: {names}\nFor example, call module.to_empty(device) to materialize to device and call "
                "module.reset_parameters() on each module to initialize values."
            )
        self._check_on_host()
        known = self.extended
        if any(has_extension(param.local) != (param in known) for param in self.params):
            self.move_shards()

    def _check_on_host(self) -> None:
        elsewhere = [(param.name, param.local.device) for param in self.params if param.local.device.type != "cpu"]
        if self.offloads and elsewhere:
            raise RuntimeError(
                "FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, call "
                'module.cpu(), or module.to_empty(device="cpu") and load values. Found following parameters on non-CPU '
                f"device: {elsewhere}"
            )

    def refuse_gradients_elsewhere(self, indices: Iterable[int]) -> None:
        """Raise RuntimeError if these parameters' shards are not where the mesh is: gradients will be on its device.

        A forward without gradients may compute with shards that were moved to the CPU.
        """
        device = self.mesh.device
        away = [param for param in map(self.params.__getitem__, indices) if param.local.device.type != device.type]
        if away and not self.offloads:
            raise RuntimeError(
                f"{', '.join(param.name for param in away)}: shards on {away[0].local.device}, whose gradients will be "
                f'on {device}; expected both on one device. Call module.to("{device.type}") before the forward, or '
                "keep shards on the CPU by offload_policy=CPUOffloadPolicy()"
            )

    def _place(self, pieces: Sequence[torch.Tensor]) -> None:
        """Copy ``pieces`` into the flat buffer, and make the copies the shards; stage 2 of the life of a parameter.

        Make a new flat buffer if parameters, dtypes, formats or the device changed. Shards that somebody has moved stay
        where they are: a DTensor knows its device. The next gather refuses them if they should be on the CPU.
        """
        plain = [(p, piece) for p, piece in zip(self.params, pieces) if not has_extension(piece)]
        own = [(p, piece) for p, piece in zip(self.params, pieces) if has_extension(piece)]
        if any(piece.is_meta for piece in pieces):
            plain, own = [], list(zip(self.params, pieces))
        device = self.mesh.device
        with lasting_tensors():
            for param, piece in own:
                if param.sharded is None or piece.is_meta or piece is not param.local:
                    where = "cpu" if self.offloads and not piece.is_meta and param.sharded is None else piece.device
                    piece = _own(piece, param, where)
                self._set(param, piece)  # the object itself, since its attributes may make the extension
            items = [_item(p, x.dtype) for p, x in plain]
            to_host = not plain or (self.offloads and plain[0][0].sharded is None)
            target = torch.device("cpu") if to_host else plain[0][1].device
            fits = self._plan is not None and self._flat is not None and self._flat.device == target
            if not fits or items != self._items or [p for p, _ in plain] != self._plain:
                with_extension = [p for p, x in own if not x.is_meta]
                if with_extension and self.mesh.has_portions:
                    refuse_portions(with_extension[0].name, with_extension[0].local)
                self._make_buffer([p for p, _ in plain], items, target)
                extensions = [GatherExtension(p, self.mesh.shard_mesh, device) for p in with_extension]
                self.extensions = GroupExtensions(extensions) if extensions else None
            for i, (param, piece) in enumerate(plain):
                view = self._view(i)
                if address_of(view) != address_of(piece) or not view.numel():
                    view.copy_(piece)
                self._set(param, view)
        self._storages = storages_of([param.sharded for param in self._placed])
        self._comparison = self._sample = None

    def _make_buffer(self, plain: list[FSDPParam], items: list[PlannedParam], device: torch.device) -> None:
        self._plain, self._items = plain, items
        self._gathered_items = portion_items(plain, items, self.mesh) if self.mesh.has_portions else items
        self.full_bytes = sum(item.full_bytes for item in self._gathered_items)
        axis = self.mesh.replicate if self.mesh.has_portions else self.mesh.shard
        self._plan = plan_flat(items, self.options.gather_sizes, coalesced=axis.coalesces)
        flat = torch.zeros(self._plan.shard_bytes, dtype=torch.uint8, device=device)
        self._flat = flat.pin_memory() if self.pins and device.type == "cpu" else flat
        self.generation += self._full_buffer is not None  # autograd may have saved views of the full parameters
        self._full_buffer = self.gather_buffers = self._subgroup = self.portions = None

    def _view(self, i: int) -> torch.Tensor:
        """Return the shard of plain parameter ``i``, with a storage of its own inside the flat buffer's memory."""
        assert self._flat is not None and self._plan is not None
        spec, dtype, start = self._plain[i].spec, self._items[i].dtype, self._plan.shard_offset[i]
        return part_of(self._flat, start, dtype, spec.shard_shape, spec.shard_stride)

    def _set(self, param: FSDPParam, local: torch.Tensor) -> None:
        self._placed[param] = local
        param.set_shard(local)

    # ---- full parameters ----

    def make_gather_buffers(self, lanes: Lanes) -> GatherBuffers:
        """Make the buffers of gathers, and the full parameters in them.

        Except for portions, all memory is allocated only for a moment, on the gather lane, whose next gather reuses it.
        """
        assert self._plan is not None and self._flat is not None
        self._check_on_host()  # the shards may have been moved since the first forward
        plan, source, items = self._plan, self._flat, self._gathered_items
        with lasting_tensors():
            if self.mesh.has_portions:
                sizes = self.options.gather_sizes
                self.portions = Portions(source, self._items, plan, items, sizes, self.mesh, lanes.replicate)
                plan, source = self.portions.plan, self.portions.bytes
        with lasting_tensors(), lanes.gather.after():
            self._full_buffer = Buffer(plan.full_bytes, self.mesh.device)
            self.gather_buffers = GatherBuffers(items, plan, source, self._full_buffer)
            self._plain_fulls, self._comparison = [], None
            for i, (param, item) in enumerate(zip(self._plain, items)):
                layout, start = item.layout, plan.full_offset[i]
                flat = self._full_buffer.view(start, layout.full_storage_numel, item.wire_dtype)
                self._plain_fulls.append(flat.as_strided(layout.shape, layout.stride))
                param.set_full(flat)
            self._full_buffer.free()
        self._own_versions, self._gone = None, [next(_gone) for _ in self._plain]
        self._full_params = [param.full for param in self._plain if param.full is not None]
        return self.gather_buffers

    def free_full(self) -> None:
        """Give back the memory of the full parameters, unless ``keep_full_storage`` was set.

        Many kernels do not check that a tensor has memory: a backward that enters the unit unnoticed would crash the
        process. So the version counters change to values that no forward has saved. Then autograd raises an error,
        which ``hints.py`` explains.
        """
        if self.options.keep_full_storage:
            return
        if self._full_buffer is not None:
            self._full_buffer.free()
            if self._own_versions is None:
                self._own_versions = [full._version for full in self._full_params]
                set_versions(self._full_params, self._gone)
        if self.extensions is not None:
            self.extensions.free()

    def note_full(self) -> None:
        """Note that the full parameters have memory, which contains them."""
        if self._own_versions is not None:
            set_versions(self._full_params, self._own_versions)
            self._own_versions = None

    def full_apart(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the full parameters in memory, each with a tensor like it in another storage over that memory."""
        full = self._full_buffer
        if full is None or not full.exists or not has_memory(full.bytes):
            return
        for tensor in map(on_this_rank, self._full_params):
            if full.has(tensor):
                yield tensor, full.view_apart(tensor)

    def lies_in_full(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a full parameter, or a view of one."""
        return self._full_buffer is not None and self._full_buffer.has(on_this_rank(tensor))

    def lends(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in memory that is freed: of full parameters, or of a subgroup's pieces."""
        pieces = self._subgroup
        return self.lies_in_full(tensor) or (pieces is not None and pieces.has(on_this_rank(tensor)))

    def full_versions(self) -> list[int]:
        """Return the version counter of each full parameter: its changes in place, gathers excepted."""
        return versions_of(self._full_params) if self._own_versions is None else self._own_versions

    def changed_since(self, versions: list[int]) -> list[str]:
        """Return the names of full parameters that were changed in place since they had these ``versions``."""
        return [p.name for p, before, now in zip(self._plain, versions, self.full_versions()) if now != before]

    def refuse_assigned_data(self) -> None:
        """Raise RuntimeError if somebody assigned ``.data``, which has no effect on a shard."""
        if (storages := storages_of([param.sharded for param in self._placed])) != self._storages:
            self._refuse_assigned_data(storages)

    @property
    def sample(self) -> Sample[FSDPParam] | None:
        """A sample of the shards, whose memory the host must be allowed to read; None if they are fake.

        A write that changes most elements is seen by all ranks: parameters of which some have no elements are left out.
        """
        if self._sample is None and self._flat is not None and self._plan is not None and has_memory(self._flat):
            starts = zip(self._plain, self._plan.shard_offset)
            spans = {p: (start, self._placed[p].nbytes) for p, start in starts if p.spec.reaches_all_ranks}
            self._sample = Sample(self._flat, spans)
        return self._sample

    @property
    def comparison(self) -> Comparison[FSDPParam]:
        """The comparison of full parameters with shards, in a few places, by a device.

        A write that changes most elements is seen by all ranks: parameters of which some have no elements are left out,
        and those that an extension, a format or a custom all-gather may change on the way.
        """
        if self._comparison is None:
            sent = zip(self._plain, self._gathered_items, self._plain_fulls)
            changes = self.mesh.is_pretended or self.options.custom_gather is not None
            self._comparison = Comparison(
                {
                    param: (param.spec.cut(full), self._placed[param])
                    for param, item, full in sent
                    if not changes and item.form is None and param.spec.reaches_all_ranks and has_memory(full)
                }
            )
        return self._comparison

    def reclaim_full(self) -> None:
        """Undo assignments to ``.data`` of full parameters: gathers would write to memory that nobody reads."""
        for param in self._plain:
            param.reclaim_full()

    def pieces_on(self, size: int) -> SubgroupShards:
        """Return the group's pieces over ``size`` ranks; full parameters must be in memory."""
        if self._subgroup is None or self._subgroup.axis.size != size:
            assert self.gather_buffers is not None
            with lasting_tensors():
                sizes = self.options.gather_sizes
                self._subgroup = SubgroupShards(
                    self._plain, self.gather_buffers, self._plain_fulls, self.mesh, size, sizes
                )
        return self._subgroup


def _item(param: FSDPParam, dtype: torch.dtype) -> PlannedParam:
    wire_dtype = compute_dtype(dtype, param.policy)
    if (layout := param.spec.over_replicas) is not None:  # the format is for portions
        return PlannedParam(layout, dtype, wire_dtype)
    form = param.formats.gather if dtype in ENCODED and wire_dtype in ENCODED else None
    return PlannedParam(param.spec.layout, dtype, wire_dtype, form=form)


def _own(piece: torch.Tensor, param: FSDPParam, device: torch.device | str) -> torch.Tensor:
    """Return a copy of ``piece`` on ``device``, with the layout's strides."""
    spec = param.spec
    if type(piece) is not torch.Tensor and has_extension(piece):
        copied = copy_of(piece)
        return copied if copied.device == torch.device(device) else copied.to(device)
    own = torch.empty_strided(spec.shard_shape, spec.shard_stride, dtype=piece.dtype, device=device)
    return own if piece.is_meta else own.copy_(piece.detach())


def _check_replacement(param: FSDPParam, shown: object) -> None:
    shape, placements = tuple(param.spec.layout.shape), param.spec.dtensor.placements
    if param.spec.dtensor.tensor_meta is not None:
        shape = tuple(param.spec.dtensor.tensor_meta.shape)
    site = param.sites[0]
    if shown is None:
        raise RuntimeError(
            f"{param.name}: the sharded parameter is not on its module any more; got none as {site.name!r} of "
            f"{class_name(site.module)}, expected a DTensor of shape {shape}. weight_norm, spectral_norm, "
            "pruning and the like take it away when they are applied: apply them before fully_shard. Put a "
            "parameter back that was deleted or set to None, or do so before fully_shard. To go on without it, put a "
            "new module in the place of this one"
        )
    if isinstance(shown, torch.Tensor) and (not shown.is_leaf or functorch_active()):
        raise RuntimeError(
            f"{param.name}: replaced on its module by a {type(shown).__name__} that autograd or torch.func computes a "
            "gradient of, which would not flow through the gather; expected the module's own parameter. Call "
            "functional_call with detached values under torch.no_grad(), and differentiate with respect to other "
            "values on a copy of the model that is not sharded"
        )
    if isinstance(shown, DTensor):
        if tuple(shown.shape) == shape and shown.placements == placements:
            return
        got = f"a DTensor of shape {tuple(shown.shape)} placed as {shown.placements}"
    else:
        got = f"a {type(shown).__name__} of shape {tuple(shown.shape)}"  # type: ignore[attr-defined]  # a parameter
    raise RuntimeError(
        f"{param.name}: the sharded parameter was replaced on its module; got {got}; expected a DTensor of shape "
        f"{shape} placed as {placements}. Load values with load_state_dict or copy_ them into the sharded parameter. "
        f"For a parameter of another shape, put a new {class_name(site.module)} in the place of this one, or replace "
        "parameters before fully_shard"
    )
