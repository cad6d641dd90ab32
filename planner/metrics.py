"""Plain counters of a planner, ever growing. Their reader turns them into rates; nothing here has a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.request import FinishReason
from planner.slices import Method, Slice, decode_width


@dataclass(slots=True)
class Metrics:
    """Owner: the planner; others read.

    Once nothing is live, `num_sequences_accepted` equals the sum of `finished`. The tokens of all methods together are
    those of all steps planned. `num_decodes` are decode forwards by their width, `num_padded_rows` their rows that hold
    no token. Prompt tokens count as computed whenever they are, so recomputed ones again; a prefix query counts the
    tokens looked up, a hit those found. Of the preemptions, `num_swapped_out` had their cells copied to host memory and
    the others recompute; a copy that comes to nothing (its sequence is cancelled, or has to recompute after all) is
    never swapped in.
    """

    num_steps: int = 0
    num_forwards: Counter[Method] = field(default_factory=Counter)
    num_tokens: Counter[Method] = field(default_factory=Counter)
    num_decodes: Counter[int] = field(default_factory=Counter)
    num_padded_rows: int = 0
    num_prompt_tokens_computed: int = 0
    num_tokens_generated: int = 0
    num_tokens_forced: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_preemptions: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_cells_swapped_out: int = 0
    num_cells_swapped_in: int = 0
    num_requests_submitted: int = 0
    num_requests_refused: int = 0
    num_sequences_accepted: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)

    def count_step(self, slices: Sequence[Slice], widths: Sequence[int]) -> None:
        """Count a planned step's forwards; `widths` are those that its slices were planned with."""
        self.num_steps += 1
        for piece in slices:
            self.num_forwards[piece.method] += 1
            self.num_tokens[piece.method] += piece.length
            if piece.method is Method.DECODE:
                width = decode_width(piece.length, widths)
                self.num_decodes[width] += 1
                self.num_padded_rows += width - piece.length
