"""`raycomb bench online`: a seeded load over HTTP against any server that speaks `/v1/completions` with streaming."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from cluster.bench import plot as bench_plot
from cluster.bench import workload
from cluster.bench import workloads as bench_workloads
from cluster.bench.latency import LoadResult, RequestRecord, result_block
from cluster.bench.reach import check_reachable, first_model
from cluster.bench.sse_client import HttpError, Target, post_events
from cluster.bench.workloads import OnlineWorkload, Prompt
from cluster.commands.argument_types import (
    file_to_read,
    file_to_write,
    one_of,
    positive,
    positive_number,
    refuse_unread,
    service_url,
)
from cluster.commands.help_format import flag_of
from cluster.commands.service_client import bearer
from cluster.commands.terminal import say
from planner.errors import InvalidConfiguration

PATH = "/v1/completions"
NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 100, 128, 128
NUM_PREFIXES, PREFIX_LEN = 20, 512
_LENGTHS = (OnlineWorkload.RANDOM, OnlineWorkload.SHARED_PREFIX)
_DRAWN = (*_LENGTHS, OnlineWorkload.CHAT)
# Flags that only some loads read; giving one to another load is refused.
READERS = {
    "num_prompts": _DRAWN,
    "request_rate": _DRAWN,
    "burstiness": _DRAWN,
    "input_len": _LENGTHS,
    "output_len": _LENGTHS,
    "prefix_len": (OnlineWorkload.SHARED_PREFIX,),
    "num_prefixes": (OnlineWorkload.SHARED_PREFIX,),
}
# What a file of prompts says itself.
IN_FILE = ("num_prompts", "input_len")


@dataclass(frozen=True, slots=True)
class Server:
    """Who is asked, for which model, with which key."""

    target: Target
    model: str
    api_key: str | None = None
    ignore_eos: bool = True

    def body(self, prompt: Prompt) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.model,
            "prompt": prompt.prompt,
            "max_tokens": prompt.output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body | {"ignore_eos": True} if self.ignore_eos else body

    @property
    def headers(self) -> dict[str, str]:
        return bearer(self.api_key)


async def ask(server: Server, prompt: Prompt) -> RequestRecord:
    """Send one request and time its answer. A failure is a record with an error, never an exception.

    Tokens are counted by the usage chunk; a server that sends none is counted by events.
    """
    sent = time.perf_counter()
    events: list[float] = []
    usage: dict[str, int] = {}
    error: str | None = None
    try:
        async with aclosing(post_events(server.target, PATH, server.body(prompt), server.headers)) as arrivals:
            async for arrival in arrivals:
                for message in map(json.loads, arrival.payloads):
                    if "error" in message:
                        raise HttpError(f"error event: {message['error']}")
                    if message.get("choices"):
                        events.append(arrival.at)
                    usage = message.get("usage") or usage
        if not events:
            error = "the stream held no token"
    except (HttpError, OSError, ValueError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return RequestRecord(
        sent=sent,
        ended=time.perf_counter(),
        num_input=usage.get("prompt_tokens", prompt.num_input),
        num_output=usage.get("completion_tokens", len(events)),
        events=tuple(events),
        error=error,
    )


async def run_load(
    server: Server,
    prompts: Sequence[Prompt],
    *,
    request_rate: float = math.inf,
    burstiness: float = 1.0,
    times: Sequence[float] | None = None,
    max_concurrency: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> LoadResult:
    """Send every prompt at its time, at most `max_concurrency` at once, and wait for all answers. `times`, in seconds
    from the start, go before rate and burstiness. `progress`: show it, where there is a terminal.

    A request that waits for its turn under `max_concurrency` is timed from when it is sent, as is usual.
    """
    turns = asyncio.Semaphore(max_concurrency or len(prompts))
    start = time.perf_counter()

    async def one(prompt: Prompt, at: float) -> RequestRecord:
        await asyncio.sleep(start + at - time.perf_counter())
        async with turns:
            record = await ask(server, prompt)
        bar.update()
        return record

    arrivals = times or list(bench_workloads.arrivals(len(prompts), request_rate, burstiness, seed=seed))
    with tqdm(total=len(prompts), disable=None if progress else True, unit="request") as bar:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt, at)) for prompt, at in zip(prompts, arrivals, strict=True)]
    return LoadResult([task.result() for task in tasks], time.perf_counter() - start, max_concurrency)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base-url", type=service_url, default="http://127.0.0.1:8000", metavar="URL", help="scheme, host and port"
    )
    parser.add_argument("--model", metavar="NAME", help="model to ask for; not given: the first that the server lists")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    parser.add_argument("--num-prompts", type=positive, metavar="N", help=f"requests to send (default: {NUM_PROMPTS})")
    parser.add_argument(
        "--request-rate",
        type=positive_number,
        metavar="NUMBER",
        help="requests a second (Poisson), or inf (default: inf)",
    )
    parser.add_argument("--max-concurrency", type=positive, metavar="N", help="most requests in flight (default: all)")
    parser.add_argument(
        "--burstiness",
        type=positive_number,
        metavar="NUMBER",
        help="1: Poisson; less: in bursts; more: evenly (default: 1)",
    )
    parser.add_argument("--workload", **one_of(OnlineWorkload), default=OnlineWorkload.RANDOM, help="which prompts")
    parser.add_argument(
        "--prefix-len", type=positive, metavar="N", help=f"shared-prefix: tokens of each prefix (default: {PREFIX_LEN})"
    )
    parser.add_argument(
        "--num-prefixes",
        type=positive,
        metavar="N",
        help=f"shared-prefix: how many there are (default: {NUM_PREFIXES})",
    )
    parser.add_argument(
        "--trace",
        type=file_to_read,
        metavar="FILE",
        help="trace: JSON lines with at, output_len, and prompt or input_len",
    )
    parser.add_argument(
        "--goodput", nargs="+", default=[], metavar="MEASURE:MS", help="count requests within ttft, tpot and e2el"
    )
    parser.add_argument(
        "--input-len", type=positive, metavar="N", help=f"tokens of each random prompt (default: {INPUT_LEN})"
    )
    parser.add_argument(
        "--output-len", type=positive, metavar="N", help=f"tokens of each answer (default: {OUTPUT_LEN})"
    )
    parser.add_argument(
        "--vocab-size", type=positive, default=32_000, metavar="N", help="random token ids are below this"
    )
    parser.add_argument(
        "--prompts",
        type=file_to_read,
        metavar="FILE",
        help="JSON lines with prompt or prompt_token_ids, and max_tokens",
    )
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answers have their full length, whatever the model says",
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and of the times at which they are sent")
    parser.add_argument("--result", type=file_to_write, metavar="FILE", help="also write the figures to this file")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw them: a .png, .svg or .pdf (needs matplotlib)"
    )


def read_prompts(path: Path, output_len: int) -> list[Prompt]:
    """One prompt a line. Raises `InvalidConfiguration` naming the line that is not one."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            item = bench_workloads.line_object(line)
            prompts.append(Prompt(item.get("prompt_token_ids") or item["prompt"], item.get("max_tokens", output_len)))
        except (ValueError, KeyError) as fault:
            told = bench_workloads.said(fault)
            raise InvalidConfiguration(f"{path}:{number} is not a prompt: {told}", param="prompts") from fault
    return prompts


def chosen_load(args: argparse.Namespace) -> tuple[list[Prompt], list[float] | None]:
    """What the flags ask for, and when it is sent where the load itself says so. Raises `InvalidConfiguration`."""
    if (args.trace is not None) != (args.workload is OnlineWorkload.TRACE):
        raise InvalidConfiguration("--trace FILE and --workload trace go together", param="trace")
    refuse_unread(args, READERS)
    if args.prompts is not None:
        _check_prompts_alone(args)
        return read_prompts(args.prompts, args.output_len or OUTPUT_LEN), None
    num_prompts, input_len, output_len = (
        args.num_prompts or NUM_PROMPTS,
        args.input_len or INPUT_LEN,
        args.output_len or OUTPUT_LEN,
    )
    match args.workload:
        case OnlineWorkload.TRACE:
            return bench_workloads.read_trace(args.trace, vocab_size=args.vocab_size, seed=args.seed)
        case OnlineWorkload.CHAT:
            return bench_workloads.chat(num_prompts, vocab_size=args.vocab_size, seed=args.seed), None
        case OnlineWorkload.SHARED_PREFIX:
            prompts = bench_workloads.shared_prefix(
                num_prompts,
                num_prefixes=args.num_prefixes or NUM_PREFIXES,
                prefix_len=args.prefix_len or PREFIX_LEN,
                input_len=input_len,
                output_len=output_len,
                vocab_size=args.vocab_size,
                seed=args.seed,
            )
            return prompts, None
    items = workload.uniform(num_prompts, input_len, output_len, vocab_size=args.vocab_size, seed=args.seed)
    return [Prompt(list(item.prompt), item.output_len) for item in items], None


def _check_prompts_alone(args: argparse.Namespace) -> None:
    """Raises `InvalidConfiguration` for what a file of prompts leaves no room for."""
    given = [flag_of(name) for name in IN_FILE if getattr(args, name) is not None]
    if args.workload is not OnlineWorkload.RANDOM:
        given.append("--workload")
    if given:
        raise InvalidConfiguration(f"{given[0]} means nothing to --prompts FILE", param="prompts")


def execute(args: argparse.Namespace) -> int:
    """Run the load; print the table and, as the last line, JSON. Exit code 1 if any request failed."""
    slo = bench_workloads.parse_slo(args.goodput)
    if args.plot is not None:
        bench_plot.check_plot(args.plot)
    prompts, times = chosen_load(args)
    check_reachable(args.base_url)
    model = args.model or first_model(args.base_url, args.api_key)
    if args.model is None:
        say(f"asking for {model}, which the server lists first")
    server = Server(Target.parse(args.base_url), model, args.api_key, args.ignore_eos)
    request_rate, burstiness = args.request_rate or math.inf, args.burstiness or 1.0
    result = asyncio.run(
        run_load(
            server,
            prompts,
            request_rate=request_rate,
            burstiness=burstiness,
            times=times,
            max_concurrency=args.max_concurrency,
            seed=args.seed,
            progress=True,
        )
    )
    print(result_block(result, slo))
    for error in sorted({r.error for r in result.records if r.error is not None})[:5]:
        print(f"failed: {error}")
    figures = {
        "benchmark": "online",
        "base_url": args.base_url,
        "model": model,
        "seed": args.seed,
        "request_rate": "inf" if math.isinf(request_rate) else request_rate,
        "workload": args.workload.value,
        "burstiness": burstiness,
        **result.summary(slo),
    }
    if args.result is not None:
        args.result.write_text(json.dumps(figures, indent=2) + "\n")
    if args.plot is not None and result.good:  # where nothing succeeded the lines above say why
        bench_plot.draw(result, args.plot, f"{model}: {len(prompts)} requests, {args.workload.value}", slo)
    print(json.dumps(figures))
    return 0 if len(result.good) == len(result.records) else 1
