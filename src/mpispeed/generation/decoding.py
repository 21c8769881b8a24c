"""The answers of one batch: prompts padded on the left, `generate` of the engine, rows that have ended left behind.

Rows of a batch end at different tokens, and `generate` carries those that have ended along. When half of them have,
the others go on alone: their part of the cache is kept. When that happens is a function of the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpispeed.generation.answers import ERROR, Answer, Answers
from mpispeed.generation.batches import Batches
from mpispeed.generation.model import Described, Opened
from mpispeed.generation.prompts import Prompts
from mpispeed.generation.requests import Options, Prompt
from mpispeed.generation.sampling import Row, Sampler, row_of
from mpispeed.generation.texts import Encoder, RowLimits, trim
from mpispeed.inference.fused import growing_cache

LEAST_ROWS, LEAST_TOKENS = 2, 4
"""Rows that have ended are left behind where so many rows are left, and not more often than every so many tokens."""

AGREE_TOKENS = 8
"""How often ranks that share layers agree on dropping a batch."""

MustDrop = Callable[[], bool]


class Dropped(Exception):
    """The batch was given up before its end; nothing is kept of it."""


@dataclass(frozen=True)
class Job:
    """The facts that are the same for all batches.

    Attributes:
        described: the model.
        prompts: all requests.
        batches: how they are cut.
        encoder: makes token ids.
        options: for prompts that have none of their own.
    """

    described: Described
    prompts: Prompts
    batches: Batches
    encoder: Encoder
    options: Options


@dataclass
class Group:
    """Rows that are generated together.

    Attributes:
        places: of the rows in the batch.
        tokens: ids so far, padded on the left. Shapes: (rows, tokens).
        mask: 0 where it is padded. Shapes: (rows, tokens).
        cache: of keys and values; None at first.
    """

    places: list[int]
    tokens: Tensor
    mask: Tensor
    cache: Any = None


@dataclass
class Made:
    """New tokens of a row.

    Attributes:
        tokens: maybe with some after its end.
        first_nan: the first of them whose logits were NaN; -1: none.
    """

    tokens: list[int] = field(default_factory=list)
    first_nan: int = -1


@dataclass
class End:
    """Stopping criterion of transformers: which rows have ended; ends the call where rows can be left behind.

    Attributes:
        limits: of tokens and stop texts of rows.
        ends: ids of end tokens.
        width: tokens before this call.
        must_drop: asked at each token.
        leaves_behind: whether rows can be left behind.
        done: whether each row has ended, after the call. Shapes: (rows,).
        is_dropped: the batch is given up.
        first_nan: as `Sampler.first_nan`, after the call.
    """

    limits: RowLimits
    ends: Tensor
    width: int
    must_drop: MustDrop
    leaves_behind: bool
    done: Tensor | None = None
    is_dropped: bool = False
    first_nan: list[int] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Any = None, **_: Any) -> Tensor:
        """Whether each row has ended. Shapes: input_ids (rows, tokens), returns (rows,), bool."""
        done = self.limits(input_ids) | torch.isin(input_ids[:, -1], self.ends)
        self.done = done if self.done is None else self.done | done
        self.is_dropped = self.must_drop()
        rows, ended = len(self.done), int(self.done.sum())
        made = input_ids.shape[1] - self.width
        leaves = self.leaves_behind and LEAST_ROWS <= rows <= 2 * ended and made >= LEAST_TOKENS
        return torch.ones_like(self.done) if self.is_dropped or leaves else self.done.clone()


@dataclass
class Answerer:
    """Answers batches. All ranks that share layers call it alike."""

    job: Job
    opened: Opened
    must_drop: MustDrop
    leaves_behind: bool = True
    _count: int = field(default=0, init=False)

    def answer(self, number: int) -> Answers:
        """The answers of a batch.

        Collective over: the ranks that share layers.

        Raises:
            Dropped: on all of them, if any of them must drop it.
            PromptError: the file of prompts has changed.
        """
        began = time.monotonic()
        job = self.job
        requests = job.batches[number].tolist()
        prompts = [job.prompts[request] for request in requests]
        lengths = job.batches.lengths[requests].tolist()
        ids = [job.encoder(prompt)[-length:] for prompt, length in zip(prompts, lengths, strict=True)]
        made = self._generate(prompts, ids, job.batches.limits[requests].tolist())
        answers = [self._trimmed(*each) for each in zip(prompts, lengths, made, strict=True)]
        return Answers(number, tuple(answers), time.monotonic() - began)

    def _trimmed(self, prompt: Prompt, length: int, made: Made) -> Answer:
        described, limit = self.job.described, int(self.job.batches.limits[prompt.number])
        found = trim(
            made.tokens, limit=limit, ends=described.ends, stops=self._stops(prompt),
            decode=None if described.tokenizer is None else described.decode,
        )  # fmt: skip
        if 0 <= made.first_nan < len(found.tokens):
            error = (
                f"logits of token {made.first_nan} are no numbers (NaN): the model overflows in its dtype, or is broken"
            )
            return Answer(prompt.number, length, (), ERROR, error=error)
        return Answer(prompt.number, length, found.tokens, found.reason, found.text)

    def _stops(self, prompt: Prompt) -> tuple[str, ...]:
        return prompt.options.over(self.job.options).stop or ()

    def _generate(self, prompts: Sequence[Prompt], ids: Sequence[Sequence[int]], limits: Sequence[int]) -> list[Made]:
        """What follows each prompt. Collective over: the ranks that share layers."""
        rows = [row_of(prompt, self.job.options) for prompt in prompts]
        width = max(map(len, ids))
        found = [Made() for _ in ids]
        group = self._padded(ids, width, max(limits))
        while group.places:
            end = self._step(group, rows, limits, [self._stops(prompt) for prompt in prompts], list(map(len, ids)))
            done = end.done.tolist() if end.done is not None else [True] * len(group.places)
            for row, place in enumerate(group.places):
                if found[place].first_nan < 0:
                    found[place].first_nan = end.first_nan[row]
                if done[row]:
                    found[place].tokens = group.tokens[row, width:].tolist()
            self._leave_behind(group, [row for row, is_done in enumerate(done) if not is_done])
        return found

    def _padded(self, ids: Sequence[Sequence[int]], width: int, most: int) -> Group:
        tokens = np.full((len(ids), width), self.job.described.pad, np.int64)
        mask = np.zeros_like(tokens)
        for row, own in enumerate(ids):
            tokens[row, width - len(own) :] = own
            mask[row, width - len(own) :] = 1
        device = self.opened.engine.device
        group = Group(list(range(len(ids))), torch.from_numpy(tokens).to(device), torch.from_numpy(mask).to(device))
        if self.leaves_behind:
            group.cache = growing_cache(self.job.described.config, width + most)
        return group

    def _step(
        self,
        group: Group,
        rows: Sequence[Row],
        limits: Sequence[int],
        stops: Sequence[Sequence[str]],
        lengths: Sequence[int],
    ) -> End:
        """Generate until rows can be left behind, or all have ended. Collective over: the ranks that share layers."""
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        described, before = self.job.described, group.tokens.shape[1]
        width = max(lengths)
        own_limits = [limits[place] for place in group.places]
        has_texts = described.tokenizer is not None
        end = End(
            RowLimits(own_limits, width, [stops[place] for place in group.places],
                      described.decode if has_texts else None),
            torch.tensor(sorted(described.ends), dtype=torch.int64, device=group.tokens.device),
            before, self._must_drop, self.leaves_behind,
        )  # fmt: skip
        sampler = Sampler([rows[place] for place in group.places], [lengths[place] for place in group.places], width)
        out = self.opened.engine.generate(
            input_ids=group.tokens, attention_mask=group.mask, past_key_values=group.cache,
            generation_config=GenerationConfig(
                do_sample=False, num_beams=1, max_new_tokens=width + max(own_limits) - before, use_cache=True,
                pad_token_id=described.pad, eos_token_id=None, bos_token_id=None,
            ),
            logits_processor=LogitsProcessorList([sampler]), stopping_criteria=StoppingCriteriaList([end]),
        )  # fmt: skip
        if end.is_dropped:
            raise Dropped
        group.mask = torch.cat([group.mask, torch.ones_like(out[:, before:])], dim=1)
        group.tokens, end.first_nan = out, sampler.first_nan
        return end

    def _leave_behind(self, group: Group, rows: Sequence[int]) -> None:
        """Keep only these rows of a group."""
        group.places = [group.places[row] for row in rows]
        if not rows:
            return
        chosen = torch.tensor(rows, device=group.tokens.device)
        group.tokens, group.mask = group.tokens[chosen], group.mask[chosen]
        if group.cache is not None:
            group.cache.batch_select_indices(chosen)

    def _must_drop(self) -> bool:
        """Asked at each token; ranks that share layers agree now and then."""
        asks = self.must_drop()
        tensor = self.opened.tensor
        if tensor.size == 1:
            return asks
        self._count += 1
        if self._count % AGREE_TOKENS:
            return False
        flag = torch.tensor([int(asks)])
        tensor.all_reduce(flag, "max")
        return bool(flag.item())
