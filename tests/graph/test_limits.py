"""Files made to burn time or memory, or to reach out of the sandbox, are dealt with at once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hflow.graph.source.document import MAX_BYTES
from hflow.graph.source.expressions import ExpressionError, evaluate

MAX_SECONDS = 2.0  # of one core: parsing 1 MB of brackets by the pure-Python parser included
MAX_MEMORY = 300 * 2**20  # bytes, of the whole process with the interpreter and hflow

# Run in a process of its own, which may have 1 GiB: checks the file, prints codes, seconds and the greatest
# resident memory (of `getrusage` it would be that of the process that forked this one).
PROGRAM = """
import json, re, resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
from hflow.diagnostics import HflowError
from hflow.graph.load import check
started = time.process_time()
try:
    codes = [d.code for d in check(sys.argv[1])[1]]
except HflowError as error:
    codes = sorted({d.code for d in error.diagnostics})
seconds = time.process_time() - started
peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
print(json.dumps([codes, seconds, peak]))
"""


def bomb(levels: int, width: int) -> str:
    """The billion laughs: each level repeats the one before by aliases."""
    lines = [f"a0: &a0 [{', '.join(['x'] * width)}]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"


GRPO = Path("tests/bad/parents/grpo.yaml").read_text()
LONG = "x" * 200_000
TEXTS = {
    "bomb of aliases": (bomb(64, 9), ["HF004"]),
    "alias to itself": ("a: &a [*a]\n", ["HF004"]),
    "merge keys": ("a: &a {b: 1}\nc: {<<: *a}\n", ["HF004"]),
    "1 MB of brackets": ("[" * (MAX_BYTES - 1), ["HF005"]),
    "1 MB of braces": ("{" * (MAX_BYTES - 1), ["HF005"]),
    "1 MB of question marks": ("? " * (MAX_BYTES // 2 - 1), ["HF005"]),
    "1 MB of sequences": ("- " * (MAX_BYTES // 2 - 1), ["HF005"]),
    "1 MB of keys": ("".join(f"k{i}: 1\n" for i in range(MAX_BYTES // 11)), ["HF005"]),
    "1 MB of one word": ("a: " + "x" * (MAX_BYTES - 4), ["HF101", "HF102"]),
    "1 MB of escapes": ('a: "' + r"\x41" * (MAX_BYTES // 4 - 2) + '"', ["HF101", "HF102"]),
    "1 MB of digits": ("a: " + "9" * (MAX_BYTES - 4), ["HF002"]),
    "1 MB of a file name": (f"extends: {'x' * (MAX_BYTES - 11)}", ["HF107"]),
    "more than 1 MB": ("#" * (MAX_BYTES + 1), ["HF005"]),
    "deep mapping": ("".join(" " * i + "a:\n" for i in range(400)), ["HF005"]),
    "huge integers": (GRPO.replace("times: 10", f"times: {'9' * 400}"), ["HF103"]),
    "huge options": (GRPO.replace("n: 4", f"n: {'9' * 400}"), ["HF212"]),
    "huge exponent": (GRPO.replace("lr: 1e-6", "lr: 1e999999999"), ["HF212"]),
    "long names": (GRPO.replace("  prompts:", f"  ? {LONG}\n  :"), ["HF201"]),
    "long references": (GRPO.replace("reward.score", f"{LONG}.score"), ["HF201"]),
    "long function": (GRPO.replace("hflow.ops.rewards.exact_match", f"{LONG}.f"), ["HF205"]),
    "long function file": (GRPO.replace("hflow.ops.rewards.exact_match", f"./{LONG}.py:f"), ["HF205"]),
    "long type": (GRPO.replace("str[batch]", f"str[{'*'.join(['a'] * 50_000)}]"), ["HF206"]),
    "deep template": (GRPO.replace("{{ question }}", "{{ " + "(" * 5_000 + " }}"), ["HF212"]),
    "template that is not run": (GRPO.replace("{{ question }}", "{{ range(10**9) | list }}"), []),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_checked_soon_and_in_little_memory(name: str, tmp_path: Path) -> None:
    text, expected = TEXTS[name]
    (tmp_path / "limits.yaml").write_text(text)
    codes, seconds, peak = measured(tmp_path / "limits.yaml")
    assert codes == expected
    assert seconds < MAX_SECONDS
    assert peak < MAX_MEMORY


def measured(path: Path) -> tuple[list[str], float, int]:
    command = [sys.executable, "-c", PROGRAM, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return tuple(json.loads(done.stdout))


ESCAPES = [
    "params",
    "self",
    "batch.__class__",
    "batch.__class__.__mro__[1].__subclasses__()",
    "batch['__class__']",
    "(batch).real",
    "name.format(batch)",
    "'{0.__class__}'.format(batch)",
    "'%s' % batch",
    "'%(a)s' % {'a': 1}",
    "batch | attr('__class__')",
    "batch | string",
    "[1][0]",
    "(1, 2)",
    "{'a': 1}.a",
    "range(10**9)",
    "cycler",
    "lipsum()",
    "joiner",
    "namespace(a=1)",
    "dict(a=1)",
    "batch()",
    "batch is callable",
    "batch in [1]",
    "true in name",
    "name ~ name",
    "name + name",
    "name * 999999999",
    "999999999 * name",
    "name[0:1]",
    "none",
    "9 ** 999999",
    "9 ** 99 ** 99",
    "(2 ** 64) ** 64",
    "((((9 ** 64) ** 64) ** 64) ** 64)",
    "9.9 ** 999",
    "1 / 0",
    "1 // 0",
    "1 % 0",
    "1 if batch",
    "(" * 99 + "1" + ")" * 99,
    "1" + "+1" * 100,
    "{# comment #} 1",
    "1 }} {{ 1",
    "{% raw %}",
    "1; 2",
    "lambda: 1",
    "__import__('os')",
    "batch if (batch := 1) else 2",
    "\\x00",
    "\u202e1",
    "１ + ",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_expressions_stay_in_their_sandbox(text: str) -> None:
    started = time.process_time()
    with pytest.raises(ExpressionError) as caught:
        evaluate(text, {"batch": 8, "name": "tiny"})
    assert str(caught.value)
    assert time.process_time() - started < MAX_SECONDS
