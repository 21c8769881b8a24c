"""A search from the first look at the model to the tables: survey, trials in their order, and what is left behind.

    lists, stages, micro-batches -> survey of the model -> trials by predicted time -> micro-batches around the best
    -> (full search) buckets, overlap, offload for the best -> files

Nothing here joins MPI: trials run in a worker job.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import UsageError
from mpispeed.tuning.forecast import Survey
from mpispeed.tuning.memory_filter import Memory, of_metrics
from mpispeed.tuning.protocol import Task
from mpispeed.tuning.results import Folders, Row, best_of, experiment_of, metric_of
from mpispeed.tuning.search import Listed, Predicted, Search, Shuffled
from mpispeed.tuning.space import Candidate, Space, get

if TYPE_CHECKING:
    from mpispeed.config.autotuning import Autotuning
    from mpispeed.tuning.forecast import Forecast
    from mpispeed.tuning.protocol import Runs
    from mpispeed.tuning.search import Order


@dataclass(frozen=True)
class Found:
    """The end of a search.

    Attributes:
        rows: all candidates that were tried or discarded, in that order.
        best: the candidate with the best figure; None if no trial was measured.
        seconds: of the search.
        ended: why each round of trials ended.
    """

    rows: Sequence[Row]
    best: Candidate | None
    seconds: float
    ended: Sequence[str]


class Tuner:
    """One search.

    Args:
        space: the candidates.
        tuning: the section `autotuning`.
        job: runs the script.
        folders: of results.
        ranks: of the job.
        words: the script's arguments.
        memory_bytes: of a node, in place of what its machine has left.
        say: called with each row as it is known, and with sentences.
    """

    def __init__(
        self,
        space: Space,
        tuning: Autotuning,
        job: Runs,
        folders: Folders,
        *,
        ranks: int,
        words: Sequence[str] = (),
        memory_bytes: int | None = None,
        say: Callable[[Row | str], None] = lambda _: None,
    ) -> None:
        self._space, self._tuning, self._job, self._folders = space, tuning, job, folders
        self._ranks, self._words, self._memory_bytes, self._say = ranks, list(words), memory_bytes, say
        self._mappings = mappings_of(tuning)
        self._steps = max(1, tuning.start_profile_step), max(1, tuning.end_profile_step)
        self._number = 0
        self._rows: dict[str, Row] = {}
        self._candidates: dict[str, Candidate] = {}
        self._forecasts: dict[str, Forecast] = {}
        self._survey: Survey | None = None
        self._ended: list[str] = []

    def run(self) -> Found:
        """Search, write all files, and end the job.

        Raises:
            UsageError: the folders cannot be used, the script does not come to `initialize`, or no job starts. Once
                something is measured, that only ends the search.
        """
        start = time.monotonic()
        self._folders.prepare(overwrite=self._tuning.overwrite)
        try:
            self._rounds()
        except UsageError as error:
            if self._best() is None:
                raise
            self._ended.append(f"the search ended early: {error}")
        finally:
            self._job.close()
            rows, seconds = list(self._rows.values()), time.monotonic() - start
            if rows:  # also those of a search that was interrupted
                self._folders.conclude(rows, self._tuning.metric, seconds)
        self._write_figures()
        return Found(rows, self._best(), seconds, [why for why in self._ended if why])

    def arguments(self, config: Mapping[str, Any]) -> list[str]:
        """The script's words with the values of these settings for mapped options."""
        return mapped(self._words, self._mappings, config)

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _rounds(self) -> None:
        self._ended.append(self._round(self._space.first()))
        best = self._best()
        if best is not None and not self._space.has_own_sizes:
            self._ended.append(self._round(self._space.around(best)))
        best = self._best()
        if best is not None and not self._tuning.fast and self._survey is not None:
            self._ended.append(self._round(self._space.full(best, self._survey)))

    def _round(self, candidates: Sequence[Candidate]) -> str:
        """Try candidates that are new, by the model of all trials so far; why it ended."""
        new = [one for one in candidates if one.name not in self._candidates]
        if not new:
            return ""
        survey = self._look(new)
        memory = Memory(survey, self._memory_bytes)
        names = list(self._candidates)
        for row in self._rows.values():
            self._learn(memory, row)
        order = self._order(names)
        fresh = {one.name for one in self._discard_twins(new)}
        search = Search(
            order, [place for place, name in enumerate(names) if name in fresh],
            early_stopping=self._tuning.tuner_early_stopping,
            most=max(0, self._tuning.tuner_num_trials - self._tried()),
            earlier=self._earlier(names),
        )  # fmt: skip
        self._discard(search, memory, names)
        while (place := search.next()) is not None:
            row = self._try(names[place], order, place, memory)
            self._learn(memory, row)
            search.tell(place, self._cost(row))
            self._discard(search, memory, names)
        return search.ended

    def _order(self, names: Sequence[str]) -> Order:
        if self._tuning.tuner_type == "gridsearch":
            return Listed()
        if self._tuning.tuner_type == "random":
            return Shuffled()
        forecasts, points = [self._forecasts[one] for one in names], [self._candidates[one].point for one in names]
        return Predicted(forecasts, points, per_sample=self._tuning.metric != "latency")

    def _look(self, new: Sequence[Candidate]) -> Survey:
        """Forecasts of new candidates, by the job."""
        configs = [one.config for one in new]
        folder = str(self._folders.of_model())
        words = self.arguments(configs[0])
        self._say(f"{len(new)} candidates; the script runs until it has its model, to predict them")
        task = self._task("survey", "survey", bare(configs[0]), payload=configs, folder=folder, arguments=words)
        outcome = self._job.run(task, self._tuning.trial_timeout)
        if outcome.status != "ok":
            msg = f"the script does not come as far as mpispeed.initialize ({outcome.status}): {outcome.reason}"
            raise UsageError(msg)
        survey = Survey.of_values(outcome.survey)
        if survey.ranks != self._ranks:
            msg = f"the worker job has {survey.ranks} ranks, and {self._ranks} were asked for"
            raise UsageError(msg)
        info = self._tuning.model_info
        known = {} if info is None else {key: value for key in survey.model if (value := getattr(info, key, None))}
        survey = replace(survey, model={**survey.model, **known})
        if self._survey is None:
            self._folders.write_model(survey.model)
            if self._tuning.model_info_path is not None:
                Path(self._tuning.model_info_path).write_text(json.dumps(survey.model) + "\n")
        self._survey = survey
        for one, forecast in zip(new, survey.forecasts, strict=True):
            self._candidates[one.name], self._forecasts[one.name] = one, forecast
        return survey

    # -- candidates that are not tried ---------------------------------------------------------------------------------

    def _discard_twins(self, new: Sequence[Candidate]) -> list[Candidate]:
        """Leave out candidates that are refused, and those that would do just what another one does."""
        tried = [name for name, row in self._rows.items() if row.status != "skipped"]
        first = {(repr(self._forecasts[name]), self._own(name)): name for name in tried}
        kept = []
        for one in new:
            forecast = self._forecasts[one.name]
            if forecast.refusal:
                self._note(self._skipped(one.name, forecast.refusal))
                continue
            twin = first.setdefault((repr(forecast), self._own(one.name)), one.name)
            if twin == one.name:
                kept.append(one)
            else:
                self._note(self._skipped(one.name, f"holds and sends the same as {twin}"))
        return kept

    def _own(self, name: str) -> str:
        """What a forecast does not see of a candidate's settings: all but the sizes of buckets."""
        point = self._candidates[name].point
        return repr([(key, value) for key, value in point.items() if not key.endswith("bucket_size")])

    def _discard(self, search: Search, memory: Memory, names: Sequence[str]) -> None:
        gone = []
        for place in search.left:
            name = names[place]
            point, forecast = self._candidates[name].point, self._forecasts[name]
            refusal = memory.refusal(point, forecast)
            if refusal:
                gone.append(place)
                self._note(self._skipped(name, refusal, memory.need(point, forecast)))
        search.drop(gone)

    def _skipped(self, name: str, reason: str, need: int = 0) -> Row:
        return replace(self._row(name), status="skipped", reason=reason, need_bytes=need)

    # -- trials --------------------------------------------------------------------------------------------------------

    def _try(self, name: str, order: Order, place: int, memory: Memory) -> Row:
        candidate, words = self._candidates[name], self.arguments(self._candidates[name].config)
        row = replace(self._row(name), need_bytes=memory.need(candidate.point, self._forecasts[name]))
        if isinstance(order, Predicted) and order.is_fitted:
            row = replace(row, predicted_seconds=order.model.predict(place).seconds)
        experiment = experiment_of(name, candidate.config, words, self._ranks, self._steps)
        figures = self._folders.finished(experiment)
        if metric_of(figures, self._tuning.metric) is not None:
            row = self._measured(replace(row, status="reused"), figures)
            return self._note(row)
        self._folders.describe(experiment)
        task = self._task("trial", name, candidate.config, folder=str(self._folders.of_trial(name)), arguments=words)
        outcome = self._job.run(task, self._tuning.trial_timeout)
        row = self._measured(replace(row, status=outcome.status, reason=outcome.reason), outcome.metrics)
        if outcome.status == "ok" and row.metric is None:
            row = replace(row, status="error", reason=f"the trial gave no {self._tuning.metric}")
        self._folders.note(row)
        return self._note(row)

    def _measured(self, row: Row, figures: Mapping[str, float]) -> Row:
        if row.status not in ("ok", "reused"):
            return row
        return replace(
            row, seconds=float(figures.get("latency", 0.0)), metrics=dict(figures),
            metric=metric_of(figures, self._tuning.metric),
        )  # fmt: skip

    def _task(self, kind: Any, name: str, config: Mapping[str, Any], **more: Any) -> Task:
        self._number += 1
        first, last = self._steps
        return Task(
            self._number, kind, name, config=config, metric=self._tuning.metric, first_step=first, last_step=last,
            **more,
        )  # fmt: skip

    def _row(self, name: str) -> Row:
        one, forecast = self._candidates[name], self._forecasts[name]
        steps = int(one.point["gradient_accumulation_steps"])
        sent = sum(forecast.sent.values())
        return Row(name, one.stage, one.micro_batch, steps, forecast.train_batch, "ok", sent_bytes=sent)

    def _learn(self, memory: Memory, row: Row) -> None:
        if row.status == "memory":
            memory.failed(row.name, self._forecasts[row.name])
        elif row.is_good and row.metrics is not None and of_metrics(row.metrics):
            memory.measured(self._candidates[row.name].point, row.micro_batch, of_metrics(row.metrics))

    def _cost(self, row: Row) -> float:
        """What is minimised: seconds of a step, or of a sample."""
        if row.metric is None or not row.seconds:
            return math.inf
        return row.seconds if self._tuning.metric == "latency" else row.seconds / row.train_batch

    def _earlier(self, names: Sequence[str]) -> list[tuple[int, float]]:
        return [(names.index(name), self._cost(row)) for name, row in self._rows.items() if row.status != "skipped"]

    def _tried(self) -> int:
        return sum(row.status != "skipped" for row in self._rows.values())

    def _note(self, row: Row) -> Row:
        self._rows[row.name] = row
        self._say(row)
        return row

    def _best(self) -> Candidate | None:
        best = best_of(list(self._rows.values()), self._tuning.metric)
        return None if best is None else self._candidates[best.name]

    def _write_figures(self) -> None:
        best = best_of(list(self._rows.values()), self._tuning.metric)
        if self._tuning.metric_path is not None and best is not None:
            Path(self._tuning.metric_path).write_text(json.dumps(dict(best.metrics or {})) + "\n")


def bare(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under which `initialize` leaves the script's model as it is until it is surveyed."""
    return {key: value for key, value in config.items() if key not in ("tensor_parallel", "expert_parallel")}


# -- words of the script -----------------------------------------------------------------------------------------------


def mappings_of(tuning: Autotuning) -> dict[str, str]:
    """Key of the file -> option of the script, without blanks around them."""
    return {key.strip(): flag.strip() for key, flag in (tuning.arg_mappings or {}).items()}


def mapped(words: Sequence[str], mappings: Mapping[str, str], config: Mapping[str, Any]) -> list[str]:
    """Words in which mapped options have the values of `config`; options that are not there are appended."""
    found = list(words)
    for key, flag in mappings.items():
        value = get(config, key)
        if value is None or value == "auto":
            continue
        text = json.dumps(value) if isinstance(value, bool | list | dict) else str(value)
        place = next((n for n, word in enumerate(found) if word == flag or word.startswith(f"{flag}=")), None)
        if place is None:
            found += [flag, text]
        elif found[place] == flag:
            found[place + 1 : place + 2] = [text]
        else:
            found[place] = f"{flag}={text}"
    return found


def mapped_value(words: Sequence[str], mappings: Mapping[str, str], key: str) -> int | None:
    """The number that the script's words have for a mapped key; None for none."""
    flag = mappings.get(key)
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if flag is not None and name == flag:
            text = value if equals else next(iter(words[place + 1 :]), "")
            return int(text) if text.isdecimal() else None
    return None
