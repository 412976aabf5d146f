"""Rows of prompt and response.

Response token j of a row is predicted at position prompt_length + j - 1, so the last token of a row is
never an input, and only positions that predict response tokens need logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hflow.runtime.engines.megatron.dropout import token_draws
from hflow.runtime.kept import KeptSets
from hflow.runtime.rows import Rows, length_mask


@dataclass(frozen=True)
class Sequences:
    """`tokens`: int64 ``[rows, longest]``, right-padded; lengths: int64 ``[rows]``. `kept`: on the host, the
    sets of tokens among which those of the responses were chosen; None: among all. `routes`: on the host, the
    experts through which tokens pass, `choices` for each; None: routers choose. `draws`: int64 ``[rows,
    longest]``, the number of each token by which dropout draws (`token_draws`); None: nothing is dropped."""

    tokens: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    kept: KeptSets | None = None
    routes: Rows | None = None
    choices: int = 0
    draws: Tensor | None = None

    @staticmethod
    def of(tokens: Rows, mask: Rows, device: torch.device, kept: Rows | None = None) -> Sequences:
        """From ragged tokens (prompt followed by response), a ragged mask of the response, and kept sets.

        Raises:
            ValueError: a row has no prompt, so that nothing predicts its first response token.
        """
        prompts = tokens.row_lengths - mask.row_lengths
        if len(prompts) and int(prompts.min()) < 1:
            raise ValueError("a row has no prompt before its response")
        padded = tokens.padded().to(device, torch.int64)
        sets = None if kept is None else KeptSets(kept, mask.row_lengths)
        return Sequences(padded, prompts.to(device), mask.row_lengths.to(device), sets)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> Tensor:
        """Prompt and response, int64 ``[rows]``."""
        return self.prompt_lengths + self.response_lengths

    def routed(self, routes: Rows | None, choices: int) -> Sequences:
        """The same, of tokens that pass through given experts, if there are any."""
        return self if routes is None else replace(self, routes=routes, choices=choices)

    def drawn(self, rows: Tensor, seed: int) -> Sequences:
        """The same, of an update whose dropout has a `seed`; `rows` are their global numbers."""
        return replace(self, draws=token_draws(self.tokens, self.prompt_lengths, rows, seed))

    def take(self, rows: Tensor) -> Sequences:
        """The given rows, cut to the longest of them."""
        prompts, responses = self.prompt_lengths[rows], self.response_lengths[rows]
        longest = int((prompts + responses).max()) if len(rows) else 0
        kept = self.kept.take(rows) if self.kept else None
        routes = self.routes.take(rows.cpu()) if self.routes else None
        draws = None if self.draws is None else self.draws[rows, :longest]
        return Sequences(self.tokens[rows, :longest], prompts, responses, kept, routes, self.choices, draws)

    def extended(self) -> Sequences:
        """Each row with one more, arbitrary token: it would be predicted at what was the row's last token.

        So what a model gives at the response's places becomes what it gives before every response token,
        followed by what it gives after the whole row.
        """
        tokens = torch.nn.functional.pad(self.tokens, (0, 1))
        return Sequences(tokens, self.prompt_lengths, self.response_lengths + 1)

    @cached_property
    def same_prompt(self) -> Tensor:
        """The first row with the same prompt, and the same routes of it, int64 ``[rows]``."""
        present = length_mask(self.prompt_lengths, self.tokens.shape[1])
        prompts, first = self.tokens.where(present, -1).cpu().numpy(), dict[bytes, int]()
        keys = [prompt.tobytes() for prompt in prompts]
        if self.routes is not None:
            keys = [key + routes for key, routes in zip(keys, self._prompt_routes(), strict=True)]
        found = [first.setdefault(key, row) for row, key in enumerate(keys)]
        return torch.tensor(found, dtype=torch.int64, device=self.tokens.device)

    def _prompt_routes(self) -> Iterator[bytes]:
        """Of each row."""
        assert self.routes is not None
        ends = [length * self.choices for length in self.prompt_lengths.tolist()]
        for row, end in zip(self.routes.values.split(self.routes.row_lengths.tolist()), ends, strict=True):
            yield row[:end].numpy().tobytes()

    @cached_property
    def response_mask(self) -> Tensor:
        """bool ``[rows, longest response]``: True where a row has a response token."""
        longest = int(self.response_lengths.max()) if len(self) else 0
        return length_mask(self.response_lengths, longest)

    @cached_property
    def predicted_at(self) -> tuple[Tensor, Tensor]:
        """Row and position that predict each response token, row by row; int64 ``[tokens]`` each."""
        rows, offsets = self.response_mask.nonzero(as_tuple=True)
        return rows, self.prompt_lengths[rows] + offsets - 1

    @cached_property
    def targets(self) -> Tensor:
        """The response tokens, row by row; int64 ``[tokens]``."""
        rows, positions = self.predicted_at
        return self.tokens[rows, positions + 1]

    @cached_property
    def kept_ids(self) -> Tensor | None:
        """The set of each response token, row by row; int64 ``[tokens, largest set]``, padded with -1."""
        return self.kept.padded().to(self.tokens.device) if self.kept else None
