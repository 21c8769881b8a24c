"""Words that start the interpreter of a rank."""

from __future__ import annotations

import sys

WITHOUT_FOLDER = "import sys; del sys.path[0]; from {} import main; main()"
"""What -P does, for interpreters that do not have it yet."""


def without_folder(module: str, main: str, version: tuple[int, ...] = sys.version_info[:2]) -> list[str]:
    """Words that let Python run `module`, whose function is in `main`, without the working folder in its path."""
    return ["-P", "-m", module] if version >= (3, 11) else ["-c", WITHOUT_FOLDER.format(main)]


def runner(version: tuple[int, ...] = sys.version_info[:2]) -> list[str]:
    """Python's flags for mpi4py's runner, which ends all ranks when one fails: the others would wait for ever.

    Files of the working folder must not take the place of mpi4py's and our modules before the script starts.
    """
    return without_folder("mpi4py", "mpi4py.run", version)
