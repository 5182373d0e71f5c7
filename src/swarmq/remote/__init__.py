"""Runs on another host, from Python and from the command line: a client of the daemon that `swarmq host serve` starts there.

It runs in users' programs and in `swarmq ... --host`, and offers `launch` and `HostClient`. It imports neither torch nor an HTTP
library.
"""
