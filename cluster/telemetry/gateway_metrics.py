"""The metrics of a gateway: their names, and their values from its meter and its router's predictions."""

from __future__ import annotations

from typing import Final

from cluster.routing.fleet import Fleet
from cluster.telemetry.gateway_meter import GatewayMeter
from cluster.telemetry.metric import Sample, counter, gauge, histogram

PROMPT_TOKENS: Final = counter("prompt_tokens_total", "Tokens of prompts, as `usage` tells them.")
GENERATION_TOKENS: Final = counter("generation_tokens_total", "Tokens of answers, as `usage` tells them.")
SUCCESS: Final = counter(
    "request_success_total", "Choices that ended by themselves; a request has n.", "finished_reason"
)
CANCELLED: Final = counter("requests_cancelled_total", "Requests whose client left before the end.")
REFUSED: Final = counter("requests_refused_total", "Requests that were not accepted, by the error's code.", "code")
FAILED: Final = counter(
    "requests_failed_total", "Requests that failed after they were accepted, by the error's code.", "code"
)
OPEN: Final = gauge("open_requests", "Requests that this gateway is answering.")
WORKERS: Final = gauge("workers", "Workers that this gateway has a stream to, by whether they take requests.", "state")
FIRST_TOKEN: Final = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.")
BETWEEN_TOKENS: Final = histogram("inter_token_latency_seconds", "Between two tokens of one choice.")
WHOLE: Final = histogram(
    "e2e_request_latency_seconds", "From a request's arrival to its last token; of requests that ended by themselves."
)
FREE: Final = histogram(
    "cancel_to_free_seconds", "From a cancel to the worker's word that the request's last sequence has ended."
)
FAILOVERS: Final = counter("failovers_total", "Sequences that went on at another worker.")
WORKERS_LOST: Final = counter("workers_lost_total", "Streams to workers that broke.")
PREDICTED: Final = counter(
    "prefix_cache_predicted_tokens_total", "Prompt tokens expected to be resident where the request was sent."
)
FOUND: Final = counter("prefix_cache_found_tokens_total", "Prompt tokens found resident there.")

GATEWAY_METRICS: Final = (
    *(PROMPT_TOKENS, GENERATION_TOKENS, SUCCESS, CANCELLED, REFUSED, FAILED, OPEN, WORKERS, FIRST_TOKEN),
    *(BETWEEN_TOKENS, WHOLE, FREE, FAILOVERS, WORKERS_LOST, PREDICTED, FOUND),
)


def gateway_samples(meter: GatewayMeter, fleet: Fleet) -> list[Sample]:
    """All of a gateway's metrics."""
    draining = sum(report.draining for report in fleet.reports)
    return [
        Sample(PROMPT_TOKENS, meter.num_prompt_tokens),
        Sample(GENERATION_TOKENS, meter.num_tokens),
        *(Sample(SUCCESS, count, (ending.value,)) for ending, count in meter.endings.items()),
        Sample(CANCELLED, meter.num_cancelled),
        *(Sample(REFUSED, count, (code,)) for code, count in meter.refused.items()),
        *(Sample(FAILED, count, (code,)) for code, count in meter.failed.items()),
        Sample(OPEN, meter.num_open),
        Sample(WORKERS, len(fleet.reports) - draining, ("ready",)),
        Sample(WORKERS, draining, ("draining",)),
        Sample(FIRST_TOKEN, meter.first_token.distribution),
        Sample(BETWEEN_TOKENS, meter.between_tokens.distribution),
        Sample(WHOLE, meter.whole.distribution),
        Sample(FREE, meter.free.distribution),
        Sample(FAILOVERS, meter.num_failovers),
        Sample(WORKERS_LOST, meter.num_workers_lost),
        Sample(PREDICTED, fleet.predictions.num_predicted_tokens),
        Sample(FOUND, fleet.predictions.num_cached_tokens),
    ]
