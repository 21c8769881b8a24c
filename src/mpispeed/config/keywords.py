"""Checks of optimizers and schedules, by name and keywords, before anything is built.

Own ones are checked by the tables of `optimizer`, those of torch by torch itself, which is imported only for them.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from mpispeed.config import optimizer as known
from mpispeed.config.problems import Problem, Suggestions, show, show_unknown
from mpispeed.config.section import LARGEST

MOST_STEPS = 2**53  # beyond, a float no longer counts by ones
_MOST_RATE = 1e6


def check_optimizer(section: known.Optimizer, autos: Collection[str]) -> Iterator[Problem]:
    """Mistakes in the optimizer's name and keywords; `autos` are the keywords that were "auto"."""
    path, params = "optimizer.params", section.params
    if section.type is None and params:
        yield Problem("optimizer.type", "required because optimizer.params is there", 'name one, such as "AdamW"')
    if "max_grad_norm" in params:
        value = params["max_grad_norm"]
        yield Problem(
            f"{path}.max_grad_norm", f"the optimizer takes no max_grad_norm (value {show(value)})",
            f"remove it and set the top-level key gradient_clipping to {show(value)}",
        )  # fmt: skip
    rest = {key: value for key, value in params.items() if key != "max_grad_norm"}
    kind = (section.type or "").lower()
    table = known.OPTIMIZER_PARAMS.get(kind)
    is_torch = kind in ("adam", "adamw") and rest.get("torch_adam") is True
    if table is not None:
        yield from _check_params(rest, autos, path, known.TORCH_ADAM_PARAMS if is_torch else table)
        yield from _check_together(section.type or "", rest, path)
        if rest.get("amsgrad") is True and not is_torch and kind not in ("muadam", "muadamw"):
            cure = "set params.torch_adam to true" if kind in ("adam", "adamw") else "remove it"
            yield Problem(f"{path}.amsgrad", f"{section.type} has no amsgrad", cure)
    elif section.type is None:
        yield from _check_params({key: rest[key] for key in rest if key in known.COMMON_PARAMS}, (), path,
                                 known.COMMON_PARAMS)  # fmt: skip
    else:
        yield from _check_torch_optimizer(section.type, rest, autos)


def check_schedule(section: known.Scheduler, autos: Collection[str]) -> Iterator[Problem]:
    """Mistakes in the schedule's name and keywords; `autos` are the keywords that were "auto"."""
    path, params = "scheduler.params", section.params
    if section.type is None:
        if params:
            yield Problem(
                "scheduler.type", "required because scheduler.params is there", 'name one, such as "WarmupLR"'
            )
        return
    table = known.SCHEDULE_PARAMS.get(section.type)
    if table is None:
        yield from _check_torch_schedule(section.type, params, autos)
        return
    yield from _check_params(params, autos, path, table)
    for key in known.SCHEDULE_REQUIRED.get(section.type, ()):
        if params.get(key) is None:
            what = f'required by {section.type} and has no default ("auto" counts as missing)'
            yield Problem(f"{path}.{key}", what)


def _check_params(
    params: Mapping[str, Any], autos: Collection[str], path: str, table: Mapping[str, str]
) -> Iterator[Problem]:
    """Unknown keywords and values of a wrong kind."""
    yield from _find_unknown(params, autos, path, table)
    for key, value in params.items():
        kind = table.get(key)
        if kind and not KINDS[kind][1](value):
            yield Problem(f"{path}.{key}", f"expected {KINDS[kind][0]}, found {show(value)}")


def _check_together(name: str, params: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """Keywords of own optimizers that are legal one by one but not together."""
    if name.lower() == "muon":
        yield from _check_muon(params, path)
    elif params.get("nesterov") is True and not (params.get("momentum") and not params.get("dampening")):
        what = f"{name} needs momentum above 0 and dampening 0 for it"
        yield Problem(f"{path}.nesterov", what, "set params.momentum, or remove it")
    least, most = params.get("min_coeff", 0.01), params.get("max_coeff", 10.0)
    if _is_number(least) and _is_number(most) and least > most:
        yield Problem(f"{path}.min_coeff", f"{show(least)} is above max_coeff, which is {show(most)}")
    backend = params.get("comm_backend_name", known.BACKENDS[0])
    if isinstance(backend, str) and backend not in known.BACKENDS:
        what = f"expected one of {', '.join(known.BACKENDS)}, found {show(backend)}"
        yield Problem(f"{path}.comm_backend_name", what, "it is a hint: the one-bit mean always runs over MPI")


def _check_muon(params: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for key, choices in known.CHOICES.items():
        value = params.get(key, choices[0])
        if isinstance(value, str) and value not in choices:
            yield Problem(f"{path}.{key}", f"expected one of {', '.join(choices)}, found {show(value)}")
    if params.get("per_head_muon") is True:
        yield Problem(f"{path}.per_head_muon", "heads are not made orthogonal one by one", "remove it")


def _find_unknown(
    params: Mapping[str, Any], autos: Collection[str], path: str, names: Collection[str]
) -> Iterator[Problem]:
    suggestions = Suggestions()
    for key in (*params, *autos):
        if key not in names:
            cure = suggestions(key, names) or f"known: {', '.join(names) or 'none'}"
            found = show_unknown(params[key]) if key in params else 'value "auto"'
            yield Problem(f"{path}.{key}", f"unknown keyword ({found})", cure)


# -- torch's own -----------------------------------------------------------------------------------------------------


def _check_torch_optimizer(name: str, params: Mapping[str, Any], autos: Collection[str]) -> Iterator[Problem]:
    import torch

    from mpispeed.base.torch_names import optimizers, why_unusable

    cls = optimizers().get(name)
    if cls is None:
        yield _unknown("optimizer.type", "optimizer", name, known.OWN_OPTIMIZERS, optimizers(), "torch.optim")
        few = {key: value for key, value in params.items() if key in known.COMMON_PARAMS}
        yield from _check_params(few, (), "optimizer.params", known.COMMON_PARAMS)
        return
    problems = list(_check_call(cls, params, autos, "optimizer.params"))
    why = why_unusable(cls)
    if why:
        yield Problem("optimizer.type", f"{name} cannot be used: {why}", "choose another, such as AdamW")
    yield from problems
    if not problems:
        parameter = torch.nn.Parameter(torch.zeros(1, 1))
        yield from _try(cls, parameter, {key: _tuple(value) for key, value in params.items()}, "optimizer.params")


def _check_torch_schedule(name: str, params: Mapping[str, Any], autos: Collection[str]) -> Iterator[Problem]:
    import torch

    from mpispeed.base.torch_names import schedules

    cls = schedules().get(name)
    if cls is None:
        own = known.SCHEDULE_PARAMS
        yield _unknown("scheduler.type", "schedule", name, own, schedules(), "torch.optim.lr_scheduler")
        return
    problems = list(_check_call(cls, params, autos, "scheduler.params"))
    yield from problems
    if not problems and not any(isinstance(value, list) for value in params.values()):  # one for each group, perhaps
        group = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        yield from _try(cls, group, params, "scheduler.params")


def _unknown(
    path: str, what: str, name: str, own: Iterable[str], classes: Iterable[str], module: str
) -> Problem:  # fmt: skip
    own, theirs = list(own), sorted(set(classes) - set(own))
    cure = Suggestions()(name, [*own, *theirs])
    listed = f"known are {', '.join(own)}, and {', '.join(theirs)} of {module}"
    return Problem(path, f"unknown {what} {show(name)}", f"{cure} K{listed[1:]}" if cure else listed)


def _check_call(
    cls: Callable[..., Any], params: Mapping[str, Any], autos: Collection[str], path: str
) -> Iterator[Problem]:
    """Check keywords by names and defaults of a class's constructor, after its first parameter."""
    takes = dict(list(inspect.signature(cls).parameters.items())[1:])
    yield from _find_unknown(params, autos, path, takes)
    for key, parameter in takes.items():
        if key not in params and parameter.default is parameter.empty:
            yield Problem(f"{path}.{key}", f'required by {cls.__name__} and has no default ("auto" counts as missing)')
        kind = _kind_of(key, parameter)
        if key in params and kind is not None and not KINDS[kind][1](params[key]):
            yield Problem(f"{path}.{key}", f"expected {KINDS[kind][0]}, found {show(params[key])}")


def _kind_of(key: str, parameter: inspect.Parameter) -> str | None:
    """The kind of a keyword, if its default or annotation leaves no doubt."""
    if key == "lr":
        return "rate"
    default = parameter.default
    if isinstance(default, bool) or parameter.annotation in ("bool", bool):
        return "bool"
    if parameter.annotation in ("int", int):
        return "integer"
    if isinstance(default, (int, float)) or parameter.annotation in ("float", float):
        return "number"
    return None


def _try(make: Callable[..., Any], first: Any, params: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """Problems that the constructor finds in values of the right kind."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make([first] if path.startswith("optimizer") else first, **params)
    except Exception as error:  # a run would fail on it, whatever it is
        name = getattr(make, "__name__", "torch")
        yield Problem(path, f"{name} of torch refuses {show(dict(params))}: {type(error).__name__}: {error}")


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# -- kinds of values -------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_whole(value: Any) -> bool:
    return _is_number(value) and value == int(value) and abs(value) <= MOST_STEPS


def _is_betas(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_is_number(beta) and 0 <= beta < 1 for beta in value)


def _is_rate(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= _MOST_RATE


def _is_rates(value: Any) -> bool:
    return _is_rate(value) or (isinstance(value, list) and bool(value) and all(map(_is_rate, value)))


# Kind of a keyword's value -> (its name in messages, test).
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "number": ("a number that fits into fp32", _is_number),
    "non-negative": ("a number of at least 0 that fits into fp32", lambda v: _is_number(v) and v >= 0),
    "rate": (f"a learning rate from 0 to {_MOST_RATE:g}", _is_rate),
    "rates": (f"a learning rate from 0 to {_MOST_RATE:g}, or a list of them", _is_rates),
    "integer": ("a whole number", _is_whole),
    "integer or null": ("a whole number or null", lambda v: v is None or _is_whole(v)),
    "count": ("a whole number from 0 to 2^53", lambda v: _is_whole(v) and v >= 0),
    "positive count": ("a whole number from 1 to 2^53", lambda v: _is_whole(v) and v >= 1),
    "positive count or null": (
        "a whole number from 1 to 2^53, or null", lambda v: v is None or (_is_whole(v) and v >= 1)
    ),
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "bool or null": ("true, false or null", lambda v: v is None or isinstance(v, bool)),
    "fraction": ("a number from 0 to below 1", lambda v: _is_number(v) and 0 <= v < 1),
    "three numbers": (
        "three numbers", lambda v: isinstance(v, list) and len(v) == 3 and all(_is_number(one) for one in v)
    ),
    "betas": ("two numbers from 0 to below 1", _is_betas),
    "text": ("a text", lambda v: isinstance(v, str)),
    "text or null": ("a text or null", lambda v: v is None or isinstance(v, str)),
}  # fmt: skip
