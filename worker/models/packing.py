"""How a checkpoint's matrices are packed: what `quantization_config` of config.json says. Free of torch.

Only what the packed tensors mean is read here. How activations were quantized when the checkpoint was made is not
followed: its weights are used as they are published, with activations in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from planner.errors import InvalidCheckpoint, UnsupportedModel


class PackedFormat(Enum):
    """Who packed it, and how."""

    GPTQ = "gptq"
    AWQ = "awq"
    COMPRESSED_INTEGERS = "pack-quantized"
    PLAIN_INTEGERS = "int-quantized"
    FLOATS = "float-quantized"


@dataclass(frozen=True, slots=True)
class Packing:
    """`bits` of one number. `zero_offset`: what is added to GPTQ's stored zero points, 1 in its first version."""

    format: PackedFormat
    bits: int
    zero_offset: int = 0


_COMPRESSED_FORMATS = {
    "pack-quantized": PackedFormat.COMPRESSED_INTEGERS,
    "int-quantized": PackedFormat.PLAIN_INTEGERS,
    "naive-quantized": PackedFormat.PLAIN_INTEGERS,
    "float-quantized": PackedFormat.FLOATS,
}


def read_packing(settings: Mapping[str, Any]) -> Packing:
    """Raises `UnsupportedModel` naming what is not handled, `InvalidCheckpoint` for what is missing."""
    match settings.get("quant_method"):
        case "gptq":
            return _gptq(settings)
        case "awq":
            return _awq(settings)
        case "compressed-tensors":
            return _compressed(settings)
        case method:
            raise UnsupportedModel(
                f"quantization_config: quant_method {method!r} is not supported; supported are gptq, awq and "
                "compressed-tensors"
            )


def _gptq(settings: Mapping[str, Any]) -> Packing:
    bits = _bits(settings, (2, 4, 8))
    version = settings.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise UnsupportedModel(f"GPTQ's checkpoint_format {version!r} is not supported; gptq and gptq_v2 are")
    return Packing(PackedFormat.GPTQ, bits, zero_offset=1 if version == "gptq" else 0)


def _awq(settings: Mapping[str, Any]) -> Packing:
    version = str(settings.get("version") or "gemm").lower()
    if version != "gemm":
        raise UnsupportedModel(f"AWQ's version {version!r} is not supported; gemm is")
    return Packing(PackedFormat.AWQ, _bits(settings, (4,)))


def _compressed(settings: Mapping[str, Any]) -> Packing:
    name = settings.get("format")
    if name not in _COMPRESSED_FORMATS:
        raise UnsupportedModel(
            f"compressed-tensors' format {name!r} is not supported; supported are {', '.join(_COMPRESSED_FORMATS)}"
        )
    if settings.get("kv_cache_scheme"):
        raise UnsupportedModel("a checkpoint with a kv_cache_scheme is not supported")
    groups: list[Mapping[str, Any]] = [
        group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()
    ]
    widths: set[tuple[Any, Any]] = {(group.get("num_bits"), group.get("type")) for group in groups}
    if len(widths) != 1:
        raise UnsupportedModel(f"compressed-tensors with {len(widths)} kinds of weights in one checkpoint")
    ((bits, kind),) = widths
    packed = _COMPRESSED_FORMATS[name]
    fits = (bits, kind) == (8, "float") if packed is PackedFormat.FLOATS else kind == "int" and bits in (4, 8)
    if not fits:
        raise UnsupportedModel(f"compressed-tensors' {name} with weights of {bits} bits ({kind}) is not supported")
    return Packing(packed, int(bits))


def _bits(settings: Mapping[str, Any], supported: tuple[int, ...]) -> int:
    bits = settings.get("bits")
    if bits is None:
        raise InvalidCheckpoint("quantization_config has no bits")
    if bits not in supported:
        raise UnsupportedModel(f"weights of {bits} bits are not supported; supported are {supported}")
    return int(bits)
