"""Compare several settings of one program: the needs of each, those that fit, and the fastest of these."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp2.tools.forecast.rank import line_of
from fsdp2.tools.forecast.result import Forecast
from fsdp2.tools.forecast.run import forecast

__all__ = ["Case", "compare", "comparison"]


_IN, _COLUMNS = ", in ", 100


@dataclass(frozen=True)
class Case:
    """One setting, its mesh and arguments of build, and its result: a forecast, or the error that was raised."""

    mesh: dict[str, int]
    arguments: dict[str, Any]
    forecast: Forecast | None = field(default=None, repr=False)
    raised: Exception | None = None

    @property
    def name(self) -> str:
        """The setting in words."""
        sizes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        return ", ".join([sizes, *(f"{name}={value}" for name, value in self.arguments.items())])

    @property
    def error(self) -> str:
        """The error in words: its type, its text, and the line of the user's code. "" if there is none."""
        if self.raised is None:
            return ""
        line = line_of(self.raised)
        text = f"{type(self.raised).__name__}: {self.raised}" if line else str(self.raised)
        return text + (f"{_IN}{line}" if line and line not in text else "")

    def to_json(self) -> dict[str, Any]:
        """Return the setting and its figures, or its error."""
        values = {"mesh": self.mesh, "arguments": {name: repr(value) for name, value in self.arguments.items()}}
        return values | (self.forecast.figures() if self.forecast is not None else {"error": self.error})

    def fits(self, nbytes: int | None) -> bool:
        """Return True if it ran, and its peak is at most ``nbytes``; None stands for no limit."""
        return self.forecast is not None and (nbytes is None or self.forecast.peak_bytes <= nbytes)


def compare(
    build: Callable[..., Any],
    step: Callable[[Any, Any], object],
    meshes: Sequence[Mapping[str, int]],
    settings: Mapping[str, Sequence[Any]],
    *,
    progress: Callable[[str], object] | None = None,
    **options: Any,
) -> list[Case]:
    """Forecast every mesh with every combination of ``settings``, which are keyword arguments of ``build``.

    A case that raises an exception has it instead of a forecast. ``options`` are those of ``forecast``.

    Raises:
        ValueError: ``build`` or ``step`` cannot be called with these arguments.
    """
    _check(build, step, settings)
    cases = list(_cases(meshes, settings))
    found = []
    for number, case in enumerate(cases, 1):
        prefix = f"{number} of {len(cases)}: {case.name}: " if len(cases) > 1 else ""

        def report(doing: str, prefix: str = prefix) -> None:
            if progress is not None:
                progress(f"{prefix}{doing}")

        def made(mesh: Any, arguments: dict[str, Any] = case.arguments) -> Any:
            return build(mesh, **arguments)

        try:
            result = forecast(made, step, mesh=case.mesh, progress=report, **options)
            found.append(Case(case.mesh, case.arguments, result))
        except Exception as error:
            found.append(Case(case.mesh, case.arguments, raised=error))
    return found


def _cases(meshes: Sequence[Mapping[str, int]], settings: Mapping[str, Sequence[Any]]) -> Iterator[Case]:
    for mesh in meshes:
        for values in itertools.product(*settings.values()):
            yield Case(dict(mesh), dict(zip(settings, values)))


def _check(build: Callable[..., Any], step: Callable[..., Any], settings: Mapping[str, Sequence[Any]]) -> None:
    parameters = inspect.signature(build).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        takes = list(parameters)[1:]
        for name in settings:
            if name not in takes:
                raise ValueError(f"build takes no argument {name!r}; expected one of {takes}, or add it to build")
    for function, positional, named in ((build, ("mesh",), dict(settings)), (step, ("model", "optimizer"), {})):
        try:
            inspect.signature(function).bind(*positional, **named)
        except TypeError as error:
            called = ", ".join([*positional, *(f"{name}=..." for name in named)])
            raise ValueError(
                f"{getattr(function, '__name__', function)}{inspect.signature(function)}: {error}; a forecast calls "
                f"it as ({called})"
            ) from error


_HEAD = "  peak GiB  reserved   step ms  exposed ms  sent GiB  launches"
_TOO_LARGE = "  too large"


def comparison(cases: Sequence[Case], limit: int | None = None) -> str:
    """Return a table of ``cases``; with ``limit`` bytes also which fit, and the fastest of these.

    Errors are shortened to the width of the table and told in full below it.
    """
    rows = [row for case in cases for row in _rows(case)]
    widest = _COLUMNS - len(_HEAD) - (0 if limit is None else len(_TOO_LARGE))
    names = max((len(name) for name, _ in rows if len(name) <= widest), default=2)
    lines = [f"{'':<{names}}{_HEAD}"]
    for name, found in rows:
        lines += [name] if len(name) > names else []  # on a line of its own
        start = f"{name if len(name) <= names else '':<{names}}"
        if isinstance(found, str):
            first = found.splitlines()[0].split(_IN)[0]
            lines.append(f"{start}  {first if len(first) < len(_HEAD) else first[: len(_HEAD) - 5] + '...'}")
            continue
        fits = "" if limit is None else "  fits" if found.peak_bytes <= limit else _TOO_LARGE
        lines.append(
            f"{start}  {found.peak_bytes / 2**30:8.2f}  {found.reserved_bytes / 2**30:8.2f}  "
            f"{found.step_seconds * 1e3:8.1f}  {found.exposed_seconds * 1e3:10.1f}  {found.sent_bytes / 2**30:8.2f}  "
            f"{found.launches:8}{fits}"
        )
    if limit is not None:
        fitting = [case for case in cases if case.fits(limit)]
        best = min(fitting, key=lambda case: case.forecast.step_seconds if case.forecast else 0.0, default=None)
        lines += ["", f"none fits {limit / 2**30:g} GiB" if best is None else f"fastest that fits: {best.name}"]
    errors: dict[str, list[str]] = {}
    for case in cases:
        if case.raised is not None:
            errors.setdefault(case.error, []).append(case.name)
    for text, failed in errors.items():
        lines += ["", *(f"{name}:" for name in failed), f"  {text}"]
    return "\n".join(lines)


def _rows(case: Case) -> Iterator[tuple[str, Forecast | str]]:
    """Yield the case, and the same with torch's own if it was requested."""
    if case.forecast is None:
        yield case.name, case.error
        return
    yield case.name, case.forecast
    if case.forecast.beside is not None:
        yield "  the same with torch's own", case.forecast.beside
