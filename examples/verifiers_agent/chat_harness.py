"""A harness of verifiers that asks the model in its own process: no program is started and nothing is installed."""

import httpx
import verifiers.v1 as vf

__all__ = ["ChatHarness"]


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """One request per exchange. Tool servers are not supported."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        if mcp_urls:
            raise ValueError(f"chat_harness has no tools, but the task has the servers {', '.join(mcp_urls)}")
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [m if isinstance(m, dict) else m.model_dump(exclude_none=True) for m in prompt or ()]
        async with httpx.AsyncClient(trust_env=False, timeout=None) as http:
            headers = {"Authorization": f"Bearer {secret}"}
            body = {"model": ctx.model, "messages": messages}
            answer = await http.post(f"{endpoint.rstrip('/')}/chat/completions", json=body, headers=headers)
        answer.raise_for_status()
        return vf.ProgramResult(0, "", "")
