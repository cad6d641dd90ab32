"""Masks of grammars: what they let through fits, and the state follows from the tokens alone."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from cluster.answers.structured import MAX_GRAMMAR, requested_form
from planner.errors import GrammarFailed
from planner.request import SamplingParams
from planner.step import Chunk
from protos.openai import CompletionBody
from tests.grammar_rig import EOS, TEXT, allowed, mask_of, row, schema_grammar, walk
from tests.random_schemas import random_schema
from worker.grammars import Grammars, check_grammar
from worker.masks import NoMasks, constrained_row
from worker.vocabulary import Vocabulary

COLOUR = schema_grammar(
    {
        "type": "object",
        "properties": {"color": {"enum": ["red", "green", "blue"]}, "ok": {"type": "boolean"}},
        "required": ["color", "ok"],
        "additionalProperties": False,
    }
)


def choice(*texts: str) -> str:
    form = requested_form(CompletionBody(prompt="x", guided_choice=list(texts)))
    assert form is not None
    return form.grammar


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(TEXT.vocabulary)
    yield made
    made.close()


def test_random_answers_fit_the_schema(grammars: Grammars) -> None:
    answers = {walk(grammars, COLOUR, seed) for seed in range(40)}
    assert len(answers) == 6
    assert all(set(json.loads(answer or "")) == {"color", "ok"} for answer in answers)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_answers_to_random_schemas_validate(grammars: Grammars, first: int) -> None:
    num_ended = 0
    for seed in range(first, first + 20):
        schema = random_schema(seed)
        grammar = schema_grammar(schema)
        assert check_grammar(grammar) is None, schema
        answer = walk(grammars, grammar, seed)
        if answer is not None:
            num_ended += 1
            jsonschema.validate(json.loads(answer), schema, format_checker=jsonschema.FormatChecker())
    assert num_ended >= 15


def test_forced_tokens_are_what_masks_leave_one_by_one(grammars: Grammars) -> None:
    num_forced, num_single = 0, 0
    for seed in range(20):
        draw, grammar, tokens = random.Random(seed), schema_grammar(random_schema(seed)), list[int]()
        while len(tokens) < 200:
            asked = row(grammar, tokens, sequence_id=seed)
            choices = allowed(mask_of(grammars, asked))
            (forced,) = grammars.forced([asked])
            for place, token in enumerate(forced):
                again = row(grammar, [*tokens, *forced[:place]], sequence_id=1000)
                assert allowed(mask_of(grammars, again)) == [token]
            grammars.drop([1000])
            num_forced += bool(forced)
            num_single += len(choices) == 1 and choices != [EOS]
            token = draw.choice(choices)
            if token == EOS:
                break
            tokens += forced or (token,)
    assert num_forced > 100
    assert num_forced >= 0.9 * num_single


def test_nothing_is_forced_where_some_tokens_may_not_be_drawn_or_the_answer_is_over(grammars: Grammars) -> None:
    asked = row(COLOUR)
    mask_of(grammars, asked)
    (forced,) = grammars.forced([asked])
    assert TEXT.decode(list(forced)) == '{"color": "'
    assert grammars.forced([row(COLOUR, masked=frozenset({EOS}))]) == [()]
    over = row(COLOUR, [*TEXT.encode('{"color": "red", "ok": true}'), EOS])
    mask_of(grammars, over)
    assert grammars.forced([over]) == [()]
    assert grammars.forced([row(COLOUR, sequence_id=77)]) == [()], "a sequence that nobody asked masks for"
    assert NoMasks().forced([asked]) == [()]


def test_a_state_that_is_replayed_is_the_state_that_went_step_by_step(grammars: Grammars) -> None:
    draw, tokens = random.Random(3), list[int]()
    while True:
        went = mask_of(grammars, row(COLOUR, tokens, sequence_id=1))
        replayed = mask_of(grammars, row(COLOUR, tokens, sequence_id=100 + len(tokens)))
        assert (went == replayed).all()
        token = draw.choice(allowed(went))
        if token == EOS:
            break
        tokens.append(token)
    assert len(tokens) > 10


def test_sequences_that_move_between_compiled_copies_keep_their_state(grammars: Grammars) -> None:
    """With several threads a grammar is compiled several times, and sequences that began together are spread."""
    grammar = schema_grammar({"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 99})
    spread = Grammars(TEXT.vocabulary, num_threads=4)
    draw, tokens = random.Random(3), [list[int]() for _ in range(12)]
    for _ in range(30):
        asked = [row(grammar, generated, sequence_id=place) for place, generated in enumerate(tokens)]
        masks = spread.masks(asked)
        for generated, mask, expected in zip(tokens, masks, grammars.masks(asked), strict=True):
            assert isinstance(mask, np.ndarray)
            assert np.array_equal(mask, expected)
            generated.append(draw.choice(allowed(mask)))
    grammars.drop(range(12))
    spread.close()


def test_each_sequence_has_a_state_of_its_own(grammars: Grammars) -> None:
    grammar = choice("ab", "cd")
    a, b, c, d = (TEXT.encode(letter)[0] for letter in "abcd")
    joined = TEXT.encode("ab")[0]
    masks = grammars.masks([row(grammar, [a], 1), row(grammar, [c], 2), row(grammar, [], 3)])
    assert [allowed(np.asarray(mask)) for mask in masks] == [[b], [d], sorted([a, c, joined])]


def test_a_finished_answer_may_only_end(grammars: Grammars) -> None:
    tokens = TEXT.encode('{"color": "red", "ok": true}')
    assert allowed(mask_of(grammars, row(COLOUR, tokens))) == [EOS]
    assert allowed(mask_of(grammars, row(COLOUR, [*tokens, EOS]))) == [EOS]


def test_what_must_not_be_drawn_yet_is_drawn_when_nothing_else_is_left(grammars: Grammars) -> None:
    grammar = choice("hello", "hell")
    begun = TEXT.encode("hell")
    letter_o = TEXT.encode("o")[0]
    assert allowed(mask_of(grammars, row(grammar, begun))) == sorted([EOS, letter_o])
    masked = frozenset({EOS})
    assert allowed(mask_of(grammars, row(grammar, begun, masked=masked))) == [letter_o]
    assert allowed(mask_of(grammars, row(grammar, [*begun, letter_o], masked=masked))) == [EOS]


def test_a_sequence_that_left_its_grammar_fails_alone(grammars: Grammars) -> None:
    astray = TEXT.encode("{nonsense")
    failed, fine = grammars.masks([row(COLOUR, astray, 1), row(COLOUR, [], 2)])
    assert isinstance(failed, GrammarFailed)
    assert len(allowed(np.asarray(fine))) > 0
    grammars.drop([1])
    assert len(allowed(mask_of(grammars, row(COLOUR, [], 1)))) > 0


def test_a_grammar_that_does_not_compile_fails_its_row(grammars: Grammars) -> None:
    failed, fine = grammars.masks([row("start: nothing_of_that_name", [], 1), row(COLOUR, [], 2)])
    assert isinstance(failed, GrammarFailed)
    assert "nothing_of_that_name" in failed.message
    assert isinstance(fine, np.ndarray)


def test_without_a_vocabulary_or_an_end_token_a_row_fails() -> None:
    endless = Grammars(lambda: Vocabulary((b"a", b"b"), frozenset(), frozenset(), lambda _: []))
    for maker, words in ((NoMasks(), "no vocabulary"), (endless, "no token that ends")):
        failed = maker.masks([row(COLOUR)])[0]
        assert isinstance(failed, GrammarFailed)
        assert words in failed.message
        maker.close()


def test_a_token_that_only_the_device_knew_is_put_behind_the_history() -> None:
    chunk = Chunk(
        sequence_id=4,
        start=5,
        length=1,
        cells=np.arange(6, dtype=np.int32),
        tokens=None,
        samples=True,
        sampling=SamplingParams(grammar=COLOUR),
        history=np.array([9, 9, 9, 1, 2], dtype=np.int64),
        num_prompt=3,
    )
    assert constrained_row(chunk, 7).generated.tolist() == [1, 2, 7]
    known = chunk._replace(tokens=np.array([7]), history=np.array([9, 9, 9, 1, 2, 7], dtype=np.int64))
    assert constrained_row(known).generated.tolist() == [1, 2, 7]


def test_a_metaspace_tokenizer_writes_what_goes_on_without_a_space() -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers

    from cluster.language.text import TextModel

    letters = ["<0x02>", "▁", *'{"ab:', "▁a"]
    tokenizer = Tokenizer(
        models.BPE(vocab={name: i for i, name in enumerate(letters)}, merges=[("▁", "a")], byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    text = TextModel(tokenizer, eos_ids=frozenset({0}))
    vocabulary = text.vocabulary()
    assert b"".join(vocabulary.tokens[i] for i in text.encode("ab", add_special_tokens=False)) == b" ab"
    assert b"".join(vocabulary.tokens[i] for i in vocabulary.encode("ab")) == b"ab"


def chained_rules() -> str:
    """Rules that are nothing but the next one's name."""
    rules = [f"r{i}: r{i + 1}" for i in range(15_000)]
    return LLMatcher.grammar_from_lark("\n".join(["start: r0", *rules, 'r15000: "red"']))


def chained_schemas() -> str:
    """Objects of one property each, whose schema is the next one's."""
    below = [{"type": "object", "properties": {"b": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(3_500)]
    return schema_grammar({"$ref": "#/$defs/0", "$defs": dict(enumerate([*below, {"const": 1}]))})


@pytest.mark.parametrize("chained", [chained_rules, chained_schemas])
def test_a_grammar_that_nests_as_deep_as_its_text_allows_ends_no_process(
    grammars: Grammars, chained: Callable[[], str]
) -> None:
    """The library compiles by recursion, and more levels than fit onto a usual stack would end the process."""
    grammar = chained()
    assert len(grammar) < MAX_GRAMMAR
    assert check_grammar(grammar) is None
    tokens: list[int] = []
    for _ in range(3):
        mask = mask_of(grammars, row(grammar, tokens))
        tokens.append(allowed(mask)[0])


NOWHERE = {
    "rules in a circle": LLMatcher.grammar_from_lark("start: a\na: b\nb: a"),
    "schemas in a circle": schema_grammar({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "no character at all": LLMatcher.grammar_from_regex(r"[^\s\S]"),
    "two things at once": LLMatcher.grammar_from_lark("start: BOTH\nBOTH: /red/ & /green/"),
}


@pytest.mark.parametrize("grammar", NOWHERE.values(), ids=NOWHERE)
def test_a_grammar_that_no_text_fits_leaves_nothing_to_draw_and_not_even_the_end(
    grammars: Grammars, grammar: str
) -> None:
    """So that it is refused as what the client asked for, and is no failure of the service."""
    for _ in range(2):
        assert allowed(mask_of(grammars, row(grammar))) == []
    assert allowed(mask_of(grammars, row(grammar, masked=frozenset({EOS})))) == []
    assert allowed(mask_of(grammars, row(schema_grammar({"const": 1}), sequence_id=2)))


def test_a_fault_below_thousands_of_rules_is_found_at_once_where_rust_is_told_to_trace() -> None:
    """Traces at each of these levels take minutes."""
    program = """
from llguidance import LLMatcher
from worker.grammars import check_grammar
rules = [f"r{i}: r{i + 1}" for i in range(8_000)]
print(check_grammar(LLMatcher.grammar_from_lark(chr(10).join(["start: r0", *rules, "r8000: nowhere"]))))
"""
    environment = {name: value for name, value in os.environ.items() if name != "RUST_LIB_BACKTRACE"}
    told = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"RUST_BACKTRACE": "1"},
        timeout=60,
        check=True,
        capture_output=True,
        text=True,
    )
    assert 'unknown name: "nowhere"' in told.stdout
