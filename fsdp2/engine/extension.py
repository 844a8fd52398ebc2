"""All-gather extensions: tensor classes that define what is sent of them, and how the full tensor is made of that.

If a shard's local tensor has ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` (as torchao's float8 weights have),
the tensors that the first one returns are sent. The contract is torch's: two accepted signatures, ``out=`` from the
second gather on, and results that may alias the gathered tensors, whose storages are freed and allocated again with the
parameter.

On one rank nothing has to be sent. Then ``fsdp_get_unsharded_view`` (of torch's main branch) may return the tensor to
compute with, a view of the shard's memory; so may the other two functions, if the first one returns no inputs. A tensor
that has only this function is sent like a plain tensor if there are more ranks, if the parameter trains, or if the
function returns None.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.comm.host_work import waits_of_others
from fsdp2.comm.streams import ComputeLane, Lane
from fsdp2.engine.param import FSDPParam

_RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
_VIEW = "fsdp_get_unsharded_view"
_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"

__all__ = ["GatherExtension", "GroupExtensions", "has_extension", "refuse_portions", "sends_itself"]


def has_extension(local: torch.Tensor) -> bool:
    """Return whether ``local`` has an all-gather extension.

    Raises:
        AssertionError: it defines only one of the two functions, or none and the third (torch's contract).
    """
    pre, post = hasattr(local, _PRE), hasattr(local, _POST)
    if pre != post:
        raise AssertionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all-gather extensions: "
            f"{type(local).__name__} defines {'the first' if pre else 'the second'} only"
        )
    if not pre and hasattr(local, _RELEASE):
        raise AssertionError(
            f"{_RELEASE} requires fsdp_pre_all_gather and fsdp_post_all_gather to be defined: {type(local).__name__} "
            "defines neither"
        )
    return pre or hasattr(local, _VIEW)


def sends_itself(local: torch.Tensor) -> bool:
    """Return whether ``local`` defines what is sent of it; otherwise it is sent like a plain tensor."""
    return hasattr(local, _PRE)


def refuse_portions(name: str, tensor: torch.Tensor) -> NoReturn:
    """Raise NotImplementedError: ``tensor``, the parameter ``name`` or its shard, cannot be sharded over two axes."""
    raise NotImplementedError(
        f"{name}: got a {type(tensor).__name__} with an all-gather extension, expected a plain tensor, because only "
        "these can be sharded over replicas. Pass shard_over_replicas=False for the unit"
    )


class GatherExtension:
    """The extension of one parameter, between its gathers."""

    def __init__(self, param: FSDPParam, mesh: DeviceMesh, device: torch.device) -> None:
        self.param = param
        self.mesh = mesh
        self.device = device
        self.outputs: list[torch.Tensor] = []
        self._inner: list[torch.Tensor] = []
        self._input_sizes: list[torch.Size] = []
        self._metadata: Any = None
        self._view: torch.Tensor | None = None  # the full parameter in the shard's memory, between encode and decode
        # What this extension has made the full parameter of: the gathered tensors, or the local tensor.
        self._made_of: list[torch.Tensor] | torch.Tensor | None = None
        self.releases = getattr(param.local, _RELEASE, bool)()
        if not isinstance(self.releases, bool):
            raise AssertionError(f"{param.name}: {_RELEASE} must return a bool, got {type(self.releases)}")

    @contextlib.contextmanager
    def _calling(self, function: str) -> Iterator[None]:
        """Add the parameter's name to an error of the extension's ``function``, which the ``with`` block calls.

        The function may communicate. If that fails because another rank has ended, the error says so.
        """
        with waits_of_others():
            try:
                yield
            except Exception as error:
                if error.args and isinstance(error.args[0], str) and self.param.name not in error.args[0]:
                    local = self.param.local
                    text = (
                        f"{self.param.name}: {function} of {type(local).__name__} raised on this rank, whose piece has "
                        f"the shape {tuple(local.shape)}: {error.args[0]}"
                    )
                    if not local.numel():
                        text += "; it has to support pieces without elements. If it cannot, pass ignored_params"
                    error.args = (text, *error.args[1:])
                raise

    def encode(self) -> list[torch.Tensor]:
        """Return this rank's inputs of the gather, 1D each and of the same size on every rank."""
        local = self.param.local
        # What was gathered once is always gathered, also when it is frozen now: autograd may need it once more.
        self._view = None if self._made_of is self.outputs else self._own_view(local)
        if self._view is not None:
            self._input_sizes = []
            return []
        if local.device != self.device:
            local = local.to(self.device, non_blocking=True)
        layout = self.param.spec.layout
        if not sends_itself(local):
            self._input_sizes = [torch.Size((layout.slot_numel,))]
            return [self._slot(local)]
        arguments = len(inspect.signature(local.fsdp_pre_all_gather).parameters)  # type: ignore[attr-defined]  # it has one
        if arguments not in (1, 5):
            raise AssertionError(
                f"{self.param.name}: Invalid fsdp_pre_all_gather with {arguments} parameters\nExpects "
                "fsdp_pre_all_gather(self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], "
                "module: nn.Module, mp_policy: MixedPrecisionPolicy)"
            )
        outer = (torch.Size(layout.shape), layout.stride, self.param.module, self.param.policy)
        with self._calling(_PRE):
            inputs, self._metadata = local.fsdp_pre_all_gather(self.mesh, *(outer if arguments == 5 else ()))  # type: ignore[attr-defined]  # it has one
        padded = [self._pad(tensor) for tensor in inputs]
        self._input_sizes = [tensor.size() for tensor in padded]
        return [tensor.contiguous().view(-1) for tensor in padded]

    def _own_view(self, local: Any) -> torch.Tensor | None:
        """Return the view of ``local`` to compute with, if this rank alone holds it; None if there is none.

        Raises:
            ValueError: it has another shape, dtype or device than the full parameter.
        """
        make, param = getattr(local, _VIEW, None), self.param
        if make is None or self.mesh.size() > 1 or param.requires_grad:
            return None
        with self._calling(_VIEW):
            view = make(self.mesh, param.module, param.policy)
        if view is None:
            return None
        expected = (torch.Size(param.spec.layout.shape), param.compute_dtype, self.device)
        if (view.shape, view.dtype, view.device) != expected:
            raise ValueError(
                f"{param.name}: {_VIEW} must keep the parameter's local shape, dtype, and device: expected {expected}, "
                f"got {(view.shape, view.dtype, view.device)}"
            )
        return view  # type: ignore[no-any-return]  # a tensor

    def _slot(self, local: torch.Tensor) -> torch.Tensor:
        """Return the elements of ``local`` in a slot, as a plain tensor is sent."""
        spec = self.param.spec
        row = torch.zeros(spec.layout.slot_numel, dtype=self.param.compute_dtype, device=self.device)
        row.as_strided(spec.shard_shape, spec.shard_stride).copy_(local)
        return row

    def _join_slots(self) -> torch.Tensor:
        """Return the memory of the full parameter, made of the slots of all ranks."""
        layout, output = self.param.spec.layout, self.outputs[0].data
        if layout.rank_major:
            return output
        if not self._inner:
            self._inner = [output.new_empty(layout.numel)]
        full = self._inner[0].data.as_strided(layout.shape, layout.stride)
        for rank, slot in enumerate(output.view(layout.ranks, -1)):
            piece = slot.as_strided(layout.shard_shape(rank), layout.shard_stride(rank), slot.storage_offset())
            full.narrow(layout.dim or 0, *layout.bounds(rank)).copy_(piece)
        return self._inner[0]

    def _pad(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pad an input with the shape of a shorter piece to that of the first rank: all ranks must send one size."""
        spec = self.param.spec
        slot = torch.Size(spec.layout.shard_shape(0))
        if tensor.size() != torch.Size(spec.shard_shape) or tensor.size() == slot:
            return tensor
        padded = tensor.new_zeros(slot)
        dim = spec.layout.dim
        assert dim is not None
        padded.narrow(dim, 0, tensor.size(dim)).copy_(tensor)
        return padded

    def allocate(self, inputs: list[torch.Tensor], ranks: int) -> None:
        """Make room for the gathered inputs; the tensor objects stay the same from gather to gather."""
        if len(self.outputs) != len(inputs):
            with torch.inference_mode(False):
                self.outputs = [torch.empty(ranks * t.numel(), dtype=t.dtype, device=self.device) for t in inputs]
        for tensor in self.outputs:
            _allocate(tensor)

    def fill(self, rows: list[torch.Tensor]) -> None:
        """Take the gathered inputs: ``rows[i]`` is (ranks, numel) of input i."""
        layout = self.param.spec.layout
        for output, row, size in zip(self.outputs, rows, self._input_sizes):
            target = output.data  # .data has another version counter: autograd must not see the write
            if layout.rank_major or size != torch.Size(layout.shard_shape(0)):
                target.view(row.shape).copy_(row)
            else:
                assert layout.dim is not None
                whole = list(size)
                whole[layout.dim] *= row.shape[0]
                torch.cat(row.view(row.shape[0], *size).unbind(0), dim=layout.dim, out=target.view(whole))

    def decode(self) -> None:
        """Make the full parameter of the gathered inputs, or write them to it if it was made before."""
        param = self.param
        local: Any = param.local
        gathered = tuple(output.view(-1, *size[1:]) for output, size in zip(self.outputs, self._input_sizes))
        dtype = param.compute_dtype
        if self._made_of is not self.outputs and self._made_of is not local:  # none yet, or of a replaced shard
            self._inner = []
            full = self._view
            if full is None and not sends_itself(local):
                full = self._join_slots()
            elif full is None:
                with self._calling(_POST):
                    full, inner = local.fsdp_post_all_gather(gathered, self._metadata, dtype)
                self._inner = list(inner)
            with torch.no_grad():
                param.set_full(full)
            self._made_of = self.outputs if self._input_sizes else local
        elif self._view is None:
            for tensor in self._inner:
                _allocate(tensor)
            if not sends_itself(local):
                self._join_slots()
            else:
                with self._calling(_POST):
                    local.fsdp_post_all_gather(gathered, self._metadata, dtype, out=param.full)
        self._metadata = self._view = None

    def release(self) -> None:
        """Give back the memory of the gathered inputs, for extensions whose full parameter does not alias it."""
        _free(self.outputs)

    def free(self) -> None:
        """Give back the memory of the full parameter."""
        _free([*self.outputs, *self._inner])


_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
"""Every dtype, in an order that is the same on all ranks."""


class GroupExtensions:
    """The extensions of one group's parameters. Their tensors are sent with the group's packed parameters."""

    def __init__(self, extensions: list[GatherExtension]) -> None:
        self._extensions = extensions
        self._counts: list[int] = []
        # For each tensor of the last ``encode``: its number of elements, and the index of its dtype in ``_DTYPES``.
        self.sent: tuple[int, ...] | None = None

    @property
    def params(self) -> set[FSDPParam]:
        """The parameters that have an extension."""
        return {extension.param for extension in self._extensions}

    def describe(self, sent: Sequence[int]) -> str:
        """Say which parameter sends how much of which dtype; ``sent`` is this rank's or another's."""
        tensors = [f"{numel} elements of {_DTYPES[dtype]}" for numel, dtype in zip(sent[::2], sent[1::2])]
        parts = []
        for extension, count in zip(self._extensions, self._counts):
            parts.append(f"{extension.param.name} sends {' + '.join(tensors[:count])}")
            tensors = tensors[count:]
        return ", ".join(parts)

    def encode(self, ranks: int, lane: Lane) -> list[torch.Tensor]:
        """Return the tensors that this rank sends, and make room for those of all ``ranks``."""
        sent: list[torch.Tensor] = []
        self._counts = []
        with torch.inference_mode(False), torch.no_grad(), lane.after():
            for extension in self._extensions:
                inputs = extension.encode()
                extension.allocate(inputs, ranks)
                self._counts.append(len(inputs))
                sent += inputs
        self.sent = tuple(number for tensor in sent for number in (tensor.numel(), _DTYPES.index(tensor.dtype)))
        return sent

    def decode(self, rows: list[torch.Tensor], lane: Lane, compute: ComputeLane) -> None:
        """Make full parameters of what was gathered: a tensor of (ranks, numel) for each that was sent.

        Inputs are written on the gather's ``lane``, so compute waits for it before the extension reads them there.
        """
        with torch.no_grad(), lane.after() as done:
            for extension, count in zip(self._extensions, self._counts):
                extension.fill(rows[:count])
                rows = rows[count:]
        compute.wait(done.event)
        # Not in inference mode: training will compute with tensors that an evaluation makes. Without gradients: an
        # extension may write to the full parameter, which is a leaf.
        with torch.inference_mode(False), torch.no_grad():
            for extension in self._extensions:
                extension.decode()
        # The memory came from the gather's lane, which must not use it again before compute has decoded.
        released = [extension for extension in self._extensions if extension.releases]
        if released:
            with lane.after(compute):
                for extension in released:
                    extension.release()

    def free(self) -> None:
        """Give back the memory of the full parameters."""
        for extension in self._extensions:
            extension.free()


def _free(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.size() != 0:
            storage.resize_(0)


def _allocate(tensor: torch.Tensor) -> None:
    nbytes = tensor.numel() * tensor.itemsize
    storage = tensor.untyped_storage()
    if storage.size() != nbytes:
        storage.resize_(nbytes)
