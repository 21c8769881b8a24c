"""`mpispeed data show` and `mpispeed data verify`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mpispeed.cli.data import data
from mpispeed.tokens.columns import add_column
from mpispeed.tokens.errors import TokenStoreError
from mpispeed.tokens.reader import open_file, read_contents
from tests.helpers.system import cannot


def said(*words: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(data, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == code
    return done.output


def test_show_tells_what_is_there(make: Callable[..., Any]) -> None:
    made = make(columns={"loss": "f4"}, row_length=64, facts={"tokenizer": "gpt2\x1b[31m"})
    add_column(made.path, "rarity", np.arange(50), facts={"by": "analyze"})
    text = said("show", made.path)
    for line in (
        f"tokens           {len(made.tokens)} of u2",
        "documents        50, ",
        "rows  ",
        "loss    f4",
        'rarity  i8     {"by"',
    ):
        assert line in text
    assert "\x1b" not in text
    told = json.loads(said("show", "--json", made.path))
    assert told["tokens"] == len(made.tokens)
    assert told["columns"]["rarity"] == {"dtype": "i8", "facts": {"by": "analyze"}}
    assert said("show", "--document", "7", made.path).split() == list(map(str, made.documents[7]))
    with pytest.raises(TokenStoreError, match="no document 50; it has 50"):
        said("show", "--document", "50", made.path)


def test_verify_has_an_exit_code(make: Callable[..., Any]) -> None:
    made = make()
    assert "3 of 3 blocks" in said("verify", made.path)
    told = json.loads(said("verify", "--json", "--sample", "1", "--threads", "2", made.path))
    assert told["fine"]
    assert told["blocks"] == 1
    handle = open_file(made.path)
    offset = read_contents(made.path, handle).places.tables["tokens"].offset
    with made.path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([old ^ 1]))
    assert "of /tokens are damaged" in said("verify", made.path, code=1)
    assert not json.loads(said("verify", "--json", made.path, code=1))["fine"]


def test_no_command_needs_torch(make: Callable[..., Any]) -> None:
    made = make()
    code = (
        "import sys; from click.testing import CliRunner; from mpispeed.cli.data import data;"
        f"done = [CliRunner().invoke(data, [word, {str(made.path)!r}]).exit_code for word in ('show', 'verify')];"
        "assert done == [0, 0], done; assert not {'torch', 'mpi4py'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_any_tool_for_hdf5_reads_a_store(make: Callable[..., Any]) -> None:
    made = make(columns={"loss": "f4"})
    add_column(made.path, "rarity", np.arange(50, dtype=np.uint8))
    if shutil.which("h5dump") is None:
        cannot("h5dump is not installed (package hdf5-tools)")
    for name, values in (("/tokens", made.tokens), ("/columns/rarity/values", np.arange(50))):
        command = ["h5dump", "-d", name, "-y", "-w", "0", "-m", "%.9g", made.path]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        body = text[text.index("DATA {") + 6 : text.rindex("}")].replace("}", "")
        assert [int(number) for number in body.split(",")] == values.tolist()
