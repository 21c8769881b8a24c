"""The few cases that `make test` trains in layouts of three axes stand for all pairs of their settings."""

import itertools
from dataclasses import astuple

from tests.helpers.pipes import LAYOUTS, SCHEDULES, Case, every_case, pairwise_cases


def pairs(cases: list[Case]) -> set[object]:
    found: set[object] = set()
    for case in cases:
        values = enumerate((case.layout, *astuple(case)[1:5]))
        found.update(itertools.combinations(values, 2))
    return found


def test_each_pair_of_settings_is_trained() -> None:
    assert pairs(pairwise_cases()) == pairs(every_case())
    assert len(set(pairwise_cases())) == len(pairwise_cases()) <= 32


def test_all_cases_are_all() -> None:
    ours = {(case.layout, case.schedule, case.stage, case.dtype) for case in every_case()}
    several = sum(layout.pipe > 1 for layout in LAYOUTS)
    assert len(ours) == (several * len(SCHEDULES) + (len(LAYOUTS) - several) * (len(SCHEDULES) - 1)) * 4 * 2
