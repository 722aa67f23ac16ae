"""An MCP server that fails on request in every way. It starts fast, because it imports only the standard library.

Launch: python tests/helpers/mcp_server.py [names of the only tools it offers]

The tests serve the same `answer` over HTTP.
"""

import base64
import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

PIXEL = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8cfc000000301010018dd8db0"
        "0000000049454e44ae426082"
    )
).decode()

NESTED = {
    "type": "object",
    "properties": {
        "order": {
            "type": "object",
            "properties": {"size": {"type": "string", "enum": ["s", "l"]}, "to": {"$ref": "#/$defs/Place"}},
            "required": ["size"],
        },
        "counts": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
    },
    "required": ["order"],
    "$defs": {"Place": {"type": "object", "properties": {"street": {"type": "string"}}}},
}
ONE = {"type": "object", "properties": {"value": {"type": "string"}}}
PAGES = [
    ["order", "echo", "remember"],
    ["fail", "refuse", "reject", "die", "hang"],
    ["noise", "show", "structured", "freeze"],
]

remembered: list[str] = []
cancelled = threading.Event()


class Failure(Exception):
    """A JSON-RPC error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": value}], **fields}


def call(name: str, value: str) -> dict[str, Any]:
    if path := os.environ.get("CALLS"):
        with Path(path).open("a") as calls:
            calls.write(f"{name} {value}\n")
    match name:
        case "remember":
            remembered.append(value)
            return text(f"{os.getpid()}:{','.join(remembered)}")
        case "fail":
            return text("Error: no such city", isError=True)
        case "refuse":
            raise Failure(-32603, f"out of order {value}")
        case "reject":
            raise Failure(-32602, "value must be even")
        case "die":
            os.write(2, f"disk full {os.environ.get('KEY', '')}\n".encode())
            os._exit(3)
        case "hang":
            cancelled.wait(60)
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "noise":
            os.write(1, b"loading \xff\xfe model...\n{}\n")
        case "structured":
            return {"content": [], "structuredContent": {"degrees": 21}}
        case "show":
            return {"content": show()}
    return text(f"{name} {value} {os.environ.get('KEY', '')}".strip())


def show() -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": "here:"},
        {"type": "image", "data": PIXEL, "mimeType": "image/png"},
        {"type": "image", "data": "bm9uZQ==", "mimeType": "image/png"},
        {"type": "audio", "data": "", "mimeType": "audio/wav"},
        {"type": "resource_link", "name": "map", "uri": "file:///map"},
        {"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}},
        {"type": "resource", "resource": {"uri": "file:///b", "blob": PIXEL, "mimeType": "image/png"}},
    ]


def tools(cursor: str | None) -> dict[str, Any]:
    page = int(cursor or 0)
    names, last = PAGES[page], page + 1 == len(PAGES)
    listed = [{"name": n, "description": f"Does {n}.", "inputSchema": NESTED if n == "order" else ONE} for n in names]
    for tool in listed:
        if tool["name"] == "echo":
            tool["annotations"] = {"readOnlyHint": True}
    return {"tools": listed, **({} if last else {"nextCursor": str(page + 1)})}


def result(method: str, params: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            info = {"name": "drill", "version": "1"}
            return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            return tools(params.get("cursor"))
        case "tools/call":
            return call(params["name"], str((params.get("arguments") or {}).get("value", "")))
    raise Failure(-32601, f"there is no method {method}")


def answer(message: dict[str, Any]) -> dict[str, Any] | None:
    """None for a notification."""
    if message.get("method") == "notifications/cancelled":
        cancelled.set()
    if "id" not in message:
        return None
    reply = {"jsonrpc": "2.0", "id": message["id"]}
    try:
        return reply | {"result": result(message["method"], message.get("params") or {})}
    except Failure as failure:
        return reply | {"error": {"code": failure.code, "message": str(failure)}}


def serve_stdio() -> None:
    if Path(os.environ.get("BROKEN", "/nowhere")).exists():
        sys.exit("cannot start today")
    lock = threading.Lock()

    def handle(line: str) -> None:
        reply = answer(json.loads(line))
        with lock, contextlib.suppress(BrokenPipeError):
            if reply is not None:
                sys.stdout.write(f"{json.dumps(reply)}\n")
                sys.stdout.flush()

    for line in sys.stdin:
        if "STRICT" in os.environ and "server/discover" in line:
            sys.exit("expected initialize")
        threading.Thread(target=handle, args=(line,), daemon=True).start()
    while "STUBBORN" in os.environ:  # does not exit when its stdin closes
        time.sleep(1)


if __name__ == "__main__":
    PAGES = [sys.argv[1:]] if sys.argv[1:] else PAGES
    serve_stdio()
