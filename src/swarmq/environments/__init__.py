"""Environments that exist, run whole: their own tasks, rollout and rewards against an episode's endpoint.

    verifiers:NAME   gymnasium:ID   reasoning-gym:NAME   openenv:URL      each with ?key=value&key=value

Runs in `swarmq worker` (the attempts) and in `swarmq feed` (the tasks), or in a user's program:

    environment = load_environment("gymnasium:FrozenLake-v1?is_slippery=false")
    client.run_episodes_until_all_complete(environment.tasks("train"), environment.attempt)

Every kind of environment is one module with the three methods of `Environment`. What breaks in an environment fails the
episode and is never a reward.
"""

from swarmq.environments.protocol import Environment, Split
from swarmq.environments.schemes import EnvironmentAgent, is_environment, load_agent, load_environment

__all__ = ["Environment", "EnvironmentAgent", "Split", "is_environment", "load_agent", "load_environment"]
