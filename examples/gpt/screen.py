"""The output of a run: opening lines, a progress bar, and generated text."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from gpt.data import Text, printable
from gpt.memory import process_memory
from gpt.options import Settings
from gpt.processes import Place
from gpt.record import Run

WIDTH = 100


class Bar:
    """A progress bar on rank 0. If the output is not a terminal (a log file, a pipe), it prints a few lines instead."""

    LINES = 8  # the number of lines of a run without a bar

    def __init__(self, place: Place, start: int, goal: int) -> None:
        self.place = place
        self.start, self.goal = start, goal
        self.every = max(1, (goal - start) // self.LINES)
        self.watched = sys.stderr.isatty()
        self.bar: tqdm | None = None
        if place.first:
            self.bar = tqdm(
                initial=start,
                total=goal,
                desc="training",
                disable=not self.watched,
                dynamic_ncols=True,
                bar_format="{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}",
            )

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.close()

    def step(self, run: Run) -> None:
        """Show that one more step is done."""
        if self.bar is None:
            return
        recent = run.losses[-20:]
        speed = f"{run.tokens_per_second / 1000:.1f}k" if run.tokens_per_second else "-"
        figures = f"loss {sum(recent) / len(recent):.3f}, {speed} tokens/s, {process_memory(self.place.device)}"
        if self.watched:
            self.bar.set_postfix_str(figures, refresh=False)
            self.bar.update()
        elif run.last_step == self.goal or (run.last_step - self.start) % self.every == 0:
            self.place.say(f"step {run.last_step:>{len(str(self.goal))}}/{self.goal}  {figures}")

    def write(self, text: str) -> None:
        """Show `text` above the bar."""
        if self.bar is None:
            return
        if self.watched:
            self.bar.write(text)
        else:
            self.place.say(text)


def heading(text: str) -> str:
    """Return `text` in a horizontal rule."""
    return f"── {text} ".ljust(WIDTH, "─")


def opening(run: Run, settings: Settings, text: Text, start: Path | None) -> str:
    """Return two or three lines that describe the run."""
    lines = [
        f"text     {text.name}: {len(text.train):,} bytes to learn from, {len(text.held_out):,} held out",
        f"model    {run.parameters:,} parameters ({settings.layers} layers of width {settings.width}), "
        f"{run.parameters_per_rank:,} on each of {run.ranks} processes ({run.backend}, {run.compute})",
    ]
    if start is not None:
        lines.append(f"resumed  {start}")
    return "\n".join(lines)


def sample(title: str, prompt: bytes, continued: bytes) -> str:
    """Return generated text with a heading. A mark separates the prompt from the generated part."""
    body = printable(prompt) + "▸" + printable(continued)
    lines = [
        part for line in body.splitlines() for part in textwrap.wrap(line, WIDTH - 2, drop_whitespace=False) or [""]
    ]
    return "\n".join([heading(title), *(f"  {line}".rstrip() for line in lines), ""])
