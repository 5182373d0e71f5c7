"""An agent as people write it, timed from outside: one episode, one completion, one reward."""

from openai import OpenAI

import swarmq


def reward(answer: str) -> float:
    return float(len(answer) > 0)


with swarmq.SwarmClient() as client, client.episode({"id": "first"}, mode="eval", kind=client.invite.kinds[0]) as ep:
    agent = OpenAI(base_url=ep.base_url, api_key=ep.api_key)
    completion = agent.chat.completions.create(model=ep.model, messages=[{"role": "user", "content": "1 + 1"}])
    print("ANSWERED", flush=True)
    ep.end(reward(completion.choices[0].message.content or ""))
