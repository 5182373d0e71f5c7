"""Entry point of one rank started by `swarmq-learner --num-gpus N`: `python -m swarmq.learner.rank JOB POLICY NO_PUSH`."""

from __future__ import annotations

import sys

from swarmq.config import SwarmJob
from swarmq.errors import SwarmqError
from swarmq.learner.distributed.processes import own_rank
from swarmq.learner.main import train
from swarmq.runtime import logs
from swarmq.runtime.processes import FINAL_MESSAGE_PREFIX, exit_status_for


def main(job_file: str, policy: str, no_push: str) -> None:
    job, rank = SwarmJob.load(job_file), own_rank()
    logs.configure(role=f"learner.{policy}.{rank}", run=job.run)
    try:
        train(job, policy, is_main=rank == 0, no_push=bool(int(no_push)))
    except SwarmqError as error:
        sys.stderr.write(f"{FINAL_MESSAGE_PREFIX}rank {rank}: {error}\n")
        sys.exit(exit_status_for([error]))


if __name__ == "__main__":
    main(*sys.argv[1:])
