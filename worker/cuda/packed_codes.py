"""From the codes of packed matrices to sums and numbers, inside Triton kernels.

`NATIVE` says that instructions are written out, for which Triton's interpreter has no meaning; without it the same is
computed by plain operations.

No code is converted: bits of two at a time go into the mantissas of two numbers whose exponents are known, and one
packed instruction takes the rest off. (FasterTransformer's weight-only products, and Marlin's, Frantar et al. 2024, do
so for float16, whose mantissa has room for eight bits; here bfloat16's seven are made to do.)
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

LOAD_WORDS = tl.constexpr(4)
"""Words of 32 bits that a thread loads at once; of four bits they are the 32 codes that share a scale."""

CODE_OFFSET = tl.constexpr(16.0)
"""What is added to a code of four bits before it is multiplied by its scale."""

# 1.5 * 2^23: a float32 near it ends with its integer part in two's complement.
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def as_bytes(x0, x1, x2, x3, factor, NATIVE: tl.constexpr):
    """float32 times `factor`, at most 2^15 in magnitude, to integers of 16 bits; of the four the low bytes, and the
    high ones, which are signed: two int32."""
    x0 = x0 * factor + _ROUND
    x1 = x1 * factor + _ROUND
    x2 = x2 * factor + _ROUND
    x3 = x3 * factor + _ROUND
    if NATIVE:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 first, second;
            prmt.b32 first, $2, $3, 0x5140;
            prmt.b32 second, $4, $5, 0x5140;
            prmt.b32 $0, first, second, 0x5410;
            prmt.b32 $1, first, second, 0x7632;
            }
            """,
            "=r,=r,r,r,r,r",
            [x0, x1, x2, x3],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        b0 = x0.to(tl.int32, bitcast=True)
        b1 = x1.to(tl.int32, bitcast=True)
        b2 = x2.to(tl.int32, bitcast=True)
        b3 = x3.to(tl.int32, bitcast=True)
        low = (b0 & 255) | ((b1 & 255) << 8) | ((b2 & 255) << 16) | (b3 << 24)
        high = ((b0 >> 8) & 255) | (((b1 >> 8) & 255) << 8) | (((b2 >> 8) & 255) << 16) | ((b3 >> 8) << 24)
    return low, high


@triton.jit
def nibble_dots(words, x, NATIVE: tl.constexpr):
    """int32: sixteen times the 32 unsigned codes of four words times the integers of `as_bytes`, of which x has four
    tensors of low bytes and four of high ones for the even places, and as many for the odd ones. Sixteen times, since
    a code in an odd place is that much larger as it stands in its byte."""
    if NATIVE:
        dot = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 codes, low, high, odd_low, odd_high;
            and.b32 codes, $1, 0x0F0F0F0F;
            dp4a.u32.u32 low, codes, $5, 0;
            dp4a.u32.s32 high, codes, $9, 0;
            and.b32 codes, $1, 0xF0F0F0F0;
            dp4a.u32.u32 odd_low, codes, $13, 0;
            dp4a.u32.s32 odd_high, codes, $17, 0;
            and.b32 codes, $2, 0x0F0F0F0F;
            dp4a.u32.u32 low, codes, $6, low;
            dp4a.u32.s32 high, codes, $10, high;
            and.b32 codes, $2, 0xF0F0F0F0;
            dp4a.u32.u32 odd_low, codes, $14, odd_low;
            dp4a.u32.s32 odd_high, codes, $18, odd_high;
            and.b32 codes, $3, 0x0F0F0F0F;
            dp4a.u32.u32 low, codes, $7, low;
            dp4a.u32.s32 high, codes, $11, high;
            and.b32 codes, $3, 0xF0F0F0F0;
            dp4a.u32.u32 odd_low, codes, $15, odd_low;
            dp4a.u32.s32 odd_high, codes, $19, odd_high;
            and.b32 codes, $4, 0x0F0F0F0F;
            dp4a.u32.u32 low, codes, $8, low;
            dp4a.u32.s32 high, codes, $12, high;
            and.b32 codes, $4, 0xF0F0F0F0;
            dp4a.u32.u32 odd_low, codes, $16, odd_low;
            dp4a.u32.s32 odd_high, codes, $20, odd_high;
            mad.lo.s32 low, high, 256, low;
            mad.lo.s32 odd_low, odd_high, 256, odd_low;
            mad.lo.s32 $0, low, 16, odd_low;
            }
            """,
            "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [
                words[0], words[1], words[2], words[3],
                x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7],
                x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15],
            ],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        dot = words[0] * 0
        for word in tl.static_range(4):
            for byte in tl.static_range(4):
                even, odd = (words[word] >> (8 * byte)) & 15, (words[word] >> (8 * byte + 4)) & 15
                dot += even * (((x[word + 4] << (24 - 8 * byte)) >> 24) * 256 + ((x[word] >> (8 * byte)) & 255))
                dot += odd * (((x[word + 12] << (24 - 8 * byte)) >> 24) * 256 + ((x[word + 8] >> (8 * byte)) & 255))
        dot = dot * 16
    return dot


@triton.jit
def byte_dots(words, x, NATIVE: tl.constexpr):
    """int32: the 16 signed codes of four words times the integers of `as_bytes`, of which x has four tensors of low
    bytes and four of high ones."""
    if NATIVE:
        dot = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 of_low, of_high;
            dp4a.s32.u32 of_low, $1, $5, 0;
            dp4a.s32.s32 of_high, $1, $9, 0;
            dp4a.s32.u32 of_low, $2, $6, of_low;
            dp4a.s32.s32 of_high, $2, $10, of_high;
            dp4a.s32.u32 of_low, $3, $7, of_low;
            dp4a.s32.s32 of_high, $3, $11, of_high;
            dp4a.s32.u32 of_low, $4, $8, of_low;
            dp4a.s32.s32 of_high, $4, $12, of_high;
            mad.lo.s32 $0, of_high, 256, of_low;
            }
            """,
            "=r,r,r,r,r,r,r,r,r,r,r,r,r",
            [words[0], words[1], words[2], words[3], x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        dot = words[0] * 0
        for word in tl.static_range(4):
            for byte in tl.static_range(4):
                code = (words[word] << (24 - 8 * byte)) >> 24
                dot += code * (((x[word + 4] << (24 - 8 * byte)) >> 24) * 256 + ((x[word] >> (8 * byte)) & 255))
    return dot


@triton.jit
def finished(acc, NATIVE: tl.constexpr):
    """The accumulator of a product whose weights are in registers, once the tensor cores are done with it.

    Left to itself the compiler lets most of a step's products run on while the next step's weights are made, in the
    very registers that they read: an assembler before ptxas 13.3 does not keep these apart (triton-lang/triton#9433).
    Anything that reads the accumulator makes it wait."""
    if NATIVE:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


@triton.jit
def in_order(words, scales, COUNT: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, NUMBER: tl.constexpr,
             NATIVE: tl.constexpr):  # fmt: skip
    """int32 [COUNT, WORDS] of so many rows to [COUNT, WORDS * 32 / BITS] of the type NUMBER, columns in order: the
    values of four bits, whose `scales` are int32 of the same shape; the codes of eight, which lack their row's scale
    (`scales` is not looked at). What stays in one thread's registers from its word to the tensor cores' operand."""
    LOADS: tl.constexpr = WORDS // LOAD_WORDS
    if BITS == 4:
        a0, b0, a1, b1, a2, b2, a3, b3 = _nibble_values(words, scales, NUMBER, NATIVE)
        even = tl.join(tl.join(a0, b0), tl.join(a2, b2))
        odd = tl.join(tl.join(a1, b1), tl.join(a3, b3))
        places = tl.reshape(tl.join(even, odd), (COUNT, LOADS, LOAD_WORDS, 2, 2, 2))  # half, place / 2, place % 2
        columns = tl.reshape(tl.permute(places, (0, 1, 4, 5, 2, 3)), (COUNT, WORDS * 8))
    else:
        a0, b0, a1, b1 = _byte_values(words, NUMBER, NATIVE)
        places = tl.reshape(tl.join(tl.join(a0, b0), tl.join(a1, b1)), (COUNT, LOADS, LOAD_WORDS, 2, 2))  # half, place
        columns = tl.reshape(tl.permute(places, (0, 1, 4, 2, 3)), (COUNT, WORDS * 4))
    return columns


@triton.jit
def _nibble_values(words, scales, NUMBER: tl.constexpr, NATIVE: tl.constexpr):
    """The eight values in each word: the low half's first, the high half's first, the low half's second and so on."""
    if NATIVE and tl.bfloat16 == NUMBER:
        # 0x4180 is 16, of whose mantissa bit 3 counts one: 0x4180 | code << 3 is 16 + code.
        a0, b0, a1, b1, a2, b2, a3, b3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 scale, base;
            .reg .b32 s, b, v0, v1, v2, v3;
            mov.b32 {scale, base}, $9;
            mov.b32 s, {scale, scale};
            mov.b32 b, {base, base};
            shl.b32 v0, $8, 3;
            shr.u32 v1, $8, 1;
            shr.u32 v2, $8, 5;
            shr.u32 v3, $8, 9;
            lop3.b32 v0, v0, 0x00780078, 0x41804180, 0xEA;
            lop3.b32 v1, v1, 0x00780078, 0x41804180, 0xEA;
            lop3.b32 v2, v2, 0x00780078, 0x41804180, 0xEA;
            lop3.b32 v3, v3, 0x00780078, 0x41804180, 0xEA;
            fma.rn.bf16x2 v0, v0, s, b;
            fma.rn.bf16x2 v1, v1, s, b;
            fma.rn.bf16x2 v2, v2, s, b;
            fma.rn.bf16x2 v3, v3, s, b;
            mov.b32 {$0, $1}, v0;
            mov.b32 {$2, $3}, v1;
            mov.b32 {$4, $5}, v2;
            mov.b32 {$6, $7}, v3;
            }
            """,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [words, scales],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        scale, base = scale_and_base(scales)
        a0 = _nibble_value(words, scale, base, 0, NUMBER)
        a1 = _nibble_value(words, scale, base, 4, NUMBER)
        a2 = _nibble_value(words, scale, base, 8, NUMBER)
        a3 = _nibble_value(words, scale, base, 12, NUMBER)
        b0 = _nibble_value(words, scale, base, 16, NUMBER)
        b1 = _nibble_value(words, scale, base, 20, NUMBER)
        b2 = _nibble_value(words, scale, base, 24, NUMBER)
        b3 = _nibble_value(words, scale, base, 28, NUMBER)
    return a0, b0, a1, b1, a2, b2, a3, b3


@triton.jit
def _nibble_value(words, scale, base, SHIFT: tl.constexpr, NUMBER: tl.constexpr):
    return ((((words >> SHIFT) & 15).to(tl.float32) + CODE_OFFSET) * scale + base).to(NUMBER)


@triton.jit
def _byte_values(words, NUMBER: tl.constexpr, NATIVE: tl.constexpr):
    """The four signed bytes in each word as numbers, in the order of `_nibble_values`."""
    if NATIVE and tl.bfloat16 == NUMBER:
        # Its low seven bits over 128 (0x4300), and -128 (0xC300), or -256 (0xC380) where its sign is set. Pairs can be
        # added on GPUs of 9.0 alone, multiplied and added in one on those of 8.0.
        a0, b0, a1, b1 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 second, v0, v1, less0, less1, one;
            shr.u32 second, $4, 8;
            lop3.b32 v0, $4, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 v1, second, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 less0, $4, 0x00800080, 0xC300C300, 0xEA;
            lop3.b32 less1, second, 0x00800080, 0xC300C300, 0xEA;
            mov.b32 one, 0x3F803F80;
            fma.rn.bf16x2 v0, v0, one, less0;
            fma.rn.bf16x2 v1, v1, one, less1;
            mov.b32 {$0, $1}, v0;
            mov.b32 {$2, $3}, v1;
            }
            """,
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.bfloat16,) * 4,
            is_pure=True,
            pack=1,
        )
    else:
        a0 = ((words << 24) >> 24).to(tl.float32).to(NUMBER)
        a1 = ((words << 16) >> 24).to(tl.float32).to(NUMBER)
        b0 = ((words << 8) >> 24).to(tl.float32).to(NUMBER)
        b1 = (words >> 24).to(tl.float32).to(NUMBER)
    return a0, b0, a1, b1


@triton.jit
def scale_and_base(words):
    """int32 words to the two bfloat16 in them as float32: the scale of 32 codes in the low half, in the high one their
    base."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
