"""A tool whose server is down, in a module that its process imports quickly."""

from typing import Any

from rally.tools import BaseTool


class Lookup(BaseTool[Any]):
    def get_openai_tool_schema(self) -> dict[str, Any]:
        return {"name": "lookup", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        raise ConnectionRefusedError("nobody listens")
