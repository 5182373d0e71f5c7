"""The proxy: an OpenAI- and Anthropic-compatible server in front of vLLM that records every sampled token.

`swarmq-proxy` runs `main`. A request passes `http` (routes), `dialects` (translation of each API), `completions` (the pipeline),
`engines` (vLLM) and `episodes` (earlier turns of the conversation); `requests` has the records that travel between them.
"""
