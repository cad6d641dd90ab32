"""Keys and values of a sequence outside any pool: plain bytes that one worker takes out and another one puts in.

Free of torch. Whose cells they are, and which cells they go to, is the planner's business (`Planner.held`,
`Planner.receive`); how they get there is the executor's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from planner.errors import InvalidCellImage
from planner.request import CellArray

if TYPE_CHECKING:
    from worker.executor import ProgramInfo


@dataclass(frozen=True, slots=True)
class CellLayout:
    """What the bytes of a cell mean. Only pools of equal layouts understand each other."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    cell_bytes: int

    @staticmethod
    def of(info: ProgramInfo) -> CellLayout:
        dtype = info.cell_dtype or info.dtype
        return CellLayout(info.num_layers, info.num_kv_heads, info.head_dim, dtype, info.bytes_per_cell)


@dataclass(frozen=True, slots=True)
class CellImage:
    """`num_cells` cells in the order of positions. `data`, uint8[bytes]: for each cell after the other within a plane,
    the planes being the keys of all layers and then their values."""

    layout: CellLayout
    num_cells: int
    data: npt.NDArray[np.uint8]

    def check(self, layout: CellLayout, cells: CellArray) -> None:
        """Raise `InvalidCellImage` unless this fits int32[n] `cells` of a pool of `layout`."""
        if self.layout != layout:
            raise InvalidCellImage(f"the cells are {self.layout}, and those of this pool are {layout}")
        if len(cells) != self.num_cells:
            raise InvalidCellImage(f"the image holds {self.num_cells} cells, and {len(cells)} are to be filled")
        if self.data.size != self.num_cells * layout.cell_bytes:
            raise InvalidCellImage(
                f"{self.num_cells} cells of {layout.cell_bytes} bytes are {self.num_cells * layout.cell_bytes} bytes, "
                f"and the image has {self.data.size}"
            )

    def part(self, start: int) -> CellImage:
        """The cells from `start` on."""
        planes = self.data.reshape(2 * self.layout.num_layers, self.num_cells, -1)[:, start:]
        return CellImage(self.layout, self.num_cells - start, np.ascontiguousarray(planes).ravel())


class CellPort(Protocol):
    """Where cells leave a pool and enter it. Owner and only caller: the thread that owns the executor.

    Both wait for the pool's device. Cells to be filled belong to nobody that a step in flight writes for.
    """

    @property
    def layout(self) -> CellLayout: ...

    def export(self, cells: CellArray) -> CellImage:
        """int32[n] cells, as they are after all that was launched."""
        ...

    def fill(self, cells: CellArray, image: CellImage) -> None:
        """Put an image's cells into int32[n] cells, no two alike. Raises `InvalidCellImage`; nothing has changed."""
        ...
