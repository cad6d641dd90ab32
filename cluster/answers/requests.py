"""From prompts and a body's parameters to the requests that workers understand, each checked against the model."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cluster.answers.choice import TextRules
from cluster.answers.prompts import EncodedPrompt
from cluster.api_settings import ApiSettings
from cluster.headers import Terms
from cluster.routing.fleet import ServedModel
from planner.errors import ContextLengthExceeded, InvalidRequest, UnknownModel
from planner.request import Adapter, Request, SamplingParams
from protos.openai import ChatBody, CompletionBody, GenerationBody
from worker.tracing import traceparent


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One prompt and what becomes of it. `request` None: nothing is generated (echo with max_tokens 0).

    Of `n` choices the best `num_told` are told. `scores_echo`: the echoed prompt has log probabilities.
    """

    prompt: EncodedPrompt
    request: Request | None
    n: int
    num_told: int
    echo: bool = False
    scores_echo: bool = False


@dataclass(frozen=True, slots=True)
class Extras:
    """What needs the model's text side to be made: a grammar, and words in tokens that no answer may have."""

    grammar: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


def served_name(asked: str | None, model: ServedModel, settings: ApiSettings, adapters: Collection[str] = ()) -> str:
    """The name to answer with. Raises `UnknownModel` when the client asked for another model: it names these and
    `adapters`."""
    names = settings.served_model_names or (model.name,)
    if asked is None:
        return names[0]
    if asked not in names:
        there = ", ".join((*names, *adapters))
        raise UnknownModel(f"the model {asked!r} is not served here; there is: {there}", param="model")
    return asked


def plan_completion(
    body: CompletionBody,
    prompts: Sequence[EncodedPrompt],
    model: ServedModel,
    eos_ids: frozenset[int],
    settings: ApiSettings,
    extras: Extras | None = None,
) -> list[ChoicePlan]:
    """One plan a prompt, in order; `extras` hold for every answer. Raises `InvalidRequest`; nothing has been sent."""
    _check_counts(body, len(prompts), settings)
    scores_echo = body.echo and body.logprobs is not None
    alternatives = _alternatives(body.logprobs, body.prompt_logprobs, ranked=body.num_made > body.n)
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens must be at least 1 unless echo is true", param="max_tokens")
    plans = []
    for prompt in prompts:
        left = _room(prompt, model, "prompt")
        wanted = min(settings.default_max_tokens, left) if body.max_tokens is None else body.max_tokens
        _check_context(len(prompt.ids), wanted, model, "prompt", "max_tokens")
        runs = wanted > 0 or scores_echo or body.prompt_logprobs is not None
        at_least = wanted if runs else 1  # so that what does not run is checked all the same
        request = _request(body, prompt, at_least, alternatives, model, eos_ids, extras, prompt_logprobs=scores_echo)
        plans.append(
            ChoicePlan(prompt, request if runs else None, body.num_made, body.n, body.echo, scores_echo=scores_echo)
        )
    return plans


def plan_chat(
    body: ChatBody,
    prompt: EncodedPrompt,
    model: ServedModel,
    eos_ids: frozenset[int],
    settings: ApiSettings,
    extras: Extras | None = None,
) -> list[ChoicePlan]:
    """The one plan of a conversation; `extras` hold for every answer. Raises `InvalidRequest`; nothing was sent."""
    _check_counts(body, 1, settings)
    left = _room(prompt, model, "messages")
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if wanted is None:
        wanted = max(1, min(left, model.capacity - len(prompt.ids)))
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    _check_context(len(prompt.ids), wanted, model, "messages", limit)
    asked = (body.top_logprobs or 0) if body.logprobs else None
    alternatives = _alternatives(asked, body.prompt_logprobs)
    return [ChoicePlan(prompt, _request(body, prompt, wanted, alternatives, model, eos_ids, extras), body.n, body.n)]


def text_rules(body: GenerationBody, num_top: int | None, marks: frozenset[int] = frozenset()) -> TextRules:
    """How the tokens of the body's answers become text; `num_top` alternatives of each are told."""
    return TextRules(
        stops=body.stop_strings,
        keeps_stop=body.include_stop_str_in_output,
        min_tokens=body.min_tokens,
        shows_special=not body.skip_special_tokens,
        marks=marks,
        num_top=num_top,
    )


def on_terms(terms: Terms, plans: Sequence[ChoicePlan], adapter: Adapter | None) -> list[ChoicePlan]:
    """The same plans, their requests with `adapter`, on the client's account, under its deadline and in its trace."""
    trace = traceparent(terms.record.span)
    agreed: dict[str, Any] = {"tenant": terms.tenant, "deadline": terms.deadline, "trace": trace, "adapter": adapter}
    return [plan if plan.request is None else replace(plan, request=replace(plan.request, **agreed)) for plan in plans]


def _check_counts(body: GenerationBody, num_prompts: int, settings: ApiSettings) -> None:
    made, param = body.num_made, "n" if body.num_made == body.n else "best_of"
    if made > settings.max_choices:
        raise InvalidRequest(f"{param} must lie in [1, {settings.max_choices}], not {made}", param=param)
    if made * num_prompts > settings.max_sequences:
        raise InvalidRequest(
            f"{num_prompts} prompts with {param} = {made} make {made * num_prompts} choices; at most "
            f"{settings.max_sequences} are allowed",
            param="prompt",
        )


def _alternatives(asked: int | None, of_prompt: int | None, *, ranked: bool = False) -> int | None:
    """How many alternatives a worker is to tell at each position; None: no log probabilities at all."""
    wanted = [number for number in (asked, of_prompt, 0 if ranked else None) if number is not None]
    return max(wanted, default=None)


def _room(prompt: EncodedPrompt, model: ServedModel, param: str) -> int:
    """Tokens that fit behind the prompt; at least one where the prompt is shorter than the context."""
    if not prompt.ids:
        raise InvalidRequest("the prompt is empty; it needs at least one token", param=param)
    return max(1, model.context - len(prompt.ids))


def _check_context(num_prompt: int, max_tokens: int, model: ServedModel, prompt: str, limit: str) -> None:
    """Raises `ContextLengthExceeded` at the field that the prompt came in, or at that which limits the answer. The
    first words are those that clients know such an error by."""
    if num_prompt + max_tokens <= model.context:
        return
    most = f"this model's maximum context length is {model.context} tokens"
    if num_prompt >= model.context:
        raise ContextLengthExceeded(
            f"{most}, which must hold the prompt and at least one more, and the prompt has {num_prompt}", param=prompt
        )
    raise ContextLengthExceeded(
        f"{most}; the prompt has {num_prompt} and {limit} is {max_tokens}, together {num_prompt + max_tokens}",
        param=limit,
    )


def _request(
    body: GenerationBody,
    prompt: EncodedPrompt,
    max_tokens: int,
    alternatives: int | None,
    model: ServedModel,
    eos_ids: frozenset[int],
    extras: Extras | None,
    *,
    prompt_logprobs: bool = False,
) -> Request:
    grammar, bad_words = (None, ()) if extras is None else (extras.grammar, extras.bad_words)
    vocab_size = model.vocab_size
    if grammar is not None and not eos_ids:
        raise InvalidRequest("this model has no token that ends an answer, so no answer of it can follow a grammar")
    _check_ids(prompt.ids, vocab_size, "prompt")
    _check_ids(body.stop_token_ids, vocab_size, "stop_token_ids")
    stops = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else eos_ids)
    sampling = SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        min_p=body.min_p,
        seed=secrets.randbits(64) if body.seed is None else body.seed % 2**64,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias, vocab_size),
        logprobs=alternatives,
        grammar=grammar,
        bad_words=bad_words,
    )
    return Request(
        prompt=np.asarray(prompt.ids, dtype=np.int64),
        max_tokens=max_tokens,
        sampling=sampling,
        min_tokens=body.min_tokens,
        stop_token_ids=stops,
        n=body.num_made,
        priority=body.priority,
        prompt_logprobs=prompt_logprobs or body.prompt_logprobs is not None,
    )


def _check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise InvalidRequest(f"{param} has token id {highest}; ids lie in [0, {vocab_size - 1}]", param=param)


def _logit_bias(biases: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, bias in biases.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and key == str(int(key))):  # "07" could meet "7"
            raise InvalidRequest(f"logit_bias has the key {key!r}, which is no token id", param="logit_bias")
        pairs.append((int(key), bias))
    _check_ids([token for token, _ in pairs], vocab_size, "logit_bias")
    return tuple(pairs)
