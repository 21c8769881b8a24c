"""Batches of requests of like length: cut once, a function of lengths and limits alone.

Neither the number of ranks nor that of groups enters, so every start of a job, on whatever nodes, has the same batches,
and a batch that one start has finished is finished for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from mpispeed.base.errors import UsageError
from mpispeed.generation.requests import PromptError

TOO_LONG = ("error", "skip", "truncate")
"""Ways to treat a prompt that is longer than the limits allow."""

_NAMED = 5


@dataclass(frozen=True, slots=True)
class Batches:
    """All batches of a job, those that take longest first.

    Attributes:
        order: numbers of requests, batch by batch, int64. Shapes: (requests that are answered,).
        starts: where each batch begins in `order`, and the end, int64. Shapes: (batches + 1,).
        lengths: tokens that are taken of each request's prompt, the last ones, int32. Shapes: (requests,).
        limits: new tokens that each request may have, int32. Shapes: (requests,).
        left_out: numbers of requests that are in no batch, because their prompts are too long, int64.
        digest: of all of it, "blake2b:...".
    """

    order: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    limits: np.ndarray
    left_out: np.ndarray
    digest: str

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        """Requests of batch `number`, the longest prompt first.

        Raises:
            IndexError: there is no such batch.
        """
        if not 0 <= number < len(self):
            msg = f"there are {len(self)} batches; there is no number {number}"
            raise IndexError(msg)
        found: np.ndarray = self.order[self.starts[number] : self.starts[number + 1]]
        return found

    def positions(self, number: int) -> tuple[int, int]:
        """Tokens of the longest prompt of a batch, and most new tokens of one of its answers."""
        requests = self[number]
        return int(self.lengths[requests].max()), int(self.limits[requests].max())

    def batch_of(self) -> np.ndarray:
        """The batch of each request, -1 for those left out, int64. Shapes: (requests,)."""
        found = np.full(len(self.lengths), -1, np.int64)
        found[self.order] = np.repeat(np.arange(len(self)), np.diff(self.starts))
        return found


def cut(
    lengths: np.ndarray,
    limits: np.ndarray | int,
    *,
    batch_size: int,
    max_batch_tokens: int | None = None,
    max_positions: int | None = None,
    too_long: str = "error",
) -> Batches:
    """Cut requests into batches by the lengths of their prompts.

    Requests are sorted by the length of the prompt, then by that of the longest answer, then by number, and a batch is
    filled until a limit stops it; its longest prompt with its longest answer keeps to `max_positions` too. Batches are
    then sorted by the positions of their longest request: what takes long begins first, and the end of a job is short
    work.

    Args:
        lengths: tokens of each prompt. Shapes: (requests,).
        limits: new tokens that an answer may have, for each request or for all; at least 1.
        batch_size: most requests of a batch.
        max_batch_tokens: most tokens of a batch, as its cache has to hold them: requests x (longest prompt + longest
            answer).
        max_positions: most tokens of a request with its answer, of the model.
        too_long: what becomes of a prompt that leaves no room for a token within these limits: "error", "skip" (it is
            in no batch) or "truncate" (its last tokens are taken, so many that its answer has room, or half of the
            limit at least). Where only the answer has not all of its room, it may have fewer tokens.

    Raises:
        UsageError: a limit is no positive number, or prompts are too long; a PromptError then.
    """
    lengths = np.array(lengths, np.int64)
    room: np.ndarray = np.broadcast_to(np.asarray(limits, np.int64), lengths.shape)
    _check(lengths, room, batch_size, max_batch_tokens, max_positions, too_long)
    most = min(max_positions or 2**31 - 1, max_batch_tokens or 2**31 - 1)
    is_long = lengths >= most
    if is_long.any() and too_long == "error":
        raise _too_long(lengths, is_long, most)
    if too_long == "truncate":
        kept = np.maximum(most - np.minimum(room, most), min(most - 1, -(-most // 2)))
        lengths = np.where(is_long, np.minimum(lengths, kept), lengths)
        is_long = np.zeros_like(is_long)
    room = np.minimum(room, np.maximum(most - lengths, 1))
    (taken,) = np.nonzero(~is_long)
    order = taken[np.lexsort((taken, -room[taken], -lengths[taken]))]
    starts = _starts(lengths[order], room[order], batch_size, max_batch_tokens or 2**62, most)
    order, starts = _longest_first(order, starts, lengths, room)
    (left_out,) = np.nonzero(is_long)
    parts = (order, starts, lengths.astype(np.int32), room.astype(np.int32), left_out)
    hashed = blake2b(digest_size=32)
    for part in parts:
        hashed.update(part.astype(part.dtype.newbyteorder("<")).tobytes() + b"|")
    return Batches(*parts, digest=f"blake2b:{hashed.hexdigest()}")


def _check(
    lengths: np.ndarray,
    limits: np.ndarray,
    batch_size: int,
    max_batch_tokens: int | None,
    max_positions: int | None,
    too_long: str,
) -> None:
    numbers = {"batch_size": batch_size, "max_batch_tokens": max_batch_tokens, "max_positions": max_positions}
    for name, value in numbers.items():
        least = 1 if name == "batch_size" else 2
        if value is not None and not least <= value < 2**31:
            msg = f"{name} is {value}; expected a whole number from {least} to 2^31 - 1"
            raise UsageError(msg)
    if too_long not in TOO_LONG:
        msg = f"too_long is {too_long!r}; expected {', '.join(TOO_LONG)}"
        raise UsageError(msg)
    if lengths.size and (lengths.min() < 0 or lengths.max() >= 2**31 or limits.min() < 1 or limits.max() >= 2**31):
        msg = f"prompts have {lengths.min()} to {lengths.max()} tokens, and answers may have {limits.min()} to "
        msg += f"{limits.max()}; expected at least 0 and 1, and fewer than 2^31"
        raise UsageError(msg)


def _too_long(lengths: np.ndarray, is_long: np.ndarray, most: int) -> PromptError:
    (found,) = np.nonzero(is_long)
    named = ", ".join(f"number {request} with {lengths[request]}" for request in found[:_NAMED].tolist())
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    msg = f"{len(found)} of {len(lengths)} prompts leave no room for an answer within {most} tokens ({named}{more}); "
    msg += "shorten them, raise max_batch_tokens if that is the limit, or choose --too-long skip or truncate"
    return PromptError(msg)


def _starts(lengths: np.ndarray, limits: np.ndarray, batch_size: int, max_tokens: int, most: int) -> np.ndarray:
    """Starts of batches of requests that are sorted by falling length."""
    count = len(lengths)
    if not count or (int(lengths[0]) + int(limits.max()) <= most and batch_size * most <= max_tokens):
        return np.append(np.arange(0, count, batch_size), count).astype(np.int64)
    starts, first = [0], 0
    while first < count:
        # The first of a batch has its longest prompt. Rows that have ended go on until the last one has, so each of
        # them must have positions for the longest answer.
        widths = lengths[first] + np.maximum.accumulate(limits[first : first + batch_size])
        tokens = widths * np.arange(1, len(widths) + 1)
        fits = np.searchsorted(widths, most, side="right"), np.searchsorted(tokens, max_tokens, side="right")
        first += max(1, int(min(fits)))
        starts.append(first)
    return np.array(starts, np.int64)


def _longest_first(
    order: np.ndarray, starts: np.ndarray, lengths: np.ndarray, limits: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    if len(starts) < 2:
        return order, starts
    widths = np.maximum.reduceat(lengths[order], starts[:-1]) + np.maximum.reduceat(limits[order], starts[:-1])
    by_width = np.argsort(-widths, kind="stable")
    sizes = np.diff(starts)
    parts = [order[starts[batch] : starts[batch + 1]] for batch in by_width]
    return np.concatenate(parts), np.concatenate([[0], np.cumsum(sizes[by_width])]).astype(np.int64)
