"""Reads log probabilities of prompts out of a worker's message in parts, between which the event loop turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from planner.request import TokenLogprobs
from protos import worker_pb2 as pb
from worker.wire import logprobs_from_proto

AT_ONCE: Final = 256
"""Tokens."""

PromptScores = dict[int, tuple[TokenLogprobs, ...]]
"""By an update's place in its message."""


async def long_prompt_scores(updates: Sequence[pb.SequenceUpdate]) -> PromptScores:
    """Those of the updates that have more than can be read at once."""
    found: PromptScores = {}
    for place, update in enumerate(updates):
        if len(update.prompt_logprobs) > AT_ONCE:
            found[place] = await _in_parts(update.prompt_logprobs)
    return found


async def _in_parts(messages: Sequence[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    scores: list[TokenLogprobs] = []
    for first in range(0, len(messages), AT_ONCE):
        scores += map(logprobs_from_proto, messages[first : first + AT_ONCE])
        await asyncio.sleep(0)
    return tuple(scores)
