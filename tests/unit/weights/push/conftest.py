from support.scripted_vllm import another, vllm

__all__ = ["another", "vllm"]
