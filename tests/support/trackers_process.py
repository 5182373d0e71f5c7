"""Log like a learner to W&B, MLflow, trackio and TensorBoard, read back what they stored, and print it as JSON.

A process of its own, because these packages are in a folder of their own and leave threads and global state behind.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from accelerate import Accelerator

from support.episodes import make_group
from swarmq.config import Train
from swarmq.learner.train.trackers import Trackers

EVALUATED = {
    "version": 1,
    "missing": 0,
    "kinds": {
        "math": {
            "tasks": 2,
            "episodes": 2,
            "reward": 0.5,
            "pass": {"1": {"value": 0.5, "low": 0.1, "high": 0.9, "tasks": 2}},
            "metrics": {"tool calls": 2.5},
        }
    },
}
HOSTILE = [{"role": "user", "content": "<script>\x1b[2J" + "x" * 100_000}]
BLOCK, HEADER = 32768, struct.Struct("<IHB")
PARTS = {1: (True, True), 2: (True, False), 3: (False, False), 4: (False, True)}
"""Type of a part of a record -> whether it is the first and the last one."""


def log_run(folder: Path) -> None:
    train = Train(trackers=("tensorboard", "wandb", "mlflow", "trackio"))
    trackers = Trackers(Accelerator(cpu=True), train, run="r", policy="main", folder=folder)
    episodes = [
        msgspec.structs.replace(
            one, turns=(msgspec.structs.replace(one.turns[0], messages=msgspec.json.encode(HOSTILE)),)
        )
        for one in make_group("a", (0.0, 1.0))
    ]
    for version in (1, 2, 3):
        trackers.log(version, {"reward": version / 4, "metrics_by_kind": {"math": {"tool calls": float(version)}}})
        trackers.log_samples(version, episodes)
    trackers.log_evaluation(1, EVALUATED, now=3)  # it took two steps
    trackers.log(4, {"reward": 1.0})
    trackers.close()


def read_wandb(folder: Path) -> dict[str, Any]:
    """Return rows of the history, the axis of evaluations, and the tables."""
    from wandb.proto import wandb_internal_pb2

    rows, axes = [], {}
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    for body in read_records(path.read_bytes()[7:]):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(body)
        match record.WhichOneof("record_type"):
            case "history":
                items = {one.key or "/".join(one.nested_key): one.value_json for one in record.history.item}
                rows.append({name: msgspec.json.decode(value) for name, value in items.items()})
            case "metric" if record.metric.step_metric:
                axes[record.metric.glob_name] = record.metric.step_metric
    tables = [msgspec.json.decode(file.read_bytes()) for file in folder.glob("wandb/offline-run-*/files/media/table/*")]
    return {"rows": rows, "axes": axes, "tables": tables}


def read_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log, W&B's file format, whose blocks begin 7 bytes before `data`."""
    at, record = 7, b""
    while at - 7 < len(data):
        if BLOCK - at % BLOCK < HEADER.size:
            at += BLOCK - at % BLOCK
            continue
        _, size, part = HEADER.unpack_from(data, at - 7)
        body = data[at - 7 + HEADER.size :][:size]
        is_first, is_last = PARTS[part]
        record = body if is_first else record + body
        if is_last:
            yield record
        at += HEADER.size + size


def read_mlflow() -> dict[str, list[tuple[int, float]]]:
    import mlflow

    client = mlflow.MlflowClient()
    (experiment,) = (one for one in client.search_experiments() if one.name == "r.main")
    (run,) = client.search_runs([experiment.experiment_id])
    return {
        name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def read_trackio() -> list[dict[str, Any]]:
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("r.main")
    return list(SQLiteStorage.get_logs("r.main", run))


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ |= {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio"), "MLFLOW_ALLOW_FILE_STORE": "true"}
    os.environ["MLFLOW_TRACKING_URI"] = f"file://{folder}/mlruns"
    log_run(folder)
    read = {"wandb": read_wandb(folder), "mlflow": read_mlflow(), "trackio": read_trackio()}
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(read, enc_hook=str))


if __name__ == "__main__":
    main()
