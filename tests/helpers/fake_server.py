"""A server with vLLM's or SGLang's protocol over a small real model, which fails on request in every way.

In a test: `async with FakeServer("vllm") as server`. Alone, without a model: python fake_server.py vllm PORT
"""

import asyncio
import base64
import contextlib
import json
import pickle
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:  # importing torch takes seconds, and a server without a model needs none
    from transformers import PreTrainedModel

Answer = tuple[int, Any]
RULE_LOGPROB = -1.5


def rule(last: int) -> int:
    """The next token of a server without a model."""
    return (last * 7 + 1) % 97


@dataclass
class FakeServer:
    """Each generate request consumes one of `faults`; `log` holds all requests."""

    dialect: str = "vllm"
    model: "PreTrainedModel | None" = None  # without a model it follows `rule`
    port: int = 0
    faults: deque[str] = field(default_factory=deque)
    log: list[tuple[str, Any]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    gone_callers: int = 0
    connections: int = 0  # opened in total
    reports_spans: bool = True
    before_temperature: bool = False
    window: int = 4096
    stale: bool = False  # reports that it has loaded weights, but has not
    refuses_weights: bool = False
    orders: deque[int] = field(default_factory=deque)  # HTTP statuses of the next weight updates, in order
    label: str = "default"
    asleep: set[str] = field(default_factory=set)  # parts whose memory is released
    sleepless: bool = False
    handles: str = "taken"  # or refused, fatal, or garbled: reports success without loading
    pace: float = 0.0  # seconds a token takes

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self._going = asyncio.Event()
        self._going.set()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path, _ = head.decode().split(" ", 2)
                length = next((int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if b"content-length" in x), 0)
                body = json.loads(await reader.readexactly(length)) if length else None
                self.log.append((path, body))
                route = path.partition("?")[0]
                if method == "POST" and route in ("/inference/v1/generate", "/generate"):
                    await self._generate(body, reader, writer)
                else:
                    await _reply(writer, *self._control(route, path, body), {"retry-after": "0.05"})
        writer.close()

    async def _generate(self, body: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert not self.asleep, "a request for a server that sleeps"
        fault = self.faults.popleft() if self.faults else ""
        if fault.isdecimal():
            return await _reply(writer, int(fault), {"error": {"message": "as told"}}, {"retry-after": "0.25"})
        if fault == "cut":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
            raise ConnectionError
        if fault == "hang up":
            raise ConnectionError
        if fault == "drip":
            return await _drip(writer)
        if fault == "not json":
            return await _reply(writer, 200, "<html>")
        sampling = asyncio.ensure_future(self._sample(body))
        leaving = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({sampling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not sampling.done():
            self.gone_callers += 1
            sampling.cancel()
            raise ConnectionError
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        await _reply(writer, 200, _spoilt(self._told(body, *sampling.result()), fault))
        return None

    async def _sample(self, body: Any) -> tuple[list[int], list[float], list[dict[str, Any]]]:
        """Ids, log-probabilities and weight versions, by one full forward for each token."""
        params, prompt = body["sampling_params"], body.get("token_ids", body.get("input_ids"))
        most = params.get("max_tokens", params.get("max_new_tokens"))
        seed = params.get("seed", params.get("sampling_seed", 0))
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[dict[str, Any]] = []
        while len(ids) < most and not (ids and ids[-1] in params["stop_token_ids"]):
            await asyncio.sleep(self.pace)
            await self._going.wait()
            token, logprob = self._next([*prompt, *ids], params, seed + len(ids))
            if not versions or versions[-1]["version"] != self.label:
                versions.append({"version": self.label, "start": len(ids), "end": len(ids)})
            ids.append(token)
            logprobs.append(logprob)
            versions[-1]["end"] += 1
        return ids, logprobs, versions

    def _next(self, history: list[int], params: Any, seed: int) -> tuple[int, float]:
        if self.model is None:
            return rule(history[-1]), RULE_LOGPROB
        import torch

        with torch.no_grad():
            logits_V = self.model(input_ids=torch.tensor([history])).logits[0, -1].float()
        chance = torch.Generator().manual_seed(seed % 2**63)
        heat = params["temperature"]
        logp_V = torch.log_softmax(logits_V / (heat or 1.0), -1)
        token = int(torch.multinomial(logp_V.exp(), 1, generator=chance)) if heat else int(logp_V.argmax())
        told_V = torch.log_softmax(logits_V, -1) if self.before_temperature else logp_V
        return token, float(told_V[token])

    def _told(self, body: Any, ids: list[int], logprobs: list[float], versions: list[dict[str, Any]]) -> Any:
        stopped = bool(ids) and ids[-1] in body["sampling_params"]["stop_token_ids"]
        finish = "stop" if stopped else "length"
        prompt = body.get("token_ids", body.get("input_ids"))
        spans = versions if self.reports_spans else None
        if self.dialect == "vllm":
            content = [{"token_id": i, "logprob": x, "rank": 1} for i, x in zip(ids, logprobs, strict=True)]
            choice = {"token_ids": ids, "finish_reason": finish, "logprobs": {"content": content}}
            usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 3}}
            return {"choices": [choice | {"weight_versions": spans}], "usage": usage}
        pairs = [[x, i, None] for i, x in zip(ids, logprobs, strict=True)]
        meta = {"finish_reason": {"type": finish}, "prompt_tokens": len(prompt), "cached_tokens": 3, "queue_time": 0.25}
        return {"output_ids": ids, "meta_info": meta | {"output_token_logprobs": pairs, "weight_versions": spans}}

    def _control(self, route: str, path: str, body: Any) -> Answer:
        if route in ("/pause", "/pause_generation"):
            self._going.clear()
        elif route in ("/resume", "/continue_generation"):
            self._going.set()
        elif route in ("/sleep", "/release_memory_occupation"):
            if self.sleepless:
                return 500, {"message": "started without --enable-sleep-mode"}
            self.asleep = {"weights", "kv_cache"}
        elif route == "/wake_up":
            self.asleep.remove(path.partition("tags=")[2])
        elif route == "/resume_memory_occupation":
            for part in body["tags"]:
                self.asleep.remove(part)  # waking a part twice would crash a real server
        elif route == "/abort_request":
            self.aborted.append(body["rid"])
        elif route == "/collective_rpc":
            return self._load(body["kwargs"]["weights_path"], None)
        elif route == "/update_weights_from_disk":
            return self._load(body["model_path"], body["weight_version"])
        elif route == "/update_weights":
            return self._open(body["update_info"]["ipc_handles_pickled"], body["update_info"]["names"], None)
        elif route == "/update_weights_from_tensor":
            return self._open(body["serialized_named_tensors"][0], None, body["weight_version"])
        elif route == "/update_weight_version":
            if not self.reports_spans:
                return 404, {"detail": "Not Found"}
            self.label = body["new_version"]
        elif route == "/v1/models":
            return 200, {"data": [{"id": "policy", "max_model_len": self.window}]}
        elif route == "/get_server_info":
            return 200, {"context_length": self.window}
        return 200, {"success": True}

    def _open(self, pickled: str, names: list[str] | None, label: str | None) -> Answer:
        """Loads weights from handles, which in tests hold the tensors themselves."""
        if self.handles == "refused":
            return 400, {"error": "Refusing to deserialize"}
        if self.handles == "fatal":
            self.orders.append(500)  # a dead server accepts no files either
            raise ConnectionError
        weights = pickle.loads(base64.b64decode(pickled))
        if names is not None:
            weights = [(name, handle["gpu"][0]) for name, handle in zip(names, weights, strict=True)]
        assert self.model is not None
        if self.handles == "taken":
            self.model.load_state_dict(dict(weights), strict=False)
        self.label = label or self.label
        return 200, {"success": True}

    def _load(self, folder: str, label: str | None) -> Answer:
        assert "weights" not in self.asleep, "weights for a server that has no memory for them"
        if self.orders:
            return self.orders.popleft(), {"message": "as told"}
        if self.refuses_weights:
            return 500, {"message": "out of memory"}
        if self.model is not None and not self.stale:
            from transformers import AutoModelForCausalLM

            self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.label = label or self.label
        return 200, {"success": True}


def _spoilt(answer: Any, fault: str) -> Any:
    """The response with one defect."""
    choice = answer["choices"][0] if "choices" in answer else answer
    meta = answer.get("meta_info", choice)
    ids = choice["token_ids" if "choices" in answer else "output_ids"]
    if fault == "no logprobs":
        meta["logprobs" if "choices" in answer else "output_token_logprobs"] = None
    elif fault == "few logprobs":
        (choice["logprobs"]["content"] if "choices" in answer else meta["output_token_logprobs"]).pop()
    elif fault == "nan":
        if "choices" in answer:
            choice["logprobs"]["content"][0]["logprob"] = None
        else:
            meta["output_token_logprobs"][0][0] = None
    elif fault == "too many":
        ids.append(5)
    elif fault == "text":
        choice.update({"token_ids": "some words", "output_ids": "some words"})
    elif fault == "other prompt":
        (answer["usage"] if "choices" in answer else meta)["prompt_tokens"] += 1
    elif fault == "odd end":
        meta["finish_reason"] = "error" if "choices" in answer else {"type": "error"}
    elif fault == "foreign weights":
        meta["weight_versions"][0]["version"] = "default"
    elif fault == "gap":
        meta["weight_versions"][0]["start"] = 1
    elif fault == "no answer":
        return {}
    return answer


async def _reply(writer: asyncio.StreamWriter, status: int, answer: Any, headers: dict[str, str] | None = None) -> None:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    more = "".join(f"{key}: {value}\r\n" for key, value in (headers or {}).items())
    writer.write(f"HTTP/1.1 {status} As Told\r\ncontent-length: {len(text)}\r\n{more}\r\n{text}".encode())
    await writer.drain()


async def _drip(writer: asyncio.StreamWriter) -> None:
    """Sends bytes slowly and never completes the response."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)


async def _alone(dialect: str, port: int) -> None:
    async with FakeServer(dialect, port=port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_alone(sys.argv[1], int(sys.argv[2])))
