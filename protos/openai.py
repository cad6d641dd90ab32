"""The bodies that the OpenAI-compatible endpoints accept, field by field. Not what is done with them.

What holds for every field (strict types, nulls, unknown names) is in `protos.openai_body`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from protos.openai_body import Body, Neutral, RefusedField
from protos.openai_messages import Conversation
from protos.openai_structured import Structured
from protos.openai_tools import NamedTool, Tool, ToolChoice

MAX_STOP_STRINGS: Final = 4
MAX_ALTERNATIVES: Final = 20
MAX_BAD_WORDS: Final = 1000
MAX_LENGTH_PENALTY: Final = 20.0  # so that no length to this power is beyond a float
MAX_BEAMS: Final = MAX_ALTERNATIVES // 2  # of each beam twice as many continuations are looked at

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]


def _stop_shape(value: Any) -> str:
    return "<list>" if isinstance(value, list) else "<text>"


StopString = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    Annotated[StopString, Tag("<text>")]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), Tag("<list>")],
    Discriminator(_stop_shape),
]


class StreamOptions(Body):
    """`include_usage`: a last chunk without choices tells the token counts, and each chunk those so far where
    `continuous_usage_stats` are asked for, too."""

    unsupported: ClassVar[Neutral] = {"include_obfuscation": (False,)}

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @model_validator(mode="after")
    def _usage_is_told_at_all(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise RefusedField("stream_options", "continuous_usage_stats needs include_usage to be true")
        return self


_NOT_SUPPORTED_ANYWHERE: Final[Neutral] = {
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
}


class GenerationBody(Structured):
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
    logit_bias: dict[str, float] = Field(default_factory=dict)
    stop: Stop = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    ignore_eos: bool = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    bad_words: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_BAD_WORDS)] = Field(
        default_factory=list
    )
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
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
    def num_made(self) -> int:
        """Choices that are generated for each prompt."""
        return self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @model_validator(mode="after")
    def _options_of_a_stream_need_one(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise RefusedField("stream_options", "stream_options is only allowed when stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise RefusedField("prompt_logprobs", "prompt_logprobs are not told in a stream")
        if self.truncate_prompt_tokens == 0:
            raise RefusedField(
                "truncate_prompt_tokens", "truncate_prompt_tokens must be at least 1, or -1 for what fits"
            )
        return self


def _prompt_shape(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    return "<texts>" if isinstance(first, str) else "<id_lists>" if isinstance(first, list) else "<ids>"


Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[TokenId], Tag("<ids>")]
    | Annotated[list[str], Tag("<texts>")]
    | Annotated[list[list[TokenId]], Tag("<id_lists>")],
    Discriminator(
        _prompt_shape,
        custom_error_type="prompt_shape",
        custom_error_message="should be a text, a list of token ids, or a filled list of either",
    ),
]


_NOT_WITH_BEAMS: Final = (
    *("stream", "echo", "logprobs", "prompt_logprobs", "session_id", "bad_words", "min_tokens", "logit_bias"),
    *("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    unsupported: ClassVar[Neutral] = {**_NOT_SUPPORTED_ANYWHERE, "suffix": ()}
    elsewhere: ClassVar[Mapping[str, str]] = {"messages": "/v1/chat/completions has it; a completion has a prompt"}

    prompt: Prompt
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    session_id: str | None = None
    use_beam_search: bool = False
    length_penalty: Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] = 1.0

    @property
    def num_made(self) -> int:
        return self.best_of or self.n

    @model_validator(mode="after")
    def _beams_go_alone(self) -> CompletionBody:
        if not self.use_beam_search:
            if self.length_penalty != 1.0:
                raise RefusedField("length_penalty", "length_penalty needs use_beam_search")
            return self
        if self.num_made > MAX_BEAMS:
            param = "n" if self.num_made == self.n else "best_of"
            raise RefusedField(param, f"{param} beams are searched, at most {MAX_BEAMS}, not {self.num_made}")
        if not isinstance(self.prompt, str) and not all(isinstance(token, int) for token in self.prompt):
            raise RefusedField("prompt", "a beam search takes one prompt")
        for name in _NOT_WITH_BEAMS:
            if getattr(self, name) != CompletionBody.model_fields[name].get_default(call_default_factory=True):
                raise RefusedField(name, f"{name} has no meaning in a beam search")
        if self.temperature not in (0.0, 1.0):
            raise RefusedField("temperature", "a beam search draws nothing, so it has no temperature")
        return self

    @model_validator(mode="after")
    def _best_of_some(self) -> CompletionBody:
        if self.num_made < self.n:
            raise RefusedField("best_of", f"best_of ({self.num_made}) must be at least n ({self.n})")
        if self.num_made > self.n and self.stream:
            raise RefusedField("best_of", "the best are known only at the end, so best_of over n allows no stream")
        return self


class ChatBody(GenerationBody, Conversation):
    """POST /v1/chat/completions."""

    elsewhere: ClassVar[Mapping[str, str]] = {"prompt": "/v1/completions has it; a chat has messages"}
    unsupported: ClassVar[Neutral] = {
        **_NOT_SUPPORTED_ANYWHERE,
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
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
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True

    @property
    def chosen_tool(self) -> str | None:
        """The function that must be called, where one is named."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice == "required" or self.chosen_tool is not None

    @property
    def offered_tools(self) -> list[Tool]:
        """Tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools

    @model_validator(mode="after")
    def _tools_agree(self) -> ChatBody:
        names = [tool.function.name for tool in self.tools]
        if twice := {name for name in names if names.count(name) > 1}:
            raise RefusedField("tools", f"has the function {min(twice)!r} more than once")
        if self.tool_choice not in (None, "none") and not names:
            raise RefusedField("tool_choice", "tool_choice needs tools to choose from")
        if self.chosen_tool is not None and self.chosen_tool not in names:
            raise RefusedField("tool_choice", f"names {self.chosen_tool!r}, which is not among the tools")
        return self

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
