"""Registries of a run: JSON files in the run folder that list its clients, proxies and engines.

Commands and `swarmq up` write them; proxies, collector and learners read them while they run. Each registry has a class for reading
and changing its file. This package imports no AMQP and no HTTP code.
"""
