"""Generate nodes on SGLang, as one rank of their mesh sees them.

A server that samples with older weights evaluates the newest, too: these are given to it for an evaluation,
and its own again, from the host's memory, before it samples next.
"""

from __future__ import annotations

import importlib.util
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Self

import torch

from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.infer.kinds.generate import LENGTH, ROUTES
from hflow.graph.ir import Model, Node
from hflow.graph.types import Truncation
from hflow.plan.engines.sglang import SERVER_PROFILE
from hflow.plan.model_shape import ModelShape
from hflow.plan.node_plan import NodePlan
from hflow.plan.sharding import Sharding
from hflow.plan.workload import workload
from hflow.runtime.cores import Cores
from hflow.runtime.engines.groups import NewGroup, make_groups
from hflow.runtime.engines.protocol import EngineCall, ModelEngine, ModelSetup, NodeError, Result
from hflow.runtime.engines.rollout import Rollout
from hflow.runtime.engines.sampler import Answers, NotFinite, Sampling
from hflow.runtime.engines.sglang.hosts import ServerHosts
from hflow.runtime.engines.sglang.options import ServerOptions, foresight
from hflow.runtime.engines.sglang.replica import Replica
from hflow.runtime.engines.sglang.requests import RequestRow, Response
from hflow.runtime.engines.sglang.routes import served_routes
from hflow.runtime.engines.sglang.server import ServerError
from hflow.runtime.engines.sglang.tiles import LOADER
from hflow.runtime.engines.sglang.weights import ServedWeights, buckets
from hflow.runtime.kept import KeptSets
from hflow.runtime.rows import TORCH_DTYPES, Rows, from_lists
from hflow.runtime.sampling import row_seeds
from hflow.runtime.tokenizer import Tokenizer
from hflow.runtime.weight_files import stored_tensors

DTYPES = {"f32": "float32", "bf16": "bfloat16"}


class SglangModel(ModelEngine):
    """The engine of the generate nodes that read one copy of a model's weights."""

    weights: ServedWeights

    def __init__(
        self,
        model: Model,
        shape: ModelShape,
        sharding: Sharding,
        rank: int,
        cores: Mapping[int, Cores],
        new_group: NewGroup,
        tokenizer: Tokenizer,
        device: torch.device,
        nodes: Iterable[tuple[Node, NodePlan]],
        renewed: bool,
        server_bytes: int,
        seed: int,
        stopped: threading.Event,
        told: Callable[[str], None],
    ):
        """Start the server of this rank's replica, with the weights in ``model.path``. Collective over the
        whole world.

        Args:
            rank: of this process in the torch.distributed world.
            cores: that the ranks of this machine may count on.
            nodes: that it will run.
            renewed: whether its weights come anew in every step, so that it need not keep them between.
            server_bytes: what the server takes of a device before it computes anything (`Cluster`).

        Raises:
            HflowError: HF406 when SGLang is not installed.
            NodeError: HF404 when the server does not start.
        """
        self.tokenizer, self.shape = tokenizer, shape
        groups = make_groups(sharding, rank, new_group)
        self.member = groups is not None
        if groups is None:
            return
        _check_installed(model)
        stored_tensors(model, shape.base)  # which the server reads itself
        self.groups = groups
        planned = tuple(nodes)
        works = [(plan.micro_batch, workload(node)) for node, plan in planned]
        sequence = max(work.sequence for _, work in works)
        rooms = [plan.cached(work.sequence) for (_, plan), (_, work) in zip(planned, works)]
        size = TORCH_DTYPES[model.weight_dtype].itemsize
        reserve = max(
            SERVER_PROFILE.reserve_bytes(shape, size, work, sharding.mesh, rows) for rows, work in works
        )
        replica = next(ranks for ranks in sharding.mesh.groups("tp") if rank in ranks)
        together = tuple(sorted({core for other in replica for core in cores.get(other, ())}))

        def options(devices: tuple[str, ...], hosts: ServerHosts) -> ServerOptions:
            return ServerOptions(
                model_path=model.path,
                dtype=DTYPES[model.weight_dtype],
                tp=sharding.mesh.tp,
                devices=devices if device.type == "cuda" else (),
                cores=() if device.type == "cuda" else together,
                max_running=max(rows for rows, _ in works),
                max_tokens=max(rooms),
                foresight=min(foresight(rows, room, work) for room, (rows, work) in zip(rooms, works)),
                max_length=min(sequence, shape.max_positions),
                seed=seed % 2**31,
                sleeps=SERVER_PROFILE.sleeps(device.type, renewed),
                weight_loader=LOADER,
                reserve_bytes=server_bytes + reserve,
                truncates=any(Truncation.of(node.options) for node, _ in planned),
                reads_texts=any("stop" in node.options for node, _ in planned),
                adapter=shape.adapter,
                tells_routes=any(node.output(ROUTES) for node, _ in planned),
                hosts=hosts,
            )

        node = planned[0][0].name
        self._begun: dict[str, Callable[[], Result]] = {}
        self.replica = Replica(node, device, _visible(device), options, groups.tp, stopped, told)
        dtype = TORCH_DTYPES[model.weight_dtype]
        self._copy_of_weights = partial(ServedWeights, shape, sharding, rank, dtype, device, self.replica)
        self.weights = self._copy_of_weights()

    @classmethod
    def build(cls, setup: ModelSetup) -> Self | None:
        """See `ModelEngine.build`.

        Raises:
            NodeError: HF404 when the server does not start.
        """
        made = cls(
            setup.model, setup.shape, setup.sharding, setup.rank, setup.cores, setup.new_group,
            setup.tokenizer, setup.device, setup.nodes, setup.renewed, setup.server_bytes, setup.seed,
            setup.stopped, setup.told,
        )  # fmt: skip
        return made if made.member else None

    @staticmethod
    def parts(shape: ModelShape, tp: int) -> tuple[Sequence[str] | None, ...]:
        """See `ModelEngine.parts`: one for each bucket."""
        return buckets(shape, tp)

    def evaluator(self) -> SglangModel:
        """See `ModelEngine.evaluator`."""
        made = copy(self)
        made._begun, made.weights = {}, self._copy_of_weights()
        return made

    def begin(self, call: EngineCall, inputs: Mapping[str, Rows]) -> None:
        """See `ModelEngine.begin`."""
        if not self.weights.present:
            raise NodeError(call.node.name, "the weights it reads were released")
        self.weights.serve()
        at = self.groups.dp.rank(), self.groups.tp.rank()
        rollout = Rollout(call, self._sample, self.shape.max_positions, self.tokenizer, *at)
        self._begun[call.node.name] = rollout.begin(inputs)

    def run(self, call: EngineCall, inputs: Mapping[str, Rows]) -> Result:
        """Execute a generate node on this rank's rows, or end it where it was begun. Collective over its
        replica.

        Raises:
            NodeError: HF401 for inputs that the node cannot work on, HF404 when the server died again and
                again, HF405 when a log-prob is not finite, HF410 when it does not serve the weights that it
                should.
        """
        if call.node.name not in self._begun:
            self.begin(call, inputs)
        return self._begun.pop(call.node.name)()

    def close(self) -> None:
        """End the server. Not collective."""
        if self.member:
            self.replica.close()

    def _sample(self, prompts: Rows, ids: torch.Tensor, sampling: Sampling) -> Callable[[], Answers]:
        texts = prompts.lists()
        n = len(ids) // len(prompts) if len(prompts) else 1
        seeds = row_seeds(sampling.seed, sampling.step, ids, sampling.stream).tolist()
        rows = [RequestRow(texts[number // n], seed) for number, seed in enumerate(seeds)]
        # More sets than tokens there are cannot be asked for.
        most = None if sampling.max_kept is None else min(sampling.max_kept, self.shape.vocab - 1)
        asked = self.replica.ask(rows, replace(sampling, max_kept=most))
        begun, unnamed = self.weights.version, not self.weights.renewed

        def answers() -> Answers:
            responses = self.replica.answers(asked, self.weights.restore)
            _check_finite(responses, ids)
            responses = [self._ended(response, sampling) for response in responses]
            numbers = self._numbers(responses, begun, unnamed)
            log_probs = torch.tensor([x for r in responses for x in r.log_probs], dtype=torch.float32)
            tokens = from_lists([r.tokens for r in responses])
            versions = torch.tensor([numbers[v] for r in responses for v in r.versions], dtype=torch.int32)
            told = Rows(log_probs, tokens.lengths), Rows(versions, tokens.lengths)
            kept, overflown = _kept(responses, sampling.max_kept)
            routes = self._routes(rows, responses) if sampling.routes else None
            return Answers(tokens, *told, begun, asked.end_s, kept, overflown, routes)

        return answers

    def _ended(self, response: Response, sampling: Sampling) -> Response:
        """Where it ends by hflow's own check, which every engine has. SGLang may look at more or fewer tokens
        for a stop text, and go on for some tokens.

        Raises:
            NodeError: it has ended before.
        """
        if not (sampling.ends.texts or sampling.ends.token_ids):
            return response
        tokens, by = sampling.ends.first(response.tokens)
        if by == LENGTH and len(response.tokens) < sampling.max_new_tokens:
            last = response.tokens[-1]
            problem = (
                f"SGLang ended a response after token {last}, which neither ends it nor completes a `stop`"
            )
            raise NodeError(self.replica.node, problem)
        return response.first(tokens)

    def _routes(self, rows: Sequence[RequestRow], responses: Sequence[Response]) -> Rows:
        """Raises NodeError: not every token has its experts."""
        lengths = [len(row.prompt) + len(response.tokens) for row, response in zip(rows, responses)]
        try:
            return served_routes([response.routes for response in responses], lengths, self.shape)
        except ServerError as error:
            raise NodeError(self.replica.node, f"SGLang told {error}") from None

    def _numbers(self, responses: Iterable[Response], begun: int, unnamed: bool) -> dict[str, int]:
        """The versions that the server names.

        Args:
            begun: that of the weights when it was asked.
            unnamed: these were those that it had read from the model's folder.

        Raises:
            NodeError: HF410 when it sampled with other weights than it was given.
        """
        known = {str(version): version for version in range(begun, self.weights.version + 1)}
        served = {version for response in responses for version in response.versions}
        if unnamed:  # SGLang has its own name for them
            return {**dict.fromkeys(served - known.keys(), begun), **known}
        if served - known.keys():
            told, wanted = ", ".join(sorted(served)), " or ".join(known)
            problem = f"SGLang sampled with weights of version {told}, not {wanted}"
            raise NodeError(self.replica.node, problem, "HF410")
        return known


def _check_finite(responses: Iterable[Response], ids: torch.Tensor) -> None:
    """Of NaN logits SGLang draws tokens of its own choice, and tells their log-probs.

    Raises:
        NotFinite: naming the row by its global number.
    """
    for row, response in zip(ids.tolist(), responses):
        bad = ((place, x) for place, x in enumerate(response.log_probs) if not math.isfinite(x))
        for place, value in bad:
            raise NotFinite(f"SGLang's log-prob of response token {place} of row {row} is {value}")


def _kept(responses: Sequence[Response], most: int | None) -> tuple[KeptSets | None, torch.Tensor | None]:
    """The sets, and the rows that have one of more than `most` tokens; nothing where nobody asked."""
    if most is None:
        return None, None
    sets = [response.kept or [] for response in responses]
    overflown = torch.tensor([any(len(s) > most for s in of) for of in sets], dtype=torch.bool)
    counts = torch.tensor([len(s) for of in sets for s in of], dtype=torch.int64)
    ids = torch.tensor([i for of in sets for s in of for i in s], dtype=torch.int64)
    lengths = torch.tensor([len(of) for of in sets], dtype=torch.int64)
    return KeptSets.of(counts, ids, lengths).without(overflown), overflown


def _check_installed(model: Model) -> None:
    if importlib.util.find_spec("sglang") is None:
        message = f"the plan has `{model.name}` generate on SGLang, which is not installed here"
        help_ = "in hflow's checkout: `make setup-sglang`"
        raise HflowError(Diagnostic("HF406", message, model.span, help_))


def _visible(device: torch.device) -> str:
    """The entry of CUDA_VISIBLE_DEVICES for this process's device; empty on a CPU."""
    if device.type != "cuda":
        return ""
    entries, index = os.environ.get("CUDA_VISIBLE_DEVICES", ""), torch.cuda.current_device()
    return entries.split(",")[index] if entries else str(index)
