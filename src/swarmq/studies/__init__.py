"""Studies: from a question to a report with intervals, by trials that may be killed at any time.

Others import `study` (the file that states a study) and `ledger` (what happened). The leader (`leader`) and workers (`worker`) are
processes of `swarmq study`; the pages of `report` and `statistics` read the ledger alone.
"""
