"""The worker as a Serve deployment: one replica, one engine, one pool of cells.

Serve places, checks and replaces it; tokens go over its own data plane (`worker.serving`). Its process is the only
kind in an application that loads torch, and only when the executor is made.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Final

from ray import serve

from cluster.adapters.catalogue import AdapterCatalogue
from cluster.adapters.keeper import AdapterKeeper
from cluster.adapters.store import KvAdapterStore
from cluster.checkpoints import resolve
from cluster.config import ServiceConfig
from cluster.engine_factory import make_engine
from cluster.serving.node_address import node_address
from cluster.serving.scaling import load_report
from cluster.telemetry.metric import Source
from cluster.telemetry.ray_metrics import RayMetrics
from cluster.telemetry.service_metrics import worker_labels
from cluster.telemetry.worker_metrics import worker_samples
from cluster.web.debug_views import View, worker_view
from planner.limits import Snapshot
from worker.engine import EngineState
from worker.heap import settle
from worker.serving import DataPlaneServer
from worker.tls import server_credentials
from worker.tracing import open_tracing

logger = logging.getLogger("ray.serve")

EXIT_CODE_OF_DEAD_ENGINE: Final = 70
STOP_GRACE_S: Final = 2.0
INSPECT_WITHIN_S: Final = 5.0


class Worker:
    """Serve owns it and calls every method on one event loop; the engine has its own thread.

    The replica is its identity: a replaced worker is another worker.
    """

    async def __init__(self, config: ServiceConfig) -> None:  # type: ignore[misc]
        """Load the model and listen. Raises a `SetupError` where the model or the settings do not allow it."""
        started_at = time.monotonic()
        self._config = config
        self.worker_id = serve.get_replica_context().replica_tag
        model = await asyncio.to_thread(resolve, config.engine.model, logger.info)
        settings = config.engine.model_copy(update={"model": str(model)})
        step_log = None if config.step_log is None else Path(config.step_log) / f"{self.worker_id}.jsonl"
        self._tracing = open_tracing(config.otlp_endpoint, config.otlp_protocol, "raycomb-worker", self.worker_id)
        self._engine = make_engine(settings, self._end_process, config.executor, step_log, self._tracing.tracer)
        info = await asyncio.to_thread(self._engine.start)
        host = config.data_plane_host or node_address()
        self._server = DataPlaneServer(
            self._engine,
            info,
            self.worker_id,
            config.secret.get_secret_value(),
            max_num_seqs=settings.max_num_seqs,
            host=host,
            credentials=None if config.data_plane_tls is None else server_credentials(Path(config.data_plane_tls)),
        )
        self._adapters = await self._open_adapters()
        self.address = await self._server.start()
        labels = worker_labels(config.model_name, self.worker_id)
        self._ray_metrics = RayMetrics(
            lambda: [Source(labels, worker_samples(self._engine.snapshot, self._server.totals))]
        )
        self._ray_metrics.start()
        settle()
        logger.info(
            "worker ready after %.1f s: %s, %s on %s, %d cells",
            time.monotonic() - started_at,
            info.architecture,
            info.dtype,
            info.device,
            info.num_cells,
        )

    async def _open_adapters(self) -> AdapterKeeper | None:
        """Load the adapters that there are to be, and follow what becomes of them. Raises `InvalidAdapter`."""
        config, context = self._config, serve.get_replica_context()
        if not config.engine.enable_lora:
            return None
        catalogue = AdapterCatalogue(config.lora_modules, KvAdapterStore(context.app_name, context.deployment))
        keeper = AdapterKeeper(self._engine, catalogue, config.lora_folder)
        await keeper.begin()
        keeper.start()
        return keeper

    async def sync_adapters(self) -> dict[str, str]:
        """Have those adapters that the catalogue wants now; what could not be loaded, and why. Asked over a Serve
        handle by a gateway that changed it."""
        return {} if self._adapters is None else await self._adapters.sync()

    def record_replica_metadata(self) -> dict[str, str]:
        """What gateways learn of this replica from Serve, once; see `cluster.routing.membership_router`."""
        return {"worker_id": self.worker_id, "address": self.address, "program": self._config.program}

    async def check_health(self) -> None:
        if self._engine.state in (EngineState.DEAD, EngineState.STOPPED):
            raise RuntimeError(f"the engine is {self._engine.state.value}")
        if self._hangs:
            raise RuntimeError(f"the engine has not got on for {self._server.engine_quiet_s:.0f} s")

    @property
    def _hangs(self) -> bool:
        return self._server.engine_quiet_s >= self._config.stall_timeout_s

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `cluster.serving.scaling_policy` decides by; Serve asks now and then."""
        return load_report(self._engine.snapshot, self._config.engine.max_num_seqs)

    async def num_live(self) -> int:
        """Requests that run or wait here."""
        return self._engine.num_live

    async def snapshot(self) -> Snapshot:
        """Cells and sequences after the last step; asked over a Serve handle by whoever checks them."""
        return self._engine.snapshot

    async def inspect(self, num_steps: int) -> View:
        """What it holds, with so many of its last steps explained; asked over a Serve handle by a gateway.

        Raises `TimeoutError` when the engine does not come to it.
        """
        async with asyncio.timeout(INSPECT_WITHIN_S):
            view = await asyncio.wrap_future(self._engine.inspect())
        return await asyncio.to_thread(worker_view, self.worker_id, view, num_steps)

    async def __del__(self) -> None:
        """Serve's shutdown hook: gateways have left already, or leave at the drain. Runs once, before the process ends.

        A replica whose constructor failed has nothing to drain.
        """
        if not hasattr(self, "_server"):
            return
        if self._hangs:  # gateways go on elsewhere; here nothing would ever end, and its thread cannot be joined
            await self._server.stop(STOP_GRACE_S)
            return
        if not await self._server.drain(self._config.drain_timeout_s):
            logger.warning("worker ends with %d requests unfinished", self._engine.num_live)
        if self._adapters is not None:
            await self._adapters.close()
        await self._ray_metrics.stop()
        await asyncio.to_thread(self._engine.stop)
        await self._server.stop(STOP_GRACE_S)
        await asyncio.to_thread(self._tracing.close)

    def _end_process(self, error: BaseException) -> None:
        """A dead engine ends its process, so that Serve replaces the worker at once and nobody waits for it.

        Called on the engine thread after every request was told; the pause lets the data plane send that.
        """
        logger.error("the engine died, the worker's process ends", exc_info=error)
        time.sleep(0.5)
        self._tracing.flush()
        os._exit(EXIT_CODE_OF_DEAD_ENGINE)
