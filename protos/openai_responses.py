"""What POST /v1/responses accepts: the stateless core of OpenAI's Responses API.

Not what is done with it: `cluster.web.responses` says the same as a conversation.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from protos.openai import Count
from protos.openai_body import Body, Neutral, only_text
from protos.openai_structured import JsonSchema, PlainFormat
from protos.openai_tools import MAX_TOOLS, FunctionName

OwnBooks = dict[str, JsonValue]


class TextPart(Body):
    """A piece of a message. Annotations and log probabilities of an earlier answer say nothing to a model."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[JsonValue] | None = None
    logprobs: list[JsonValue] | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        return only_text(data, ("input_text", "output_text", "text"), "input")


def _text_shape(value: Any) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


Texts = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Tag("<parts>")],
    Discriminator(_text_shape),
]


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class InputCall(Body):
    """A call that the model made before. `arguments` is the text of a JSON object."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class InputCallOutput(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: Texts
    id: str | None = None
    status: str | None = None


class Thought(Body):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Body):
    """What the model thought before it went on; of a `summary` and of what is encrypted nothing is read."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[JsonValue] = Field(default_factory=list)
    content: list[Thought] = Field(default_factory=list)
    encrypted_content: str | None = None
    status: str | None = None


def _item_shape(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    known = ("message", "function_call", "function_call_output", "reasoning")
    return f"<{kind}>" if kind in known else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[InputCall, Tag("<function_call>")]
    | Annotated[InputCallOutput, Tag("<function_call_output>")]
    | Annotated[InputReasoning, Tag("<reasoning>")],
    Discriminator(
        _item_shape,
        custom_error_type="item_shape",
        custom_error_message="should be a message, a function_call, a function_call_output or a reasoning item",
    ),
]


def _input_shape(value: Any) -> str:
    return "<items>" if isinstance(value, list) else "<text>"


Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[InputItem], Field(min_length=1), Tag("<items>")],
    Discriminator(_input_shape),
]


class FunctionTool(Body):
    """As a tool of a chat, but flat."""

    unsupported: ClassVar[Neutral] = {"defer_loading": (False,)}

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class ChosenFunction(Body):
    type: Literal["function"]
    name: str


class SchemaText(Body):
    """As a chat's `json_schema`, but flat."""

    type: Literal["json_schema"]
    name: str
    json_schema: JsonSchema = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


def _format_shape(value: Any) -> str:
    return "<schema>" if isinstance(value, dict) and value.get("type") == "json_schema" else "<plain>"


class TextSettings(Body):
    unsupported: ClassVar[Neutral] = {"verbosity": ("medium",)}

    format: Annotated[
        Annotated[PlainFormat, Tag("<plain>")] | Annotated[SchemaText, Tag("<schema>")], Discriminator(_format_shape)
    ] = PlainFormat(type="text")


class ResponseStreamOptions(Body):
    unsupported: ClassVar[Neutral] = {"include_obfuscation": (False,)}


class ResponsesBody(Body):
    """POST /v1/responses. Beyond OpenAI's fields those of the sampler: `top_k`, `min_p`, `seed` and the like."""

    unsupported: ClassVar[Neutral] = {
        "previous_response_id": (),
        "conversation": (),
        "store": (False,),
        "background": (False,),
        "include": ([],),
        "max_tool_calls": (),
        "prompt": (),
        "reasoning": ({},),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        "context_management": ([],),
        "moderation": (),
    }

    model: str | None = None
    input: Input
    instructions: str | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    text: TextSettings = TextSettings()
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag("<word>")] | Annotated[ChosenFunction, Tag("<named>")],
        Discriminator(lambda value: "<named>" if isinstance(value, dict) else "<word>"),
    ] = "auto"
    parallel_tool_calls: bool = True
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    priority: int | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    # For the client's own books; they change nothing here.
    metadata: OwnBooks | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
