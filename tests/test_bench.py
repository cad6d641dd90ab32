"""The online benchmark: loads, the client that times, and the figures made of it."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench import online as bench_online
from cluster.bench import workload
from cluster.bench.latency import LoadResult, RequestRecord, Spread, result_block
from cluster.bench.online import Server, run_load
from cluster.bench.sse_client import ChunkedBody, EventLines, Target
from cluster.bench.workloads import Prompt, arrivals
from planner.errors import InvalidConfiguration

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
Answer = Callable[[dict[str, object], asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(message: object) -> bytes:
    return chunk(b"data: " + json.dumps(message).encode() + b"\n\n")


def token(text: str = "a") -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None})


def end(prompt_tokens: int, completion_tokens: int) -> bytes:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event({"choices": [], "usage": usage}) + chunk(b"data: [DONE]\n\n") + chunk(b"")


@asynccontextmanager
async def scripted_server(answer: Answer) -> AsyncIterator[Target]:
    """An HTTP server that reads one request a connection and lets `answer` write the bytes of its response."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in head.split(b"\r\n") if line.startswith(b"content-length")]
        await answer(json.loads(await reader.readexactly(int(lengths[0].split(b":")[1]))), writer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Target.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def load(answer: Answer, num_prompts: int = 1, **options: object) -> LoadResult:
    async with scripted_server(answer) as target:
        return await run_load(Server(target, "m"), [Prompt([5, 6, 7], 4)] * num_prompts, **options)  # type: ignore[arg-type]


async def test_tokens_are_counted_by_usage_and_not_by_events() -> None:
    async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + token() + token() + end(3, 4))

    (record,) = (await load(answer)).records
    assert (record.error, record.num_input, record.num_output, len(record.events)) == (None, 3, 4, 2)


async def test_the_body_asks_for_a_stream_with_usage_and_the_whole_answer() -> None:
    bodies = []

    async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        bodies.append(body)
        writer.write(HEAD + token() + end(3, 1))

    await load(answer)
    assert bodies == [
        {
            "model": "m",
            "prompt": [5, 6, 7],
            "max_tokens": 4,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ]


async def test_a_refused_request_is_a_record_with_the_servers_words() -> None:
    async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nfull")

    (record,) = (await load(answer)).records
    assert record.error == "HttpError: status 429: full"


@pytest.mark.parametrize(
    ("response", "why"),
    [
        (HEAD + token(), "the stream ended before [DONE]"),
        (HEAD + event({"error": {"message": "worker lost"}}), "worker lost"),
        (HEAD + end(3, 0), "the stream held no token"),
        (b"", "without an answer"),
        (b"SSH-2.0\r\n\r\n", "not an HTTP answer"),
        (HEAD + chunk(b"data: {broken\n\n"), "JSONDecodeError"),
    ],
)
async def test_a_broken_stream_is_a_failed_request(response: bytes, why: str) -> None:
    async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(response)

    result = await load(answer)
    assert why in str(result.records[0].error)
    assert result.good == []


async def test_no_more_requests_are_in_flight_than_allowed() -> None:
    running = peak = 0

    async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        writer.write(HEAD + token())
        await writer.drain()
        await asyncio.sleep(0.005)
        running -= 1
        writer.write(end(3, 1))

    result = await load(answer, num_prompts=12, max_concurrency=3)
    assert len(result.good) == 12
    assert peak == 3


async def test_an_unreachable_server_fails_each_request_and_raises_nothing() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    result = await run_load(Server(Target.parse(f"http://127.0.0.1:{port}"), "m"), [Prompt("x", 1)] * 2)
    assert [r.error is not None for r in result.records] == [True, True]


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(1, 30), min_size=1))
def test_chunk_framing_is_taken_off_however_the_bytes_were_cut(parts: list[bytes], cuts: list[int]) -> None:
    wire = b"".join(map(chunk, parts)) + chunk(b"")
    body, out, i = ChunkedBody(), b"", 0
    while wire:
        cut = cuts[i % len(cuts)]
        out, wire, i = out + body.feed(wire[:cut]), wire[cut:], i + 1
    assert out == b"".join(parts)
    assert body.ended


def test_event_payloads_survive_any_cut_and_other_lines_are_passed_over() -> None:
    wire = b": comment\r\ndata: one\r\n\r\nevent: x\ndata:two\n\n"
    for cut in range(len(wire)):
        lines = EventLines()
        assert lines.feed(wire[:cut]) + lines.feed(wire[cut:]) == [b"one", b"two"]


def test_a_base_url_keeps_its_prefix_and_gets_its_schemes_port() -> None:
    target = Target.parse("https://example.org/api/")
    assert (target.host, target.port, target.prefix, target.tls is None) == ("example.org", 443, "/api", False)
    with pytest.raises(InvalidConfiguration, match="localhost:8000"):
        Target.parse("localhost:8000")


def test_an_ipv6_address_stands_in_brackets_where_its_port_follows() -> None:
    assert Target.parse("http://[::1]:8000").authority == "[::1]:8000"
    assert Target.parse("http://localhost:8000").authority == "localhost:8000"


def test_figures_are_those_of_a_hand_made_timeline() -> None:
    records = [
        RequestRecord(sent=0.0, ended=1.0, num_input=10, num_output=5, events=(0.1, 0.2, 0.5)),
        RequestRecord(sent=1.0, ended=2.0, num_input=20, num_output=1, events=(1.3,)),
        RequestRecord(sent=1.0, ended=9.0, num_input=99, num_output=3, events=(1.1,), error="lost"),
    ]
    figures = LoadResult(records, duration_s=2.0).summary()
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 6)
    assert (figures["output_throughput"], figures["total_token_throughput"]) == (3.0, 18.0)
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["mean_tpot_ms"] == pytest.approx(100)  # (0.5 - 0.1) / 4; one token has no time per further token
    assert figures["median_itl_ms"] == pytest.approx(200)


def test_percentiles_are_numpys_and_nothing_measured_is_zero() -> None:
    assert Spread.of_seconds([]) == Spread(0.0, 0.0, 0.0)
    assert Spread.of_seconds([i / 1000 for i in range(101)]).p99 == pytest.approx(99)


def test_the_block_has_the_lines_that_users_look_for() -> None:
    record = RequestRecord(sent=0.0, ended=1.0, num_input=10, num_output=2, events=(0.1, 0.2))
    block = result_block(LoadResult([record], duration_s=1.0, max_concurrency=4))
    for line in ("Successful requests:", "Output token throughput (tok/s):", "Mean TTFT (ms):", "P99 ITL (ms):"):
        assert line in block
    assert {len(line) for line in block.splitlines() if line.startswith(("=", "-"))} == {50}


def test_the_mixed_load_is_the_same_for_every_model() -> None:
    big = workload.mixed(256, (100, 1024), vocab_size=128_256, seed=0)
    small = workload.mixed(256, (100, 1024), vocab_size=500, seed=0)
    assert (workload.total_input(big), workload.total_output(big)) == (145_573, 147_164)
    assert [(len(i.prompt), i.output_len) for i in big] == [(len(i.prompt), i.output_len) for i in small]
    assert max(max(item.prompt) for item in small) < 500
    assert big != workload.mixed(256, (100, 1024), vocab_size=128_256, seed=1)


def test_a_poisson_load_has_its_rate_and_its_seed() -> None:
    times = list(arrivals(4000, 50.0, 1.0, seed=3))
    assert times == sorted(times)
    assert times[0] == 0.0
    assert 4000 / times[-1] == pytest.approx(50, rel=0.1)
    assert times == list(arrivals(4000, 50.0, 1.0, seed=3))
    assert list(arrivals(3, math.inf, 1.0, seed=3)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_that_is_not_positive_is_refused(rate: float) -> None:
    with pytest.raises(InvalidConfiguration, match="request_rate"):
        list(arrivals(2, rate, 1.0, seed=0))


def test_a_load_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="num_prompts"):
        workload.uniform(0, 1, 1, vocab_size=10, seed=0)
    with pytest.raises(InvalidConfiguration, match="longest"):
        workload.mixed(1, (5, 4), vocab_size=10, seed=0)


def online_args(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_online.add_arguments(parser)
    return parser.parse_args(["--model", "m", *words])


async def test_the_command_ends_with_one_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + token() + token() + end(2, 2))

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello", "max_tokens": 2}\n\n{"prompt_token_ids": [1, 2]}\n')
    async with scripted_server(answer) as target:
        url = f"http://{target.host}:{target.port}"
        args = online_args("--base-url", url, "--prompts", str(prompts), "--result", str(tmp_path / "r.json"))
        code = await asyncio.to_thread(bench_online.execute, args)
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert (figures["completed"], figures["total_output_tokens"], figures["request_rate"]) == (2, 4, "inf")
    assert json.loads((tmp_path / "r.json").read_text()) == figures


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"text": "b"}', "prompt is missing"),
        ("b", "it is not JSON: Expecting value: line 1 column 1"),
        ("[1]", "it is no JSON object"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(InvalidConfiguration, match=rf"prompts\.jsonl:2 is not a prompt: {why}"):
        bench_online.read_prompts(path, 16)
