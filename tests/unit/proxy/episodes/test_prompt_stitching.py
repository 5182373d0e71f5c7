"""Conversations through graph and stitching, with a tokenizer that drifts and no HTTP."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmq.keys import Claims
from swarmq.messages import Timings, pack_ids, unpack_ids
from swarmq.proxy.completions.recorder import build_node, build_turn
from swarmq.proxy.episodes.conversation_graph import ID_BYTES, Graph, canonical, common_tokens, history_of
from swarmq.proxy.episodes.prompt_stitching import stitch
from swarmq.proxy.requests import ChoiceResult, RequestContext
from swarmq.testing.scripted_engine import END, ScriptedEngine, chat_template, decode, encode, encode_characters

SYSTEM = {"role": "system", "content": "be brief"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


CLAIMS = Claims(run="r", client="c", episode_id="e", policies=("main",), kind="math", expires_at=0.0)


class Episode:
    """What proxy and engine do for a request, without either."""

    def __init__(self, template=chat_template):
        self.engine = ScriptedEngine(template=template)
        self.graph = Graph()
        self.turns = []
        self.sequences = {}

    async def turn(self, messages, answer, tokens, *, ended=True, cut=False, **chat):
        """Ask with `messages`, sample `tokens`, give the agent `answer`. Returns the turn and its prompt."""
        chat = {"messages": messages, **chat}
        history = history_of(chat)
        rendered = await self.engine.render(chat)
        request_id = str(len(self.turns))
        stitched = await stitch(self.graph, history, rendered.token_ids, self.engine, request_id=request_id)
        request = RequestContext(
            claims=CLAIMS,
            policy="main",
            request_id=request_id,
            chat=chat,
            stream=False,
            retry=0,
            request_digest="",
            agent=None,
            began_at=0.0,
            began=0.0,
            history=history,
            stitched=stitched,
            fresh=pack_ids(rendered.token_ids),
        )
        result = ChoiceResult(
            index=0,
            token_ids=[*tokens, END] if ended else tokens,
            logprobs=[-1.0] * (len(tokens) + ended),
            versions=(),
            finish_reason="stop" if ended else "length",
            stop_reason="a stop string" if cut else None,
            message=answer,
            timings=Timings(),
        )
        origin = self.graph.origin(stitched, history, request_id)
        turn = build_turn(request, result, origin)
        self.graph.add(build_node(request, result, turn, origin), stitched, history)
        prompt = unpack_ids(stitched.prompt).tolist()
        parent = self.sequences[turn.parent] if turn.parent else []
        assert prompt == [*parent[: turn.shared], *unpack_ids(turn.prompt_ids)], "a reader finds another prompt"
        assert decode(prompt) == self.engine.template(chat), "the prompt is not what the agent asked"
        self.sequences[turn.call_id] = [*prompt, *unpack_ids(turn.sampled_ids)]
        self.turns.append(turn)
        return turn, prompt


def spell(text, rng):
    """Random tokens of a text: what a model samples is rarely what a tokenizer would choose."""
    return [i for at in range(0, len(text), 3) for i in rng.choice((encode, encode_characters))(text[at : at + 3])]


texts = st.text(st.characters(codec="utf-8", exclude_characters="<", exclude_categories=("Cs",)), max_size=30)


@given(st.lists(st.tuples(texts, texts, st.booleans()), min_size=1, max_size=8), st.randoms(use_true_random=False))
async def test_every_sampled_token_of_a_conversation_stays_as_it_was_sampled(exchanges, rng: random.Random):
    episode = Episode()
    messages, sequence = [SYSTEM], []
    for question, answer, ended in exchanges:
        messages = [*messages, user(question)]
        tokens = spell(answer, rng)
        turn, prompt = await episode.turn(messages, assistant(answer), tokens, ended=ended)
        assert prompt[: len(sequence)] == sequence
        assert turn.branch is None
        assert turn.repaired == (prompt != encode(chat_template({"messages": messages})))
        sequence = [*prompt, *unpack_ids(turn.sampled_ids)]
        messages = [*messages, assistant(answer)]
    sent = sum(len(unpack_ids(turn.prompt_ids)) + len(unpack_ids(turn.sampled_ids)) for turn in episode.turns)
    assert sent == len(sequence), "a token travelled twice"


def test_re_encoding_gives_other_tokens_than_were_sampled():
    tokens = spell("hello there, you", random.Random(0))
    assert decode(tokens) == "hello there, you"
    assert encode(decode(tokens)) != tokens


@given(st.randoms(use_true_random=False))
async def test_any_tree_of_conversations_gives_prompts_that_say_what_was_asked(rng: random.Random):
    """Forks, retries, equal answers, edits, compaction, tools that come and go: `Episode.turn` asserts the claim for each."""
    episode, system = Episode(), {"role": "system", "content": " ".join(map(str, range(60)))}
    known = [[system, user("go")]]
    for number in range(12):
        messages = list(rng.choice(known))
        move = rng.randrange(5)
        if move == 0 and len(messages) > 2:
            messages[rng.randrange(len(messages))] = user(f"edited {number}")
        elif move == 1:
            messages = [system, user(f"summary {number}")]
        chat = {"tools": [TOOL]} if move == 2 else {}
        answer = rng.choice([f"answer {number} to {len(messages)}", "always the same"])
        await episode.turn(messages, assistant(answer), spell(answer, rng), **chat)
        known.append([*messages, assistant(answer), user(f"next {number}")])


async def test_a_fork_continues_its_node_without_being_a_branch():
    episode = Episode()
    first, _ = await episode.turn([user("a")], assistant("xyz"), encode_characters("xyz"))
    for text in ("left", "right"):
        turn, _ = await episode.turn([user("a"), assistant("xyz"), user(text)], assistant("z"), encode_characters("z"))
        assert (turn.parent, turn.branch, turn.repaired) == (first.call_id, None, True)


async def test_equal_requests_refer_to_each_other_only_where_they_continue_the_same():
    """Else the second answer would look as if nothing continued it, and be taken for a lost sending."""
    long = " ".join(map(str, range(100)))
    episode, first = Episode(), user(long)
    one, _ = await episode.turn([first], assistant("x"), encode_characters("x"))
    two, _ = await episode.turn([first], assistant("x"), encode_characters("x"))
    assert (two.parent, two.prompt_ids, two.begins) == (one.call_id, b"", True)
    later = [first, assistant("x"), user(long)]
    continuing = [(await episode.turn(later, assistant(text), encode_characters(text)))[0] for text in ("y", "z")]
    assert {turn.parent for turn in continuing} == {one.call_id, two.call_id}
    assert all(turn.prompt_ids and turn.branch is None and not turn.begins for turn in continuing)


async def test_an_edited_answer_is_a_branch_and_says_why():
    episode = Episode()
    first, _ = await episode.turn([user("a")], assistant("xyz"), encode_characters("xyz"))
    turn, _ = await episode.turn([user("a"), assistant("xyz!"), user("b")], assistant("z"), encode_characters("z"))
    assert (turn.branch, turn.parent) == ("history_edited", None)
    turn, _ = await episode.turn(
        [user("a"), assistant("xyz"), user("b"), assistant("never said"), user("c")],
        assistant("z"),
        encode_characters("z"),
    )
    assert (turn.branch, turn.parent) == ("history_edited", first.call_id)
    assert turn.shared == len(episode.sequences[first.call_id]), "what was said before the edit stays exact"


async def test_changed_tools_are_a_branch_and_say_why():
    episode = Episode()
    await episode.turn([user("a")], assistant("xyz"), encode_characters("xyz"))
    turn, _ = await episode.turn(
        [user("a"), assistant("xyz"), user("b")], assistant("z"), encode_characters("z"), tools=[TOOL]
    )
    assert turn.branch == "tools_changed"


async def test_a_stop_string_that_was_cut_off_is_a_branch_and_says_why():
    episode = Episode()
    first, prompt = await episode.turn([user("a")], assistant("xyz"), encode_characters("xyz STOP"), cut=True)
    turn, _ = await episode.turn([user("a"), assistant("xyz"), user("b")], assistant("z"), encode_characters("z"))
    assert (turn.branch, turn.parent) == ("answer_cut", first.call_id)
    assert turn.shared == len(prompt), "up to the answer the tokens are still the same"


async def test_a_template_that_drops_thoughts_branches_but_keeps_what_came_before():
    episode = Episode()
    first, _ = await episode.turn([user("a")], assistant("xyz"), encode_characters("xyz"))
    thought = {"role": "assistant", "content": "b", "reasoning": "hm"}
    second, prompt = await episode.turn(
        [user("a"), assistant("xyz"), user("b")], thought, [*encode("<think>hm</think>"), *encode_characters("b")]
    )
    turn, _ = await episode.turn(
        [user("a"), assistant("xyz"), user("b"), assistant("b"), user("c")], assistant("z"), encode("z")
    )
    assert (turn.branch, turn.parent, turn.shared) == ("template_rewrote_history", second.call_id, len(prompt))
    assert turn.repaired, "the first answer's own tokens are still there"
    following, _ = await episode.turn(
        [user("a"), assistant("xyz"), user("b"), assistant("b"), user("c"), assistant("z"), user("d")],
        assistant("y"),
        encode("y"),
    )
    assert (following.branch, following.parent) == (None, turn.call_id)
    assert first.call_id in episode.sequences


async def test_after_a_restart_an_unknown_history_is_just_a_turn_without_a_parent():
    episode = Episode()
    turn, _ = await episode.turn([user("a"), assistant("xyz"), user("b")], assistant("z"), encode_characters("z"))
    assert (turn.parent, turn.branch) == (None, None)


async def test_a_second_conversation_in_an_episode_is_no_branch():
    episode = Episode()
    await episode.turn([user("a")], assistant("xyz"), encode_characters("xyz"))
    turn, _ = await episode.turn(
        [user("sub-agent"), assistant("an example"), user("b")], assistant("z"), encode_characters("z")
    )
    assert (turn.parent, turn.branch) == (None, None)


@pytest.mark.parametrize(
    "returned",
    [
        {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None},
        {"role": "assistant", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": "x", "tool_calls": None, "reasoning": "dropped or not"},
    ],
)
def test_a_message_is_recognised_in_the_forms_that_agents_send_it_back(returned):
    assert canonical(returned) == canonical({"role": "assistant", "content": "x"})


def test_tool_calls_are_recognised_by_name_and_arguments():
    def call(arguments, identity):
        function = {"name": "f", "arguments": arguments}
        return canonical({"role": "assistant", "content": None, "tool_calls": [{"id": identity, "function": function}]})

    assert call('{"a":1,"b":2}', "1") == call('{"b": 2, "a": 1}', "2")
    assert call('{"a":1}', "1") != call('{"a":2}', "1")


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40))
def test_common_tokens_counts_whole_tokens(head, one, other):
    one, other = head + one, head + other
    count = common_tokens(one, other)
    assert one[: count * ID_BYTES] == other[: count * ID_BYTES]
    longer = (count + 1) * ID_BYTES
    assert longer > min(len(one), len(other)) or one[:longer] != other[:longer]


HALF = encode_characters("\ufffd")
"""As a decoder spells the first bytes of a character."""
THINK = encode("<think>")


@pytest.mark.parametrize(
    ("tokens", "shown", "reason"),
    [
        ([*encode("he"), *THINK, *encode("llo")], "hello", "token_dropped"),
        ([*encode("hello"), *HALF], "hello", "character_cut"),
    ],
)
async def test_an_answer_whose_text_lacks_what_was_sampled_is_continued_as_it_was_sampled(tokens, shown, reason):
    """The template shows what the agent got; the prompt keeps what was sampled."""
    episode = Episode()
    asked, sampled = [SYSTEM, user("hi")], [*tokens, END]
    await episode.turn(asked, assistant(shown), tokens)
    [node] = episode.graph.known(history_of({"messages": [*asked, assistant(shown)]}))[0]

    async def continued(*more, template=chat_template):
        chat = {"messages": [*asked, assistant(shown), *more]}
        fresh = encode(template(chat))
        how = {"request_id": "next", "messages": chat["messages"]}
        return await stitch(episode.graph, history_of(chat), fresh, episode.engine, **how)

    found = await continued(user("more"))
    assert (found.parent, found.branch, found.repaired) == (node, None, True)
    prompt = unpack_ids(found.prompt).tolist()
    before = encode(chat_template({"messages": asked}))
    assert prompt[: len(before) + len(sampled)] == [*before, *sampled]
    assert decode(prompt[len(before) + len(sampled) :]) == "\n<|start|>user\nmore<|end|>\n<|start|>assistant\n"

    other = await continued(user("more"), template=lambda chat: chat_template(chat).replace("hello", "HELLO"))
    assert other.branch == reason, "where the template writes the answer otherwise it is told why"
