"""The speed of the machine: seconds of processor for a fixed piece of work of the kinds that swarmq does, from the standard library alone.

A figure in seconds is divided by it, and a rate is multiplied by it, so that a line measured on a fast machine can be compared with
one of a slow machine. The work must never change: all lines would have to be measured again.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import statistics
import time
import zlib

REPEATS = 7


def measure_reference_s() -> float:
    return statistics.median(_work() for _ in range(REPEATS))


def _work() -> float:
    began = time.process_time()
    database = sqlite3.connect(":memory:")
    database.execute("create table message (key text primary key, body blob)")
    for number in range(2_000):
        row = {"id": f"message-{number}", "tokens": list(range(number, number + 128)), "logprobs": [0.25] * 128}
        body = zlib.compress(json.dumps(row).encode(), 1)
        key = hashlib.sha256(body).hexdigest()
        database.execute("insert into message values (?, ?)", (key, body))
    for (body,) in database.execute("select body from message order by key"):
        json.loads(zlib.decompress(body))
    return time.process_time() - began
