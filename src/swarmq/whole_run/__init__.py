"""A whole run in this process: `swarmq train`, and the parts of it that the demo uses, too.

plan.py       agents and tasks, loaded and checked before anything starts
session.py    a run that is up, followed, recorded and joined by a client; how its progress is shown
run.py        the course of `swarmq train`: feed, work, measure, stop
report.py     what it ends with: a page in the run folder

Nothing but the command line, the demo and `offline` imports this package.
"""
