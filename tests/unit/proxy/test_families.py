"""Whole conversations through the proxy's core under the templates of seven families, with tokenizers that drift.

`Stage.ask` holds every request to the claims of the conversation graph: the prompt says exactly what the template says,
a reader of the turns finds the same prompt, and where a turn continues another, every token of it is there unchanged.
"""

import asyncio
import itertools
import random
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import json

from support.families import BY_NAME, FAMILIES, FamilyEngine, in_bytes, spell, tokenizer_of
from swarmq import keys
from swarmq.broker import topology
from swarmq.collector.decide import state
from swarmq.collector.decide.assemble import assemble_rollout, decide_received
from swarmq.config import Policy, SwarmJob
from swarmq.errors import EngineRefusedError
from swarmq.messages import EpisodeBegin, EpisodeEnd, Slot, decode, unpack_ids
from swarmq.proxy.completions.limiter import CallLimiter
from swarmq.proxy.completions.live_sampling import LiveSampling
from swarmq.proxy.completions.pipeline import Completions
from swarmq.proxy.completions.recorder import Recorder
from swarmq.proxy.completions.remote_images import RemoteImages
from swarmq.proxy.counters import Counters
from swarmq.proxy.engines.pool import EnginePool
from swarmq.proxy.episodes.cache import EpisodeCache
from swarmq.proxy.episodes.conversation_graph import digest
from swarmq.proxy.requests import RequestContext
from swarmq.testing import MemoryBroker
from swarmq.timeline import fold, resolve

SYSTEM = {"role": "system", "content": "Be brief."}
LONG = {"role": "system", "content": "You are to be brief. " * 40}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
EPISODE = "e"

every = pytest.mark.parametrize("family", FAMILIES, ids=str)
with_tools = pytest.mark.parametrize("family", [f for f in FAMILIES if "tools" in f.template], ids=str)
with_parallel_calls = pytest.mark.parametrize(
    "family", [BY_NAME[n] for n in ("chatml", "mistral", "deepseek")], ids=str
)
with_thoughts = pytest.mark.parametrize("family", [BY_NAME[n] for n in ("chatml", "deepseek", "harmony")], ids=str)


def user(text):
    return {"role": "user", "content": text}


def results_of(answer, *contents):
    """Tool messages for the calls of an answer."""
    calls = answer["tool_calls"]
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": content}
        for call, content in zip(calls, contents, strict=True)
    ]


class Stage:
    """The proxy without its HTTP, one engine of a family, one episode."""

    def __init__(self, family, seed=0):
        self.family, self.rng = family, random.Random(seed)
        self.engine, self.broker, self.meter = FamilyEngine(family), MemoryBroker(), Counters()
        self.completions = Completions(
            tuning=LiveSampling(SwarmJob(run="r", policies={"main": Policy(model="x")})),
            pools={"main": EnginePool([self.engine])},
            episodes=EpisodeCache(idle_s=1000),
            recorder=Recorder(self.broker, self.meter, confirm_timeout_s=1),
            meter=self.meter,
            gate=CallLimiter(max_open=10, max_waiting=0),
            images=RemoteImages(max_bytes=0),
            timeout_s=60.0,
        )
        self.declared = False
        self.numbers = itertools.count()

    @property
    def turns(self):
        return [decode(stored.body) for stored in self.broker.stored(topology.inbox("r"))]

    async def ask(self, messages, content="", *, thought="", calls=(), cut=False, **fields):
        """One request, which the model answers so, in tokens of its own choice. The newest turn and what the agent got."""
        ids = spell(self.family, self.family.say(content, thought, calls), self.rng)
        self.engine.say(ids[:-1] if cut else ids, finish_reason="length" if cut else "stop")
        return await self.send(messages, **fields)

    async def send(self, messages, **fields):
        if not self.declared:
            await self.broker.declare("r", policies=["main"], kinds=[])
            self.declared = True
        chat = {"messages": messages, **fields}
        claims = keys.Claims(run="r", episode_id=EPISODE, policies=("main",), client="c", expires_at=time.time() + 60)
        call = RequestContext(
            claims=claims, policy="main", request_id=f"q{next(self.numbers)}", chat=chat, stream=False, retry=0,
            request_digest=digest(json.encode(chat)).hex(), agent=None, began_at=0.0, began=time.monotonic(),
        )  # fmt: skip
        begun = await self.completions.begin(call)
        ended = await self.completions.whole(begun)
        self._check(chat, call.request_id, begun.rendered.token_ids)
        return next(t for t in reversed(self.turns) if t.request_id == call.request_id), ended[-1].message

    def kept(self):
        """Ids of the calls that the collector takes for answered: all answers were sent."""
        calls = {turn.call_id: state.TurnMeta.of(turn, 0) for turn in self.turns}
        return decide_received(calls, sent=calls.keys()).kept

    def _check(self, chat, request_id, prompt):
        turns = self.turns
        assert self.engine.decode(prompt) == self.engine.write(chat), "the prompt is not what was asked"
        resolved = resolve(turns)
        index = {turn.call_id: i for i, turn in enumerate(turns)}
        for turn, whole in zip(turns, resolved, strict=True):
            if turn.request_id != request_id:
                continue
            assert whole.prompt_ids.tolist() == prompt, "a reader of the turns finds another prompt"
            fresh = self.engine.encode(self.engine.write(chat))
            assert turn.repaired == (prompt != fresh), "not what was rendered, and not counted"
            if turn.branch is None and turn.parent is not None:
                parent = resolved[index[turn.parent]]
                if turn.shared > parent.prompt_length:
                    assert prompt[: len(parent)] == parent.token_ids.tolist(), (
                        "a token of what is continued has changed"
                    )
                else:
                    assert turn.begins or prompt == parent.prompt_ids.tolist(), "no equal request, and no other"
            assert turn.branch != "drift", "what the model sampled was lost to re-tokenisation"
        trained = sum(int(row.trained.sum()) for row in fold(resolved))
        assert trained == sum(len(unpack_ids(turn.sampled_ids)) for turn in turns), "a token is not trained once"
        assert self.meter.drift.repaired == sum(turn.repaired for turn in turns)


keys_of = st.text(st.sampled_from("abc_"), min_size=1, max_size=6)
words = st.text(
    st.sampled_from("aeinortdl .,;!?'0123456789äéß€漢字🙂\n"), min_size=1, max_size=40
).map(lambda text: "I think that " + text.strip() + ".")  # fmt: skip
values = st.integers() | st.booleans() | st.none() | words | st.lists(words, max_size=2)


@every
@given(words, st.randoms(use_true_random=False))
def test_each_tokenizer_drifts(family, text, rng):
    """Nearly every text has a spelling that re-tokenisation does not give back."""
    tokenizer = tokenizer_of(family.name)
    spellings = [spell(family, text, rng) for _ in range(8)]
    assert {tokenizer.decode(ids, skip_special_tokens=False) for ids in spellings} == {text}
    assert any(tokenizer.encode(text, add_special_tokens=False).ids != ids for ids in spellings)


@every
@settings(max_examples=12)
@given(st.lists(st.tuples(words, words), min_size=2, max_size=4), st.integers(0, 1000))
async def test_a_chat_never_drifts(family, exchanges, seed):
    """All answers are sampled in tokens of their own, and every one of them is in the next prompt as it was sampled."""
    stage, messages = Stage(family, seed), []
    for question, answer in exchanges:
        messages = [*messages, user(question)]
        turn, got = await stage.ask(messages, answer)
        assert got["content"].strip() == answer
        assert (turn.parent is not None) == (len(messages) > 1)
        if family.name == "harmony":  # it writes <|end|> in history where the model sampled <|return|>
            assert turn.branch == (None if len(messages) == 1 else "template_rewrote_history")
        else:
            assert turn.branch is None
        messages = [*messages, got]
    if family.name != "harmony":
        (before,) = stage.engine.encode(family.ends[0])  # some encode the beginning of a text otherwise
        sampled = [[before, *unpack_ids(turn.sampled_ids).tolist()] for turn in stage.turns]
        drifted = [stage.engine.encode(stage.engine.decode(ids)) != ids for ids in sampled]
        assert [turn.repaired for turn in stage.turns] == [any(drifted[:i]) for i in range(len(drifted))]
    rows = fold(resolve(stage.turns))
    assert len(rows) == (len(exchanges) if family.name == "harmony" else 1)


@with_tools
async def test_a_loop_of_tool_calls_is_one_sequence(family):
    stage, messages = Stage(family), [SYSTEM, user("What is 1 + 2 + 3?")]
    for number in range(4):
        turn, got = await stage.ask(messages, calls=[("add", {"a": number, "b": 'x"y'})], tools=TOOLS)
        assert got["tool_calls"][0]["function"]["name"] == "add"
        assert turn.branch is None
        messages = [*messages, got, *results_of(got, f"it is {number}")]
    turn, _ = await stage.ask(messages, "It is 6.", tools=TOOLS)
    assert turn.branch is None
    assert len(fold(resolve(stage.turns))) == 1


@with_parallel_calls
async def test_parallel_calls_are_one_sequence(family):
    stage, messages = Stage(family), [user("Add all.")]
    _, got = await stage.ask(messages, calls=[("add", {"a": 1}), ("add", {"a": 2})], tools=TOOLS)
    assert len(got["tool_calls"]) == 2
    turn, _ = await stage.ask([*messages, got, *results_of(got, "1", "2")], "Done.", tools=TOOLS)
    assert (turn.branch, turn.parent) == (None, "q0.0")


async def test_what_a_template_refuses_is_the_request_s_fault():
    stage = Stage(BY_NAME["llama3"])
    _, got = await stage.ask([user("Add all.")], calls=[("add", {"a": 1}), ("add", {"a": 2})], tools=TOOLS)
    with pytest.raises(EngineRefusedError, match="one tool call at a time"):
        await stage.send([user("Add all."), got, *results_of(got, "1", "2")], tools=TOOLS)


@with_tools
async def test_a_call_in_other_spaces_than_the_template_s_is_a_branch_of_the_template(family):
    """The model wrote the arguments in its own way; the template writes them again, and so not what was sampled."""
    stage, messages = Stage(family), [user("Add.")]
    said = family.say("", "", [("add", {"a": 1})]).replace('{"a": 1}', '{"a":  1}')
    stage.engine.say(spell(family, said, stage.rng))
    _, got = await stage.send(messages, tools=TOOLS)
    turn, _ = await stage.ask([*messages, got, *results_of(got, "1")], "Done.", tools=TOOLS)
    assert (turn.branch, turn.parent) == ("template_rewrote_history", "q0.0")
    assert turn.shared == len(stage.engine.prompts[0])


@with_thoughts
async def test_thoughts_that_the_template_drops_are_a_branch_and_nothing_is_corrupt(family):
    more = {"chat_template_kwargs": {"thinking": True}} if family.name == "deepseek" else {}
    stage, messages = Stage(family), [user("What is 1 + 2?")]
    for number in range(3):
        turn, got = await stage.ask(messages, f"It is {number}.", thought=f"Let me add {number}.", **more)
        assert "add" in got["reasoning"]
        assert turn.branch == ("template_rewrote_history" if number else None)
        messages = [*messages, got, user("And more?")]
    assert len(fold(resolve(stage.turns))) == 3
    assert stage.turns[1].shared, "what precedes the thought is still shared"


@pytest.mark.parametrize("family", [BY_NAME["chatml"], BY_NAME["harmony"]], ids=str)
async def test_thoughts_between_tool_calls_stay_where_the_agent_sends_them_back(family):
    """Between two questions these templates keep thoughts, so a tool loop with thoughts is one sequence."""
    stage, messages = Stage(family), [user("What is 1 + 2?")]
    for number in range(3):
        turn, got = await stage.ask(messages, thought=f"I add {number}.", calls=[("add", {"a": number})], tools=TOOLS)
        assert turn.branch is None
        messages = [*messages, got, *results_of(got, str(number))]
    assert len(fold(resolve(stage.turns))) == 1


async def test_an_agent_that_drops_thoughts_has_rewritten_history():
    stage, messages = Stage(BY_NAME["chatml"]), [user("What is 1 + 2?")]
    _, got = await stage.ask(messages, thought="I add.", calls=[("add", {"a": 1})], tools=TOOLS)
    del got["reasoning"]
    turn, _ = await stage.ask([*messages, got, *results_of(got, "1")], "Done.", tools=TOOLS)
    assert (turn.branch, turn.parent) == ("template_rewrote_history", "q0.0")


@pytest.mark.parametrize("extra", [{"tools": TOOLS}, {}], ids=["tools", "system"])
async def test_what_a_template_moves_to_the_newest_question_is_a_branch(extra):
    """Mistral's form writes tools and system prompt before the last question only."""
    stage, messages = Stage(BY_NAME["mistral"]), [*([] if extra else [SYSTEM]), user("One?")]
    _, got = await stage.ask(messages, "One.", **extra)
    turn, _ = await stage.ask([*messages, got, user("Two?")], "Two.", **extra)
    assert (turn.branch, turn.parent) == ("template_rewrote_history", "q0.0")


async def test_a_prompt_that_ends_in_an_empty_thought_is_a_branch_of_the_template():
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    stage, messages = Stage(BY_NAME["chatml"]), [user("One?")]
    _, got = await stage.ask(messages, "One.", **off)
    turn, _ = await stage.ask([*messages, got, user("Two?")], "Two.", **off)
    assert (turn.branch, turn.parent) == ("template_rewrote_history", "q0.0")


@pytest.mark.parametrize("family", [BY_NAME[n] for n in ("llama3", "mistral", "gemma")], ids=str)
async def test_an_answer_that_the_template_trims_is_a_branch_of_the_template(family):
    stage, messages = Stage(family), [user("One?")]
    _, got = await stage.ask(messages, "One. \n\n")
    turn, _ = await stage.ask([*messages, got, user("Two?")], "Two.")
    assert (turn.branch, turn.parent) == ("template_rewrote_history", "q0.0")
    assert turn.shared == len(stage.engine.prompts[0])


@every
async def test_markup_that_was_sampled_in_pieces_stays_in_pieces(family):
    """A model may write `<tool_call>` letter by letter: the same text, other tokens, and no special one."""
    stage, messages = Stage(family), [user("Say it.")]
    markup = family.special[-1]
    said = family.say("It is {} so.", "", ()).format(markup)
    stage.engine.say(spell(family, said, stage.rng, markup_in_pieces=True))
    stage.family = stage.engine.family = _plain(family)
    _, got = await stage.send(messages)
    turn, _ = await stage.ask([*messages, got, user("Again.")], "No.")
    if family.name == "harmony":
        assert turn.branch == "template_rewrote_history"
    else:
        assert (turn.branch, turn.repaired, turn.parent) == (None, True, "q0.0")


@every
async def test_an_answer_that_was_cut_off_is_continued_from_its_own_tokens(family):
    stage, messages = Stage(family), [user("Count.")]
    _, got = await stage.ask(messages, "One, two, three and so on", cut=True)
    turn, _ = await stage.ask([*messages, got, user("Go on.")], "Four.")
    assert (turn.branch, turn.parent) == (None, "q0.0")


@every
@pytest.mark.parametrize("size", [1, 2, 3])
async def test_an_answer_that_was_cut_in_the_middle_of_a_character(family, size):
    """Its last bytes decode to a replacement character, and so they are sent back; the bytes stay."""
    stage, messages = Stage(family), [user("Smile.")]
    smile = in_bytes(family, "🙂")
    head = spell(family, family.say("Yes ", "", ()), random.Random(0))[:-1]
    stage.engine.say([*head, *smile[:size]], finish_reason="length")
    _, got = await stage.send(messages)
    assert got["content"].endswith("\ufffd")
    turn, _ = await stage.ask([*messages, got, user("Go on.")], "Four.")
    assert (turn.branch, turn.repaired, turn.parent) == (None, True, "q0.0")


@every
async def test_a_retry_is_a_second_answer_and_the_newer_one_is_continued(family):
    stage, messages = Stage(family, seed=1), [user("One?")]
    first, _ = await stage.ask(messages, "I think that it is one.")
    second, got = await stage.ask(messages, "I think that it is one.")
    assert first.sampled_ids != second.sampled_ids, "the same answer, other tokens"
    turn, _ = await stage.ask([*messages, got, user("Two?")], "Two.")
    assert (second.branch, turn.parent) == (None, second.call_id)


@every
async def test_several_choices_are_forks_and_each_can_be_continued(family):
    stage, messages = Stage(family), [user("One?")]
    for answer in ("One.", "Uno."):
        stage.engine.say(spell(family, family.say(answer, "", ()), stage.rng))
    await stage.send(messages, n=2)
    for index, answer in enumerate(("One.", "Uno.")):
        said = {
            "role": "assistant",
            "content": family.parse_answer(family.say(answer, "", ()).removesuffix(family.ends[0]))["content"],
        }
        turn, _ = await stage.ask([*messages, said, user("Two?")], "Two.")
        assert turn.parent == f"q0.{index}"


@every
async def test_edited_history_is_a_branch_that_keeps_what_was_not_edited(family):
    stage, messages = Stage(family), [user("One?")]
    _, one = await stage.ask(messages, "One.")
    later = [*messages, one, user("Two?")]
    _, two = await stage.ask(later, "Two.")
    edited, _ = await stage.ask([*later, {**two, "content": "Not two."}, user("Three?")], "Three.")
    assert edited.branch == "history_edited"
    assert edited.shared >= len(stage.engine.prompts[0])
    again, _ = await stage.ask([*messages, {**one, "content": "Never."}, user("Two?")], "Two.")
    assert again.branch == "history_edited"


@every
async def test_two_interleaved_conversations_do_not_disturb_each_other(family):
    """A sub-agent has its own prompt and history under the same key."""
    stage = Stage(family)
    threads = {name: [user(f"You are {name}.")] for name in ("main", "sub")}
    last = dict.fromkeys(threads)
    for number in range(6):
        name = ("main", "sub")[number % 2]
        turn, got = await stage.ask(threads[name], f"I am {name} {number}.")
        assert turn.parent == last[name]
        assert turn.branch in ((None, "template_rewrote_history") if family.name == "harmony" else (None,))
        threads[name] = [*threads[name], got, user("Go on.")]
        last[name] = turn.call_id
    assert len(fold(resolve(stage.turns))) == (6 if family.name == "harmony" else 2)


@every
async def test_a_summary_in_place_of_the_history_begins_anew(family):
    stage, messages = Stage(family), [SYSTEM, user("One?")]
    for text in ("One.", "Two.", "Three."):
        _, got = await stage.ask(messages, text)
        messages = [*messages, got, user("And then?")]
    turn, got = await stage.ask([SYSTEM, user("So far: one, two, three. And then?")], "Four.")
    assert (turn.parent, turn.branch) == (None, None)
    kept = [SYSTEM, user("So far: one, two."), *messages[-2:]]
    turn, _ = await stage.ask(kept, "Four.")
    assert turn.branch == "history_edited"


@every
async def test_changed_tools_are_a_branch(family):
    stage, messages = Stage(family), [SYSTEM, user("One?")]
    _, got = await stage.ask(messages, "One.")
    turn, _ = await stage.ask([*messages, got, user("Two?")], "Two.", tools=TOOLS)
    if "tools" not in family.template:  # which does not write them
        assert turn.branch is None
    else:
        assert turn.branch == "tools_changed"


@with_tools
@settings(max_examples=8)
@given(
    st.lists(st.tuples(words, st.dictionaries(keys_of, values, max_size=3), words), min_size=1, max_size=3),
    st.integers(0, 1000),
)
async def test_a_tool_loop_never_drifts_whatever_it_thinks_and_calls_with(family, steps, seed):
    stage, messages = Stage(family, seed), [user("What is 1 + 2?")]
    for thought, arguments, result in steps:
        kept = thought if family.name in {"chatml", "harmony"} else ""  # the others drop thoughts or have none
        turn, got = await stage.ask(messages, thought=kept, calls=[("add", arguments)], tools=TOOLS)
        assert json.decode(got["tool_calls"][0]["function"]["arguments"]) == arguments
        assert turn.branch is None
        messages = [*messages, got, *results_of(got, result)]
    turn, _ = await stage.ask(messages, "Done.", tools=TOOLS)
    assert turn.branch is None
    assert len(fold(resolve(stage.turns))) == 1


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name != "harmony"], ids=str)
async def test_equal_answers_in_flight_are_each_continued_once(family):
    """Nothing tells them apart but their tokens; continued only once, the other would be taken for a lost sending."""
    stage, messages = Stage(family), [user("One?")]
    asked = [stage.ask(messages, "I think that it is one.") for _ in range(3)]
    got = [message for _, message in await asyncio.gather(*asked)]
    later = [[*messages, message, user(text)] for message, text in zip(got, ("Sure?", "Two?", "Three?"), strict=True)]
    turns = [turn for turn, _ in await asyncio.gather(*(stage.ask(chat, "Yes.") for chat in later))]
    assert {turn.branch for turn in turns} == {None}
    assert sorted(turn.parent for turn in turns) == ["q0.0", "q1.0", "q2.0"]
    assert len(stage.kept()) == 6


@pytest.mark.parametrize("family", [BY_NAME["chatml"], BY_NAME["harmony"]], ids=str)
async def test_equal_answers_with_other_thoughts_are_each_continued_from_their_own(family):
    """Parallel calls and retries; what the agent sees is the same and does not say which of them it was."""
    stage, messages = Stage(family), [user("What is 1 + 2?")]
    call = {"calls": [("add", {"a": 1})], "tools": TOOLS}
    asked = [stage.ask(messages, thought=f"I add {text}.", **call) for text in ("first", "at once", "it")]
    answers = await asyncio.gather(*asked)
    later = [[*messages, got, *results_of(got, "3")] for _, got in answers]
    turns = [turn for turn, _ in await asyncio.gather(*(stage.ask(chat, "Done.", tools=TOOLS) for chat in later))]
    assert [(turn.branch, turn.parent) for turn in turns] == [(None, before.call_id) for before, _ in answers]
    assert len(stage.kept()) == 6


@every
async def test_a_clock_in_the_first_message_is_an_edited_history(family):
    stage, history = Stage(family), []
    for number in range(4):
        first = user(f"{LONG['content']} It is 12:0{number}.")  # mistral's form writes system prompts further below
        turn, got = await stage.ask([first, *history], f"I think that it is {number}.")
        assert turn.branch == ("history_edited" if number else None)
        assert bool(turn.shared) == bool(number), "what precedes the clock need not travel again"
        history = [*history, got, user("And now?")]
    assert stage.meter.drift.branches == {"history_edited": 3}


@every
async def test_examples_before_every_question_are_no_edited_history(family):
    stage, examples = Stage(family), [user("Is 1 one?"), {"role": "assistant", "content": "Yes."}]
    for number in range(3):
        turn, _ = await stage.ask([*examples, user(f"Is {number} one?")], "Yes.")
        assert turn.branch is None
    assert stage.meter.drift.continued == 0


@every
async def test_a_prompt_travels_once_for_all_choices(family):
    stage, messages = Stage(family), [LONG, user("One?")]
    for number in range(4):
        stage.engine.say(spell(family, family.say(f"I say {number}.", "", ()), stage.rng))
    await stage.send(messages, n=4)
    first, *others = stage.turns
    assert first.prompt_ids
    for turn in others:
        assert (turn.parent, turn.prompt_ids, turn.branch) == (first.call_id, b"", None)
        assert len(json.decode(turn.messages)) == 1, "its answer"
    assert stage.meter.drift.continued == 0, "choices continue nothing"
    assert len(stage.kept()) == 4


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name not in {"mistral", "harmony"}], ids=str)
async def test_a_prompt_that_is_sent_again_travels_once_and_survives_its_first_sending(family):
    stage, messages = Stage(family), [LONG, user("One?")]
    for text in ("One.", "Uno."):
        turn, got = await stage.ask(messages, text)
    assert (turn.parent, turn.prompt_ids, stage.meter.drift.continued) == ("q0.0", b"", 0)
    assert len(json.decode(turn.messages)) == 3, "all that was said: the first sending may be left out"
    later, _ = await stage.ask([*messages, got, user("Two?")], "Two.")
    assert stage.kept() == {"q1.0", "q2.0"}, "what shares only the prompt does not continue"
    begin = EpisodeBegin(
        run="r", episode_id=EPISODE, slot=Slot(task_id="t"), kind="k", group_size=1, policies=("main",), client_id="c"
    )
    kept = tuple(stage.kept())
    end = EpisodeEnd(run="r", episode_id=EPISODE, status="finished", rewards={"main": 1.0}, calls=kept)
    sent = assemble_rollout("main", begin, end, stage.turns, group_members=1).turns
    whole = {turn.call_id: ids for turn, ids in zip(stage.turns, resolve(stage.turns), strict=True)}
    assert [turn.call_id for turn in sent] == ["q1.0", later.call_id]
    for turn, ids in zip(sent, resolve(sent), strict=True):
        assert ids.token_ids.tolist() == whole[turn.call_id].token_ids.tolist()


@every
async def test_what_only_begins_like_a_known_prompt_does_not_carry_that_again(family):
    """A sub-agent, and a window that rolls over the history. Neither continues anything, and neither is said to."""
    stage = Stage(family)
    system = (
        user(LONG["content"]) if family.name == "mistral" else LONG
    )  # whose form writes it before the last question
    first, got = await stage.ask([system, user("One?")], "I think that it is one.")
    _, two = await stage.ask([system, user("One?"), got, user("Two?")], "I think that it is two.")
    sub, _ = await stage.ask([system, user("You are a sub-agent.")], "Yes.")
    window, _ = await stage.ask([system, user("Two?"), two, user("Three?")], "I think that it is three.")
    for turn, branch in ((sub, None), (window, "history_edited")):
        assert (turn.branch, turn.begins) == (branch, branch is None)
        assert len(turn.prompt_ids) * 2 < len(first.prompt_ids)
    assert stage.meter.drift.continued == 2, "the second turn and the window"


def _plain(family):
    """The family, with a model whose answers are heard as they are written."""

    def parse_answer(text):
        text = text.removeprefix("<|channel|>final<|message|>")
        return {"role": "assistant", "content": text}

    return msgspec.structs.replace(family, parse_answer=parse_answer)
