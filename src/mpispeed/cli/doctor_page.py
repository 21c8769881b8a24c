"""The doctor's report for a terminal, and as a page that needs no other file."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence

from mpispeed.launch.findings import Finding, Verdict

MARKS = {Verdict.OK: "ok", Verdict.INFO: "-", Verdict.WARN: "WARN", Verdict.FAIL: "FAIL"}

_STYLE = """
body { font: 15px/1.45 sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; padding: 1.2em .6em .3em; border-bottom: 2px solid #888; }
td { padding: .3em .6em; border-bottom: 1px solid #ddd; vertical-align: top; }
td.name { white-space: nowrap; }
.mark { display: inline-block; min-width: 3.2em; text-align: center; border-radius: .7em; color: #fff; }
.ok { background: #2e7d32; } .info { background: #607d8b; }
.warn { background: #c77700; } .fail { background: #c62828; }
.cure { color: #555; } .place { color: #555; font-style: italic; }
"""


def as_text(findings: Sequence[Finding]) -> str:
    """A line for each finding, below headings; cures follow their lines."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines: list[str] = []
    for area, rows in _by_area(findings):
        lines += ["", f"{area}:"] if lines else [f"{area}:"]
        for finding in rows:
            place = f"[{finding.place}] " if finding.place else ""
            lines.append(f"{MARKS[finding.verdict]:6}{finding.name:{width}}  {place}{finding.detail}".rstrip())
            if finding.cure:
                lines.append(f"{'':6}{'':{width}}  -> {finding.cure}")
    lines += ["", _sum_up(findings)]
    return "\n".join(lines)


def as_page(title: str, findings: Sequence[Finding]) -> str:
    """The report as HTML."""
    summary = f"{_sum_up(findings)}; {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
    body = []
    for area, rows in _by_area(findings):
        body.append(f'<tr><th colspan="3">{html.escape(area)}</th></tr>')
        body += [_row(finding) for finding in rows]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style></head>\n<body>\n<h1>{html.escape(title)}</h1>\n"
        f"<p>{html.escape(summary)}</p>\n<table>\n" + "\n".join(body) + "\n</table>\n</body></html>\n"
    )


def _row(finding: Finding) -> str:
    place = f'<span class="place">{html.escape(finding.place)}: </span>' if finding.place else ""
    cure = f'<br><span class="cure">&rarr; {html.escape(finding.cure)}</span>' if finding.cure else ""
    verdict = finding.verdict.value
    return (
        f'<tr><td><span class="mark {verdict}">{verdict}</span></td><td class="name">{html.escape(finding.name)}</td>'
        f"<td>{place}{html.escape(finding.detail)}{cure}</td></tr>"
    )


def _by_area(findings: Sequence[Finding]) -> list[tuple[str, list[Finding]]]:
    areas: dict[str, list[Finding]] = {}
    for finding in findings:
        areas.setdefault(finding.area, []).append(finding)
    return list(areas.items())


def _sum_up(findings: Sequence[Finding]) -> str:
    words = {Verdict.FAIL: "fail", Verdict.WARN: "warn", Verdict.OK: "good"}
    return ", ".join(f"{word}: {sum(f.verdict is verdict for f in findings)}" for verdict, word in words.items())
