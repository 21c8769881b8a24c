"""The section `elasticity` keeps the global batch on any of its numbers of ranks."""

import json

import pytest

from mpispeed.config.elastic_batch import SCHEDULED
from mpispeed.elasticity import ElasticityConfigError, ElasticityIncompatibleWorldSize
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, start, train_averaged, train_warm

SECTION = {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [1, 2]}


def elastic(**more):
    settings = {**config(1, 12, 1, **WARM), "elasticity": {**SECTION, **more}}
    return {
        key: value for key, value in settings.items() if key not in ("train_batch_size", "gradient_accumulation_steps")
    }


@pytest.mark.mpi(min_size=1)
def test_losses_are_those_of_the_batch_on_any_number_of_ranks():
    data = batches(4, 12)
    engine = start(elastic(), TinyLM())
    ranks = engine.mesh["data"].size
    assert engine.elasticity_enabled()
    assert engine.get_batch_info() == (12, {1: 2, 2: 2, 3: 2, 4: 1}[ranks], {1: 6, 2: 3, 3: 2, 4: 3}[ranks])
    # Ranks and micro-batches add up in another order than one whole batch.
    assert train_averaged(engine, data) == pytest.approx(train_warm(TinyLM(), data), rel=1e-4)
    engine.destroy()


@pytest.mark.mpi(min_size=3)
@pytest.mark.ranks(3)
def test_numbers_of_ranks_that_do_not_divide_the_batch_are_refused_everywhere():
    with pytest.raises(ElasticityIncompatibleWorldSize, match=r"3 ranks do not divide .* start 2 or 4 ranks"):
        start(elastic(version=0.1, max_train_batch_size=8), TinyLM())


@pytest.mark.mpi(min_size=2)
@pytest.mark.ranks(3)
def test_a_schedule_for_other_settings_is_refused_everywhere(monkeypatch, mpi_tmp_path):
    monkeypatch.setenv(SCHEDULED, json.dumps({**SECTION, "max_train_batch_size": 24}))
    with pytest.raises(ElasticityConfigError, match="max_train_batch_size is 12, and the scheduler chose"):
        start(elastic(), TinyLM())
