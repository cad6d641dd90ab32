"""`raycomb top`: the fleet in a terminal, as one of its gateways sees it. Asks what the page at `/` asks."""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
from collections.abc import Mapping
from typing import Any

from cluster.commands.argument_types import seconds, service_url
from cluster.commands.service_client import opened
from planner.errors import Unavailable

BAR_CELLS = 24
CLEAR = "\x1b[H\x1b[2J"
ANSWER_S = 5.0

View = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", type=service_url, default="http://127.0.0.1:8000", metavar="URL", help="of the service"
    )
    parser.add_argument("--api-key", metavar="KEY", help="where the service has keys")
    parser.add_argument("--interval", type=seconds, default=1.0, metavar="S", help="seconds between looks")
    parser.add_argument("--once", action="store_true", help="look twice, print, and end")


def execute(args: argparse.Namespace) -> int:
    """Until Ctrl-C. Raises `Unavailable` when the service does not answer at first; later it is waited for."""
    before = fetch(args.url, args.api_key)
    while True:
        time.sleep(max(0.1, args.interval))
        try:
            fleet = fetch(args.url, args.api_key)
            text, before = table(fleet, before), fleet
        except Unavailable as error:
            if args.once:
                raise
            text = error.message
        if args.once:
            print(text)
            return 0
        sys.stdout.write(f"{CLEAR}{text}\n")
        sys.stdout.flush()


def fetch(url: str, key: str | None) -> View:
    """`/debug/fleet`. Raises `Unavailable` in one sentence."""
    try:
        with opened(f"{url}/debug/fleet", patience_s=ANSWER_S, api_key=key) as answer:
            fleet: View = json.load(answer)
    except urllib.error.HTTPError as error:
        hint = ": give --api-key" if error.code == 401 else ""
        raise Unavailable(f"{url} answered {error.code}{hint}") from error
    except (OSError, ValueError) as error:
        raise Unavailable(f"{url} does not answer: {_reason(error)}") from error
    return fleet


def _reason(error: OSError | ValueError) -> str:
    beneath = getattr(error, "reason", error)  # what urllib wraps
    return beneath.strerror if isinstance(beneath, OSError) and beneath.strerror else str(beneath)


def table(fleet: View, before: View) -> str:
    """For people: one line for the service, one a worker, and the last events. `before` is an earlier look."""
    gateway = fleet["gateway"]
    seconds = max(1e-9, fleet["at"] - before["at"])
    earlier = {worker["worker"]: worker for worker in before["workers"]}
    rates = {
        worker["worker"]: max(0, worker["tokens_generated"] - earlier[worker["worker"]]["tokens_generated"]) / seconds
        for worker in fleet["workers"]
        if worker["worker"] in earlier
    }
    models = ["MODEL", *(worker["model"] for worker in fleet["workers"])]
    if len(fleet["models"]) == 1:
        models = [""] * len(models)
    lines = [
        f"{', '.join(fleet['models'])}  {'ready' if fleet['ready'] else 'NOT READY'}  "
        f"{sum(rates.values()):.1f} tokens/s  "
        f"{gateway['num_open']} open  {gateway['num_cancelled']} hung up  {gateway['num_refused']} refused  "
        f"{gateway['num_failed']} failed  {gateway['num_failovers']} failovers",
        "",
    ]
    rows = [f"{'WORKER':<12} {'STATE':<9} {'RUN':>5} {'WAIT':>5} {'TOK/S':>8} {'HITS':>5}  CELLS (# owned, + cached)"]
    rows += [_worker(worker, rates.get(worker["worker"])) for worker in fleet["workers"]]
    width = max(map(len, rows))
    lines += [f"{row:<{width}}  {model}".rstrip() for row, model in zip(rows, models, strict=True)]
    lines += ["", *(_event(event) for event in fleet["events"][-5:])]
    return "\n".join(lines).rstrip()


def _worker(worker: View, rate: float | None) -> str:
    queries = worker["prefix_queries"]
    hits = f"{100 * worker['prefix_hits'] // queries} %" if queries else "-"
    owned = round(BAR_CELLS * worker["owned_cells"] / worker["capacity"])
    cached = min(BAR_CELLS - owned, round(BAR_CELLS * worker["cached_cells"] / worker["capacity"]))
    bar = "#" * owned + "+" * cached + "." * (BAR_CELLS - owned - cached)
    state, told = "draining" if worker["draining"] else "ready", "-" if rate is None else f"{rate:.1f}"
    numbers = f"{worker['num_running']:>5} {worker['num_waiting']:>5} {told:>8} {hits:>5}"
    return f"{worker['worker']:<12} {state:<9} {numbers}  [{bar}] of {worker['capacity']}"


def _event(event: View) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(event['at']))} {event['text']}"
