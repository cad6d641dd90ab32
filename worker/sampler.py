"""Draws tokens from logits, batched over rows: penalties, bias and masks, then greedy or by a race of the kept tokens.

A row that asks for nothing special pays for nothing: a batch of greedy rows is one arg max.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planner.request import SamplingParams, TokenArray
from worker.race import Race, torch_race

Upload: TypeAlias = Callable[[npt.NDArray[Any]], Tensor]
"""Brings an array to the device that logits are on."""

# How many of the largest probabilities are sorted at first; rows that keep more of them sort all.
_FIRST_SORTED = 256


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's draw. `position` is the position that the drawn token will take and, with the seed, its noise.

    `history` int64[position] and `num_prompt` are needed where `sampling.needs_history`; `masked` ids have no chance.
    `allowed` uint8[>= 1] has a bit for each id that a grammar lets be drawn, lowest bit first; ids beyond its end have
    no chance. None: no grammar.
    """

    sampling: SamplingParams
    position: int
    history: TokenArray | None = None
    num_prompt: int = 0
    masked: frozenset[int] = frozenset()
    allowed: npt.NDArray[np.uint8] | None = None

    @property
    def changes_logits(self) -> bool:
        return self.changes_scores or self.allowed is not None

    @property
    def changes_scores(self) -> bool:
        """Whether `adjust` has something to do."""
        return bool(self.masked or self.sampling.logit_bias or self.sampling.needs_history)


class DrawnRows(NamedTuple):
    """`tokens` int64[N]. `nothing_left` bool[N]: the rows in which what the draws change left no token, or a logit that
    is not finite for the largest; their tokens are valid ids and mean nothing. None: the draws change nothing."""

    tokens: Tensor
    nothing_left: Tensor | None = None


DrawRows: TypeAlias = Callable[[Tensor, Sequence["Draw"]], DrawnRows]
"""Draws one token a row from float32[N, vocab_size], which are finite and stay as they are. As `sample` does."""


def sample(logits: Tensor, draws: Sequence[Draw], race: Race = torch_race) -> DrawnRows:
    """Draw one token a row from float32[N, vocab_size], which are finite and stay as they are.

    Order: repetition, frequency and presence penalty, bad words, bias, masks; temperature; min-p, top-k, top-p; then
    `race`, any form of `worker.race` that runs on the device of `logits`.
    """
    changed = [row for row, draw in enumerate(draws) if draw.changes_logits]
    if not changed:
        return DrawnRows(_drawn(logits, draws, race))
    logits = adjusted(logits, draws)
    nothing_left = torch.zeros(len(draws), dtype=torch.bool, device=logits.device)
    for row in changed:
        nothing_left[row] = ~logits[row].amax().isfinite()
    return DrawnRows(_drawn(logits, draws, race), nothing_left)


def _drawn(logits: Tensor, draws: Sequence[Draw], race: Race) -> Tensor:
    """One token a row of logits that the draws have changed already; int64[N]."""
    random = [row for row, draw in enumerate(draws) if not draw.sampling.greedy]
    if not random:
        return logits.argmax(dim=-1)
    random_draws = [draws[row] for row in random]
    if len(random) == len(draws):
        return _sample_random(logits, random_draws, race)
    tokens = logits.argmax(dim=-1)
    rows = torch.tensor(random, device=logits.device)
    tokens[rows] = _sample_random(logits.index_select(0, rows), random_draws, race)
    return tokens


def adjusted(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """`logits` float32[N, vocab_size] with what these N draws change of them: a copy, where there is any such thing."""
    changed = [row for row, draw in enumerate(draws) if draw.changes_logits]
    if not changed:
        return logits
    logits = logits.clone()
    for row in changed:
        adjust(logits[row], draws[row], lambda values: torch.from_numpy(values).to(logits.device))
    forbid(logits, draws)
    return logits


def adjust(logits: Tensor, draw: Draw, upload: Upload) -> None:
    """Apply penalties, bias and masks to one row float32[vocab_size] in place. `upload` brings an array to its device.

    Repetition (Keskar et al. 2019, "CTRL") reads prompt and answer; frequency and presence read the answer alone.
    """
    sampling = draw.sampling
    if sampling.needs_history:
        assert draw.history is not None, "a draw with penalties needs the tokens before it"
        if sampling.repetition_penalty != 1.0:
            seen = upload(np.unique(draw.history))
            scores, penalty = logits[seen], sampling.repetition_penalty
            logits[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
        if sampling.frequency_penalty or sampling.presence_penalty:
            generated, counts = np.unique(draw.history[draw.num_prompt :], return_counts=True)
            penalties = sampling.frequency_penalty * counts + sampling.presence_penalty
            logits.index_add_(0, upload(generated), upload(-penalties).to(logits.dtype))
        if banned := _banned(sampling, draw.history[draw.num_prompt :].tolist()):
            _forbid_ids(logits, banned, upload)
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        logits.index_add_(0, upload(np.array(ids)), upload(np.array(biases)).to(logits.dtype))
    if draw.masked:
        _forbid_ids(logits, sorted(draw.masked), upload)


def _forbid_ids(logits: Tensor, ids: Sequence[int], upload: Upload) -> None:
    logits.index_fill_(0, upload(np.array(ids)), -torch.inf)


def _banned(sampling: SamplingParams, generated: list[int]) -> list[int]:
    """The tokens that would complete one of the bad words behind these."""
    return [word[-1] for word in sampling.bad_words if tuple(generated[len(generated) - len(word) + 1 :]) == word[:-1]]


def forbid(logits: Tensor, draws: Sequence[Draw]) -> None:
    """Leave no chance, in float32[N, vocab_size], to what the grammars of these N draws do not allow; in place."""
    rows, masks = [], []
    for row, draw in enumerate(draws):
        if draw.allowed is not None:
            rows.append(row)
            masks.append(draw.allowed)
    if not rows:
        return
    device, vocab_size = logits.device, logits.shape[-1]
    packed = torch.from_numpy(np.stack(masks)).to(device)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    allowed = ((packed[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocab_size]
    where = torch.tensor(rows, device=device)
    kept = logits.index_select(0, where)
    kept[:, : allowed.shape[1]].masked_fill_(~allowed, -torch.inf)
    kept[:, allowed.shape[1] :] = -torch.inf
    logits.index_copy_(0, where, kept)


def _sample_random(logits: Tensor, draws: Sequence[Draw], race: Race) -> Tensor:
    params = [draw.sampling for draw in draws]
    device = logits.device
    temperatures = torch.tensor([p.temperature for p in params], dtype=logits.dtype, device=device)
    # A temperature that underflows to 0 in float32 must stay a division by something.
    temperatures = temperatures.clamp_(min=torch.finfo(logits.dtype).tiny)
    # Subtracting the largest first keeps a tiny temperature from overflowing.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperatures[:, None])
    probabilities = torch.softmax(scaled, dim=-1)
    filtered = [row for row, p in enumerate(params) if p.min_p > 0 or p.top_p < 1 or p.top_k > 0]
    if filtered:
        rows = torch.tensor(filtered, device=device)
        probabilities[rows] = keep_likely(probabilities.index_select(0, rows), [params[row] for row in filtered])
    return race(probabilities, [p.seed for p in params], [draw.position for draw in draws])


def keep_likely(probabilities: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Zero what min-p, then top-k, then top-p leave out, in float32[N, vocab_size]; what is kept stays as it was.

    Min-p (Nguyen et al. 2024) keeps what has at least `min_p` times the largest probability. Top-p (Holtzman et al.
    2020) keeps, largest first, through the first token where the cumulative share exceeds `top_p`. Both cut sets hold
    the lowest ids where probabilities tie.
    """
    device, vocab_size = probabilities.device, probabilities.shape[-1]
    min_ps = torch.tensor([p.min_p for p in params], device=device)[:, None]
    floor = min_ps * probabilities.amax(dim=-1, keepdim=True)
    probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
    num_sorted = min(_FIRST_SORTED, vocab_size)
    counts, complete = _num_kept(probabilities, params, num_sorted)
    if not complete:
        counts, _ = _num_kept(probabilities, params, vocab_size)
    most_kept = int(counts.max())
    largest = probabilities.topk(most_kept, dim=-1).values
    threshold = largest.gather(1, (counts - 1)[:, None])
    above = probabilities > threshold
    tied = probabilities == threshold
    num_tied_kept = counts[:, None] - above.sum(dim=-1, keepdim=True)
    kept = above | (tied & (tied.cumsum(dim=-1) <= num_tied_kept))
    return probabilities.masked_fill(~kept, 0.0)


def _num_kept(probabilities: Tensor, params: Sequence[SamplingParams], num_sorted: int) -> tuple[Tensor, bool]:
    """How many of each row's largest probabilities top-k and top-p keep, int64[N], at least 1.

    Second: whether sorting `num_sorted` of them was enough to know.
    """
    device, vocab_size = probabilities.device, probabilities.shape[-1]
    top_ks = torch.tensor([min(p.top_k or vocab_size, vocab_size) for p in params], device=device)[:, None]
    top_ps = torch.tensor([p.top_p if p.top_p < 1 else torch.inf for p in params], dtype=torch.float64, device=device)
    largest = probabilities.topk(num_sorted, dim=-1).values
    largest.masked_fill_(torch.arange(num_sorted, device=device) >= top_ks, 0.0)
    cumulative = largest.cumsum(dim=-1, dtype=torch.float64)
    within_top_k = (top_ks <= num_sorted).expand(-1, 1)
    total = torch.where(within_top_k, cumulative[:, -1:], probabilities.sum(dim=-1, keepdim=True, dtype=torch.float64))
    kept = (cumulative - largest <= top_ps[:, None] * total) & (largest > 0)
    counts = kept.sum(dim=-1)
    complete = (counts < num_sorted) | (top_ks[:, 0] <= num_sorted)
    return counts.clamp_(min=1), bool(complete.all()) or num_sorted == vocab_size
