"""The prompt as it is given back at the head of a choice, with its log probabilities where those were asked for."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.answers.choice import Echo, ScoredToken
from cluster.answers.requests import ChoicePlan
from cluster.language.detokeniser import Detokeniser
from cluster.language.text import TextModel
from planner.request import TokenLogprobs


def echo_of(plan: ChoicePlan, text: TextModel, scores: Sequence[TokenLogprobs]) -> Echo:
    """`scores`: one for each token of the prompt, or none. Takes seconds for a long prompt, and touches nothing."""
    prompt = plan.prompt
    told = text.decode(prompt.ids) if prompt.text is None else prompt.text
    if not scores or not plan.scores_echo:
        return Echo(told)
    offsets = _offsets(text, prompt.ids, prompt.num_added)
    return Echo(told, tuple(ScoredToken(s, min(at, len(told))) for s, at in zip(scores, offsets, strict=True)))


def _offsets(text: TextModel, ids: Sequence[int], num_added: int) -> list[int]:
    """Where each token's text begins in the prompt's; tokens that encoding added have none of their own."""
    known = Detokeniser(text.tokens, from_start=True, with_special=True)
    offsets, at = [], 0
    for position, token in enumerate(ids):
        offsets.append(at)
        if position >= num_added:
            at += len(known.add(token))
    return offsets
