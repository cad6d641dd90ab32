"""A program: a model that is ready to run and what the rest of the system needs to know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from planner.errors import InvalidCheckpoint, InvalidConfiguration, UnsupportedModel
from planner.limits import SWAP_BLOCK_CELLS
from worker.adapters import AdapterSlots
from worker.cell_image import CellLayout
from worker.cell_rows import cell_dtype
from worker.config import CPU_PREFILL_TOKENS, CPU_SWAP_SPACE, GPU_PREFILL_TOKENS, GPU_SWAP_SPACE, EngineConfig
from worker.cpu.forwards import forwards_of
from worker.executor import Executor, ProgramInfo
from worker.forwards import Forwards
from worker.kv_pool import KvPool, bytes_per_cell
from worker.lora import LoraSlots
from worker.lora_forwards import LoraForwards
from worker.machine import choose_device, default_cells, host_bytes
from worker.masks import MaskMaker, NoMasks
from worker.models.config import ModelConfig, read_config
from worker.models.decoder import Decoder
from worker.models.dummy_weights import dummy_weights
from worker.models.gguf_source import GgufSource
from worker.models.packed_source import PackedSource
from worker.models.safetensors_source import SafetensorsSource
from worker.models.weights import Become, DecoderWeights, TensorSource, as_it_is, load_weights
from worker.pool_port import PoolPort, TorchMover
from worker.programs.metadata import SUFFIX
from worker.quantize import quantize_weights, quantizer
from worker.settings_check import check_settings, context_of, min_prefill_of
from worker.swap import GIB, HostSwap, blocks_in
from worker.torch_executor import TorchExecutor
from worker.vocabulary import VocabularySource

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Program:
    """`decoder` runs both methods; `info` says how wide they are and how large a pool they were given."""

    info: ProgramInfo
    decoder: Decoder


def build_executor(config: EngineConfig, vocabulary: VocabularySource | None = None) -> Executor:
    """Load the model and make its pool. Raises a `SetupError` that says what is wrong with model or settings.

    `vocabulary` is what answers are written in that follow a grammar; without it there can be none."""
    return build_executor_with(config, mask_maker(vocabulary))


def build_executor_with(config: EngineConfig, grammars: MaskMaker) -> Executor:
    """The same, where masks are made by `grammars`, which are the executor's from here on."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    _check_adapters(config)
    if Path(config.model).suffix == SUFFIX:
        from worker.programs.loading import build_program_executor  # loads torch's compiler

        return build_program_executor(config, grammars)
    program = load_program(config)
    info, decoder = program.info, program.decoder
    if decoder.device.type == "cuda":
        from worker.cuda.memory import build_cuda_executor  # needs Triton, which only a GPU's machine has

        return build_cuda_executor(config, info, decoder, grammars)
    pool = make_pool(config, info)
    if not config.enable_lora:
        return executor_over(pool, info, forwards_of(decoder, pool), grammars)
    adapters = LoraSlots(decoder.config, config.max_loras, config.max_lora_rank, decoder.dtype, decoder.device)
    return executor_over(pool, info, adapted_forwards(decoder, pool, adapters), grammars, adapters)


def make_pool(config: EngineConfig, info: ProgramInfo) -> KvPool:
    """A pool of the program's geometry that has all its cells at once. Raises `InvalidConfiguration` where it is to
    grow."""
    if config.kv_initial_cells is not None:
        raise InvalidConfiguration(
            f"kv_initial_cells is {config.kv_initial_cells}, and only the pool of a model on a GPU grows that is no "
            "program: on a CPU cells take no memory before they are written",
            param="kv_initial_cells",
        )
    dtype, device = _DTYPES[info.dtype], torch.device(info.device)
    return KvPool(info.num_layers, info.num_cells, info.num_kv_heads, info.head_dim, dtype, device)


def executor_over(
    pool: KvPool, info: ProgramInfo, forwards: Forwards, masks: MaskMaker, adapters: AdapterSlots | None = None
) -> TorchExecutor:
    """What runs `forwards`, which are over `pool` and compute with `adapters`, one step at a time."""
    swap = HostSwap(pool, info.swap_blocks, info.swap_block_cells) if info.swap_blocks else None
    port = PoolPort(TorchMover(pool), CellLayout.of(info))
    return TorchExecutor(info, forwards, swap, masks, port, adapters)


def adapted_forwards(decoder: Decoder, pool: KvPool, adapters: LoraSlots) -> Forwards:
    """What runs `decoder` with adapters beside it."""
    return LoraForwards(forwards_of(decoder, pool), forwards_of(decoder, pool, adapters))


def _check_adapters(config: EngineConfig) -> None:
    """Raises `InvalidConfiguration` where adapters were asked for and nothing computes with them yet."""
    if config.enable_lora and Path(config.model).suffix == SUFFIX:
        raise InvalidConfiguration("enable_lora is not supported by an exported program yet", param="enable_lora")


def mask_maker(vocabulary: VocabularySource | None) -> MaskMaker:
    """Of answers in this vocabulary, which is read in the background; without one, none can follow a grammar."""
    if vocabulary is None:
        return NoMasks()
    from worker.grammars import Grammars  # loads llguidance, which a benchmark's machine may lack

    return Grammars(vocabulary)


def load_program(
    config: EngineConfig, *, keep_blocks: bool = True, see_weights: Callable[[DecoderWeights], None] | None = None
) -> Program:
    """Load the model and settle every number that the configuration left open.

    Without `keep_blocks` all weights are tensors that can be traced. With it matrices that a GGUF file has in blocks
    stay so where they can be multiplied with: on a CPU in float32. Matrices are
    quantized as they are read, so that there is memory for one dense one at a time; with `see_weights`, which is called
    with the weights as they were read, all of them are there first.
    """
    path = Path(config.model)
    device = choose_device(config)
    model, source = _open(path, load=config.load_format != "dummy")
    check_settings(config, model.context, "cuda" if device.type == "cuda" else "cpu")
    dtype = _dtype(config, model, device)
    context, least = context_of(config, model.context), min_prefill_of(config)
    space = swap_space(config, device)
    become = quantizer(config.quantization) if see_weights is None else as_it_is
    try:
        weights = _weights(config, model, source, dtype, device, keep_blocks, become)
        if see_weights is not None:
            see_weights(weights)
            weights = quantize_weights(weights, config.quantization)
    except torch.OutOfMemoryError as error:
        raise InvalidConfiguration(f"the GPU's memory does not hold the weights: {error}", param="model") from error
    cells = _cells_named(config, dtype)
    cell_bytes = bytes_per_cell(model.num_layers, model.num_kv_heads, model.head_dim, cell_dtype(cells, dtype))
    info = ProgramInfo(
        name=path.stem if path.suffix == ".gguf" else path.resolve().name,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        context=context,
        max_prefill_tokens=config.max_prefill_tokens
        or (GPU_PREFILL_TOKENS if device.type == "cuda" else CPU_PREFILL_TOKENS),
        min_prefill_tokens=least,
        widths=config.decode_widths,
        num_cells=config.max_cells or default_cells(context, cell_bytes, device),
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        bytes_per_cell=cell_bytes,
        weight_bytes=weights.bytes_read,
        cell_dtype=cells,
        num_block_matrices=len(weights.kept_in_blocks),
        swap_blocks=blocks_in(space, SWAP_BLOCK_CELLS, cell_bytes),
        vector_size=model.hidden_size,
    )
    return Program(info, Decoder(model, weights, context))


def _open(path: Path, *, load: bool) -> tuple[ModelConfig, TensorSource | None]:
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InvalidCheckpoint(f"{path} does not exist")
        gguf_source = GgufSource(path)
        return gguf_source.config, gguf_source if load else None
    config = read_config(path)
    if not load:
        return config, None
    source = SafetensorsSource(path)
    return config, source if config.packing is None else PackedSource(source, config.packing)


def _weights(
    config: EngineConfig,
    model: ModelConfig,
    source: TensorSource | None,
    dtype: torch.dtype,
    device: torch.device,
    keep_blocks: bool,
    become: Become,
) -> DecoderWeights:
    if source is None:
        return dummy_weights(model, dtype, device, config.seed, become)
    multipliable = device.type == "cpu" and dtype == torch.float32 and config.quantization == "none"
    kept = source if keep_blocks and multipliable and isinstance(source, GgufSource) else None
    return load_weights(model, source, dtype, device, kept, become)


def _dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    name = model.dtype or "bfloat16"
    if name not in _DTYPES:
        raise UnsupportedModel(f"the checkpoint's dtype {name!r} is not supported; supported are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _cells_named(config: EngineConfig, dtype: torch.dtype) -> str | None:
    """Name of what keys and values are kept in; None for the model's own, as always on a CPU."""
    asked = config.kv_cache_dtype
    if asked == "auto" or cell_dtype(asked, dtype) == dtype:
        return None
    return asked


def swap_space(config: EngineConfig, device: torch.device) -> float:
    """GiB of host memory for preempted sequences. Raises `InvalidConfiguration` for more than this machine has, which
    would end it: on a GPU all of it is pinned at the start."""
    if (asked := config.swap_space) is not None:
        if (there_are := host_bytes() / GIB) < asked:
            raise InvalidConfiguration(
                f"swap_space is {asked:g} GiB, and this machine's memory has {there_are:.1f}", param="swap_space"
            )
        return asked
    return GPU_SWAP_SPACE if device.type == "cuda" else CPU_SWAP_SPACE
