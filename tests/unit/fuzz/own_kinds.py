"""Kinds of altered checkpoints of our own, for `tests.helpers.fuzz`.

Whoever alters a checkpoint on purpose also makes its sizes, checksums and the manifest's digest fit; so do these.
"""

import contextlib
import io
import json
import warnings

import h5py
import numpy as np

from mpispeed.ckpt.format import manifest as manifests
from mpispeed.ckpt.format import schema, tags
from mpispeed.cli.main import main
from tests.helpers import mutations
from tests.helpers.fuzz import Kind
from tests.unit.ckpt import attacks
from tests.zoo import has_same_bits

TAG = "step7"
TEXTS = ("", "4", "x\x1b[31m", "[" * 3000, '{"a": NaN}', '["a", "a"]', "a" * 5000, "dict", "list", "None", "../x", "/")
COMMANDS = (["show"], ["show", "--state"], ["show", "--config", "--layout"], ["tree"], ["verify"])


def make(folder):
    attacks.make(folder)


def read(folder):
    """Everything that is in it; the commands that show it have to end in words too, whatever is in it."""
    for words in COMMANDS:
        code, shown = run("ckpt", words[0], f"{folder}:{TAG}", *words[1:])
        assert code in range(5), (words, code)
        assert all(sign.isprintable() or sign == "\n" for sign in shown), f"{words} shows raw signs"
        assert code == 0 or any(len(line.split()) > 1 for line in shown.splitlines()), f"{words}: {shown!r}"
    tags.list_tags(folder)
    return attacks.read_all(folder, TAG)


def run(*words):
    """The command `mpispeed`: its exit code, and what it shows."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            main(list(words))
            code = 0
        except SystemExit as end:
            code = end.code
    return code, shown.getvalue()


def wrong(right, folder, found):
    """Tensors that kept name, dtype and number of elements kept their elements, which nothing here alters unseen."""
    for key in right[0].keys() & found[0].keys():
        was, now = right[0][key], found[0][key]
        if (
            was.dtype == now.dtype
            and was.numel() == now.numel()
            and not has_same_bits(was.reshape(-1), now.reshape(-1))
        ):
            return f"other elements of {key}"
    return plainness(found[3])


def plainness(value, depth=0):
    """Why a state is none: it holds what no state is made of."""
    if depth > 200:
        return "the state is deeper than any is written"
    if isinstance(value, dict):
        return next((why for item in value.values() if (why := plainness(item, depth + 1))), "")
    if isinstance(value, (list, tuple)):
        return next((why for item in value if (why := plainness(item, depth + 1))), "")
    known = (bool, int, float, str, bytes, type(None), np.ndarray)
    is_known = isinstance(value, known) or type(value).__module__.startswith("torch")
    return "" if is_known else f"the state has a {type(value).__name__}"


# files of HDF5


def alter_file(name):
    """Alter one file of HDF5: bytes, or objects by the library; the manifest then fits, but for one case in ten."""

    def alter(pick, folder):
        path = folder / TAG / name
        way = pick.random()
        if way < 0.5:
            altered, what = (mutations.raw if way < 0.15 else mutations.hdf5)(pick, path.read_bytes())
            path.write_bytes(altered)
        else:
            with warnings.catch_warnings(), h5py.File(path, "r+") as file:
                warnings.simplefilter("ignore")
                what = "; ".join(alter_object(pick, file) for _ in range(pick.choice((1, 1, 2))))
        if pick.random() < 0.9:
            attacks.sign_files(folder / TAG)
        return f"{name}: {what}"

    return alter


def alter_object(pick, file):
    """One attribute, dataset, group or link becomes another."""
    names = [""]
    file.visit(names.append)
    place = pick.choice(names)
    owner = file[place] if place else file
    if len(owner.attrs) and pick.random() < 0.6:
        return alter_attribute(pick, owner)
    if not place:
        return "nothing"
    return alter_link(pick, file, place)


def alter_attribute(pick, owner):
    name = pick.choice(sorted(owner.attrs))
    way = pick.choice(("text", "number", "numbers", "gone", "renamed", "of variable length", "a reference", "empty"))
    where = f"{owner.name}.{name}"
    was = owner.attrs[name]
    del owner.attrs[name]
    if way == "text":
        value = np.bytes_(pick.choice(TEXTS).encode())
        owner.attrs.create(name, value if value else np.bytes_(b"\0"))
    elif way == "number":
        owner.attrs.create(name, pick.choice((0, -1, 7, 2**31, 2**62, 0.5, float("nan"), True)))
    elif way == "numbers":
        owner.attrs.create(name, np.array(pick.choice(([0], [1, 2, 3], [-5, 2**62], [2**40] * 9, [[1, 2], [3, 4]]))))
    elif way == "renamed":
        owner.attrs.create(pick.choice(("x", "%kind", "a\x1b[31m", "b" * 200)), was)
    elif way == "of variable length":
        owner.attrs.create(name, pick.choice(TEXTS), dtype=h5py.string_dtype())
    elif way == "a reference":
        owner.attrs.create(name, owner.ref, dtype=h5py.ref_dtype)
    elif way == "empty":
        owner.attrs.create(name, h5py.Empty(pick.choice(("f8", "S4", "i8"))))
    return f"{where} {way}"


def alter_link(pick, file, place):
    """What has a name is another object, or has another name."""
    if pick.random() < 0.15:
        file.move(place, f"{place.rpartition('/')[0]}/{pick.choice(('x', 'é%2f', 'y' + chr(27) + '[31m', 'z' * 900))}")
        return f"/{place} renamed"
    was = file[place]
    has_elements = isinstance(was, h5py.Dataset) and was.shape is not None and was.size < 10**6
    content = np.atleast_1d(was[()]) if has_elements else np.arange(9)
    way = pick.choice(sorted(PUT))
    del file[place]
    PUT[way](pick, file, place, content)
    return f"/{place} {way}"


def put_external(pick, file, place, _):
    file[place] = h5py.ExternalLink(pick.choice(("model.h5", "/etc/passwd", "../latest", "\x1b[31m")), "/")


def put_dataset(pick, file, place, _):
    file[place] = pick.choice((1, 0.5, np.bytes_(b"a"), np.zeros((3, 0)), np.arange(5)))


def put_packed(_, file, place, content):
    file.create_dataset(place, data=content, chunks=True, compression="gzip")


def put_virtual(_, file, place, content):
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("../outside.h5", "x", (4,))
    file.create_virtual_dataset(place, layout)


PUT = {
    "gone": lambda pick, file, place, _: None,
    "soft": lambda pick, file, place, _: file.__setitem__(place, h5py.SoftLink(pick.choice(("/nowhere", "/", "x")))),
    "external": put_external,
    "loop": lambda pick, file, place, _: file.__setitem__(place, file["/"]),
    "group": lambda pick, file, place, _: file.create_group(place),
    "dataset": put_dataset,
    "packed": put_packed,
    "virtual": put_virtual,
    "type": lambda pick, file, place, _: file.__setitem__(place, np.dtype("i4")),
    "huge": lambda pick, file, place, _: file.create_dataset(place, (2**40,), "f4", chunks=(1024,)),
}


# manifest.json


def alter_manifest(pick, folder):
    path = folder / TAG / schema.MANIFEST_FILE
    text = path.read_text()
    if pick.random() < 0.2:
        altered, what = mutations.raw(pick, text.encode())
        path.write_bytes(altered)
        return f"manifest: {what}"
    if pick.random() < 0.3:
        altered, what = mutations.text(pick, text)
        path.write_text(altered, errors="surrogatepass")
        return f"manifest: {what}"
    content, what = mutations.tree(pick, json.loads(text))
    if pick.random() < 0.3:
        content, more = mutations.tree(pick, content)
        what += f"; {more}"
    path.write_text(manifests.signed(content), errors="surrogatepass")
    return f"signed manifest: {what}"


def wrong_manifest(right, folder, found):
    """What the files hold stays what it was: a manifest says nothing of names and elements."""
    if right[0].keys() != found[0].keys():
        return "other names"
    return wrong(right, folder, found)


KINDS = (
    Kind("model.h5", make, alter_file("model.h5"), read, wrong),
    Kind("state.h5", make, alter_file("state.h5"), read, wrong),
    Kind("manifest", make, alter_manifest, read, wrong_manifest),
)
