"""What a service can be told, validated once and never changed after. Free of Ray and torch.

`serve deploy` hands the same settings over as `args` of `deploy/serve.yaml`; the `raycomb` command makes them from
flags and YAML.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from cluster.adapters.settings import check_lora_settings
from cluster.api_settings import ApiSettings
from cluster.model_settings import BUILD_EXECUTOR, ModelSettings, first_and_others
from cluster.serving.scaling import ScalingSettings
from cluster.setting_faults import told_fault
from planner.errors import InvalidConfiguration
from worker.config import EngineConfig
from worker.executor import Executor
from worker.programs.metadata import SUFFIX, read_metadata
from worker.tracing import Protocol, check_endpoint
from worker.vocabulary import VocabularySource

ExecutorFactory = Callable[[EngineConfig, VocabularySource], Executor]
"""What `ServiceConfig.executor` names."""


class ServiceConfig(BaseModel):
    """Settings of one application: workers that run a model, and gateways that speak HTTP.

    * `engine.model` is anything that `cluster.checkpoints.resolve` takes; every node resolves it for itself.
    * `http` are the settings of the HTTP endpoints, with the names and keys that clients use.
    * `num_workers` stay, unless `max_workers` is given: then there are between `min_workers` (1) and so many, as
      `scaling` says, and `num_workers` (as few as may be) to begin with.
    * `executor` is the import path of what makes an executor from an `EngineConfig` and the source of a vocabulary.
    * `data_plane_host` is the address that workers bind and gateways reach; None: the node's own, as Ray knows it.
    * `data_plane_tls` is a folder on every node with the files of `raycomb certs`; None: the data plane is plaintext.
    * `secret` authenticates gateways to workers; when it is not given, the Ray cluster's
      (`cluster.access.shared_secret`).
    * `worker_cpus`, `gateway_cpus` are what Ray reserves for one replica; a worker on CUDA also reserves one GPU.
    * `drain_timeout_s` is how long a worker or gateway that is to end waits for what runs on it.
    * `step_log` is a folder where each worker records its planner's steps, with the token ids of prompts.
    * `log_requests`: whether `raycomb serve` has a line logged of each request; under `serve deploy` Serve's own
      `logging_config` says so.
    * `otlp_endpoint`, `otlp_protocol`: where spans of requests go (`cluster.telemetry.otlp_settings`); None: there are
      none.
    * `lora_modules`: folders of adapters that every worker loads at its start, by the name that clients use.
    * `lora_folder`: below it lie the adapters that an admin may have loaded at run time; None: none may be.
    * `others`: models beside that of `engine`, each with workers of its own behind the same gateways. Instead of both,
      `models` may list all of them (`cluster.model_settings`).
    * `failover_timeout_s`, `max_failovers`, `stall_timeout_s`: see `cluster.routing.failover.FailoverLimits`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: EngineConfig
    http: ApiSettings = ApiSettings()
    num_workers: int = Field(default=1, ge=1)
    min_workers: int | None = Field(default=None, ge=1)
    max_workers: int | None = Field(default=None, ge=1)
    scaling: ScalingSettings = ScalingSettings()
    num_gateways: int = Field(default=1, ge=1)
    executor: str = Field(default=BUILD_EXECUTOR, pattern=r"^[\w.]+:\w+$")
    data_plane_host: str | None = None
    data_plane_tls: str | None = None
    secret: SecretStr = Field(default_factory=lambda: SecretStr(secrets.token_hex(32)))
    worker_cpus: float = Field(default=0.5, gt=0)
    gateway_cpus: float = Field(default=0.25, gt=0)
    drain_timeout_s: float = Field(default=30.0, gt=0)
    step_log: str | None = None
    log_requests: bool = False
    otlp_endpoint: Annotated[str, AfterValidator(check_endpoint)] | None = None
    otlp_protocol: Protocol = "grpc"
    lora_modules: Mapping[str, str] = Field(default_factory=dict)
    lora_folder: str | None = None
    others: tuple[ModelSettings, ...] = ()
    failover_timeout_s: float = Field(default=60.0, gt=0)
    max_failovers: int = Field(default=3, ge=0)
    stall_timeout_s: float = Field(default=60.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _begin_with_the_fewest(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and settings.get("min_workers") is not None:
            return {"num_workers": settings["min_workers"], **settings}
        return settings

    @model_validator(mode="before")
    @classmethod
    def _list_of_models(cls, settings: Any) -> Any:
        """Raises `InvalidConfiguration`. It is the last of these, and so the first to look."""
        return first_and_others(settings) if isinstance(settings, dict) else settings

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
        """Raises `InvalidConfiguration` with the numbers that contradict each other."""
        if self.max_workers is None:
            if self.min_workers is not None:
                raise InvalidConfiguration(
                    f"min_workers is {self.min_workers} and max_workers is not given: say both, or num_workers alone",
                    param="min_workers",
                )
        elif not (self.min_workers or 1) <= self.num_workers <= self.max_workers:
            raise InvalidConfiguration(
                f"min_workers ({self.min_workers or 1}) <= num_workers ({self.num_workers}) <= max_workers "
                f"({self.max_workers}) must hold",
                param="max_workers",
            )
        return self

    @model_validator(mode="after")
    def _adapters_agree(self) -> Self:
        """Raises `InvalidConfiguration`."""
        names = {self.model_name, *self.http.served_model_names}
        has_admin = bool(self.http.admin_keys)
        check_lora_settings(self.engine, self.lora_modules, self.lora_folder, names, has_admin=has_admin)
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        """Raises `InvalidConfiguration` for a name that two models, or a model and an adapter, go by."""
        if not self.others:
            return self
        taken: set[str] = set()
        for one in self.each:
            names = {*(one.http.served_model_names or (one.model_name,)), *one.lora_modules}
            if both := sorted(names & taken):
                raise InvalidConfiguration(f"two models go by the name {both[0]!r}", param="served_model_names")
            taken |= names
        return self

    @property
    def each(self) -> tuple[ServiceConfig, ...]:
        """For each model, the first one first, the configuration of a service that has no other."""
        return (self.model_copy(update={"others": ()}), *(self._alone(other) for other in self.others))

    def _alone(self, model: ModelSettings) -> ServiceConfig:
        """Raises `InvalidConfiguration` where its own settings contradict each other."""
        told = {name: getattr(model, name) for name in ModelSettings.model_fields if name in model.model_fields_set}
        told.pop("served_model_names", None)
        http = self.http.model_copy(update={"served_model_names": model.served_model_names})
        shared = {name: getattr(self, name) for name in _SHARED}
        return ServiceConfig(**shared | told | {"http": http})

    @property
    def most_workers(self) -> int:
        """Of this model. There are never more, but for those that drain."""
        return self.max_workers or self.num_workers

    @property
    def program(self) -> str:
        """What workers run, in words: they may take over each other's sequences where this is the same."""
        engine = self.engine
        return f"{engine.model} ({engine.load_format} weights, seed {engine.seed}) in {self.executor}"

    @property
    def model_name(self) -> str:
        """The name that the service answers with: the first given one, else the model's own.

        A hub id and a built-in name are served as they are; of files only the last part tells clients anything.
        """
        names, model = self.http.served_model_names, PurePath(self.engine.model)
        if names:
            return names[0]
        is_file = model.is_absolute() or model.suffix in (".gguf", SUFFIX)
        return model.name.removesuffix(".gguf").removesuffix(SUFFIX) if is_file else str(model)

    @property
    def model_names(self) -> str:
        """All of them, for people."""
        return ", ".join(one.model_name for one in self.each)

    def with_secret(self, secret: str | None) -> ServiceConfig:
        """The same service with `secret`, unless one was given or there is none."""
        if secret is None or "secret" in self.model_fields_set:
            return self
        return self.model_copy(update={"secret": SecretStr(secret)})

    def with_threads(self, num_threads: int) -> ServiceConfig:
        """The same service with so many threads for every engine on a CPU that left it open."""

        def decided(engine: EngineConfig) -> EngineConfig:
            is_open = engine.device == "cpu" and engine.num_threads is None
            return engine.model_copy(update={"num_threads": num_threads}) if is_open else engine

        return self.with_engines(decided)

    def on(self, device: Literal["cpu", "cuda"]) -> ServiceConfig:
        """The same service with the device decided of every engine that left it open."""

        def decided(engine: EngineConfig) -> EngineConfig:
            return engine.model_copy(update={"device": device}) if engine.device == "auto" else engine

        return self.with_engines(decided)

    def with_engines(self, change: Callable[[EngineConfig], EngineConfig]) -> ServiceConfig:
        """The same service with the settings of each engine as `change` makes them."""
        others = tuple(other.model_copy(update={"engine": change(other.engine)}) for other in self.others)
        return self.model_copy(update={"engine": change(self.engine), "others": others})


_SHARED = tuple(ServiceConfig.model_fields.keys() - ModelSettings.model_fields.keys() - {"others", "http"})
"""Settings of a service that are no single model's."""


def service_config(settings: dict[str, Any]) -> ServiceConfig:
    """Validate settings from outside. Raises `InvalidConfiguration` that names the setting at fault."""
    try:
        return ServiceConfig.model_validate(settings)
    except ValidationError as fault:
        name = ".".join(map(str, fault.errors()[0]["loc"]))
        raise InvalidConfiguration(told_fault(fault), param=name) from fault


def on_device_of_program(engine: EngineConfig) -> EngineConfig:
    """An engine of a program that leaves its device open runs where the program was made for. Raises `InvalidProgram`
    where the file is none."""
    if engine.device != "auto" or PurePath(engine.model).suffix != SUFFIX:
        return engine
    return engine.model_copy(update={"device": read_metadata(Path(engine.model)).device})


def decide_device(config: ServiceConfig, resources: Mapping[str, float]) -> Literal["cpu", "cuda"]:
    """What was asked for; "auto" is CUDA if the cluster has a GPU now, of which each worker gets one to itself."""
    devices = [one.engine.device for one in config.each]
    if "auto" not in devices and config.engine.device != "auto":
        return config.engine.device
    num_gpus = int(resources.get("GPU", 0))
    num_needed = sum(one.num_workers for one in config.each if one.engine.device != "cpu")
    if 0 < num_gpus < num_needed:
        raise InvalidConfiguration(
            f"{num_needed} workers need a GPU each and the cluster has {num_gpus}: "
            "ask for fewer workers, or say device cpu, or, in a cluster that grows, cuda to wait for more GPUs",
            param="num_workers",
        )
    return "cuda" if num_gpus else "cpu"


def check_gpus(config: ServiceConfig, resources: Mapping[str, float]) -> None:
    """Raises `InvalidConfiguration` where workers would wait for GPUs that a cluster with these never gets."""
    num_gpus = int(resources.get("GPU", 0))
    num_needed = sum(one.num_workers for one in config.each if one.engine.device == "cuda")
    if num_needed > num_gpus:
        raise InvalidConfiguration(
            f"device is cuda, so workers need {num_needed} GPUs, and this machine has {num_gpus} that Ray knows of: "
            "`nvidia-smi` must list them; without any, say device cpu",
            param="device",
        )


def decide_devices(config: ServiceConfig, resources: Mapping[str, float]) -> ServiceConfig:
    """The same service with each engine's device decided, for a cluster with these resources."""
    known = config.with_engines(on_device_of_program)
    return known.on(decide_device(known, resources))


def load_executor_factory(path: str) -> ExecutorFactory:
    """What the import path `module:name` names. Raises `InvalidConfiguration` where there is no such thing."""
    module_name, _, name = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise InvalidConfiguration(f"executor {path} cannot be imported: {error}", param="executor") from error
    if not callable(factory):
        raise InvalidConfiguration(f"executor {path} is not callable", param="executor")
    made: ExecutorFactory = factory
    return made
