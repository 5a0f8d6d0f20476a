"""Writes a small random model directory that a server loads: to try a server, and for the tests.

    python third_party/sglang/small_checkpoint.py DIR [--vocabulary=152064]

Two layers; with a vocabulary size the Qwen2.5 architecture, else the Llama architecture with the
tokenizer of the generated encyclopedia. Its text means nothing.
"""

import argparse
import json
import pathlib

import jax

from stratified.data import tokenizer as tokenizers
from stratified.policy import decoder
from stratified.policy.files import hugging_face
from stratified.tasks.encyclopedia import vocabulary as pieces

SIZES = dict(width=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, mlp_width=128)


def write(
  directory: pathlib.Path, *, vocabulary: int | None = None, seed: int = 0, positions: int = 4096
) -> None:
  """Weights twice as large as a new model's, so that its choices differ; float32."""
  tokenizer = pieces.build()
  config = decoder.DecoderConfig(
    vocab_size=vocabulary or tokenizer.vocab_size,
    rope_theta=10000.0,
    qkv_bias=vocabulary is not None,
    **SIZES,
  )
  params = {
    name: 2 * value if value.ndim > 2 else value
    for name, value in decoder.init(config, jax.random.key(seed)).items()
  }
  hugging_face.save(
    directory,
    config,
    params,
    extra={
      "eos_token_id": tokenizer.eos_id,
      "bos_token_id": tokenizer.eos_id,
      "max_position_embeddings": positions,
    },
  )
  tokenizer.save(directory / "tokenizer.json")
  (directory / "tokenizer_config.json").write_text(
    json.dumps(
      {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizers.END_OF_TEXT,
        "pad_token": tokenizers.END_OF_TEXT,
        "model_max_length": positions,
        "clean_up_tokenization_spaces": False,
      }
    )
  )


if __name__ == "__main__":
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("directory", type=pathlib.Path)
  parser.add_argument("--vocabulary", type=int)
  arguments = parser.parse_args()
  write(arguments.directory, vocabulary=arguments.vocabulary)
  print(f"wrote {arguments.directory}")
