"""Agents that are programs: coding agents and other command lines, run as they are, one process for every episode.

Runs in the process of `swarmq run`. Offers `agent.CommandAgent`, an agent's function for the client's runners: it copies the
task's folder, relays the command's model calls to the run's proxy, and scores what the command left behind. Built on `client`
and `runtime`; imports no HTTP library.
"""
