"""The bodies by which an operator loads and unloads adapters, with vLLM's names."""

from __future__ import annotations

from protos.openai_body import Body


class LoadAdapterBody(Body):
    """`lora_path` lies below the folder that the operator named; `base_model_name`: of several models, which one's."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None


class UnloadAdapterBody(Body):
    """`base_model_name` as above."""

    lora_name: str
    base_model_name: str | None = None
