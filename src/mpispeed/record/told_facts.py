"""Facts of a run on a few lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpispeed.base.plain import printable
from mpispeed.base.units import format_count

_MOST_SIGNS = 200
_LAUNCHED = "mpispeed.launch.rank"
_VERSIONS = ("mpispeed", "torch", "python", "mpi4py", "h5py", "mpi")
_JOB = (("job", "SLURM_JOB_ID"), ("name", "SLURM_JOB_NAME"), ("partition", "SLURM_JOB_PARTITION"),
        ("nodes", "SLURM_JOB_NODELIST"))  # fmt: skip


def fact_lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Labels and lines: the command, the job, the model, the plan, versions. Facts of others have any values."""
    command, model, ranks, plan = (_object(facts, name) for name in ("command", "model", "ranks", "plan"))
    versions, job = _object(facts, "versions"), _object(facts, "slurm")
    lines = [
        ("command", _command(command.get("words"))),
        ("folder", _text(command.get("folder"))),
        ("job", ", ".join(f"{label} {_text(job[name])}" for label, name in _JOB if name in job)),
        ("model", ", ".join(filter(None, [_text(model.get("class")), _count(model.get("parameters"))]))),
        ("nodes", _text(ranks.get("nodes"))),
        *((_text(name), _text(value)) for name, value in plan.items()),
        ("versions", ", ".join(f"{name} {_text(versions[name])}" for name in _VERSIONS if name in versions)),
    ]
    return [(printable(label, 20), printable(text, _MOST_SIGNS)) for label, text in lines if text]


def _command(words: Any) -> str:
    """The words from the script on, where the launcher's can be told from them."""
    if not isinstance(words, list):
        return ""
    return " ".join(map(str, words[words.index(_LAUNCHED) + 1 :] if _LAUNCHED in words else words))


def _object(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = facts.get(name)
    return found if isinstance(found, Mapping) else {}


def _text(value: Any) -> str:
    return "" if value is None else " ".join(str(value)[: 2 * _MOST_SIGNS].split())


def _count(value: Any) -> str:
    return f"{format_count(value)} parameters" if isinstance(value, int) and 0 < value < 1 << 60 else ""
