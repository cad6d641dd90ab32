"""Makes a program: traces a decoder's methods, compiles them ahead of time (AOTInductor), and writes one file.

What is compiled is tied to this machine's kind of processor or GPU and to this torch; the file says so. Needs a C++
compiler.
"""

from __future__ import annotations

import hashlib
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from planner.errors import InvalidConfiguration
from planner.slices import Method
from worker.attention import Span
from worker.attention_op import plan_attention
from worker.config import EngineConfig, Quantization
from worker.executor import ProgramInfo
from worker.kv_pool import KvPool
from worker.models.decoder import Decoder
from worker.models.weights import DecoderWeights
from worker.program import load_program
from worker.programs.machine import platform_of, torch_version
from worker.programs.metadata import (
    METADATA_MEMBER,
    TEXT_FOLDER,
    ProgramMetadata,
    WeightEntry,
    method_name,
    own_constant,
    root_of,
)
from worker.programs.toolchain import check_compiler, compiling_for
from worker.programs.traced import TracedDecoder, named_weights, plain_tensors
from worker.programs.weight_store import write_weights

Report = Callable[[str], None]

# Cells of the pool that methods are traced with; any other number works afterwards.
_TRACED_CELLS = 37
_COMPILING: dict[str, Any] = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,  # both methods read the archive's one copy
    "aot_inductor.use_runtime_constant_folding": False,
    "cpp.dynamic_threads": True,  # as many as torch has when the program runs, not when it was made
}


@dataclass(frozen=True, slots=True)
class ExportSource:
    """What a program is made of. `info` has its bounds and geometry; `text_files` are kept for the gateway, by name;
    `cells` are those of the pool unless whoever runs the program asks for another number."""

    info: ProgramInfo
    decoder: Decoder
    quantization: Quantization
    source_sha256: str
    cells: int | None
    text_files: Mapping[str, bytes]


def export_program(source: ExportSource, output: Path, report: Report = lambda line: None) -> ProgramMetadata:
    """Trace, compile and write `output`, which appears only when it is whole. Blocks for minutes.

    Raises `InvalidConfiguration` where there is no C++ compiler, or the folder of `output` cannot be written to.
    """
    check_compiler()
    module = TracedDecoder(source.decoder).eval()
    files: dict[str, Any] = {}
    weights = plain_tensors(module)
    with compiling_for(source.decoder.device):
        for method, width in [*((Method.DECODE, width) for width in source.info.widths), (Method.PREFILL, None)]:
            name = method_name(method, width)
            report(f"compiling {name}")
            traced = trace(module, source.decoder, source.info, width)
            files[name], constants = _compile(traced)
            weights |= {own_constant(name, constant): tensor for constant, tensor in constants.items()}
    report(f"writing {output}")
    metadata = _metadata(source, weights)
    _write(output, files, metadata, weights, source.text_files)
    return metadata


def trace(module: TracedDecoder, decoder: Decoder, info: ProgramInfo, width: int | None) -> ExportedProgram:
    """One method as a graph: a decode of `width` tokens, or the prefill, whose numbers of tokens and of selected rows
    each lie in [m, W]."""
    m, w = info.min_prefill_tokens, info.max_prefill_tokens
    rows_vary = width is None and m < w
    num_tokens = width or (m + 1 if rows_vary else m)
    num_rows = width or m
    arguments = _example(decoder, num_tokens, num_rows)
    tables = arguments[-1]
    cells = Dim("cells", min=2, max=2**40)
    shapes = (
        {0: Dim("tokens", min=m, max=w)} if rows_vary else None,
        {0: Dim("tokens", min=m, max=w)} if rows_vary else None,
        {0: Dim("rows", min=m, max=w)} if rows_vary else None,
        {1: cells},
        {1: cells},
        [{0: Dim(f"table_{index}", min=2, max=2**40)} for index in range(len(tables))],
        [{0: Dim(f"layout_{index}", min=2, max=2**40)} for index in range(len(tables))],
    )
    with torch.no_grad():
        return torch.export.export(module, arguments, dynamic_shapes=shapes, strict=False)


def _compile(traced: ExportedProgram) -> tuple[list[Any], dict[str, Tensor]]:
    """Files of compiled code, as `package_aoti` takes them, and constants that the compiler itself has made."""
    options = dict(_COMPILING)
    if traced.example_inputs[0][0].device.type == "cpu":  # whose kernels of int4 read the size of a group from one
        options |= {"aot_inductor.package_constants_on_disk_format": "pickle_weights"}
    with torch.no_grad(), warnings.catch_warnings():
        # torch's own use of a class that it deprecates.
        warnings.filterwarnings("ignore", message=".*treespec", category=FutureWarning)
        made: Any = torch._inductor.aot_compile(traced.module(), traced.example_inputs[0], options=options)
    files = [part for part in made if isinstance(part, str)]
    constants = {name: entry[0] for part in made if not isinstance(part, str) for name, entry in part.items()}
    return files, {name: tensor for name, tensor in constants.items() if name not in traced.state_dict}


def hash_weights(weights: DecoderWeights) -> str:
    """SHA-256 over names, shapes and bytes of weights that are plain tensors."""
    digest = hashlib.sha256()
    for name, tensor in named_weights(weights).items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _example(decoder: Decoder, num_tokens: int, num_rows: int) -> tuple[Any, ...]:
    """Arguments of a method: one sequence's tokens, at its beginning."""
    config, device = decoder.config, decoder.device
    pool = KvPool(config.num_layers, _TRACED_CELLS, config.num_kv_heads, config.head_dim, decoder.dtype, device)
    spans = [Span(row, 0, 1, np.array([row % _TRACED_CELLS], dtype=np.int32)) for row in range(num_tokens)]
    plans = plan_attention(pool, spans, config.windows, config.num_heads).values()
    tokens = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    selector = torch.zeros(num_rows, dtype=torch.int64, device=device)
    tables, layouts = [plan.table for plan in plans], [plan.layout for plan in plans]
    return tokens, torch.zeros_like(tokens), selector, pool.keys, pool.values, tables, layouts


def _metadata(source: ExportSource, weights: Mapping[str, Tensor]) -> ProgramMetadata:
    info, config = source.info, source.decoder.config
    device = source.decoder.device
    return ProgramMetadata(
        format=1,
        name=info.name,
        architecture=info.architecture,
        vocab_size=info.vocab_size,
        context=info.context,
        max_prefill_tokens=info.max_prefill_tokens,
        min_prefill_tokens=info.min_prefill_tokens,
        widths=info.widths,
        cells=source.cells,
        num_layers=info.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        windows=config.windows,
        dtype=info.dtype,  # type: ignore[arg-type]  # checked when it is made
        quantization=source.quantization,
        device=device.type,  # type: ignore[arg-type]
        platform=platform_of(device),
        torch=torch_version(),
        source_sha256=source.source_sha256,
        weight_bytes=info.weight_bytes,
        weights={name: _entry(tensor) for name, tensor in weights.items()},
    )


def _entry(tensor: Tensor) -> WeightEntry:
    return WeightEntry(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def _write(
    output: Path,
    files: Mapping[str, Sequence[Any]],
    metadata: ProgramMetadata,
    weights: Mapping[str, Tensor],
    text_files: Mapping[str, bytes],
) -> None:
    from torch._inductor.package.package import package_aoti

    try:
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".export-") as folder:
            whole = Path(folder) / output.name
            package_aoti(str(whole), {name: list(parts) for name, parts in files.items()})
            with zipfile.ZipFile(whole, "a") as archive:
                root = root_of(archive)
                archive.writestr(f"{root}/{METADATA_MEMBER}", metadata.model_dump_json(indent=1))
                for name, data in text_files.items():
                    archive.writestr(f"{root}/{TEXT_FOLDER}{name}", data)
                write_weights(archive, root, weights)
            whole.replace(output)
    except OSError as error:
        raise InvalidConfiguration(f"cannot write {output}: {error.strerror}", param="output") from error


def export_model(
    config: EngineConfig, output: Path, widths: tuple[int, ...], text_files: Mapping[str, bytes], report: Report
) -> ProgramMetadata:
    """Load the model that `config` names, and export it with decodes of `widths`. Raises as `load_program` too."""
    check_compiler()
    report(f"loading {config.model}")
    return export_program(load_source(config, widths, text_files), output, report)


def load_source(config: EngineConfig, widths: tuple[int, ...], text_files: Mapping[str, bytes]) -> ExportSource:
    """The model that `config` names, as a program with decodes of `widths` is made of it."""
    hashes: list[str] = []
    program = load_program(config, keep_blocks=False, see_weights=lambda read: hashes.append(hash_weights(read)))
    info = replace(program.info, widths=widths)
    return ExportSource(info, program.decoder, config.quantization, hashes[0], config.max_cells, text_files)
