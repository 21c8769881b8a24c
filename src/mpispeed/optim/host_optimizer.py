"""Base of the optimizers for any model: one call into compiled code for all parameters of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter, not_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpispeed.base.errors import UnsupportedOption, UsageError
from mpispeed.native.device_optim import DeviceTable
from mpispeed.native.multi_tensor_host import HostTable, Row, check_pair
from mpispeed.optim.host_rule import HostRule, read_hyper

_HALVES = (torch.bfloat16, torch.float16)

Factor = float | Tensor
"""What gradients are multiplied by: a number, or a scalar on the device that nobody has to wait for."""


class _Prepared(NamedTuple):
    """A table, with the conditions for its reuse; lists are in the order of its rows."""

    table: HostTable | DeviceTable
    params: list[Tensor]
    states: list[dict[str, Any]]
    everything: list[dict[str, Any]]  # the states of all parameters, also those without gradient
    slots: list[Tensor]
    steps: list[int]  # updates done
    lots: list[tuple[int, int]]  # (group, updates done) of each entry of the terms


class HostOptimizer(torch.optim.Optimizer):
    """Updates parameters in host memory by one rule.

    State of a parameter: `step` (int, updates done) and one tensor of its shape for each name of the rule's
    `state_names`, fp32 or, with `fp32_optimizer_states=False`, of the parameter's dtype. Parameters are fp32, fp16
    or bf16, dense and contiguous; all work is in fp32, and each stored value is rounded once. Parameters without
    gradient are left alone.

    Tables are reused by the next step, as long as the tensors keep their addresses.
    """

    is_on_host = True  # False: `_make_table` also takes tensors of a device
    needs_whole_tensors = False  # True: the result depends on what is one parameter

    def __init__(
        self,
        rule: HostRule,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        fp32_optimizer_states: bool = True,
        threads: int | None = None,
    ) -> None:
        """Args: `threads` is that of `torch.get_num_threads()` at every step when it is None.

        Raises:
            ConfigError: a hyper-parameter is out of range.
            UsageError: a parameter is not dense and contiguous.
            TypeError: there is no update for a parameter's dtype and that of its states.
        """
        self._rule = rule
        self._prepared: _Prepared | None = None
        self._ratios: list[float] | Tensor = []
        self.fp32_optimizer_states = bool(fp32_optimizer_states)
        self.threads = threads
        super().__init__(params, defaults)

    @property
    def rule(self) -> HostRule:
        """The update rule; the groups have all hyper-parameters that it reads."""
        return self._rule

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; hyper-parameters that it does not give are those of the constructor.

        Raises:
            ConfigError, UsageError, TypeError: as the constructor, before anything is added.
        """
        if isinstance(param_group, dict):
            self._check_hyper({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            self._check_params(len(self.param_groups) - 1)
        except BaseException:
            self.param_groups.pop()
            raise
        self._prepared = None

    def _check_hyper(self, hyper: Mapping[str, Any]) -> None:
        name = type(self).__name__
        if hyper.get("amsgrad"):
            msg = f"amsgrad is true in {name}; this variant is not supported. Remove it, or use torch.optim"
            raise UnsupportedOption(msg)
        read_hyper(name, {key: hyper[key] for key in self._rule.defaults if key in hyper}, self._rule.defaults)

    def _check_params(self, index: int) -> None:
        group = self.param_groups[index]
        for position, param in enumerate(group["params"]):
            where = self._place(index, position)
            self._check_form(f"{where} of", param)  # where it has to be, a step says: an engine has masters elsewhere
            check_pair(f"{type(self).__name__}, {where}", param.dtype, self._state_dtype(param))

    def _place(self, index: int, position: int) -> str:
        """Name of a parameter for messages: its own where the groups were made from named parameters."""
        names = self.param_groups[index].get("param_names")
        return f"parameter {names[position]}" if names else f"parameter {position} of group {index}"

    def _check_form(self, what: str, x: Tensor) -> None:
        name = type(self).__name__
        if x.layout != torch.strided:
            msg = f"{what} {name} has the layout {x.layout}; only dense tensors can be updated"
            if x.is_sparse:
                msg += ": make the embedding with sparse=False, or use torch.optim.SparseAdam for it"
            raise UsageError(msg)
        if not x.is_contiguous():
            msg = f"{what} {name} has strides {x.stride()} for shape {tuple(x.shape)}; make it contiguous"
            raise UsageError(msg)

    def _check_tensor(self, what: str, x: Tensor) -> None:
        if self.is_on_host and x.device.type != "cpu":
            msg = (
                f"{what} {type(self).__name__} is on {x.device}, and this optimizer updates host memory; keep the "
                "parameters there (zero_optimization.offload_optimizer with device cpu does), or use an optimizer of "
                "torch.optim"
            )
            raise UsageError(msg)
        self._check_form(what, x)

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        return torch.float32 if self.fp32_optimizer_states else param.dtype

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        lowp_out: Sequence[Tensor] | None = None,
        grad_scale: float = 1.0,
    ) -> Any:
        """One update of all parameters with a gradient; returns the result of `closure`, called with grad on.

        Gradients are multiplied by `grad_scale` on the way (unscaling and clipping) and stay as they are.
        `lowp_out` has one contiguous bf16 or fp16 buffer for each parameter, in the order of the groups, of its
        length; when the call returns, each holds the parameter rounded to nearest even, also where there was no
        gradient.

        Raises:
            UsageError: a parameter or gradient is sparse, not contiguous or not in host memory.
            ValueError: `lowp_out` does not fit.
        """
        loss = self._called(closure)
        self._update_all(None, lowp_out, [float(grad_scale)] * len(self.param_groups))
        return loss

    @staticmethod
    def _called(closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def _update_all(
        self, grads: Sequence[Any] | None, lowp_out: Sequence[Tensor] | None, factors: Sequence[Factor]
    ) -> None:
        """One update; `grads` instead of those of the parameters, where given, and a factor for each group."""
        params = [param for group in self.param_groups for param in group["params"]]
        outs = list(lowp_out or ())
        if lowp_out is not None:
            _check_outs(params, outs)
        grads = list(map(attrgetter("grad"), params)) if grads is None else list(grads)
        if any(grad is None for grad in grads):
            is_live = [grad is not None for grad in grads]
            for param, out in compress(zip(params, outs, strict=False), map(not_, is_live)):
                out.view(-1).copy_(param.view(-1))
            params, grads, outs = (list(compress(x, is_live)) for x in (params, grads, outs))
        self._update(params, grads, outs, factors)

    def _update(self, live: list[Tensor], grads: list[Tensor], outs: list[Tensor], factors: Sequence[Factor]) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is None or not (
            _is_same(prepared, live, self.state, self._rule.state_names) and prepared.table.take(live, grads, outs)
        ):
            prepared = self._prepare(live, grads, outs)
        self._run(prepared, factors)
        steps = [done + 1 for done in prepared.steps]
        for state, done in zip(prepared.states, steps, strict=True):
            state["step"] = done
        self._prepared = prepared._replace(steps=steps, lots=[(index, done + 1) for index, done in prepared.lots])

    def _run(self, prepared: _Prepared, factors: Sequence[Factor]) -> None:
        table = prepared.table
        is_host = isinstance(table, HostTable)
        given = [factors[index] for index, _ in prepared.lots]
        terms = [
            self._rule.terms(
                {**self._rule.defaults, **self.param_groups[index]},
                done + 1,
                float(factor) if is_host or not isinstance(factor, Tensor) else 1.0,
            )
            for (index, done), factor in zip(prepared.lots, given, strict=True)
        ]
        if isinstance(table, HostTable):
            self._ratios = table.run(terms, threads=self.threads or torch.get_num_threads())
        else:
            scales = [factor if isinstance(factor, Tensor) else None for factor in given]
            self._ratios = table.run(terms, scales=scales)

    def _make_table(self, rows: list[Row]) -> HostTable | DeviceTable:
        """The table that updates these tensors together."""
        return HostTable(self._rule.kernel, rows)

    def _prepare(self, live: list[Tensor], grads: list[Tensor], outs: list[Tensor]) -> _Prepared:
        """Check everything, begin the states that are not there, and lay out the table."""
        places = {
            id(param): (index, position)
            for index, group in enumerate(self.param_groups)
            for position, param in enumerate(group["params"])
        }
        names = self._rule.state_names
        lots: dict[tuple[int, int], int] = {}
        rows = []
        for row, (param, grad) in enumerate(zip(live, grads, strict=True)):
            index, position = places[id(param)]
            where = self._place(index, position)
            self._check_tensor(f"{where} of", param)
            self._check_tensor(f"the gradient of {where} of", grad)
            state = self.state[param]
            if not state:
                self._begin(param, state, self.param_groups[index])
            state["step"] = int(state["step"])
            lot = lots.setdefault((index, state["step"]), len(lots))
            rows.append(Row(param, tuple(state[name] for name in names), grad, outs[row] if outs else None, lot))
        states = [self.state[param] for param in live]
        return _Prepared(
            table=self._make_table(rows),
            params=live,
            states=states,
            everything=list(self.state.values()),
            slots=_slots(states, names),
            steps=[state["step"] for state in states],
            lots=list(lots),
        )

    def _begin(self, param: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        del group
        state["step"] = 0
        for name in self._rule.state_names:
            state[name] = torch.zeros_like(param, dtype=self._state_dtype(param))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but states keep their dtype: torch casts them to that of their parameter.

        Raises:
            ValueError: the groups do not fit, or a state has another shape than its parameter.
        """
        super().load_state_dict(state_dict)
        self._prepared = None
        indices = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, param in zip(indices, params, strict=True):
            for name in self._rule.state_names:
                saved = state_dict["state"].get(index, {}).get(name)
                if saved is None:
                    continue
                if saved.shape != param.shape:
                    msg = f"{name} of parameter {index} has shape {tuple(saved.shape)}, not {tuple(param.shape)}"
                    raise ValueError(msg)
                self.state[param][name] = saved.to(param.device, self._state_dtype(param), copy=True).contiguous()

    def __getstate__(self) -> dict[str, Any]:
        kept = {"_rule": self._rule, "fp32_optimizer_states": self.fp32_optimizer_states, "threads": self.threads}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepared, self._ratios = None, []
        for group in self.param_groups:
            if "amsgrad" in self.defaults:
                group.setdefault("amsgrad", False)


def _place_of(param: Tensor) -> str:
    return "the host" if param.device.type == "cpu" else str(param.device)


def _check_outs(params: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    if len(outs) != len(params):
        msg = f"lowp_out has {len(outs)} buffers for {len(params)} parameters; give one for each"
        raise ValueError(msg)
    for position, (param, out) in enumerate(zip(params, outs, strict=True)):
        fits = out.numel() == param.numel() and out.is_contiguous() and out.device == param.device
        if out.dtype not in _HALVES or not fits:
            msg = (
                f"lowp_out[{position}] is a {out.dtype} tensor of shape {tuple(out.shape)} and strides {out.stride()} "
                f"on {out.device}; expected a contiguous bf16 or fp16 buffer of {param.numel()} elements on "
                f"{_place_of(param)}"
            )
            raise ValueError(msg)


def _slots(states: list[dict[str, Any]], names: Sequence[str]) -> list[Tensor]:
    return [tensor for name in names for tensor in map(itemgetter(name), states)]


def _is_same(
    prepared: _Prepared,
    live: list[Tensor],
    state: Mapping[Any, dict[str, Any]],
    names: Sequence[str],
) -> bool:
    """True if parameters and states are the objects of the table, and the states have counted the same updates."""
    if len(live) != len(prepared.params) or len(state) != len(prepared.everything):
        return False
    if not all(map(is_, live, prepared.params)) or not all(map(is_, state.values(), prepared.everything)):
        return False
    try:
        slots, steps = _slots(prepared.states, names), list(map(itemgetter("step"), prepared.states))
    except KeyError:
        return False
    return all(map(is_, slots, prepared.slots)) and steps == prepared.steps
