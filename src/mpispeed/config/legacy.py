"""History of the file format: a table of old spellings, and one pure pass that translates them.

The pass turns a user's dict into one that the models understand, and remembers for each entry where
it came from. It never changes the dict it is given.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpispeed.config.problems import Problem, join, path_of, show

AUTO = "auto"
_NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
_UNUSABLE = re.compile("[\x00\ud800-\udfff]")
_INDEX = re.compile(r"\[\d+\]")


class Alias(NamedTuple):
    """An old or second spelling. Paths are keys joined by dots."""

    old: str
    new: str
    is_deprecated: bool = False
    convert: Callable[[Any], Any] | None = None


def _on_host(value: Any) -> dict[str, str] | None:
    if value is not None and not isinstance(value, bool):
        msg = f"expected true or false, found {show(value)}"
        raise ValueError(msg)
    return {"device": "cpu"} if value else None


_ZERO = "zero_optimization"
_STAGE3 = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
)
ALIASES = (
    *(Alias(f"{_ZERO}.stage3_{key}", f"{_ZERO}.{key}") for key in _STAGE3),
    Alias(f"{_ZERO}.stage3_gather_fp16_weights_on_model_save", f"{_ZERO}.gather_16bit_weights_on_model_save", True),
    Alias(f"{_ZERO}.cpu_offload", f"{_ZERO}.offload_optimizer", True, _on_host),
    Alias(f"{_ZERO}.cpu_offload_param", f"{_ZERO}.offload_param", True, _on_host),
    Alias("allgather_size", f"{_ZERO}.allgather_bucket_size", True),
    Alias("bfloat16", "bf16"),
    Alias("seq_parallel_communication_data_type", "seq_parallel_comm_data_type"),
    Alias("aio.thread_count", "aio.intra_op_parallelism"),
    Alias("elasticity.prefer_large_batch", "elasticity.prefer_larger_batch"),
    Alias("tensor_parallel.tp", "tensor_parallel.tensor_parallel"),
    Alias("tensor_parallel.kernel_inject", "tensor_parallel.replace_with_kernel_inject"),
    Alias("quantize_training.quantize-algo", "quantize_training.quantize_algo"),
    Alias("quantize_training.quantize_type", "quantize_training.quantize_algo.q_type"),
)
# Both spellings at once are refused, but for these the new one silently wins.
_NEW_WINS = frozenset({"bfloat16"})

IGNORED = {
    f"{_ZERO}.grad_hooks": "has no effect; gradients are always reduced from hooks",
    f"{_ZERO}.cpu_offload_use_pin_memory": "is deprecated and has no effect; use offload_optimizer.pin_memory",
    "flops_profiler.step": "has no effect; profile_step says which step is counted",
}

_DOTTED = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_gather_16bit_weights_on_model_save",
)

# Sections that were, or are easily written as, a bare true or false.
_SWITCHES = (
    "fp16", "bf16", "bfloat16", "amp", "torch_autocast", "tensorboard", "csv_monitor", "wandb", "comet", "comms_logger",
    "flops_profiler", "autotuning", "elasticity", "data_efficiency", "curriculum_learning",
    "progressive_layer_drop", "quantize_training", "eigenvalue", "hybrid_engine", "nebula",
)  # fmt: skip


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _title(value: Any) -> Any:
    return value.capitalize() if isinstance(value, str) else value


def _off_is_null(value: Any) -> Any:
    """Spell a number of lines that means none (null, 0 or infinity) as null."""
    if isinstance(value, bool):
        return value
    return None if value == 0 or (isinstance(value, float) and math.isinf(value)) else value


def _false_is_null(value: Any) -> Any:
    return None if value is False else value


def _null_is_no_params(value: Any) -> Any:
    return {} if value is None else value


_DTYPES = {
    "float16": "fp16", "half": "fp16", "torch.float16": "fp16", "bfloat16": "bf16", "torch.bfloat16": "bf16",
    "float32": "fp32", "float": "fp32", "torch.float32": "fp32", "torch.float": "fp32",
}  # fmt: skip


def _dtype(value: Any) -> Any:
    return _DTYPES.get(value.lower(), value.lower()) if isinstance(value, str) else value


NORMAL_FORMS: dict[str, Callable[[Any], Any]] = {
    "steps_per_print": _off_is_null,
    "communication_data_type": _lower,
    "seq_parallel_comm_data_type": _lower,
    "data_types.grad_accum_dtype": _dtype,
    "tensor_parallel.dtype": _dtype,
    "amp.cast_model_type": _dtype,
    "amp.cast_model_outputs": _dtype,
    "torch_autocast.dtype": _dtype,
    "checkpoint.tag_validation": _title,
    "autotuning.metric": _lower,
    f"{_ZERO}.offload_param": _false_is_null,
    f"{_ZERO}.offload_optimizer": _false_is_null,
    "optimizer.params": _null_is_no_params,
    "scheduler.params": _null_is_no_params,
}


def in_section(section: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The settings of one section in the models' spelling, and sentences about what is deprecated.

    For sections that are made in code; files are translated as a whole.

    Args:
        section: its path.
        given: its entries, in any spelling.

    Raises:
        ValueError: an entry is given in two spellings, or cannot be translated.
    """
    settings, said = dict(given), []
    for path, sentence in IGNORED.items():
        parent, _, key = path.rpartition(".")
        if parent == section and key in settings:
            del settings[key]
            said.append(f"{path} {sentence}")
    for alias in ALIASES:
        parent, _, key = alias.old.rpartition(".")
        if parent != section or key not in settings:
            continue
        new, value = alias.new.rpartition(".")[2], settings.pop(key)
        if new in settings:
            msg = f"{key} and {new} are the same setting; keep only the latter"
            raise ValueError(msg)
        settings[new] = value if alias.convert is None else alias.convert(value)
        said += [f"{alias.old} is deprecated; use {alias.new}"] if alias.is_deprecated else []
    for path, convert in NORMAL_FORMS.items():
        parent, _, key = path.rpartition(".")
        if parent == section and key in settings:
            settings[key] = convert(settings[key])
    return settings, said


@dataclass(slots=True)
class Translation:
    """A dict in the models' spelling, and the history of its entries."""

    data: dict[str, Any]
    spelled: dict[str, str] = field(default_factory=dict)  # path -> path in the user's file
    autos: set[str] = field(default_factory=set)  # paths that were "auto"
    derived: dict[str, str] = field(default_factory=dict)  # path -> what it was derived from
    of_site: dict[str, str] = field(default_factory=dict)  # path -> the site file that has the value
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_spelled(self, path: str) -> str:
        """The path of an entry in the user's file."""
        return _replace_prefix(path, self.spelled)

    def origin(self, path: str) -> str:
        """The origin of the value at a path."""
        if path in self.of_site:
            return self.of_site[path]
        if path in self.autos:
            return 'default ("auto")'
        for prefix in prefixes(path):
            if prefix in self.derived and has(self.data, path):
                return f"given as {self.derived[prefix]}"
        if not has(self.data, path):
            return "default"
        spelled = self.as_spelled(path)
        return "given" if spelled == path else f"alias of {spelled}"


def translate(
    raw: Mapping[str, Any], text_keys: frozenset[str], knows: Callable[[Sequence[str], str], bool]
) -> Translation:
    """Translate old spellings, "auto", comments, bare switches and texts that are numbers, in one pass.

    Args:
        raw: the user's settings; not changed.
        text_keys: keys whose values stay texts even if they look like numbers.
        knows: whether the section at a path of keys has a key; "auto" counts as absent only there.
    """
    problems: list[Problem] = []
    result = Translation(_copy(raw, "", problems), problems=problems)
    _widen_switches(result)
    _place_dotted(result)
    for path, sentence in IGNORED.items():
        if _stands(result.data, path):
            _pop(result.data, path)
            result.warnings.append(f"{path} {sentence}")
    for alias in ALIASES:
        _rename(result, alias)
    _drop_autos(result.data, [], result.autos, knows)
    for path, convert in NORMAL_FORMS.items():
        if _stands(result.data, path):
            put(result.data, path, convert(get(result.data, path)))
    _read_numbers(result.data, "", text_keys)
    _refuse_infinite(result.data, "", result)
    return result


def _copy(value: Any, path: str, problems: list[Problem]) -> Any:
    """A copy of objects and lists without comments; other values are kept as they are."""
    if isinstance(value, Mapping):
        result = {}
        for key, entry in value.items():
            here = join(path, str(key))
            if not isinstance(key, str):
                problems.append(Problem(here, f"a key must be a text, found {show(key)}"))
            elif not is_comment(key) and _is_usable(key, here, problems) and _is_usable(entry, here, problems):
                result[key] = _copy(entry, here, problems)
        return result
    if isinstance(value, (list, tuple)):
        places = [(join(path, index), entry) for index, entry in enumerate(value)]
        return [_copy(entry, here, problems) for here, entry in places if _is_usable(entry, here, problems)]
    return value


def _is_usable(value: Any, path: str, problems: list[Problem]) -> bool:
    """False, with a problem, for a text that no file name, log or message can hold."""
    found = _UNUSABLE.search(value) if isinstance(value, str) else None
    if found is not None:
        sign = "NUL" if found.group() == "\0" else f"half of a surrogate pair, U+{ord(found.group()):04X},"
        what = f"{sign} at place {found.start() + 1} of the text, which no file name and no message can hold"
        problems.append(Problem(path, what, "take it out"))
    return found is None


def is_comment(key: str) -> bool:
    """True for keys that only talk to the reader."""
    return key.startswith("_") or key == "comment"


def _place_dotted(result: Translation) -> None:
    """Put keys that accelerate and trl write with a dot, beside the sections, into theirs; what stands there stays.

    A fraction in a number of elements, 0.9 of a square, is cut off.
    """
    data = result.data
    for key in _DOTTED:
        dotted = f"{_ZERO}.{key}"
        if dotted in data and isinstance(data.get(_ZERO, {}), dict):
            value = data.pop(dotted)
            if isinstance(value, float) and math.isfinite(value):
                value = int(value)
            data.setdefault(_ZERO, {}).setdefault(key, value)


def _widen_switches(result: Translation) -> None:
    """A bare true or false becomes the section it stands for."""
    data = result.data
    for key in _SWITCHES:
        if isinstance(data.get(key), bool):
            result.derived[{"bfloat16": "bf16"}.get(key, key)] = f"{key}: {show(data[key])}"
            data[key] = {"enabled": data[key]}
    if isinstance(data.get(_ZERO), bool):
        result.derived[f"{_ZERO}.stage"] = f"{_ZERO}: {show(data[_ZERO])}"
        result.warnings.append(f'{_ZERO}: true or false is deprecated; write {{"stage": {int(data[_ZERO])}}}')
        data[_ZERO] = {"stage": int(data[_ZERO])}


def _rename(result: Translation, alias: Alias) -> None:
    """Move one entry from its old place to its new one."""
    data = result.data
    if not _stands(data, alias.old):
        return
    parent = alias.new.rpartition(".")[0]
    if parent and _stands(data, parent) and not isinstance(get(data, parent), dict):
        _pop(data, alias.old)  # the wrong type of the parent is reported by validation
        return
    value = _pop(data, alias.old)
    if alias.is_deprecated:
        result.warnings.append(f"{alias.old} is deprecated; use {alias.new}")
    if value == AUTO and isinstance(value, str):
        result.autos.add(alias.new)
        return
    if alias.convert is not None:
        try:
            value = alias.convert(value)
        except ValueError as error:
            result.problems.append(Problem(alias.old, str(error), f"use {alias.new}"))
            return
    if _stands(data, alias.new):
        if alias.old in _NEW_WINS:
            result.warnings.append(f"{alias.old} is ignored because {alias.new} is there")
        else:
            result.problems.append(Problem(alias.old, f"{alias.new} is given too", "keep only the latter"))
        return
    put(data, alias.new, value)
    if alias.convert is not None:
        result.derived[alias.new] = f"{alias.old}: {show(value is not None)}"
    result.spelled[alias.new] = alias.old


def _drop_autos(
    node: dict[str, Any], keys: list[str], autos: set[str], knows: Callable[[Sequence[str], str], bool]
) -> None:
    """Remove "auto", so that defaults apply; a list of nothing but "auto" is "auto"."""
    for key in list(node):
        here, value = [*keys, key], node[key]
        if isinstance(value, dict):
            _drop_autos(value, here, autos, knows)
        elif _is_auto(value) and knows(keys, key):
            del node[key]
            autos.add(path_of(here))


def _is_auto(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_is_auto(entry) for entry in value)
    return isinstance(value, str) and value == AUTO


def _read_numbers(node: dict[str, Any], path: str, text_keys: frozenset[str]) -> None:
    """Texts such as "5e8" become numbers."""
    in_params = path.endswith("params")
    for key, value in node.items():
        here = join(path, key)
        if key in text_keys:
            continue
        if isinstance(value, dict):
            _read_numbers(value, here, text_keys)
        elif isinstance(value, list) and in_params:
            node[key] = [_number(entry) for entry in value]
        else:
            node[key] = _number(value)


def _refuse_infinite(value: Any, path: str, result: Translation) -> None:
    """Report NaN, infinity and numbers beyond every float, wherever they stand."""
    if isinstance(value, dict):
        for key, entry in value.items():
            _refuse_infinite(entry, join(path, key), result)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            _refuse_infinite(entry, join(path, index), result)
    elif isinstance(value, (int, float)) and not abs(value) <= sys.float_info.max:
        result.problems.append(Problem(result.as_spelled(path), f"expected a finite number, found {show(value)}"))


def _number(value: Any) -> Any:
    """The number in a text (whole numbers as int), or the value itself."""
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        return value
    try:
        return int(value)
    except ValueError:
        number = float(value)
    return int(number) if math.isfinite(number) and number == int(number) and abs(number) >= 1 else number


def has(data: Mapping[str, Any], path: str) -> bool:
    """True if there is an entry at a path of keys joined by dots; free names may hold dots themselves."""
    if path in data:
        return True
    keys = path.split(".")
    for count in range(1, len(keys)):
        inner = data.get(".".join(keys[:count]))
        if isinstance(inner, Mapping) and has(inner, ".".join(keys[count:])):
            return True
    return False


def _stands(data: Mapping[str, Any], path: str) -> bool:
    """As `has`, for names without dots only: `get`, `put` and `_pop` do not find others either."""
    node: Any = data
    for key in path.split("."):
        if not isinstance(node, Mapping) or key not in node:
            return False
        node = node[key]
    return True


def get(data: Mapping[str, Any], path: str) -> Any:
    """The entry at a path; it must be there."""
    node: Any = data
    for key in path.split("."):
        node = node[key]
    return node


def put(data: dict[str, Any], path: str, value: Any) -> None:
    """Set the entry at a path and make the sections on the way."""
    *parents, last = path.split(".")
    node = data
    for key in parents:
        node = node.setdefault(key, {})
    node[last] = value


def _pop(data: dict[str, Any], path: str) -> Any:
    parent, _, last = path.rpartition(".")
    node = get(data, parent) if parent else data
    return node.pop(last)


def prefixes(path: str) -> list[str]:
    """The path and the paths of all sections around it, longest first."""
    keys = _INDEX.sub("", path).split(".")
    return [".".join(keys[:count]) for count in range(len(keys), 0, -1)]


def _replace_prefix(path: str, table: Mapping[str, str]) -> str:
    for prefix in prefixes(path):
        if prefix in table and (path == prefix or path[len(prefix)] in ".["):
            return table[prefix] + path[len(prefix) :]
    return path
