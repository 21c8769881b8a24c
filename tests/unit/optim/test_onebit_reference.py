"""The reference of the one-bit mean against vectors worked out by hand, and what error feedback promises."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.onebit_reference import Counters, OneBitMean, sign

FIRST = [1, -2, 3, -4, 0.5, -0.5, 0, 2, -1, 1, -1, 1, 4, -4, 0.25, -0.25]
SECOND = [-1, -2, 1, 4, 0.5, 1.5, -3, 0, 2, -1, 0.5, 1, -4, -4, 1, 0]


def test_golden_vectors() -> None:
    mean = OneBitMean(2, 16)
    inputs = [np.array(FIRST, dtype=float), np.array(SECOND, dtype=float)]
    for scales, packed, taus, served in (
        ((2.100967, 2.132340), [[171, 90], [61, 179]], (1.496741, 1.296240), [[61], [179]]),
        ((2.945615, 2.933875), [[37, 169], [148, 192]], (1.853330, 2.012591), [[165], [200]]),
    ):
        result = mean(inputs)
        assert mean.sent["worker scales"] == pytest.approx(scales, abs=1e-6)  # digits given
        assert mean.sent["worker bytes"] == packed
        assert mean.sent["server scales"] == pytest.approx(taus, abs=1e-6)
        assert mean.sent["server bytes"] == served
        bits = np.unpackbits(np.array(served, dtype=np.uint8).reshape(-1)) * 2.0 - 1.0
        assert result == pytest.approx(np.repeat(mean.sent["server scales"], 8) * bits)


@pytest.mark.parametrize(("workers", "length", "padded"), [(1, 1, 8), (2, 16, 16), (2, 17, 32), (3, 5, 24), (4, 1, 32)])
def test_padding(workers: int, length: int, padded: int) -> None:
    mean = OneBitMean(workers, length)
    assert mean.padded == padded
    assert len(mean([np.ones(length)] * workers)) == length


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_nothing_is_lost(workers: int) -> None:
    """Sum of results = sum of means - errors that are still kept, exactly but for rounding."""
    source = np.random.default_rng(workers)
    mean, length = OneBitMean(workers, 48 * workers), 48 * workers
    given, got = np.zeros(length), np.zeros(length)
    for _ in range(50):
        inputs = [source.normal(size=length) for _ in range(workers)]
        given += np.mean(inputs, axis=0)
        got += mean(inputs)
    kept = np.mean(mean.worker_errors, axis=0) + np.concatenate(mean.server_errors)
    assert got + kept == pytest.approx(given, abs=1e-12)


def test_zero_counts_as_positive() -> None:
    assert sign(np.array([0.0, -0.0, -1e-300])).tolist() == [1.0, 1.0, -1.0]


def test_trace_of_the_counters() -> None:
    """freeze 4, kappa 1, alpha 1, H 2, after a first step without effect: steps 2 to 12."""
    counters = Counters(4, 1, 1, 2, dry_run=True)
    assert [counters.next() for _ in range(2, 13)] == [
        "full", "coded", "full", "coded", "sync", "local", "sync", "local", "sync", "local", "sync",
    ]  # fmt: skip
