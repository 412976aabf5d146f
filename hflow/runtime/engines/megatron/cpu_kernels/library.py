"""`kernels.cpp` and its headers, compiled by the machine's C++ compiler and loaded into this process."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.cpp")
SWITCH = "HFLOW_CPU_KERNELS"  # 0: torch's own operations
COMPILERS = ["c++"], ["g++"], ["clang++"]
# Not -ffast-math: it hides NaN, and changes how the whole process rounds. bf16 is read in pairs, as floats.
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno",
    "-fno-trapping-math", "-fno-strict-aliasing", "-shared", "-fPIC",
)  # fmt: skip
TIME_LIMIT_S = 120
TYPES = {torch.float32: 0, torch.bfloat16: 1}  # as `kernels.cpp` numbers them

_pointer, _long, _int = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
_float, _double = ctypes.c_float, ctypes.c_double
_ARGUMENTS = {
    "attend_newest": [_int, *[_pointer] * 10, *[_long] * 10, _float, _int],
    "causal": [_int, *[_pointer] * 7, *[_long] * 6, _int],
    "causal_gradient": [_int, *[_pointer] * 11, *[_long] * 6, _int],
    "norm": [_int, *[_pointer] * 3, *[_long] * 2, *[_float] * 2, _int],
    "norm_gradient": [_int, *[_pointer] * 5, *[_long] * 2, *[_float] * 2, _int],
    "gated": [*[_int] * 2, *[_pointer] * 2, *[_long] * 2, _int],
    "gated_gradient": [*[_int] * 2, *[_pointer] * 3, *[_long] * 2, _int],
    "softmax": [*[_int] * 2, *[_pointer] * 4, *[_long] * 2, _float, _int],
    "softmax_gradient": [_int, *[_pointer] * 8, *[_long] * 2, _float, _int],
    "turned": [_int, *[_pointer] * 4, *[_long] * 6, _float, _int],
    "place": [_int, *[_pointer] * 7, *[_long] * 12, _float, _int],
    "sample": [_int, *[_pointer] * 4, *[_long] * 2, _double, _int],
    "linear": [_int, *[_pointer] * 5, *[_long] * 3, _int],
    "attention_block": [_int, *[_pointer] * 19, *[_long] * 12, *[_float] * 4, _int],
    "layers": [*[_int] * 2, *[_pointer] * 6, *[_long] * 15, *[_float] * 4, _int],
    "mlp_block": [*[_int] * 2, *[_pointer] * 6, *[_long] * 3, *[_float] * 2, _int],
}


class NotBuiltError(Exception):
    """The kernels cannot be compiled or loaded here; the message is one line."""


def runs_on(x: Tensor, other: Tensor | None = None) -> bool:
    """Whether there are kernels for `x`, and for what it meets, which has to be of the same type."""
    is_alike = other is None or other.dtype == x.dtype
    return is_alike and x.device.type == "cpu" and x.dtype in TYPES and library() is not None


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, whose functions are called ``hflow_NAME``. None, after a warning, where they
    cannot be had, and where the user has switched them off."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return built()
    except NotBuiltError as error:
        warnings.warn(f"no kernels for this CPU, torch's own operations take longer: {error}", stacklevel=2)
        return None


def built(folder: Path | None = None) -> ctypes.CDLL:
    """The kernels, by the first compiler that can make them.

    Args:
        folder: where they are, if they have been compiled for this processor before; default: in the user's
            cache.

    Raises:
        NotBuiltError: no compiler, or all fail, or the result cannot be written or loaded.
    """
    problem = NotBuiltError("there is no C++ compiler: install g++, or name one in CXX")
    for compiler in compilers():
        try:
            return _loaded(compiler, folder or cache_folder())
        except NotBuiltError as error:
            problem = error
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home
            problem = NotBuiltError(str(error).splitlines()[0])
    raise problem


def compilers() -> list[list[str]]:
    """How their command lines begin: that of ``$CXX``, which may have arguments, and the usual ones."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = (
        [path, *rest] for name, *rest in filter(None, (named, *COMPILERS)) if (path := shutil.which(name))
    )
    return list(found)


def cache_folder() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "hflow" / "cpu-kernels"


def _loaded(compiler: list[str], folder: Path) -> ctypes.CDLL:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise NotBuiltError(f"`{folder}` belongs to another user")
    file = folder / f"kernels-{_key(compiler)}.so"
    if not file.exists():
        _compile(compiler, file)
    loaded = ctypes.CDLL(str(file))
    for name, arguments in _ARGUMENTS.items():
        function = getattr(loaded, f"hflow_{name}")
        function.argtypes, function.restype = arguments, None
    return loaded


def sources() -> list[Path]:
    """What is compiled."""
    return [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]


def _key(compiler: list[str]) -> str:
    """What the compiled file depends on: a folder may be shared by machines with other processors."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=TIME_LIMIT_S, check=True)
    files = (path.read_bytes() for path in sources())
    parts = (*files, version.stdout, repr(FLAGS).encode(), _processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    said = (line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    return "\n".join(sorted(set(said)))


def _compile(compiler: list[str], file: Path) -> None:
    """Other processes, on other hosts too, may do so at the same time: the first result stays, which may be
    in use."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        command = [*compiler, *FLAGS, str(SOURCE), "-o", str(made)]
        told = subprocess.run(command, capture_output=True, timeout=TIME_LIMIT_S)
        if told.returncode:
            lines = told.stderr.decode(errors="replace").splitlines() or [f"exit code {told.returncode}"]
            first = next((line for line in lines if "error:" in line), lines[0])
            raise NotBuiltError(f"`{compiler[0]}` fails: {first}")
        with made.open("rb+") as written:
            os.fsync(written.fileno())  # loading a file of which a part was lost ends the process
        try:
            file.hardlink_to(made)
        except FileExistsError:
            pass  # another process was first, and its file is the same
        except OSError:  # a file system without hard links
            made.replace(file)


def call(name: str, x: Tensor, *arguments: Tensor | float | None) -> None:
    """Run a kernel for tensors of the type of `x`; tensors are given by their memory. It has the threads that
    torch has."""
    found = library()
    assert found is not None, "ask `runs_on` first"
    given = (a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)
    getattr(found, f"hflow_{name}")(TYPES[x.dtype], *given, torch.get_num_threads())
