"""The bodies that the OpenAI-compatible endpoints accept, field by field. Not what is done with them.

Types are strict: `true` is no integer, `"3"` no number, 2.5 no count, and infinity nothing at all. A null means that
the field was not given. A field that nothing here knows is refused by its name, and so is one that is known and not
supported, unless its value asks for what happens anyway (`best_of` 1, an empty `tools`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag, model_validator

MAX_STOP_STRINGS: Final = 4
MAX_ALTERNATIVES: Final = 20

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]


class RefusedField(ValueError):
    """A field whose presence or value is refused. `param` is its name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class Body(BaseModel):
    """Base of all bodies. `unsupported` maps a known field to the values that ask for nothing special."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_says_nothing(cls, data: Any) -> Any:
        """Without nulls, and without unsupported fields at their neutral value."""
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if value is None:
                continue
            if name in cls.unsupported:
                if any(type(value) is type(neutral) and value == neutral for neutral in cls.unsupported[name]):
                    continue
                raise RefusedField(name, f"{name} is not supported here")
            if name not in cls.model_fields:
                raise RefusedField(name, f"{name} is not a field of this request")
            kept[name] = value
        return kept


def _stop_shape(value: Any) -> str:
    return "list" if isinstance(value, list) else "text"


StopString = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    Annotated[StopString, Tag("text")] | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), Tag("list")],
    Discriminator(_stop_shape),
]


class StreamOptions(Body):
    """`include_usage`: a last chunk without choices tells the token counts."""

    unsupported = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}

    include_usage: bool = False


_NOT_SUPPORTED_ANYWHERE: Final[Mapping[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}


class GenerationBody(Body):
    """What both generating endpoints understand. Ranges that the sampler has are checked there, not here."""

    model: str | None = None
    max_tokens: Count | None = None
    min_tokens: Count = 0
    n: Annotated[int, Field(ge=1)] = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    min_p: float = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    stop: Stop = []
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    # For the client's own books; they change nothing here.
    user: str | None = None
    metadata: dict[str, JsonValue] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _options_of_a_stream_need_one(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise RefusedField("stream_options", "stream_options is only allowed when stream is true")
        return self


def _prompt_shape(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    return "texts" if isinstance(first, str) else "id_lists" if isinstance(first, list) else "ids"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[TokenId], Tag("ids")]
    | Annotated[list[str], Tag("texts")]
    | Annotated[list[list[TokenId]], Tag("id_lists")],
    Discriminator(
        _prompt_shape,
        custom_error_type="prompt_shape",
        custom_error_message="should be a text, a list of token ids, or a filled list of either",
    ),
]


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    unsupported = {**_NOT_SUPPORTED_ANYWHERE, "suffix": ()}

    prompt: Prompt
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None


class ContentPart(Body):
    """One part of a message's content. Only text can be read."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise RefusedField("messages", f"content of type {kind} is not supported; this model reads text")
        return data


def _content_shape(value: Any) -> str:
    return "parts" if isinstance(value, list) else "text"


class Message(Body):
    """One turn of a conversation. Only an assistant's turn may have no content; it then reads as empty."""

    unsupported = {
        "tool_calls": ([],),
        "tool_call_id": (),
        "function_call": (),
        "audio": (),
        "refusal": (),
        "annotations": ([],),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[list[ContentPart], Field(min_length=1), Tag("parts")],
            Discriminator(_content_shape),
        ]
        | None
    ) = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_tool_turns(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("role") in ("tool", "function"):
            raise RefusedField("messages", f"turns of role {data['role']} are not supported; this model calls no tools")
        return data

    @model_validator(mode="after")
    def _content_is_there(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise RefusedField("messages", f"a message of role {self.role} needs content")
        return self

    @property
    def text(self) -> str:
        """The content as one text; parts are joined by line ends."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.text for part in self.content)

    def for_template(self) -> dict[str, str]:
        """As chat templates read it. OpenAI's developer role is their system role."""
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": self.text, **named}


class Conversation(Body):
    """What is needed to write a chat prompt; shared by the chat and the tokenize endpoint."""

    messages: Annotated[list[Message], Field(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, JsonValue] = {}

    @property
    def opens_answer(self) -> bool:
        """Whether the prompt ends by opening the assistant's turn."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @model_validator(mode="after")
    def _one_way_to_go_on(self) -> Conversation:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt cannot both be true"
            raise RefusedField("continue_final_message", message)
        if self.messages[-1].role != "assistant":
            message = "continue_final_message needs a last message of role assistant"
            raise RefusedField("continue_final_message", message)
        return self


class ChatBody(GenerationBody, Conversation):
    """POST /v1/chat/completions."""

    unsupported = {
        **_NOT_SUPPORTED_ANYWHERE,
        "tools": ([],),
        "tool_choice": ("none",),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
        "echo": (False,),
        "documents": ([],),
        "chat_template": (),
    }

    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise RefusedField("top_logprobs", "top_logprobs needs logprobs to be true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = f"max_tokens ({self.max_tokens}) and max_completion_tokens ({self.max_completion_tokens}) differ"
            raise RefusedField("max_completion_tokens", message)
        return self


class TokenizeTextBody(Body):
    """POST /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(Conversation):
    """POST /tokenize with a conversation."""

    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
