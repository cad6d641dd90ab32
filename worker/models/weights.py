"""A decoder's weights: what there must be, and putting it together from a source of named tensors.

Query, key and value (and gate and up) are fused into one matrix each while they are read. Nothing may be missing, left
over or of another shape. Where tensors come from is the source's business (`safetensors_source`, `gguf_source`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from planner.errors import InvalidCheckpoint
from worker.config import Quantization
from worker.models.block_matrix import BlockMatrix
from worker.models.blocks import Arena, Blocks, stacked, tiled
from worker.models.config import ModelConfig
from worker.models.stored_matrix import StoredMatrix

# Old Llama checkpoints store the rotary frequencies, which follow from the configuration.
_DERIVED = re.compile(r"(model\.layers\.\d+\.self_attn\.|model\.)rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. H, J, D, E, F: query heads, key/value heads, head dimension, hidden and intermediate size.

    `qkv` [(H + 2J)D, E], `output` [E, HD], `gate_up` [2F, E], `down` [E, F]; biases are theirs, norms are vectors.
    """

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """`embedding` and `head` [vocab_size, E]; they are one tensor when the head is tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor

    @property
    def is_quantized(self) -> bool:
        return any(hasattr(layer.qkv, "__tensor_flatten__") for layer in self.layers)

    @property
    def quantization(self) -> Quantization:
        """What the layers' matrices were made by, where they are our own kinds."""
        matrix = self.layers[0].qkv
        return matrix.quantization if isinstance(matrix, StoredMatrix) else "none"

    @property
    def kept_in_blocks(self) -> list[BlockMatrix]:
        """Those of its matrices that are; a head that is the embedding comes once."""
        matrices = [getattr(layer, name) for layer in self.layers for name in ("qkv", "output", "gate_up", "down")]
        ends = [self.head] if self.head is self.embedding else [self.embedding, self.head]
        return [matrix for matrix in [*ends, *matrices] if isinstance(matrix, BlockMatrix)]

    @property
    def bytes_read(self) -> int:
        """What a decode forward reads of them; of an embedding that is not the head it reads a few rows only."""
        tensors = [getattr(layer, field.name) for layer in self.layers for field in fields(layer)]
        return sum(_stored_bytes(t) for t in (self.final_norm, self.head, *tensors) if t is not None)


def _stored_bytes(tensor: Tensor) -> int:
    """Of a quantized matrix, what its parts hold."""
    if isinstance(tensor, BlockMatrix):
        return tensor.tiles.data.nbytes
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(getattr(tensor, name).nbytes for name in names)


Become = Callable[[str, Tensor], Tensor]
"""What a layer's matrix becomes as soon as it is there, by its name in `LayerWeights`, and the head, by the name head.
Nobody else keeps the matrix, so that dense ones are alive one at a time."""


def as_it_is(name: str, matrix: Tensor) -> Tensor:
    return matrix


class TensorSource(Protocol):
    """Named tensors of a checkpoint, under the names that transformers gives them."""

    def names(self) -> Collection[str]: ...

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU, in any float dtype. Raises `InvalidCheckpoint` naming it if it cannot be read."""
        ...


class BlockSource(TensorSource, Protocol):
    """A source some of whose matrices are stored in blocks of codes."""

    def read_blocks(self, name: str) -> Blocks | None:
        """A matrix as it is stored; None for one that is not stored in such blocks."""
        ...


class _Assembly:
    """Takes tensors from a source, once each, and remembers what was taken."""

    def __init__(
        self, source: TensorSource, kept: BlockSource | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._source = source
        self._kept = kept
        self._arena = Arena()
        self._names = frozenset(source.names())
        self._dtype = dtype
        self._device = device
        self._taken: set[str] = set()

    def vector(self, name: str, size: int) -> Tensor:
        return self.stack([(name, size)], None)

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self.stack([(name, rows)], columns)

    def stack(self, parts: list[tuple[str, int]], columns: int | None) -> Tensor:
        """The named tensors above one another, in the program's dtype and on its device."""
        if columns is not None and (matrix := self._kept_blocks(parts, columns)) is not None:
            return matrix
        tail = () if columns is None else (columns,)
        stacked = torch.empty((sum(rows for _, rows in parts), *tail), dtype=self._dtype, device=self._device)
        offset = 0
        for name, rows in parts:
            stacked[offset : offset + rows].copy_(self._take(name, (rows, *tail)))
            offset += rows
        return stacked

    def drop_copy_of_embedding(self, name: str, embedding: Tensor) -> None:
        """A tied head that is stored all the same must be the embedding, else one of the two would be ignored."""
        if name not in self._names:
            return
        if not torch.equal(self._take(name, tuple(embedding.shape)).to(embedding), embedding):
            raise InvalidCheckpoint(f"{name} differs from the embedding that config.json says it is tied to")

    def finish(self) -> None:
        unused = sorted(name for name in self._names - self._taken if not _DERIVED.fullmatch(name))
        if unused:
            raise InvalidCheckpoint(f"the model does not use {len(unused)} tensors of the checkpoint: {_some(unused)}")

    def _kept_blocks(self, parts: list[tuple[str, int]], columns: int) -> BlockMatrix | None:
        """The named matrices above one another, if all of them are stored in blocks of one layout."""
        if self._kept is None:
            return None
        found = [self._kept.read_blocks(self._existing(name)) for name, _ in parts]
        blocks = [of_part for of_part in found if of_part is not None]
        if len(blocks) < len(found) or len({of_part.layout for of_part in blocks}) > 1:
            return None
        for (name, rows), of_part in zip(parts, blocks, strict=True):
            _check_shape(name, of_part.shape, (rows, columns))
            self._taken.add(name)
        return BlockMatrix(tiled(stacked(blocks), self._arena))

    def _existing(self, name: str) -> str:
        if name not in self._names:
            raise InvalidCheckpoint(f"the checkpoint has no tensor {name}")
        return name

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._source.read(self._existing(name))
        _check_shape(name, tuple(tensor.shape), shape)
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise InvalidCheckpoint(f"tensor {name} has dtype {tensor.dtype}, which is not supported")
        self._taken.add(name)
        return tensor


def load_weights(
    config: ModelConfig,
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    kept: BlockSource | None = None,
    become: Become = as_it_is,
) -> DecoderWeights:
    """Read all, one tensor at a time, into `dtype` on `device`. Raises `InvalidCheckpoint` naming the tensor, and what
    `become` raises.

    `kept`: the same source, where matrices that it has in blocks are to stay so, as `BlockMatrix`; these are for the
    CPU in float32 alone.
    """
    assembly = _Assembly(source, kept, dtype, device)
    embedding = assembly.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = tuple(_layer(config, assembly, f"model.layers.{i}.", become) for i in range(config.num_layers))
    final_norm = assembly.vector("model.norm.weight", config.hidden_size)
    if config.tied_head:
        head = embedding
        assembly.drop_copy_of_embedding("lm_head.weight", embedding)
    else:
        head = assembly.matrix("lm_head.weight", config.vocab_size, config.hidden_size)
    assembly.finish()
    return DecoderWeights(embedding, layers, final_norm, become("head", head))


def _layer(config: ModelConfig, assembly: _Assembly, prefix: str, become: Become) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."

    def qkv(kind: str) -> list[tuple[str, int]]:
        return [
            (f"{attention}{p}_proj.{kind}", rows) for p, rows in zip("qkv", (query_rows, kv_rows, kv_rows), strict=True)
        ]

    def gate_up(kind: str) -> list[tuple[str, int]]:
        return [(f"{mlp}{part}_proj.{kind}", inner) for part in ("gate", "up")]

    return LayerWeights(
        attention_norm=assembly.vector(prefix + "input_layernorm.weight", hidden),
        qkv=become("qkv", assembly.stack(qkv("weight"), hidden)),
        qkv_bias=assembly.stack(qkv("bias"), None) if config.qkv_bias else None,
        query_norm=assembly.vector(attention + "q_norm.weight", config.head_dim) if config.qk_norm else None,
        key_norm=assembly.vector(attention + "k_norm.weight", config.head_dim) if config.qk_norm else None,
        output=become("output", assembly.matrix(attention + "o_proj.weight", hidden, query_rows)),
        output_bias=assembly.vector(attention + "o_proj.bias", hidden) if config.output_bias else None,
        mlp_norm=assembly.vector(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=become("gate_up", assembly.stack(gate_up("weight"), hidden)),
        gate_up_bias=assembly.stack(gate_up("bias"), None) if config.mlp_bias else None,
        down=become("down", assembly.matrix(mlp + "down_proj.weight", hidden, inner)),
        down_bias=assembly.vector(mlp + "down_proj.bias", hidden) if config.mlp_bias else None,
    )


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise InvalidCheckpoint(f"tensor {name} has shape {shape}, not {expected}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
