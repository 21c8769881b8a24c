"""1-bit exchanges are one room behind the interface of exchanges: no other file knows of them.

Their optimizers, verbs and kernels have rooms of their own below, which lists of names register.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "mpispeed"
ONE_BIT = re.compile(r"1-bit|one_?bit|zero_?one|0/1 adam", re.IGNORECASE)
OWN = ("exchange/onebit/", "optim/", "native/", "mesh/compressed/")
LISTS = {
    "exchange/table.py",  # the row of the exchange
    "base/unused_params.py",  # parameters of optimizers that change nothing
    "comm.py",  # public names
    "compat/names.py",  # DeepSpeed's
}
"""Tables by which something is found, and the config, which knows all keys."""


def knowing(package):
    """Files below `package`, outside of the rooms and lists, that name 1-bit exchanges."""
    for path in sorted(package.rglob("*.py*")):
        name = path.relative_to(package).as_posix()
        if path.suffix in (".py", ".pyi") and not name.startswith((*OWN, "config/")) and name not in LISTS:
            yield from ([name] if ONE_BIT.search(path.read_text()) else [])


def test_only_the_room_of_1_bit_exchanges_knows_of_them():
    assert not list(knowing(PACKAGE)), "ask the exchange instead (`exchange/strategy.py`)"


def test_every_list_names_them():
    assert all(ONE_BIT.search((PACKAGE / name).read_text()) for name in LISTS)
    assert all((PACKAGE / room).is_dir() for room in OWN)


def test_the_check_sees_names_and_prose(tmp_path):
    (tmp_path / "engine").mkdir()
    for name, text in {"a": "x.onebit = 1", "b": "# a 1-bit optimizer", "c": "ZeroOneAdam()", "d": "one = bit"}.items():
        (tmp_path / "engine" / f"{name}.py").write_text(text)
    assert list(knowing(tmp_path)) == ["engine/a.py", "engine/b.py", "engine/c.py"]
