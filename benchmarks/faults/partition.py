"""A cut between one node of a RabbitMQ cluster and the others, while clients still reach all of them.

The node gets a wrong cookie for each of the others, and drops its connections to them. From then on neither side accepts the other,
as if their link was down, until the cookie is right again. That needs no root, and works with any RabbitMQ.
"""

from __future__ import annotations

from swarmq.broker.node.process import PrivateNode

CUT = "[begin erlang:set_cookie(N, cut), erlang:disconnect_node(N) end || N <- [{others}]]."
HEAL = "[erlang:set_cookie(N, erlang:get_cookie()) || N <- [{others}]]."


async def cut_off(node: PrivateNode, nodes: list[PrivateNode]) -> None:
    await node.ctl("eval", CUT.format(others=_others(node, nodes)))


async def heal(node: PrivateNode, nodes: list[PrivateNode]) -> None:
    await node.ctl("eval", HEAL.format(others=_others(node, nodes)))


def _others(node: PrivateNode, nodes: list[PrivateNode]) -> str:
    return ", ".join(f"'{other.identity.node}'" for other in nodes if other is not node)
