"""Draws tokens on the GPU, rows of any mix of settings in one fixed launch, with nothing for the host to wait for.

The algorithm is `worker.sampler`'s: logits / temperature; min-p, then top-k, then top-p, lowest id first among equals;
then the race of what is kept (`worker.race`), with the same noise. Arithmetic is float32: where two tokens arrive
within about 1e-6 of each other either may be first, and a token within that of top-p's or min-p's border may fall on
its other side. Not here: penalties, bias, masks and log probabilities, whose rows finish outside.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from worker.cuda import sampler_kernels, sampler_layout

# Low bits of a float32 that a value of the type never uses.
_KEY_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
_SCAN_WARPS = 4
_DRAW_WARPS = 8


class GpuSampler:
    """Scratch memory at fixed addresses, and the two launches. Owner: the executor; a captured graph may hold them."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._num_chunks = triton.cdiv(vocab_size, sampler_layout.CHUNK.value)
        num_groups = self._num_chunks * sampler_layout.CHUNK_GROUPS.value
        self._group_max = torch.empty(max_rows, num_groups, dtype=torch.float32, device=device)
        self._group_mass = torch.empty_like(self._group_max)
        self._chunk_mass = torch.empty(max_rows, self._num_chunks, dtype=torch.float32, device=device)
        self._chunk_score = torch.empty_like(self._chunk_mass)
        self._chunk_winner = torch.empty(max_rows, self._num_chunks, dtype=torch.int32, device=device)
        self._listed = torch.empty(max_rows, num_groups, dtype=torch.int32, device=device)
        # Of each filtered row: key of the threshold, and the last token kept at it. For tests; nothing else reads it.
        self.cut = torch.empty(max_rows, 2, dtype=torch.int32, device=device)

    def sample(
        self,
        logits: Tensor,
        row_slots: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seed: Tensor,
        length: Tensor,
        out_tokens: Tensor,
        bad_rows: Tensor,
    ) -> None:
        """Draw one token a row from `logits` [B, vocab_size], bfloat16, float16 or float32, rows contiguous.

        Row r has the settings of slot `row_slots[r]`, int32[B]. Per slot: `temperature` float32 (0: the largest logit,
        lowest id first), `top_k` int32 (0: off), `top_p` float32 (1: off), `min_p` float32 (0: off), `seed` int64 (the
        64 bits of an unsigned one), `length` int32: positions before this step's token. The drawn token's position,
        which keys the noise, is therefore `length + 1`.

        Writes `out_tokens` int32[B] and `bad_rows` int32[B]: 1 where a row holds NaN or +infinity or nothing but
        -infinity; its token is then 0 and means nothing. A single -infinity is a token without a chance.
        """
        num_rows = len(logits)
        assert logits.shape[1] == self._vocab_size
        assert logits.stride(1) == 1
        assert num_rows <= len(self._listed)
        if num_rows == 0:
            return
        settings = row_slots, temperature, top_k, top_p, min_p, seed, length
        scanned = self._group_max, self._group_mass, self._chunk_mass, self._chunk_score, self._chunk_winner
        sizes = logits.stride(0), self._vocab_size, self._num_chunks
        sampler_kernels.scan[(self._num_chunks, num_rows)](logits, *settings, *scanned, *sizes, num_warps=_SCAN_WARPS)
        sampler_kernels.draw[(num_rows,)](
            logits, *settings, out_tokens, bad_rows, *scanned, self._listed, self.cut, *sizes,
            KEY_SHIFT=_KEY_SHIFTS[logits.dtype],
            BLOCK_CHUNKS=triton.next_power_of_2(self._num_chunks),
            num_warps=_DRAW_WARPS,
        )  # fmt: skip
