"""A worker loads the bytes that the learner sent, or none: what does not reach it leaves the model alone."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from swarmq.errors import EngineError
from swarmq.runtime.processes import find_free_port
from swarmq.weights.format import nccl_group
from swarmq.weights.format.conventions import UNTOUCHED
from swarmq.weights.format.packing import PackedLayout, checksum_buffer
from swarmq.weights.format.served_folder import ServedFolder

pynccl = pytest.importorskip("vllm.distributed.device_communicators.pynccl")
weights_receiver = pytest.importorskip("swarmq.weights.vllm_plugin.receiver")
weights_reload = pytest.importorskip("swarmq.weights.vllm_plugin.reload")
layerwise = pytest.importorskip("vllm.model_executor.model_loader.reload.layerwise")

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
CPU = torch.device("cpu")


class Group:
    """Of a learner that holds `sent`."""

    def __init__(self, sent: torch.Tensor) -> None:
        self._sent = sent

    def broadcast(self, buffer: torch.Tensor) -> None:
        buffer.copy_(self._sent)


def worker(group: Group) -> weights_receiver.WeightReceiver:
    receiver = object.__new__(weights_receiver.WeightReceiver)
    receiver.device, receiver._group = CPU, group
    return receiver


@pytest.fixture
def plan() -> PackedLayout:
    return PackedLayout.of(WEIGHTS, torch.float32)


@pytest.fixture
def sent(plan: PackedLayout) -> torch.Tensor:
    buffer = torch.zeros(plan.size_bytes, dtype=torch.uint8)
    plan.pack(WEIGHTS, buffer)
    return buffer


def test_what_lies_beside_the_files_of_an_index_is_not_of_the_model(tmp_path: Path) -> None:
    """Some models are published in two formats, in one folder."""
    save_file({"a": torch.ones(2, 3)}, tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    save_file({"layers.a": torch.ones(2, 3)}, tmp_path / "consolidated.safetensors")
    folder = ServedFolder(tmp_path)
    assert folder.read_shapes() == {"a": (2, 3)}
    with folder.weights() as weights:
        assert weights.keys() == {"a"}


@pytest.mark.parametrize("revision", [None, "main", "v2"])
def test_the_folder_of_a_model_that_is_named_as_on_the_hub_is_the_one_that_vllm_loaded(
    tmp_path: Path, revision: str | None
) -> None:
    for commit, ref in (("c1", "main"), ("c2", "v2")):
        (tmp_path / "models--org--tiny" / "refs").mkdir(parents=True, exist_ok=True)
        (tmp_path / "models--org--tiny" / "refs" / ref).write_text(commit)
        (tmp_path / "models--org--tiny" / "snapshots" / commit).mkdir(parents=True)
    found = serving("org/tiny", tmp_path, revision)._find_served_folder().path
    assert found == tmp_path / "models--org--tiny" / "snapshots" / ("c2" if revision == "v2" else "c1")


def test_a_model_that_is_not_on_this_host_is_not_fetched_for_adapters(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=f"org/tiny cannot be found on this host, {UNTOUCHED}: .*traffic has been disabled"
    ):
        serving("org/tiny", tmp_path)._find_served_folder()


def serving(model: str, cache: Path, revision: str | None = None) -> weights_receiver.WeightReceiver:
    receiver = object.__new__(weights_receiver.WeightReceiver)
    receiver.model_config = SimpleNamespace(model=model, revision=revision)
    receiver.vllm_config = SimpleNamespace(load_config=SimpleNamespace(download_dir=str(cache)))
    return receiver


def test_the_bytes_that_were_sent_are_the_weights(plan: PackedLayout, sent: torch.Tensor) -> None:
    update = weights_receiver.UpdateInfo(tensors=plan.entries, checksum=checksum_buffer(sent))
    with worker(Group(sent))._open_update(update) as arrived:
        assert {name: tensor.tolist() for name, tensor in arrived.items()} == {
            name: tensor.tolist() for name, tensor in WEIGHTS.items()
        }


@pytest.mark.parametrize(
    ("come", "reason"),
    [
        ({"a": (2, 3)}, r"lacks \['b'\]"),
        ({"a": (2, 3), "b": (4,)}, r"has other shapes for \['b'\]"),
        ({"a": (2, 3), "b": (3,), "c": (3,)}, r"has \['c'\] besides"),
    ],
)
def test_weights_of_another_model_are_refused_before_the_model_is_touched(
    tmp_path: Path, come: dict[str, tuple[int, ...]], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"push does not fit the served model, {UNTOUCHED}: it {reason}"):
        in_folder(tmp_path)._check_shapes(come, "push")


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_what_vllm_has_no_use_for_may_come_though_the_folder_does_not_have_it(tmp_path: Path, name: str) -> None:
    in_folder(tmp_path)._check_shapes({"a": (2, 3), "b": (3,), name: (3,)}, "push")


def test_where_the_folder_is_not_known_anything_may_come(tmp_path: Path) -> None:
    in_folder(tmp_path, model="org/tiny")._check_shapes({"a": (2, 3)}, "push")


def in_folder(folder: Path, model: str | None = None) -> weights_receiver.WeightReceiver:
    """Of a worker that serves `WEIGHTS`."""
    save_file(WEIGHTS, folder / "model.safetensors")
    receiver = serving(model or str(folder), folder)
    config = receiver.model_config
    config.hf_config = config.hf_text_config = SimpleNamespace(tie_word_embeddings=True)
    return receiver


@pytest.mark.parametrize("place", [0, 21, -1])
def test_one_other_byte_is_refused_before_the_model_is_touched(
    plan: PackedLayout, sent: torch.Tensor, place: int
) -> None:
    update, other = weights_receiver.UpdateInfo(tensors=plan.entries, checksum=checksum_buffer(sent)), sent.clone()
    other[place] += 1
    with (
        pytest.raises(ValueError, match=f"{UNTOUCHED}: received bytes differ"),
        worker(Group(other))._open_update(update),
    ):
        pass


async def test_a_communicator_that_would_send_nothing_is_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object) -> None:
        raise OSError("libnccl.so.2: cannot open shared object file")

    monkeypatch.setattr(pynccl, "NCCLLibrary", lacking)
    port = find_free_port()
    both = [
        asyncio.to_thread(nccl_group.join_group, "127.0.0.1", port, rank=rank, world_size=2, device=CPU)
        for rank in (0, 1)
    ]
    told = await asyncio.gather(*both, return_exceptions=True)
    assert [type(each) for each in told] == [EngineError, EngineError]
    assert all("disabled" in str(each) for each in told)


LAYERS = "vllm.model_executor.layers."
LAID_OUT, PLAIN = "fused_moe.experts.cpu_moe X86CPUUnquantizedExperts", "fused_moe.experts.triton_moe TritonExperts"
FLASHINFER = "fused_moe.experts.flashinfer_cutlass_moe FlashInferExperts"
UNQUANTIZED = "fused_moe.unquantized_fused_moe_method UnquantizedFusedMoEMethod"
QUANTIZED = "quantization.online.int8 Int8OnlineMoEMethod"


def experts(kernel: str, method: str = UNQUANTIZED) -> torch.nn.Module:
    """A model with experts as vLLM has them, served by this kernel."""
    layer = torch.nn.Module()
    layer.quant_method = made = bare(method)
    made.moe_kernel = SimpleNamespace(fused_experts=bare(kernel))
    return torch.nn.ModuleDict({"layer": layer})


def bare(place: str) -> Any:
    """One of vLLM's, without what it needs to compute."""
    module, name = place.split()
    one = object.__new__(getattr(importlib.import_module(LAYERS + module), name))
    if isinstance(one, torch.nn.Module):
        torch.nn.Module.__init__(one)
    return one


def test_a_kernel_that_lays_experts_out_is_made_anew_with_the_weights_that_come() -> None:
    model = experts(LAID_OUT)
    for _ in range(2):  # the second time as if the first load had failed
        weights_reload.prepare_reload(model, CPU)
        assert model["layer"].quant_method.moe_kernel is None


def test_where_it_cannot_be_made_anew_the_model_is_refused_before_it_is_touched() -> None:
    model = experts(LAID_OUT)
    with pytest.raises(
        ValueError, match=rf"experts of layer for X86CPUUnquantizedExperts, {UNTOUCHED}: .*--moe-backend"
    ):
        weights_reload.prepare_reload(model, torch.device("cuda"))
    assert model["layer"].quant_method.moe_kernel is not None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("kernel", "method"), [(PLAIN, UNQUANTIZED), (FLASHINFER, UNQUANTIZED), (LAID_OUT, QUANTIZED)])
def test_kernels_that_reloading_is_enough_for_stay(kernel: str, method: str, device: str) -> None:
    model = experts(kernel, method)
    kept = model["layer"].quant_method.moe_kernel
    weights_reload.prepare_reload(model, torch.device(device))
    assert model["layer"].quant_method.moe_kernel is kept


class Latent(torch.nn.Module):
    """Multi-head latent attention as vLLM computes it on a CPU with AMX: a copy of the weight is packed, the weight freed."""

    is_amx_bmm_enabled = True

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = torch.nn.Linear(2, 3, bias=False)

    def pack(self) -> None:
        self.packed = self.kv_b_proj.weight.detach().clone()
        self.kv_b_proj.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


def test_a_weight_that_was_packed_and_freed_is_loaded_again() -> None:
    model, config = torch.nn.ModuleDict({"attention": Latent()}), SimpleNamespace(dtype=torch.float32)
    layerwise.record_metadata_for_reloading(model)
    for value in (1.0, 2.0):
        model["attention"].pack()
        weights_reload.prepare_reload(model, CPU)
        layerwise.initialize_layerwise_reload(model)
        weight = model["attention"].kv_b_proj.weight
        weight.weight_loader(weight, torch.full((3, 2), value))
        layerwise.finalize_layerwise_reload(model, config)
        model["attention"].pack()
        assert model["attention"].packed.tolist() == [[value] * 2] * 3


class Tied(torch.nn.Module):
    """Two layers with weights of their own; a head that is tied to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.sinks, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.head.weight, self.head.bias = self.embed.weight, self.embed.bias


@pytest.mark.parametrize(("past", "left"), [(False, []), (True, ["sinks.weight"])])
def test_what_a_model_writes_past_the_loaders_is_noticed_and_a_tied_head_is_none_of_it(
    past: bool, left: list[str]
) -> None:
    model = Tied().requires_grad_(False)
    layerwise.record_metadata_for_reloading(model)
    layerwise.initialize_layerwise_reload(model)
    for layer in (model.embed, model.sinks):
        for name, parameter in list(layer.named_parameters()):
            if past and layer is model.sinks and name == "weight":
                parameter.data.copy_(torch.ones(2))
            else:
                parameter.weight_loader(parameter, torch.ones(parameter.shape))
    assert weights_reload.find_unloaded(model) == left


class Direct(torch.nn.Module):
    """A served model that copies into `pair` instead of calling its loaders, one half at a time, and calls the loader of `plain`."""

    def __init__(self, halves: int, *, quantised: bool) -> None:
        super().__init__()
        self.pair, self.plain = (torch.nn.Linear(2, 2, bias=False).requires_grad_(False) for _ in range(2))
        self._halves = halves
        layerwise.record_metadata_for_reloading(self)
        if quantised:
            self.pair.quant_method = PerRow()
            self.pair.quant_method.process_weights_after_loading(self.pair)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == "plain":
                self.plain.weight.weight_loader(self.plain.weight, tensor)
            else:
                for half in range(self._halves):
                    self.pair.weight.data[:, half].copy_(tensor[:, half])


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("halves", [2, 1])
def test_what_a_model_writes_past_the_loaders_is_loaded_if_it_is_whole(
    tmp_path: Path, halves: int, quantised: bool
) -> None:
    pushed = {"pair": torch.tensor([[1.0, 2.0], [4.0, 3.0]]), "plain": torch.ones(2, 2)}
    save_file(pushed, tmp_path / "model.safetensors")
    receiver = serving(str(tmp_path), tmp_path)
    receiver.device, receiver.model = CPU, Direct(halves, quantised=quantised)
    config = receiver.model_config
    config.hf_config = config.hf_text_config = SimpleNamespace(tie_word_embeddings=False)
    kept = receiver.model.pair.weight
    update = weights_receiver.UpdateInfo(path=str(tmp_path / "model.safetensors"))
    if halves == 1:
        with pytest.raises(RuntimeError, match=r"does not reload \['pair.weight'\]"):
            receiver.receive_weights(update)
    else:
        receiver.receive_weights(update)
        scale = receiver.model.pair.weight_scale if quantised else 1
        assert torch.allclose(receiver.model.pair.weight.float() * scale, pushed["pair"], rtol=0.07)
    assert receiver.model.pair.weight is kept, "captured graphs read the same memory"
    assert torch.equal(receiver.model.plain.weight, pushed["plain"])


quantization = pytest.importorskip("vllm.model_executor.layers.quantization.base_config")


class PerRow(quantization.QuantizeMethodBase):
    """FP8 weights with a scale for each row, as vLLM makes them of the weights that it reads."""

    def create_weights(self, layer: torch.nn.Module, *args: Any, **fields: Any) -> None:
        raise NotImplementedError

    def apply(self, layer: torch.nn.Module, *args: Any, **fields: Any) -> torch.Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        scale = layer.weight.abs().amax(1, keepdim=True) / 448
        quantised = (layer.weight / scale).to(torch.float8_e4m3fn)
        layer.weight = torch.nn.Parameter(quantised, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)


class Quantised(torch.nn.Module):
    """A served model with two FP8 layers, which passes `loaded` on to their loaders."""

    def __init__(self, loaded: set[str]) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Linear(3, 2, bias=False).requires_grad_(False) for _ in range(2))
        self._loaded = loaded
        layerwise.record_metadata_for_reloading(self)
        for layer in (self.a, self.b):
            layer.quant_method = PerRow()
            layer.quant_method.process_weights_after_loading(layer)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name in self._loaded:
                parameter = self.get_submodule(name).weight
                parameter.weight_loader(parameter, tensor)


@pytest.mark.parametrize("loaded", [{"a", "b"}, {"a"}])
def test_an_fp8_layer_that_a_push_did_not_reach_is_reported(tmp_path: Path, loaded: set[str]) -> None:
    pushed = {name: torch.full((2, 3), value) for name, value in {"a": 2.0, "b": 3.0}.items()}
    save_file(pushed, tmp_path / "model.safetensors")
    receiver = serving(str(tmp_path), tmp_path)
    receiver.device, receiver.model = CPU, Quantised(loaded)
    receiver.model_config.quantization = "fp8_per_channel"
    config = receiver.model_config
    config.hf_config = config.hf_text_config = SimpleNamespace(tie_word_embeddings=False)
    update = weights_receiver.UpdateInfo(path=str(tmp_path / "model.safetensors"))
    if loaded == {"a"}:
        with pytest.raises(RuntimeError, match=r"does not reload \['b.weight'\]"):
            receiver.receive_weights(update)
    else:
        receiver.receive_weights(update)
    for name in loaded:
        layer = receiver.model.get_submodule(name)
        assert torch.equal(layer.weight.float() * layer.weight_scale, pushed[name])
