"""Provisioning of a RabbitMQ server: find or install one, start it, watch it.

`swarmq up` uses it to run a private node (process.py) or a docker container (container.py);
`python -m swarmq.broker.node.install` installs a server. Its seam is `PrivateNode`, `find_server` and `find_container`.
It knows nothing of messages and must never import `amqp`.
"""
