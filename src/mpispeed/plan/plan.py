"""The plan: config and world size with every "auto" and default resolved, equal on all ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.device import HOST
from mpispeed.base.errors import ConfigError, TopologyError, UnsupportedOption
from mpispeed.config.derive import batch_sizes, overlaps_communication
from mpispeed.config.dtypes import masters_and_grads
from mpispeed.config.mixed import cast_dtype
from mpispeed.mesh.device_paths import NOTHING, Choice
from mpispeed.optim.choice import needs_of
from mpispeed.plan.mixed import Mixed, mixed_precision
from mpispeed.plan.placements import Placing, States, place
from mpispeed.plan.sequence_axis import SequenceAxis
from mpispeed.plan.slots import Slots
from mpispeed.plan.state_dtypes import codes_of, describe_codes
from mpispeed.precision.policy import Policy, resolve
from mpispeed.sharding.collecting import Collecting
from mpispeed.sharding.prefetch import Limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mpispeed.config.root import Config
    from mpispeed.mesh.mesh import Axes, Topology

UNIT_ELEMENTS_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch triangle: `train_batch_size == micro_batch_size * gradient_accumulation_steps * ranks`.

    `ranks` are those of the batch axis: ranks that share sequences have the same samples.
    """

    train_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    ranks: int

    @property
    def triple(self) -> tuple[int, int, int]:
        """(train_batch_size, micro_batch_size, gradient_accumulation_steps)."""
        return self.train_batch_size, self.micro_batch_size, self.gradient_accumulation_steps

    def with_train_batch_size(self, size: int) -> Batch:
        """A batch of `size` samples with the same micro-batch size."""
        unit = self.micro_batch_size * self.ranks
        if size <= 0 or size % unit:
            msg = (
                f"train_batch_size {size} is no multiple of micro-batch size {self.micro_batch_size} times "
                f"{self.ranks} data-parallel ranks; choose a multiple of {unit}"
            )
            raise ConfigError(msg)
        return dataclasses.replace(self, train_batch_size=size, gradient_accumulation_steps=size // unit)

    def with_micro_batch_size(self, size: int) -> Batch:
        """A batch with the same number of micro-batches, of another size."""
        if size <= 0:
            msg = f"the micro-batch size must be positive, not {size}"
            raise ConfigError(msg)
        total = size * self.gradient_accumulation_steps * self.ranks
        return dataclasses.replace(self, train_batch_size=total, micro_batch_size=size)


@dataclass(frozen=True, slots=True)
class Plan:
    """The resolved settings of a run. `config` is kept for observers and queries; components get plain values."""

    config: Config
    world_size: int
    axes: dict[str, int]
    sequence: SequenceAxis
    batch: Batch
    stage: int
    placing: Placing
    ranks_per_node: int
    policy: Policy
    mixed: Mixed
    gradient_clipping: float
    is_prescaled: bool
    predivide: float
    is_overlapped: bool
    bucket_elements: int
    reduction: str
    optimizer_name: str | None
    optimizer_params: dict[str, Any]
    device: torch.device
    paths: Choice = NOTHING

    @property
    def states(self) -> States:
        """Placement of each kind of model state."""
        return self.placing.states

    @property
    def slots(self) -> Slots | None:
        """Who computes which micro-batch of the global batch, where that may not matter; None: it does.

        Raises:
            ConfigError: the ranks do not divide the micro-batches.
        """
        if self.config.reduction != "invariant":
            return None
        count, sequence = self.batch.train_batch_size // self.batch.micro_batch_size, self.sequence.size
        together = max((-(-size // sequence) for size in self.placing.distinct), default=1)
        in_turn = not self.states.grad.is_replicated
        return Slots(count, self.batch.ranks, in_turn, together=together, sequence=sequence)

    @property
    def gathers_once(self) -> bool:
        """True if sharded parameters stay gathered during a step, as in pipelines."""
        is_asked = self.axes["pipe"] > 1 and not self.config.pipeline.per_micro_batch
        return is_asked and not self.states.param.is_replicated

    @property
    def collecting(self) -> Collecting:
        """How updated parameters are collected."""
        zero = self.config.zero_optimization
        return Collecting(zero.allgather_bucket_size, by_broadcast=not zero.allgather_partitions)

    @property
    def fetch_limits(self) -> Limits:
        """How far ahead sharded parameters are fetched, and how long they stay."""
        zero = self.config.zero_optimization
        ahead = zero.prefetch_bucket_size if self.is_overlapped else 0
        return Limits(ahead=ahead, live=zero.max_live_parameters, reuse=zero.max_reuse_distance)

    @property
    def window_elements(self) -> int | None:
        """Most elements of a window of an update in memory; None: no limit."""
        return self.config.zero_optimization.sub_group_size if self.stage == 3 else None

    @property
    def scheduler_name(self) -> str | None:
        """The learning-rate schedule that the config names."""
        return self.config.scheduler.type if self.config.scheduler else None

    @property
    def scheduler_params(self) -> dict[str, Any]:
        """Its keywords."""
        return dict(self.config.scheduler.params) if self.config.scheduler else {}

    @property
    def steps_per_print(self) -> int | None:
        """Steps between progress lines; None: no lines."""
        return self.config.steps_per_print

    @property
    def cast_by(self) -> str:
        """The config section by which the model is cast, "fp16", "bf16", "amp" or ""."""
        return self.mixed.section

    @property
    def is_wire_set(self) -> bool:
        """True if messages of gradients have the dtype of the policy; else that of the parameters."""
        return bool(self.cast_by) or _wire(self.config, self.sequence) is not None

    @property
    def outlasts_overflows(self) -> bool:
        """True if a run goes on when gradients overflow at the minimum loss scale."""
        return self.stage == 0

    @property
    def layout(self) -> dict[str, int]:
        """`axes`, and "sequence" if it is cut: the inner part of "data"."""
        return {**self.axes, **({"sequence": self.sequence.size} if self.sequence.size > 1 else {})}

    def topology(self) -> Topology:
        """`axes`, divided as the placements need."""
        return self.placing.topology(self.axes)

    def is_in_node(self, axes: Axes) -> bool:
        """True if every group over `axes` lies on one node; False where nodes have different numbers of ranks."""
        if self.world_size <= self.ranks_per_node:
            return True
        return self.ranks_per_node > 0 and self.ranks_per_node % self.topology().block_size(axes) == 0

    def takes_codes(self, axes: Axes) -> bool:
        """True if groups over `axes` may send the codes of ZeRO++: those of one node only if the config asks for it.

        Inside of a node plain values travel faster than they are coded.
        """
        return self.config.zero_optimization.zero_quantized_in_node or not self.is_in_node(axes)

    def _coded(self) -> str:
        """What ZeRO++ codes, in words; empty where the config asks for no codes."""
        zero, said = self.config.zero_optimization, []
        if zero.zero_quantized_weights and not self.states.param.is_replicated:
            is_coded = self.takes_codes(self.states.param.axes)
            said.append("weights in 8 bits" if is_coded else "weights plain on one node")
        if zero.zero_quantized_gradients:
            hops = self.placing.sum_hops
            if hops is None or not self.takes_codes(hops):
                said.append("gradients plain on one node" if self.is_in_node("data") else "gradients plain")
            else:
                said.append("gradients in 4 bits" + (" between nodes" if not self.takes_codes(hops[0]) else ""))
        return ", ".join(said)

    def _divided(self) -> str:
        names = [factor.name for factor in self.placing.factors]
        sizes = [f"{name} {self.topology().group_size(name)}" for name in names]
        return f" ({', '.join(sizes)})" if sizes else ""

    def _replicated(self) -> str:
        is_one = self.stage == 1 and self.states.master.is_replicated
        return (
            f", with whole states on every rank: {self.optimizer_name or 'the optimizer'} needs them" if is_one else ""
        )

    def with_batch(self, batch: Batch) -> Plan:
        """The same plan with another batch."""
        return dataclasses.replace(self, batch=batch)

    def with_paths(self, paths: Choice) -> Plan:
        """The same plan with the ways that tensors of the device take between ranks."""
        return dataclasses.replace(self, paths=paths)

    def with_distinct(self, sizes: Iterable[int]) -> Plan:
        """The same plan for groups of neighbours on the data axis whose ranks have parameters of their own.

        Args:
            sizes: ranks of such groups (`plan.units.distinct_sizes`).
        """
        return dataclasses.replace(self, placing=self.placing.with_distinct(sizes))

    def digest(self) -> str:
        """A short hash of everything that must be equal on all ranks, except the policy, which may differ by stage."""
        text = self.config.model_dump_json() + repr((self.axes, self.batch, self.placing))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> list[tuple[str, str]]:
        """Rows (name, value) for the log at the start."""
        b, policy = self.batch, self.policy
        dtypes = ("compute", "accumulate", "master")
        names = {name: str(getattr(policy, name)).removeprefix("torch.") for name in dtypes}
        return [
            ("ranks", " x ".join(f"{axis} {size}" for axis, size in self.axes.items()) + self._divided()),
            ("batch", f"{b.train_batch_size} = {b.micro_batch_size} x {b.gradient_accumulation_steps} x {b.ranks}"),
            ("stage", f"{self.stage}" + self._replicated()),
            ("dtypes", ", ".join(f"{what} {dtype}" for what, dtype in names.items())),
            *([("autocast", said)] if (said := self.mixed.describe()) else []),
            *([("at rest", describe_codes(self.config))] if not codes_of(self.config).is_plain else []),
            ("wire", f"{str(policy.communicate).removeprefix('torch.')}, reduction {self.config.reduction}"),
            *([("codes", coded)] if (coded := self._coded()) else []),
            ("optimizer", self.optimizer_name or "given in code"),
            *([("device", str(self.device))] if self.device.type != "cpu" else []),
            *([("tensors", self.paths.describe())] if self.device.type != "cpu" and self.world_size > 1 else []),
            *([("curriculum", self._growth())] if self.config.curriculum_learning.enabled else []),
        ]

    def _growth(self) -> str:
        """The difficulty of the older form of curriculum learning, in words."""
        section = self.config.curriculum_learning
        steps = section.schedule_config.total_curriculum_step or max(section.schedule_config.max_step or [0])
        bounds = f"{section.curriculum_type} {section.min_difficulty} to {section.max_difficulty}"
        return f"{bounds}, {section.schedule_type}" + (f" over {steps} steps" if steps else "")


def make_plan(
    config: Config,
    world_size: int,
    model_dtype: torch.dtype,
    *,
    ranks_per_node: int | None = None,
    axes: Mapping[str, int] | None = None,
    device: torch.device = HOST,
    optimizer_kind: str | None = None,
) -> Plan:
    """Resolve `config` for `world_size` ranks; `ranks_per_node` None: all are on one node.

    `axes` has the sizes of pipe, data and model in the order of the ranks; None: all ranks are data parallel. It may
    have "sequence", the size of the inner part of data; else that is the config's. `device` is that of this rank.
    `optimizer_kind`: JSON name, in lower case, of an optimizer given in code; None: the config's.

    Raises:
        ConfigError: settings contradict each other, or do not work on the device; with keys, values and the cure.
        TopologyError: axis sizes do not multiply to the number of ranks.
    """
    axes = dict(axes) if axes is not None else {"pipe": 1, "data": world_size, "model": 1}
    size = axes.pop("sequence", config.sequence_parallel_size or 1)
    sequence = SequenceAxis(size, config.sequence_parallel.ring_size)
    data, ranks = axes["data"], _batch_ranks(config, axes, sequence)
    zero = config.zero_optimization
    optimizer, neighbours = config.optimizer, world_size if ranks_per_node is None else ranks_per_node
    node = _data_per_node(axes, neighbours)
    _check_device(config, device)
    mixed = mixed_precision(config)
    name = ((optimizer.type if optimizer else "") or "").lower() if optimizer_kind is None else optimizer_kind
    return Plan(
        config=config,
        world_size=world_size,
        axes=axes,
        sequence=sequence,
        batch=Batch(*batch_sizes(config, ranks, math.prod(axes.values())), ranks),
        stage=zero.stage,
        placing=dataclasses.replace(
            place(
                zero,
                data,
                node,
                sums_late=axes["pipe"] > 1 and not config.pipeline.per_micro_batch,
                needs=needs_of(name),
            ).with_sequence(sequence),
            data_per_node=node,
        ),
        ranks_per_node=neighbours,
        policy=_policy(config, mixed, sequence, model_dtype),
        mixed=mixed,
        gradient_clipping=config.gradient_clipping,
        is_prescaled=config.prescale_gradients,
        predivide=config.gradient_predivide_factor,
        is_overlapped=overlaps_communication(config),
        bucket_elements=min(max(zero.reduce_bucket_size, 1), UNIT_ELEMENTS_MAX),
        reduction="ordered" if config.reduction == "invariant" else config.reduction,
        optimizer_name=optimizer.type if optimizer else None,
        optimizer_params=dict(optimizer.params) if optimizer else {},
        device=device,
    )


def _policy(config: Config, mixed: Mixed, sequence: SequenceAxis, model_dtype: torch.dtype) -> Policy:
    return resolve(
        grad_accum_dtype=config.data_types.grad_accum_dtype or masters_and_grads(config) or None,
        communication_data_type=_wire(config, sequence),
        model_dtype=mixed.model or model_dtype,
    )


def _wire(config: Config, sequence: SequenceAxis) -> str | None:
    """The dtype in which gradients travel by the config; None: that of the model."""
    if config.communication_data_type is not None or sequence.size == 1:
        return config.communication_data_type
    is_asked = "seq_parallel_comm_data_type" in config.model_fields_set
    return config.seq_parallel_comm_data_type if is_asked or cast_dtype(config) else None


def _check_device(config: Config, device: torch.device) -> None:
    """Refuse settings that work in host memory only.

    Raises:
        UnsupportedOption: a setting is on that does not work on a device.
    """
    if config.sparse_gradients and device.type != "cpu":
        msg = (
            f"sparse_gradients works on host memory only, and this rank computes on {device}; leave it out, or set "
            "MPISPEED_DEVICE=cpu"
        )
        raise UnsupportedOption(msg)


def _batch_ranks(config: Config, axes: Mapping[str, int], sequence: SequenceAxis) -> int:
    """Ranks of the batch axis, of which `data_parallel_size` is the size."""
    sequence.check(axes["data"])
    wanted, ranks, world = config.data_parallel_size, axes["data"] // sequence.size, math.prod(axes.values())
    if wanted is not None and wanted != ranks:
        parts = {"pipeline stages": axes["pipe"], "ranks per sequence": sequence.size, "slices": axes["model"]}
        cut = " x ".join(f"{size} {what}" for what, size in parts.items() if size > 1)
        msg = (
            f"data_parallel_size {wanted} does not fit {world} ranks{f' at {cut}' if cut else ''}; start "
            f"{world // ranks * wanted} ranks or remove the key, the size then follows the ranks"
        )
        raise TopologyError(msg)
    return ranks


def _data_per_node(axes: Mapping[str, int], ranks_per_node: int) -> int:
    """Number of neighbours on the data axis that share a node; 0 if it differs between nodes."""
    names = list(axes)
    inner = math.prod(axes[name] for name in names[names.index("data") + 1 :])
    if ranks_per_node % inner:
        return 0
    return min(ranks_per_node // inner, axes["data"])
