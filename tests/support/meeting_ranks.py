"""Run on ranks: each joins the group, and prints why it cannot."""

from __future__ import annotations

import sys

from swarmq.errors import LearnerError
from swarmq.learner.distributed.rendezvous import join_group

if __name__ == "__main__":
    try:
        join_group(connect_s=float(sys.argv[1]))
    except LearnerError as error:
        sys.stdout.write(str(error))
