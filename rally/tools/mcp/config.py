"""Reads an MCP entry of a tool YAML, in either spelling, and the server file that it names.

A mistake raises one ToolConfigError. The file is JSON of the usual form, `{"mcpServers": {name: server}}`. A server is

    {"command": "uvx", "args": ["mcp-server-time"], "env": {"KEY": "${KEY}"}, "cwd": "..."}      stdio
    {"url": "https://host/mcp", "headers": {...}, "auth_token_env": "TOKEN"}                     streamable HTTP

`"type": "sse"` selects the older HTTP transport, `"disabled": true` skips a server. `${NAME}` is replaced by the
environment variable of that name. Tokens, and the values of variables, headers and `env` entries whose names look like
secrets, are registered with `redact` and appear in no repr.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rally.redact import learn_environment, learn_tree, says_secret
from rally.tools.schema import ToolConfigError, from_pydantic
from rally.util.checksums import UNREADABLE, reason

CLASS_NAMES = {"verl.tools.mcp_base_tool.MCPBaseTool", "verl.tools.mcp_search_tool.MCPSearchTool"}
"""The class names that an MCP entry may have. Rally's own tools are used for all of them."""


Transport = Literal["stdio", "http", "sse"]
SPELLINGS: dict[str, Transport] = {
    "stdio": "stdio",
    "http": "http",
    "streamable-http": "http",
    "streamable_http": "http",
    "streamableHttp": "http",
    "sse": "sse",
}


class McpSettings(BaseModel):
    """The keys of an entry. They may be at its top level, in its `config` or in its `mcp`."""

    model_config = ConfigDict(extra="forbid")

    mcp_servers_config_path: str
    tool_selected_list: list[str] | None = None
    session: Literal["shared", "episode"] = "shared"
    prefix: bool = False
    timeout: float | None = Field(default=None, gt=0)
    startup_timeout: float = Field(default=60.0, gt=0)
    num_workers: int = Field(default=128, ge=1)
    rate_limit: float | None = Field(default=None, gt=0)


@dataclass(frozen=True, kw_only=True)
class Server:
    """How one server is reached."""

    name: str
    transport: Transport
    command: str = ""
    args: tuple[str, ...] = field(default=(), repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    url: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    startup_timeout: float = 60.0


class _ServerEntry(BaseModel):
    """A server as written in its file."""

    model_config = ConfigDict(extra="forbid")

    type: str | None = None
    transport: str | None = None
    disabled: bool = False
    command: str | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = {}
    auth_token: str | None = None
    auth_token_env: str | None = None


def is_mcp(entry: Mapping[str, Any]) -> bool:
    config = entry.get("config")
    kinds = (entry.get("type"), config.get("type") if isinstance(config, Mapping) else None)
    return "mcp" in kinds or "mcp" in entry or str(entry.get("class_name")) in CLASS_NAMES


APART = ("class_name", "config", "limits", "mcp", "on_outage", "timeout_counts")  # read by the loader, or below


def read_settings(entry: Mapping[str, Any]) -> McpSettings:
    if str(entry.get("class_name", next(iter(CLASS_NAMES)))) not in CLASS_NAMES:
        raise ToolConfigError("an entry of type mcp takes no class_name; the server's tools are used as they are")
    merged: dict[str, Any] = {}
    top = {key: value for key, value in entry.items() if key not in APART}
    for part in (top, entry.get("config") or {}, entry.get("mcp") or {}):
        if not isinstance(part, Mapping):
            raise ToolConfigError("config and mcp of an MCP entry must be mappings")
        settings = {key: value for key, value in part.items() if key != "type"}
        if twice := sorted(map(str, set(settings) & set(merged))):
            raise ToolConfigError(f"{twice[0]!r} is written twice; write it once")
        merged |= settings
    try:
        return McpSettings.model_validate(merged)
    except ValidationError as error:
        raise ToolConfigError(f"an MCP entry: {from_pydantic(error)}") from None


def read_servers(settings: McpSettings, folder: Path) -> list[Server]:
    """The servers of the entry's file. Its path is relative to the working folder or to `folder`."""
    written = Path(settings.mcp_servers_config_path).expanduser()
    path = next((p for p in (written, folder / written) if p.is_file()), None)
    if path is None:
        raise ToolConfigError(f"mcp_servers_config_path {written} does not exist, neither here nor below {folder}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except UNREADABLE as error:
        raise ToolConfigError(f"{path} is not valid JSON ({reason(error)})") from None
    servers = content.get("mcpServers") if isinstance(content, Mapping) else None
    if not isinstance(servers, Mapping) or not servers:
        raise ToolConfigError(f'{path} must have servers under the key "mcpServers"')
    entries = [_server(str(name), body, path, settings.startup_timeout) for name, body in servers.items()]
    enabled = [server for server in entries if server is not None]
    if not enabled:
        raise ToolConfigError(f"every server in {path} is disabled")
    return enabled


def _server(name: str, body: Any, path: Path, startup_timeout: float) -> Server | None:
    where = f"{path}, server {name!r}"
    environment = _Environment(where)
    try:
        written = _ServerEntry.model_validate(environment.filled(body))
    except ValidationError as error:
        raise ToolConfigError(f"{where}: {from_pydantic(error)}") from None
    if written.disabled:
        return None
    transport = _transport(written, where)
    token = environment.value(written.auth_token_env) if written.auth_token_env else written.auth_token
    headers = {**written.headers, **({"Authorization": f"Bearer {token}"} if token else {})}
    learn_environment(name for name in environment.used if says_secret(name) or name == written.auth_token_env)
    learn_tree({"env": written.env, "headers": headers, "token": token or ""})
    return Server(
        name=name,
        transport=transport,
        command=written.command or "",
        args=tuple(written.args),
        env=written.env,
        cwd=written.cwd,
        url=written.url or "",
        headers=headers,
        startup_timeout=startup_timeout,
    )


def _transport(written: _ServerEntry, where: str) -> Transport:
    if (written.command is None) == (written.url is None):
        raise ToolConfigError(f"{where} needs one of command (a program to start) and url (a server that runs)")
    name = written.type or written.transport or ("stdio" if written.url is None else "http")
    transport = SPELLINGS.get(name)
    if transport is None or (transport == "stdio") != (written.url is None):
        raise ToolConfigError(f"{where}: type {name!r} does not fit; it is stdio for a command, http or sse for a url")
    if written.url is None and (written.headers or written.auth_token or written.auth_token_env):
        raise ToolConfigError(f"{where}: headers and tokens are for a url; give a command its secrets in env")
    return transport


class _Environment:
    """Replaces `${NAME}` by environment variables and records which were used."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.used: dict[str, str] = {}

    def value(self, name: str) -> str:
        if name not in os.environ:
            raise ToolConfigError(f"{self._where} needs the environment variable {name}, which is not set; set it")
        self.used[name] = os.environ[name]
        return os.environ[name]

    def filled(self, value: Any) -> Any:
        if isinstance(value, str):
            return re.sub(r"\$\{(\w+)\}", lambda match: self.value(match[1]), value)
        if isinstance(value, list):
            return [self.filled(part) for part in value]
        if isinstance(value, Mapping):
            return {key: self.filled(part) for key, part in value.items()}
        return value
