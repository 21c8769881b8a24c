import math
from collections import OrderedDict

import h5py
import numpy as np
import pytest
import torch

from mpispeed.ckpt.format import hdf5, tree
from mpispeed.ckpt.format.errors import UnsupportedValue


class Custom:
    pass


def round_trip(tmp_path, value):
    tree.check(value, "client")
    with hdf5.Builder(tmp_path / "t.h5") as build:
        tree.write(build, build.root, "value", value)
    with hdf5.open_reading(tmp_path / "t.h5") as file:
        return tree.read(file.id, "value")


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -(2**63),
        2**64 - 1,
        2**64,
        -(10**500),
        1.5,
        -0.0,
        math.inf,
        "",
        "läuft\n",
        "nul\0inside",
        "x" * 100_000,
        b"",
        b"\0raw",
        1 + 2j,
        [],
        {},
        (),
        set(),
        [1, 2.0, "x", None, True],
        list(range(100)),
        tuple(float(i) for i in range(20)),
        [2**63 - 1 + i for i in range(20)],
        [True] * 20,
        (1, (2, [3, {"a": ()}])),
        {3, "a", None, (1, 2)},
        frozenset({1, 2}),
        {"a": 1, "b/c": 2, "%kind": 3, "%": 4, "": 5, ".": 6, "kind": 7},
        {0: {"step": 1}, 1: {"step": 2}, None: 3, (1, 2): 4, 1.5: 5},
        {"x": {}, "y": [], "z": [[]]},
    ],
)
def test_plain_values_come_back_equal_and_of_their_type(tmp_path, value):
    found = round_trip(tmp_path, value)
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value) or isinstance(value, (set, frozenset))


def test_nan_comes_back(tmp_path):
    assert math.isnan(round_trip(tmp_path, [math.nan])[0])


def test_order_of_keys_is_kept_over_many_keys(tmp_path):
    value = {f"k{i * 7919 % 3000}": ([i] if i % 3 else i) for i in range(3000)}
    assert list(round_trip(tmp_path, value).items()) == list(value.items())


@pytest.mark.parametrize("count", [48, 49, 5000])
def test_many_plain_values_take_few_attributes(tmp_path, count):
    """HDF5 keeps many attributes in a heap of their own, and finding them there takes long."""
    odd = [math.inf, None, True, 2**64, -5, 0.1, "nul\0", "läuft", "x" * 2000, 2**63]
    for value in ({f"k/{i}": odd[i % 10] for i in range(count)}, [odd[i % 10] for i in range(count)]):
        found = round_trip(tmp_path, value)
        assert found == value
        assert repr(found) == repr(value)
        with h5py.File(tmp_path / "t.h5") as file:
            assert file["value"].attrs.__len__() <= hdf5.MOST_ATTRIBUTES
        (tmp_path / "t.h5").unlink()


def test_no_text_is_of_variable_length(tmp_path):
    round_trip(tmp_path, {"a": "short", "long": "ö" * 5000, "b": ["x"] * 100, "nul": "\0", "c": {"d": ("y", "")}})
    with h5py.File(tmp_path / "t.h5") as file:
        kinds = []

        def look(_, item):
            kinds.extend(item.attrs.get_id(name).get_type() for name in item.attrs)
            kinds.extend([item.id.get_type()] if isinstance(item, h5py.Dataset) else [])

        file.visititems(look)
        texts = [kind for kind in kinds if isinstance(kind, h5py.h5t.TypeStringID)]
        assert len(texts) > 5
        assert not any(kind.is_variable_str() for kind in texts)


def test_dict_subclasses_come_back_as_dict(tmp_path):
    found = round_trip(tmp_path, OrderedDict(b=1, a=2))
    assert type(found) is dict
    assert list(found) == ["b", "a"]


@pytest.mark.parametrize("dtype", ["?", "i1", "<i8", "u4", "<f2", "f4", "f8", "c8", "c16", ">i4", ">f8"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_arrays_come_back(tmp_path, dtype, shape):
    value = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    found = round_trip(tmp_path, {"a": value, "s": value.dtype.type(1)})
    assert found["a"].dtype == value.dtype.newbyteorder("<")
    assert found["a"].shape == shape
    np.testing.assert_array_equal(found["a"], value)
    assert type(found["s"]) is value.dtype.type


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int64", "uint8", "bool", "complex64"]
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_tensors_come_back(tmp_path, dtype, shape):
    value = torch.arange(math.prod(shape)).reshape(shape).to(getattr(torch, dtype))
    found = round_trip(tmp_path, [value])[0]
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert torch.equal(found.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


def test_tensor_views_parameters_and_sizes(tmp_path):
    wide = torch.arange(12.0).reshape(3, 4)
    value = {"t": wide.t(), "p": torch.nn.Parameter(wide), "size": wide.shape, "conj": torch.tensor([1 + 2j]).conj()}
    found = round_trip(tmp_path, value)
    assert torch.equal(found["t"], wide.t())
    assert torch.equal(found["p"], wide)
    assert type(found["size"]) is torch.Size
    assert found["size"] == wide.shape
    assert torch.equal(found["conj"], torch.tensor([1 - 2j]))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, Custom()]}, r"client\['a'\]\[1\] is a .*Custom"),
        ({"a": {Custom(): 1}}, r"client\['a'\].*Custom"),
        ({"f": print}, r"client\['f'\] is a builtins.builtin_function"),
        ({"a": np.array(["x"])}, r"client\['a'\] is a numpy value of dtype <U1"),
        ({"a": np.array([None])}, "dtype object"),
        ({"a": torch.ones(2).to_sparse()}, "sparse"),
        ({"a": torch.ones(2, device="meta")}, "meta"),
        ("\ud800", "not valid Unicode"),
    ],
)
def test_unknown_objects_are_named_by_path(value, message):
    with pytest.raises(UnsupportedValue, match=message) as caught:
        tree.check(value, "client")
    assert isinstance(caught.value, TypeError)


def test_a_tree_that_contains_itself_is_refused():
    value = {"a": []}
    value["a"].append(value)
    with pytest.raises(UnsupportedValue, match="contains itself"):
        tree.check(value, "client")


def test_shared_parts_are_no_cycle():
    part = [1]
    assert tree.check({"a": part, "b": part}, "client") > 0


def test_tensors_can_be_described_without_torch(tmp_path):
    with hdf5.Builder(tmp_path / "t.h5") as build:
        tree.write(build, build.root, "v", {"t": torch.ones(2, 3).bfloat16()})
    with h5py.File(tmp_path / "t.h5") as file:
        assert tree.read(file.id, "v", lambda array, dtype: (array.shape, dtype)) == {"t": ((2, 3), "bfloat16")}
