"""Compression during training: quantization, pruning, fewer layers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from mpispeed.config.data import Eigenvalue
from mpispeed.config.section import Fraction, Names, Natural, Positive, Section, require_number, subsection

QuantizationType = Literal["symmetric", "asymmetric"]
Ratio = Annotated[float, Field(gt=0, lt=1), BeforeValidator(require_number)]


class MixedQuantize(Section):
    """Fade from fp16 to quantized values."""

    enabled: bool = Field(False, description="Mix fp16 and quantized values.")
    quantize_change_ratio: Fraction = Field(0.001, description="Change of the mix per step.")


class Group(Section):
    """Modules that share parameters of a technique."""

    modules: Names = Field(["*"], description='Names or patterns of modules; ["*"] is all Linear and Conv2d layers.')
    related_modules: list[Names] | None = Field(None, description="Modules pruned along.")


class WeightBits(Section):
    """Bits of weights."""

    start_bits: Positive = Field(..., description="Bits at the start.")
    target_bits: Positive = Field(..., description="Bits in the end.")
    quantization_period: Natural = Field(1, description="Steps until the first bit falls; 0 is as 1.")


class WeightGroup(Group):
    """Modules whose weights are quantized alike."""

    params: WeightBits = Field(..., description="Bits.")


class WeightShared(Section):
    """Common to all groups."""

    enabled: bool = Field(False, description="Quantize weights.")
    quantizer_kernel: bool = Field(False, description="Use native code.")
    schedule_offset: Natural = Field(0, description="First step.")
    quantize_groups: Positive = Field(1, description="Groups of a weight with their own scale.")
    quantize_verbose: bool = Field(False, description="Print what is done.")
    quantization_type: QuantizationType = Field("symmetric", description="Range of the integers.")
    rounding: Literal["nearest", "stochastic"] = Field("nearest", description="Rounding.")
    quantize_weight_in_forward: bool = Field(False, description="Quantize in forward; false: in the optimizer step.")
    fp16_mixed_quantize: MixedQuantize = subsection(MixedQuantize, "Fade from fp16.")


class WeightTechnique(Section):
    """Quantized weights."""

    shared_parameters: WeightShared = subsection(WeightShared, "Common to all groups.")
    different_groups: dict[str, WeightGroup] = Field(default_factory=dict, description="Name -> group.")


class ActivationBits(Section):
    """Bits of activations."""

    bits: Positive = Field(..., description="Bits.")


class ActivationGroup(Group):
    """Modules whose activations are quantized alike."""

    params: ActivationBits = Field(..., description="Bits.")


class ActivationShared(Section):
    """Common to all groups."""

    enabled: bool = Field(False, description="Quantize activations.")
    quantization_type: QuantizationType = Field("symmetric", description="Range of the integers.")
    range_calibration: Literal["static", "dynamic"] = Field("static", description="How ranges are found.")
    schedule_offset: Natural = Field(1000, description="First step.")


class ActivationTechnique(Section):
    """Quantized activations."""

    shared_parameters: ActivationShared = subsection(ActivationShared, "Common to all groups.")
    different_groups: dict[str, ActivationGroup] = Field(default_factory=dict, description="Name -> group.")


class Density(Section):
    """Share of elements that is kept."""

    dense_ratio: Ratio = Field(..., description="Part that is kept.")


class PruningGroup(Group):
    """Modules that are pruned alike."""

    params: Density = Field(..., description="How much is kept.")


class SparseShared(Section):
    """Common to all groups."""

    enabled: bool = Field(False, description="Prune single weights.")
    method: Literal["l1", "topk", "snip_momentum"] = Field("l1", description="How weights are chosen.")
    schedule_offset: Natural = Field(1000, description="First step.")
    block_pattern: str = Field("4x1", description="snip_momentum: NxM outputs by inputs, or N:M, N of M inputs go.")
    dense_ratio: Ratio = Field(0.1, description="snip_momentum: part that is kept.")
    schedule_offset_stride: Positive = Field(1, description="snip_momentum: steps from one pruning to the next.")
    excluded_modules: Names = Field([], description="snip_momentum: modules left alone.")
    schedule_offset_end: Natural | None = Field(None, description="snip_momentum: last step; null is the first.")


class SparsePruning(Section):
    """Prune single weights."""

    shared_parameters: SparseShared = subsection(SparseShared, "Common to all groups.")
    different_groups: dict[str, PruningGroup] = Field(default_factory=dict, description="Name -> group.")


class PruningShared(Section):
    """Common to all groups."""

    enabled: bool = Field(False, description="Prune.")
    method: Literal["l1", "topk"] = Field("l1", description="How rows or channels are chosen.")
    schedule_offset: Natural = Field(1000, description="First step.")


class RowPruning(Section):
    """Prune rows."""

    shared_parameters: PruningShared = subsection(PruningShared, "Common to all groups.")
    different_groups: dict[str, PruningGroup] = Field(default_factory=dict, description="Name -> group.")


class ChannelGroup(PruningGroup):
    """Convolutions whose channels are pruned alike."""

    modules: Names = Field(["*"], description='Names or patterns of modules; ["*"] is all Conv2d layers.')


class ChannelPruning(Section):
    """Prune channels of convolutions."""

    shared_parameters: PruningShared = subsection(PruningShared, "Common to all groups.")
    different_groups: dict[str, ChannelGroup] = Field(default_factory=dict, description="Name -> group.")


class HeadShared(Section):
    """Common to all groups."""

    enabled: bool = Field(False, description="Prune attention heads.")
    method: Literal["l1", "topk"] = Field("topk", description="How heads are chosen.")
    schedule_offset: Natural = Field(1000, description="First step.")
    num_heads: Positive | None = Field(None, description="Heads of a layer; required when enabled.")


class HeadPruning(Section):
    """Prune attention heads."""

    shared_parameters: HeadShared = subsection(HeadShared, "Common to all groups.")
    different_groups: dict[str, PruningGroup] = Field(default_factory=dict, description="Name -> group.")


class LayerReduction(Section):
    """A student with fewer layers than the teacher."""

    enabled: bool = Field(False, description="Reduce the layers.")
    keep_number_layer: Positive | None = Field(None, description="Layers of the student.")
    module_name_prefix: str | None = Field(None, description="Module list of the layers.")
    teacher_layer: list[Natural] = Field(default_factory=list, description="Layers that are copied.")
    other_module_name: Names = Field([], description="Other modules that are copied.")


class CompressionTraining(Section):
    """Compression during training."""

    weight_quantization: WeightTechnique = subsection(WeightTechnique, "Quantized weights.")
    activation_quantization: ActivationTechnique = subsection(ActivationTechnique, "Quantized activations.")
    sparse_pruning: SparsePruning = subsection(SparsePruning, "Single weights.")
    row_pruning: RowPruning = subsection(RowPruning, "Rows.")
    head_pruning: HeadPruning = subsection(HeadPruning, "Attention heads.")
    channel_pruning: ChannelPruning = subsection(ChannelPruning, "Channels.")
    layer_reduction: LayerReduction = subsection(LayerReduction, "Fewer layers.")


class QuantizeAlgorithm(Section):
    """Rounding of values to integers."""

    q_type: QuantizationType = Field("symmetric", description="Range of the integers.")
    rounding: Literal["nearest", "stochastic"] = Field("nearest", description="Rounding.")


class QuantizeBits(Section):
    """Bits of weights."""

    start_bits: Positive = Field(16, description="Bits at the start.")
    target_bits: Positive = Field(8, description="Bits in the end.")


class QuantizeSchedule(Section):
    """Schedule by which the number of bits falls."""

    quantize_period: Positive = Field(100, description="Steps per bit.")
    schedule_offset: Natural = Field(0, description="First step.")


class QuantizeTraining(Section):
    """Mixture of quantization: fewer bits as training goes on."""

    enabled: bool = Field(False, description="Quantize during training.")
    quantize_verbose: bool = Field(False, description="Print what is done.")
    quantizer_kernel: bool = Field(False, description="Use native code.")
    quantize_algo: QuantizeAlgorithm = subsection(QuantizeAlgorithm, "Also read as quantize-algo.")
    quantize_bits: QuantizeBits = subsection(QuantizeBits, "Bits of weights.")
    quantize_schedule: QuantizeSchedule = subsection(QuantizeSchedule, "When bits fall.")
    quantize_groups: Positive = Field(1, description="Groups of a weight with their own scale.")
    fp16_mixed_quantize: MixedQuantize = subsection(MixedQuantize, "Fade from fp16.")
    eigenvalue: Eigenvalue = subsection(Eigenvalue, "Curvature of blocks.")

    @property
    def technique(self) -> WeightTechnique:
        """The same as weight quantization of `compression_training`, of one group with all modules."""
        shared = {
            "enabled": self.enabled,
            "quantizer_kernel": self.quantizer_kernel,
            "schedule_offset": self.quantize_schedule.schedule_offset,
            "quantize_groups": self.quantize_groups,
            "quantize_verbose": self.quantize_verbose,
            "quantization_type": self.quantize_algo.q_type,
            "rounding": self.quantize_algo.rounding,
            "fp16_mixed_quantize": self.fp16_mixed_quantize.model_dump(),
        }
        bits = self.quantize_bits.model_dump() | {"quantization_period": self.quantize_schedule.quantize_period}
        groups = {"quantize_training": {"params": bits}}
        return WeightTechnique.model_validate({"shared_parameters": shared, "different_groups": groups})
