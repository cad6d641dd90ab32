"""What the comparison of engines on a GPU makes of each side's figures; running them takes a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.against_vllm import BATCH_SIZES, compared, loads_s
from cluster.bench import workload
from cluster.bench.workload import Item

OURS = {
    "decode1_ms": 2.0, "decode8_ms": 4.0, "mixed256_tok_s": 300.0, "prefill_tok_s": 50.0, "startup_s": 7.0,
    "weight_bytes": 4_380_000_000, "bytes_per_cell": 0,
}  # fmt: skip
THEIRS = {"decode1_ms": 3.0, "mixed256_tok_s": 200.0, "prefill_tok_s": 100.0, "startup_s": 70.0}


def test_ratios_above_one_are_ours_being_faster_and_cover_what_both_did() -> None:
    results = [{"side": side, "shape": "small", "figures": f} for side, f in (("raycomb", OURS), ("vllm", THEIRS))]
    sides = compared(results)["small"]
    assert sides["raycomb_over_vllm"] == {"decode1_ms": 1.5, "mixed256_tok_s": 1.5, "prefill_tok_s": 0.5}
    assert sides["of_floor"] == pytest.approx({"decode1_ms": 0.5, "decode8_ms": 0.25})


def test_a_side_that_takes_a_second_a_token_of_a_batch_is_told_so() -> None:
    """A decode is the difference of two runs, so the prompts' time, ten seconds here, is not in it."""
    seen: list[int] = []

    def seconds(items: Sequence[Item]) -> float:
        seen.append(len(items))
        return 10.0 + max(item.output_len for item in items)

    figures = loads_s(seconds, 1000, BATCH_SIZES)
    assert [figures[f"decode{size}_ms"] for size in BATCH_SIZES] == [1000.0] * len(BATCH_SIZES)
    longest = max(item.output_len for item in workload.mixed(256, (100, 1024), vocab_size=1000, seed=0))
    assert figures["mixed256_tok_s"] == 147_164 / (10 + longest)
    assert figures["prefill_tok_s"] == 64 * 2048 / 11
    assert seen == [4, *(size for size in BATCH_SIZES for _ in range(4)), 256, 256, 64, 64]
