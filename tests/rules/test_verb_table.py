"""The table of verbs in the guide is the one that the tests run."""

from tests.helpers.torch_verbs import GUIDE, written


def test_the_guide_has_the_table_of_the_tests():
    text = GUIDE.read_text()
    assert written(text) == text, "run `python -m tests.helpers.torch_verbs`"
