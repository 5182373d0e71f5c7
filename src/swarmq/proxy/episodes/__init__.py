"""What the proxy remembers of episodes: conversations with their exact tokens, budgets, and answers to repeated requests.

Runs in the proxy. `cache` bounds the memory; `conversation_graph` and `prompt_stitching` build prompts that continue recorded tokens.
Forgetting costs a turn its parent, never its exactness.
"""
