"""A token store built from files by all ranks: parts first, each by one rank, then all parts joined to one file.

Parts depend on the inputs alone, and the store on the parts, so its bytes are the same on any number of ranks. A build
that was killed goes on: parts that are whole are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import MpispeedError
from mpispeed.base.plain import printable
from mpispeed.tokens_build import joining, sources
from mpispeed.tokens_build.errors import BuildError, Faults, writing
from mpispeed.tokens_build.inputs import DOCUMENTS, FORMATS, Input, Reading, find_inputs
from mpispeed.tokens_build.joining import LENGTH, RARITY
from mpispeed.tokens_build.part_file import Part, PartFacts, PartWriter, Shape, Sizes, new_file, total_of
from mpispeed.tokens_build.sources import Parts
from mpispeed.tokens_build.tokenizer import Tokenizer, end_token, open_tokenizer
from mpispeed.tokens_build.work_folder import Job, WorkFolder, work_folder

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

PART_BYTES = 64 << 20
LEAST_PART_BYTES = 1 << 10
MOST_ROW = 1 << 24
MOST_COUNTED = 1 << 24
"""Tokens of a vocabulary whose rarity can be told."""
PLAIN = (MpispeedError, OSError)
"""Failures whose text is enough."""

COLUMNS = (LENGTH, RARITY)


@dataclass(frozen=True)
class Request:
    """A wish: the store to build, and from which files.

    Attributes:
        output: the store.
        inputs: files and folders.
        tokenizer: as of `open_tokenizer`; None: the inputs have tokens.
        is_text: the inputs are expected to have texts, not tokens.
        kind: of inputs whose names do not tell it.
        reading: the field, and what a document is.
        end: the token after each document: "auto", "none", its text or its number.
        appends_end: it is put there; else it is only told of.
        adds_special: of `open_tokenizer`.
        parses_special: of `open_tokenizer`.
        vocabulary: where there is no tokenizer: tokens are smaller. None: what the inputs can hold.
        row: documents are packed into rows of at most so many tokens; 0: they are not.
        columns: numbers for each document: some of COLUMNS.
        part_bytes: of inputs in one part.
        skips_bad: records that cannot be used are left out.
        threads: of a tokenizer.
    """

    output: Path
    inputs: Sequence[Path]
    tokenizer: str | None
    is_text: bool = True
    kind: str | None = None
    reading: Reading = field(default_factory=Reading)
    end: str = "auto"
    appends_end: bool = True
    adds_special: bool = False
    parses_special: bool = False
    vocabulary: int | None = None
    row: int = 0
    columns: Sequence[str] = ()
    part_bytes: int = PART_BYTES
    skips_bad: bool = False
    threads: int = 1


@dataclass(frozen=True)
class Report:
    """The result of a build.

    Attributes:
        path: of the store.
        is_new: False: it was complete already.
        skipped: records that were left out; `first` is the first of them.
        empty: documents without tokens, which were left out too.
        kept: parts that an earlier build had left.
    """

    path: Path
    is_new: bool
    tokens: int = 0
    documents: int = 0
    rows: int = 0
    skipped: int = 0
    first: str = ""
    empty: int = 0
    parts: int = 0
    kept: int = 0


@dataclass(frozen=True)
class _Plan:
    """Decisions of the first rank that all ranks know."""

    job: Job
    digest: str
    shape: Shape
    end: int | None
    parts: Parts
    is_open: bool
    there: Sequence[int]


def build(comm: Comm, request: Request, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Build a store, or go on with one.

    Args:
        comm: the ranks that build.
        request: the same on all of them.
        tell: takes lines about the progress, on the first rank.

    Collective over: comm.

    Raises:
        BuildError: on every rank: with what is wrong, and where.
    """
    with work_folder(request.output, is_first=comm.rank == 0) as folder:
        return _build(comm, request, folder, tell)


def _build(comm: Comm, request: Request, folder: WorkFolder, tell: Callable[[str], None]) -> Report:
    plan: _Plan | None = None
    with comm.together(BuildError, plain=PLAIN):
        check(request)
        tokenizer = None
        if request.tokenizer is not None:
            tokenizer = open_tokenizer(
                request.tokenizer, threads=request.threads, adds_special=request.adds_special,
                parses_special=request.parses_special,
            )  # fmt: skip
        if comm.rank == 0:
            plan = _planned(request, tokenizer, folder)
    plan = comm.share(plan)
    if not plan.is_open:
        if comm.rank == 0:
            folder.remove()
        return Report(request.output, is_new=False)
    with comm.together(BuildError, plain=PLAIN):
        folder.check_seen(plan.job)
        # no others are looked for: an NFS client that did not find a file may say so when another has written it
        whole = {number for number in plan.there[comm.rank :: comm.size] if _is_whole(plan, folder, number, request)}
    kept = set().union(*comm.gather_objects(whole))
    missing = [number for number in range(len(plan.parts)) if number not in kept]
    with comm.together(BuildError, plain=PLAIN):
        try:
            _write_parts(missing[comm.rank :: comm.size], request, plan, tokenizer, folder, tell)
        except BaseException:
            folder.ask_to_stop()
            raise
    facts = _facts_of_all(comm, plan, folder)
    total = total_of(facts)
    with comm.together(BuildError, plain=PLAIN):
        if not total.tokens:
            skipped = f" ({total.skipped} records were left out; {total.first})" if total.skipped else ""
            msg = f"the inputs have no document with a token{skipped}"
            raise BuildError(msg)
    told = store_facts(request, tokenizer, plan, total)
    joining.join(comm, folder, plan.shape, plan.digest, facts, request.columns, told)
    with comm.together(BuildError, plain=PLAIN):
        if comm.rank == 0:
            folder.publish()
    return Report(
        request.output, True, total.tokens, total.documents, total.rows, total.skipped, total.first, total.empty,
        len(plan.parts), len(kept),
    )  # fmt: skip


def check(request: Request) -> None:
    """Check numbers and names.

    Raises:
        BuildError: one of them cannot be.
    """
    problem = ""
    if request.part_bytes < LEAST_PART_BYTES:
        problem = f"--part-size is {request.part_bytes} bytes; expected {LEAST_PART_BYTES} at least"
    elif not 0 <= request.row <= MOST_ROW:
        problem = f"--pack is {request.row}; expected 1 to {MOST_ROW} tokens"
    elif request.vocabulary is not None and not 1 <= request.vocabulary <= 1 << 32:
        problem = f"--vocab-size is {request.vocabulary}; expected 1 to 2^32"
    elif request.kind is not None and request.kind not in FORMATS:
        problem = f"there is no format {printable(request.kind, 60)}; known are {', '.join(FORMATS)}"
    elif request.reading.documents not in DOCUMENTS:
        problem = f"documents cannot be {printable(request.reading.documents, 60)}; known are {', '.join(DOCUMENTS)}"
    elif len(set(request.columns)) < len(request.columns):
        problem = f"a column is named twice: {printable(', '.join(request.columns), 60)}"
    unknown = [name for name in request.columns if name not in COLUMNS]
    if unknown:
        problem = f"there is no column {printable(unknown[0], 60)} to build; known are {', '.join(COLUMNS)}"
    if not request.output.name or request.output.name in (".", ".."):
        problem = f"{printable(str(request.output))} is no name of a file"
    if problem:
        raise BuildError(problem)


def _planned(request: Request, tokenizer: Tokenizer | None, folder: WorkFolder) -> _Plan:
    inputs = find_inputs(request.inputs, request.kind)
    shape, end = _shape(request, tokenizer, inputs)
    parts = sources.cut_parts(inputs, request.reading, request.part_bytes)
    job = Job(_arguments(request, tokenizer, shape, end), inputs, len(parts))
    is_open = folder.begin(job)
    return _Plan(job, job.digest, shape, end, parts, is_open, folder.numbers() if is_open else ())


def _shape(request: Request, tokenizer: Tokenizer | None, inputs: Sequence[Input]) -> tuple[Shape, int | None]:
    """What parts have, and the token that ends documents."""
    if tokenizer is None:
        vocabulary = request.vocabulary or sources.most_vocabulary(inputs)
        end = _end_number(request.end, vocabulary)
    else:
        vocabulary, end = tokenizer.vocabulary, end_token(tokenizer, request.end)
    counts = RARITY in request.columns
    if counts and vocabulary > MOST_COUNTED:
        msg = f"the column {RARITY} needs a vocabulary of at most {MOST_COUNTED} tokens; say its size with --vocab-size"
        raise BuildError(msg)
    dtype = "u2" if vocabulary <= 1 << 16 else "u4"
    return Shape(dtype, vocabulary, end if request.appends_end else None, request.row, counts), end


def _end_number(wish: str, vocabulary: int) -> int | None:
    if wish in ("auto", "none"):
        return None
    if wish.isascii() and wish.isdecimal() and int(wish) < vocabulary:
        return int(wish)
    msg = f"--eos is {printable(wish)}; expected none, or the number of a token below {vocabulary}"
    raise BuildError(msg)


def _arguments(request: Request, tokenizer: Tokenizer | None, shape: Shape, end: int | None) -> dict[str, Any]:
    """All that the bytes of the store depend on besides the inputs."""
    return {
        "command": "build" if request.is_text else "import",
        "--tokenizer": None if tokenizer is None else f"{tokenizer.name} ({tokenizer.digest})",
        "--special-tokens": request.adds_special,
        "--parse-special": request.parses_special,
        "--eos": end,
        "--append-eos": request.appends_end,
        "--vocab-size": shape.vocabulary,
        "--field": request.reading.field,
        "--documents": request.reading.documents,
        "--pack": request.row,
        "--columns": list(request.columns),
        "--part-size": request.part_bytes,
    }


def store_facts(request: Request, tokenizer: Tokenizer | None, plan: _Plan, total: Sizes) -> dict[str, Any]:
    """What the store tells of itself; the same wherever its inputs lie."""
    inputs, is_known = plan.job.inputs, tokenizer is not None or request.vocabulary is not None
    return {
        "tokenizer": None if tokenizer is None else tokenizer.name,
        "tokenizer_digest": None if tokenizer is None else tokenizer.digest,
        "vocabulary_size": plan.shape.vocabulary if is_known else None,
        "eos": plan.end,
        "row_length": plan.shape.row or None,
        "source": {
            "files": len(inputs),
            "kinds": sorted({one.kind for one in inputs}),
            "bytes": sum(one.size for one in inputs),
            "left_out": total.skipped,
            "empty": total.empty,
        },
    }


# -- parts -------------------------------------------------------------------------------------------------------------


def _is_whole(plan: _Plan, folder: WorkFolder, number: int, request: Request) -> bool:
    """Whether a part of an earlier build is there; one without bad records is the same with and without --skip-bad."""
    try:
        with Part(folder.part(number), plan.shape, plan.digest) as part:
            return request.skips_bad or not part.facts.skipped
    except (BuildError, OSError):
        return False


def _write_parts(
    numbers: Sequence[int],
    request: Request,
    plan: _Plan,
    tokenizer: Tokenizer | None,
    folder: WorkFolder,
    tell: Callable[[str], None],
) -> None:
    """Write these parts, until a rank has failed."""
    last = time.monotonic()
    for number in numbers:
        if folder.is_stopping():
            return
        with writing(folder.part(number)):
            _write_part(folder.part(number), number, request, plan, tokenizer)
        if time.monotonic() - last > 10:
            last = time.monotonic()
            tell(f"{folder.done()} of {len(plan.parts)} parts")


def _write_part(path: Path, number: int, request: Request, plan: _Plan, tokenizer: Tokenizer | None) -> PartFacts:
    """Read, tokenise and write one part.

    Raises:
        BuildError: an input cannot be used.
        OSError: the part cannot be written.
    """
    faults = Faults(are_skipped=request.skips_bad)
    inputs = plan.job.inputs
    with new_file(path) as file:
        writer = PartWriter(file, plan.shape)
        for piece in plan.parts[number]:
            where = printable(inputs[piece.input].path)
            for batch in sources.read(inputs, piece, request.reading, faults):
                if not isinstance(batch, list):
                    tokens, lengths = batch.tokens, batch.lengths
                elif tokenizer is None:
                    msg = f"{where} has texts, not tokens; mpispeed data build makes tokens of them"
                    raise BuildError(msg)
                else:
                    tokens, lengths = tokenizer.encode(batch)
                try:
                    writer.add(tokens, lengths)
                except BuildError as failure:
                    msg = f"{where}: {failure}"
                    raise BuildError(msg) from failure
        return writer.finish(number, plan.digest, faults.count, faults.first)


def _facts_of_all(comm: Comm, plan: _Plan, folder: WorkFolder) -> list[PartFacts]:
    """The sizes of all parts, in order. Collective over: comm."""
    own = []
    with comm.together(BuildError, plain=PLAIN):
        for number in range(comm.rank, len(plan.parts), comm.size):
            with Part(folder.part(number), plan.shape, plan.digest) as part:
                own.append(part.facts)
    return sorted((each for facts in comm.gather_objects(own) for each in facts), key=lambda each: each.number)
