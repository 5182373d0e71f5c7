from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from benchmarks.engine_profile import kind_of, read_trace


def event(name: str, begin: float, microseconds: float, category: str = "kernel", thread: int = 0) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": begin, "dur": microseconds, "cat": category, "tid": thread}


def steps(count: int) -> list[dict[str, Any]]:
    """Steps of a millisecond."""
    return [event(f"execute_context_0(0)_generation_{n}", 1000.0 * n, 10, "user_annotation") for n in range(count)]


def packed(*events: dict[str, Any]) -> bytes:
    return gzip.compress(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}).encode())


def test_kernels_of_whole_steps_after_the_first_two_are_counted_by_kind() -> None:
    trace = read_trace(
        packed(
            *steps(5),
            event("flash::FlashAttnFwdSm90", 500, 999),  # before the third step
            event("flash::FlashAttnFwdSm90", 2100, 600),
            event("nvjet_sm90_tst", 3100, 200),
            event("flash::FlashAttnFwdSm90", 4100, 999),  # of a step whose end was not traced
        )
    )
    assert (trace.steps, trace.step_ms) == (2, 1.0)
    assert trace.kinds == {"attention": 0.3, "matrix products": 0.1}
    assert trace.busy_ms == pytest.approx(0.4)


def test_kernels_side_by_side_are_busy_time_once() -> None:
    trace = read_trace(packed(*steps(4), event("gemm", 2100, 400), event("Memcpy HtoD", 2200, 100)))
    assert trace.busy_ms == pytest.approx(0.4)
    assert trace.kinds == {"matrix products": 0.4, "other": 0.1}


def test_without_a_gpu_only_operators_without_others_inside_count() -> None:
    outer, inner = event("aten::linear", 2100, 500, "cpu_op"), event("aten::addmm", 2200, 300, "cpu_op")
    elsewhere = event("aten::softmax", 2100, 100, "cpu_op", thread=1)
    trace = read_trace(packed(*steps(4), outer, inner, elsewhere))
    assert trace.kinds == {"matrix products": 0.3, "sampling and log-probabilities": 0.1}


def test_a_trace_of_too_few_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 3 steps; at least 4"):
        read_trace(packed(*steps(3), event("gemm", 100, 10)))


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("vllm::reshape_and_cache_flash_kernel", "cache write"),
        ("cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90", "attention"),
        ("_topk_log_softmax_kernel", "sampling and log-probabilities"),
        ("nvjet_sm90_tst_64x64_64x13_4x1_v_bz_TNT", "matrix products"),
        ("triton_red_fused_fused_add_rms_norm_2", "norms, rotations, activations"),
        ("Memcpy DtoH", "other"),
    ],
)
def test_a_kernel_is_told_by_its_name(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind
