"""Pages of the benchmarks' records: tables and charts of each file in benchmarks/results."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from docpages import charts
from docpages.markdown import code, escaped, table, toctree

FOLDER = "benchmarks"
PEER = re.compile(
    r"ddp|fsdp|torch|gloo|fio\b|raw|^copy|safetensors|datasets|arrow|memory map|transformers|eager|dense|plain|"
    r"deepspeed|all_to_all|disk alone|wire|^mpi$|foreach|fused$|loop|baseline|explicit|sdpa|pure|messages|alone",
    re.IGNORECASE,
)
"""Names of what is no work of ours: other libraries, and limits of the machine."""

CHARTED = (
    "tokens_per_second",
    "seconds",
    "ms",
    "peak",
    "milliseconds",
    "MiB_per_second",
    "microseconds",
    "step_seconds",
)
MOST_COLUMNS = 9
MOST_BARS = 24
MOST_DEPTH = 5
MOST_WHOLE = 22
NARROW = "\N{NO-BREAK SPACE}"
ACROSS = ("step", "steps")

_ROW = re.compile(r"^\| `([\w/]+)\.py` \| (.*) \|$", re.MULTILINE)
_KINDS = ((re.compile(r"seconds$"), "s"), (re.compile(r"(^|[ _])ms$|milliseconds"), "ms"), (re.compile(r"micro"), "µs"))
_BYTES = re.compile(r"bytes|^peak|^idle$|^shared$|^accounted|_memory$")


def pages(root: Path) -> Iterator[tuple[str, str]]:
    """(page, text) of all records and their index.

    Args:
        root: the repository.
    """
    compares = dict(_ROW.findall((root / "benchmarks" / "README.md").read_text(encoding="utf-8")))
    rows, names = [], []
    for path in sorted((root / "benchmarks" / "results").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        script = script_of(path.stem, record, compares)
        text = compares.get(script, "")
        names.append(path.stem)
        rows.append((f"[{path.stem}]({path.stem}.md)", text, day(record), whole(machine(record))))
        yield f"{FOLDER}/{path.stem}", "\n".join(page(path.stem, record, script, text))
    head = [
        "# Benchmarks",
        "",
        "What was measured, beside peers or limits of the same machine in the same run; each page has the record's",
        "tables and charts. [How they are run](scripts.md). Figures are of one machine at one time: its name, the date",
        "and the commit stand on each page. Grey bars are peers and limits.",
        "",
    ]
    yield (
        f"{FOLDER}/index",
        "\n".join(
            [
                *head,
                *table(("record", "compares", "date", "machine"), rows),
                *toctree([f"{FOLDER}/scripts", *(f"{FOLDER}/{name}" for name in names)]),
            ]
        ),
    )


def script_of(stem: str, record: Mapping[str, Any], compares: Mapping[str, str]) -> str:
    """The script, without its suffix, that made a record; "" if nothing tells."""
    said = str(record.get("benchmark", "")).split(" ")[0].replace("-", "_")
    for script in compares:
        if said in (script, script.rpartition("/")[2]):
            return script
    words = stem.replace("-", "_")
    fitting = [script for script in compares if words in (script.replace("/", "_"), script.rpartition("/")[2])]
    return fitting[0] if fitting else ""


def day(record: Mapping[str, Any]) -> str:
    """When a record was made, as `27 Nov 2026`, which breaks nowhere."""
    if "date" not in record:
        return whole("not kept")
    return whole(datetime.fromisoformat(str(record["date"])).strftime("%d %b %Y").lstrip("0"))


def whole(text: str) -> str:
    """A short text that breaks nowhere."""
    return text.replace(" ", NARROW) if len(text) <= MOST_WHOLE else text


def machine(record: Mapping[str, Any]) -> str:
    """Where a record was made."""
    return str(record.get("device") or record.get("machine") or "not kept")


def page(stem: str, record: Mapping[str, Any], script: str, compares: str) -> Iterator[str]:
    """One record: where and when, with which options, then all it has."""
    yield f"# {stem}\n"
    if compares:
        yield f"Compares {compares}.\n"
    facts = [("machine", machine(record)), ("date", str(record.get("date", "not kept")))]
    facts += [(key, str(record[key])) for key in ("commit", "torch", "cuda", "kernel") if key in record]
    facts += [("script", code(f"benchmarks/{script}.py"))] if script else []
    options = {key: value for key, value in record.get("options", {}).items() if key != "goals"}
    facts += [(key, options[key] if isinstance(options[key], str) else json.dumps(options[key])) for key in options]
    yield from table(("what", "value"), [(escaped(key), value) for key, value in facts])
    known = {"benchmark", "date", "commit", "machine", "device", "torch", "cuda", "kernel", "options", "results"}
    shown = {key: value for key, value in record.items() if key not in known and not is_empty(value)}
    if "results" in record:
        shown = (
            {**record["results"], **shown}
            if isinstance(record["results"], dict)
            else {"results": record["results"], **shown}
        )
    yield from part(shown, 2)


def is_empty(value: Any) -> bool:
    """True for what has nothing to show."""
    return value is None or value in ({}, [])


def part(found: Mapping[str, Any], level: int) -> Iterator[str]:
    """A part of a record: a table of rows alike, a table of single values, and parts of their own for the rest."""
    curves = curves_of(found)
    if curves:
        yield from curves
    values = {name: value for name, value in found.items() if is_value(value)}
    deeper = {name: as_mapping(value) for name, value in found.items() if not is_value(value) and not is_empty(value)}
    rows = {name: flat for name, value in deeper.items() if (flat := flattened(value)) is not None}
    alike = rows if len(rows) >= 2 and len(columns_of(rows)) <= MOST_COLUMNS and not is_turned(rows) else {}
    if alike:
        yield from row_table(alike)
    if values:
        yield from value_table(values)
    for name, value in deeper.items():
        if name not in alike:
            yield f"{'#' * min(level, MOST_DEPTH)} {escaped(name)}\n"
            yield from part(value, level + 1)


def is_value(found: Any) -> bool:
    """True for a number, a text, a claim, or numbers of several rounds."""
    if isinstance(found, list):
        return bool(found) and all(isinstance(each, (int, float, str, bool)) for each in found)
    return isinstance(found, (int, float, str, bool)) or found is None


def as_mapping(found: Any) -> Mapping[str, Any]:
    """A list of rows by what tells them apart: their names, else their texts and whole numbers, else their place."""
    if isinstance(found, Mapping):
        return found
    named: dict[str, Any] = {}
    for at, each in enumerate(found, 1):
        if not isinstance(each, Mapping):
            named[str(at)] = {"value": each}
            continue
        words = (
            [str(each["name"])]
            if "name" in each
            else [
                f"{value}" if isinstance(value, str) else f"{key} {value}"
                for key, value in each.items()
                if isinstance(value, (str, int)) and not isinstance(value, bool) and key != "bytes"
            ]
        )
        label = ", ".join(words) or str(at)
        rest = {
            key: value
            for key, value in each.items()
            if not (isinstance(value, (str, int)) and not isinstance(value, bool) and key != "bytes")
        }
        named[label if label not in named else f"{label} ({at})"] = rest
    return named


def flattened(found: Mapping[str, Any], prefix: str = "") -> dict[str, Any] | None:
    """Values of a row by column, those of inner mappings with their names before; None if there are too many."""
    flat: dict[str, Any] = {}
    for name, value in found.items():
        full = f"{prefix}{name}"
        if is_value(value):
            flat[full] = value
        elif isinstance(value, Mapping) and not prefix:
            inner = flattened(value, f"{name}: ")
            if inner is None:
                return None
            flat |= inner
        elif not is_empty(value):
            return None
    return flat if 0 < len(flat) <= MOST_COLUMNS else None


def is_turned(rows: Mapping[str, Mapping[str, Any]]) -> bool:
    """True for kinds of times, each with rounds of ours and of peers: each has a chart of its own."""
    return all(is_rounds(value) for row in rows.values() for value in row.values()) and any(
        PEER.search(name) for name in columns_of(rows)
    )


def columns_of(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """All columns in the order in which they first come."""
    return list(dict.fromkeys(name for row in rows.values() for name in row))


def row_table(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A chart of the first column that has a time, a rate or a peak of memory; then all columns."""
    columns = columns_of(rows)
    charted = next((name for key in CHARTED for name in columns if name == key or name.endswith(f": {key}")), None)
    if charted and len(rows) <= MOST_BARS:
        yield from bar_chart(charted, {name: row.get(charted) for name, row in rows.items()})
    head = ["", *(escaped(name.replace("_", " ")) for name in columns)]
    yield from table(
        head,
        [[whole(escaped(name)), *(shown(key, row.get(key)) for key in columns)] for name, row in rows.items()],
        "l" + "r" * len(columns),
    )


def value_table(values: Mapping[str, Any]) -> Iterator[str]:
    """Single values below each other, with a chart where they are rounds of the same kind."""
    rounds = {name: value for name, value in values.items() if is_rounds(value) and name not in ACROSS}
    if len(rounds) >= 2 and len(rounds) == len(values) <= MOST_BARS:
        yield from bar_chart("", rounds)
    yield from table(
        ("what", "value"),
        [(escaped(name.replace("_", " ")), shown(name, value)) for name, value in values.items()],
        "lr",
    )


def is_rounds(value: Any) -> bool:
    """True for numbers of several rounds."""
    return isinstance(value, list) and all(
        isinstance(each, (int, float)) and not isinstance(each, bool) for each in value
    )


def bar_chart(key: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Bars of the values that are numbers, or medians of rounds."""
    numbers = {
        name: (float(middle), shown(key, value if not is_rounds(value) else middle))
        for name, value in values.items()
        if (middle := median(value)) is not None and middle >= 0
    }
    if len(numbers) >= 2:
        if key:
            yield f"{escaped(key.replace('_', ' '))}:\n"
        yield from charts.bars(numbers, [name for name in numbers if PEER.search(name)])


def median(value: Any) -> float | None:
    """The number, or the median of rounds; None for anything else."""
    if is_rounds(value):
        return statistics.median(value)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def shown(key: str, value: Any) -> str:
    """A value as text: rounds by their median and range, bytes as MiB, with the unit that the name tells."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and is_rounds(value) and len(value) > 1:
        middle, low, high = (number(key, each) for each in (statistics.median(value), min(value), max(value)))
        unit = re.sub(r"^[\d.,e+-]+", "", middle)
        return f"{whole(middle)} ({whole(f'{low.removesuffix(unit)} to {high.removesuffix(unit)}')})"
    if isinstance(value, list):
        return ", ".join(shown(key, each) for each in value)
    return number(key, value) if isinstance(value, (int, float)) else escaped(str(value))


def number(key: str, value: float) -> str:
    """A number to four places that count."""
    last = key.rpartition(": ")[2]
    if _BYTES.search(last) and "per_second" not in last and abs(value) >= 2**16:
        return f"{value / 2**20:,.1f} MiB"
    unit = next(
        (f" {unit}" for kind, unit in _KINDS if kind.search(last) and "per" not in last and "_of_" not in last), ""
    )
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}{unit}"
    return f"{value:.4g}{unit}"


def curves_of(found: Mapping[str, Any]) -> list[str]:
    """A chart of what has a list of steps beside lists as long, one line for each name; [] where nothing has."""
    series: dict[str, list[tuple[float, float]]] = {}
    up = ""
    for name, value in found.items():
        inner = value
        if isinstance(value, Mapping) and isinstance(value.get("runs"), list) and value["runs"]:
            inner = value["runs"][0]
        if not isinstance(inner, Mapping):
            return []
        across = next((key for key in ACROSS if is_rounds(inner.get(key))), None)
        lists = [
            key
            for key, each in inner.items()
            if key != across and is_rounds(each) and across and len(each) == len(inner[across])
        ]
        if not lists:
            return []
        key = next((key for key in lists if "loss" in key or "valid" in key), lists[0])
        up = key
        series[name] = list(zip(inner[across], inner[key], strict=True))
    return [f"{escaped(up.replace('_', ' '))} by step:\n", *charts.curves("step", up, series)] if series else []
