"""Products of a few rows with a weight on the CPU in float32, compiled.

Such a product reads the weight once and is bound by that; a tile of 4 rows by 4 outputs keeps sixteen sums in registers
meanwhile. In a decode of 16 rows of a 135M model on two cores all products but the head's take 38 ms. With torch's
(MKL) they take 42 to 55, and 47 over weights that oneDNN packed, which would be a second copy of them. It also leaves
one pool of threads to a decode: torch's and numba's wait for work by spinning, and take the cores from each other.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import numpy.typing as npt
from torch import Tensor

from worker.cpu.decode import FAST_MATH

Floats = npt.NDArray[np.float32]
SmallLinear = Callable[[Floats, Floats, Floats, Floats], None]

# With more rows a product is bound by its arithmetic, and a library's is faster.
MOST_ROWS = 16
_TILE = 4
_NO_BIAS = np.empty(0, dtype=np.float32)
_SIGNATURE = "(f4[:,::1], f4[:,::1], f4[::1], f4[:,::1])"


def _small_linear(x: Floats, weight: Floats, bias: Floats, product: Floats) -> None:
    """`product` [T, N] = `x` [T, K] @ `weight` [N, K].T + `bias` [N] (or [0]: none)."""
    num_rows, size = x.shape
    num_outputs = weight.shape[0]
    for block in numba.prange((num_outputs + _TILE - 1) // _TILE):
        first = block * _TILE
        if first + _TILE > num_outputs:
            for n in range(first, num_outputs):
                for row in range(num_rows):
                    total = np.float32(0)
                    for k in range(size):
                        total += x[row, k] * weight[n, k]
                    product[row, n] = total
        else:
            w0, w1, w2, w3 = weight[first], weight[first + 1], weight[first + 2], weight[first + 3]
            row = 0
            while row + _TILE <= num_rows:
                x0, x1, x2, x3 = x[row], x[row + 1], x[row + 2], x[row + 3]
                p00 = p01 = p02 = p03 = p10 = p11 = p12 = p13 = np.float32(0)
                p20 = p21 = p22 = p23 = p30 = p31 = p32 = p33 = np.float32(0)
                for k in range(size):
                    a0, a1, a2, a3 = x0[k], x1[k], x2[k], x3[k]
                    b0, b1, b2, b3 = w0[k], w1[k], w2[k], w3[k]
                    p00, p01, p02, p03 = p00 + a0 * b0, p01 + a0 * b1, p02 + a0 * b2, p03 + a0 * b3
                    p10, p11, p12, p13 = p10 + a1 * b0, p11 + a1 * b1, p12 + a1 * b2, p13 + a1 * b3
                    p20, p21, p22, p23 = p20 + a2 * b0, p21 + a2 * b1, p22 + a2 * b2, p23 + a2 * b3
                    p30, p31, p32, p33 = p30 + a3 * b0, p31 + a3 * b1, p32 + a3 * b2, p33 + a3 * b3
                out = product[row : row + _TILE, first : first + _TILE]
                out[0, 0], out[0, 1], out[0, 2], out[0, 3] = p00, p01, p02, p03
                out[1, 0], out[1, 1], out[1, 2], out[1, 3] = p10, p11, p12, p13
                out[2, 0], out[2, 1], out[2, 2], out[2, 3] = p20, p21, p22, p23
                out[3, 0], out[3, 1], out[3, 2], out[3, 3] = p30, p31, p32, p33
                row += _TILE
            while row < num_rows:
                x0 = x[row]
                p00 = p01 = p02 = p03 = np.float32(0)
                for k in range(size):
                    a0 = x0[k]
                    p00, p01, p02, p03 = p00 + a0 * w0[k], p01 + a0 * w1[k], p02 + a0 * w2[k], p03 + a0 * w3[k]
                out = product[row : row + 1, first : first + _TILE]
                out[0, 0], out[0, 1], out[0, 2], out[0, 3] = p00, p01, p02, p03
                row += 1
        if len(bias) > 0:
            for row in range(num_rows):
                for n in range(first, min(first + _TILE, num_outputs)):
                    product[row, n] += bias[n]


def compile_small_linear() -> SmallLinear:
    """Compile it, or load it from numba's cache on disk."""
    compiled: SmallLinear = numba.njit(_SIGNATURE, parallel=True, nogil=True, cache=True, fastmath=FAST_MATH)(
        _small_linear
    )
    return compiled


def run(linear: SmallLinear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x` [T, K] times `weight` [N, K] plus `bias` [N]; all contiguous float32 on the CPU. Returns [T, N]."""
    product = x.new_empty((len(x), len(weight)))
    linear(x.numpy(), weight.numpy(), _NO_BIAS if bias is None else bias.numpy(), product.numpy())
    return product
