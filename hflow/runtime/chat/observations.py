"""Later turns of a conversation: what the chat template writes between two turns of the assistant.

The tokens so far, sampled ones among them, are never read or written again. What is appended is the end of a
conversation with one message more, after the end of the assistant's turn before it: the end of that turn, the
message of the tool or the user, and what begins the assistant's next turn. It is tokenised behind a token
that ends a turn, as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hflow.runtime.chat.messages import ASSISTANT, SYSTEM, USER
from hflow.runtime.chat.problem import ChatProblem
from hflow.runtime.chat.rows import chat_template
from hflow.runtime.chat.template import ChatTemplate
from hflow.runtime.tokenizer import Tokenizer, UnknownTextError

# A conversation to be continued. What matters is where the answer ends, so it must be found again.
QUESTION, ANSWER, THOUGHT = "0", "[answer]", "<think>\n[thought]\n</think>\n\n"
DATES = ("2026-01-01", "2027-02-02")


@dataclass(frozen=True)
class Observations:
    """Messages of `role` after the assistant's turn, as `template` writes them."""

    template: ChatTemplate
    role: str

    def check(self) -> None:
        """Raises ChatProblem where the template leaves such messages out, takes thoughts of earlier turns
        away once they follow, ends a turn with no token that ends responses, or writes a date there."""
        self.template.check(False)
        first, second = (
            Observations(replace(self.template, date=date), self.role).between("[seen]") for date in DATES
        )
        if first != second:
            raise ChatProblem("the chat template writes the date between two turns")
        if "[seen]" not in first:
            raise ChatProblem(f"the chat template does not write a message of role `{self.role}`")
        kept = self.template.render([_question(), *self._seen(THOUGHT + ANSWER, "[seen]")])
        if "[thought]" not in kept:
            raise ChatProblem(
                f"the chat template takes thoughts out of turns that a message of role `{self.role}` follows,"
                " and sampled tokens stay",
                "another `role`, such as `tool`, or a `chat_template` that keeps them",
            )

    def between(self, text: str) -> str:
        """What stands between the token that ends the assistant's turn and its next turn.

        Raises:
            ChatProblem: the template refuses such a conversation, or ends the turn with no token that ends
                responses.
        """
        whole = self.template.render([_question(), *self._seen(ANSWER, text)], None, prompts=True)
        after = whole.partition(ANSWER)[2]
        end = self.template.tokenizer.fast.convert_ids_to_tokens(self._end)
        return after.partition(str(end))[2]

    def tokens(self, text: str, last: int | None, most: int) -> tuple[list[int], bool]:
        """What is appended to a row whose last token is `last` (None: there is none): at most `most` tokens,
        to which the observation is cut, and whether it was.

        Raises:
            UnknownTextError: the vocabulary cannot express it.
            ChatProblem: as `between`; or what the template writes around it is longer than `most`.
        """
        found = self._appended(text, last)
        if len(found) <= most:
            return found, False
        tokenizer = self.template.tokenizer
        (own,) = tokenizer.encode([text])
        kept = len(own)
        while len(found) > most and kept > 0:
            kept = max(0, kept - (len(found) - most))
            found = self._appended(tokenizer.decode([own[:kept]])[0], last)
        if len(found) > most:
            message = f"what the chat template writes around an observation has {len(found)} tokens"
            raise ChatProblem(f"{message}, `max_observation_tokens` is {most}")
        return found, True

    def _appended(self, text: str, last: int | None) -> list[int]:
        """Behind an end of its own where the turn was cut short, and has none."""
        tokenizer = self.template.tokenizer
        end = tokenizer.fast.convert_ids_to_tokens(self._end)
        (found,) = tokenizer.encode([f"{end}{self.between(text)}"])
        return found[1:] if last in tokenizer.end_ids else found

    @cached_property
    def _end(self) -> int:
        return turn_end(self.template)

    def _seen(self, answer: str, text: str) -> list[Mapping[str, Any]]:
        return [{"role": ASSISTANT, "content": answer}, {"role": self.role, "content": text}]


def turn_end(template: ChatTemplate) -> int:
    """The token with which the template ends the assistant's turn.

    Raises:
        ChatProblem: it is none that ends responses.
    """
    talk = [_question(), {"role": ASSISTANT, "content": ANSWER}]
    try:
        text = template.render(talk)
    except ChatProblem:  # some ask for a message of the system
        text = template.render([{"role": SYSTEM, "content": QUESTION}, *talk])
    after = text.rpartition(ANSWER)[2]
    tokenizer = template.tokenizer
    found = {after.find(mark): number for mark, number in zip(tokenizer.end_texts, sorted(tokenizer.end_ids))}
    found.pop(-1, None)
    if not found:
        ends = ", ".join(f"`{mark}`" for mark in tokenizer.end_texts)
        raise ChatProblem(
            f"the chat template ends the assistant's turn with {after[:30]!r}, and not with a token that ends"
            f" responses ({ends})",
            "name it as `eos_token` in tokenizer_config.json",
        )
    return found[min(found)]


def _question() -> Mapping[str, Any]:
    return {"role": USER, "content": QUESTION}


def observations(options: Mapping[str, Any], tokenizer: Tokenizer) -> Observations | None:
    """Of a generate node with these options; None for one that appends observations as they are."""
    role = options.get("role")
    return Observations(chat_template({**options, "date": DATES[0]}, tokenizer), role) if role else None


def observed(
    written: Observations, texts: Sequence[str], lasts: Sequence[int | None], most: int
) -> tuple[list[list[int]], int]:
    """What is appended to each row, nothing for an empty text; and how many observations were cut.

    Raises:
        UnknownTextError: with the number of the row; ChatProblem.
    """
    rows: list[list[int]] = []
    cut = 0
    for number, (text, last) in enumerate(zip(texts, lasts)):
        try:
            found, is_cut = written.tokens(text, last, most) if text else ([], False)
        except UnknownTextError as error:
            raise UnknownTextError(number, str(error)) from None
        rows.append(found)
        cut += is_cut
    return rows, cut
