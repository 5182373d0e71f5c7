"""The path of a model call: limits, sampling settings, rendering, sampling, recording, delivery reports.

Runs in the proxy. `pipeline.Completions` is the entry; dialects never import this package.
"""
