"""Floors: what the machine can do at best, and what a decode step cannot beat."""

from __future__ import annotations

import pytest

from worker.roofline import decode_floor_s, measure_bandwidth, measure_matmul_rate


def test_a_floor_counts_every_weight_once_and_every_sequences_cells() -> None:
    floor = decode_floor_s(batch=4, context=10, weight_bytes=1000, bytes_per_cell=5, bandwidth=100.0)
    assert floor == pytest.approx((1000 + 4 * 10 * 5) / 100)


def test_what_the_machine_can_do_is_measured() -> None:
    bandwidth = measure_bandwidth("cpu", block_bytes=2**20)
    assert bandwidth.best == max(bandwidth.copy, bandwidth.read) > 0
    assert measure_matmul_rate(2, "cpu", width=64, total_bytes=2**16) > 0
