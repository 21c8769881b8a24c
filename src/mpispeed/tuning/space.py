"""Candidates of a search: lists of the file, ZeRO stages, micro-batches; buckets, overlap, offload in a full search."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, get_args, get_origin

from mpispeed.base.errors import ConfigError
from mpispeed.config import added, legacy
from mpispeed.config.batch import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from mpispeed.config.section import Section, walk
from mpispeed.tuning.protocol import OBSERVERS

if TYPE_CHECKING:
    from mpispeed.config.autotuning import Autotuning
    from mpispeed.tuning.forecast import Survey

ZERO = "zero_optimization"
STAGE = f"{ZERO}.stage"
SECTION = "autotuning"
STAGES = (0, 1, 2, 3)
BUCKETS = (5e7, 5e8, 1e9)
"""Elements of buckets that a full search tries, as DeepSpeed's; smaller models get parts of themselves."""

MOST_SIZES = 12
"""Micro-batches that divide a fixed batch, at most; of more, those in equal ratios are taken."""

MOST_CANDIDATES = 4000

Sizes = Callable[[int | None], Sequence[int]]
"""Micro-batches to try, by the samples of a rank in a step, where these are fixed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings that may be tried.

    Attributes:
        name: as DeepSpeed's names of experiments: z1_gas2_tmbspg8.
        config: of the trial, without what only observes a run.
        point: dotted key -> value, of what candidates differ in.
    """

    name: str
    config: Mapping[str, Any]
    point: Mapping[str, Any]

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return int(self.point[STAGE])

    @property
    def micro_batch(self) -> int:
        """Samples of a forward pass."""
        return int(self.point[MICRO_BATCH])


class Space:
    """Candidates for the settings of one file.

    Args:
        raw: the file's content.
        tuning: its section `autotuning`.
        ranks: of the job.
        least: the micro-batch that the script's own words name, if any.
    """

    def __init__(self, raw: Mapping[str, Any], tuning: Autotuning, ranks: int, least: int | None = None) -> None:
        self._raw = {key: value for key, value in raw.items() if key != SECTION}
        self._tuning, self._ranks = tuning, ranks
        lists = lists_of(self._raw)
        self._stages = _stages(self._raw)
        self._sizes = {key: _numbers(self._raw, key) for key in (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION)}
        self._listed = {key for key in self._sizes if isinstance(raw.get(key), list)}
        self._least = max(tuning.min_train_micro_batch_size_per_gpu, least or 1)
        self._lists = {key: values for key, values in lists.items() if key not in {STAGE, *self._sizes}}

    @property
    def has_own_sizes(self) -> bool:
        """The file lists micro-batches."""
        return MICRO_BATCH in self._listed

    def first(self) -> list[Candidate]:
        """Stages, micro-batches and the file's lists.

        Raises:
            ConfigError: there are none, or more than `MOST_CANDIDATES`.
        """
        found = self._all(self._stages, self._micro_batches, self._lists)
        if not found:
            msg = (
                f"no batch is possible: {TRAIN_BATCH}, {MICRO_BATCH}, {ACCUMULATION} and the limits of the section "
                f"{SECTION} leave none for {self._ranks} ranks; change one of them"
            )
            raise ConfigError(msg)
        return found

    def around(self, best: Candidate) -> list[Candidate]:
        """Micro-batches at equal distances around the best power of two, all else as there."""
        count, centre = self._tuning.num_tuning_micro_batch_sizes, best.micro_batch
        stride = max(1, round(1.5 * centre / (count + 1)))
        sizes = [centre // 2 + stride * number for number in range(1, count + 1)]
        near = [size for size in sizes if size != centre and centre // 2 < size < 2 * centre]
        own = {key: [best.point[key]] for key in best.point if key not in (STAGE, MICRO_BATCH, ACCUMULATION)}
        return self._all(
            [best.stage], lambda share: near if share is None else [n for n in near if share % n == 0], own
        )

    def full(self, best: Candidate, survey: Survey) -> list[Candidate]:
        """Buckets, overlap and offload for the best stage and micro-batch; keys that the file has stay as they are."""
        section = self._raw.get(ZERO) or {}
        given = {legacy_path(f"{ZERO}.{key}") for key in section} if isinstance(section, Mapping) else set()
        values = {key: list(found) for key, found in full_values(best.stage, section, survey).items()}
        own = {key: [best.point[key]] for key in best.point if key not in (STAGE, MICRO_BATCH, ACCUMULATION)}
        more = {key: found for key, found in values.items() if key not in given and key not in own}
        return self._all([best.stage], lambda _: [best.micro_batch], {**own, **more})

    # -- products ----------------------------------------------------------------------------------------------------

    def _all(self, stages: Sequence[int], micro_batches: Sizes, lists: Mapping[str, Sequence[Any]]) -> list[Candidate]:
        found: dict[str, Candidate] = {}
        for values in itertools.product(*lists.values()):
            point = dict(zip(lists, values, strict=True))
            for stage in stages:
                config = self._config({STAGE: stage, **point})
                for micro, steps in self._batches(_sharing(config, self._tuning.mp_size), micro_batches):
                    full = {STAGE: stage, ACCUMULATION: steps, MICRO_BATCH: micro, **point}
                    one = Candidate(name_of(full), self._config(full), full)
                    name = one.name
                    for number in itertools.count(2):
                        if name not in found:
                            break
                        name = f"{one.name}_{number}"
                    found[name] = Candidate(name, one.config, full)
                    if len(found) > MOST_CANDIDATES:
                        msg = f"the file's lists give more than {MOST_CANDIDATES} candidates; shorten one of them"
                        raise ConfigError(msg)
        return list(found.values())

    def _config(self, point: Mapping[str, Any]) -> dict[str, Any]:
        config = copy.deepcopy({key: value for key, value in self._raw.items() if key not in self._sizes})
        for key, value in point.items():
            put(config, key, value)
        return quiet(config)

    def _batches(self, sharing: int, micro_batches: Sizes) -> Iterator[tuple[int, int]]:
        """(micro-batch, accumulation steps) for ranks of which `sharing` share each model."""
        if self._ranks % sharing:
            return
        data, tuning = self._ranks // sharing, self._tuning
        totals: list[int | None] = [*self._sizes[TRAIN_BATCH]] or [None]
        for total in totals:
            if total is not None and total % data:
                continue
            share = None if total is None else total // data
            for micro in micro_batches(share):
                for steps in self._steps(micro, share, data):
                    batch = micro * steps * data
                    most = tuning.max_train_batch_size
                    if batch >= tuning.min_train_batch_size and (most is None or batch <= most):
                        yield micro, steps

    def _micro_batches(self, share: int | None) -> list[int]:
        """Micro-batches to try, where a rank has `share` samples of a step; None: any number."""
        given = self._sizes[MICRO_BATCH]
        if self.has_own_sizes:
            return given
        least, most = max([self._least, *given]), self._tuning.max_train_micro_batch_size_per_gpu
        if share is not None:
            sizes = [size for size in range(1, share + 1) if share % size == 0 and least <= size <= most]
            return sizes if len(sizes) <= MOST_SIZES else [sizes[round(n)] for n in _spread(len(sizes), MOST_SIZES)]
        return [least * 2**power for power in range(most.bit_length()) if least * 2**power <= most]

    def _steps(self, micro: int, share: int | None, data: int) -> list[int]:
        given, most = self._sizes[ACCUMULATION], self._tuning.max_train_batch_size
        if share is not None:
            steps, rest = divmod(share, micro)
            return [steps] if not rest and (not given or steps in given) else []
        if most is not None and ACCUMULATION not in self._listed:
            return [steps] if (steps := most // data // micro) else []
        return given or [1]


def _spread(count: int, most: int) -> list[float]:
    return [number * (count - 1) / (most - 1) for number in range(most)]


# -- values of a full search -----------------------------------------------------------------------------------------


def full_values(stage: int, section: Any, survey: Survey) -> dict[str, Sequence[Any]]:
    """Dotted key -> values that a full search tries at a stage.

    At stage 3 the first values follow from the model's width h, as in DeepSpeed's template: buckets of h² elements,
    0.9 h² fetched ahead, parameters of up to 10 h kept whole.

    Args:
        stage: of ZeRO.
        section: `zero_optimization` of the file.
        survey: facts about model and machine.
    """
    size, width = survey.model["num_params"], survey.model["hidden_size"]
    buckets = BUCKETS if size > BUCKETS[0] else tuple(max(1, size // parts) for parts in (16, 4, 1))
    found: dict[str, Sequence[Any]] = {
        f"{ZERO}.reduce_bucket_size": [int(one) for one in buckets],
        f"{ZERO}.overlap_comm": [False, True],
    }
    if stage in (1, 2):
        found[f"{ZERO}.allgather_bucket_size"] = [int(one) for one in buckets]
    if stage == 3:
        found[f"{ZERO}.reduce_bucket_size"] = sorted({width * width or int(buckets[0]), int(buckets[-1])})
        found[f"{ZERO}.prefetch_bucket_size"] = sorted({0, width * width * 9 // 10, 5 * 10**7})
        found[f"{ZERO}.param_persistence_threshold"] = sorted({10 * width, 10**5})
    if stage > 0:
        devices = ["none"]
        if survey.device != "cpu":
            devices.append("cpu")
        offload = section.get("offload_optimizer") if isinstance(section, Mapping) else None
        if isinstance(offload, Mapping) and offload.get("nvme_path"):
            devices.append("nvme")
        if len(devices) > 1:
            found[f"{ZERO}.offload_optimizer.device"] = devices
    return found


# -- the file --------------------------------------------------------------------------------------------------------


def lists_of(raw: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Dotted key -> list, for each list of the file in the place of a value; those of `optimizer` are its own."""
    fields, found = _fields(added.root()), {}
    for key, value in _leaves(raw):
        if not isinstance(value, list) or key.split(".")[0] in ("optimizer", SECTION):
            continue
        annotation = fields.get(legacy_path(key))
        if annotation is not None and not _takes_lists(annotation):
            if not value:
                msg = f"{key} is an empty list; give the values to try, or one value"
                raise ConfigError(msg)
            found[key] = value
    return found


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@cache
def _fields(root: type[Section]) -> dict[str, Any]:
    return {field.path: field.annotation for field in walk(root)}


def _takes_lists(annotation: Any) -> bool:
    if annotation is Any or annotation in (list, tuple):
        return True
    return get_origin(annotation) in (list, tuple) or any(_takes_lists(part) for part in get_args(annotation))


def legacy_path(key: str) -> str:
    """The path of today for a dotted key that may be spelled as in older versions."""
    return next((alias.new for alias in legacy.ALIASES if alias.old == key), key)


def _stages(raw: Mapping[str, Any]) -> list[int]:
    section = raw.get(ZERO)
    given = section.get("stage", "all") if isinstance(section, Mapping) else "all"
    if given in ("all", "auto", None):
        return list(STAGES)
    stages: list[Any] = list(given) if isinstance(given, list) else [given]
    wrong = [one for one in stages if isinstance(one, bool) or one not in STAGES]
    if wrong or not stages:
        msg = f'{STAGE} is {given!r}; expected 0, 1, 2, 3, a list of these, or "all"'
        raise ConfigError(msg)
    return stages


def _numbers(raw: Mapping[str, Any], key: str) -> list[int]:
    """The batch sizes under a key: none for null and "auto"."""
    given = raw.get(key)
    if given in (None, "auto"):
        return []
    values = given if isinstance(given, list) else [given]
    wrong = [one for one in values if isinstance(one, bool) or not isinstance(one, int) or one < 1]
    if wrong or not values:
        msg = f"{key} is {given!r}; expected a positive whole number, or a list of them"
        raise ConfigError(msg)
    return values


def _sharing(config: Mapping[str, Any], least: int) -> int:
    """Ranks that share each sample: stages x slices, by these settings, or `least`, x parts of sequences."""
    tensor = config.get("tensor_parallel")
    tensor = tensor if isinstance(tensor, Mapping) else {}
    inner = tensor.get("tensor_parallel", tensor.get("tp"))
    slices = [tensor.get("autotp_size"), inner.get("tp_size") if isinstance(inner, Mapping) else None]
    pipeline = config.get("pipeline")
    stages = pipeline.get("stages") if isinstance(pipeline, Mapping) else None
    found = max([1, *(one for one in slices if isinstance(one, int))]) * (stages if isinstance(stages, int) else 1)
    pieces = config.get("sequence_parallel_size")
    return max(found, least) * (pieces if isinstance(pieces, int) else 1)


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set the entry at a dotted key; sections that are not there are made."""
    *heads, last = key.split(".")
    for head in heads:
        if not isinstance(config.get(head), dict):
            config[head] = {}
        config = config[head]
    config[last] = value


def get(config: Mapping[str, Any], key: str) -> Any:
    """The entry at a dotted key; None where there is none."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def quiet(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without what only observes a run: trials must not write to anybody's monitors."""
    loader = dict(config.get("data_loader") or {}) | {"stall_warning": 0}
    return {key: value for key, value in config.items() if key not in OBSERVERS} | {"data_loader": loader}


# -- names -----------------------------------------------------------------------------------------------------------


def name_of(point: Mapping[str, Any]) -> str:
    """z1_gas2_tmbspg8: the stage, then the first letters of each key's words and the value."""
    rest = [(key, value) for key, value in point.items() if key != STAGE]
    return "_".join([f"z{point[STAGE]}", *(f"{_initials(key)}{_shown(value)}" for key, value in rest)])


def _initials(key: str) -> str:
    words: Iterable[str] = re.split(r"[._]", key.removeprefix(f"{ZERO}."))
    return "".join(word[0] for word in words if word)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "T" if value else "F"
    if isinstance(value, int | float):
        return f"{value:.1e}" if value > 9000 else f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^\w.+-]", "-", str(value))[:40]
