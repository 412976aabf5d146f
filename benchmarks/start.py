"""How long a user waits for `hflow check`: the whole process, for every algorithm.

    python benchmarks/start.py [--times 5] [--save]

The median of some runs, the algorithms in turn; `share` is that of the libraries' own start (Python,
pydantic, typer, ruamel), measured in the same rounds: no command of hflow takes less. The last line is one
JSON object; with --save it also goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = "libraries alone"


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds of `hflow check`.")
    parser.add_argument("--times", type=int, default=5, help="runs of which the median counts")
    parser.add_argument("--save", action="store_true", help="also write results/start-DATE.json")
    options = parser.parse_args()
    checks = [sys.executable, "-m", "hflow.cli.app", "check"]
    commands = {path.stem: [*checks, str(path)] for path in sorted((ROOT / "algorithms").glob("*.yaml"))}
    commands[LIBRARIES] = [sys.executable, "-c", "import pydantic, ruamel.yaml, typer"]
    rounds = [{name: seconds(command) for name, command in commands.items()} for _ in range(options.times)]
    found = {name: round(median(each[name] for each in rounds), 3) for name in commands}
    for name, taken in found.items():
        print(f"{name:<26}{taken:6.2f} s")
    least = found.pop(LIBRARIES)
    slowest = max(found.values())
    report = {"benchmark": "start", "libraries_s": least, "slowest_s": slowest, "check_s": found}
    line = json.dumps({**report, "share": round(least / slowest, 2)})
    if options.save:
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        (ROOT / f"benchmarks/results/start-{date}.json").write_text(line + "\n")
    print(line)


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
