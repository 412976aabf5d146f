"""A run that goes on from a checkpoint is the run that was never stopped."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import hflow
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.graph.run_config import CheckpointPolicy, RunConfig
from hflow.plan.parameters import parameters
from hflow.plan.plan import Plan
from hflow.plan.run_state import run_state, trained_models
from hflow.runtime.checkpoint.manifest import NAME, read_manifest
from hflow.runtime.checkpoint.reader import CheckpointReader
from hflow.runtime.controller.checkpoints import complete, name_of
from hflow.runtime.controller.pool import Pool
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from hflow.runtime.tools.new_model import new_model
from tests.runtime.matrix import GRAPHS
from tests.runtime.memory import put_away
from tests.runtime.test_failures import HFLOW
from tests.runtime.test_language import APART, ELSEWHERE
from tests.runtime.test_signals import heed_signals, wait_until

EVERY = RunConfig(CheckpointPolicy(every=1, keep=99))
STEPS = 4
# Everything that a run carries: moments, a critic, older weights, a refreshed model, an average beside frozen
# parameters and a schedule, scalars, counts of what was right and rows that wait to be counted, waiting rows;
# a mixture by a curriculum, with evaluations of its own; how far a stream was read; an adapter, of which a
# reader has an older one.
CASES: dict[str, dict[str, object]] = {
    "ppo_small": {"steps": STEPS},
    "lagged": {"steps": STEPS},
    "refreshed": {"steps": STEPS + 1},
    "averaged": {"steps": STEPS},
    "carried": {"every": 1},
    "by_success": {"steps": STEPS, "lag": 2},
    "region": {"rows": 2, "batch": 12, "age": 1, "steps": STEPS},
    "everything": {"steps": STEPS},
    "streamed": {"steps": STEPS + 1},
    "adapted": {"steps": STEPS, "lag": 1},
}
LAYOUTS = ("tp1@0", "dp2,zero1@0-1", "tp2@0-1", "pp2@0-1", "tp2,dp2,zero1@0-3", "pp2,tp2@0-3")
TIMES = ("time_s", "tokens_per_s")
KEYS = "model.layers.0.self_attn.k_proj.weight"

Start = Callable[..., Run]


def graph_of(name: str, model: Path, reward: Path, steps: int = 0) -> Graph:
    params: dict[str, object] = {"model": model, **CASES[name]}
    if steps:
        params["steps"] = steps
    if name == "ppo_small":
        params["reward_model"] = reward
    return hflow.load(GRAPHS / f"{name}.yaml", [f"params.{key}={value}" for key, value in params.items()])


def plan_of(graph: Graph, layout: str) -> Plan:
    """All nodes with models in one layout on the same devices; or, without one, on meshes apart."""
    trained = {n.name for n in graph.nodes if n.op == "train"}
    follow = {n.name for model in trained_models(graph) for n in graph.trainers(model)[1:]}
    pins: list[str] = []
    for node in (n for n in graph.nodes if n.model and n.name not in follow):
        text = layout or APART.get(node.name, ELSEWHERE)
        if node.name not in trained:
            text = text.replace(",zero1", "").replace(",vpp2", "")
        if node.op == "generate":
            text = text.replace("pp2,tp2@", "tp4@").replace("pp2@", "tp2@").replace("cp2,dp2@", "dp4@")
        pins.append(f"{node.name}={text}")
    return hflow.compile(graph, "local4", pins)


def untimed(run: Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in run.metrics]


def up_to(run: Path, step: int, to: Path) -> Path:
    """A copy of a run as it was when a worker died some time after `step` steps: later lines are there."""
    shutil.copytree(run, to)
    for other in complete(run):
        if other > step:
            shutil.rmtree(to / "checkpoints" / name_of(other))
    shutil.rmtree(to / "export", ignore_errors=True)
    with (to / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "los')  # as a killed process leaves it
    return to


def weights(run: Path) -> dict[str, torch.Tensor]:
    files = sorted((run / "export").glob("*/model.safetensors"))
    assert files
    return {f"{f.parent.name}/{name}": values for f in files for name, values in load_file(f).items()}


@pytest.fixture(scope="module")
def whole(
    workers: Pool, tiny_model: Path, tiny_reward: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Run]:
    """The undisturbed run of a case in a layout, with a checkpoint after every step; each is made once."""
    made: dict[tuple[str, str], Run] = {}

    def run(name: str, layout: str) -> Run:
        if (name, layout) not in made:
            plan = plan_of(graph_of(name, tiny_model, tiny_reward), layout)
            folder = tmp_path_factory.mktemp("whole") / "run"
            made[name, layout] = execute(plan, folder, pool=workers, config=EVERY)
        return made[name, layout]

    return run


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["dp2,zero1@0-1", ""])
@pytest.mark.parametrize("name", CASES)
def test_on_the_same_plan_it_is_bit_equal(
    whole: Callable[[str, str], Run],
    workers: Pool,
    tiny_model: Path,
    tiny_reward: Path,
    tmp_path: Path,
    name: str,
    layout: str,
) -> None:
    undisturbed = whole(name, layout)
    plan = plan_of(graph_of(name, tiny_model, tiny_reward), layout)
    for step in range(1, plan.graph.steps):
        folder = up_to(undisturbed.folder, step, tmp_path / str(step))
        resumed = execute(plan, folder, pool=workers, config=EVERY, resume=True)
        assert untimed(resumed) == untimed(undisturbed)
        assert resumed.evaluations == undisturbed.evaluations
        assert resumed.evaluated == undisturbed.evaluated
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(plan.graph.steps))
        ours, theirs = weights(folder), weights(undisturbed.folder)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), step


@pytest.mark.matrix
@pytest.mark.parametrize("layout", (*LAYOUTS, ""))
@pytest.mark.parametrize("name", CASES)
def test_on_other_plans_it_samples_the_same(
    whole: Callable[[str, str], Run],
    workers: Pool,
    tiny_model: Path,
    tiny_reward: Path,
    tmp_path: Path,
    name: str,
    layout: str,
) -> None:
    undisturbed = whole(name, "dp2,zero1@0-1")
    graph = graph_of(name, tiny_model, tiny_reward)
    step = 1 + (*LAYOUTS, "").index(layout) % (graph.steps - 1)
    folder = up_to(undisturbed.folder, step, tmp_path / "resumed")
    resumed = execute(plan_of(graph, layout), folder, pool=workers, export=False, resume=True)
    for ours, theirs in zip(resumed.metrics, undisturbed.metrics, strict=True):
        assert_same(ours, theirs, layout)
    assert resumed.evaluated.keys() == undisturbed.evaluated.keys()
    for key, values in undisturbed.evaluated.items():
        assert resumed.evaluated[key] == pytest.approx(values, abs=1e-6), key


@pytest.mark.parametrize("between", ["cp2,dp2,zero1@0-3", "pp2,vpp2@0-1"])
def test_ranks_of_other_axes_read_and_write_it(
    whole: Callable[[str, str], Run],
    workers: Pool,
    tiny_model: Path,
    tiny_reward: Path,
    tmp_path: Path,
    between: str,
) -> None:
    """Context-parallel ranks, whose optimizer ZeRO-1 splits over dp and cp, and interleaved stages, whose
    layers are no neighbours. From dp2 to these, and from these to tp2."""
    undisturbed = whole("ppo_small", "dp2,zero1@0-1")
    graph, folder = graph_of("ppo_small", tiny_model, tiny_reward), undisturbed.folder
    for step, layout in ((1, between), (2, "tp2@0-1")):
        folder = up_to(folder, step, tmp_path / str(step))
        options: dict[str, Any] = {"config": EVERY, "export": False, "resume": True}
        resumed = execute(plan_of(graph, layout), folder, pool=workers, **options)
        for ours, theirs in zip(resumed.metrics, undisturbed.metrics, strict=True):
            assert_same(ours, theirs, layout)


def test_parts_of_older_weights_may_cut_through_heads(workers: Pool, tmp_path: Path) -> None:
    """Two readers share the writing by rows, in the middle of the second of three heads; Megatron keeps
    queries, keys and values of a head together."""
    new_model(tmp_path / "model", layers=2, hidden=24, heads=3, ffn=48, alphabet="0123456789+=. ")
    plan = plan_of(graph_of("lagged", tmp_path / "model", tmp_path), "dp2@0-1")
    undisturbed = execute(plan, tmp_path / "run", pool=workers, config=EVERY)
    folder = up_to(undisturbed.folder, 2, tmp_path / "2")
    with closing(CheckpointReader(folder / "checkpoints" / name_of(2))) as reader:
        pieces = reader.manifest.tensors[f"models/actor/lagging/{KEYS}"].pieces
        assert [piece.box[0] for piece in pieces] == [(0, 12), (12, 24)]
    assert_older(undisturbed.folder / "checkpoints", plan, 2)
    resumed = execute(plan, folder, pool=workers, config=EVERY, resume=True)
    assert untimed(resumed) == untimed(undisturbed)


def assert_older(checkpoints: Path, plan: Plan, step: int) -> None:
    """With `lag: 1` the older weights of a checkpoint are the weights of the one before."""
    before, after = (CheckpointReader(checkpoints / name_of(number)) for number in (step - 1, step))
    with closing(before), closing(after):
        for name in (parameter.name for parameter in parameters(plan.shapes["actor"])):
            older = after.whole(f"models/actor/lagging/{name}")
            assert torch.equal(older, before.whole(f"models/actor/weights/{name}")), name


@pytest.mark.slow
def test_older_weights_that_are_away_are_in_a_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    """A refreshed model waits in the host's memory between its calls."""
    plan = put_away(plan_of(graph_of("refreshed", tiny_model, tmp_path), "tp1@0"), ("ref_logprobs",))
    undisturbed = execute(plan, tmp_path / "run", workers="inline", config=EVERY)
    folder = up_to(undisturbed.folder, 3, tmp_path / "3")
    with closing(CheckpointReader(folder / "checkpoints" / name_of(3))) as reader:
        assert int(reader.whole("models/actor/refreshed/ref/version")) == 2
    resumed = execute(plan, folder, workers="inline", config=EVERY, resume=True)
    assert untimed(resumed) == untimed(undisturbed)


@pytest.mark.slow
def test_of_bf16_weights_the_float32_ones_go_on(tiny_model: Path, tmp_path: Path) -> None:
    """Which those of bf16 do not tell: updates are smaller than their last bit."""
    given = [f"params.model={tiny_model}", f"params.steps={STEPS}", "params.lag=0", "params.lr=1e-5"]
    plan = hflow.compile(hflow.load(GRAPHS / "lagged.yaml", [*given, "models.actor.dtype=bf16"]), "local1")
    undisturbed = execute(plan, tmp_path / "run", workers="inline", config=EVERY, export=False)
    folder = up_to(undisturbed.folder, 2, tmp_path / "2")
    resumed = execute(plan, folder, workers="inline", config=EVERY, export=False, resume=True)
    assert untimed(resumed) == untimed(undisturbed)


@pytest.mark.rotating(6)
def test_texts_of_an_averaged_model_keep_their_version(tiny_model: Path, tmp_path: Path) -> None:
    """The last refresh was before the checkpoint: nothing in the steps after it tells the version again."""
    params = [f"params.model={tiny_model}", "params.every=2", f"params.steps={STEPS}"]
    plan = hflow.compile(hflow.load(GRAPHS / "averaged_texts.yaml", params), "local1")
    undisturbed = execute(plan, tmp_path / "run", workers="inline", config=EVERY, export=False)
    folder = up_to(undisturbed.folder, 3, tmp_path / "3")
    with closing(CheckpointReader(folder / "checkpoints" / name_of(3))) as reader:
        assert int(reader.whole("models/actor/average/ref/version")) == 2
    resumed = execute(plan, folder, workers="inline", config=EVERY, export=False, resume=True)
    for run in (undisturbed, resumed):
        written = (row["version"] for row in run.samples(3).to_pylist() if row["node"] == "written")
        assert set(written) == {2}
    assert untimed(resumed) == untimed(undisturbed)


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], layout: str) -> None:
    for key in (k for k in theirs if not k.startswith(TIMES)):
        if key.startswith("digest."):
            assert ours[key] == theirs[key], (layout, key)
        elif key.startswith("loss."):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-5), (layout, key)


def test_a_checkpoint_holds_the_state_and_nothing_else(
    whole: Callable[[str, str], Run], tiny_model: Path, tiny_reward: Path
) -> None:
    """The size of its files is that of the state, each element written once, and a little to name it."""
    for name in CASES:
        run = whole(name, "dp2,zero1@0-1")
        plan = plan_of(graph_of(name, tiny_model, tiny_reward), "dp2,zero1@0-1")
        known = {tensor.name: tensor for tensor in run_state(plan)}
        manifest = read_manifest(run.folder / "checkpoints" / name_of(plan.graph.steps))
        assert manifest.tensors.keys() <= known.keys()
        assert {n for n, tensor in known.items() if not tensor.optional} <= manifest.tensors.keys()
        for tensor_name, stored in manifest.tensors.items():
            expected = known[tensor_name]
            assert stored.dtype == expected.dtype
            assert all(want in (None, size) for size, want in zip(stored.shape, expected.shape, strict=True))


def test_a_torn_checkpoint_is_passed_over(
    whole: Callable[[str, str], Run], workers: Pool, tiny_model: Path, tiny_reward: Path, tmp_path: Path
) -> None:
    undisturbed = whole("lagged", "dp2,zero1@0-1")
    plan = plan_of(graph_of("lagged", tiny_model, tiny_reward), "dp2,zero1@0-1")
    folder = up_to(undisturbed.folder, 3, tmp_path / "run")
    newest = folder / "checkpoints" / name_of(3)
    file = next(newest.glob("rank-*"))
    file.write_bytes(file.read_bytes()[:-1])
    (folder / "checkpoints" / name_of(2) / NAME).unlink()
    resumed = execute(plan, folder, pool=workers, export=False, resume=True)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "resumed"] == [1]
    assert untimed(resumed) == untimed(undisturbed)


def flip_a_bit(checkpoint: Path) -> None:
    """In the largest file of a checkpoint, whose size stays."""
    file = max(checkpoint.glob("rank-*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_checkpoints_with_other_checksums_are_passed_over(
    whole: Callable[[str, str], Run], workers: Pool, tiny_model: Path, tiny_reward: Path, tmp_path: Path
) -> None:
    """Workers find out. The run goes on from the one before, and writes anew what it passed over."""
    undisturbed = whole("lagged", "dp2,zero1@0-1")
    plan = plan_of(graph_of("lagged", tiny_model, tiny_reward), "dp2,zero1@0-1")
    folder = up_to(undisturbed.folder, 3, tmp_path / "run")
    for step in (2, 3):
        flip_a_bit(folder / "checkpoints" / name_of(step))
    told, policy = StringIO(), CheckpointPolicy(every=1, keep=1)
    config, console = RunConfig(policy), Console(file=told, width=1000)
    resumed = execute(plan, folder, pool=workers, config=config, resume=True, console=console)
    assert untimed(resumed) == untimed(undisturbed) and resumed.evaluations == undisturbed.evaluations
    ours, theirs = weights(folder), weights(undisturbed.folder)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "passed_over"] == [2, 1]
    assert told.getvalue().count("passed over: error[HF412]") == 2
    assert "the checksum of `rank-" in told.getvalue() and "going on from step 1" in told.getvalue()
    assert list(complete(folder)) == [STEPS]


def test_damaged_checkpoints_alone_do_not_begin_the_run_anew(
    whole: Callable[[str, str], Run], workers: Pool, tiny_model: Path, tiny_reward: Path, tmp_path: Path
) -> None:
    undisturbed = whole("lagged", "dp2,zero1@0-1")
    plan = plan_of(graph_of("lagged", tiny_model, tiny_reward), "dp2,zero1@0-1")
    folder = up_to(undisturbed.folder, 1, tmp_path / "run")
    metrics = (folder / "metrics.jsonl").read_text().splitlines()[:1]
    flip_a_bit(folder / "checkpoints" / name_of(1))
    with pytest.raises(HflowError, match="without any, a run that has not finished begins anew") as caught:
        execute(plan, folder, pool=workers, config=EVERY, resume=True)
    assert caught.value.diagnostics[0].code == "HF412"
    next((folder / "checkpoints" / name_of(1)).glob("rank-*")).unlink()
    with pytest.raises(HflowError, match="none of 1 checkpoint is whole") as caught:
        execute(plan, folder, pool=workers, config=EVERY, resume=True)
    assert caught.value.diagnostics[0].code == "HF412"
    assert (folder / "metrics.jsonl").read_text().splitlines() == metrics
    shutil.rmtree(folder / "checkpoints" / name_of(1))
    assert untimed(execute(plan, folder, pool=workers, resume=True)) == untimed(undisturbed)


@pytest.mark.parametrize("policy", [CheckpointPolicy(every=3), CheckpointPolicy(seconds=1e6)])
def test_a_finished_run_goes_on_with_more_steps(
    whole: Callable[[str, str], Run],
    workers: Pool,
    tiny_model: Path,
    tiny_reward: Path,
    tmp_path: Path,
    policy: CheckpointPolicy,
) -> None:
    """It has a checkpoint of its last step, whenever others are due."""
    short, long = (
        plan_of(graph_of("lagged", tiny_model, tiny_reward, steps), "dp2,zero1@0-1") for steps in (2, STEPS)
    )
    run = execute(short, tmp_path / "run", pool=workers, config=RunConfig(policy))
    assert list(complete(run.folder)) == [2]
    told = StringIO()
    again = execute(
        short, run.folder, pool=workers, config=RunConfig(policy), resume=True, console=Console(file=told)
    )
    assert again.metrics == run.metrics and "which are all" in told.getvalue()
    longer = execute(long, run.folder, pool=workers, config=RunConfig(policy), resume=True)
    undisturbed = whole("lagged", "dp2,zero1@0-1")
    assert untimed(longer) == untimed(undisturbed)
    ours, theirs = weights(run.folder), weights(undisturbed.folder)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    policy = CheckpointPolicy(on_signal=True)
    done = execute(short, tmp_path / "other", pool=workers, config=RunConfig(policy), export=False)
    assert list(complete(done.folder)) == []


def test_only_the_newest_and_the_best_stay(
    workers: Pool, tiny_model: Path, tiny_reward: Path, tmp_path: Path
) -> None:
    graph = graph_of("lagged", tiny_model, tiny_reward)
    policy = CheckpointPolicy(every=1, keep=1, best="loss.actor_train", mode="max")
    run = execute(plan_of(graph, "tp1@0"), tmp_path / "run", pool=workers, config=RunConfig(policy))
    losses = [line["loss.actor_train"] for line in run.metrics]
    assert set(complete(run.folder)) == {STEPS, 1 + losses.index(max(losses))}


FATAL = '''

@op("text: str[rows] -> length: f32[rows]")
def length(text: list[str]) -> list[float]:
    """Its worker is killed when it is called for the fifth time, once."""
    import os, pathlib, psutil

    calls = pathlib.Path(__file__).with_name("calls")
    calls.write_text(calls.read_text() + "." if calls.exists() else ".")
    if calls.stat().st_size == 5:
        os.kill(psutil.Process().parents()[1].pid, 9)  # the first is the process of functions' guard
    return [float(len(t)) for t in text]
'''


@pytest.mark.rotating(6)
@pytest.mark.slow
def test_a_lost_worker_is_replaced(tiny_model: Path, tmp_path: Path) -> None:
    """The run begins again by itself from its newest checkpoint, and is the run that nothing happened to."""
    for file in ("lagged.yaml", "functions.py"):
        shutil.copy(GRAPHS / file, tmp_path / file)
    given = [f"params.model={tiny_model}", f"params.steps={STEPS}", "eval.every=1"]
    command = [*HFLOW, "exec", str(tmp_path / "lagged.yaml"), "--cluster", "local4"]
    command += ["--pin", "rollout=tp1@0", "--pin", "actor_train=dp2@1-2"]
    command += [word for text in given for word in ("--set", text)]
    subprocess.run([*command, "--run-dir", tmp_path / "plain"], check=True, capture_output=True)
    (tmp_path / "functions.py").write_text((GRAPHS / "functions.py").read_text() + FATAL)
    policy = ["--set", "run.checkpoint.every=1", "--set", "run.restarts=1"]
    done = subprocess.run(
        [*command, *policy, "--run-dir", tmp_path / "killed"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "going on from step" in done.stderr and "Traceback" not in done.stderr
    killed, plain = (metrics_of(tmp_path / name) for name in ("killed", "plain"))
    assert killed == plain and len(plain) == STEPS
    ours, theirs = weights(tmp_path / "killed"), weights(tmp_path / "plain")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]


@pytest.mark.rotating(6)
@pytest.mark.slow
def test_an_interrupted_run_goes_on_from_the_command_line(tiny_model: Path, tmp_path: Path) -> None:
    """The first Ctrl-C ends the step and writes a checkpoint; then the same run goes on with more steps."""
    graph = [str(GRAPHS / "lagged.yaml"), "--cluster", "local1", "--set", f"params.model={tiny_model}"]
    run = tmp_path / "run"
    command = [*HFLOW, "exec", *graph, "--set", "params.steps=4000", "--run-dir", str(run)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=heed_signals
    )
    wait_until(process, lambda: (run / "metrics.jsonl").exists() and len(metrics_of(run)) >= 3)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130, told
    (done,) = complete(run)
    assert len(metrics_of(run)) == done and f"hflow exec --resume {run}" in told
    refused = subprocess.run(
        [*HFLOW, "exec", "--resume", run, "--set", "params.lr=0.5"], capture_output=True, text=True
    )
    assert refused.returncode == 1 and "HF411" in refused.stderr
    assert "nodes.actor_train.with.lr" in refused.stderr
    steps = ["--set", f"params.steps={done + 2}"]
    resumed = subprocess.run([*HFLOW, "exec", "--resume", run, *steps], capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    whole = subprocess.run(
        [*HFLOW, "exec", *graph, *steps, "--run-dir", tmp_path / "whole"], capture_output=True, text=True
    )
    assert whole.returncode == 0 and metrics_of(run) == metrics_of(tmp_path / "whole")


def test_the_best_checkpoint_is_exported(
    workers: Pool, tiny_model: Path, tiny_reward: Path, tmp_path: Path
) -> None:
    graph = graph_of("lagged", tiny_model, tiny_reward)
    plan = plan_of(graph, "dp2,zero1@0-1")
    policy = CheckpointPolicy(every=1, keep=1, best="loss.actor_train", mode="max")
    run = execute(plan, tmp_path / "run", pool=workers, config=RunConfig(policy, export="best"))
    losses = [line["loss.actor_train"] for line in run.metrics]
    best = 1 + losses.index(max(losses))
    shorter = hflow.load(GRAPHS / "lagged.yaml", [f"params.model={tiny_model}", f"params.steps={best}"])
    until = execute(plan_of(shorter, "dp2,zero1@0-1"), tmp_path / "until", pool=workers)
    ours, theirs = weights(run.folder), weights(until.folder)
    assert best < STEPS and all(torch.equal(ours[key], theirs[key]) for key in theirs)
