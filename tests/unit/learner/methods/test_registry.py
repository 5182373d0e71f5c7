"""Own methods: where they are found, what the log keeps of them, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from support.episodes import make_group
from support.own_methods import ADVANTAGE, LOSS, write_own_methods
from swarmq.config import ADVANTAGES, GROUPINGS, LOSSES, OPTIMIZERS, SCHEDULES, Loss, SwarmJob, Train
from swarmq.errors import ConfigError, SetUpError
from swarmq.learner import preflight
from swarmq.learner.methods import registry
from swarmq.learner.methods.credit import compute_advantages
from swarmq.live_settings import validate_changes

TRAIN = Train(advantage=ADVANTAGE, loss=Loss(name=LOSS))


def write_job(folder: Path, train: str) -> Path:
    path = folder / "job.toml"
    path.write_text(f'run = "r"\n[policies.main]\nmodel = "m"\n[policies.main.train]\n{train}\n')
    return path


def test_every_name_of_the_settings_is_a_method_in_a_file_of_its_own() -> None:
    every = {"loss": LOSSES, "advantage": ADVANTAGES, "schedule": SCHEDULES, "optimizer": OPTIMIZERS}
    every |= {"filter": ("row_k3_max", "ratio_band"), "grouping": GROUPINGS}
    assert every.keys() | {"reward"} == registry.PACKAGES.keys() == registry.SETTINGS.keys()
    for kind, names in every.items():
        folder = Path(registry.__file__).parent / registry.PACKAGES[kind]
        assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == set(names)
        assert all(callable(registry.find_method(kind, name)) for name in names)


def test_a_module_is_found_in_the_folder_of_the_job_file_wherever_it_is_started(tmp_path: Path) -> None:
    write_own_methods(tmp_path)
    job = SwarmJob.load(write_job(tmp_path, f'advantage = "{ADVANTAGE}"\nloss.name = "{LOSS}"'))
    assert job.methods_folder == str(tmp_path.resolve())
    assert SwarmJob.load(write_job(tmp_path, 'advantage = "grpo"')).methods_folder is None
    preflight.check_methods(job, "main")
    codes = registry.read_own(job.train_of("main"), job.methods_folder)
    assert [(code.kind, code.name) for code in codes] == [("loss", LOSS), ("advantage", ADVANTAGE)]
    assert compute_advantages([make_group("a", (0.0, 1.0, 5.0), turns=1)], job.train_of("main")) == {
        "a-0": [-1.0], "a-1": [0.0], "a-2": [4.0],
    }  # fmt: skip


def test_the_log_has_the_hash_of_every_method_and_the_source_of_own_ones(tmp_path: Path) -> None:
    path = write_own_methods(tmp_path)
    registry.read_own(TRAIN, str(tmp_path))
    loss, advantage, *_ = registry.describe_methods(TRAIN)
    assert loss.source == advantage.source == path.read_text()
    built_in = registry.describe_methods(Train(advantages={"code": "ema"}))
    assert [code.name for code in built_in] == ["tis_mask", "rloo", "ema", "slot", "constant", "adamw"]
    assert {code.source for code in built_in} == {""}
    assert len({code.sha256 for code in built_in}) == 6


def test_what_trained_is_used_again_although_the_file_has_changed_or_gone(tmp_path: Path) -> None:
    path = write_own_methods(tmp_path)
    codes = registry.read_own(TRAIN, str(tmp_path))
    group = [make_group("a", (0.0, 1.0, 5.0), turns=1)]
    path.write_text(path.read_text().replace("reward - median", "reward + median"))
    assert list(registry.explain_changes(codes, str(tmp_path))) == [
        f"the loss {LOSS} has changed since it trained: the recorded code is used",
        f"the advantage {ADVANTAGE} has changed since it trained: the recorded code is used",
    ]
    registry.adopt(codes)
    assert compute_advantages(group, TRAIN)["a-0"] == [-1.0]
    registry.read_own(TRAIN, str(tmp_path))
    assert compute_advantages(group, TRAIN)["a-0"] == [1.0], "as the file now says"
    registry.adopt(codes)
    assert compute_advantages(group, TRAIN)["a-0"] == [-1.0]
    path.unlink()
    assert "is no longer there" in next(registry.explain_changes(codes, str(tmp_path)))


def test_a_built_in_method_that_has_changed_is_reported() -> None:
    code, *_ = registry.describe_methods(Train())
    assert list(registry.explain_changes([code])) == []
    (change,) = registry.explain_changes([msgspec.structs.replace(code, sha256="0")])
    assert (
        change == "the loss tis_mask has changed since it trained: its present code is used, so the weights may differ"
    )


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (None, "train.loss.name: there is no Python module 'bad_methods' in "),
        ("import torch_that_is_missing", "train.loss.name: bad_methods:one: its module cannot be loaded: ModuleNotFoundError: No module"),
        ("def other(tokens, loss): ...", "train.loss.name: bad_methods:one: bad_methods has no function 'one'"),
        ("def one(tokens, loss): return None", "train.loss.name: bad_methods:one fails the check 'shape': returned a NoneType, not a TokenLoss"),
    ],
)  # fmt: skip
def test_a_method_that_cannot_be_used_is_refused_by_its_setting(tmp_path: Path, source: str | None, says: str) -> None:
    if source is not None:
        (tmp_path / "bad_methods.py").write_text(source)
    job = SwarmJob.load(write_job(tmp_path, 'loss.name = "bad_methods:one"'))
    with pytest.raises(SetUpError) as told:
        preflight.check_methods(job, "main")
    assert str(told.value).startswith(says)


def test_options_of_a_built_in_loss_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policies.main.train.loss.options: only a loss of your own has options"):
        SwarmJob.load(write_job(tmp_path, "loss.options.cap = 1.0"))


def test_a_run_that_is_up_takes_no_code_that_it_has_not_loaded(tmp_path: Path) -> None:
    write_own_methods(tmp_path)
    job = SwarmJob.load(write_job(tmp_path, f'loss.name = "{LOSS}"'))
    path = "policies.main.train.loss.name"
    assert validate_changes(job, {path: "cispo"}, {}).policies["main"].train.loss.name == "cispo"
    assert validate_changes(job, {path: LOSS}, {}) == job
    with pytest.raises(ConfigError, match=rf"^{path}: the code of 'other:loss' is loaded when the run starts"):
        validate_changes(job, {path: "other:loss"}, {})


def test_the_registry_imports_no_torch(tmp_path: Path) -> None:
    import subprocess

    code = "import sys; from swarmq.learner.methods import registry, credit; from swarmq.config import Train; registry.describe_methods(Train()); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
