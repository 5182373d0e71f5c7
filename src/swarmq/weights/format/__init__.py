"""Formats in which weights travel: packed buffers, adapter files, CUDA IPC handles, NCCL groups, and checksums.

Shared by the learner and the plug-in inside vLLM, so both ends run the same code. Never imports `push` or `vllm_plugin`.
"""
