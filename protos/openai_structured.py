"""How a client says what form an answer must have: OpenAI's `response_format`, and vLLM's guided fields.

Not what a form means: `cluster.answers.structured` makes grammars of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from protos.openai_body import Body, RefusedField

JsonSchema = dict[str, JsonValue] | bool
FORMS: Final = ("json", "regex", "choice", "grammar")


class PlainFormat(Body):
    """`text` asks for nothing, `json_object` for any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(Body):
    """`name`, `description` and `strict` are for the client's own books: answers always follow the schema."""

    name: str
    json_schema: JsonSchema = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


def _format_shape(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return (
        {"text": "<plain>", "json_object": "<plain>", "json_schema": "<schema>"}.get(kind)
        if isinstance(kind, str)
        else None
    )


ResponseFormat = Annotated[
    Annotated[PlainFormat, Tag("<plain>")] | Annotated[SchemaFormat, Tag("<schema>")],
    Discriminator(
        _format_shape,
        custom_error_type="format_shape",
        custom_error_message="should have the type text, json_object or json_schema",
    ),
]

Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=10_000)]
Pattern = Annotated[str, Field(min_length=1)]


class StructuredOutputs(Body):
    """vLLM's newer name of the guided fields: exactly one of them."""

    json_schema: JsonSchema | str | None = Field(default=None, alias="json")
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        given = [name for name in type(self).model_fields if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RefusedField("structured_outputs", f"has {len(given)} forms ({', '.join(given)}); it needs one")
        return self


class Structured(Body):
    """The fields of a generating body that ask for a form. At most one of them may do so."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | str | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Structured:
        given = [name for name in Structured.model_fields if getattr(self, name) is not None]
        asking = [name for name in given if getattr(self, name) != PlainFormat(type="text")]
        if len(asking) > 1:
            raise RefusedField(asking[1], f"{asking[0]} and {asking[1]} both ask for a form; one is allowed")
        return self
