"""Acceptance of settings for a run: all mistakes, missing keys and sizes that do not divide, in one message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpispeed.base.errors import ConfigError
from mpispeed.config.batch import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from mpispeed.config.derive import batch_sizes, ranks_per_model
from mpispeed.config.load import LoadedConfig, judge, read_source
from mpispeed.config.overlay import merged
from mpispeed.config.problems import Problem, refuse
from mpispeed.config.root import Config
from mpispeed.config.text import decode
from mpispeed.config.unavailable import find_unavailable

_BATCH = {TRAIN_BATCH, MICRO_BATCH, ACCUMULATION}


def load_for_run(source: str | Path | Mapping[str, Any], ranks: int | None = None, sharing: int = 0) -> LoadedConfig:
    """As `load`; refuses settings that a run would refuse.

    Args:
        source: path of a JSON file, a dict, or the URL-safe base64 of a JSON text.
        ranks: as for `accept`.
        sharing: as for `accept`.

    Raises:
        ConfigError: lists every mistake of the source, one per line, each with its path.
    """
    content, where = read_source(source)
    return accept(content, where, ranks, sharing)


def accept(
    content: str | Mapping[str, Any], where: str, ranks: int | None = None, sharing: int = 0
) -> LoadedConfig:  # fmt: skip
    """Validate settings that were read already, for a run.

    Args:
        content: a JSON text, or a dict, which is not changed.
        where: what it was read from, for messages.
        ranks: ranks in all; None: the batch sizes are not checked.
        sharing: ranks that share each model; 0: as many as the settings say.

    Raises:
        ConfigError: as `load_for_run`.
    """
    raw, known = decode(content, where) if isinstance(content, str) else (content, [])
    verdict = judge(merged(raw), known)
    if verdict.config is not None:
        verdict.add(find_unavailable(verdict.config))
        # The meaning of a wrong key is unknown, so nothing can be said of how batch sizes divide.
        is_known = not any(p.path in _BATCH or p.path.startswith("elasticity") for p in verdict.problems)
        if ranks is not None and is_known:
            verdict.add(_check_ranks(verdict.config, ranks, sharing or ranks_per_model(verdict.config)))
    if verdict.problems:
        raise refuse(where, verdict.problems)
    return verdict.accept(where)


def _check_ranks(config: Config, ranks: int, sharing: int) -> Iterator[Problem]:
    """Problems with whole models, whole sequences, groups of experts and micro-batches on `ranks` ranks."""
    if ranks % sharing:
        what = f"{ranks} ranks are no multiple of the {sharing} that share each model (pipeline stages x slices)"
        yield Problem("", what, f"start {' or '.join(str(n) for n in _near(ranks, sharing))}")
        return
    data, experts, pieces = ranks // sharing, config.expert_parallel, config.sequence_parallel_size or 1
    if data % pieces:
        what = f"{pieces} ranks cannot share each sequence, as this does not divide the {data} data ranks"
        near = " or ".join(str(n) for n in range(1, data + 1) if data % n == 0)
        yield Problem("sequence_parallel_size", what, f"choose {near}")
        return
    if experts.enabled and data % experts.autoep_size:
        what = f"{experts.autoep_size} ranks cannot share experts out, as this does not divide the {data} data ranks"
        near = " or ".join(str(n) for n in range(1, data + 1) if data % n == 0)
        yield Problem("expert_parallel.autoep_size", what, f"choose {near}")
    try:
        batch_sizes(config, data // pieces, ranks)
    except ConfigError as error:
        yield Problem("", str(error), error=type(error))


def _near(number: int, unit: int) -> list[int]:
    return [near for near in (number // unit * unit, (number // unit + 1) * unit) if near]
