"""Tools that a client offers, how they are to be chosen, and the calls that conversations carry."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator
from pydantic_core import from_json

from protos.openai_body import Body, RefusedField

MAX_TOOLS: Final = 128

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


class Function(Body):
    """`parameters` is a JSON schema of the arguments. `strict` is for the client's own books."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it, which expect parameters of every tool."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": {**function, "parameters": self.function.parameters or EMPTY_SCHEMA}}


EMPTY_SCHEMA: Final[dict[str, JsonValue]] = {"type": "object", "properties": {}}


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")] | Annotated[NamedTool, Tag("<named>")],
    Discriminator(lambda value: "<named>" if isinstance(value, dict) else "<word>"),
]


class CalledFunction(Body):
    """`arguments` is the text of a JSON object, as the model wrote it."""

    name: str
    arguments: str = "{}"


class ToolCall(Body):
    """A call in an assistant's turn of a conversation."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> ToolCall:
        self.arguments()
        return self

    def arguments(self) -> dict[str, JsonValue]:
        """Raises `RefusedField` where they are no JSON object."""
        try:
            value = from_json(self.function.arguments or "{}", allow_inf_nan=False)
        except ValueError as error:
            raise RefusedField("messages", f"the arguments of call {self.id} are not JSON: {error}") from error
        if not isinstance(value, dict):
            raise RefusedField("messages", f"the arguments of call {self.id} are no JSON object")
        return value

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: arguments as a value."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": self.arguments()},
        }
