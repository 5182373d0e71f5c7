"""What travels is measured on the real recorder, and grows as it is said to."""

from benchmarks.wire import CHOICES, SUB_AGENTS, measure


async def test_bytes_grow_with_the_tokens_of_an_episode_and_not_with_turns_times_tokens():
    sizes = await measure(prompt=128, sampled=32, observed=32)
    ten, fifty = sizes["10"], sizes["50"]
    assert fifty.sent < 5 * ten.sent
    assert fifty.whole > 15 * ten.whole
    for name in (f"choices_{CHOICES}", f"sub_agents_{SUB_AGENTS}"):
        tokens = sizes[name].sent - sizes[name].sent_messages
        assert tokens < 0.7 * (sizes[name].whole - sizes[name].whole_messages)
