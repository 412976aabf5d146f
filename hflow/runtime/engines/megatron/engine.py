"""One model on one mesh, as seen by one rank: generate, score and train nodes are executed here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hflow.compiler.layout import Mesh
from hflow.compiler.shape import ModelShape
from hflow.graph.graph import Model
from hflow.runtime.engines.base import Call, NodeError, Result
from hflow.runtime.engines.megatron.build import build_model
from hflow.runtime.engines.megatron.generate import Responses, Sampling, generate, left_padded
from hflow.runtime.engines.megatron.groups import NewGroup, make_groups
from hflow.runtime.engines.megatron.load import load_safetensors
from hflow.runtime.engines.megatron.optimizer import Adam, AdamOptions
from hflow.runtime.engines.megatron.score import score
from hflow.runtime.engines.megatron.sequences import Sequences
from hflow.runtime.engines.megatron.train import Training
from hflow.runtime.engines.megatron.weights import MegatronWeights
from hflow.runtime.rows import Rows, from_padded, from_strings, length_mask
from hflow.runtime.tokenizer import Tokenizer


class MegatronModel:
    """The engine of the nodes that use one model in one layout; `hflow.runtime.engines.base.Engine`."""

    def __init__(
        self,
        model: Model,
        shape: ModelShape,
        mesh: Mesh,
        rank: int,
        new_group: NewGroup,
        tokenizer: Tokenizer,
        device: torch.device,
        train_options: Mapping[str, Any] | None = None,
    ):
        """Build the model and load its weights from ``model.path``. Collective over the whole world.

        Ranks outside the mesh take part in making the process groups, with `member` false afterwards.

        Args:
            rank: this process's rank in the torch.distributed world = its device id in the plan.
            new_group: makes (or remembers) the process group of some ranks.
            train_options: options of the train node, for a model that is trained here.

        Raises:
            HflowError: HF406 when the weights cannot be read.
        """
        self.tokenizer, self.device, self.shape, self.mesh = tokenizer, device, shape, mesh
        groups = make_groups(mesh, rank, new_group)
        self.member = groups is not None
        if groups is None:
            return
        self.groups = groups
        self.model = build_model(shape, mesh, model.dtype, groups)
        self.weights = MegatronWeights(self.model, shape, mesh, rank)
        load_safetensors(self.weights, model.path)
        self.adam = None if train_options is None else Adam(self.model, groups, AdamOptions.of(train_options))
        self.weights.changed = False

    def run(self, call: Call, inputs: Mapping[str, Rows]) -> Result:
        """Execute a generate, score or train node on this rank's rows. Collective over the mesh.

        Raises:
            NodeError: HF405 when training diverged; HF401 for inputs that the node cannot work on.
        """
        actions = {"generate": self._generate, "score": self._score, "train": self._train}
        return actions[call.node.op](call, inputs)

    def _generate(self, call: Call, inputs: Mapping[str, Rows]) -> Result:
        prompts, options = inputs["prompt"], call.node.options
        sampling = Sampling(
            n=options["n"],
            max_new_tokens=options["max_new_tokens"],
            temperature=options["temperature"],
            seed=call.seed,
            step=call.step,
            eos_id=self.tokenizer.eos_id,
        )
        self._check_prompts(call, prompts, sampling)
        responses = generate(
            self.model, prompts, call.first_row, sampling, call.plan.micro_batch, self.device
        )
        return self._generated(call, prompts, sampling.n, responses)

    def _check_prompts(self, call: Call, prompts: Rows, sampling: Sampling) -> None:
        assert prompts.lengths is not None
        if self.mesh.pp > 1:
            raise NodeError(call.node.name, "generation is not split into pipeline stages; use pp 1")
        if not len(prompts):
            return
        if int(prompts.lengths.min()) == 0:
            raise NodeError(call.node.name, "a prompt is empty")
        longest = int(prompts.lengths.max()) + sampling.max_new_tokens
        if longest > self.shape.max_positions:
            limit = self.shape.max_positions
            problem = f"prompt and response need {longest} positions, the model has {limit}"
            raise NodeError(call.node.name, problem)

    def _generated(self, call: Call, prompts: Rows, n: int, responses: Responses) -> Result:
        lengths, answers = responses.lengths.cpu(), responses.tokens.cpu()
        tokens = _joined(prompts, n, answers, lengths)
        outputs = {
            "tokens": tokens,
            "logprobs": from_padded(responses.log_probs.cpu(), lengths),
            "mask": Rows(torch.ones(int(lengths.sum()), dtype=torch.bool), lengths),
        }
        if call.node.output("text"):
            texts = [row[:length] for row, length in zip(answers.tolist(), lengths.tolist())]
            outputs["text"] = from_strings(self.tokenizer.decode(texts))
        if self.groups.tp.rank() > 0:
            return Result(outputs)
        metrics = {"response_length": (float(lengths.sum()), float(len(lengths)))}
        return Result(outputs, metrics, digest(tokens, call.first_row * n))

    def _score(self, call: Call, inputs: Mapping[str, Rows]) -> Result:
        sequences = Sequences.of(inputs["tokens"], inputs["mask"], self.device)
        temperature = call.node.options["temperature"]
        scored = score(self.model, self.groups, sequences, call.plan.micro_batch, temperature)
        if scored is None:
            return Result()
        log_probs, entropy = scored
        lengths = inputs["mask"].lengths
        return Result({"logprobs": Rows(log_probs.cpu(), lengths), "entropy": Rows(entropy.cpu(), lengths)})

    def _train(self, call: Call, inputs: Mapping[str, Rows]) -> Result:
        assert self.adam is not None, f"{call.node.name}: this model was built without an optimizer"
        if self.weights.changed:
            self.adam.reload_weights()
            self.weights.changed = False
        return Result(metrics=Training.of(call, inputs, self.adam, self.groups, self.device).run())


def _joined(prompts: Rows, n: int, answers: torch.Tensor, lengths: torch.Tensor) -> Rows:
    """Each prompt followed by its responses, as int32 ragged rows."""
    assert prompts.lengths is not None
    if not len(prompts):
        return Rows(torch.zeros(0, dtype=torch.int32), lengths)
    tokens, present = (t.repeat_interleave(n, 0) for t in left_padded(prompts, torch.device("cpu")))
    both = torch.cat([tokens, answers], 1)
    kept = torch.cat([present, length_mask(lengths, answers.shape[1])], 1)
    return Rows(both[kept].to(torch.int32), prompts.lengths.repeat_interleave(n) + lengths)


def digest(tokens: Rows, first_row: int) -> int:
    """Sum modulo 2^64 over rows of the 64-bit BLAKE2b of (int64 global row number, int32 tokens).

    A sum, so that parts on different devices add up to the same number however the rows are split.
    """
    assert tokens.lengths is not None
    ends = np.concatenate([[0], tokens.lengths.cumsum(0).numpy()])
    data = tokens.values.numpy().astype("<i4").tobytes()
    total = 0
    for row, (start, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist())):
        text = (first_row + row).to_bytes(8, "little") + data[4 * start : 4 * end]
        total += int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return total % 2**64
