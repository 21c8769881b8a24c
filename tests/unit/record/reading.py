"""A run record as plain h5py reads it."""

import json

import h5py

from mpispeed.native.checksum import crc32c
from mpispeed.record import layout


def proven_contents(path):
    """State, capacity of /rows, and the bytes that the state proves; checks checksums and the fact "config"."""
    with h5py.File(path, "r", locking=False) as file:
        assert file.attrs["format"].decode() == layout.FORMAT
        assert json.loads(file["facts/config"][...].tobytes()) == {"a": 1}
        state = layout.latest_state(file["state"][...].tobytes()) or layout.State()
        found = {name: file[name][: state.counts[name]].tobytes() for name in layout.TABLES}
        capacity = len(file["rows"])
    for name, data in found.items():
        assert len(data) == state.counts[name] * layout.TABLES[name].itemsize
        assert crc32c(data) == state.checksums[name], name
    return state, capacity, found
