"""`python -m swarmq` is `swarmq`."""

from swarmq.cli import main

main()
