"""Products of any number of rows with packed matrices, for layers that are run one operation after the other.

Few rows go through the tensor cores' kernel, which reads the codes as they are; for more the matrix is unpacked, whose
bytes are then few beside the product's work, and the vendor's library multiplies. What is launched depends on sizes
alone. Decode steps of models have more of a layer in one kernel: `decode_chain`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from worker.cuda.packed import PackedMatrix
from worker.cuda.packed_products import split_product, unpacked
from worker.cuda.packed_tiles import product_tile


def product_of_rows(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """x [T, K] times the matrix [N, K] transposed: [T, N], of x's dtype; float32 sums. Waits for nothing."""
    num_rows, (num_columns, depth) = len(x), matrix.shape
    if num_rows == 0:  # of the last layer, where a chunk in the middle of a prompt draws nothing
        return x.new_empty(0, num_columns)
    tile = product_tile(matrix.bits, num_rows, num_columns, depth)
    if tile is None or (x.is_cuda and x.dtype == torch.float32):  # of which the tensor cores have no exact products
        return functional.linear(x, unpacked(matrix))
    room = -(-num_rows // tile.rows) * tile.rows
    whole = functional.pad(x, (0, 0, 0, room - num_rows)).contiguous()  # a tile reads all of its rows
    parts = torch.empty((tile.splits, num_rows, num_columns), dtype=torch.float32, device=x.device)
    launch = {"PDL": False, "num_warps": tile.warps, "num_stages": tile.stages}
    split_product(whole, matrix, parts, num_rows, num_rows * num_columns, tile, launch)
    return (parts[0] if tile.splits == 1 else parts.sum(dim=0)).to(x.dtype)
