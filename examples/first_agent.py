"""The smallest agent that trains: one question, one answer, one reward.

    swarmq up job.toml                      # in another terminal; prints how clients join
    export SWARMQ_INVITE=runs/NAME
    python examples/first_agent.py

To change `attempt`, stop the program, edit it and start it again: training continues meanwhile.
"""

from __future__ import annotations

from openai import OpenAI

from swarmq import Episode, SwarmClient

TASKS = [
    {"id": f"{a}x{b}", "question": f"What is {a} times {b}?", "answer": a * b} for a in range(2, 12) for b in (7, 8)
]


def attempt(ep: Episode) -> float:
    """Attempt a task with an ordinary SDK, and return the reward."""
    model = OpenAI(base_url=ep.base_url, api_key=ep.api_key)
    answer = model.chat.completions.create(
        model=ep.model, messages=[{"role": "user", "content": ep.payload["question"]}]
    )
    text = answer.choices[0].message.content or ""
    return 1.0 if str(ep.payload["answer"]) in text.split() else 0.0


def main() -> None:
    with SwarmClient() as client:
        print(client.run_episodes_until_all_complete(TASKS, attempt, epochs=10))


if __name__ == "__main__":
    main()
