"""The settings of a run: the command line, combined with the settings in a checkpoint."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NoReturn

from gpt.model import GPTConfig
from gpt.processes import UserError


@dataclass(frozen=True)
class Settings:
    """The settings that influence the result. They are stored in checkpoints, so a resumed run need not repeat them."""

    layers: int = 6
    width: int = 256
    heads: int = 8
    context: int = 128
    batch: int = 12
    steps: int = 154
    learning_rate: float = 4e-3
    seed: int = 0

    @property
    def model(self) -> GPTConfig:
        """The sizes of the model."""
        return GPTConfig(self.layers, self.width, self.heads, self.context)

    def check(self, ranks: int) -> None:
        """Raise a UserError that names the setting if one of them does not fit `ranks` processes."""
        if self.width % self.heads or self.width // self.heads % 2:
            raise UserError(f"--width {self.width} cannot be split into {self.heads} heads of an even width")
        if self.batch % ranks:
            fitting = ", ".join(str(n) for n in range(1, self.batch + 1) if self.batch % n == 0)
            raise UserError(
                f"a batch of {self.batch} sequences cannot be split evenly over {ranks} processes; "
                f"start {fitting} of them, or choose another --batch"
            )


FIXED = ("layers", "width", "heads", "context")  # the settings that the shapes in a checkpoint depend on


@dataclass(frozen=True)
class Options:
    """The options of the command line: the given settings, and options that do not influence the result."""

    given: dict[str, int | float]
    text: Path | None
    out: Path | None
    resume: Path | None
    ranks: int
    device: str
    compute: str
    stop_at: int | None
    eval_every: int
    save_every: int
    sample: int
    prompt: str
    report: bool

    def settings(self, saved: Settings | None) -> Settings:
        """Return the settings in a checkpoint, or the defaults, overridden by those of the command line."""
        for name in FIXED:
            if saved is not None and self.given.get(name, getattr(saved, name)) != getattr(saved, name):
                raise UserError(
                    f"the checkpoint's model has {name} {getattr(saved, name)}; "
                    f"it cannot be resumed with --{name} {self.given[name]}"
                )
        return replace(saved or Settings(), **self.given)  # type: ignore[arg-type]


def parse(arguments: list[str]) -> Options:
    """Return the options, checked as far as that is possible without files; raise a UserError if they are wrong."""
    found = vars(_parser().parse_args(arguments))
    given = {f.name: found.pop(f.name) for f in fields(Settings) if f.name in found}
    return Options(given=given, **found)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists what can be given")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train_gpt.py",
        allow_abbrev=False,
        description="Train a byte-level GPT that fsdp2.fully_shard shards over several processes.",
        epilog="Without torchrun, the program starts its processes itself.",
    )
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="the text to learn; default: the manual in Python's library")
    add("--out", type=Path, metavar="FOLDER", help="folder for checkpoints and the picture; default: runs/DATE-TIME")
    add("--resume", type=Path, metavar="FOLDER", help="resume from this checkpoint, or from the newest one of this run")
    add("--ranks", type=_at_least(1), default=2, metavar="N", help="processes to start; ignored under torchrun")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs over NCCL if there are any")
    add("--compute", choices=("auto", "bfloat16", "float32"), default="auto", help="auto: bfloat16 where it is fast")
    add("--stop-at", type=_at_least(1), metavar="STEP", help="save and stop there, as if the job's time were up")
    add("--eval-every", type=_at_least(1), default=20, metavar="N", help="steps between evaluations on held-out text")
    add("--save-every", type=_at_least(1), default=200, metavar="N", help="steps between checkpoints")
    add("--sample", type=_at_least(0), default=300, metavar="BYTES", help="bytes of text to generate; 0: none")
    add("--prompt", type=_some_text, default="The ", metavar="TEXT", help="the beginning of the generated text")
    add("--report", action=argparse.BooleanOptionalAction, default=True, help="print the table and draw the picture")
    what = parser.add_argument_group("model and training (kept in the checkpoint)")
    for name, value in asdict(Settings()).items():
        kind = _at_least(0 if name == "seed" else 1) if isinstance(value, int) else _positive
        flag = "--" + name.replace("_", "-")
        what.add_argument(flag, type=kind, default=argparse.SUPPRESS, metavar="N", help=f"default: {value}")
    return parser


def _at_least(smallest: int):  # type: ignore[no-untyped-def]
    def whole_number(text: str) -> int:
        if (value := int(text)) < smallest:
            raise argparse.ArgumentTypeError(f"{value} is less than {smallest}")
        return value

    return whole_number


def _some_text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it must not be empty")
    return text


def _positive(text: str) -> float:
    if not 0 < (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value
