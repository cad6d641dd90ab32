"""An adapter's matrices, read from PEFT's safetensors and ordered as the decoder's fused matrices are.

Not for computing with them: `worker.lora` is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from planner.errors import InvalidAdapter
from worker.models.config import ModelConfig
from worker.models.lora_config import CONFIG_FILE, WEIGHTS_FILE, LoraConfig, read_lora_config

_NAME: Final = re.compile(
    r"base_model\.model\.(?P<module>model\.layers\.(?P<layer>\d+)\."
    r"(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj))\.lora_(?P<half>[AB])\.weight"
)
_HASHED_AT_ONCE: Final = 1 << 24


class Site(Enum):
    """A product of a layer that an adapter may add to, by the modules whose matrices are fused there."""

    QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    OUTPUT = ("self_attn.o_proj",)
    GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
    DOWN = ("mlp.down_proj",)

    @property
    def parts(self) -> tuple[str, ...]:
        modules: tuple[str, ...] = self.value
        return modules


@dataclass(frozen=True, slots=True)
class SiteShape:
    """`num_inputs`, and the outputs of each part, above one another."""

    num_inputs: int
    outputs: tuple[int, ...]

    @property
    def num_outputs(self) -> int:
        return sum(self.outputs)


def site_shapes(config: ModelConfig) -> dict[Site, SiteShape]:
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        Site.QKV: SiteShape(hidden, (query, kv, kv)),
        Site.OUTPUT: SiteShape(query, (hidden,)),
        Site.GATE_UP: SiteShape(hidden, (inner, inner)),
        Site.DOWN: SiteShape(inner, (hidden,)),
    }


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to x [T, K] @ W.T by one part of W: (x @ down.T) @ up. `down` [R, K]; `up` [R, N], with the scale
    in it."""

    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        return len(self.down)


@dataclass(frozen=True, slots=True)
class LoraMatrices:
    """An `AdapterMatrices`: by layer and site one pair for each part of the fused matrix, None for a part that is not
    adapted; float32 on the CPU. A site without any is not there."""

    revision: int
    products: Mapping[tuple[int, Site], tuple[LowRank | None, ...]]


def read_lora(folder: Path, config: ModelConfig, max_rank: int) -> LoraMatrices:
    """Raises `InvalidAdapter` that names the setting or tensor which does not fit `config`, or a rank over the most."""
    settings = read_lora_config(folder)
    tensors = _Tensors(folder)
    shapes = site_shapes(config)
    products: dict[tuple[int, Site], tuple[LowRank | None, ...]] = {}
    for layer in range(config.num_layers):
        for site, shape in shapes.items():
            parts = [f"model.layers.{layer}.{part}" for part in site.parts]
            found = tuple(
                tensors.pair(module, settings, shape.num_inputs, num_outputs, max_rank)
                for module, num_outputs in zip(parts, shape.outputs, strict=True)
            )
            if any(pair is not None for pair in found):
                products[layer, site] = found
    tensors.finish(config.num_layers)
    return LoraMatrices(_revision(folder), products)


class _Tensors:
    """The tensors of an adapter's file, taken pair by pair, and which of them were taken."""

    def __init__(self, folder: Path) -> None:
        self._taken: set[str] = set()
        try:
            opened: Any = safe_open(folder / WEIGHTS_FILE, framework="pt")
            self._names = frozenset(opened.keys())
        except (SafetensorError, OSError) as error:
            raise _refused(f"cannot be read: {error}") from error
        self._file = opened
        for name in sorted(self._names):
            if not _NAME.fullmatch(name):
                raise _refused(f"has the tensor {name}, which is not one of a supported module's lora_A and lora_B")

    def pair(
        self, module: str, settings: LoraConfig, num_inputs: int, num_outputs: int, max_rank: int
    ) -> LowRank | None:
        """The module's two matrices; None where it has none."""
        names = [f"base_model.model.{module}.lora_{half}.weight" for half in "AB"]
        present = [name for name in names if name in self._names]
        if not present:
            return None
        if len(present) < 2:
            raise _refused(f"has {present[0]} without the other half of the pair")
        rank = settings.rank_of(module)
        if rank > max_rank:
            raise InvalidAdapter(f"{module} has rank {rank}, and max_lora_rank is {max_rank}", param="lora_path")
        down = self._take(names[0], (rank, num_inputs))
        up = self._take(names[1], (num_outputs, rank))
        return LowRank(down, (up * settings.scale_of(module)).T.contiguous())

    def finish(self, num_layers: int) -> None:
        if not self._names:
            raise _refused("has no tensor")
        if unused := sorted(self._names - self._taken):
            raise _refused(f"has {unused[0]}, and the model has {num_layers} layers")

    def _take(self, name: str, shape: tuple[int, int]) -> Tensor:
        try:
            tensor = cast(Tensor, self._file.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise _refused(f"cannot be read at {name}: {error}") from error
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise _refused(f"has {name} of shape {tuple(tensor.shape)} and {tensor.dtype}, not {shape} of floats")
        tensor = tensor.float()
        if not bool(tensor.isfinite().all()):
            raise _refused(f"has {name}, which holds numbers that are not finite")
        self._taken.add(name)
        return tensor


def _revision(folder: Path) -> int:
    """64 bits of the BLAKE2b hash of both files; never 0, which means no adapter."""
    digest = hashlib.blake2b(digest_size=8)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (folder / name).open("rb") as file:
            while piece := file.read(_HASHED_AT_ONCE):
                digest.update(piece)
    return int.from_bytes(digest.digest(), "little") or 1


def _refused(why: str) -> InvalidAdapter:
    return InvalidAdapter(f"{WEIGHTS_FILE} {why}", param="lora_path")
