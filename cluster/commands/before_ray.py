"""What `raycomb serve` can know to be wrong before Ray is started: each a `SetupError` of one sentence.

With RAY_ADDRESS set workers run elsewhere, so this machine's GPUs and folders say nothing of theirs. What only a worker
can tell, since it takes the weights or the device, comes later (`cluster.commands.local_service`).
"""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from cluster.access.certificate_check import check_certificates
from cluster.checkpoints import resolve
from cluster.commands.cluster_address import check_cluster_address
from cluster.commands.terminal import report
from cluster.config import ServiceConfig, check_gpus, decide_devices
from cluster.language.text import load_text
from cluster.model_settings import BUILD_EXECUTOR
from cluster.serving.gpus import num_gpus
from cluster.version import installed_version
from planner.errors import InvalidAdapter, InvalidConfiguration
from worker.config import EngineConfig
from worker.models.config import check_gguf_architecture, read_config
from worker.models.lora_config import WEIGHTS_FILE, read_lora_config
from worker.models.safetensors_files import check_files
from worker.programs.asked import check_asked, check_torch
from worker.programs.metadata import SUFFIX, read_metadata
from worker.settings_check import check_settings


def check_before_ray(service: ServiceConfig, ray_address: str | None) -> None:
    """Raises `SetupError` for the first thing that is wrong: settings, this machine or the cluster's address, adapters,
    and at last the models, which are fetched if need be."""
    if service.data_plane_tls is not None:
        check_certificates(Path(service.data_plane_tls), datetime.now(UTC))
    if ray_address is not None:
        check_cluster_address(ray_address)
    else:
        _check_folder("step_log", service.step_log)
        _check_folder("batch_store", service.http.batch_store)
        _check_address(service.data_plane_host)
        service = _with_devices_of_this_machine(service)
    for one in service.each:
        _check_adapters(one)
    for one in service.each:
        _check_model(one)


def _with_devices_of_this_machine(service: ServiceConfig) -> ServiceConfig:
    resources = {"GPU": float(num_gpus())}
    decided = decide_devices(service, resources)
    check_gpus(decided, resources)
    return decided


def _check_model(service: ServiceConfig) -> None:
    """Fetch one model if need be, and refuse what a gateway or worker would refuse."""
    engine = service.engine
    path = resolve(engine.model, report)
    load_text(path)
    if service.executor != BUILD_EXECUTOR:
        return
    if path.suffix == SUFFIX:
        metadata = read_metadata(path)
        check_asked(metadata, engine)
        if (version := installed_version("torch")) is not None:
            check_torch(metadata, version.partition("+")[0])
        return
    device: Literal["cpu", "cuda"] | None = None if engine.device == "auto" else engine.device
    check_settings(engine, _context(path, engine), device)


def _context(path: Path, engine: EngineConfig) -> int:
    """Tokens that the model was made for. Raises `SetupError` where its files are not whole or its kind is unknown."""
    if path.suffix == ".gguf":
        from worker.gguf_tensors import GgufTensors  # a library that no other command needs

        metadata = GgufTensors(path).metadata
        architecture = metadata.get("general.architecture")
        check_gguf_architecture(architecture)
        context = metadata.get(f"{architecture}.context_length")
        if not isinstance(context, int):
            raise InvalidConfiguration(f"{path.name} has no {architecture}.context_length", param="model")
        return context
    config = read_config(path)
    if engine.load_format != "dummy":
        check_files(path)
    return config.context


def _check_adapters(service: ServiceConfig) -> None:
    most = service.engine.max_lora_rank
    for name, folder in service.lora_modules.items():
        config = read_lora_config(Path(folder))
        if config.rank > most:
            raise InvalidAdapter(
                f"the adapter {name} has rank {config.rank}, and max_lora_rank is {most}", param="max_lora_rank"
            )
        if not (Path(folder) / WEIGHTS_FILE).is_file():
            raise InvalidAdapter(f"the adapter {name} has no {WEIGHTS_FILE} in {folder}", param="lora_modules")


def _check_folder(name: str, folder: str | None) -> None:
    """One that there is, or that can be made."""
    if folder is None:
        return
    nearest = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    if not nearest.is_dir():
        raise InvalidConfiguration(f"{name} is {folder}, and {nearest} is not a folder", param=name)
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InvalidConfiguration(f"{name} is {folder}, and {nearest} may not be written to", param=name)


def _check_address(host: str | None) -> None:
    if host is None:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise InvalidConfiguration(
                f"data_plane_host is {host}, where this machine cannot listen: {error.strerror}",
                param="data_plane_host",
            ) from error
