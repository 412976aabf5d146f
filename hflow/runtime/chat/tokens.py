"""Tokens of rendered conversations: of the prompt exactly as a rollout gets it, then of each part that
follows.

A part is read in its place, as tokens of the text up to its end less those of the text before it, so that
nothing is put before it and no merge is lost. Where the two texts have other tokens at their border (a
response that begins with the line end that the prompt ends with, too), the part is read alone: a model cannot
sample across its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hflow.runtime.chat.problem import ChatProblem
from hflow.runtime.chat.turns import Turns
from hflow.runtime.tokenizer import Tokenizer, UnknownTextError


@dataclass(frozen=True)
class TokenisedTurns:
    """`mask` says of each token of the response whether it is learned."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    mask: tuple[bool, ...]


def tokenised(tokenizer: Tokenizer, rows: Sequence[Turns]) -> list[TokenisedTurns | ChatProblem]:
    """The tokens of each conversation, or why it has none."""
    texts = [row.text[:end] for row in rows for end in _borders(row)]
    encoded = _encode(tokenizer, texts)
    out: list[TokenisedTurns | ChatProblem] = []
    for row in rows:
        own = [encoded[row.text[:end]] for end in _borders(row)]
        try:
            out.append(_assembled(tokenizer, row, own))
        except ChatProblem as problem:
            out.append(problem)
    return out


def _borders(row: Turns) -> list[int]:
    """The ends of the parts: of the prompt, and by turns of what is not learned and what is."""
    return [row.prompt, *(at for span in row.spans for at in span)]


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> dict[str, list[int] | ChatProblem]:
    """All at once; one by one where some text has no tokens."""
    distinct = list(dict.fromkeys(texts))
    try:
        return dict(zip(distinct, tokenizer.encode(distinct)))
    except UnknownTextError:  # each alone: all of them may have such a part, and every failure costs all
        return {text: _encoded(tokenizer, text) for text in distinct}


def _encoded(tokenizer: Tokenizer, text: str) -> list[int] | ChatProblem:
    try:
        return tokenizer.encode([text])[0]
    except UnknownTextError as error:
        return ChatProblem(str(error))


def _assembled(
    tokenizer: Tokenizer, row: Turns, prefixes: Sequence[list[int] | ChatProblem]
) -> TokenisedTurns:
    known: list[list[int]] = []
    for prefix in prefixes:
        if isinstance(prefix, ChatProblem):
            raise prefix
        known.append(prefix)
    response: list[int] = []
    mask: list[bool] = []
    borders = _borders(row)
    for number in range(1, len(borders)):
        text = row.text[borders[number - 1] : borders[number]]
        part = _part(tokenizer, known[number - 1], known[number], text)
        learned = number % 2 == 0
        if learned and not tokenizer.end_ids & set(part):
            raise ChatProblem(f"the tokenizer has no token of its own for what ends {text[-30:]!r}")
        response += part
        mask += [learned] * len(part)
    return TokenisedTurns(tuple(known[0]), tuple(response), tuple(mask))


def _part(tokenizer: Tokenizer, before: list[int], whole: list[int], text: str) -> list[int]:
    """The tokens of `text`, which stands between the texts of the tokens `before` and `whole`."""
    if whole[: len(before)] == before:
        return whole[len(before) :]
    end = tokenizer.fast.convert_ids_to_tokens(tokenizer.eos_id)
    after_end, alone = tokenizer.encode([f"{end}{text}", text])
    decode = tokenizer.fast.backend_tokenizer.decode_batch
    for part in (after_end[1:], alone):  # some tokenizers put a space before the first word of a text
        joined, expected = decode([[*before, *part], whole], skip_special_tokens=False)
        if joined == expected:
            return part
    raise ChatProblem(f"the tokenizer reads {text[:40]!r} otherwise apart from the text before it")
