"""The GPU's side of `worker.attention_op`: which plan a forward gets, and what the operator does with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.attention import Span
from worker.cuda.lone_attention import attend_lone
from worker.cuda.lone_plan import are_lone, is_lone, pack_lone, unpack_lone
from worker.cuda.prefill_attention import attend
from worker.cuda.prefill_plan import pack_prefill, unpack_prefill
from worker.cuda.write_cells import write_cells
from worker.packed_plan import PackedPlan


def plan_for_gpu(spans: Sequence[Span], shared_heads: int, device: torch.device) -> PackedPlan:
    """The plan of a forward whose rows `spans` cover in order, for layers of any window."""
    return pack_lone(spans, device) if are_lone(spans) else pack_prefill(spans, shared_heads, device)


def update_and_attend_on_gpu(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, packed: PackedPlan, window: int | None
) -> Tensor:
    """Write `key` and `value` [T, J, D] to their cells of one layer's `keys` and `values` [num_cells + 1, J, D], and
    attend with `query` [T, H, D] to what each token sees; [T, H, D]. Waits for nothing, so it can be captured."""
    if is_lone(packed):
        return attend_lone(query, key, value, keys, values, unpack_lone(packed), window)
    plan = unpack_prefill(packed, query.shape[1] // key.shape[1])
    write_cells(key, value, plan.new_cells, keys, values)
    mixed = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    attend(query, keys, values, plan, mixed, window)
    return mixed
