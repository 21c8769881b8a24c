"""Parallelism other than over data: pipeline and tensor slices; and storage of activations."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mpispeed.config.section import Natural, Positive, Section, subsection


class Pipeline(Section):
    """Layers spread over ranks."""

    stages: Positive | None = Field(None, description='Number of stages; null or "auto" is what the model says.')
    partition: str = Field("best", description="How layers are spread: best, uniform, parameters or type:REGEX.")
    seed_layers: bool = Field(False, description="Seed the generator before each layer is built.")
    activation_checkpoint_interval: Natural = Field(0, description="Layers per recomputed block; 0 is off.")
    pipe_partitioned: bool = Field(True, description="Cut activations over the slices of a layer when sending.")
    grad_partitioned: bool = Field(True, description="Cut gradients over the slices of a layer when sending.")
    schedule: Literal["1f1b", "gpipe", "interleaved", "zb-h1"] | None = Field(
        None, description='Order of the passes; null or "auto" is 1f1b, or interleaved where ranks have several chunks.'
    )
    per_micro_batch: bool = Field(
        False,
        description="Stages 2 and 3: sum gradients, and gather parameters, for every micro-batch: less memory, more "
        "traffic. False: once in a step.",
    )
    use_reentrant: bool = Field(True, description="Accepted; recomputation is always non-reentrant.")


class TensorSlices(Section):
    """Slices of one layer."""

    tp_size: Positive = Field(1, description="Ranks that share a layer.")
    tp_grain_size: Positive = Field(1, description="Slices are multiples of this many elements.")
    mpu: Any = Field(None, description="An object that knows the ranks' positions; only from Python.")
    tp_group: Any = Field(None, description="A group of ranks; only from Python.")


class TensorParallel(Section):
    """Layers sliced over ranks automatically."""

    autotp_size: Natural = Field(0, description="Ranks that share each layer; 0 is off.")
    dtype: Literal["fp16", "bf16", "fp32", "int8"] = Field("fp16", description="Format of the cut layers.")
    tensor_parallel: TensorSlices = subsection(TensorSlices, "Slices of one layer; also read as tp.")
    injection_policy_tuple: Any = Field(None, description="Which layers are cut; only from Python.")
    vocab_parallel: bool = Field(False, description="Cut the embedding of tokens and the head by vocabulary too.")
    sequence_parallel: bool = Field(False, description="Cut the sequence between attention and MLP while training.")
    keep_module_on_host: bool = Field(False, description="Leave the modules in host memory while they are cut.")
    replace_with_kernel_inject: bool = Field(False, description="Replace modules by fused ones; also kernel_inject.")


class ActivationCheckpointing(Section):
    """Storage of activations that are kept for the backward pass."""

    partition_activations: bool = Field(False, description="Cut kept activations over the slices of a layer.")
    cpu_checkpointing: bool = Field(False, description="Keep them in host memory.")
    contiguous_memory_optimization: bool = Field(
        False, description="Keep them in one buffer; needs partition_activations and number_checkpoints."
    )
    number_checkpoints: Positive | None = Field(
        None, description="Recomputed blocks whose backward is still to come, at most; the slots of the one buffer."
    )
    synchronize_checkpoint_boundary: bool = Field(False, description="Synchronize the device at each block.")
    profile: bool = Field(False, description="Time forward and backward of each block.")
