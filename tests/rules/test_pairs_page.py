"""The page of pairs of features is that of the data, and has every feature and every pair once."""

from collections import Counter

import pytest

from tests.helpers import pairs_page
from tests.helpers.features import BY_NAME, FEATURES, all_pairs, meaningless, sample

HOW = "run `python tools/pairs.py`"


def test_the_page_is_made_of_the_data():
    assert pairs_page.written(pairs_page.load()) == pairs_page.PAGE.read_text(), f"{HOW} --page"


def test_each_pair_of_features_is_on_the_page_once():
    found = Counter((first, second) for first, second, _ in pairs_page.pairs_of_page(pairs_page.PAGE.read_text()))
    assert found == Counter((first.name, second.name) for first, second in all_pairs()), HOW


def test_the_data_have_each_feature_alone_and_each_pair():
    alone = {(feature.name, feature.name) for feature in FEATURES}
    assert set(pairs_page.load()) == alone | {(first.name, second.name) for first, second in all_pairs()}, HOW


def test_pairs_that_cannot_be_are_told_by_the_rule():
    told = {pair for pair, fields in pairs_page.load().items() if fields["result"] == "meaningless"}
    assert told == {(first.name, second.name) for first, second in all_pairs() if meaningless(first, second)}, HOW


def test_each_feature_works_alone():
    bad = [name for name in BY_NAME if pairs_page.load()[name, name]["result"] != "works"]
    assert not bad


@pytest.mark.parametrize("result", ["refused", "no effect"])
def test_a_sentence_names_one_of_the_pair_or_both(result):
    silent = [
        (pair, fields["text"])
        for pair, fields in pairs_page.load().items()
        if fields["result"] == result
        and not any(word in fields["text"].lower() for name in pair for word in BY_NAME[name].words)
    ]
    assert not silent


def test_the_sample_has_each_feature_that_one_job_can_try():
    names = [feature.name for pair in sample() for feature in pair]
    assert len(set(names)) == len(names) >= len(FEATURES) - 2
