"""Makes the tools of MCP servers tools of a run, with the names, descriptions and answers of their servers.

    tools:
      - type: mcp
        mcp_servers_config_path: servers.json     # {"mcpServers": {name: {command, args, env} | {url, headers}}}
        tool_selected_list: [get_current_time]    # default: all tools of all servers
        session: shared                           # or episode: a separate session for every episode

Also accepted: `config: {type: mcp, ...}` with `mcp: {mcp_servers_config_path: ..., tool_selected_list: [...]}`. The
sessions are closed with the run.
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
from rally.tools.mcp.client import McpClient, hub
from rally.tools.mcp.config import McpSettings, Server, read_servers, read_settings
from rally.tools.mcp.connection import McpFailure, McpRefusal
from rally.tools.schema import Schema, ToolConfigError
from rally.types import Image, ToolResponse
from rally.util.rate_limit import RateLimiter

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Content:
    """The content of a result, and the number of parts that could not be converted."""

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
    """The image, decoded here, so that a broken one fails now and not during training; None if it is broken."""
    with suppress(binascii.Error, ValueError):
        raw = base64.b64decode(data)
        with suppress(ImageError):
            return read_image(raw)
        if raw.startswith(PNG_SIGNATURE):
            with suppress(ImageError):
                return read_image(_necessary_chunks(raw))
    return None


def _necessary_chunks(png: bytes) -> bytes:
    """The PNG without its ancillary chunks. Pillow rejects a whole file for a colour profile with a wrong checksum, and
    one of the protocol's example servers sends such a file."""
    kept, at = [PNG_SIGNATURE], len(PNG_SIGNATURE)
    while at + 8 <= len(png):
        end = at + 12 + int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 5].isupper():  # an upper-case first letter marks a critical chunk
            kept.append(png[at:end])
        at = end
    return b"".join(kept)


class McpTool(BaseTool[Any]):
    """One tool of a server whose session all episodes share."""

    def __init__(self, clients: McpClients, tool: types.Tool, settings: McpSettings, limiter: RateLimiter) -> None:
        super().__init__(settings.model_dump(exclude_none=True), _schema(clients.server, tool, prefix=settings.prefix))
        self._clients = clients
        self._remote_name = tool.name
        self.own_timeout = settings.timeout
        self.shared_limiter = limiter
        hints = tool.annotations
        # The protocol's default: a tool without annotations may be destructive.
        self.destructive = not (hints and (hints.read_only_hint or hints.destructive_hint is False))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, None, dict[str, Any]]:
        """The row's execute_kwargs are added to the arguments and override those of the model."""
        try:
            async with asyncio.timeout(self.own_timeout) as limit:
                work = self._client(instance_id).call(self._remote_name, {**parameters, **kwargs})
                result = await hub().ask(work)
        except TimeoutError:
            if not limit.expired():
                raise
            raise ToolTimeout(f"{self.name} did not answer within {self.own_timeout or 0:g} seconds") from None
        return self._answer(result)

    def close(self) -> None:
        self._clients.close()

    def _answer(self, result: types.CallToolResult) -> tuple[ToolResponse, None, dict[str, Any]]:
        content = read_content(result)
        text = redact(content.response.text or "")
        if result.is_error:
            raise McpRefusal(text.removeprefix("Error: ") or f"{self.name} failed and gave no reason")
        metrics = {
            "images": len(content.response.image or ()),
            "not_shown": content.not_shown,
        }
        return replace(content.response, text=text), None, metrics

    def _client(self, instance_id: str) -> McpClient:
        return self._clients.shared


class EpisodeMcpTool(McpTool):
    """One tool of a server with a separate session for every episode, shared by the tools of that server."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        assert instance_id is not None
        if kwargs.get("create_kwargs"):
            raise ToolConfigError(f"{self.name} is a tool of an MCP server, which takes no create_kwargs")
        self._clients.take(self._episode(instance_id))
        return instance_id, ToolResponse()

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        client = self._clients.give_back(self._episode(instance_id))
        if client is not None:
            await hub().ask(client.close())

    def _client(self, instance_id: str) -> McpClient:
        return self._clients.of_episode(self._episode(instance_id))

    def _episode(self, instance_id: str) -> str:
        """The episode id: a ToolSession forms instance ids as `episode/tool`."""
        return instance_id.removesuffix(f"/{self.name}")


class _EpisodeClient:
    """The client of one episode and the number of tools that use it."""

    def __init__(self, client: McpClient) -> None:
        self.client = client
        self.users = 0


class McpClients:
    """All clients of one server: the shared one, and one for each running episode."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.shared = McpClient(server, keeps_state=False)
        self._episodes: dict[str, _EpisodeClient] = {}
        # Tools dropped without `close` (filtered out, a failed start) must still end their servers.
        self._ended = weakref.finalize(self, _close_soon, self.shared, self._episodes)
        self._ended.atexit = False  # the hub closes the rest at exit

    def take(self, episode: str) -> None:
        held = self._episodes.setdefault(episode, _EpisodeClient(self._new_client()))
        held.users += 1

    def _new_client(self) -> McpClient:
        return McpClient(self.server, keeps_state=True, old_handshake=self.shared.old_handshake)

    def of_episode(self, episode: str) -> McpClient:
        return self._episodes[episode].client

    def give_back(self, episode: str) -> McpClient | None:
        """Drop one use of the episode's client. Returns the client if that was the last use; the caller closes it."""
        held = self._episodes[episode]
        held.users -= 1
        return self._episodes.pop(episode).client if held.users == 0 else None

    def close(self) -> None:
        if self._ended.detach() is not None:
            hub().run(_close(self.shared, self._episodes))


async def _close(shared: McpClient, episodes: Mapping[str, _EpisodeClient]) -> None:
    await asyncio.gather(shared.close(), *(held.client.close() for held in episodes.values()))


def _close_soon(shared: McpClient, episodes: Mapping[str, _EpisodeClient]) -> None:
    hub().start(_close(shared, episodes))


class _OfferedTool(NamedTuple):
    clients: McpClients
    tool: types.Tool


def mcp_tools(entry: Mapping[str, Any], folder: Path) -> list[BaseTool[Any]]:
    """Start the servers of an entry and return their tools. Raises ToolConfigError for a bad entry or server."""
    settings = read_settings(entry)
    servers = [McpClients(server) for server in read_servers(settings, folder)]
    try:
        listed = hub().run(_list_all(servers, settings))
        offered = [
            _OfferedTool(clients, tool) for clients, tools in zip(servers, listed, strict=True) for tool in tools
        ]
        chosen = _selected(offered, settings.tool_selected_list)
        _check_unique_names(chosen, settings)
    except McpFailure as failure:
        _close_all(servers)
        raise ToolConfigError(str(failure)) from None
    except ToolConfigError:
        _close_all(servers)
        raise
    limiter = RateLimiter(max_concurrency=settings.num_workers, rate=settings.rate_limit)
    kind = EpisodeMcpTool if settings.session == "episode" else McpTool
    return [kind(clients, tool, settings, limiter) for clients, tool in chosen]


async def _list_all(servers: Sequence[McpClients], settings: McpSettings) -> list[list[types.Tool]]:
    tools = await asyncio.gather(*(clients.shared.list_tools() for clients in servers))
    if settings.session == "episode":
        await asyncio.gather(*(clients.shared.close() for clients in servers))
    return tools


def _close_all(servers: Iterable[McpClients]) -> None:
    for clients in servers:
        clients.close()


def _selected(offered: Sequence[_OfferedTool], names: Sequence[str] | None) -> list[_OfferedTool]:
    if names is None:
        return list(offered)
    known = [one.tool.name for one in offered]
    missing = next((name for name in names if name not in known), None)
    if missing is not None:
        raise ToolConfigError(f"tool_selected_list: no server offers {missing!r}; they offer {', '.join(known)}")
    return [one for one in offered if one.tool.name in names]


def _check_unique_names(chosen: Sequence[_OfferedTool], settings: McpSettings) -> None:
    owners: dict[str, str] = {}
    for clients, tool in chosen:
        other = owners.setdefault(tool.name, clients.server.name)
        if other != clients.server.name and not settings.prefix:
            raise ToolConfigError(
                f"the MCP servers {other!r} and {clients.server.name!r} both offer {tool.name!r}; write `prefix: true` "
                "to put the server's name before each tool's, or leave one out by tool_selected_list"
            )


def _schema(server: Server, tool: types.Tool, *, prefix: bool) -> Schema:
    """The schema as the server gives it."""
    return {
        "name": f"{server.name}_{tool.name}" if prefix else tool.name,
        "description": tool.description or tool.title or "",
        "parameters": tool.input_schema,
    }
