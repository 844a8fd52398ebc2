"""Linear layers whose weights are sent as float8, one byte per element, and computed with in a wider dtype.

    torchrun --nproc-per-node 2 examples/float8_linear.py

trains a small model twice, with bfloat16 and with float8 gathers. For each it prints the bytes of parameters that one
rank sends per step, and the loss. The optimizer keeps float32 shards both times; only the gathers differ.

``fully_shard`` calls two methods of the shard's local tensor: ``fsdp_pre_all_gather`` returns the tensors to send, and
``fsdp_post_all_gather`` makes the full parameter from the gathered tensors.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2 import fully_shard

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
aten = torch.ops.aten

STILL_FLOAT8 = {
    aten.detach.default,
    aten.clone.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten.new_zeros.default,
    aten.empty_like.default,
    aten._to_copy.default,
}
"""Operators whose results stay Float8Weights: those with which ``fully_shard`` and ``Module.to`` cut and copy."""

Scaled = tuple[Tensor, Tensor]


def to_float8(weight: Tensor, largest: Tensor) -> Scaled:
    """Return ``weight`` as float8 and the scale to multiply it with; ``largest`` becomes the largest float8 number."""
    scale = (largest / LARGEST).clamp(min=1e-12).float()
    return (weight / scale).clamp(-LARGEST, LARGEST).to(FLOAT8), scale


class Float8Weight(Tensor):
    """A shard in full precision that is sent as float8.

    Each rank scales its own piece by the largest magnitude in it and sends the scale as a second input, so the gather
    needs no communication before it.
    """

    _tensor: Tensor

    @staticmethod
    def __new__(cls, tensor: Tensor) -> Float8Weight:
        """Return a tensor with the shape, dtype and device of ``tensor``; ``__init__`` stores ``tensor`` in it."""
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tensor.size(), strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute with the tensor inside. Operators that cut or copy return Float8Weights."""
        inside = pytree.tree_map_only(cls, lambda weight: weight._tensor, (args, kwargs or {}))
        result = func(*inside[0], **inside[1])
        if func in STILL_FLOAT8:
            return pytree.tree_map_only(Tensor, cls, result)
        return args[0] if func._schema.name.endswith("_") else result  # an in-place operator returns its argument

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_tensor"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], metadata: None, size: Any, stride: Any) -> Float8Weight:
        return Float8Weight(inner["_tensor"])

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[Scaled, tuple[int, int]]:
        """Return what this rank sends: its piece as float8, padded to the first rank's size, and the scale."""
        piece, rows = self._tensor, -(-outer_size[0] // mesh.size())
        padded = torch.cat([piece, piece.new_zeros(rows - piece.shape[0], *piece.shape[1:])])
        values, scale = to_float8(padded, padded.abs().max())
        return (values, scale.view(1)), (mesh.size(), outer_size[0])

    def fsdp_post_all_gather(
        self, gathered: Scaled, metadata: tuple[int, int], param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Make the full weight in the dtype of computation.

        The first gather returns the weight, and the tensors whose memory is freed with it. Later gathers write into
        that weight. They keep its version counter, because autograd may have saved the weight.
        """
        values, scales = gathered
        ranks, rows = metadata
        pieces = values.to(param_dtype).view(ranks, -1, *values.shape[1:])
        weight = (pieces * scales.to(param_dtype).view(ranks, *[1] * values.ndim)).flatten(0, 1)[:rows]
        if out is None:
            weight = weight.contiguous()
            return weight, (weight,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(weight)
        return None


def use_float8(module: nn.Module) -> None:
    """Send the weights of all Linear layers of ``module`` as float8. Call this before ``fully_shard``."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(Float8Weight(layer.weight.detach()))


class SentBytes:
    """Counts the bytes that this process sends in all-gathers inside a ``with`` block."""

    def __init__(self) -> None:
        self.total = 0

    def __enter__(self) -> SentBytes:
        counter = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func.namespace == "c10d" and "allgather" in func.__name__:
                    counter.total += sum(tensor.nbytes for tensor in pytree.tree_leaves(args[1]) if tensor is not None)
                return func(*args, **(kwargs or {}))

        self._mode = Mode()
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._mode.__exit__(*exception)


def train(kind: str, steps: int, width: int, layers: int, compute: torch.dtype) -> tuple[float, list[float]]:
    """Return the bytes that this rank's gathers send per step, and the loss of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
    if kind == "float8":
        use_float8(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (*model, model):
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(compute, torch.float32, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    with SentBytes() as sent:
        for _ in range(steps):
            x = torch.randn(64, width, generator=data)
            loss = (model(x) - x.flip(1).sin()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(mean := loss.detach(), dist.ReduceOp.AVG)
            losses.append(mean.item())
    return sent.total / steps, losses


def main() -> None:
    """Read the options, train twice and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=30, help="training steps (30)")
    parser.add_argument("--width", type=int, default=256, help="rows and columns of each weight (256)")
    parser.add_argument("--layers", type=int, default=3, help="linear layers (3)")
    parser.add_argument("--compute", choices=("bfloat16", "float32"), default="bfloat16", help="dtype (bfloat16)")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for kind in ("bfloat16", "float8"):
        compute = torch.bfloat16 if kind == "bfloat16" else getattr(torch, options.compute)
        nbytes, losses = train(kind, options.steps, options.width, options.layers, compute)
        if dist.get_rank() == 0:
            print(f"{kind:>8}: {nbytes:9.0f} bytes sent per step, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    dist.barrier()  # no rank may end while another still communicates
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
