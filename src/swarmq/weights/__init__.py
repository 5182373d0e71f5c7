"""Weight pushes from a learner into running engines.

`push` runs in the learner, `vllm_plugin` inside vLLM, and both share the formats in `format`.
"""
