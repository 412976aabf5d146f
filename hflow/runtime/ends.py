"""Where a response ends, and by what: the same on every engine.

A response ends with its first token that is the end token or one of `token_ids`, or after which its text
contains one of `texts`. That token belongs to it, and so does the whole stop text. The text is that which the
node hands out: without end and padding tokens, other special tokens as they are written. Looked at are the
last tokens, as many as a stop text can have: four to a character, which may be four bytes, each a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hflow.graph.infer.kinds.generate import END_TOKEN, LENGTH, STOP

TOKENS_PER_CHARACTER = 4
BEFORE = 4  # tokens more, so that the first of the text is whole
Decode = Callable[[Sequence[Sequence[int]]], list[str]]  # the text of each row


@dataclass(frozen=True)
class EndRule:
    """`eos_id`: the end token. `decode`: needed for `texts`."""

    eos_id: int
    token_ids: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    decode: Decode | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any], eos_id: int, decode: Decode) -> EndRule:
        """That of a generate node with these options."""
        stop: str | list[str] = options.get("stop", [])
        texts = (stop,) if isinstance(stop, str) else tuple(stop)
        return cls(eos_id, frozenset(options.get("stop_token_ids", ())), texts, decode)

    @property
    def window(self) -> int:
        """How many of the last tokens decide whether a response ends."""
        return TOKENS_PER_CHARACTER * max(map(len, self.texts)) + BEFORE if self.texts else 1

    def now(self, responses: Sequence[Sequence[int]]) -> list[int]:
        """By what each response ends with its last token; `LENGTH`: it does not."""
        by_text = self._by_text([row[-self.window :] for row in responses])
        return [self._by_token(row[-1]) or text for row, text in zip(responses, by_text)]

    def going(self, responses: Tensor) -> Tensor:
        """bool ``[rows]``: whether responses, int64 ``[rows, so far]``, go on after their last token. Their
        last `window` tokens suffice."""
        going = self.goes_on(responses[:, -1])
        if self.texts:
            found = self._by_text(responses[:, -self.window :].tolist())
            going &= torch.tensor([by == LENGTH for by in found], device=going.device)
        return going

    def goes_on(self, last: Tensor) -> Tensor:
        """bool ``[rows]``: whether a response goes on after its `last` token, whatever its text says."""
        going = last != self.eos_id
        for token in self.token_ids:
            going &= last != token
        return going

    def first(self, response: Sequence[int]) -> tuple[int, int]:
        """After how many tokens a response ends first, and by what; all of them, `LENGTH`, if it does not."""
        prefixes = [response[max(0, end - self.window) : end] for end in range(1, len(response) + 1)]
        by_text = self._by_text(prefixes)
        for place, token in enumerate(response):
            if by := self._by_token(token) or by_text[place]:
                return place + 1, by
        return len(response), LENGTH

    def _by_token(self, token: int) -> int:
        if token == self.eos_id:
            return END_TOKEN
        return STOP if token in self.token_ids else LENGTH

    def _by_text(self, tails: Sequence[Sequence[int]]) -> list[int]:
        if not self.texts:
            return [LENGTH] * len(tails)
        assert self.decode, "stop texts need a tokenizer"
        return [STOP if any(t in text for t in self.texts) else LENGTH for text in self.decode(tails)]
