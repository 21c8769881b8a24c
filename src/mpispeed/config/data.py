"""Data: sampling by difficulty, token drop, and the older form of curriculum learning."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mpispeed.config.section import Integer, Natural, NonNegative, Positive, PositiveReal, Section, subsection

ScheduleType = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]


class DifficultySchedule(Section):
    """Growth of difficulty; schedule_type decides which keys are read."""

    total_curriculum_step: Positive | None = Field(
        None, description="fixed_linear, fixed_root: steps from the minimum to the maximum."
    )
    difficulty_step: Positive | None = Field(
        None, description="fixed_linear, fixed_root: difficulties are multiples of it, between minimum and maximum."
    )
    root_degree: PositiveReal | None = Field(None, description="fixed_root: degree of the root; 1 is fixed_linear.")
    difficulty: list[Integer] | None = Field(None, description="fixed_discrete: the difficulties.")
    max_step: list[Natural] | None = Field(
        None, description="fixed_discrete: last step of each difficulty but the last, in order; steps count from 1."
    )


class CurriculumLearning(Section):
    """The older form: difficulty of all samples as a function of the step."""

    enabled: bool = Field(False, description="Grow the difficulty during training.")
    curriculum_type: str | None = Field(
        None,
        description="What the difficulty is. seqlen: a length, which the model's forward gets as curriculum_seqlen in "
        "training, but not layers of a pipeline; other names pass nothing.",
    )
    min_difficulty: Natural | None = Field(None, description="Difficulty at the start.")
    max_difficulty: Natural | None = Field(None, description="Difficulty in the end.")
    schedule_type: ScheduleType | None = Field(
        None,
        description="How difficulty grows; custom: by a function of engine.set_custom_curriculum_learning_schedule.",
    )
    schedule_config: DifficultySchedule = subsection(DifficultySchedule, "Numbers of the schedule.")


class CurriculumMetric(Section):
    """One measure of difficulty."""

    index_to_sample_path: str | None = Field(
        None,
        description="Path, without .bin and .idx, of the analyzer's file NAME_index_to_sample; for percentiles also "
        "NAME_index_to_sample_percentile_merged. Not read for single_cluster.",
    )
    index_to_metric_path: str | None = Field(
        None, description="The same of NAME_index_to_metric; read if difficulty_type is value."
    )
    difficulty_type: Literal["value", "percentile"] | None = Field(
        None,
        description="Samples that a difficulty admits: those whose metric is not above it, or that percentage of the "
        "samples, of max_difficulty per cent.",
    )
    clustering_type: Literal["schedule_based", "single_cluster"] | None = Field(
        None,
        description="schedule_based, also if left out: the difficulty admits samples. single_cluster: it admits all, "
        "and is for a function of engine.set_data_post_process_func, which may cut batches.",
    )
    min_difficulty: Natural | None = Field(None, description="Difficulty at the start; it has to admit a sample.")
    max_difficulty: Natural | None = Field(None, description="Difficulty in the end.")
    schedule_type: ScheduleType | None = Field(
        None,
        description="How difficulty grows with global batches that were handed out, from 1; custom: by a function of "
        "engine.set_custom_curriculum_learning_schedule.",
    )
    schedule_config: DifficultySchedule = subsection(DifficultySchedule, "Numbers of the schedule.")


class SampledCurriculum(Section):
    """Samples chosen by measured difficulty."""

    enabled: bool = Field(False, description="Choose samples by difficulty; needs curriculum_metrics.")
    data_cluster_path: str | None = Field(
        None,
        description="Folder that all nodes share, for files of the samples that several metrics admit; made if it is "
        "missing, and used again by later runs. One metric needs none.",
    )
    curriculum_metrics: dict[str, CurriculumMetric] = Field(
        default_factory=dict, description="Name -> measure; a sample has to be admitted by all of them."
    )


class DataSampling(Section):
    """Choice and order of samples of training_data and of engine.deepspeed_io."""

    enabled: bool = Field(False, description="Use the keys below; needs data_efficiency.enabled.")
    num_epochs: Positive = Field(
        1000,
        description="Most passes over the data. By difficulty one pass of the loader has the samples of all of them.",
    )
    num_workers: Natural = Field(0, description="Processes of a loader that read samples.")
    curriculum_learning: SampledCurriculum = subsection(SampledCurriculum, "Samples by difficulty.")


class TokenSchedule(Section):
    """Numbers of the growth of kept tokens."""

    require_steps: Positive | None = Field(None, description="Steps from min_value to max_value.")
    seq_per_step: Positive | None = Field(None, description="The kept length between them is a multiple of this.")


class RandomLtdSchedule(Section):
    """Kept length as a function of the step; all keys are required."""

    min_value: Positive | None = Field(None, description="Kept tokens of a sample at the start.")
    max_value: Positive | None = Field(None, description="Kept tokens of a sample in the end: mostly all.")
    schedule_type: Literal["fixed_linear"] | None = Field(None, description="How it grows.")
    schedule_config: TokenSchedule = subsection(TokenSchedule, "Numbers of the growth.")


class LayerTokenLr(Section):
    """Learning rate by consumed layer tokens."""

    enabled: bool = Field(False, description="Not offered; only false is accepted.")


class RandomLtd(Section):
    """Some layers see a random part of the tokens; convert_to_random_ltd(engine, Layer) puts it into effect."""

    enabled: bool = Field(False, description="Drop tokens; data_efficiency and data_routing have to be enabled, too.")
    total_layer_num: Positive | None = Field(None, description="Layers of the model; required.")
    random_ltd_layer_num: Natural | None = Field(None, description="Layers that drop tokens; required.")
    random_ltd_layer_id: list[Natural] = Field(
        default_factory=list, description="Their numbers, as in the names of the layers."
    )
    model_mask_name: str | None = Field(
        None, description="The layers' argument that is the attention mask; null: none. An encoder needs it."
    )
    model_type: Literal["decoder", "encoder"] | None = Field(
        None, description="A decoder's masks that are common to all samples are causal; required."
    )
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | None = Field(
        None, description="Order of the first two dims of hidden states; required."
    )
    token_inputs: list[str] = Field(
        ["position_ids", "position_embeddings", "rotary_pos_emb"],
        description="Further arguments of the layers that run over tokens (mpispeed only).",
    )
    random_ltd_schedule: RandomLtdSchedule = subsection(RandomLtdSchedule, "Kept length.")
    layer_token_lr_schedule: LayerTokenLr = subsection(LayerTokenLr, "Learning rate by layer tokens.")


class DataRouting(Section):
    """Choice of the tokens that pass each layer."""

    enabled: bool = Field(False, description="Use the routing below.")
    random_ltd: RandomLtd = subsection(RandomLtd, "Random part of the tokens.")


class DataEfficiency(Section):
    """Sampling and routing of data."""

    enabled: bool = Field(False, description="Use the parts below that are enabled.")
    seed: Integer = Field(
        1234, description="Seed of the order of samples, if data_sampling is enabled, and of the choice of tokens."
    )
    data_sampling: DataSampling = subsection(DataSampling, "Which samples are seen when.")
    data_routing: DataRouting = subsection(DataRouting, "Which tokens pass which layers.")

    @property
    def routes_tokens(self) -> bool:
        """True if random-LTD is enabled at all three levels."""
        return self.enabled and self.data_routing.enabled and self.data_routing.random_ltd.enabled


class Eigenvalue(Section):
    """Curvature of blocks: the largest eigenvalue of the Hessian of each, by power iteration."""

    enabled: bool = Field(
        False,
        description="Compute eigenvalues, for monitors; where bits of weights fall, they slow their fall. Needs "
        "engine.backward(loss) or a pipeline, no slices, and operators that have second derivatives.",
    )
    verbose: bool = Field(False, description="Log the eigenvalues.")
    max_iter: Positive = Field(100, description="Most iterations for one block.")
    tol: NonNegative = Field(1e-2, description="Relative change of an eigenvalue at which its iteration ends.")
    stability: NonNegative = Field(
        1e-6, description="Added to the norm of a vector before it is divided, but no more than the norm itself."
    )
    gas_boundary_resolution: Positive = Field(1, description="Optimizer steps from one computation to the next.")
    layer_name: str = Field(
        "bert.encoder.layer",
        description="Name of the model's list of blocks; of a pipeline a pattern of the class names of its blocks.",
    )
    layer_num: Natural = Field(0, description="Number of blocks, from the first; 0: all of them.")
