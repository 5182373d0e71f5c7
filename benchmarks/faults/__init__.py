"""The fault run: real daemons under injected faults, and the comparison of every promise afterwards.

`python -m benchmarks.faults` is `run`. `world` starts the daemons through `nursery`; `inject` breaks them; `client`, `http_client` and
`engine` are processes of the run; `check` judges what is left; `broken` has the negative controls.
"""
