"""Memory: how much training needs (`estimate`), what the host has (`host`), and whether a policy fits (`plan`).

`estimate`, `host` and `ranks` import no torch and are used by `swarmq up`, too; `outline` and `plan` read model configurations.
"""
