"""Whole conversations through the proxy's core under the templates of seven families, with tokenizers that drift.

`Stage.ask` holds every request to the claims of the conversation graph: the prompt says exactly what the template says,
a reader of the turns finds the same prompt, and where a turn continues another, every token of it is there unchanged.
"""

import random
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.families import BY_NAME, FAMILIES, FamilyEngine, in_bytes, spell, tokenizer_of
from swarmq import keys
from swarmq.broker import topology
from swarmq.config import Policy, SwarmJob
from swarmq.errors import EngineRefusedError
from swarmq.messages import decode, unpack_ids
from swarmq.proxy.calls import Call
from swarmq.proxy.completion import Completions
from swarmq.proxy.gate import Gate
from swarmq.proxy.memory import Episodes
from swarmq.proxy.meter import Meter
from swarmq.proxy.pool import Pool
from swarmq.proxy.recorder import Recorder
from swarmq.proxy.tuning import Tuning
from swarmq.testing import MemoryBroker
from swarmq.timeline import fold, resolve

SYSTEM = {"role": "system", "content": "Be brief."}
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
        self.engine, self.broker, self.meter = FamilyEngine(family), MemoryBroker(), Meter()
        self.completions = Completions(
            run="r",
            tuning=Tuning(SwarmJob(run="r", policies={"main": Policy(model="x")})),
            pools={"main": Pool([self.engine])},
            episodes=Episodes(idle_s=1000),
            recorder=Recorder(self.broker, self.meter, confirm_timeout_s=1),
            meter=self.meter,
            gate=Gate(max_open=10, max_waiting=0),
            timeout_s=60.0,
        )
        self.declared = False

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
        call = Call(
            claims=claims, policy="main", request_id=f"q{len(self.turns)}", chat=chat, stream=False, retry=0,
            digest="", agent=None, began_at=0.0, began=time.monotonic(),
        )  # fmt: skip
        ended = await self.completions.whole(await self.completions.begin(call))
        self._check(chat, choices=len(ended))
        return self.turns[-1], ended[-1].message

    def _check(self, chat, choices):
        prompt, turns = self.engine.prompts[-1], self.turns
        assert self.engine.decode(prompt) == self.engine.write(chat), "the prompt is not what was asked"
        resolved = resolve(turns)
        index = {turn.call_id: i for i, turn in enumerate(turns)}
        for turn, whole in list(zip(turns, resolved, strict=True))[-choices:]:
            assert whole.prompt_ids.tolist() == prompt, "a reader of the turns finds another prompt"
            fresh = self.engine.encode(self.engine.write(chat))
            assert turn.repaired == (prompt != fresh), "not what was rendered, and not counted"
            if turn.branch is None and turn.parent is not None:
                parent = resolved[index[turn.parent]].token_ids.tolist()
                assert prompt[: len(parent)] == parent, "a token of what is continued has changed"
            assert turn.branch != "drift", "what the model sampled was lost to re-tokenisation"
        trained = sum(int(row.trained.sum()) for row in fold(resolved))
        assert trained == sum(len(unpack_ids(turn.sampled_ids)) for turn in turns), "a token is not trained once"
        assert self.meter.drift.repaired == sum(turn.repaired for turn in turns)


words = st.text(
    st.sampled_from("aeinortdl .,;!?'0123456789äéß€漢字🙂\n"), min_size=1, max_size=40
).map(lambda text: "I think that " + text.strip() + ".")  # fmt: skip


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
            "content": family.hear(family.say(answer, "", ()).removesuffix(family.ends[0]))["content"],
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


def _plain(family):
    """The family, with a model whose answers are heard as they are written."""

    def hear(text):
        text = text.removeprefix("<|channel|>final<|message|>")
        return {"role": "assistant", "content": text}

    return msgspec.structs.replace(family, hear=hear)
