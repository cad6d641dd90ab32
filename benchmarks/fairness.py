"""What one tenant's flood costs another: waiting times with every tenant as one, and with shares, in virtual time.

The real planner decides; a step takes a fixed time and one for each token, so the figures are the same on every
machine. Tenant A sends 500 requests at once, and tenant B one a second; then, in B's place, C sends 500 at once and
weighs 2.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from benchmarks.record import record
from planner.limits import Limits
from planner.planner import Planner
from planner.request import Request
from planner.step import ChunkOutput, StepResult

STEP_S = 0.008
TOKEN_S = 20e-6
LIMITS = Limits(
    capacity=2**17,
    context=8192,
    vocab_size=1000,
    max_prefill_tokens=2048,
    widths=(1, 2, 4, 8, 16, 32, 64, 128),
    max_num_seqs=128,
    max_batched_tokens=2048,
    max_waiting=4096,
)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one tenant: so many at the start, and then `num_later` more, `every_s` seconds apart.

    Lengths are uniform in [1, 2 * mean). Equal seeds give equal requests.
    """

    tenant: str
    num_at_start: int
    num_later: int
    every_s: float
    mean_prompt: int = 512
    mean_answer: int = 128

    def arrivals(self, lot: random.Random) -> list[tuple[float, Request]]:
        times = [0.0] * self.num_at_start + [self.every_s * (1 + number) for number in range(self.num_later)]
        return [(at, self._request(lot)) for at in times]

    def _request(self, lot: random.Random) -> Request:
        prompt = np.array(lot.choices(range(LIMITS.vocab_size), k=lot.randint(1, 2 * self.mean_prompt - 1)), np.int64)
        return Request(prompt, lot.randint(1, 2 * self.mean_answer - 1), tenant=self.tenant)


def waits(loads: Sequence[Load], limits: Limits, *, shared: bool, seed: int = 0) -> dict[str, list[float]]:
    """Seconds from arrival to first token of every request, by tenant. `shared`: tenants are told apart."""
    lot = random.Random(seed)
    arrivals = [(at, load.tenant, request) for load in loads for at, request in load.arrivals(lot)]
    coming = deque(sorted(arrivals, key=lambda arrival: arrival[0]))
    planner, now = Planner(limits), 0.0
    asked: dict[int, tuple[str, float]] = {}
    found: dict[str, list[float]] = {load.tenant: [] for load in loads}
    while coming or planner.has_work:
        while coming and coming[0][0] <= now:
            at, tenant, request = coming.popleft()
            asked[planner.submit(request if shared else replace(request, tenant=""))] = tenant, at
        step = planner.plan()
        if step is None:
            now = coming[0][0]
            continue
        now += STEP_S + TOKEN_S * step.num_tokens
        outcomes = [ChunkOutput(1 if chunk.samples else None) for chunk in step.chunks]
        for update in planner.commit(step, StepResult(outcomes)):
            if update.tokens and update.request_id in asked:
                tenant, at = asked.pop(update.request_id)
                found[tenant].append(now - at)
    return found


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.quantile(seconds, [0.5, 0.99]).tolist()
    return {"ttft_p50_s": round(p50, 4), "ttft_p99_s": round(p99, 4), "requests": len(seconds)}


def compare(loads: Sequence[Load], limits: Limits) -> dict[str, dict[str, dict[str, float]]]:
    return {
        words: {tenant: quantiles(found) for tenant, found in waits(loads, limits, shared=shared).items()}
        for words, shared in (("one_queue", False), ("shares", True))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trial", action="store_true", help="keep no result file")
    trial = parser.parse_args().trial
    few_seats = replace(LIMITS, max_num_seqs=32)
    flood, one_a_second = Load("A", 500, 0, 1.0), Load("B", 0, 20, 1.0)
    figures: dict[str, object] = {
        "b_alone": quantiles(waits([one_a_second], few_seats, shared=True)["B"]),
        "seats_are_short": compare([flood, one_a_second], few_seats),
        "prefill_is_short": compare([flood, one_a_second], LIMITS),
        "two_floods_and_c_weighs_2": compare(
            [flood, Load("C", 500, 0, 1.0)], replace(few_seats, tenant_weights={"C": 2.0})
        ),
    }
    config = {
        "step_s": STEP_S,
        "token_s": TOKEN_S,
        "limits": {key: value for key, value in asdict(LIMITS).items() if key != "tenant_weights"},
        "seats": {"seats_are_short": few_seats.max_num_seqs, "prefill_is_short": LIMITS.max_num_seqs},
        "loads": [asdict(load) for load in (flood, one_a_second)],
        "seed": 0,
    }
    record("fairness", config, figures, keep=not trial)


if __name__ == "__main__":
    main()
