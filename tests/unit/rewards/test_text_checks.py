# ruff: noqa: RUF001 - text in many scripts
"""Repetition and nonsense, and what is neither in any script."""

import pytest

from swarmq.rewards import TextChecks, loops, nonsense_share, repeated_share
from swarmq.rewards.text_checks import split_units

PROSE = {
    "english": "The quick brown fox jumps over the lazy dog, and then it goes on to sleep beneath an old oak tree.",
    "chinese": "今天天气很好，我们一起去公园散步，然后在湖边的小店里喝了一杯热茶，聊了很多有趣的事情。",
    "japanese": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。",
    "arabic": "كان يا ما كان في قديم الزمان ملك عادل يحكم مدينة كبيرة على شاطئ البحر ويحبه جميع الناس.",
    "hebrew": "בראשית ברא אלהים את השמים ואת הארץ והארץ היתה תהו ובהו וחשך על פני תהום",
    "thai": "วันนี้อากาศดีมากเราจึงไปเดินเล่นที่สวนสาธารณะด้วยกัน",
    "hindi": "एक समय की बात है कि एक गाँव में एक किसान रहता था जो बहुत मेहनती था।",
    "emoji": "👩‍👩‍👧‍👦 went to 🇩🇪 by 🚂, then ✈️ to 🇯🇵 🏳️‍🌈 and said 👍🏽👋🏿🎉",
    "code": "def f(xs):\n    for x in xs:\n        if x > 0:\n            yield x * 2\n        else:\n            yield -x\n\n\nclass A:\n    def __init__(self):\n        self.a = {}\n        self.b = []\n",
    "maths": "∀ε>0 ∃δ>0: |x−a|<δ ⇒ |f(x)−f(a)|<ε, so ∫₀¹ x² dx = ⅓ ≈ 0.333",
    "table": "| a | 1 | 2 |\n|---|---|---|\n| b | 3 | 4 |\n|---|---|---|\n| c | 5 | 6 |\n",
}


@pytest.mark.parametrize("name", PROSE)
def test_honest_text_of_any_script_is_neither(name):
    checks = TextChecks(max_repeated=0.2, max_nonsense=0.0, no_loops=True)
    assert checks.problem(PROSE[name]) == ""


@pytest.mark.parametrize("name", PROSE)
def test_text_over_and_over_is_repetition_in_any_script(name):
    assert repeated_share(f"{PROSE[name]}\n" * 12) > 0.6
    assert loops(f"{PROSE[name]}\n" * 12)


@pytest.mark.parametrize("text", ["no no no " * 10, "哈" * 40, "🎉" * 40, "ها ها " * 20, "a b " * 20 + "a"])
def test_a_loop_at_the_end_is_seen_whatever_came_before(text):
    assert loops(PROSE["english"] + " " + text)
    assert not loops(text + " " + PROSE["english"])


def test_an_emoji_with_its_modifiers_and_both_ways_of_an_accent_are_one_unit():
    assert split_units("👩‍👩‍👧‍👦 👍🏽 🇩🇪 1️⃣")[:3] == ["👩‍👩‍👧‍👦", "👍🏽", "🇩🇪"]
    assert split_units("caf\u00e9 don't") == split_units("cafe\u0301 DON'T") == ["caf\u00e9", "don't"]
    assert split_units("我是cat猫") == ["我", "是", "cat", "猫"]


@pytest.mark.parametrize("text", ["\ufffd" * 5, "ok\x00\x01\x02", "\ue000\ue001", "\ud800"])
def test_what_nobody_writes_is_nonsense(text):
    assert nonsense_share(text) > 0.3
    assert TextChecks(max_nonsense=0.1).problem(text).startswith("nonsense")


def test_everything_is_off_by_default():
    assert TextChecks().problem("\ufffd" * 100 + "la " * 1000) == ""
    assert (repeated_share(""), nonsense_share(""), loops("")) == (0.0, 0.0, False)
