"""Clients of a running engine: the `Engine` interface, its vLLM implementation, and comparison of tokenizers.

Runs in proxies, the learner and the command line. Never imports vLLM or torch.
"""
