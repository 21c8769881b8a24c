"""Texts to token ids and back: chat templates, ends of answers, stop texts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpispeed.base.plain import printable
from mpispeed.generation.answers import EOS, LENGTH, STOP
from mpispeed.generation.prompts import Prompts
from mpispeed.generation.requests import Prompt, PromptError

Decode = Callable[[Sequence[int]], str]

_AT_ONCE = 1024
_SPARE_TOKENS = 8


class Encoder:
    """Makes token ids of prompts, by a tokenizer of transformers that is loaded already.

    Args:
        tokenizer: None: only prompts that are token ids can be used.
        vocabulary: tokens that the model knows; ids from there on are refused.
        adds_special_tokens: as the tokenizer does by default, such as one for the beginning; chat templates say
            themselves what they want.
        chat_template: in place of the tokenizer's own, a template of Jinja.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        *,
        vocabulary: int | None = None,
        adds_special_tokens: bool = True,
        chat_template: str | None = None,
    ) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._adds, self._template = adds_special_tokens, chat_template

    def __call__(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; for an empty text, the token of the beginning.

        Raises:
            PromptError: the prompt has no tokens, or they are not of this model, or there is no template for a chat.
        """
        return self._checked(prompt, self._ids(prompt))

    def lengths(self, prompts: Prompts, first: int, last: int) -> np.ndarray:
        """Tokens of the prompts of requests [first, last), int32. Raises as `__call__`."""
        found = np.zeros(last - first, np.int32)
        for start in range(first, last, _AT_ONCE):
            block = [prompts[number] for number in range(start, min(last, start + _AT_ONCE))]
            for place, ids in enumerate(self._each(block)):
                found[start - first + place] = len(self._checked(block[place], ids))
        return found

    def _each(self, block: Sequence[Prompt]) -> Iterator[list[int]]:
        """Token ids of each; texts go through the tokenizer together, which has threads of its own."""
        texts = [prompt.content for prompt in block if isinstance(prompt.content, str)]
        if len(texts) < len(block) or self._tokenizer is None:
            yield from map(self._ids, block)
        else:
            yield from self._tokenizer(texts, add_special_tokens=self._adds, verbose=False)["input_ids"]

    def _ids(self, prompt: Prompt) -> list[int]:
        content = prompt.content
        if not isinstance(content, str):
            given: list[Any] = list(content)
            if not given or not isinstance(given[0], dict):
                return given
        if self._tokenizer is None:
            msg = (
                f"{prompt.where} is a text, and the model's folder has no tokenizer; save one there, or give token ids"
            )
            raise PromptError(msg)
        if isinstance(content, str):
            ids: list[int] = self._tokenizer(content, add_special_tokens=self._adds, verbose=False)["input_ids"]
            return ids
        return self._chat(prompt)

    def _chat(self, prompt: Prompt) -> list[int]:
        tokenizer: Any = self._tokenizer
        if self._template is None and not getattr(tokenizer, "chat_template", None):
            msg = f"{prompt.where} is a chat, and the tokenizer has no chat template; give one (--chat-template FILE), "
            msg += "or write prompts as texts"
            raise PromptError(msg)
        try:
            text = tokenizer.apply_chat_template(
                list(prompt.content), chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
        except Exception as failure:
            # templates are programs: they raise what they like
            msg = f"{prompt.where}: the chat template does not take it: {printable(str(failure), 300)}"
            raise PromptError(msg) from failure
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _checked(self, prompt: Prompt, ids: list[int]) -> list[int]:
        if not ids:
            begin = getattr(self._tokenizer, "bos_token_id", None)
            if begin is None:
                msg = f"{prompt.where} has no tokens, and the tokenizer has none for the beginning; give it a text"
                raise PromptError(msg)
            return [int(begin)]
        if self._vocabulary is not None and max(ids) >= self._vocabulary:
            msg = f"{prompt.where} has the token id {max(ids)}; the model knows those below {self._vocabulary}: is the "
            msg += "tokenizer that of the model?"
            raise PromptError(msg)
        return ids


@dataclass(frozen=True, slots=True)
class Trimmed:
    """An answer without what comes after its end.

    Attributes:
        tokens: new tokens, with the end token, or up to the one that completes a stop text.
        reason: EOS, LENGTH or STOP.
        text: without special tokens and without the stop text.
    """

    tokens: list[int]
    reason: int
    text: str


def trim(
    tokens: Sequence[int],
    *,
    limit: int,
    ends: Collection[int],
    stops: Sequence[str] = (),
    decode: Decode | None = None,
) -> Trimmed:
    """The answer in the new tokens of a row, which may go on behind its end as long as other rows of its batch did.

    Args:
        tokens: new tokens of the row.
        limit: new tokens that it may have.
        ends: ids of end tokens.
        stops: texts that end the answer.
        decode: token ids to text, without special tokens; None: there is no tokenizer and no text.
    """
    kept = [int(token) for token in tokens[:limit]]
    reason = LENGTH
    for place, token in enumerate(kept):
        if token in ends:
            kept, reason = kept[: place + 1], EOS
            break
    if decode is None:
        return Trimmed(kept, reason, "")
    text = decode(kept)
    place = _first_stop(text, stops)
    if place < 0:
        return Trimmed(kept, reason, text)
    return Trimmed(kept[: _completed(kept, stops, decode)], STOP, text[:place])


def _first_stop(text: str, stops: Sequence[str]) -> int:
    """Where the first stop text begins, or -1."""
    return min((place for place in map(text.find, stops) if place >= 0), default=-1)


def _completed(tokens: list[int], stops: Sequence[str], decode: Decode) -> int:
    """How many tokens it takes until a stop text is there; all of them have one."""
    low, high = 0, len(tokens)
    while high - low > 1:
        middle = (low + high) // 2
        if _first_stop(decode(tokens[:middle]), stops) >= 0:
            high = middle
        else:
            low = middle
    return high


class RowLimits:
    """Stopping criterion of transformers for one batch: each row has its own limit and its own stop texts.

    Args:
        limits: new tokens that each row may have.
        width: tokens of the padded prompts.
        stops: stop texts of each row; empty: none.
        decode: as of `trim`; needed if there are stop texts.
    """

    def __init__(
        self,
        limits: Sequence[int],
        width: int,
        stops: Sequence[Sequence[str]] = (),
        decode: Decode | None = None,
    ) -> None:
        self._limits, self._width = torch.tensor(list(limits)), width
        self._stops = {row: tuple(own) for row, own in enumerate(stops) if own}
        self._decode = decode
        self._is_done = torch.zeros(len(self._limits), dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: Any = None, **_: Any) -> Tensor:
        """Whether each row is done. Shapes: input_ids (rows, tokens), returns (rows,), bool."""
        count = input_ids.shape[1] - self._width
        self._is_done |= self._limits <= count
        for row, stops in self._stops.items():
            if not self._is_done[row] and self._has_stop(input_ids[row, self._width :], stops):
                self._is_done[row] = True
        return self._is_done.to(input_ids.device)

    def _has_stop(self, tokens: Tensor, stops: Sequence[str]) -> bool:
        if self._decode is None:
            return False
        # A stop text ends with the newest token, if it is new; most tokens have a letter or more.
        window = max(map(len, stops)) + _SPARE_TOKENS
        if _first_stop(self._decode(tokens[-window:].tolist()), stops) < 0:
            return False
        return len(tokens) <= window or _first_stop(self._decode(tokens.tolist()), stops) >= 0
