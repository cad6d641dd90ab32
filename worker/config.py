"""What an engine can be told, validated once and never changed after. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from planner.errors import InvalidConfiguration

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["none", "int8", "int4", "fp8"]
KvCacheDtype = Literal["auto", "fp8", "bfloat16", "float16"]

# Widest prefill unless told: a GPU needs thousands of rows to be busy for longer than launching a forward takes.
CPU_PREFILL_TOKENS = 512
GPU_PREFILL_TOKENS = 8192
# GiB of host memory for preempted sequences unless told. A CPU's pool lies in the same memory: better a larger pool.
CPU_SWAP_SPACE = 0.0
GPU_SWAP_SPACE = 4.0


class EngineConfig(BaseModel):
    """Settings of one engine. None means: derived from the model and the machine when the executor is made.

    `model` is a folder with config.json and safetensors, a .gguf file, or a program (.pt2). Names are vLLM's where the
    thing is the same.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    device: Device = "auto"
    dtype: Dtype = "auto"
    load_format: LoadFormat = "auto"
    quantization: Quantization = "none"
    kv_cache_dtype: KvCacheDtype = "auto"
    max_model_len: int | None = Field(default=None, ge=1)
    max_cells: int | None = Field(default=None, ge=1)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    kv_initial_cells: int | None = Field(default=None, ge=1)
    swap_space: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    max_prefill_tokens: int | None = Field(default=None, ge=2)
    min_prefill_tokens: int = Field(default=2, ge=2)
    max_num_seqs: int = Field(default=128, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=2)
    prefill_chunk_tokens: int = Field(default=256, ge=1)
    max_waiting: int = Field(default=2048, ge=1)
    max_waiting_tokens: int = Field(default=2**24, ge=1)
    tenant_weights: Mapping[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    prefix_caching: bool = True
    cuda_graph: bool = True
    enable_lora: bool = False
    max_loras: int = Field(default=8, ge=1)
    max_lora_rank: int = Field(default=16, ge=1)
    num_threads: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**64)

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        """Raises `InvalidConfiguration`, so that a contradiction is told before anything is loaded."""
        w, m = self.max_prefill_tokens or CPU_PREFILL_TOKENS, self.min_prefill_tokens
        if m > w:
            raise InvalidConfiguration(
                f"min_prefill_tokens must lie in [2, max_prefill_tokens = {w}], not {m}", param="min_prefill_tokens"
            )
        if self.batched_tokens(w) <= self.max_num_seqs:
            raise InvalidConfiguration(
                f"max_num_batched_tokens ({self.batched_tokens(w)}) must exceed max_num_seqs ({self.max_num_seqs}), "
                "else decodes could starve prefills for ever",
                param="max_num_batched_tokens",
            )
        return self

    def batched_tokens(self, max_prefill_tokens: int) -> int:
        """Tokens of one step: given, or a full prefill, but no fewer than twice the decodes that may run."""
        return self.max_num_batched_tokens or max(max_prefill_tokens, 2 * self.max_num_seqs)

    @property
    def decode_widths(self) -> tuple[int, ...]:
        """The ladder of decode widths up to and including `max_num_seqs`: powers of two up to 32, every 16 rows up to
        256, where an idle row costs time, and from there on every eighth of the way between two powers."""
        powers = [1 << exponent for exponent in range(self.max_num_seqs.bit_length())]
        between = [
            power + part * power // 8
            for power in powers
            if power >= 32
            for part in range(1, 8)
            if power >= 128 or part == 4 or (power == 64 and part % 2 == 0)
        ]
        return tuple(sorted({width for width in powers + between if width < self.max_num_seqs} | {self.max_num_seqs}))
