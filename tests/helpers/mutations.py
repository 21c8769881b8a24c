"""Ways to alter a file or a tree of values at random, by a seed; each says in words what it did."""

import functools
import json
import random
import struct

#: what stands in fields of lengths, offsets and counts of hostile files
EXTREMES = (
    0,
    1,
    2,
    7,
    0x7F,
    0xFF,
    0x7FFF,
    0xFFFF,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
#: what stands where another value is expected
STRANGE = (
    None, True, False, -1, 0, 0.9, 1e308, -1e-320, 2**63, 2**70, -(2**40), "", "4", "x\x1b[31m\n\u202ey", "\ud800",
    "a" * 5000, [], {}, [[]], {"a": {"b": []}}, [1, "two", None], float("inf"), float("nan"),
)  # fmt: skip
TOKENS = (
    "{", "}", "[", "]", ",", ":", '"', '"a"', "0", "-1", "0.5", "1e400", "Infinity", "NaN", "null", "true", "9" * 30,
    "\\u0000", '"\\ud800"', "\x00", "\x1b", "[" * 20_000, '{"a":' * 20_000, " " * 1000, "/*", "//", "'",
)  # fmt: skip


def raw(pick: random.Random, content: bytes) -> tuple[bytes, str]:
    """Bytes flipped, cut, put in, taken out, repeated, or set to an extreme number."""
    if not content:
        return b"\xff", "a byte put in an empty file"
    own, at = bytearray(content), pick.randrange(len(content))
    # small structures at both ends are met as often as the many elements between
    at = pick.choice((at, min(at, pick.randrange(400)), max(at, len(own) - 1 - pick.randrange(600)), at)) % len(own)
    way = pick.choice(("flip", "flip", "flips", "number", "number", "cut", "put in", "taken out", "repeated"))
    count = pick.choice((1, 2, 8, 64, 300))
    if way in ("flip", "flips"):
        for place in [at] if way == "flip" else [pick.randrange(len(own)) for _ in range(5)]:
            own[place] ^= 1 << pick.randrange(8)
    elif way == "number":
        width = pick.choice((1, 2, 4, 8))
        number = pick.choice(EXTREMES) % 256**width
        own[at : at + width] = number.to_bytes(width, pick.choice(("little", "little", "big")))
        own = own[: len(content)]
    elif way == "cut":
        del own[at:]
    elif way == "put in":
        own[at:at] = pick.randbytes(count)
    elif way == "taken out":
        del own[at : at + count]
    else:
        own[at:at] = own[max(0, at - count) : at]
    return bytes(own), f"{way} at byte {at} of {len(content)}"


def text(pick: random.Random, content: str) -> tuple[str, str]:
    """Tokens of JSON put in, taken out, swapped or repeated."""
    marks = [place for place, sign in enumerate(content) if sign in '{}[],:"'] or [0]
    first, second = sorted(pick.choice(marks) for _ in range(2))
    way = pick.choice(("token", "token", "taken out", "repeated", "number"))
    if way == "token":
        token = pick.choice(TOKENS)
        return content[:first] + token + content[first + pick.randrange(2) :], f"{token[:20]!r} at sign {first}"
    if way == "taken out":
        return content[:first] + content[second:], f"signs {first} to {second} taken out"
    if way == "repeated":
        return content[:second] + content[first:second] + content[second:], f"signs {first} to {second} repeated"
    digits = [place for place, sign in enumerate(content) if sign.isdigit()] or [0]
    place, number = pick.choice(digits), str(pick.choice((*EXTREMES, -1, 0.9, "1e999")))
    return content[:place] + number + content[place + 1 :], f"{number} at sign {place}"


def tree(pick: random.Random, value: object, strange: tuple = STRANGE) -> tuple[object, str]:
    """A value deep in dicts and lists replaced, taken out, or put under another name; `value` is altered."""
    where, path = value, []
    while True:
        keys = list(where) if isinstance(where, dict) else list(range(len(where)))
        if not keys:
            return value, "nothing"
        key = pick.choice(keys)
        path.append(key)
        if not (isinstance(where[key], (dict, list)) and where[key]) or pick.random() < 0.25:
            break
        where = where[key]
    way = pick.choice(("replaced", "replaced", "replaced", "taken out", "renamed", "nested"))
    if way == "replaced":
        where[key] = pick.choice(strange)
        what = f"replaced by {where[key]!r:.30}"
    elif way == "nested":
        inner = where[key]
        for _ in range(pick.choice((1, 60, 300))):
            inner = [inner]
        where[key], what = inner, "nested"
    elif way == "renamed" and isinstance(where, dict):
        where[pick.choice(("x", "", "\x1b[31m\n", "a" * 3000))] = where.pop(key)
        what = "renamed"
    else:
        del where[key]
        what = "taken out"
    return value, f"{'/'.join(map(str, path)):.100} {what}"


def as_json(pick: random.Random, content: str) -> tuple[str, str]:
    """The text of a JSON object altered as text, or in its values."""
    if pick.random() < 0.5:
        return text(pick, content)
    altered, what = tree(pick, json.loads(content))
    return json.dumps(altered), what


# -- files of HDF5 whose own checksums fit ----------------------------------------------------------------------------

HDF5_SIGNS = (b"OHDR", b"OCHK", b"FRHP", b"BTHD", b"BTLF")


def hdf5(pick: random.Random, content: bytes) -> tuple[bytes, str]:
    """A byte or number in a block of HDF5's metadata, and the checksum of the block; as `raw` if there is none."""
    blocks = [block for sign in HDF5_SIGNS for block in _blocks(content, sign)]
    if not blocks:
        return raw(pick, content)
    start, end = pick.choice(blocks)
    own, at = bytearray(content), start + 4 + pick.randrange(end - start - 4)
    if pick.random() < 0.5:
        own[at] ^= 1 << pick.randrange(8)
        what = "a bit flipped"
    else:
        width, number = pick.choice((1, 2, 4, 8)), pick.choice(EXTREMES)
        width = min(width, end - at)
        own[at : at + width] = (number % 256**width).to_bytes(width, "little")
        what = f"{number} in {width} bytes"
    own[end : end + 4] = lookup3(bytes(own[start:end])).to_bytes(4, "little")
    return bytes(own), f"{what} at byte {at} of a {content[start : start + 4].decode()}, its checksum fits"


@functools.lru_cache(16)
def _blocks(content: bytes, sign: bytes) -> list[tuple[int, int]]:
    """(start, end) of blocks that begin with `sign` and whose checksum stands at their end.

    The length of a block is found by trying: the checksum of what is before it fits nowhere else.
    """
    found, start = [], content.find(sign)
    while start >= 0:
        last = content.find(b"OHDR", start + 4)
        last = min(start + 2000, len(content), last if last > 0 else len(content))
        ends = (end for end in range(start + 8, last - 3) if _is_end(content, start, end))
        end = next(ends, None)
        if end is not None:
            found.append((start, end))
        start = content.find(sign, start + 4)
    return found


def _is_end(content: bytes, start: int, end: int) -> bool:
    return lookup3(content[start:end]) == int.from_bytes(content[end : end + 4], "little")


def lookup3(key: bytes) -> int:
    """The checksum of HDF5's metadata: Bob Jenkins' hashlittle of 2006 with the start 0."""
    size = len(key)
    a = b = c = (0xDEADBEEF + size) & 0xFFFFFFFF
    if size == 0:
        return c
    whole = (size - 1) // 12 * 12
    for at in range(0, whole, 12):
        x, y, z = struct.unpack_from("<III", key, at)
        a, b, c = _mixed((a + x) & 0xFFFFFFFF, (b + y) & 0xFFFFFFFF, (c + z) & 0xFFFFFFFF)
    x, y, z = struct.unpack("<III", key[whole:].ljust(12, b"\0"))
    return _last((a + x) & 0xFFFFFFFF, (b + y) & 0xFFFFFFFF, (c + z) & 0xFFFFFFFF)


def _turned(value: int, by: int) -> int:
    return ((value << by) | (value >> (32 - by))) & 0xFFFFFFFF


def _mixed(a: int, b: int, c: int) -> tuple[int, int, int]:
    for by in (4, 6, 8, 16, 19, 4):
        a = ((a - c) & 0xFFFFFFFF) ^ _turned(c, by)
        c = (c + b) & 0xFFFFFFFF
        a, b, c = b, c, a
    return a, b, c


def _last(a: int, b: int, c: int) -> int:
    for by in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - _turned(b, by)) & 0xFFFFFFFF
        a, b, c = b, c, a
    return b
