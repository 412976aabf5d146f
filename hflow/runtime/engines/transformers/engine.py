"""One whole model on one device, as transformers computes it; every data-parallel rank has a replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils.quantization_config import Mxfp4Config

from hflow.plan.model_config import CONFIG, read_config
from hflow.plan.parameters import SCALAR_HEAD
from hflow.runtime.engines.finite import not_finite
from hflow.runtime.engines.kept_input import check_kept
from hflow.runtime.engines.protocol import EngineCall, ModelEngine, ModelSetup, NodeError, Result
from hflow.runtime.engines.rollout import Rollout
from hflow.runtime.engines.sampler import Answers, Sampling
from hflow.runtime.engines.transformers.generate import generate
from hflow.runtime.engines.transformers.score import judge, score
from hflow.runtime.engines.transformers.weights import TransformersWeights
from hflow.runtime.rows import TORCH_DTYPES, Rows
from hflow.runtime.weight_files import stored_tensors


class TransformersModel(ModelEngine):
    """The engine of the generate and score nodes that read one copy of a model's weights."""

    weights: TransformersWeights

    def __init__(self, setup: ModelSetup):
        """Load the model in ``model.path``. Not collective: a replica is alone on its device.

        Raises:
            HflowError: HF406 when the weights cannot be read.
        """
        self.setup, self.device = setup, setup.device
        mesh = setup.sharding.mesh
        assert mesh.tp == mesh.pp == 1, f"transformers does not split a model: {mesh}"
        self.dp = mesh.coordinates(setup.rank)["dp"]
        stored = stored_tensors(setup.model, setup.shape)
        self.model = _load(setup)
        self.weights = TransformersWeights(self.model, setup.shape)
        if setup.shape.head == "scalar" and SCALAR_HEAD not in stored:
            self.weights.view(SCALAR_HEAD, self.weights.box(SCALAR_HEAD)).zero_()

    @classmethod
    def build(cls, setup: ModelSetup) -> Self | None:
        """See `ModelEngine.build`."""
        return cls(setup) if setup.rank in setup.sharding.mesh.devices else None

    def run(self, call: EngineCall, inputs: Mapping[str, Rows]) -> Result:
        """See `ModelEngine.run`. Not collective."""
        if not self.weights.present:
            raise NodeError(call.node.name, "the weights it reads were released")
        return self._generate(call, inputs) if call.node.op == "generate" else self._score(call, inputs)

    def _generate(self, call: EngineCall, inputs: Mapping[str, Rows]) -> Result:
        def sampler(prompts: Rows, ids: torch.Tensor, sampling: Sampling) -> Callable[[], Answers]:
            return lambda: generate(self.model, prompts, ids, sampling, call.plan.micro_batch, self.device)

        positions, tokenizer = self.setup.shape.max_positions, self.setup.tokenizer
        return Rollout(call, sampler, positions, tokenizer, self.dp, 0).begin(inputs)()

    def _score(self, call: EngineCall, inputs: Mapping[str, Rows]) -> Result:
        """Metrics: the mean score, value or entropy."""
        tokens, mask = inputs["tokens"], inputs["mask"]
        if self.setup.shape.head == "scalar":
            values, scores = judge(self.model, tokens, mask, self.device)
            outputs = {"values": Rows(values, mask.lengths), "score": Rows(scores)}
        else:
            check_kept(call, inputs)
            heat = call.node.options["temperature"]
            found = score(self.model, tokens, mask, heat, self.device, inputs.get("kept"))
            outputs = {name: Rows(x, mask.lengths) for name, x in zip(("logprobs", "entropy"), found)}
        if problem := not_finite(outputs, call.first_row):
            raise NodeError(call.node.name, f"{call.when}: {problem}", "HF405")
        told = {name: rows.values for name, rows in outputs.items() if name != "logprobs"}
        return Result(outputs, {name: (float(x.sum()), float(len(x))) for name, x in told.items()})


def _load(setup: ModelSetup) -> PreTrainedModel:
    of_head: dict[str, Any] = {"lm": AutoModelForCausalLM, "scalar": AutoModelForSequenceClassification}
    labels = {"num_labels": 1} if setup.shape.head == "scalar" else {}
    # Of transformers' kinds of attention that need no further package, this one caps scores and has sinks.
    options: dict[str, Any] = {"attn_implementation": "eager"} if setup.shape.explicit_scores else {}
    if read_config(Path(setup.model.path) / CONFIG).has("quantization_config"):
        options["quantization_config"] = Mxfp4Config(dequantize=True)  # to bf16, whatever `dtype` says
    dtype = TORCH_DTYPES[setup.model.weight_dtype]
    made = of_head[setup.shape.head].from_pretrained(
        setup.model.path, dtype=dtype, local_files_only=True, **labels, **options
    )
    return made.to(setup.device, dtype).eval()
