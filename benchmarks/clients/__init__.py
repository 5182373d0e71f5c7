"""Other people's clients as rows of a table: is every answer that a client reports spelled by the tokens recorded for it?

programs.py   the clients, their versions and what each runs
world.py      RabbitMQ, vLLM, proxy and collector that they meet
compare.py    answers against recorded tokens
drivers/      a small program for each client, run in an environment of its own

Engine, tiny model and installations are those of the tests (tests/support).
"""
