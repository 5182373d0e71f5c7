"""The weight receiver: a process beside an engine that receives weights from learners on other hosts into shared memory.

`process.keep_receiver` runs it. The package needs neither vLLM nor torch, and must never import `push` or `vllm_plugin`.
"""
