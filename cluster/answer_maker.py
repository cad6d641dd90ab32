"""From validated bodies to answers that can start: the road that HTTP and gRPC share, so that both say the same."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.answer import Answer
from cluster.api_settings import ApiSettings
from cluster.fleet import Fleet, ServedModel
from cluster.headers import Terms
from cluster.message_reader import NewReader
from cluster.prompts import PromptEncoder
from cluster.requests import Extras, on_terms, plan_chat, plan_completion, served_name, text_rules
from cluster.side_threads import SideThreads
from cluster.structured import Form, FormReader, requested_form
from cluster.talk import plan_talk
from cluster.text import TextModel
from planner.errors import InvalidRequest, Unavailable
from protos.openai import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeChatBody, TokenizeTextBody


@dataclass(frozen=True, slots=True)
class Service:
    """What the endpoints serve from."""

    fleet: Fleet
    text: TextModel
    settings: ApiSettings


class AnswerMaker:
    """Owner: a gateway; lives on its event loop. Nothing that it raises has sent anything to a worker."""

    def __init__(self, service: Service) -> None:
        settings = service.settings
        self.service = service
        self.threads = SideThreads(
            inline_size=settings.inline_size, num_threads=settings.text_threads, max_waiting=settings.max_long_texts
        )
        self._prompts = PromptEncoder(service.text, self.threads)
        self._forms = FormReader(self.threads)

    def served(self) -> ServedModel:
        """The model. Raises `Unavailable` before the first worker has said what it serves."""
        model = self.service.fleet.model
        if model is None:
            raise Unavailable("no worker has started yet")
        return model

    def model(self, asked: str | None) -> tuple[ServedModel, str]:
        """The model and the name to answer with. Raises `UnknownModel` as well."""
        model = self.served()
        return model, served_name(asked, model, self.service.settings)

    def names(self) -> tuple[str, ...]:
        """What clients may call the model."""
        return self.service.settings.served_model_names or (self.served().name,)

    async def completion(self, body: CompletionBody, terms: Terms) -> tuple[Answer, str]:
        """The answer to a text completion, and the name to answer with. Raises `RequestRefused`."""
        model, name = self.model(body.model)
        text = self.service.text
        prompts = await self._prompts.completion(body, model.context)
        extras = await self._extras(body, requested_form(body))
        plans = on_terms(terms, plan_completion(body, prompts, model, text.eos_ids, self.service.settings, extras))
        scored = body.logprobs is not None or body.num_made > body.n
        return Answer(self.service.fleet, text, plans, text_rules(body, body.logprobs), scored=scored), name

    async def chat(self, body: ChatBody, terms: Terms) -> tuple[Answer, str, NewReader | None]:
        """The answer to a conversation, the name to answer with, and what reads calls and thoughts out of its text.

        Raises `RequestRefused`."""
        model, name = self.model(body.model)
        text = self.service.text
        prompt = await self._prompts.chat(body, model.context)
        talk = plan_talk(body, text, prompt.ids)
        for part in talk.parts:
            await self._forms.checked(part)
        extras = await self._extras(body, talk.form)
        plans = on_terms(terms, plan_chat(body, prompt, model, text.eos_ids, self.service.settings, extras))
        marks = frozenset(text.marks.values()) if talk.new_reader is not None else frozenset()
        rules = text_rules(body, body.top_logprobs or 0, marks)
        answer = Answer(self.service.fleet, text, plans, rules, scored=body.logprobs)
        return answer, name, talk.new_reader

    async def _extras(self, body: GenerationBody, form: Form | None) -> Extras:
        """Raises `InvalidRequest` where the form cannot be kept to."""
        return Extras(await self._forms.checked(form), self._prompts.bad_words(body.bad_words))

    async def token_ids(self, body: TokenizeTextBody | TokenizeChatBody) -> list[int]:
        """Token ids of a text or of a conversation's prompt."""
        special = body.add_special_tokens
        if isinstance(body, TokenizeChatBody):
            return await self._prompts.conversation(body, context=None, add_special_tokens=special)
        return await self._prompts.ids(body.prompt, add_special_tokens=special)

    async def decoded(self, body: DetokenizeBody) -> str:
        """The text of token ids."""
        model, _ = self.model(body.model)
        highest = max(body.tokens, default=0)
        if highest >= model.vocab_size:
            raise InvalidRequest(f"token id {highest} is not below {model.vocab_size}", param="tokens")
        return await self._prompts.decoded(body.tokens)
