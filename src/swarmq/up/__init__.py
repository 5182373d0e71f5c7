"""`swarmq up`: start every process of a run on one host, keep each running, stop them in order.

job_checks.py    checks and decisions before anything is started
placement.py     GPUs for learners and engines
deployment.py    the start of all processes, in order
supervision.py   restarts of processes that die
shutdown.py      the time each process has to stop
ports.py         the same ports at every start

It runs in the process of `swarmq up`, and offers `deploy`, `plan_run` and `check_settings` to the command line and the demo.
It must never import `cli`, `demo` or `testing`, nor torch.
"""

from swarmq.up.deployment import Deployment, Endpoints, deploy
from swarmq.up.job_checks import check_settings, plan_run

__all__ = ["Deployment", "Endpoints", "check_settings", "deploy", "plan_run"]
