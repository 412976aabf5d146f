"""Whether validation pass@1 of a run has risen enough: python examples/math_chat/check.py RUN"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LEAST_RISE = 0.2


def main() -> None:
    summary = json.loads((Path(sys.argv[1]) / "summary.json").read_text())
    measured = summary["evaluations"]["eval/test/pass@1"]
    before, after = measured["before"], measured["after"]
    print(f"pass@1 on {sys.argv[1]}: {before:.1%} before, {after:.1%} after")
    if after - before < LEAST_RISE:
        sys.exit(f"it should have risen by {LEAST_RISE:.0%}")


if __name__ == "__main__":
    main()
