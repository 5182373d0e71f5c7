"""Copies of a model on two hosts are compared before an engine is started with one of them."""

import json

import pytest

from swarmq.config import SwarmJob
from swarmq.errors import ConfigError
from swarmq.hosts.members import StoredMembership, check_model_files
from swarmq.hosts.model_files import describe_model


def write(folder, *, hidden_size=64, tokenizer="a"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": hidden_size, "transformers_version": tokenizer}))
    (folder / "tokenizer.json").write_text(tokenizer)
    return folder


def test_a_copy_that_another_version_has_written_is_the_same_model(tmp_path):
    there, here = write(tmp_path / "there"), write(tmp_path / "here")
    (here / "config.json").write_text('{"transformers_version": "9",   "hidden_size": 64}')
    assert describe_model(there) == describe_model(here)


def test_what_differs_is_named(tmp_path):
    there = describe_model(write(tmp_path / "there"))
    wider = describe_model(write(tmp_path / "wider", hidden_size=128))
    foreign = describe_model(write(tmp_path / "foreign", tokenizer="b"))
    assert there.find_difference(there) == ""
    assert there.find_difference(wider) == "hidden_size in its config.json is 128, not 64"
    assert there.find_difference(foreign) == "its tokenizer's files differ"


def test_a_host_without_the_folder_or_with_another_model_in_it_is_told_so(tmp_path):
    model = write(tmp_path / "model")
    job = SwarmJob.build({"run": "r", "folder": str(tmp_path), "policies": {"main": {"model": str(model)}}})
    members = StoredMembership(job).read()
    check_model_files(members, "main")
    write(model, hidden_size=128)
    with pytest.raises(ConfigError, match="another model here than on the run's host: hidden_size"):
        check_model_files(members, "main")
    (model / "config.json").unlink()
    with pytest.raises(ConfigError, match="copy it to the same path"):
        check_model_files(members, "main")


def test_a_name_on_the_hub_is_not_compared(tmp_path):
    job = SwarmJob.build({"run": "r", "folder": str(tmp_path), "policies": {"main": {"model": "Qwen/Qwen3-0.6B"}}})
    check_model_files(StoredMembership(job).read(), "main")
