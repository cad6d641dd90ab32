"""Random requests, cancellations, failures and pipelining on tiny pools, against the undisturbed run."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from planner.errors import DeadlineExceeded
from planner.limits import Limits
from planner.request import Request, SamplingParams
from tests.planner_life import PlannerLife
from tests.strategies import UNHURRIED, requests, tight_limits

VOCAB_SIZE = 6
MAX_PROMPT = 12
MAX_TOKENS = 6


class PlannerMachine(RuleBasedStateMachine):
    life: PlannerLife

    @initialize(limits=tight_limits(vocab_size=VOCAB_SIZE))
    def start(self, limits: Limits) -> None:
        self.life = PlannerLife(limits)

    @rule(
        burst=st.lists(
            requests(vocab_size=VOCAB_SIZE, max_prompt=MAX_PROMPT, max_tokens=MAX_TOKENS, max_n=3),
            min_size=1,
            max_size=3,
        )
    )
    def submit(self, burst: list[Request]) -> None:
        for request in burst:
            self.life.submit(request)

    @precondition(lambda self: self.life.requests)
    @rule(data=st.data(), indices=st.none() | st.sets(st.integers(0, 3)))
    def cancel(self, data: st.DataObject, indices: set[int] | None) -> None:
        self.life.cancel(data.draw(st.sampled_from(sorted(self.life.requests)), "request"), indices)

    @precondition(lambda self: self.life.requests)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        self.life.expire(data.draw(st.sampled_from(sorted(self.life.requests)), "request"))

    @rule()
    def cancel_what_is_unknown(self) -> None:
        assert self.life.planner.cancel(len(self.life.requests) + 1) == []
        assert self.life.planner.fail(len(self.life.requests) + 1, DeadlineExceeded("out of time")) == []

    @rule(failing_slice=st.none() | st.none() | st.integers(0, 3))
    def plan(self, failing_slice: int | None) -> None:
        self.life.launch(failing_slice)

    @precondition(lambda self: self.life.in_flight)
    @rule()
    def commit(self) -> None:
        self.life.settle()

    @rule(num_turns=st.integers(1, 12))
    def run(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.life.turn()

    @precondition(lambda self: len(self.life.requests) > 8)
    @rule(lot=st.integers(0, 9))
    def end_everything(self, lot: int) -> None:
        if lot == 0:
            self.life.cancel_all()
        if lot == 1:
            self.life.lose_the_executor()

    @invariant()
    def cells_are_conserved(self) -> None:
        if hasattr(self, "life"):
            self.life.check()

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.finish()


TestPlannerMachine = PlannerMachine.TestCase
TestPlannerMachine.settings = settings(UNHURRIED, max_examples=30, stateful_step_count=40)


def random_limits(lot: random.Random, depth: int) -> Limits:
    widest, max_num_seqs = lot.randint(2, 12), lot.randint(3, 6)
    return Limits(
        capacity=lot.randint(18, 32),
        context=32,
        vocab_size=VOCAB_SIZE,
        max_prefill_tokens=widest,
        min_prefill_tokens=lot.randint(2, widest),
        widths=lot.choice([(1,), (1, 2, 4, 8)]),
        max_num_seqs=max_num_seqs,
        max_batched_tokens=lot.randint(max_num_seqs + 1, max_num_seqs + 6),
        prefill_chunk_tokens=lot.randint(1, 8),
        max_waiting=6,
        tenant_weights={"a": 3.0},
        max_steps_in_flight=depth,
        prefix_caching=lot.random() < 0.8,
        swap_blocks=lot.choice([0, 4, 16, 16]),
        swap_block_cells=lot.randint(1, 4),
        min_swapped_cells=lot.randint(1, 6),
    )


def random_request(lot: random.Random) -> Request:
    num_alike = lot.randint(0, MAX_PROMPT - 1)
    prompt = [position % 3 for position in range(num_alike)] + lot.choices(range(VOCAB_SIZE), k=lot.randint(1, 4))
    prompt_logprobs = lot.random() < 0.2
    max_tokens = lot.randint(0 if prompt_logprobs else 1, MAX_TOKENS)
    return Request(
        prompt=np.array(prompt[:MAX_PROMPT], np.int64),
        max_tokens=max_tokens,
        sampling=SamplingParams(
            seed=lot.randint(0, 9),
            presence_penalty=0.5 * (lot.random() < 0.2),
            grammar=lot.choice([None, None, "1", "4"]),
        ),
        min_tokens=lot.randint(0, max_tokens),
        stop_token_ids=frozenset(lot.sample(range(VOCAB_SIZE), lot.randint(0, 1))),
        n=lot.choice([1, 1, 1, 2, 3]),
        priority=lot.choice([0, 0, 0, -1, 1]),
        tenant=lot.choice(["", "a"]),
        prompt_logprobs=prompt_logprobs,
    )


def live_through(lot: random.Random, life: PlannerLife, num_operations: int) -> None:
    for _ in range(num_operations):
        kind = lot.random()
        if kind < 0.3:
            life.submit(random_request(lot))
        elif kind < 0.36 and life.requests:
            indices = lot.choice([None, {0}, {1}, {0, 2}])
            life.cancel(lot.choice(sorted(life.requests)[-6:]), indices)
        elif kind < 0.64:
            life.launch(lot.randint(0, 3) if lot.random() < 0.1 else None)
        elif kind < 0.998:
            if life.in_flight:
                life.settle()
        else:
            lot.choice([life.cancel_all, life.lose_the_executor])()
        life.check()
    life.finish()


KINDS = ("stop", "length", "cancelled", "failed", "preempted", "recomputed", "found", "padded", "forced")


@pytest.mark.parametrize("depth", [1, 2])
def test_thousands_of_operations_leave_no_trace_in_the_answers(depth: int) -> None:
    """Everything that can happen to a sequence happens here, many times; else this test proves little."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        lot = random.Random(1000 * depth + seed)
        life = PlannerLife(random_limits(lot, depth))
        live_through(lot, life, 150)
        metrics = life.planner.metrics
        seen.update({reason.value: count for reason, count in metrics.finished.items()})
        seen.update(
            preempted=metrics.num_preemptions,
            recomputed=metrics.num_preemptions - metrics.num_swapped_out,
            swapped=metrics.num_swapped_in,
            wasted=metrics.num_swapped_out - metrics.num_swapped_in,
            found=metrics.num_prefix_hits,
            padded=metrics.num_padded_rows,
            discarded=metrics.num_tokens_generated - sum(map(len, life.tokens.values())),
            refused=metrics.num_requests_refused,
            forced=metrics.num_tokens_forced,
        )
    assert min(seen[what] for what in KINDS) > 20
    assert seen["refused"] > 20
    assert min(seen["swapped"], seen["wasted"]) > 0
