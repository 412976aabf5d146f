"""The sample of a matrix: it shows every value, can be repeated, and comes round to every case. What rotates
runs seldom."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests import sampling
from tests.sampling import ALL, cover, sampled

AXES = {"layout": ["dp2", "tp2", "pp2", "tp2,pp2"], "dtype": ["f32", "bf16"], "tied": ["yes", "no"]}
CASES = [dict(zip(AXES, values)) for values in product(*AXES.values())]
SEEDS = [f"commit{number}" for number in range(60)]

CONFTEST = """
from tests import sampling_hooks

def pytest_configure(config):
    config.pluginmanager.register(sampling_hooks)
"""
MATRIX = """
import pytest

@pytest.mark.matrix
@pytest.mark.parametrize("layout", range(4))
@pytest.mark.parametrize("dtype", range(6))
def test_one(layout, dtype):
    pass

@pytest.mark.matrix(10**9)
@pytest.mark.parametrize("function", [abs, lambda x: x, min])
@pytest.mark.parametrize("dtype", range(3))
def test_two(function, dtype):
    pass

@pytest.mark.rotating(6)
@pytest.mark.parametrize("number", range(30))
def test_seldom(number):
    pass

@pytest.mark.acceptance
def test_long():
    pass
"""
SLOW = """
import pytest

@pytest.mark.slow
def test_of_seconds():
    pass

@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("number", range(3))
def test_of_cases(number):
    pass

def test_quick():
    pass
"""


def test_a_cover_has_every_value_and_no_case_too_many() -> None:
    chosen = cover(CASES)
    assert len(chosen) == 4, "as many as the longest axis has values"
    for axis, values in AXES.items():
        assert {CASES[number][axis] for number in chosen} == set(values)
    assert cover([]) == set()


def test_every_sample_holds_the_cover_and_all_is_all() -> None:
    assert all(cover(CASES) <= sampled(CASES, seed, 8) for seed in SEEDS)
    assert sampled(CASES, ALL) == set(range(len(CASES)))


def test_a_seed_repeats_its_sample_and_another_draws_another() -> None:
    assert all(sampled(CASES, seed, 8) == sampled(CASES, seed, 8) for seed in SEEDS)
    assert len({frozenset(sampled(CASES, seed, 8)) for seed in SEEDS}) > len(SEEDS) / 2


def test_samples_come_round_to_every_case() -> None:
    """One of eight is drawn: that 60 seeds miss a given one has a chance of 3e-4."""
    assert set[int]().union(*(sampled(CASES, seed, 8) for seed in SEEDS)) == set(range(len(CASES)))
    drawn = [len(sampled(CASES, seed, 8) - cover(CASES)) for seed in SEEDS]
    assert sum(drawn) / len(drawn) == pytest.approx(12 / 8, abs=0.6), "12 cases, about 3 standard deviations"


def test_a_case_is_drawn_whichever_others_there_are() -> None:
    """Tests of the same cases share runs, and one that has more of them must not draw others."""
    for seed in SEEDS:
        rest = sampled(CASES, seed, 8) - cover(CASES)
        assert {number for number in rest if number < 8} <= sampled(CASES[:8], seed, 8)


def test_without_a_cover_there_is_one_case_at_least() -> None:
    samples = [sampled(CASES, seed, 1000, must_cover=False) for seed in SEEDS]
    assert all(samples) and len(set[int]().union(*samples)) > len(CASES) / 2


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """With this project's way of choosing tests, and few tests."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_matrix.py").write_text(MATRIX)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  matrix\n  rotating\n  acceptance\n  slow\n")
    return tmp_path


def passed(project: Path, sample: str, *more: str) -> tuple[str, list[str]]:
    """The header's line and the tests that ran."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", str(project)]
    environment = {"PYTHONPATH": str(Path.cwd()), "PATH": "/usr/bin:/bin"}
    environment |= {sampling.VARIABLE: sample} if sample else {}
    told = subprocess.run(
        [*command, *(more or (str(project),))], capture_output=True, text=True, env=environment, cwd=project
    ).stdout.splitlines()
    header = next(line for line in told if line.startswith("sample: "))
    return header, [line.split()[0] for line in told if " PASSED" in line]


@pytest.mark.slow
def test_pytest_prints_the_seed_and_repeats_with_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sampling.VARIABLE)
    header, first = passed(project, "")
    seed = sampling.seed()
    assert f"{sampling.VARIABLE}={seed} " in header
    assert passed(project, seed)[1] == first
    assert 6 <= len([name for name in first if "test_one" in name]) < 24
    assert len([name for name in first if "test_two" in name]) == 3
    assert not any("test_long" in name for name in first)
    assert len(passed(project, ALL)[1]) == 24 + 9 + 30 + 1


@pytest.mark.slow
def test_a_rotating_test_runs_with_some_seeds(project: Path) -> None:
    """With one of three; that 30 have fewer than 2 or more than 20 of it has a chance of 2e-4."""
    samples = [{name for name in passed(project, seed)[1] if "test_seldom" in name} for seed in ("a", "b")]
    assert all(2 <= len(sample) <= 20 for sample in samples) and samples[0] != samples[1]
    name = f"test_matrix.py::test_seldom[{next(n for n in range(30) if not _is_in(n, samples[0]))}]"
    assert passed(project, "a", f"{project}/{name}")[1] == [name]


def _is_in(number: int, sample: set[str]) -> bool:
    return any(name.endswith(f"[{number}]") for name in sample)


@pytest.mark.slow
def test_what_the_command_line_names_runs(project: Path) -> None:
    _, everything = passed(project, ALL)
    _, some = passed(project, "x")
    name = next(name for name in everything if name not in some and "[" in name)
    assert passed(project, "x", f"{project}/{name}")[1] == [name]
    assert passed(project, "x", str(project), "-m", "acceptance")[1] == ["test_matrix.py::test_long"]


@pytest.mark.slow
def test_files_with_slow_tests_take_turns(project: Path) -> None:
    """One of two; that of 20 files fewer than 3 or more than 17 are drawn has a chance of 4e-4."""
    for number in range(20):
        (project / f"test_slow_{number}.py").write_text(SLOW)
    (project / "test_matrix.py").unlink()
    samples = [passed(project, seed)[1] for seed in ("a", "b")]
    drawn = [{name for name in sample if "test_of_seconds" in name} for sample in samples]
    assert all(3 <= len(names) <= 17 for names in drawn) and drawn[0] != drawn[1]
    assert all(sum("test_quick" in name for name in sample) == 20 for sample in samples)
    assert all(sum("test_of_cases" in name for name in sample) == 60 for sample in samples), (
        "a matrix samples"
    )
    rests = next(n for n in range(20) if not any(f"test_slow_{n}.py" in name for name in drawn[0]))
    assert len(passed(project, "a", f"{project}/test_slow_{rests}.py")[1]) == 5
    assert len(passed(project, ALL)[1]) == 20 * 5
