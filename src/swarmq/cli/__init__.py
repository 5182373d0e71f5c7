"""The `swarmq` command and the daemons' entry points. Heavy modules are imported when their command runs."""

from swarmq.cli import (  # noqa: F401 - each adds its commands to the group
    access,
    control,
    dashboard,
    dead_letters,
    engines,
    hosts,
    init,
    make_tasks,
    methods,
    recording,
    run,
    slurm,
    stored_runs,
    studies,
    tasks,
    train,
    up,
    warm,
    watching,
)
from swarmq.cli.common import main
from swarmq.cli.daemons import collector, learner, proxy
from swarmq.cli.remote import add_host_options

add_host_options(main)

__all__ = ["collector", "learner", "main", "proxy"]
