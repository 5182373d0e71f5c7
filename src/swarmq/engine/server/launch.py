"""Starts, watches and stops a policy's vLLM server with its child processes.

The server requires a secret (middleware.py), because its control endpoints can replace the model, and listens on the loopback
address only, unless proxies or learners on other hosts use it. Agents reach it through a proxy only.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from swarmq.config import Policy
from swarmq.engine.auth import SECRET_ENV
from swarmq.engine.client.versions import check_installed_version, strip_local_part
from swarmq.engine.server.arguments import check_arguments
from swarmq.engine.server.gpus import GpuCapacity, check_fp8, find_visible_gpus
from swarmq.engine.server.model_check import ModelFacts, check_model
from swarmq.engine.server.pause_watchdog import PauseWatchdog
from swarmq.engine.server.startup_error import find_root_cause
from swarmq.errors import EngineError, MissingExtraError
from swarmq.hosts.addresses import TlsFiles, format_url
from swarmq.runtime.processes import die_with_parent, find_children, is_alive, is_port_free, read_tail, stop_group
from swarmq.weights.format.conventions import DRAFT_COUNTS, DRAFT_SCHEDULE, LONGEST_MATCH, SHORTEST_MATCH
from swarmq.weights.push.engine_control import EngineControl
from swarmq.weights.vllm_plugin.plugin import BACKEND, ENGINE_ENV, MIDDLEWARE, START, WORKER_EXTENSION

__all__ = ["EngineProcess", "check_arguments", "check_model"]

HOST = "127.0.0.1"
DEFAULT_GPU_SHARE = 0.45
"""Default fraction of a GPU's memory for an engine."""
ENGINE_ALONE_SHARE = 0.9
"""Fraction of a GPU's memory for an engine on a GPU without a learner."""
DEFAULT_CONTEXT = 4096
"""Default context length in tokens."""
POLL_S = 0.2
PAUSE_CHECK_S = 15.0
LIVENESS_CHECK_S = 1.0
"""Seconds between checks that the server's processes live and its port accepts connections."""
EXIT_GRACE_S = 0.5
"""Seconds that a server gets to end by itself before `wait` kills it."""
CHILD_TITLE_PREFIX = "VLLM::"
"""Prefix of the process titles of a server's child processes."""
STOP_GRACE_S = 10.0

CPU_CACHE_ENV = "VLLM_CPU_KVCACHE_SPACE"
"""Environment variable with the KV cache size in GiB of an engine without a GPU."""
MAX_CPU_CACHE_GIB = 8
"""Maximum default size in GiB of the KV cache of an engine without a GPU. vLLM refuses a cache larger than the free memory of
its first core's NUMA node, which on a large host is a fraction of all memory. 8 GiB hold 37,000 tokens of Qwen3-0.6B in FP32,
more than a CPU serves at a time."""

MAX_API_SERVERS = 8
"""Maximum number of API server processes per engine core. An API server spends 0.14 to 0.21 ms per token
(`benchmarks/proxy_h200.py`), and a GPU samples 30,000 tokens a second with a small model. All state is in the core, so any API
server can pause it or update its weights."""
CORES_PER_API_SERVER = 2
"""Minimum number of the host's cores for each API server, so that some are left for the engine core, proxies and agents."""

SINGLE_THREAD_BELOW = 1024
"""Hidden size below which a model gets one thread: it then runs as fast as on several threads, and much faster if cores are
shared."""

CPU_PREFILL_TOKENS = 512
"""Maximum number of tokens per step on a CPU, for models with a hidden size of at least `SINGLE_THREAD_BELOW`. During a step
the engine samples nothing and answers no request."""
CPU_SHARED_PREFILL_TOKENS = 256
"""Maximum number of tokens of one long prompt per step on a CPU: with more, other requests would wait for the whole prompt."""

FP8_WEIGHTS = "fp8_per_channel"
"""vLLM's name of the quantisation for `engine.quantization = "fp8"`: the finest scales that it multiplies in FP8."""

CORE = "VLLM::EngineCore"
LOST = "lost its {} (killed because memory ran out?)"
CORE_LOST = "engine core exited unexpectedly"
"""Text in the log of a server that ends by itself because its engine core ended, which may be sooner than the next check."""
LOG_LINES = 1000
"""Number of a log's last lines in which that is looked for: every call in flight adds a traceback."""

STAGES = (
    ("Initializing a V1 LLM engine", "starting the engine core"),
    ("Starting to load model", "loading the weights"),
    ("Starting vLLM server", "opening its port"),
)
"""Text in vLLM's log -> stage reported as progress, in order."""


class EngineProcess:
    """A vLLM server: `async with EngineProcess(policy, port=8001, log_path=...) as engine:` runs it at `engine.url` until the
    block ends."""

    def __init__(
        self,
        policy: Policy,
        *,
        port: int,
        log_path: Path,
        secret: str | None = None,
        progress: Callable[[str], None] | None = None,
        gpus: Sequence[int] | None = None,
        host: str = HOST,
        tls: TlsFiles | None = None,
        environment: Mapping[str, str] | None = None,
        find_gpus: Callable[[], list[GpuCapacity]] = find_visible_gpus,
    ) -> None:
        """`host`: address to listen on. `tls`: files for https; the certificate is for `host`. `secret`: secret that callers
        must send; None: a new random secret. `progress`: called with each new stage of the start. `gpus`: GPU numbers; None: all.
        `environment`: further environment variables for vLLM, such as those of a weight receiver. `find_gpus`: returns this host's GPUs."""
        self.url = format_url("https" if tls else "http", host, port)
        self.secret = secret or secrets.token_hex(32)
        self.log_path = log_path
        self.kill_reason = ""
        """Reason why `wait` killed the server, or why it ended by itself if that is known; else empty."""
        self._policy = policy
        self._host, self._port, self._tls = host, port, tls
        self._gpus, self._find_gpus = gpus, find_gpus
        self._environment = dict(environment or {})
        self._progress = progress or (lambda _stage: None)
        self._process: asyncio.subprocess.Process | None = None
        self._children: dict[int, str] = {}
        """Pid -> title of processes that the server needs."""

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def wait(self) -> int:
        """Wait for the server's end and return its exit status. A server that lost its engine core or closed its port is killed
        within seconds; a server left paused is resumed or, if its weights are in doubt, ended."""
        assert self._process is not None
        self.kill_reason = ""
        async with asyncio.TaskGroup() as tasks:
            ended = tasks.create_task(self._process.wait())
            watchers = [tasks.create_task(self._watch_for_loss()), tasks.create_task(self._watch_for_pause())]
            done, _ = await asyncio.wait({ended, *watchers}, return_when=asyncio.FIRST_COMPLETED)
            if not (await asyncio.wait({ended}, timeout=EXIT_GRACE_S))[0]:
                self.kill_reason = next(task.result() for task in watchers if task in done)
                await self._stop(grace_s=0.0 if watchers[0] in done else STOP_GRACE_S)
            for watcher in watchers:
                watcher.cancel()
        if not self.kill_reason and CORE_LOST in read_tail(self.log_path, LOG_LINES).rpartition("\n$ ")[2]:
            self.kill_reason = LOST.format(CORE)
        return ended.result()

    async def _watch_for_loss(self) -> str:
        """Wait until the server can answer no more, and return the reason."""
        while True:  # vLLM sends no notice
            await asyncio.sleep(LIVENESS_CHECK_S)
            if lost := next((title for pid, title in self._children.items() if not is_alive(pid)), None):
                return LOST.format(lost)
            if await self._refuses_connections():
                return "accepts no connections, though its process lives"

    async def _refuses_connections(self) -> bool:
        try:
            async with asyncio.timeout(LIVENESS_CHECK_S):
                _, writer = await asyncio.open_connection(self._host, self._port)
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError):
            return False
        writer.close()
        return False

    async def _watch_for_pause(self) -> str:
        """Resume the server whenever it was left paused; once it needs a restart, return the reason."""
        async with EngineControl(self.url, secret=self.secret) as control:
            watch = PauseWatchdog(control)
            while True:
                await asyncio.sleep(PAUSE_CHECK_S)
                if await watch.needs_restart(time.monotonic()):
                    return watch.reason

    async def restart(self) -> None:
        """Restart the server on the same port, with the weights on disk. Raises EngineError."""
        await self._stop()
        await self._start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def _may_fork(self) -> bool:
        """Whether the engine core may begin as a copy of its parent: on one GPU, except with tensors in shared memory, which vLLM refuses then."""
        return len(self._gpus or ()) == 1 and "torch_shm" not in " ".join(self._policy.engine.arguments)

    async def _start(self) -> None:
        cuda = is_cuda_build()
        if self._policy.engine.uses_fp8:
            present = enumerate(self._find_gpus() if cuda else [])
            chosen = {number: gpu for number, gpu in present if self._gpus is None or number in self._gpus}
            check_fp8("policies.*.engine", self._policy.engine, chosen)
        model = check_model(self._policy.model, trained=self._policy.trained)
        if not is_port_free(self._port, self._host):
            raise EngineError(
                f"port {self._port} of {self._host} for the engine of {model.name} is taken: stop what listens there"
            )
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = build_command(
            self._policy, model, host=self._host, port=self._port, tls=self._tls, cuda=cuda, cores=_count_cores()
        )
        argv = [sys.executable, *command]
        with self.log_path.open("ab", buffering=0) as sink:
            with contextlib.suppress(OSError):  # a full disk: vLLM itself only loses lines of its log
                sink.write(f"$ {shlex.join(argv)}\n".encode())
            begin_at = sink.tell()
            environment = (
                os.environ
                | build_environment(model, cuda=cuda, forks=self._may_fork, given=os.environ)
                | build_gpu_environment(self._gpus)
                | self._environment
                | {SECRET_ENV: self.secret}
            )
            self._process = await self._spawn(argv, environment, sink)
        try:
            async with asyncio.timeout(self._policy.engine.start_timeout_s):
                await self._wait_until_healthy(self._process, begin_at)
        except TimeoutError as error:
            raise await self._stop_and_explain(
                f"did not serve within {self._policy.engine.start_timeout_s:g} s"
            ) from error
        except BaseException:
            await self._stop()
            raise

    async def _spawn(
        self, argv: Sequence[str], environment: Mapping[str, str], sink: IO[bytes]
    ) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *argv,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            # on SIGTERM vLLM waits for open calls, which never end without its core
            preexec_fn=partial(die_with_parent, signal.SIGKILL),
        )

    async def _wait_until_healthy(self, process: asyncio.subprocess.Process, begin_at: int) -> None:
        self._progress("starting vLLM")
        reported: set[str] = set()
        async with EngineControl(self.url, secret=self.secret) as engine:
            while True:  # vLLM sends no notice
                healthy = await engine.is_healthy()
                for stage in _find_stages(self.log_path, begin_at):
                    if stage not in reported:
                        reported.add(stage)
                        self._progress(stage)
                if healthy:
                    break
                if process.returncode is not None:
                    cause = find_root_cause(self.log_path, begin_at)
                    raise await self._stop_and_explain(
                        f"ended with status {process.returncode} while it started", cause
                    )
                await asyncio.sleep(POLL_S)
            await engine.status()
        self._children = find_children(process.pid, CHILD_TITLE_PREFIX)

    async def _stop_and_explain(self, what: str, cause: str = "") -> EngineError:
        await self._stop()
        what = f"vLLM for {self._policy.model} {what}"
        if cause:
            return EngineError(f"{what}: {cause}; its log is {self.log_path}")
        return EngineError(f"{what}; the end of {self.log_path}:\n{read_tail(self.log_path)}")

    async def _stop(self, grace_s: float = STOP_GRACE_S) -> None:
        if self._process is not None:
            await stop_group(self._process, grace_s=grace_s)


def is_cuda_build() -> bool:
    """Return whether the installed vLLM is for CUDA. Raises MissingExtraError if vLLM is not installed, EngineError for an
    unsupported version."""
    return _find_vllm()[0] == "vllm"


def get_installed_vllm() -> str:
    """Return the version of the installed vLLM. Raises what `is_cuda_build` raises."""
    return strip_local_part(_find_vllm()[1])


def _find_vllm() -> tuple[str, str]:
    """Return the distribution that provides vLLM, and its version."""
    for distribution in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        check_installed_version(version)
        return distribution, version
    raise MissingExtraError(
        "vLLM is not installed: `make install` in the repository, or pip install 'swarmq[vllm]' on a CUDA machine"
    )


def build_command(
    policy: Policy,
    model: ModelFacts,
    *,
    port: int,
    cuda: bool,
    cores: int,
    host: str = HOST,
    tls: TlsFiles | None = None,
) -> list[str]:
    """Build Python's arguments to start vLLM; the user's arguments come last and take precedence. Raises ConfigError if one of
    them is reserved."""
    check_arguments(policy)
    engine = policy.engine
    asked = engine.max_model_len or DEFAULT_CONTEXT
    options = {
        "--host": host,
        "--port": str(port),
        "--max-model-len": str(min(asked, model.max_length or asked)),
        "--dtype": "float32" if engine.dtype == "auto" and not cuda else engine.dtype,
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        # under a JSON schema a model may sample whitespace between fields until its answer is cut off;
        # with "auto" the first schema that needs another backend would switch all requests to it until a restart
        "--structured-outputs-config": json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}),
        "--weight-transfer-config": json.dumps({"backend": BACKEND}),
        "--worker-extension-cls": WORKER_EXTENSION,
        "--middleware": MIDDLEWARE,
        "--uvicorn-log-level": "warning",
    }
    if engine.quantization == "fp8":
        options["--quantization"] = FP8_WEIGHTS
    if engine.kv_cache_dtype != "auto":
        options["--kv-cache-dtype"] = engine.kv_cache_dtype
    if engine.speculation == "ngram":
        options["--speculative-config"] = json.dumps(build_drafts(cuda=cuda))
    if tls:
        options |= {"--ssl-certfile": tls.certificate, "--ssl-keyfile": tls.key}
    flags = ["--enable-scale-out", "--disable-uvicorn-access-log"]
    if policy.replays_routing:
        flags.append("--enable-return-routed-experts")
    if cuda:
        options["--gpu-memory-utilization"] = str(engine.gpu_memory_utilization or DEFAULT_GPU_SHARE)
        options["--api-server-count"] = str(max(1, min(MAX_API_SERVERS, cores // CORES_PER_API_SERVER)))
        if engine.sleep:
            flags.append("--enable-sleep-mode")
        server = ["vllm.entrypoints.cli.main", "serve", model.name]
    else:
        server = [
            "vllm.entrypoints.openai.api_server",
            "--model",
            model.name,
        ]  # `vllm serve` cannot start the CPU build
        # A separate worker process would cost 8 s at the start and a hop per step; compiling would cost minutes.
        options["--distributed-executor-backend"] = "uni"
        flags.append("--enforce-eager")
        options["--long-prefill-token-threshold"] = str(min(CPU_SHARED_PREFILL_TOKENS, int(options["--max-model-len"])))
        if model.hidden_size >= SINGLE_THREAD_BELOW:
            options["--max-num-batched-tokens"] = str(CPU_PREFILL_TOKENS)
    if model.tool_call_parser is not None:
        options["--tool-call-parser"] = model.tool_call_parser
        flags.append("--enable-auto-tool-choice")
    if model.reasoning_parser is not None:
        options["--reasoning-parser"] = model.reasoning_parser
    return ["-m", START, *server, *(word for pair in options.items() for word in pair), *flags, *engine.arguments]


def build_drafts(*, cuda: bool) -> dict[str, object]:
    """Return vLLM's speculative decoding for `engine.speculation = "ngram"`."""
    return {
        "method": "ngram_gpu"
        if cuda
        else "ngram",  # the first lets vLLM schedule a step while it computes the one before
        "num_speculative_tokens": max(DRAFT_COUNTS),
        "num_speculative_tokens_per_batch_size": DRAFT_SCHEDULE,
        "prompt_lookup_min": SHORTEST_MATCH,
        "prompt_lookup_max": LONGEST_MATCH,
    }


def build_environment(
    model: ModelFacts, *, cuda: bool, given: Mapping[str, str], forks: bool = False
) -> dict[str, str]:
    """Return environment variables for the server. Values in `given`, the user's environment, are kept, except for those that
    weight control needs. `forks`: whether the engine core on a GPU begins as a copy of its parent, which has imported torch and vLLM."""
    wanted = {"VLLM_NO_USAGE_STATS": "1"}
    if model.is_folder:
        wanted["HF_HUB_OFFLINE"] = "1"
    if cuda and forks:
        wanted["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM itself spawns where its parent has used CUDA
    if not cuda:
        wanted |= {
            "OMP_NUM_THREADS": str(1 if model.hidden_size < SINGLE_THREAD_BELOW else _count_cores()),
            "TORCHDYNAMO_DISABLE": "1",  # otherwise sampling is compiled during the first request, which takes 3 s
            CPU_CACHE_ENV: str(choose_cpu_cache_gib(_measure_host_memory())),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # lets the CPU build run its worker in the engine core
        }
    chosen = {key: given.get(key, value) for key, value in wanted.items()}
    # an API key that the user has set for other vLLM servers would reject callers that send the secret
    return chosen | {"VLLM_SERVER_DEV_MODE": "1", ENGINE_ENV: "1", "VLLM_API_KEY": ""}


def build_gpu_environment(gpus: Sequence[int] | None) -> dict[str, str]:
    """Return environment variables that restrict a process to `gpus`, numbered among this process's GPUs."""
    if gpus is None:
        return {}
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] if names else str(gpu) for gpu in gpus)}


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def get_cpu_cache_bytes(given: Mapping[str, str]) -> int:
    """Return the KV cache size in bytes of an engine without a GPU, from environment `given` or by default."""
    return int(float(given.get(CPU_CACHE_ENV) or choose_cpu_cache_gib(_measure_host_memory())) * (1 << 30))


def choose_cpu_cache_gib(host_memory_bytes: int) -> int:
    """Return a twelfth of the host's memory in GiB, at least 1 and at most MAX_CPU_CACHE_GIB. The system allocates pages only
    when they are used."""
    return min(max(1, host_memory_bytes // (12 << 30)), MAX_CPU_CACHE_GIB)


def _measure_host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _find_stages(log_path: Path, begin_at: int) -> list[str]:
    """Return all stages that the server has entered, because a short stage may begin and end between two checks."""
    with log_path.open("rb") as source:
        source.seek(begin_at)
        text = source.read().decode(errors="replace")
    return [stage for mark, stage in STAGES if mark in text]
