"""Runs on hosts that share no loopback, memory nor ``/tmp``: they are those of one host, and survive what can
happen between hosts, or say what happened."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hflow
from hflow.graph.ir import Graph
from hflow.runtime.execute import Run, execute
from tests.runtime.hosts import Host, why_not
from tests.runtime.matrix import GRAPHS
from tests.runtime.ray_hosts import RayHosts, cluster_file, finish, ray_hosts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")]
LONG = pytest.mark.acceptance

STEPS = 4
# Trained models lie across hosts in another way than their readers: weights are resharded over the network.
PINS = {
    ("grpo_tiny", 2): ("rollout=dp2@0-1", "ref_logprobs=tp1@1", "actor_train=pp2@0-1"),
    ("grpo_tiny", 4): ("rollout=dp4@0-3", "ref_logprobs=dp2@2-3", "actor_train=pp2,dp2,zero1@0-3"),
    ("ppo_small", 2): (
        "rollout=dp2@0-1", "actor_train=dp2,zero1@0-1", "critic_train=pp2@0-1", "values=dp2@0-1",
        "reward=tp1@0", "ref_logprobs=tp1@1",
    ),
    ("ppo_small", 4): (
        "rollout=dp4@0-3", "actor_train=pp2,dp2@0-3", "critic_train=dp2,zero1@2-3", "values=pp2@0-1",
        "reward=dp2@2-3", "ref_logprobs=pp2@0-1",
    ),
}  # fmt: skip
FAULT_STEPS, BEFORE_FAULT = 40, 3
LOST_S = 120  # until a host that is silent counts as lost


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_reward: Path) -> Path:
    """What all hosts see: the models are there, and the runs."""
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def two(shared: Path) -> Iterator[RayHosts]:
    with ray_hosts(2, shared) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def four(shared: Path) -> Iterator[RayHosts]:
    with ray_hosts(4, shared) as hosts:
        yield hosts


def settings(name: str, model: Path, reward: Path, steps: int) -> list[str]:
    found = [f"params.model={model}", f"params.steps={steps}"]
    return [*found, f"params.reward_model={reward}"] if name == "ppo_small" else found


def graph_of(name: str, model: Path, reward: Path, steps: int) -> Graph:
    return hflow.load(GRAPHS / f"{name}.yaml", settings(name, model, reward, steps))


@pytest.fixture(scope="module")
def on_one(tiny_model: Path, tiny_reward: Path, shared: Path) -> Callable[[str], Run]:
    """The run of a graph on one host, in this process; each is made once."""
    made: dict[str, Run] = {}

    def run(name: str) -> Run:
        if name not in made:
            plan = hflow.compile(graph_of(name, tiny_model, tiny_reward, STEPS), "local1")
            made[name] = execute(plan, shared / f"one-{name}", workers="inline")
        return made[name]

    return run


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def weights(run: Path) -> dict[str, torch.Tensor]:
    files = sorted((run / "export").glob("*/model.safetensors"))
    return {f"{f.parent.name}/{name}": values for f in files for name, values in load_file(f).items()}


def moved_bytes(run: Path) -> int:
    """Of values that workers have got from others."""
    return sum(e["bytes"] for e in lines(run, "events.jsonl") if e.get("kind") in ("transfer", "weights"))


def assert_same(run: Path, other: Run) -> None:
    for ours, theirs in zip(lines(run, "metrics.jsonl"), other.metrics, strict=True):
        assert ours["digest.rollout"] == theirs["digest.rollout"]
        for key in (k for k in theirs if k.startswith("loss.")):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-7), key
    ours, theirs = weights(run), weights(other.folder)
    assert ours.keys() == theirs.keys() and ours
    for key, values in theirs.items():  # Adam makes a whole step of what is left of a gradient by rounding
        assert torch.allclose(ours[key], values, atol=1e-4), key


@pytest.mark.rotating(6)
@pytest.mark.parametrize("name", ["grpo_tiny", pytest.param("ppo_small", marks=LONG)])
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=LONG)])
def test_a_run_is_that_of_one_host(
    request: pytest.FixtureRequest,
    on_one: Callable[[str], Run],
    tiny_model: Path,
    tiny_reward: Path,
    count: int,
    name: str,
) -> None:
    """Half of it, and the other half from the checkpoint. What workers send goes over the network."""
    hosts: RayHosts = request.getfixturevalue({2: "two", 4: "four"}[count])
    cluster, run = cluster_file(hosts.folder, count), hosts.folder / f"{name}-{count}"
    sent = sum(host.sent_bytes() for host in hosts.hosts)
    half = hflow.compile(graph_of(name, tiny_model, tiny_reward, STEPS // 2), cluster, PINS[name, count])
    half.save(hosts.folder / f"{name}-{count}.json")
    kept = ("--set", f"run.checkpoint.every={STEPS // 2}")
    hosts.run(str(hosts.folder / f"{name}-{count}.json"), *kept, "--run-dir", str(run))
    sent = sum(host.sent_bytes() for host in hosts.hosts) - sent
    assert 0 < moved_bytes(run) < sent
    pins = [word for pin in PINS[name, count] for word in ("--pin", pin)]
    more = ("--set", f"params.steps={STEPS}", "--cluster", str(cluster))
    told = hosts.run("--resume", str(run), *more, *pins)
    assert f"resuming {run} after {STEPS // 2} steps" in told
    assert [line["step"] for line in lines(run, "metrics.jsonl")] == list(range(STEPS))
    placed = [e["nodes"] for e in lines(run, "events.jsonl") if e["event"] == "placed"]
    addresses = {host.address for host in hosts.hosts}
    assert [{node.partition("/")[0] for node in nodes} for nodes in placed] == [addresses, addresses]
    assert_same(run, on_one(name))


class Fault:
    """A run on two of the hosts, under way when something happens to them."""

    def __init__(self, hosts: RayHosts, model: Path, *more: str, name: str = "fault"):
        self.run = hosts.folder / f"{name}-{time.time_ns()}"
        cluster = ("--cluster", str(cluster_file(hosts.folder, 2)), "--pin", "actor_train=dp2@0-1")
        graph = [str(GRAPHS / "grpo_tiny.yaml"), "--set", f"params.model={model}"]
        more = ("--set", f"params.steps={FAULT_STEPS}", *cluster, *more)
        self.process = hosts.start(*graph, *more, "--run-dir", str(self.run))
        metrics, deadline = self.run / "metrics.jsonl", time.monotonic() + LOST_S
        while not metrics.exists() or metrics.read_text().count("\n") < BEFORE_FAULT:
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)

    def workers(self, hosts: RayHosts) -> list[Host]:
        """Those that lie elsewhere than the controller and Ray's head."""
        [placed] = [e["nodes"] for e in lines(self.run, "events.jsonl") if e["event"] == "placed"]
        used = {node.partition("/")[0] for node in placed}
        return [host for host in hosts.hosts if host.address in used and host is not hosts.head]


@pytest.mark.acceptance
def test_traffic_stays_between_the_addresses_of_the_hosts(two: RayHosts, tiny_model: Path) -> None:
    """Of workers and controller, none is on loopback, whatever a host's name resolves to, nor on the
    interface that all hosts have with the same address."""
    fault = Fault(two, tiny_model)
    own = {host.address for host in two.hosts}
    for host in two.hosts:
        sockets = host.run("ss", "--no-header", "--tcp", "--numeric", "--processes", "--all").splitlines()
        ours = [s for s in sockets if _is_of_run(host, s)]
        assert ours
        for state, here, there in (_ends(socket) for socket in ours):
            assert here in own or (state == "LISTEN" and here == "*"), ours  # Ray's own listen everywhere
            assert state == "LISTEN" or there in own, ours
    finish(fault.process)


def _ends(socket: str) -> tuple[str, str, str]:
    """The state, and the addresses of both ends."""
    state, _, _, *ends = socket.split()[:5]
    here, there = (re.sub(r"^\[(::ffff:)?|\]$", "", end.rpartition(":")[0]) for end in ends)
    return state, here, there


def _is_of_run(host: Host, socket: str) -> bool:
    """Whether it is a worker's, or the controller's."""
    pids = re.findall(r"pid=(\d+)", socket)
    commands = [host.run("cat", f"/proc/{pid}/cmdline") for pid in pids]
    return any("RayWorker" in command or "hflow.cli.app" in command for command in commands)


@pytest.mark.acceptance
def test_a_cut_of_five_seconds_is_survived(two: RayHosts, tiny_model: Path) -> None:
    fault = Fault(two, tiny_model)
    [host] = fault.workers(two)
    host.cut()
    time.sleep(5)
    assert len(lines(fault.run, "metrics.jsonl")) < FAULT_STEPS
    host.mend()
    finish(fault.process)
    took = [line["time_s"] for line in lines(fault.run, "metrics.jsonl")]
    assert len(took) == FAULT_STEPS and 4 < max(took) < 60


@pytest.mark.acceptance
def test_a_slow_network_is_only_slower(two: RayHosts, tiny_model: Path) -> None:
    """A megabit per second carries the bytes of a step in the time that it takes."""
    for host in two.hosts:
        host.limit(8)
    try:
        fault = Fault(two, tiny_model, "--set", "params.steps=6")
        finish(fault.process)
    finally:
        for host in two.hosts:
            host.limit(10_000)
    moved = moved_bytes(fault.run) / len(two.hosts)
    took = sum(line["time_s"] for line in lines(fault.run, "metrics.jsonl"))
    assert took > moved * 8 / 8e6


@pytest.fixture
def own_disk(two: RayHosts) -> Iterator[Path]:
    """A folder of which the other host sees one of its own."""
    _, other = two.hosts
    folder = two.folder / "own"
    folder.mkdir(exist_ok=True)
    other.run("mount", "-t", "tmpfs", "tmpfs", str(folder))
    yield folder
    other.run("umount", str(folder))


@pytest.fixture
def read_only(two: RayHosts) -> Iterator[Path]:
    """A folder to which the other host cannot write."""
    _, other = two.hosts
    folder = two.folder / "read-only"
    folder.mkdir(exist_ok=True)
    other.run("mount", "--bind", str(folder), str(folder))
    other.run("mount", "-o", "remount,ro,bind", str(folder))
    yield folder
    other.run("umount", str(folder))


def on_two(two: RayHosts, model: Path) -> list[str]:
    """Arguments of a run on both."""
    arguments = [str(GRAPHS / "grpo_tiny.yaml"), "--set", f"params.model={model}"]
    return [*arguments, "--cluster", str(cluster_file(two.folder, 2)), "--pin", "actor_train=dp2@0-1"]


@pytest.mark.rotating(6)
def test_a_host_without_the_run_folder_is_told_at_the_start(
    two: RayHosts, own_disk: Path, tiny_model: Path
) -> None:
    """Its workers would write to a disk of their own."""
    _, other = two.hosts
    arguments = on_two(two, tiny_model)
    told = finish(two.start(*arguments, "--run-dir", str(own_disk / "run")), 1)
    assert (
        f"error[HF407]: the run folder `{own_disk / 'run'}` is not shared: on {other.address} it does" in told
    )
    other.run("mkdir", str(own_disk / "empty"))
    told = finish(two.start(*arguments, "--run-dir", str(own_disk / "empty")), 1)
    assert f"on {other.address} it is another folder" in told


@pytest.mark.rotating(6)
def test_a_host_that_cannot_write_is_told_where_it_would(
    two: RayHosts, read_only: Path, tiny_model: Path
) -> None:
    """A run that writes nothing there goes on."""
    _, other = two.hosts
    arguments = on_two(two, tiny_model)
    told = finish(two.start(*arguments, "--run-dir", str(read_only / "run")), 1)
    assert f"on {other.address} it cannot be written (Read-only file system)" in told
    nothing = "run.checkpoint=false", "run.export=none", "run.samples=false", "params.steps=1"
    without = [word for setting in nothing for word in ("--set", setting)]
    two.run(*arguments, *without, "--run-dir", str(read_only / "unwritten"))


@pytest.mark.acceptance
@pytest.mark.parametrize("silent", [False, True], ids=["processes", "power"])
def test_a_lost_host_is_told_with_its_address(shared: Path, tiny_model: Path, silent: bool) -> None:
    """At once where its system still says that the processes have gone, and else when Ray finds it silent."""
    with ray_hosts(2, shared) as hosts:
        fault = Fault(hosts, tiny_model, "--set", "params.steps=100000")
        [host] = fault.workers(hosts)
        if silent:
            host.cut()
        host.kill()
        told = finish(fault.process, 1, LOST_S)
        assert "error[HF402]: failed on worker" in told and f" at {host.address}: " in told
        assert not [p for p in _processes(hosts.head) if "RayWorker" in p]


@pytest.mark.acceptance
def test_a_run_goes_on_where_a_spare_host_is(shared: Path, tiny_model: Path) -> None:
    with ray_hosts(3, shared) as hosts:
        kept = ("--set", "run.restarts=1", "--set", "run.checkpoint=2")
        fault = Fault(hosts, tiny_model, *kept)
        fault.workers(hosts)[0].kill()
        told = finish(fault.process)
        assert "starting the workers again" in told and "going on from step" in told
        undisturbed = Fault(hosts, tiny_model)
        finish(undisturbed.process)
        ours, theirs = (lines(run, "metrics.jsonl") for run in (fault.run, undisturbed.run))
        assert [m["digest.rollout"] for m in ours] == [m["digest.rollout"] for m in theirs]
        assert [m["loss.actor_train"] for m in ours] == [m["loss.actor_train"] for m in theirs]


@pytest.mark.acceptance
def test_an_address_that_others_do_not_reach_is_told(shared: Path, tiny_model: Path) -> None:
    """Ray takes what the head's name resolves to, where it has no route to the world."""
    with ray_hosts(2, shared, without_routes=True) as hosts:
        arguments = [str(GRAPHS / "grpo_tiny.yaml"), "--set", f"params.model={tiny_model}"]
        arguments += ["--cluster", str(cluster_file(hosts.folder, 2)), "--pin", "actor_train=dp2@0-1"]
        told = finish(hosts.start(*arguments, "--run-dir", str(hosts.folder / "run")), 1)
        assert "error[HF404]: a Ray node is known as 127.0.1.1" in told and "--node-ip-address" in told


def _processes(host: Host) -> list[str]:
    return host.run("ps", "-eo", "args").splitlines()
