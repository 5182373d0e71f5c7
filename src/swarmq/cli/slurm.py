"""`swarmq slurm`: a batch script that runs a job on nodes of a Slurm cluster.

first node       `swarmq up`: broker, engines, proxies, collector, learners
next nodes       ranks of a learner, if it spans several nodes, and a proxy
other nodes      engines and a proxy that join with an invite
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import click

from swarmq.cli.common import JOB, SETS, choose_policy, main
from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import ConfigError, SwarmqError

STOP_S = 300
"""Seconds before the time limit at which Slurm tells the script to stop the run, so that learners can write their checkpoints."""

HEAD = """\
#!/bin/bash
# Written by `swarmq slurm`, for `sbatch`. The run folder must be on a disk that all nodes share.
#
#   first node     swarmq up: RabbitMQ, engines, proxies, collector, learners
{ranks_line}#   other nodes    engines and a proxy that join with an invite
#
# When a node fails or the time limit is near, Slurm queues the job again, and the run goes on from its checkpoints.
{directives}
set -euo pipefail
export PATH={bin}:$PATH
export job={job} run={run} policy={policy}
export host=$(hostname -f)
start=$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}
tls_port=$((20000 + SLURM_JOB_ID % 10000))

# RabbitMQ listens to other nodes with TLS, under a certificate of its own.
umask 077
mkdir -p "$run/slurm"
rm -f "$run/endpoints.json" # of a start that was cut off
openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj "/CN=$host" -addext "subjectAltName=DNS:$host" \\
    -keyout "$run/slurm/key.pem" -out "$run/slurm/cert.pem" 2> "$run/slurm/openssl.log"
{ranks}
swarmq up "$job"{sets} --set proxy.host="$host" --set broker.tls_port="$tls_port" \\
    --set broker.certificate="$run/slurm/cert.pem" --set broker.key="$run/slurm/key.pem" --until-done &
up=$!

stop() {{ # the first signal lets learners write their checkpoints
    trap '' TERM USR1
    kill -TERM "$up" 2> /dev/null || true
    wait "$up" || true
}}
trap 'stop; scontrol requeue "$SLURM_JOB_ID"; exit 0' USR1 # the time limit is near
trap 'stop; exit 143' TERM                                 # scancel, or preemption

until [ -e "$run/endpoints.json" ]; do # once everything serves
    kill -0 "$up"
    sleep 1
done
# The name of an invite is used once.
swarmq client add "client-$start" --run "$run" --amqp "amqps://$host:$tls_port/" --ca "$run/slurm/cert.pem" \\
    > "$run/slurm/line"
sed 's/^export SWARMQ_INVITE=//' "$run/slurm/line" > "$run/slurm/new" && mv "$run/slurm/new" "$run/slurm/client.invite"
echo "clients on any node: export SWARMQ_INVITE=$run/slurm/client.invite"
"""

MEMBERS = """
swarmq host add "slurm-$start" --run "$run" --amqp "amqps://$host:$tls_port/" --ca "$run/slurm/cert.pem" \\
    > "$run/slurm/host.invite"

serve() {{ # on each other node
    swarmq proxy --join "$run/slurm/host.invite" &
{engines}    wait
}}
export -f serve
srun --overlap --relative=1 --nodes={others} --ntasks={others} --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 bash -c serve &
"""

RANKS_LINE = "#   next nodes     a proxy, and ranks of the learner\n"
RANKS = """
# `swarmq up` starts the learner by `ranks`, which starts `rank` on each of its nodes, with the same GPUs as on the first one. srun
# would kill the ranks at SIGTERM, before they have written their checkpoint, so they are asked to stop by SIGUSR1.
ranks() {{
    export gpus=${{CUDA_VISIBLE_DEVICES-}}
    srun --overlap --relative=0 --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \\
        bash -c 'rank "$@"' rank "$@" &
    trap 'kill -USR1 $!' TERM
    wait $! || wait $!
}}
rank() {{
    {gpus}(
        trap '' USR1 # Slurm may signal every process of a step
        exec torchrun --nnodes={nodes} --nproc-per-node={per_node} --node-rank="$SLURM_PROCID" \\
            --master-addr="$host" --master-port=$((30000 + SLURM_JOB_ID % 10000)) --shutdown-timeout={stop_s} "$@"
    ) &
    trap 'kill -TERM $!' USR1
    wait $! || wait $!
}}
export -f ranks rank
"""
LAUNCHER = ["bash", "-c", 'ranks "$@"', "ranks"]

TAIL = """
wait "$up"
"""


@main.command()
@JOB
@SETS
@click.option("--nodes", required=True, type=click.IntRange(min=1), help="Number of nodes.")
@click.option(
    "--learner-nodes",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Nodes, from the first one on, that the policy's learner spans. On those after the first there are no engines.",
)
@click.option("--policy", help="Policy that the other nodes' engines serve; required if the job has several.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="GPUs of each node; none by default.")
@click.option(
    "--gpus-per-engine",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="GPUs of each engine on the other nodes; the job's engine arguments must agree (--tensor-parallel-size).",
)
@click.option("--time", "limit", metavar="TIME", help="Time limit of the batch job, in Slurm's format.")
@click.option("--partition", metavar="NAME", help="Partition of the cluster.")
@click.option("--account", metavar="NAME", help="Account that is charged.")
@click.option("--submit", is_flag=True, help="Submit the script instead of printing it.")
def slurm(
    job: Path,
    sets: tuple[str, ...],
    nodes: int,
    learner_nodes: int,
    policy: str | None,
    gpus_per_node: int | None,
    gpus_per_engine: int,
    limit: str | None,
    partition: str | None,
    account: str | None,
    submit: bool,
) -> None:
    """Write a batch script for a Slurm cluster, or submit it.

    The first node runs `swarmq up`; engines and proxies on the other nodes join it. If a node fails, or before the time limit,
    Slurm queues the job again and the run continues. See docs/how-to/slurm.md.

    \b
    swarmq slurm job.toml --nodes 4 --gpus-per-node 8 --time 12:00:00 > run.sbatch
    swarmq slurm job.toml --nodes 4 --gpus-per-node 8 --time 12:00:00 --submit
    """
    settings = SwarmJob.load(job, sets=sets)
    if gpus_per_node and gpus_per_node % gpus_per_engine:
        raise ConfigError(f"--gpus-per-engine {gpus_per_engine}: it does not divide --gpus-per-node {gpus_per_node}")
    if settings.broker.url:
        raise ConfigError("broker.url: leave it out, the batch job starts a RabbitMQ of its own on its first node")
    if learner_nodes > nodes:
        raise ConfigError(f"--learner-nodes {learner_nodes}: the job has only --nodes {nodes}")
    served = choose_policy(settings, policy, frozen_too=True) if nodes > 1 else ""
    if learner_nodes > 1 and not settings.policies[served].trained:
        raise ConfigError(f"--learner-nodes {learner_nodes}: policies.{served} is not trained")
    folder = RunFolder(Path(settings.folder).resolve() / settings.run)
    directives = {
        "job-name": f"swarmq-{settings.run}",
        "nodes": nodes,
        "ntasks-per-node": 1,
        "exclusive": None,
        "mem": 0,
        "gpus-per-node": gpus_per_node,
        "time": limit,
        "partition": partition,
        "account": account,
        "requeue": None,
        "open-mode": "append",
        "output": Path(settings.folder).resolve() / f"{settings.run}.slurm-%j.log",
        "signal": f"B:USR1@{STOP_S}",
    }
    if learner_nodes > 1:
        sets = (*sets, f"policies.{served}.train.launcher={json.dumps(LAUNCHER)}")
    flags = {"exclusive", "requeue"}
    lines = [
        f"#SBATCH --{name}" + ("" if name in flags else f"={value}")
        for name, value in directives.items()
        if name in flags or value is not None
    ]
    text = HEAD.format(
        directives="\n".join(lines),
        bin=shlex.quote(str(Path(sys.executable).parent)),
        job=shlex.quote(str(job.resolve())),
        run=shlex.quote(str(folder.path)),
        policy=served or "''",
        sets="".join(f" --set {shlex.quote(one)}" for one in sets),
        ranks_line=RANKS_LINE if learner_nodes > 1 else "",
        ranks=_start_ranks(learner_nodes, gpus_per_node) if learner_nodes > 1 else "",
    )
    if nodes > 1:
        engines = _start_engines(gpus_per_node, gpus_per_engine) if nodes > learner_nodes else ""
        if engines and learner_nodes > 1:
            engines = textwrap.indent(engines, "    ")
            engines = f'    if [ "$SLURM_NODEID" -ge {learner_nodes - 1} ]; then # no rank runs here\n{engines}    fi\n'
        text += MEMBERS.format(others=nodes - 1, engines=engines)
    text += TAIL
    if not submit:
        click.echo(text, nl=False)
        return
    if shutil.which("sbatch") is None:
        raise SwarmqError(
            "sbatch: not found on this host; print the script without --submit, and submit it where Slurm is installed"
        )
    folder.path.parent.mkdir(parents=True, exist_ok=True)  # for the log
    done = subprocess.run(["sbatch"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SwarmqError(f"sbatch refuses the job: {done.stderr.strip()}")
    click.echo(done.stdout.strip())


def _start_ranks(nodes: int, gpus: int | None) -> str:
    """Return the script's functions that start a learner's ranks on several nodes."""
    return RANKS.format(
        nodes=nodes,
        gpus="" if gpus is None else 'IFS=, read -ra each <<< "$gpus"\n    export CUDA_VISIBLE_DEVICES=$gpus\n    ',
        per_node=1 if gpus is None else "${#each[@]}",
        stop_s=STOP_S,
    )


def _start_engines(gpus: int | None, width: int) -> str:
    """Return the script's lines that start a node's engines."""
    start = '    swarmq engine start --join "$run/slurm/host.invite" --policy "$policy"'
    if gpus is None:
        return f"{start} &\n"
    groups = [range(first, first + width) for first in range(0, gpus, width)]
    return "".join(f"{start}{''.join(f' --gpu {gpu}' for gpu in group)} &\n" for group in groups)
