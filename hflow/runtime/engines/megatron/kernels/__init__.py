"""Kernels for CUDA, in Triton, which comes with torch where torch knows CUDA: import a module here only then.

Torch's elementwise operations read halves of rows at a third of the memory's speed, and each of them reads
and writes everything once more. Inside a kernel sums are float32; numbers are rounded where they are written,
and where a product of matrices reads them.
"""

# Triton may not be installed.
# pyright: reportMissingImports=false

from typing import Any

import triton

jit: Any = triton.jit  # what it makes is no function, and is not called like one
