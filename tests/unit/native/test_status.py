"""What is usable, and what is said when it is not."""

from __future__ import annotations

import logging

import pytest

from mpispeed.base.errors import NativeMissing
from mpispeed.native import status


@pytest.fixture
def broken_import(monkeypatch):
    """Importing a compiled module fails with the given error."""

    def install(error):
        def refuse(name):
            raise error

        monkeypatch.setattr(status.importlib, "import_module", refuse)
        status._load.cache_clear()

    yield install
    monkeypatch.undo()
    status._load.cache_clear()


def test_everything_is_built_here():
    found = {c.name: c for c in status.report()}
    for name in status.MODULES:
        assert found[name].is_usable, found[name].reason
        assert status.require(name) is status.compiled(name)


def test_missing_module_has_its_reason(broken_import):
    name = "mpispeed._native.cpu_optim"
    broken_import(ModuleNotFoundError(f"No module named {name!r}", name=name))
    assert status.compiled("cpu_optim") is None
    with pytest.raises(NativeMissing, match="'cpu_optim' of mpispeed is not usable: it was not built"):
        status.require("cpu_optim")
    report = {c.name: c for c in status.report()}
    assert not report["cpu_optim"].is_usable
    assert "it was not built" in report["cpu_optim"].reason
    assert not report["vector loops"].is_usable


def test_missing_openmp_library_is_explained(broken_import):
    broken_import(ImportError("libgomp.so.1: cannot open shared object file"))
    with pytest.raises(NativeMissing, match="libgomp1"):
        status.require("fp_sum")


def test_fallback_is_logged_once(broken_import, monkeypatch, caplog):
    monkeypatch.setattr("mpispeed.base.log._seen", set())
    monkeypatch.setattr(logging.getLogger("mpispeed"), "propagate", True)
    broken_import(ImportError("undefined symbol: PyFoo"))
    with caplog.at_level(logging.WARNING, logger="mpispeed.native.status"):
        assert status.compiled("crc32c") is None
        assert status.compiled("crc32c") is None
    assert [r.getMessage() for r in caplog.records] == [
        "no compiled crc32c (checksums): undefined symbol: PyFoo; it may have been built for another Python or C "
        "library: build it again; a slower implementation runs instead"
    ]
