"""Observation of a run: a live board folded from its events, plots from its event file, the list of runs, and stored episodes.

Commands and `swarmq up` run this code. It offers `monitor` (follow a live run), `board_terminal` (draw it), `control_requests` (ask a
live run to change), `curves` and `runs` (event files and run folders) and `inspect` (batch logs). It never imports torch.
"""
