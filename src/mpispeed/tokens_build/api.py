"""Token stores for scripts: built, joined and opened by all ranks of a program."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpispeed.mesh.world import start
from mpispeed.tokens.store import TokenStore, open_store
from mpispeed.tokens_build.inputs import Reading
from mpispeed.tokens_build.job import PART_BYTES, Report, Request, build
from mpispeed.tokens_build.merging import Merged, merge

Name = str | os.PathLike[str]
Names = Sequence[Name]


def build_store(
    output: Name,
    inputs: Names,
    tokenizer: str = "byte",
    *,
    field: str = "text",
    documents: str = "line",
    eos: str = "auto",
    special_tokens: bool = False,
    parse_special: bool = False,
    **further: Any,
) -> Report:
    """Build a token store from texts, as `mpispeed data build` does; a build that was interrupted goes on.

    Args:
        output: the store, which is not there yet.
        inputs: files and folders.
        tokenizer: "byte", a tokenizer.json, or the folder of a tokenizer of transformers.
        field: entry or column that has the texts.
        documents: what a document of a text file is: "line", "paragraph" or "file".
        eos: the token after each document: "auto", "none", its text or its number.
        special_tokens: add what the tokenizer puts around a text.
        parse_special: make special tokens of their texts within documents; else these are text as any other.
        further: `format`, `pack`, `columns`, `part_bytes`, `skip_bad`, as the options of the command.

    Collective over: all ranks.

    Raises:
        BuildError: on every rank: an input, an option or the folder cannot be used.
    """
    reading, asked = Reading(field, documents), _further(**further)
    request = Request(
        Path(output), _paths(inputs), tokenizer, reading=reading, end=eos, adds_special=special_tokens,
        parses_special=parse_special, **asked,
    )  # fmt: skip
    return build(start().comm, request)


def import_store(
    output: Name,
    inputs: Names,
    *,
    vocabulary_size: int | None = None,
    tokenizer: str | None = None,
    field: str = "input_ids",
    eos: str = "none",
    append_eos: bool = False,
    **further: Any,
) -> Report:
    """Build a token store from files that have tokens, as `mpispeed data import` does.

    Args:
        output: the store, which is not there yet.
        inputs: pairs of Megatron, Parquet, Arrow, lines of JSON, or folders.
        vocabulary_size: tokens are smaller; without a tokenizer.
        tokenizer: what made the tokens.
        field: entry or column that has them.
        eos: the token that ends documents, as the store tells.
        append_eos: put it there.
        further: as in `build_store`.

    Collective over: all ranks.

    Raises:
        BuildError: on every rank: an input, an option or the folder cannot be used.
    """
    request = Request(
        Path(output), _paths(inputs), tokenizer, is_text=False, reading=Reading(field), end=eos,
        appends_end=append_eos, vocabulary=vocabulary_size, **_further(**further),
    )  # fmt: skip
    return build(start().comm, request)


def merge_stores(output: Name, stores: Names) -> Merged:
    """Join token stores of one tokenizer to one, in this order, with the columns that all of them have.

    Collective over: all ranks.

    Raises:
        BuildError: on every rank: a store is damaged or does not fit the others, or the new one cannot be written.
    """
    return merge(start().comm, Path(output), _paths(stores))


def open_on_node(path: Name) -> TokenStore:
    """Open a token store with one open file for all ranks of a node. Raises as `open_store`.

    Collective over: the ranks of each node.
    """
    return open_store(path, start().node)


def _paths(names: Names) -> list[Path]:
    return [Path(name) for name in names]


def _further(
    *,
    format: str | None = None,
    pack: int | None = None,
    columns: Sequence[str] = (),
    part_bytes: int = PART_BYTES,
    skip_bad: bool = False,
) -> dict[str, Any]:
    """Settings of a Request that have other names there."""
    import torch

    return {
        "kind": format, "row": pack or 0, "columns": tuple(columns), "part_bytes": part_bytes, "skips_bad": skip_bad,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
