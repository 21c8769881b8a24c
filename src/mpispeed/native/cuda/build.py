"""Build of all kernels ahead of time, for machines whose nodes have no compiler."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from mpispeed.base import assets
from mpispeed.base.errors import NativeMissing
from mpispeed.native.cuda import catalog, store, toolchain


@dataclass(frozen=True, slots=True)
class Built:
    """One source compiled for one architecture, and the resources of its kernels."""

    source: str
    arch: str
    path: Path
    resources: tuple[toolchain.Resources, ...]

    @property
    def spilled(self) -> list[str]:
        """Hot kernels that spill registers to memory, which costs them their speed."""
        return [
            entry.kernel for entry in self.resources if entry.spilled_bytes and catalog.KERNELS[entry.kernel].is_hot
        ]


def default_folder() -> Path:
    """Folder of prebuilt kernels without a setting: inside the package, or in a checkout below cuda/."""
    return assets.folder("cuda") / "built"


def build(archs: Sequence[str], folder: Path, jobs: int | None = None) -> Iterator[Built]:
    """Compile every source for every architecture into `folder`; gives each when it is there, in order.

    Raises:
        NativeMissing: nvcc is missing or finds an error, the folder cannot be written or others can write it, or a
            source and the catalog name different kernels.
        ValueError: an architecture is spelled wrong.
    """
    for arch in archs:
        toolchain.check_architecture(arch)
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)  # or a umask of 002 lets its group write
    except OSError as error:
        msg = f"cannot make {folder}: {error.strerror}; choose another with --out, and set {store.BUILT_VARIABLE} to it"
        raise NativeMissing(msg) from error
    if folder != default_folder():
        store.check_trusted(folder.stat(), str(folder))

    def one(work: tuple[str, str]) -> Built:
        source, arch = work
        code, resources = toolchain.compile_source(source, arch)
        check_names(source, [entry.kernel for entry in resources])
        path = folder / store.file_name(source, arch)
        try:
            store.publish(code, path)
        except OSError as error:
            msg = f"cannot write {path}: {error.strerror}; choose another folder with --out"
            raise NativeMissing(msg) from error
        return Built(source, arch, path, tuple(resources))

    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        yield from pool.map(one, product(catalog.sources(), archs))


def check_names(source: str, found: Sequence[str]) -> None:
    """Check that the kernels in the machine code of a source are those that the catalog has of it.

    Raises:
        NativeMissing: they are not.
    """
    wanted = {kernel.name for kernel in catalog.of_source(source)}
    if wanted != set(found):
        missing, extra = sorted(wanted - set(found)), sorted(set(found) - wanted)
        msg = f"{source} and the catalog differ: missing in the source {missing}, missing in the catalog {extra}"
        raise NativeMissing(msg)
