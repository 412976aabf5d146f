"""SGLang is installed on demand; tests that need it say so."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

# Asked once, before any test: a folder `sglang` on a path that a test adds would count as a package.
HAS_SGLANG = find_spec("sglang") is not None
needs_sglang = pytest.mark.skipif(not HAS_SGLANG, reason="make setup-sglang")
