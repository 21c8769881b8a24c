"""Names that a lower floor finds in a higher one."""

import pytest

from mpispeed.base import late
from mpispeed.base.errors import UsageError


def test_what_was_provided_is_imported_when_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(late, "_PLACES", {})
    late.provide("join", "posixpath:join")
    assert late.find("join")("a", "b") == "a/b"
    with pytest.raises(UsageError, match="nothing is provided as 'split', only join"):
        late.find("split")


def test_the_root_names_the_resolver_of_init():
    import mpispeed

    assert mpispeed.__all__
    resolved = late.find("resolve_init_config")({"train_batch_size": 4})
    assert {key: resolved[key] for key in ("dtype", "override_module_apply", "device")} == {
        "dtype": None,
        "override_module_apply": True,
        "device": None,
    }
