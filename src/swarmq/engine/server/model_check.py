"""Preflight checks of a model's files, before anything slow is started.

Imports nothing heavy: folders are read as JSON, and only the small files of a hub model are fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from swarmq.config import is_model_path
from swarmq.errors import EngineError, MissingExtraError
from swarmq.weights.format.safetensors_files import check_weight_files

CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
MULTIMODAL_SUFFIX = "ForConditionalGeneration"
"""Suffix of the architecture of models that take images; encoder-decoders have it, too, but no `vision_config`."""
TRAINED_VISION_MODELS = ("qwen2_5_vl", "qwen3_vl")
"""Types (`model_type` in config.json) of models that take images and can be trained."""
SMALL_FILES = ["config.json", "tokenizer_config.json", "chat_template.*", "tokenizer.*", "generation_config.json"]
VOCABULARY_FILES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
"""Patterns of vocabulary files, of which every tokenizer has at least one."""
TOOL_PARSERS = {"<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3_json"}
"""Tool-call marker in a chat template -> vLLM's parser."""
HARMONY = {"gpt_oss": "openai"}
"""`model_type` whose chats vLLM renders in OpenAI's Harmony format, whatever the chat template -> its only parser."""

REASONING_PARSERS = (
    (("<seed:think>",), "seed_oss"),
    (("[gMASK]", "<think>", "enable_thinking"), "glm45"),
    (("<think>", "enable_thinking"), "qwen3"),
)
"""Markers -> vLLM's reasoning parser. The first parser is used for which the chat template has all markers."""
PROMPT_OPENS_REASONING = re.compile(r"<think>(\\n|\s)*['\"]?\s*-?}}[^<]*\Z")
"""Pattern of a template whose generation prompt ends with an opening tag, as DeepSeek-R1's."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a model that its launch depends on."""

    name: str
    architecture: str
    hidden_size: int
    is_folder: bool
    max_length: int | None = None
    """Model's context length in tokens; None if its config does not say."""
    layers: int = 0
    parameters: int = 0
    """Estimated number of parameters; fields that config.json lacks are assumed to be as in Llama."""
    fans: int = 0
    """Estimated sum of inputs plus outputs over all matrices in the layers: the number of adapter parameters per rank."""
    kv_values_per_token: int = 0
    """Number of cached key and value elements per token, in all layers."""
    tool_call_parser: str | None
    """vLLM's tool-call parser; None if unknown (`engine.arguments` can name it)."""
    reasoning_parser: str | None = None
    """vLLM's reasoning parser; None if unknown or if the model does not reason by default."""


def check_model(name: str, *, trained: bool) -> ModelFacts:
    """Return facts of a model folder or hub name; for a model that takes images, those of its language model. Raises
    EngineError if the model cannot be served or, with `trained`, cannot be trained."""
    is_folder = Path(name).is_dir()
    folder = Path(name) if is_folder else _fetch_small_files(name)
    config = _read_json(folder / "config.json", f"{name} is not a Hugging Face model folder")
    architectures = config.get("architectures") or ["none named"]
    _check_architecture(name, config, architectures, trained=trained)
    if trained and (quantization := config.get("quantization_config")):
        raise EngineError(
            f"{name} has quantised weights (config.json: quantization_config, quant_method {quantization.get('quant_method')!r}), for which "
            "engines take no pushes from a learner: use the model with BF16 weights (engine.quantization = 'fp8' lets engines quantise "
            "them), or serve it untrained (policies.*.trained = false)"
        )
    if is_folder:
        check_weight_files(folder)
        _check_vocabulary(folder)
    template = _read_chat_template(folder, name)
    return ModelFacts(
        name=name,
        architecture=str(architectures[0]),
        hidden_size=_get_int(config, "hidden_size"),
        layers=_get_int(config, "num_hidden_layers"),
        parameters=count_parameters(config),
        fans=count_fans(config),
        kv_values_per_token=2
        * _get_int(config, "num_hidden_layers")
        * _count_kv_heads(config)
        * _get_head_size(config),
        is_folder=is_folder,
        max_length=_get_int(config, "max_position_embeddings") or None,
        tool_call_parser=HARMONY.get(str(config.get("model_type")))
        or next((parser for mark, parser in TOOL_PARSERS.items() if mark in template), None),
        reasoning_parser=_choose_reasoning_parser(template),
    )


def _check_vocabulary(folder: Path) -> None:
    own_code = _read_json(folder / "tokenizer_config.json", f"{folder} has no tokenizer").get("auto_map")
    if not own_code and not any(path for pattern in VOCABULARY_FILES for path in folder.glob(pattern)):
        raise EngineError(
            f"the tokenizer of {folder} has no vocabulary (tokenizer.json or the like): fetch all of the model's files, or save its "
            "tokenizer there with save_pretrained()"
        )


def _check_architecture(name: str, config: Mapping[str, Any], architectures: Sequence[Any], *, trained: bool) -> None:
    written = f"config.json: architectures {architectures}"
    takes_images = isinstance(config.get("vision_config"), dict)
    known = (*CAUSAL_SUFFIXES, MULTIMODAL_SUFFIX) if takes_images else CAUSAL_SUFFIXES
    if config.get("is_encoder_decoder") or not str(architectures[0]).endswith(known):
        raise EngineError(
            f"{name} is not a causal language model ({written}): choose one whose architecture ends in ForCausalLM, or, for a "
            "policy with trained = false, one that takes images (ForConditionalGeneration with a vision_config)"
        )
    if takes_images and trained and config.get("model_type") not in TRAINED_VISION_MODELS:
        raise EngineError(
            f"{name} is a model that takes images ({written}, model_type {config.get('model_type')!r}), and of these a learner "
            f"trains only {', '.join(TRAINED_VISION_MODELS)}: serve it untrained (policies.*.trained = false), or train another one"
        )


def fetch_num_parameters(name: str) -> int:
    """Return the number of parameters of a model folder or hub name, computed from its configuration. Raises EngineError without
    a configuration."""
    folder = Path(name) if Path(name).is_dir() else _fetch_small_files(name)
    return count_parameters(_read_json(folder / "config.json", f"{name} is not a Hugging Face model folder"))


def count_parameters(config: Mapping[str, Any]) -> int:
    """Count the parameters of a causal language model with this config.json: attention, gated MLP or experts, embedding, head."""
    hidden, layers = _get_int(config, "hidden_size"), _get_int(config, "num_hidden_layers")
    attention = (
        2 * hidden * _get_head_size(config) * (_get_int(config, "num_attention_heads") + _count_kv_heads(config))
    )
    experts, inner = _get_experts(config)
    mlp = 3 * hidden * experts * inner
    ends = hidden * _get_int(config, "vocab_size") * (1 if _get_text_config(config).get("tie_word_embeddings") else 2)
    return layers * (attention + mlp + 2 * hidden) + ends + hidden


def count_fans(config: Mapping[str, Any]) -> int:
    """Count inputs plus outputs of every matrix in the layers of a model with this config.json; fused expert gates count twice,
    because their adapters have the rank of both matrices."""
    hidden, layers = _get_int(config, "hidden_size"), _get_int(config, "num_hidden_layers")
    queries, keys = (
        _get_head_size(config) * n for n in (_get_int(config, "num_attention_heads"), _count_kv_heads(config))
    )
    attention = 2 * (hidden + queries) + 2 * (hidden + keys)
    experts, inner = _get_experts(config)
    gates = 2 * (hidden + (2 if experts > 1 else 1) * inner)
    return layers * (attention + experts * (gates + hidden + inner))


def _get_experts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of gated MLPs per layer, and their width."""
    experts = _get_int(config, "num_experts", "num_local_experts", "n_routed_experts")
    width = _get_int(config, "moe_intermediate_size", "intermediate_size") if experts else 0
    return (experts, width) if experts * width else (1, _get_int(config, "intermediate_size"))


def _get_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a configuration."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _get_int(config: Mapping[str, Any], *names: str) -> int:
    """Return the first value in `config` that is set among the fields `names`, else 0."""
    return next((int(value) for name in names if (value := _get_text_config(config).get(name))), 0)


def _count_kv_heads(config: Mapping[str, Any]) -> int:
    return _get_int(config, "num_key_value_heads", "num_attention_heads")


def _get_head_size(config: Mapping[str, Any]) -> int:
    heads = _get_int(config, "num_attention_heads")
    return _get_int(config, "head_dim") or _get_int(config, "hidden_size") // max(heads, 1)


def _read_chat_template(folder: Path, name: str) -> str:
    """Return the chat template, read from the files in which transformers looks for it."""
    tokenizer = _read_json(folder / "tokenizer_config.json", f"{name} has no tokenizer")
    for path in (folder / "chat_template.jinja", folder / "chat_template.json"):
        if path.is_file():
            return path.read_text()
    if template := tokenizer.get("chat_template"):
        return json.dumps(template) if isinstance(template, list) else str(template)
    raise EngineError(
        f"the tokenizer of {name} has no chat template, so it cannot answer chat completions: use an instruction-tuned "
        "model, or put a chat_template.jinja beside its tokenizer_config.json"
    )


def _choose_reasoning_parser(template: str) -> str | None:
    """Return the reasoning parser of a model that reasons by default. For a model that only reasons on request, a parser would
    take the whole answer as reasoning."""
    for marks, parser in REASONING_PARSERS:
        if all(mark in template for mark in marks):
            return parser
    return "deepseek_r1" if PROMPT_OPENS_REASONING.search(template) else None


def _read_json(path: Path, problem: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise EngineError(f"{problem}: {path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise EngineError(f"{problem}: {path} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise EngineError(f"{problem}: {path} is not a JSON object")
    return content


def _fetch_small_files(name: str) -> Path:
    """Fetch the small files of a hub model and return their folder."""
    if is_model_path(name) or Path(name).exists():
        raise EngineError(f"model folder {name} does not exist or is not a folder: check policies.*.model")
    try:
        import huggingface_hub  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise MissingExtraError(
            f"model {name!r} is not a local folder; to fetch it from the hub: pip install 'swarmq[learner]'"
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=SMALL_FILES))
    except Exception as error:  # the hub raises many kinds of errors; each means that the model is not available
        why = str(error).partition("\n")[0]
        raise EngineError(
            f"model {name!r} is neither a folder ({Path(name).absolute()}) nor can it be fetched from the Hugging Face hub "
            f"({type(error).__name__}: {why}): check policies.*.model, or download the model and name its folder"
        ) from error
