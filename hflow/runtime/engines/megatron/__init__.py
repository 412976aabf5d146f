"""The Megatron engine: generate, score and train on one mesh with explicit process groups.

Importing this package prepares Megatron for machines without CUDA, so import it before
``megatron.core``.
"""

from hflow.runtime.engines.megatron import cpu

cpu.install()
