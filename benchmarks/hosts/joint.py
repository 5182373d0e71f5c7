"""A run on three hosts that share no disk, each of which is cut off, killed and brought back: what became of every episode.

    gpu0  RabbitMQ  proxy             run folder, collector, learner's rank 0
    gpu1  RabbitMQ  proxy (invited)   learner's rank 1
    gpu2  RabbitMQ                    vLLM and weight receiver (invited)
    pc    agents

The hosts are namespaces of this machine (machines.py), set up by the commands of docs/how-to/several-hosts.md. On each of them a
supervisor starts every service again when it ends. A host is cut off for longer than RabbitMQ, its clients and proxies take to notice;
then all its processes are killed, and it boots again from its disk. Before the next fault training must have gone on, with both ranks
and all proxies. In the end the agents' ledger is compared with batch log and collector, as in `benchmarks.faults`. Needs root.

    sudo python -m benchmarks.hosts.joint --rounds 2
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from benchmarks import report
from benchmarks.faults.check import Verdict, judge
from benchmarks.faults.client import Line, read_lines
from benchmarks.faults.inject import Injection
from benchmarks.hosts.agents import RewardLine
from benchmarks.hosts.machines import DISK, Machine, Switch, why_not
from benchmarks.hosts.rabbitmq import AMQP_PORT, MANAGEMENT_PORT, USER
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.collector.ledger import read_fates
from swarmq.config import SwarmJob
from swarmq.errors import CollectorError, LearnerError
from swarmq.learner.store.batch_log import scan_log
from swarmq.messages import Rollout
from swarmq.registries.proxies import ProxyRegistry

PASSWORD = "of-the-joint-run"
HEARTBEAT_S = 5
CUT_S = 25.0
"""Longer than RabbitMQ's nodes (15 s), its clients (15 s) and followers of the membership (10 s) take to notice a silent host."""
WAIT_S = 900.0
LEFT_S = 60.0
"""Seconds in which RabbitMQ puts back what a killed learner held."""
LOOK_S = 0.3
WINDOW = 64
"""Episodes of a mean reward."""
LEAST_RISE = 0.4
ENGINE_PORT, PROXY_PORT, MEETING_PORT = 8100, 8000, 29500
GROUP_SIZE, GROUPS_PER_BATCH = 8, 2
JOB_FILE, LEDGER, INJECTIONS = Path(f"{DISK}/job.toml"), Path(f"{DISK}/ledger.jsonl"), Path(f"{DISK}/injections.json")
COPIED = {
    "push_bytes_whole": ("hosts_push", "push_bytes_whole"),
    "push_bytes_delta": ("hosts_push", "push_bytes_delta"),
    "push_s_1gbit_delta": ("hosts_push", "push_s_1gbit_1ms_delta"),
    **{name: ("hosts_processes", name) for name in (f"collector_episodes_per_s_{num}" for num in (1, 2, 4))},
}
"""Figure -> result that has it, and its name there."""
SWARMQ = (sys.executable, "-m", "swarmq")
JOB = """
run = "joint"
folder = "{disk}/runs"
[broker]
url = "{broker}"
[groups]
group_size = {group_size}
groups_per_batch = {groups_per_batch}
[proxy]
host = "{proxy}"
port = {proxy_port}
[policies.main]
model = "{disk}/model"
[policies.main.engine]
urls = ["{engine}"]
dtype = "float32"
max_model_len = 512
[policies.main.sampling]
max_tokens = 8
[policies.main.train]
learning_rate = 1e-3
warmup_steps = 0
checkpoint_every = 2
gradient_checkpointing = false
"""


class JointResult(msgspec.Struct, frozen=True, kw_only=True):
    hosts: int
    faults: int
    seconds: float
    steps: int
    reward_before: float
    reward_after: float
    rank_starts: dict[str, int]
    """Host -> how often its rank has loaded the policy."""
    recovered_s: dict[str, list[float]]
    """Fault -> seconds from the host's return until training had gone on with everything."""
    verdict: Verdict


class Joint:
    """The run and its hosts."""

    def __init__(self, machines: list[Machine], agents: Machine, model: Path) -> None:
        self.machines, self.agents = machines, agents
        self.gpu0, self.gpu1, self.gpu2 = machines
        self.injections: list[Injection] = []
        self.recovered_s: dict[str, list[float]] = {}
        for machine in (self.gpu0, self.gpu2):  # the others need no copy
            shutil.copytree(model, machine.path(f"{DISK}/model"))

    @classmethod
    @contextlib.contextmanager
    def open(cls, model: Path) -> Iterator[Joint]:
        """Bring everything up, with agents at work."""
        with contextlib.ExitStack() as stack:
            switch = stack.enter_context(Switch())
            *machines, agents = [stack.enter_context(switch.machine(name)) for name in ("gpu0", "gpu1", "gpu2", "pc")]
            joint = cls(machines, agents, model)
            try:
                joint._start()
                yield joint
            except BaseException:
                for machine in (*machines, agents):
                    print(machine.logs(), file=sys.stderr)
                raise

    def _start(self) -> None:
        for joining in ([self.gpu0], [self.gpu1, self.gpu2]):
            for machine in joining:
                machine.boot(self._services(machine))
            for machine in joining:
                self.wait_for(f"RabbitMQ on {machine.name}", partial(self._serves, machine, AMQP_PORT))
        self._on_gpu0("invite", str(JOB_FILE))
        management = f"--management=http://{USER}:{PASSWORD}@{self.gpu0.address}:{MANAGEMENT_PORT}"
        run = f"--run={DISK}/runs/joint"
        for machine in (self.gpu1, self.gpu2):
            machine.path(f"{DISK}/invite").write_text(self._on_gpu0("host", "add", machine.name, run, management))
        for machine in self.machines:
            machine.path(f"{DISK}/ready").touch()
        line = self._on_gpu0("client", "add", "agents", run, management)
        self.agents.path(f"{DISK}/invite").write_text(line.strip().removeprefix("export SWARMQ_INVITE="))
        self.agents.boot({"agents": _python("-m", "benchmarks.hosts.agents", f"{DISK}/invite", DISK)})
        self.wait_for("two steps", lambda: self.step >= 2)
        self.wait_until_whole()

    def _services(self, machine: Machine) -> dict[str, list[str]]:
        """Write the job, if this is the run's host, and return the services of a machine."""
        rabbitmq = _python(
            "-m", "benchmarks.hosts.rabbitmq", f"{DISK}/rabbitmq", machine.address, self.gpu0.address, PASSWORD
        )
        learner = [*self._launch(self.machines.index(machine)), "-m", "swarmq", "learner", str(JOB_FILE)]
        join = f"--join={DISK}/invite"
        own = {
            "gpu0": {
                "collector": [*SWARMQ, "collector", str(JOB_FILE)],
                "proxy": [*SWARMQ, "proxy", str(JOB_FILE)],
                "learner": [*learner, "--no-collector"],
            },
            "gpu1": {"proxy": [*SWARMQ, "proxy", join, f"--port={PROXY_PORT}"], "learner": learner},
            "gpu2": {"engine": [*SWARMQ, "engine", "start", join, f"--port={ENGINE_PORT}"]},
        }[machine.name]
        if machine is self.gpu0:
            nodes = (
                f"amqp://{USER}:{PASSWORD}@{one.address}:{AMQP_PORT}/?heartbeat={HEARTBEAT_S}" for one in self.machines
            )
            text = JOB.format(
                disk=DISK,
                broker=",".join(nodes),
                proxy=self.gpu0.address,
                proxy_port=PROXY_PORT,
                engine=f"http://{self.gpu2.address}:{ENGINE_PORT}",
                group_size=GROUP_SIZE,
                groups_per_batch=GROUPS_PER_BATCH,
            )
            machine.path(JOB_FILE).write_text(text)
        # queues are to be declared once all nodes are there: one that is declared before keeps a single copy
        return {"rabbitmq": rabbitmq, **{name: _when_ready(argv) for name, argv in own.items()}}

    def _launch(self, host: int) -> list[str]:
        where = (f"--master-addr={self.gpu0.address}", f"--master-port={MEETING_PORT}", f"--node-rank={host}")
        return _python("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *where)

    def _on_gpu0(self, *words: str) -> str:
        return self.gpu0.run([*SWARMQ, *words])

    @property
    def job(self) -> SwarmJob:
        """The job as this process reaches its run folder."""
        job = SwarmJob.load(self.gpu0.path(JOB_FILE))
        return msgspec.structs.replace(job, folder=str(self.gpu0.path(job.folder)))

    @property
    def step(self) -> int:
        return max((place.index.version for place in scan_log(self.job.run_folder.batch_log("main"))), default=0)

    def lines(self) -> list[RewardLine]:
        return read_lines(self.agents.path(LEDGER), RewardLine)

    def rewards(self) -> list[float]:
        return [line.reward for line in self.lines() if line.event == "confirmed"]

    def rank_starts(self) -> dict[str, int]:
        """Host -> how often its rank has loaded the policy, at which it has met the other rank."""
        return {
            machine.name: machine.path(f"{DISK}/log/learner").read_text(errors="replace").count('"loaded"')
            for machine in (self.gpu0, self.gpu1)
        }

    def wait_for(self, what: str, fact: Callable[[], object]) -> None:
        until = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(CollectorError, LearnerError):
                if fact():
                    return
            if time.monotonic() > until:
                raise TimeoutError(f"{what} did not come within {WAIT_S:g} s")
            time.sleep(LOOK_S)

    def wait_until_whole(self) -> None:
        """Wait until every node of RabbitMQ and every proxy serves, agents have ended a group's episodes since, and then both ranks
        have made steps."""
        num_ended = len(self.rewards())
        for machine in self.machines:
            self.wait_for(f"RabbitMQ on {machine.name}", partial(self._serves, machine, AMQP_PORT))
        for machine in (self.gpu0, self.gpu1):
            url = f"http://{machine.address}:{PROXY_PORT}/v1"
            self.wait_for(f"a proxy on {machine.name}", partial(self._serves, machine, PROXY_PORT))
            self.wait_for(f"{url} in the list", partial(self._lists, url))
        self.wait_for("ends of episodes", lambda: len(self.rewards()) >= num_ended + GROUP_SIZE)
        step = self.step
        self.wait_for(f"two steps after {step}", lambda: self.step >= step + 2)

    def _serves(self, machine: Machine, port: int) -> bool:
        """Return whether something listens there, as the agents' machine sees it."""
        argv = ["timeout", "5", "bash", "-c", f"exec 3<>/dev/tcp/{machine.address}/{port}"]
        with contextlib.suppress(RuntimeError):
            self.agents.run(argv)
            return True
        return False

    def _lists(self, proxy: str) -> bool:
        return proxy in ProxyRegistry(self.job.run_folder.proxies).urls()

    def cut_off(self, machine: Machine) -> None:
        self._inject("cut off", machine)
        machine.cut_off()
        time.sleep(CUT_S)
        machine.reconnect()
        self._recover(f"{machine.name} cut off")

    def kill(self, machine: Machine) -> None:
        self._inject("killed", machine)
        machine.kill()
        machine.boot()
        self._recover(f"{machine.name} killed")

    def _inject(self, what: str, machine: Machine) -> None:
        fault = f"{machine.name} {what}"
        print(f"{time.strftime('%H:%M:%S')} step {self.step}: {fault}", flush=True)
        self.injections.append(Injection(number=len(self.injections), fault=fault, at=time.time(), hit=machine.name))

    def _recover(self, fault: str) -> None:
        began = time.monotonic()
        self.wait_until_whole()
        self.recovered_s.setdefault(fault, []).append(time.monotonic() - began)

    def rise(self) -> tuple[float, float]:
        """Wait until the reward has risen, and return the means of the first and the newest episodes."""
        first = statistics.mean(self.rewards()[:WINDOW])
        self.wait_for("a higher reward", lambda: statistics.mean(self.rewards()[-WINDOW:]) > first + LEAST_RISE)
        return first, statistics.mean(self.rewards()[-WINDOW:])

    def settle(self) -> Verdict:
        """Let agents and learner finish what they have, switch off the run's host, and judge what is on its disk."""
        self.agents.path(f"{DISK}/stop").touch()
        log = self.agents.path(f"{DISK}/log/agents")
        self.wait_for("the agents' end", lambda: "agents ended with status 0" in log.read_text())
        self.agents.kill()
        shutil.copy(self.agents.path(LEDGER), self.gpu0.path(LEDGER))
        self.gpu0.path(INJECTIONS).write_bytes(msgspec.json.encode(self.injections))
        self.wait_for("the end of all episodes", lambda: not self._evaluate("unsettled"))
        self.gpu0.kill()
        return msgspec.json.decode(self._evaluate("judge"), type=Verdict, dec_hook=lambda kind, value: kind(value))

    def _evaluate(self, what: str) -> str:
        """Return the last line of a process that sees the disk of the run's host as its own; before it there may be log lines."""
        return self.gpu0.run(_python("-m", "benchmarks.hosts.joint", what)).splitlines()[-1]


def play(model: Path, *, rounds: int = 1, until: float = math.inf) -> JointResult:
    """Cut off and kill each host `rounds` times, unless `until` (by the monotonic clock) comes first, and settle."""
    began = time.monotonic()
    with Joint.open(model) as joint:
        for machine in list(reversed(joint.machines)) * rounds:
            for break_host in (joint.cut_off, joint.kill):
                if time.monotonic() < until:
                    break_host(machine)
        before, after = joint.rise()
        starts, steps = joint.rank_starts(), joint.step
        verdict = joint.settle()
        return JointResult(
            hosts=len(joint.machines),
            faults=len(joint.injections),
            seconds=time.monotonic() - began,
            steps=steps,
            reward_before=before,
            reward_after=after,
            rank_starts=starts,
            recovered_s=joint.recovered_s,
            verdict=verdict,
        )


def find_unsettled() -> str:
    """Return which episodes have no known fate yet, or "". Some groups may wait for a batch."""
    job = SwarmJob.load(JOB_FILE)
    ended = {line.episode_id for line in read_lines(LEDGER, Line) if line.event == "confirmed"}
    try:
        fates = read_fates(job.run_folder.inbox)
        logged = {name for place in scan_log(job.run_folder.batch_log("main")) for name in place.index.trained}
    except (CollectorError, LearnerError) as error:
        return str(error)
    states = Counter(fate.state for fate in fates.values())
    reports = logged ^ {name for name, fate in fates.items() if fate.state == "trained"}
    is_over = states["published"] <= GROUP_SIZE * (GROUPS_PER_BATCH - 1) and not states["open"] + states["waiting"]
    if is_over and ended <= fates.keys() and not reports:
        return ""
    return f"{dict(states)}; {len(ended - fates.keys())} unknown, {len(reports)} not reported"


def judge_disk() -> Verdict:
    """Compare the agents' ledger with batch log, collector and the learner's queue."""
    job = SwarmJob.load(JOB_FILE)
    settled = {name for place in scan_log(job.run_folder.batch_log("main")) for name in place.index.dropped}
    published = {name for name, fate in read_fates(job.run_folder.inbox).items() if fate.state == "published"}
    owed = published - settled
    left = asyncio.run(find_left(job.broker.url or "", owed)) if owed else set[str]()
    injections = msgspec.json.decode(INJECTIONS.read_bytes(), type=list[Injection])
    return judge(job, read_lines(LEDGER, Line), injections, (), left=left, texts=False)


async def find_left(url: str, owed: set[str]) -> set[str]:
    """Return those of the episodes `owed` to the learner that are in its queue, now that it has gone."""
    found = set[str]()
    with contextlib.suppress(TimeoutError):
        async with (
            asyncio.timeout(LEFT_S),
            AmqpBroker.open(url, name="joint", deadline_s=None) as broker,
            broker.consume(topology.ready("joint", "main"), prefetch=1000) as deliveries,
        ):
            while owed - found:
                message = (await anext(deliveries)).message
                assert isinstance(message, Rollout)
                found.add(message.episode_id)
    return found


def main() -> None:
    if sys.argv[1:] == ["unsettled"]:
        print(find_unsettled())
        return
    if sys.argv[1:] == ["judge"]:
        print(msgspec.json.encode(judge_disk()).decode())
        return
    from support.figures import FIGURES_ENV  # noqa: PLC0415 - of the tests
    from support.tiny_model import tiny_model  # noqa: PLC0415 - loads transformers

    options = report.parser(__doc__)
    options.add_argument("--rounds", type=int, default=2, help="how often each host is cut off, and killed")
    options.add_argument("--minutes", type=float, default=math.inf, help="begin no fault after this time")
    options.add_argument(
        "--tests", type=Path, help=f"folder that ${FIGURES_ENV} named when the tests of docker compose and Slurm ran"
    )
    given = options.parse_args()
    if reason := why_not():
        sys.exit(reason)
    result = play(tiny_model(), rounds=given.rounds, until=time.monotonic() + given.minutes * 60)
    rows = [[row.fault, row.injections, row.ended, row.once, row.twice, row.lost] for row in result.verdict.rows]
    print(report.table(["fault", "injections", "ended", "trained once", "twice", "lost"], rows))
    print(
        f"{result.steps} steps; reward {result.reward_before:.2f}, then {result.reward_after:.2f}; {result.verdict.faults}"
    )
    measured = {name: getattr(result, name) for name in ("hosts", "faults", "steps", "reward_before", "reward_after")}
    measured |= {
        "episodes_ended": result.verdict.account.confirmed,
        "lost": result.verdict.lost,
        "twice": result.verdict.twice,
        "longest_recovery_s": max(seconds for times in result.recovered_s.values() for seconds in times),
    }
    copied, sources = copy_figures(given.tests)
    detail = {**msgspec.to_builtins(result, str_keys=True), "copied": sources}
    report.save("hosts", measured | copied, detail=detail, out=given.out)
    sys.exit(f"FAILED: {result.verdict.faults}" if result.verdict.faults else 0)


def copy_figures(tests: Path | None) -> tuple[dict[str, float], dict[str, str]]:
    """Return figures on several hosts that other runs have measured, and where each is from."""
    figures, sources = dict[str, float](), dict[str, str]()
    for name, (result, figure) in COPIED.items():
        record = json.loads((report.RESULTS / f"{result}.json").read_text())
        if figure in record["figures"]:
            figures[name] = record["figures"][figure]
            sources[name] = f"{figure} of {result}, commit {record['commit']} ({record['date'][:10]})"
    for path in sorted(tests.glob("*.json")) if tests else ():
        figures[path.stem] = float(json.loads(path.read_text()))
        sources[path.stem] = "a test of tests/e2e"
    return figures, sources


def _python(*words: str) -> list[str]:
    return [sys.executable, *words]


def _when_ready(argv: list[str]) -> list[str]:
    return ["sh", "-c", f'until [ -e {DISK}/ready ]; do sleep 0.2; done; exec "$@"', "sh", *argv]


if __name__ == "__main__":
    main()
