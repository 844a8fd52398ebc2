"""The null device: its libraries, built once for each torch, and the environment of a program that runs on it.

    python -m tests.nullgpu.device program.py ARGUMENT ...    runs any program on it
    python -m tests.nullgpu.device -m pytest tests/nullgpu    as `make test-cuda` does

The libraries take the place of CUDA's runtime, its driver, cuBLAS, NCCL and NVML (``device/*.c``); ``README.md`` says
what they simulate. Programs are started with them loaded before anything else, so torch must be imported later.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["COUNTS", "Counts", "environment", "missing", "on_device"]

HERE = Path(__file__).parent
SOURCES = HERE / "device"
COUNTS = (
    *("kernels", "memcpys", "memsets", "event_records", "stream_waits", "nccl_calls", "nccl_groups", "mallocs"),
    *("frees", "gemms", "host_waits", "nccl_bytes", "event_queries", "streams", "events", "host_allocs"),
    *("graph_nodes", "graph_launches"),
)
"""What the device counts, in the order of the enumeration in ``device/null.h``."""
IMPORTED = re.compile(r"(__cuda|cuda[A-Z]|cublas|nccl)\w+")
DEFINED = re.compile(r"^(?:EXPORT [\w\s*]*?|PRODUCT\()(\w+)[()]", re.M)
DEFAULT = '__attribute__((visibility("default")))'
WITH_KERNELS = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so", "libtorch_cuda_linalg.so")


def _torch() -> Path | None:
    """Return the folder of the installed torch, which is not imported."""
    found = importlib.util.find_spec("torch")
    return Path(found.origin).parent if found and found.origin else None


@functools.cache
def missing() -> str:
    """Return why programs cannot run on the null device here; nothing if they can."""
    torch = _torch()
    if torch is None or not (torch / "lib" / "libtorch_cuda.so").exists():
        return "needs a torch that is built for CUDA (make test-cuda installs one)"
    if sys.platform != "linux":
        return "needs Linux"
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            return f"needs {tool} (binutils and a C compiler)"
    if _headers() is None:
        return "needs CUDA's headers, which pip installs with torch for CUDA (nvidia/*/include/cuda_runtime_api.h)"
    return ""


def _headers() -> Path | None:
    torch = _torch()
    assert torch is not None
    return next((path.parent for path in sorted(torch.parent.glob("nvidia/*/include/cuda_runtime_api.h"))), None)


def _undefined(libraries: Path) -> set[str]:
    """Return the functions of CUDA that torch imports."""
    names: set[str] = set()
    for library in WITH_KERNELS:
        if (libraries / library).exists():
            run = subprocess.run(
                ["nm", "-D", "--undefined-only", libraries / library], capture_output=True, text=True, check=True
            )
            names |= {line.split()[-1].split("@")[0] for line in run.stdout.splitlines()}
    return {name for name in names if IMPORTED.fullmatch(name)}


@functools.cache
def libraries() -> Path:
    """Return the folder with the libraries, which are built at the first call for this torch and these sources."""
    torch, headers = _torch(), _headers()
    assert torch is not None and headers is not None, missing()
    sources = sorted(SOURCES.rglob("*.[ch]"))
    key = hashlib.sha256(b"".join(path.read_bytes() for path in sources) + str(torch).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fsdp2-nullgpu"
    built = cache / key
    if not built.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            making = Path(folder) / "made"
            _build(making, torch / "lib", headers)
            try:
                making.rename(built)  # whole or not at all
            except OSError:
                assert built.exists()  # another process was first
    return built


def _build(folder: Path, torch_libraries: Path, headers: Path) -> None:
    folder.mkdir()
    main = [SOURCES / name for name in ("queue.c", "runtime.c", "nccl.c")]
    defined = {name for path in main for name in DEFINED.findall(path.read_text())}
    rest = folder / "rest.c"
    rest.write_text(
        "".join(
            f"{DEFAULT} int {name}(void) {{ return 0; }}\n" for name in sorted(_undefined(torch_libraries) - defined)
        )
    )
    for name, files, options in (
        ("libnullgpu.so", [*main, rest], [f"-I{SOURCES}", f"-I{headers}", "-lpthread", "-ldl"]),
        ("libcuda.so.1", [SOURCES / "driver.c"], ["-ldl"]),
        ("libnvidia-ml.so.1", [SOURCES / "nvml.c"], []),
    ):
        command = [
            "gcc",
            "-O1",
            "-fPIC",
            "-shared",
            "-fvisibility=hidden",
            f"-Wl,-soname,{name}",
            "-o",
            folder / name,
            *files,
            *options,
        ]
        made = subprocess.run(command, capture_output=True, text=True)
        assert not made.returncode, made.stderr


def environment(devices: int = 1, log: int = 0, shared: Path | None = None, gib: float = 80.0) -> dict[str, str]:
    """Return the variables to add for a program on ``devices`` null devices.

    ``log`` is the room for what was put on streams, which ``ordering.py`` reads. ``shared`` is a folder in which
    processes meet that are ranks of one job; without it a process is alone and plays one rank of any number.
    """
    folder = libraries()
    return {
        "LD_LIBRARY_PATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]),
        "LD_PRELOAD": str(folder / "libnullgpu.so"),
        "NULLGPU_DEVICES": str(devices),
        "NULLGPU_GIB": str(gib),
        "NULLGPU_LOG": str(log),
        "NULLGPU_SHARED": "" if shared is None else str(shared),
        "TORCH_NCCL_RANKS_PER_ROOT": "100000",  # else a communicator of more than 128 ranks waits for rank 128
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def on_device() -> bool:
    """Whether this process runs on the null device."""
    return "libnullgpu.so" in os.environ.get("LD_PRELOAD", "")


class Counts:
    """What the device does in a block: ``with Counts() as counts: ...``, then ``counts["kernels"]``."""

    def __enter__(self) -> Counts:
        self._all = (ctypes.c_longlong * 32).in_dll(ctypes.CDLL(None), "nullgpu_counts")
        self._before = list(self._all)
        return self

    def __exit__(self, *error: object) -> None:
        changes = [after - before for before, after in zip(self._before, self._all, strict=True)]
        self.found = dict(zip(COUNTS, changes, strict=False))

    def __getitem__(self, name: str) -> int:
        return self.found[name]


if __name__ == "__main__":
    if reason := missing():
        print(f"no null device: {reason}")
        sys.exit(0)
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], os.environ | environment(devices=8, log=4_000_000))
