"""`curriculum_learning`, the older form: the length grows, and training is that of plain torch on cut batches."""

import pytest
import torch

from mpispeed.curriculum import truncate
from tests.helpers.covering import on_ranks
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, start, train_averaged, train_warm

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 2, 3, 4)]
BATCH = 36
LENGTHS = [2, 4, 6, 8, 8]
"""Of the first steps."""


def growth(kind="fixed_linear", **more):
    """The section: from 2 to 8 in 4 steps."""
    numbers = {"total_curriculum_step": 4, "difficulty_step": 2} if kind == "fixed_linear" else {}
    return {
        "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 2, "max_difficulty": 8, "schedule_type": kind,
        "schedule_config": numbers, **more,
    }  # fmt: skip


class Growing(TinyLM):
    """Takes the first `curriculum_seqlen` tokens to predict the next ones of, and notes each length."""

    def __init__(self, **more):
        super().__init__(**more)
        self.lengths = []

    def forward(self, tokens, curriculum_seqlen=None):
        self.lengths.append(curriculum_seqlen)
        return super().forward(tokens if curriculum_seqlen is None else tokens[:, : curriculum_seqlen + 1])


def started(stage=1, accumulation=1, section=None, model=None, **more):
    settings = config(stage, BATCH, accumulation, curriculum_learning=section or growth(), **{**WARM, **more})
    return start(settings, model or Growing())


@pytest.mark.parametrize("stage", on_ranks([0, 1, 2, 3]))
def test_training_is_that_of_plain_torch_on_cut_batches(stage):
    """The length is constant within a global batch, and evaluations between have the whole batch."""
    data = batches(5, BATCH)
    expected = train_warm(TinyLM(), [truncate(x, length + 1) for x, length in zip(data, LENGTHS, strict=True)])
    engine = started(stage, 3)
    found = []
    for x in data:
        found += train_averaged(engine, [x])
        engine.eval()
        with torch.no_grad():
            engine(x)
        engine.train()
    assert found == pytest.approx(expected, rel=1e-5)
    assert engine.module.lengths == [each for length in LENGTHS for each in (length, length, length, None)]
    assert engine.curriculum_enabled_legacy()
    assert engine.curriculum_params_legacy()["max_difficulty"] == 8
    assert engine.curriculum_scheduler_legacy.get_current_difficulty() == 8
    engine.destroy()
