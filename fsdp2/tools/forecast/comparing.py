"""Compare several settings of one program: the needs of each, those that fit, and the fastest of these."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp2.tools.forecast.result import Forecast
from fsdp2.tools.forecast.run import forecast

__all__ = ["Case", "compare", "comparison"]


@dataclass(frozen=True)
class Case:
    """One setting, its mesh and arguments of build, and its result: a forecast or an error."""

    mesh: dict[str, int]
    arguments: dict[str, Any]
    forecast: Forecast | None = field(default=None, repr=False)
    error: str = ""

    @property
    def name(self) -> str:
        """The setting in words."""
        sizes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        return ", ".join([sizes, *(f"{name}={value}" for name, value in self.arguments.items())])

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

    A case that raises an error has its text instead of a forecast. ``options`` are those of ``forecast``.

    Raises:
        ValueError: ``build`` has no argument of that name.
    """
    _check(build, settings)
    cases = list(_cases(meshes, settings))
    found = []
    for number, case in enumerate(cases, 1):
        prefix = f"{number} of {len(cases)}: {case.name}"

        def report(doing: str, prefix: str = prefix) -> None:
            if progress is not None:
                progress(f"{prefix}: {doing}")

        def made(mesh: Any, arguments: dict[str, Any] = case.arguments) -> Any:
            return build(mesh, **arguments)

        try:
            result = forecast(made, step, mesh=case.mesh, progress=report, **options)
            found.append(Case(case.mesh, case.arguments, result))
        except (RuntimeError, ValueError, TypeError) as error:
            found.append(Case(case.mesh, case.arguments, error=str(error).splitlines()[0]))
    return found


def _cases(meshes: Sequence[Mapping[str, int]], settings: Mapping[str, Sequence[Any]]) -> Iterator[Case]:
    for mesh in meshes:
        for values in itertools.product(*settings.values()):
            yield Case(dict(mesh), dict(zip(settings, values)))


def _check(build: Callable[..., Any], settings: Mapping[str, Sequence[Any]]) -> None:
    parameters = inspect.signature(build).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    takes = list(parameters)[1:]
    for name in settings:
        if name not in takes:
            raise ValueError(f"build takes no argument {name!r}; expected one of {takes}, or add it to build")


def comparison(cases: Sequence[Case], limit: int | None = None) -> str:
    """Return a table of ``cases``; with ``limit`` bytes also which fit, and the fastest of these."""
    rows = [row for case in cases for row in _rows(case)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{'':<{width}}  peak GiB  reserved GiB   step ms  exposed ms  sent GiB  launches"]
    for name, found in rows:
        if isinstance(found, str):
            lines.append(f"{name:<{width}}  {found}")
            continue
        fits = "" if limit is None else "  fits" if found.peak_bytes <= limit else "  too large"
        lines.append(
            f"{name:<{width}}  {found.peak_bytes / 2**30:8.2f}  {found.reserved_bytes / 2**30:12.2f}  "
            f"{found.step_seconds * 1e3:8.1f}  {found.exposed_seconds * 1e3:10.1f}  {found.sent_bytes / 2**30:8.2f}  "
            f"{found.launches:8}{fits}"
        )
    if limit is not None:
        fitting = [case for case in cases if case.fits(limit)]
        best = min(fitting, key=lambda case: case.forecast.step_seconds if case.forecast else 0.0, default=None)
        lines += ["", f"none fits {limit / 2**30:g} GiB" if best is None else f"fastest that fits: {best.name}"]
    return "\n".join(lines)


def _rows(case: Case) -> Iterator[tuple[str, Forecast | str]]:
    """Yield the case, and the same with torch's own if it was requested."""
    if case.forecast is None:
        yield case.name, case.error
        return
    yield case.name, case.forecast
    if case.forecast.beside is not None:
        yield "  the same with torch's own", case.forecast.beside
