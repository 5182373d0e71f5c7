"""An agent with a reward that you change during training (docs/tutorials/five-examples.md).

python examples/live_edit.py          # stop it with Ctrl-C, edit `reward`, start it again
"""

from __future__ import annotations

from swarmq import Episode, Outcome, SwarmClient, ask

TASKS = [{"id": f"{a}+{b}", "question": f"What is {a} + {b}?", "answer": a + b} for a in range(3, 9) for b in (5, 9)]


def reward(text: str, answer: int) -> float:
    """Return 1 if the number is anywhere in the text. The tutorial changes this: 1 only if the text is nothing but the number."""
    return 1.0 if str(answer) in text.split() else 0.0


def attempt(ep: Episode) -> Outcome:
    text = ask(ep, ep.payload["question"])
    return Outcome(reward(text, ep.payload["answer"]), metrics={"words": len(text.split())})


def main() -> None:
    with SwarmClient() as client:
        print(client.run_episodes_until_all_complete(TASKS, attempt, epochs=2))


if __name__ == "__main__":
    main()
