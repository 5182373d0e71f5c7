"""The tables of README and docs, made from `results/*.json`: `python -m benchmarks.tables` writes, a test compares."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import gpu_sizing, scaling
from benchmarks.report import RESULTS
from benchmarks.tables import learning
from benchmarks.tables.common import ends, table
from benchmarks.track.figures import FIGURES
from benchmarks.track.record import SIGMAS, TOLERANCE, compare, read_lines, read_noise

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "examples" / "README.md",
    *(
        ROOT / "docs" / f"{page}.md"
        for page in (
            "tutorials/demo",
            "explanation/faults",
            "explanation/proxy",
            "explanation/scaling",
            "how-to/black-box-agents",
            "how-to/dashboard",
            "how-to/gpu-sizing",
            "how-to/swarm",
            "explanation/learning/families",
            "explanation/learning/losses",
            "explanation/learning/memory",
            "explanation/learning/rows-and-trees",
            "explanation/learning/several-gpus",
            "explanation/learning/whole-loop",
            "reference/dialects",
            "reference/figures",
            "reference/models",
            "reference/track",
        )
    ),
)
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

HEADLINES = (
    ("faults injected; finished episodes lost, trained twice; turns trained although no agent received their answer", "faults", "{injections:.0f}; {lost:.0f}, {twice:.0f}; {unseen}"),
    ("`from swarmq import SwarmClient`", "demo", "{client_import_s:.2f} s"),
    ("from an edited reward function to its first traceback", "demo", "{edit_to_traceback_s:.2f} s"),
    ("chats of 10, 20, 30 turns, 1.7 B: speed-up of folded timelines over one row per turn", "timelines_h200", "{speedup_linear_10:.1f}x, {speedup_linear_20:.1f}x, {speedup_linear_30:.1f}x"),
    ("episodes that fork, 1.7 B: speed-up of trees over one row per turn; of packed rows", "timelines_h200", "{speedup_forks:.1f}x; {speedup_forks_rows:.1f}x"),
    ("learner alone, 1.7 B with FlashAttention 4, 4 B with FlexAttention: model FLOPs per second over the GPU's measured matrix rate", "learner_h200", "{mfu_1p7b_2k:.2f}, {mfu_4b_2k:.2f}"),
    ("learner alone, 1.7 B, 4 B: speed-up over plain transformers, at least", "learner_h200", "{over_baseline_1p7b:.1f}x, {over_baseline_4b:.1f}x"),
    ("model families compared in FP32 with a float64 oracle; largest difference of a log-probability", "oracle", "{families_trained:.0f}; {logprob_max_abs:.0e}"),
    ("whole loop on one GPU, 1.7 B, 4 B: pause of engines for a weight push (median); share of time with an idle GPU", "loop_h200", "{pause_1p7b_s:.2f}, {pause_4b_s:.2f} s; {gpu_idle_share_1p7b:.2f}, {gpu_idle_share_4b:.2f}"),
    ("speed over TRL's GRPO trainer with vLLM, same GPU, same run: episodes trained per second; tokens sampled per second", "trl_h200", "{samples_per_s_ratio:.2f}x; {tokens_per_s_ratio_sampled:.2f}x"),
    ("speed over verl 0.9.1 in its modes `sync` and `colocate_async`, multi-turn, 1.7 B, on the same GPU: episodes trained per second; episodes sampled per second", "peers_h200", "{verl_sync_ratio:.2f}x, {verl_async_ratio:.2f}x; {verl_sync_ratio_sampled:.2f}x, {verl_async_ratio_sampled:.2f}x"),
    ("time that one proxy process adds to the first token, at 1, 64, 512, 2,000 streams (median)", "proxy", "{added_first_p50_ms_1:.1f}, {added_first_p50_ms_64:.1f}, {added_first_p50_ms_512:.1f}, {added_first_p50_ms_2000:.1f} ms"),
    ("requests per second over LiteLLM's proxy, which records nothing", "proxy", "{over_litellm:.1f}x"),
    ("dashboard of a run of 100,000 episodes: index, once; first page of episodes after it; memory; what a browser loads", "dashboard", "{index_s_100k:.0f} s; {first_view_s_100k:.1f} s; {rss_mb:.0f} MB; {bundle_kb_gz:.0f} kB"),
)  # fmt: skip
"""What a reader of the README wants to know first: words, result, figures."""
CITED: tuple[tuple[str, str, str], ...] = (
    ("docs/explanation/proxy.md", "columns", "takes vLLM's own code {write_ms_stock:.0f} ms of a core, and {write_ms_columns:.1f} ms in columns"),
    ("docs/explanation/proxy.md", "proxy_h200", "get {throughput_over_direct_logprobs_256:.2f} times the tokens that vLLM gives when it is asked directly"),
    ("docs/explanation/proxy.md", "proxy_h200", "and {throughput_over_direct_256:.2f} times those of text alone"),
    ("docs/explanation/proxy.md", "proxy_h200", "single rounds lie between {low[ratio][direct_logprobs]:.2f} and {high[ratio][direct_logprobs]:.2f}, and between {low[ratio][direct]:.2f} and {high[ratio][direct]:.2f}"),
    ("docs/explanation/proxy.md", "proxy", "takes {low[call_ms]:.0f} to {high[call_ms]:.0f} ms of its core where many are open"),
    ("docs/explanation/proxy.md", "proxy_h200", "a token of a fast stream {token_ms[proxy][proxies]:.2f} ms"),
    ("docs/explanation/learning/adapters.md", "moe_routing", "choose other experts for {rerouted_share:.0%} of the tokens of a layer, and k3 is {k3_without:.1e} without replay and {k3_with:.1e} with it"),
    ("docs/explanation/learning/adapters.md", "moe_routing", "In whole runs of {seeds:.0f} seeds on a toy task, the reward rose to {reward_after_with:.2f} (median) with replay and {reward_after_without:.2f} without"),
    ("docs/explanation/learning/weights.md", "proxy_h200", "each needs {token_ms[direct][API servers]:.2f} to {token_ms[direct_logprobs][API servers]:.2f} ms for a token"),
    ("docs/explanation/studies.md", "studies", "After {kills:.0f} kills, {results_lost:.0f} results were lost and {results_twice:.0f} counted twice, no cap was exceeded, and the reports were equal to the byte"),
    ("docs/how-to/laptop.md", "host", "Of {jobs:.0f} scripted runs, {runs_lost:.0f} were lost in {kills:.0f} kills of daemons and runs"),
    ("docs/explanation/learning/weights.md", "demo_keep_cache", "the demo learned on {seeds:.0f} seeds with a kept cache as it does without: from {reward_before_max:.2f} at most to {reward_after_min:.2f} at least"),
    ("docs/explanation/learning/weights.md", "fp8_h200", "differs from the learner by a k3 of {k3_small_fp8:.1e}, with an FP8 cache {k3_small_fp8_cache:.1e}, and by a BF16 engine {k3_small_plain:.1e}"),
    ("docs/explanation/learning/weights.md", "fp8_h200", "the held-out reward after 48 steps was {detail[reward_after][fp8][0]:.2f} and {detail[reward_after][fp8][1]:.2f} with an FP8 engine, and {detail[reward_after][bf16][0]:.2f} and {detail[reward_after][bf16][1]:.2f} with a BF16 engine"),
    ("docs/explanation/learning/weights.md", "fp8_h200", "an FP8 engine sampled {ratio_large_fp8:.2f} times and one with an FP8 cache too {ratio_large_fp8_cache:.2f} times"),
    ("docs/explanation/learning/weights.md", "spec_h200", "got {tokens_ratio:.2f} times the tokens with drafts (three rounds), and {tokens_ratio_again:.2f} times in another run"),
    ("docs/explanation/learning/weights.md", "spec_h200", "vLLM's own drafts gave {tokens_ratio_small_vllm_gpu:.2f} times"),
    ("docs/explanation/learning/weights.md", "spec_h200", "by at most {logprob_max_abs:.3f} nats with drafts"),
    ("docs/explanation/learning/weights.md", "spec_h100", "and by at most {logprob_max_abs_plain:.3f} without"),
    ("docs/explanation/learning/weights.md", "spec_files_h200", "got {tokens_ratio:.2f} times the tokens with drafts, {tokens_ratio_first_round:.2f} times in the round before"),
    ("docs/explanation/learning/weights.md", "spec_files_h200", "in each step from the same conversation, gave {tokens_ratio_small_vllm_gpu:.2f} times"),
    ("docs/explanation/learning/weights.md", "hosts_push", "takes {delta_share_large_1e-06:.1%} of the bytes of the BF16 weights, at 1e-5 {delta_share_large_1e-05:.1%}, and the whole weights take {whole_share_large:.0%}"),
    ("docs/explanation/learning/weights.md", "hosts_push", "a difference takes {push_s_1gbit_1ms_delta:.1f} s and the whole weights {push_s_1gbit_1ms_whole:.1f} s at 1 Gbit/s"),
    ("docs/explanation/learning/checkpoints.md", "checkpoints_cpu", "training waits {waited_s:.2f} s for a copy, where writing took {waited_at_once_s:.2f} s"),
    ("docs/explanation/learning/checkpoints.md", "loop_as_shipped_h200", "still waited for the files, {detail[1.7b][training_waited_for_checkpoints_s][0]:.0f} s for 1.7 B"),
    ("docs/explanation/learning/whole-loop.md", "loop_limit_h200", "one of the six steps took {longest_step_s:.1f} and"),
    ("docs/explanation/learning/whole-loop.md", "loop_limit_h200", "Without it a step takes {loop_over_sum_without_the_longest_step:.2f} and"),
    ("docs/explanation/learning/whole-loop.md", "loop_limit_keep_cache_h200", "and {longest_step_s:.1f} s, 1.8 and 2.6 times the mean"),
    ("docs/explanation/learning/whole-loop.md", "loop_limit_keep_cache_h200", "and {loop_over_sum_without_the_longest_step:.2f} of the sum"),
    ("docs/explanation/learning/whole-loop.md", "loop_limit_keep_cache_mps_learner_low_h200", "so together they take {loop_over_sum:.2f} of their sum, or {loop_over_sum_by_proxy:.2f} with"),
    ("docs/explanation/learning/whole-loop.md", "engine_profile_h200", "has {busy_ms:.1f} ms of kernels in a step of {step_ms:.1f} ms: attention takes {detail[kinds][attention]:.1f} ms ({share_attention:.0%}), matrix"),
    ("docs/explanation/learning/whole-loop.md", "engine_profile_h200", "products {detail[kinds][matrix products]:.1f} ms, and sampling with log-probabilities {detail[kinds][sampling and log-probabilities]:.1f} ms"),
    ("docs/explanation/proxy.md", "proxy_latency", "| {added_first_p50_ms_512:.1f} and {added_first_p99_ms_512:.1f} ms |"),
    ("docs/explanation/proxy.md", "proxy_latency", "nothing: {added_whole_p50_ms_512:.0f} and {added_whole_p99_ms_512:.0f} ms"),
    ("docs/explanation/learning/whole-loop.md", "peers_h200", "it sampled {sampled_per_s_swarmq_gpu_0:.2f} and {sampled_per_s_swarmq_gpu_1:.2f} episodes a second, which is {verl_sync_ratio_sampled:.2f} times what verl trained in `sync`, {verl_async_ratio_sampled:.2f} times `colocate_async` and {trl_tuned_ratio_sampled:.2f} times TRL"),
    ("docs/explanation/learning/whole-loop.md", "peers_h200", "trained {samples_per_s_swarmq_keep_cache_starts_low:.1f} to {samples_per_s_swarmq_keep_cache_starts_high:.1f} episodes a second and sampled {sampled_per_s_swarmq_keep_cache_starts_low:.1f} to {sampled_per_s_swarmq_keep_cache_starts_high:.1f}, with the GPU idle for {gpu_idle_share_keep_cache_starts:.0%} of the time"),
    ("docs/explanation/learning/whole-loop.md", "peers_h200", "the MFU of its training was {mfu_in_loop:.2f}: sampling"),
    ("docs/explanation/learning/whole-loop.md", "peers_h200", "Of a step of {detail[gpu_0][swarmq][step_s]:.1f} and {detail[gpu_1][swarmq][step_s]:.1f} s, swarmq's learner waited {detail[gpu_0][swarmq][figures][wait_s]:.1f} and {detail[gpu_1][swarmq][figures][wait_s]:.1f} s (median)"),
    ("docs/explanation/comparison.md", "peers_h200", "swarmq trained {verl_sync_ratio:.1f} times the episodes of verl 0.9.1 and {trl_tuned_ratio:.1f} times those of TRL 1.16.0"),
    ("docs/explanation/learning/weights.md", "spec_files_h100", "agents that write files got {tokens_ratio:.2f} times (two rounds)"),
    ("docs/explanation/learning/weights.md", "spec_h100", "those with short calls {tokens_ratio:.2f} times (four rounds)"),
    ("docs/explanation/learning/weights.md", "spec_files_h100", "gave {tokens_ratio_small_vllm_gpu:.2f} and"),
    ("docs/explanation/learning/weights.md", "spec_h100", "and {tokens_ratio_small_vllm_gpu:.2f} times (`spec_files_h100`"),
    ("docs/explanation/learning/weights.md", "spec_h100", "sampled {detail[tokens_per_s][large_ngram][0]:,.0f}, {detail[tokens_per_s][large_ngram][1]:,.0f}, {detail[tokens_per_s][large_ngram][2]:,.0f} and {detail[tokens_per_s][large_ngram][3]:,.0f} tokens/s in four rounds"),
    ("docs/explanation/learning/weights.md", "spec_h100", "and {detail[tokens_per_s][large_plain][0]:,.0f}, {detail[tokens_per_s][large_plain][1]:,.0f}, {detail[tokens_per_s][large_plain][2]:,.0f} and {detail[tokens_per_s][large_plain][3]:,.0f} without"),
    ("docs/explanation/learning/weights.md", "spec_h100", "{tokens_ratio_large:.2f} times as many by"),
    ("docs/explanation/learning/whole-loop.md", "loop_limit_keep_cache_fp8_cache_mps_learner_low_h100", "both take {loop_over_sum_by_proxy:.2f} of their sum with"),
    ("docs/explanation/learning/whole-loop.md", "loop_limit_keep_cache_fp8_cache_mps_learner_low_h100", "vLLM asked directly it is {loop_over_sum:.2f}"),
    ("docs/explanation/learning/whole-loop.md", "peers_h100", "On H100 0 and 1 swarmq trained {verl_async_ratio_keep_cache_gpu_0:.2f} and {verl_async_ratio_keep_cache_gpu_1:.2f} times the episodes of `colocate_async`, and sampled {verl_async_ratio_keep_cache_gpu_0_sampled:.2f} and {verl_async_ratio_keep_cache_gpu_1_sampled:.2f} times"),
    ("docs/explanation/learning/whole-loop.md", "peers_h100", "the ratios are {verl_async_ratio_keep_cache_of_eight_steps_gpu_0:.2f} and {verl_async_ratio_keep_cache_of_eight_steps_gpu_1:.2f} trained, and {verl_async_ratio_keep_cache_of_eight_steps_gpu_0_sampled:.2f} and {verl_async_ratio_keep_cache_of_eight_steps_gpu_1_sampled:.2f} sampled"),
    ("docs/explanation/learning/whole-loop.md", "peers_h100", "On H100 2 swarmq trained {verl_sync_ratio_keep_cache:.2f} times the episodes of `sync` and sampled {verl_sync_ratio_keep_cache_sampled:.2f} times as many; with MPS {verl_sync_ratio_mps:.2f} and {verl_sync_ratio_mps_sampled:.2f}"),
    ("docs/explanation/comparison.md", "peers_h100", "it trained {verl_async_ratio_keep_cache_of_eight_steps_gpu_0:.1f} to {verl_sync_ratio_keep_cache:.1f} times the episodes of verl on H100s, also from a backlog, and sampled {verl_async_ratio_keep_cache_of_eight_steps_gpu_0_sampled:.1f} to {verl_sync_ratio_keep_cache_sampled:.1f} times"),
    ("CHANGELOG.md", "peers_h100", "trains {verl_async_ratio_keep_cache_of_eight_steps_gpu_0:.2f} to {verl_sync_ratio_keep_cache:.2f} times as many as verl on H100s, and samples {verl_async_ratio_keep_cache_of_eight_steps_gpu_0_sampled:.2f} to {verl_sync_ratio_keep_cache_sampled:.2f} times"),
    ("CHANGELOG.md", "spec_files_h200", "{tokens_ratio:.2f} times the tokens a second"),
    ("CHANGELOG.md", "start", "{gpu_second_s:.0f} s instead of {gpu_second_before_s:.0f} s with 1.7 B on one H100, one start each, and in later runs {gpu_second_h200_s:.0f} s on an H200 and {gpu_second_busy_h100_s:.0f} s on an H100"),
    ("CHANGELOG.md", "peers_h200", "swarmq trains {verl_async_ratio:.2f} to {trl_tuned_ratio:.2f} times as many episodes a second, and samples {verl_sync_ratio_sampled:.2f} to {trl_tuned_ratio_sampled:.2f} times"),
    ("docs/how-to/move-from-verl.md", "peers_h200", "| {samples_per_s_verl_sync_bypass:.1f} episodes/s in `sync` and in `colocate_async` | {samples_per_s_swarmq_gpu_0:.1f} and {samples_per_s_swarmq_gpu_1:.1f}, [on staler"),
    ("docs/explanation/learning/rows-and-trees.md", "timelines_h200", "log-probabilities agree within {worst[oracle_logprob_max_abs]} and the whole gradient within {worst[oracle_grad_rel]} in FP32"),
    ("docs/explanation/learning/rows-and-trees.md", "timelines_h200", "trees reach {tree_over_flop_ratio_think_stripped_10:.2f} (short histories without thoughts) to {tree_over_flop_ratio_prompt_1k:.1f} of what they save"),
    ("docs/explanation/learning/memory.md", "learner_h200", "of {detail[precisions_8b][fp8_2k][kernels_s][all]:.1f} s in kernels, its products take {detail[precisions_8b][fp8_2k][kernels_s][fp8_products]:.1f} s (in BF16 {detail[precisions_8b][bf16_2k][kernels_s][other_products]:.1f} s with the head's, of {detail[precisions_8b][bf16_2k][kernels_s][all]:.1f} s), and kernels that find scales or cast factors to FP8 take {detail[precisions_8b][fp8_2k][kernels_s][scales_and_casts]:.1f} s"),
    ("docs/explanation/learning/memory.md", "learner_h200", "cross-entropy averaged {loss_mean_85m_bf16:.2f} in BF16 and {loss_mean_85m_fp8:.2f} in FP8"),
    ("docs/how-to/dashboard.md", "dashboard_tokens", "In a run of {sampled_tokens:,.0f} sampled tokens, that took {index_s:.1f} s and {index_rss_mb:.0f} MB"),
    ("docs/explanation/scaling.md", "hosts_push", "took {push_s_10gbit_1ms_delta:.1f} to {push_s_10gbit_30ms_delta:.1f} s and the whole weights {push_s_1gbit_1ms_whole:.1f} to {push_s_10gbit_30ms_whole:.1f} s"),
    ("docs/explanation/faults.md", "simulation", "{schedules_per_cpu_s_one_group:,.0f} with one group, {schedules_per_cpu_s_two_groups:,.0f} to {schedules_per_cpu_s_two_policies:,.0f} with two groups"),
    ("docs/explanation/faults.md", "simulation", "{long_schedules_per_cpu_s:.0f} long ones, {long_schedules_per_cpu_s_on_disk:.0f} on the real store"),
    ("docs/explanation/faults.md", "faults_cluster", "After {injections:.0f} such faults, {episodes_ended:,.0f} episodes had ended: {lost:.0f} were lost, {twice:.0f} trained twice, and the longest time without progress was {longest_stall_s:.0f} s"),
    ("docs/explanation/faults.md", "faults_collectors", "After {injections:.0f} such faults, in 3 of which the collector was stopped instead, {episodes_ended:,.0f} episodes had ended: {lost:.0f} were lost and {twice:.0f} trained twice"),
    ("docs/explanation/faults.md", "hosts", "{episodes_ended:,.0f} episodes ended: {lost:.0f} were lost and {twice:.0f} trained twice"),
    ("docs/explanation/faults.md", "soak", "the 100,000 took {minutes:.1f} minutes"),
    ("docs/explanation/faults.md", "soak", "The proxy ended at {mib[proxy]:.0f} MiB, {rss_growth_ratio_proxy:.3f} of its size after the first tenth, the collector at {mib[collector]:.0f} MiB and {rss_growth_ratio_collector:.2f}, the learner's I/O process at {mib[learner I/O]:.0f} MiB and {rss_growth_ratio_learner:.2f}, clients at {mib[client0]:.0f} MiB and {rss_growth_ratio_client:.2f}. No process held more than {fd_growth:.0f} further open files."),
    ("docs/explanation/learning/off-policy.md", "staleness", "held-out success after the same episodes was {reward_by_bound_0:.2f}, {reward_by_bound_1:.2f}, {reward_by_bound_2:.2f}, {reward_by_bound_4:.2f} and {reward_by_bound_8:.2f}"),
    ("docs/explanation/learning/off-policy.md", "staleness", "which really were {staleness_0:.1f}, {staleness_1:.1f}, {staleness_2:.1f}, {staleness_4:.1f} and {staleness_8:.1f} on average"),
    ("docs/explanation/learning/off-policy.md", "staleness", "With `ppo_clip` it was {reward_by_bound_ppo_clip_0:.2f} and {reward_by_bound_ppo_clip_8:.2f} at the bounds 0 and 8"),
    ("docs/explanation/learning/off-policy.md", "staleness", "the last five batches of the toy model ({detail[equal_seconds]:.0f} s) had a reward of {reward_by_bound_seconds_0:.2f}, {reward_by_bound_seconds_1:.2f}, {reward_by_bound_seconds_2:.2f}, {reward_by_bound_seconds_4:.2f} and {reward_by_bound_seconds_8:.2f}"),
    ("docs/explanation/learning/off-policy.md", "staleness", "the same bounds were {staleness_gpu_0:.1f}, {staleness_gpu_1:.1f}, {staleness_gpu_2:.1f}, {staleness_gpu_4:.1f} and {staleness_gpu_8:.1f} on average. After the same episodes the held-out reward was {reward_by_bound_gpu_0:.2f}, {reward_by_bound_gpu_1:.2f}, {reward_by_bound_gpu_2:.2f}, {reward_by_bound_gpu_4:.2f} and {reward_by_bound_gpu_8:.2f} (from"),
    ("docs/explanation/learning/off-policy.md", "staleness", "({detail[gpu][equal_seconds]:.0f} s after the first batch) had {reward_by_bound_seconds_gpu_0:.2f}, {reward_by_bound_seconds_gpu_1:.2f}, {reward_by_bound_seconds_gpu_2:.2f}, {reward_by_bound_seconds_gpu_4:.2f} and {reward_by_bound_seconds_gpu_8:.2f}, after"),
    ("docs/how-to/studies.md", "studies", "In {studies_simulated:,} simulated studies of three arms without effect, t-tests after every seed claim an effect in {false_discovery_rate_naive_looks:.0%} of the studies, the e-process in {false_discovery_rate_looks:.1%}, and one t-test at the end in {false_discovery_rate:.1%}"),
    ("docs/how-to/studies.md", "studies", "found the effect in {power_seen:.0%}, where a power of {power_announced:.0%} had been announced"),
    ("docs/how-to/train-on-images.md", "vlm_cpu", "from at most {reward_before:.2f} to at least {reward_after:.2f} in {seeds:.0f} runs, and the gradient of their last batches differs from that of transformers by at most {grad_rel:.0e} of its norm"),
    ("docs/how-to/swarm.md", "swarm", "it reaches {collector_episodes_per_s:.0f} episodes a second on one core"),
    ("docs/how-to/swarm.md", "swarm", "16 workers held {held_episodes:,.0f} episodes of 30 seconds open at once (`--part hold`), {held_episodes_per_s:.0f} a second, and none was dropped"),
)  # fmt: skip
"""Figures in the midst of sentences: page, result, how the sentence goes. Names besides the figures': see `quotable`."""
DERIVED = {"faults": lambda record: {"unseen": unseen_turns(record)}, "trl_h200": learning.trl_derived}
"""Figures that are made here from what a result holds."""


def quotable(record: dict[str, Any]) -> dict[str, Any]:
    """What sentences of `CITED` may name: figures, `detail`, and what is worked out from it here."""
    detail, told = record["detail"], dict(record["figures"])
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    if ratios := detail.get("ratio"):
        low["ratio"] = {way: min(values) for way, values in ratios.items()}
        high["ratio"] = {way: max(values) for way, values in ratios.items()}
    if saturated := detail.get("saturated"):
        many = [median(row["cpu_ms_per_request"]["swarmq"]) for streams, row in saturated.items() if int(streams) > 1]
        low["call_ms"], high["call_ms"] = min(many), max(many)
    if micros := detail.get("micros_a_token"):
        told["token_ms"] = {
            way: {whose: median(row[whose] for row in rows) / 1000 for whose in rows[0]} for way, rows in micros.items()
        }
    if checked := detail.get("fp32_check"):
        told["worst"] = {key: _power(max(one[key] for one in checked.values())) for key in next(iter(checked.values()))}
    if record["name"] == "soak":
        told["minutes"] = detail["seconds"] / 60
        told["mib"] = {name: samples[-1][1] for name, samples in detail["samples"].items()}
    return told | {"detail": detail, "low": low, "high": high}


def _power(value: float) -> str:
    """6e-6, not 6e-06."""
    digits, _, power = f"{value:.0e}".partition("e")
    return f"{digits}e{int(power)}"


def render(text: str, results: Path = RESULTS) -> str:
    """`text` with every figures block made anew."""
    known = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    blocks = {
        "demo": demo_block,
        "faults": faults_block,
        "matrix": matrix_block,
        "clients": clients_block,
        "derender": derender_block,
        "dashboard": dashboard_block,
        "scale": scale_block,
        "examples": examples_block,
        "poisoned": poisoned_block,
        "coding_agents": coding_agents_block,
        "all": all_block,
        "headlines": headlines_block,
        "timelines": learning.timelines_block,
        "learner": learning.learner_block,
        "precisions": learning.precisions_block,
        "oracle": learning.oracle_block,
        "models": learning.models_block,
        "loop": learning.loop_block,
        "limit": learning.limit_block,
        "learns": learning.learns_block,
        "scaling": learning.scaling_block,
        "trl": learning.trl_block,
        "peers": learning.peers_block,
        "track": lambda _: track_block(),
        "sizing_memory": lambda _: gpu_sizing.memory_table(),
        "sizing_plans": lambda _: gpu_sizing.plan_tables(),
        **{name: partial(_growth_block, block) for name, block in scaling.BLOCKS.items()},
    }
    return BLOCK.sub(lambda found: found[1] + "".join(blocks[found[2]](known)) + found[3], text)


def _growth_block(block: Callable[[scaling.Costs], Iterator[str]], known: dict[str, Any]) -> Iterator[str]:
    return block(scaling.Costs.read(known))


def demo_block(known: dict[str, Any]) -> Iterator[str]:
    """Reward and accounts of the demo, a row for each seed."""
    if "demo" not in known:
        return
    record = known["demo"]
    yield f"\n{_origin(record)}:\n\n"
    heads = ("seed", "held-out reward before", "after", "steps", "up after", "training", "begun", "trained", "lost")

    def cells(run: dict[str, Any]) -> Iterable[Any]:
        account = run["account"]
        return (
            run["seed"],
            *(f"{reward:.3f}" for reward in ends(run["held_out"])),
            run["steps"],
            f"{run['start_s']:.0f} s",
            f"{run['train_s']:.0f} s",
            account["begun"],
            account["trained"],
            len(account["lost"]),
            len(account["twice"]),
        )

    yield from table((*heads, "trained twice"), map(cells, record["detail"]["runs"]))
    yield f"\nThe model was made in {max(run['model_s'] for run in record['detail']['runs']):.0f} s.\n\n"


def examples_block(known: dict[str, Any]) -> Iterator[str]:
    """Reward of every tutorial before and after, by seed."""
    if "examples" not in known:
        yield "\nNo tutorial has been run to its end yet.\n\n"
        return
    record = known["examples"]
    yield f"\n{_origin(record)}. Held-out reward ± standard error; the last column is the least gain that counts as learned:\n\n"

    def cells(one: dict[str, Any], row: dict[str, Any]) -> Iterable[Any]:
        points = [
            row[when] and f"{row[when]['reward']:.3f} ± {row[when]['standard_error']:.3f}"
            for when in ("before", "after")
        ]
        minutes = f"{row['minutes']:.1f} + {one['model_minutes']:.1f}"
        link = f"[{one['title']}]({one['name']}/README.md)"
        return (
            link,
            row["seed"],
            *(point or "-" for point in points),
            row["steps"],
            row["episodes"],
            minutes,
            f"{one['wanted_gain']:+.2f}",
        )

    heads = (
        "tutorial",
        "seed",
        "before",
        "after",
        "steps",
        "episodes trained",
        "minutes of the run + of making the model",
        "wanted",
    )
    yield from table(heads, [cells(one, row) for one in record["detail"]["tutorials"] for row in one["seeds"]])
    yield "\n"


def poisoned_block(known: dict[str, Any]) -> Iterator[str]:
    """Held-out reward where the environment fails, by rate and by what becomes of the failed attempts."""
    record = known["poisoned"]
    yield f"\n{_origin(record)}:\n\n"
    runs = record["detail"]["runs"]

    def cells(rate: float, way: str) -> Iterator[Any]:
        mine = sorted((run for run in runs if (run["rate"], run["way"]) == (rate, way)), key=lambda run: run["seed"])
        yield f"{rate:.0%}".replace("%", " %")
        yield {"ours": "never trained", "zero": "scored 0"}[way]
        yield ", ".join(f"{run['before']:.2f} → {run['after']:.2f}" for run in mine)
        yield sum(run["trained"] for run in mine)
        yield sum(run["killed_trained"] for run in mine)
        yield f"{min(run['seconds'] for run in mine):.0f} to {max(run['seconds'] for run in mine):.0f}"

    heads = (
        "server down",
        "failed attempts",
        "held-out reward by seed",
        "episodes trained",
        "failed among them",
        "seconds",
    )
    ways = sorted({(run["rate"], run["way"]) for run in runs})
    yield from table(heads, [cells(rate, way) for rate, way in ways])
    yield "\n"


def coding_agents_block(known: dict[str, Any]) -> Iterator[str]:
    """What each coding agent did with a scripted model."""
    record = known["coding_agents"]
    yield f"\n{_origin(record)}:\n\n"
    heads = (
        "agent",
        "version",
        "protocol",
        "task",
        "calls",
        "turns recorded",
        "answers received",
        "summaries",
        "branches",
        "result",
    )
    names = ("agent", "version", "protocol", "task", "calls", "turns", "received", "summaries", "branches", "result")
    yield from table(heads, [[row[name] for name in names] for row in record["detail"]["rows"]])
    yield "\n"


def unseen_turns(record: dict[str, Any]) -> str:
    """As the fault run counted them, which it does since it has clients that lose answers without noticing."""
    count = record["figures"].get("unseen_turns_trained")
    return "not counted" if count is None else f"{count:.0f}"


def faults_block(known: dict[str, Any]) -> Iterator[str]:
    """What came of the episodes that ended after each kind of fault."""
    if "faults" not in known:
        return
    record, detail = known["faults"], known["faults"]["detail"]
    account, weights = detail["verdict"]["account"], detail["weights"]
    yield f"\n{_origin(record)}, "
    yield f"{detail['seconds'] / 60:.0f} minutes, {sum(detail['starts'].values())} processes started:\n\n"
    heads = (
        *("fault", "injections", "episodes ended", "trained once", "twice", "lost", "unseen turns trained", "dropped"),
        "longest stall",
    )
    rows = sorted(detail["verdict"]["rows"], key=lambda row: row["fault"])

    def cells(row: dict[str, Any]) -> Iterable[Any]:
        dropped = sorted(row["dropped"].items(), key=lambda item: -item[1])
        return (
            *(row[name] for name in ("fault", "injections", "ended", "once", "twice", "lost")),
            row.get("unseen", "-"),
            ", ".join(f"{reason} {count}" for reason, count in dropped) or "-",
            f"{row['longest_stall_s']:.1f} s" if row["longest_stall_s"] else "-",
        )

    yield from table(heads, map(cells, rows))
    figures = record["figures"]
    total = (
        figures["injections"],
        account["confirmed"],
        sum(r["once"] for r in rows),
        figures["twice"],
        figures["lost"],
        unseen_turns(record),
    )
    longest_s = figures["longest_stall_s"]
    yield f"| **all** | {' | '.join(map(str, total))} | {sum(sum(r['dropped'].values()) for r in rows)} | {longest_s:.1f} s |\n\n"
    yield f"{account['begun']} episodes begun, {account['trained']} trained, {account['waiting']} waiting for a full batch at "
    yield f"the end; {figures['hangs']} hangs. Version {weights['version']} of the weights is "
    yield f"{'bit-identical to' if weights['checkpoint_equal'] else 'DIFFERENT from'} that of a replay without faults, as were "
    yield f"{weights['pushes'] - len(weights['pushes_wrong'])} of the {weights['pushes']} versions pushed to an engine.\n\n"
    for stall in detail.get("stalls", []):
        meanwhile = ", ".join(f"{fault} at {at:.0f} s" for at, fault in stall["during"]) or "no other fault"
        yield f'* {stall["seconds"]:.1f} s without progress after "{stall["before"]}"; meanwhile: {meanwhile}\n'
    yield "\n" if detail.get("stalls") else ""


def matrix_block(known: dict[str, Any]) -> Iterator[str]:
    """The fault run and the broker's tests on several versions of RabbitMQ."""
    if "faults_matrix" not in known:
        yield "\nNot measured for this version.\n\n"
        return
    record = known["faults_matrix"]
    yield f"\n{_origin(record)}:\n\n"
    heads = ("RabbitMQ", "faults", "episodes ended", "lost", "twice", "hangs", "longest stall", "tests passed")

    def cells(run: dict[str, Any]) -> Iterable[Any]:
        figures = run["figures"]
        names = ("injections", "episodes_ended", "lost", "twice", "hangs")
        return (
            run["rabbitmq"],
            *(figures[name] for name in names),
            f"{figures['longest_stall_s']:.1f} s",
            run["passed"],
            run["failed"],
        )

    yield from table((*heads, "failed"), map(cells, record["detail"]["runs"]))
    yield "\n"


def _origin(record: dict[str, Any]) -> str:
    """What made a result, of which version, where."""
    return f"`{record['command']}` of commit {record['commit']} ({record['date'][:10]}) on {record['hardware']}"


def headlines_block(known: dict[str, Any]) -> Iterator[str]:
    """The few figures to read first."""
    figures = {name: record["figures"] for name, record in known.items()}
    figures |= {name: figures[name] | derive(known[name]) for name, derive in DERIVED.items() if name in known}
    found = ((words, name, form) for words, name, form in HEADLINES if name in known)
    rows = (
        (
            words,
            form.format(**figures[name]),
            known[name]["hardware"],
            f"{known[name]['commit']}, {known[name]['date'][:10]}",
        )
        for words, name, form in found
    )
    yield "\n"
    yield from table(("what", "figure", "on", "of commit"), rows)
    yield "\n"


def scale_block(known: dict[str, Any]) -> Iterator[str]:
    """What an episode costs whom, a row for each number of workers."""
    if "swarm" not in known:
        return
    scale = known["swarm"]["detail"]["scale"]
    yield f"\n`{scale['command']}` of commit {scale['commit']} on {scale['hardware']}:\n\n"
    parts = ("broker", "collector", "proxy", "worker")
    rows = (
        (one["workers"], f"{one['episodes_per_s']:.0f}", *(f"{one['cpu_ms'][part]:.1f}" for part in parts))
        for one in scale["workers"]
    )
    yield from table(("worker processes", "episodes/s", "broker", "collector", "proxies", "workers"), rows)
    yield "\n"


def clients_block(known: dict[str, Any]) -> Iterator[str]:
    """What foreign clients were answered against what was recorded, a row for each client and protocol."""
    if "clients" not in known:
        return
    record = known["clients"]
    yield f"\n{_origin(record)}:\n\n"
    heads = ("client", "version", "protocol", "run", "calls", "turns", "equal", "result")
    rows = ([str(row[head]).replace("|", "\\|") for head in heads] for row in record["detail"]["rows"])
    yield from table(heads, rows)
    yield "\n"


def dashboard_block(known: dict[str, Any]) -> Iterator[str]:
    """What looking at a large run costs."""
    if "dashboard" not in known:
        return
    record = known["dashboard"]
    figures = record["figures"]
    yield f"\n{_origin(record)}:\n\n"
    rows = (
        ("index of a run of 100,000 episodes, built once", f"{figures['index_s_100k']:.1f} s"),
        (
            "first page of its episodes in a browser, fresh server (median of 5)",
            f"{figures['first_view_s_100k']:.2f} s",
        ),
        ("memory of the server after every view", f"{figures['rss_mb']:.0f} MB"),
        ("what a browser loads, compressed", f"{figures['bundle_kb_gz']:.0f} kB"),
        ("episodes/s of the collector with transcripts over without", f"{figures['collector_ratio_transcripts']:.3f}"),
        ("violations that axe finds in all views", f"{figures['axe_violations']:.0f}"),
    )
    yield from table(("what", "figure"), rows)
    yield "\n"
    if "dashboard_calls" in known:
        record, figures = known["dashboard_calls"], known["dashboard_calls"]["figures"]
        paced, saturated = (
            f"{figures[f'{load}_call_ms_with']:.1f} ms with transcripts, {figures[f'{load}_call_ms_without']:.1f} ms without "
            f"(median ratio {figures[f'{load}_call_ratio']:.2f})"
            for load in ("paced", "saturated")
        )
        yield (
            f"A proxy does nothing for transcripts, the collector beside it does. {_origin(record)}: an agent's call took {paced} "
            f"where agents pause, and {saturated} where everything competes for the cores.\n\n"
        )


def derender_block(known: dict[str, Any]) -> Iterator[str]:
    """What parsing a streamed answer costs, a row for each kind of answer and way."""
    if "derender" not in known:
        return
    record = known["derender"]
    tokens, rate = record["detail"]["tokens"], record["detail"]["rate"]
    yield f"\nAn answer of {tokens} tokens, {rate:.0f} a second; {_origin(record)}:\n\n"
    waits = "another call waits for the thread, median"
    rows = []
    ways = {"eager": "whenever the thread is free", "paced": "as the proxy does"}
    for name in record["detail"]["answers"]:
        for way, words in ways.items():
            told = {key: record["figures"][f"{key}_{name}_{way}"] for key in ("portions", "parsing_s", "longest_gap_s")}
            cells = (
                name,
                words,
                f"{told['portions']:.0f}",
                f"{told['parsing_s']:.2f} s",
                f"{told['longest_gap_s']:.2f} s",
                f"{record['figures'][f'wait_p50_ms_{name}_{way}']:.1f} ms",
            )
            rows.append(cells)
    yield from table(("answer", "parsed", "portions", "processor", "longest pause", waits), rows)
    yield "\n"


def track_block() -> Iterator[str]:
    """The newest line of the tracked figures, compared with those before it."""
    lines = read_lines()
    if not lines:
        yield "\nNo line yet.\n\n"
        return
    newest, noise = lines[-1], read_noise()
    yield f"\nCommit {newest.commit.rstrip('+')}, {newest.date[:10]}, {newest.hardware}; newest of the record's lines ({len(lines)}):\n\n"
    verdicts = {verdict.figure.name: verdict for verdict in compare(lines, noise)}

    def cells(name: str) -> Iterable[Any]:
        verdict = verdicts.get(name)
        if verdict is None:
            return ("-", "-", "-")
        return (
            f"{verdict.newest:.4g}",
            "-" if verdict.before is None else f"{verdict.before:.4g}",
            f"{max(TOLERANCE, SIGMAS * noise[name]):.3f}"
            if name in noise
            else "0"
            if verdict.figure.unit == "count"
            else "not measured",
        )

    heads = ("figure", "what it is", "unit", "better", "newest", "before (median)", "fall that may be noise")
    yield from table(heads, ((f"`{one.name}`", one.meaning, one.unit, one.better, *cells(one.name)) for one in FIGURES))
    yield "\n"


def all_block(known: dict[str, Any]) -> Iterator[str]:
    """Every figure of every result, with its hardware and command."""
    for name, record in known.items():
        yield f"\n**{name}**: {_origin(record)}\n\n"
        figures = ((f"`{figure}`", f"{value:.4g}") for figure, value in record["figures"].items())
        yield from table(("figure", "value"), figures)
    if known:
        yield "\n"
