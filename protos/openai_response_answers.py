"""What POST /v1/responses answers: a response and the items of its output. The events around them are plain JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from protos.openai_answers import Answer

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Answer):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


class OutputMessage(Answer):
    id: str
    type: Literal["message"] = "message"
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningText(Answer):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(Answer):
    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Status
    summary: list[Any] = Field(default_factory=list)
    content: list[ReasoningText]


class OutputCall(Answer):
    """`arguments` is the text of a JSON object, as the model wrote it."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(Answer):
    cached_tokens: int


class OutputDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(Answer):
    reason: Literal["max_output_tokens"]


class ResponseError(Answer):
    code: str
    message: str


class Response(Answer):
    """What was asked for is told again, with what held where nothing was asked."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, Any]
