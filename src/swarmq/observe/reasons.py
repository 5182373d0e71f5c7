"""Why an episode was not trained: one plain sentence for every reason that swarmq can give, with what to do about it.

A test collects the reasons from the code of collector, learner and timelines, and fails if one has no sentence here.
"""

from __future__ import annotations

from swarmq.collector.decide.state import TAINTS

FAILED = ("failed", "aborted", "silent", "incomplete", "no_begin")
"""Reasons of episodes that never came to a usable end, as opposed to finished ones that were not trained."""

EXPLANATIONS = {
    "failed": "The agent's code raised an error or reported a failure; the detail has its text. Fix the agent or its environment.",
    "aborted": "The client gave the attempt up, for instance because it was stopped or died; the slot is attempted again.",
    "silent": "No call and no end came within the idle timeout. Look for a hung agent, or raise groups.idle_timeout_s.",
    "incomplete": "The end came, but recorded turns that it needs never did. Look for a proxy that was killed.",
    "no_begin": "Messages of this episode came, but never its begin, usually because its client died or did not send one.",
    "no_turns": "The agent made no model call that was answered. Does it use the episode's base_url and api_key?",
    "unseen": "No proof came that the agent received any answer, usually because its proxy was killed.",
    "superseded": "Another attempt at the same slot had finished first, and a slot is trained once.",
    "late_sibling": "It finished after its group had been published without it. Raise groups.deadline_s if this is common.",
    "unknown_policy": "It names a policy that the run does not have. Use the policies of the job.",
    "two_clients": "Two clients began it, so its turns may be mixed. Give every attempt an id of its own.",
    "refused_turn": "A turn could not be recorded, so its conversation is not whole. The proxy's log says why.",
    "reward_missing": "The end has no reward for a policy that answered, or a reward for a policy that took no part. Reward each policy.",
    "too_large": "Its turns do not fit one message of 8 MiB. Shorten the conversation or its metadata.",
    "unresolvable": "Its turns refer to each other in a way that contradicts itself. Please report this as a bug.",
    "group_too_small": "Too few attempts of its group had finished, so there was nothing to compare it with. Look at why the others failed, "
    "raise groups.deadline_s or lower groups.min_group.",
    "equal_rewards": "All attempts of its group had the same reward, so none was better than another and nothing can be learned. Take tasks "
    "that are neither too easy nor too hard, a finer reward, or larger groups.",
    "stale": "Its oldest token was sampled by weights older than groups.max_staleness allows. Raise it, or shorten the episodes.",
    "version_unknown": "Its tokens come from a weight version that this learner has not made. Its engine served another run's weights, or the "
    "log was removed.",
    "kind_not_in_mix": "Its kind is no longer in the mix of the run.",
    "overlong": "An answer was cut off by a token limit, and train.overlong is 'drop'. Raise the limit, or keep such answers.",
    "truncated_sampling": "It was sampled with parameters, such as top_p or temperature 0, for which no ratio can correct. Leave them to "
    "the run's sampling settings.",
    "no_teacher": "It was sampled at a temperature at which the teacher's server cannot judge it. Sample at 1.",
    "duplicate_call": "Two of its turns have the same call id. Please report this as a bug.",
    "parent_unknown": "A turn continues a turn that is not there. Please report this as a bug.",
    "parent_cycle": "Its turns continue each other in a circle. Please report this as a bug.",
    "shared_beyond_parent": "A turn shares more tokens than its parent has. Please report this as a bug.",
    "empty_prompt": "A turn has no prompt, so nothing predicts its first token. Send at least one message.",
    "nothing_sampled": "An answer has no sampled token, so there is nothing to learn from.",
    "over_budget": "A conversation is longer than one pass of the learner. Raise train.micro_batch_tokens, or shorten it.",
    "id_outside_vocabulary": "A token id is outside the model's vocabulary. Engine and learner serve different models.",
    "image_damaged": "An image's pixels are not those that the proxy recorded. Check the disks, and please report this as a bug.",
    "logprob_missing": "An answer has no log-probability for each of its tokens. Check the engine's version.",
    "logprob_not_finite": "A log-probability is not a finite number. Look at the engine's numerics.",
    "version_missing": "The engine did not say which weights sampled a token. Check that swarmq's plug-in is loaded.",
    "routing_missing": "An answer lacks the experts that sampled its tokens, which train.routing_replay needs. Check that swarmq's plug-in is loaded.",
    "missing": "Its evaluation round was closed before a result came. Raise eval.deadline_s.",
    "finished": "It ended regularly.",
}
"""Reason -> what it means and what to do."""

assert set(TAINTS) - {""} <= EXPLANATIONS.keys()


def explain(reason: str) -> str:
    """Return the sentence for a reason. For a reason that only a newer version knows, the sentence says so."""
    return EXPLANATIONS.get(reason, f"Dropped for the reason {reason!r}, which this version of swarmq does not know.")
