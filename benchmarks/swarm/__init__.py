"""Swarms of clients on a whole deployment: mixed kinds, edited agents, many workers, two policies.

`python -m benchmarks.swarm` is `run`, which starts one part after the other; `world` has the deployment that the parts share.
"""
