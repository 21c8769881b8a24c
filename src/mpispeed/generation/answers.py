"""The answers of one batch, and the bytes that they are kept as.

    bytes = size of the head u32, head (JSON: name -> [dtype, count] in order), arrays

Integers are little endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_SIZE = struct.Struct("<I")

REASONS = ("pending", "eos", "length", "stop", "too_long", "error")
"""Reasons why an answer ends, by code: not answered yet, the model's end token, the limit of new tokens, a stop text, a
prompt that is too long, a failure."""

PENDING, EOS, LENGTH, STOP, TOO_LONG, ERROR = range(len(REASONS))

_ARRAYS = {
    "batch": "<i8", "requests": "<i8", "prompt_tokens": "<i4", "reasons": "|u1", "seconds": "<f8",
    "offsets": "<i8", "tokens": "<i4", "text_offsets": "<i8", "texts": "|u1", "error_offsets": "<i8", "errors": "|u1",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request.

    Attributes:
        request: its number.
        prompt_tokens: tokens of the prompt that the model saw.
        tokens: new token ids, with the end token if the model made one.
        reason: a code of `REASONS`.
        text: what they say, without a stop text.
        error: why there is no answer, for ERROR and TOO_LONG.
    """

    request: int
    prompt_tokens: int
    tokens: Sequence[int] | np.ndarray
    reason: int
    text: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one batch.

    Attributes:
        batch: its number.
        answers: one for each of its requests.
        seconds: that the batch took.
    """

    batch: int
    answers: tuple[Answer, ...]
    seconds: float = 0.0


def pack(found: Answers) -> bytes:
    """The bytes of the answers of a batch: the payload of a record."""
    texts = [each.text.encode("utf-8", errors="replace") for each in found.answers]
    errors = [each.error.encode("utf-8", errors="replace") for each in found.answers]
    tokens = [np.asarray(each.tokens, "<i4").reshape(-1) for each in found.answers]
    values = {
        "batch": [found.batch],
        "requests": [each.request for each in found.answers],
        "prompt_tokens": [each.prompt_tokens for each in found.answers],
        "reasons": [each.reason for each in found.answers],
        "seconds": [found.seconds],
        "offsets": _offsets(tokens),
        "tokens": np.concatenate([np.zeros(0, "<i4"), *tokens]),
        "text_offsets": _offsets(texts),
        "texts": np.frombuffer(b"".join(texts), np.uint8),
        "error_offsets": _offsets(errors),
        "errors": np.frombuffer(b"".join(errors), np.uint8),
    }
    arrays = {name: np.asarray(value, _ARRAYS[name]) for name, value in values.items()}
    head = json.dumps({name: [array.dtype.str, len(array)] for name, array in arrays.items()}).encode()
    return _SIZE.pack(len(head)) + head + b"".join(array.tobytes() for array in arrays.values())


def unpack(payload: bytes | memoryview) -> Answers:
    """The answers in a payload.

    Raises:
        ValueError: it is none.
    """
    arrays = arrays_of(payload)
    cuts = [arrays[name].tolist() for name in ("offsets", "text_offsets", "error_offsets")]
    texts, errors = arrays["texts"].tobytes(), arrays["errors"].tobytes()
    answers = []
    for place, request in enumerate(arrays["requests"].tolist()):
        (first, last), text, error = ((cut[place], cut[place + 1]) for cut in cuts)
        answers.append(
            Answer(
                request,
                int(arrays["prompt_tokens"][place]),
                arrays["tokens"][first:last],
                int(arrays["reasons"][place]),
                texts[slice(*text)].decode(),
                errors[slice(*error)].decode(),
            )
        )
    return Answers(int(arrays["batch"][0]), tuple(answers), float(arrays["seconds"][0]))


def _offsets(parts: Sequence[bytes] | Sequence[np.ndarray]) -> np.ndarray:
    return np.cumsum([0, *map(len, parts)], dtype=np.int64)


def arrays_of(payload: bytes | memoryview) -> dict[str, np.ndarray]:
    """The arrays in a payload, by the names of `pack`; views of it.

    Raises:
        ValueError: it is none.
    """
    view = memoryview(payload)
    try:
        (size,) = _SIZE.unpack_from(view)
        head = json.loads(bytes(view[_SIZE.size : _SIZE.size + size]))
        place, arrays = _SIZE.size + size, {}
        for name, (dtype, count) in head.items():
            if _ARRAYS.get(name) != dtype:
                continue  # of a later version
            arrays[name] = np.frombuffer(view, dtype, count, place)
            place += arrays[name].nbytes
    except (struct.error, AttributeError, TypeError, ValueError, RecursionError) as failure:
        msg = f"a record has no head that can be read: {failure}"
        raise ValueError(msg) from None
    _check(arrays)
    return arrays


def _check(arrays: dict[str, np.ndarray]) -> None:
    lacking = _ARRAYS.keys() - arrays.keys()
    if lacking or len(arrays["batch"]) != 1 or len(arrays["seconds"]) != 1:
        msg = f"a record lacks {', '.join(sorted(lacking)) or 'its number'}"
        raise ValueError(msg)
    count = len(arrays["requests"])
    pairs = (("offsets", "tokens"), ("text_offsets", "texts"), ("error_offsets", "errors"))
    is_whole = all(len(arrays[name]) == count for name in ("prompt_tokens", "reasons"))
    for cuts, flat in pairs:
        is_whole = is_whole and len(arrays[cuts]) == count + 1 and arrays[cuts][0] == 0
        is_whole = is_whole and arrays[cuts][-1] == len(arrays[flat]) and bool((np.diff(arrays[cuts]) >= 0).all())
    if not is_whole or (count and int(arrays["reasons"].max()) >= len(REASONS)):
        msg = "the arrays of a record do not fit each other"
        raise ValueError(msg)
