from __future__ import annotations

from pathlib import Path

import pytest

from hflow.diagnostics import Diagnostic, HflowError, render
from hflow.graph.load import assembled, check, load, sources
from hflow.graph.source.document import read

GRPO = Path("algorithms/grpo.yaml").read_text()
HEAD = "hflow: 1\nextends: grpo.yaml\nname: child\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "grpo.yaml").write_text(GRPO)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def plain(path: Path, *files: Path) -> dict[str, dict[str, dict[str, object]]]:
    return assembled(read(path), (), files).plain()


def refused(path: Path, *files: Path) -> tuple[Diagnostic, ...]:
    with pytest.raises(HflowError) as caught:
        load(path, (), files)
    return caught.value.diagnostics


def test_a_child_that_adds_nothing_is_its_parent_by_another_name(folder: Path) -> None:
    child, parent = load(write(folder / "child.yaml", HEAD)), load(folder / "grpo.yaml")
    assert (child.name, child.doc) == ("child", "")
    assert (child.params, child.models, child.nodes) == (parent.params, parent.models, parent.nodes)


def test_mappings_merge_by_key_and_everything_else_replaces(folder: Path) -> None:
    text = """
params: {group: 4, extra: 1}
models:
  actor: {dtype: bf16}
nodes:
  rollout: {model: {use: actor, lag: 1}, with: {temperature: 0.5}}
  prompts: {with: {options: {operators: ["-"]}}}
"""
    merged, parent = plain(write(folder / "child.yaml", HEAD + text)), read(folder / "grpo.yaml").plain()
    assert merged["params"] == {**parent["params"], "group": 4, "extra": 1}
    assert merged["models"]["actor"] == {"path": "${ model }", "dtype": "bf16"}
    assert merged["nodes"]["rollout"]["model"] == {"use": "actor", "lag": 1}
    assert merged["nodes"]["rollout"]["with"] == {**parent["nodes"]["rollout"]["with"], "temperature": 0.5}
    options = merged["nodes"]["prompts"]["with"]
    assert isinstance(options, dict) and options["options"]["operators"] == ["-"]
    assert merged["nodes"]["reward"] == parent["nodes"]["reward"]


def test_null_removes(folder: Path) -> None:
    text = """
eval: null
params: {kl_coef: null, holdout: null}
models: {ref: null}
nodes:
  prompts: {with: {holdout: null}}
  ref_logprobs: null
  actor_train: {in: {ref_logprobs: null}, with: {kl_coef: null}}
"""
    graph, warnings = check(write(folder / "child.yaml", HEAD + text))
    assert not warnings
    assert graph.evaluation is None
    assert [m.name for m in graph.models] == ["actor"]
    assert "ref_logprobs" not in {n.name for n in graph.nodes} and "kl_coef" not in graph.params
    assert graph.node("actor_train").input("ref_logprobs") is None


def test_what_is_not_there_cannot_be_removed(folder: Path) -> None:
    text = "params: {kl_coeff: null}\nnodes: {reward: {with: null}, rolout: null}\n"
    found = refused(write(folder / "child.yaml", HEAD + text))
    assert [(d.code, d.message, d.help) for d in found] == [
        ("HF107", "`params.kl_coeff: null` removes what is not there", "did you mean `kl_coef`?"),
        ("HF107", "`nodes.reward.with: null` removes what is not there", "keys: fn, in, op"),
        ("HF107", "`nodes.rolout: null` removes what is not there", "did you mean `rollout`?"),
    ]
    assert found[0].span and (found[0].span.line, found[0].span.column) == (4, 10)


def test_null_is_a_value_in_what_the_parent_does_not_have(folder: Path) -> None:
    text = "nodes: {reward: {with: {x: null}}}\n"
    assert plain(write(folder / "child.yaml", HEAD + text))["nodes"]["reward"]["with"] == {"x": None}


def test_another_op_replaces_a_node_wholly(folder: Path) -> None:
    node = "{op: score, model: ref, in: {tokens: rollout.tokens}}"
    merged = plain(write(folder / "child.yaml", HEAD + f"nodes: {{advantages: {node}}}\n"))
    assert merged["nodes"]["advantages"] == {
        "op": "score",
        "model": "ref",
        "in": {"tokens": "rollout.tokens"},
    }
    same = plain(write(folder / "child.yaml", HEAD + "nodes: {advantages: {op: call, with: {eps: 1}}}\n"))
    assert same["nodes"]["advantages"].keys() == {"op", "fn", "in", "with"}


def test_every_value_keeps_its_place(folder: Path) -> None:
    bad_parent = GRPO.replace('n: "${ group }"', "n: 0")
    write(folder / "grpo.yaml", bad_parent)
    child = write(folder / "child.yaml", HEAD + "nodes: {reward: {in: {text: rollout.txt}}}\n")
    places = {d.code: d.span for d in refused(child)}
    in_parent, in_child = places["HF212"], places["HF201"]
    assert in_parent and in_parent.file == str(folder / "grpo.yaml")
    assert bad_parent.splitlines()[in_parent.line - 1].startswith("    with: {n: 0")
    assert in_child and (in_child.file, in_child.line) == (str(child), 4)
    for problem in refused(child):
        assert "^" in render(problem, sources(child))


def test_the_name_is_not_inherited(folder: Path) -> None:
    (problem,) = refused(write(folder / "child.yaml", HEAD.replace("name: child\n", "")))
    assert (problem.code, problem.message) == ("HF101", "the file has no `name`")
    assert problem.span and problem.span.file == str(folder / "child.yaml")


def test_chains(folder: Path) -> None:
    write(folder / "a.yaml", HEAD + "params: {group: 2, batch: 4, minibatch: 8}\n")
    path = write(folder / "b.yaml", HEAD.replace("grpo", "a") + "params: {group: 4}\n")
    graph = load(path)
    assert (graph.params["group"], graph.params["batch"], graph.params["lr"]) == (4, 4, 1e-4)


def test_eight_parents_and_no_more(folder: Path) -> None:
    for number in range(1, 10):
        parent = f"g{number - 1}.yaml" if number > 1 else "grpo.yaml"
        write(folder / f"g{number}.yaml", HEAD.replace("grpo.yaml", parent))
    assert load(folder / "g8.yaml").name == "child"
    (problem,) = refused(folder / "g9.yaml")
    assert (problem.code, problem.message) == ("HF107", "more than 8 parents")
    assert problem.span and problem.span.file == str(folder / "g1.yaml")


def test_a_file_cannot_extend_itself(folder: Path) -> None:
    write(folder / "a.yaml", HEAD.replace("grpo", "sub/../b"))
    path = write(folder / "b.yaml", HEAD.replace("grpo", "a"))
    (problem,) = refused(path)
    assert problem.code == "HF107"
    assert problem.message == f"a file extends itself: {path} -> {folder / 'a.yaml'} -> {path}"


@pytest.mark.parametrize(
    ("extends", "message", "help_"),
    [
        ("grp.yaml", "cannot read `{}/grp.yaml`: No such file or directory", "did you mean `grpo.yaml`?"),
        ("[grpo.yaml]", "`extends` must name one graph file", ""),
        ('"a\\0.yaml"', "`extends` must name one graph file", ""),
        ("null", "`extends` must name one graph file", ""),
        ("list.yaml", "`{}/list.yaml` is no graph file: it is no mapping", ""),
    ],
)
def test_bad_parents(folder: Path, extends: str, message: str, help_: str) -> None:
    write(folder / "list.yaml", "- a\n")
    (problem,) = refused(write(folder / "child.yaml", HEAD.replace("grpo.yaml", extends)))
    assert (problem.code, problem.message, problem.help) == ("HF107", message.format(folder), help_)
    assert problem.span and problem.span.line == 2


@pytest.mark.parametrize("version", ["2", "[1]", "{a: 1}"])
def test_a_parent_of_another_version(folder: Path, version: str) -> None:
    write(folder / "grpo.yaml", GRPO.replace("hflow: 1", f"hflow: {version}"))
    (problem,) = refused(write(folder / "child.yaml", HEAD))
    assert problem.code == "HF107" and problem.span and problem.span.file == str(folder / "grpo.yaml")


def test_a_parent_that_is_no_yaml(folder: Path) -> None:
    write(folder / "grpo.yaml", "a: {")
    (problem,) = refused(write(folder / "child.yaml", HEAD))
    assert problem.code == "HF002" and problem.span and problem.span.file == str(folder / "grpo.yaml")


FUNCTION = """from hflow.ops.op import op


@op("text: str[rows] -> score: f32[rows]")
def length(text):
    raise AssertionError
"""
REWARD = 'nodes: {reward: {fn: "./rewards.py:length", in: {answer: null}}}\n'


def test_function_files_are_relative_to_the_file_that_names_them(folder: Path) -> None:
    write(folder / "sub" / "rewards.py", FUNCTION)
    write(folder / "sub" / "base.yaml", HEAD.replace("grpo", "../grpo") + REWARD)
    path = write(folder / "child.yaml", HEAD.replace("grpo", "sub/base"))
    graph = load(path)
    function = graph.node("reward").function
    assert function and function.reference == f"{folder}/sub/rewards.py:length"
    (folder / "graph.yaml").write_text(graph.text)  # beside the child it says the same
    assert load(folder / "graph.yaml") == graph

    over = write(folder / "sub" / "over.yaml", REWARD)
    function = load(folder / "grpo.yaml", (), (over,)).node("reward").function
    assert function and function.reference == f"{folder}/sub/rewards.py:length"


def test_files_of_overrides_come_before_set(folder: Path) -> None:
    one = write(folder / "one.yaml", "name: mine\nparams: {group: 2, batch: 4, minibatch: 8}\neval: null\n")
    two = write(folder / "two.yaml", "params: {group: 4}\n")
    graph = load(folder / "grpo.yaml", ("params.batch=2",), (one, two))
    assert (graph.name, graph.doc, graph.evaluation) == (
        "mine",
        read(folder / "grpo.yaml").plain()["doc"],
        None,
    )
    assert [graph.params[k] for k in ("group", "batch", "minibatch")] == [4, 2, 8]
    assert graph.text.splitlines()[0] == f"# with -f {one}, -f {two}, params.batch=2"
    assert load(write(folder / "again.yaml", graph.text)) == graph


@pytest.mark.parametrize(
    ("node", "removals"),
    [
        (
            "reward: {fn: hflow.ops.penalties.length_penalty, with: {per_token: 0.1}}",
            ["`in: {text: null}`", "`in: {answer: null}`"],
        ),
        ("actor_train: {loss: hflow.ops.losses.reinforce}", ["`with: {clip: null}`"]),
    ],
)
def test_what_another_function_does_not_take_is_removed_with_null(
    folder: Path, node: str, removals: list[str]
) -> None:
    found = refused(write(folder / "child.yaml", f"{HEAD}nodes:\n  {node}\n"))
    unknown = [p for p in found if p.code in ("HF211", "HF214")]
    assert [p.help.rpartition("; to remove what another file says, write ")[2] for p in unknown] == removals
    assert {p.span.file for p in unknown if p.span} == {str(folder / "grpo.yaml")}


def test_a_function_without_options_has_no_other_help_than_to_remove_them(folder: Path) -> None:
    (folder / "own.py").write_text(
        '@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")\ndef f(text, answer):\n    pass\n'
    )
    (folder / "grpo.yaml").write_text(
        GRPO.replace("answer: prompts.answer}", "answer: prompts.answer}\n    with: {x: 1}")
    )
    (problem,) = refused(write(folder / "child.yaml", HEAD + "nodes:\n  reward: {fn: './own.py:f'}\n"))
    assert problem.code == "HF211" and not problem.help.startswith(";"), problem.help
    assert problem.help.endswith("to remove what another file says, write `with: {x: null}`")


def test_what_is_wrong_in_a_file_of_overrides_is_shown_there(folder: Path) -> None:
    over = write(folder / "over.yaml", "nodes:\n  rollout:\n    wiht: {n: 3}\n")
    (problem,) = refused(folder / "grpo.yaml", over)
    assert (problem.code, problem.help) == ("HF102", "did you mean `with`?")
    assert problem.span and (problem.span.file, problem.span.line) == (str(over), 3)
    assert "wiht" in render(problem, sources(folder / "grpo.yaml", (), (over,)))


@pytest.mark.parametrize("text", ["- a\n", "extends: grpo.yaml\n", "params: {nothing: null}\n"])
def test_bad_files_of_overrides(folder: Path, text: str) -> None:
    over = write(folder / "over.yaml", text)
    (problem,) = refused(folder / "grpo.yaml", over)
    assert problem.code == "HF107" and problem.span and problem.span.file == str(over)
