"""The commands of a page as a shell script, for tests/newcomer.sh; the files that it shows are written here.

python tests/follow.py README.md > steps.sh
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

FILE = re.compile(r"^`([\w/]+\.\w+)`:\n\n```\w+\n(.*?)^```", re.M | re.S)
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.M | re.S)
FAILS = "# exit code 1"
FEW, MORE = 10, 12  # steps of a run, and of one that goes on


def write_files(text: str) -> None:
    for name, content in FILE.findall(text):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
        print(f"wrote {name}", file=sys.stderr)


def script(text: str) -> Iterator[str]:
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if not words:
                continue
            if words[0] != "hflow" or words[1] == "calibrate":  # which measures for minutes
                yield f"echo {shlex.quote(f'left out: {shlex.join(words)}')}"
                continue
            command = shlex.join(shortened(words) if words[1] == "exec" else words)
            yield f"echo {shlex.quote(f'$ {command}')}"
            yield f"status=0; {command} || status=$?; test $status = 1" if FAILS in line else command


def shortened(words: list[str]) -> list[str]:
    """`hflow exec`, on CPUs, for a few steps."""
    steps = MORE if "--resume" in words else FEW
    here = ["local1" if "h100" in word else word for word in words]
    few = [re.sub(r"(?<=params\.steps=)\d{3,}", str(steps), word) for word in here]
    if any("params.steps=" in word for word in few):
        return few
    return [*few, "--set", f"params.steps={steps}"]


def main() -> None:
    text = Path(sys.argv[1]).read_text()
    write_files(text)
    print("\n".join(script(text)))


if __name__ == "__main__":
    main()
