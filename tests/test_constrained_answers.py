"""Answers that follow a grammar, drawn by the torch executor under the real planner: each fits, whatever else runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from cluster.routing.run import continuation
from planner.errors import GrammarFailed
from planner.request import FinishReason, Request, SamplingParams, Update
from tests.grammar_rig import EOS, TEXT, OneByOne, schema_grammar
from tests.torch_rig import GREEDY, Rig, load
from worker.forwards import EagerForwards
from worker.grammars import Grammars
from worker.kv_pool import KvPool
from worker.program import Program
from worker.torch_executor import TorchExecutor

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "c": {"enum": ["red", "blue", 7]},
        "n": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["c", "n"],
    "additionalProperties": False,
}
GRAMMAR = schema_grammar(SCHEMA)
STOPS = frozenset({EOS})
NewRig = Callable[..., Rig]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    folder: Path = tmp_path_factory.mktemp("tiny")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": TEXT.vocab_size + 7,  # padded, as real models' are
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return load(str(folder), load_format="dummy")


@pytest.fixture
def new_rig(program: Program) -> Iterator[NewRig]:
    made: list[TorchExecutor] = []

    def make(capacity: int = 4096, *, forces: bool = True, **options: Any) -> Rig:
        info, decoder = program.info, program.decoder
        pool = KvPool(info.num_layers, capacity, info.num_kv_heads, info.head_dim, decoder.dtype, decoder.device)
        kind = Grammars if forces else OneByOne
        forwards, grammars = EagerForwards(decoder, pool), kind(TEXT.vocabulary)
        made.append(TorchExecutor(replace(info, num_cells=capacity), forwards, grammars=grammars))
        return Rig(made[-1], **options)

    yield make
    for executor in made:
        executor.close()


def asking(seed: int = 0, grammar: str | None = GRAMMAR, temperature: float = 1.5, **options: Any) -> Request:
    prompt = np.array(TEXT.encode(f"hello {seed}"), dtype=np.int64)
    logprobs = options.pop("logprobs", None)
    sampling = SamplingParams(temperature=temperature, seed=seed, grammar=grammar, logprobs=logprobs)
    return Request(prompt, options.pop("max_tokens", 60), sampling, stop_token_ids=STOPS, **options)


def fits(tokens: list[int]) -> bool:
    assert tokens[-1] == EOS, TEXT.decode(tokens)
    jsonschema.validate(json.loads(TEXT.decode(tokens[:-1])), SCHEMA)
    return True


def test_hot_answers_of_one_request_all_fit_and_differ(new_rig: NewRig) -> None:
    answers = new_rig().answer([asking(n=5)])[0]
    assert all(fits(tokens) for tokens in answers)
    assert len(set(map(tuple, answers))) > 2


def test_a_plain_mate_answers_as_it_does_alone(new_rig: NewRig) -> None:
    plain = asking(5, grammar=None, max_tokens=20)
    alone = new_rig().answer([plain])
    together = new_rig().answer([asking(1), plain, asking(2, temperature=0.0), asking(3, n=2)])
    assert together[1] == alone[0]
    assert all(fits(tokens) for place in (0, 2, 3) for tokens in together[place])


def test_an_answer_is_the_same_alone_batched_and_preempted(new_rig: NewRig) -> None:
    requests = [asking(seed) for seed in range(4)]
    alone = new_rig().answer_alone(requests)
    assert new_rig().answer(requests) == alone
    tight = new_rig(capacity=66)
    assert tight.answer(requests) == alone
    assert tight.planner.metrics.num_preemptions > 0


def test_an_answer_is_the_same_whether_forced_tokens_are_fed_at_once_or_drawn(new_rig: NewRig) -> None:
    requests = [asking(seed, n=1 + seed % 2, max_tokens=9 + 10 * seed) for seed in range(6)]
    requests += [asking(7, grammar=None, max_tokens=20), asking(8, logprobs=1)]
    at_once, drawn = new_rig(), new_rig(forces=False)
    assert at_once.answer(requests) == drawn.answer(requests)
    assert new_rig(capacity=80).answer(requests) == drawn.answer(requests)
    assert at_once.planner.metrics.num_tokens_forced > 50
    assert drawn.planner.metrics.num_tokens_forced == 0
    assert at_once.answer_alone(requests[:2]) == drawn.answer_alone(requests[:2])


def test_one_answer_takes_fewer_steps_than_it_has_tokens(new_rig: NewRig) -> None:
    rig = new_rig()
    (answer,) = rig.answer([asking(3)])[0]
    assert fits(answer)
    assert rig.planner.metrics.num_steps < len(answer) / 2


def test_a_continuation_elsewhere_says_what_would_have_come(new_rig: NewRig) -> None:
    request = asking(11, n=2)
    whole = new_rig().answer([request])[0]
    for index, tokens in enumerate(whole):
        for cut in (1, 9):
            assert new_rig().answer([continuation(request, index, tokens[:cut])])[0][0] == tokens[cut:]


def test_penalties_and_a_minimum_go_with_a_grammar(new_rig: NewRig) -> None:
    prompt = np.array(TEXT.encode("hello"), dtype=np.int64)
    sampling = SamplingParams(temperature=1.0, seed=3, frequency_penalty=1.0, grammar=GRAMMAR)
    request = Request(prompt, 60, sampling, stop_token_ids=STOPS, min_tokens=50)
    assert fits(new_rig().answer([request])[0][0])


def test_log_probabilities_of_a_constrained_answer_are_finite(new_rig: NewRig) -> None:
    rig = new_rig()
    sampling = SamplingParams(temperature=0.0, logprobs=20, grammar=GRAMMAR)
    rig.planner.submit(Request(np.array([70, 71]), 60, sampling, stop_token_ids=STOPS))
    scores = [score for update in rig.run() for score in update.logprobs]
    assert len(scores) > 10
    assert all(np.isfinite(value) for s in scores for value in (s.logprob, *(p for _, p in s.top)))


def test_a_grammar_that_fails_ends_its_own_sequence_alone(new_rig: NewRig) -> None:
    rig = new_rig()
    broken = rig.planner.submit(asking(1, grammar="start: nothing_of_that_name"))
    fine = rig.planner.submit(asking(2))
    ends: dict[int, Update] = {update.request_id: update for update in rig.run() if update.finish_reason is not None}
    assert isinstance(ends[broken].error, GrammarFailed)
    assert ends[fine].finish_reason is FinishReason.STOP


def test_the_engine_tells_the_executor_what_it_accepted() -> None:
    from tests.fakes import FakeExecutor, fake_limits, fake_request
    from worker.engine import Engine

    executor = FakeExecutor()
    engine = Engine(executor, fake_limits(executor.info), inbox_size=10, on_death=lambda _: None)
    engine.start()
    client = engine.connect(lambda _: None)
    request = fake_request(sampling=SamplingParams(grammar=GRAMMAR))
    client.submit(1, request)
    client.submit(2, fake_request(prompt=[5000]))  # refused: not in the vocabulary
    executor.wait_launched(1)
    engine.stop()
    assert executor.prepared == [request]


def test_greedy_is_the_likeliest_that_the_grammar_allows(new_rig: NewRig) -> None:
    free = new_rig().answer([Request(np.array([70, 71]), 1, GREEDY)])[0][0]
    answer = new_rig().answer([asking(4, temperature=0.0)])[0][0]
    assert fits(answer)
    assert free != answer[:1]
