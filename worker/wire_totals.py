"""A worker's totals to and from their message on the data plane. Free of torch and of grpc."""

from __future__ import annotations

from protos import worker_pb2 as pb
from worker.distribution import Distribution
from worker.stats import StepKind
from worker.totals import Totals
from worker.wire import FROM_WIRE, TO_WIRE


def totals_to_proto(totals: Totals) -> pb.Totals:
    return pb.Totals(
        prompt_tokens_computed=totals.prompt_tokens_computed,
        tokens_generated=totals.tokens_generated,
        tokens_forced=totals.tokens_forced,
        decode_tokens=totals.decode_tokens,
        prefill_tokens=totals.prefill_tokens,
        padded_rows=totals.padded_rows,
        prefill_forwards=totals.prefill_forwards,
        decode_forwards=totals.decode_forwards,
        prefix_queries=totals.prefix_queries,
        prefix_hits=totals.prefix_hits,
        preemptions=totals.preemptions,
        cells_swapped_out=totals.cells_swapped_out,
        cells_swapped_in=totals.cells_swapped_in,
        streams_refused=totals.streams_refused,
        finished={TO_WIRE[reason]: count for reason, count in totals.finished.items()},
        queue_time=_distribution_to_proto(totals.queue_time),
        decode_step_time=_step_time_to_proto(totals, StepKind.DECODE),
        prefill_step_time=_step_time_to_proto(totals, StepKind.PREFILL),
        mixed_step_time=_step_time_to_proto(totals, StepKind.MIXED),
    )


def totals_from_proto(message: pb.Totals) -> Totals:
    """A finish reason of a newer peer that is unknown here is left out."""
    step_times = {
        StepKind.DECODE: message.decode_step_time,
        StepKind.PREFILL: message.prefill_step_time,
        StepKind.MIXED: message.mixed_step_time,
    }
    return Totals(
        prompt_tokens_computed=message.prompt_tokens_computed,
        tokens_generated=message.tokens_generated,
        tokens_forced=message.tokens_forced,
        decode_tokens=message.decode_tokens,
        prefill_tokens=message.prefill_tokens,
        padded_rows=message.padded_rows,
        prefill_forwards=message.prefill_forwards,
        decode_forwards=dict(message.decode_forwards),
        prefix_queries=message.prefix_queries,
        prefix_hits=message.prefix_hits,
        preemptions=message.preemptions,
        cells_swapped_out=message.cells_swapped_out,
        cells_swapped_in=message.cells_swapped_in,
        streams_refused=message.streams_refused,
        finished={FROM_WIRE[wire]: count for wire in FROM_WIRE if (count := message.finished.get(int(wire), 0))},
        queue_time=_distribution_from_proto(message.queue_time),
        step_time={kind: _distribution_from_proto(it) for kind, it in step_times.items() if it.counts},
    )


def _step_time_to_proto(totals: Totals, kind: StepKind) -> pb.Distribution | None:
    distribution = totals.step_time.get(kind)
    return None if distribution is None else _distribution_to_proto(distribution)


def _distribution_to_proto(distribution: Distribution) -> pb.Distribution:
    return pb.Distribution(bounds=distribution.bounds, counts=distribution.counts, sums=distribution.sums)


def _distribution_from_proto(message: pb.Distribution) -> Distribution:
    return Distribution(tuple(message.bounds), tuple(message.counts), tuple(message.sums))
