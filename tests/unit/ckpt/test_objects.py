"""Namespaces, paths, dtypes, enums and dataclasses in typed trees."""

import enum
import json
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import pytest
import torch
from click.testing import CliRunner

from mpispeed.base.errors import CheckpointError, UsageError
from mpispeed.ckpt.format import hdf5, objects, tree
from mpispeed.ckpt.format.errors import UnsupportedValue
from mpispeed.ckpt.read.load import open_checkpoint
from mpispeed.ckpt.tools.diff import _compared
from mpispeed.cli.main import cli
from tests.unit.ckpt.attacks import TENSORS
from tests.unit.ckpt.sample import saved


class Color(enum.Enum):
    RED = "r"
    BLUE = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass(frozen=True)
class Inner:
    level: Level
    where: Path


@dataclass(slots=True)
class Settings:
    inner: Inner
    sizes: list[int] = field(default_factory=list)
    name: str = "x"
    derived: int = field(init=False, default=0)

    def __post_init__(self):
        self.derived += 1


CLASSES = (Color, Level, Access, Inner, Settings)


def back(tmp_path, value, types=CLASSES):
    tree.check(value, "client")
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.h5"
    with hdf5.Builder(path) as build:
        tree.write(build, build.root, "value", value)
    with hdf5.open_reading(path) as file:
        return objects.restored(tree.read(file.id, "value"), objects.by_name(types))


VALUES = [
    Namespace(),
    Namespace(lr=0.1, layers=[1, 2], nested=Namespace(a=None), **{"odd name/": 1}),
    Path("a/ö b"),
    torch.bfloat16,
    torch.float32,
    Color.RED,
    Color.BLUE,
    Level.LOW,
    Access.READ | Access.WRITE,
    Access(0),
    Inner(Level.LOW, Path("/x")),
    Settings(Inner(Level.LOW, Path("y")), [1], "z"),
    {Color.RED: {Level.LOW}, "args": [Namespace(color=Color.BLUE, dtype=torch.int8)]},
]


@pytest.mark.deepspeed_row("a18")
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_as_their_classes(tmp_path, value):
    found = back(tmp_path, value)
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)
    assert back(tmp_path, tree.copied(value)) == value


@pytest.mark.deepspeed_row("a18")
def test_classes_that_are_not_named_come_back_as_data(tmp_path):
    settings = Settings(Inner(Level.LOW, Path("y")), [1])
    found = back(tmp_path, {"settings": settings, "color": Color.BLUE, "pure": PurePosixPath("a/b")}, ())
    assert found["settings"] == Namespace(inner=Namespace(level=1, where=Path("y")), sizes=[1], name="x", derived=1)
    assert type(found["settings"].inner.level) is int
    assert found["color"] == (1, 2)
    assert found["pure"] == Path("a/b")


def test_a_copy_does_not_change_with_the_original(tmp_path):
    settings, args = Settings(Inner(Level.LOW, Path("y")), [1]), Namespace(sizes=[1])
    copy = tree.copied({"settings": settings, "args": args})
    settings.sizes.append(2)
    args.sizes.append(2)
    found = back(tmp_path, copy)
    assert found["settings"].sizes == found["args"].sizes == [1]


def test_classes_of_a_script_are_found_where_it_is_imported(tmp_path):
    stored = objects.Record("__main__.Inner", {"level": objects.Member("__main__.Level", "LOW", 1), "where": Path("x")})
    assert back(tmp_path, stored) == Inner(Level.LOW, Path("x"))

    class Here(enum.Enum):
        A = 1

    Here.__module__, Here.__qualname__ = "__main__", "Here"
    assert back(tmp_path, objects.Member("train.Here", "A", 1), [Here]) is Here.A


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        (objects.Record("__main__.Inner", {"level": 1, "where": 1, "odd": 1}), "lacks the stored fields odd"),
        (objects.Record("__main__.Inner", {"level": 1}), "has fields that were not stored: where"),
        (objects.Record("__main__.Color", {}), "is no dataclass"),
        (objects.Member("__main__.Color", "GREEN", "g"), "which .*Color lacks"),
        (objects.Member("__main__.Inner", "GREEN", "g"), "which .*Inner lacks"),
    ],
)
def test_classes_that_do_not_fit_are_named(tmp_path, stored, text):
    with pytest.raises(CheckpointError, match=text):
        back(tmp_path, stored)


def test_sets_of_unknown_classes_say_what_to_give(tmp_path):
    with pytest.raises(CheckpointError, match="client_types"):
        back(tmp_path, {Inner(Level.LOW, Path("x"))}, ())


def test_only_dataclasses_and_enums_are_types():
    for odd in (int, Namespace, Inner(Level.LOW, Path("x"))):
        with pytest.raises(UsageError, match="neither a dataclass nor an enum"):
            objects.by_name([odd])


def test_parts_that_cannot_be_held_are_named():
    with pytest.raises(UnsupportedValue, match=r"client\.inner\.f is a builtins\.object"):
        tree.check(Namespace(inner=Namespace(f=object())), "client")
    with pytest.raises(UnsupportedValue, match=r"client\.fields\['inner'\] is a builtins\.object"):
        tree.check(Settings(object()), "client")
    loop = Namespace()
    loop.self = loop
    with pytest.raises(UnsupportedValue, match="contains itself"):
        tree.check(loop, "client")


def test_inspection_shows_them(tmp_path):
    args = Namespace(path=Path("p"), dtype=torch.int8, color=Color.RED, inner=Inner(Level.LOW, Path("q")))
    saved(tmp_path, tensors=TENSORS, size=1, state={"client": {"args": args}})
    result = CliRunner().invoke(cli, ["ckpt", "show", str(tmp_path), "--state"], catch_exceptions=False)
    assert result.exit_code == 0
    name = __name__
    for line in (
        'state.client.args.class = "argparse.Namespace"',
        'state.client.args.fields.path = "p"',
        'state.client.args.fields.dtype = "torch.int8"',
        f'state.client.args.fields.color.class = "{name}.Color"',
        'state.client.args.fields.color.name = "RED"',
        f'state.client.args.fields.inner.class = "{name}.Inner"',
        "state.client.args.fields.inner.fields.level.value = 1",
    ):
        assert line in result.output
    json.loads(CliRunner().invoke(cli, ["ckpt", "show", str(tmp_path), "--state", "--json"]).output)
    with open_checkpoint(tmp_path) as checkpoint:
        found = checkpoint.state()["client"]["args"]
    assert found.inner.class_name == f"{name}.Inner"
    assert list(_compared("a", found, Namespace(**{**vars(found), "path": Path("r")}))) == [
        ("a.fields.path", repr(Path("p")), repr(Path("r")))
    ]
