"""Bytes on the queue per sampled token, as an episode grows: only new tokens travel, against sending whole prompts.

Every turn is a real record with the fields a proxy fills in, encoded as it is published. Sent whole, the prompt of turn n
holds all n - 1 turns before it. Texts for people (`messages`) are left out of both: they are the same. Example:

    python -m benchmarks.wire
"""

from __future__ import annotations

import msgspec
import numpy as np

from benchmarks import report
from swarmq.messages import Sampling, Timings, Turn, VersionSpan, encode, new_id, pack_floats, pack_ids

TURNS = (1, 10, 20, 50)
VOCABULARY = 151_936


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--prompt", type=int, default=512, help="tokens before the first turn")
    parser.add_argument("--sampled", type=int, default=128, help="tokens sampled per turn")
    parser.add_argument("--observed", type=int, default=128, help="tokens read between turns")
    arguments = parser.parse_args()
    figures, rows = {}, []
    for turns in TURNS:
        growing, whole = episode(turns, arguments.prompt, arguments.sampled, arguments.observed)
        sampled = turns * arguments.sampled
        figures[f"bytes_per_sampled_token_{turns}"] = growing / sampled
        figures[f"whole_prompt_bytes_per_sampled_token_{turns}"] = whole / sampled
        figures[f"whole_prompt_ratio_{turns}"] = whole / growing
        rows.append([turns, growing, whole, growing / sampled, whole / sampled, whole / growing])
    heads = ["turns", "bytes", "whole prompts", "per sampled token", "whole prompts", "ratio"]
    print(report.table(heads, rows))
    sizes = {"prompt": arguments.prompt, "sampled": arguments.sampled, "observed": arguments.observed}
    report.save("wire", figures, detail={"tokens": sizes}, out=arguments.out)


def episode(turns: int, prompt: int, sampled: int, observed: int) -> tuple[int, int]:
    """Bytes of an episode's turns as they travel, and if every turn carried its whole prompt."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in rng.integers(0, VOCABULARY, count)]

    episode_id, history, parent = new_id(), list[int](), None
    growing = whole = 0
    for index in range(turns):
        added = tokens(observed if index else prompt)
        answer = tokens(sampled)
        turn = Turn(
            run="benchmark",
            episode_id=episode_id,
            policy="main",
            call_id=new_id(),
            request_id=new_id(),
            request_digest="0" * 32,
            parent=parent,
            shared=len(history),
            prompt_ids=pack_ids(added),
            sampled_ids=pack_ids(answer),
            logprobs=pack_floats(rng.normal(-1.0, 0.5, sampled).tolist()),
            versions=(VersionSpan(version=17, start=0, end=sampled),),
            sampling=Sampling(max_tokens=512),
            timings=Timings(began_at=1.7e9, first_token_s=0.05, total_s=1.25),
        )
        growing += len(encode(turn))
        alone = msgspec.structs.replace(turn, parent=None, shared=0, prompt_ids=pack_ids([*history, *added]))
        whole += len(encode(alone))
        history += [*added, *answer]
        parent = turn.call_id
    return growing, whole


if __name__ == "__main__":
    main()
