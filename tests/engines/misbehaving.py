"""Functions that do to their process what they like; only that imports this file."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

CALLS: list[Tensor] = []


def double(x: Tensor) -> Tensor:
    return 2 * x


def crash(x: Tensor) -> None:
    ctypes.string_at(0)


def leave(x: Tensor) -> NoReturn:
    os._exit(3)


def exits(x: Tensor) -> NoReturn:
    sys.exit(3)


def killed(x: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def speaks_last(x: Tensor) -> NoReturn:
    print("the last words", file=sys.stderr)
    os._exit(1)


def writes_slowly(x: Tensor) -> NoReturn:
    """Faulthandler, too, writes its lines in pieces."""
    for character in "the last words" + 100 * "\n":
        os.write(2, character.encode())
        time.sleep(0.002)
    os._exit(1)


def raises(x: Tensor) -> Tensor:
    return x * (1 / len(CALLS))


def interrupts(x: Tensor) -> NoReturn:
    raise KeyboardInterrupt


def junk(x: Tensor) -> object:
    return object()


def wrong_shape(x: Tensor) -> Tensor:
    return x[:1]


def closes(x: Tensor) -> None:
    os.closerange(3, 100)


def scribbles(x: Tensor) -> Tensor:
    """Into every socket that there is."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if "socket" in str(link.readlink()):
                os.write(int(link.name), b"x" * 100)
    return x


def for_ever(x: Tensor) -> NoReturn:
    while True:
        pass


def holds_the_lock(x: Tensor) -> None:
    ctypes.PyDLL(None).sleep(1000)  # unlike CDLL, it does not let Python's lock go


def prints(x: Tensor) -> Tensor:
    print("y" * 50_000_000)
    print("z" * 50_000_000, file=sys.stderr)
    return x


def warns(x: Tensor) -> Tensor:
    print("one")
    warnings.warn("two", stacklevel=1)
    logging.getLogger("three").warning("four")
    sys.stderr.write("five")
    return x


def forks(x: Tensor) -> Tensor:
    os.fork()
    return x


def forks_and_stays(x: Tensor) -> NoReturn:
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(4)


def starts(x: Tensor) -> Tensor:
    """The numbers of its process and of one that it starts."""
    child = subprocess.Popen(["sleep", "1000"])
    return torch.tensor([os.getpid(), child.pid, 0, 0])


def counts(x: Tensor) -> Tensor:
    CALLS.append(x)
    return x * len(CALLS)


def where(x: Tensor) -> Tensor:
    return torch.tensor([os.getpid(), os.getppid(), torch.get_num_threads(), 0])


def slow(x: Tensor) -> Tensor:
    time.sleep(0.3)
    return x


def leaks(x: Tensor) -> Tensor:
    CALLS.append(torch.ones(25_000_000))
    return x


def sums(x: Tensor) -> Tensor:
    """What depends on the number of threads, for one."""
    torch.manual_seed(3)
    big = torch.randn(3_000_000)
    product = big[:90_000].view(300, 300) @ big[:300]
    return torch.stack([big.sum(), big.softmax(0).norm(), product.sum(), x.exp().mean()])
