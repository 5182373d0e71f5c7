"""A harness for `verifiers` that asks once, in verifiers' own process: no program has to start."""

import httpx
import verifiers.v1 as vf

__all__ = ["DirectHarness"]


class DirectHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, _trace, _runtime, endpoint, secret, _mcp_urls, data, _tool_interception_url=None):
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}) as http:
            answer = await http.post(f"{endpoint}/chat/completions", json=body, timeout=60)
        return vf.ProgramResult(exit_code=int(answer.is_error), stdout="", stderr=answer.text)
