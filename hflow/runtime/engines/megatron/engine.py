"""One model on one mesh, as seen by one rank: generate, score and train nodes are executed here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from hflow.graph.infer.kinds.generate import ROUTES
from hflow.graph.infer.kinds.train import frozen_patterns
from hflow.graph.ir import Model
from hflow.plan.frozen import frozen_names
from hflow.plan.model_shape import ModelShape
from hflow.plan.routes import choices
from hflow.plan.sharding import Sharding
from hflow.plan.strategy import PLAIN, Strategy
from hflow.runtime.engines.finite import not_finite
from hflow.runtime.engines.groups import NewGroup, make_groups
from hflow.runtime.engines.kept_input import check_kept
from hflow.runtime.engines.megatron import present_device
from hflow.runtime.engines.megatron.adapter import without_adapters
from hflow.runtime.engines.megatron.build import build_chunks, build_model
from hflow.runtime.engines.megatron.divergence import agreed, diverged
from hflow.runtime.engines.megatron.generate import generate
from hflow.runtime.engines.megatron.interleaved import chunks_of
from hflow.runtime.engines.megatron.load import load_safetensors
from hflow.runtime.engines.megatron.micro_batches import budget_of
from hflow.runtime.engines.megatron.moving_average import moving_averages
from hflow.runtime.engines.megatron.optimizer import Adam, AdamOptions
from hflow.runtime.engines.megatron.padding import freeze_padding, padding_token
from hflow.runtime.engines.megatron.score import judge, score
from hflow.runtime.engines.megatron.sequences import Sequences
from hflow.runtime.engines.megatron.shared_forward import SharedForward, Trainer
from hflow.runtime.engines.megatron.train import Training
from hflow.runtime.engines.megatron.training_state import MegatronTrainingState
from hflow.runtime.engines.megatron.weights import MegatronWeights, freeze_parameters, lie_on
from hflow.runtime.engines.protocol import EngineCall, ModelEngine, ModelSetup, NodeError, Result
from hflow.runtime.engines.rollout import Rollout
from hflow.runtime.engines.sampler import Answers, NotFinite, Sampling
from hflow.runtime.routes import check_routes
from hflow.runtime.rows import Rows, from_padded
from hflow.runtime.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
UNWRITTEN = torch.device("cpu")  # where tensors take no memory as long as nothing is written to them


class MegatronModel(ModelEngine):
    """The engine of the nodes that use one model in one layout."""

    weights: MegatronWeights

    def __init__(
        self,
        model: Model,
        shape: ModelShape,
        sharding: Sharding,
        rank: int,
        new_group: NewGroup,
        tokenizer: Tokenizer,
        device: torch.device,
        train_options: Mapping[str, Any] | None = None,
        strategy: Strategy = PLAIN,
        freeze: tuple[str, ...] = (),
        averaging: tuple[Model, ...] = (),
        seed: int = 0,
        base: MegatronWeights | None = None,
    ):
        """Build the model and load its weights from ``model.path``. Collective over the whole world.

        Ranks outside the mesh take part in making the process groups, with `member` false afterwards.

        Args:
            sharding: a model with several chunks of layers on each rank of pp can be trained only.
            rank: this process's rank in the torch.distributed world = its device id in the plan.
            new_group: makes (or remembers) the process group of some ranks.
            train_options, strategy: of the train node, for a model that is trained here.
            freeze: patterns of the names of parameters that are not trained.
            averaging: the models that take over an average of the weights.
            seed: of what an adapter begins with.
            base: the weights of another model in this layout, on whose memory those are that are not trained.

        Raises:
            HflowError: HF406 when the weights cannot be read.
        """
        mesh, vpp = sharding.mesh, sharding.vpp
        self.tokenizer, self.device, self.shape, self.mesh = tokenizer, device, shape, mesh
        groups = make_groups(sharding, rank, new_group, shape.kv_copies(mesh.tp))
        self.member = groups is not None
        if groups is None:
            return
        self.groups = groups
        how = shape, mesh, model.weight_dtype, groups, UNWRITTEN if base else device
        # `Interleaved` or a `GPTModel`, as it is wherever a model can generate
        self.model: Any = build_chunks(*how, vpp) if vpp > 1 else build_model(*how)
        if groups.first_stage and not model.frozen:
            embedding = chunks_of(self.model)[0].embedding
            freeze_padding(embedding.word_embeddings, padding_token(model.path))
        self.weights = MegatronWeights(self.model, shape, sharding, rank)
        frozen = frozen_names(shape, freeze)
        if base:
            lie_on(base, self.weights, frozen)
            self.model.to(device)
            present_device.work_on(device)
        fresh = load_safetensors(self.weights, model, shape, seed, there=frozen if base else ())
        if fresh and groups.reports and groups.dp.rank() == 0:
            _LOG.warning("%s: `%s` has no %s: it begins with zeros", model.name, model.path, ", ".join(fresh))
        self.adam = None
        if train_options is not None:
            freeze_parameters(self.weights, frozen)
            self.averages = moving_averages(self.weights, averaging, shape)
            self.adam = Adam(self.model, groups, AdamOptions.of(train_options), strategy.zero == 1)
            self.training = MegatronTrainingState(self.weights, self.adam)
        self.trainer: Trainer | None = None
        self.passed: Sequence[Tensor] | None = None  # by a score node, for the training that comes
        self.weights.changed = False

    @classmethod
    def build(cls, setup: ModelSetup) -> Self | None:
        """See `ModelEngine.build`."""
        trainings = [(node, plan) for node, plan in setup.nodes if node.op == "train"]
        trainer, plan = trainings[0] if trainings else (None, None)
        base = setup.base.weights if setup.base else None
        assert base is None or isinstance(base, MegatronWeights), f"{setup.base} trains no model"
        made = cls(
            setup.model, setup.shape, setup.sharding, setup.rank, setup.new_group, setup.tokenizer,
            setup.device, trainer.options if trainer else None, plan.strategy if plan else PLAIN,
            frozen_patterns(trainer) if trainer else (), setup.averaging, setup.seed, base,
        )  # fmt: skip
        if not made.member:
            return None
        if trainer and plan and made.adam:
            made.trainer = Trainer(trainer, plan, made.adam.model)
        return made

    def run(self, call: EngineCall, inputs: Mapping[str, Rows]) -> Result:
        """Execute a generate, score or train node on this rank's rows. Collective over the mesh.

        Raises:
            NodeError: HF405 when training diverged, or the model gives numbers that are not finite; HF401 for
                inputs that the node cannot work on, or when the plan has not brought back what it put away.
        """
        if not self.weights.present:
            raise NodeError(call.node.name, "the weights it reads were released or offloaded")
        actions = {"generate": self._generate, "score": self._score, "train": self._train}
        return actions[call.node.op](call, inputs)

    def onload(self) -> int:
        """Bring back what `offload` put away. Returns bytes copied to the device."""
        return self.adam.onload() if self.adam else self.weights.onload()

    def offload(self) -> int:
        """Put away what waits for the next call: the state of the optimizer of a model that is trained here,
        else the weights. Returns bytes copied to the host."""
        return self.adam.offload() if self.adam else self.weights.offload()

    def _generate(self, call: EngineCall, inputs: Mapping[str, Rows]) -> Result:
        if self.groups.pp.size() > 1:
            problem = "generation is not split into pipeline stages; use pp 1"
            raise NodeError(call.node.name, problem)

        def sampler(prompts: Rows, ids: torch.Tensor, sampling: Sampling) -> Callable[[], Answers]:
            try:
                found = generate(self.model, prompts, ids, sampling, call.plan.micro_batch, self.device)
            except NotFinite as problem:  # on all ranks of the group, which have the same logits
                raise diverged(call, self.weights, self.groups.tp, str(problem)) from None
            lengths = found.lengths.cpu()
            tokens = from_padded(found.tokens.cpu().to(torch.int32), lengths)
            kept, overflown = found.kept or (None, None)
            log_probs = from_padded(found.log_probs.cpu(), lengths)
            answers = Answers(tokens, log_probs, kept=kept, overflown=overflown, routes=found.routes)
            return lambda: answers

        at = self.groups.dp.rank(), self.groups.tp.rank()
        return Rollout(call, sampler, self.shape.max_positions, self.tokenizer, *at).begin(inputs)()

    def _score(self, call: EngineCall, inputs: Mapping[str, Rows]) -> Result:
        """Metrics: the mean score, value or entropy."""
        check_kept(call, inputs)
        self._check_routes(call, inputs)
        shared = self._shared(call, inputs)
        rows = shared.taken(inputs) if shared else inputs
        found = self._scored(call, rows, shared)
        lengths, per_token = rows["mask"].lengths, {"values", "logprobs", "entropy"}
        outputs = {name: Rows(x.cpu(), lengths if name in per_token else None) for name, x in found.items()}
        if shared:
            outputs = {name: shared.exchange.back(values) for name, values in outputs.items()}
        self._check_finite(call, outputs)
        told = outputs.keys() - {"logprobs"} if self.groups.reports else ()
        return Result(outputs, {name: _sum(outputs[name].values) for name in told})

    def _scored(
        self, call: EngineCall, inputs: Mapping[str, Rows], shared: SharedForward | None
    ) -> dict[str, Tensor]:
        """By output port, on the ranks of the last stage; on others nothing."""
        sequences = Sequences.of(inputs["tokens"], inputs["mask"], self.device, inputs.get("kept"))
        sequences = sequences.routed(inputs.get(ROUTES), choices(self.shape))
        budget, sp = budget_of(call.node, call.plan, self.model), call.plan.strategy.sp
        use = call.node.model
        with without_adapters(self.model, use is not None and use.base):
            if self.shape.head == "scalar":
                judged = judge(self.model, self.groups, sequences, budget, sp, shared)
                names = ("values", "score")
            else:
                temperature = call.node.options["temperature"]
                judged = score(self.model, self.groups, sequences, budget, temperature, sp, shared)
                names = ("logprobs", "entropy")
        return dict(zip(names, judged or ()))

    def _shared(self, call: EngineCall, inputs: Mapping[str, Rows]) -> SharedForward | None:
        """The forward pass that this one is, too, in a step whose plan says so."""
        if call.evaluation or not call.plan.strategy.share_forward:
            return None
        assert self.trainer, f"{call.node.name} shares its forward pass with no training"
        shared = SharedForward.of(self.trainer, call, inputs, self.groups, self.device)
        self.passed = shared.passed
        return shared

    def _check_routes(self, call: EngineCall, inputs: Mapping[str, Rows]) -> None:
        moe = self.shape.moe
        check_routes(call, inputs, choices(self.shape), moe.num_experts if moe else 0)

    def _check_finite(self, call: EngineCall, outputs: Mapping[str, Rows]) -> None:
        """Collective over the ranks that share these rows, of which the last stage's have `outputs`."""
        problem = not_finite(outputs, call.first_row)
        if not agreed(torch.tensor(not problem, device=self.device), self.groups.replica):
            raise diverged(call, self.weights, self.groups.replica, problem)

    def _train(self, call: EngineCall, inputs: Mapping[str, Rows]) -> Result:
        check_kept(call, inputs)
        self._check_routes(call, inputs)
        assert self.adam is not None, f"{call.node.name}: this model was built without an optimizer"
        if not self.adam.present:
            raise NodeError(call.node.name, "its optimizer's state was offloaded")
        if self.weights.changed:
            self.adam.reload_weights()
            self.weights.changed = False
        passed, self.passed = self.passed, None
        assert (passed is not None) == call.plan.strategy.share_forward, (
            f"{call.node.name}: nothing is shared, or not with it"
        )
        training = Training.of(call, inputs, self.adam, self.weights, self.groups, self.device, passed)
        return Result(metrics=training.run())


def _sum(values: torch.Tensor) -> tuple[float, float]:
    return float(values.sum()), float(len(values))
