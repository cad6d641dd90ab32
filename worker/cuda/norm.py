"""The row-wise kernels of a decode step: embedding, add-and-norm, SiLU, arg max of logits, and the end of the step.

One program a row (or a part of one). Everything is computed in fp32 and rounded once, when stored. Launched as
programmatic dependents, every kernel waits before it writes anything, or reads what another one wrote.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.cuda.decode_work import list_pieces
from worker.cuda.fp8_rows import store_row


@triton.jit(do_not_specialize=["table_stride", "num_rows", "scratch_slot", "longest"])
def embed_kernel(
    row_slots, new_cells, last_token, length, table, table_stride,
    embedding, norm_weight, residual, normed, sums, eps, num_rows, scratch_slot, longest, work, num_pieces,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, PIECES: tl.constexpr, SHARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Starts a step: row r takes its slot's last token, enters its new cell into the slot's cell table, and writes the
    token's embedding as residual. `normed` gets the first layer's input: normalised, or (SCALED, one row) only
    multiplied by the norm's weight, with the sum of squares in `sums`, as `gemv` wants it. If PIECES, attention's
    work is listed too."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    if PDL:
        gdc_wait()
    slot = tl.load(row_slots + row).to(tl.int64)
    token = tl.load(last_token + slot).to(tl.int64)
    position = tl.load(length + slot)
    new_cell = tl.load(new_cells + row)
    tl.store(table + slot * table_stride + position, new_cell)
    if PIECES > 0:
        list_pieces(row, row_slots, length, new_cell, num_rows, scratch_slot, longest, work, num_pieces,
                    ROWS, PIECES, SHARE)  # fmt: skip
    value = tl.load(embedding + token * HIDDEN + columns, mask=inside, other=0.0)
    tl.store(residual + row * HIDDEN + columns, value, mask=inside)
    value = value.to(tl.float32)
    weight = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(value * value, axis=0)
    if SCALED:
        tl.store(sums, squares)
        out = value * weight
    else:
        out = value * tl.rsqrt(squares / HIDDEN + eps) * weight
    if PDL:
        gdc_launch_dependents()
    tl.store(normed + row * HIDDEN + columns, out.to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["split_stride"])
def add_norm_kernel(
    partials, split_stride, bias, residual, norm_weight, normed, codes, scales, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, CODED: tl.constexpr,
    NATIVE: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual += sum of the SPLITS partials [SPLITS, rows, HIDDEN] (+ bias); normed = RMS norm of it (Zhang, Sennrich
    2019). If CODED, products of fp8 find it in codes e4m3 [rows, HIDDEN] and scales fp32 [rows], too."""
    if PDL and EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    at = row * HIDDEN + columns
    weight = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    value = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(SPLITS):
        value += tl.load(partials + split * split_stride.to(tl.int64) + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(residual.dtype.element_ty)
    value = rounded.to(tl.float32)
    out = value * tl.rsqrt(tl.sum(value * value, axis=0) / HIDDEN + eps) * weight
    if PDL and not EARLY:
        gdc_launch_dependents()
    tl.store(residual + at, rounded, mask=inside)
    out = out.to(normed.dtype.element_ty)
    tl.store(normed + at, out, mask=inside)
    if CODED:
        store_row(out.to(tl.float32), codes, scales, row, columns, inside, HIDDEN, NATIVE)


@triton.jit
def silu_kernel(gate_up, bias, out, FFN: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr):
    """out [rows, FFN] = silu(gate) * up of gate_up [rows, 2 FFN] (+ bias [2 FFN])."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside = columns < FFN
    if PDL:
        gdc_wait()
    gate = tl.load(gate_up + row * 2 * FFN + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * FFN + FFN + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        gate += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + FFN + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
    tl.store(out + row * FFN + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_programs"])
def arg_max_kernel(logits, best, best_id, num_programs, VOCAB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Each part's largest logit and its lowest token id into best, best_id [rows, num_programs]; NaN counts as +inf."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
    value = tl.load(logits + row * VOCAB + columns, mask=columns < VOCAB, other=float("-inf")).to(tl.float32)
    value = tl.where(value != value, float("inf"), value)
    if PDL:
        gdc_launch_dependents()
    top = tl.max(value, axis=0)
    tl.store(best + row * num_programs + tl.program_id(0), top)
    tl.store(best_id + row * num_programs + tl.program_id(0), tl.min(tl.where(value == top, columns, VOCAB), axis=0))


@triton.jit
def _advance(row, token, row_slots, last_token, length, scratch_slot):
    slot = tl.load(row_slots + row)
    position = tl.load(length + slot)
    real = slot != scratch_slot
    tl.store(last_token + slot, token, mask=real)
    tl.store(length + slot, position + 1, mask=real)


@triton.jit(do_not_specialize=["num_programs", "scratch_slot"])
def pick_kernel(
    best, best_id, num_programs, row_slots, last_token, length, scratch_slot, out_tokens, bad_rows,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Ends a greedy step: out_tokens[row] = the largest logit's lowest token id, and the row's slot moves on to it.
    bad_rows[row] = 1 where the largest is not finite (the row had a NaN or an infinity); the token is a valid id even
    then."""
    row = tl.program_id(0)
    if PDL:
        gdc_wait()
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    top_id = tl.full([BLOCK], VOCAB, tl.int32)
    for start in range(0, num_programs, BLOCK):
        part = start + tl.arange(0, BLOCK)
        value = tl.load(best + row * num_programs + part, mask=part < num_programs, other=float("-inf"))
        token = tl.load(best_id + row * num_programs + part, mask=part < num_programs, other=VOCAB)
        top_id = tl.where(value > top, token, tl.where(value == top, tl.minimum(top_id, token), top_id))
        top = tl.maximum(top, value)
    if PDL:
        gdc_launch_dependents()
    largest = tl.max(top, axis=0)
    chosen = tl.minimum(tl.min(tl.where(top == largest, top_id, VOCAB), axis=0), VOCAB - 1)
    finite = (largest < float("inf")) & (largest > float("-inf"))
    tl.store(out_tokens + row, chosen)
    tl.store(bad_rows + row, tl.where(finite, 0, 1))
    _advance(row, chosen, row_slots, last_token, length, scratch_slot)


@triton.jit(do_not_specialize=["scratch_slot"])
def advance_kernel(row_slots, out_tokens, last_token, length, scratch_slot, PDL: tl.constexpr):
    """Ends a sampled step: row r's slot remembers the drawn token and is one position longer. The scratch slot, which
    many padding rows share, never moves."""
    row = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    _advance(row, tl.load(out_tokens + row), row_slots, last_token, length, scratch_slot)
