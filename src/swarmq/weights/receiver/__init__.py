"""The weight receiver: a process beside an engine that takes weights from learners on other hosts into shared memory.

`process.keep_receiver` runs it. Needs neither vLLM nor torch, and never imports `push` or `vllm_plugin`.
"""
