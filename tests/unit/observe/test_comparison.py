"""A replay beside the original is a page, JSON lines and a figure, and says that it is off-policy."""

import msgspec
import pytest

from swarmq.learner.replay import Comparison, ReplayedStep, StepDiagnostics
from swarmq.observe.comparison import describe_step, explain, make_panels, write_comparison


def diagnostics(**fields):
    plain = {
        "loss": 1.0,
        "kl_k3": 0.5,
        "effective_samples": 0.9,
        "entropy": 2.0,
        "grad_norm": 3.0,
        "weighted_reward": 0.6,
    }
    return StepDiagnostics(**{**plain, "reward": 0.5, "tokens_trained": 10, **fields})


def step(version, *, cosine=0.5, **fields):
    return ReplayedStep(
        version=version, original=diagnostics(), replayed=diagnostics(**fields), distance=0.125 * version,
        original_moved=1.0, replayed_moved=2.0, cosine=cosine,
    )  # fmt: skip


@pytest.fixture
def comparison():
    steps = step(11, loss=1.5), step(12, loss=float("inf"), effective_samples=0.05, skipped="gradient_not_finite")
    return Comparison(policy="main", changes=("train.loss.name: a -> b",), steps=steps, groups_missing=3)


def test_a_line_has_both_values_of_every_diagnostic():
    assert describe_step(step(11, loss=1.5)) == (
        "step 11: loss 1 / 1.5, KL to sampler 0.5 / 0.5, effective samples 0.9 / 0.9, entropy 2 / 2, gradient norm 3 / 3, "
        "ratio-weighted reward 0.6 / 0.6, weight distance 1.38"
    )


def test_page_lines_and_figure_are_written(comparison, tmp_path):
    page, lines, figure = write_comparison(tmp_path, comparison)
    text = page.read_text()
    assert "| 11 | 1 / 1.5 |" in text
    assert all(f"- {note}" in text for note in explain(comparison))
    assert [msgspec.json.decode(line)["version"] for line in lines.read_bytes().splitlines()] == [11, 12]
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_it_says_what_it_does_not_show(comparison):
    notes = " ".join(explain(comparison))
    assert "off-policy" in notes
    assert "47.5% of the tokens as effective samples, so later steps say little" in notes
    assert "3 groups with equal rewards are missing" in notes
    assert "12 (gradient_not_finite)" in notes


def test_numbers_that_are_not_finite_are_left_out_of_the_figure(comparison):
    panels = {panel.title: {curve.label: curve.steps for curve in panel.curves} for panel in make_panels(comparison)}
    assert panels["loss"] == {"original": [11, 12], "replayed": [11]}
    assert set(panels["distances of weights (L2)"]) == {"weight distance", "original moved", "replayed moved"}
    still = msgspec.structs.replace(comparison, steps=(step(11, cosine=None),))
    assert "cosine of movements" not in {panel.title for panel in make_panels(still)}
