"""Every token of an episode is shown as it was sampled and as it was trained, on a terminal, as JSON and as a page."""

import io
import re
from html.parser import HTMLParser

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from support.episodes import make_episode, make_group
from support.families import BY_NAME, FamilyEngine, tokenizer_of
from swarmq.cli import main
from swarmq.config import RunFolder, SwarmJob
from swarmq.drift import Drift
from swarmq.errors import EpisodeError
from swarmq.learner import token_log
from swarmq.learner.algorithms.effects import Effect
from swarmq.learner.batch_log import BatchLog
from swarmq.learner.records import BatchRecord, Identity, Index
from swarmq.learner.token_log import EpisodeTokens, TurnTokens
from swarmq.messages import pack_floats, unpack_floats, unpack_ids
from swarmq.observe.inspect import EpisodeView, find_episode, pieces, view_of
from swarmq.observe.inspect_draw import draw_episode
from swarmq.observe.inspect_html import page


def spoken(ids):
    return "".join(chr(97 + token % 26) for token in ids)


def seen_of(episode, advantage=0.5, left_out=b""):
    """What training would have recorded: the sampled log-probability and a quarter more."""
    return EpisodeTokens(
        episode_id=episode.episode_id,
        turns=tuple(
            TurnTokens(
                call_id=turn.call_id,
                advantage=advantage,
                logprobs=pack_floats([value + 0.25 for value in unpack_floats(turn.logprobs)]),
                left_out=left_out and left_out[:1] + bytes(len(turn.sampled_ids) // 4 - 1),
            )
            for turn in episode.turns
        ),
    )


def text_of(renderable, *, colour=False):
    console = Console(file=io.StringIO(), width=160, force_terminal=colour)
    console.print(renderable)
    return console.file.getvalue()


def test_every_sampled_token_has_what_sampling_and_training_made_of_it():
    episode = make_episode("g0", turns=6, version=3)
    view = view_of(episode, 4, seen_of(episode), spoken)
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


def test_the_log_probabilities_stand_at_their_own_tokens():
    episode = make_episode("g0", turns=6)
    for row in view_of(episode, 1, seen_of(episode), spoken).tokens:
        if row.trained:
            turn = episode.turns[row.turn]
            pairs = list(zip(unpack_ids(turn.sampled_ids), unpack_floats(turn.logprobs), strict=True))
            assert (row.token_id, row.logprob) in pairs


def test_a_token_that_a_filter_left_out_contributes_nothing():
    episode = make_episode("g0", turns=2)
    view = view_of(episode, 1, seen_of(episode, left_out=b"\1"), spoken)
    out = [row for row in view.tokens if row.left_out]
    assert len(out) == 2, "the first token of each turn"
    assert {row.contribution for row in out} == {0.0}


@pytest.mark.parametrize(
    ("effect", "share"), [(Effect.MASKED, 0.0), (Effect.CLIPPED, 0.0), (Effect.TRUNCATED, 1.0), (Effect.WHOLE, 1.0)]
)
def test_a_token_whose_gradient_the_loss_cut_contributes_nothing(effect, share):
    episode = make_episode("g0", turns=2)
    seen = seen_of(episode)
    turns = [msgspec.structs.replace(t, effects=bytes([effect]) * (len(t.logprobs) // 4)) for t in seen.turns]
    view = view_of(episode, 1, msgspec.structs.replace(seen, turns=tuple(turns)), spoken)
    assert {(row.effect, row.contribution) for row in view.tokens if row.trained} == {(effect, 0.5 * share)}


def test_advantages_of_single_tokens_stand_at_their_tokens_and_a_loss_without_any_makes_all_likelier():
    episode = make_episode("g0", turns=6)
    seen = seen_of(episode, None)
    own = [msgspec.structs.replace(turn, advantages=turn.logprobs) for turn in seen.turns]
    each = view_of(episode, 1, msgspec.structs.replace(seen, turns=tuple(own)), spoken)
    assert all(row.contribution == row.advantage == row.logprob_trained for row in each.tokens if row.trained)
    none = view_of(episode, 1, seen, spoken)
    assert {(row.advantage, row.contribution) for row in none.tokens if row.trained} == {(None, 1.0)}


def test_a_record_from_before_effects_were_kept_can_be_read():
    old = {"call_id": "c", "advantage": 0.5, "logprobs": b"\0" * 4}
    turn = msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=TurnTokens)
    assert (turn.advantage, turn.advantages, turn.effects) == (0.5, b"", b"")


def test_without_the_training_record_sampling_alone_is_shown_and_that_is_said():
    episode = make_episode("g0", turns=2)
    view = view_of(episode, 1, None, spoken)
    assert not view.training_recorded
    assert {row.logprob_trained for row in view.tokens} == {None}
    assert "training was not recorded" in text_of(draw_episode(view))
    assert "Training was not recorded" in page(view)


def test_the_terminal_shows_all_columns_and_colours_by_contribution():
    episode = make_episode("g0", turns=2, reward=1.0)
    for advantage, code in ((0.5, "1;32"), (-0.5, "1;31"), (0.0, "36")):
        view = view_of(episode, 1, seen_of(episode, advantage), spoken)
        assert f"\x1b[{code}m" in text_of(draw_episode(view), colour=True)
    plain = text_of(draw_episode(view))
    for heading in ("id", "mask", "logprob", "trained", "gap", "advantage", "version", "0.2500"):
        assert heading in plain


def test_the_json_can_be_read_back():
    episode = make_episode("g0", turns=3)
    view = view_of(episode, 1, seen_of(episode), spoken)
    assert msgspec.json.decode(msgspec.json.encode(view), type=EpisodeView) == view


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
    view = view_of(episode, 1, seen_of(episode), lambda ids: "<script>&'" if len(ids) == 1 else "")
    html = page(view)
    tags = Tags(html)
    assert tags.open == []
    assert "script" not in {tag for tag, _ in tags.seen}, "text of tokens is not markup"
    assert not re.search(r"\b(src|href|url)\b *[=(]", html)
    assert tags.told.count("<script>&'") == len(view.tokens)
    assert sum(tag == "tr" for tag, _ in tags.seen) == len(view.tokens) + html.count("<table>")


def test_a_character_of_several_tokens_is_shown_once_and_whole():
    engine = FamilyEngine(BY_NAME["chatml"])
    smile = [tokenizer_of("chatml").token_to_id(piece) for piece in "ðŁĻĤ"]
    texts = pieces([*engine.encode("Yes"), *smile, *engine.encode("!")], engine.decode)
    assert "".join(texts) == "Yes🙂!"
    assert pieces(smile[:2], engine.decode)[0] == ""
    assert "\ufffd" in pieces(smile[:2], engine.decode)[1]


@pytest.fixture
def run(tmp_path):
    """The folder of a run with two steps, of which the second recorded its tokens."""
    model = tmp_path / "model"
    model.mkdir()
    tokenizer_of("chatml").save(str(model / "tokenizer.json"))
    job = SwarmJob.build({"run": "r", "folder": str(tmp_path), "policies": {"main": {"model": str(model)}}})
    folder = job.run_folder
    log = BatchLog(folder.batch_log("main"), Identity.of(job, "main"))
    for number, name in ((1, "first"), (2, "second")):
        episodes = tuple(make_group(name, (0.0, 1.0), turns=3))
        drifted = msgspec.structs.replace(episodes[0].turns[1], repaired=True)
        turns = (episodes[0].turns[0], drifted, episodes[0].turns[2])
        episodes = (msgspec.structs.replace(episodes[0], turns=turns), episodes[1])
        ids = tuple(episode.episode_id for episode in episodes)
        dropped = {"x": "stale"} if number == 2 else {}
        log.append(
            BatchRecord(index=Index(record=number, version=number, trained=ids, dropped=dropped), episodes=episodes)
        )
    log.close()
    token_log.write(folder.token_log("main"), 2, 0, [seen_of(episode) for episode in episodes])
    (folder.path / "resolved.toml").write_text(job.to_toml())
    return folder.path


def inspect(*arguments):
    result = CliRunner().invoke(main, ["inspect", *map(str, arguments)], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_list_of_batches_says_how_much_drifted(run):
    listing = inspect(run)
    assert "stale 1" in listing
    assert "8 of 12 turns had one to continue: 25.0% drifted, 2 repaired, branches: none" in listing
    rows = [msgspec.json.decode(line) for line in inspect(run, "--json").splitlines()]
    assert [(row["step"], row["episodes"], row["drift"]["repaired"]) for row in rows] == [(1, 2, 1), (2, 2, 1)]


def test_an_episode_is_found_by_its_beginning_with_what_training_recorded(run):
    assert "training was not recorded" in inspect(run, "first-0")
    assert "made likelier" in inspect(run, "second-0")
    view = msgspec.json.decode(inspect(run, "second-0", "--json"), type=EpisodeView)
    assert (view.step, view.training_recorded, view.drift_rate) == (2, True, 0.5)
    assert view.drift == Drift(turns=3, continued=2, repaired=1, drifted=1)


def test_the_page_is_written_to_the_file(run, tmp_path):
    assert inspect(run, "second-0", "--html", tmp_path / "e.html") == ""
    assert "second-0" in (tmp_path / "e.html").read_text()
    refused = CliRunner().invoke(main, ["inspect", str(run), "--html", str(tmp_path / "x.html")])
    assert refused.exit_code == 1
    assert "which EPISODE" in refused.output


def test_an_episode_that_is_not_there_or_not_meant_alone_is_refused(run):
    with pytest.raises(EpisodeError, match="no trained episode"):
        find_episode(RunFolder(run), "main", "nowhere", spoken)
    with pytest.raises(EpisodeError, match="beginning of 2 episodes"):
        find_episode(RunFolder(run), "main", "first", spoken)
