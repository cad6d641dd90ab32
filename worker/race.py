"""The draw's rule: an exponential race of the kept tokens, here in plain torch on any device.

Token i arrives after E_i / p_i, where E_i is exponential of mean 1; the first to arrive is i with probability p_i. Its
logarithm is the Gumbel-max trick (Gumbel 1954, "Statistical theory of extreme values"; Maddison, Tarlow, Minka 2014,
"A* sampling"). E_i is a function of (seed, position, i) alone, so rounding of the probabilities changes the winner only
where the first two arrive within that rounding of each other: about once in a million draws at 1e-6. (An inverse of the
cumulative distribution moves all later borders when one probability is rounded, and a large vocabulary has thousands.)

`worker.cpu.race` runs the same race faster on the CPU, and `worker.cuda.sampler` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from worker.philox import philox4x32

# A race takes probabilities float32[N, vocab_size], in any scale a row and 0 where a token may not be drawn; the rows'
# seeds, 64 bits each; and the positions that the drawn tokens will take. It gives winners int64[N]: the lowest id on
# ties, and 0 where nothing may be drawn.
Race: TypeAlias = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]

WORDS_A_CALL = 4
# Of 128 Ki tokens 16 rows of times are 16 MiB, and there are about six such things at once.
_ROWS_AT_ONCE = 16


def torch_race(probabilities: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """A `Race` that looks at every token, in float64."""
    winners = []
    for first in range(0, len(probabilities), _ROWS_AT_ONCE):
        block = slice(first, first + _ROWS_AT_ONCE)
        times = arrival_times(seeds[block], positions[block], probabilities.shape[-1], probabilities.device)
        chances = probabilities[block].to(torch.float64)
        winners.append(torch.where(chances > 0, chances / times, 0.0).argmax(dim=-1))
    return torch.cat(winners)


def arrival_times(seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Exponential times of mean 1 by (seed, position, token id), float64[N, vocab_size], between 1e-10 and 23.

    Philox's key is the seed's low and high word, its counter (position, id // 4, 0, 0); word id % 4 is the token's.
    """

    def column(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)[:, None]

    key = (column([seed & 0xFFFFFFFF for seed in seeds]), column([seed >> 32 for seed in seeds]))
    calls = torch.arange(-(-vocab_size // WORDS_A_CALL), dtype=torch.int64, device=device)[None, :]
    zero = torch.zeros_like(calls)
    words = torch.stack(philox4x32((column(positions), calls, zero, zero), key), dim=-1)
    uniform = (words.flatten(1)[:, :vocab_size].to(torch.float64) + 0.5) * 2.0**-32
    return uniform.neg_().log1p_().neg_()
