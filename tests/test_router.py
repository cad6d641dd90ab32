"""How a gateway's view of the workers is kept fresh, and where it sends requests by it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cluster.routing.router import Predictions, Router, WorkerInfo
from planner.blocks import BlockChanges, block_hashes
from planner.errors import QueueFull, Unavailable
from planner.limits import Snapshot
from planner.request import Adapter, Request


def info(worker_id: str, **changes: int) -> WorkerInfo:
    base = WorkerInfo(worker_id, "m", 100, 512, num_cells=1000, max_prefill_tokens=64, max_num_seqs=8)
    return replace(base, **changes)


def snapshot(step: int, **changes: int) -> Snapshot:
    base = Snapshot(1000, 1000, 0, 0, num_running=0, num_waiting=0, queued_prefill_tokens=0, step=step)
    return replace(base, **changes)


def request(length: int = 10, n: int = 1) -> Request:
    return Request(prompt=np.zeros(length, np.int64), max_tokens=5, n=n)


def test_a_burst_is_spread_before_any_worker_has_reported() -> None:
    router = Router(max_waiting=16)
    for worker_id in ("a", "b", "c"):
        router.join(info(worker_id))
    chosen = [router.assign(number, request()) for number in range(9)]
    assert sorted(chosen) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3


def test_a_request_goes_to_its_owner_and_elsewhere_once_that_is_gone() -> None:
    router = Router(max_waiting=16)
    for worker_id in ("a", "b", "c"):
        router.join(info(worker_id))
    assert [router.assign(number, request(), owner="c") for number in range(4)] == ["c"] * 4
    assert router.assign(4, request(), owner="c", avoid={"c"}) == "a"
    router.observe("c", snapshot(1), draining=True, newest_request=0)
    assert router.assign(5, request(), owner="c") == "b"
    router.leave("c")
    assert router.assign(6, request(), owner="c") == "a"


def test_what_was_sent_counts_until_the_worker_has_read_it() -> None:
    router = Router(max_waiting=16)
    router.join(info("a"))
    router.join(info("b"))
    assert router.assign(1, request()) == "a"
    router.observe("a", snapshot(1), draining=False, newest_request=0)  # it was on its way when the request was sent
    assert router.assign(2, request()) == "b"
    router.observe("a", snapshot(1), draining=False, newest_request=1)
    assert router.assign(3, request()) == "a"


def test_a_worker_that_has_less_left_to_draw_gets_more() -> None:
    """Both run as many, and nothing is queued."""
    router = router_of("a", "b")
    router.observe("a", snapshot(1, num_running=3, answer_tokens=900), draining=False, newest_request=0)
    router.observe("b", snapshot(1, num_running=3, answer_tokens=870), draining=False, newest_request=0)
    asked = [replace(request(), max_tokens=max_tokens) for max_tokens in (20, 30, 10, 10)]
    assert [router.assign(number, each) for number, each in enumerate(asked, 1)] == ["b", "b", "a", "a"]


def test_answers_are_expected_to_be_as_long_as_the_workers_were() -> None:
    """Answers that end one token in ten are short, whatever their budget; those that nothing ends are as long as it."""
    router = Router(max_waiting=16)
    for worker_id in "ab":
        router.join(info(worker_id, max_prefill_tokens=4096))
        told_so = replace(snapshot(1), ends_per_token=0.1)
        router.observe(worker_id, told_so, draining=False, newest_request=0)
    ending = replace(request(), max_tokens=400, stop_token_ids=frozenset({1}))
    endless = replace(request(), max_tokens=400)
    assert router.assign(1, ending) == "a"
    assert router.assign(2, endless) == "b"
    assert {router.assign(number, ending) for number in range(3, 10)} == {"a"}


def test_a_settled_request_no_longer_counts() -> None:
    router = Router(max_waiting=16)
    router.join(info("a"))
    router.join(info("b"))
    assert router.assign(1, request()) == "a"
    router.settle("a", 1)
    assert router.assign(2, request()) == "a"


def test_gateways_with_equal_views_break_ties_differently() -> None:
    chosen = []
    for offset in range(2):
        router = Router(max_waiting=16, offset=offset)
        router.join(info("a"))
        router.join(info("b"))
        chosen.append(router.assign(1, request()))
    assert chosen == ["a", "b"]


def test_a_draining_worker_gets_nothing_and_without_another_one_the_router_is_not_ready() -> None:
    router = Router(max_waiting=16)
    assert not router.ready
    router.join(info("a"))
    assert router.ready
    router.observe("a", snapshot(1), draining=True, newest_request=0)
    assert not router.ready
    with pytest.raises(Unavailable, match="no worker takes requests"):
        router.assign(1, request())


def test_a_burst_beyond_every_queue_is_refused_before_it_is_sent() -> None:
    router = Router(max_waiting=2)
    router.join(info("a", max_num_seqs=1))
    for number in range(3):
        router.assign(number, request())
    with pytest.raises(QueueFull):
        router.assign(3, request())


def test_a_worker_that_left_is_forgotten_with_all_that_was_sent_to_it() -> None:
    router = Router(max_waiting=2)
    router.join(info("a"))
    router.assign(1, request(n=8))
    router.leave("a")
    router.observe("a", snapshot(5), draining=False, newest_request=0)
    assert not router.ready
    assert router.infos == []
    router.join(info("a"))
    assert router.assign(2, request(n=8)) == "a"


def test_a_worker_that_one_request_fills_with_sequences_still_has_its_whole_queue() -> None:
    router = Router(max_waiting=2)
    router.join(info("a", max_num_seqs=8))
    for number in range(3):  # one runs, two wait: the worker counts requests in its queue
        assert router.assign(number, request(n=8)) == "a"
    with pytest.raises(QueueFull):
        router.assign(3, request())


def prompt(length: int, seed: int = 0) -> Request:
    return Request(prompt=np.random.default_rng(seed).integers(0, 100, length), max_tokens=5)


def told(asked: Request) -> BlockChanges:
    """What a worker says once it has computed the prompt."""
    return BlockChanges(added=tuple(block_hashes(asked.prompt)))


def router_of(*worker_ids: str) -> Router:
    router = Router(max_waiting=16)
    for worker_id in worker_ids:
        router.join(info(worker_id))
    return router


def test_a_request_goes_where_its_prefix_is_resident_until_it_is_evicted() -> None:
    asked = prompt(300)
    for owner in "abc":
        router = router_of("a", "b", "c")
        router.learn(owner, told(asked))
        assert router.assign(1, asked) == owner
        router.settle(owner, 1, 256)
        router.observe(owner, snapshot(1, queued_prefill_tokens=50), draining=False, newest_request=0)
        assert router.assign(2, asked) == owner
        router.settle(owner, 2, 256)
        router.learn(owner, BlockChanges(removed=told(asked).added))
        assert router.assign(3, asked) != owner


def test_a_burst_of_one_prefix_stays_together_before_any_worker_has_told_of_it() -> None:
    router = router_of("a", "b", "c")
    assert len({router.assign(number, prompt(300)) for number in range(4)}) == 1


def test_cold_prefixes_are_spread_over_idle_workers() -> None:
    router = router_of("a", "b", "c")
    chosen = set()
    for number in range(30):
        worker_id = router.assign(number, prompt(300, number))
        router.settle(worker_id, number)
        chosen.add(worker_id)
    assert chosen == {"a", "b", "c"}


def test_gateways_with_equal_views_send_a_cold_prefix_to_the_same_worker() -> None:
    first, second = Router(max_waiting=16, offset=0), Router(max_waiting=16, offset=1)
    for worker_id in "abc":
        first.join(info(worker_id))
    for worker_id in "cba":
        second.join(info(worker_id))
    for seed in range(10):
        chosen = first.assign(seed, prompt(300, seed))
        assert second.assign(seed, prompt(300, seed)) == chosen
        first.settle(chosen, seed)
        second.settle(chosen, seed)


def test_what_a_request_was_expected_to_leave_is_forgotten_when_it_was_refused() -> None:
    router = router_of("a", "b")
    asked = prompt(300)
    worker_id = router.assign(1, asked)
    router.settle(worker_id, 1)
    router.observe(worker_id, snapshot(1, queued_prefill_tokens=10), draining=False, newest_request=0)
    assert router.assign(2, asked) != worker_id


def test_predictions_are_held_against_what_was_found() -> None:
    router = router_of("a")
    for number, found in enumerate((0, 256, 64)):
        router.assign(number, prompt(300))
        router.settle("a", number, found)
        router.learn("a", told(prompt(300)))
    router.assign(9, prompt(300))
    router.settle("a", 9)  # it was cancelled
    assert router.predictions == Predictions(3, 900, num_predicted_tokens=512, num_cached_tokens=320)


def test_a_worker_that_left_and_came_back_has_nothing_resident() -> None:
    router = router_of("a", "b")
    asked = prompt(300)
    router.learn("a", told(asked))
    router.leave("a")
    router.learn("a", told(asked))
    router.join(info("a"))
    router.observe("a", snapshot(1, queued_prefill_tokens=10), draining=False, newest_request=0)
    assert router.assign(1, asked) == "b"


def test_a_draining_worker_attracts_nothing() -> None:
    router = router_of("a", "b")
    asked = prompt(300)
    router.learn("a", told(asked))
    router.observe("a", snapshot(1), draining=True, newest_request=0)
    assert router.assign(1, asked) == "b"


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_wherever_it_goes() -> None:
    router = router_of("a", "b")
    asked = replace(prompt(300), prompt_logprobs=True)
    router.learn("a", told(asked))
    router.observe("a", snapshot(1, queued_prefill_tokens=10), draining=False, newest_request=0)
    assert router.assign(1, asked) == "b"


def test_what_waiting_prompts_will_find_resident_does_not_make_a_queue_look_long() -> None:
    router = router_of("a", "b")
    asked = prompt(600)
    router.learn("b", told(asked))
    for number in range(4):
        assert router.assign(number, asked) == "b"
    router.observe("b", snapshot(9, num_waiting=4, queued_prefill_tokens=2400), draining=False, newest_request=3)
    assert router.assign(4, asked) == "b"
    for number in range(4):
        router.settle("b", number)
    # Now it is other prompts that wait, of which this gateway knows nothing.
    assert router.assign(5, asked) == "a"


PIRATE, POET = Adapter("pirate", 7), Adapter("poet", 8)


def with_adapter(adapter: Adapter | None, length: int = 10) -> Request:
    return replace(request(length), adapter=adapter)


def test_a_request_goes_only_to_workers_that_have_its_adapter() -> None:
    router = Router(max_waiting=16)
    for worker_id in ("a", "b", "c"):
        router.join(info(worker_id))
    router.equip("b", [PIRATE])
    router.equip("c", [PIRATE, POET])
    assert {router.assign(number, with_adapter(PIRATE)) for number in range(6)} == {"b", "c"}
    assert [router.assign(number, with_adapter(POET)) for number in range(6, 9)] == ["c"] * 3
    assert router.assign(9, with_adapter(PIRATE), avoid={"c"}) == "b"
    assert {router.assign(number, request()) for number in range(10, 22)} == {"a", "b", "c"}
    assert router.adapters == {"pirate": PIRATE, "poet": POET}
    assert (router.num_without("pirate"), router.num_without("poet"), router.num_without("other")) == (1, 2, 3)


def test_other_matrices_under_the_same_name_are_another_adapter() -> None:
    router = Router(max_waiting=16)
    router.join(info("a"))
    router.join(info("b"))
    router.equip("a", [PIRATE])
    router.equip("b", [PIRATE._replace(revision=9)])
    assert [router.assign(number, with_adapter(PIRATE)) for number in range(3)] == ["a"] * 3
    assert router.adapters == {"pirate": PIRATE._replace(revision=9)}


def test_an_adapter_that_no_worker_has_is_waited_for() -> None:
    router = Router(max_waiting=16)
    router.join(info("a"))
    with pytest.raises(Unavailable, match="no worker has the adapter 'pirate' now"):
        router.assign(1, with_adapter(PIRATE))
    router.equip("a", [PIRATE])
    assert router.assign(1, with_adapter(PIRATE)) == "a"
    router.equip("a", [])
    with pytest.raises(Unavailable):
        router.assign(2, with_adapter(PIRATE))
    router.leave("a")
    assert router.adapters == {}


def test_a_prefix_of_one_adapter_draws_nobody_elses_requests() -> None:
    """Else a request would go where its prefix is not, and count it as found."""
    router = Router(max_waiting=16)
    tokens = np.zeros(500, np.int64)
    for worker_id in ("a", "b"):
        router.join(info(worker_id))
        router.equip(worker_id, [PIRATE, POET])
    router.learn("a", BlockChanges(added=tuple(block_hashes(tokens, PIRATE.revision))))
    router.learn("b", BlockChanges(added=tuple(block_hashes(tokens))))
    for number, (adapter, best) in enumerate([(PIRATE, "a"), (None, "b")]):
        assert router.assign(number, with_adapter(adapter, 500)) == best
        router.settle(best, number, num_cached_tokens=448)
    for number, adapter in enumerate([PIRATE, None, POET], 2):
        where = router.assign(number, with_adapter(adapter, 500))
        router.settle(where, number, num_cached_tokens=0)
    predicted = router.predictions.num_predicted_tokens
    assert predicted == 4 * 448, "the poet's prompt was expected to be found"
