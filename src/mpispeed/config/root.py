"""The whole configuration: top-level keys and sections."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, field_validator

from mpispeed.config.autotuning import Autotuning
from mpispeed.config.checkpoint import Checkpoint, Nebula
from mpispeed.config.compress import CompressionTraining, QuantizeTraining
from mpispeed.config.data import CurriculumLearning, DataEfficiency, Eigenvalue
from mpispeed.config.elastic import Elasticity
from mpispeed.config.experts import ExpertParallel
from mpispeed.config.later import HybridEngine, WeightQuantization
from mpispeed.config.layer_drop import ProgressiveLayerDrop
from mpispeed.config.loader import DataLoader
from mpispeed.config.monitor import Comet, CommsLogger, CsvMonitor, FlopsProfiler, Guard, Tensorboard, Timers, Wandb
from mpispeed.config.offload import Aio
from mpispeed.config.optimizer import Optimizer, Scheduler
from mpispeed.config.pipeline import ActivationCheckpointing, Pipeline, TensorParallel
from mpispeed.config.precision import Amp, Bf16, DataTypes, Dtype, Fp16, TorchAutocast
from mpispeed.config.record import RunRecord
from mpispeed.config.reproducibility import Reproducibility
from mpispeed.config.section import Bytes, NonNegative, Positive, PositiveReal, Section, Seed, subsection
from mpispeed.config.sequence import SequenceParallel
from mpispeed.config.sparse import SparseAttention
from mpispeed.config.trace import Trace
from mpispeed.config.walltime import Walltime
from mpispeed.config.zero import ZeroOptimization


class Config(Section):
    """All settings of a run. Null values are decided later, by the number of ranks or by other keys."""

    train_batch_size: Positive | None = Field(None, description="Samples of one optimizer step over all ranks.")
    train_micro_batch_size_per_gpu: Positive | None = Field(
        None, description="Samples of one forward pass of one rank."
    )
    gradient_accumulation_steps: Positive | None = Field(None, description="Forward passes per optimizer step.")
    seed: Seed = Field(1234, description="Seed of the order of samples (mpispeed only).")
    steps_per_print: Positive | None = Field(None, description="Steps between progress lines; null is no lines.")
    gradient_clipping: NonNegative = Field(0.0, description="Greatest global L2 norm of the gradients; 0 is off.")
    communication_data_type: Dtype | None = Field(
        None, description="Format in which gradients travel; null is the model's."
    )
    seq_parallel_comm_data_type: Dtype = Field(
        "fp32", description="The same where sequences are cut over ranks; a set communication_data_type comes first."
    )
    reduction: Literal["mpi", "ordered", "invariant"] = Field(
        "mpi",
        description="mpi: the MPI library's sums for fp32; ordered: sums in rank order, reproducible to the bit; "
        "invariant: the same bits at any number of ranks, by sums in the order of micro-batches (mpispeed only).",
    )
    prescale_gradients: bool = Field(False, description="Divide gradients by the ranks before the sum, not after.")
    gradient_predivide_factor: PositiveReal = Field(1.0, description="Divide by this before the sum, the rest after.")
    sparse_gradients: bool = Field(False, description="Send only the used rows of embedding gradients.")
    disable_allgather: bool = Field(False, description="Accepted; no effect.")
    wall_clock_breakdown: bool = Field(False, description="Time forward, backward and step.")
    memory_breakdown: bool = Field(False, description="Report memory around forward, backward and step.")
    dump_state: bool = Field(False, description="Print the state of the engine after it is built.")
    graph_harvesting: bool = Field(False, description="Accepted; no effect.")
    zero_allow_untested_optimizer: bool = Field(False, description="Let ZeRO run with any optimizer.")
    zero_force_ds_cpu_optimizer: bool = Field(
        True, description="No effect: any optimizer updates states in host memory, only the own those in files."
    )
    dataloader_drop_last: bool = Field(False, description="Drop a last batch that is short.")
    dataloader_shuffle: bool | None = Field(
        None,
        description="Shuffle training_data in each epoch; null is true, for a PipelineModule false (mpispeed only).",
    )
    vocabulary_size: Positive | None = Field(None, description="Warn if it is no multiple of 8.")
    use_data_before_expert_parallelism: bool = Field(False, description="Order of data and expert ranks.")
    host_memory_limit: Bytes | None = Field(
        None,
        description="Most bytes of host memory for the model states of one rank, such as 4e9 or 4GiB; what is planned "
        "is compared with it before anything is allocated. null compares with RLIMIT_AS, if that is set (mpispeed "
        "only).",
    )
    data_parallel_size: Positive | None = Field(
        None, description="Ranks with samples of their own, or groups of them that share samples."
    )
    sequence_parallel_size: Positive | None = Field(
        None, description="Ranks over which each sequence is cut; they share samples. null is 1."
    )

    optimizer: Optimizer | None = Field(None, description="Update rule.")
    scheduler: Scheduler | None = Field(None, description="Learning rate as a function of the step.")
    fp16: Fp16 = subsection(Fp16, "Half precision.")
    bf16: Bf16 = subsection(Bf16, "bfloat16; also read as bfloat16.")
    amp: Amp = subsection(Amp, "Mixed precision by Apex's keywords.")
    torch_autocast: TorchAutocast = subsection(TorchAutocast, "Passes within torch.autocast.")
    data_types: DataTypes = subsection(DataTypes, "Other number formats.")
    zero_optimization: ZeroOptimization = subsection(ZeroOptimization, "Cutting of model states.")
    aio: Aio = subsection(Aio, "Reads and writes of the nvme tier.")
    checkpoint: Checkpoint = subsection(Checkpoint, "Checkpoints.")
    guard: Guard = subsection(Guard, "Limits for hangs (mpispeed only).")
    trace: Trace = subsection(Trace, "What all ranks do when, in some steps (mpispeed only).")
    walltime: Walltime = subsection(Walltime, "Saving before the job ends (mpispeed only).")
    data_loader: DataLoader = subsection(DataLoader, "How training data is read (mpispeed only).")
    reproducibility: Reproducibility = subsection(
        Reproducibility, "What bits depend on beside the ranks (mpispeed only)."
    )
    run_record: RunRecord = subsection(RunRecord, "What a run did, in one file (mpispeed only).")
    nebula: Nebula = subsection(Nebula, "Accepted; no effect.")
    activation_checkpointing: ActivationCheckpointing = subsection(ActivationCheckpointing, "Kept activations.")
    pipeline: Pipeline = subsection(Pipeline, "Layers spread over ranks.")
    tensor_parallel: TensorParallel = subsection(TensorParallel, "Layers cut over ranks.")
    sequence_parallel: SequenceParallel = subsection(SequenceParallel, "Sequences cut over ranks (mpispeed only).")
    expert_parallel: ExpertParallel = subsection(ExpertParallel, "Experts of transformers' models spread over ranks.")
    tensorboard: Tensorboard = subsection(Tensorboard, "TensorBoard.")
    csv_monitor: CsvMonitor = subsection(CsvMonitor, "CSV files.")
    wandb: Wandb = subsection(Wandb, "Weights & Biases.")
    comet: Comet = subsection(Comet, "Comet.")
    comms_logger: CommsLogger = subsection(CommsLogger, "Records of communication.")
    timers: Timers = subsection(Timers, "Timers.")
    flops_profiler: FlopsProfiler = subsection(FlopsProfiler, "Floating-point operations.")
    autotuning: Autotuning = subsection(Autotuning, "Search for fast settings.")
    elasticity: Elasticity = subsection(Elasticity, "Changing numbers of ranks.")
    data_efficiency: DataEfficiency = subsection(DataEfficiency, "Sampling and routing of data.")
    curriculum_learning: CurriculumLearning = subsection(CurriculumLearning, "Growing difficulty, older form.")
    progressive_layer_drop: ProgressiveLayerDrop = subsection(ProgressiveLayerDrop, "Skipped layers.")
    sparse_attention: SparseAttention | None = Field(None, description="Attention in blocks.")
    compression_training: CompressionTraining = subsection(CompressionTraining, "Compression during training.")
    quantize_training: QuantizeTraining = subsection(QuantizeTraining, "Mixture of quantization.")
    eigenvalue: Eigenvalue = subsection(Eigenvalue, "Curvature of blocks.")
    hybrid_engine: HybridEngine = subsection(HybridEngine, "Train and generate.")
    weight_quantization: WeightQuantization = subsection(WeightQuantization, "Few-bit weights for inference.")

    @field_validator("steps_per_print", mode="before")
    @classmethod
    def take_infinity(cls, value: Any) -> Any:
        """Infinity, which means no lines, is null."""
        return None if isinstance(value, float) and value == math.inf else value

    def resolved_dict(self) -> dict[str, Any]:
        """All settings with their defaults, as plain values; a new dict at each call."""
        return self.model_dump(mode="python")
