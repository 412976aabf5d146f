"""Steps that CUDA can capture draw what growing ones draw. Here they are not captured but run: a CPU shows
that they are the same operations each time, and that they ask nothing of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hflow.graph.types import Truncation
from hflow.plan.layout import Mesh
from hflow.runtime.ends import EndRule
from hflow.runtime.engines.groups import NewGroup
from hflow.runtime.engines.megatron import static_decoding
from hflow.runtime.engines.megatron.generate import Sampling, generate
from hflow.runtime.engines.megatron.responses import Responses
from hflow.runtime.engines.sampler import NotFinite
from hflow.runtime.rows import from_lists
from hflow.runtime.tokenizer import load_tokenizer
from tests.engines.models import EOS, VARIANTS, Folders, make_engine, some_prompts
from tests.engines.processes import Pool

PROMPTS, SAMPLES, NEW = 5, 3, 21
ONE = Mesh.of((0,))
DENSE = [v for v in VARIANTS if "moe" not in v and v not in ("mixtral", "gpt_oss")]
ASKING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "_unique2", "equal")


class AsksNothing(TorchDispatchMode):
    """Counts operations by name. Those whose result the host has to wait for are errors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ASKING, f"{name} asks the device"
        indices = args[1] if name in ("index", "index_put_", "index_put") else ()
        assert all(i is None or i.dtype != torch.bool for i in indices), f"{name} by a mask asks the device"
        self.names.append("slice" if name == "alias" else name)  # which it is, of a whole dimension
        return func(*args, **(kwargs or {}))


@contextmanager
def static(stretch: int = 4, few: float = 0.5) -> Iterator[list[list[str]]]:
    """Static steps on a CPU, of short stretches; gives the operations of each step that would be captured."""
    captured: list[list[str]] = []

    class Watched:
        """In the place of graphs."""

        def captured(self, step: Callable[[], None]) -> Callable[[], None]:
            def watched() -> None:
                with AsksNothing() as watch:
                    step()
                captured.append(watch.names)

            return watched

    with (
        patch.object(static_decoding, "PLATFORMS", ("cpu",)),
        patch.object(static_decoding, "STRETCH", stretch),
        patch.object(static_decoding, "FEW", few),
        patch.object(static_decoding, "WORTH", 0),
        patch.object(static_decoding, "LOOK", 3),
        patch.object(static_decoding, "Graphs", Watched),
    ):
        yield captured


def both(
    rank: int, new_group: NewGroup, folder: str, temperature: float, dtype: str, changes: dict[str, Any]
) -> Any:
    """Lengths, tokens and log-probs of growing steps, and of static ones, with the operations of these."""
    model = make_engine(rank, new_group, folder, ONE, dtype=dtype).model
    ends = replace(EndRule(EOS, decode=load_tokenizer(folder).decode), **changes.get("ends", {}))
    sampling = Sampling(NEW, temperature, 7, 2, 1, ends, changes.get("truncation", Truncation()))
    ids, prompts = torch.arange(PROMPTS * SAMPLES) + 4, from_lists(some_prompts(PROMPTS))
    run = lambda: told(generate(model, prompts, ids, sampling, 2 * SAMPLES, torch.device("cpu")))  # noqa: E731
    with patch("hflow.runtime.engines.megatron.generate.DRAWN", 4):  # static steps draw one by one
        growing = run()
    with static() as captured:
        return growing, run(), captured


def told(found: Any) -> tuple[list[int], list[list[int]], list[list[float]]]:
    lengths = found.lengths.tolist()
    rows = [[x[:length].tolist() for x, length in zip(t, lengths)] for t in (found.tokens, found.log_probs)]
    return lengths, rows[0], rows[1]


def same(growing: Any, static: Any, tolerance: float = 1e-5) -> None:
    assert growing[:2] == static[:2]
    for mine, theirs in zip(static[2], growing[2], strict=True):
        assert mine == pytest.approx(theirs, abs=tolerance)  # a masked place more, and sums in another order


@pytest.mark.parametrize("variant", DENSE)
def test_static_steps_draw_the_same(pool: Pool, folders: Folders, variant: str) -> None:
    [(growing, found, captured)] = pool.run(1, both, folders.of(variant, False), 1.0, "f32", {})
    same(growing, found)
    assert len(set(growing[0])) > 1, "rows end at different tokens"
    assert captured and all(names == captured[0] for names in captured), "all steps are the same operations"


@pytest.mark.parametrize(
    ("temperature", "changes"),
    [
        (0.0, {}),
        (0.7, {"truncation": Truncation(top_k=9, top_p=0.8, min_p=0.05)}),
        (1.0, {"ends": {"token_ids": frozenset({5, 9})}}),
        (1.0, {"ends": {"token_ids": frozenset(range(32))}}),
        (1.0, {"ends": {"texts": ("0", "7a")}}),
    ],
    ids=["greedy", "truncated", "stop tokens", "all end before anyone looks", "stop texts"],
)
def test_whatever_is_sampled(
    pool: Pool, folders: Folders, temperature: float, changes: dict[str, Any]
) -> None:
    [(growing, found, _)] = pool.run(1, both, folders.of("qwen3", True), temperature, "f32", changes)
    same(growing, found)


def broken(rank: int, new_group: NewGroup, folder: str) -> list[str]:
    """What is said of a logit that is no number, by growing steps and by static ones."""
    engine = make_engine(rank, new_group, folder, ONE)
    said = list[str]()
    embedding: Tensor = engine.model.embedding.word_embeddings.weight
    sampling = Sampling(NEW, 1.0, 7, 2, 1, EndRule(-1))
    prompts, ids = from_lists([[5, 6], [5, 6, 7]]), torch.tensor([8, 9])
    clean = generate(engine.model, prompts, ids, sampling, 2, torch.device("cpu")).tokens
    with torch.no_grad():  # a token that only row 9 reads, and not as its first
        late = next(t for t in clean[1, 2:].tolist() if t not in (5, 6, 7) and t not in clean[0])
        embedding[late] = torch.nan
    for mode in (None, static()):
        with pytest.raises(NotFinite) as raised:
            if mode is None:
                generate(engine.model, prompts, ids, sampling, 2, torch.device("cpu"))
            else:
                with mode:
                    generate(engine.model, prompts, ids, sampling, 2, torch.device("cpu"))
        said.append(str(raised.value))
    return said


def test_a_number_that_is_not_finite_is_told_with_its_row(pool: Pool, folders: Folders) -> None:
    [(growing, found)] = pool.run(1, broken, folders.of("qwen2", False))
    assert growing.replace(" is nan", " is not finite") == found and "of row 9" in found


def test_an_ended_row_may_be_no_number() -> None:
    """Nobody reads what it draws, but a token outside the vocabulary would end CUDA's context."""
    decoder, cache = SimpleNamespace(length=8, windows=[None]), SimpleNamespace(used=2)
    sampling, out = Sampling(4, 1.0, 7, 2, 1, EndRule(-1)), Responses.to_fill(2, 4, torch.device("cpu"))
    given: Any = decoder, cache, torch.ones(2, 2, dtype=torch.bool), torch.tensor([3, 4]), sampling, out
    step = static_decoding.StaticStep(*given)
    step.going[0] = False
    step.draw(torch.tensor([[torch.nan] * 5, [0.0] * 5]))
    assert step.going_after(1) == 1 and 0 <= int(out.tokens[0, 0]) < 5
    step.draw(torch.tensor([[0.0] * 5, [torch.inf] * 5]))
    with pytest.raises(NotFinite, match="response token 1 of row 4"):
        step.going_after(2)


class FakeCuda:
    """torch.cuda, of which captures fail for want of memory as often as told."""

    def __init__(self, failures: int):
        self.failures, self.pools, self.used, self.emptied = failures, 0, list[int](), 0

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def empty_cache(self) -> None:
        self.emptied += 1

    def graph(self, graphs: Any, step: Callable[[], None]) -> Any:
        self.used.append(graphs._pool)
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError
        return SimpleNamespace(replay=step)


@pytest.mark.parametrize(
    ("failures", "used", "emptied"), [(0, [1, 1, 1], 0), (1, [1, 2, 2, 2], 1)], ids=["room", "full once"]
)
def test_graphs_of_one_decoding_share_a_pool(failures: int, used: list[int], emptied: int) -> None:
    cuda, graphs = FakeCuda(failures), static_decoding.Graphs()
    with (
        patch.object(static_decoding.torch.cuda, "graph_pool_handle", cuda.graph_pool_handle),
        patch.object(static_decoding.torch.cuda, "empty_cache", cuda.empty_cache),
        patch.object(static_decoding.Graphs, "_graph", lambda self, step: cuda.graph(self, step)),
    ):
        for _ in range(3):
            graphs.captured(lambda: None)
    assert (cuda.used, cuda.emptied) == (used, emptied)


def test_a_device_that_stays_full_is_told() -> None:
    cuda = FakeCuda(2)
    with (
        patch.object(static_decoding.torch.cuda, "graph_pool_handle", cuda.graph_pool_handle),
        patch.object(static_decoding.torch.cuda, "empty_cache", cuda.empty_cache),
        patch.object(static_decoding.Graphs, "_graph", lambda self, step: cuda.graph(self, step)),
        pytest.raises(torch.OutOfMemoryError),
    ):
        static_decoding.Graphs().captured(lambda: None)


def test_what_has_changing_shapes_is_not_captured(pool: Pool, folders: Folders) -> None:
    plain = {"variant": "qwen2", "sampling": {}}
    cases = [plain, plain | {"variant": "qwen3_moe"}, plain | {"sampling": {"max_kept": 4}}]
    [chosen] = pool.run(1, choices, [folders.of(c["variant"], False) for c in cases], cases)
    assert chosen == [(False, True), (False, False), (False, False)]


def choices(rank: int, new_group: NewGroup, paths: list[str], cases: list[dict[str, Any]]) -> Any:
    """Whether each would be captured, on a CPU and if that were a platform where it pays."""
    found = []
    for path, case in zip(paths, cases, strict=True):
        model = make_engine(rank, new_group, path, ONE).model
        sampling = replace(Sampling(NEW, 1.0, 7, 2, 1, EndRule(EOS)), **case["sampling"])
        here = static_decoding.is_static(model, sampling)
        with static():
            found.append((here, static_decoding.is_static(model, sampling)))
    return found
