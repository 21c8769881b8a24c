"""Two features at once: what the table of pairs says is what comes of them, tried with one partner of each feature.

`make matrix` tries every pair (`tools/pairs.py --check`).
"""

import pytest

from tests.helpers import pairs, pairs_page
from tests.helpers.features import sample

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.ranks(4)]


@pytest.mark.parametrize("pair", sample(), ids=lambda pair: f"{pair[0].key}-with-{pair[1].key}")
def test_a_pair_of_features_is_what_the_table_says(pair, monkeypatch):
    monkeypatch.setenv("MPISPEED_RANKS_PER_NODE", pairs.NODE)
    first, second = pair
    found = pairs.try_pair(first, second).fields()
    said = pairs_page.differs(pairs_page.load()[first.name, second.name], found)
    assert said is None, f"the table says {said}, and now it is {found}; see tools/pairs.py"
