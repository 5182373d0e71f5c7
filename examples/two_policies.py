"""Two models trained in one episode: a planner writes a plan, an executor follows it; each has its own reward.

The job needs a section for each: [policies.planner] and [policies.executor].
"""

from __future__ import annotations

from openai import OpenAI

from swarmq import Episode, Outcome, SwarmClient

TASKS = [{"id": f"sum-{n}", "numbers": [n, n + 3, 2 * n]} for n in range(3, 40)]
LONG_PLAN = 60


def attempt(ep: Episode) -> Outcome:
    model = OpenAI(base_url=ep.base_url, api_key=ep.api_key)

    def ask(policy: str, text: str) -> str:
        answer = model.chat.completions.create(model=policy, messages=[{"role": "user", "content": text}])
        return answer.choices[0].message.content or ""

    numbers = ep.payload["numbers"]
    plan = ask("planner", f"In one sentence: how does one add {numbers}?")
    answer = ask("executor", f"{plan}\nDo it with {numbers}. Answer with the number.")
    right = answer.strip() == str(sum(numbers))
    return Outcome(
        rewards={"executor": float(right), "planner": float(right) - 0.1 * (len(plan.split()) > LONG_PLAN)},
        success=right,
    )


def main() -> None:
    with SwarmClient() as client:
        print(client.run_episodes_until_all_complete(TASKS, attempt, policies=["planner", "executor"]))


if __name__ == "__main__":
    main()
