"""What the kernels of packed matrices have written out as instructions gives what the matrices stand for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tests.ptx_words import Words, evaluated, written_out
from worker.cuda.packed import PackedMatrix, pack_int4, pack_int8

MAGIC = np.float32(12582912.0)  # near which a float ends with its integer part
LARGEST = 32767


def matrix() -> torch.Tensor:
    return (torch.randn(9, 256, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()


def words_of(tensor: torch.Tensor) -> Words:
    return tensor.numpy().view(np.uint32).ravel()


def in_order(registers: dict[str, Words], packed: PackedMatrix) -> torch.Tensor:
    """The numbers that the registers $0, $1 and so on hold of each word, at their columns."""
    num_places = 16 // packed.bits
    word = np.arange(packed.codes.numel())
    found = np.zeros(packed.shape.numel(), dtype=np.float32)
    for place in range(num_places):
        for half in (0, 1):
            column = word // 4 * (8 * num_places) + 8 * place + 2 * (word % 4) + half
            found[column] = (registers[f"${2 * place + half}"] << 16).view(np.float32)
    return torch.from_numpy(found).view(packed.shape)


def test_a_word_of_four_bits_becomes_eight_values_to_the_last_bit() -> None:
    packed = pack_int4(matrix())
    given = {"$8": words_of(packed.codes), "$9": words_of(packed.scales).repeat(4)}
    found = in_order(evaluated(written_out("_nibble_values"), given), packed)
    assert torch.equal(found, packed.values().float())


def test_a_word_of_eight_bits_becomes_its_four_codes() -> None:
    packed = pack_int8(matrix())
    found = in_order(evaluated(written_out("_byte_values"), {"$4": words_of(packed.codes)}), packed)
    assert torch.equal((found * packed.scales[:, None]).bfloat16(), packed.values())
    assert found.min() == -127, "a sign is seen"


def integers(generator: np.random.Generator, *shape: int) -> npt.NDArray[np.int64]:
    return generator.integers(-LARGEST, LARGEST + 1, size=shape)


def split(values: npt.NDArray[np.int64]) -> tuple[Words, Words]:
    """Words of the low bytes and of the high ones of four integers, [4, n]."""
    near = [(MAGIC + each.astype(np.float32)).view(np.uint32) for each in values]
    registers = evaluated(written_out("as_bytes"), {f"${2 + i}": each for i, each in enumerate(near)})
    return registers["$0"], registers["$1"]


def packed_words(codes: npt.NDArray[np.int64], bits: int) -> list[Words]:
    """Of codes [4 words, places, n]."""
    low = (codes & ((1 << bits) - 1)).astype(np.uint32)
    return [np.bitwise_or.reduce([each << np.uint32(bits * i) for i, each in enumerate(word)]) for word in low]


def test_a_load_of_four_bits_is_multiplied_exactly() -> None:
    generator = np.random.default_rng(0)
    codes, x = generator.integers(0, 16, size=(4, 8, 500)), integers(generator, 4, 8, 500)
    even, odd = [split(each[0::2]) for each in x], [split(each[1::2]) for each in x]
    operands = [pair[part] for pairs in (even, odd) for part in (0, 1) for pair in pairs]
    given = dict(zip((f"${i}" for i in range(1, 21)), [*packed_words(codes, 4), *operands], strict=True))
    found = evaluated(written_out("nibble_dots"), given)["$0"].view(np.int32)
    assert np.array_equal(found, 16 * (codes * x).sum(axis=(0, 1)))


def test_a_load_of_eight_bits_is_multiplied_exactly() -> None:
    generator = np.random.default_rng(1)
    codes, x = generator.integers(-127, 128, size=(4, 4, 500)), integers(generator, 4, 4, 500)
    pairs = [split(each) for each in x]
    operands = [pair[part] for part in (0, 1) for pair in pairs]
    given = dict(zip((f"${i}" for i in range(1, 13)), [*packed_words(codes, 8), *operands], strict=True))
    found = evaluated(written_out("byte_dots"), given)["$0"].view(np.int32)
    assert np.array_equal(found, (codes * x).sum(axis=(0, 1)))
