"""Foreign clients and harnesses, unchanged, on a run of swarmq: a row for each client and protocol.

    python -m benchmarks.clients
    python -m benchmarks.clients --only openai codex --out /tmp/out

Every client is a process in an environment of its own (pinned versions, kept in `.cache`), which gets the base URL and key of an
episode and nothing else. It has a small conversation and writes down every answer as its library reports it. The answers are
compared with the tokens that the collector hands to a learner, decoded. Needs the registries of pip and npm at the first run.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import report
from benchmarks.clients.compare import Answer, compare
from benchmarks.clients.programs import CLIENTS, Client
from benchmarks.clients.world import World, open_world
from support.clients import run_agent

RUN_S = 300.0


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="clients whose name contains one of these words")
    options = parser.parse_args()
    clients = [one for one in CLIENTS if not options.only or any(w.lower() in one.name.lower() for w in options.only)]
    rows = asyncio.run(measure(clients))
    heads = ("client", "version", "protocol", "run", "calls", "answered", "turns", "equal", "result")
    print(report.table(heads, [[row[head] for head in heads] for row in rows]))
    figures = {
        "clients": len(clients),
        "rows": len(rows),
        "rows_equal": sum(row["result"] == "equal" for row in rows),
        **{name: sum(row[name] for row in rows) for name in ("calls", "answered", "turns", "equal")},
        "refused": sum(len(row["refused"]) for row in rows),
        "unequal": sum(len(row["unequal"]) for row in rows),
    }
    print(report.table(("figure", "value"), list(figures.items())))
    report.save("clients", figures, detail={"rows": rows}, out=options.out, finished=not options.only)


async def measure(clients: list[Client]) -> list[dict[str, Any]]:
    """A row for every client and protocol. A client that cannot be installed or fails is a row with its error."""
    installed: dict[str, Path | str] = {}
    for client in clients:
        print(f"install {', '.join(client.packages)}", flush=True)
        try:
            installed[client.name] = await asyncio.to_thread(client.install)
        except AssertionError as error:
            installed[client.name] = str(error)[-500:]
    rows = []
    with tempfile.TemporaryDirectory(prefix="swarmq-clients-") as folder:
        print("start RabbitMQ, vLLM, proxy and collector", flush=True)
        async with open_world(Path(folder)) as world:
            for client in clients:
                for protocol, forms in client.runs.items():
                    row = await run_row(world, client, protocol, forms, installed[client.name], Path(folder))
                    print(f"{client.name}, {protocol}: {row['equal']} of {row['turns']}, {row['result']}", flush=True)
                    rows.append(row)
    return rows


async def run_row(
    world: World, client: Client, protocol: str, forms: tuple[str, ...], installed: Path | str, folder: Path
) -> dict[str, Any]:
    """All that a client runs over one protocol."""
    row: dict[str, Any] = {"client": client.name, "version": client.version, "protocol": protocol}
    row |= {"run": ", ".join(forms), "calls": 0, "answered": 0, "turns": 0, "equal": 0}
    row |= {"refused": [], "unequal": [], "unreported": [], "errors": []}
    began = time.monotonic()
    if isinstance(installed, str):
        row["errors"].append(f"not installed: {installed}")
    else:
        for form in forms:
            await run_form(world, client, protocol, form, installed, folder / "answers.jsonl", row)
    return row | {"seconds": round(time.monotonic() - began, 1), "result": verdict(row)}


async def run_form(
    world: World, client: Client, protocol: str, form: str, installed: Path, answers: Path, row: dict[str, Any]
) -> None:
    """One episode; what came of it is added to the row."""
    await asyncio.to_thread(answers.write_text, "")
    task = f"{client.name} {protocol} {form}"
    async with world.client.episode({"id": task}) as ep:
        command, environment = client.command(installed, protocol, form)
        environment |= {"AGENT_BASE_URL": ep.base_url, "AGENT_KEY": ep.api_key, "AGENT_ANSWERS": str(answers)}
        try:
            async with asyncio.timeout(RUN_S):
                await run_agent(*command, **environment)
        except AssertionError as error:
            row["errors"].append(f"{form}: {last_line(str(error))}")
            print(str(error)[-3000:], flush=True)
        except TimeoutError:
            row["errors"].append(f"{form}: not done after {RUN_S:.0f} s")
        await ep.end(1.0)
    calls = world.counter.sampled(ep.api_key)
    answered = [one for one in calls if one.status == 200]
    recorded = await world.recorded(ep.episode_id) if answered else []
    told = await asyncio.to_thread(read_answers, answers)
    compared = compare(told, recorded)
    row["calls"] += len(calls)
    row["answered"] += len(answered)
    row["turns"] += len(recorded)
    row["equal"] += compared.equal
    row["refused"] += [one.refusal for one in calls if one.status != 200]
    for answer in compared.unequal:
        print(f"{task}: no turn spells {answer}; left: {compared.unreported}", flush=True)
    row["unequal"] += msgspec.to_builtins(compared.unequal)
    row["unreported"] += compared.unreported


def read_answers(path: Path) -> list[Answer]:
    return [msgspec.json.decode(line, type=Answer) for line in path.read_bytes().splitlines()]


def verdict(row: dict[str, Any]) -> str:
    """`equal`, or what went wrong, in words."""
    if row["errors"]:
        return row["errors"][0][:160]
    if row["turns"] != row["answered"]:
        return f"{row['answered']} calls answered, {row['turns']} turns recorded"
    if row["unequal"]:
        return f"unequal: {len(row['unequal'])} answers have no turn that spells them"
    if row["refused"]:
        return f"refused: {row['refused'][0][:160]}"
    if row["unreported"]:
        return f"{len(row['unreported'])} recorded turns were not reported by the client"
    return "equal" if row["turns"] else "no call"


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


if __name__ == "__main__":
    main()
