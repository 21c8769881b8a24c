"""The profiler as scripts use it: what each module of a model computes, how long it takes, and its parameters."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from mpispeed.base.errors import UsageError
from mpispeed.flops.by_module import Counts, ModuleCounter
from mpispeed.flops.tables import Facts, Row, duration_text, flops_text, macs_text, params_text, report, top_modules


class FlopsProfiler:
    """Counts operations, MACs, parameters and seconds of each module of a model, in passes between start and stop.

    Numbers of several forward passes add up. Nothing is installed in the model before `start_profile` or left behind by
    `end_profile`; results stay until the next start.

    Args:
        model: the model.
        ds_engine: its engine, for the sizes of the run in the report; None: one rank.
        recompute_fwd_factor: forward passes that backward repeats, for the rates in the report.

    Attributes:
        flops, macs, params: totals of the model, as the getters give them.
        facts: what the report says of the run.
        passes: forward passes of the model that were counted; the numbers are of one.

    Source of the API: DeepSpeed's documentation, "Flops Profiler".

    Raises:
        UsageError: `model` is no module.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        if not isinstance(model, nn.Module):
            msg = f"FlopsProfiler(model): a torch.nn.Module is needed, found a {type(model).__name__}"
            raise UsageError(msg)
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.facts = _facts_of(ds_engine, recompute_fwd_factor)
        self.passes = 1
        self._counter: ModuleCounter | None = None
        self._ignored: tuple[Any, ...] = ()
        self._last: list[Row] = []

    # -- counting ------------------------------------------------------------------------------------------------------

    @property
    def counter(self) -> ModuleCounter | None:
        """What counts, between `start_profile` and `end_profile`."""
        return self._counter

    @property
    def started(self) -> bool:
        """True between `start_profile` and `end_profile`."""
        return self._counter is not None

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Count from now on, from zero.

        Args:
            ignore_list: classes of modules that are not counted.
        """
        self.end_profile()
        self._ignored, self._last = tuple(ignore_list or ()), []
        self._counter = ModuleCounter(self.model, ignore=self._ignored)
        self._counter.start()

    def stop_profile(self) -> None:
        """Count no more; the model is as before."""
        if self._counter is not None:
            self._counter.stop()

    def reset_profile(self) -> None:
        """Begin again from zero."""
        if self._counter is None:
            self._last = []
        else:
            self.start_profile(self._ignored)

    def end_profile(self) -> None:
        """Stop, and let go of what counted; the results stay."""
        if self._counter is not None:
            self._counter.stop()
            self._last, self._counter = self.rows(), None

    # -- results -------------------------------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """The numbers of all modules, the model first, each before those in it."""
        if self._counter is None and self._last:
            return self._last
        return rows_of(self.model, self._counter, self.passes)

    @property
    def flops(self) -> int:
        """`get_total_flops()`."""
        return round(self.rows()[0].flops)

    @property
    def macs(self) -> int:
        """`get_total_macs()`."""
        return round(self.rows()[0].macs)

    @property
    def params(self) -> int:
        """`get_total_params()`."""
        return self.rows()[0].params

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Floating-point operations of the forward pass, by the formulas of DeepSpeed's profiler."""
        return flops_text(self.flops) if as_string else self.flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiply-accumulate operations of the forward pass."""
        return macs_text(self.macs) if as_string else self.macs

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds of the forward pass."""
        seconds = self.rows()[0].seconds
        return duration_text(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Elements of the parameters of this rank's model, full ones where they are sharded."""
        return params_text(self.params) if as_string else self.params

    # -- reports -------------------------------------------------------------------------------------------------------

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | os.PathLike[str] | None = None,
    ) -> None:
        """Print the report: a summary, the top modules at each depth, and the tree of modules.

        Args:
            profile_step: the step that it names.
            module_depth: of the deepest modules among the top ones; -1 for all.
            top_modules: modules that are shown at each depth.
            detailed: print the tree of modules.
            output_file: a file instead of the screen; its folder is made.

        Raises:
            UsageError: nothing was counted, or the file cannot be written.
        """
        self._require_started("print_model_profile")
        text = report(
            self.rows(), self._facts(), step=profile_step, depth=module_depth, top=top_modules, detailed=detailed
        )
        write_report(text, output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the top modules at each depth.

        Args:
            module_depth: of the deepest ones; -1 for all.
            top_modules: modules that are shown at each depth.

        Raises:
            UsageError: nothing was counted.
        """
        self._require_started("print_model_aggregated_profile")
        write_report(_top_modules(self.rows(), module_depth, top_modules) + "\n", None)

    def _facts(self) -> Facts:
        unknown = self.facts.unknown if self._counter is None else self._counter.unknown
        return replace(self.facts, unknown=dict(unknown))

    def _require_started(self, call: str) -> None:
        if self._counter is None and not self._last:
            msg = f"FlopsProfiler.{call}(): nothing was counted; call start_profile() and run the model first"
            raise UsageError(msg)


_top_modules = top_modules


@contextmanager
def flops_of_step(model: nn.Module) -> Iterator[Counts]:
    """Context of the passes of one step; what it yields has their flops on this rank afterwards, per pass.

    For `forward`, `backward` and `recompute` of all operators that ran, without the column of DeepSpeed's formulas.
    Local: every rank counts its own.
    """
    counter, found = ModuleCounter(model, deepspeed=False), Counts()
    counter.start()
    try:
        yield found
    finally:
        counter.stop()
    total = counter.total()
    for name in found.__dataclass_fields__:
        setattr(found, name, getattr(total, name))


def rows_of(model: nn.Module, counter: ModuleCounter | None, passes: int = 1) -> list[Row]:
    """The numbers of all modules for one of `passes` equal forward passes; zeros without a counter."""
    found, totals = [], {} if counter is None else _totals(counter)
    for path, module in model.named_modules():
        counts = totals.get(path, Counts())
        found.append(
            Row(
                path,
                type(module).__name__,
                module.extra_repr().replace("\n", " "),
                sum(param.numel() for param in module.parameters()),
                counts.deepspeed_flops / passes,
                counts.deepspeed_macs / passes,
                counts.seconds / passes,
                counts.forward / passes,
                counts.backward / passes,
                counts.recompute / passes,
            )
        )
    return found


def _totals(counter: ModuleCounter) -> dict[str, Counts]:
    """`counter.total(path)` for all paths at once."""
    found: defaultdict[str, Counts] = defaultdict(Counts)
    for path, counts in counter.own.items():
        found[""].add(counts)
        at = path
        while at:
            found[at].add(counts)
            at = at.rpartition(".")[0]
    return found


def _facts_of(engine: Any, recompute_factor: float) -> Facts:
    """What an engine's getters say of the run."""
    if engine is None:
        return Facts(recompute_factor=recompute_factor)
    return Facts(
        world_size=engine.world_size,
        data_size=engine.dp_world_size,
        sequence_size=engine.seq_dp_world_size // engine.dp_world_size,
        model_size=engine.mp_world_size,
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        recompute_factor=recompute_factor,
    )


# -- files -------------------------------------------------------------------------------------------------------------


def prepare_file(path: str | os.PathLike[str]) -> None:
    """Make the folder of a report, and see that the file can be written.

    Raises:
        UsageError: names the file and the reason.
    """
    file = Path(path).absolute()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error
    if file.is_dir():
        raise _unwritable(path, "it is a folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise _unwritable(path, "permission denied")


def write_report(text: str, path: str | os.PathLike[str] | None) -> None:
    """Write a report into a file, or to the screen.

    Raises:
        UsageError: names the file and the reason.
    """
    if not path:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    prepare_file(path)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error


def _unwritable(path: object, reason: str) -> UsageError:
    return UsageError(
        f"the flops profile cannot be written to output_file {str(path)!r}: {reason}; give another file, or "
        "none for the screen"
    )
