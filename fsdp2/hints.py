"""Explain torch's errors about shards that were used as if they were full parameters: which parameter, what to do.

DTensor raises such an error in C++, before any Python code of ours could run. So its text is added when Python tells of
the exception (3.12 and newer), or when it leaves the forward of a root, or a registered method. What older Pythons do
not tell of is explained where nobody caught it: below the cell of a notebook, or in the log when the process ends.

Such an error is a plain RuntimeError that has no parameter in it. Its text tells the kind, and the failing frames tell
the parameter. Nothing but the text of the hint depends on this.
"""

from __future__ import annotations

import atexit
import itertools
import linecache
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from fsdp2._naming import class_name
from fsdp2._torch.tensors import versions_of
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.param import FSDPParam
from fsdp2.engine.unit import explain_with, live_units

__all__ = ["explain", "watch"]

logger = logging.getLogger("fsdp2")

_TEXT = "got mixed torch.Tensor and DTensor"
_REMEDY = (
    "use it inside `with fsdp2.use_weights(module):`, where module is the one that has the parameter, or call that "
    "module instead"
)
_REMEDY_FOR_METHODS = (
    "call fsdp2.register_fsdp_forward_method(module, {method!r}) after fully_shard, where module is the {kind} whose "
    "method this is, or use the parameter inside `with fsdp2.use_weights(module):`"
)
_REMEDY_FOR_WRITES = (
    "got a write to a shard, expected one to the full parameter or its gradient; write inside "
    "`with fsdp2.summon_full_params(module, with_grads=True):`, which copies new values to the shards"
)
_REMEDY_FOR_OPERATORS = (
    "got a shard, on which DTensor cannot compute this operator, expected a plain tensor; give it what `full_tensor()` "
    "of the shard returns, on every rank, or the parameter inside `with fsdp2.summon_full_params(module):`"
)
_REMEDY_FOR_COLLECTIVES = (
    "a collective of torch.distributed got a shard, of which each rank has another, expected a plain tensor. Leave the "
    "collective out if it averages gradients: backward has done so. To make ranks equal, call "
    "fsdp2.sync_module_states(module) before fully_shard; to send whole values, send what `full_tensor()` returns, "
    "which every rank calls"
)
_REMEDY_FOR_LOADING = (
    "load_state_dict got shards for the plain parameters of {0}, expected whole tensors; make the state dict on every "
    "rank inside `with fsdp2.state_dict_type(model, StateDictType.FULL_STATE_DICT):`, where model is the sharded one"
)
_RESIZED = "resize storage that is not resizable"  # an operator with ``out=``, as in torch.nn.init.eye_
_LACKS = (
    "Sharding propagation failed",  # torch 2.13
    "does not have a sharding strategy registered",
    "is not supported for tensor subclasses",  # numpy() and tolist()
    _RESIZED,
)
_STEP = (
    "build it as fsdp2.use_full_params({0}(...)), which runs the step on full parameters, or as "
    "fsdp2.use_local_shards({0}(...)) if it updates each element alone"
)
_STORAGE = "access the data pointer on an invalid python storage"
_COLLECTIVE = re.compile(r"\bc10d\.\w+\.\w+ (got mixed|does not have)")
_WRITE = re.compile(r"\baten\.(\w+)_\.")  # operators that write end with an underscore
_GONE = re.compile(r"is at version (\d+); expected version")
_MEMORY = (
    "DTensors have no memory of their own: got one, perhaps of a state dict of shards, expected a plain tensor; "
    "to write whole tensors to a file, save on every rank inside "
    "`with fsdp2.state_dict_type(model, StateDictType.FULL_STATE_DICT):`, or call fsdp2.save_safetensors"
)
_DTYPES = re.compile(r"same dtype|scalar type|type .* should be the same|dtypes match|dtype to be equal")
_EXPLAINED = "_fsdp2_explained"  # an attribute of errors whose text was added
_SHOWN = 8
_FREE_TOOLS = 3, 4  # of sys.monitoring: those that are for no particular kind of tool


def _shown(groups: Iterable[FSDPParamGroup]) -> dict[FSDPParam, str]:
    """Return the parameters that modules show shards of at the moment, each with the name of its unit.

    Before the first forward that is the module's class: a name counts from the root, which nobody knows then.
    """
    params = {p: _unit(group) for group in groups for p in group.params}
    return {p: name for p, name in params.items() if p.sites[0].shown is p.sharded}


def _about_gone(version: int, groups: Iterable[FSDPParamGroup]) -> str | None:
    """Return which full parameter backward needed when its memory was gone; None if the ``version`` is none of ours."""
    for group in groups:
        for param in group.params:
            if param.full is not None and versions_of([param.full]) == [version]:
                return (
                    f"{param.name} (unit {_unit(group)}): got a backward through it while it is sharded, expected that "
                    "backward enters the unit by what its forward returned, wrote to its arguments or left on its "
                    "modules; return the tensor by which it entered, or keep the unit in memory: "
                    "set_reshard_after_forward(False) and set_reshard_after_backward(False)"
                )
    return None


def _unit(group: Any) -> str:
    if group.name or group.in_root:
        return repr(group.name or "the root")
    return class_name(group.modules[0])


def _hint(error: BaseException | None, groups: Iterable[FSDPParamGroup]) -> str | None:
    """Return what ``error`` is about and what to do; None if it is not about the use of shards."""
    if not isinstance(error, RuntimeError) or error.__traceback__ is None:
        return None
    text = error.args[0] if error.args and isinstance(error.args[0], str) else ""
    if _STORAGE in text and _shown(groups):
        return _MEMORY
    if (found := _GONE.search(text)) is not None:
        return _about_gone(int(found[1]), groups)
    if _DTYPES.search(text):
        return _buffers(_frames(error.__traceback__), groups)
    lacks = any(part in text for part in _LACKS)
    if _TEXT not in text and not lacks:
        return None
    units = _shown(groups)
    frames = list(_frames(error.__traceback__))
    if (optimizer := _stepping(frames)) is not None and _holds(optimizer, units):
        name = type(optimizer).__name__
        return f"{name}: its step got shards, and computes as if they were full parameters; {_STEP.format(name)}"
    if units and _COLLECTIVE.search(text):
        return _REMEDY_FOR_COLLECTIVES
    if (plain := _loads_shards(frames[-1].tb_frame)) is not None:
        return _REMEDY_FOR_LOADING.format(class_name(plain))
    failing = next((one for one in reversed(frames) if not _is_dtensors(one)), frames[-1])
    used, named = _used(failing, units)
    if not used or (lacks and not named):
        return None
    meant = list(dict.fromkeys(f"{p.name} (unit {units[p]})" for p in used))  # before the first forward, of equal names
    names = ", ".join(meant[:_SHOWN])
    names = f"{'' if named else 'possibly '}{names}{', ...' if len(meant) > _SHOWN else ''}"
    write = _WRITE.search(text)
    if _RESIZED in text or (write is not None and _writes_to(failing, write[1], used)):
        return f"{names}: {_REMEDY_FOR_WRITES}"
    if lacks:
        return f"{names}: {_REMEDY_FOR_OPERATORS}"
    remedy = _method_remedy(error.__traceback__, used)
    return f"{names}: got a shard, expected the full parameter, which exists in its unit's forward; {remedy}"


def _method_remedy(trace: TracebackType, used: Iterable[FSDPParam]) -> str:
    """Return what to do, given how the ``used`` parameters were reached: by a method of their unit, or in any way.

    A ``forward`` that is called as a method (``layer.forward(x)``, as a SqueezeBERT calls its layers) is one.
    """
    modules = {id(module) for param in used for module in param.group.modules}
    calls = _calls(trace)
    for caller, frame in zip([None, *calls], calls):
        method, owner = frame.f_code.co_name, frame.f_locals.get("self")
        if id(owner) not in modules or not hasattr(type(owner), method):
            continue
        # What nn.Module has calls or is a forward; one that nn.Module has not called gathers nothing.
        by_hand = method == "forward" and (caller is None or caller.f_globals.get("__name__") != nn.Module.__module__)
        if by_hand or not hasattr(nn.Module, method):
            return _REMEDY_FOR_METHODS.format(method=method, kind=class_name(owner))
    return _REMEDY


def _calls(trace: TracebackType) -> list[FrameType]:
    """Return the frames that led to the error, the outermost first; also those that it has not reached yet."""
    around = []
    frame = trace.tb_frame.f_back
    while frame is not None:
        around.append(frame)
        frame = frame.f_back
    return [*reversed(around), *(one.tb_frame for one in _frames(trace))]


def _buffers(frames: Iterable[TracebackType], groups: Iterable[FSDPParamGroup]) -> str | None:
    """Return a hint about buffers of the innermost failing module that stay in another dtype than its parameters.

    Mixed precision casts parameters and inputs. spectral_norm keeps vectors in buffers, and computes with both; a
    frozen BatchNorm of detection models is buffers alone, and gives the next convolution their dtype. What such a
    module outside the innermost unit has computed was cast when it entered that unit.
    """
    units = {id(module) for group in groups for module in group.modules}
    for one in reversed([*frames]):
        modules = [value for value in one.tb_frame.f_locals.values() if isinstance(value, nn.Module)]
        for module in modules:
            for group in groups:
                dtype = group.store.options.mp_policy.param_dtype
                own = [(name, buffer) for name, buffer in module.named_buffers() if buffer.is_floating_point()]
                others = [(name, buffer) for name, buffer in own if buffer.dtype != dtype]
                inside = any(module in unit_module.modules() for unit_module in group.modules)
                if dtype is not None and others and inside:
                    names = ", ".join(name for name, _ in others[:_SHOWN])
                    return (
                        f"possibly the buffers {names} of {class_name(module)} (unit {_unit(group)}): got "
                        f"{others[0][1].dtype}, expected {dtype}, in which mp_policy lets the unit compute. It casts "
                        "no buffers; cast these before training, each by `buffer.data = buffer.to(...)`"
                    )
        if any(id(module) in units for module in modules):
            break
    return None


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_dtensors(trace: TracebackType) -> bool:
    """Return whether the frame is one of DTensor's dispatcher, which the failing line called."""
    return str(trace.tb_frame.f_globals.get("__name__", "")).startswith("torch.distributed.tensor")


def _stepping(frames: Iterable[TracebackType]) -> optim.Optimizer | None:
    """Return the optimizer whose step failed in its own source; None if another module's code failed (a closure's)."""
    found, source = None, None
    for one in frames:
        if isinstance(stepping := one.tb_frame.f_locals.get("self"), optim.Optimizer):
            found = stepping
        if not _is_dtensors(one):
            source = one.tb_frame.f_globals.get("__name__", "")
    return found if found is not None and type(found).__module__ == source else None


def _holds(optimizer: optim.Optimizer, params: Iterable[FSDPParam]) -> bool:
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return any(id(param.sharded) in held for param in params)


def _used(trace: TracebackType, params: Iterable[FSDPParam]) -> tuple[list[FSDPParam], bool]:
    """Return those of ``params`` that the failing lines name, else that their function names, and whether named."""
    frame, code = trace.tb_frame, trace.tb_frame.f_code
    text = _lines(trace)
    meant = {id(_follow(path, frame.f_locals)) for path in re.findall(r"\w+(?:\.\w+)*", text)}
    used = [p for p in params if id(p.sharded) in meant]
    if used:
        return used, True
    for words, named in (({*re.findall(r"\w+", text)}, True), ({*code.co_names, *code.co_varnames}, False)):
        values = {id(value) for name, value in frame.f_locals.items() if name in words}
        used = [p for p in params if id(p.sharded) in values or {*p.name.split(".")[-2:]} <= words]
        if used:
            return used, named
    return [], False


def _loads_shards(frame: FrameType) -> nn.Module | None:
    """Return the module whose ``load_state_dict`` failed in this frame because it has plain parameters for shards."""
    module, values = frame.f_locals.get("self"), frame.f_locals.get("state_dict")
    if frame.f_code.co_name != "load_state_dict" or not isinstance(values, Mapping):
        return None
    if not isinstance(module, nn.Module):
        return None
    own = module.named_parameters()
    return module if any(isinstance(values.get(n), DTensor) and not isinstance(p, DTensor) for n, p in own) else None


def _writes_to(trace: TracebackType, operator: str, params: Iterable[FSDPParam]) -> bool:
    """Return whether the failing expression is a write, by an ``operator``, to one of ``params`` or its gradient."""
    text = _expression(trace)
    called = re.match(rf"(.+)\.{operator}_\(|(.+?)\s*[-+*/|&^@%]*=(?!=)", text, re.DOTALL)
    target = text if called is None else called[1] or called[2]  # of `x[i] = y` the expression is `x[i]`
    words, values = {*re.findall(r"\w+", target)}, trace.tb_frame.f_locals
    meant = {id(value) for name, value in values.items() if name in words}
    meant |= {id(_follow(path, values)) for path in re.findall(r"\w+(?:\.\w+)*", target)}
    return any(id(p.sharded) in meant or {*p.name.split(".")[-1:]} <= words for p in params)


def _follow(path: str, values: Mapping[str, object]) -> object:
    """Return what a path like ``self.head.weight`` leads to. Only modules are followed: other attributes run code."""
    first, *rest = path.split(".")
    value = values.get(first)
    for name in rest:
        if not isinstance(value, nn.Module):
            return None
        value = value._parameters.get(name, value._modules.get(name))
    return value


def _lines(trace: TracebackType) -> str:
    """Return the failing expression's lines."""
    first = last = trace.tb_lineno
    if sys.version_info >= (3, 11):
        _, last_known, _, _ = next(itertools.islice(trace.tb_frame.f_code.co_positions(), trace.tb_lasti // 2, None))
        last = last_known or first
    return "".join(linecache.getline(trace.tb_frame.f_code.co_filename, number) for number in range(first, last + 1))


def _expression(trace: TracebackType) -> str:
    """Return the failing expression; its lines where Python does not tell columns, or there are several lines."""
    if sys.version_info >= (3, 11):
        first, last, start, end = next(
            itertools.islice(trace.tb_frame.f_code.co_positions(), trace.tb_lasti // 2, None)
        )
        if first is not None and first == last and start is not None and end is not None:
            line = linecache.getline(trace.tb_frame.f_code.co_filename, first).encode()
            return line[start:end].decode()  # columns count bytes
    return _lines(trace).strip()


def explain(error: BaseException | None, groups: Iterable[FSDPParamGroup]) -> None:
    """Add to the text of ``error`` what it is about, once; ``groups`` are those whose shards it may be about."""
    text = None if error is None or _EXPLAINED in error.__dict__ else _hint(error, groups)
    if error is not None and text is not None:
        error.__dict__[_EXPLAINED] = True
        error.args = (f"{error}\n{text}", *error.args[1:])


def _all_groups() -> list[FSDPParamGroup]:
    return [group for unit in live_units() for group in unit.groups]


def _explain_when_raised() -> bool:
    """Have Python tell of every exception when it is raised; return False if it cannot, or others are told."""
    if sys.version_info < (3, 12):
        return False
    monitoring = sys.monitoring
    tool = next((tool for tool in _FREE_TOOLS if monitoring.get_tool(tool) is None), None)
    if tool is None:
        return False

    torch_folder = str(torch.__path__[0])

    def raised(code: CodeType, offset: int, error: BaseException) -> None:
        # It is called for each frame that the exception passes. When it leaves torch, which optimizer failed is known.
        if isinstance(error, RuntimeError) and not code.co_filename.startswith(torch_folder):
            explain(error, _all_groups())

    monitoring.use_tool_id(tool, "fsdp2")
    monitoring.register_callback(tool, monitoring.events.RAISE, raised)
    monitoring.set_events(tool, monitoring.events.RAISE)
    return True


def _explain_below_cells() -> None:
    """Show the explanation below the cell of a notebook in which such an error was raised."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        shell.events.register("post_run_cell", lambda result: _show(getattr(result, "error_in_exec", None)))


def _show(error: BaseException | None) -> None:
    text = None if error is None or _EXPLAINED in error.__dict__ else _hint(error, _all_groups())
    if text is not None:
        logger.error("%s", text)


def _at_exit() -> None:
    _show(getattr(sys, "last_value", None))


def watch() -> None:
    """Explain errors about the shards of this process from now on. ``fully_shard.py`` calls it when it is imported."""
    explain_with(explain)
    atexit.register(_at_exit)
    if not _explain_when_raised():
        _explain_below_cells()
