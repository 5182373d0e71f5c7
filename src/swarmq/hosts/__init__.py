"""Engines and proxies on other hosts: they follow the run's membership over the broker, and join and leave by registrations.

    collector ──`members` event──> follow.py      the registries of the run folder, its settings, its models
    engine, proxy ──Registration──> collector     register.py; the collector checks that it reaches the URL, then edits the registry

Proxies and `swarmq engine start --join` import this package; it runs no process of its own. It must never import HTTP code.
"""
