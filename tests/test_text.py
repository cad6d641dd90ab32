"""Text to tokens and back: exact bytes, whole characters, and what a checkpoint folder says."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from cluster.language.detokeniser import Detokeniser, TokenBytes, detokenise
from cluster.language.text import load_text
from planner.errors import InvalidCheckpoint, UnsupportedModel
from tests.tiny_text import EOS, TEMPLATE, tiny_text, tiny_tokenizer

BYTE_LEVEL = tiny_tokenizer()
TEXT = tiny_text()


def sentencepiece_like() -> Tokenizer:
    """Metaspace words over bytes, in the manner of Llama 2."""
    words = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "e", "▁h", "▁he"]
    merges = [("▁", "h"), ("▁h", "e")]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges, byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words[:2]])
    return tokenizer


SENTENCEPIECE = sentencepiece_like()
TOKENIZERS = {"byte-level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE}
TABLES = {name: TokenBytes(tokenizer) for name, tokenizer in TOKENIZERS.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text())
def test_pieces_joined_are_the_tokenizers_own_decoding(name: str, text: str) -> None:
    ids = TOKENIZERS[name].encode(text).ids
    known = Detokeniser(TABLES[name], from_start=True)
    pieces = [known.add(token) for token in ids] + [known.finish()]
    assert "".join(pieces) == TOKENIZERS[name].decode(ids, skip_special_tokens=True)


@given(text=st.text(alphabet=st.characters(exclude_characters="<", exclude_categories=("Cs",)), min_size=1))
def test_no_piece_of_whole_text_has_a_replacement_character_of_its_own(text: str) -> None:
    known = Detokeniser(TABLES["byte-level"])
    pieces = [known.add(token) for token in BYTE_LEVEL.encode(text).ids]
    assert "".join(pieces) == text
    assert known.finish() == ""


@given(ids=st.lists(st.integers(0, len(TABLES["byte-level"]) - 1)))
def test_any_tokens_at_all_decode_as_the_tokenizer_decodes_them(ids: list[int]) -> None:
    assert detokenise(TABLES["byte-level"], ids, with_special=False) == BYTE_LEVEL.decode(ids)


@given(text=st.text(), data=st.data())
def test_a_text_cut_anywhere_loses_only_its_last_character(text: str, data: st.DataObject) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    known = Detokeniser(TABLES["byte-level"])
    shown = "".join(known.add(token) for token in ids[: data.draw(st.integers(0, len(ids)))])
    assert text.replace("<|", "").startswith(shown.replace("<|", "")) or "<|" in text


def test_a_character_that_was_cut_off_ends_as_one_replacement() -> None:
    known = TEXT.detokeniser()
    ids = TEXT.encode("a🦙")
    assert [known.add(token) for token in ids[:-1]] == ["a", "", "", ""]
    assert known.finish() == "�"


def test_a_continuation_keeps_the_space_that_a_first_word_has_not() -> None:
    ids = SENTENCEPIECE.encode("he").ids
    assert Detokeniser(TABLES["sentencepiece"]).add(ids[0]) == " he"
    assert Detokeniser(TABLES["sentencepiece"], from_start=True).add(ids[0]) == "he"


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    ids = [0, *TEXT.encode("hello"), EOS]
    assert TEXT.decode(ids, with_special=False) == "hello"
    assert TEXT.decode(ids) == "<|end|>hello<|stop|>"


def test_ids_without_a_spelling_are_silent() -> None:
    beyond = TEXT.vocab_size + 5
    assert TEXT.detokeniser().add(beyond) == ""
    assert TEXT.tokens.of(beyond) == b""


def test_token_names_tell_half_characters_apart() -> None:
    names = {TEXT.tokens.name(token) for token in range(TEXT.vocab_size)}
    assert len(names) == TEXT.vocab_size
    assert {"hello", " w", "bytes:\\xf0"} <= names


@given(text=st.text(alphabet="abhelow <|stop>🦙"))
@settings(max_examples=200)
def test_the_least_count_never_exceeds_the_true_one(text: str) -> None:
    assert TEXT.tokens.least(text) <= len(TEXT.encode(text))


@given(text=st.text())
def test_the_least_count_knows_of_bytes_without_a_token(text: str) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:150]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert TokenBytes(tokenizer).least(text) == len(tokenizer.encode(text).ids)


def test_the_least_count_makes_no_claim_where_text_may_shrink() -> None:
    assert TEXT.tokens.least("x" * 1000) > 10
    assert TABLES["sentencepiece"].least("x" * 1000) == 0


def test_another_kind_of_decoder_is_refused_by_name() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        TokenBytes(tokenizer)


# ---------------------------------------------------------------------------------------------- checkpoint folders


def folder(path: Path, tokenizer: Tokenizer | None = None, **files: Any) -> Path:
    (tokenizer or tiny_tokenizer()).save(str(path / "tokenizer.json"))
    for name, value in files.items():
        stem, _, kind = name.rpartition("_")
        content = value if isinstance(value, str) else json.dumps(value)
        (path / f"{stem}.{kind}").write_text(content, encoding="utf-8")
    return path


def test_a_folder_gives_template_and_end_tokens(tmp_path: Path) -> None:
    config = {"chat_template": TEMPLATE, "bos_token": "<|start|>", "eos_token": {"content": "<|stop|>"}}
    text = load_text(folder(tmp_path, tokenizer_config_json=config, generation_config_json={"eos_token_id": [0, 2]}))
    assert text.eos_ids == {0, 2}
    assert text.chat_template is not None
    assert text.chat_template.render([{"role": "user", "content": "x"}]).endswith("<|start|>assistant:")


def test_the_models_own_end_token_stands_in_for_generation_settings(tmp_path: Path) -> None:
    assert load_text(folder(tmp_path, config_json={"eos_token_id": 1})).eos_ids == {1}


def test_a_bare_tokenizer_is_enough(tmp_path: Path) -> None:
    text = load_text(folder(tmp_path))
    assert text.eos_ids == frozenset()
    assert text.chat_template is None
    assert text.encode("hello") == TEXT.encode("hello")


@pytest.mark.parametrize(
    "template",
    [
        [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}],
        {"tools": "no", "default": "yes"},
        "yes",
    ],
)
def test_a_chat_template_may_be_one_of_several(tmp_path: Path, template: Any) -> None:
    text = load_text(folder(tmp_path, tokenizer_config_json={"chat_template": template}))
    assert text.chat_template is not None
    assert text.chat_template.render([]) == "yes"


def test_a_template_file_outranks_the_configured_one(tmp_path: Path) -> None:
    text = load_text(folder(tmp_path, tokenizer_config_json={"chat_template": "no"}, chat_template_jinja="yes"))
    assert text.chat_template is not None
    assert text.chat_template.render([]) == "yes"


@pytest.mark.parametrize(("configured", "starts"), [(None, True), (True, True), (False, False)])
def test_a_start_token_is_added_as_the_checkpoint_says(tmp_path: Path, configured: bool | None, starts: bool) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 1)])
    config: dict[str, Any] = {"bos_token": "<|start|>"}
    if configured is not None:
        config["add_bos_token"] = configured
    text = load_text(folder(tmp_path, tokenizer, tokenizer_config_json=config))
    bare = TEXT.encode("hello")
    assert text.encode("hello") == ([1, *bare] if starts else bare)
    assert text.encode("hello", add_special_tokens=False) == bare


def test_truncation_and_padding_of_the_file_are_not_kept(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    assert load_text(folder(tmp_path, tokenizer)).encode("abcdefgh") == TEXT.encode("abcdefgh")


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_a_broken_folder_is_an_invalid_checkpoint(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InvalidCheckpoint, match=r"tokenizer\.json"):
        load_text(tmp_path)


def test_a_broken_configuration_is_an_invalid_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="tokenizer_config"):
        load_text(folder(tmp_path, tokenizer_config_json="{"))
    with pytest.raises(InvalidCheckpoint, match="chat template"):
        load_text(folder(tmp_path, tokenizer_config_json={"chat_template": "{% for %}"}))


def test_metaspace_tokenizers_are_read(tmp_path: Path) -> None:
    words = ["▁hello", "▁world", "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    text = load_text(folder(tmp_path, tokenizer))
    assert text.decode(text.encode("hello world")) == "hello world"


def test_a_long_text_is_tokenised_beside_other_work() -> None:
    """The interpreter lock is free meanwhile: else every stream of a gateway would stand still for a long prompt."""
    ended, num_turns = threading.Event(), 0

    def work() -> None:
        nonlocal num_turns
        while not ended.wait(0.001):
            num_turns += 1

    beside = threading.Thread(target=work)
    beside.start()
    try:
        before = num_turns
        ids = TEXT.encode("hello wor" * 60_000)
        during = num_turns - before
    finally:
        ended.set()
        beside.join()
    assert len(ids) > 100_000
    assert during > 20
