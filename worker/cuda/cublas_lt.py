"""Matrix products by the vendor's library through its own interface, cublasLt, where a caller says which kernel runs.

torch's products take the one kernel that the library's heuristic names first. The library has hundreds, of other tiles,
clusters and orders of them; for steps of 65 to 256 rows others take down to 0.7 of its time
(docs/gpu_decode_notes.md). What is called here is the public interface (cuBLAS documentation, "Using the cublasLt
API"); its numbers are those of `cublasLt.h`, which keep their meaning between versions.

A GPU has no part in importing this module; `CublasLt` wants one, and torch's libraries in the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

WORK_BYTES: Final = 1 << 20
"""Of the library's work space. Kernels that want more, to add up partial sums in it, are not offered."""

_KINDS: Final = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
_SUMS_OF_FLOAT32: Final = 68  # CUBLAS_COMPUTE_32F
_TRANSPOSE_FIRST: Final = 3  # CUBLASLT_MATMUL_DESC_TRANSA
_TRANSPOSED: Final = 1  # CUBLAS_OP_T
_BATCH_COUNT, _BATCH_STRIDE = 5, 6  # of CUBLASLT_MATRIX_LAYOUT
_MOST_WORK_BYTES: Final = 1  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
_CAN_TILES, _CAN_ORDERS = 6, 7  # of CUBLASLT_ALGO_CAP: tile ids, and the largest "custom option"
_KIND, _TILE, _SPLITS, _ORDER, _CLUSTER = 0, 1, 2, 5, 8  # of CUBLASLT_ALGO_CONFIG; the fourth is "custom option"


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("words", c_uint64 * 8),)


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("work_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class VendorError(RuntimeError):
    """The library refused a call; the message has its name and the library's number for why."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a kernel of the library cuts a product, in the library's own numbers: of a tile, of a cluster's shape, and of
    the order in which tiles are computed."""

    tile: int
    cluster: int
    order: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """One of the library's for one product. `kind`: the library's number of the family that it is of. `cuts_depth`: it
    cuts K by itself, and adds the parts up in its own way."""

    kind: int
    tiling: Tiling
    algorithm: Algorithm
    cuts_depth: bool


@dataclass(frozen=True, slots=True)
class ProductShape:
    """x [rows, depth] times w [columns, depth] transposed, both of `dtype` and contiguous, summed in float32. Where
    `parts` is more than 1, K is cut into as many, and each part's sum is kept apart, in float32, `part_stride` elements
    behind the one before."""

    rows: int
    columns: int
    depth: int
    dtype: torch.dtype
    parts: int = 1
    part_stride: int = 0

    def __post_init__(self) -> None:
        assert self.depth % self.parts == 0
        assert self.part_stride >= self.rows * self.columns if self.parts > 1 else self.part_stride == 0

    @property
    def out_dtype(self) -> torch.dtype:
        return self.dtype if self.parts == 1 else torch.float32

    @property
    def out_numel(self) -> int:
        """Elements from the first of the result to its last."""
        return (self.parts - 1) * self.part_stride + self.rows * self.columns


class CublasLt:
    """The library on one GPU. One thread uses it. What it holds of the library is held until the process ends."""

    def __init__(self, device: torch.device) -> None:
        """Raises OSError where the library is not there, and `VendorError` where it does not start."""
        assert torch.version.cuda is not None
        self._library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
        self._handle = c_void_p()
        self.call("cublasLtCreate", byref(self._handle))
        self._work = torch.empty(WORK_BYTES, dtype=torch.uint8, device=device)

    def call(self, name: str, *args: Any) -> None:
        """Raises `VendorError`."""
        if status := self.function(name)(*args):
            raise VendorError(f"{name} failed with status {status}")

    def function(self, name: str) -> Callable[..., int]:
        """Of the library; it returns 0, or why it failed."""
        found: Callable[..., int] = getattr(self._library, name)
        return found

    def product(self, shape: ProductShape) -> Product:
        """Raises `VendorError`, as all that the product is asked does."""
        return Product(self, self._handle, self._work, shape)


class Product:
    """A product of one shape. The library reads matrices column by column, so that x and w, row by row, are their own
    transposes to it: it computes the transpose of out as w times x's transpose."""

    def __init__(self, library: CublasLt, handle: c_void_p, work: Tensor, shape: ProductShape) -> None:
        self.shape = shape
        self._library, self._handle, self._work = library, handle, work
        self._one, self._zero = c_float(1), c_float(0)
        self._capabilities: dict[tuple[int, int], list[int]] = {}
        self._description = c_void_p()
        library.call("cublasLtMatmulDescCreate", byref(self._description), _SUMS_OF_FLOAT32, _KINDS[torch.float32])
        transposed = c_int32(_TRANSPOSED)
        library.call(
            "cublasLtMatmulDescSetAttribute", self._description, _TRANSPOSE_FIRST, byref(transposed), c_size_t(4)
        )
        part = shape.depth // shape.parts
        self._w = self._layout(shape.dtype, part, shape.columns, shape.depth, part)
        self._x = self._layout(shape.dtype, part, shape.rows, shape.depth, part)
        self._out = self._layout(shape.out_dtype, shape.columns, shape.rows, shape.columns, shape.part_stride)
        self._layouts = (self._w, self._x, self._out, self._out)

    def launcher(self, x: Tensor, w: Tensor, out: Tensor, kernel: Kernel) -> Callable[[], None]:
        """Launches it on what is torch's current stream now: x [rows or more, depth] into out [rows, columns], or
        [parts, rows, columns] as far apart as the shape says. Capturable; one at a time, since all share the work
        space. Whoever has the launcher, or a graph of it, keeps the tensors and the library."""
        shape = self.shape
        assert x.dtype == w.dtype == shape.dtype
        assert out.dtype == shape.out_dtype
        assert x.is_contiguous()
        assert w.is_contiguous()
        assert out.is_contiguous()
        assert x.shape[1:] == (shape.depth,)
        assert len(x) >= shape.rows
        assert w.shape == (shape.columns, shape.depth)
        assert out.numel() >= shape.out_numel
        multiply, where = self._library.function("cublasLtMatmul"), c_void_p(out.data_ptr())
        args = (
            self._handle, self._description, byref(self._one), c_void_p(w.data_ptr()), self._w, c_void_p(x.data_ptr()),
            self._x, byref(self._zero), where, self._out, where, self._out, byref(kernel.algorithm),
            c_void_p(self._work.data_ptr()), c_size_t(WORK_BYTES),
            c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
        )  # fmt: skip

        def launch() -> None:
            if status := multiply(*args):
                raise VendorError(f"cublasLtMatmul failed with status {status}")

        return launch

    def suggested(self, most: int = 32) -> list[Kernel]:
        """Those that the library's heuristic names, the one it thinks the fastest first."""
        preference = c_void_p()
        self._library.call("cublasLtMatmulPreferenceCreate", byref(preference))
        limit = c_uint64(WORK_BYTES)
        self._library.call(
            "cublasLtMatmulPreferenceSetAttribute", preference, _MOST_WORK_BYTES, byref(limit), c_size_t(8)
        )
        found, count = (_Found * most)(), c_int()
        self._library.call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, self._description, *self._layouts, preference, most, found,
            byref(count),
        )  # fmt: skip
        self._library.call("cublasLtMatmulPreferenceDestroy", preference)
        usable = [each.algorithm for each in found[: count.value] if each.status == 0]
        return [
            Kernel(
                self._value(each, _KIND, c_int32), self._tiling(each), each,
                cuts_depth=self._value(each, _SPLITS, c_int32) > 1,
            )
            for each in usable
        ]  # fmt: skip

    def tiles(self, like: Kernel) -> list[int]:
        """Numbers of all tiles that kernels of the kind of `like` come in."""
        return self._capability(like, _CAN_TILES)

    def orders(self, like: Kernel) -> range:
        """Numbers of all orders, alike."""
        (most,) = self._capability(like, _CAN_ORDERS)
        return range(most + 1)

    def variant(self, like: Kernel, tiling: Tiling) -> Kernel | None:
        """A kernel of the kind of `like`, which does not cut K, with another tiling; None where there is none."""
        assert not like.cuts_depth
        if tiling.tile not in self.tiles(like) or tiling.order not in self.orders(like):
            return None  # the library does not look, and ends the process
        algorithm = Algorithm.from_buffer_copy(like.algorithm)
        wanted = (
            (_TILE, c_uint32(tiling.tile)),
            (_ORDER, c_uint32(tiling.order)),
            (_CLUSTER, c_uint16(tiling.cluster)),
        )
        found = _Found()
        try:
            for attribute, value in wanted:
                self._library.call(
                    "cublasLtMatmulAlgoConfigSetAttribute", byref(algorithm), attribute, byref(value),
                    c_size_t(ctypes.sizeof(value)),
                )  # fmt: skip
            self._library.call(
                "cublasLtMatmulAlgoCheck", self._handle, self._description, *self._layouts, byref(algorithm),
                byref(found),
            )  # fmt: skip
        except VendorError:
            return None
        return Kernel(like.kind, tiling, algorithm, cuts_depth=False) if found.work_bytes <= WORK_BYTES else None

    def _capability(self, like: Kernel, which: int) -> list[int]:
        """What the library says that this kind of kernels can; asked once for each kind."""
        kind = (like.kind, which)
        if kind not in self._capabilities:
            got = c_size_t()
            ask = ("cublasLtMatmulAlgoCapGetAttribute", byref(like.algorithm), which)
            self._library.call(*ask, None, c_size_t(0), byref(got))
            numbers = (c_uint32 * (got.value // 4))()
            self._library.call(*ask, numbers, got, byref(got))
            self._capabilities[kind] = list(numbers)
        return self._capabilities[kind]

    def _tiling(self, algorithm: Algorithm) -> Tiling:
        return Tiling(
            self._value(algorithm, _TILE, c_uint32),
            self._value(algorithm, _CLUSTER, c_uint16),
            self._value(algorithm, _ORDER, c_uint32),
        )

    def _value(self, algorithm: Algorithm, attribute: int, kind: type[c_int32 | c_uint16 | c_uint32]) -> int:
        value, got = kind(), c_size_t()
        self._library.call(
            "cublasLtMatmulAlgoConfigGetAttribute", byref(algorithm), attribute, byref(value),
            c_size_t(ctypes.sizeof(value)), byref(got),
        )  # fmt: skip
        return value.value

    def _layout(self, dtype: torch.dtype, rows: int, columns: int, stride: int, between_parts: int) -> c_void_p:
        layout = c_void_p()
        self._library.call(
            "cublasLtMatrixLayoutCreate", byref(layout), _KINDS[dtype], c_uint64(rows), c_uint64(columns),
            c_int64(stride),
        )  # fmt: skip
        if self.shape.parts > 1:
            for attribute, value in (
                (_BATCH_COUNT, c_int32(self.shape.parts)),
                (_BATCH_STRIDE, c_int64(between_parts)),
            ):
                self._library.call(
                    "cublasLtMatrixLayoutSetAttribute", layout, attribute, byref(value), c_size_t(ctypes.sizeof(value))
                )
        return layout
