"""The plug-in inside vLLM: receiving weights, the secret, and patches of vLLM; `plugin.register` is vLLM's entry point.

Runs in vLLM's processes. Other packages import only the names in `plugin`, which imports vLLM on demand.
"""
