"""Every token of an episode is shown as it was sampled and as it was trained, on a terminal, as JSON and as a page."""

import io
import math
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from html.parser import HTMLParser

import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from rich.console import Console

from support.episodes import make_episode, make_group
from support.families import BY_NAME, FamilyEngine, tokenizer_of
from swarmq.cli import main
from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import EpisodeError
from swarmq.learner.methods.loss_effects import LossEffect
from swarmq.learner.store import token_trace
from swarmq.learner.store.batch_log import BatchLog
from swarmq.learner.store.records import BatchIndex, BatchRecord, RunIdentity
from swarmq.learner.store.token_trace import EpisodeTrace, TurnTrace
from swarmq.messages import new_id, pack_floats, unpack_floats, unpack_ids
from swarmq.observe.index import EpisodeFilter, RunIndex
from swarmq.observe.inspect.html import render_page
from swarmq.observe.inspect.read import (
    BatchRow,
    Decoders,
    EpisodeView,
    StepEpisode,
    build_view,
    decode_tokens,
    find_episode,
    read_batches,
)
from swarmq.observe.inspect.terminal import MARKS, _steps_of, draw_batches, draw_episode, print_parts
from swarmq.token_drift import Drift


def spoken(ids):
    return "".join(chr(97 + token % 26) for token in ids)


def seen_of(episode, advantage=0.5, left_out=b""):
    """What training would have recorded: the sampled log-probability and a quarter more."""
    return EpisodeTrace(
        episode_id=episode.episode_id,
        turns=tuple(
            TurnTrace(
                call_id=turn.call_id,
                advantage=advantage,
                logprobs=pack_floats([value + 0.25 for value in unpack_floats(turn.logprobs)]),
                left_out=left_out and left_out[:1] + bytes(len(turn.sampled_ids) // 4 - 1),
            )
            for turn in episode.turns
        ),
    )


def text_of(parts, *, colour=False):
    console = Console(file=io.StringIO(), width=80, force_terminal=colour)
    print_parts(console, parts)
    return console.file.getvalue()


def test_every_sampled_token_has_what_sampling_and_training_made_of_it():
    episode = make_episode("g0", turns=6, version=3)
    view = build_view(episode, 4, seen_of(episode), spoken)
    trained = [row for row in view.tokens if row.trained]
    assert sorted(row.token_id for row in trained) == sorted(
        token for turn in episode.turns for token in unpack_ids(turn.sampled_ids)
    )
    for row in trained:
        assert row.logprob_trained == pytest.approx(row.logprob + 0.25, abs=1e-6)
        assert (row.advantage, row.contribution, row.version) == (0.5, 0.5, 3)
    given = [row for row in view.tokens if not row.trained]
    assert given
    assert {(row.logprob, row.logprob_trained, row.advantage, row.turn) for row in given} == {(None,) * 4}


def test_turns_that_name_another_only_for_its_prompt_are_shown_whole_and_continue_nothing():
    """Further choices of a request carry no prompt; a sub-agent carries the end of its own."""
    episode = make_episode("g0", turns=1, version=3)
    (first,) = episode.turns
    length = len(first.prompt_ids) // 4
    like = {"parent": first.call_id, "begins": True}
    choice = replace(first, call_id="c1", shared=length, prompt_ids=b"", **like)
    sub = replace(first, call_id="c2", shared=length - 1, prompt_ids=first.sampled_ids[:4], **like)
    view = build_view(replace(episode, turns=(first, choice, sub)), 4, None, spoken)
    assert view.drift.continued == 0
    whole = [row.token_id for row in view.tokens if row.trained]
    assert sorted(whole) == sorted(3 * unpack_ids(first.sampled_ids).tolist())
    given = unpack_ids(first.prompt_ids).tolist()
    rows = {
        n: [row.token_id for row in view.tokens if row.timeline == n] for n in {row.timeline for row in view.tokens}
    }
    assert [*given, *unpack_ids(first.sampled_ids)] in rows.values()
    assert [*given[:-1], unpack_ids(first.sampled_ids)[0], *unpack_ids(first.sampled_ids)] in rows.values()


def test_the_log_probabilities_stand_at_their_own_tokens():
    episode = make_episode("g0", turns=6)
    for row in build_view(episode, 1, seen_of(episode), spoken).tokens:
        if row.trained:
            turn = episode.turns[row.turn]
            pairs = list(zip(unpack_ids(turn.sampled_ids), unpack_floats(turn.logprobs), strict=True))
            assert (row.token_id, row.logprob) in pairs


def test_a_token_that_a_filter_left_out_contributes_nothing():
    episode = make_episode("g0", turns=2)
    view = build_view(episode, 1, seen_of(episode, left_out=b"\1"), spoken)
    out = [row for row in view.tokens if row.left_out]
    assert len(out) == 2, "the first token of each turn"
    assert {row.contribution for row in out} == {0.0}


@pytest.mark.parametrize(
    ("effect", "share"),
    [(LossEffect.MASKED, 0.0), (LossEffect.CLIPPED, 0.0), (LossEffect.TRUNCATED, 1.0), (LossEffect.WHOLE, 1.0)],
)
def test_a_token_whose_gradient_the_loss_cut_contributes_nothing(effect, share):
    episode = make_episode("g0", turns=2)
    seen = seen_of(episode)
    turns = [msgspec.structs.replace(t, effects=bytes([effect]) * (len(t.logprobs) // 4)) for t in seen.turns]
    view = build_view(episode, 1, msgspec.structs.replace(seen, turns=tuple(turns)), spoken)
    assert {(row.effect, row.contribution) for row in view.tokens if row.trained} == {(effect, 0.5 * share)}
    lines = text_of(draw_episode(view), colour=True).splitlines()
    rows = [line for line in lines if line.endswith("\x1b[0m") and " 0.5000 " in line]
    colour = "\x1b[35m" if effect.cuts else "\x1b[1;32m"
    assert len(rows) == sum(row.trained for row in view.tokens)
    assert all(colour in row and f" {MARKS[effect]} " in row for row in rows)
    assert render_page(view).count(f"<td>{MARKS[effect]}</td>") >= len(rows)
    assert ("rgba(var(--cut)" in render_page(view).partition("</p>")[2]) == effect.cuts


def test_advantages_of_single_tokens_stand_at_their_tokens_and_a_loss_without_any_makes_all_likelier():
    episode = make_episode("g0", turns=6)
    seen = seen_of(episode, None)
    own = [msgspec.structs.replace(turn, advantages=turn.logprobs) for turn in seen.turns]
    each = build_view(episode, 1, msgspec.structs.replace(seen, turns=tuple(own)), spoken)
    assert all(row.contribution == row.advantage == row.logprob_trained for row in each.tokens if row.trained)
    none = build_view(episode, 1, seen, spoken)
    assert {(row.advantage, row.contribution) for row in none.tokens if row.trained} == {(None, 1.0)}


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_contribution_that_is_not_finite_takes_no_colour_from_the_others(broken):
    episode = make_episode("g0", turns=1)
    seen = seen_of(episode)
    size = len(unpack_floats(seen.turns[0].logprobs))
    own = msgspec.structs.replace(seen.turns[0], advantages=pack_floats([broken] + [0.5] * (size - 1)))
    view = build_view(episode, 1, msgspec.structs.replace(seen, turns=(own,)), spoken)
    strongest = "--up),0.67)"
    assert render_page(view).count(strongest) == 1 + 2 * (size - 1 + math.isinf(broken)), (
        "in the legend, the text and the table"
    )
    assert "nan)" not in render_page(view)
    assert "inf)" not in render_page(view)


def test_a_record_from_before_effects_were_kept_can_be_read():
    old = {"call_id": "c", "advantage": 0.5, "logprobs": b"\0" * 4}
    turn = msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=TurnTrace)
    assert (turn.advantage, turn.advantages, turn.effects) == (0.5, b"", b"")


def test_without_the_training_record_sampling_alone_is_shown_and_that_is_said():
    episode = make_episode("g0", turns=2)
    view = build_view(episode, 1, None, spoken)
    assert not view.training_recorded
    assert {row.logprob_trained for row in view.tokens} == {None}
    assert "training was not recorded" in text_of(draw_episode(view))
    assert "Training was not recorded" in render_page(view)


def test_the_terminal_shows_all_columns_and_colours_by_contribution():
    episode = make_episode("g0", turns=2, reward=1.0)
    for advantage, code in ((0.5, "1;32"), (-0.5, "1;31"), (0.0, "36")):
        view = build_view(episode, 1, seen_of(episode, advantage), spoken)
        assert f"\x1b[{code}m" in text_of(draw_episode(view), colour=True)
    plain = text_of(draw_episode(view))
    for heading in ("id", "mask", "logprob", "trained", "gap", "advantage", "version", "0.2500"):
        assert heading in plain


def test_within_80_columns_each_token_is_whole_beside_its_figures():
    engine = FamilyEngine(BY_NAME["chatml"])
    episode = make_episode("g0", turns=4, vocab=300)
    view = build_view(episode, 1, seen_of(episode, left_out=b"\1"), engine.decode)
    markup = msgspec.structs.replace(view.tokens[0], text="<|im_start|>", position=30_000, token_id=151_644)
    view = msgspec.structs.replace(view, tokens=(markup, *view.tokens[1:]))
    lines = [line for line in text_of(draw_episode(view)).split("\n") if re.match(r" *\d+ +\d+ ", line)]
    rows = [line.split() for line in lines]
    assert [(int(row[0]), int(row[1])) for row in rows] == [(token.position, token.token_id) for token in view.tokens]
    assert rows[0] == ["30000", "151644", "0", "<|im_start|>"]
    sampled = next(token for token in view.tokens if token.trained and not token.left_out and token.text.strip())
    figures = [f"{value:.4f}" for value in (sampled.logprob, sampled.logprob_trained, 0.25, 0.5)]
    line = [*map(str, (sampled.position, sampled.token_id, 1)), *figures, str(sampled.version), str(sampled.turn)]
    assert line in [row[:9] for row in rows]
    assert max(map(len, lines)) <= 80


def test_each_timeline_has_a_heading_before_its_text_and_before_its_tokens():
    episode = make_episode("g1", turns=6)
    view = build_view(episode, 1, None, spoken)
    shown = text_of(draw_episode(view))
    timelines = [
        [row for row in view.tokens if row.timeline == number] for number in range(view.tokens[-1].timeline + 1)
    ]
    assert len(timelines) > 1
    for number, rows in enumerate(timelines):
        heading = f"timeline {number}: {len(rows)} tokens, {sum(row.trained for row in rows)} trained\n"
        text = "".join(row.text for row in rows)
        assert shown.count(heading) == 2
        assert f"\n\n{heading}{text}\n\n" in shown


def test_a_long_text_is_left_whole_and_what_would_move_the_cursor_is_shown():
    episode = make_episode("g0", turns=2)
    shown = text_of(draw_episode(build_view(episode, 1, None, lambda ids: "word \x1b[2J\r" * len(ids))))
    assert ("word ␛[2J␍" * 12) in shown
    assert "\x1b" not in shown


def test_the_json_can_be_read_back():
    episode = make_episode("g0", turns=3)
    view = build_view(episode, 1, seen_of(episode), spoken)
    assert msgspec.json.decode(msgspec.json.encode(view), type=EpisodeView) == view


def test_rewards_by_agent_and_by_call_are_shown_beside_the_episodes_own():
    plain = make_episode("g0", turns=3)
    assert "reward by" not in text_of(draw_episode(build_view(plain, 1, None, spoken)))
    rated = {plain.turns[2].call_id: -0.5, "of another": 9.0}
    episode = replace(plain, agent_rewards={"writer": 1.0, "a\x1b[2J": 0.0}, call_rewards=rated)
    view = build_view(episode, 1, None, spoken)
    shown = text_of(draw_episode(view))
    assert "\nreward by agent: writer 1, a␛[2J 0\nreward by call: turn 2: -0.5\n" in shown
    assert "<dt>reward by call</dt><dd>turn 2: -0.5</dd>" in render_page(view)
    told = msgspec.json.decode(msgspec.json.encode(view))
    assert told["call_rewards"] == rated
    assert told["calls"] == [turn.call_id for turn in episode.turns]


def test_turns_that_the_agent_did_not_receive_and_rewards_for_them_are_shown():
    plain = make_episode("g0", turns=3)
    assert "not received" not in text_of(draw_episode(build_view(plain, 1, None, spoken)))
    episode = replace(plain, orphan_turns=2, uncredited={"c9.0": 0.5})
    view = build_view(episode, 1, None, spoken)
    assert "\nnot received, not trained: 2 turns\nreward for a call that is not trained: c9.0: 0.5\n" in text_of(
        draw_episode(view)
    )
    assert "<dt>not received, not trained</dt><dd>2 turns</dd>" in render_page(view)
    told = msgspec.json.decode(msgspec.json.encode(view))
    assert (told["orphan_turns"], told["uncredited"]) == (2, {"c9.0": 0.5})


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.seen, self.open, self.told = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in {"b", "i"}:
            self.told += data


def test_the_page_is_whole_and_loads_nothing():
    episode = make_episode("g0", turns=3)
    view = build_view(episode, 1, seen_of(episode), lambda ids: "<script>&'" if len(ids) == 1 else "")
    html = render_page(view)
    tags = Tags(html)
    assert tags.open == []
    assert "script" not in {tag for tag, _ in tags.seen}, "text of tokens is not markup"
    assert not re.search(r"\b(src|href|url)\b *[=(]", html)
    assert tags.told.count("<script>&'") == len(view.tokens)
    assert sum(tag == "tr" for tag, _ in tags.seen) == len(view.tokens) + html.count("<table>")


def test_a_character_of_several_tokens_is_shown_once_and_whole():
    engine = FamilyEngine(BY_NAME["chatml"])
    smile = [tokenizer_of("chatml").token_to_id(piece) for piece in "ðŁĻĤ"]
    texts = decode_tokens([*engine.encode("Yes"), *smile, *engine.encode("!")], engine.decode)
    assert "".join(texts) == "Yes🙂!"
    assert decode_tokens(smile[:2], engine.decode)[0] == ""
    assert "\ufffd" in decode_tokens(smile[:2], engine.decode)[1]


def test_a_tokenizer_that_drops_leading_spaces_shows_them_where_they_stand():
    tokenizer, engine = tokenizer_of("sentencepiece"), FamilyEngine(BY_NAME["sentencepiece"])
    text = "The weather in Paris is mild today,\nand 🙂 it will rain."
    ids = tokenizer.encode(text).ids
    texts = decode_tokens(ids, engine.decode)
    assert "".join(texts) == text
    words = {token: texts[at] for at, token in enumerate(tokenizer.encode(text).tokens)}
    assert words["▁Paris"] == " Paris"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run with two steps, of which the second recorded its tokens."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    tokenizer_of("chatml").save(str(model / "tokenizer.json"))
    job = SwarmJob.build({"run": "r", "folder": str(tmp_path), "policies": {"main": {"model": str(model)}}})
    folder = job.run_folder
    log = BatchLog(folder.batch_log("main"), RunIdentity.of(job, "main"))
    for number, name in ((1, "first"), (2, "second")):
        episodes = tuple(make_group(name, (0.0, 1.0), turns=3))
        drifted = msgspec.structs.replace(episodes[0].turns[1], repaired=True)
        turns = (episodes[0].turns[0], drifted, episodes[0].turns[2])
        episodes = (msgspec.structs.replace(episodes[0], turns=turns), episodes[1])
        ids = tuple(episode.episode_id for episode in episodes)
        dropped = {"stale-11": "stale", "long-12": "over_budget"} if number == 2 else {}
        log.append(
            BatchRecord(
                index=BatchIndex(record=number, version=number, trained=ids, dropped=dropped), episodes=episodes
            )
        )
    # logged while step 2 was still being trained, so it names the version before
    log.append(BatchRecord(index=BatchIndex(record=3, version=1, dropped={"old-13": "stale"})))
    log.close()
    token_trace.write_trace(folder.token_log("main"), 2, [seen_of(episode) for episode in episodes])
    (folder.path / "resolved.toml").write_text(job.to_toml())
    return folder.path


def inspect(*arguments):
    result = CliRunner().invoke(main, ["inspect", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_list_of_batches_says_what_was_dropped_and_how_much_drifted(run):
    listing = inspect(run)
    assert "reward trained" in listing.splitlines()[0]
    assert "dropped: stale 2, over_budget 1; 1 of them since step 2\n" in listing
    assert "8 of 12 turns had one to continue: 25.0% drifted, 2 repaired, branches: none" in listing
    assert "…" not in listing
    rows = [msgspec.json.decode(line) for line in inspect(run, "--json").splitlines()]
    figures = [(row["step"], row["episodes"], row["drift"].get("repaired")) for row in rows]
    assert figures == [(1, 2, 1), (2, 2, 1), (None, 0, 0)]


def test_records_of_drops_alone_are_counted_with_the_step_that_they_are_on_the_way_to():
    def record(step, **dropped):
        return BatchRow(
            step=step, episodes=8 if step else 0, groups=2 if step else 0, dropped=dropped, reward_trained=0.5 if step else None,
            drift=Drift(), at=0.0, first_episode=f"episode-of-{step}" if step else "",
        )  # fmt: skip

    log = [record(None, stale=8), record(None, equal_rewards=8), record(1, stale=1), record(2), record(None, stale=3)]
    _, *rows = text_of(draw_batches(log)).split("\n\n")[0].splitlines()
    assert [row.split()[:4] for row in rows] == [["1", "8", "2", "17"], ["2", "8", "2", "0"]]
    assert "dropped: stale 12, equal_rewards 8; 3 of them since step 2" in text_of(draw_batches(log))
    assert text_of(draw_batches(log[:1])).splitlines()[2] == "dropped: stale 8; 8 of them before the first step"


def test_without_torch_all_of_it_can_be_read(run):
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'accelerate', 'litestar', 'vllm'))); "
        "from swarmq.cli import main; main()"
    )
    for arguments in ([], ["--step", "2"], ["second-0"]):
        done = subprocess.run(
            [sys.executable, "-c", script, "inspect", run, *arguments], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert done.stdout


def test_a_record_that_is_being_written_is_said_in_words_and_beside_the_output(run):
    (segment,) = (run / "main" / "batches").glob("*.log")
    with segment.open("ab") as log:
        log.write(b"SQRC")
    done = CliRunner().invoke(main, ["inspect", str(run), "--json"])
    assert [msgspec.json.decode(line)["step"] for line in done.stdout.splitlines() if line.startswith("{")] == [
        1,
        2,
        None,
    ]
    assert done.stderr.startswith(f"warning: batch log torn tail: segment {segment}, at ")


def test_the_list_of_batches_fits_80_columns_with_large_figures():
    reasons = {"over_budget": 12_345, "truncated_sampling": 20, "overlong": 3}
    row = BatchRow(
        step=123_456, episodes=99_999, groups=12_345, dropped=reasons, reward_trained=-12.3456,
        drift=Drift(turns=10, continued=10, drifted=10), at=0.0, first_episode=new_id(),
    )  # fmt: skip
    lines = text_of(draw_batches([row])).splitlines()
    assert [*lines[1].split()[:6], lines[1].split()[-1]] == [
        *("123456", "99999", "12345", "12368", "-12.346", "100.0%"),
        row.first_episode[-8:],
    ]
    assert "dropped: over_budget 12345, truncated_sampling 20, overlong 3" in lines
    assert max(map(len, lines[:2])) <= 80


def test_the_episodes_of_a_step_are_listed_with_what_was_dropped_for_it(run):
    rows = [msgspec.json.decode(line, type=StepEpisode) for line in inspect(run, "--step", 2, "--json").splitlines()]
    assert [(row.episode_id, row.group, row.reward, row.turns, row.dropped) for row in rows] == [
        ("second-0", "second/0", 0.0, 3, ""),
        ("second-1", "second/0", 1.0, 3, ""),
        ("stale-11", "", None, 0, "stale"),
        ("long-12", "", None, 0, "over_budget"),
    ]
    listing = inspect(run, "--step", 2)
    tokens = sum(len(turn.sampled_ids) // 4 for turn in make_group("second", (0.0, 1.0), turns=3)[1].turns)
    assert ["1.000", "3", "0", str(tokens), "second-1", "second/0"] in [line.split() for line in listing.splitlines()]
    assert ["over_budget", "long-12"] in [line.split() for line in listing.splitlines()]
    assert "old-13" in inspect(run, "--step", 3), "on the way to the next step"
    refused = CliRunner().invoke(main, ["inspect", str(run), "--step", "7"])
    assert (refused.exit_code, "no record of step 7; it has steps 1 to 3" in refused.output) == (1, True)


def test_the_list_of_batches_and_the_list_of_a_step_count_the_same_drops(run):
    rows, since = _steps_of(list(read_batches(RunFolder(run).batch_log("main"))))
    listed = {
        step: list(map(msgspec.json.decode, inspect(run, "--step", step, "--json").splitlines())) for step in (1, 2, 3)
    }
    by_step = {step: Counter(row["dropped"] for row in found if row.get("dropped")) for step, found in listed.items()}
    assert (
        {row.step: row.dropped for row in rows} | {3: since}
        == by_step
        == {1: {}, 2: {"stale": 1, "over_budget": 1}, 3: {"stale": 1}}
    )
    index = RunIndex(RunFolder(run))
    index.update()
    assert [row.id for row in index.page(EpisodeFilter(step=3)).rows] == ["old-13"]


def test_an_episode_is_found_by_its_beginning_or_end_with_what_training_recorded(run):
    assert "training was not recorded" in inspect(run, "first-0")
    assert "made likelier" in inspect(run, "second-0")
    for part in ("second-0", "ond-0"):
        view = msgspec.json.decode(inspect(run, part, "--json"), type=EpisodeView)
        assert (view.episode_id, view.step, view.training_recorded, view.drift_rate) == ("second-0", 2, True, 0.5)
        assert view.drift == Drift(turns=3, continued=2, repaired=1, drifted=1)


def test_of_an_episode_that_was_dropped_it_is_said_when_and_why(run):
    for part, step, reason in (("long", 2, "over_budget"), ("-13", 3, "stale")):
        with pytest.raises(EpisodeError, match=f"dropped in step {step}: {reason}"):
            find_episode(RunFolder(run), "main", part, spoken)


def test_the_page_is_written_to_the_file(run, tmp_path):
    assert inspect(run, "second-0", "--html", tmp_path / "e.html") == ""
    assert "second-0" in (tmp_path / "e.html").read_text()
    assert (tmp_path / "e.html").stat().st_mode & 0o77 == 0, "prompts are in it"
    nowhere = CliRunner().invoke(main, ["inspect", str(run), "second-0", "--html", str(tmp_path / "no" / "e.html")])
    assert (nowhere.exit_code, "no/e.html: cannot be written (No such file or directory)" in nowhere.output) == (
        1,
        True,
    )
    refused = CliRunner().invoke(main, ["inspect", str(run), "--html", str(tmp_path / "x.html")])
    assert refused.exit_code == 1
    assert "--html needs an EPISODE" in refused.output
    refused = CliRunner().invoke(main, ["inspect", str(run), "second-0", "--step", "2"])
    assert "--step cannot be combined with EPISODE" in refused.output


@pytest.mark.parametrize("unreadable", ["batches", "batches/000000000001.log"])
def test_a_log_that_cannot_be_read_is_not_taken_for_an_empty_one(run, unreadable):
    path = run / "main" / unreadable
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.write_text("") if unreadable == "batches" else path.mkdir()
    refused = CliRunner().invoke(main, ["inspect", str(run)])
    assert (refused.exit_code, f"{path}: " in refused.output) == (1, True), refused.output
    assert "check the folder and its permissions" in refused.output


def test_an_episode_that_is_not_there_or_not_meant_alone_is_refused(run):
    with pytest.raises(EpisodeError, match="no episode of the batch log"):
        find_episode(RunFolder(run), "main", "nowhere", spoken)
    with pytest.raises(EpisodeError, match="2 episodes begin or end with"):
        find_episode(RunFolder(run), "main", "first", spoken)


def decoders_of(tmp_path, fetch):
    job = SwarmJob.build(
        {"run": "r", "folder": str(tmp_path), "policies": {"main": {"model": "nobody/no-such-model-9f2"}}}
    )
    return Decoders(job, job.run_folder, fetch=fetch, patience_s=0.05)


def test_nobody_waits_for_a_hub_that_does_not_answer_and_what_comes_late_is_used(tmp_path):
    may_answer, asked = threading.Event(), []

    def fetch(model):
        asked.append(model)
        may_answer.wait(30)
        return spoken

    decoders = decoders_of(tmp_path, fetch)
    assert "nobody/no-such-model-9f2: its tokenizer is not on this machine" in decoders("main")
    assert "has not sent it yet" in decoders("main")
    may_answer.set()
    for thread in threading.enumerate():
        if thread.name == "tokenizer of nobody/no-such-model-9f2":
            thread.join(30)
    assert decoders("main") is spoken
    assert asked == ["nobody/no-such-model-9f2"]


def test_a_hub_that_cannot_be_reached_is_asked_once_and_the_model_is_named(tmp_path):
    asked = []

    def fetch(model):
        asked.append(model)
        raise EpisodeError("no network")

    decoders = decoders_of(tmp_path, fetch)
    for _ in range(3):
        assert "nobody/no-such-model-9f2: its tokenizer is not on this machine, and the hub cannot" in decoders("main")
    assert len(asked) == 1


def test_files_of_this_machine_come_before_the_hub(run, tmp_path):
    def fetch(model):
        raise AssertionError(model)

    decoders = decoders_of(tmp_path, fetch)
    checkpoint = RunFolder(tmp_path / "r").checkpoints("main") / "step-00000001"
    checkpoint.mkdir(parents=True)
    shutil.copy(tmp_path / "model" / "tokenizer.json", checkpoint)
    assert not isinstance(decoders("main"), str)
