"""Tokenizers from GGUF metadata: each model's own way of splitting, and SmolLM2's against its published tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from cluster.language.gguf_tokenizer import gguf_tokenizer
from cluster.language.text import TextModel, load_text
from planner.errors import InvalidCheckpoint, UnsupportedModel
from tests.tiny_text import MERGES, SPECIALS, TEMPLATE, tiny_text
from worker.gguf_layout import read_gguf_metadata

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIALS, *ALPHABET, *("".join(pair) for pair in MERGES)]
CONTROL, NORMAL, USER = 3, 1, 4


def metadata(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "token_type": [CONTROL] * len(SPECIALS) + [NORMAL] * (len(TOKENS) - len(SPECIALS)),
        "merges": [" ".join(pair) for pair in MERGES],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    merged = {key: value for key, value in (values | changes).items() if value is not None}
    return {f"tokenizer.ggml.{key}": value for key, value in merged.items()}


def words(pre: str, text: str) -> list[str]:
    """How a pre-tokenizer splits plain ASCII text."""
    pre_tokenizer = gguf_tokenizer(metadata(pre=pre)).pre_tokenizer
    assert pre_tokenizer is not None
    return [word.replace("Ġ", " ").replace("Ċ", "\n") for word, _ in pre_tokenizer.pre_tokenize_str(text)]


GPT2_WORDS = ["I", "'", "M", " it", "'s", " 12345", "!", "\n", "\n", "x"]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", GPT2_WORDS),
        ("default", GPT2_WORDS),
        ("smollm", ["I", "'", "M", " it", "'s", " ", "1", "2", "3", "4", "5", "!", "\n", "\n", "x"]),
        ("llama-bpe", ["I", "'M", " it", "'s", " ", "123", "45", "!\n\n", "x"]),
        ("qwen2", ["I", "'M", " it", "'s", " ", "1", "2", "3", "4", "5", "!\n\n", "x"]),
        ("gpt-4o", ["I'M", " it's", " ", "123", "45", "!\n\n", "x"]),
    ],
)
def test_each_name_splits_as_its_models_were_trained(pre: str, expected: list[str]) -> None:
    assert words(pre, "I'M it's 12345!\n\nx") == expected


def test_an_unknown_split_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="quokka"):
        gguf_tokenizer(metadata(pre="quokka"))


@pytest.mark.parametrize("model", ["llama", "bert", "t5", "rwkv", None])
def test_another_kind_of_tokenizer_is_refused_by_name(model: str | None) -> None:
    with pytest.raises(UnsupportedModel, match=str(model)):
        gguf_tokenizer(metadata(model=model))


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": None},
        {"merges": None},
        {"merges": ["abc"]},
        {"token_type": [1, 2]},
        {"eos_token_id": 9999},
        {"bos_token_id": -1},
        {"tokens": [*TOKENS[:-1], TOKENS[0]]},
    ],
)
def test_an_inconsistent_vocabulary_is_an_invalid_checkpoint(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidCheckpoint):
        gguf_tokenizer(metadata(**changes))


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    kinds = [CONTROL, CONTROL, USER] + [NORMAL] * (len(TOKENS) - 3)
    text = TextModel(gguf_tokenizer(metadata(token_type=kinds)), eos_ids=frozenset())
    assert text.encode("<|end|>a<|stop|>") == [0, TOKENS.index("a"), 2]
    assert text.decode([0, TOKENS.index("a"), 2], with_special=False) == "a<|stop|>"


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True), (False, False)])
def test_start_and_end_tokens_are_added_as_the_file_says(bos: bool, eos: bool) -> None:
    tokenizer = gguf_tokenizer(metadata(add_bos_token=bos, add_eos_token=eos))
    assert tokenizer.encode("hello").ids == [1] * bos + [TOKENS.index("hello")] + [2] * eos


def test_words_of_the_vocabulary_stay_whole_where_the_model_wants_it() -> None:
    merges = ["a b"]  # "hello" cannot be reached by merging
    whole = gguf_tokenizer(metadata(pre="llama-bpe", merges=merges))
    parts = gguf_tokenizer(metadata(pre="gpt-2", merges=merges))
    assert whole.encode("hello").ids == [TOKENS.index("hello")]
    assert len(parts.encode("hello").ids) == 5


# ---------------------------------------------------------------------------------------------- the file itself


def write(path: Path, fill: Callable[[GGUFWriter], None]) -> Path:
    writer = GGUFWriter(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_uint8("u8", 255)
        writer.add_int8("i8", -128)
        writer.add_uint16("u16", 65535)
        writer.add_int16("i16", -32768)
        writer.add_uint32("u32", 2**32 - 1)
        writer.add_int32("i32", -(2**31))
        writer.add_uint64("u64", 2**64 - 1)
        writer.add_int64("i64", -(2**63))
        writer.add_float32("f32", 0.5)
        writer.add_float64("f64", 0.1)
        writer.add_bool("yes", True)
        writer.add_string("text", "naïve 🦙")
        writer.add_array("list", ["a", "ü", "c"])
        writer.add_array("numbers", [1, -2, 3])

    values = read_gguf_metadata(write(tmp_path / "x.gguf", fill))
    del values["general.architecture"]
    assert values == {
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -32768,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "text": "naïve 🦙",
        "list": ["a", "ü", "c"],
        "numbers": [1, -2, 3],
    }


def test_a_file_cut_anywhere_in_its_head_is_an_invalid_checkpoint(tmp_path: Path) -> None:
    whole = write(tmp_path / "x.gguf", lambda writer: writer.add_array("list", ["a", "b"])).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(len(whole.rstrip(b"\0"))):
        path.write_bytes(whole[:length])
        with pytest.raises(InvalidCheckpoint):
            read_gguf_metadata(path)
    with pytest.raises(InvalidCheckpoint):
        read_gguf_metadata(tmp_path / "missing.gguf")


def test_a_gguf_file_is_a_whole_text_model(tmp_path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(TOKENS)
        writer.add_token_types([CONTROL] * 3 + [NORMAL] * (len(TOKENS) - 3))
        writer.add_token_merges([" ".join(pair) for pair in MERGES])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(TEMPLATE)

    text = load_text(write(tmp_path / "x.gguf", fill))
    sample = "hello wab, naïve 🦙 <|stop|>"
    assert text.encode(sample) == tiny_text().encode(sample)
    assert text.eos_ids == {2}
    assert text.chat_template is not None
    assert text.chat_template.render([{"role": "user", "content": "x"}]).endswith("<|start|>assistant:")


# ---------------------------------------------------------------------------------------------- SmolLM2


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> TextModel:
    return load_text(smollm2_path)


@pytest.fixture(scope="module")
def published(smollm2_path: Path) -> Any:
    """What `transformers` makes of the same file. Its conversion forgets that each digit stands alone."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)


NO_DIGITS = st.characters(exclude_categories=("Cs", "Nd", "Nl", "No"))


@pytest.mark.model
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet=NO_DIGITS))
def test_smollm2_tokens_are_those_of_transformers_but_for_digits(smollm2: TextModel, published: Any, text: str) -> None:
    assert smollm2.encode(text) == published(text)["input_ids"]


@pytest.mark.model
def test_smollm2_reads_each_digit_alone(smollm2: TextModel) -> None:
    names = [smollm2.tokens.name(token) for token in smollm2.encode("in 1984, x2")]
    assert names == ["in", " ", "1", "9", "8", "4", ",", " x", "2"]


@pytest.mark.model
def test_smollm2_chat_prompts_are_those_of_transformers(smollm2: TextModel, published: Any) -> None:
    conversations = [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "  How are you?\n"},
        ],
    ]
    assert smollm2.chat_template is not None
    for messages in conversations:
        for opens in (True, False):
            expected = published.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
            assert smollm2.chat_template.render(messages, add_generation_prompt=opens) == expected


@pytest.mark.model
def test_smollm2_text_comes_back_but_for_bytes_that_its_vocabulary_lacks(smollm2: TextModel) -> None:
    text = "  naïve  🦙 café\t你好\r\n<|im_end|> 1984"
    assert smollm2.decode(smollm2.encode(text)) == text
    assert smollm2.encode("\U00040000") == smollm2.encode("\U00080000"), "no token has the byte F1 or F2"
    assert smollm2.tokens.least("\U00040000" * 100) <= len(smollm2.encode("\U00040000" * 100))


@pytest.mark.model
def test_smollm2_ends_its_answers_with_im_end(smollm2: TextModel) -> None:
    assert {smollm2.tokens.name(token) for token in smollm2.eos_ids} == {"<|im_end|>"}
    assert smollm2.vocab_size == 49152
    assert isinstance(gguf_tokenizer(metadata()), Tokenizer)
