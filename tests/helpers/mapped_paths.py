"""Groups whose tensors of a device travel through memory that their ranks have mapped."""

from __future__ import annotations

from contextlib import contextmanager

from mpispeed.mesh.backends import mapped


@contextmanager
def mapped_paths(comm, device):
    """Open the path of a group and of its started verbs; one rank alone has none. Collective over: `comm`."""
    groups = [] if comm.size == 1 else list(dict.fromkeys((comm.group, comm.started.group)))
    for group in groups:
        group.device_path = mapped.open_mapped(group, device)
    try:
        yield
    finally:
        for group in groups:
            path, group.device_path = group.device_path, None
            path.close()
