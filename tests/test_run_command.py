"""The offline batch: every line gets its answer or its error, in order, and the run ends in order."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cluster.commands import run as run_command
from cluster.language.text import TextModel, load_text
from cluster.offline.batch import Batch
from cluster.offline.engine import Interrupted, OfflineEngine, running
from cluster.offline.files import Line, OrderedWriter, parse_line
from planner.errors import InvalidConfiguration, InvalidRequest
from planner.request import Adapter, SamplingParams
from tests.fake_slots import save_fake_adapter
from tests.fakes import FakeExecutor, expected_tokens, fake_info, fake_limits, fake_request
from worker.engine import Engine

VOCAB_SIZE = 1000
EOS = 999
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }};{% endfor %}answer:"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of one token a byte, and named tokens up to the fake's vocabulary."""
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate(alphabet)}
    vocabulary |= {f"<{index}>": index for index in range(len(alphabet), EOS)} | {"<eos>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def text(model_path: Path) -> TextModel:
    return load_text(model_path)


@contextmanager
def engine_of(executor: FakeExecutor, **limits: Any) -> Iterator[OfflineEngine]:
    engine = Engine(
        executor, fake_limits(executor.info, **limits), inbox_size=64, on_death=lambda error: None, check_cells=True
    )
    with running(engine) as offline:
        yield offline


def lines_of(*bodies: dict[str, Any]) -> list[Line]:
    return [parse_line(json.dumps(body).encode(), number, seed=number) for number, body in enumerate(bodies)]


def answers(
    text: TextModel, executor: FakeExecutor, *bodies: dict[str, Any], in_flight: int = 8
) -> list[dict[str, Any]]:
    file = io.StringIO()
    with engine_of(executor) as engine:
        batch = Batch(engine, text, OrderedWriter(file), max_num_seqs=16, on_line=lambda: None)
        batch.run(lines_of(*bodies), in_flight)
        snapshot = engine.engine.snapshot
    assert snapshot.owned_cells == 0
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_a_line_is_answered_with_the_engines_tokens_and_their_text(text: TextModel) -> None:
    (answer,) = answers(text, FakeExecutor(), {"id": "a", "prompt": "Hi", "max_tokens": 5, "seed": 7})
    prompt = text.encode("Hi")
    want = expected_tokens(fake_request(prompt, 5, sampling=SamplingParams(seed=7)))
    assert answer == {"id": "a", "text": text.decode(list(want)), "token_ids": list(want), "finish_reason": "length"}


def test_a_conversation_is_answered_as_the_chat_template_writes_it(text: TextModel) -> None:
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    asked = {"messages": messages, "max_completion_tokens": 5, "seed": 7}
    prompt = text.encode("system: Be brief;user: Hi;answer:", add_special_tokens=False)
    want = expected_tokens(fake_request(prompt, 5, sampling=SamplingParams(seed=7)))
    plain, scored, refused = answers(
        text,
        FakeExecutor(),
        asked,
        asked | {"logprobs": True, "top_logprobs": 2},
        asked | {"tools": [{"type": "function", "function": {"name": "f"}}]},
    )
    assert plain == {"id": 0, "text": text.decode(list(want)), "token_ids": list(want), "finish_reason": "length"}
    assert [len(score["top"]) for score in scored["logprobs"]] == [2] * 5
    assert refused["error"]["message"] == "tools is not supported in a batch file"


def test_answers_stand_in_the_order_of_the_lines_whichever_ends_first(text: TextModel) -> None:
    bodies = [{"prompt_token_ids": [1, 2, 3], "max_tokens": 40 - 3 * number} for number in range(12)]
    out = answers(text, FakeExecutor(), *bodies, in_flight=5)
    assert [answer["id"] for answer in out] == list(range(12))
    assert [len(answer["token_ids"]) for answer in out] == [40 - 3 * number for number in range(12)]


@pytest.mark.parametrize(
    ("raw", "line_id", "param"),
    [
        (b"{broken", 3, None),
        (b"[1]", 3, None),
        (b'{"id": "x"}', "x", "prompt"),
        (b'{"id": "x", "prompt": "a", "prompt_token_ids": [1]}', "x", "prompt"),
        (b'{"id": "x", "prompt": ["a", "b"]}', "x", "prompt"),
        (b'{"id": true, "prompt": "a"}', 3, "id"),
        (b'{"id": "x", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "x", "prompt"),
        (b'{"id": "x", "messages": []}', "x", "messages"),
        (b'{"custom_id": "x", "url": "/v1/completions", "body": {"prompt": "a"}}', 3, "body"),
        (b'{"id": "x", "prompt": "a", "stream": true}', "x", "stream"),
        (b'{"id": "x", "prompt": "a", "max_tokens": "3"}', "x", "max_tokens"),
        (b'{"id": "x", "prompt": "a", "temperatur": 1}', "x", "temperatur"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_with_its_id(raw: bytes, line_id: str | int, param: str | None) -> None:
    line = parse_line(raw, 3, seed=0)
    assert line.id == line_id
    assert isinstance(line.body, InvalidRequest)
    assert line.body.param == param


def test_a_bad_line_costs_no_other_line_its_answer(text: TextModel) -> None:
    out = answers(
        text,
        FakeExecutor(),
        {"id": "a", "prompt": "Hi", "max_tokens": 3},
        {"id": "b", "prompt": "Hi", "max_tokens": 30_000},
        {"id": "c", "prompt_token_ids": [1, 5000], "max_tokens": 3},
        {"id": "d", "prompt": "Hi", "temperature": -1},
        {"id": "e", "prompt": "Hi", "max_tokens": 3},
    )
    assert [answer["id"] for answer in out] == ["a", "b", "c", "d", "e"]
    assert [answer.get("error", {}).get("code") for answer in out] == [
        None,
        "context_length_exceeded",
        "invalid_request",
        "invalid_request",
        None,
    ]


def test_n_choices_are_n_lines_with_an_index(text: TextModel) -> None:
    out = answers(text, FakeExecutor(), {"id": "a", "prompt": "Hi", "n": 3, "max_tokens": 4, "seed": 1})
    request = fake_request(text.encode("Hi"), 4, sampling=SamplingParams(seed=1), n=3)
    assert [answer["index"] for answer in out] == [0, 1, 2]
    assert [tuple(answer["token_ids"]) for answer in out] == [expected_tokens(request, index) for index in range(3)]


def test_cached_prompt_tokens_count_once_a_line_however_many_updates_tell_them(text: TextModel) -> None:
    prompt = {"prompt": "x" * 20, "max_tokens": 9}
    with engine_of(FakeExecutor()) as engine:
        batch = Batch(engine, text, OrderedWriter(io.StringIO()), max_num_seqs=16, on_line=lambda: None)
        batch.run(lines_of(prompt, prompt | {"n": 3}), 1)
    assert (batch.totals.prompt_tokens, batch.totals.cached_prompt_tokens) == (40, 19)


def test_a_stop_string_cuts_the_text_and_ends_the_sequence(text: TextModel) -> None:
    spelled = text.encode("one two. three")
    executor = FakeExecutor(script=dict(enumerate(spelled, start=2)))
    (answer,) = answers(text, executor, {"prompt": "Hi", "stop": "two", "max_tokens": 900})
    assert (answer["text"], answer["finish_reason"]) == ("one ", "stop")
    assert answer["token_ids"] == text.encode("one two")
    assert len(executor.steps) < 30


def test_the_end_token_ends_a_line_and_is_not_text_unless_ignored(text: TextModel) -> None:
    script = dict(enumerate([*text.encode("ab"), EOS, *text.encode("cd")], start=2))
    body = {"prompt": "Hi", "max_tokens": 5}
    ended, ignored = answers(text, FakeExecutor(script=script), body, body | {"ignore_eos": True})
    assert (ended["text"], ended["token_ids"][-1], ended["finish_reason"]) == ("ab", EOS, "stop")
    assert (len(ignored["token_ids"]), ignored["finish_reason"]) == (5, "length")


def test_log_probabilities_are_given_where_asked_for(text: TextModel) -> None:
    plain, scored = answers(text, FakeExecutor(), {"prompt": "Hi"}, {"prompt": "Hi", "logprobs": 2, "max_tokens": 3})
    assert "logprobs" not in plain
    assert [score["token_id"] for score in scored["logprobs"]] == scored["token_ids"]
    assert scored["logprobs"][0]["top"][1] == [scored["token_ids"][0] + 1, -2.0]


def test_a_failed_forward_is_the_error_of_its_lines_and_the_run_goes_on(text: TextModel) -> None:
    executor = FakeExecutor()
    executor.fail_forward(2, lambda chunk: chunk.start + chunk.length > 20)
    long, short = {"prompt": "x" * 30, "max_tokens": 9, "n": 2}, {"prompt": "y", "max_tokens": 9}
    out = answers(text, executor, long, short)
    assert out[0]["error"]["code"] == "forward_failed"
    assert len(out[1]["token_ids"]) == 9


def test_a_dead_engine_is_the_error_of_every_line_that_has_no_answer(text: TextModel) -> None:
    executor = FakeExecutor()
    executor.die(3, RuntimeError("out of memory"))
    out = answers_of_dead_engine(text, executor)
    assert [answer["error"]["code"] for answer in out] == ["worker_lost"] * 4 + ["unavailable"] * 2


def answers_of_dead_engine(text: TextModel, executor: FakeExecutor) -> list[dict[str, Any]]:
    file = io.StringIO()
    with engine_of(executor) as engine:
        batch = Batch(engine, text, OrderedWriter(file), max_num_seqs=16, on_line=lambda: None)
        batch.run(lines_of(*[{"prompt": "Hi", "max_tokens": 50}] * 6), 4)
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_no_more_lines_are_submitted_than_may_be_in_flight(text: TextModel) -> None:
    read = 0

    def lines() -> Iterator[Line]:
        nonlocal read
        for line in lines_of(*[{"prompt": "Hi", "max_tokens": 2}] * 30):
            read += 1
            yield line

    done: list[int] = []
    with engine_of(FakeExecutor()) as engine:
        batch = Batch(engine, text, OrderedWriter(io.StringIO()), max_num_seqs=16, on_line=lambda: done.append(read))
        batch.run(lines(), 3)
    assert all(seen <= number + 3 for number, seen in enumerate(done))
    assert batch.totals.completed == 30


def test_an_interrupted_run_keeps_the_lines_that_were_answered(text: TextModel) -> None:
    executor = FakeExecutor()
    file = io.StringIO()
    with engine_of(executor) as engine:

        def on_line() -> None:
            if batch.totals.completed == 2:
                engine.interrupt()

        batch = Batch(engine, text, OrderedWriter(file), max_num_seqs=16, on_line=on_line)
        bodies = [{"prompt": "Hi", "max_tokens": length} for length in (500, 3, 600, 4)]
        with pytest.raises(Interrupted):
            batch.run(lines_of(*bodies), 4)
    assert [json.loads(line)["id"] for line in file.getvalue().splitlines()] == [1, 3]


def run_args(model: Path, prompts: Path, output: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    run_command.add_arguments(parser)
    fixed = ["--prompts", str(prompts), "--output", str(output), "--executor", "tests.fakes:make_fake_executor"]
    return parser.parse_args([str(model), *fixed, *words])


def test_the_command_answers_reports_and_says_by_its_exit_code_whether_all_went_well(
    model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output, report = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "report.json"
    prompts.write_text('{"id": 1, "prompt": "Hi", "max_tokens": 3}\n\n{"id": 2, "prompt": "Yo", "max_tokens": 4}\n')
    args = run_args(model_path, prompts, output, "--report", str(report), "--max-num-seqs", "4")
    assert run_command.execute(args) == 0
    assert [json.loads(line)["id"] for line in output.read_text().splitlines()] == [1, 2]
    figures = json.loads(report.read_text())
    assert figures["lines"] == {"completed": 2, "failed": 0}
    assert figures["tokens"] == {"prompt": 4, "cached_prompt": 0, "generated": 7}
    assert figures["generations"] == {"length": 2}
    assert sum(figures["decodes_of_width"].values()) == figures["forwards"]["decode"]
    assert 0 < figures["pool"]["peak_owned_bytes"] < figures["pool"]["bytes"]
    assert figures["load_s"] > 0
    assert figures["peak_owned_cells"] > 0
    assert sum(figures["forward_tokens"].values()) == 4 + 5  # the last token of each line is never fed
    assert (figures["config"]["max_num_seqs"], figures["program"]["architecture"]) == (4, "FakeForCausalLM")

    prompts.write_text('{"prompt": "Hi", "max_tokens": 3}\n{"prompt": ""}\n')
    capsys.readouterr()
    assert run_command.execute(args) == 1
    told = capsys.readouterr().err
    assert told.splitlines()[-1] == "the first that failed is 1: the prompt is empty; it needs at least one token"
    assert "\r" not in told  # no bar is drawn where no terminal is


def test_lines_name_adapters_for_their_model(model_path: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    named = [f"{name}={save_fake_adapter(tmp_path / name, revision)}" for name, revision in (("a", 5), ("b", 6))]
    lines = [
        {"prompt": "Hi", "max_tokens": 6, "temperature": 0} | extra for extra in ({}, {"model": "a"}, {"model": "b"})
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"prompt": "Hi", "model": "c"}]))
    args = run_args(model_path, prompts, output, "--enable-lora", "--max-loras", "2", "--lora-modules", *named)
    assert run_command.execute(args) == 1
    *told, error = [json.loads(line) for line in output.read_text().splitlines()]
    for answer, adapter in zip(told, (None, Adapter("a", 5), Adapter("b", 6)), strict=True):
        request = fake_request(
            load_text(model_path).encode("Hi"), 6, sampling=SamplingParams(temperature=0.0), adapter=adapter
        )
        assert tuple(answer["token_ids"]) == expected_tokens(request)
    assert error["error"]["message"] == "there is no adapter 'c'; there is: a, b"
    with pytest.raises(InvalidConfiguration, match="enable_lora is not"):
        run_command.execute(run_args(model_path, prompts, output, "--lora-modules", named[0]))
    prompts.write_text(json.dumps({"prompt": "Hi", "model": "a"}) + "\n")
    assert run_command.execute(run_args(model_path, prompts, output)) == 1
    assert "without adapters" in output.read_text()


def test_the_same_batch_run_again_gives_the_same_answers(model_path: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "Hi", "max_tokens": 6}\n' * 3)
    outputs = []
    for words in ([], [], ["--seed", "5"]):
        run_command.execute(run_args(model_path, prompts, tmp_path / "out.jsonl", *words))
        outputs.append((tmp_path / "out.jsonl").read_text())
    assert outputs[0] == outputs[1] != outputs[2]
    assert len({json.loads(line)["text"] for line in outputs[0].splitlines()}) == 3


def test_ctrl_c_ends_the_run_with_its_own_exit_code(model_path: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    long = '{"prompt": "Hi", "max_tokens": 1000, "ignore_eos": true}\n'
    prompts.write_text('{"prompt": "Hi", "max_tokens": 1}\n' + long * 200)
    before = signal.getsignal(signal.SIGINT)

    def interrupt_after_the_first_answer() -> None:
        while not (output.exists() and output.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt_after_the_first_answer)
    helper.start()
    code = run_command.execute(run_args(model_path, prompts, output, "--max-num-seqs", "4"))
    helper.join()
    assert code == 130
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert 1 <= len(answers) < 201
    assert [len(answer["token_ids"]) for answer in answers] == [1, *[1000] * (len(answers) - 1)]
    assert signal.getsignal(signal.SIGINT) is before


def test_files_that_cannot_work_are_refused_before_anything_is_overwritten(model_path: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "in.jsonl"
    with pytest.raises(InvalidConfiguration, match="no prompts file"):
        run_command.execute(run_args(model_path, prompts, tmp_path / "out.jsonl"))
    prompts.write_text('{"prompt": "Hi"}\n')
    with pytest.raises(InvalidConfiguration, match="same file"):
        run_command.execute(run_args(model_path, prompts, prompts))
    with pytest.raises(InvalidConfiguration, match="no folder"):
        run_command.execute(run_args(model_path, prompts, tmp_path / "nowhere" / "out.jsonl"))
    assert prompts.read_text() == '{"prompt": "Hi"}\n'


def test_an_unknown_setting_is_named_by_its_flag(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("")
    args = run_args(model_path, tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--max-cells", "0")
    with pytest.raises(InvalidConfiguration, match="--max-cells must be"):
        run_command.execute(args)


def test_the_fake_of_these_tests_has_the_tokenizers_vocabulary(text: TextModel) -> None:
    assert fake_info().vocab_size == text.vocab_size == VOCAB_SIZE
