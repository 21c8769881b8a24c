"""Values of classes in typed trees, stored as data: namespaces, dataclasses, enums, paths and dtypes of torch.

No class is imported or called on the word of a file. What a file says of a dataclass or of a member of an enum is read
as a `Record` or `Member`; `restored` makes the caller's own classes of them.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from mpispeed.base.errors import CheckpointError, UsageError

#: kinds that are stored as named parts
GROUPS = ("namespace", "record", "member")
#: kinds that are stored as text
TEXTS = ("path", "dtype")

_MAIN = "__main__"


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A dataclass as a checkpoint holds it.

    Attributes:
        class_name: module and name of its class, "train.Settings".
        fields: name -> value.
    """

    class_name: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an enum as a checkpoint holds it.

    Attributes:
        class_name: module and name of its class, "train.Color".
        name: its name; None for a mix of flags that has none.
        value: its value.
    """

    class_name: str
    name: str | None
    value: Any

    def __hash__(self) -> int:
        return hash((self.class_name, self.name))


def kind_of(value: Any) -> str:
    """The format's word for the kind of `value`; empty if it is none of this module's."""
    if isinstance(value, (enum.Enum, Member)):
        return "member"
    if isinstance(value, PurePath):
        return "path"
    if type(value) is Namespace:
        return "namespace"
    if isinstance(value, Record) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return "" if isinstance(value, dict) else "record"
    torch = sys.modules.get("torch")  # a value can only be a dtype when torch is loaded
    return "dtype" if torch is not None and isinstance(value, torch.dtype) else ""


def parts(value: Any) -> dict[str, Any]:
    """What a namespace, dataclass or member of an enum is made of."""
    if isinstance(value, Namespace):
        return vars(value)
    if isinstance(value, Record):
        return {"class": value.class_name, "fields": value.fields}
    if isinstance(value, Member):
        return {"class": value.class_name, "name": value.name, "value": value.value}
    if isinstance(value, enum.Enum):
        return {"class": class_name(type(value)), "name": value.name, "value": value.value}
    set_fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    return {"class": class_name(type(value)), "fields": {name: getattr(value, name) for name in set_fields}}


def class_name(cls: type) -> str:
    """Module and name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def made(kind: str, found: Mapping[str, Any]) -> Namespace | Record | Member:
    """The value of one of `GROUPS` from its parts.

    Raises:
        ValueError: these are no parts of such a value.
    """
    if kind == "namespace":
        value = Namespace()
        vars(value).update(found)
        return value
    name, fields, label = found.get("class"), found.get("fields"), found.get("name")
    if type(name) is str and kind == "record" and found.keys() == {"class", "fields"} and type(fields) is dict:
        return Record(name, fields)
    is_member = type(name) is str and kind == "member" and found.keys() == {"class", "name", "value"}
    if is_member and (label is None or type(label) is str):
        return Member(str(name), label, found["value"])
    msg = f"{sorted(found)!r:.80} are no parts of a {kind} of the state"
    raise ValueError(msg)


def text(value: Any) -> str:
    """The text that a path or dtype is stored as."""
    return str(value)


def of_text(kind: str, stored: str) -> Any:
    """The value of one of `TEXTS`.

    Raises:
        ValueError: this torch has no such dtype.
    """
    if kind == "path":
        return Path(stored)
    import torch  # only values that torch made are of this kind

    found = getattr(torch, stored.removeprefix("torch."), None)
    if isinstance(found, torch.dtype):
        return found
    msg = f"torch {torch.__version__} has no dtype {stored!r:.80}"
    raise ValueError(msg)


def opened(value: Any) -> Any:
    """A namespace, record or member as a dict that names its class; other values as they are."""
    if isinstance(value, Namespace):
        return {"class": class_name(Namespace), "fields": vars(value)}
    return parts(value) if isinstance(value, (Record, Member)) else value


def copied(value: Any) -> Any:
    """`value` without the objects that the caller may go on changing: dataclasses become records."""
    if isinstance(value, Namespace):
        return made("namespace", parts(value))
    return made("record", parts(value)) if kind_of(value) == "record" else value


def by_name(types: Iterable[type]) -> dict[str, type]:
    """Classes by module and name; also as those of a script that is run itself, which has them in `__main__`.

    Raises:
        UsageError: one is neither a dataclass nor an enum.
    """
    named: dict[str, type] = {}
    for cls in types:
        if not (isinstance(cls, type) and (issubclass(cls, enum.Enum) or dataclasses.is_dataclass(cls))):
            msg = f"client_types has {cls!r}, which is neither a dataclass nor an enum; leave it out"
            raise UsageError(msg)
        named[class_name(cls)] = named[f"{_MAIN}.{cls.__qualname__}"] = cls
    return named


def restored(tree: Any, types: Mapping[str, type]) -> Any:
    """A tree with the caller's classes in place of records and members.

    Args:
        tree: as read.
        types: classes as `by_name` has them. Of another class, a dataclass becomes a Namespace and a member of an
            enum its value.

    Raises:
        CheckpointError: a class does not fit what was stored of it.
    """
    if isinstance(tree, Record):
        fields = {name: restored(value, types) for name, value in tree.fields.items()}
        return _instance(tree.class_name, fields, types)
    if isinstance(tree, Member):
        return _member(tree, restored(tree.value, types), types)
    if type(tree) is Namespace:
        return made("namespace", {name: restored(value, types) for name, value in vars(tree).items()})
    try:
        if isinstance(tree, dict):
            return {restored(key, types): restored(value, types) for key, value in tree.items()}
        if type(tree) in (list, tuple, set, frozenset):
            return type(tree)(restored(value, types) for value in tree)
    except TypeError as failure:
        msg = f"a set or the keys of a dict in client_state hold objects whose classes are not known ({failure}); "
        msg += "name them: load_checkpoint(..., client_types=[TheClass])"
        raise CheckpointError(msg) from failure
    return tree


def _found(name: str, types: Mapping[str, type]) -> type | None:
    """The class that a stored name means: that of the name, else one of the script that is run itself."""
    own = (cls for cls in types.values() if cls.__module__ == _MAIN and name.endswith(f".{cls.__qualname__}"))
    return types.get(name) or next(own, None)


def _instance(name: str, fields: dict[str, Any], types: Mapping[str, type]) -> Any:
    cls = _found(name, types)
    if cls is None:
        return made("namespace", fields)
    problem = "is no dataclass"
    if dataclasses.is_dataclass(cls):
        own = {field.name: field for field in dataclasses.fields(cls)}
        odd = sorted(fields.keys() - own.keys())
        lacking = sorted(field.name for field in own.values() if field.name not in fields and not _has_default(field))
        problem = f"lacks the stored fields {', '.join(odd)}" if odd else ""
        problem = problem or (f"has fields that were not stored: {', '.join(lacking)}" if lacking else "")
        if not problem:
            return _filled(cls, fields)
    msg = (
        f"client_state holds a {name:.200}, and the {class_name(cls)} of client_types {problem:.400}; leave it out of "
    )
    msg += "client_types to get a Namespace"
    raise CheckpointError(msg)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return any(given is not dataclasses.MISSING for given in (field.default, field.default_factory)) or not field.init


def _filled(cls: Any, fields: dict[str, Any]) -> Any:
    """An instance with these fields; neither `__init__` nor `__post_init__` runs, which saw other values."""
    value = object.__new__(cls)
    for field in dataclasses.fields(cls):
        if field.name in fields:
            object.__setattr__(value, field.name, fields[field.name])
        elif field.default_factory is not dataclasses.MISSING:
            object.__setattr__(value, field.name, field.default_factory())
        elif field.default is not dataclasses.MISSING:
            object.__setattr__(value, field.name, field.default)
    return value


def _member(stored: Member, value: Any, types: Mapping[str, type]) -> Any:
    cls = _found(stored.class_name, types)
    if cls is None:
        return value
    if issubclass(cls, enum.Enum):
        if stored.name in cls.__members__:
            return cls[str(stored.name)]
        try:
            return cls(value)
        except ValueError:
            pass
    msg = f"client_state holds the member {stored.name!r:.80} of {stored.class_name:.200}, which {class_name(cls)} "
    msg += "lacks; leave it out of client_types to get its value"
    raise CheckpointError(msg)
