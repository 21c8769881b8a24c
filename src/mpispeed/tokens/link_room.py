"""Groups of HDF5 whose header has room for all links they will ever have.

HDF5 moves the links of a group from its header to a heap once there are more than 8, and extends headers where there
is free space in the file. With room reserved for them a new link changes the header in place, and nothing else that
is in the file.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from h5py import _objects, h5g, h5p

_MAPS = Path("/proc/self/maps")
_ALWAYS_COMPACT = 65000  # the format has 16 bits for it


def roomy_group(parent: h5g.GroupID, name: str, links: int, name_bytes: int) -> h5g.GroupID:
    """A new group with room for so many links; an ordinary one where the library behind h5py is not found.

    h5py does not offer these two properties, so they are set by calls to its library.

    Args:
        parent: file or group.
        name: of the new group.
        links: how many.
        name_bytes: the longest name of a link.
    """
    properties = h5p.create(h5p.GROUP_CREATE)
    properties.set_obj_track_times(False)
    library = _library()
    if library is not None:
        with _objects.phil:  # no other thread may be in the library
            library.H5Pset_link_phase_change(properties.id, _ALWAYS_COMPACT, 0)
            library.H5Pset_est_link_info(properties.id, links, name_bytes)
    return h5g.create(parent, name.encode(), gcpl=properties)


@cache
def _library() -> ctypes.CDLL | None:
    """The HDF5 that h5py has loaded."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libhdf5") and "_hl" not in path.name:
            library = ctypes.CDLL(str(path))
            for call in (library.H5Pset_link_phase_change, library.H5Pset_est_link_info):
                call.argtypes = [ctypes.c_int64, ctypes.c_uint, ctypes.c_uint]
            return library
    return None
