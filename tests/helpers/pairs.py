"""Runs two features together and says what came of it: works, no effect, refused with its sentence, or fails.

All ranks of a job call these functions. A run trains three steps; after two of them it writes what its features write,
and where one is about checkpoints another engine makes the third step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

import mpispeed
from mpispeed import features as registry
from mpispeed.base.errors import CheckpointError, ConfigError, UsageError
from mpispeed.compression import init_compression
from mpispeed.config.accept import accept
from mpispeed.curriculum import truncate
from mpispeed.nn.layer_drop import convert_to_layer_drop
from mpispeed.nn.routing import convert_to_random_ltd
from mpispeed.pipe import PipelineModule, PipeModelDataParallelTopology
from mpispeed.sharding.sharded_param import is_sharded
from mpispeed.walltime import last_safe_step, requests
from tests.helpers import features as rows
from tests.helpers.closeness import nearness
from tests.helpers.feature import BATCH, FINAL, PROMISES, Feature
from tests.helpers.feature_models import SEED, SHAPE, Block, Whole, layers, widen
from tests.helpers.features_of_data import STEPS, TEXTS, Texts
from tests.helpers.index_files import write_metric
from tests.zoo.training import own_part

NODE = "2"
"""Ranks of a node: of 4 ranks there are two nodes, which second copies and coded sums tell apart."""

DRILL = "slow:rank=0,seconds=0.001@step=2"
WORKS, NO_EFFECT, REFUSED, MEANINGLESS, FAILS = "works", "no effect", "refused", "meaningless", "fails"


@dataclass(frozen=True)
class Outcome:
    """Of a pair. `kept` says how near losses are to those of one feature alone: "bits", "near" or "runs".

    `text` is the sentence that refuses, warns or explains.
    """

    result: str
    kept: str = ""
    text: str = ""

    def fields(self) -> dict[str, str]:
        """Those that are not empty."""
        return {name: value for name, value in asdict(self).items() if value}


class Run:
    """A training with some features."""

    def __init__(self, features: tuple[Feature, ...], folder: Path, stage: int) -> None:
        self.features, self.folder, self.stage = features, folder, stage
        self.names = {feature.name for feature in features}
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.notes: dict[str, Any] = {"counted": 0, "was born cut": False}
        self.steps, self.loaded = 0, ""
        self.engine: Any = None
        self._feed: Iterator[Any] | None = None  # of the engine's own data
        self.rank = mpispeed.init_distributed().rank
        self.own = folder / f"node{self.rank // int(NODE)}" if "node-local checkpoints" in self.names else folder
        self.own.mkdir(parents=True, exist_ok=True)

    @property
    def swap(self) -> Path:
        """Where swap files are."""
        return self.folder / "swap"

    @property
    def block_runs(self) -> int:
        """How often this rank ran a block."""
        return Block.runs

    @property
    def sums_late(self) -> bool:
        """True if gradients are whole until the end of a step only because a pipeline sums them then."""
        return bool(self.engine.plan.placing.sums_late)

    def settings(self) -> dict[str, Any]:
        """The config."""
        settings: dict[str, Any] = {
            "train_batch_size": BATCH, "reduction": "ordered", "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0},
        }  # fmt: skip
        self.swap.mkdir(exist_ok=True)
        for feature in self.features:
            feature.change(settings, self.folder)
        if {"random-LTD", "pipeline stages"} <= self.names:  # layers of a pipeline begin with the embedding
            settings["data_efficiency"]["data_routing"]["random_ltd"]["random_ltd_layer_id"] = [1]
        if "elasticity" in self.names and any(feature.axes for feature in self.features):
            settings["elasticity"] |= {"version": 0.2, "model_parallel_size": 2, "num_gpus_per_node": int(NODE)}
        return settings

    def make(self, seed: int) -> Any:
        """An engine. Collective over: all ranks."""
        settings = self.settings()
        born = (
            mpispeed.zero.Init(config_dict_or_path=settings) if "zero.Init" in self.names else contextlib.nullcontext()
        )
        with born:
            model = self._model(seed)
        if "progressive layer drop" in self.names and any(isinstance(each, Block) for each in model.modules()):
            convert_to_layer_drop(model, Block)
        if "MuAdamW" in self.names:
            widen(model)
        self.notes["was born cut"] = any(map(is_sharded, model.parameters()))
        make = next((feature.client for feature in self.features if feature.client), None)
        client: Any = None
        if make is not None:
            is_late = any("model" in feature.axes for feature in self.features)  # layers are cut in `initialize`
            if "compression" in self.names:  # which adds parameters
                model = init_compression(model, settings)
            client = (
                (lambda params: make(model, params))
                if is_late
                else make(model, [*model.parameters()] or [{"params": []}])
            )
        engine = mpispeed.initialize(model=model, optimizer=client, config=settings, training_data=self._texts())[0]
        self._feed = None if engine.training_dataloader is None else iter(engine.training_dataloader)
        if "curriculum learning" in self.names and engine.mesh["pipe"].size > 1:
            engine.set_batch_fn(lambda pair: _cut(pair, engine, self.notes))
        return convert_to_random_ltd(engine, Block) if "random-LTD" in self.names else engine

    def _texts(self) -> Texts | None:
        """Data that are sampled by difficulty, whose files are written; None for a run without. Collective."""
        if "sampling by difficulty" not in self.names:
            return None
        if self.rank == 0:
            write_metric(self.folder, "number", range(TEXTS))
        mpispeed.init_distributed().comm.barrier()
        return Texts()

    def _model(self, seed: int) -> torch.nn.Module:
        axes = {name: size for feature in self.features for name, size in feature.axes.items()}
        recomputes = "activation checkpointing" in self.names
        is_sparse = bool(self.names & {"torch.optim.SparseAdam", "sparse gradients"})
        ep_size, has_blocks = 2 * ("experts" in self.names), "sparse attention" in self.names
        if "pipe" not in axes:
            return Whole(seed=seed, recomputes=recomputes, is_sparse=is_sparse, ep_size=ep_size, has_blocks=has_blocks)
        slices = axes.get("model", 1)
        data = mpispeed.init_distributed().size // (axes["pipe"] * slices)
        model = PipelineModule(
            layers(ep_size=ep_size, has_blocks=has_blocks),
            topology=PipeModelDataParallelTopology(num_pp=axes["pipe"], num_mp=slices, num_dp=data),
            loss_fn=rows.gpt_layers.cross_entropy, seed_layers=True, base_seed=seed,
            activation_checkpoint_interval=int(recomputes),
        )  # fmt: skip
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.sparse = is_sparse
        return model

    def train(self, steps: int) -> None:
        """Go on for some steps."""
        for _ in range(steps):
            self.losses.append(self._step(len(self.losses)))
            self.rates.append(float(self.engine.get_lr()[0]))
            self.steps += 1

    def _step(self, step: int) -> float:
        engine, tokens = self.engine, torch.arange(SHAPE.block + 1) + torch.arange(BATCH)[:, None] * 7 + step
        batch = tokens[:, :-1] % 256, tokens[:, 1:] % 256
        micros = range(engine.gradient_accumulation_steps())
        if engine.mesh["pipe"].size > 1:
            own = None if self._feed else iter([own_part(engine, batch, micro) for micro in micros])
            return float(engine.train_batch(own))
        total = torch.zeros((), dtype=torch.float64)
        for micro in micros:
            loss = engine(*(next(self._feed) if self._feed else own_part(engine, batch, micro)))
            total += engine.backward(loss).detach().double()
            engine.step()
        engine.mesh["data"].all_reduce(total)
        return float(total) / engine.mesh["data"].size

    def go(self) -> list[str]:
        """Train, write, go on, end; names of features that were not in effect. Collective over: all ranks."""
        with self._prepared():
            self.engine = self.make(SEED)
            if "loaded by other ranks" in self.names:
                self._take_from_others()
            self.train(STEPS - 1 - len(self.losses))
            for feature in self.features:
                if feature.act is not None:
                    feature.act(self)
            self._change_engines()
            self.train(1)
            missing = [feature.name for feature in self.features if not feature.seen(self)]
            self.engine.destroy()
            mpispeed.init_distributed().comm.barrier()
            missing += [feature.name for feature in self.features if self.rank == 0 and not feature.left(self)]
        if not all(map(math.isfinite, self.losses)) or len(set(self.losses)) == 1:
            msg = f"losses are {self.losses}"
            raise ArithmeticError(msg)
        return missing

    def warnings(self, missing: list[str]) -> str:
        """What the config, the plan and the log say about features without effect."""
        told = [text for text in accept(self.settings(), "config").warnings if "no effect" in text]
        told += [f"stage {text}" for name, text in self.engine.plan.describe() if name == "stage" and "whole" in text]
        words = [word for name in missing for word in rows.BY_NAME[name].words]
        told += [text for text in _logged if any(word in text.lower() for word in words)]
        return "; ".join(dict.fromkeys(told))

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[None]:
        """What is set outside of a config."""
        before, Block.runs = Path.cwd(), 0
        _listen()
        os.environ["MPISPEED_RANKS_PER_NODE"] = NODE
        if "drills" in self.names:
            os.environ["MPISPEED_INJECT"] = DRILL
        if "registered feature" in self.names:
            registry.register(registry.Feature("counted", self._count))
        os.chdir(self.own)
        looks = (last_safe_step, "CHECK_SECONDS"), (requests, "LOOK_SECONDS")
        kept = [(module, name, getattr(module, name)) for module, name in looks]
        for module, name in looks:
            setattr(module, name, 0.0)  # ranks agree after each step, not once in a second
        try:
            yield
        finally:
            os.chdir(before)
            os.environ.pop("MPISPEED_INJECT", None)
            for module, name, value in kept:
                setattr(module, name, value)
            if "registered feature" in self.names:
                registry.unregister("counted")

    def _count(self, context: Any) -> registry.Hooks:
        def count(ctx: Any) -> None:
            self.notes["counted"] += 1

        def state() -> dict[str, int]:
            return {"counted": self.notes["counted"]}

        def load(kept: dict[str, int]) -> None:
            if kept["counted"] != STEPS - 1:
                msg = f"the state of the feature is {kept}"
                raise ValueError(msg)

        return registry.Hooks([(registry.Place.UPDATED, count)], state=state, load=load)

    # -- other engines ----------------------------------------------------------------------------------------------

    def _change_engines(self) -> None:
        """Where a feature is about checkpoints: save, and go on with another engine."""
        folder = str(self.own / "saved")
        if "walltime" in self.names:
            self._end_in_time()
        elif any(feature.saves for feature in self.features):
            self.engine.save_checkpoint(folder)
            self.engine.wait_checkpoint()
            self.engine.destroy()
            self.engine = self.make(SEED + 90)
            self.loaded = self.engine.load_checkpoint(folder)[0]

    def _end_in_time(self) -> None:
        """A signal on one rank, and the next run, which finds what was saved."""
        if self.rank == mpispeed.init_distributed().size - 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        asked = 0
        while not self.engine.must_stop:
            asked += 1
            if asked > 1000:
                msg = "a signal did not end the run"
                raise RuntimeError(msg)
            self.engine.heed_requests()
        self.engine.destroy()
        self.engine = self.make(SEED + 90)
        self.loaded = self.engine.resumed_from or ""

    def _take_from_others(self) -> None:
        source = others_folder(self.features)
        told = json.loads((source / "told.json").read_text())
        if "failed" in told:
            raise RuntimeError(told["failed"])
        if told["refused"]:
            raise ConfigError(told["refused"])
        self.losses, self.rates = told["losses"], told["rates"]
        self.loaded = self.engine.load_checkpoint(str(source))[0]

    def save_for_others(self) -> None:
        """Two steps on these ranks, saved for a job of others. Collective over: all ranks."""
        told: dict[str, Any] = {"refused": "", "losses": [], "rates": []}
        source = others_folder(self.features)
        try:
            with self._prepared():
                self.engine = self.make(SEED)
                self.train(STEPS - 1)
                self.engine.save_checkpoint(str(source))
                self.engine.wait_checkpoint()
                self.engine.destroy()
            told |= {"losses": self.losses, "rates": self.rates}
        except (ConfigError, UsageError, CheckpointError) as error:
            told["refused"] = one_line(error)
        if self.rank == 0:
            source.mkdir(parents=True, exist_ok=True)
            (source / "told.json").write_text(json.dumps(told))


def _cut(pair: Any, engine: Any, notes: dict[str, Any]) -> Any:
    """Inputs and labels of a pipeline with the length of the step, which is noted."""
    notes["length"] = engine.curriculum_scheduler_legacy.get_current_difficulty()
    return truncate(pair, notes["length"])


# -- outcomes -------------------------------------------------------------------------------------------------------

_references: dict[tuple[str, int], list[float] | None] = {}
_shared: list[Path] = []
_logged: list[str] = []
"""Of this process, because some are logged once."""


class _Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if "no effect" in record.getMessage() and record.getMessage() not in _logged:
            _logged.append(record.getMessage())


def _listen() -> None:
    """Hear what the package logs."""
    log = logging.getLogger("mpispeed")
    if not any(isinstance(handler, _Listener) for handler in log.handlers):
        log.addHandler(_Listener())


def share_folder(path: Path) -> None:
    """Name the folder of checkpoints of other ranks, and forget what ran before."""
    _shared[:] = [path]


def others_folder(features: tuple[Feature, ...]) -> Path:
    """Where a job of other ranks saves the run of the feature that is not about it."""
    return _shared[0] / next((f.key for f in features if f.name != "loaded by other ranks"), "alone")


def save_for_others(feature: Feature) -> None:
    """Two steps with a feature, or none, that a job of other ranks loads. Collective over: all ranks."""
    features = () if feature.name == "loaded by other ranks" else (feature,)
    with _folder() as folder:
        Run(features, folder, rows.stage_of(feature)).save_for_others()


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder of a run that all ranks see. Collective over: all ranks."""
    comm = mpispeed.init_distributed().comm
    folder = Path(comm.share(tempfile.mkdtemp(prefix="mpispeed-pair-") if comm.rank == 0 else ""))
    yield folder
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


def one_line(error: BaseException) -> str:
    """Its text on one line."""
    return " ".join(str(error).split())


def try_pair(first: Feature, second: Feature) -> Outcome:
    """What comes of two features; of one, if both are the same. Collective over: all ranks."""
    why = meaningless_pair(first, second)
    if why:
        return Outcome(MEANINGLESS, text=why)
    features = (first,) if first is second else (first, second)
    stage = rows.stage_of(*features)
    if "mpispeed plan" in {feature.name for feature in features}:
        return _forecast(features, stage)
    run, outcome = _tried(features, stage)
    if outcome.result != WORKS or first is second:
        return outcome
    # The feature that promises less is the reference: the other one may change no more than it promises.
    # Of two that promise the same, the one that makes one engine only.
    promising, other = sorted(features, key=lambda one: (PROMISES.index(one.keeps), not one.makes_engines))
    stages = [stage]
    if promising.kind == "stage":  # another stage is what the feature is without this one
        stages = [one for one in other.stages if one != stage]
    expected = _reference(other, stages[0]) if stages else None
    draws_others = other.by_micro_batch and promising.name in {"accumulation", "elasticity"}
    if expected is None or promising.keeps == FINAL or draws_others:
        return Outcome(WORKS, FINAL)
    kept = nearness(run.losses, expected, any(feature.is_rounding for feature in features))
    if kept == FINAL:
        told = f"losses are {run.losses}, and without {promising.name} {expected}"
        return Outcome(FAILS, kept, told)
    return Outcome(WORKS, kept)


def meaningless_pair(first: Feature, second: Feature) -> str:
    """Why a pair cannot be; "" if it can, or is one feature."""
    return "" if first is second else rows.meaningless(first, second)


def _reference(feature: Feature, stage: int) -> list[float] | None:
    """Losses of one feature alone at a stage; None if it does not run there."""
    if (feature.name, stage) not in _references:
        run, outcome = _tried((feature,), stage)
        _references[feature.name, stage] = run.losses if outcome.result == WORKS else None
    return _references[feature.name, stage]


def _tried(features: tuple[Feature, ...], stage: int) -> tuple[Run, Outcome]:
    """Run them in a folder of their own. Collective over: all ranks."""
    with _folder() as folder:
        run = Run(features, folder, stage)
        own = _own_outcome(run)
        outcome = joined(mpispeed.init_distributed().comm.gather_objects(own))
        return run, replace(outcome, text=outcome.text.replace(str(folder), "FOLDER"))


def _own_outcome(run: Run) -> Outcome:
    """What this rank says of a run."""
    try:
        missing = run.go()
        text = run.warnings(missing) if missing else ""
        if not missing:
            return Outcome(WORKS)
        return Outcome(NO_EFFECT, text=text) if text else Outcome(FAILS, text=f"not in effect: {', '.join(missing)}")
    except (ConfigError, UsageError, CheckpointError) as error:
        with contextlib.suppress(Exception):
            run.engine.destroy()
        return Outcome(REFUSED, text=one_line(error))
    except Exception as error:  # told, and the job begins anew
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return Outcome(FAILS, text=f"{type(error).__name__} at {where}: {one_line(error)}"[:600])


def joined(found: list[Outcome]) -> Outcome:
    """One outcome of those of all ranks: the worst one; a refusal of only some ranks is a failure."""
    results = [outcome.result for outcome in found]
    if FAILS in results:
        return found[results.index(FAILS)]
    if REFUSED in results and len(set(results)) > 1:
        rank = results.index(REFUSED)
        return Outcome(FAILS, text=f"only rank {rank} and its like refused: {found[rank].text}")
    return found[results.index(NO_EFFECT)] if NO_EFFECT in results else found[0]


def _forecast(features: tuple[Feature, ...], stage: int) -> Outcome:
    """What `mpispeed plan` says of a config; nothing is started. Collective over: all ranks."""
    from mpispeed.cli.plan import plan

    comm = mpispeed.init_distributed().comm
    if comm.rank:
        return comm.share(None)  # type: ignore[no-any-return]
    with tempfile.TemporaryDirectory() as scratch:
        settings = _settings(features, Path(scratch), stage)
        config = Path(scratch) / "ds.json"
        config.write_text(json.dumps(settings))
        kinds = {"experts": "WholeWithExperts", "sparse attention": "WholeWithBlocks", "MuAdamW": "WholeWithWidths"}
        model = next((kinds[feature.name] for feature in features if feature.name in kinds), "Whole")
        words = [str(config), "-n", "4", "--model", f"{Whole.__module__}:{model}", "--memory", "1e12", "--json"]
        words += ["--zero-init"] if any(feature.name == "zero.Init" for feature in features) else []
        done = CliRunner().invoke(plan, words)
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1] if done.exit_code else done.stdout)
        outcome = Outcome(WORKS, FINAL) if done.exit_code == 0 else Outcome(REFUSED, text=answer["error"])
    except (ValueError, KeyError, IndexError):
        outcome = Outcome(FAILS, text=f"exit code {done.exit_code}: {done.exception!r} {done.output}"[:600])
    return comm.share(outcome)  # type: ignore[no-any-return]


def _settings(features: tuple[Feature, ...], folder: Path, stage: int) -> dict[str, Any]:
    settings = Run(features, folder, stage).settings()
    stages = [feature.axes["pipe"] for feature in features if "pipe" in feature.axes]
    if stages:
        settings["pipeline"] = {"stages": stages[0]}  # a script's model says it, which is not there
    return settings
