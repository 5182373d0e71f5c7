"""`swarmq demo`: a small model, arithmetic problems, an agent and a scenario that show the whole system on one machine.

The command runs `run`; the model is made in a process of its own (`make_model`), clients are processes (`client`). Only
`warmup` loads torch, through `swarmq.toy_model`. Nothing but the command line and benchmarks imports this package.
"""
