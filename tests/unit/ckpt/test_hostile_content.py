"""HDF5 files made by others, with checksums that fit: every one is refused at once, and nothing elsewhere is opened."""

import subprocess
import sys

import h5py
import numpy as np
import pytest

from mpispeed.ckpt.format import schema
from tests.unit.ckpt import attacks
from tests.unit.ckpt.attacks import SECONDS, as_older_file, fixed, make_dict, move_data, read_all, refused, sign_files

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


def endless(file):
    """A master whose number of rows is said by another file: HDF5 opens that to tell the shape."""
    del file["params/b.weight/master"]
    space, unlimited = h5py.h5s.create_simple((999,), (h5py.h5s.UNLIMITED,)), (h5py.h5s.UNLIMITED,)
    space.select_hyperslab((0,), unlimited)
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_virtual(space, b"../../outside/step7/model.h5", b"params/b.weight/master", space)
    h5py.h5d.create(file["params/b.weight"].id, b"master", h5py.h5t.IEEE_F32LE, space, dcpl=plan)


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
                      [1, 0], [3, 0], [2**62, 0])
    },
    "version empty": attribute("/", "version", h5py.Empty("i8")),
    **{
        f"{name} {value}": attribute("params/b.weight", name, value)
        for name in ATTRIBUTES
        for value in (h5py.Empty("f8"), "text of variable length", np.void(b"opaque"), np.zeros((), COMPOUND))
    },
    **{
        f"expert {value}": attribute("params/b.weight", "expert", value)
        for value in ([], [3], [4, 4], [-1, 4], [0, 0], [0, 1, 2], [2**62, 2**62], [0.0, 4.0])
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
    "virtual without end": endless,
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
    "alias of nothing": replaced("aliases", data=np.bytes_('{"tied": "gone"}')),
    "alias of an alias": replaced("aliases", data=np.bytes_('{"tied": "b.weight", "more": "tied"}')),
    "alias of itself": replaced("aliases", data=np.bytes_('{"more": "more"}')),
    "alias that is a parameter": replaced("aliases", data=np.bytes_('{"a.weight": "b.weight"}')),
    "alias of a number": replaced("aliases", data=np.bytes_('{"tied": 5}')),
    "aliases a list": replaced("aliases", data=np.bytes_('["tied"]')),
    "aliases deep": replaced("aliases", data=np.bytes_("[" * 100000)),
    "aliases of variable length": replaced("aliases", data='{"tied": "b.weight"}', dtype=TEXT),
    "aliases a group": lambda file: (file.__delitem__("aliases"), file.create_group("aliases")),
    "attributes very many": lambda file: [file["params/b.weight"].attrs.__setitem__(f"a{n}", n) for n in range(3000)],
    "name spelled otherwise": group_of("%61.weight"),
    "name with a small sign": group_of("x%2fy"),
    "name of a marker": group_of("%kind"),
    "long name": lambda file: file.create_group("params/" + "n" * 60000),
    "name that no screen shows": lambda file: file.create_group("params/\x1b[2J\x07"),
    "no parameters": lambda file: file.__delitem__("params"),
    "parameters a dataset": replaced("params", data=1.0),
    "tag no text": attribute("/", "tag", 7),
    "tag of another": attribute("/", "tag", np.bytes_("step8")),
    "step of another": attribute("/", "global_step", 8),
    "step negative": attribute("/", "global_step", -5),
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
        make_dict(group, ["leak"])
        change(group)

    return plant


def dataset(kind, **how):
    def change(group):
        fixed(group.create_dataset("leak", **how), "%kind", kind)

    return client(change)


def sequence(kind, length, **values):
    def change(group):
        made = group.create_group("leak")
        made.attrs["%kind"] = np.bytes_(kind) if isinstance(kind, str) else kind
        made.attrs["%length"] = np.bytes_(length) if isinstance(length, str) else length
        for name, value in values.items():
            made.attrs[name[1:]] = np.bytes_(value) if isinstance(value, str) else value

    return client(change)


def deep(group, kind="dict"):
    for _ in range(1100):
        made = group.create_group("leak")
        make_dict(made, ["leak"])
        fixed(made, "%kind", kind)
        group = made
    group.attrs["leak"] = 1


def laughs(group):
    """A key that is named twice, forty levels deep."""
    for _ in range(40):
        made = group.create_group("leak")
        make_dict(made, ["leak", "leak"])
        group = made
    group.attrs["leak"] = 1


def parts(kind, *keys, **values):
    """A group of a kind with named parts."""

    def change(group):
        made = group.create_group("leak")
        make_dict(made, list(keys))
        fixed(made, "%kind", kind)
        for name, value in values.items():
            made.attrs[name[1:]] = np.bytes_(value) if isinstance(value, str) else value

    return client(change)


def tensor(dtype, **how):
    def change(group):
        made = group.create_dataset("leak", **how)
        fixed(made, "%kind", "tensor")
        fixed(made, "dtype", dtype)

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
    "texts": dataset("array", data=np.array([b"ab", b"cd"])),
    "lists": dataset("array", shape=(3,), dtype=h5py.vlen_dtype(np.int32)),
    "opaque": dataset("bytes", data=np.zeros(3, "V8")),
    "compound": dataset("array", data=np.zeros(3, COMPOUND)),
    "gzip": dataset("bytes", data=np.zeros(3000, np.uint8), compression="gzip"),
    "complex of many": dataset("complex", data=np.zeros(3, "<c16")),
    "record of nothing": parts("record"),
    "record without class": parts("record", "fields", _fields=1),
    "fields no dict": parts("record", "class", "fields", _class="a.B", _fields=1),
    "class no text": parts("member", "class", "name", "value", _class=1, _name="x", _value=1),
    "member of more": parts("member", "class", "name", "value", "x", _class="a.B", _name="x", _value=1, _x=1),
    "member with a number for a name": parts("member", "class", "name", "value", _class="a.B", _name=1, _value=1),
    "namespaces deep": client(lambda group: deep(group, "namespace")),
    "dtype of another name": dataset("dtype", data=np.frombuffer(b"torch.nn", np.uint8)),
    "dtype elsewhere": dataset("dtype", data=np.frombuffer(b"os.system", np.uint8)),
    "path no text": dataset("path", data=np.array([255], np.uint8)),
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
    "config a list": attribute("config", "%kind", np.bytes_("list")),
    "state a list": attribute("state", "%kind", np.bytes_("list")),
    "text of variable length": client(lambda group: group.attrs.create("leak", "x", dtype=TEXT)),
    "kind of variable length": lambda file: file["state"].attrs.create("%kind", "dict", dtype=TEXT),
    "keys of variable length": lambda file: file["state"].attrs.create("%keys", '["client"]', dtype=TEXT),
    "keys of text": lambda file: fixed(file["state"], "%keys", "client"),
    "keys a dict": lambda file: fixed(file["state"], "%keys", "{}"),
    "keys of numbers": lambda file: fixed(file["state"], "%keys", "[1]"),
    "keys deep": lambda file: fixed(file["state"], "%keys", "[" * 30000),
    "values of lists": client(lambda group: fixed(group, "%values", '{"leak": [1]}')),
    "values a list": client(lambda group: fixed(group, "%values", "[1]")),
    "values a dataset of numbers": client(lambda group: group.create_dataset("%values", data=np.zeros(3, "<f4"))),
    "values of variable length": client(lambda group: group.create_dataset("%values", data='{"leak": 1}', dtype=TEXT)),
    "attributes very many": client(lambda group: [group.attrs.__setitem__(f"a{n}", n) for n in range(65)]),
    "other tag": attribute("/", "tag", np.bytes_("step8")),
    "other step": attribute("/", "global_step", 8),
    "no version": lambda file: file.attrs.__delitem__("version"),
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
    fixed(made, "%kind", outer)
    made.attrs["%length"] = 1
    below = made.create_group("0")
    fixed(below, "%kind", inner)
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
            fixed(made, "%kind", "bytes")
            if name == "k0":
                made[:] = 1
        make_dict(own, names)
    if is_placed:
        with h5py.File(path) as file:
            first = file["state/client/k0"].id.get_offset()
        raw, length = path.read_bytes(), size.to_bytes(8, "little")
        path.write_bytes(raw.replace(b"\xff" * 8 + length, first.to_bytes(8, "little") + length))
        with h5py.File(path) as file:
            assert {file[f"state/client/{name}"].id.get_offset() for name in names} == {first}
    sign_files(folder / "step7")
    assert "more bytes than the file has" in refused(folder)


READ_EVERYWHERE = """
import sys
from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.read.reader import open_reader
from mpispeed.ckpt.tools import tree, verify
from pathlib import Path
where = Path(sys.argv[1])
try:
    open_reader(where).state()
except CheckpointError as failure:
    print(failure)
print(verify.verify(where / "step7", "step7").status, len(tree.rows(str(where))) > 9)
"""


def test_a_heap_that_keeps_hdf5_busy_for_ever_is_not_read(folder):
    """One byte of the size of a text of variable length; HDF5 lets no signal through then, so this has a process."""
    path = folder / "step7" / STATE
    with h5py.File(path, "r+") as file:
        file["state/client"].attrs.create("leak", "betas", dtype=TEXT)
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"\x05" + bytes(7) + b"betas") + 1] = 2
    path.write_bytes(raw)
    sign_files(folder / "step7")
    argv = [sys.executable, "-c", READ_EVERYWHERE, folder]
    told = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=True).stdout.splitlines()
    assert "attribute 'leak' of a type that no attribute of a checkpoint is" in told[0]
    assert told[1] == "corrupt True"
