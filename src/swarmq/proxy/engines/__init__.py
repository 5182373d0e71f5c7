"""The engines as the proxy uses them: pools by policy, the choice for each call, probes, and coalescing of their streams.

Runs in the proxy. Speaks to vLLM through `engine.client` alone and knows nothing of episodes or HTTP routes.
"""
