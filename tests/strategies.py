"""Hypothesis strategies for what the planner is given."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from planner.limits import Limits
from planner.request import Adapter, Request, SamplingParams

# A busy machine is no failure: no deadline an example, no complaint about slow generation.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def prompts(vocab_size: int, max_size: int) -> st.SearchStrategy[list[int]]:
    """Prompts that often begin alike, so that prefixes are shared."""
    opening = st.integers(0, max_size - 1).map(lambda length: [position % vocab_size for position in range(length)])
    free = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=max_size)
    return st.builds(lambda head, tail: [*head, *tail][:max_size], opening, free)


def sampling_params() -> st.SearchStrategy[SamplingParams]:
    """Greedy or drawn, with few seeds, sometimes with a penalty (which forbids to run ahead), log probabilities, or a
    grammar."""
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 3),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.0, 0.5]),
        logprobs=st.sampled_from([None, None, 0, 2]),
        grammar=st.sampled_from([None, None, "1", "5"]),  # the fake's: how many tokens it forces at most
    )


@st.composite
def requests(draw: st.DrawFn, *, vocab_size: int, max_prompt: int, max_tokens: int, max_n: int = 1) -> Request:
    """Valid requests of at most these sizes."""
    prompt_logprobs = draw(st.sampled_from([False, False, False, True]))
    budget = draw(st.integers(0 if prompt_logprobs else 1, max_tokens))
    prompt = draw(prompts(vocab_size, max_prompt))
    return Request(
        prompt=np.array(prompt, np.int64),
        max_tokens=budget,
        sampling=draw(sampling_params()),
        min_tokens=draw(st.integers(0, budget)),
        stop_token_ids=draw(st.frozensets(st.integers(0, vocab_size - 1), max_size=2)),
        n=draw(st.integers(1, max_n)),
        priority=draw(st.sampled_from([0, 0, 0, -1, 1])),
        prompt_logprobs=prompt_logprobs,
        num_generated=min(draw(st.sampled_from([0, 0, 0, 2])), len(prompt) - 1),
        tenant=draw(st.sampled_from(["", "", "a", "b"])),
        adapter=draw(st.sampled_from([None, None, Adapter("pirate", 2**63 + 5), Adapter("poet", 7)])),
    )


@st.composite
def tight_limits(draw: st.DrawFn, *, vocab_size: int) -> Limits:
    """Limits so tight that sequences of up to 18 tokens keep running out of cells, slots and budget."""
    widest = draw(st.integers(2, 12))
    max_num_seqs = draw(st.integers(3, 6))
    return Limits(
        capacity=draw(st.integers(18, 48)),
        context=32,
        vocab_size=vocab_size,
        max_prefill_tokens=widest,
        min_prefill_tokens=draw(st.integers(2, widest)),
        widths=draw(st.sampled_from([(1,), (1, 2, 4), (1, 2, 4, 8)])),
        max_num_seqs=max_num_seqs,
        max_batched_tokens=draw(st.integers(max_num_seqs + 1, 16)),
        prefill_chunk_tokens=draw(st.integers(1, 8)),
        max_waiting=draw(st.integers(2, 8)),
        max_waiting_tokens=draw(st.sampled_from([24, 2**24])),
        tenant_weights=draw(st.sampled_from([{}, {"a": 3.0}, {"": 0.5, "b": 2.0}])),
        max_steps_in_flight=draw(st.integers(1, 2)),
        prefix_caching=draw(st.sampled_from([True, True, False])),
        swap_blocks=draw(st.sampled_from([0, 3, 12])),
        swap_block_cells=draw(st.integers(1, 4)),
        min_swapped_cells=draw(st.integers(1, 6)),
    )
