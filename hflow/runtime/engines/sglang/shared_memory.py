"""Files of SGLang in shared memory: killed processes leave them."""

from __future__ import annotations

from hflow.runtime.engines.shared_memory import SHARED_MEMORY


def remove_of(instance: str) -> None:
    """SGLang's own, which bear the name of the server. Processes that still have them open serve on."""
    for file in SHARED_MEMORY.glob(f"sglang_*_{instance}_*"):
        file.unlink(missing_ok=True)
