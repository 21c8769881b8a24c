"""The printed report of a profile: summary, top modules by depth, and the tree of modules.

Lines, their order and their units are those of DeepSpeed's report as its documentation shows it; "GPU" stands there for
a rank, whatever computes on it. What is counted here beyond that follows in lines of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))
_WIDTH = 98
_LABEL = 76

NOTATIONS = """\
Notations:
data parallel size (dp_size), model parallel size (mp_size), GPU (a rank, on whatever device),
number of parameters (params), number of multiply-accumulate operations (MACs),
number of floating-point operations (flops), floating-point operations per second (FLOPS),
fwd latency (forward propagation latency), bwd latency (backward propagation latency),
step (weights update latency), iter latency (sum of fwd, bwd and step latency)
"""

DETAILS = """\
Each module profile is listed after its name in the following order:
params, percentage of total params, MACs, percentage of total MACs, fwd latency, percentage of total fwd latency,
fwd FLOPS, and of the operators that ran: flops of forward, backward and recomputation

Note:
1. What a module computes itself, not in a submodule, is the difference between its numbers and the sum of those of its
   submodules.
2. MACs and flops are those of the formulas of DeepSpeed's profiler, in forward only. Flops of operators count products
   of matrices, convolutions and attention, not what works element by element.
3. A submodule that is used in several places is printed once.
"""


# -- numbers -----------------------------------------------------------------------------------------------------------


def number_text(value: float, unit: str = "", *, giga: str = "G") -> str:
    """A number in steps of 1000 with two decimals: "866.08 M", "426.52 MMACs"; whole ones below 1000 as they are.

    Args:
        value: at least 0.
        unit: behind the prefix.
        giga: the prefix of 10**9; "B" for parameters.
    """
    for scale, prefix in _STEPS:
        if value >= scale:
            return f"{value / scale:.2f} {giga if prefix == 'G' else prefix}{unit}"
    shown = str(int(value)) if value == int(value) else f"{value:.2f}"
    return f"{shown} {unit}".rstrip()


def flops_text(flops: float) -> str:
    """Floating-point operations: "866.08 M"."""
    return number_text(flops)


def macs_text(macs: float) -> str:
    """Multiply-accumulate operations: "426.52 MMACs"."""
    return number_text(macs, "MACs")


def params_text(params: float) -> str:
    """Elements of parameters: "61.71 K", "1.50 B"."""
    return number_text(params, giga="B")


def rate_text(flops: float, seconds: float) -> str:
    """Floating-point operations per second: "81.90 TFLOPS"; "0 FLOPS" where no time was measured."""
    return number_text(flops / seconds if seconds > 0 else 0, "FLOPS")


def duration_text(seconds: float) -> str:
    """Seconds: "1.25 s", "76.67 ms", "34.09 us"."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.2f} us"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0:.2f}%"


# -- what is reported --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One module with all that ran in it and below it, on this rank, for one micro-batch.

    Attributes:
        path: its name in the model, "" for the model.
        kind: its class.
        text: what its `repr` says of itself.
        params: elements of its parameters, each once; full ones where they are sharded.
        flops, macs: in forward, by the formulas of DeepSpeed's profiler.
        seconds: of forward.
        forward, backward, recompute: flops of the operators that ran.
    """

    path: str
    kind: str
    text: str = ""
    params: int = 0
    flops: float = 0
    macs: float = 0
    seconds: float = 0
    forward: float = 0
    backward: float = 0
    recompute: float = 0

    @property
    def depth(self) -> int:
        """0 for the model."""
        return self.path.count(".") + 1 if self.path else 0


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all ranks for one step, where what ranks have or compute alike counts once.

    Attributes:
        flops, macs: in forward, by the formulas of DeepSpeed's profiler.
        forward, backward, recompute: flops of the operators that ran.
        params: elements of the parameters of the model.
        expert_params: those of experts among them.
    """

    flops: int = 0
    macs: int = 0
    forward: int = 0
    backward: int = 0
    recompute: int = 0
    params: int = 0
    expert_params: int = 0


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of this rank in the step that was counted, which counting makes longer.

    Attributes:
        forward, backward: of all micro-batches.
        step: of reductions that were left, and of the update.
        before: of the whole step before, which was not counted; 0 if there was none.
    """

    forward: float = 0.0
    backward: float = 0.0
    step: float = 0.0
    before: float = 0.0


@dataclass(frozen=True, slots=True)
class Facts:
    """The run around a profile.

    Attributes:
        world_size, data_size, model_size, stages: ranks, and ranks along the axes; data ranks have their own samples.
        micro_batch: samples of one micro-batch; None if unknown.
        micro_batches: of one step.
        recompute_factor: forward passes that backward repeats, as the user says.
        times: None where no step was measured.
        totals: None where nothing was summed over ranks.
        peak: floating-point operations per second that all ranks together could do; None if unknown.
        unknown: operators without a formula, with calls.
        sequence_size: ranks that share each sequence.
    """

    world_size: int = 1
    data_size: int = 1
    model_size: int = 1
    stages: int = 1
    micro_batch: int | None = None
    micro_batches: int = 1
    recompute_factor: float = 0.0
    times: Times | None = None
    totals: Totals | None = None
    peak: float | None = None
    unknown: Mapping[str, int] = field(default_factory=dict)
    sequence_size: int = 1


# -- the report --------------------------------------------------------------------------------------------------------


def report(rows: Sequence[Row], facts: Facts, *, step: int, depth: int, top: int, detailed: bool) -> str:
    """The report of a model.

    Args:
        rows: of all modules, the model first, each before those in it.
        facts: of the run.
        step: that was counted.
        depth: of the deepest modules among the top ones; -1 for all.
        top: modules that are shown at each depth.
        detailed: print the tree of modules.
    """
    parts = [
        _ruled("Flops Profiler"),
        f"Profile Summary at step {step}:",
        NOTATIONS,
        *(f"{label + ':':<{_LABEL}} {value}" for label, value in summary(rows[0], facts)),
        "",
        _ruled("Aggregated Profile per GPU"),
        top_modules(rows, depth, top),
    ]
    if detailed:
        parts += ["", _ruled("Detailed Profile per GPU"), DETAILS, tree(rows)]
    return "\n".join([*parts, "-" * _WIDTH, ""])


def _ruled(title: str) -> str:
    return f" {title} ".center(_WIDTH, "-")


def summary(model: Row, facts: Facts) -> list[tuple[str, str]]:
    """Labels and values of the summary."""
    lines = [
        ("world size", str(facts.world_size)),
        ("data parallel size", str(facts.data_size)),
        ("model parallel size", str(facts.model_size)),
    ]
    if facts.sequence_size > 1:
        lines.append(("sequence parallel size", str(facts.sequence_size)))
    if facts.stages > 1:
        lines.append(("pipeline stages", str(facts.stages)))
    if facts.micro_batch is not None:
        lines.append(("batch size per GPU", str(facts.micro_batch)))
    if facts.micro_batches > 1:
        lines.append(("micro-batches per step; what follows is of one unless it says step", str(facts.micro_batches)))
    lines += _sizes(model, facts)
    lines.append(("fwd latency", duration_text(model.seconds)))
    lines.append(("fwd FLOPS per GPU = fwd flops per GPU / fwd latency", rate_text(model.flops, model.seconds)))
    if facts.times is not None:
        lines += _speeds(model, facts, facts.times)
    return lines + _counted(model, facts)


def _sizes(model: Row, facts: Facts) -> list[tuple[str, str]]:
    lines, totals = [("params per GPU", params_text(model.params))], facts.totals
    if totals is not None:
        lines.append(("params of model", params_text(totals.params)))
        if totals.expert_params:
            lines.append(("expert params of model", params_text(totals.expert_params)))
            lines.append(("non-expert params of model", params_text(totals.params - totals.expert_params)))
    lines += [("fwd MACs per GPU", macs_text(model.macs)), ("fwd flops per GPU", flops_text(model.flops))]
    if totals is not None:
        label = "fwd flops of model" + (", slices and stages together" if facts.model_size * facts.stages > 1 else "")
        label += ", whole sequences" if facts.sequence_size > 1 else ""
        lines.append((label, flops_text(totals.flops / facts.data_size / facts.micro_batches)))
    return lines


def _speeds(model: Row, facts: Facts, times: Times) -> list[tuple[str, str]]:
    forward, backward = times.forward / facts.micro_batches, times.backward / facts.micro_batches
    whole, factor = times.forward + times.backward + times.step, facts.recompute_factor
    lines = [
        ("bwd latency", duration_text(backward)),
        (f"bwd FLOPS per GPU = {2 + factor:g} * fwd flops per GPU / bwd latency",
         rate_text((2 + factor) * model.flops, backward)),
        (f"fwd+bwd FLOPS per GPU = {3 + factor:g} * fwd flops per GPU / (fwd+bwd latency)",
         rate_text((3 + factor) * model.flops, forward + backward)),
        ("step latency", duration_text(times.step)),
        ("iter latency" + (" of a step" if facts.micro_batches > 1 else ""), duration_text(whole)),
        (f"FLOPS per GPU = {3 + factor:g} * fwd flops per GPU / iter latency",
         rate_text((3 + factor) * model.flops * facts.micro_batches, whole)),
    ]  # fmt: skip
    if facts.micro_batch is not None and whole > 0:
        samples = facts.micro_batch * facts.micro_batches * facts.data_size
        lines.append(("samples/second", f"{samples / whole:.2f}"))
    return lines


def _counted(model: Row, facts: Facts) -> list[tuple[str, str]]:
    """What was counted operator by operator."""
    lines = [
        ("flops of operators, forward", flops_text(model.forward)),
        ("flops of operators, backward", flops_text(model.backward)),
        ("flops of operators, recomputation in backward", flops_text(model.recompute)),
    ]
    totals, times = facts.totals, facts.times
    if totals is not None:
        lines.append(("flops of operators in a step of all ranks, forward", flops_text(totals.forward)))
        lines.append(("flops of operators in a step of all ranks, backward", flops_text(totals.backward)))
        lines.append(("flops of operators in a step of all ranks, recomputation", flops_text(totals.recompute)))
        if times is not None and times.before > 0:
            lines += _utilisation(facts, totals.forward + totals.backward, times.before)
    if facts.unknown:
        names = ", ".join(f"{name} ({calls})" for name, calls in sorted(facts.unknown.items()))
        lines.append(("operators without a formula, which count as 0 (calls)", names))
    return lines


def _utilisation(facts: Facts, flops: int, seconds: float) -> list[tuple[str, str]]:
    lines = [
        ("time of the step before, which was not counted", duration_text(seconds)),
        ("FLOPS per GPU = (forward + backward) / time of the step before / world size",
         rate_text(flops, seconds * facts.world_size)),
    ]  # fmt: skip
    if facts.peak:
        lines.append(("peak FLOPS per GPU", number_text(facts.peak / facts.world_size, "FLOPS")))
        lines.append(("model flops utilisation (MFU)", f"{100 * flops / seconds / facts.peak:.2f}%"))
    return lines


def top_modules(rows: Sequence[Row], depth: int, top: int) -> str:
    """The classes of modules with the most parameters, MACs and time, at each depth down to `depth`; -1 for all."""
    deepest = max(row.depth for row in rows)
    last = deepest if depth < 0 else min(depth, deepest)
    lines = ["Top modules in terms of params, MACs or fwd latency at different model depths:"]
    for level in range(last + 1):
        at_level = [row for row in rows if row.depth == level]
        lines.append(f"depth {level}:")
        lines.append(f"    params      - {_top(at_level, top, lambda row: row.params, params_text)}")
        lines.append(f"    MACs        - {_top(at_level, top, lambda row: row.macs, macs_text)}")
        lines.append(f"    fwd latency - {_top(at_level, top, lambda row: row.seconds, duration_text)}")
    return "\n".join(lines)


def _top(rows: Sequence[Row], count: int, value: Callable[[Row], float], text: Callable[[float], str]) -> str:
    sums: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        sums[row.kind] += value(row)
    best = sorted(sums.items(), key=lambda pair: -pair[1])[:count]
    return str({kind: text(total) for kind, total in best})


def tree(rows: Sequence[Row]) -> str:
    """The modules as `print(model)` shows them, with their numbers."""
    inner: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows[1:]:
        inner[row.path.rpartition(".")[0]].append(row)
    lines: list[str] = []

    def add(row: Row, name: str) -> None:
        indent, below = "  " * row.depth, inner[row.path]
        texts = [*_numbers(row, rows[0]), *([row.text] if row.text and not below else [])]
        begin = f"{indent}{name}{row.kind}("
        if not below:
            lines.append(f"{begin}{', '.join(texts)})")
            return
        lines.append(begin)
        lines.append(f"{indent}  {', '.join(texts)}")
        for each in below:
            add(each, f"({each.path.rpartition('.')[2]}): ")
        lines.append(f"{indent})")

    add(rows[0], "")
    return "\n".join(lines)


def _numbers(row: Row, model: Row) -> list[str]:
    return [
        params_text(row.params),
        f"{_percent(row.params, model.params)} Params",
        macs_text(row.macs),
        f"{_percent(row.macs, model.macs)} MACs",
        duration_text(row.seconds),
        f"{_percent(row.seconds, model.seconds)} latency",
        rate_text(row.flops, row.seconds),
        f"{flops_text(row.forward)} fwd",
        f"{flops_text(row.backward)} bwd",
        f"{flops_text(row.recompute)} recompute",
    ]
