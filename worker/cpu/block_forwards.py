"""Forwards of any kind on the CPU in float32, of a decoder whose matrices are all kept in blocks: the compiled pass of
`worker.cpu.layers` over its layers, and a product with the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from planner.slices import Method
from worker.batch import Batch
from worker.cpu.attention import use_threads_of_torch
from worker.cpu.blocks import WIDTHS, compile_tile, prepare_products, width_for
from worker.cpu.board import new_board
from worker.cpu.heads import compile_heads
from worker.cpu.layers import FRAME, MATRICES, PHASES, VECTORS, compile_launch, compile_layers
from worker.cpu.seen import seen_cells
from worker.forwards import ReadyLogits, SelectedLogits
from worker.kv_pool import KvPool
from worker.models.block_matrix import BlockMatrix
from worker.models.blocks import LANES
from worker.models.decoder import Decoder
from worker.models.weights import LayerWeights

Integers = npt.NDArray[np.int64]


def has_block_pass(decoder: Decoder) -> bool:
    """Whether every matrix of every layer is kept in blocks, and fills its last tile."""
    config = decoder.config
    sizes = (config.hidden_size, config.intermediate_size, config.head_dim)
    matrices = [getattr(layer, name) for layer in decoder.weights.layers for name in MATRICES]
    return all(isinstance(matrix, BlockMatrix) for matrix in matrices) and not any(size % LANES for size in sizes)


class BlockForwards:
    """A `Forwards`."""

    def __init__(self, decoder: Decoder, pool: KvPool) -> None:
        """Compiles, once a machine, all that forwards of any number of rows need. See `has_block_pass`."""
        config = decoder.config
        shared = config.num_heads // config.num_kv_heads
        self._decoder = decoder
        self._pool = pool
        self._launch = compile_launch()
        self._layers = compile_layers()
        self._heads = compile_heads(config.head_dim, shared)
        self._mixed_size = config.num_heads * config.head_dim
        self._heads_size = self._mixed_size + 2 * config.num_kv_heads * config.head_dim
        self._beats = np.zeros(1, dtype=np.int64)
        for matrix in decoder.weights.kept_in_blocks:
            prepare_products(matrix.tiles.layout)
        self._windows = list(dict.fromkeys(config.windows))
        self._matrices = {width: _matrices(decoder.weights.layers, width) for width in WIDTHS}
        self._constants: dict[str, npt.NDArray[Any]] = {
            "vectors": np.array([_vectors(layer) for layer in decoder.weights.layers]),
            "window_of": np.array([self._windows.index(window) for window in config.windows]),
            "beats": self._beats,
            "cos": decoder.cos.numpy(),
            "sin": decoder.sin.numpy(),
        }
        self._frame = np.zeros(1, dtype=FRAME)
        self._fill(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            inner_size=config.intermediate_size,
            num_kv_heads=config.num_kv_heads,
            shared=shared,
            head_dim=config.head_dim,
            context=len(decoder.cos),
            num_windows=len(self._windows),
            has_head_norms=decoder.weights.layers[0].query_norm is not None,
            heads_code=self._heads.address,
        )
        self._frame["eps"] = config.norm_eps
        self._point_to(self._constants)

    @property
    def num_beats(self) -> int:
        return int(self._beats[0])

    def run(self, batch: Batch, method: Method, wanted: Sequence[int]) -> SelectedLogits:
        hidden = self._run_layers(batch)
        self._beats[0] += 1
        logits = self._decoder.logits(hidden.index_select(0, torch.tensor(wanted, dtype=torch.int64)))
        return ReadyLogits(logits, wanted, hidden, self._decoder)

    def _run_layers(self, batch: Batch) -> Tensor:
        """Write keys and values of the batch's T tokens. Returns [T, E], before the last norm."""
        hidden = functional.embedding(torch.from_numpy(batch.tokens), self._decoder.weights.embedding)
        num_rows, width, num_threads = len(hidden), width_for(len(hidden)), torch.get_num_threads()
        num_groups = -(-num_rows // width)
        seen = seen_cells(batch, self._windows)
        pool, num_layers = (self._pool.keys, self._pool.values), self._decoder.config.num_layers
        arrays = {
            **self._room(num_groups, width),
            "matrices": self._matrices[width],
            "pools": np.array([[half[layer].data_ptr() for half in pool] for layer in range(num_layers)]),
            "hidden": hidden.numpy(),
            "positions": batch.positions,
            "cells": seen.cells,
            "firsts": np.stack([seen.firsts[window] for window in self._windows]),
            "ends": seen.ends,
        }
        self._point_to(arrays)
        self._fill(num_rows=num_rows, width=width, num_groups=num_groups, num_threads=num_threads)
        self._fill(num_cells=len(seen.cells), num_pool_cells=len(self._pool.keys[0]))
        use_threads_of_torch()
        ran = np.zeros(num_threads, dtype=np.int64)
        self._launch(self._layers.address, self._frame.ctypes.data, num_threads, ran)
        return hidden.add_(torch.from_numpy(arrays["delta"][:num_rows]))

    def _room(self, num_groups: int, width: int) -> dict[str, npt.NDArray[Any]]:
        """What a forward of so many rows writes between its phases."""
        config, num_padded = self._decoder.config, num_groups * width
        return {
            "board": new_board(config.num_layers * PHASES),
            "delta": np.zeros((num_padded, config.hidden_size), dtype=np.float32),
            "heads": np.empty((num_padded, self._heads_size), dtype=np.float32),
            "mixed": np.empty((num_padded, self._mixed_size), dtype=np.float32),
            "of_hidden": np.zeros((num_groups, config.hidden_size, width), dtype=np.float32),
            "of_mixed": np.zeros((num_groups, self._mixed_size, width), dtype=np.float32),
            "of_inner": np.empty((num_groups, config.intermediate_size, width), dtype=np.float32),
        }

    def _fill(self, **numbers: int) -> None:
        for name, number in numbers.items():
            self._frame[name] = number

    def _point_to(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        for name, array in arrays.items():
            self._frame[name] = array.ctypes.data


def _matrices(layers: Sequence[LayerWeights], width: int) -> Integers:
    return np.array([[_matrix(getattr(layer, name), width) for name in MATRICES] for layer in layers])


def _vectors(layer: LayerWeights) -> list[int]:
    vectors = [getattr(layer, name) for name in VECTORS]
    return [0 if vector is None else vector.data_ptr() for vector in vectors]


def _matrix(matrix: BlockMatrix, width: int) -> list[int]:
    data = matrix.tiles.data
    code = compile_tile(matrix.tiles.layout, width)
    return [code.address, data.ctypes.data, len(data), data.shape[1], data.strides[0]]
