"""Which features a test combines: decorators that ``docs/make_compositions.py`` reads to draw its matrix.

    @composes("tensor parallel", "hybrid sharding")
    @refuses("named dimensions", "reshard to int", by="both", reason="...")

The script reads the source, so the arguments are literals. A test whose cases combine different features has several
``composes`` lines, one for each combination. Sharding itself goes without saying.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

FEATURES = {
    "hybrid sharding": "a mesh of a replicate and a shard axis",
    "over replicas": "`shard_over_replicas` on such a mesh",
    "tensor parallel": "`parallelize_module` before `fully_shard`",
    "sequence parallel": "norms and residuals sharded along the sequence",
    "loss parallel": "logits sharded along the vocabulary",
    "named dimensions": "`dp_mesh_dims` on the mesh of DTensor parameters",
    "uneven": "sizes that the number of ranks does not divide, also empty shards",
    "shard dim": "`Shard(d)` with d > 0, from `shard_placement_fn`",
    "experts": "experts on a mesh of their own",
    "several meshes": "parameters of one call on several meshes",
    "divide factor": "`set_gradient_divide_factor`",
    "deterministic reduction": "`set_deterministic_reduction`",
    "reshard to int": "`reshard_after_forward=<int>`",
    "mixed precision": "`MixedPrecisionPolicy`",
    "CPU offload": "`CPUOffloadPolicy`",
    "accumulation": "several backwards before one reduction",
    "recomputation": "activation checkpointing, not reentrant",
    "reentrant recomputation": "activation checkpointing, reentrant",
    "selective recomputation": "activation checkpointing with a policy that selects the saved results",
    "activations on the CPU": "saved activations are offloaded",
    "used twice": "one unit runs several times in a forward",
    "context parallel": "one mesh dimension over the ranks of both, `mesh._flatten`",
    "several roots": "models that are trained together, with `share_comm_ctx`",
    "pipeline": "torch.distributed.pipelining",
    "zero bubble": "a schedule that splits backward in two",
    "compile": "torch.compile of blocks",
    "SGD": "`torch.optim.SGD`",
    "Adam": "`torch.optim.Adam(W)`, for-loop, foreach and fused",
    "Muon": "`torch.optim.Muon`",
    "sent in backward": "`use_full_params(overlap_backward=True)`",
    "kept by owners": "`use_full_params(keep_full_params=True)`",
    "optimizer in backward": "steps in post-accumulate hooks",
    "state on the host": "`offload_optimizer_state`, after `use_local_shards` or `use_full_params`",
    "GradScaler": "`torch.amp.GradScaler`",
    "LR schedule": "`torch.optim.lr_scheduler`",
    "averaged model": "`swa_utils.AveragedModel`",
    "clipping": "the norm of all gradients",
    "saved elsewhere": "a DCP checkpoint of another mesh, size or shard dimension",
    "async save": "`dcp.async_save`",
    "weight sync": "`WeightSender` to an inference engine, of all weights and of what changed",
}
"""The features by name and what is meant, in the order of the matrix."""

OUT_OF_REACH = (
    "sequence parallel",
    "loss parallel",
    "named dimensions",
    "several meshes",
    "several roots",
    "context parallel",
    "pipeline",
    "zero bubble",
    "Muon",
    "optimizer in backward",
)
"""Features that no random program (``programs.py``) has: they want models, meshes, schedules or processes that a tree
of small modules on the processes of a test has not."""


def composes(*features: str) -> Callable[[F], F]:
    """Return a decorator that says which features a test combines."""
    return _known(features)


def refuses(*features: str, by: str, reason: str) -> Callable[[F], F]:
    """Return a decorator that says which combination is refused, ``by`` "torch", "fsdp2" or "both", and why."""
    assert by in ("torch", "fsdp2", "both") and reason
    return _known(features)


def _known(features: tuple[str, ...]) -> Callable[[F], F]:
    unknown = set(features) - set(FEATURES)
    assert features and not unknown, f"{sorted(unknown)}: not in FEATURES of tests/support/composition.py"
    return lambda function: function
