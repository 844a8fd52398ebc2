"""Run one script with fsdp2's ``fully_shard`` and with torch's own, no matter which of the two it imports."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch.distributed.fsdp as torch_fsdp
from torch import nn

from fsdp2._torch.forecast import torch_placement
from fsdp2.engine.unit import get_state, is_managed_by_torch
from fsdp2.fsdp1.install import OURS, THEIRS
from fsdp2.module import FSDPModule

__all__ = ["LIBRARIES", "TorchEvents", "check_units", "using"]

LIBRARIES = ("fsdp2", "torch")
_DATA = {"CompressionPolicy", "ShardPlacementResult"}  # converted, or refused with an error, where they are passed
_LATER = {"forecast", "record_steps"}
_SETTINGS = {"install", "uninstall", "set_rank_checks"}  # without a counterpart in torch


@contextmanager
def using(library: str) -> Iterator[None]:
    """Replace fsdp2's and torch's functions in all modules by those of ``library`` inside a ``with`` block.

    Copies elsewhere, such as default arguments, are not replaced; ``check_units`` finds their units.
    """
    new = _to_torch() if library == "torch" else {id(theirs): OURS[name] for name, theirs in THEIRS.items()}
    replaced = []
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or not _is_open(module.__name__):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in new:
                replaced.append((module, name, value))
                setattr(module, name, new[id(value)])
    try:
        with _explained_as_torchs() if library == "torch" else nullcontext():
            yield
    finally:
        for module, name, value in reversed(replaced):
            setattr(module, name, value)


def _is_open(name: str) -> bool:
    """Return True if names in a module may be replaced: in the script, its libraries, and the two public packages."""
    return name in ("fsdp2", *_PUBLIC) or name.split(".")[0] not in ("fsdp2", "torch")


_PUBLIC = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")


def check_units(model: nn.Module, library: str) -> None:
    """Check that all units of ``model`` were made by ``library``.

    Raises:
        RuntimeError: The other library made a unit.
    """
    for name, module in model.named_modules():
        managed = get_state(module) is not None if library == "torch" else is_managed_by_torch(module)
        if managed:
            unit = f"the unit {name!r}" if name else "the root unit"
            used, wanted = ("fsdp2's", "torch's own") if library == "torch" else ("torch's own", "fsdp2's")
            raise RuntimeError(
                f"{unit} was made by {used} fully_shard, where this forecast needs {wanted}; call it by its "
                "name in a module (fsdp2.fully_shard, or imported at the top of a file), not as a default argument or "
                "from a partial or a dictionary"
            )


# ---- torch's functions in place of fsdp2's ----


def _to_torch() -> dict[int, Any]:
    """Return the replacement of each public object of fsdp2, by the object's id."""
    package = sys.modules["fsdp2"]
    new: dict[int, Any] = {}
    for name in set(package.__all__) - _DATA - _LATER:
        ours = getattr(package, name)
        theirs = THEIRS.get(name) or getattr(torch_fsdp, name, None)
        if name in _SETTINGS:
            theirs = _nothing
        elif name == "fully_shard":
            theirs = _fully_shard
        elif name == "clip_grad_norm_":
            theirs = nn.utils.clip_grad_norm_
        if theirs is not ours:
            new[id(ours)] = theirs or _missing(name)
    return new


def _nothing(*args: Any, **kwargs: Any) -> Any:
    return nullcontext()


def _missing(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(_LACKS.format(what=f"fsdp2.{name}"))

    return refuse


_LACKS = "the script uses {what}, which torch's own fully_shard does not have"


@functools.wraps(THEIRS["fully_shard"])
def _fully_shard(module: Any, **options: Any) -> Any:
    """Call torch's own function; raise an error that names a feature which it lacks."""
    takes = inspect.signature(THEIRS["fully_shard"]).parameters
    for name, value in list(options.items()):
        if name not in takes:
            if value is not None:
                raise NotImplementedError(_LACKS.format(what=f"fully_shard({name}=...)"))
            del options[name]
    policy, place = options.get("mp_policy"), options.get("shard_placement_fn")
    if isinstance(policy, Mapping) or (callable(policy) and not isinstance(policy, type)):
        raise NotImplementedError(_LACKS.format(what="fully_shard(mp_policy=...) with a policy for each parameter"))
    if isinstance(options.get("offload_policy"), Mapping) and not hasattr(torch_fsdp, "cpu_offload_by_budget"):
        raise NotImplementedError(
            _LACKS.format(what="fully_shard(offload_policy=...) with a policy for each parameter")
        )
    if isinstance(place, str):
        raise NotImplementedError(_LACKS.format(what=f"fully_shard(shard_placement_fn={place!r})"))
    if place is not None:
        options["shard_placement_fn"] = torch_placement(place, options.get("mesh"))
    return THEIRS["fully_shard"](module, **options)


@contextmanager
def _explained_as_torchs() -> Iterator[None]:
    """Raise an error that names a method or an argument which only fsdp2 has."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        name = (error.name or "") if isinstance(error, AttributeError) else ""
        if callable(getattr(FSDPModule, name, None)):
            raise NotImplementedError(_LACKS.format(what=f"FSDPModule.{name}")) from error
        # A TypeError has neither the method nor the argument but in its text.
        argument = re.search(r"FSDPModule\.(\w+)\(\) got an unexpected keyword argument '(\w+)'", str(error))
        if argument:
            raise NotImplementedError(_LACKS.format(what=f"FSDPModule.{argument[1]}({argument[2]}=...)")) from error
        raise


class TorchEvents:
    """Translates the profiler ranges of torch's own fully_shard to the events of fsdp2.

    Args:
        heard: Called with each event and the name of its unit.
        enter: Called with the unit that communicates or is waited for from now on.
        claim: Called with the purpose of the tensors that collectives took since the last call; "" if it is unknown.
    """

    def __init__(
        self,
        heard: Callable[[str, str], None],
        enter: Callable[[str], None],
        claim: Callable[[str], None],
    ) -> None:
        self._heard, self._enter, self._claim = heard, enter, claim
        self._open: list[tuple[str, str]] = []

    def began(self, name: str) -> None:
        """Handle the start of a range."""
        found = re.fullmatch(r"FSDP::(\w+?)(?: \((.*)\))?", name)
        event, unit = (found[1], found[2] or "") if found else ("", "")
        self._open.append((event, unit))
        self._claim("")
        self._own()
        if event in _EVENTS:
            self._heard(_EVENTS[event], unit)

    def ended(self) -> None:
        """Handle the end of the innermost range."""
        event, _ = self._open.pop() if self._open else ("", "")
        self._claim(_KINDS.get(event, ""))
        self._own()
        if event == "root_post_backward_callback":
            self._heard("root_post_backward", "")

    def _own(self) -> None:
        unit = next((unit for event, unit in reversed(self._open) if event and not event.startswith("root")), None)
        if unit is not None:
            self._enter(unit)


_EVENTS = {
    "root_pre_forward": "root_pre_forward",
    "pre_forward": "pre_forward",
    "post_forward": "post_forward",
    "pre_backward": "pre_backward",
    "post_backward_reshard": "post_backward",
    "post_backward_reduce": "reduce",
}
_KINDS = {"all_gather": "gathered", "post_backward_reduce": "gradients"}
