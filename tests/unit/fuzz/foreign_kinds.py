"""Kinds of files of other programs, for `tests.helpers.fuzz`: how they are made, altered and read."""

import io
import json
import os
import re
import shutil
import warnings
import zipfile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.tools.importing import import_checkpoint
from tests.helpers import mutations
from tests.helpers.fuzz import Kind
from tests.unit.ckpt.foreign_folders import Known, deepspeed_classes, write_cut, write_grouped, write_universal
from tests.zoo import has_same_bits

TENSORS = {
    "embed.weight": torch.arange(28.0).reshape(4, 7),
    "half": torch.arange(5.0).bfloat16(),
    "scalar": torch.tensor(2.5),
    "none": torch.empty(0, 3),
    "mask": torch.tensor([True, False, True]),
    "count": torch.tensor(12),
}
ZIP_FIELDS = {
    b"PK\x03\x04": 30,
    b"PK\x01\x02": 46,
    b"PK\x05\x06": 22,
    b"PK\x06\x06": 56,
    b"PK\x06\x07": 20,
    b"PK\x07\x08": 16,
}

ZIP_NAMES = ("x/data/9", "y/data.pkl", "../x", "/etc/x", "x\\y", "", "x/\x1b[31m", "x/constants.pkl")


def imported(source, to):
    """What an import of a file or folder makes: (name, slot) -> tensor, and the other names."""
    shutil.rmtree(to, ignore_errors=True)
    import_checkpoint(source, to)
    with open_checkpoint(to) as checkpoint:
        values = {(t.name, t.slot): checkpoint.read_whole(t.name, t.slot) for t in checkpoint.tensors()}
        return values, checkpoint.aliases()


def reader(name):
    return lambda folder: imported(folder / name, folder.with_name("to"))


def differing(wanted, values):
    """Why what was imported is not what a state dict holds."""
    (found, aliases), by_name = values, {}
    for (name, _), tensor in found.items():
        by_name[name] = tensor
    by_name |= {alias: by_name[name] for alias, name in aliases.items() if name in by_name and alias in wanted}
    if by_name.keys() != wanted.keys():
        return f"the names {sorted(by_name)[:9]!r:.200} instead of {sorted(wanted)[:9]!r:.200}"
    return next((f"another {name!r:.50}" for name in wanted if not has_same_bits(by_name[name], wanted[name])), "")


def alter_bytes(pick, path):
    altered, what = mutations.raw(pick, path.read_bytes())
    path.write_bytes(altered)
    return f"{path.name}: {what}"


# safetensors


def make_safetensors(folder):
    save_file(TENSORS, folder / "model.safetensors", metadata={"head.weight": "embed.weight", "format": "pt"})


def alter_safetensors(pick, folder, name="model.safetensors"):
    path = folder / name
    raw = path.read_bytes()
    if pick.random() < 0.4:
        return alter_bytes(pick, path)
    end = 8 + int.from_bytes(raw[:8], "little")
    header, what = mutations.as_json(pick, raw[8:end].decode())
    new = header.encode(errors="surrogatepass")
    path.write_bytes(len(new).to_bytes(8, "little") + new + raw[end:])
    return f"{name}: {what}"


def wrong_safetensors(_, folder, values):
    """By the format's own reader."""
    try:
        return differing(load_file(folder / "model.safetensors"), values)
    except (SafetensorError, KeyError) as failure:
        return f"the reader of safetensors refuses it: {failure}"


# shards


def make_shards(folder):
    names, places = list(TENSORS), {}
    for number, own in enumerate((names[:2], names[2:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: TENSORS[name] for name in own}, folder / file)
        places |= dict.fromkeys(own, file)
    text = json.dumps({"metadata": {"total_size": 138}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(text)


def alter_shards(pick, folder):
    index = folder / "model.safetensors.index.json"
    way = pick.choice(("index", "index", "index", "shard", "files"))
    if way == "index":
        text, what = mutations.as_json(pick, index.read_text())
        index.write_text(text, errors="surrogatepass")
        return f"index: {what}"
    if way == "shard":
        return alter_safetensors(pick, folder, f"model-0000{pick.choice('12')}-of-00002.safetensors")
    return alter_files(pick, folder, sorted(folder.iterdir()))


def wrong_shards(_, folder, values):
    paths = sorted(folder.glob("*.safetensors"))
    if (index := folder / "model.safetensors.index.json").is_file():
        paths = [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    try:
        wanted = [load_file(path) for path in paths]
    except (SafetensorError, OSError, KeyError) as failure:
        return f"the reader of safetensors refuses a shard: {failure}"
    return differing({name: tensor for own in wanted for name, tensor in own.items()}, values)


def alter_files(pick, folder, paths):
    """A file of a folder is gone, empty, cut, no file, or of another name."""
    path = pick.choice(paths)
    way = pick.choice(("gone", "empty", "cut", "a pipe", "a folder", "a loop", "renamed", "copied"))
    if way == "cut":
        path.write_bytes(path.read_bytes()[: pick.randrange(path.stat().st_size)])
    elif way in ("renamed", "copied"):
        number = pick.choice(("7", "99999999", "9" * 30, "\x1b[31m", "\u0661"))
        to = path.with_name(re.sub(r"\d+", number, path.name, count=pick.choice((0, 1))))
        shutil.copy(path, folder / "kept")
        if way == "renamed":
            path.unlink()
        (folder / "kept").rename(to)
        way = f"{way} to {to.name!r}"
    else:
        path.unlink()
        if way == "empty":
            path.touch()
        elif way == "a pipe":
            os.mkfifo(path)
        elif way == "a folder":
            path.mkdir()
        elif way == "a loop":
            path.symlink_to(path.name)
    return f"{path.name}: {way}"


# torch


def make_torch(folder):
    torch.save(STATE, folder / "x.pt")


def make_old_torch(folder):
    torch.save(STATE, folder / "x.pt", _use_new_zipfile_serialization=False)


STATE = {**TENSORS, "head.weight": TENSORS["embed.weight"], "turned": torch.arange(6.0).reshape(2, 3).T}


def alter_torch(pick, folder):
    way, path = pick.random(), folder / "x.pt"
    if way < 0.3:
        return alter_bytes(pick, path)
    return alter_fields(pick, path) if way < 0.6 else alter_entries(pick, path)


def alter_fields(pick, path):
    """A number in the headers of a zip file."""
    raw = bytearray(path.read_bytes())
    kind = pick.choice([sign for sign in ZIP_FIELDS if sign in raw])
    start = pick.choice([match.start() for match in re.finditer(re.escape(kind), raw)])
    place, width = start + pick.randrange(0, ZIP_FIELDS[kind], 2), pick.choice((2, 2, 4, 8))
    number = pick.choice((*mutations.EXTREMES, len(raw), int.from_bytes(raw[place : place + width], "little") + 1))
    raw[place : place + width] = (number % 256**width).to_bytes(width, "little")
    path.write_bytes(raw)
    return f"{kind!r} at {start}: {number} at {place - start}"


def alter_entries(pick, path):
    """The same entries packed anew, one of them altered; sizes and checksums fit."""
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as source:
        rows = [[info.filename, source.read(info)] for info in source.infolist()]
    row = pick.choice([*rows, *(row for row in rows if row[0].endswith("data.pkl")), rows[0], rows[0], rows[0]])
    way = pick.choice(("bytes", "bytes", "bytes", "bytes", "gone", "twice", "renamed", "exchanged", "packed"))
    what = way
    if way == "bytes":
        row[1], what = mutations.raw(pick, row[1])
    elif way == "gone":
        rows.remove(row)
    elif way == "twice":
        rows.append([row[0], mutations.raw(pick, row[1])[0]])
    elif way == "renamed":
        row[0] = pick.choice((*ZIP_NAMES, row[0] + "\0"))
    elif way == "exchanged":
        other = pick.choice(rows)
        row[1], other[1] = other[1], row[1]
    packing = pick.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)) if way == "packed" else 0
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", packing) as target:
        warnings.simplefilter("ignore")
        for name, content in rows:
            target.writestr(zipfile.ZipInfo(name) if not packing else name, content)
    return f"{row[0]!r:.60}: {what}"


def wrong_torch(right, folder, values):
    """The same as before, or as torch reads it."""
    if not differing_pairs(right, values):
        return ""
    try:
        state = torch.load(folder / "x.pt", weights_only=True)
    except Exception as failure:
        return f"torch refuses it ({failure!r:.200}), and it is not as it was: {differing_pairs(right, values)}"
    kept = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    return differing({str(name): tensor for name, tensor in kept.items()}, values)


def differing_pairs(right, values):
    if right[0].keys() != values[0].keys() or right[1] != values[1]:
        return "other names"
    return next((f"another {key}" for key, tensor in right[0].items() if not has_same_bits(values[0][key], tensor)), "")


# DeepSpeed


def alter_deepspeed(pick, folder):
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    way = pick.choice(("bytes", "fields", "files", "content", "content", "content"))
    if way == "files":
        return alter_files(pick, folder, paths)
    path = pick.choice([path for path in paths if path.suffix == ".pt"])
    if way == "bytes":
        return alter_bytes(pick, path)
    if way == "fields":
        return f"{path.name}: {alter_fields(pick, path)}"
    with deepspeed_classes() as made:
        torch.serialization.add_safe_globals(list(made.values()))
        content = torch.load(path, weights_only=False)
        if not isinstance(content, dict):
            return alter_bytes(pick, path)
        content, what = mutations.tree(pick, content)
        torch.save(content, path)
    return f"{path.name}: {what}"


def wrong_deepspeed(right, folder, values):
    """What has the name and slot that it had has the elements that it had: nothing here alters elements."""
    what = (folder / "what").read_text() if (folder / "what").is_file() else ""
    if "param_shapes" in what or "fp32_groups" in what or "flat_groups" in what:
        return ""  # says itself which elements are whose
    for key in right[0].keys() & values[0].keys():
        if not has_same_bits(values[0][key].reshape(-1), right[0][key].reshape(-1)):
            return f"another {key}"
    return ""


def alter_noted(pick, folder):
    what = alter_deepspeed(pick, folder)
    (folder / "what").write_text(what, errors="replace")
    return what


def deepspeed(name, make):
    return Kind(name, make, alter_noted, reader("."), wrong_deepspeed)


KINDS = (
    Kind("safetensors", make_safetensors, alter_safetensors, reader("model.safetensors"), wrong_safetensors),
    Kind("shards", make_shards, alter_shards, reader("."), wrong_shards),
    Kind("torch", make_torch, alter_torch, reader("x.pt"), wrong_torch),
    Kind(
        "old torch",
        make_old_torch,
        lambda pick, folder: alter_bytes(pick, folder / "x.pt"),
        reader("x.pt"),
        wrong_torch,
    ),
    deepspeed("grouped", lambda folder: write_grouped(folder, Known(), 2)),
    deepspeed("cut", lambda folder: write_cut(folder, Known(), 2)),
    deepspeed("universal", lambda folder: write_universal(folder, Known())),
)
