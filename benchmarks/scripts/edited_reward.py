"""The same agent after an edit of its reward function that has a mistake: how soon is its traceback seen?"""

from openai import OpenAI

import swarmq


def reward(answer: str) -> float:
    return float(answer.strip()[999_999])


with swarmq.SwarmClient() as client, client.episode({"id": "edited"}, mode="eval", kind=client.invite.kinds[0]) as ep:
    agent = OpenAI(base_url=ep.base_url, api_key=ep.api_key)
    completion = agent.chat.completions.create(model=ep.model, messages=[{"role": "user", "content": "1 + 1"}])
    ep.end(reward(completion.choices[0].message.content or ""))
