"""Self-play: one model plays both sides of a game, and each side gets its own reward (docs/tutorials/five-examples.md).

Nim: two players take one to three stones in turn; the player who takes the last stone wins. The header `x-swarmq-agent` names the
side of each request, so rewards of a side are compared with those of the same side in the other games of the group (same starting
position), never with the opponent's. For an opponent that does not learn, give the job a policy with `trained = false` and pass its
name as `model`.
"""

from __future__ import annotations

from openai import OpenAI

from swarmq import Episode, Outcome, SwarmClient

TASKS = [{"id": f"nim-{stones}", "stones": stones} for stones in range(5, 21)]
SIDES = ("first", "second")
MOST = 3


def move(model: OpenAI, ep: Episode, side: str, stones: int) -> int:
    """Return the stones that a side takes; 0 if its answer is not a valid move."""
    question = (
        f"Nim: {stones} stones are left. Take 1 to {MOST}; who takes the last one wins. How many? Only the number."
    )
    answer = model.chat.completions.create(
        model=ep.model,
        messages=[{"role": "user", "content": question}],
        extra_headers={"x-swarmq-agent": side},
    )
    text = (answer.choices[0].message.content or "").strip()
    return int(text) if text in {str(taken) for taken in range(1, min(MOST, stones) + 1)} else 0


def play(ep: Episode) -> Outcome:
    model = OpenAI(base_url=ep.base_url, api_key=ep.api_key)
    stones, turn = ep.payload["stones"], 0
    while taken := move(model, ep, SIDES[turn % 2], stones):
        stones -= taken
        if stones == 0:
            break
        turn += 1
    loser = SIDES[(turn + (stones == 0)) % 2]  # an invalid move loses at once
    sides = {side: 0.0 if side == loser else 1.0 for side in SIDES[: turn + 1]}
    return Outcome(0.5, agent_rewards={ep.model: sides}, metrics={"moves": turn + 1, "played_out": float(stones == 0)})


def main() -> None:
    with SwarmClient() as client:
        print(client.run_episodes_until_all_complete(TASKS, play, policies=[client.invite.policies[0]]))


if __name__ == "__main__":
    main()
