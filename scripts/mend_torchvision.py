"""Make PyPI's torchvision importable beside a torch without CUDA.

Its compiled operators are linked with CUDA and do not load there. torchvision bears that, but for one file,
`_meta_registrations.py`, which describes the shapes of those operators' results and fails because they do
not exist. SGLang imports torchvision and, for text, calls none of them: the file is emptied. Installing
torchvision again brings it back.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch


def mend(file: Path) -> bool:
    """Empty `file`; whether it was not empty yet."""
    if not file.read_bytes():
        return False
    # pip may have linked the file from its cache, and writing would then empty it there as well
    empty = file.with_suffix(".new")
    empty.touch()
    empty.replace(file)
    return True


def main() -> int:
    if torch.version.cuda is not None:
        print(f"torch {torch.__version__} has CUDA: torchvision is left as it is")
        return 0
    spec = importlib.util.find_spec("torchvision")  # found, not imported
    if spec is None or spec.origin is None:
        print("torchvision is not installed", file=sys.stderr)
        return 1
    file = Path(spec.origin).with_name("_meta_registrations.py")
    print(f"{'emptied' if mend(file) else 'already empty:'} {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
