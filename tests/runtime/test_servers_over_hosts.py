"""SGLang's servers whose ranks are on several hosts, which share no loopback, memory nor ``/tmp``."""

from __future__ import annotations

import re
import string
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hflow
from hflow.runtime.tools.new_model import new_model
from tests.installed import needs_sglang
from tests.runtime.hosts import Host, why_not
from tests.runtime.matrix import GRAPHS
from tests.runtime.ray_hosts import RayHosts, cluster_file, finish, ray_hosts
from tests.runtime.test_hosts_apart import lines
from tests.runtime.test_sglang import AGREE, STEPS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "none"),
    needs_sglang,
]
LONG = 500  # steps that no test waits for
LOST_S = 240


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all hosts see: the model is there, and the runs."""
    folder = tmp_path_factory.getbasetemp() / "shared"
    new_model(
        folder / "lm", family="qwen2", layers=2, hidden=32, heads=4, kv_heads=2, ffn=64,
        alphabet="+=. " + string.digits + string.ascii_letters[:42], max_positions=64, tied=False, seed=3,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def two(shared: Path) -> Iterator[RayHosts]:
    with ray_hosts(2, shared) as hosts:
        yield hosts


def saved_plan(hosts: RayHosts, shared: Path, steps: int) -> str:
    """GRPO, trained by dp over both hosts and sampled by one server over both; the actor also answers
    greedily, by the server and by Megatron."""
    overrides = [f"params.model={shared / 'lm'}", f"params.steps={steps}", "run.export=none"]
    graph = hflow.load(GRAPHS / "grpo_tiny.yaml", overrides, [GRAPHS / "greedy_twice.yaml"])
    pins = "actor_train=dp2@0-1", "rollout=tp2@0-1", "greedy=tp2@0-1"
    engines = "rollout=sglang", "greedy=sglang"
    plan = hflow.compile(graph, cluster_file(hosts.folder, 2), pins, engines=engines)
    path = hosts.folder / f"plan-{steps}.json"
    plan.save(path)
    return str(path)


@pytest.mark.rotating(6)
def test_it_samples_and_takes_new_weights(two: RayHosts, shared: Path) -> None:
    """As Megatron answers with the same weights."""
    run = two.folder / "run"
    two.run(saved_plan(two, shared, STEPS), "--run-dir", str(run))
    metrics = lines(run, "metrics.jsonl")
    assert len(metrics) == STEPS == len({line["digest.greedy"] for line in metrics})
    for line in metrics:
        assert line["digest.greedy"] == line["digest.greedy_again"]
        assert 0 < line["actor_train.mismatch"] < AGREE
        assert line["actor_train.staleness"] == 0


@pytest.mark.rotating(6)
def test_it_is_started_again_when_one_of_its_hosts_loses_it(two: RayHosts, shared: Path) -> None:
    """The other host's part ends with it. Its ranks listen at the addresses of the hosts alone."""
    run = two.folder / "killed"
    process = two.start(saved_plan(two, shared, LONG), "--run-dir", str(run))
    metrics, own = run / "metrics.jsonl", {host.address for host in two.hosts}
    try:
        _await(lambda: metrics.exists() and metrics.read_text().count("\n") > 1)
        first, second = (_servers(host) for host in two.hosts)
        assert first and second
        for host, servers in zip(two.hosts, (first, second)):
            assert _listening(host, servers) <= {*own, "127.0.0.1"}
        two.hosts[1].run("kill", "-9", str(second[0]))
        before = metrics.read_text().count("\n")
        _await(lambda: metrics.read_text().count("\n") > before + 2)
        again = [_servers(host) for host in two.hosts]
        assert all(again) and not {*first} & {*again[0]} and not {*second} & {*again[1]}
    finally:
        two.head.run("pkill", "-INT", "-f", "hflow.cli.app exec")
    finish(process, 130)
    _await(lambda: not any(map(_servers, two.hosts)))


def _await(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LOST_S
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _servers(host: Host) -> list[int]:
    """Processes of SGLang's programs there, the first ones of each before its children."""
    told = host.run("ps", "-eo", "pid,args").splitlines()
    return [int(line.split()[0]) for line in told if "sglang.serve" in line or "sglang::" in line]


def _listening(host: Host, pids: list[int]) -> set[str]:
    """The addresses at which any of them listens."""
    sockets = host.run("ss", "--no-header", "--tcp", "--numeric", "--processes", "--listening").splitlines()
    ours = [s for s in sockets if {*map(int, re.findall(r"pid=(\d+)", s))} & {*pids}]
    return {s.split()[3].rpartition(":")[0].strip("[]").removeprefix("::ffff:") for s in ours}
