"""The doctor on Slingshot: variables by which jobs hang, from a table of environments."""

import pytest

from mpispeed.launch.findings import Verdict
from mpispeed.launch.probes_slingshot import check_slingshot, find_devices

GOOD = {
    "FI_PROVIDER": "cxi", "FI_MR_CACHE_MONITOR": "userfaultfd", "FI_CXI_RX_MATCH_MODE": "hybrid",
    "FI_CXI_DEFAULT_CQ_SIZE": "131072", "FI_CXI_DEFAULT_TX_SIZE": "2048", "FI_CXI_DISABLE_HOST_REGISTER": "1",
    "NCCL_SOCKET_IFNAME": "hsn", "NCCL_NET_GDR_LEVEL": "PHB",
}  # fmt: skip


def verdicts(environ, has_gpu=True):
    return {finding.name: finding for finding in check_slingshot(["cxi0"], environ, has_gpu=has_gpu)}


def warned(environ, has_gpu=True):
    return {name for name, finding in verdicts(environ, has_gpu).items() if finding.verdict is Verdict.WARN}


def test_other_networks_are_not_looked_at():
    assert list(check_slingshot([], {}, has_gpu=True)) == []


def test_good_settings_are_good():
    assert warned(GOOD) == set()
    assert warned({**GOOD, "FI_MR_CACHE_MONITOR": "kdreg2", "FI_CXI_RX_MATCH_MODE": "software"}) == set()


def test_defaults_are_warned_of_with_a_cure():
    common = {"FI_MR_CACHE_MONITOR", "FI_CXI_RX_MATCH_MODE", "FI_CXI_DEFAULT_CQ_SIZE", "FI_CXI_DEFAULT_TX_SIZE"}
    assert warned({}, has_gpu=False) == common
    assert warned({}) == {*common, "FI_CXI_DISABLE_HOST_REGISTER", "NCCL_SOCKET_IFNAME"}
    for name, finding in verdicts({}).items():
        if finding.verdict is Verdict.WARN:
            assert finding.cure.startswith(f"{name}=")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FI_PROVIDER", "tcp;ofi_rxm"),
        ("FI_MR_CACHE_MONITOR", "memhooks"),
        ("FI_CXI_RX_MATCH_MODE", "hardware"),
        ("FI_CXI_DEFAULT_CQ_SIZE", "1024"),
        ("FI_CXI_DEFAULT_TX_SIZE", "many"),
        ("FI_CXI_DISABLE_HOST_REGISTER", "0"),
        ("FI_CXI_RDZV_PROTO", "alt"),
        ("FI_CXI_RDZV_GET_MIN", "-1"),
        ("NCCL_SOCKET_IFNAME", "eth0"),
        ("MPICH_GPU_SUPPORT_ENABLED", "1"),
    ],
)
def test_each_bad_value_is_one_warning(name, value):
    assert warned({**GOOD, name: value}) == {name}


def test_memory_of_gpus_in_mpi():
    preloaded = {**GOOD, "MPICH_GPU_SUPPORT_ENABLED": "1", "LD_PRELOAD": "/opt/cray/libmpi_gtl_cuda.so"}
    assert warned(preloaded) == set()
    assert warned({**GOOD, "MPISPEED_DEVICE_PATH": "pointers"}) == {"MPICH_GPU_SUPPORT_ENABLED"}


def test_rendezvous_has_to_fit_the_overflow_buffers():
    sizes = {"FI_CXI_RDZV_THRESHOLD": "16384", "FI_CXI_RDZV_GET_MIN": "0", "FI_CXI_OFLOW_BUF_SIZE": "8192"}
    assert warned({**GOOD, **sizes}) == {"rendezvous"}
    assert verdicts({**GOOD, "FI_CXI_RDZV_PROTO": "alt_read"})["FI_CXI_RDZV_PROTO"].verdict is Verdict.INFO


def test_devices_are_found(tmp_path):
    for name in ("cxi/cxi0", "net/hsn0", "net/eth0"):
        (tmp_path / name).mkdir(parents=True)
    assert find_devices(tmp_path) == ["cxi0", "hsn0"]
    assert find_devices(tmp_path / "none") == []
