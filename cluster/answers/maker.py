"""From validated bodies to answers that can start: the road that HTTP and gRPC share, so that both say the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from opentelemetry.trace import NoOpTracer, Tracer

from cluster.access.key_ring import KeyRing, KeyUse
from cluster.adapters.desk import AdapterDesk
from cluster.answers.answer import Answer
from cluster.answers.beam import BeamAnswer
from cluster.answers.choice import TextRules
from cluster.answers.prompts import EncodedPrompt, PromptEncoder
from cluster.answers.requests import ChoicePlan, Extras, on_terms, plan_chat, plan_completion, served_name, text_rules
from cluster.answers.structured import Form, FormReader, form_fields
from cluster.answers.talk import plan_talk
from cluster.api_settings import ApiSettings
from cluster.headers import Terms, terms
from cluster.language.message_reader import NewReader
from cluster.language.side_threads import SideThreads
from cluster.language.text import TextModel
from cluster.routing.fleet import Fleet, ServedModel
from cluster.sessions.answer import SessionAnswer
from cluster.sessions.desk import SessionDesk
from cluster.sessions.histories import Sessions
from cluster.sessions.owner import LocalOwner, SessionOwner, session_limits
from cluster.telemetry.gateway_meter import GatewayMeter
from cluster.telemetry.request_log import Tell
from cluster.telemetry.request_record import RequestRecord, RequestRecords
from cluster.web.debug_views import Inspect, nobody
from planner.errors import InvalidRequest, Unavailable
from planner.request import Adapter
from protos.openai import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeChatBody, TokenizeTextBody


@dataclass(frozen=True, slots=True)
class Service:
    """What the endpoints serve from. `inspect` asks the workers what they hold; `model_name` and `gateway_id` are
    labels of the metrics. `sessions`: who keeps them for the whole service; None: this gateway is all of it. `adapters`
    loads and unloads them, where that is allowed. `tracer` makes the requests' spans; `tell` is told of each request
    that asked for tokens and is over."""

    fleet: Fleet
    text: TextModel
    settings: ApiSettings
    meter: GatewayMeter = field(default_factory=GatewayMeter)
    inspect: Inspect = nobody
    model_name: str = ""
    gateway_id: str = ""
    sessions: SessionOwner | None = None
    adapters: AdapterDesk | None = None
    tracer: Tracer = field(default_factory=NoOpTracer)
    tell: Tell | None = None


class Asked(NamedTuple):
    """What a request is about: the model, the name to answer with, and the adapter that the name is of, if it is."""

    model: ServedModel
    name: str
    adapter: Adapter | None


class AnswerMaker:
    """Owner: a gateway; lives on its event loop. Nothing that it raises has sent anything to a worker."""

    def __init__(self, service: Service) -> None:
        settings = service.settings
        self.service = service
        self.threads = SideThreads(
            inline_size=settings.inline_size, num_threads=settings.text_threads, max_waiting=settings.max_long_texts
        )
        self.keys = KeyRing(settings)
        self.records = RequestRecords(service.tracer, service.model_name, service.tell)
        self.prompts = PromptEncoder(service.text, self.threads)
        self._forms = FormReader(self.threads)
        self._sessions = SessionDesk(service.sessions or LocalOwner(Sessions(session_limits(settings))))

    @property
    def sessions(self) -> SessionDesk:
        """Raises `InvalidRequest` where the service keeps none."""
        if self.service.settings.max_sessions == 0:
            raise InvalidRequest("this service keeps no sessions: max_sessions is 0", param="session_id")
        return self._sessions

    async def shut(self) -> None:
        """What was generated on sessions is handed to them."""
        await self._sessions.shut()

    @property
    def known_names(self) -> tuple[str, ...]:
        """What clients may ask for here, whether a worker has started or not: the model, and its adapters."""
        service = self.service
        names = service.settings.served_model_names or (service.model_name,)
        return (*names, *sorted(service.fleet.adapters))

    def served(self) -> ServedModel:
        """The model. Raises `Unavailable` before the first worker has said what it serves."""
        model = self.service.fleet.model
        if model is None:
            raise Unavailable("no worker has started yet")
        return model

    def model(self, asked: str | None) -> Asked:
        """What a client means by a model's or an adapter's name. Raises `UnknownModel` as well."""
        adapter = None if asked is None else self.service.fleet.adapters.get(asked)
        if adapter is not None:
            return Asked(self.served(), adapter.name, adapter)
        return Asked(*self.base(asked), None)

    def base(self, asked: str | None) -> tuple[ServedModel, str]:
        """The model and the name to answer with, which is no adapter's. Raises `UnknownModel` as well."""
        model = self.served()
        return model, served_name(asked, model, self.service.settings, self.service.fleet.adapters)

    def names(self) -> tuple[str, ...]:
        """What clients may call the model."""
        return self.service.settings.served_model_names or (self.served().name,)

    def terms(
        self, deadlines: Sequence[str], tenants: Sequence[str], key: KeyUse | None, record: RequestRecord | None = None
    ) -> Terms:
        """As `cluster.headers.terms`; whether a request may name its tenant is for the operator and its key to say."""
        may_name = self.service.settings.tenant_from_header and not (key is not None and key.is_fixed)
        return terms(deadlines, tenants if may_name else (), "" if key is None else key.tenant, record)

    async def completion(self, body: CompletionBody, terms: Terms) -> tuple[Answer, str]:
        """The answer to a text completion, and the name to answer with. Raises `RequestRefused`."""
        model, name, adapter = self.model(body.model)
        terms.record.note_model(name)
        text = self.service.text
        prompts = await self.prompts.completion(body, model.context)
        extras = await self._extras(body, await self._forms.requested(body))
        plans = plan_completion(body, prompts, model, text.eos_ids, self.service.settings, extras)
        plans = on_terms(terms, plans, adapter)
        if body.use_beam_search:
            (plan,) = plans
            rules, meter = text_rules(body, None), self.service.meter.request(terms)
            return BeamAnswer(self.service.fleet, text, plan, rules, meter, self.threads, body.length_penalty), name
        scored = body.logprobs is not None or body.num_made > body.n
        return self._answer(plans, text_rules(body, body.logprobs), terms, scored=scored), name

    async def extension(self, body: CompletionBody, session_id: str, account: str, terms: Terms) -> tuple[Answer, str]:
        """The answer that goes on with a session behind the body's prompt, which is one text or list of token ids.

        Raises `RequestRefused`; the session is then as it was. Close the answer, and the session is free again."""
        given, session = body, await self.sessions.get(session_id, account)
        model, name, adapter = self.model(body.model)
        terms.record.note_model(name)
        text = self.service.text
        _check_extends(body)
        if not session.is_empty and body.add_special_tokens is None:
            body = body.model_copy(update={"add_special_tokens": False})
        if body.prompt in ("", []):
            deltas = [EncodedPrompt([])]
        else:
            deltas = await self.prompts.completion(body, model.context)
        if len(deltas) > 1:
            raise InvalidRequest("a session takes one prompt at a time", param="prompt")
        extras = await self._extras(body, await self._forms.requested(body))
        delta = deltas[0].ids
        turn = await self.sessions.begin(session_id, account, delta, body.max_tokens, model.context)
        if session.is_empty and turn.history:  # somebody was faster, and the delta was encoded as a beginning
            await turn.end()
            return await self.extension(given, session_id, account, terms)
        try:
            prompt = EncodedPrompt([*turn.history, *delta])
            plans = plan_completion(body, [prompt], model, text.eos_ids, self.service.settings, extras)
            plans = on_terms(terms, plans, adapter)
            rules = text_rules(body, body.logprobs)
            meter, scored = self.service.meter.request(terms), body.logprobs is not None
            return SessionAnswer(self.service.fleet, text, plans, rules, meter, self.threads, turn, scored=scored), name
        except BaseException:
            await turn.end()
            raise

    async def chat(self, body: ChatBody, terms: Terms) -> tuple[Answer, str, NewReader | None]:
        """The answer to a conversation, the name to answer with, and what reads calls and thoughts out of its text.

        Raises `RequestRefused`."""
        model, name, adapter = self.model(body.model)
        terms.record.note_model(name)
        text = self.service.text
        prompt = await self.prompts.chat(body, model.context)
        size = self.threads.size_of(body.tools, *form_fields(body))
        talk = await self.threads.run(size, lambda: plan_talk(body, text, prompt.ids))
        for part in talk.parts:
            await self._forms.checked(part)
        extras = await self._extras(body, talk.form)
        plans = plan_chat(body, prompt, model, text.eos_ids, self.service.settings, extras)
        plans = on_terms(terms, plans, adapter)
        marks = frozenset(text.marks.values()) if talk.new_reader is not None else frozenset()
        rules = text_rules(body, body.top_logprobs or 0, marks)
        return self._answer(plans, rules, terms, scored=body.logprobs), name, talk.new_reader

    def _answer(self, plans: Sequence[ChoicePlan], rules: TextRules, terms: Terms, *, scored: bool) -> Answer:
        service = self.service
        return Answer(
            service.fleet, service.text, plans, rules, service.meter.request(terms), self.threads, scored=scored
        )

    async def _extras(self, body: GenerationBody, form: Form | None) -> Extras:
        """Raises `InvalidRequest` where the form cannot be kept to."""
        return Extras(await self._forms.checked(form), await self.prompts.bad_words(body.bad_words))

    async def token_ids(self, body: TokenizeTextBody | TokenizeChatBody) -> list[int]:
        """Token ids of a text or of a conversation's prompt."""
        special = body.add_special_tokens
        if isinstance(body, TokenizeChatBody):
            return await self.prompts.conversation(body, context=None, add_special_tokens=special)
        return await self.prompts.ids(body.prompt, add_special_tokens=special)

    async def decoded(self, body: DetokenizeBody) -> str:
        """The text of token ids."""
        model = self.model(body.model).model
        highest = max(body.tokens, default=0)
        if highest >= model.vocab_size:
            raise InvalidRequest(f"token id {highest} is not below {model.vocab_size}", param="tokens")
        return await self.prompts.decoded(body.tokens)


def _check_extends(body: CompletionBody) -> None:
    """Raises `InvalidRequest` for what a session, which has one history, cannot go on with."""
    asked = {
        "echo": ("echo", body.echo),
        "n": ("n over 1", body.n > 1),
        "best_of": ("best_of over 1", body.num_made > 1),
        "truncate_prompt_tokens": ("truncate_prompt_tokens", body.truncate_prompt_tokens is not None),
    }
    for name, (words, is_asked) in asked.items():
        if is_asked:
            raise InvalidRequest(f"a session allows no {words}", param=name)
