"""Features of mpispeed that an engine may have together: one row each, for the table of all pairs of them.

A row says what the feature adds to a run, at which ZeRO stages it can be, what it promises about the numbers of a run
that has another feature too, and how one sees that it was in effect. `tests/helpers/pairs.py` runs pairs of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import mpispeed
from mpispeed.moe import MoE
from mpispeed.nn.sparse import SparseSelfAttention
from tests.helpers.compression import IN_PAIRS
from tests.helpers.feature import ANY, BATCH, CLOSE, CUT, FINAL, UP, Feature, put, together, zero
from tests.helpers.feature_models import Whole
from tests.helpers.features_of_data import TEXTS, compresses, drops_layers, drops_tokens, grows, is_sampled, recomputed
from tests.helpers.features_of_numbers import NUMBERS
from tests.helpers.index_files import metric
from tests.helpers.pipes import gpt_layers

if TYPE_CHECKING:
    from tests.helpers.pairs import Run

# -- how one sees a feature -----------------------------------------------------------------------------------------


def _stage(number: int) -> Feature:
    def seen(run: Run) -> bool:
        states = run.engine.plan.states
        cut = [not placing.is_replicated for placing in (states.master, states.grad, states.param)]
        if run.sums_late:  # a pipeline sums gradients once in a step: they are whole until then
            cut[1] = number >= 2
        return bool(run.engine.zero_optimization_stage() == number) and cut == [number >= least for least in (1, 2, 3)]

    keeps = CLOSE  # accumulation adds in another order at stages 2 and 3
    return Feature(f"ZeRO stage {number}", ("stage",), seen, stages=(number,), keeps=keeps, kind="stage")


def _dtype(name: str, dtype: torch.dtype) -> Feature:
    section = {"enabled": True, **({"initial_scale_power": 6} if name == "fp16" else {})}

    def seen(run: Run) -> bool:
        return all(param.dtype == dtype for param in run.engine.module.parameters())

    return Feature(name, (name, "16"), seen, put(name, section), keeps=FINAL, is_rounding=True)


def _config(run: Run) -> Any:
    return run.engine.plan.config.zero_optimization


def _files(tier: str) -> Callable[[Run], bool]:
    """True if states are in swap files."""

    def seen(run: Run) -> bool:
        states = run.engine.plan.states
        placing = states.param if tier == "param" else states.master
        return placing.tier.name == "NVME" and any(run.swap.rglob("*"))

    return seen


def _offload(tier: str, device: str) -> Feature:
    section: dict[str, Any] = {"device": device}
    if device == "nvme":
        section |= {"nvme_path": "FOLDER/swap", **({"max_in_cpu": 0} if tier == "param" else {})}

    def in_memory(run: Run) -> bool:
        states = run.engine.plan.states
        return (states.param if tier == "param" else states.master).tier.name == "HOST"

    seen = in_memory if device == "cpu" else _files(tier)
    name, stages = f"offload_{tier}, {device}", UP if tier == "param" else CUT
    return Feature(
        name, ("offload", "files", device), seen, zero(f"offload_{tier}", section), stages, kind=f"offload_{tier}"
    )


def _onebit(name: str, params: dict[str, Any]) -> Feature:
    """Full precision for two steps, since a variance of fewer makes large steps; the third one is coded."""
    settings = {"type": name, "params": {"lr": 1e-3, **params}}

    def seen(run: Run) -> bool:
        return run.engine.mpispeed.parts.optimization.exchange.is_phased

    return Feature(
        name, (name.lower(), "1-bit", "gradients stay local"), seen, put("optimizer", settings), (0, 1), FINAL,
        is_rounding=True, kind="optimizer",
    )  # fmt: skip


def _client(name: str, make: Callable[[nn.Module, list[Any]], Any], keeps: str, **more: Any) -> Feature:
    def seen(run: Run) -> bool:
        return (
            run.engine.basic_optimizer is not None and type(run.engine.basic_optimizer).__name__ == name.split(".")[-1]
        )

    return Feature(
        name, (name.split(".")[-1].lower(), "optimizer"), seen, keeps=keeps, kind="optimizer", client=make, **more
    )


def _sparse_adam(model: nn.Module, params: list[Any]) -> Any:
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return torch.optim.SparseAdam([{"params": tables}], lr=1e-2)


def _sequence_is_cut(run: Run) -> bool:
    cuts = [getattr(getattr(module, "entry", None), "sequence", None) for module in run.engine.module.modules()]
    return run.engine.mesh["model"].size == 2 and any(cut is not None for cut in cuts)


def _attends_to_blocks(run: Run) -> bool:
    """True if attention of this rank, where it has one, has the pattern of the config, and ran with it."""
    layers = [each for each in run.engine.module.modules() if isinstance(each, SparseSelfAttention)]
    return all(each.sparsity_config.block == 2 and each._blocks for each in layers)


def _elastic(settings: dict[str, Any], folder: Path) -> None:
    settings.pop("train_batch_size", None)
    settings["elasticity"] = {"enabled": True, "max_train_batch_size": BATCH, "micro_batch_sizes": [6, 8, 12]}


def _save_weights(run: Run) -> None:
    run.notes["wrote"] = run.engine.save_16bit_model(str(run.folder), "weights.bin")


def _whole_file(run: Run) -> bool:
    """The file has the whole model; that of a compressed one has scores and ranges, too."""
    shapes = sorted(tuple(param.shape) for param in Whole(ep_size=int("experts" in run.names)).parameters())
    found = torch.load(run.folder / "weights.bin", weights_only=True)
    own = [value for name, value in found.items() if not name.endswith(("_scores", "_range"))]
    return sorted(tuple(value.shape) for value in own) == shapes


def _in_nodes(run: Run) -> bool:
    return any(path.name.startswith("node") for path in run.folder.iterdir())


def _clipped(run: Run) -> bool:
    return run.engine.gradient_clipping() == 0.1 and run.engine.get_global_grad_norm() > 0.1


def _has_rates(run: Run) -> bool:
    return len(set(run.rates)) > 1


def _logged(run: Run) -> bool:
    from mpispeed.mesh import comms_log

    return comms_log.of_process().is_attached and bool(comms_log.of_process().rows())


def _counted_flops(run: Run) -> bool:
    totals = run.engine.flops_profiler.facts.totals
    return bool(run.loaded) or totals.backward > totals.forward > 0


def _drilled(run: Run) -> bool:
    return any(type(part).__name__ == "BeforeUpdate" for part in run.engine.updates._parts)


def _shares_experts(run: Run) -> bool:
    """True if this rank, where it has the layer, holds half of the experts."""
    layers = [each for each in run.engine.module.modules() if isinstance(each, MoE)]
    return all(each.deepspeed_moe.comm.size == 2 and len(each.deepspeed_moe.experts.held) == 2 for each in layers)


def _sends_rows(run: Run) -> bool:
    """True if this rank, where it has a table, sums rows of it."""
    has_table = any(isinstance(module, nn.Embedding) for module in run.engine.module.modules())
    reducer = run.engine.mpispeed.parts.optimization.grads.sums.reducer
    return not has_table or type(reducer).__name__ == "RowReducer"


def _sends_codes(run: Run) -> bool:
    return _config(run).zero_quantized_weights and not run.engine.plan.states.param.is_replicated


_SLICES = put("tensor_parallel", {"autotp_size": 2, "injection_policy_tuple": gpt_layers.SLICES})
_CODED = zero("zero_quantized_gradients", True)

FEATURES: tuple[Feature, ...] = (
    *map(_stage, ANY),
    _dtype("fp16", torch.float16),
    _dtype("bf16", torch.bfloat16),
    Feature(
        "accumulation", ("accumulation", "batch"), lambda run: run.engine.gradient_accumulation_steps() == 2,
        put("gradient_accumulation_steps", 2), keeps=CLOSE,
    ),
    Feature("gradient clipping", ("clip",), _clipped, put("gradient_clipping", 0.1), keeps=FINAL),
    *itertools.starmap(_offload, itertools.product(("optimizer", "param"), ("cpu", "nvme"))),
    Feature("zero.Init", ("zero.init",), lambda run: run.notes["was born cut"], stages=ANY[::-1]),
    Feature(
        "MiCS", ("mics",), lambda run: run.engine.plan.states.param.axes == ("data.inner",),
        zero("mics_shard_size", 2), UP,
    ),
    Feature(
        "hpZ", ("hpz",), lambda run: run.engine.plan.states.second is not None, zero("zero_hpz_partition_size", 2), UP
    ),
    Feature(
        "quantized weights", ("quantized",), _sends_codes,
        together(zero("zero_quantized_weights", True), zero("zero_quantized_in_node", True)), UP, FINAL,
        is_rounding=True,
    ),
    Feature(
        "quantized gradients", ("quantized",), lambda run: run.engine.plan.placing.hops is not None, _CODED, CUT, FINAL,
        is_rounding=True,
    ),
    Feature(
        "LoCo", ("loco", "quantized"), lambda run: run.engine.plan.placing.hops is not None,
        together(_CODED, zero("zeropp_loco_param", {"err_beta": 0.8, "reset_T": 1024})), CUT, FINAL, is_rounding=True,
    ),
    _onebit("OneBitAdam", {"freeze_step": 2}),
    _onebit("OneBitLamb", {"freeze_step": 2}),
    _onebit("ZeroOneAdam", {"var_freeze_step": 2, "local_step_scaler": 2, "local_step_clipper": 2}),
    Feature(
        "pipeline stages", ("pipeline", "stage"), lambda run: run.engine.mesh["pipe"].size == 2, keeps=CLOSE,
        axes={"pipe": 2},
    ),
    Feature(
        "slices", ("slice", "tensor_parallel", "cut over ranks"), lambda run: run.engine.mesh["model"].size == 2,
        _SLICES, keeps=CLOSE, axes={"model": 2},
    ),
    Feature(
        "sequence_parallel", ("sequence", "slice", "tensor_parallel"), _sequence_is_cut,
        together(_SLICES, put("tensor_parallel.sequence_parallel", True)), keeps=CLOSE, axes={"model": 2},
    ),
    Feature(
        "sequence axis", ("sequence",), lambda run: run.engine.mesh["sequence"].size == 2,
        put("sequence_parallel_size", 2), keeps=CLOSE, axes={"sequence": 2},
    ),
    Feature(
        "sparse attention", ("sparse_attention", "blocks"), _attends_to_blocks,
        put("sparse_attention", {"mode": "fixed", "block": 2, "num_local_blocks": 2, "attention": "unidirectional"}),
        keeps=FINAL,
    ),
    Feature("experts", ("experts", "mark_distinct", "parameters of their own"), _shares_experts, keeps=FINAL),
    Feature(
        "activation checkpointing", ("activation", "recompute"), recomputed,
        put("activation_checkpointing.partition_activations", True),
    ),
    Feature("sparse gradients", ("sparse",), _sends_rows, put("sparse_gradients", True), (0,), CLOSE),
    _client("torch.optim.AdamW", lambda model, params: torch.optim.AdamW(params, lr=1e-2), CLOSE),
    _client("mpispeed.optim.CPUAdam", lambda model, params: mpispeed.optim.CPUAdam(params, lr=1e-2), CLOSE),
    _client("torch.optim.SparseAdam", _sparse_adam, FINAL, stages=(0,)),
    Feature(
        "schedule of the rate", ("schedule", "rate"), _has_rates,
        put("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}}), keeps=FINAL,
    ),
    Feature(
        "curriculum learning", ("curriculum",), grows,
        put("curriculum_learning", {
            "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 2, "max_difficulty": 8,
            "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 2}}),
        keeps=FINAL,
    ),
    Feature(
        "progressive layer drop", ("layer_drop", "left out"), drops_layers,
        put("progressive_layer_drop", {"enabled": True, "theta": 0.2, "gamma": 3.0, "seed": 6}), keeps=FINAL,
        by_micro_batch=True,
    ),
    Feature(
        "sampling by difficulty", ("sampling",), is_sampled,
        put("data_efficiency", {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": {
            "enabled": True, "curriculum_metrics": {"number": metric(
                {"index_to_sample_path": "FOLDER/number_index_to_sample",
                 "index_to_metric_path": "FOLDER/number_index_to_metric"}, [TEXTS // 2, TEXTS - 1], [2])}}}}),
        keeps=FINAL,
    ),
    Feature(
        "random-LTD", ("random_ltd", "random-ltd"), drops_tokens,
        put("data_efficiency", {"enabled": True, "data_routing": {"enabled": True, "random_ltd": {
            "enabled": True, "total_layer_num": 2, "random_ltd_layer_num": 1, "random_ltd_layer_id": [0],
            "model_type": "decoder", "hidden_state_order": "batch_seq_dim", "random_ltd_schedule": {
                "min_value": 2, "max_value": 8, "schedule_type": "fixed_linear",
                "schedule_config": {"require_steps": 4, "seq_per_step": 2}}}}}),
        keeps=FINAL,
    ),
    Feature("compression", ("compress", "quantiz", "prun"), compresses, put("compression_training", IN_PAIRS),
            keeps=FINAL, is_rounding=True),
    Feature("checkpoint", ("checkpoint",), lambda run: bool(run.loaded), saves=True),
    Feature("async save", ("async_save", "background"), lambda run: bool(run.loaded),
            put("checkpoint.async_save", True), saves=True),
    Feature("node-local checkpoints", ("node",), _in_nodes, put("checkpoint.use_node_local_storage", True), saves=True),
    Feature("loaded by other ranks", ("ranks",), lambda run: bool(run.loaded), keeps=CLOSE),
    Feature(
        "walltime", ("walltime",), lambda run: bool(run.engine.resumed_from),
        put("walltime", {"signals": ["USR2"], "margin_seconds": 0, "ends_program": False, "save_dir": "run"}),
    ),
    Feature("elasticity", ("elastic",), lambda run: run.engine.elasticity_enabled(), _elastic, keeps=CLOSE),
    Feature(
        "monitors", ("monitor",), lambda run: True,
        put("csv_monitor", {"enabled": True, "output_path": "FOLDER", "job_name": "csv"}),
        left=lambda run: any(run.folder.rglob("*.csv")),
    ),
    Feature(
        "run record", ("record",), lambda run: "run_record" in run.engine.mpispeed.parts.features.published,
        put("run_record", {"enabled": True, "path": "FOLDER/record", "every": 1}),
        left=lambda run: (run.folder / "record" / "run.h5").exists(),
    ),
    Feature(
        "times and traces", ("wall_clock", "trace"), lambda run: run.engine.wall_clock_breakdown(),
        together(put("wall_clock_breakdown", True), put("trace", {
            "enabled": True, "start_step": 1, "end_step": 1, "path": "FOLDER/trace.json"})),
        left=lambda run: (run.folder / "trace.json").exists(),
    ),
    Feature("comms logger", ("comms_logger",), _logged, put("comms_logger.enabled", True)),
    Feature(
        "flops profiler", ("flops",), _counted_flops,
        put("flops_profiler", {"enabled": True, "profile_step": 1, "output_file": "FOLDER/flops.txt"}),
        left=lambda run: "loaded by other ranks" in run.names or (run.folder / "flops.txt").exists(),
    ),
    Feature("drills", ("inject", "drill"), _drilled),
    Feature("registered feature", ("counted", "feature"), lambda run: run.notes["counted"] == run.steps),
    Feature(
        "save_16bit_model", ("save_16bit", "parts of the model", "gather_16bit"),
        lambda run: run.notes["wrote"] is True,
        zero("stage3_gather_16bit_weights_on_model_save", True), act=_save_weights, left=_whole_file,
    ),
    Feature("mpispeed plan", ("planned", "plan"), lambda run: True, keeps=FINAL),
    *NUMBERS,
)  # fmt: skip
BY_NAME = {feature.name: feature for feature in FEATURES}

Pair = tuple[Feature, Feature]


def all_pairs() -> Iterator[Pair]:
    """Every two different features, in the order of the table."""
    return itertools.combinations(FEATURES, 2)


def meaningless(first: Feature, second: Feature) -> str:
    """Why two features cannot be in one run by what they are; "" if they can."""
    names = {first.name, second.name}
    if first.kind and first.kind == second.kind:
        return {
            "stage": "a run has one ZeRO stage",
            "optimizer": "a run has one optimizer",
            "offload_optimizer": "states rest in one place",
            "offload_param": "parameters rest in one place",
        }[first.kind]
    if "mpispeed plan" in names and (first.client or second.client):
        return "mpispeed plan reads a config, and the optimizer is an object of the script"
    if "mpispeed plan" in names and names & NOT_PLANNED:
        return "mpispeed plan starts no ranks"
    if "loaded by other ranks" in names and names & {"walltime", "node-local checkpoints", "save_16bit_model"}:
        other = (names - {"loaded by other ranks"}).pop()
        return f"{LOADED_BY_ITSELF[other]}; `checkpoint` with {other} is the pair"
    return ""


NOT_PLANNED = {"checkpoint", "loaded by other ranks", "drills", "registered feature", "save_16bit_model"}
LOADED_BY_ITSELF = {
    "walltime": "a run that ends in time is loaded by the next one by itself",
    "node-local checkpoints": "folders of nodes are loaded by jobs of these nodes",
    "save_16bit_model": "its file is no checkpoint",
}


def stage_of(*features: Feature) -> int:
    """The ZeRO stage of a run with these features: one at which all can be, else one that the most demanding needs."""
    given = [feature.stages[0] for feature in features if feature.kind == "stage"]
    if given:
        return given[0]
    common = set(ANY).intersection(*(feature.stages for feature in features))
    if not common:
        return max(feature.stages[0] for feature in features)
    return min(common, key=lambda stage: (sum(feature.stages.index(stage) for feature in features), -stage))


def sample() -> list[Pair]:
    """Each feature once, with a partner that rotates with the number of features."""
    pairs, left = [], [feature for feature in FEATURES if feature.name != "loaded by other ranks"]
    while len(left) > 1:
        first = left.pop(0)
        partner = next((one for one in left[len(left) // 2 :] if not meaningless(first, one)), left[-1])
        left.remove(partner)
        pairs.append((first, partner))
    return pairs
