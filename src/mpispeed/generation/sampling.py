"""Sampling whose random numbers belong to the request: neither the batch, nor the group, nor a restart changes them.

Noise of a Gumbel distribution is added to the logits, and the largest is taken, which is a draw from their softmax. The
noise of a token is a function of the request's key, the position in the answer and the token id, by a generator that
counts. So `generate` runs with `do_sample=False` and needs no state, and all ranks of a tensor group, which have equal
logits, draw the same.

Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox 4x32-10); Maddison et al., "A*
sampling", NIPS 2014 (Gumbel-max); Holtzman et al., arXiv 1904.09751 (top-p); Keskar et al., arXiv 1909.05858 (penalty).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from mpispeed.generation.requests import Options, Prompt

_MASK = 0xFFFFFFFF
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

_TOP_TOKENS = (1024, 8192)
"""As many of the likeliest tokens are sorted for top-p; more, then all where these have not enough probability."""

_WORDS_AT_ONCE = 1 << 14

_LARGEST = 1 - 2.0**-24
"""Largest uniform number: the next float of 32 bits is 1, whose logarithm would be infinite."""


@dataclass(frozen=True, slots=True)
class Row:
    """The way in which the tokens of one request are chosen.

    Attributes:
        key: four words of 32 bits, the name of its stream of random numbers.
        temperature: 0: the likeliest token is taken.
        top_k: 0: all tokens can be drawn.
        top_p: 1: all tokens can be drawn.
        repetition_penalty: 1: none.
    """

    key: tuple[int, int, int, int]
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


def row_of(prompt: Prompt, defaults: Options) -> Row:
    """The row of a request: its own options, and those of the job where it has none; greedy where neither has."""
    options = prompt.options.over(defaults)
    return Row(
        stream_key(options.seed or 0, prompt.id, prompt.sample),
        options.temperature or 0.0,
        options.top_k or 0,
        1.0 if options.top_p is None else options.top_p,
        1.0 if options.repetition_penalty is None else options.repetition_penalty,
    )


def stream_key(seed: int, name: str, sample: int) -> tuple[int, int, int, int]:
    """The key of a stream of random numbers, from a seed, the id of a prompt and the number of its answer."""
    digest = blake2b(f"{seed}\0{sample}\0{name}".encode(), digest_size=16).digest()
    first, second, third, fourth = (int.from_bytes(digest[place : place + 4], "little") for place in (0, 4, 8, 12))
    return first, second, third, fourth


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> list[Tensor]:
    """Philox 4x32-10: four random words for each counter of four words and key of two.

    Shapes: all are int64 tensors that broadcast, with values from 0 to 2^32 - 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # the low 64 bits of these products are right although int64 has a sign
        first, second = c0 * _FACTORS[0], c2 * _FACTORS[1]
        c0, c2 = (second >> 32 & _MASK) ^ c1 ^ k0, (first >> 32 & _MASK) ^ c3 ^ k1
        c1, c3 = second & _MASK, first & _MASK
        k0, k1 = (k0 + _STEPS[0]) & _MASK, (k1 + _STEPS[1]) & _MASK
    return [c0, c1, c2, c3]


def noise(keys: Tensor, position: int, tokens: int) -> Tensor:
    """Gumbel noise of all tokens.

    Args:
        keys: of streams. Shapes: (rows, 4), int64.
        position: of the new token in its answer, from 0.
        tokens: of the vocabulary.

    Returns:
        Shapes: (rows, tokens), fp32.
    """
    blocks = torch.arange((tokens + 3) // 4, device=keys.device)
    found = torch.empty(len(keys), 4 * len(blocks), device=keys.device)
    # few words at a time stay in the cache of a core; a device does better with all of them
    step = max(1, _WORDS_AT_ONCE // len(blocks)) if keys.device.type == "cpu" else len(keys)
    for first in range(0, len(keys), step):
        rows = keys[first : first + step, :, None]
        words = philox((blocks, torch.full_like(blocks, position), rows[:, 2], rows[:, 3]), (rows[:, 0], rows[:, 1]))
        found[first : first + step] = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)
    return _gumbel(found[:, :tokens])


def noise_at(keys: Tensor, position: int, tokens: Tensor) -> Tensor:
    """The noise of single tokens, equal to that of `noise`. Shapes: keys (n, 4), tokens (n,), returns (n,)."""
    words = philox((tokens >> 2, torch.full_like(tokens, position), keys[:, 2], keys[:, 3]), (keys[:, 0], keys[:, 1]))
    return _gumbel(torch.stack(words, dim=-1).gather(1, (tokens & 3)[:, None])[:, 0].float())


def _gumbel(words: Tensor) -> Tensor:
    """Changes fp32 words from 0 to 2^32 - 1 to noise in place.

    Small uniform numbers are large noise and decide; they are exact to 2^-32.
    """
    uniform = words.add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST)
    return uniform.neg_().log1p_().neg_().log_().neg_()


class Sampler:
    """Logits processor of transformers for one batch: its largest score is the token that is drawn.

    Called once for each new token, with all rows and all tokens so far: it remembers which tokens a row has had. What
    is padded on the left does not count as had.

    Args:
        rows: one for each row of the batch.
        lengths: tokens of each row's prompt, without padding.
        width: tokens of the padded prompts; by default those of the longest of `lengths`.
    """

    def __init__(self, rows: Sequence[Row], lengths: Sequence[int], width: int = 0) -> None:
        self._rows = list(rows)
        self._width, self._lengths = width or max(lengths), list(lengths)
        self._drawn = [place for place, row in enumerate(rows) if row.temperature > 0]
        self._punished = [place for place, row in enumerate(rows) if row.repetition_penalty != 1]
        self._tables: dict[str, Tensor] = {}
        self._had: Tensor | None = None
        self._first_nan: Tensor | None = None

    @property
    def first_nan(self) -> list[int]:
        """The first position of each row's answer at which a logit was NaN, as it is after an overflow; -1: none was.

        The tokens of the row from there on mean nothing.
        """
        return [-1] * len(self._rows) if self._first_nan is None else self._first_nan.tolist()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores of which the largest is drawn. Shapes: input_ids (rows, tokens), scores (rows, vocabulary)."""
        self._look_for_nan(input_ids.shape[1] - self._width, scores)
        if self._punished:
            scores = self._punish(input_ids, scores)
        if not self._drawn:
            return scores
        all_drawn = len(self._drawn) == len(self._rows)
        table = self._table(scores.device)
        chosen = (scores if all_drawn else scores[table["drawn"]]).float() / table["temperature"]
        chosen = self._among_top(chosen)
        chosen = self._perturbed(chosen, input_ids.shape[1] - self._width)
        if all_drawn:
            return chosen
        scores = scores.float().clone()
        scores[table["drawn"]] = chosen
        return scores

    def _look_for_nan(self, position: int, scores: Tensor) -> None:
        """Nothing waits for a device here. The largest of some numbers is NaN if one of them is."""
        first = scores.new_full((len(scores),), -1, dtype=torch.int64) if self._first_nan is None else self._first_nan
        self._first_nan = torch.where(scores.amax(1).isnan() & (first < 0), position, first)

    def _table(self, device: torch.device) -> dict[str, Tensor]:
        """What rows have, as tensors on the device of the logits."""
        if not self._tables:
            drawn = [self._rows[place] for place in self._drawn]
            self._tables = {
                "drawn": torch.tensor(self._drawn, device=device),
                "temperature": torch.tensor([[row.temperature] for row in drawn], device=device),
                "top_p": torch.tensor([[row.top_p] for row in drawn], device=device),
                "top_k": torch.tensor([[row.top_k] for row in drawn], device=device),
                "keys": torch.tensor([row.key for row in drawn], dtype=torch.int64, device=device),
            }
        return self._tables

    def _among_top(self, scores: Tensor) -> Tensor:
        """Scores with -inf for tokens that cannot be drawn. Equal scores are in or out together."""
        rows = [self._rows[place] for place in self._drawn]
        largest = max(row.top_k for row in rows)
        if largest:
            count = scores.shape[1]
            top_k = self._tables["top_k"]
            sizes = torch.where(top_k > 0, top_k, count).clamp(max=count)
            best = scores.topk(min(largest, count)).values
            bounds = best.gather(1, (sizes - 1).clamp(max=best.shape[1] - 1))
            scores = scores.masked_fill((scores < bounds) & (sizes < count), -torch.inf)
        if min(row.top_p for row in rows) < 1:
            bounds = nucleus_bounds(scores, self._tables["top_p"])
            scores = scores.masked_fill(scores < bounds, -torch.inf)
        return scores

    def _perturbed(self, scores: Tensor, position: int) -> Tensor:
        keys = self._tables["keys"]
        if all(self._rows[place].top_k == 0 and self._rows[place].top_p == 1 for place in self._drawn):
            return scores + noise(keys, position, scores.shape[1])
        rows, tokens = (scores > -torch.inf).nonzero(as_tuple=True)
        if 4 * len(rows) > scores.numel():
            return scores + noise(keys, position, scores.shape[1])
        found = torch.full_like(scores, -torch.inf)
        found[rows, tokens] = scores[rows, tokens] + noise_at(keys[rows], position, tokens)
        return found

    def _punish(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores with those of tokens that a row has had brought down."""
        places = torch.tensor(self._punished, device=scores.device)
        rows = [self._rows[place] for place in self._punished]
        had = self._had
        if had is None:
            had = torch.zeros(len(rows), scores.shape[1], dtype=torch.bool, device=scores.device)
            for row, place in enumerate(self._punished):
                had[row, input_ids[place, self._width - self._lengths[place] :]] = True
        else:
            had[torch.arange(len(rows), device=scores.device), input_ids[places, -1]] = True
        self._had = had
        penalty = torch.tensor([[row.repetition_penalty] for row in rows], device=scores.device)
        own = scores[places]
        scores = scores.clone()
        scores[places] = torch.where(had, torch.where(own < 0, own * penalty, own / penalty).to(own.dtype), own)
        return scores


def nucleus_bounds(scores: Tensor, top_p: Tensor) -> Tensor:
    """The smallest score of the likeliest tokens that together have the probability `top_p`, of each row.

    Shapes: scores (rows, tokens), top_p (rows, 1); returns (rows, 1). Rows with 1 get -inf.
    """
    tokens = scores.shape[1]
    bounds = scores.new_full((len(scores), 1), torch.nan)
    for count in (*(each for each in _TOP_TOKENS if each < tokens), tokens):
        lacking = bounds.isnan().squeeze(1)
        if lacking.any():
            bounds[lacking] = _bounds_within(scores[lacking], top_p[lacking], count)
    return bounds


def _bounds_within(scores: Tensor, top_p: Tensor, count: int) -> Tensor:
    """As `nucleus_bounds`, from the `count` likeliest tokens; NaN where these have not enough."""
    best = scores.topk(count).values
    shares = (best - scores.logsumexp(1, keepdim=True)).exp()
    before = shares.cumsum(1) - shares
    last = (before < top_p).sum(1, keepdim=True) - 1
    bounds = best.gather(1, last)
    if count < scores.shape[1]:
        is_enough = shares.sum(1, keepdim=True) >= top_p
        bounds = torch.where(is_enough, bounds, torch.nan)
    return torch.where(top_p >= 1, -torch.inf, bounds)
