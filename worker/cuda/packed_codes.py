"""From the codes of packed matrices to sums and numbers, inside Triton kernels.

`NATIVE` says that instructions are written out, for which Triton's interpreter has no meaning; without it the same is
computed by plain operations.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

LOAD_WORDS = tl.constexpr(4)
"""Words of 32 bits that a thread loads at once; of four bits they are the 32 codes that share a scale."""

NIBBLE_OFFSET = tl.constexpr(128.0)
BYTE_OFFSET = tl.constexpr(32768.0 + 128.0)

# 1.5 * 2^23: a float32 near it ends with its integer part in two's complement.
_ROUND = tl.constexpr(12582912.0)
_NIBBLES = tl.constexpr(0x0F0F0F0F)


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
def nibble_dots(words, low_even, high_even, low_odd, high_odd, NATIVE: tl.constexpr):
    """int32: each word's eight unsigned codes times the integers of `as_bytes`, of which the even places come first."""
    even = _dot(words & _NIBBLES, low_even, high_even, False, NATIVE)
    return even + _dot((words >> 4) & _NIBBLES, low_odd, high_odd, False, NATIVE)


@triton.jit
def byte_dots(words, low, high, NATIVE: tl.constexpr):
    """int32: each word's four signed codes times the integers of `as_bytes`."""
    return _dot(words, low, high, True, NATIVE)


@triton.jit
def _dot(codes, low, high, SIGNED: tl.constexpr, NATIVE: tl.constexpr):
    """Four bytes times four integers of 16 bits, exactly: two four-way products of bytes."""
    if NATIVE and SIGNED:
        dot = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 of_high, of_low;
            dp4a.s32.s32 of_high, $1, $3, 0;
            dp4a.s32.u32 of_low, $1, $2, 0;
            mad.lo.s32 $0, of_high, 256, of_low;
            }
            """,
            "=r,r,r,r",
            [codes, low, high],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    elif NATIVE:
        dot = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 of_high, of_low;
            dp4a.u32.s32 of_high, $1, $3, 0;
            dp4a.u32.u32 of_low, $1, $2, 0;
            mad.lo.s32 $0, of_high, 256, of_low;
            }
            """,
            "=r,r,r,r",
            [codes, low, high],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        dot = codes * 0
        for byte in tl.static_range(4):
            value = ((high << (24 - 8 * byte)) >> 24) * 256 + ((low >> (8 * byte)) & 255)
            code = (codes >> (8 * byte)) & 255
            if SIGNED:
                code = (code << 24) >> 24
            dot += code * value
    return dot


@triton.jit
def nibbles_as_floats(words, NATIVE: tl.constexpr):
    """int32 to the eight codes in each, lowest bits first, float32 and 128 (`NIBBLE_OFFSET`) more than they are:
    numbers from 128 to 143, whose mantissas end with the code. Permuting bytes is four times as fast as converting."""
    if NATIVE:
        n0, n2, n4, n6, n1, n3, n5, n7 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 even, odd;
            and.b32 even, $8, 0x0F0F0F0F;
            shr.b32 odd, $8, 4;
            and.b32 odd, odd, 0x0F0F0F0F;
            prmt.b32 $0, even, 0x43, 0x4055;
            prmt.b32 $1, even, 0x43, 0x4155;
            prmt.b32 $2, even, 0x43, 0x4255;
            prmt.b32 $3, even, 0x43, 0x4355;
            prmt.b32 $4, odd, 0x43, 0x4055;
            prmt.b32 $5, odd, 0x43, 0x4155;
            prmt.b32 $6, odd, 0x43, 0x4255;
            prmt.b32 $7, odd, 0x43, 0x4355;
            }
            """,
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float32,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        n0 = (words & 15).to(tl.float32) + NIBBLE_OFFSET
        n1 = ((words >> 4) & 15).to(tl.float32) + NIBBLE_OFFSET
        n2 = ((words >> 8) & 15).to(tl.float32) + NIBBLE_OFFSET
        n3 = ((words >> 12) & 15).to(tl.float32) + NIBBLE_OFFSET
        n4 = ((words >> 16) & 15).to(tl.float32) + NIBBLE_OFFSET
        n5 = ((words >> 20) & 15).to(tl.float32) + NIBBLE_OFFSET
        n6 = ((words >> 24) & 15).to(tl.float32) + NIBBLE_OFFSET
        n7 = ((words >> 28) & 15).to(tl.float32) + NIBBLE_OFFSET
    return n0, n1, n2, n3, n4, n5, n6, n7


@triton.jit
def bytes_as_floats(words, NATIVE: tl.constexpr):
    """int32 to the four signed bytes in each, lowest first, float32 and 32,896 (`BYTE_OFFSET`) more than they are: 2^15
    and a byte from 0 to 255 in the mantissa's middle."""
    if NATIVE:
        b0, b1, b2, b3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 biased;
            xor.b32 biased, $4, 0x80808080;
            prmt.b32 $0, biased, 0x47, 0x4505;
            prmt.b32 $1, biased, 0x47, 0x4515;
            prmt.b32 $2, biased, 0x47, 0x4525;
            prmt.b32 $3, biased, 0x47, 0x4535;
            }
            """,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float32,) * 4,
            is_pure=True,
            pack=1,
        )
    else:
        b0 = ((words << 24) >> 24).to(tl.float32) + BYTE_OFFSET
        b1 = ((words << 16) >> 24).to(tl.float32) + BYTE_OFFSET
        b2 = ((words << 8) >> 24).to(tl.float32) + BYTE_OFFSET
        b3 = (words >> 24).to(tl.float32) + BYTE_OFFSET
    return b0, b1, b2, b3


@triton.jit
def scale_and_least(words):
    """int32 words to the two bfloat16 in them as float32: the scale of 32 codes in the low half, and in the high one
    what the code 0 stands for."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
