"""Pictures, drawn with matplotlib."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from matplotlib.figure import Figure

    from mpispeed.base.errors import MpispeedError

_DPI = 110


@contextmanager
def picture(
    path: Path, width_inches: float, height_inches: float, *, error: type[MpispeedError] = UsageError, **options: Any
) -> Iterator[Figure]:
    """An empty figure, drawn in the block and then written as PNG; `options` as for `Figure`.

    Raises:
        error: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        import matplotlib as mpl  # slow to import, and in an extra of its own
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as failure:
        msg = f"a picture needs matplotlib ({failure}); install it with: pip install mpispeed[monitor]"
        raise error(msg) from failure
    # Settings of the user may hand texts to LaTeX; names are text of strangers.
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure = Figure(figsize=(width_inches, height_inches), dpi=_DPI, **options)
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, format="png")
