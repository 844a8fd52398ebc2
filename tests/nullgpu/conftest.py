"""Where there is no null device under this process, only a sample of these tests runs, in a process that has one."""

from __future__ import annotations

from tests.nullgpu.device import on_device

collect_ignore_glob = (
    ["test_sample.py"] if on_device() else [f"test_{letter}*.py" for letter in "abcdefghijklmnopqrtuvwxyz"]
)
