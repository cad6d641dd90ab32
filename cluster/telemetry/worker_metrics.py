"""The metrics of a worker: their names, and their values from its snapshot and totals.

Used where the worker runs and by every gateway, which gets both over the data plane: so the names are the same.
"""

from __future__ import annotations

from typing import Final

from cluster.telemetry.metric import Sample, counter, gauge, histogram
from planner.limits import Snapshot
from worker.totals import Totals

RUNNING: Final = gauge("num_requests_running", "Sequences that run; a request has n of them.")
WAITING: Final = gauge("num_requests_waiting", "Requests that wait for a seat.")
QUEUED_TOKENS: Final = gauge("queued_prefill_tokens", "Tokens of accepted prompts that are still to be prefilled.")
USAGE: Final = gauge("kv_cache_usage_ratio", "Cells owned by sequences over all cells: 1 is full.")
CELLS: Final = gauge("kv_cells", "Cells of the pool; those of all states together are its capacity.", "state")
QUERIES: Final = counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.")
HITS: Final = counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.")
PREEMPTIONS: Final = counter("num_preemptions_total", "Sequences that lost their cells to older ones.")
SWAPPED: Final = counter("swapped_cells_total", "Cells copied to host memory and back.", "direction")
PREFILLED: Final = counter("prefilled_tokens_total", "Prompt tokens computed, again after a preemption included.")
SAMPLED: Final = counter("sampled_tokens_total", "Tokens drawn, those included that no client was told.")
FORCED: Final = counter(
    "forced_tokens_total", "Tokens that a grammar left no choice in, fed at once; drawn ones include them."
)
FORWARD_TOKENS: Final = counter("forward_tokens_total", "Tokens run by forwards of each method.", "method")
PADDED_ROWS: Final = counter("padded_rows_total", "Rows of decode forwards that held no token.")
DECODES: Final = counter(
    "decode_forwards_total", "Decode forwards by width; on a GPU each replays the graph of its width.", "width"
)
PREFILLS: Final = counter("prefill_forwards_total", "Prefill forwards.")
FINISHED: Final = counter("sequences_finished_total", "Sequences that ended here, by how.", "reason")
STRANGERS: Final = counter(
    "data_plane_refusals_total", "Streams of the data plane that were refused since they lacked its secret."
)
QUEUE_TIME: Final = histogram(
    "request_queue_time_seconds", "From a request's arrival at its worker until it was first scheduled."
)
STEP_TIME: Final = histogram("step_time_seconds", "Duration of a step, by what it ran.", "kind")

WORKER_METRICS: Final = (
    *(RUNNING, WAITING, QUEUED_TOKENS, USAGE, CELLS, QUERIES, HITS, PREEMPTIONS, SWAPPED, PREFILLED, SAMPLED),
    *(FORCED, FORWARD_TOKENS, PADDED_ROWS, DECODES, PREFILLS, FINISHED, STRANGERS, QUEUE_TIME, STEP_TIME),
)


def worker_samples(snapshot: Snapshot, totals: Totals) -> list[Sample]:
    """All of a worker's metrics."""
    cells = {"free": snapshot.free_cells, "owned": snapshot.owned_cells, "cached": snapshot.cached_cells}
    return [
        Sample(RUNNING, snapshot.num_running),
        Sample(WAITING, snapshot.num_waiting),
        Sample(QUEUED_TOKENS, snapshot.queued_prefill_tokens),
        Sample(USAGE, snapshot.owned_cells / snapshot.capacity),
        *(Sample(CELLS, number, (state,)) for state, number in cells.items()),
        Sample(QUERIES, totals.prefix_queries),
        Sample(HITS, totals.prefix_hits),
        Sample(PREEMPTIONS, totals.preemptions),
        Sample(SWAPPED, totals.cells_swapped_out, ("out",)),
        Sample(SWAPPED, totals.cells_swapped_in, ("in",)),
        Sample(PREFILLED, totals.prompt_tokens_computed),
        Sample(SAMPLED, totals.tokens_generated),
        Sample(FORCED, totals.tokens_forced),
        Sample(FORWARD_TOKENS, totals.decode_tokens, ("decode",)),
        Sample(FORWARD_TOKENS, totals.prefill_tokens, ("prefill",)),
        Sample(PADDED_ROWS, totals.padded_rows),
        *(Sample(DECODES, count, (str(width),)) for width, count in sorted(totals.decode_forwards.items())),
        Sample(PREFILLS, totals.prefill_forwards),
        *(Sample(FINISHED, count, (reason.value,)) for reason, count in totals.finished.items()),
        Sample(STRANGERS, totals.streams_refused),
        Sample(QUEUE_TIME, totals.queue_time),
        *(Sample(STEP_TIME, distribution, (kind.value,)) for kind, distribution in totals.step_time.items()),
    ]
