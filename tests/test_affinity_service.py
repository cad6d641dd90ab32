"""The real service finds a prompt again where it was computed, and foresees that it will."""

from __future__ import annotations

import httpx
import pytest

from tests.service_process import ServiceProcess
from tests.service_state import ServiceState

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(290)]

PROMPT_TOKENS = 200
WHOLE_BLOCKS = 192
NUM_REQUESTS = 6


def test_a_prompt_is_found_again_at_the_worker_that_computed_it(
    smollm2_service: ServiceProcess, smollm2_state: ServiceState, api_key: str
) -> None:
    (before,) = smollm2_state.ask()["predictions"]
    body = {"model": "smollm2-135m", "prompt": list(range(300, 300 + PROMPT_TOKENS)), "max_tokens": 1}
    headers = {"authorization": f"Bearer {api_key}"}
    with httpx.Client(base_url=smollm2_service.url, headers=headers, timeout=60, trust_env=False) as client:
        for _ in range(NUM_REQUESTS):
            client.post("/v1/completions", json=body).raise_for_status()
    (after,) = smollm2_state.ask()["predictions"]
    grown = {name: after[name] - before[name] for name in after}
    assert grown == {
        "num_requests": NUM_REQUESTS,
        "num_prompt_tokens": NUM_REQUESTS * PROMPT_TOKENS,
        "num_predicted_tokens": (NUM_REQUESTS - 1) * WHOLE_BLOCKS,
        "num_cached_tokens": (NUM_REQUESTS - 1) * (PROMPT_TOKENS - 1),
    }
