"""What a service is told of one model when it serves several. Free of Ray and torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from cluster.api_settings import ServedNames
from cluster.serving.scaling import ScalingSettings
from planner.errors import InvalidConfiguration
from worker.config import EngineConfig

BUILD_EXECUTOR: Final = "worker.program:build_executor"


class ModelSettings(BaseModel):
    """One model beside the first; every setting means what it means in `cluster.config.ServiceConfig`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: EngineConfig
    served_model_names: ServedNames = ()
    num_workers: int = Field(default=1, ge=1)
    min_workers: int | None = Field(default=None, ge=1)
    max_workers: int | None = Field(default=None, ge=1)
    scaling: ScalingSettings = ScalingSettings()
    executor: str = Field(default=BUILD_EXECUTOR, pattern=r"^[\w.]+:\w+$")
    worker_cpus: float = Field(default=0.5, gt=0)
    lora_modules: Mapping[str, str] = Field(default_factory=dict)
    lora_folder: str | None = None


def first_and_others(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that name all `models` in one list, as those of the first and the `others`.

    Raises `InvalidConfiguration` where the list says nothing, or the first one is said twice.
    """
    models = settings.get("models")
    if models is None:
        return settings
    rest = {name: value for name, value in settings.items() if name != "models"}
    if not isinstance(models, list | tuple) or not all(isinstance(model, dict) for model in models) or not models:
        raise InvalidConfiguration("models must be a list of at least one model's settings", param="models")
    first, *others = models
    known = set(ModelSettings.model_fields)
    if unknown := sorted(set(first) - known):
        raise InvalidConfiguration(f"models[0]: unknown setting {unknown[0]!r}", param="models")
    if twice := sorted((known & rest.keys()) | ({"others"} & rest.keys())):
        raise InvalidConfiguration(f"{twice[0]} is given beside models: say it in the list", param=twice[0])
    first = dict(first)
    http = dict(rest.get("http") or {})
    if (names := first.pop("served_model_names", None)) is not None:
        http["served_model_names"] = names
    return rest | first | {"http": http, "others": others}
