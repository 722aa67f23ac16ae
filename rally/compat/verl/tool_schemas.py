"""verl's Pydantic models of tool schemas. Unknown keys are kept."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class SchemaPart(BaseModel):
    """One mapping of a schema. Keys without a field are kept."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(SchemaPart):
    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(SchemaPart):
    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(SchemaPart):
    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)


class OpenAIFunctionToolSchema(SchemaPart):
    type: Literal["function"] = "function"
    function: OpenAIFunctionSchema
