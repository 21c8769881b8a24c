"""Few cases have every pair of values, and every value is on every number of ranks."""

import itertools

from tests.helpers.covering import IS_FULL, in_turn, on_ranks, pairwise

STAGES, DTYPES, COUNTS = (0, 1, 2, 3), ("fp32", "bf16", "fp16"), (1, 3)


def pairs(rows):
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


def test_every_pair_is_there_and_few_rows_are():
    rows = pairwise(STAGES, DTYPES, COUNTS)
    assert pairs(rows) == pairs(itertools.product(STAGES, DTYPES, COUNTS))
    assert len(rows) == len(set(rows))
    assert len(rows) <= 14 or IS_FULL


def test_every_value_runs_on_every_number_of_ranks():
    rows = [(size, *param.values) for param in on_ranks(STAGES, DTYPES) for size in param.marks[0].args]
    assert pairs(rows) == pairs(itertools.product((1, 2, 3, 4), STAGES, DTYPES))
    assert len(rows) <= 18 or IS_FULL


def test_in_turn_every_case_and_every_number_has_one():
    for cases in ([(0, "a"), (1, "b")], [(stage, dtype) for stage in STAGES for dtype in DTYPES]):
        params = in_turn(cases, ranks=(2, 3, 4))
        assert [param.values for param in params] == cases
        assert {size for param in params for size in param.marks[0].args} == {2, 3, 4}


def test_rows_that_do_not_fit_are_left_out():
    rows = pairwise(STAGES, DTYPES, COUNTS, fits=lambda stage, dtype, _: stage == 0 or dtype != "fp16")
    wanted = [row for row in itertools.product(STAGES, DTYPES, COUNTS) if row[0] == 0 or row[1] != "fp16"]
    assert pairs(rows) == pairs(wanted)
    assert set(rows) <= set(wanted)
