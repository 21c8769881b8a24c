"""Candidates of a file: its lists, stages, batches that are possible, and their names."""

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.config.autotuning import Autotuning
from mpispeed.tuning.forecast import Survey, survey
from mpispeed.tuning.space import Space, full_values, lists_of, name_of
from tests.helpers.tuning import ADAM, layers

BASE = {"optimizer": ADAM}


def space(raw, ranks=2, least=None, **tuning):
    return Space({**BASE, **raw}, Autotuning(**tuning), ranks, least)


def sizes(found):
    return [(one.micro_batch, one.point["gradient_accumulation_steps"]) for one in found]


def test_all_stages_and_powers_of_two_where_the_file_says_nothing():
    found = space({}, max_train_micro_batch_size_per_gpu=8).first()
    assert [one.stage for one in found] == [stage for stage in range(4) for _ in range(4)]
    assert sizes(found)[:4] == [(1, 1), (2, 1), (4, 1), (8, 1)]
    assert found[5].name == "z1_gas1_tmbspg2"
    assert found[5].config == {
        **BASE, "zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 2, "data_loader": {"stall_warning": 0},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "stages"), [(2, [2]), ([1, 3], [1, 3]), ("all", [0, 1, 2, 3]), ("auto", [0, 1, 2, 3])]
)
def test_stages_are_those_of_the_file(given, stages):
    found = space({"zero_optimization": {"stage": given}, "train_micro_batch_size_per_gpu": [4, 5]}).first()
    assert [one.stage for one in found] == [stage for stage in stages for _ in range(2)]


def test_a_micro_batch_of_the_file_or_the_script_is_the_least():
    assert sizes(space({"train_micro_batch_size_per_gpu": 3}, max_train_micro_batch_size_per_gpu=13).first())[:3] == [
        (3, 1), (6, 1), (12, 1),
    ]  # fmt: skip
    assert sizes(space({}, least=8, max_train_micro_batch_size_per_gpu=16).first())[:2] == [(8, 1), (16, 1)]
    found = space({}, min_train_micro_batch_size_per_gpu=4, max_train_micro_batch_size_per_gpu=4).first()
    assert set(sizes(found)) == {(4, 1)}


def test_a_batch_of_the_file_stays_as_it_is():
    found = space({"train_batch_size": 24, "zero_optimization": {"stage": 0}}).first()
    assert sizes(found) == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    assert {micro * steps * 2 for micro, steps in sizes(found)} == {24}
    assert "train_batch_size" not in found[0].config
    fixed = space({"train_batch_size": 24, "gradient_accumulation_steps": 3, "zero_optimization": {"stage": 0}}).first()
    assert sizes(fixed) == [(4, 3)]
    both = space(
        {"train_batch_size": [8, 16], "train_micro_batch_size_per_gpu": [4], "zero_optimization": {"stage": 0}}
    )
    assert sizes(both.first()) == [(4, 1), (4, 2)]
    many = space({"train_batch_size": 2 * 5040, "zero_optimization": {"stage": 0}}).first()
    assert len(many) == 12


def test_micro_batches_are_accumulated_up_to_the_greatest_batch():
    found = space(
        {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": [3, 8, 64]}, max_train_batch_size=40
    ).first()
    assert sizes(found) == [(3, 6), (8, 2)]
    listed = space(
        {
            "zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": [3, 8],
            "gradient_accumulation_steps": [1, 4],
        },
        max_train_batch_size=40, min_train_batch_size=10,
    ).first()  # fmt: skip
    assert sizes(listed) == [(3, 4), (8, 1)]


def test_ranks_that_share_a_model_have_one_batch():
    assert sizes(space({"train_batch_size": 8, "zero_optimization": {"stage": 0}}, ranks=4, mp_size=2).first())[-1] == (
        4,
        1,
    )
    sliced = {"tensor_parallel": {"autotp_size": [1, 2, 3]}, "train_batch_size": 8, "zero_optimization": {"stage": 0}}
    found = space({**sliced, "train_micro_batch_size_per_gpu": [2]}, ranks=4).first()
    assert [one.point["tensor_parallel.autotp_size"] for one in found] == [1, 2]
    assert sizes(found) == [(2, 1), (2, 2)]
    assert found[1].config["tensor_parallel"] == {"autotp_size": 2}


def test_ranks_that_share_a_sequence_have_one_batch():
    """So that all candidates train with the samples of a step that the file says."""
    shared = {"sequence_parallel_size": [1, 2, 3, 4], "train_batch_size": 8, "zero_optimization": {"stage": 0}}
    found = space({**shared, "train_micro_batch_size_per_gpu": [2]}, ranks=4).first()
    assert [one.point["sequence_parallel_size"] for one in found] == [1, 2, 4]
    assert sizes(found) == [(2, 1), (2, 2), (2, 4)]


def test_lists_in_the_place_of_values_are_tried_and_real_lists_stay():
    raw = {
        "train_micro_batch_size_per_gpu": [2, 4],
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": [0, 20000], "overlap_comm": [True, False]},
        "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "lr": [1e-3]}},
        "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]},
        "autotuning": {"enabled": True},
    }
    assert set(lists_of(raw)) == {
        "train_micro_batch_size_per_gpu", "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.overlap_comm",
    }  # fmt: skip
    found = space(raw).first()
    assert len(found) == 8
    assert len({one.name for one in found}) == 8
    assert "z3_gas1_tmbspg4_spbs2.0e+04_ocF" in {one.name for one in found}
    assert found[0].config["optimizer"] == raw["optimizer"]
    assert not {"autotuning", "comms_logger"} & set(found[0].config)


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage is 7"),
        ({"train_micro_batch_size_per_gpu": [2, "x"]}, "train_micro_batch_size_per_gpu"),
        ({"train_batch_size": 7}, "no batch is possible"),
        ({"zero_optimization": {"overlap_comm": []}}, "empty list"),
        ({"train_micro_batch_size_per_gpu": list(range(1, 9000))}, "more than"),
    ],
)
def test_files_without_candidates_are_refused(raw, word):
    with pytest.raises(ConfigError, match=word):
        space(raw).first()


def test_micro_batches_around_the_best():
    whole = space({}, num_tuning_micro_batch_sizes=3)
    best = next(one for one in whole.first() if one.micro_batch == 16 and one.stage == 2)
    assert sizes(whole.around(best)) == [(14, 1), (20, 1), (26, 1)]
    assert {one.stage for one in whole.around(best)} == {2}
    one = next(one for one in whole.first() if one.micro_batch == 1)
    assert whole.around(one) == []
    fixed = space({"train_batch_size": 24, "zero_optimization": {"stage": 0}})
    best = next(one for one in fixed.first() if one.micro_batch == 4)
    assert all(24 % (2 * one.micro_batch) == 0 for one in fixed.around(best))
    assert space({"train_micro_batch_size_per_gpu": [1, 7]}).has_own_sizes


def test_a_full_search_leaves_given_keys_alone(tmp_path):
    facts = Survey.of_values(survey([], layers(), ranks=2))
    whole = space({"zero_optimization": {"stage": 2, "reduce_bucket_size": 1234}, "train_batch_size": 4})
    found = whole.full(whole.first()[0], facts)
    assert {one.config["zero_optimization"]["reduce_bucket_size"] for one in found} == {1234}
    assert {one.config["zero_optimization"]["overlap_comm"] for one in found} == {False, True}
    assert len(found) == 6
    deep = full_values(3, {"offload_optimizer": {"nvme_path": str(tmp_path)}}, facts)
    assert deep["zero_optimization.offload_optimizer.device"] == ["none", "nvme"]
    assert 384 * 384 in deep["zero_optimization.reduce_bucket_size"]
    assert 3840 in deep["zero_optimization.param_persistence_threshold"]


def test_names_have_first_letters_and_values():
    point = {
        "zero_optimization.stage": 2, "gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 8,
        "zero_optimization.reduce_bucket_size": 50000000, "zero_optimization.overlap_comm": True,
        "activation_checkpointing.partition_activations": False,
    }  # fmt: skip
    assert name_of(point) == "z2_gas1_tmbspg8_rbs5.0e+07_ocT_acpaF"
