"""The table of all pairs: its data beside the test, and the page made of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.helpers.feature import PROMISES
from tests.helpers.features import FEATURES, all_pairs, stage_of

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "mpi" / "engine" / "pairs.json"
PAGE = ROOT / "docs" / "reference" / "pairs.md"

Fields = Mapping[str, str]
Table = dict[tuple[str, str], Fields]

SIGNS = {"works bits": "=", "works near": "~", "works runs": "+", "no effect": "o", "refused": "x",
         "meaningless": ".", "fails": "!"}  # fmt: skip
HEAD = """# Features together

Which features an engine can have together. `python tools/pairs.py` makes this page: it trains a small GPT with every
pair on 4 ranks (two nodes of two) for three steps, where one of the pair is about checkpoints with another engine for
the last one, and looks that both are in effect. `make test` tries each feature with one partner, `make matrix` tries
all pairs.

| sign | what came of it |
|---|---|
| = | works: losses have the bits of a run without one of the two |
| ~ | works: losses are those of a run without one of the two, up to rounding |
| + | works: losses are finite; both change the numbers, or one cannot be without the other, or nothing is trained |
| o | one has no effect beside the other, and a sentence says so |
| x | refused, with a sentence |
| . | cannot be together by what they are |
| ! | fails: a defect |

"Up to rounding" is 1e-4 of a loss in fp32, and 3e-2 where numbers are computed or sent in 16 bits or fewer. The ZeRO
stage of a pair is that of the pair, or the lowest at which both can be. Three and more features together are not in
this table.
"""
TITLES = {
    "fails": ("Failures", "Defects."),
    "refused": ("Refused", "What the error says, and to which pairs."),
    "no effect": ("Without effect", "What a warning says, and with which pairs."),
    "meaningless": ("Not together", "Why, and which pairs."),
}


def load() -> Table:
    """The data that are there, by the names of pairs."""
    return {(first, second): fields for first, second, fields in json.loads(DATA.read_text())}


def save(found: Table) -> None:
    """Write the data, a line for each pair, in the order of features."""
    names = [feature.name for feature in FEATURES]
    rows = sorted(found.items(), key=lambda item: [names.index(name) for name in item[0]])
    lines = [json.dumps([*pair, dict(fields)], ensure_ascii=False) for pair, fields in rows]
    DATA.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def differs(said: Fields | None, now: Fields) -> Fields | str | None:
    """What the table says of a pair where it is not what came of it now; None where it is.

    Losses may be nearer than the table says.
    """
    if said is None:
        return "nothing"
    kept = [PROMISES.index(fields.get("kept", PROMISES[-1])) for fields in (now, said)]
    same = all(said.get(key) == now.get(key) for key in ("result", "text"))
    return None if same and kept[0] <= kept[1] else said


def counted(found: Table) -> str:
    """Counts of outcomes of pairs."""
    pairs = [fields for (first, second), fields in found.items() if first != second]
    counts = Counter(fields["result"] for fields in pairs)
    return f"{len(pairs)} pairs: " + ", ".join(f"{count} {result}" for result, count in counts.most_common())


def sign(fields: Fields) -> str:
    """Of an outcome."""
    return SIGNS.get(f"{fields['result']} {fields.get('kept', '')}".strip(), "+")


def written(table: Table) -> str:
    """The page."""
    missing = [pair for pair in ((a.name, b.name) for a, b in all_pairs()) if pair not in table]
    if missing:
        msg = f"{len(missing)} pairs are not in the data, the first is {missing[0]}; run tools/pairs.py"
        raise ValueError(msg)
    parts = [HEAD, f"{counted(table)}.\n", "\n".join(_matrix(table)) + "\n"]
    for result, (title, what) in TITLES.items():
        lines = list(_sentences(table, result))
        if lines:
            parts.append(f"## {title}\n\n{what}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def write(table: Table) -> None:
    """Write the page."""
    PAGE.write_text(written(table))


def _matrix(table: Table) -> Iterator[str]:
    """A row for each feature, with those before it; alone, and at which ZeRO stage."""
    numbers = range(1, len(FEATURES) + 1)
    yield "| | feature | alone | at stage | " + " | ".join(map(str, numbers)) + " |"
    yield "|" + "---|" * (len(FEATURES) + 4)
    for number, feature in zip(numbers, FEATURES, strict=True):
        signs = [sign(table[other.name, feature.name]) for other in FEATURES[: number - 1]]
        cells = signs + [""] * (len(FEATURES) - len(signs))
        alone = sign(table.get((feature.name, feature.name), {"result": "works"}))
        yield "| " + " | ".join([str(number), feature.name, alone, str(stage_of(feature)), *cells]) + " |"


def _sentences(table: Table, result: str) -> Iterator[str]:
    by_text: dict[str, list[tuple[str, str]]] = {}
    for pair, fields in table.items():
        if fields["result"] == result:
            by_text.setdefault(fields.get("text", ""), []).append(pair)
    for text, pairs in by_text.items():
        yield f"- {_quoted(text)}: {'; '.join(_grouped(pairs))}"


def _quoted(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<").replace("_", "\\_").replace("*", "\\*").strip(".:")


def _grouped(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Pairs with the same first feature in one clause."""
    by_first: dict[str, list[str]] = {}
    for first, second in pairs:
        by_first.setdefault(first, []).append("alone" if first == second else second)
    for first, seconds in by_first.items():
        yield f"**{first}** with {', '.join(seconds)}"


def pairs_of_page(text: str) -> list[tuple[str, str, str]]:
    """(first, second, sign) of all cells of the page's matrix."""
    found: list[tuple[str, str, str]] = []
    names: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|") or not cells[0].isdigit():
            continue
        names.append(cells[1])
        found += [(name, cells[1], one) for name, one in zip(names, cells[4:], strict=False) if one]
    return found
