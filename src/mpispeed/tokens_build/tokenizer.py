"""From texts to tokens: a built-in tokenizer of bytes, and those of Hugging Face where their packages are installed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mpispeed.base.plain import printable, read_plain
from mpispeed.tokens_build.errors import BuildError

MOST_FILE_BYTES = 1 << 30
"""Of a file of a tokenizer."""

BYTES = "byte"
BYTE_END = 256

Encoded = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]


class Tokenizer(Protocol):
    """A maker of tokens from texts.

    Attributes:
        name: for people, and to tell stores of different tokenizers apart.
        digest: of what it was made from.
        vocabulary: tokens are 0 to vocabulary - 1.
        end: the token that ends a document, where the tokenizer's files say so.
    """

    name: str
    digest: str
    vocabulary: int
    end: int | None

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Tokens of all texts one after another [N], and the number of each text [D]."""

    def number_of(self, token: str) -> int | None:
        """The number of a token by its text; None where it has no such token."""


class ByteTokenizer:
    """A token for each byte of UTF-8, and 256 for the end of a document."""

    name, digest, vocabulary = BYTES, BYTES, 257
    end: int | None = BYTE_END

    def encode(self, texts: Sequence[str]) -> Encoded:
        """As `Tokenizer.encode`."""
        raw = [text.encode() for text in texts]
        tokens = np.frombuffer(b"".join(raw), np.uint8).astype(np.uint32)
        return tokens, np.fromiter(map(len, raw), np.int64, len(raw))

    def number_of(self, token: str) -> int | None:
        """Byte tokens have no texts."""
        return None


class _Fast:
    """A tokenizer.json of Hugging Face."""

    def __init__(self, path: Path, adds_special: bool, parses_special: bool) -> None:
        raw = _bytes_of(path)
        try:
            from tokenizers import Tokenizer as Rust
        except ImportError as failure:
            msg = f"{printable(str(path))} needs the package tokenizers; pip install 'mpispeed[data]', or take "
            msg += "--tokenizer byte"
            raise BuildError(msg) from failure
        try:
            self._rust = Rust.from_str(raw.decode())
        except Exception as failure:  # what the package raises is no narrower
            msg = f"{printable(str(path))} is no tokenizer that the package tokenizers can read: {failure}"
            raise BuildError(msg) from failure
        if getattr(self._rust.model, "dropout", None):
            msg = f"{printable(str(path))} drops merges by chance (dropout), so that tokens would differ each time; "
            msg += "remove dropout from the file"
            raise BuildError(msg)
        self._rust.no_truncation()
        self._rust.no_padding()
        self._rust.encode_special_tokens = not parses_special
        self._adds_special = adds_special
        self.name = path.resolve().parent.name if path.name == "tokenizer.json" else path.stem
        self.digest = f"blake2b:{blake2b(raw, digest_size=16).hexdigest()}"
        self.vocabulary = max(self._rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        said = _end_of(path.parent)
        self.end = None if said is None else self.number_of(said)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """As `Tokenizer.encode`."""
        encode = getattr(self._rust, "encode_batch_fast", self._rust.encode_batch)
        try:
            return _flat([each.ids for each in encode(list(texts), add_special_tokens=self._adds_special)])
        except Exception as failure:  # the package has no narrower one
            msg = f"the tokenizer {printable(self.name, 60)} cannot take a text of these inputs: {failure}"
            raise BuildError(msg) from failure

    def number_of(self, token: str) -> int | None:
        """As `Tokenizer.number_of`."""
        found: int | None = self._rust.token_to_id(token)
        return found


class _Slow:
    """A tokenizer of transformers that has no tokenizer.json."""

    def __init__(self, folder: Path, adds_special: bool, parses_special: bool) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as failure:
            msg = f"{printable(str(folder))} has no tokenizer.json, and the package transformers is not installed"
            raise BuildError(msg) from failure
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as failure:  # what the package raises is no narrower
            msg = f"transformers cannot read a tokenizer from {printable(str(folder))}: {failure}"
            raise BuildError(msg) from failure
        self._tokenizer.split_special_tokens = not parses_special
        self._adds_special = adds_special
        self.name = folder.resolve().name
        self.digest = _digest_of(folder)
        self.vocabulary = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.end: int | None = self._tokenizer.eos_token_id

    def encode(self, texts: Sequence[str]) -> Encoded:
        """As `Tokenizer.encode`."""
        found = self._tokenizer(list(texts), add_special_tokens=self._adds_special, return_attention_mask=False)
        return _flat(found["input_ids"])

    def number_of(self, token: str) -> int | None:
        """As `Tokenizer.number_of`."""
        found: int | None = self._tokenizer.get_vocab().get(token)
        return found


def open_tokenizer(
    wish: str, *, threads: int = 1, adds_special: bool = False, parses_special: bool = False
) -> Tokenizer:
    """The tokenizer of this name: "byte", a tokenizer.json, or the folder of a model of transformers.

    Args:
        wish: nothing is looked for in the network.
        threads: of the package tokenizers, if it has not started any.
        adds_special: add what the tokenizer puts around a text, such as a token to begin with.
        parses_special: make special tokens of their texts, such as "<|endoftext|>" in a document; else these are text
            as any other, so that no document can forge the end of one.

    Raises:
        BuildError: there is none, or it cannot be used.
    """
    if wish == BYTES:
        return ByteTokenizer()
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if threads > 1 else "false")
    path = Path(wish)
    if path.is_dir():
        file = path / "tokenizer.json"
        made = (
            _Fast(file, adds_special, parses_special) if file.is_file() else _Slow(path, adds_special, parses_special)
        )
        return _checked(made)
    if path.is_file():
        return _checked(_Fast(path, adds_special, parses_special))
    msg = f"there is no tokenizer {printable(wish)}; give byte, a tokenizer.json, or the folder of one"
    raise BuildError(msg)


def _checked(found: Tokenizer) -> Tokenizer:
    if not 0 < found.vocabulary <= 1 << 32:
        msg = f"the tokenizer {printable(found.name)} has a vocabulary of {found.vocabulary}; expected 1 to 2^32"
        raise BuildError(msg)
    return found


def end_token(tokenizer: Tokenizer, wish: str) -> int | None:
    """The token that is put after each document.

    Args:
        tokenizer: whose token it is.
        wish: "auto", "none", the text of a token or its number.

    Raises:
        BuildError: the tokenizer has none of this name, or does not say which it is.
    """
    if wish == "none":
        return None
    if wish == "auto":
        if tokenizer.end is None:
            msg = (
                f"the files of the tokenizer {printable(tokenizer.name)} do not say which token ends a document; give "
            )
            msg += "it with --eos TOKEN, or --eos none"
            raise BuildError(msg)
        return tokenizer.end
    if wish.isascii() and wish.isdecimal():  # not the token whose text are these digits, as many tokenizers have
        found = int(wish) if int(wish) < tokenizer.vocabulary else None
    else:
        found = tokenizer.number_of(wish)
    if found is None:
        msg = f"the tokenizer {printable(tokenizer.name)} has no token {printable(wish)}; see --eos"
        raise BuildError(msg)
    return found


def _flat(ids: list[list[int]]) -> Encoded:
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return np.fromiter(chain.from_iterable(ids), np.uint32, int(lengths.sum())), lengths


def _bytes_of(path: Path) -> bytes:
    try:
        return read_plain(path, MOST_FILE_BYTES, follows_links=True)
    except OSError as failure:
        msg = f"the tokenizer {printable(str(path))} cannot be read: {failure.strerror or failure}"
        raise BuildError(msg) from failure


def _end_of(folder: Path) -> str | None:
    """The token that ends a text, as tokenizer_config.json says beside a tokenizer.json."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        said = json.loads(_bytes_of(path))
    except ValueError as failure:
        msg = f"{printable(str(path))} is no JSON: {failure}"
        raise BuildError(msg) from failure
    token = said.get("eos_token") if isinstance(said, dict) else None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _digest_of(folder: Path) -> str:
    """Of the small files of a folder, which have no weights."""
    digest = blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".vocab", ".tiktoken"):
            digest.update(blake2b(path.name.encode() + b"\0" + _bytes_of(path)).digest())
    return f"blake2b:{digest.hexdigest()}"
