import pytest
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import schema


@pytest.mark.parametrize("name", ["", ".", "..", "a.b", "a/b", "%", "%2F", "a%2Fb/c", "ünï", "a\0b", "%kind", " "])
def test_names_survive_escaping(name):
    stored = schema.escape(name)
    assert schema.unescape(stored) == name
    assert stored not in ("", ".")
    assert "/" not in stored
    assert "\0" not in stored


def test_escaping_leaves_ordinary_names_alone():
    assert schema.escape("model.layers.0.weight") == "model.layers.0.weight"


def test_names_that_are_no_text_are_refused():
    with pytest.raises(CheckpointError, match="not valid Unicode"):
        schema.escape("\ud800")


@pytest.mark.parametrize("name", schema.STORAGE)
def test_every_dtype_of_the_table_is_torchs_and_has_its_size(name):
    dtype = getattr(torch, name)
    assert schema.dtype_name(dtype) == name
    assert schema.STORAGE[name].itemsize == dtype.itemsize


def test_unknown_dtypes_are_named():
    with pytest.raises(CheckpointError, match="qint8"):
        schema.dtype_name(torch.qint8)


def test_versions():
    known = r"{}\.{}".format(*schema.VERSION)
    assert schema.check_version(schema.VERSION, "x") == ""
    assert "2.9" in schema.check_version((2, 9), "x")
    newer, older = (
        rf"3\.0, this library reads up to {known}; install",
        rf"1\.0, this library reads {known}; load it with",
    )
    with pytest.raises(CheckpointError, match=f"x has checkpoint format {newer}"):
        schema.check_version((3, 0), "x")
    with pytest.raises(CheckpointError, match=f"x has checkpoint format {older}"):
        schema.check_version((1, 0), "x")
