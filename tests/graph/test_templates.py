"""Templates: what they have, that it is the same in every process, and that none of it is without bound."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hflow.diagnostics import HflowError
from hflow.graph.load import check
from hflow.graph.templates import template as templates
from hflow.graph.templates.budget import BadTemplateError
from hflow.graph.templates.environment import BoundedEnvironment
from hflow.graph.templates.template import Template
from hflow.graph.templates.vocabulary import FILTERS, FUNCTIONS, METHODS, STATEMENTS, TESTS
from tests.limits import memory_limited_to

ROW: dict[str, Any] = {
    "question": "How many? " * 50,
    "n": 5,
    "null": None,
    "part": 1.5,
    "list": [3, 1, 2],
    "words": ["b", "a", "c", "a"],
    "meta": {"b": 1, "a": 2, "items": 7},
    "messages": [{"role": "user", "content": "hi"}, {"role": "model", "content": "yo"}],
    "long": "a" * 10**6,
    "hyphens": "a-" * 10**5,
}
WRITTEN = {
    "{{ question[:8] }} {{ n * 2 + 1 }} {{ n // 2 }} {{ -n }} {{ 'a' * 3 }}": "How many 11 2 -5 aaa",
    "{{ meta.items }} {{ meta.items() }} {{ meta.keys() }}": (
        "7 [('b', 1), ('a', 2), ('items', 7)] ['b', 'a', 'items']"
    ),
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ m.role | upper }}: {{ m.content.strip() }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}": "1/2 USER: hi, 2/2 MODEL: yo",
    "{% for x in list if x > 1 %}{{ loop.cycle('a', 'b') }}{{ x }}{% else %}none{% endfor %}": "a3b2",
    "{% set s = namespace(t='') %}{% for m in messages %}{% set s.t = s.t ~ m.content %}{% endfor %}{{ s.t }}"
    "": "hiyo",
    "{% set t %}<{{ n }}>{% endset %}{{ t }}{% with q = 1 %}{{ q }}{% endwith %}\n": "<5>1\n",
    "{{ list | sort | join(',') }} {{ words | unique }} {{ words | map('upper') | list }}": (
        "1,2,3 ['b', 'a', 'c'] ['B', 'A', 'C', 'A']"
    ),
    "{{ messages | groupby('role') | map(attribute='grouper') | join(' ') }}": "model user",
    "{{ messages | selectattr('role', 'eq', 'user') | map(attribute='content') | first }}": "hi",
    "{{ meta | tojson(indent=1) }} {{ '<' | e }} {{ '%s-%05d' | format('a', 5) }}": (
        '{\n "a": 2,\n "b": 1,\n "items": 7\n} &lt; a-00005'
    ),
    "{{ list | batch(2, 0) }} {{ list | slice(2) }} {{ list | sum }} {{ list | reverse }}": (
        "[[3, 1], [2, 0]] [[3, 1], [2]] 6 [2, 1, 3]"
    ),
    "{{ null or 'none' }} {{ null is none }} {{ meta.x is defined }} {{ meta.x | default('d') }}": (
        "none True False d"
    ),
    "{{ 'x=1'.partition('=')[2] }} {{ 'a' in words }} {{ range(3) }} {{ words | select('eq', 'a') }}": (
        "1 True [0, 1, 2] ['a', 'a']"
    ),
}

REFUSED_AT_ONCE = {
    "{{ range(9) | random }}": "no filter `random`",
    "{{ lipsum() }}": "no function `lipsum`",
    "{{ strftime_now('%d') }}": "no function `strftime_now`",
    "{{ cycler('a') }}": "no function `cycler`",
    "{{ question | attr('upper') }}": "no filter `attr`",
    "{{ question | pprint }}": "no filter `pprint`",
    "{{ question is callable }}": "no test `callable`",
    "{{ question is sameas question }}": "no test `sameas`",
    "{{ question.format(1) }}": "no method `format`",
    "{{ list.append(1) }}": "no method `append`",
    "{{ list[0](1) }}": "by their names only",
    "{{ range(*list) }}": r"no `\*` and `\*\*`",
    "{% macro f() %}{% endmacro %}": "no statement `macro`",
    "{% include 'a' %}": "no statement `include`",
    "{% import 'a' as a %}": "no statement `import`",
    "{% filter upper %}{% endfilter %}": "no statement `filter`",
    "{% set a | upper %}{% endset %}": "no statement `set",
    "{% for x in list recursive %}{% endfor %}": "no recursive loops",
    '{{ "\\ud800" }}': "lone surrogate",
    "a\ud800": "lone surrogate",
    "{{ " + "9" * 5000 + " }}": "digits",
    "{% for x in list %}" * 30 + "{% endfor %}" * 30: "too many",
    "{% if n %}" * 120 + "{% endif %}" * 120: "too many",
    "{{ " + "(" * 9999 + " }}": "too deeply",
    "{{ n": "unexpected end",
}
REFUSED_WHEN_RENDERED = {
    "{{ null }}": "null would be written",
    "{{ null ~ '=' }}": "null would be written",
    "{{ [null] | join }}": "null would be written",
    "{{ 1e308 * 10 }}": "`inf` would be written",
    "{{ (0 - 8) ** 0.5 }}": "not real",
    "{{ question.upper }}": "no attribute 'upper'",
    "{{ question.__class__ }}": "no attribute '__class__'",
    "{{ meta.x }}": "no attribute 'x'",
    "{{ meta.x.y }}": "no attribute 'x'",
    "{{ n.upper() }}": "a int has no method",
    "{{ words | map('random') }}": "no filter `random`",
    "{{ words | map('_method', 'upper') }}": "no filter `_method`",
    "{{ words | select('callable') }}": "no test `callable`",
    "{% for x in list %}{{ loop }}{% endfor %}": "a value of type `LoopContext`",
    "{{ namespace(a=1) }}": "a value of type `Namespace`",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ 'abc' | truncate(1) }}": "AssertionError",
    "{{ messages | sort }}": "TypeError",
}
IN_A_LOOP = (
    "{% set s = namespace(t=START) %}{% for i in range(99999) %}{% set s.t = MORE %}{% endfor %}{{ s.t }}"
)


def in_a_loop(start: str, more: str) -> str:
    return IN_A_LOOP.replace("START", start).replace("MORE", more)


WITHOUT_BOUND = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}" + "x" * 200 + "{% endfor %}",
    "{% for a in range(99999) %}{% if long == long %}{% endif %}{% endfor %}",
    "{% for a in range(99999) %}{% set z = long[1:] %}{% endfor %}",
    "{% for a in range(99999) %}{{ long }}{% endfor %}",
    "{% for a in range(99999) if long in long %}{% endfor %}",
    in_a_loop("'aa'", "s.t ~ s.t"),
    in_a_loop("'aa'", "s.t + s.t"),
    in_a_loop("[1]", "s.t + s.t"),
    in_a_loop("[1]", "[s.t, s.t]"),
    in_a_loop("[1]", "[s.t]"),
    in_a_loop("2", "s.t * s.t"),
    in_a_loop("2", "s.t + s.t"),
    in_a_loop("'a'", "s.t | replace('a', 'aa')"),
    in_a_loop("'a'", "s.t.join([s.t, s.t])"),
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [1] * 10**10 }}",
    "{{ (question * 99999999) | length }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ range(10**30) }}",
    "{{ range(999999) | sort | length }}",
    "{{ range(0, 99999 * (2**61 - 1), 2**61 - 1) | unique | length }}",
    "{{ question | center(10**10) }}",
    "{{ question.center(10**10) }}",
    "{{ question.zfill(10**10) }}",
    "{{ question | indent(10**10) }}",
    "{{ '%9999999999d' | format(5) }}",
    "{{ '%*d' | format(10**9, 5) }}",
    "{{ '%.9999999999f' | format(5) }}",
    "{{ '%9999999999d' % 5 }}",
    "{{ question | replace('', question) | replace('', question) }}",
    "{{ long | replace('a', long) }}",
    "{{ words | join(long * 9) }}",
    "{{ 1.5 | round(10**10, 'ceil') }}",
    "{{ 5 | round(-10**10) }}",
    "{{ list | batch(10**10, 0) }}",
    "{{ list | slice(10**10) }}",
    "{{ meta | tojson(indent=10**10) }}",
    "{{ long | wordwrap(1) }}",
    "{{ hyphens | wordwrap(80) }}",
    "{{ long.strip(long) }}",
    "{{ long.rfind('b' + long[:500000]) }}",
]


@pytest.mark.parametrize("text", WRITTEN)
def test_what_templates_write(text: str) -> None:
    assert Template(text).render(ROW) == WRITTEN[text]


@pytest.mark.parametrize("text", REFUSED_AT_ONCE, ids=lambda t: ascii(t)[:50])
def test_what_templates_lack_is_refused_when_they_are_read(text: str) -> None:
    with pytest.raises(BadTemplateError, match=REFUSED_AT_ONCE[text]):
        Template(text)


@pytest.mark.parametrize("text", REFUSED_WHEN_RENDERED)
def test_what_cannot_be_written_is_refused(text: str) -> None:
    template = Template(text)
    with pytest.raises(BadTemplateError, match=REFUSED_WHEN_RENDERED[text]):
        template.render(ROW)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", WITHOUT_BOUND)
def test_work_without_bound_is_refused_within_bounds(text: str) -> None:
    """The bounds are of operations and characters; time and memory follow."""
    template = Template(text)
    with memory_limited_to(2**29), pytest.raises(BadTemplateError, match="more than|digits|deeper|numbers"):
        template.render(ROW)


@pytest.mark.parametrize("text", WITHOUT_BOUND)
def test_nothing_is_worked_out_when_a_template_is_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_: Any, **__: Any) -> None:
        raise AssertionError("work at check time")

    for name in ("spend", "weigh", "text", "number"):
        monkeypatch.setattr(f"hflow.graph.templates.budget.Budget.{name}", work)
    Template(text)


def test_what_takes_long_but_ends_is_rendered() -> None:
    assert len(Template("{% for a in range(99999) %}{{ long[:10] }}{% endfor %}").render(ROW)) == 999_990
    assert Template("{{ hyphens | title | length }} {{ long.find('b' + long[:500000]) }}").render(ROW)


def test_every_row_has_the_whole_budget_and_all_rows_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    template = Template("{{ long }}" * 4)
    monkeypatch.setattr(templates, "MAX_WRITTEN", 5 * 10**6)
    assert len(template.render(ROW)) == 4 * 10**6
    with pytest.raises(BadTemplateError, match="all rows together"):
        template.render(ROW)


def test_a_set_has_no_text_that_is_the_same_everywhere() -> None:
    for value in ({"a", "b"}, object(), len, b"a"):
        with pytest.raises(BadTemplateError, match=f"a value of type `{type(value).__name__}`"):
            Template("{{ question }}").render({"question": value})


ALL = """
import json, sys
from hflow.graph.templates.budget import BadTemplateError
from hflow.graph.templates.template import Template

def text(template):
    try:
        return Template(template).render(row)
    except BadTemplateError as error:
        return error.message

templates, row = json.load(sys.stdin)
print(json.dumps([text(t) for t in templates]))
"""
ARGUMENTS = ("", "(2)", "('a')", "('a', 'b')", "('upper')", "(attribute='role')")


@pytest.mark.rotating(6)
@pytest.mark.slow
def test_every_filter_test_and_method_says_the_same_in_every_process() -> None:
    """Over many kinds of values and arguments, whether it takes them or not: with other seeds of Python's
    hashes, and at other addresses."""
    values = ("question", "n", "part", "list", "words", "meta", "messages", "null", "(words + list)")
    made = [f"{{{{ {v} | {f}{a} }}}}" for v in values for f in sorted(FILTERS) for a in ARGUMENTS]
    made += [
        f"{{{{ {v} is {t}{a} }}}}" for v in values for t in sorted(TESTS - {"!="}) for a in ARGUMENTS[:3]
    ]
    made += [
        f"{{{{ {v}.{m}{a or '()'} }}}}"
        for v in values
        for m in sorted({*METHODS["text"], *METHODS["mapping"], *METHODS["list"]})
        for a in ARGUMENTS[:4]
    ]
    made += [f"{{{{ {name} }}}}" for name in (*FUNCTIONS, "self", "loop", "caller", "context", "environment")]
    made += WRITTEN.keys()
    row = {**ROW, "long": "", "hyphens": ""}
    texts = [_said(made, row, seed) for seed in ("1", "2")]
    assert texts[0] == texts[1]
    assert not [t for t in texts[0] if " at 0x" in t]
    assert sum(1 for t in texts[0] if "Error" not in t and "no " not in t) > 500


def _said(made: list[str], row: dict[str, Any], seed: str) -> list[str]:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", ALL],
        input=json.dumps([made, row]),
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_the_vocabulary_is_jinja2s() -> None:
    environment = BoundedEnvironment()
    assert environment.filters.keys() > FILTERS and environment.tests.keys() == TESTS
    assert not environment.globals
    for name in METHODS["text"]:
        assert callable(getattr(str, name))


def test_the_page_names_the_whole_vocabulary() -> None:
    rows = dict(re.findall(r"^\| ([a-z ]+) \| (`.*`) \|$", Path("docs/nodes.md").read_text(), re.MULTILINE))
    told = {kind: frozenset(re.findall(r"`([^`]+)`", names)) for kind, names in rows.items()}
    assert (told["statements"], told["filters"], told["tests"]) == (STATEMENTS, FILTERS, TESTS)
    assert told["functions"] == FUNCTIONS
    for kind in ("text", "mapping", "list"):
        assert told[f"methods of a {kind}"] == METHODS[kind]


def test_check_tells_place_and_what_there_is(tmp_path: Path) -> None:
    text = Path("tests/bad/parents/grpo.yaml").read_text()
    file = tmp_path / "random.yaml"
    file.write_text(text.replace("{{ question }}", "{{ range(9) | random }}"))
    with pytest.raises(HflowError) as caught:
        check(file)
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == (
        "HF212",
        "`prompt` is no template: a template has no filter `random`",
    )
    assert (
        found.span and "random" in text.replace("{{ question }}", "random").splitlines()[found.span.line - 1]
    )
    assert found.help.startswith("filters: abs, ") and "replace" in found.help
