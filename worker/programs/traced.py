"""A decoder as torch.export wants it: a module whose forward is one method of a program, with weights as buffers.

The maths is `worker.models.decoder`'s own, and cells are reached through `worker.attention_op` as ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from worker.attention_op import OperatorAttention, distinct_windows
from worker.models.decoder import Decoder
from worker.models.weights import DecoderWeights, LayerWeights
from worker.packed_plan import PackedPlan

_LAYER_FIELDS = tuple(field.name for field in fields(LayerWeights))


class TracedDecoder(nn.Module):
    """One method over packed tokens. The same buffers serve every method that is traced from it."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self._config = decoder.config
        self._context = decoder.context
        self._windows = distinct_windows(decoder.config.windows)
        self._specs: dict[str, _Spec] = {}
        named = named_weights(decoder.weights) | {"cos": decoder.cos, "sin": decoder.sin}
        for name, tensor in named.items():
            self._register(name.replace(".", "__"), tensor)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        selector: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Sequence[Tensor],
        layouts: Sequence[Tensor],
    ) -> Tensor:
        """Logits, float32 [K, vocab_size], of rows `selector` int64[K] of `tokens` int64[T] at `positions` int64[T].

        `keys`, `values`: the pool's. `tables` and `layouts`: a packed plan for each distinct window of the layers.
        """
        plans = {
            window: PackedPlan(table, layout)
            for window, table, layout in zip(self._windows, tables, layouts, strict=True)
        }
        weights = self._weights()
        rotary = self._tensor("cos"), self._tensor("sin")
        decoder = Decoder(self._config, weights, self._context, rotary)
        attention = OperatorAttention(keys, values, self._config.windows, plans)
        hidden = decoder.hidden(tokens, positions, attention)
        return decoder.logits(hidden.index_select(0, selector))

    def _weights(self) -> DecoderWeights:
        layers = tuple(
            LayerWeights(**{field: self._optional(f"layers__{index}__{field}") for field in _LAYER_FIELDS})
            for index in range(self._config.num_layers)
        )
        embedding, head = self._tensor("embedding"), self._optional("head")
        return DecoderWeights(embedding, layers, self._tensor("final_norm"), embedding if head is None else head)

    def _register(self, name: str, tensor: Tensor) -> None:
        spec = _Spec.of(tensor)
        self._specs[name] = spec
        for part, plain in spec.parts(tensor).items():
            # Compiled code holds the strides, and the file the bytes alone, in order.
            self.register_buffer(name + part, plain.contiguous())

    def _tensor(self, name: str) -> Tensor:
        spec = self._specs[name]
        return spec.join({part: self.get_buffer(name + part) for part in spec.names})

    def _optional(self, name: str) -> Any:
        return self._tensor(name) if name in self._specs else None


class _Spec:
    """How a weight is taken apart into plain tensors and put together again: quantized ones consist of several."""

    def __init__(self, names: tuple[str, ...], kind: type[Tensor], context: Any, like: Tensor) -> None:
        self.names = names
        self._kind = kind
        self._context = context
        self._shape = like.shape
        self._stride = like.stride()

    @classmethod
    def of(cls, tensor: Tensor) -> _Spec:
        if not hasattr(tensor, "__tensor_flatten__"):
            return cls(("",), type(tensor), None, tensor)
        names, context = tensor.__tensor_flatten__()
        return cls(tuple(f"__{name}" for name in names), type(tensor), context, tensor)

    def parts(self, tensor: Tensor) -> dict[str, Tensor]:
        if self.names == ("",):
            return {"": tensor}
        return {name: getattr(tensor, name.removeprefix("__")) for name in self.names}

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        if self.names == ("",):
            return parts[""]
        inner = {name.removeprefix("__"): tensor for name, tensor in parts.items()}
        joined: Tensor = self._kind.__tensor_unflatten__(inner, self._context, self._shape, self._stride)  # type: ignore[attr-defined]
        return joined


def named_weights(weights: DecoderWeights) -> dict[str, Tensor]:
    """Every weight once, by its place; a head that is the embedding has no name of its own."""
    named = {"embedding": weights.embedding, "final_norm": weights.final_norm}
    if weights.head is not weights.embedding:
        named["head"] = weights.head
    for index, layer in enumerate(weights.layers):
        for field in _LAYER_FIELDS:
            tensor = getattr(layer, field)
            if tensor is not None:
                named[f"layers.{index}.{field}"] = tensor
    return named


def plain_tensors(module: TracedDecoder) -> dict[str, Tensor]:
    """The buffers that the compiled methods read, by the names that they have there."""
    return {name: torch.Tensor.detach(buffer) for name, buffer in module.named_buffers()}
