"""The names that engines get from `mpispeed.engine.delegation`, for type checkers.

python tools/getter_stub.py             write src/mpispeed/engine/getters.pyi
python tools/getter_stub.py --check     fail if the file is not what would be written
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from mpispeed.engine.delegation import COMPONENTS, HOMES, OWN, PROPERTIES, all_methods

PAGE = Path(__file__).resolve().parents[1] / "src" / "mpispeed" / "engine" / "getters.pyi"


def page() -> str:
    """The whole stub."""
    methods, values = all_methods(), {**COMPONENTS, **OWN, **PROPERTIES}
    used = {word for getter in (*methods.values(), *values.values()) for word in re.findall(r"\w+", getter.returns)}
    places: dict[str, list[str]] = {}
    for name in sorted(used & HOMES.keys()):
        places.setdefault(HOMES[name], []).append(name)
    lines = [
        "# Made by tools/getter_stub.py of the tables in delegation.py.",
        "",
        "from typing import Any",
        "",
        "import torch",
        "from torch import nn",
        "",
        *(f"from {place} import {', '.join(names)}" for place, names in sorted(places.items())),
        "",
        "class Getters(nn.Module):",
    ]
    for name, getter in sorted(values.items()):
        lines += ["    @property", f"    def {name}(self) -> {getter.returns}: ..."]
    lines += [f"    def {name}(self) -> {getter.returns}: ..." for name, getter in sorted(methods.items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the stub, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        return int(not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
