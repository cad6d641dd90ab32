"""`raycomb inspect`: what a program's file says of itself, for a person or as JSON. Needs neither torch nor a GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from worker.programs.metadata import ProgramMetadata, read_metadata


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", type=Path, metavar="PROGRAM", help="a file that `raycomb export` wrote")
    parser.add_argument("--json", action="store_true", help="everything, the list of weights too, as JSON")


def execute(args: argparse.Namespace) -> int:
    """Print it; exit code 0. Raises `InvalidProgram` where it is none."""
    metadata = read_metadata(args.program)
    print(json.dumps(metadata.model_dump(mode="json"), indent=2) if args.json else _lines(metadata))
    return 0


def _lines(metadata: ProgramMetadata) -> str:
    windows = sorted({window for window in metadata.windows if window is not None})
    rows = {
        "name": metadata.name,
        "architecture": metadata.architecture,
        "device": f"{metadata.device}, compiled by torch {metadata.torch} for {len(metadata.platform)} abilities",
        "numbers": metadata.dtype + ("" if metadata.quantization == "none" else f", layers {metadata.quantization}"),
        "decode": f"widths {', '.join(map(str, metadata.widths))}",
        "prefill": f"m = {metadata.min_prefill_tokens} to W = {metadata.max_prefill_tokens} tokens",
        "context": f"{metadata.context} tokens, vocabulary {metadata.vocab_size}",
        "cache": f"{metadata.num_layers} layers of K and V [cells, {metadata.num_kv_heads}, {metadata.head_dim}], "
        + ("full context" if not windows else f"windows {', '.join(map(str, windows))}"),
        "cells": "as many as memory allows" if metadata.cells is None else str(metadata.cells),
        "weights": f"{metadata.weight_bytes / 1e6:.1f} MB read by a decode",
        "source": f"sha256 {metadata.source_sha256}",
    }
    return "\n".join(f"{name:14}{value}" for name, value in rows.items())
