"""The load of the proxy: callers, a scripted engine and a drained inbox, each a process of its own.

`python -m benchmarks.proxy` is `run`; `benchmarks.proxy_h200` measures the proxy with a real vLLM.
"""
