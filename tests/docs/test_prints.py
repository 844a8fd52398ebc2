"""What a page says that it prints, it prints: its program runs as a reader starts it, to the end and with all steps.

A block below ``<!-- prints -->`` is what the program writes to stdout at that point. Numbers with a decimal point may
differ a little, since kernels sum in other orders; below ``<!-- prints: measured -->`` they are not compared.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_pages import DOCS, blocks, packages, torchrun
from tests.support import ROOT, api
from tests.support.packages import needs

pytestmark = [api.fsdp2_only, pytest.mark.slow]

SHOWN = re.compile(r"^<!-- prints(: measured)? -->\n```\w*\n(.*?)^```$", re.M | re.S)
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
PAGES = [path for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))) if SHOWN.search(path.read_text())]


def shown(path: Path) -> list[tuple[str, bool]]:
    """Return the lines that a page shows as printed, each with whether its numbers were measured."""
    found = SHOWN.findall(path.read_text())
    return [(line.rstrip(), bool(measured)) for measured, text in found for line in text.splitlines() if line.strip()]


def program_of(path: Path) -> str:
    """Return the page's blocks as one program, which ends as a reader is told to end it."""
    text = "\n".join(blocks(path))
    return text if "destroy_process_group()" in text else f"{text}\ntorch.distributed.destroy_process_group()\n"


def assert_alike(line: str, expected: str, measured: bool) -> None:
    """Compare two lines: words exactly, numbers within a twentieth, or not at all if they were measured."""
    assert NUMBER.sub("#", line).split() == NUMBER.sub("#", expected).split()
    if not measured:
        for got, wanted in zip(NUMBER.findall(line), NUMBER.findall(expected), strict=True):
            assert float(got) == pytest.approx(float(wanted), rel=0.05, abs=0.011), f"{line!r}, expected {expected!r}"


def cases() -> list[Any]:
    """Return the pages as pytest's parameters."""
    needed = {path: packages(path.relative_to(DOCS).as_posix()) if path.is_relative_to(DOCS) else [] for path in PAGES}
    return [pytest.param(path, id=path.stem, marks=needs(*names) if names else ()) for path, names in needed.items()]


@pytest.mark.parametrize("path", cases())
def test_prints(path, tmp_path):
    """Each line, in order, and nothing else."""
    ranks = re.search(r"<!-- ranks: (\d+) -->", path.read_text())
    (tmp_path / "program.py").write_text(program_of(path))
    done = torchrun("program.py", folder=tmp_path, ranks=int(ranks[1]) if ranks else 2)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
    expected = shown(path)
    assert len(lines) == len(expected), done.stdout
    for line, (wanted, measured) in zip(lines, expected, strict=True):
        assert_alike(line, wanted, measured)


CONFIG = re.compile(r"^config = AutoConfig\.for_model\(\n.*?^\)\n", re.M | re.S)
TIED = """config = AutoConfig.for_model("{}", vocab_size=64, hidden_size=64, {}, eos_token_id=0, pad_token_id=0)
assert config.tie_word_embeddings
"""


@needs(*packages("tutorials/finetune.md"))
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gpt2", "n_layer=2, n_head=4"),
        ("opt", "ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64"),
    ],
)
def test_fine_tuning_another_model(kind, sizes, tmp_path):
    """With nothing but the configuration changed: of a model with a tied head, and with dropout. The head was parted
    from the embedding on the meta device, so that its weight was missing in the files; and dropout was left on."""
    text, changed = CONFIG.subn(TIED.format(kind, sizes), program_of(DOCS / "tutorials" / "finetune.md"))
    assert changed == 1
    (tmp_path / "program.py").write_text(text)
    done = torchrun("program.py", folder=tmp_path, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r"^(held out|exported|loaded again): loss (\d+\.\d+)", done.stdout, re.M))
    assert len(found) == 3 and found["exported"] == found["loaded again"], done.stdout
    assert float(found["held out"]) == pytest.approx(float(found["exported"]), abs=0.02), done.stdout


def test_differences_are_noticed():
    """Another word, another integer and a number that is too far away."""
    assert_alike("step 10: loss 4.16 of 64", "step 10: loss 4.17 of 64", False)
    assert_alike("12.1 ms", "99.9 ms", True)
    for other in ("step 20: loss 4.16 of 64", "step 10: loss 5.16 of 64", "step 10: norm 4.16 of 64"):
        with pytest.raises(AssertionError):
            assert_alike(other, "step 10: loss 4.16 of 64", False)
