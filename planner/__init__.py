"""Decides, in integers, what a worker runs next. No torch, no Ray, no clock of its own."""

from planner.slices import Method, Slice, plan_slices

__all__ = ["Method", "Slice", "plan_slices"]
