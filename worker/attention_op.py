"""The operator through which every forward reaches its cells: `torch.ops.raycomb.update_and_attend`.

Eager decoders, traced ones and exported programs call the same operator, so a program holds no keys and values: the
pool comes in as an argument, and so does the plan that says which row sees which cells. What is inside a plan is the
business of the device's kernel: `worker.cpu.plan`, `worker.cuda.packed_attention`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from worker.attention import Span
from worker.cpu.attention import has_lone_token_kernel, use_threads_of_torch
from worker.cpu.attention import update_and_attend as update_and_attend_on_cpu
from worker.cpu.plan import plan_for_cpu, unpack
from worker.kv_pool import KvPool
from worker.packed_plan import PackedPlan

_LIBRARY = torch.library.Library("raycomb", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "update_and_attend(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor table, Tensor layout, int layer, int? window) -> Tensor"
)
_Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int | None]
"""As the operator is defined: `query` to `layout`, `layer`, `window`."""


class OperatorAttention:
    """Keys, values and visibility of one forward; see `worker.models.decoder.Attention`.

    `keys`, `values`: the pool's, [L, num_cells + 1, J, D]. `plans`: one for each distinct window of `windows`.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, windows: Sequence[int | None], plans: Mapping[int | None, PackedPlan]
    ) -> None:
        self._keys = keys
        self._values = values
        self._windows = windows
        self._plans = plans

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        window = self._windows[layer]
        plan = self._plans[window]
        mixed: Tensor = torch.ops.raycomb.update_and_attend(
            query, key, value, self._keys, self._values, plan.table, plan.layout, layer, window
        )
        return mixed


def plan_attention(
    pool: KvPool, spans: Sequence[Span], windows: Sequence[int | None], num_heads: int
) -> dict[int | None, PackedPlan]:
    """Plans of one forward whose rows `spans` cover in order: one a window, in the order of `distinct_windows`."""
    if pool.keys.device.type == "cuda":
        from worker.cuda.packed_attention import plan_for_gpu  # needs Triton, which only a GPU's machine has

        packed = plan_for_gpu(spans, num_heads // pool.keys.shape[2], pool.keys.device)
        return dict.fromkeys(distinct_windows(windows), packed)
    use_threads_of_torch()
    lone_kernel = has_lone_token_kernel(pool.keys.dtype)
    return {
        window: plan_for_cpu(spans, window, pool.scratch_cell, lone_kernel=lone_kernel)
        for window in distinct_windows(windows)
    }


def attention_of(
    pool: KvPool, spans: Sequence[Span], windows: Sequence[int | None], num_heads: int
) -> OperatorAttention:
    """What an eager forward attends with."""
    return OperatorAttention(pool.keys, pool.values, windows, plan_attention(pool, spans, windows, num_heads))


def distinct_windows(windows: Sequence[int | None]) -> tuple[int | None, ...]:
    """Each window once, in the order of the layers."""
    return tuple(dict.fromkeys(windows))


def _on_cpu(*operands: *_Operands) -> Tensor:
    query, key, value, keys, values, table, layout, layer, _ = operands  # the plan was made for the window
    plan = unpack(PackedPlan(table, layout))
    return update_and_attend_on_cpu(query, key, value, keys[layer], values[layer], plan)


def _on_cuda(*operands: *_Operands) -> Tensor:
    from worker.cuda.packed_attention import update_and_attend_on_gpu

    query, key, value, keys, values, table, layout, layer, window = operands
    return update_and_attend_on_gpu(query, key, value, keys[layer], values[layer], PackedPlan(table, layout), window)


def _fake(*operands: *_Operands) -> Tensor:
    query, *_ = operands
    return query.new_empty(query.shape)


_LIBRARY.impl("update_and_attend", _on_cpu, "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.impl("update_and_attend", _on_cuda, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("raycomb::update_and_attend", _fake, lib=_LIBRARY)
