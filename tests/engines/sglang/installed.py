"""SGLang is installed on demand; tests that need it say so."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_sglang = pytest.mark.skipif(find_spec("sglang") is None, reason="make setup-sglang")
