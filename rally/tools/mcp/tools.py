"""The tools of MCP servers are tools of a run: named, described and answered as their servers do, closed with the run.

    tools:
      - type: mcp
        mcp_servers_config_path: servers.json     # {"mcpServers": {name: {command, args, env} | {url, headers}}}
        tool_selected_list: [get_current_time]    # all tools of all servers when left out
        session: shared                           # or episode: every episode has a session of its own

also as `config: {type: mcp, ...}` with `mcp: {mcp_servers_config_path: ..., tool_selected_list: [...]}`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import mcp_types as types

from rally.images.loading import ImageError, read_image
from rally.redact import redact
from rally.tools.base import BaseTool
from rally.tools.invoke import ToolTimeout
from rally.tools.limits import CallLimits
from rally.tools.mcp.client import McpClient, hub
from rally.tools.mcp.config import McpSettings, Server, read_servers, read_settings
from rally.tools.mcp.connection import McpFailure
from rally.tools.rate_limit import RateLimiter
from rally.tools.schema import Schema, ToolConfigError
from rally.types import Image, ToolResponse

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Content:
    """A result's content, with the number of parts that could not be shown."""

    response: ToolResponse
    not_shown: int


def read_content(result: types.CallToolResult) -> Content:
    reader = _ContentReader()
    lines = [reader.line(part) for part in result.content]
    if not lines and result.structured_content is not None:
        lines = [json.dumps(result.structured_content, ensure_ascii=False)]
    return Content(ToolResponse(text="\n".join(lines), image=reader.images or None), reader.not_shown)


class _ContentReader:
    def __init__(self) -> None:
        self.images: list[Image] = []
        self.not_shown = 0

    def line(self, part: types.ContentBlock) -> str:
        if part.type == "text":
            return part.text
        if part.type == "image":
            return self._blob(part.data, part.mime_type, "image")
        if part.type == "audio":
            return self._blob(part.data, part.mime_type, "audio")
        if part.type == "resource_link":
            return f"[{part.title or part.name}: {part.uri}]"
        resource = part.resource
        text: str | None = getattr(resource, "text", None)
        if text is not None:
            return text
        return self._blob(getattr(resource, "blob", ""), resource.mime_type, str(resource.uri))

    def _blob(self, data: str, mime_type: str | None, what: str) -> str:
        image = _image(data) if (mime_type or "").startswith("image/") else None
        if image is None:
            self.not_shown += 1
            return f"[{what} of type {mime_type or 'unknown'}, which cannot be shown]"
        self.images.append(image)
        return f"[image {len(self.images)}: {image.width}x{image.height}]"


def _image(data: str) -> Image | None:
    """The picture, decoded now, so that a broken one is found here and not in the middle of training."""
    with suppress(binascii.Error, ValueError):
        raw = base64.b64decode(data)
        with suppress(ImageError):
            return read_image(raw)
        if raw.startswith(PNG_SIGNATURE):
            with suppress(ImageError):
                return read_image(_necessary_chunks(raw))
    return None


def _necessary_chunks(png: bytes) -> bytes:
    """The PNG less what is no part of the picture: a colour profile with a wrong checksum, as one of the protocol's own
    example servers sends it, makes Pillow refuse the whole."""
    kept, at = [PNG_SIGNATURE], len(PNG_SIGNATURE)
    while at + 8 <= len(png):
        end = at + 12 + int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 5].isupper():  # how PNG marks a chunk that every reader must understand
            kept.append(png[at:end])
        at = end
    return b"".join(kept)


class McpTool(BaseTool[Any]):
    """One tool of a server whose session all episodes share."""

    def __init__(self, lines: McpClients, tool: types.Tool, settings: McpSettings, gate: RateLimiter) -> None:
        super().__init__(settings.model_dump(exclude_none=True), _schema(lines.server, tool, prefix=settings.prefix))
        self._lines = lines
        self._called = tool.name
        self.own_timeout = settings.timeout
        self.shared_gate = gate
        hints = tool.annotations
        # The protocol's own defaults: a tool that says nothing may destroy.
        self.destructive = not (hints and (hints.read_only_hint or hints.destructive_hint is False))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, None, dict[str, Any]]:
        """The row's execute_kwargs are arguments too, and win over what the model wrote."""
        try:
            async with asyncio.timeout(self.own_timeout) as limit:
                work = self._line(instance_id).call(self._called, {**parameters, **kwargs})
                result = await hub().ask(work)
        except TimeoutError:
            if not limit.expired():
                raise
            raise ToolTimeout(f"{self.name} did not answer within {self.own_timeout or 0:g} seconds") from None
        return self._told(result)

    def close(self) -> None:
        self._lines.close()

    def _told(self, result: types.CallToolResult) -> tuple[ToolResponse, None, dict[str, Any]]:
        content = read_content(result)
        text = redact(content.response.text or "")
        if result.is_error:
            raise McpFailure(text.removeprefix("Error: ") or f"{self.name} failed and did not say why")
        metrics = {
            "images": len(content.response.image or ()),
            "not_shown": content.not_shown,
        }
        return replace(content.response, text=text), None, metrics

    def _line(self, instance_id: str) -> McpClient:
        return self._lines.shared


class EpisodeMcpTool(McpTool):
    """One tool of a server with which every episode has a session of its own, shared by the tools of that server."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        assert instance_id is not None
        if kwargs.get("create_kwargs"):
            raise ToolConfigError(f"{self.name} is a tool of an MCP server, which takes no create_kwargs")
        self._lines.take(self._episode(instance_id))
        return instance_id, ToolResponse()

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        line = self._lines.give_back(self._episode(instance_id))
        if line is not None:
            await hub().ask(line.close())

    def _line(self, instance_id: str) -> McpClient:
        return self._lines.of_episode(self._episode(instance_id))

    def _episode(self, instance_id: str) -> str:
        """A ToolSession calls an instance by its episode and its tool."""
        return instance_id.removesuffix(f"/{self.name}")


class _Held:
    """An episode's line and the number of tools that use it."""

    def __init__(self, line: McpClient) -> None:
        self.line = line
        self.holders = 0


class McpClients:
    """All lines to one server: the shared one, and one for each episode that is under way."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.shared = McpClient(server, keeps_state=False)
        self._episodes: dict[str, _Held] = {}
        # Tools that are dropped without `close` (filtered out, a failed start) take their servers with them.
        self._ended = weakref.finalize(self, _close_soon, self.shared, self._episodes)
        self._ended.atexit = False  # the hub closes what is left by then

    def take(self, episode: str) -> None:
        held = self._episodes.setdefault(episode, _Held(self._new_line()))
        held.holders += 1

    def _new_line(self) -> McpClient:
        return McpClient(self.server, keeps_state=True, old_handshake=self.shared.old_handshake)

    def of_episode(self, episode: str) -> McpClient:
        return self._episodes[episode].line

    def give_back(self, episode: str) -> McpClient | None:
        """The episode's line when nobody holds it any more, to be closed."""
        held = self._episodes[episode]
        held.holders -= 1
        return self._episodes.pop(episode).line if held.holders == 0 else None

    def close(self) -> None:
        if self._ended.detach() is not None:
            hub().run(_close(self.shared, self._episodes))


async def _close(shared: McpClient, episodes: Mapping[str, _Held]) -> None:
    await asyncio.gather(shared.close(), *(held.line.close() for held in episodes.values()))


def _close_soon(shared: McpClient, episodes: Mapping[str, _Held]) -> None:
    hub().start(_close(shared, episodes))


class _Found(NamedTuple):
    lines: McpClients
    tool: types.Tool


def mcp_tools(entry: Mapping[str, Any], folder: Path) -> list[BaseTool[Any]]:
    """The tools of an entry, its servers started; a ToolConfigError says what is wrong with the entry or a server."""
    settings = read_settings(entry)
    every = [McpClients(server) for server in read_servers(settings, folder)]
    try:
        listed = hub().run(_list_all(every, settings))
        found = [_Found(lines, tool) for lines, tools in zip(every, listed, strict=True) for tool in tools]
        chosen = _selected(found, settings.tool_selected_list)
        _refuse_twins(chosen, settings)
    except McpFailure as failure:
        _close_every(every)
        raise ToolConfigError(str(failure)) from None
    except ToolConfigError:
        _close_every(every)
        raise
    gate = RateLimiter(CallLimits(max_concurrency=settings.num_workers, rate_limit=settings.rate_limit))
    kind = EpisodeMcpTool if settings.session == "episode" else McpTool
    return [kind(lines, tool, settings, gate) for lines, tool in chosen]


async def _list_all(every: Sequence[McpClients], settings: McpSettings) -> list[list[types.Tool]]:
    tools = await asyncio.gather(*(lines.shared.list_tools() for lines in every))
    if settings.session == "episode":
        await asyncio.gather(*(lines.shared.close() for lines in every))
    return tools


def _close_every(every: Iterable[McpClients]) -> None:
    for lines in every:
        lines.close()


def _selected(found: Sequence[_Found], names: Sequence[str] | None) -> list[_Found]:
    offered = [tool.name for _, tool in found]
    if names is None:
        return list(found)
    missing = next((name for name in names if name not in offered), None)
    if missing is not None:
        raise ToolConfigError(f"tool_selected_list: no server offers {missing!r}; they offer {', '.join(offered)}")
    return [one for one in found if one.tool.name in names]


def _refuse_twins(chosen: Sequence[_Found], settings: McpSettings) -> None:
    owners: dict[str, str] = {}
    for lines, tool in chosen:
        other = owners.setdefault(tool.name, lines.server.name)
        if other != lines.server.name and not settings.prefix:
            raise ToolConfigError(
                f"the MCP servers {other!r} and {lines.server.name!r} both offer {tool.name!r}; write `prefix: true` "
                "to put the server's name before each tool's, or leave one out by tool_selected_list"
            )


def _schema(server: Server, tool: types.Tool, *, prefix: bool) -> Schema:
    """The server's own words, whole."""
    return {
        "name": f"{server.name}_{tool.name}" if prefix else tool.name,
        "description": tool.description or tool.title or "",
        "parameters": tool.input_schema,
    }
