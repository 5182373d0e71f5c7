"""vLLM servers of a run: clients of running servers (`client`), and their start and supervision (`server`).

`client` is used by proxy, learner and command line; `server` by `swarmq up` and `swarmq engine`. `auth` imports the standard
library only. Nothing here imports torch or, outside the server's own processes, vLLM.
"""
