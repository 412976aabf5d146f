"""The experts that are chosen for rows which are sampled token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hflow.runtime.engines.megatron.moe.routes import Recorder
from hflow.runtime.routes import NONE
from hflow.runtime.rows import Rows, length_mask


@dataclass(frozen=True)
class RouteBuffer:
    """`routes`: int16 ``[rows, longest prompt + new, choices]``; `present`: bool ``[rows, longest prompt]``,
    False where there is padding, which comes first."""

    recorder: Recorder
    routes: Tensor
    present: Tensor

    @staticmethod
    def of(recorder: Recorder, present: Tensor, prompt_of: Tensor, new: int) -> RouteBuffer:
        """Of rows that continue the prompts that were read last, with room for `new` tokens.

        Args:
            present: bool ``[prompts, longest]``.
            prompt_of: int64 ``[rows]``.
        """
        found = recorder.newest().unflatten(0, present.shape)
        routes = found.new_full((len(prompt_of), found.shape[1] + new, found.shape[2]), NONE)
        routes[:, : found.shape[1]] = found[prompt_of]
        return RouteBuffer(recorder, routes, present[prompt_of])

    def add(self, rows: Tensor, step: int) -> None:
        """What was chosen for response token `step` of `rows`, int64."""
        self.routes[rows, self.present.shape[1] + step] = self.recorder.newest()

    def collected(self, lengths: Tensor) -> Rows:
        """Of prompts and responses of these `lengths`, int64 ``[rows]``."""
        new = self.routes.shape[1] - self.present.shape[1]
        inside = torch.cat([self.present, length_mask(lengths, new)], 1)
        return Rows(self.routes[inside].flatten().cpu(), inside.sum(1).cpu() * self.routes.shape[2])
