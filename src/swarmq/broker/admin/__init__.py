"""Administration of a broker: users and rights, invites of clients, dead letters.

The commands `swarmq invite`, `swarmq client` and `swarmq dead`, and `swarmq up`, call it on the operator's host.
No client, proxy, collector or learner may import it.
"""
