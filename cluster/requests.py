"""From prompts and a body's parameters to the requests that workers understand, each checked against the model."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cluster.api_settings import ApiSettings
from cluster.fleet import ServedModel
from cluster.headers import Terms
from cluster.prompts import EncodedPrompt
from planner.errors import ContextLengthExceeded, InvalidRequest, UnknownModel
from planner.request import Request, SamplingParams
from protos.openai import ChatBody, CompletionBody, GenerationBody


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One prompt and what becomes of it. `request` None: nothing is generated (echo with max_tokens 0)."""

    prompt: EncodedPrompt
    request: Request | None
    n: int
    echo: bool = False


def served_name(asked: str | None, model: ServedModel, settings: ApiSettings) -> str:
    """The name to answer with. Raises `UnknownModel` when the client asked for another model."""
    names = settings.served_model_names or (model.name,)
    if asked is None:
        return names[0]
    if asked not in names:
        raise UnknownModel(f"the model {asked!r} is not served here; there is: {', '.join(names)}", param="model")
    return asked


def plan_completion(
    body: CompletionBody,
    prompts: Sequence[EncodedPrompt],
    model: ServedModel,
    eos_ids: frozenset[int],
    settings: ApiSettings,
    grammar: str | None = None,
) -> list[ChoicePlan]:
    """One plan a prompt, in order; every answer follows `grammar`. Raises `InvalidRequest`; nothing has been sent."""
    _check_counts(body, len(prompts), settings)
    scores_prompt = body.echo and body.logprobs is not None
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens must be at least 1 unless echo is true", param="max_tokens")
    plans = []
    for prompt in prompts:
        left = _room(prompt, model, "prompt")
        wanted = min(settings.default_max_tokens, left) if body.max_tokens is None else body.max_tokens
        _check_context(len(prompt.ids), wanted, model, "prompt")
        runs = wanted > 0 or scores_prompt
        at_least = wanted if runs else 1  # so that what does not run is checked all the same
        request = _request(
            body, prompt, at_least, body.logprobs, model, eos_ids, grammar, prompt_logprobs=scores_prompt
        )
        plans.append(ChoicePlan(prompt, request if runs else None, body.n, echo=body.echo))
    return plans


def plan_chat(
    body: ChatBody,
    prompt: EncodedPrompt,
    model: ServedModel,
    eos_ids: frozenset[int],
    settings: ApiSettings,
    grammar: str | None = None,
) -> list[ChoicePlan]:
    """The one plan of a conversation; every answer follows `grammar`. Raises `InvalidRequest`; nothing was sent."""
    _check_counts(body, 1, settings)
    left = _room(prompt, model, "messages")
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if wanted is None:
        wanted = max(1, min(left, model.capacity - len(prompt.ids)))
    _check_context(len(prompt.ids), wanted, model, "messages")
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    return [ChoicePlan(prompt, _request(body, prompt, wanted, alternatives, model, eos_ids, grammar), body.n)]


def on_terms(terms: Terms, plans: Sequence[ChoicePlan]) -> list[ChoicePlan]:
    """The same plans, their requests on the client's account and under its deadline."""
    return [
        plan
        if plan.request is None
        else replace(plan, request=replace(plan.request, tenant=terms.tenant, deadline=terms.deadline))
        for plan in plans
    ]


def _check_counts(body: GenerationBody, num_prompts: int, settings: ApiSettings) -> None:
    if body.n > settings.max_choices:
        raise InvalidRequest(f"n must lie in [1, {settings.max_choices}], not {body.n}", param="n")
    if body.n * num_prompts > settings.max_sequences:
        raise InvalidRequest(
            f"{num_prompts} prompts with n = {body.n} make {body.n * num_prompts} choices; at most "
            f"{settings.max_sequences} are allowed",
            param="prompt",
        )


def _room(prompt: EncodedPrompt, model: ServedModel, param: str) -> int:
    """Tokens that fit behind the prompt; at least one where the prompt is shorter than the context."""
    if not prompt.ids:
        raise InvalidRequest("the prompt is empty; it needs at least one token", param=param)
    return max(1, model.context - len(prompt.ids))


def _check_context(num_prompt: int, max_tokens: int, model: ServedModel, param: str) -> None:
    if num_prompt + max_tokens <= model.context:
        return
    at_fault = param if num_prompt >= model.context else "max_tokens"
    raise ContextLengthExceeded(
        f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}: together {num_prompt + max_tokens}, "
        f"over the context length of {model.context}",
        param=at_fault,
    )


def _request(
    body: GenerationBody,
    prompt: EncodedPrompt,
    max_tokens: int,
    alternatives: int | None,
    model: ServedModel,
    eos_ids: frozenset[int],
    grammar: str | None,
    *,
    prompt_logprobs: bool = False,
) -> Request:
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
    )
    return Request(
        prompt=np.asarray(prompt.ids, dtype=np.int64),
        max_tokens=max_tokens,
        sampling=sampling,
        min_tokens=body.min_tokens,
        stop_token_ids=stops,
        n=body.n,
        priority=body.priority,
        prompt_logprobs=prompt_logprobs,
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
