from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.diagnostics import HflowError
from hflow.graph.source.document import parse
from hflow.graph.write.formatter import format_file, format_text, meaning

ALGORITHMS = sorted(Path("algorithms").glob("*.yaml"))
TEXTS = [path.read_text() for path in ALGORITHMS]


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_algorithms_are_in_canonical_form(path: Path) -> None:
    assert format_text(path.read_text()) == path.read_text()


def test_examples_of_the_readme_are_in_canonical_form() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    examples = [text for text in blocks if "nodes:" in text]
    assert examples
    for text in examples:
        assert format_text(text) == text


CASES = {
    "keys take the order of the language": (
        "name: x\nhflow: 1\nmodels: {a: {frozen: true, path: p}}\n",
        "hflow: 1\nname: x\n\nmodels: {a: {path: p, frozen: true}}\n",
    ),
    "names and options keep theirs": (
        "params:\n  z: 1\n  a: 2\n",
        "params:\n  z: 1\n  a: 2\n",
    ),
    "a block stays a block, brackets stay brackets": (
        "loop:\n    name: step\n    times: 3\neval: { metric: a.b,rows: 1 }\n",
        "loop:\n  name: step\n  times: 3\n\neval: {metric: a.b, rows: 1}\n",
    ),
    "brackets over several lines are closed up": (
        "params: {a: 1,\n  b: 2}\n",
        "params: {a: 1, b: 2}\n",
    ),
    "brackets with comments become a block": (
        "params: {a: 1, # one\n  # two\n  b: 2} # end\n",
        "params:\n  a: 1 # one\n  # two\n  b: 2 # end\n",
    ),
    "quotes only where needed": (
        "doc: 'text, more'\nparams: {a: 'b', n: '1', l: ['x', 'y, z'], t: \"yes\", e: '', f: 'true'}\n",
        'doc: text, more\n\nparams: {a: b, n: "1", l: [x, "y, z"], t: yes, e: "", f: "true"}\n',
    ),
    "expressions have spaces and quotes": (
        "loop: {times: '${steps}', name: step}\n",
        'loop: {name: step, times: "${ steps }"}\n',
    ),
    "numbers stay as they are written": (
        "params: {a: 1e-4, b: 0x10, c: 1.50, d: .5, e: ~, f: True}\n",
        "params: {a: 1e-4, b: 0x10, c: 1.50, d: .5, e: null, f: true}\n",
    ),
    "blank lines between nodes, and at most one elsewhere": (
        "nodes:\n\n\n  a:\n    op: data\n    out: {}\n  b: {op: call}\n  c: {op: call}\n"
        "params:\n  x: 1\n\n\n  y: 2\n",
        "params:\n  x: 1\n\n  y: 2\n\n"
        "nodes:\n  a:\n    op: data\n    out: {}\n\n  b: {op: call}\n  c: {op: call}\n",
    ),
    "comments move with their key, what heads the file stays": (
        "# head\n\n# of the name\nname: x # beside\n# version\nhflow: 1\n# the end\n",
        "# head\n\n# of the name\n# version\nhflow: 1\nname: x # beside\n# the end\n",
    ),
    "a comment at the end of a mapping stays there": (
        "models:\n  a: {path: p}\n  # end of models\nloop: {}\n# end\n",
        "models:\n  a: {path: p}\n  # end of models\n\nloop: {}\n# end\n",
    ),
    "a comment before the first key of a mapping": (
        "params:\n      # deep\n  a: 1\n",
        "params:\n  # deep\n  a: 1\n",
    ),
    "number signs in texts are no comments": (
        "doc: \"a # b\"\nparams: {'k # l': 'x'}\n",
        'doc: "a # b"\n\nparams: {"k # l": x}\n',
    ),
    "texts of several lines": (
        "doc: |\n     one # no comment\n       two\n\n     three\n# comment\nname: x\n",
        "# comment\nname: x\ndoc: |\n  one # no comment\n    two\n\n  three\n",
    ),
    "folded plain text": (
        "doc: one\n       two\n       three # end\n",
        "doc: one\n  two\n  three # end\n",
    ),
    "block lists": (
        "params:\n- a\n# two\n-   b: 1\n    c: 2\n- [x,   y]\n",
        "params:\n  - a\n  # two\n  - b: 1\n    c: 2\n  - [x, y]\n",
    ),
    "carriage returns": ("hflow: 1\r\nname: x # c\r\n", "hflow: 1\nname: x # c\n"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_form(case: str) -> None:
    text, expected = CASES[case]
    assert format_text(text) == expected
    assert format_text(expected) == expected


def test_what_does_not_fit_on_a_line_becomes_a_block() -> None:
    values = ", ".join(f"value_{i}: {i}" for i in range(10))
    assert format_text(f"params: {{{values}}}\n").count("\n") == 11
    fitting = "params: {a: " + "x" * (110 - len("params: {a: }")) + "}"
    assert format_text(fitting + "\n") == fitting + "\n"
    assert format_text(fitting.replace("a: ", "aa: ") + "\n").startswith("params:\n  aa: x")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("- a\n", "HF006"),
        ("doc: a\u2028b\n", "HF006"),
        ("a: 1\na: 2\n", "HF003"),
        ("a: {", "HF002"),
        ("a: &x 1\n", "HF004"),
    ],
)
def test_what_is_refused(text: str, code: str) -> None:
    with pytest.raises(HflowError) as caught:
        format_text(text)
    assert caught.value.diagnostics[0].code == code


def test_files_are_written_only_when_they_change(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text("name: x\nhflow: 1\n")
    path.chmod(0o640)
    assert format_file(path, write=False) and path.read_text() == "name: x\nhflow: 1\n"
    assert format_file(path) and path.read_text() == "hflow: 1\nname: x\n"
    assert path.stat().st_mode & 0o777 == 0o640
    before = path.stat()
    assert not format_file(path)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [p.name for p in tmp_path.iterdir()] == ["graph.yaml"]


COMMENTS = ["# a comment", "#", "# ${ x } : {", "  # indented", "      # deep"]


def mutated(text: str, seed: int) -> str:
    """`text` after a few edits of its layout: comments, blank lines, spaces, moved and doubled lines."""
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 6)):
        lines = text.split("\n")
        at = rng.randrange(len(lines))
        is_quoted = '"' in lines[at] or "'" in lines[at]
        match rng.randrange(8):
            case 0:
                lines.insert(at, rng.choice(COMMENTS))
            case 1 | 3 | 4 if is_quoted:  # a comment within quotes would be none
                continue
            case 1:
                lines[at] += "  " + rng.choice(COMMENTS)
            case 2:
                lines.insert(at, "")
            case 3:
                lines[at] = lines[at].replace(": {", ": {\n" + " " * rng.randint(8, 20), 1)
            case 4:
                lines[at] = lines[at].replace(", ", f", # c\n{' ' * rng.randint(8, 12)}", 1)
            case 5:
                lines[at] = lines[at].replace(": ", ":    ", 1)
            case 6:
                lines.insert(rng.randrange(len(lines)), lines.pop(at))
            case _:
                lines[at] = lines[at].replace('"', "'")
        text = "\n".join(lines)
    return text


@pytest.mark.slow
@given(st.sampled_from(TEXTS), st.integers(0, 2**32))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_formatting_is_idempotent_and_keeps_the_meaning(text: str, seed: int) -> None:
    text = mutated(text, seed)
    try:
        plain = parse(text, "x").plain()
    except HflowError:
        return
    formatted = format_text(text)
    again = parse(formatted, "x").plain()
    assert meaning(again) == meaning(plain)
    for section in ("params", "models", "nodes"):  # whose order is the user's
        assert list(again.get(section) or ()) == list(plain.get(section) or ())
    assert format_text(formatted) == formatted
    assert sorted(re.findall(r"# [\w ]+", formatted)) == sorted(re.findall(r"# [\w ]+", text))
