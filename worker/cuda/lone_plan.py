"""What attention of lone tokens reads on a GPU: one new token of each sequence, behind all of its past.

The plan of a forward of decodes, in a form whose sizes follow from the number of tokens alone: so a captured forward
finds everything at the same place, and its launches are the same, whatever the sequences are. Not for chunks of
prompts: `prefill_plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.attention import Span
from worker.cuda.launch import aligned
from worker.packed_plan import PackedPlan

# Every array begins at a multiple of 128 bytes.
_ALIGNED = 32
_LAYOUT_ENTRIES = 2

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LonePlan:
    """T tokens, each of a sequence of its own; all int32, on the device.

    * `positions` [T]: of each token, which is the number of cells before it.
    * `firsts` [T]: first entry in `cells` of each token's sequence.
    * `new_cells` [T]: where each token's key and value go.
    * `cells`: the sequences' cell lists end to end; what lies behind them is never read.
    """

    positions: Tensor
    firsts: Tensor
    new_cells: Tensor
    cells: Tensor


def are_lone(spans: Sequence[Span]) -> bool:
    """Whether each span is one token."""
    return all(span.length == 1 for span in spans)


def pack_lone(spans: Sequence[Span], device: torch.device) -> PackedPlan:
    """The plan of spans of one token each, as one table on `device`, copied once."""
    num_cells = sum(len(span.cells) for span in spans)
    host = torch.zeros(table_size(len(spans), num_cells), dtype=torch.int32, pin_memory=device.type == "cuda")
    write_lone(host.numpy(), spans, len(spans))
    return PackedPlan(host.to(device, non_blocking=True), layout_of(len(spans), num_cells))


def write_lone(host: Int32Array, spans: Sequence[Span], width: int) -> int:
    """Write the plan of `spans` as the first rows of one of `width` tokens into `host`, and return the number of its
    entries that were written. Further rows keep what they have."""
    room, num_rows = aligned(width, _ALIGNED), len(spans)
    lists = [span.cells for span in spans]
    ends = np.cumsum([len(cells) for cells in lists], dtype=np.int64)
    host[:num_rows] = [span.start for span in spans]
    host[room : room + num_rows] = ends - [len(cells) for cells in lists]
    host[2 * room : 2 * room + num_rows] = [cells[-1] for cells in lists]
    num_cells = int(ends[-1])
    np.concatenate(lists, out=host[3 * room : 3 * room + num_cells])
    return 3 * room + num_cells


def table_size(width: int, num_cells: int) -> int:
    """Entries of a table of `width` tokens whose sequences have so many cells together."""
    return 3 * aligned(width, _ALIGNED) + num_cells


def layout_of(width: int, num_cells: int) -> Tensor:
    """What `unpack_lone` needs to know of a table; on the CPU."""
    return torch.tensor([width, num_cells])


def is_lone(packed: PackedPlan) -> bool:
    """Whether a plan is of this kind; on the CPU alone."""
    return len(packed.layout) == _LAYOUT_ENTRIES


def unpack_lone(packed: PackedPlan) -> LonePlan:
    """The plan, as views of the table. Does not wait for the device."""
    width, num_cells = packed.layout.tolist()
    room = aligned(width, _ALIGNED)
    positions, firsts, new_cells = packed.table[: 3 * room].view(3, room)[:, :width].unbind(0)
    return LonePlan(positions, firsts, new_cells, packed.table[3 * room : 3 * room + num_cells])
