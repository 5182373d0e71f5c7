"""Observation of a run: a live board folded from its events, its folder as Python objects, figures, and every episode ever begun.

Commands, `swarmq up`, the dashboard and notebooks run this code. It offers `monitor` (follow a live run), `board_terminal` (draw it),
`recorder` (record a live run), `control_requests` (ask a live run to change), `runs` (list run folders), `open_run` and `run` (one
run in Python), `index` and `episodes` (every episode, trained or not), `inspect` (batch logs) and `plot`. It never imports torch
and never writes into a run folder, except for `recorder`.
"""
