"""The proxy: an OpenAI- and Anthropic-compatible server in front of vLLM that records every sampled token.

`swarmq-proxy` runs `main`. A request passes `http` (routes), `dialects` (its own form), `completions` (the pipeline), `engines` (vLLM) and
`episodes` (what was said before); `requests` has the records that travel between them. Litestar is used here and nowhere else.
"""
