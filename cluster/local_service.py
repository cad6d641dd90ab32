"""A service started from this terminal: Ray if there is none, the application on it, and all of it gone at the end.

With RAY_ADDRESS set it joins that cluster and, at the end, removes the application and leaves the cluster alone.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray import serve
from ray.serve import Application
from ray.serve.schema import ApplicationStatusOverview, LoggingConfig

from cluster.app import build_application, decide_device
from cluster.ask import ask, is_ready
from cluster.config import ServiceConfig
from cluster.deploy_errors import setup_error_in
from cluster.front import check_port
from cluster.stop_signals import StopSignals
from planner.errors import SetupError

APP_NAME = "raycomb"
OBJECT_STORE_BYTES = 80 * 2**20
"""Nothing of ours goes through Ray's object store; this is about the least that Ray takes."""
POLL_S = 0.25
SHUTDOWN_MARGIN_S = 10.0


def report(line: str) -> None:
    """Progress for a person at the terminal."""
    print(f"raycomb: {line}", flush=True)


class LocalService:
    """One run of `raycomb serve`. Owner: the main thread, which waits; Serve's blocking calls run on other threads."""

    def __init__(self, config: ServiceConfig, *, host: str, port: int) -> None:
        self._config = config
        self._host = host
        self._port = port
        self._joins_cluster = bool(os.environ.get("RAY_ADDRESS"))
        self._signals = StopSignals()

    @property
    def url(self) -> str:
        """Where this machine reaches the service."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self._host, self._host)
        return f"http://{host}:{self._port}"

    def run(self, question: str | None) -> int:
        """Serve until a signal comes, or only until `question` is answered; the exit code.

        Raises `SetupError` when the service cannot start; nothing is then left of it.
        """
        check_port(self._host, self._port)
        with self._signals, self._cluster():
            self._signals.install()
            config = self._on_this_machine()
            with self._application(build_application(config)) as failure:
                if not self._wait_until_ready(config, failure):
                    return 130
                if question is not None:
                    key = config.http.api_keys[0] if config.http.api_keys else None
                    return ask(self.url, config.model_name, question, key)
                self._greet(config)
                self._signals.wanted.wait()
        return 0

    @contextmanager
    def _cluster(self) -> Iterator[None]:
        """Ray: the cluster of RAY_ADDRESS, or one of our own that ends with us."""
        config = self._config
        if self._joins_cluster:
            ray.init(log_to_driver=False, logging_level="WARNING")
        else:
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a cluster for this machine alone
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            needed = math.ceil(config.num_workers * config.worker_cpus + config.num_gateways * config.gateway_cpus)
            report("starting Ray")
            ray.init(
                address="local",
                num_cpus=max(needed, len(os.sched_getaffinity(0))),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level="WARNING",
            )
        try:
            yield
        finally:
            ray.shutdown()

    def _on_this_machine(self) -> ServiceConfig:
        """The service with its device decided and, on the CPUs of a cluster of our own, the cores shared out."""
        config = self._config.on(decide_device(self._config, ray.cluster_resources()))
        if self._joins_cluster or config.engine.device != "cpu" or config.engine.num_threads is not None:
            return config
        num_threads = max(1, len(os.sched_getaffinity(0)) // config.num_workers)
        return config.model_copy(update={"engine": config.engine.model_copy(update={"num_threads": num_threads})})

    @contextmanager
    def _application(self, application: Application) -> Iterator[list[BaseException]]:
        """The application while it is deployed; what deploying it raised appears in the list."""
        failure: list[BaseException] = []

        def deploy() -> None:
            try:
                serve.run(application, name=APP_NAME, route_prefix="/")
            except BaseException as error:  # noqa: BLE001 - handed to the main thread
                failure.append(error)

        serve.start(
            http_options={"host": self._host, "port": self._port},
            logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
        )
        thread = threading.Thread(target=deploy, name="deploy", daemon=True)
        thread.start()
        try:
            yield failure
        finally:
            report("shutting down")
            end = self._remove_application if self._joins_cluster else serve.shutdown
            ending = threading.Thread(target=end, name="shutdown", daemon=True)
            ending.start()
            ending.join(self._config.drain_timeout_s + SHUTDOWN_MARGIN_S)

    @staticmethod
    def _remove_application() -> None:
        serve.delete(APP_NAME)

    def _wait_until_ready(self, config: ServiceConfig, failure: list[BaseException]) -> bool:
        """Tell of progress until a client would be served; False if a signal came first.

        Raises the `SetupError` that keeps workers from starting, as soon as one says so.
        """
        started_at, last_line = time.monotonic(), ""
        report(f"loading {config.engine.model} on {config.engine.device}")
        while not self._signals.wanted.wait(POLL_S):
            overview = serve.status().applications.get(APP_NAME)
            if overview is not None:
                self._raise_setup_error(overview, failure)
                line = _progress(overview, config)
                if line != last_line:
                    report(f"{line} ({time.monotonic() - started_at:.0f} s)")
                    last_line = line
            if overview is not None and overview.status == "RUNNING" and is_ready(self.url):
                return True
            if failure and overview is None:
                raise SetupError(f"the application could not be deployed: {failure[0]}") from failure[0]
        return False

    @staticmethod
    def _raise_setup_error(overview: ApplicationStatusOverview, failure: list[BaseException]) -> None:
        messages = [overview.message, *(deployment.message for deployment in overview.deployments.values())]
        for message in messages:
            if (error := setup_error_in(message)) is not None:
                raise error
        if overview.status == "DEPLOY_FAILED" or failure:
            raise SetupError(f"the application could not be deployed: {' '.join(messages) or failure}")

    def _greet(self, config: ServiceConfig) -> None:
        report(f"ready at {self.url} (Ctrl-C ends it)")
        key = ' -H "Authorization: Bearer $KEY"' if config.http.api_keys else ""
        body = f'{{"model": "{config.model_name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        print(f"\n  curl {self.url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n    -d '{body}'\n")


def _progress(overview: ApplicationStatusOverview, config: ServiceConfig) -> str:
    wanted = {"Worker": config.num_workers, "Gateway": config.num_gateways}
    running = {name: each.replica_states.get("RUNNING", 0) for name, each in overview.deployments.items()}
    parts = [f"{name.lower()}s ready {running.get(name, 0)}/{count}" for name, count in wanted.items()]
    return ", ".join(parts)
