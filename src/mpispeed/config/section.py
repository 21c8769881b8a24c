"""The base of all sections: frozen, unknown keys refused; number types; walking over the fields."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from mpispeed.base.units import parse_count


class Section(BaseModel):
    """One object of the configuration file. Values cannot change after validation."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


def refuse_bool(value: Any) -> Any:
    """Keep true and false out of number fields, where they would silently become 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "Input should be a number")
    return value


def _read_bytes(value: Any) -> Any:
    """4e9 or "4GiB" as a whole number."""
    try:
        return parse_count(value) if isinstance(value, (str, int, float)) else value
    except ValueError:
        raise PydanticCustomError("bytes_type", "Input should be bytes") from None


def _wrap_text(value: Any) -> Any:
    """A single name stands for a list of one."""
    return [value] if isinstance(value, str) else value


# Limits stand next to the type, so that the JSON Schema shows them.
Integer = Annotated[int, BeforeValidator(refuse_bool)]
Natural = Annotated[int, Field(ge=0), BeforeValidator(refuse_bool)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1), BeforeValidator(refuse_bool)]
ScalePower = Annotated[int, Field(ge=0, le=127), BeforeValidator(refuse_bool)]  # 2^127 still fits into fp32
Stage = Annotated[int, Field(ge=0, le=3), BeforeValidator(refuse_bool)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(refuse_bool)]
Bytes = Annotated[int, Field(ge=1), BeforeValidator(_read_bytes, json_schema_input_type=int | str)]
Real = Annotated[float, BeforeValidator(refuse_bool)]
NonNegative = Annotated[float, Field(ge=0), BeforeValidator(refuse_bool)]
PositiveReal = Annotated[float, Field(gt=0), BeforeValidator(refuse_bool)]
Fraction = Annotated[float, Field(ge=0, le=1), BeforeValidator(refuse_bool)]
Names = Annotated[list[str], BeforeValidator(_wrap_text)]

S = TypeVar("S", bound=Section)


def subsection(kind: type[S], description: str) -> Any:
    """A field that holds a section and is that section's defaults when absent."""
    return Field(default_factory=kind, description=description)


class FieldAt(NamedTuple):
    """A field and where it stands: `path` has "*" for the free names of a mapping."""

    path: str
    name: str
    annotation: Any
    description: str
    default: Any
    section: type[Section]


def inner_section(annotation: Any) -> tuple[type[Section] | None, bool]:
    """The section class inside an annotation, and whether it is the value type of a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    origin = get_origin(annotation)
    if origin is dict:
        return inner_section(get_args(annotation)[1])[0], True
    if origin in (Union, types.UnionType, Annotated):
        for part in get_args(annotation):
            found = inner_section(part)
            if found[0] is not None:
                return found
    return None, False


def walk(section: type[Section], prefix: str = "") -> Iterator[FieldAt]:
    """All fields below `section`, depth first, sections before their own fields."""
    for name, info in section.model_fields.items():
        path = f"{prefix}{name}"
        make: Any = info.default_factory
        default = info.default if make is None else make()
        yield FieldAt(path, name, info.annotation, info.description or "", default, section)
        inner, is_mapping = inner_section(info.annotation)
        if inner is not None:
            yield from walk(inner, f"{path}.*." if is_mapping else f"{path}.")


def is_text(annotation: Any) -> bool:
    """True if a text is a legal value of the field, so a text that looks like a number must stay one."""
    if annotation is str:
        return True
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is dict:
        return is_text(parts[1])
    if origin in (Union, types.UnionType, Annotated, list):
        return any(is_text(part) for part in parts)
    return False


def section_at(root: type[Section], path: list[str]) -> type[Section] | None:
    """The section class found at a path of keys, or None where the file has no such section."""
    here: type[Section] = root
    keys = list(path)
    while keys:
        info = here.model_fields.get(keys.pop(0))
        if info is None:
            return None
        inner, is_mapping = inner_section(info.annotation)
        if inner is None:
            return None
        if is_mapping and not keys:
            return None
        if is_mapping:
            keys.pop(0)
        here = inner
    return here
