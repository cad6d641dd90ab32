"""What a gateway learns of its workers for its metrics, over real gRPC, with a scripted worker at the other end."""

from __future__ import annotations

import grpc
import pytest

from cluster.routing.membership import Member
from cluster.routing.router import Router
from cluster.routing.streams import Streams
from cluster.telemetry.gateway_meter import GatewayMeter
from planner.errors import NeverFits
from planner.request import FinishReason
from protos import worker_pb2 as pb
from tests.data_plane import SECRET, attached, serving
from tests.scripted_worker import ScriptedWorker, fleet_of, request, tokens, until

SNAPSHOT = pb.Snapshot(capacity=1000, free_cells=900, owned_cells=100, num_running=2, step=1)


async def test_a_worker_is_reported_with_its_last_snapshot_and_its_last_totals() -> None:
    worker = ScriptedWorker()
    async with fleet_of(worker) as streams:
        assert streams.reports == []
        worker.say_totals(pb.Totals(tokens_generated=7), SNAPSHOT)
        worker.say(snapshot=pb.Snapshot(capacity=1000, free_cells=1000, step=2, draining=True))
        await until(lambda: bool(streams.reports) and streams.reports[0].snapshot.step == 2)
        (report,) = streams.reports
        assert report.info.worker_id == "w0"
        assert report.draining
        assert (report.snapshot.free_cells, report.totals.tokens_generated) == (1000, 7)


async def test_a_worker_whose_stream_broke_is_reported_no_more() -> None:
    worker, meter = ScriptedWorker(), GatewayMeter()
    async with fleet_of(worker, meter=meter) as streams:
        worker.say(snapshot=SNAPSHOT)
        await until(lambda: bool(streams.reports))
        worker.hang_up()
        await until(lambda: not streams.reports)
        assert meter.num_workers_lost == 1


async def test_the_end_of_a_gateway_is_no_loss_of_workers() -> None:
    worker, meter = ScriptedWorker(), GatewayMeter()
    async with fleet_of(worker, meter=meter):
        pass
    assert meter.num_workers_lost == 0


async def test_a_cancel_is_timed_until_the_worker_has_ended_every_sequence() -> None:
    worker, meter = ScriptedWorker(), GatewayMeter()
    async with fleet_of(worker, meter=meter) as streams:
        generation = streams.submit(request(n=2))
        await worker.heard()
        generation.cancel()
        await worker.heard()
        worker.say(tokens(5, finish=FinishReason.CANCELLED), snapshot=SNAPSHOT)
        await until(lambda: bool(streams.reports))
        assert meter.free.distribution.count == 0
        worker.say(tokens(6, index=1, finish=FinishReason.STOP))
        await until(lambda: meter.free.distribution.count == 1)


async def test_a_cancel_that_crosses_a_refusal_ends_with_it() -> None:
    worker, meter = ScriptedWorker(), GatewayMeter()
    async with fleet_of(worker, meter=meter) as streams:
        generation = streams.submit(request(n=3))
        await worker.heard()
        generation.cancel()
        worker.say(NeverFits("too long"))
        await until(lambda: meter.free.distribution.count == 1)


async def test_sequences_that_go_on_elsewhere_are_counted() -> None:
    workers, meter = [ScriptedWorker("w0"), ScriptedWorker("w1")], GatewayMeter()
    async with fleet_of(*workers, meter=meter) as streams:
        generation = streams.submit(request(n=2))
        await until(lambda: any(not worker.commands.empty() for worker in workers))
        first, second = workers if not workers[0].commands.empty() else reversed(workers)
        first.say(tokens(5), tokens(6, index=1))
        assert len(await generation.next()) == 2
        first.hang_up()
        await second.heard()
        await second.heard()
        assert (meter.num_failovers, meter.num_workers_lost) == (2, 1)


async def test_streams_of_strangers_are_refused_and_counted_though_nothing_runs() -> None:
    async with serving() as worker:
        streams = Streams("tiny", SECRET, Router(max_waiting=16))
        try:
            streams.set_members({"worker-1": Member("worker-1", worker.address)})
            await until(lambda: bool(streams.reports))
            for number, secret in enumerate((None, "", "wrong", SECRET[:-1], SECRET + "x"), start=1):
                async with attached(worker.address, secret) as stranger:
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await stranger.read()
                    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
                await until(lambda number=number: streams.reports[0].totals.streams_refused == number)  # type: ignore[misc]
            assert worker.server.totals.streams_refused == 5
            assert len(streams.reports) == 1, "those that know it stay"
        finally:
            await streams.close()
