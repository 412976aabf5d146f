"""Text to tokens and back, with the tokenizer that lies in a Hugging Face model folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from hflow.diagnostics import Diagnostic, HflowError
from hflow.plan.model_config import CONFIG, ConfigError, ModelConfig
from hflow.plan.vocabulary import TOKENIZER, beyond, ids_in
from hflow.runtime.model_folder import GENERATION, TOKENIZER_FILES, check_files, read_object, unusable

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # like Qwen/Qwen2-0.5B
PROBES = ("1 + 2 = 3", "The quick brown fox: 42.\nNext  line")


class UnknownTextError(ValueError):
    """The vocabulary cannot express a part of a text; `index` is the text's place among those given."""

    def __init__(self, index: int, message: str):
        super().__init__(message)
        self.index = index


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as the runtime uses it: batches in, batches out, no padding, no added tokens.

    Nothing is put before a text (no beginning-of-sequence token): a template that wants one writes it.
    `more_ends` are further tokens with which a chat model may end its turn, as ``generation_config.json``
    lists them.
    """

    fast: PreTrainedTokenizerFast
    eos_id: int
    pad_id: int
    more_ends: frozenset[int] = frozenset()

    @property
    def end_ids(self) -> frozenset[int]:
        """What may end a turn of a chat. A rollout ends with `eos_id`."""
        return self.more_ends | {self.eos_id}

    @cached_property
    def end_texts(self) -> tuple[str, ...]:
        """How these are written in a text."""
        return tuple(str(self.fast.convert_ids_to_tokens(i)) for i in sorted(self.end_ids))

    @cached_property
    def _silent(self) -> frozenset[int]:
        """Ids that carry no text: padding and the ends of a sequence."""
        ids = (self.eos_id, self.pad_id, self.fast.bos_token_id)
        return frozenset(i for i in ids if isinstance(i, int))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text.

        Raises:
            UnknownTextError: when a text has a part that the vocabulary cannot express.
        """
        if not texts:
            return []
        try:
            encoded = self._encoded(texts)
        except BaseException as error:
            if not _is_failure(error):
                raise
            raise self._failed(texts, error) from error
        unknown = self.fast.unk_token_id
        for index, (text, ids) in enumerate(zip(texts, encoded)):
            if unknown is not None and unknown in ids:
                message = f"the tokenizer has no token for {self._inexpressible(text)} in {text!r}"
                raise UnknownTextError(index, message)
        return encoded

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row, without padding and end-of-sequence tokens."""
        kept = [[i for i in row if i not in self._silent] for row in rows]
        return self.fast.backend_tokenizer.decode_batch(kept, skip_special_tokens=False)

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        return self.fast(list(texts), add_special_tokens=False)["input_ids"]

    def _failed(self, texts: Sequence[str], error: BaseException) -> UnknownTextError:
        """The first text at which the tokenizer fails as it did on all of them."""
        for index, text in enumerate(texts):
            try:
                self._encoded([text])
            except BaseException as failure:
                if not _is_failure(failure):
                    raise
                return UnknownTextError(index, f"the tokenizer fails on {text!r}: {failure}")
        return UnknownTextError(0, f"the tokenizer fails: {error}")

    def _inexpressible(self, text: str) -> str:
        unknown = self.fast.unk_token_id
        bad = [c for c in text if unknown in self.fast.encode(c, add_special_tokens=False)]
        return ", ".join(repr(c) for c in dict.fromkeys(bad)) or "a part"


def load_tokenizer(folder: Path | str, vocab: int | None = None) -> Tokenizer:
    """The tokenizer in a model folder (``tokenizer.json`` and its configuration).

    Loaded as `PreTrainedTokenizerFast`: `AutoTokenizer` puts the model family's own pre-tokenizer in
    place of the one in the file, which swallows the spaces of a character-level vocabulary.

    Args:
        vocab: rows of the model's embedding, if every token is to have one.

    Raises:
        HflowError: HF406 when there is no folder or no tokenizer in it, when a file of it cannot be read, has
            no end-of-sequence token, or has tokens without a row, or when text does not survive being encoded
            and decoded.
    """
    if not Path(folder).is_dir():
        raise _absent(folder)
    check_files(folder)
    if not (Path(folder) / TOKENIZER).is_file():
        raise _unusable(folder, "there is no tokenizer.json")
    files = {n: read_object(Path(folder) / n) for n in (TOKENIZER, *TOKENIZER_FILES, CONFIG, GENERATION)}
    fast = _loaded(folder)
    _check_tokens(folder, fast, files, vocab)
    eos, pad = fast.eos_token_id, fast.pad_token_id
    if not isinstance(eos, int):
        raise _unusable(folder, "the tokenizer names no eos_token")
    tokenizer = Tokenizer(fast, eos, pad if isinstance(pad, int) else eos, _ends(fast, files[GENERATION]))
    for probe in PROBES:
        _check_round_trip(tokenizer, probe, folder)
    return tokenizer


def _ends(fast: PreTrainedTokenizerFast, generation: Mapping[str, Any]) -> frozenset[int]:
    """`eos_token_id` of ``generation_config.json``, a number or a list of them, as far as they are tokens."""
    found: Any = generation.get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    return frozenset(i for i in ids if isinstance(i, int) and fast.convert_ids_to_tokens(i) is not None)


def _loaded(folder: Path | str) -> PreTrainedTokenizerFast:
    with _failures_told(folder, "tokenizer.json cannot be read"):
        return PreTrainedTokenizerFast.from_pretrained(str(folder))


@contextmanager
def _failures_told(folder: Path | str, what: str) -> Iterator[None]:
    try:
        yield
    except (HflowError, UnknownTextError):
        raise
    except BaseException as error:
        if not _is_failure(error):
            raise
        raise _unusable(folder, f"{what}: {error}") from error


def _is_failure(error: BaseException) -> bool:
    """Whether a library failed: it may raise anything, also Rust's ``PanicException``, no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _check_tokens(
    folder: Path | str, fast: PreTrainedTokenizerFast, files: Mapping[str, Any], vocab: int | None
) -> None:
    """transformers makes a new token, with the next id, of a special one that ``tokenizer.json`` lacks."""
    known = ids_in(files[TOKENIZER])
    if known is None:
        raise _unusable(folder, "tokenizer.json has no vocabulary")
    if files[TOKENIZER]["model"].get("dropout"):
        raise _unusable(folder, "tokenizer.json has dropout: it would cut a text differently each time")
    for token in sorted(fast.get_vocab().keys() - known.keys()):
        names = [name for name, value in fast.special_tokens_map.items() if value == token]
        special = f"{names[0]} " if names else "token "
        raise _unusable(folder, f"{special}{token!r} is not in the vocabulary of tokenizer.json")
    if vocab is None:
        return
    if problem := beyond(fast.get_vocab(), vocab):
        raise _unusable(folder, f"the tokenizer does not fit the model: {problem}")
    try:
        ModelConfig(files[GENERATION]).check_end(vocab)
    except ConfigError as error:
        raise unusable(Path(folder) / GENERATION, str(error)) from None


def _check_round_trip(tokenizer: Tokenizer, probe: str, folder: Path | str) -> None:
    try:
        with _failures_told(folder, f"the tokenizer fails on {probe!r}"):
            ids = tokenizer.encode([probe])
            back = tokenizer.decode(ids)[0]
    except UnknownTextError:  # a small alphabet need not hold this probe's characters
        return
    if back != probe:
        raise _unusable(folder, f"the tokenizer turns {probe!r} into {back!r}")


def _absent(folder: Path | str) -> HflowError:
    problem = "there is no such folder"
    if not Path(folder).is_absolute():
        problem += f" in `{Path.cwd()}`, where hflow runs"
    is_hub_name = HUB_NAME.fullmatch(str(folder)) and not Path(folder).parent.exists()
    return _unusable(folder, problem, "hub names are not downloaded" if is_hub_name else "")


def _unusable(folder: Path | str, problem: str, help_: str = "") -> HflowError:
    return HflowError(Diagnostic("HF406", f"model folder `{folder}`: {problem}", help=help_))
