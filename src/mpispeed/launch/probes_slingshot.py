"""Probe of variables by which jobs on Slingshot hang or fail: those of libfabric's cxi provider, NCCL and Cray MPICH.

Sources: the provider's manual, fi_cxi(7), and its message "FI_CXI_RX_MATCH_MODE=[hybrid|software] is required"
(libfabric, prov/cxi/src/cxip_msg.c); fi_mr(3) on cache monitors; "Cray MPICH" and "NCCL" in the documentation of CSCS
(eth-cscs.github.io/cscs-docs); the guides of NCAR Derecho and of ALCF Polaris (docs.alcf.anl.gov) for NCCL on
Slingshot. A site may know better: its own file of defaults sets these variables for all jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mpispeed.launch.findings import Finding, Verdict

AREA = "Slingshot"
CQ_SIZE, TX_SIZE = 131072, 1024
"""Least sizes of queues: the first is what sites recommend for training."""

_RDZV_BYTES = ("FI_CXI_RDZV_THRESHOLD", "FI_CXI_RDZV_GET_MIN", "FI_CXI_OFLOW_BUF_SIZE", "FI_CXI_RDZV_EAGER_SIZE")
_SYSTEM = Path("/sys/class")
_ON = ("1", "true", "yes", "on")
_SET_BY_SITE = "in the job, or once for all in the site file's [environment]"


def find_devices(system: Path = _SYSTEM) -> list[str]:
    """Names of this node's devices of Slingshot: cxi0 and the like, or its interfaces hsn0 and the like."""
    return [
        path.name
        for pattern in ("cxi/cxi*", "cxi_user/cxi*", "net/hsn*")
        for path in sorted(system.glob(pattern))
    ]  # fmt: skip


def check_slingshot(devices: Sequence[str], environ: Mapping[str, str], *, has_gpu: bool) -> Iterator[Finding]:
    """All findings of this area; none on a node without such devices.

    Args:
        devices: of this node.
        environ: of a rank there.
        has_gpu: whether torch sees a GPU, so that memory is also registered and sent by others than MPI.
    """
    if not devices:
        return
    yield Finding(AREA, "devices", Verdict.INFO, ", ".join(devices))
    yield _provider(environ)
    yield _monitor(environ)
    yield _matching(environ)
    yield from _sizes(environ)
    yield from _rendezvous(environ)
    yield _gpu_support(environ)
    if has_gpu:
        yield _host_register(environ)
        yield from _nccl(environ)


def _finding(name: str, environ: Mapping[str, str], *, is_good: bool, why: str, cure: str) -> Finding:
    value = environ.get(name)
    shown = "not set" if value is None else value
    if is_good:
        return Finding(AREA, name, Verdict.OK, shown)
    return Finding(AREA, name, Verdict.WARN, f"{shown}: {why}", cure)


def _provider(environ: Mapping[str, str]) -> Finding:
    name = "FI_PROVIDER"
    providers = environ.get(name, "").replace(";", ",").split(",")
    is_good = not environ.get(name) or "cxi" in providers
    return _finding(name, environ, is_good=is_good, why="messages do not go over Slingshot", cure=f"{name}=cxi")


def _monitor(environ: Mapping[str, str]) -> Finding:
    name = "FI_MR_CACHE_MONITOR"
    is_good = environ.get(name, "").lower() in ("userfaultfd", "kdreg2", "disabled")
    why = "memhooks, the default, can deadlock with the hooks of CUDA, NCCL and memory allocators"
    return _finding(name, environ, is_good=is_good, why=why, cure=f"{name}=userfaultfd {_SET_BY_SITE}")


def _matching(environ: Mapping[str, str]) -> Finding:
    name = "FI_CXI_RX_MATCH_MODE"
    is_good = environ.get(name, "").lower() in ("hybrid", "software")
    why = "hardware matching, the default, ends or stalls a job when the list entries of the device are used up"
    return _finding(name, environ, is_good=is_good, why=why, cure=f"{name}=hybrid {_SET_BY_SITE}")


def _sizes(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name, least, why in (
        ("FI_CXI_DEFAULT_CQ_SIZE", CQ_SIZE, "many messages at once overflow a short completion queue"),
        ("FI_CXI_DEFAULT_TX_SIZE", TX_SIZE, "many messages at once wait for a short transmit queue"),
    ):
        is_good = _number(environ.get(name, "")) >= least
        yield _finding(name, environ, is_good=is_good, why=why, cure=f"{name}={least} or more, {_SET_BY_SITE}")


def _rendezvous(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Settings of the rendezvous protocol, which the defaults do well without: those that are set."""
    name = "FI_CXI_RDZV_PROTO"
    if environ.get(name, "default") != "default":
        is_known = environ[name] in ("alt_read", "alt_write")
        why = "no protocol of the provider"
        found = _finding(name, environ, is_good=is_known, why=why, cure=f"{name}=alt_read, or unset it")
        cure = "all ranks need the same, and the driver has to allow it (rdzv_get_en=0); unset it if a job stalls"
        yield Finding(AREA, name, Verdict.INFO, found.detail, cure) if is_known else found
    sizes = [_number(environ.get(name, "")) for name in _RDZV_BYTES]
    for name in _RDZV_BYTES:
        if name in environ:
            is_good = _number(environ[name]) >= 0
            yield _finding(name, environ, is_good=is_good, why="no number of bytes", cure="unset it")
    if min(sizes[:3]) >= 0 and sizes[0] + sizes[1] > sizes[2]:
        what = f"{_RDZV_BYTES[0]} and {_RDZV_BYTES[1]} are more than {_RDZV_BYTES[2]} together"
        yield Finding(AREA, "rendezvous", Verdict.WARN, what, "the provider needs at most as much; unset them")


def _host_register(environ: Mapping[str, str]) -> Finding:
    name = "FI_CXI_DISABLE_HOST_REGISTER"
    is_good = environ.get(name, "").lower() in _ON
    why = "calls of CUDA that allocate can deadlock with the provider's registration of host memory"
    return _finding(name, environ, is_good=is_good, why=why, cure=f"{name}=1 {_SET_BY_SITE}")


def _nccl(environ: Mapping[str, str]) -> Iterator[Finding]:
    name = "NCCL_SOCKET_IFNAME"
    why = "NCCL may choose the interface of another network, and hang or be slow"
    is_good = "hsn" in environ.get(name, "")
    yield _finding(name, environ, is_good=is_good, why=why, cure=f"{name}=hsn {_SET_BY_SITE}")
    name = "NCCL_NET_GDR_LEVEL"
    is_set = environ.get(name, "") != ""
    cure = "" if is_set else f"{name}=PHB lets the network read memory of GPUs that share a host bridge with it"
    yield Finding(AREA, name, Verdict.OK if is_set else Verdict.INFO, environ.get(name) or "not set", cure)


def _gpu_support(environ: Mapping[str, str]) -> Finding:
    """Cray MPICH's support of GPU memory, which needs a library (GTL) that a wheel of mpi4py is not linked with."""
    name = "MPICH_GPU_SUPPORT_ENABLED"
    is_on = environ.get(name, "0").lower() in _ON
    if environ.get("MPISPEED_DEVICE_PATH") == "pointers":
        why = "MPISPEED_DEVICE_PATH=pointers hands memory of GPUs to MPI, which takes it only with 1"
        return _finding(name, environ, is_good=is_on, why=why, cure=f"{name}=1, or unset MPISPEED_DEVICE_PATH")
    is_good = not is_on or "libmpi_gtl" in environ.get("LD_PRELOAD", "")
    why = "Cray MPICH ends in MPI_Init unless mpi4py is linked with its GTL library"
    cure = f"{name}=0 (mpispeed hands host memory to MPI), or preload libmpi_gtl_cuda.so or libmpi_gtl_hsa.so"
    return _finding(name, environ, is_good=is_good, why=why, cure=cure)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else -1
