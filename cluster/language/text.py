"""A model's text side: tokenizer, chat template, and the tokens that end an answer. No tensor, no torch.

Read from a checkpoint folder (tokenizer.json and the small files beside it), a GGUF file's metadata, or a program.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cluster.language.chat_template import ChatTemplate
from cluster.language.detokeniser import Detokeniser, TokenBytes, detokenise
from cluster.language.gguf_tokenizer import gguf_list, gguf_token, gguf_tokenizer
from cluster.language.tool_formats import MARKS
from planner.errors import InvalidCheckpoint
from worker.gguf_layout import read_gguf_metadata
from worker.programs.metadata import SUFFIX, text_files
from worker.vocabulary import Vocabulary

_SOMETHING = "\x02"  # no vocabulary joins it to what follows

# Of a checkpoint's folder, what is read here.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """Ids that encoding puts around every text by itself. None: what the tokenizer's own post-processor does."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


class TextModel:
    """Text to tokens and back, for one model. Immutable; safe to share between tasks and threads.

    `marks`: the special tokens by spelling that tell calls of tools and thoughts from the rest of an answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_ids: frozenset[int],
        chat_template: ChatTemplate | None = None,
        added: AddedTokens | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._added = added
        self.tokens = TokenBytes(tokenizer)
        self.eos_ids = eos_ids
        self.chat_template = chat_template
        self.marks = {mark: token for mark in MARKS if (token := tokenizer.token_to_id(mark)) in self.tokens.special}

    @property
    def vocab_size(self) -> int:
        """Token ids that have a spelling are below it; the model's own vocabulary may be padded further."""
        return len(self.tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens spelled out in it are recognised. Releases the interpreter lock."""
        if self._added is None or not add_special_tokens:
            return self._ids(text, add_special_tokens=add_special_tokens)
        return [*self._added.before, *self._ids(text, add_special_tokens=False), *self._added.after]

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # The library's `encode` of one text holds the interpreter lock until it is done, and finds offsets besides.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_after(self, text: str) -> list[int]:
        """Token ids of a text that follows another one: without the space that some vocabularies put before it."""
        ids = self.encode(text, add_special_tokens=False)
        if not self.tokens.leading_space:
            return ids
        before = self.encode(_SOMETHING, add_special_tokens=False)
        both = self.encode(_SOMETHING + text, add_special_tokens=False)
        return both[len(before) :] if both[: len(before)] == before else ids

    def decode(self, ids: list[int], *, with_special: bool = True) -> str:
        """Text of `ids`; undoes `encode`."""
        return detokenise(self.tokens, ids, with_special=with_special)

    def vocabulary(self) -> Vocabulary:
        """What grammars need to know of the tokens."""
        tokens = tuple(map(self.tokens.of, range(len(self.tokens))))
        return Vocabulary(tokens, self.tokens.special, self.eos_ids, self.encode_after)

    def detokeniser(self) -> Detokeniser:
        """A new growing text that continues a prompt."""
        return Detokeniser(self.tokens)


def load_text(path: Path) -> TextModel:
    """The text side of the checkpoint at `path`: a folder, a .gguf file, or a program that was made of one of them.

    Raises `InvalidCheckpoint` when files are missing or broken, `UnsupportedModel` for a kind that is not known.
    """
    if path.suffix == SUFFIX:
        return _from_program(path)
    return _from_gguf(path) if path.is_file() else _from_folder(path)


def _from_program(path: Path) -> TextModel:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file_name, data in text_files(path).items():
            (folder / Path(file_name).name).write_bytes(data)
        gguf = next(folder.glob("*.gguf"), None)
        return _from_folder(folder) if gguf is None else _from_gguf(gguf)


def _from_gguf(path: Path) -> TextModel:
    metadata = read_gguf_metadata(path)
    tokenizer = gguf_tokenizer(metadata)
    tokens = gguf_list(metadata, "tokenizer.ggml.tokens")
    ends = {gguf_token(metadata, role, len(tokens)) for role in ("eos", "eot", "eom")} - {None}
    spelled: dict[str, str | None] = {}
    for role in ("bos", "eos"):
        token = gguf_token(metadata, role, len(tokens))
        spelled[f"{role}_token"] = None if token is None else str(tokens[token])
    source = metadata.get("tokenizer.chat_template")
    template = ChatTemplate(source, **spelled) if isinstance(source, str) else None
    return TextModel(tokenizer, eos_ids=frozenset(end for end in ends if end is not None), chat_template=template)


def _from_folder(folder: Path) -> TextModel:
    if not (folder / "tokenizer.json").is_file():
        raise InvalidCheckpoint(f"{folder} has no tokenizer.json", param="tokenizer.json")
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    bos, eos = _spelling(config, "bos_token"), _spelling(config, "eos_token")
    source = _template_source(folder, config)
    return TextModel(
        tokenizer,
        eos_ids=_eos_ids(folder, tokenizer, eos),
        chat_template=None if source is None else ChatTemplate(source, bos_token=bos, eos_token=eos),
        added=_added_tokens(tokenizer, config, bos, eos),
    )


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower for a file that it cannot read
        raise InvalidCheckpoint(f"{path} is not a tokenizer: {error}", param="tokenizer.json") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file that a checkpoint may leave out."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidCheckpoint(f"{path} is not JSON: {error}", param=path.name) from error
    if not isinstance(value, dict):
        raise InvalidCheckpoint(f"{path} is not a JSON object", param=path.name)
    return value


def _spelling(config: Mapping[str, Any], key: str) -> str | None:
    """A token of tokenizer_config.json: a text, or an object that holds it."""
    value = config.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    if isinstance(value, dict):
        value = value.get("default")
    return value if isinstance(value, str) else None


def _eos_ids(folder: Path, tokenizer: Tokenizer, eos: str | None) -> frozenset[int]:
    """Tokens that end an answer: the generation settings' (else the model's), and the tokenizer's own."""
    named = _read_json(folder / "generation_config.json").get("eos_token_id")
    if named is None:
        named = _read_json(folder / "config.json").get("eos_token_id")
    own = None if eos is None else tokenizer.token_to_id(eos)
    ids = [*(named if isinstance(named, list) else [named]), own]
    return frozenset(token for token in ids if isinstance(token, int))


def _added_tokens(
    tokenizer: Tokenizer, config: Mapping[str, Any], bos: str | None, eos: str | None
) -> AddedTokens | None:
    """Where tokenizer_config.json says what to add it outranks the post-processor, as its readers expect."""
    if not isinstance(config.get("add_bos_token"), bool):
        return None
    sides = []
    for wanted, token in ((config["add_bos_token"], bos), (config.get("add_eos_token") is True, eos)):
        index = tokenizer.token_to_id(token) if wanted and token is not None else None
        sides.append(() if index is None else (index,))
    return AddedTokens(*sides)
