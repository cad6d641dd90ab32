"""A shared-prefix load on real planners in virtual time: what the assignment is for."""

from __future__ import annotations

import statistics

from benchmarks.virtual_fleet import PowerOfTwoChoices, Routers, best_cached_tokens, limits_of, run, shared_prefixes

NUM_WORKERS = 3


def test_shared_prefixes_are_found_where_they_are_and_no_worker_carries_the_others() -> None:
    limits = limits_of(12_288)
    arrivals, prefixes = shared_prefixes(400, 40.0)
    best = best_cached_tokens(prefixes, 500)
    routers = Routers(NUM_WORKERS, 2, limits)
    ours = run(arrivals, routers, NUM_WORKERS, limits)
    theirs = run(arrivals, PowerOfTwoChoices(NUM_WORKERS, 0), NUM_WORKERS, limits)
    assert sum(ours.cached_tokens) > 0.95 * best > sum(theirs.cached_tokens) / 0.95
    assert statistics.median(ours.ttft_s) < statistics.median(theirs.ttft_s)
    loads = [ours.workers.count(worker) for worker in range(NUM_WORKERS)]
    assert max(loads) <= 1.3 * statistics.mean(loads)
    for router in routers.routers:
        told = router.predictions
        assert told.num_requests == 200
        assert 0.8 * told.num_cached_tokens < told.num_predicted_tokens <= told.num_cached_tokens
