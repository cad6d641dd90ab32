"""Log probabilities of the raw logits, as clients see them: the token's own and the most likely alternatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from planner.request import TokenLogprobs


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of float32[N, vocab_size]: its token's log probability, and its `num_top[row]` best tokens.

    Best first; the lower id first where two tie. A row that holds NaN gives NaN.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None])[:, 0].tolist()
    most = min(max(num_top, default=0), logits.shape[-1])
    if most == 0:
        return [TokenLogprobs(token, logprob) for token, logprob in zip(tokens, own, strict=True)]
    best = logprobs.topk(most, dim=-1).values.cpu()
    return [
        TokenLogprobs(token, own[row], _top(logprobs[row], float(best[row, min(num, most) - 1]), num) if num else ())
        for row, (token, num) in enumerate(zip(tokens, num_top, strict=True))
    ]


def _top(logprobs: Tensor, threshold: float, num: int) -> tuple[tuple[int, float], ...]:
    """`topk` leaves the order of ties open, so all that reach the threshold are ranked here by (value, id)."""
    candidates = (logprobs >= threshold).nonzero()[:, 0]
    pairs = zip(candidates.tolist(), logprobs[candidates].tolist(), strict=True)
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:num])
