"""A model's folder without a model: a configuration of some shape, and a tokenizer in which every id has a spelling.

For services with random weights (`load_format: dummy`), which need a text side and answer with ids from the whole
vocabulary. What is said makes no sense; how much is said, and which ids, is what a benchmark looks at.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.against_vllm import SHAPES

_SMALL: dict[str, Any] = SHAPES["llama-8b"] | {
    "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

MODELS: Final[dict[str, dict[str, Any]]] = SHAPES | {
    "small": _SMALL,
    "tiny": _SMALL
    | {"vocab_size": 4000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    | {"num_attention_heads": 4, "num_key_value_heads": 2},
}
"""What `config.json` says of each. `small` is for answers that must be exact, `tiny` for a CPU."""


def write_model(name: str, parent: Path) -> Path:
    """Make a folder for one of `MODELS` in `parent` and give its path."""
    folder = parent / name
    folder.mkdir(parents=True)
    config = MODELS[name]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spelled_tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder


def spelled_tokenizer(vocab_size: int) -> Tokenizer:
    """The 256 bytes, and for each id above them a word that names it; it joins nothing when it encodes."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"Ġ{index:x}" for index in range(len(names), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
