"""What the bodies of all OpenAI-compatible endpoints have in common, and the messages of a conversation.

Types are strict: `true` is no integer, `"3"` no number, 2.5 no count, and infinity nothing at all. A null means that
the field was not given. A field that nothing here knows is refused by its name, and so is one that is known and not
supported, unless its value asks for what happens anyway (`best_of` 1, an empty `tools`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag, model_validator

Neutral = Mapping[str, tuple[Any, ...]]
"""Known fields that are not supported, and for each the values that ask for nothing special."""


class RefusedField(ValueError):
    """A field whose presence or value is refused. `param` is its name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    unsupported: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_says_nothing(cls, data: Any) -> Any:
        """Without nulls, and without unsupported fields at their neutral value."""
        if not isinstance(data, dict):
            return data
        kept = {}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in data.items():
            if value is None:
                continue
            if name in cls.unsupported:
                if any(type(value) is type(neutral) and value == neutral for neutral in cls.unsupported[name]):
                    continue
                raise RefusedField(name, f"{name} is not supported here")
            if name not in known:
                raise RefusedField(name, f"{name} is not a field of this request")
            kept[name] = value
        return kept


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
    return "<parts>" if isinstance(value, list) else "<text>"


class Message(Body):
    """One turn of a conversation. Only an assistant's turn may have no content; it then reads as empty."""

    unsupported: ClassVar[Neutral] = {
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
            Annotated[str, Tag("<text>")] | Annotated[list[ContentPart], Field(min_length=1), Tag("<parts>")],
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
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)

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
