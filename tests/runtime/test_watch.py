"""Which workers hang, judged from what they tell: with a clock of the test's own, and no processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import hflow
from hflow.graph.run_config import HangPolicy, RunConfig
from hflow.plan.plan import Plan
from hflow.plan.program import Activity
from hflow.runtime.controller.deadlines import NOTICE, Durations, Usual
from hflow.runtime.controller.hang_report import HangReport, Stall
from hflow.runtime.controller.run_folder import RunFolder
from hflow.runtime.controller.watch import Watch
from hflow.runtime.worker.stacks import stacks
from hflow.runtime.worker.whereabouts import Whereabouts

GRAPH = Path(__file__).parent / "grpo_small.yaml"
PINS = ["rollout=tp1@0", "ref_logprobs=tp1@1", "actor_train=dp2@2-3"]
POLICY = HangPolicy(10, 300, 14400)
SECONDS = st.floats(0, 1e7)
POLICIES = st.builds(HangPolicy, st.floats(0.001, 1e3), SECONDS, SECONDS)
ALL, NONE = [True] * 4, [False] * 4


@pytest.fixture(scope="module")
def plan(tiny_model: Path) -> Plan:
    return hflow.compile(hflow.load(GRAPH, f"params.model={tiny_model}"), "local4", PINS)


def place(plan: Plan, name: str) -> tuple[int, ...]:
    """Of the instruction that events call so."""
    names = [plan.step.kind_and_name(i)[1] for i in plan.step.instructions]
    return (names.index(name),)


TRANSFER = "rollout.tokens,mask,logprobs -> actor_train"  # of workers 0, 2 and 3


class Run:
    """A watch of four workers. `spend`: they tell what they do, look after look."""

    def __init__(self, plan: Plan, folder: Path, policy: HangPolicy = POLICY):
        self.plan, self.now, self.said = plan, 0.0, list[str]()
        self.folder = RunFolder(folder, plan, RunConfig(hang=policy))
        report = HangReport(plan.graph, self.folder, self.said.append)
        self.watch = Watch(plan, policy, report, lambda: self.now)
        self.watch.enter([f"10.0.0.{rank}, pid {rank}" for rank in range(4)])

    def at(self, name: str, seconds: float, call: int = 3) -> Whereabouts:
        return Whereabouts(call, "run", False, place(self.plan, name), seconds, "")

    def measured(self, name: str, *seconds: float) -> None:
        """Worker by worker, all from the same time on."""
        names = map(self.plan.step.kind_and_name, self.plan.step.instructions)
        kinds = {name: kind for kind, name in names}
        events = [[{"kind": kinds[name], "name": name, "start_s": 0.0, "end_s": s}] for s in seconds]
        self.watch.learn(("run", 0, False), [{"events": e} for e in events])

    def spend(
        self,
        seconds: float,
        told: Callable[[float], Sequence[Whereabouts | None]],
        called: Sequence[bool] = ALL,
        stopped: Sequence[bool] = NONE,
    ) -> Stall | None:
        """`told`: what the workers tell after so many seconds."""
        spent = 0.0
        while spent < seconds:
            spent += self.watch.pause_s
            self.now += self.watch.pause_s * (1 + 1e-9)
            assert self.watch.is_due
            self.watch.hear(told(spent))
            if stall := self.watch.hanging(called, stopped):
                return stall
        return None


@pytest.fixture
def run(plan: Plan, tmp_path: Path) -> Run:
    return Run(plan, tmp_path / "run")


# ---------- deadlines


def test_the_defaults() -> None:
    assert HangPolicy() == POLICY == RunConfig().hang
    assert Usual(3.0, 1.0).deadline_s(POLICY) == 300 and Usual(3.0, 1.0).notice_s(POLICY) == 100
    assert Usual(60.0, 1.0).deadline_s(POLICY) == 600 and Usual(60.0, 70.0).deadline_s(POLICY) == 700
    assert Usual(None, 60.0).deadline_s(POLICY) == 14400 and Usual(None, 60.0).notice_s(POLICY) == 200
    assert Usual(None, 2000.0).deadline_s(POLICY) == 20000


@given(POLICIES, SECONDS, SECONDS, SECONDS)
def test_what_was_measured_only_makes_it_longer(
    policy: HangPolicy, longest_s: float, more_s: float, predicted_s: float
) -> None:
    one, two = Usual(longest_s, predicted_s), Usual(longest_s + more_s, predicted_s)
    assert one.deadline_s(policy) <= two.deadline_s(policy)
    assert policy.least_s <= one.deadline_s(policy)
    assert max(policy.first_s, policy.factor * predicted_s) == Usual(None, predicted_s).deadline_s(policy)
    for usual in (one, two, Usual(None, predicted_s)):
        assert usual.notice_s(policy) <= usual.deadline_s(policy) / NOTICE


@given(st.lists(st.floats(0.1, 1e5), min_size=2), st.floats(1, 10))
def test_what_grows_by_less_than_the_factor_never_hangs(steps: list[float], factor: float) -> None:
    longest = steps[0]
    for seconds in steps[1:]:
        assume(seconds <= factor * longest)
        assert seconds <= Usual(longest, 0.0).deadline_s(HangPolicy(factor, 0.0, 0.0)) * (1 + 1e-9)
        longest = max(longest, seconds)


def events(spans: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[dict[str, Any]]:
    for name, all_ in spans.items():
        kind = "transfer" if name == TRANSFER else "call"
        yield from ({"kind": kind, "name": name, "start_s": start, "end_s": end} for start, end in all_)


def test_a_transfer_has_not_taken_what_it_waited(plan: Plan) -> None:
    """Only from when the last worker came to it; what workers do by themselves counts whole."""
    spans = [{TRANSFER: [(0, 90)], "reward": [(0, 9), (9, 11)]}, {TRANSFER: [(88, 89)], "reward": [(8, 9)]}]
    durations = Durations(plan)
    durations.learn(False, [{"events": list(events(own))} for own in spans])
    for name, seconds in ((TRANSFER, 2), ("reward", 9)):
        at = Whereabouts(1, "run", False, place(plan, name), 0.0, "")
        assert durations.usual(plan.step, at).longest_s == seconds
    evaluated = Whereabouts(1, "run", True, (0,), 0.0, "")
    assert durations.usual(plan.evaluation, evaluated).longest_s is None


# ---------- who hangs


def test_the_one_that_others_wait_for(run: Run) -> None:
    """It is told of at a third of its deadline, once, and then it hangs; those that wait do not."""
    run.measured("rollout", 40.0)
    told = lambda s: [run.at("rollout", s), None, *[run.at(TRANSFER, s + 50)] * 2]  # noqa: E731
    called = [True, False, True, True]
    assert run.spend(130, told, called) is None and not run.said
    assert run.spend(200, lambda s: told(s + 130), called) is None
    (line,) = run.said
    assert line.startswith("worker 0 (10.0.0.0, pid 0) has been in `rollout` for 2 min")
    assert "took at most 40.0 s before; workers 2 (10.0.0.2, pid 2), 3 (10.0.0.3, pid 3) wait for it" in line
    stall = run.spend(100, lambda s: told(s + 330), called)
    assert stall and stall.ranks == (0,) and stall.node == "rollout" and stall.waiting == (2, 3)
    assert stall.limit_s == 400 and len(run.said) == 1


def test_who_went_on_alone_does_not_hang(run: Run) -> None:
    """A transfer that worker 2 has skipped: the others never leave it."""
    run.measured(TRANSFER, 0.1, 0.1)
    told = lambda s: [run.at(TRANSFER, s), None, run.at("actor_train", s), run.at(TRANSFER, s)]  # noqa: E731
    stall = run.spend(400, told, [True, False, True, True])
    assert stall and stall.ranks == (0, 3) and stall.passed == (2,)
    assert "worker 2 (10.0.0.2, pid 2), which takes part in it, went on without" in run.said[0]


def test_a_collective_that_all_are_in(run: Run) -> None:
    run.measured("actor_train", 20.0, 20.0)
    told = lambda s: [None, None, run.at("actor_train", s), run.at("actor_train", s)]  # noqa: E731
    stall = run.spend(400, told, [False, False, True, True])
    assert stall and stall.ranks == (2, 3) and not stall.passed and stall.seconds == pytest.approx(300, abs=6)


def test_a_worker_that_is_done_is_past_everything(run: Run) -> None:
    """Even if its last answer is older, and it was stopped since."""
    run.measured("actor_train", 20.0, 20.0)
    run.spend(5, lambda s: [None, None, run.at(TRANSFER, s), run.at("actor_train", s)])
    told = lambda s: [None, None, None, run.at("actor_train", s)]  # noqa: E731
    stall = run.spend(400, told, [False, False, False, True])
    assert stall and stall.ranks == (3,)


def test_waiting_for_days_is_no_hang(run: Run) -> None:
    """The rollout of a first step goes on as long as it may; the transfer that waits for it was short."""
    run.measured(TRANSFER, 0.1, 0.1)
    run.measured("rollout", 1e5)
    told = lambda s: [run.at("rollout", s), None, *[run.at(TRANSFER, s)] * 2]  # noqa: E731
    assert run.spend(2e5, told, [True, False, True, True]) is None
    after = lambda s: [*[run.at(TRANSFER, s + s0) for s0 in (0, 0)], *[run.at(TRANSFER, s + 2e5)] * 2]  # noqa: E731
    assert run.spend(250, after, [True, False, True, True]) is None  # since all are there
    stall = run.spend(100, lambda s: after(s + 250), [True, False, True, True])
    assert stall and stall.ranks == (0, 2, 3)


@pytest.mark.parametrize("path", [(), (3,)])
def test_a_worker_between_two_calls(run: Run, path: tuple[int, ...]) -> None:
    """It hangs only where it was called and does not begin, and not while another is in the call before."""
    idle = lambda s: Whereabouts(2, "", False, (), s, "")  # noqa: E731
    before = lambda s: [Whereabouts(2, "run", False, path, s, ""), *[idle(s)] * 3]  # noqa: E731
    assert run.spend(1000, before, [True, False, False, False]) is None
    stall = run.spend(400, lambda s: [Whereabouts(3, "load", False, (), s, "x"), *[idle(s)] * 3])
    assert stall and stall.ranks == (1, 2, 3) and stall.waiting == (0,)


def test_a_stopped_process(run: Run) -> None:
    """Whatever the deadline of what it was doing when it last answered."""
    answers = lambda s: [None, *[run.at(TRANSFER, s)] * 3]  # noqa: E731
    run.spend(5, lambda s: [run.at("rollout", s), *[run.at(TRANSFER, s)] * 3])
    assert run.spend(900, answers, stopped=NONE) is None  # it may only let no other thread run
    assert run.watch.silent() == (0,)
    stall = run.spend(10, answers, stopped=[True, False, False, False])
    assert stall and stall.silent and stall.stopped and stall.ranks == (0,) and stall.limit_s == 300


def test_a_process_is_told_to_be_stopped_whenever_that_is_found(run: Run) -> None:
    """A moment after it has become silent, where its node is another."""
    answers = lambda s: [None, *[run.at(TRANSFER, s)] * 3]  # noqa: E731
    run.spend(5, lambda s: [run.at("rollout", s), *[run.at(TRANSFER, s)] * 3])
    run.spend(150, answers)
    run.spend(50, answers, stopped=[True, False, False, False])
    silent = [text for text in run.said if "has not answered" in text]
    assert ["SIGSTOP" in text for text in silent] == [False, True]


def test_a_process_that_only_does_not_answer(run: Run, plan: Plan) -> None:
    """Where it is nobody knows; only where it was. So it has as long as whatever takes longest."""
    activities = [
        p.kind_and_name(i) for p in plan.programs for i in p.instructions if isinstance(i, Activity)
    ]
    for evaluation in (False, True):
        seen = [{"kind": k, "name": n, "start_s": 0.0, "end_s": 3.0} for k, n in activities]
        run.watch.learn(("run", 0, evaluation), [{"events": seen}])
    run.measured("actor_train", 40.0, 40.0)
    run.spend(5, lambda s: [run.at("rollout", s), *[run.at(TRANSFER, s)] * 3])
    stall = run.spend(500, lambda s: [None, *[run.at(TRANSFER, s)] * 3])
    assert stall and stall.ranks == (0,) and stall.silent and not stall.stopped and stall.limit_s == 400
    assert "it was in `rollout` before" in run.said[-1]


def test_a_pause_of_the_controller_does_not_count(run: Run) -> None:
    run.measured("reward", 1.0)
    called = [True, False, False, False]
    for _ in range(20):
        run.now += 1e4
        run.watch.hear([run.at("reward", run.now), None, None, None])
        assert run.watch.hanging(called, NONE) is None
    assert run.spend(300, lambda s: [run.at("reward", run.now), None, None, None], called)


def test_time_counts_anew_in_each_place(run: Run) -> None:
    called = [True, False, False, False]
    for call in range(9):
        run.measured("reward", 1.0)
        assert run.spend(290, lambda s, c=call: [run.at("reward", s, c), None, None, None], called) is None
    assert len(run.said) == 9


@pytest.mark.slow
@given(st.data())
def test_whoever_hangs_waits_for_nobody(
    plan: Plan, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Wherever workers stand still, some of those that are first in the program are found, and none that
    waits."""
    run = Run(plan, tmp_path_factory.mktemp("run") / "run", HangPolicy(10, 10, 10))
    steps = [
        [i for i, instruction in enumerate(plan.step.instructions) if rank in instruction.devices]
        for rank in range(4)
    ]
    paths = [(data.draw(st.sampled_from(own)),) for own in steps]
    calls = [data.draw(st.integers(3, 4)) for _ in range(4)]
    told = lambda s: [Whereabouts(c, "run", False, p, s, "") for c, p in zip(calls, paths)]  # noqa: E731
    stall = run.spend(100, told)
    assert stall
    positions = list(zip(calls, paths))
    for rank in stall.ranks:
        instruction = plan.step.instructions[paths[rank][0]]
        exchanges = instruction.op in ("transfer", "weights") or instruction.node == "actor_train"
        others = instruction.devices if exchanges and instruction.op != "free" else ()
        assert all(positions[other] >= positions[rank] for other in others)
        assert all(positions[other] > positions[rank] for other in stall.waiting)


# ---------- what is told


def test_the_failure_and_the_stacks(run: Run, plan: Plan) -> None:
    run.measured("reward", 1.0)
    told = lambda s: [run.at("reward", s), None, *[run.at(TRANSFER, s)] * 2]  # noqa: E731
    stall = run.spend(400, told, [True, False, True, True])
    assert stall
    for number in (1, 2):
        failure = run.watch.failure(
            stall, {0: "thread main: reward.py", 2: "thread main: gloo"}, {3: "stopped"}
        )
        (problem,) = failure.diagnostics
        assert problem.code == "HF413" and problem.span == plan.graph.node("reward").span
        assert "the run hangs: worker 0 (10.0.0.0, pid 0) has been in `reward` for 5 min" in problem.message
        text = (run.folder.path / f"stacks-{number}.txt").read_text()
        assert f"{run.folder.path}/stacks-{number}.txt" in problem.help
        assert "worker 0 (10.0.0.0, pid 0): in `reward` for 5 min" in text and "reward.py" in text
        assert "worker 3 (10.0.0.3, pid 3)" in text and "state of its process: stopped." in text
        assert text.count("It does not answer") == 2 and "state of its process: unknown." in text
    run.folder.close("failed", "")
    events = [json.loads(line) for line in (run.folder.path / "events.jsonl").read_text().splitlines()]
    kinds: list[Any] = [(e["event"], e.get("workers"), e.get("doing"), e.get("stacks")) for e in events]
    assert ("slow", [0], "in `reward`", None) in kinds
    assert ("hung", [0], "in `reward`", "stacks-2.txt") in kinds


def test_the_stacks_are_of_all_other_threads() -> None:
    import threading

    ready, over = threading.Event(), threading.Event()

    def wait_in_vain() -> None:
        ready.set()
        over.wait()

    thread = threading.Thread(target=wait_in_vain, name="vain")
    thread.start()
    ready.wait()
    text = stacks()
    over.set()
    thread.join()
    assert "thread vain:" in text and "in wait_in_vain" in text and "in stacks" not in text
