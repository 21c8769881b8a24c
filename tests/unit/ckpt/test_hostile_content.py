"""HDF5 files made by others, with checksums that fit: every one is refused at once, and nothing elsewhere is opened."""

import h5py
import numpy as np
import pytest

from mpispeed.ckpt import schema
from tests.unit.ckpt import attacks
from tests.unit.ckpt.attacks import as_older_file, move_data, read_all, refused, sign_files

MODEL, STATE = schema.MODEL_FILE, schema.STATE_FILE
TEXT = h5py.string_dtype()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    where = tmp_path_factory.mktemp("good")
    attacks.make(where)
    return where


@pytest.fixture
def folder(good, tmp_path):
    return attacks.copy(good, tmp_path)


def altered(folder, name, change):
    """Change an HDF5 file of the tag and let the manifest fit."""
    with h5py.File(folder / "step7" / name, "r+") as file:
        change(file)
    sign_files(folder / "step7")


def attribute(path, name, value, dtype=None):
    def change(file):
        owner = file[path]
        if name in owner.attrs:
            del owner.attrs[name]
        owner.attrs.create(name, value, dtype=dtype)

    return change


def replaced(path, **how):
    def change(file):
        if path in file:
            del file[path]
        file.create_dataset(path, **how)

    return change


def linked(path, target):
    def change(file):
        file[path] = file[target]

    return change


def slot_with_sums(name, **how):
    """A new slot of b.weight with a table of checksums of the right length."""

    def change(file):
        made = file.create_dataset(f"params/b.weight/{name}", **how)
        sums = -(-made.nbytes // schema.BLOCK_BYTES)
        file.create_dataset(f"integrity/b.weight/{name}", data=np.zeros(sums, np.uint32))

    return change


def group_of(name):
    """A copy of b.weight under a name as it is stored."""

    def change(file):
        file.copy("params/b.weight", "params/" + name)
        file.copy("integrity/b.weight", "integrity/" + name)

    return change


COMPOUND = np.dtype([("a", "<f4"), ("b", "<i8")])
ATTRIBUTES = ("step", "param_group", "tp_dim", "tp_sub_sizes", "tp_grains", "expert", "train_dtype", "kind", "sparse")
MODELS = {
    **{
        f"shape {value}": attribute("params/b.weight", "shape", value)
        for value in ([998], [1, 999], [-999], [2**62] * 4, [999.0], True, 999, [1] * 33, [np.nan], "999", [])
    },
    **{
        f"version {value}": attribute("/", "version", value)
        for value in ([1.5, 0], [np.nan, 0], [-1, 0], [1, -1], [True, False], [1], [1, 0, 0], "1.0", 1,
                      [2, 0], [2**62, 0])
    },
    "version empty": attribute("/", "version", h5py.Empty("i8")),
    **{
        f"{name} {value}": attribute("params/b.weight", name, value)
        for name in ATTRIBUTES
        for value in (h5py.Empty("f8"), "text of variable length", np.void(b"opaque"), np.zeros((), COMPOUND))
    },
    "huge text": attribute("params/b.weight", "kind", "x" * (8 << 20), TEXT),
    "reference": lambda file: file["params/b.weight"].attrs.create("more", file.ref, dtype=h5py.ref_dtype),
    "dtype of the model unknown": attribute("params/b.weight", "train_dtype", np.bytes_("object")),
    "scalars no json": attribute("params/b.weight", "scalars", np.bytes_("{")),
    "scalars deep": attribute("params/b.weight", "scalars", np.bytes_("[" * 30000)),
    "scalars a list": attribute("params/b.weight", "scalars", np.bytes_("[1]")),
    "scalars of text": attribute("params/b.weight", "scalars", np.bytes_('{"a": "b"}')),
    "dtype no number": attribute("params/c.bias/weight16", "dtype", np.bytes_("object")),
    "dtype wider": attribute("params/c.bias/weight16", "dtype", np.bytes_("float64")),
    "dtype of floats": attribute("params/b.weight/master", "dtype", np.bytes_("bfloat16")),
    "master of another shape": replaced("params/b.weight/master", shape=(3, 333), dtype="<f4"),
    "gzip": slot_with_sums("leak", data=np.zeros(5000, "<f4"), compression="gzip"),
    "chunks": slot_with_sums("leak", data=np.zeros(50, "<f4"), chunks=(10,)),
    "fletcher": slot_with_sums("leak", data=np.zeros(50, "<f4"), fletcher32=True),
    "resizable": slot_with_sums("leak", data=np.zeros(50, "<f4"), maxshape=(None,)),
    "objects": slot_with_sums("leak", data=["a", "b"], dtype=TEXT),
    "lists": slot_with_sums("leak", shape=(3,), dtype=h5py.vlen_dtype(np.int32)),
    "references": slot_with_sums("leak", shape=(3,), dtype=h5py.ref_dtype),
    "regions": slot_with_sums("leak", shape=(3,), dtype=h5py.regionref_dtype),
    "opaque": slot_with_sums("leak", data=np.zeros(3, "V8")),
    "compound": slot_with_sums("leak", data=np.zeros(3, COMPOUND)),
    "fixed text": slot_with_sums("leak", data=np.array([b"ab", b"cd"])),
    "big endian": slot_with_sums("leak", data=np.zeros(3, ">f4")),
    "arrays": slot_with_sums("leak", shape=(3,), dtype=np.dtype(("<f4", (2,)))),
    "empty": slot_with_sums("leak", data=h5py.Empty("<f4")),
    "a type": lambda file: file.__setitem__("params/b.weight/leak", np.dtype("<f4")),
    "slot named buffer": slot_with_sums("buffer", data=np.zeros(3, "<f4")),
    "no checksums": lambda file: file.__delitem__("integrity/b.weight/master"),
    "short checksums": replaced("integrity/b.weight/master", data=np.zeros(0, np.uint32)),
    "wide checksums": replaced("integrity/b.weight/master", data=np.zeros(1, np.uint64)),
    "cycle": linked("params/again", "params"),
    "cycle inside": linked("params/b.weight/again", "params/b.weight"),
    "cycle to the root": linked("params/b.weight/again", "/"),
    "two names of a tensor": lambda file: (
        linked("params/b.weight/exp_avg", "params/b.weight/master")(file),
        linked("integrity/b.weight/exp_avg", "integrity/b.weight/master")(file),
    ),
    "two names of a parameter": lambda file: (
        linked("params/again", "params/b.weight")(file), linked("integrity/again", "integrity/b.weight")(file)
    ),
    "tensor is its own checksums": lambda file: (
        file.__delitem__("buffers/steps"), replaced("buffers/steps", data=np.zeros(1, "<u4"))(file),
        file.__delitem__("integrity/steps/buffer"), linked("integrity/steps/buffer", "buffers/steps")(file),
    ),
    "alias of nothing": attribute("aliases", "tied", np.bytes_("gone")),
    "alias of an alias": attribute("aliases", "more", np.bytes_("tied")),
    "alias of itself": attribute("aliases", "more", np.bytes_("more")),
    "alias that is a parameter": attribute("aliases", "a.weight", np.bytes_("b.weight")),
    "alias of a number": attribute("aliases", "tied", 5),
    "name spelled otherwise": group_of("%61.weight"),
    "name with a small sign": group_of("x%2fy"),
    "name of a marker": group_of("%kind"),
    "long name": lambda file: file.create_group("params/" + "n" * 60000),
    "name that no screen shows": lambda file: file.create_group("params/\x1b[2J\x07"),
    "no parameters": lambda file: file.__delitem__("params"),
    "parameters a dataset": replaced("params", data=1.0),
    "other tag": attribute("/", "tag", 7),
    "step no number": attribute("/", "global_step", np.nan),
}  # fmt: skip


@pytest.mark.parametrize("what", MODELS)
def test_models(folder, tmp_path, what):
    altered(folder, MODEL, MODELS[what])
    message = refused(folder, tmp_path / "outside")
    assert MODEL in message
    assert message.isprintable()


@pytest.mark.parametrize("offset", [-1, -4096, 2**63, 2**62, 10**12, "size", "end", "other", "sums", 0])
@pytest.mark.parametrize("dataset", ["params/b.weight/master", "integrity/b.weight/master"])
def test_places_that_are_beyond_the_file_or_taken(folder, dataset, offset):
    path = folder / "step7" / MODEL
    as_older_file(path)
    sign_files(folder / "step7")
    read_all(folder)
    with h5py.File(path) as file:
        size, other = path.stat().st_size, file["params/a.weight/master"].id.get_offset()
        known = {
            "size": size,
            "end": size - 2,
            "other": other + 8,
            "sums": file["integrity/a.weight/master"].id.get_offset(),
        }
    move_data(path, dataset, known.get(offset, offset))
    sign_files(folder / "step7")
    assert MODEL in refused(folder)


def test_odd_names_are_names(folder):
    def change(file):
        for name in ("..%2F..%2Fetc", "\x1b[31m", "a b", "ö", "%", "n" * 5000):
            group_of(name)(file)

    altered(folder, MODEL, change)
    _, params, *_ = read_all(folder)
    assert {"../../etc", "\x1b[31m", "a b", "ö", "", "n" * 5000} < set(params)


def client(change):
    """A dict with one key "leak" in the state, whose value is made by `change(group)`."""

    def plant(file):
        group = file["state/client"]
        for name in list(group.attrs):
            del group.attrs[name]
        group.attrs["%kind"] = "dict"
        group.attrs["%length"] = 1
        group.attrs.create("%keys", ["leak"], dtype=TEXT)
        change(group)

    return plant


def dataset(kind, **how):
    def change(group):
        group.create_dataset("leak", **how).attrs["%kind"] = kind

    return client(change)


def sequence(kind, length, **values):
    def change(group):
        made = group.create_group("leak")
        made.attrs["%kind"] = kind
        made.attrs["%length"] = length
        for name, value in values.items():
            made.attrs[name[1:]] = value

    return client(change)


def deep(group):
    for _ in range(1100):
        made = group.create_group("leak")
        made.attrs["%kind"] = "dict"
        made.attrs["%length"] = 1
        made.attrs.create("%keys", ["leak"], dtype=TEXT)
        group = made
    group.attrs["leak"] = 1


def laughs(group):
    """A key that is named twice, forty levels deep."""
    for _ in range(40):
        made = group.create_group("leak")
        made.attrs["%kind"] = "dict"
        made.attrs["%length"] = 2
        made.attrs.create("%keys", ["leak", "leak"], dtype=TEXT)
        group = made
    group.attrs["leak"] = 1


def tensor(dtype, **how):
    def change(group):
        made = group.create_dataset("leak", **how)
        made.attrs["%kind"] = "tensor"
        made.attrs["dtype"] = dtype

    return client(change)


STATES = {
    "deep": client(deep),
    "keys twice": client(laughs),
    "unknown kind": sequence("object", 0),
    "kind a number": sequence(5, 0),
    "very long": sequence("list", 10**15),
    "length nan": sequence("list", np.nan),
    "length text": sequence("list", "many"),
    "lists in a set": lambda file: client(lambda group: _nest(group, "set", "list"))(file),
    "items without pairs": sequence("items", 1, _0=5),
    "size of text": sequence("size", 1, _0="x"),
    "pickle": dataset("pickle", data=np.zeros(3, np.uint8)),
    "objects": dataset("array", data=["a", "b"], dtype=TEXT),
    "references": dataset("array", shape=(3,), dtype=h5py.ref_dtype),
    "lists": dataset("array", shape=(3,), dtype=h5py.vlen_dtype(np.int32)),
    "opaque": dataset("bytes", data=np.zeros(3, "V8")),
    "compound": dataset("array", data=np.zeros(3, COMPOUND)),
    "gzip": dataset("bytes", data=np.zeros(3000, np.uint8), compression="gzip"),
    "complex of many": dataset("complex", data=np.zeros(3, "<c16")),
    "number no number": dataset("int", data=np.frombuffer(b"xyz", np.uint8)),
    "text no text": dataset("text", data=np.array([255], np.uint8)),
    "tensor of nothing": tensor("object", data=np.zeros(3, np.uint8)),
    "tensor of fewer": tensor("float64", data=np.zeros(3, np.uint8)),
    "tensor of storage": tensor("Storage", data=np.zeros(3, np.uint8)),
    "tensor without dtype": dataset("tensor", data=np.zeros(3, np.uint8)),
    "attribute an array": client(lambda group: group.attrs.__setitem__("leak", np.zeros(2))),
    "attribute opaque": client(lambda group: group.attrs.__setitem__("leak", np.void(b"abc"))),
    "attribute a reference": client(lambda group: group.attrs.__setitem__("leak", group.ref)),
    "attribute compound": client(lambda group: group.attrs.__setitem__("leak", np.zeros((), COMPOUND))),
    "cycle": client(lambda group: group.__setitem__("leak", group.parent)),
    "no state": lambda file: file.__delitem__("state"),
    "no config": lambda file: file.__delitem__("config"),
    "config a list": attribute("config", "%kind", "list"),
    "generators too long": attribute("state/rng/cpu", "lengths", [10**12]),
    "generators negative": attribute("state/rng/cpu", "lengths", [-1]),
    "generators of floats": attribute("state/rng/cpu", "lengths", [1.0]),
    "generators of more ranks": attribute("state/rng/cpu", "lengths", [1, 1]),
    "generators of two worlds": lambda file: (
        file["state/rng"].create_dataset("more", data=np.zeros((5, 1), np.uint8)).attrs.create("lengths", [1] * 5)
    ),
}  # fmt: skip


def _nest(group, outer, inner):
    made = group.create_group("leak")
    made.attrs["%kind"] = outer
    made.attrs["%length"] = 1
    below = made.create_group("0")
    below.attrs["%kind"] = inner
    below.attrs["%length"] = 0


@pytest.mark.parametrize("what", STATES)
def test_states(folder, tmp_path, what):
    altered(folder, STATE, STATES[what])
    message = refused(folder, tmp_path / "outside")
    assert STATE in message
    assert message.isprintable()


@pytest.mark.parametrize("is_placed", [True, False], ids=["at one place", "nowhere"])
def test_arrays_that_share_their_bytes(folder, is_placed):
    """Many datasets at one place, or at none, would be many times as large in memory as in the file."""
    names, size = [f"k{number}" for number in range(300)], 4 << 20
    path = folder / "step7" / STATE
    as_older_file(path)
    with h5py.File(path, "r+") as file:
        own = file["state/client"]
        for name in names:
            # the first alone is written to, so only that takes space
            made = own.create_dataset(name, (size,), np.uint8)
            made.attrs["%kind"] = "bytes"
            if name == "k0":
                made[:] = 1
        own.attrs["%length"] = len(names)
        del own.attrs["%keys"]
        own.attrs.create("%keys", names, dtype=TEXT)
    if is_placed:
        with h5py.File(path) as file:
            first = file["state/client/k0"].id.get_offset()
        raw, length = path.read_bytes(), size.to_bytes(8, "little")
        path.write_bytes(raw.replace(b"\xff" * 8 + length, first.to_bytes(8, "little") + length))
        with h5py.File(path) as file:
            assert {file[f"state/client/{name}"].id.get_offset() for name in names} == {first}
    sign_files(folder / "step7")
    assert "more bytes than the file has" in refused(folder)
