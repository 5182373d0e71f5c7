"""What the log-probabilities of a step cost vLLM's engine core and its API servers, in vLLM's own messages and in columns.

A message holds one sampled token of each of `--requests` requests; it is written as the core writes it, and read as a server
reads it. One thread, no sockets; its processor time counts, so that other work on the machine hardly does. Needs vLLM; example:

    python -m benchmarks.columns --requests 256
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import report


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    from vllm.v1.outputs import LogprobsLists  # noqa: PLC0415 - only where it is needed

    from swarmq.weights.vllm_plugin import logprob_columns  # noqa: PLC0415

    rows = {
        "no log-probabilities": measure(arguments, None),
        "vLLM's own": measure(arguments, LogprobsLists.slice_request),
    }
    multiprocessing.current_process().name = logprob_columns.CORE_PROCESS_NAME
    logprob_columns.register()
    rows["in columns"] = measure(arguments, LogprobsLists.slice_request)
    print(report.table(["a step's answers", "write, ms", "read, ms"], [[name, *each] for name, each in rows.items()]))
    stock, ours = rows["vLLM's own"], rows["in columns"]
    figures = {
        "write_ms_stock": stock[0],
        "write_ms_columns": ours[0],
        "read_ms_stock": stock[1],
        "read_ms_columns": ours[1],
        "write_ratio": stock[0] / ours[0],
        "read_ratio": stock[1] / ours[1],
    }
    report.save("columns", figures, detail={"requests": arguments.requests, "rows": rows}, out=arguments.out)


def measure(arguments: Any, cut: Callable[..., Any] | None) -> tuple[float, float]:
    """Milliseconds of processor to cut a step for its requests and write it as a message, and to read that; medians."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs  # noqa: PLC0415 - only where it is needed
    from vllm.v1.outputs import LogprobsLists  # noqa: PLC0415
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder  # noqa: PLC0415

    count = arguments.requests
    step = LogprobsLists(
        *(np.ones(shape, kind) for shape, kind in (((count, 1), "i4"), ((count, 1), "f4"), (count, "i4")))
    )
    names = [f"generate-{row:032x}" for row in range(count)]
    encoder, decoder, spent = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs), []
    for _ in range(arguments.repeats):
        begun = time.thread_time()
        own = [None if cut is None else cut(step, row, 1) for row in range(count)]
        message = EngineCoreOutputs(outputs=[EngineCoreOutput(names[row], [row], own[row]) for row in range(count)])
        buffers = encoder.encode_into(message, bytearray())
        written = time.thread_time()
        decoder.decode(list(buffers))
        spent.append((written - begun, time.thread_time() - written))
    write, read = np.median(np.array(spent), axis=0) * 1e3
    return float(write), float(read)


if __name__ == "__main__":
    main()
