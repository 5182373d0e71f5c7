"""One host, one command: `swarmq up` starts every part of a run, keeps each running, stops them in order.

plan.py         what is looked at before anything is started
deployment.py   start and resolve addresses, in order
keeping.py      start again what dies
stopping.py     how long each part has to stop
ports.py        the same ports at every start
"""

from swarmq.up.deployment import Deployment, Endpoints, deploy
from swarmq.up.job_checks import check_settings, plan_run

__all__ = ["Deployment", "Endpoints", "check_settings", "deploy", "plan_run"]
