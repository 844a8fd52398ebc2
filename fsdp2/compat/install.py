"""``install()``: libraries that import torch's ``fully_shard`` themselves get ours, until ``uninstall()``."""

from __future__ import annotations

import importlib.abc
import importlib.util
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp

from fsdp2._torch.fsdp import torch_group_module
from fsdp2.comm import gather, reduce
from fsdp2.comm.gather import GatherBuffers
from fsdp2.comm.reduce import ReducePlan
from fsdp2.comm.streams import Lane, Retained
from fsdp2.engine import group as param_group
from fsdp2.engine import reducer as gradients
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.forward_methods import register_fsdp_forward_method
from fsdp2.fully_shard import fully_shard
from fsdp2.module import share_comm_ctx
from fsdp2.sharding.mesh import Axis
from fsdp2.sharding.packing import RowPlan

__all__ = ["Installation", "install", "uninstall"]

logger = logging.getLogger("fsdp2")

_OURS = {
    "fully_shard": fully_shard,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "share_comm_ctx": share_comm_ctx,
}
_THEIRS = {name: getattr(torch_fsdp, name) for name in _OURS}
_PUBLIC = ("torch.distributed.fsdp", "torch.distributed.fsdp._fully_shard", "torch.distributed._composable.fsdp")
# Helpers of torch that patch the class of groups by name; torch's own replicate goes on using torch's class.
_GROUP_USERS = ("torch.testing._internal.common_fsdp", "torch.distributed._tools.fsdp2_mem_tracker")
_TORCH_GROUP = torch_group_module.FSDPParamGroup
_GROUP_METHODS = ("unshard", "wait_for_unshard", "reshard", "post_backward")
# The autograd function from which torch's groups learn that backward is through with their inputs.
_AfterInputs = torch_group_module.RegisterPostBackwardFunction
# The public functions by which torch's groups communicate; torch 2.13 renamed the first two.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


class Installation:
    """What an ``install()`` replaced; as a context manager it undoes that at the end of the block."""

    def __init__(self) -> None:
        self.replaced: list[str] = []
        self._undo: list[tuple[ModuleType | type, str, Any]] = []
        self._finder = _Finder(self)

    def __str__(self) -> str:
        return "fsdp2 replaced " + ", ".join(self.replaced)

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        uninstall()

    def set(self, owner: ModuleType | type, name: str, value: Any) -> None:
        """Replace ``owner.name`` and remember what it was."""
        if getattr(owner, name, None) is value:
            return
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)
        self.replaced.append(f"{owner.__name__}.{name}")

    def adopt(self, module: ModuleType) -> None:
        """Replace in one of torch's modules whatever of torch's own it imported."""
        for name, theirs in _THEIRS.items():
            if getattr(module, name, None) is theirs:
                self.set(module, name, _OURS[name])
        if module.__name__ in _GROUP_USERS and getattr(module, "FSDPParamGroup", None) is _TORCH_GROUP:
            self.set(module, "FSDPParamGroup", FSDPParamGroup)

    def undo(self) -> None:
        """Put everything back, latest first."""
        sys.meta_path.remove(self._finder)
        for module, name, value in reversed(self._undo):
            setattr(module, name, value)
        self._undo.clear()

    def start(self) -> None:
        """Replace torch's names where they are already, and where they will be imported."""
        for name in _PUBLIC:
            importlib.import_module(name)
        for name, module in list(sys.modules.items()):
            if module is not None and (name in _PUBLIC or name in _GROUP_USERS or _is_test_helper(name)):
                self.adopt(module)
        self._route_collectives()
        self._route_public_collectives()
        self._route_methods()
        sys.meta_path.insert(0, self._finder)

    def _route_collectives(self) -> None:
        """Let those who replace torch's collective functions of a group, to slow or count them, reach ours."""
        for name, owner, attribute, as_torch in (
            ("foreach_all_gather", param_group, "start_gather", _gather_as_torch),
            ("foreach_reduce", gradients, "reduce_chunk", _reduce_as_torch),
        ):
            theirs, ours = getattr(torch_group_module, name), getattr(owner, attribute)

            def shared(*args: Any, _ours: Any = ours, _theirs: Any = theirs, **kwargs: Any) -> Any:
                ours_called = args and isinstance(args[0], _Call)
                return args[0].made(_ours, args) if ours_called else _theirs(*args, **kwargs)

            def through(*args: Any, _name: str = name, _as_torch: Any = as_torch, **kwargs: Any) -> Any:
                return getattr(torch_group_module, _name)(*_as_torch(*args, **kwargs))

            self.set(sys.modules[theirs.__module__], name, shared)
            self.set(torch_group_module, name, shared)
            self.set(owner, attribute, through)

    def _route_public_collectives(self) -> None:
        """Let those who replace torch's public collectives, to slow, count or check them, be called by ours."""
        gathers, scatters, sums = (_Replaceable(name) for name in (_ALL_GATHER, _REDUCE_SCATTER, "all_reduce"))
        all_gather, reduce_scatter, all_reduce = gather.all_gather, reduce.reduce_scatter, reduce.all_reduce
        prefers_all_to_all = reduce.prefers_all_to_all

        def gather_by(*args: Any, custom: Any = None, **options: Any) -> list[Any]:
            return all_gather(*args, custom=custom or gathers.replacement(_as_gather), **options)

        def scatter_by(*args: Any, custom: Any = None, **options: Any) -> list[Any]:
            return reduce_scatter(*args, custom=custom or scatters.replacement(_as_scatter), **options)

        def exchange(*args: Any) -> bool:
            return scatters.replacement() is None and prefers_all_to_all(*args)

        def sum_by(tensor: torch.Tensor, axis: Axis, *, average: bool, async_op: bool) -> list[Any]:
            theirs = sums.replacement()
            if theirs is None or axis.size == 1:
                return all_reduce(tensor, axis, average=average, async_op=async_op)
            op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
            work = theirs(tensor, op=op, group=axis.group, async_op=async_op)
            return [] if work is None else [work]

        self.set(gather, "all_gather", gather_by)
        self.set(reduce, "reduce_scatter", scatter_by)
        self.set(reduce, "prefers_all_to_all", exchange)
        self.set(reduce, "all_reduce", sum_by)

    def _route_methods(self) -> None:
        """Let those who wrap methods of torch's class of groups, to record or count them, reach our groups."""
        for name in _GROUP_METHODS:
            theirs, ours = getattr(_TORCH_GROUP, name), getattr(FSDPParamGroup, name)

            def either(self: object, *args: Any, _ours: Any = ours, _theirs: Any = theirs, **kwargs: Any) -> Any:
                return (_ours if isinstance(self, FSDPParamGroup) else _theirs)(self, *args, **kwargs)

            self.set(_TORCH_GROUP, name, either)

        ours = FSDPParamGroup.inputs_done

        def inputs_done(group: FSDPParamGroup) -> None:
            _AfterInputs.backward(SimpleNamespace(param_group=SimpleNamespace(post_backward=lambda: ours(group))))

        self.set(FSDPParamGroup, "inputs_done", inputs_done)


class _Replaceable:
    """A public function of ``torch.distributed`` that somebody may replace for a while."""

    def __init__(self, name: str) -> None:
        self._name, self._original = name, getattr(dist, name)

    def replacement(self, adapt: Callable[[Any], Any] = lambda function: function) -> Any:
        """What is called in its place now, adapted; None while nothing is."""
        now = getattr(dist, self._name)
        return None if now is self._original else adapt(now)


def _as_gather(function: Callable[..., Any]) -> Callable[..., Any]:
    """A custom all-gather that calls ``function`` with the arguments torch's groups give it."""
    return lambda *, output_tensor, input_tensor, **options: function(output_tensor, input_tensor, **options)


def _as_scatter(function: Callable[..., Any]) -> Callable[..., Any]:
    """A custom reduce-scatter that calls ``function`` with the arguments torch's groups give it."""
    return lambda *, output_tensor, input_tensor, **options: function(
        output=output_tensor, input=input_tensor, **options
    )


class _Call(list[Any]):
    """A call of ours in the place of torch's list of parameters: the other arguments are torch's, for wrappers."""

    def __init__(self, make: Callable[[Any, Sequence[Any]], Any]) -> None:
        super().__init__()
        self.made = make


def _gather_as_torch(buffers: GatherBuffers, axis: Axis, lane: Lane, **options: Any) -> tuple[Any, ...]:
    """Arguments of torch's ``foreach_all_gather`` that stand for these of ours; a lane stands for its stream."""
    call = _Call(lambda ours, args: ours(buffers, axis, lane, **options))
    return call, axis.group, lane.async_op, lane, lane, buffers.full.bytes.device, options.get("custom")


# What gradients become is not told torch's ``foreach_reduce`` from 2.15 on: each parameter has a dtype of its own.
_TAKES_ORIGINAL_DTYPE = "orig_dtype" in inspect.signature(torch_group_module.foreach_reduce).parameters


def _reduce_as_torch(
    grads: list[Any], rows: RowPlan, plan: ReducePlan, reductions: Retained, *rest: Any
) -> tuple[Any, ...]:
    """Arguments of torch's ``foreach_reduce`` that stand for these of ours; the gradients are taken from them again."""
    call, lanes = _Call(lambda ours, args: ours(args[1], rows, plan, reductions, *rest)), reductions.lanes
    dtypes = (plan.out_dtype, plan.reduce_dtype) if _TAKES_ORIGINAL_DTYPE else (plan.reduce_dtype,)
    shard = (plan.shard.group, lanes.reduce, plan.custom, *dtypes, grads[0].device, None)
    return call, grads, *shard, plan.replicate.group, lanes.replicate, True, None, plan.hook, False


def _is_test_helper(name: str) -> bool:
    return name.startswith("torch.testing._internal.")


class _Finder(importlib.abc.MetaPathFinder):
    """Adopts torch's helper modules when they are imported later."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec others find, with a loader that adopts the module once it has run."""
        if self._searching or fullname not in _GROUP_USERS:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _AdoptingLoader(spec.loader, self._installation)
        return spec


class _AdoptingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any, installation: Installation) -> None:
        self._loader, self._installation = loader, installation

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._installation.adopt(module)


_installed: Installation | None = None


def install(*, rebind: bool = False) -> Installation:
    """Make ``torch.distributed.fsdp.fully_shard`` (and ``torch.distributed._composable.fsdp``'s) ours.

    Call it before importing libraries that use torch's: one that imported the old function before keeps it, which is
    warned about. ``isinstance`` with torch's ``FSDPModule`` and its policy classes holds without it. ``python -m fsdp2
    script.py`` calls it before a program that you do not want to edit.

    Args:
        rebind: Replace torch's functions in the modules that imported them before, too. What they copied elsewhere
            (into a dictionary, or as a default argument) stays torch's.

    Returns:
        What was replaced, by name; usable as a context manager. Installing twice changes nothing more.
    """
    global _installed
    if _installed is None:
        _installed = Installation()
        _installed.start()
        logger.info("%s", _installed)
    early = list(_early_importers())
    if rebind:
        for module, name in early:
            _installed.set(module, name, _OURS[name])
    elif early:
        names = ", ".join(sorted(f"{module.__name__}.{name}" for module, name in early))
        warnings.warn(
            f"fsdp2.install(): {names} imported torch's own before and will go on using it; call "
            "fsdp2.install() before importing them, or install(rebind=True)",
            stacklevel=2,
        )
    return _installed


def uninstall() -> None:
    """Give torch its own functions back; nothing happens if ``install`` was not called."""
    global _installed
    if _installed is not None:
        _installed.undo()
        _installed = None


def _early_importers() -> Iterator[tuple[ModuleType, str]]:
    """Modules outside torch and fsdp2 that hold one of torch's functions under its own name, and which."""
    for name, module in list(sys.modules.items()):
        if module is None or name.split(".")[0] in ("torch", "fsdp2"):
            continue
        for attribute, theirs in _THEIRS.items():
            if getattr(module, "__dict__", {}).get(attribute) is theirs:
                yield module, attribute
