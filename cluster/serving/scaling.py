"""What a fleet that grows and shrinks with its load is told, and what its workers tell. Free of Ray.

Not for deciding: `cluster.serving.scaling_policy` does.
"""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cluster.serving.scaling_policy import CELL_USE, QUEUE_S, SEAT_USE
from planner.errors import InvalidConfiguration
from planner.limits import Snapshot


class ScalingSettings(BaseModel):
    """When workers are added and taken away; how many at least and at most is `ServiceConfig`'s.

    * `target_use`: the share of a worker's cells, or of its seats, that shall be in use.
    * `target_queue_s`: how long a worker's queue of prompt tokens may take.
    * `upscale_delay_s`, `downscale_delay_s`: how long more, or fewer, must have been wanted without a break.
    * `look_back_s`: reports are means over so long. `report_interval_s`: how often a worker reports; the shorter.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target_use: float = Field(default=0.8, gt=0, le=1)
    target_queue_s: float = Field(default=2.0, gt=0)
    upscale_delay_s: float = Field(default=5.0, ge=0)
    downscale_delay_s: float = Field(default=300.0, ge=0)
    look_back_s: float = Field(default=15.0, gt=0)
    report_interval_s: float = Field(default=10.0, gt=0)

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if self.report_interval_s >= self.look_back_s:
            raise InvalidConfiguration(
                f"scaling.report_interval_s ({self.report_interval_s:g}) must be below scaling.look_back_s "
                f"({self.look_back_s:g})",
                param="scaling.report_interval_s",
            )
        return self


def load_report(snapshot: Snapshot, max_num_seqs: int) -> dict[str, float]:
    """How full a worker is, by the names of `cluster.serving.scaling_policy`."""
    queued = snapshot.queued_prefill_tokens
    rate = snapshot.queue_tokens_per_s
    return {
        CELL_USE: (snapshot.owned_cells + queued) / snapshot.capacity,
        SEAT_USE: (snapshot.num_running + snapshot.num_waiting) / max_num_seqs,
        QUEUE_S: 0.0 if rate is None else queued / rate,
    }
