"""All tests of this folder run commands as processes of their own would."""

import pytest


@pytest.fixture(autouse=True)
def outside_of_a_world(no_world):
    """What other tests have joined does not count."""
