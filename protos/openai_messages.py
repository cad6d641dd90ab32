"""The messages of a conversation, as the chat and the tokenize endpoint read them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from protos.openai_body import Body, Neutral, RefusedField, only_text
from protos.openai_tools import MAX_TOOLS, Tool, ToolCall


class ContentPart(Body):
    """One part of a message's content. Only text can be read."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        return only_text(data, ("text",), "messages")


def _content_shape(value: Any) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


class Message(Body):
    """One turn of a conversation. Only an assistant's turn may have no content; it then reads as empty."""

    unsupported: ClassVar[Neutral] = {
        "function_call": (),
        "audio": (),
        "refusal": (),
        "annotations": ([],),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Tag("<text>")] | Annotated[list[ContentPart], Field(min_length=1), Tag("<parts>")],
            Discriminator(_content_shape),
        ]
        | None
    ) = None
    name: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _content_is_there(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise RefusedField("messages", f"a message of role {self.role} needs content")
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content is not None):
            raise RefusedField("messages", f"tool_calls and reasoning_content are an assistant's, not a {self.role}'s")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise RefusedField("messages", "a message of role tool, and no other, needs a tool_call_id")
        return self

    @property
    def text(self) -> str:
        """The content as one text; parts are joined by line ends."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.text for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it. OpenAI's developer role is their system role."""
        made: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                made[name] = value
        if self.tool_calls:
            made["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return made


class Conversation(Body):
    """What is needed to write a chat prompt; shared by the chat and the tokenize endpoint."""

    messages: Annotated[list[Message], Field(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)

    @property
    def offered_tools(self) -> list[Tool]:
        """Tools that the prompt shows."""
        return self.tools

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
