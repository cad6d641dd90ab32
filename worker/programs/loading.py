"""From a program's file to an executor: refuses what this machine or these settings cannot run, and says why."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from torch._C import _aoti

from planner.errors import InvalidConfiguration, InvalidProgram
from planner.limits import SWAP_BLOCK_CELLS
from planner.slices import Method
from worker.config import EngineConfig
from worker.executor import ProgramInfo
from worker.kv_pool import bytes_per_cell
from worker.machine import default_cells
from worker.masks import MaskMaker
from worker.program import executor_over, make_pool, swap_space
from worker.programs.asked import check_asked, check_torch
from worker.programs.forwards import CompiledMethod, Methods, ProgramForwards
from worker.programs.machine import platform_of, torch_version
from worker.programs.metadata import ProgramMetadata, method_name, own_constant, read_metadata
from worker.programs.weight_store import map_weights
from worker.swap import blocks_in
from worker.torch_executor import TorchExecutor

logger = logging.getLogger(__name__)

# How torch's own loader of compiled code is asked for a method. The function that torch has in front of it compiles C++
# for up to a minute, only to say which instructions the processor has: `check_machine` knows, and refuses.
_SINGLE_THREADED = True
_NUM_RUNNERS = 1
_ANY_DEVICE = -1


def build_program_executor(config: EngineConfig, masks: MaskMaker) -> TorchExecutor:
    """Load the program that `config.model` names and make its pool. `masks`: of answers that follow a grammar.

    Raises `InvalidProgram` where it was made for another machine or torch, `InvalidConfiguration` where the settings
    ask for what it is not.
    """
    path = Path(config.model)
    metadata = read_metadata(path)
    check_machine(metadata)
    info = program_info(metadata, config)
    if metadata.device == "cuda":
        from worker.programs.on_gpu import build_on_gpu  # needs Triton, which only a GPU's machine has

        return build_on_gpu(config, metadata, info, load_methods(path, metadata), masks)
    pool, methods = make_pool(config, info), load_methods(path, metadata)
    return executor_over(pool, info, ProgramForwards(metadata, pool, methods.decodes, methods.prefill), masks)


def load_methods(path: Path, metadata: ProgramMetadata) -> Methods:
    """The compiled methods and their weights. Raises `InvalidProgram` naming what is missing, `InvalidConfiguration`
    where the device has no room."""
    began = time.perf_counter()
    try:
        weights = {name: tensor.to(metadata.device) for name, tensor in map_weights(path).items()}
    except torch.OutOfMemoryError as error:
        raise InvalidConfiguration(
            f"the GPU's memory does not hold the program's weights: {error}", param="model"
        ) from error
    read_at = time.perf_counter()

    def method(name: str) -> CompiledMethod:
        try:
            loaded = _aoti.AOTIModelPackageLoader(str(path), name, _SINGLE_THREADED, _NUM_RUNNERS, _ANY_DEVICE)
            # One copy for all methods, and it is ours. What a method does not read, as the zero points of symmetric
            # codes, the compiler has left out of it.
            wanted = {constant: (own_constant(name, constant), constant) for constant in loaded.get_constant_fqns()}
            read = {to: weights[at] for to, names in wanted.items() for at in names if at in weights}
            loaded.load_constants(read, use_inactive=False, check_full_update=True, user_managed=True)
        except RuntimeError as error:
            raise InvalidProgram(f"method {name} of {path} cannot be loaded: {error}", param="model") from error
        return _Loaded(loaded, weights)

    decodes = {width: method(method_name(Method.DECODE, width)) for width in metadata.widths}
    methods = Methods(decodes, method(method_name(Method.PREFILL)))
    logger.info("loaded weights in %.1f s, methods in %.1f s", read_at - began, time.perf_counter() - read_at)
    return methods


def check_machine(metadata: ProgramMetadata) -> None:
    """Raises `InvalidProgram` unless this torch, on this machine, can run what was compiled."""
    check_torch(metadata, torch_version())
    if metadata.device == "cuda" and not torch.cuda.is_available():
        raise InvalidProgram("the program is for cuda, and this machine has no usable CUDA device", param="model")
    here = platform_of(torch.device(metadata.device))
    missing = sorted(set(metadata.platform) - set(here))
    if missing:
        raise InvalidProgram(
            f"the program was compiled for {', '.join(missing)}, which this machine's {metadata.device} is not or has "
            "not: export it again here",
            param="model",
        )


def program_info(metadata: ProgramMetadata, config: EngineConfig) -> ProgramInfo:
    """The program under `config`, which may narrow it. Raises `InvalidConfiguration` where it asks for more."""
    check_asked(metadata, config)
    dtype: torch.dtype = getattr(torch, metadata.dtype)
    context = min(metadata.context, config.max_model_len or metadata.context)
    cell_bytes = bytes_per_cell(metadata.num_layers, metadata.num_kv_heads, metadata.head_dim, dtype)
    device = torch.device(metadata.device)
    return ProgramInfo(
        name=metadata.name,
        architecture=metadata.architecture,
        vocab_size=metadata.vocab_size,
        context=context,
        max_prefill_tokens=config.max_prefill_tokens or metadata.max_prefill_tokens,
        min_prefill_tokens=max(config.min_prefill_tokens, metadata.min_prefill_tokens),
        widths=metadata.widths,
        num_cells=config.max_cells or metadata.cells or default_cells(context, cell_bytes, device),
        num_layers=metadata.num_layers,
        num_kv_heads=metadata.num_kv_heads,
        head_dim=metadata.head_dim,
        dtype=metadata.dtype,
        device=metadata.device,
        bytes_per_cell=cell_bytes,
        weight_bytes=metadata.weight_bytes,
        swap_blocks=blocks_in(swap_space(config, device), SWAP_BLOCK_CELLS, cell_bytes),
    )


class _Loaded:
    """A compiled method that keeps the weights alive, which it only points to."""

    def __init__(self, compiled: _aoti.AOTIModelPackageLoader, weights: dict[str, torch.Tensor]) -> None:
        self._compiled = compiled
        self._weights = weights

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        selector: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: list[torch.Tensor],
        layouts: list[torch.Tensor],
    ) -> torch.Tensor:
        (logits,) = self._compiled.boxed_run([tokens, positions, selector, keys, values, *tables, *layouts])
        return logits
