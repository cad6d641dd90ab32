"""From a line of an offline batch to what the engine is asked. What a line may not ask for is refused here by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from cluster.answers.prompts import EncodedPrompt, written
from cluster.answers.requests import ChoicePlan, Extras, plan_chat, plan_completion
from cluster.answers.structured import check_form, requested_form
from cluster.api_settings import ApiSettings
from cluster.language.text import TextModel
from cluster.routing.fleet import ServedModel
from planner.errors import InvalidRequest, UnknownModel
from planner.request import Adapter
from protos.openai import ChatBody, CompletionBody

_ONLY_ONLINE: Final = (
    "bad_words",
    "truncate_prompt_tokens",
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
)
_ONLY_ONLINE_OF_PROMPTS: Final = (*_ONLY_ONLINE, "best_of", "use_beam_search")
_ONLY_ONLINE_OF_CHATS: Final = (*_ONLY_ONLINE, "tools")


class LinePlans:
    """Makes them for one model and its `adapters`. Pure; any thread."""

    def __init__(self, text: TextModel, model: ServedModel, adapters: Sequence[Adapter]) -> None:
        self._text = text
        self._model = model
        self._settings = ApiSettings()
        self._adapters: Mapping[str, Adapter] = {adapter.name: adapter for adapter in adapters}

    def plan(self, body: CompletionBody | ChatBody) -> ChoicePlan:
        """Raises `RequestRefused` that says what is wrong with the line."""
        is_chat = isinstance(body, ChatBody)
        for name in _ONLY_ONLINE_OF_CHATS if is_chat else _ONLY_ONLINE_OF_PROMPTS:
            if getattr(body, name):
                raise InvalidRequest(f"{name} is not supported in a batch file", param=name)
        adapter = None if body.model is None else self._adapter(body.model)
        prompt = EncodedPrompt(self._ids(body))
        if (form := requested_form(body)) is not None:
            check_form(form)
        extras = Extras(None if form is None else form.grammar)
        of_model = (self._model, self._text.eos_ids, self._settings, extras)
        if isinstance(body, ChatBody):
            (plan,) = plan_chat(body, prompt, *of_model)
        else:
            (plan,) = plan_completion(body, [prompt], *of_model)
        assert plan.request is not None, "without echo something is always generated"
        return replace(plan, request=replace(plan.request, adapter=adapter))

    def _ids(self, body: CompletionBody | ChatBody) -> list[int]:
        if isinstance(body, ChatBody):
            return self._text.encode(written(body, self._text), add_special_tokens=body.add_special_tokens is True)
        if isinstance(body.prompt, str):
            return self._text.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        return [token for token in body.prompt if isinstance(token, int)]

    def _adapter(self, name: str) -> Adapter:
        if not self._adapters:
            raise InvalidRequest("model means nothing in a batch without adapters", param="model")
        if name not in self._adapters:
            raise UnknownModel(f"there is no adapter {name!r}; there is: {', '.join(self._adapters)}", param="model")
        return self._adapters[name]


def told_alternatives(body: CompletionBody | ChatBody) -> int | None:
    """How many alternatives of each token are told; None: no log probabilities at all."""
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs
