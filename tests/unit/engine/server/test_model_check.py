"""A model that cannot be served is named with what is wrong with it, before anything is started."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from swarmq.engine.server.model_check import check_model
from swarmq.errors import EngineError

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 256}
TEMPLATE = "{{ messages }} <tool_call>"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (tmp_path / "tokenizer.json").touch()
    save_file({"a": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_whole_folder_is_described(folder):
    model = check_model(str(folder), trained=True)
    assert (model.architecture, model.hidden_size, model.is_folder) == ("Qwen3ForCausalLM", 256, True)
    assert model.tool_call_parser == "hermes"


def test_the_template_may_lie_in_a_file_of_its_own(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert check_model(str(folder), trained=True).tool_call_parser is None


QWEN3 = "{{ messages }}<tool_call><think></think>{% if not enable_thinking %}{{ '<think></think>' }}{% endif %}"
QWQ = "{{ messages }}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
INSTRUCT = "{{ messages }}{% if '</think>' in content %}{{ content.split('</think>')[-1] }}{% endif %}{{ 'assistant' }}"


@pytest.mark.parametrize(
    ("template", "parser"),
    [(QWEN3, "qwen3"), (QWQ, "deepseek_r1"), ("[gMASK]" + QWEN3, "glm45"), (INSTRUCT, None), (TEMPLATE, None)],
)
def test_thoughts_are_told_apart_where_the_template_asks_for_them(folder, template, parser):
    (folder / "chat_template.jinja").write_text(template)
    assert check_model(str(folder), trained=True).reasoning_parser == parser


@pytest.mark.parametrize(("kind", "parser"), [("qwen3", "hermes"), ("gpt_oss", "openai")])
def test_tool_calls_are_parsed_by_the_template_and_those_of_gpt_oss_by_the_only_parser_that_vllm_takes(
    folder, kind, parser
):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    (folder / "chat_template.jinja").write_text("<tool_call>")
    assert check_model(str(folder), trained=True).tool_call_parser == parser


def test_quantised_weights_are_refused_for_a_trained_policy_alone(folder):
    config = CONFIG | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=r"quantised weights .*'mxfp4'.*: use the model with BF16 weights"):
        check_model(str(folder), trained=True)
    assert check_model(str(folder), trained=False).is_folder


def test_a_tokenizer_without_chat_template_is_refused(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(EngineError, match="no chat template.*instruction-tuned"):
        check_model(str(folder), trained=True)


@pytest.mark.parametrize(
    "config",
    [{"architectures": ["BertModel"]}, {"architectures": ["T5ForCausalLM"], "is_encoder_decoder": True}, {}],
)
def test_what_is_no_causal_language_model_is_refused(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="not a causal language model"):
        check_model(str(folder), trained=True)


SEEING = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "vision_config": {"hidden_size": 1152},
    "text_config": {"hidden_size": 128, "num_hidden_layers": 3, "max_position_embeddings": 4096},
}


def test_a_model_that_takes_images_can_be_served_untrained_as_the_language_model_in_it(folder):
    (folder / "config.json").write_text(json.dumps(SEEING))
    model = check_model(str(folder), trained=False)
    assert model.architecture == "Gemma3ForConditionalGeneration"
    assert (model.hidden_size, model.layers, model.max_length) == (128, 3, 4096)


def test_of_the_models_that_take_images_only_some_can_be_trained(folder):
    for trained in ("qwen2_5_vl", "qwen3_vl"):
        (folder / "config.json").write_text(json.dumps(SEEING | {"model_type": trained}))
        assert check_model(str(folder), trained=True).hidden_size == 128
    (folder / "config.json").write_text(json.dumps(SEEING | {"model_type": "gemma3"}))
    with pytest.raises(
        EngineError, match=r"'gemma3'\), .*trains only qwen2_5_vl, qwen3_vl: .*trained = false.*another one"
    ):
        check_model(str(folder), trained=True)


@pytest.mark.parametrize("change", [{"is_encoder_decoder": True}, {"vision_config": None}])
def test_what_only_ends_as_a_model_that_takes_images_is_refused(folder, change):
    (folder / "config.json").write_text(json.dumps(SEEING | change))
    with pytest.raises(EngineError, match="not a causal language model"):
        check_model(str(folder), trained=False)


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(EngineError, match="nowhere does not exist"):
        check_model(str(tmp_path / "nowhere"), trained=True)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("config.json", "not a Hugging Face model folder"),
        ("tokenizer_config.json", "has no tokenizer"),
        ("tokenizer.json", r"has no vocabulary \(tokenizer.json or the like\): fetch"),
        ("model.safetensors", "has no weights"),
    ],
)
def test_a_missing_file_is_named(folder, name, problem):
    (folder / name).unlink()
    with pytest.raises(EngineError, match=problem):
        check_model(str(folder), trained=True)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_config_is_named(folder, content):
    (folder / "config.json").write_text(content)
    with pytest.raises(EngineError, match=r"config\.json"):
        check_model(str(folder), trained=True)


@pytest.mark.parametrize("kept", [0, 7, 8, 40, -1])
def test_weights_that_are_cut_off_are_named(folder, kept):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(EngineError, match=rf"{weights} is damaged: it .* bytes.*; fetch it again"):
        check_model(str(folder), trained=True)


def test_a_page_in_place_of_weights_is_named(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes((2).to_bytes(8, "little") + b"no")
    with pytest.raises(EngineError, match=rf"{weights} is damaged: its header is invalid"):
        check_model(str(folder), trained=True)


def test_of_weights_in_several_files_those_of_the_index_count(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / "beside.safetensors").touch()
    assert check_model(str(folder), trained=True)
    (folder / "one.safetensors").unlink()
    with pytest.raises(EngineError, match=r"one\.safetensors cannot be read \(No such file"):
        check_model(str(folder), trained=True)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": []}'])
def test_a_damaged_index_is_named(folder, content):
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(EngineError, match=r"index\.json cannot be read"):
        check_model(str(folder), trained=True)


def test_a_tokenizer_of_the_models_own_code_may_keep_its_vocabulary_anywhere(folder):
    (folder / "tokenizer.json").unlink()
    own = {"chat_template": TEMPLATE, "auto_map": {"AutoTokenizer": ["tokens.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    assert check_model(str(folder), trained=True)


def test_a_name_that_is_neither_folder_nor_model_says_where_the_folder_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EngineError) as told:
        check_model("my model", trained=True)
    assert f"neither a folder ({tmp_path}/my model) nor" in str(told.value)
    assert "\n" not in str(told.value)
