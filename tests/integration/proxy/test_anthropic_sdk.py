"""Anthropic's own client library against the proxy, where it does more than send and receive: its parsing."""

import anthropic
import pydantic
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.broker]


class Verdict(pydantic.BaseModel):
    ok: bool


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_client_s_own_parsing_gets_the_object_it_asked_for(stage, streamed):
    asked = {"model": "main", "max_tokens": 800, "messages": [{"role": "user", "content": "Is it?"}]}
    key = stage.key("parse", mode="eval")
    async with anthropic.AsyncAnthropic(base_url=stage.url, api_key=key, max_retries=0) as client:
        if streamed:
            async with client.messages.stream(**asked, output_format=Verdict, extra_body={"seed": 5}) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await client.messages.parse(**asked, output_format=Verdict, extra_body={"seed": 5})
    assert isinstance(answer.parsed_output, Verdict)
