"""Builds a tokenizer from the metadata of a GGUF file: byte-level BPE with the model's own way of splitting words.

Byte-pair encoding is that of Sennrich, Haddow and Birch (2016), over bytes as in GPT-2 (Radford et al. 2019). What
differs between models of that kind is the pre-tokenizer, which GGUF names in `tokenizer.ggml.pre`. A name that is not
in the table is refused: a wrong split gives other tokens than the model was trained on, silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from planner.errors import InvalidCheckpoint, UnsupportedModel
from worker.gguf_layout import Value

_CONTROL: Final = 3
_USER_DEFINED: Final = 4

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_MARK: Final = r"[^\r\n\p{L}\p{N}]?"
_WORD: Final = rf"{_MARK}\p{{L}}+"
_MARKS_AND_SPACE: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD: Final = f"{_MARK}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_MARK}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"


@dataclass(frozen=True, slots=True)
class _Split:
    """How text is cut before merging. `pattern` None: GPT-2's own; `digits`: each digit stands alone."""

    pattern: str | None = None
    digits: bool = False
    whole_words: bool = False  # a word that is in the vocabulary is not taken apart
    compose: bool = False  # Unicode NFC first

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        parts: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            parts.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            parts.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        return pre_tokenizers.Sequence(parts)


_GPT2: Final = _Split()
_SINGLE_DIGITS: Final = _Split(digits=True)
_LLAMA3: Final = _Split(rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS_AND_SPACE}", whole_words=True)
_QWEN2: Final = _Split(rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_MARKS_AND_SPACE}", compose=True)
_GPT4O: Final = _Split(
    rf"{_CASED_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+", whole_words=True
)

_SPLITS: Final[Mapping[str, _Split]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "mpt", "jais", "jina-en"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}


def gguf_tokenizer(metadata: Mapping[str, Value]) -> Tokenizer:
    """The tokenizer that `metadata` describes, with its start token added when the model wants one.

    Raises `UnsupportedModel` for another kind than byte-level BPE or an unknown pre-tokenizer (naming it), and
    `InvalidCheckpoint` when the vocabulary is missing or inconsistent.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedModel(f"tokenizer kind {kind!r} is not one of: 'gpt2'", param="tokenizer.ggml.model")
    name = metadata.get("tokenizer.ggml.pre", "default")
    split = _SPLITS.get(str(name))
    if split is None:
        raise UnsupportedModel(
            f"pre-tokenizer {name!r} is not one of: {', '.join(sorted(_SPLITS))}", param="tokenizer.ggml.pre"
        )
    tokens = gguf_list(metadata, "tokenizer.ggml.tokens")
    tokenizer = _byte_pairs(
        {str(token): index for index, token in enumerate(tokens)},
        [_merge(str(merge)) for merge in gguf_list(metadata, "tokenizer.ggml.merges")],
        split,
    )
    if split.compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, metadata, [str(token) for token in tokens])
    return tokenizer


def gguf_list(metadata: Mapping[str, Value], key: str) -> list[bool | int | float | str]:
    """The list at `key`. Raises `InvalidCheckpoint` when there is none."""
    value = metadata.get(key)
    if not isinstance(value, list):
        raise InvalidCheckpoint(f"the GGUF file has no list {key}", param=key)
    return value


def gguf_token(metadata: Mapping[str, Value], role: str, num_tokens: int) -> int | None:
    """Id of the `role` ("bos", "eos", ...) token, or None. Raises `InvalidCheckpoint` when outside the vocabulary."""
    key = f"tokenizer.ggml.{role}_token_id"
    token = metadata.get(key)
    if token is None:
        return None
    if not isinstance(token, int) or not 0 <= token < num_tokens:
        raise InvalidCheckpoint(f"{key} is {token!r}, outside the vocabulary of {num_tokens}", param=key)
    return token


def _byte_pairs(vocabulary: dict[str, int], merges: list[tuple[str, str]], split: _Split) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole_words))
    except Exception as error:  # the library raises nothing narrower for merges that the vocabulary lacks
        raise InvalidCheckpoint(f"vocabulary and merges do not fit: {error}", param="tokenizer.ggml.merges") from error


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if not left or not right:
        raise InvalidCheckpoint(f"merge {line!r} is not two parts", param="tokenizer.ggml.merges")
    return left, right


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Value], tokens: list[str]) -> None:
    kinds = metadata.get("tokenizer.ggml.token_type")
    if isinstance(kinds, list):
        if len(kinds) != len(tokens):
            raise InvalidCheckpoint(f"{len(kinds)} token types for {len(tokens)} tokens", param="token_type")
        for kind in (_CONTROL, _USER_DEFINED):
            chosen = [token for token, its_kind in zip(tokens, kinds, strict=True) if its_kind == kind]
            added = [AddedToken(token, special=kind == _CONTROL, normalized=False) for token in chosen]
            if kind == _CONTROL:
                tokenizer.add_special_tokens(added)
            else:
                tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size() != len(tokens):
        raise InvalidCheckpoint("tokens of the GGUF vocabulary are not all different", param="tokenizer.ggml.tokens")
    first = gguf_token(metadata, "bos", len(tokens))
    last = gguf_token(metadata, "eos", len(tokens))
    starts = [tokens[first]] if first is not None and metadata.get("tokenizer.ggml.add_bos_token") is True else []
    ends = [tokens[last]] if last is not None and metadata.get("tokenizer.ggml.add_eos_token") is True else []
    if starts or ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*starts, "$A", *ends],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(starts + ends)],
        )
