"""One managed parameter: its shard, its full tensor, which of them its modules show, and its gradient.

The only file that writes ``.grad``. Functions here take lists, since a step goes through thousands of parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from dataclasses import replace
from operator import is_
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._torch.autograd import (
    explicit_grad_dtype,
    gradient_hook_tables,
    gradient_hooks,
    have_gradient_hooks,
    share_gradient_hooks,
)
from fsdp2._torch.modules import overrides_setattr
from fsdp2._torch.tensors import (
    FakeTensor,
    address_of,
    as_parameter,
    dtensor_spec,
    local_tensor,
    python_attributes,
    set_local_tensor,
    storages_of,
)
from fsdp2.engine.casts import compute_dtype, reduce_dtype, statistics_dtype
from fsdp2.engine.formats import Formats, choose_formats
from fsdp2.engine.gradient_hooks import call_hook, gradient_after
from fsdp2.engine.options import FormatsOf
from fsdp2.policies import MixedPrecisionPolicy
from fsdp2.sharding.layout import ShardLayout
from fsdp2.sharding.spec import ShardedSpec, arrived

__all__ = [
    "FSDPParam",
    "Shown",
    "Site",
    "accumulate_gradients",
    "copy_of",
    "have_gradients",
    "have_locals",
    "is_managed_tensor",
    "is_summoned",
    "is_temporary",
    "lend_gradient",
    "parameter_like",
    "parameter_of",
    "proxy",
    "resemble",
    "show",
    "shows",
    "take_assigned",
    "take_gradients",
]


Shown = Literal["shards", "full", "pieces"]
"""The tensors of its parameters that a group's modules show: shards, full ones, or the pieces kept after forward."""


class Site(NamedTuple):
    """A module, and a name under which it shows a parameter; a tied parameter has several."""

    module: nn.Module
    name: str

    @property
    def shown(self) -> nn.Parameter | None:
        """The parameter that ``module.name`` is now, or None."""
        try:
            return self.module._parameters[self.name]
        except KeyError:  # not ``get``, which those of a scripted module lack
            return None

    def show(self, param: nn.Parameter) -> None:
        """Make ``module.name`` be ``param``."""
        if overrides_setattr(self.module):
            setattr(self.module, self.name, param)
        else:
            self.module._parameters[self.name] = param


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return False for a tensor subclass that has its elements in other tensors inside (``_make_wrapper_subclass``)."""
    try:
        return type(tensor) is FakeTensor or tensor.untyped_storage().data_ptr() is not None
    except RuntimeError:  # nothing else tells, unless the class has ``__tensor_flatten__``
        return False


def is_managed_tensor(value: object) -> bool:
    """Return whether ``value`` is a shard, a full parameter or a piece kept after forward."""
    return getattr(value, "_fsdp2_managed", False)


def is_temporary(value: object) -> bool:
    """Return whether ``value`` is shown only while its group is in use; the shard has the reduced gradient."""
    return getattr(value, "_fsdp2_temporary", False)


def is_summoned(value: object) -> bool:
    """Return whether ``summon_full_params`` shows ``value``: it is managed, not temporary, and not a DTensor."""
    return is_managed_tensor(value) and not is_temporary(value) and not isinstance(value, DTensor)


def lend_gradient(lent: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Make ``grad`` the gradient of ``lent``, a plain tensor shown for a parameter; None removes the gradient."""
    if grad is not None and lent.grad_dtype not in (None, grad.dtype):
        lent.grad_dtype = grad.dtype
    lent.grad = grad


@torch.no_grad()
def take_assigned(lent: torch.Tensor, memory: torch.Tensor) -> None:
    """Copy what was assigned to ``lent.data``, or by ``lent.set_``, to ``memory``, which ``lent`` was made of.

    A write in place is there already. A tensor subclass is left as it is.
    """
    if type(memory) is torch.Tensor and memory.numel() and address_of(lent) != address_of(memory):
        memory.copy_(lent.detach())
        lent.data = memory


def parameter_like(param: torch.Tensor, value: torch.Tensor) -> nn.Parameter:
    """Return a parameter of ``value`` itself, with what users stored on ``param`` and its ``requires_grad``."""
    made = nn.Parameter(value, requires_grad=param.requires_grad)
    resemble(made, param)
    return made


def resemble(lent: torch.Tensor, param: torch.Tensor) -> None:
    """Give ``lent``, which stands for ``param``, its ``requires_grad``, and what users have stored on it by now."""
    lent.__dict__.update(python_attributes(param))
    if lent.requires_grad != param.requires_grad:
        lent.requires_grad_(param.requires_grad)


def copy_of(local: torch.Tensor) -> torch.Tensor:
    """Return a copy of a shard's local tensor, with memory of its own."""
    local = local.detach()
    if type(local) is torch.Tensor or not hasattr(local, "fsdp_pre_all_gather"):
        return local.clone()
    copied = local.new_zeros(local.shape)  # not clone: NF4's quantizes again, with other blocks
    copied.copy_(local)  # a separate statement: NF4's copy_ returns None
    return copied


def parameter_of(shard: DTensor, *, requires_grad: bool) -> nn.Parameter:
    """Turn ``shard``, a new DTensor that nobody else has, into a parameter.

    ``nn.Parameter`` would make an alias of the local tensor, with an equal spec from DTensor's cache, which may hold an
    equal mesh that somebody else made. It would also take a third of the time of ``fully_shard``.
    """
    return as_parameter(shard, requires_grad=requires_grad)


def have_locals(shards: Iterable[Any], locals_: Iterable[torch.Tensor]) -> bool:
    """Return whether the local tensors of ``shards`` still are these, in one pass in C: there may be thousands."""
    return all(map(is_, map(local_tensor, shards), locals_))


def shows(params: Iterable[FSDPParam], which: Shown) -> bool:
    """Return whether the modules show these tensors; others may be registered there (functional_call does that)."""
    return all([param.sites[0].shown is param.tensor(which) for param in params])


def show(params: Iterable[FSDPParam], which: Shown, *, over_others: bool = False) -> bool:
    """Make the modules show one of the tensors of each parameter; return whether requires_grad of any changed.

    A tensor that somebody else has put on a module stays there, except with ``over_others``.
    """
    changed = False
    for param in params:
        sharded, full, before = param.sharded, param.full, param.requires_grad
        if (
            sharded.requires_grad != before  # type: ignore[union-attr]  # a group's has one
            or (full is not None and full.requires_grad != before)
            or param.piece is not None
        ):
            changed |= param.sync_requires_grad()
        piece = param.piece
        shown = sharded if which == "shards" else full if which == "full" else piece
        for site in param.sites:
            shown_by = site.module._parameters
            there = shown_by[site.name] if site.name in shown_by else None  # noqa: SIM401  (saves a call per site)
            if there is shown:
                continue
            if there is not sharded and there is not full and there is not piece and there is not None:
                if not over_others and not is_summoned(there):
                    continue  # the next reconcile takes it in as the shard
            if param.direct_sites:
                shown_by[site.name] = shown
            else:
                site.show(shown)  # type: ignore[arg-type]  # the caller has made it
    return changed


def have_gradients(params: Iterable[FSDPParam]) -> list[bool]:
    """Return for each of ``params`` whether its full parameter has a gradient, which is still to be reduced."""
    return [param.full is not None and param.full.grad is not None for param in params]


def take_gradients(params: list[FSDPParam], device: torch.device) -> list[torch.Tensor]:
    """Return the full gradients and drop them from the parameters, so that the caller decides how long they live.

    A parameter without a gradient gets zeros on ``device``: it took part in the backward on other ranks.

    Raises:
        NotImplementedError: one is sparse.
    """
    taken = []
    for param in params:
        full = param.full
        grad = None if full is None else full.grad
        if full is None or grad is None:
            grad = _zeros(param.spec.layout, param.compute_dtype, device)
        else:
            full.grad = None
            if type(grad) is not torch.Tensor:
                grad = arrived(param.spec.unwrap_gradient(arrived(grad)))
            if grad.requires_grad:  # create_graph: the reduction is not differentiated
                grad = grad.detach()
            if grad.layout is not torch.strided:
                raise NotImplementedError(
                    f"{param.name}: its gradient is {grad.layout}, expected a dense one; use sparse=False in the module"
                )
        taken.append(grad)
    return taken


def _zeros(layout: ShardLayout, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(layout.shape, dtype=dtype, device=device).as_strided(layout.shape, layout.stride)


def accumulate_gradients(params: list[FSDPParam], pieces: list[torch.Tensor]) -> None:
    """Add this rank's ``pieces`` of reduced gradients to the shards' ``.grad``, and run the hooks of each.

    The end of stage 8 of the life of a parameter.
    """
    shards = [param.sharded for param in params]
    hooked = have_gradient_hooks(shards)
    for param, grad in zip(params, ShardedSpec.shards_as([param.spec for param in params], pieces)):
        sharded = param.sharded
        assert sharded is not None
        hooks = gradient_hooks(sharded) if hooked else None
        for hook in hooks[0] if hooks else ():
            grad = gradient_after(hook, grad, param.name, param.spec)
        before = sharded.grad
        if before is None:
            try:
                sharded.grad = grad
            except RuntimeError as error:
                raise _about_grad_dtype(param, grad) or error from error
        else:
            _check_placed_alike(params, sharded, before, grad)
            local_tensor(before).add_(local_tensor(grad))
        for hook in hooks[1] if hooks else ():
            call_hook(hook, sharded, param.name, param.spec)


def _about_grad_dtype(param: FSDPParam, grad: torch.Tensor) -> RuntimeError | None:
    """Return an error for a ``grad_dtype`` that forbids the gradient: nobody looks for a new one at each step."""
    wanted = None if param.sharded is None else param.sharded.grad_dtype
    if wanted in (None, grad.dtype):
        return None
    return RuntimeError(
        f"{param.name}: its grad_dtype was set to {wanted} after the first forward; got a gradient of {grad.dtype}, "
        "which was reduced for the dtype before. Set grad_dtype before the first forward"
    )


def _check_placed_alike(params: list[FSDPParam], sharded: torch.Tensor, before: torch.Tensor, grad: DTensor) -> None:
    """Raise RuntimeError if somebody has made ``.grad`` a plain tensor, or placed it unlike its parameter."""
    if isinstance(before, DTensor) and before.placements == grad.placements:
        return
    name = next(param.name for param in params if param.sharded is sharded)
    got = f"a DTensor placed as {before.placements}" if isinstance(before, DTensor) else "a plain tensor"
    raise RuntimeError(
        f"{name}: a backward adds to its .grad; got {got}, expected a DTensor placed as {grad.placements} as the "
        "parameter is. Make it one again, or call zero_grad() before backward"
    )


def proxy(param: FSDPParam, value: torch.Tensor, grad: torch.Tensor | None) -> nn.Parameter:
    """Return a plain parameter of ``value`` itself with the attributes of ``param``, for modules to show it."""
    shown = nn.Parameter(value, requires_grad=param.requires_grad)
    shown.__dict__.update(param.attributes, _fsdp2_managed=True)
    lend_gradient(shown, grad)
    return shown


class FSDPParam:
    """One parameter of a group.

    ``sharded`` is the DTensor the optimizer sees, its local tensor a view into the group's shard buffer. ``full`` is
    the autograd leaf that forward uses, a view into the group's full buffer; both live as long as the buffers.
    """

    def __init__(
        self,
        original: nn.Parameter,
        spec: ShardedSpec,
        sites: list[Site],
        name: str,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.name = name  # in its unit; in the root from the first forward on
        self.group: Any = None  # its FSDPParamGroup, which sets it; typed Any because group.py imports this file
        self.spec = spec
        self.policy = policy
        self.set_sites(sites)
        self.name_in_unit = name  # by which formats are chosen
        self.formats = Formats()
        self.attributes = python_attributes(original)
        self.hooks = gradient_hook_tables(original)
        self.sharded: nn.Parameter | None = None
        # The parameter's own shard, if modules show another, perhaps for one call. Weak: whoever ends that call, to put
        # it back, keeps it alive.
        self._before: weakref.ref[nn.Parameter] | None = None
        self.values_taken = 0  # how often the shard has taken the value of a parameter that replaced it
        self.full: nn.Parameter | None = None
        self._full_place: torch.Tensor | None = None  # where gathers write it: a view of the full buffer
        self.piece: nn.Parameter | None = None
        self.requires_grad = original.requires_grad
        # What Tensor.grad_dtype was set to: () if it was not, (None,) for any dtype, else (the dtype,).
        self.grad_dtype = explicit_grad_dtype(original)
        # Others' objects that live as long as the parameter. A hook could not keep them: if they refer to the tensor,
        # the garbage collector would not free either.
        self.companions: set[object] = set()

    def __repr__(self) -> str:
        layout = self.spec.layout
        return f"FSDPParam({self.name}, {tuple(layout.shape)}, dim={layout.dim}, ranks={layout.ranks})"

    def __deepcopy__(self, memo: dict[int, object]) -> FSDPParam:
        """Refuse: a sharded module copies its parameters itself, together with the units that they belong to."""
        raise NotImplementedError(
            f"{self.name}: a part of a sharded unit cannot be deep-copied; copy the module that fully_shard was called "
            "on, or one that contains it"
        )

    def tensor(self, which: Shown) -> nn.Parameter | None:
        """Return the shard, the full parameter or the piece of a subgroup."""
        return self.sharded if which == "shards" else self.full if which == "full" else self.piece

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is its shard, its full parameter or its piece."""
        return tensor is self.sharded or tensor is self.full or tensor is self.piece

    # ---- the shard ----

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the parameter is kept, optimized and saved in."""
        assert self.sharded is not None
        return self.sharded.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the full parameter, as forward computes with it."""
        return compute_dtype(self.dtype, self.policy)

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype in which its gradients are accumulated and summed; None: the one that they have."""
        return reduce_dtype(self.dtype, self.policy, self.grad_dtype)

    @property
    def out_dtype(self) -> torch.dtype | None:
        """The dtype of its reduced gradient; None: the one in which it was reduced."""
        return self.grad_dtype[0] if self.grad_dtype else self.dtype

    @property
    def widens(self) -> bool:
        """True if gradients may stay in the dtype of computation until they are summed in a wider one."""
        dtype, computed = self.reduce_dtype, self.compute_dtype
        if dtype is None or not computed.is_floating_point or self.spec.sums_elsewhere:
            return False
        return dtype.itemsize > computed.itemsize

    @property
    def local(self) -> torch.Tensor:
        """This rank's piece as a plain tensor."""
        return local_tensor(self.sharded)

    def is_stored_as(self, value: DTensor) -> bool:
        """Return whether ``value`` is another DTensor on the memory of this shard, which is a plain tensor."""
        local, other = self.local, local_tensor(value)
        if other is local or type(local) is not torch.Tensor or type(other) is not torch.Tensor:
            return False
        return storages_of([local]) == storages_of([other]) and local.shape == other.shape

    @property
    def data(self) -> torch.Tensor | None:
        """The plain tensor with the elements of this rank's piece.

        A tensor subclass with an all-gather extension keeps them in an inner tensor. None if it does not have exactly
        one inner tensor, of the same shape and dtype, or does not say which tensors it has.
        """
        local = self.local
        if not hasattr(local, "__tensor_flatten__"):
            return local if _has_memory(local) else None
        inside = [getattr(local, name) for name in local.__tensor_flatten__()[0]]
        if len(inside) == 1 and (inside[0].shape, inside[0].dtype) == (local.shape, local.dtype):
            return inside[0]
        return None

    def choose_formats(self, formats_of: FormatsOf, shown: nn.Parameter | None) -> Formats:
        """Return the formats that ``formats_of`` chooses; it is called with the parameter's name and ``shown``."""
        return choose_formats(formats_of, self.name_in_unit, shown, self.spec.layout)

    def write(self, value: torch.Tensor, *, full: bool) -> None:
        """Write this rank's piece of a whole plain ``value`` to the shard, and with ``full`` to the full parameter."""
        data, value = self.data, self.spec.of_plain(value)
        assert data is not None
        data.copy_(self.spec.cut(value))
        if full and self.full is not None:
            plain = local_tensor(self.full) if self.spec.full is not None else self.full
            plain.data.copy_(value)  # .data has another version counter: graphs that saved the parameter stay usable

    def reclaim_full(self) -> None:
        """Point the full parameter at the memory that gathers write to, if somebody assigned its ``.data``."""
        full, place = self.full, self._full_place
        if full is None or place is None or self.spec.full is not None or storages_of([full]) == storages_of([place]):
            return
        full.data = place

    @property
    def has_statistics(self) -> bool:
        """True if it belongs to a batch norm with running statistics."""
        return statistics_dtype(self.module) is not None

    def follow_statistics(self) -> bool:
        """Compute in the dtype that a batch norm's running statistics have now; return whether it has changed."""
        dtype = statistics_dtype(self.module)
        if dtype is None or self.policy.param_dtype in (None, dtype):
            return False
        self.policy = replace(self.policy, param_dtype=dtype)
        return True

    def set_sites(self, sites: list[Site]) -> None:
        """Show the parameter in these places."""
        self.sites = sites
        self.direct_sites = not any(overrides_setattr(site.module) for site in sites)

    @property
    def module(self) -> nn.Module:
        """The first module that shows the parameter."""
        return self.sites[0].module

    def set_shard(self, local: torch.Tensor) -> None:
        """Make ``local`` the shard's local tensor; an existing DTensor keeps its identity, hooks and attributes."""
        if self.sharded is not None:
            set_local_tensor(self.sharded, local)
            return
        sharded = parameter_of(self.spec.shard(local), requires_grad=self.requires_grad)
        sharded.__dict__.update(self.attributes, _fsdp2_managed=True)
        share_gradient_hooks(sharded, self.hooks)
        self.sharded = sharded
        self.restore_grad_dtype()

    def release(self) -> None:
        """Leave the shard to whoever has it, as a parameter that nobody manages."""
        assert self.sharded is not None
        self.sharded.__dict__.pop("_fsdp2_managed", None)  # a cast may have taken it

    @property
    def own(self) -> nn.Parameter | None:
        """The parameter's own shard: ``sharded``, unless the modules show another one for a single call."""
        before = None if self._before is None else self._before()
        return self.sharded if before is None else before

    def is_one_of(self, shard_ids: Container[int]) -> bool:
        """Return whether ``shard_ids`` has the id of its shard."""
        return id(self.sharded) in shard_ids or id(self.own) in shard_ids

    def adopt_shard(self, sharded: nn.Parameter, *, lasting: bool = False) -> None:
        """Take ``sharded``, which the module shows, as the shard: ``_apply``, assignment or loading put it there.

        The old shard gets other memory, because its place in the flat buffer is now that of the new one. It must keep
        its value: ``functional_call`` registers other values for one forward and then puts the old shard back. Unless
        the new one is known to be ``lasting``, the old one is remembered as long as somebody keeps it alive.
        """
        own = self.own
        if self.sharded is not None and self.sharded is not sharded:
            set_local_tensor(self.sharded, copy_of(self.local))
        self._before = None if lasting or own is None or own is sharded else weakref.ref(own)
        for name, value in self.attributes.items():
            sharded.__dict__.setdefault(name, value)
        sharded.__dict__["_fsdp2_managed"] = True
        self.sharded = sharded
        self.follow_grad_dtype()
        self.requires_grad = sharded.requires_grad
        for other in (self.full, self.piece):
            if other is not None:
                other.requires_grad_(self.requires_grad)
        self.spec = replace(self.spec, dtensor=dtensor_spec(sharded))

    @torch.no_grad()
    def take_value(self, whole: nn.Parameter, home: torch.device) -> None:
        """Take the value, the attributes and the requires_grad of ``whole`` for the shard, and drop the gradient.

        A shard on the meta device cannot be written to: a new one takes its place, with a local tensor on ``home``.
        """
        sharded = self.sharded
        assert sharded is not None
        self.values_taken += 1
        if self.local.is_meta:
            hooks = gradient_hook_tables(sharded)
            local = self.spec.cut(whole).detach().to(home, copy=True)
            sharded = parameter_of(self.spec.shard(local), requires_grad=whole.requires_grad)
            share_gradient_hooks(sharded, hooks)
            self.adopt_shard(sharded, lasting=True)
        else:
            self.local.copy_(self.spec.cut(whole))
        sharded.grad = None
        sharded.requires_grad_(whole.requires_grad)
        sharded.__dict__.update(python_attributes(whole))
        self.grad_dtype = explicit_grad_dtype(whole) or self.grad_dtype
        self.restore_grad_dtype()

    def follow_grad_dtype(self) -> bool:
        """Follow a gradient dtype that was set on the shard, or restore a lost one; return whether it changed."""
        assert self.sharded is not None
        before, self.grad_dtype = self.grad_dtype, explicit_grad_dtype(self.sharded) or self.grad_dtype
        self.restore_grad_dtype()
        return self.grad_dtype != before

    def restore_grad_dtype(self) -> None:
        """Set on the shard the gradient dtype of the original, which is lost when it becomes a shard or moves."""
        if self.grad_dtype and self.sharded is not None and explicit_grad_dtype(self.sharded) != self.grad_dtype:
            self.sharded.grad_dtype = self.grad_dtype[0]

    def set_full(self, tensor: torch.Tensor) -> None:
        """Use ``tensor`` (this parameter's place in the full buffer, 1D) as the full parameter from now on."""
        unreduced = None if self.full is None else self.full.grad
        layout = self.spec.layout
        full = tensor.as_strided(layout.shape, layout.stride, tensor.storage_offset())  # NF4 knows no default offset
        self._full_place, full = full, self.spec.wrap_full(full)
        self.full = nn.Parameter(full, requires_grad=self.requires_grad)
        self.full.__dict__.update(self.attributes, _fsdp2_managed=True, _fsdp2_temporary=True)
        if unreduced is not None:  # gradients of backwards that did not reduce move to the new tensor, in any dtype
            self.full.grad_dtype, self.full.grad = None, unreduced

    # ---- what the module shows ----

    def sync_requires_grad(self) -> bool:
        """Copy a change of requires_grad to the other tensors of the parameter; return whether there was one."""
        before = self.requires_grad
        shown = (self.sharded, self.full, self.piece)
        if all(tensor is None or tensor.requires_grad == before for tensor in shown):
            return False
        self.requires_grad = not before
        for tensor in shown:
            if tensor is not None:
                tensor.requires_grad_(self.requires_grad)
        return True

    # ---- gradients ----

    def expect_gradients(self, *, reduced: bool, rounded: bool) -> None:
        """Set the dtype in which autograd makes gradients, which are ``reduced`` after this backward, or accumulate.

        Gradients that are reduced need no cast, because the sum casts them. If they are sent as computed, all ranks
        must have them in one dtype, so they are ``rounded`` to the dtype of computation. Gradients that accumulate do
        so in the reduce dtype.
        """
        full, dtype = self.full, self.reduce_dtype
        if full is None:
            return
        if reduced and self.widens:
            dtype = self.compute_dtype if rounded and not self.grad_dtype else None
        grad = full.grad
        if grad is not None and dtype is not None:
            if grad.dtype != dtype and not reduced:
                full.grad, grad = None, grad.detach().to(dtype)
            dtype = None  # autograd adds to it in place; otherwise it would first make a copy in that dtype
        if full.grad_dtype != dtype:
            full.grad_dtype = dtype
        if grad is not full.grad:
            full.grad = grad

    def drop_unreduced_gradient(self) -> None:
        """Drop the gradient that was still to be reduced."""
        if self.full is not None:
            self.full.grad = None

    def drop_gradient(self, *, to_zeros: bool = False) -> None:
        """Drop the reduced gradient, or make it zeros, and the one that was still to be reduced."""
        for tensor in (self.sharded, self.full):
            if tensor is not None:
                zeros = to_zeros and tensor is self.sharded and tensor.grad is not None
                tensor.grad = tensor.grad.detach().zero_() if zeros else None  # type: ignore[union-attr]  # there is one

    def withhold_gradient(self) -> torch.Tensor | None:
        """Take a reduced gradient with an explicit dtype off the shard, so that casts of the shard spare it."""
        self.follow_grad_dtype()
        assert self.sharded is not None
        grad = self.sharded.grad
        if self.grad_dtype in ((), (None,)) or grad is None:  # (None,) allows any dtype, so a cast does no harm
            return None
        self.sharded.grad = None
        return grad

    def return_gradient(self, grad: torch.Tensor) -> None:
        """Put a withheld gradient back, on the device where the shard is now."""
        assert self.sharded is not None
        self.restore_grad_dtype()
        if grad.device != self.sharded.device:
            grad = grad.detach().to(self.sharded.device).requires_grad_(grad.requires_grad)
        self.sharded.grad = grad

    @property
    def gradient(self) -> torch.Tensor | None:
        """This rank's piece of the reduced gradient."""
        grad = None if self.sharded is None else self.sharded.grad
        if grad is None:
            return None
        if isinstance(grad, DTensor) and grad.placements != self.spec.dtensor.placements:
            grad = grad.redistribute(placements=self.spec.dtensor.placements)
        return local_tensor(grad)

    def set_gradient(self, value: torch.Tensor | None) -> None:
        """Make this rank's piece of ``value``, a plain full tensor, the reduced gradient; None for no gradient."""
        sharded, spec = self.sharded, self.spec
        assert sharded is not None
        if value is None:
            sharded.grad = None
            return
        cut = spec.cut(spec.of_plain(value.detach()))
        if not isinstance(sharded.grad, DTensor) or sharded.grad.placements != spec.dtensor.placements:
            dtype = self.out_dtype or cut.dtype
            own = torch.empty_strided(spec.shard_shape, spec.shard_stride, dtype=dtype, device=self.local.device)
            sharded.grad = spec.shard_as(own)
        local_tensor(sharded.grad).copy_(cut)
