"""Checkpoints of every format that was released are read, or refused with what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hflow.diagnostics import HflowError
from hflow.plan.run_state import run_state
from hflow.runtime.checkpoint.manifest import FORMAT, NAME, name_of, sealed
from hflow.runtime.execute import execute
from tests.checkpoint.make_fixture import DIGESTS, STEP, begin, digests, folder_of, plan_of
from tests.checkpoint.written import load, tree_of, write

FORMATS = range(1, FORMAT + 1)


@pytest.mark.parametrize("number", FORMATS)
def test_a_checkpoint_of_then_has_its_values(number: int) -> None:
    checkpoint = folder_of(number) / name_of(STEP)
    assert tree_of(checkpoint)["format"] == number
    assert digests(load(checkpoint)) == json.loads((folder_of(number) / DIGESTS).read_text())


@pytest.mark.parametrize("number", FORMATS)
def test_it_has_what_a_run_carries(number: int) -> None:
    names = json.loads((folder_of(number) / DIGESTS).read_text())
    for kind in ("models/actor/weights/", "models/actor/exp_avg/", "models/actor/exp_avg_sq/", "carried/"):
        assert any(name.startswith(kind) for name in names)
    assert {"models/actor/updates", "models/actor/version", "regions/sampling/rounds"} <= names.keys()
    assert "regions/sampling/waiting/tokens/values" in names


@pytest.mark.slow
@pytest.mark.parametrize("number", FORMATS)
def test_a_run_goes_on_from_it(number: int, tmp_path: Path) -> None:
    """Its own checkpoint of that step, of other weights, is replaced."""
    run = begin(tmp_path, seed=2)
    place, kept = run.folder / "checkpoints" / name_of(STEP), folder_of(number) / name_of(STEP)
    assert digests(load(place)) != digests(load(kept))
    shutil.rmtree(place)
    shutil.copytree(kept, place)
    plan = plan_of(tmp_path / "model", STEP + 1)
    assert {t.name for t in run_state(plan) if not t.optional} <= load(kept).keys()
    resumed = execute(plan, run.folder, workers="inline", resume=True, export=False)
    assert [line["step"] for line in resumed.metrics] == list(range(STEP + 1))
    last, (two_ago, total) = resumed.metrics[-1], load(kept)["carried/sum.total"].tolist()
    assert last["sum.twice"] == two_ago and last["sum.total"] == pytest.approx(total + last["sum.mean"])


def test_a_newer_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = write(tmp_path)
    tree = tree_of(folder) | {"format": FORMAT + 1, "chunks": [], "files": None}
    (folder / NAME).write_text(sealed(json.dumps(tree)))
    with pytest.raises(HflowError) as caught:
        load(folder)
    (found,) = caught.value.diagnostics
    assert found.code == "HF412" and found.message.endswith(f"cannot be used: it has format {FORMAT + 1}")
    assert found.help == f"this hflow reads format {FORMAT}; go on with the hflow that wrote it"
