"""Start and supervision of vLLM servers: preflight checks, command line, watchdog, and engines added to a live run.

Runs in `swarmq up` and `swarmq engine`. Offers `launch.EngineProcess`; starts vLLM as a process and never imports it.
"""
