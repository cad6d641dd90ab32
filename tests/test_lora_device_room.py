"""Adapters as they are laid out for a GPU: every matrix at its place, zeros beyond its rank, and its slot alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from planner.errors import InvalidAdapter
from tests.lora_rig import random_matrices
from worker.cuda.lora_room import DeviceLoraRoom
from worker.models.config import ModelConfig
from worker.models.lora import LoraMatrices, Site, site_shapes
from worker.models.rope import Rope

MODEL = ModelConfig(
    architecture="llama", vocab_size=50, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=3,
    num_kv_heads=1, head_dim=8, norm_eps=1e-5, rope=Rope(10000.0), context=32, windows=(None, None),
)  # fmt: skip
CPU = torch.device("cpu")


def room_of(max_rank: int = 5, num_slots: int = 3) -> DeviceLoraRoom:
    return DeviceLoraRoom(MODEL, num_slots, max_rank, torch.float32, CPU)


def added(room: DeviceLoraRoom, slot: int, layer: int, site: Site) -> torch.Tensor:
    """[N, K]: what a slot adds to a matrix, by the room's layout."""
    matrices, shape = room.sites[site], site_shapes(MODEL)[site]
    rank, ups = int(matrices.ranks[slot, layer]), matrices.ups[slot, layer].split(shape.outputs)
    return torch.cat([up[:, :rank] @ down[:rank] for up, down in zip(ups, matrices.downs[slot, layer], strict=True)])


def expected(matrices: LoraMatrices, layer: int, site: Site) -> torch.Tensor:
    shape = site_shapes(MODEL)[site]
    pairs = matrices.products.get((layer, site), (None,) * len(shape.outputs))
    parts = [
        torch.zeros(outputs, shape.num_inputs) if pair is None else pair.up.T @ pair.down
        for pair, outputs in zip(pairs, shape.outputs, strict=True)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("ranks", [(5,), (1, 4), (0, 3, 2)])
def test_a_slot_adds_what_its_adapter_does_and_the_others_nothing(ranks: tuple[int, ...]) -> None:
    room, matrices = room_of(), random_matrices(MODEL, 1, ranks, layers=2)
    room.fill(1, room.pack(matrices))
    for layer in range(2):
        for site in Site:
            torch.testing.assert_close(added(room, 1, layer, site), expected(matrices, layer, site))
            assert not added(room, 0, layer, site).any()
            assert not added(room, 2, layer, site).any()


def test_a_slot_that_is_filled_anew_keeps_nothing() -> None:
    room, narrow = room_of(), random_matrices(MODEL, 2, (0, 1), layers=1)
    room.fill(0, room.pack(random_matrices(MODEL, 1, (5,), layers=2)))
    room.fill(0, room.pack(narrow))
    for layer in range(2):
        for site in Site:
            torch.testing.assert_close(added(room, 0, layer, site), expected(narrow, layer, site))
    assert room.sites[Site.OUTPUT].ranks[0].tolist() == [0, 0]


@pytest.mark.parametrize(("max_rank", "room_rank"), [(1, 16), (16, 16), (17, 32), (64, 64)])
def test_ranks_come_in_blocks_that_matrix_instructions_take(max_rank: int, room_rank: int) -> None:
    room = room_of(max_rank)
    assert room.room_rank == room_rank
    packed = room.pack(random_matrices(MODEL, 1, (max_rank, 1), layers=1))
    assert packed.sites[Site.QKV].ranks.tolist() == [room_rank, 0]
    assert packed.sites[Site.DOWN].downs.shape == (2, 1, room_rank, 40)


def test_kernels_are_told_strides_of_the_whole_room() -> None:
    room = room_of(num_slots=2)
    for site, sizes in room.sizes.items():
        matrices = room.sites[site]
        assert matrices.downs[1].data_ptr() - matrices.downs.data_ptr() == 4 * sizes.down["DOWN_STRIDE"]
        assert matrices.ups[1].data_ptr() - matrices.ups.data_ptr() == 4 * sizes.up["UP_STRIDE"]
        assert matrices.ranks[1].data_ptr() - matrices.ranks.data_ptr() == 4 * sizes.up["RANK_STRIDE"]
        assert sizes.up["FIRST"] + (sizes.num_parts - 1) * sizes.up["REST"] == sizes.up["N"]
        assert sizes.column_blocks(16) == sum(-(-size // 16) for size in site_shapes(MODEL)[site].outputs)


def test_numbers_are_the_models_own() -> None:
    room = DeviceLoraRoom(replace(MODEL, num_layers=1, windows=(None,)), 1, 4, torch.bfloat16, CPU)
    packed = room.pack(random_matrices(MODEL, 1, (4,), layers=1))
    assert packed.sites[Site.QKV].ups.dtype == room.sites[Site.QKV].ups.dtype == torch.bfloat16
    room.fill(0, packed)


@pytest.mark.parametrize("half", ["down", "up"])
def test_numbers_beyond_the_rooms_dtype_are_refused_with_their_place(half: str) -> None:
    """Half precision ends at 65,504, and an adapter's scale may take its numbers beyond."""
    room = DeviceLoraRoom(MODEL, 1, 4, torch.float16, CPU)
    matrices = random_matrices(MODEL, 1, (4,), layers=2)
    room.pack(matrices)
    pair = next(pair for pair in matrices.products[1, Site.QKV] if pair is not None)
    getattr(pair, half)[0, 0] = 1e5
    with pytest.raises(InvalidAdapter, match="layer 1 has numbers at qkv, scale included, that float16"):
        room.pack(matrices)
