"""Decides, in integers, what a worker runs next. No torch, no Ray, no clock of its own."""

from planner.limits import Limits, Snapshot
from planner.planner import Planner
from planner.slices import Method, SelectedRows, Slice, decode_width, pad_selector, plan_slices, select_rows

__all__ = [
    "Limits",
    "Method",
    "Planner",
    "SelectedRows",
    "Slice",
    "Snapshot",
    "decode_width",
    "pad_selector",
    "plan_slices",
    "select_rows",
]
