"""No figure in the README or the docs that no file holds."""

import json
import subprocess

import pytest
from benchmarks.report import RESULTS
from benchmarks.tables.render import CITED, PAGES, ROOT, quotable, render

MADE = {"hardware": "h", "command": "c", "commit": "0123456789ab", "date": "2026-01-02T03:04:05+00:00"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_say_what_the_result_files_say(page):
    text = page.read_text()
    assert render(text) == text, "run `python -m benchmarks.tables`"


@pytest.mark.parametrize(("page", "name", "sentence"), CITED, ids=lambda value: str(value)[:40])
def test_a_figure_in_a_sentence_is_that_of_its_result_file(page, name, sentence):
    record = json.loads((RESULTS / f"{name}.json").read_text())
    assert sentence.format(**quotable(record)) in " ".join((ROOT / page).read_text().split())


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_names_a_commit_that_there_is(path):
    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("no whole history here")
    commit = json.loads(path.read_text())["commit"].removesuffix("+")
    assert git("cat-file", "-e", f"{commit}^{{commit}}").returncode == 0, f"{commit} is in no branch: measure again"


def test_a_changed_figure_changes_the_table(tmp_path):
    text = "before\n<!-- figures: all -->\nold\n<!-- end of figures -->\nafter"
    record = MADE | {"figures": {"speedup": 5.5}}
    (tmp_path / "wire.json").write_text(json.dumps(record))
    first = render(text, tmp_path)
    assert "`speedup` | 5.5" in first
    assert "old" not in first
    (tmp_path / "wire.json").write_text(json.dumps(record | {"figures": {"speedup": 6.5}}))
    assert render(first, tmp_path) != first


def test_a_headline_says_of_which_commit_and_when_it_was_measured(tmp_path):
    text = "<!-- figures: headlines -->\n<!-- end of figures -->\n"
    record = MADE | {"figures": {"families_trained": 5.0, "logprob_max_abs": 2e-5}}
    (tmp_path / "oracle.json").write_text(json.dumps(record))
    assert "| 5; 2e-05 | h | 0123456789ab, 2026-01-02 |" in render(text, tmp_path)


def test_the_matrix_has_a_row_for_every_version(tmp_path):
    text = "<!-- figures: matrix -->\n<!-- end of figures -->\n"
    assert "Not measured" in render(text, tmp_path)
    figures = {"injections": 3, "episodes_ended": 40, "lost": 0, "twice": 0, "hangs": 0, "longest_stall_s": 2.25}
    runs = [{"rabbitmq": version, "figures": figures, "passed": 9, "failed": 1} for version in ("3.10.8", "4.0.5")]
    record = MADE | {"figures": {}, "detail": {"runs": runs}}
    (tmp_path / "faults_matrix.json").write_text(json.dumps(record))
    assert "| 4.0.5 | 3 | 40 | 0 | 0 | 0 | 2.2 s | 9 | 1 |" in render(text, tmp_path)


def test_parsing_has_a_row_for_every_answer_and_way(tmp_path):
    text = "<!-- figures: derender -->\n<!-- end of figures -->\n"
    assert render(text, tmp_path) == text
    told = {"portions": 9, "parsing_s": 0.5, "longest_gap_s": 0.25, "wait_p50_ms": 3.0}
    figures = {f"{key}_both_{way}": value for key, value in told.items() for way in ("eager", "paced")}
    detail = {"tokens": 10, "rate": 5.0, "answers": ["both"]}
    record = MADE | {"figures": figures, "detail": detail}
    (tmp_path / "derender.json").write_text(json.dumps(record))
    assert "| both | as the proxy does | 9 | 0.50 s | 0.25 s | 3.0 ms |" in render(text, tmp_path)


def test_clients_have_a_row_for_every_protocol_also_where_they_fail(tmp_path):
    text = "<!-- figures: clients -->\n<!-- end of figures -->\n"
    assert render(text, tmp_path) == text
    row = {"client": "c", "version": "1.2", "protocol": "chat", "run": "tools", "calls": 3, "turns": 3, "equal": 2}
    detail = {"rows": [row | {"result": "unequal: 1 answer"}, row | {"protocol": "messages", "result": "a | b"}]}
    (tmp_path / "clients.json").write_text(json.dumps(MADE | {"figures": {}, "detail": detail}))
    made = render(text, tmp_path)
    assert "| c | 1.2 | chat | tools | 3 | 3 | 2 | unequal: 1 answer |" in made
    assert "| c | 1.2 | messages | tools | 3 | 3 | 2 | a \\| b |" in made


def test_the_oracle_has_a_row_for_every_family_also_for_those_that_do_not_load(tmp_path):
    text = "<!-- figures: oracle -->\n<!-- end of figures -->\n"
    assert render(text, tmp_path) == text
    trained = {"layouts": "rows, trees", "logprob_max": 2e-6, "grad_rel": 3e-6, "largest_logit": 101.5}
    families = {
        "gemma2, logits of 100": trained | {"engine_max": 4e-6, "engine": "Gemma2ForCausalLM"},
        "moshi": {"reason": "vLLM does not serve it: no such architecture"},
    }
    record = {"hardware": "h", "command": "c", "commit": "a", "versions": {"vllm": "0.32"}, "figures": {}}
    (tmp_path / "oracle.json").write_text(json.dumps(record | {"detail": {"families": families}}))
    made = render(text, tmp_path)
    assert "| `gemma2`, logits of 100 | rows, trees | 2.0e-06 | 3.0e-06 | 4.0e-06 | Gemma2ForCausalLM | 102 |" in made
    assert "| `moshi` | - | - | - | - | vLLM does not serve it: no such architecture | - |" in made


def test_a_model_that_trains_has_its_differences_and_any_other_the_reason(tmp_path):
    text = "<!-- figures: models -->\n<!-- end of figures -->\n"
    assert render(text, tmp_path) == text
    row = {"family": "f", "date": "2026-01-02", "vllm": "0.32", "transformers": "5.1", "loaded": True, "served": True}
    equal = {"layouts": "rows, trees", "engine_max": 1e-6, "engine_k3": 2e-9, "grad_rel": 3e-7}
    models = {
        "A": row | equal | {"trained": True, "pushed_max": 4e-6, "pushed_k3": 5e-9},
        "B": row | {"trained": False, "by": "vLLM", "reason": "no | yes"},
    }
    (tmp_path / "models.json").write_text(json.dumps(MADE | {"figures": {}, "detail": {"models": models}}))
    made = render(text, tmp_path)
    assert "| A | `f` | rows, trees | 1.0e-06 | 2.0e-09 | 3.0e-07 | 4.0e-06 | 5.0e-09 | 2026-01-02, 0.32, 5.1 |" in made
    assert "| B | `f` | yes | yes | - | vLLM: no / yes | 2026-01-02, 0.32, 5.1 |" in made


def test_the_loop_says_medians_and_means_and_what_was_dropped(tmp_path):
    text = "<!-- figures: loop -->\n<!-- end of figures -->\n"
    phases = {phase: {"samples": [0.5, 0.5, 5.0]} for phase in ("wait_s", "train_s", "push_s", "pause_s", "step_s")}
    steps = [{"episodes": 6, "dropped": {"stale": 1, "group_too_small": 3}, "mfu": mfu} for mfu in (0.1, 0.3)]
    detail = {"phases": phases, "steps": steps, "staleness": {"3": 9, "4": 3}}
    names = ("pause_1p7b_s", "train_1p7b_s", "gpu_idle_share_1p7b")
    rates = {"sampled_tokens_per_s_1p7b": 10.0, "trained_tokens_per_s_1p7b": 12.0}
    record = {"figures": dict.fromkeys(names, 0.25) | rates, "detail": {"1.7b": detail}}
    (tmp_path / "loop_h200.json").write_text(json.dumps(record))
    made = render(text, tmp_path)
    assert "| steps measured (waited over 1 s) | 3 (1) |" in made
    assert "| waiting for episodes: median, mean | 0.50, 2.00 s |" in made
    assert "| staleness of what was trained, mean | 3.2 |" in made
    assert "| of the episodes, dropped as stale | 10.0% |" in made
    assert "| MFU of training, mean | 0.20 |" in made


def test_the_loop_has_a_column_for_what_is_measured_as_shipped(tmp_path):
    text = "<!-- figures: loop -->\n<!-- end of figures -->\n"
    phases = {phase: {"samples": [0.5]} for phase in ("wait_s", "train_s", "push_s", "pause_s", "step_s")}
    detail = {"phases": phases, "steps": [{"episodes": 6, "dropped": {}, "mfu": 0.1}], "staleness": {"3": 9}}
    names = ("pause_1p7b_s", "train_1p7b_s", "gpu_idle_share_1p7b")
    for name, rate, waited in (("loop_h200", 10.0, []), ("loop_as_shipped_h200", 8.0, [2.5, 3.0])):
        rates = {"sampled_tokens_per_s_1p7b": rate, "trained_tokens_per_s_1p7b": rate}
        own = {"1.7b": detail | {"training_waited_for_checkpoints_s": waited}}
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"figures": dict.fromkeys(names, 0.25) | rates, "detail": own})
        )
    made = render(text, tmp_path)
    assert "|  | 1.7 B | 1.7 B as shipped |" in made
    assert "| tokens/s sampled | 10 | 8 |" in made
    assert "1.7 B as shipped: training waited 2.5 and 3.0 s for its 2 checkpoints." in made


def test_scaling_has_a_row_for_each_way_to_hold_layers(tmp_path):
    text = "<!-- figures: scaling -->\n<!-- end of figures -->\n"

    def ran(tokens: int) -> dict[str, object]:
        return {"tokens": tokens, "seconds": {"median": 2.0}, "peak_gib": 70.4}

    detail = {"ranks_1": ran(100), "fsdp2_4b_ranks_1": ran(40), "ddp_4b_ranks_1": ran(40)}
    detail |= {"ranks_2": ran(190), "fsdp2_4b_ranks_2": ran(76), "ddp_4b_ranks_2": ran(72)}
    figures = {"fsdp2_efficiency_2": 0.95, "fsdp2_4b_efficiency_2": 0.951, "ddp_4b_efficiency_2": 0.9}
    (tmp_path / "scaling_h200.json").write_text(json.dumps({"figures": figures, "detail": detail}))
    made = render(text, tmp_path)
    assert made.count("| 1 |") == 2  # GPU of each model, however many ways beside it
    assert "| 1.7 B | 2 | gathered once a step | 2.00 | 95 | 0.95 | 70 |" in made
    assert "| 4 B | 2 | whole on each GPU | 2.00 | 36 | 0.90 | 70 |" in made


def test_a_peer_is_compared_by_what_was_sampled_where_a_backlog_was_trained(tmp_path):
    text = "<!-- figures: trl -->\n<!-- end of figures -->\n<!-- figures: headlines -->\n<!-- end of figures -->\n"

    def sampling(rate: float) -> str:
        ours = {"samples_per_s": 6, "tokens_per_s": 300, "step_s": 1.0, "figures": {"sampled_tokens_per_s": rate}}
        theirs = {"samples_per_s": 2, "tokens_per_s": 100, "step_s": 3.0}
        figures = {"samples_per_s_ratio": 3.0, "tokens_per_s_ratio": 3.0}
        record = MADE | {"figures": figures, "detail": {"swarmq": ours, "trl": theirs}}
        (tmp_path / "trl_h200.json").write_text(json.dumps(record))
        return render(text, tmp_path)

    assert "which is what lasts, it is 2.50" in sampling(250)
    assert "3.00x; 2.50x" in sampling(250)
    assert "backlog" not in sampling(300)
