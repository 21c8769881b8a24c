"""The statistics of a checkpoint as one HTML file; no script, style, font or image comes from outside.

Names come from the checkpoint and are text of strangers: all are escaped, and the page allows no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpispeed.base.plain import printable
from mpispeed.ckpt.tools import stats_drift

_STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1b1f24;--soft:#5c6670;--line:#d8dde2;--bar:#2f6fb0}
@media (prefers-color-scheme:dark){:root{--back:#15181c;--text:#e4e8ec;--soft:#98a2ad;--line:#343b43;--bar:#6fa8dc}}
body{margin:1.5rem;background:var(--back);color:var(--text);font:14px/1.4 system-ui,sans-serif}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}p{color:var(--soft);max-width:60rem}
.wide{overflow-x:auto}table{border-collapse:collapse}th,td{padding:.2rem .6rem;border-bottom:1px solid var(--line)}
td{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
th{position:sticky;top:0;background:var(--back);text-align:right;white-space:nowrap}
th:first-child,th.text,td.text,td.name{text-align:left}td.text{white-space:pre}
th:first-child,td.name{position:sticky;left:0;background:var(--back)}
td.name{white-space:pre-wrap;overflow-wrap:break-word;min-width:min(18rem,38vw);max-width:36rem}
th button{all:unset;cursor:pointer;font-weight:600}th button:focus-visible{outline:2px solid var(--bar)}
th[aria-sort=ascending] button::after{content:" \\25B2"}th[aria-sort=descending] button::after{content:" \\25BC"}
svg{width:150px;height:26px;vertical-align:middle;fill:var(--bar)}
"""

_SCRIPT = """
for (const head of document.querySelectorAll("table.sortable th")) {
  const button = head.querySelector("button");
  if (button) button.addEventListener("click", () => {
    const table = head.closest("table"), place = head.cellIndex;
    const down = head.getAttribute("aria-sort") !== "descending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = row => row.cells[place].dataset.v, side = down ? -1 : 1;
    const rows = Array.from(table.tBodies[0].rows);
    rows.sort((a, b) => {
      const x = key(a), y = key(b);
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
      const both = Number(x) - Number(y);
      return side * (Number.isNaN(both) ? x.localeCompare(y, undefined, {numeric: true}) : both);
    });
    table.tBodies[0].append(...rows);
  });
}
"""

_NUMBERS = ("count", "min", "max", "mean", "std", "rms", "zeros", "nan", "inf")
#: columns of words, which begin at the left
_TEXTS = ("slot", "shape", "dtype", "tag", "note")
_TEXT_CLASS = ' class="text"'
_HISTOGRAM_HEIGHT = 20
#: a change this many times smaller than the largest has no colour
_COLOUR_RANGE = 1e4
#: more of the colour would make the numbers on it hard to read
_DEEPEST = 0.6


def page(report: Mapping[str, Any]) -> str:
    """The whole file as text, to be written as UTF-8.

    Args:
        report: with tag, step, params and layers as `stats.statistics` gives them, and drift as `stats_drift.drift`
            gives it, or None.
    """
    title = f"Checkpoint {report['tag']}, step {report['step']}"
    drift = report.get("drift")
    parts = [f"<h1>{_text(title)}</h1>"]
    parts.append(
        f"<p>{len(report['params'])} tensors. NaN and infinite elements are counted and left out of the other numbers. "
        "Histograms run from min to max; heights are logarithmic. The update ratio is an estimate: "
        "lr &#183; rms(exp_avg / (sqrt(exp_avg_sq) + eps)) / rms(weight).</p>"
    )
    if drift:
        parts += _drift_part(drift)
    parts.append("<h2>Layers</h2>")
    parts.append(_table(("layer", "slot", "tensors", *_NUMBERS), map(_layer_cells, report["layers"])))
    parts.append("<h2>Tensors</h2>")
    parts.append(_params_table(report["params"], drift))
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + f"\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _text(value: object) -> str:
    """Escaped text; signs that do not show are written as escapes, as a browser would drop or obey them."""
    return html.escape(printable(str(value)), quote=True)


def _number(value: float | None) -> str:
    if value is None:
        return "<td>-</td>"
    shown = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return f'<td data-v="{value!r}">{shown}</td>'


def _name(value: object) -> str:
    """The first cell of a row: a name, which may be broken behind its dots, and anywhere if it has none."""
    return f'<td class="name" data-v="{_text(value)}">{_text(value).replace(".", ".<wbr>")}</td>'


def _words(value: object) -> str:
    return f'<td class="text" data-v="{_text(value)}">{_text(value)}</td>'


def _table(head: Sequence[str], rows: Iterable[str]) -> str:
    """A table whose columns sort; those with an empty head do not."""
    heads = "".join(
        f'<th scope="col"{_TEXT_CLASS if word in _TEXTS else ""}><button type="button">{_text(word)}</button></th>'
        if word
        else "<th></th>"
        for word in head
    )
    body = "\n".join(f"<tr>{cells}</tr>" for cells in rows)
    return (
        f'<div class="wide"><table class="sortable"><thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>'
        "</table></div>"
    )


def _layer_cells(row: Mapping[str, Any]) -> str:
    counts = "".join(_number(row[key]) for key in ("tensors", *_NUMBERS))
    return _name(row["layer"]) + _words(row["slot"]) + counts


def _params_table(rows: Sequence[Mapping[str, Any]], drift: Mapping[str, Any] | None) -> str:
    head = ["name", "slot", "shape", "dtype", *_NUMBERS, "update ratio"]
    last: dict[str, Mapping[str, Any]] = {}
    if drift:
        head += ["change", "change since first"]
        tag = drift["tags"][-1]["tag"]
        last = {row["name"]: row for row in drift["params"] if row["tag"] == tag}
    lines = []
    for row in rows:
        shape = "x".join(map(str, row["shape"])) or "scalar"
        cells = _name(row["name"]) + "".join(map(_words, (row["slot"], shape, row["dtype"])))
        cells += "".join(_number(row[key]) for key in (*_NUMBERS, "update_ratio"))
        if drift:
            is_weight = row["name"] in last and row["slot"] in ("master", "weight16")
            of = last[row["name"]] if is_weight else {}
            cells += "".join(_number(of.get(f"{role}_change")) for role in stats_drift.ROLES)
        lines.append(cells + f"<td>{_sparkline(row['histogram'])}</td>")
    return _table((*head, ""), lines)


def _sparkline(histogram: Mapping[str, Any] | None) -> str:
    if histogram is None:
        return ""
    counts = histogram["counts"]
    top = math.log1p(max(counts))
    steps = "".join(f"V{_HISTOGRAM_HEIGHT * (1 - math.log1p(count) / top):.2f}h1" for count in counts)
    title = f"{histogram['low']:.4g} to {histogram['high']:.4g}, {len(counts)} bins, at most {max(counts)} in one"
    return (
        f'<svg viewBox="0 0 {len(counts)} {_HISTOGRAM_HEIGHT}" preserveAspectRatio="none" role="img">'
        f'<title>{title}</title><path d="M0 {_HISTOGRAM_HEIGHT}{steps}V{_HISTOGRAM_HEIGHT}z"/></svg>'
    )


def _drift_part(drift: Mapping[str, Any]) -> list[str]:
    parts = []
    for role, words in zip(stats_drift.ROLES, ("since the tag before", "since the first tag"), strict=True):
        parts.append(f"<h2>Relative change of the layers {words}</h2>")
        parts.append(_heat_map(drift, f"{role}_change"))
    noted = [row for row in drift["params"] if row["note"]]
    if noted:
        parts.append("<h2>Parameters that are not in every tag or have another shape</h2>")
        lines = (_name(row["name"]) + "".join(_words(row[key]) for key in ("tag", "note")) for row in noted)
        parts.append(_table(("name", "tag", "note"), lines))
    return parts


def _heat_map(drift: Mapping[str, Any], column: str) -> str:
    """Layers by tags; the deeper the colour, the larger the change, on a logarithmic scale."""
    labels, layers, values = stats_drift.heat_map(drift, column)
    top = max((value for row in values for value in row if value), default=0.0)
    heads = "".join(f'<th scope="col">{_text(label)}</th>' for label in labels)
    lines = [f"<table><thead><tr><th>layer</th>{heads}</tr></thead>\n<tbody>"]
    for layer, row in zip(layers, values, strict=True):
        cells = "".join(_heat_cell(value, top) for value in row)
        lines.append(f"<tr>{_name(layer)}{cells}</tr>")
    return '<div class="wide">' + "\n".join(lines) + "\n</tbody></table></div>"


def _heat_cell(value: float | None, top: float) -> str:
    if value is None:
        return "<td>-</td>"
    part = 1 + math.log(value / top) / math.log(_COLOUR_RANGE) if value else 0.0
    return f'<td style="background:rgba(224,112,32,{max(0.0, part) * _DEEPEST:.3f})">{value:.3g}</td>'
