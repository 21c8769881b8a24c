"""The base of all sections: frozen, unknown keys refused; number types; walking over the fields."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)
from pydantic_core import PydanticCustomError

from mpispeed.base.plain import SET
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

    @field_validator("*", mode="before")
    @classmethod
    def require_switch(cls, value: Any, info: ValidationInfo) -> Any:
        """Accept only true and false in fields that are switches, where "no" would mean false."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if annotation is bool and not isinstance(value, bool):
            raise PydanticCustomError("bool_type", "Input should be a valid boolean")
        if annotation == bool | None and not (value is None or isinstance(value, bool)):
            raise PydanticCustomError("bool_type", "Input should be a valid boolean")
        return value


def require_number(value: Any) -> Any:
    """Refuse true and false in number fields, where they would become 1 and 0, and texts that are no numbers.

    Texts that are numbers were read before; those left only seem to be, such as digits of other scripts.
    """
    if isinstance(value, (bool, str)):
        raise PydanticCustomError("number_type", "Input should be a number")
    return value


def require_whole(value: Any) -> Any:
    """The same check for whole numbers."""
    if isinstance(value, (bool, str)):
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


def _read_bytes(value: Any) -> Any:
    """Read 4e9 or "4GiB" as a whole number."""
    try:
        return parse_count(value) if isinstance(value, (str, int, float)) else value
    except ValueError:
        raise PydanticCustomError("bytes_type", "Input should be bytes") from None


def _wrap_text(value: Any) -> Any:
    """Turn a single name into a list of one."""
    return [value] if isinstance(value, str) else value


# Limits stand next to the type, so that the JSON Schema shows them.
MOST = 2**63 - 1  # of whole numbers, which tensors and files hold in 64 bits
LARGEST = 3.4028234663852886e38  # of other numbers, which the arithmetic of fp32 has to hold
Integer = Annotated[int, Field(ge=-MOST, le=MOST), BeforeValidator(require_whole)]
Natural = Annotated[int, Field(ge=0, le=MOST), BeforeValidator(require_whole)]
Seed = Natural
ScalePower = Annotated[int, Field(ge=0, le=127), BeforeValidator(require_whole)]  # 2^127 still fits into fp32
Stage = Annotated[int, Field(ge=0, le=3), BeforeValidator(require_whole)]
Positive = Annotated[int, Field(ge=1, le=MOST), BeforeValidator(require_whole)]
Bytes = Annotated[int, Field(ge=1, le=MOST), BeforeValidator(_read_bytes, json_schema_input_type=int | str)]
Real = Annotated[float, Field(ge=-LARGEST, le=LARGEST), BeforeValidator(require_number)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST), BeforeValidator(require_number)]
PositiveReal = Annotated[float, Field(gt=0, le=LARGEST), BeforeValidator(require_number)]
Fraction = Annotated[float, Field(ge=0, le=1), BeforeValidator(require_number)]


def either(words: str) -> WrapValidator:
    """One problem of a value that is neither a certain word nor what else it may be, instead of one for each."""

    def read(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("either_type", "neither the word nor the type", {"wanted": words}) from None

    return WrapValidator(read)


AutoPositive = Annotated[Positive | Literal["auto"], either('"auto" or a whole number from 1 on')]
AutoReal = Annotated[Real | Literal["auto"], either('"auto" or a number')]

Secret = Annotated[SecretStr, PlainSerializer(lambda _: SET, return_type=str)]
"""A key or a password. Only `get_secret_value` gives it; every text and dump of the settings has `SET` instead."""
Names = Annotated[list[str], BeforeValidator(_wrap_text)]

S = TypeVar("S", bound=Section)


def subsection(kind: type[S], description: str) -> Any:
    """A field that holds a section and is that section's defaults when absent."""
    return Field(default_factory=kind, description=description)


class FieldAt(NamedTuple):
    """A field and its place: `path` has "*" for the free names of a mapping."""

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
    if annotation in (str, SecretStr):
        return True
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is dict:
        return is_text(parts[1])
    if origin in (Union, types.UnionType, Annotated, list):
        return any(is_text(part) for part in parts)
    return False


@cache
def text_keys(root: type[Section]) -> frozenset[str]:
    """Keys whose values are texts, so that "007" stays a text; other texts that look like numbers become numbers."""
    return frozenset(field.name for field in walk(root) if is_text(field.annotation))


def has_secrets(section: type[Section]) -> bool:
    """True if a field of the section, not of sections in it, is a secret."""
    return any(SecretStr in _parts(info.annotation) for info in section.model_fields.values())


def _parts(annotation: Any) -> list[Any]:
    """The annotation and all its parts."""
    return [annotation, *(found for part in get_args(annotation) for found in _parts(part))]


def knows(root: type[Section], path: Sequence[str], key: str) -> bool:
    """True if `key` may stand at a path of keys: a field, a name in a mapping, or a keyword of the user's own."""
    section, annotation = _follow(root, path)
    if section is not None:
        return key in section.model_fields
    return get_origin(annotation) is dict or inner_section(annotation)[1]


def section_at(root: type[Section], path: Sequence[str]) -> type[Section] | None:
    """The section class found at a path of keys, or None where the file has no such section."""
    return _follow(root, path)[0]


def _follow(root: type[Section], path: Sequence[str]) -> tuple[type[Section] | None, Any]:
    """The section at a path of keys; or None, and the annotation of the entry there, None if there is none."""
    here: type[Section] = root
    keys = list(path)
    while keys:
        info = here.model_fields.get(keys.pop(0))
        if info is None:
            return None, None
        inner, is_mapping = inner_section(info.annotation)
        if inner is None or (is_mapping and not keys):
            return None, info.annotation
        if is_mapping:
            keys.pop(0)
        here = inner
    return here, None
