"""Check a store against its checksums, and its tables against each other. Reads of samples do neither."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mpispeed.native.checksum import crc32c
from mpispeed.tokens import layout, reader
from mpispeed.tokens.create import documents_at, list_checksum
from mpispeed.tokens.errors import TokenStoreError
from mpispeed.tokens.layout import Place
from mpispeed.tokens.positions import read_bytes, read_elements

_MOST_PROBLEMS = 100


@dataclass
class Verdict:
    """The outcome of a check.

    Attributes:
        problems: a sentence for each block that is damaged, at most 100.
        blocks: how many were compared with their checksum.
        all_blocks: how many there are.
        nbytes: bytes that were read for it.
    """

    problems: list[str] = field(default_factory=list)
    blocks: int = 0
    all_blocks: int = 0
    nbytes: int = 0

    @property
    def is_fine(self) -> bool:
        """True if nothing was found."""
        return not self.problems


def verify(path: Path, *, sample: int | None = None, threads: int = 4, seed: int = 0) -> Verdict:
    """Compare a finished store with its checksums, in threads.

    Args:
        path: of the store.
        sample: so many blocks of 4 MiB chosen by chance, spread over all tables; all by default.
        threads: that read and compare at the same time.
        seed: of the choice.

    Raises:
        NoTokenStore: there is none.
        UnfinishedStore: its writer has not come to the end.
        TokenStoreError: its layout or its manifest is damaged, so that nothing else can be looked at.
        OSError: the file cannot be read.
    """
    handle = reader.open_file(path)
    try:
        return _Check(path, handle, reader.read_contents(path, handle)).run(sample, threads, seed)
    finally:
        os.close(handle)


@dataclass
class _Check:
    path: Path
    handle: int
    contents: reader.Contents

    def run(self, sample: int | None, threads: int, seed: int) -> Verdict:
        places = self.contents.places
        counts = {name: place.block_count for name, place in places.tables.items()}
        verdict = Verdict(all_blocks=sum(counts.values()))
        for name in places.tables:
            verdict.problems += self._list_problems(name)
        if verdict.problems:
            return verdict  # what blocks should be is not known
        chosen = _blocks(counts, sample, seed)
        with ThreadPoolExecutor(max(1, threads)) as pool:
            for problem, nbytes in _in_turn(pool, self._block_problem, chosen, 4 * max(1, threads)):
                verdict.blocks, verdict.nbytes = verdict.blocks + 1, verdict.nbytes + nbytes
                if problem and len(verdict.problems) < _MOST_PROBLEMS:
                    verdict.problems.append(problem)
        if not verdict.problems:
            verdict.problems += self._end_problems()
        return verdict

    def _list_problems(self, table: str) -> Iterator[str]:
        own = self.contents.columns[table] if layout.is_column(table) else self.contents.manifest
        if list_checksum(self.handle, self.contents.places.lists[table]) != own.lists.get(table):
            yield f"the checksums of /{table} do not have the checksum that the manifest gives them"

    def _end_problems(self) -> Iterator[str]:
        places = self.contents.places
        for table, first, last in layout.ends_of(places):
            place = places.tables[table]
            found = [int(read_elements(self.handle, place, number, 1)[0]) for number in (0, place.count - 1)]
            if found != [first, last]:
                yield f"/{table} is from {found[0]} to {found[1]}; it must be from {first} to {last}"

    def _block_problem(self, block: tuple[str, int]) -> tuple[str, int]:
        """What is wrong with a block, "" if nothing is, and its bytes."""
        table, number = block
        place, own = self.contents.places.tables[table], self.contents.places.lists[table]
        _, nbytes = place.block(number)
        first = number * layout.BLOCK_BYTES // place.itemsize
        where = f"elements {first} to {first + nbytes // place.itemsize} of /{table}"
        try:
            raw = read_bytes(self.handle, *place.block(number))
            wanted = int(read_elements(self.handle, own, number, 1)[0])
        except (OSError, TokenStoreError) as failure:
            return f"{where} cannot be read: {reader.said(failure)}", nbytes
        if crc32c(raw) != wanted:
            return f"{where} are damaged: they do not have their checksum", nbytes
        said = self._content_problem(table, place, first, np.frombuffer(raw, place.numpy))
        return f"{where} {said}" if said else "", nbytes

    def _content_problem(self, table: str, place: Place, first: int, values: np.ndarray) -> str:
        """What cannot be in a block that is as it was written."""
        if table in (layout.DOCUMENTS, layout.ROWS):
            before = read_elements(self.handle, place, first - 1, 1) if first else values[:0]
            joined = np.concatenate([before, values])
            return "" if (joined[1:] > joined[:-1]).all() else "do not increase everywhere"
        vocabulary = self.contents.manifest.facts.get("vocabulary_size")
        if table == layout.TOKENS and type(vocabulary) is int and int(values.max()) >= vocabulary:
            return f"have the token {values.max()}, and the vocabulary has {vocabulary}"
        if table == layout.LOOKUP:
            tokens = (first + np.arange(len(values), dtype=np.uint64)) * np.uint64(layout.LOOKUP_TOKENS)
            try:
                right = np.array_equal(documents_at(self.handle, self.contents.places, tokens), values)
            except TokenStoreError as failure:
                return f"cannot be compared: {failure}"
            return "" if right else "are not the documents in which these tokens lie"
        return ""


def _blocks(counts: dict[str, int], sample: int | None, seed: int) -> Iterator[tuple[str, int]]:
    """All blocks in their order, or some chosen by chance."""
    total = sum(counts.values())
    if sample is None or sample >= total:
        yield from ((name, number) for name, count in counts.items() for number in range(count))
        return
    dice = random.Random(seed)
    for chosen in sorted(dice.sample(range(total), max(0, sample))):
        left = chosen
        for name, count in counts.items():
            if left < count:
                yield name, left
                break
            left -= count


def _in_turn(
    pool: ThreadPoolExecutor,
    work: Callable[[tuple[str, int]], tuple[str, int]],
    blocks: Iterator[tuple[str, int]],
    ahead: int,
) -> Iterator[tuple[str, int]]:
    """Results in the order of the blocks, with so many under way."""
    waiting = []
    for block in blocks:
        waiting.append(pool.submit(work, block))
        if len(waiting) >= ahead:
            yield waiting.pop(0).result()
    for future in waiting:
        yield future.result()
