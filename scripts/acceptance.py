"""Write what `make acceptance` found to tests/acceptance.md.

    python scripts/acceptance.py RESULTS.xml [RESULTS.xml ...]

Reads pytest's results in JUnit's format. Fails when a file is missing, or when a test failed.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests/acceptance.md"
PACKAGES = ("torch", "megatron-core", "ray", "sglang")
BAD = ("failure", "error")


@dataclass(frozen=True)
class Result:
    """Of one case. `outcome`: passed, skipped, failed."""

    file: str
    name: str
    outcome: str
    time_s: float


def read(file: Path) -> Iterator[Result]:
    for case in ET.parse(file).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {*BAD} else "skipped" if "skipped" in kinds else "passed"
        name = case.get("classname", "").replace(".", "/")
        yield Result(name, case.get("name", ""), outcome, float(case.get("time", 0)))


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def commit() -> str:
    """Its hash, and whether the tree was as it says."""
    changed = git("status", "--porcelain", "--", ".", f":!{TABLE.relative_to(ROOT)}")
    return git("rev-parse", "HEAD") + (" with changes" if changed else "")


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    cores = len(os.sched_getaffinity(0))
    return f"{models[0] if models else platform.machine()}, {cores} cores, {memory_gb:.0f} GB"


def packages() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except ModuleNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def rows(results: Iterable[Result]) -> Iterator[tuple[str, ...]]:
    by_file: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_file[result.file].append(result)
    for file, cases in sorted(by_file.items()):
        counts = (sum(c.outcome == outcome for c in cases) for outcome in ("passed", "skipped", "failed"))
        yield file, *map(str, counts), f"{sum(c.time_s for c in cases):.0f}"


def text(results: Sequence[Result]) -> str:
    """The page. Times are of the tests themselves, which partly ran side by side."""
    totals = [sum(r.outcome == outcome for r in results) for outcome in ("passed", "skipped", "failed")]
    facts = {
        "commit": commit(), "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(), "packages": packages(),
    }  # fmt: skip
    lines = ["# Acceptance", "", "Written by `make acceptance`: every case of every test, once.", ""]
    lines += [f"- {name}: {fact}" for name, fact in facts.items()]
    lines += ["", "| tests | passed | skipped | failed | seconds |", "|---|---:|---:|---:|---:|"]
    lines += [f"| {' | '.join(row)} |" for row in rows(results)]
    seconds = sum(result.time_s for result in results)
    lines += [f"| **all** | {' | '.join(map(str, totals))} | {seconds:.0f} |"]
    failed = [f"- `{r.file}.py::{r.name}`" for r in results if r.outcome == "failed"]
    return "\n".join([*lines, *(["", "Failed:", "", *failed] if failed else [])]) + "\n"


def main(files: Sequence[str]) -> int:
    missing = [file for file in files if not Path(file).is_file()]
    if missing or not files:
        print(f"no results: {', '.join(missing) or 'name the files'}", file=sys.stderr)
        return 2
    results = [result for file in files for result in read(Path(file))]
    TABLE.write_text(text(results))
    print(f"{len(results)} results are in {TABLE.relative_to(ROOT)}")
    return int(not results or any(result.outcome == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
