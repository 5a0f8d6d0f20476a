"""Builds dense indexes from a corpus and an encoder: vectors in shards, then an index or several.

    python experiments/build_index.py --corpus=FILE --encoder=DIR --output=DIR --index flat
    python experiments/build_index.py --corpus=wiki18.jsonl --encoder=.cache/models/e5-base-v2 \\
        --output=wiki18 --index hnsw ivf_pq
    python experiments/build_index.py --predict --count=21015324 --dimension=768

It encodes passages first (float16 shards in OUTPUT/embeddings), then builds each index in
OUTPUT/KIND. Before any work it predicts memory and disk, and compares them with what is free. The
same command goes on where it was stopped, and does nothing where all is done. --part=0/8 encodes an
eighth of the shards, for several machines on one file system; `--index` without a kind only
encodes.
"""

import argparse
import pathlib
import shutil
import signal

from stratified.retrieval import embeddings as shards
from stratified.retrieval import indexes, memory
from stratified.retrieval.memory import IndexConfig
from stratified.retrieval.store import PassageStore

SETTINGS = (
  "storage",
  "links",
  "ef_construction",
  "ef_search",
  "lists",
  "probes",
  "code_bytes",
  "training_vectors",
  "rerank",
)


def parser() -> argparse.ArgumentParser:
  p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  p.add_argument(
    "--corpus", type=pathlib.Path, help="JSON Lines of passages, plain (or .gz, if small)"
  )
  p.add_argument(
    "--encoder", type=pathlib.Path, help="Hugging Face directory of a BERT-type encoder"
  )
  p.add_argument("--output", type=pathlib.Path, help="folder of the vectors and indexes")
  p.add_argument(
    "--index",
    nargs="*",
    choices=memory.KINDS,
    default=["flat"],
    help="kinds to build; default: flat",
  )
  p.add_argument(
    "--predict", action="store_true", help="only tell what each kind of index would take"
  )
  p.add_argument(
    "--count", type=int, default=21_015_324, help="of --predict: passages; default: Wikipedia 2018"
  )
  p.add_argument(
    "--dimension",
    type=int,
    default=768,
    help="of --predict: width of the encoder; default: E5-base",
  )
  p.add_argument("--max-length", type=int, default=256, help="tokens of a passage that are read")
  p.add_argument(
    "--query-prefix", help="in front of queries; default: E5's for an E5, else nothing"
  )
  p.add_argument("--passage-prefix", help="in front of passages; likewise")
  p.add_argument(
    "--dtype", default="float32", choices=("float32", "bfloat16"), help="of the encoder's products"
  )
  p.add_argument(
    "--batch-tokens", type=int, help="tokens of a batch on one device; default: by the device"
  )
  p.add_argument("--shard-size", type=int, default=8192, help="passages of a shard")
  p.add_argument(
    "--part", default="0/1", help="i/n: encode every n-th shard from the i-th on, build no index"
  )
  p.add_argument(
    "--save-every", type=float, default=600, help="seconds between two saves of an index under way"
  )
  for name in SETTINGS:
    default = getattr(IndexConfig(), name)
    p.add_argument(
      f"--{name.replace('_', '-')}",
      type=type(default),
      default=default,
      help="of the index; default: %(default)s",
    )
  return p


def main(arguments: list[str] | None = None) -> None:
  p = parser()
  a = p.parse_args(arguments)
  # SIGTERM ends the command as Ctrl-C does: what is done is on disk.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    if a.predict:
      print(prediction(a.count, a.dimension))
    else:
      run(a)
  except KeyboardInterrupt:
    raise SystemExit("build_index.py: stopped; the same command goes on from here") from None
  except (ValueError, OSError, MemoryError) as error:
    raise SystemExit(f"build_index.py: {error}") from error


def run(a) -> None:
  missing = [f"--{name}" for name in ("corpus", "encoder", "output") if getattr(a, name) is None]
  if missing:
    raise ValueError(f"{', '.join(missing)} must be given; see --help.")
  part = parse_part(a.part)
  configs = {
    kind: IndexConfig(kind, **{name: getattr(a, name) for name in SETTINGS}) for kind in a.index
  }
  if a.shard_size < 1:
    raise ValueError(f"--shard-size={a.shard_size} must be at least 1.")
  # here, so that --help and --predict start no accelerator
  from stratified.encoder.text_encoder import Encoder

  encoder = Encoder.load(
    a.encoder,
    max_length=a.max_length,
    prefixes=prefixes(a),
    dtype=a.dtype,
    batch_tokens=a.batch_tokens,
  )
  a.output.mkdir(parents=True, exist_ok=True)
  store = PassageStore(a.corpus, offsets=a.output / "offsets.npy")
  print(
    f"{len(store):,} passages; encoder {encoder.manifest['name']}, {encoder.width} wide, prefixes "
    f"{encoder.prefixes}, {encoder.manifest['dtype']}",
    flush=True,
  )
  check_room(a.output, configs if part == (0, 1) else {}, len(store), encoder.width)
  shards.encode_corpus(
    a.output / "embeddings",
    store,
    lambda texts: encoder.encode(texts, "passage"),
    encoder.width,
    encoder=encoder.manifest,
    corpus=store.manifest | {"sha256": store.sha256()},
    shard_size=a.shard_size,
    part=part,
  )
  if part != (0, 1):
    print(f"part {a.part} is encoded; run again without --part when all are, to build the index")
    return
  for kind, config in configs.items():
    path = indexes.build(
      config, shards.Embeddings(a.output / "embeddings"), a.output / kind, save_every_s=a.save_every
    )
    print(f"{kind}: {path}, {memory.gigabytes(path.stat().st_size)}", flush=True)


def prefixes(a) -> dict[str, str] | None:
  if (a.query_prefix is None) != (a.passage_prefix is None):
    raise ValueError("--query-prefix and --passage-prefix must be given together, or neither.")
  return None if a.query_prefix is None else {"query": a.query_prefix, "passage": a.passage_prefix}


def parse_part(text: str) -> tuple[int, int]:
  try:
    index, count = (int(number) for number in text.split("/"))
  except ValueError:
    index, count = -1, 0
  if not 0 <= index < count:
    raise ValueError(f"--part={text} must be i/n with 0 <= i < n, for example 0/8.")
  return index, count


def check_room(
  output: pathlib.Path, configs: dict[str, IndexConfig], count: int, dimension: int
) -> None:
  """Refuses what would not fit into memory or onto the disk, before hours of encoding."""
  needed = 0 if (output / "embeddings" / "manifest.json").exists() else 2 * count * dimension
  for kind, config in configs.items():
    if not (output / kind / "manifest.json").exists():
      memory.require(
        config, count, dimension, memory.build_bytes(config, count, dimension), "building"
      )
      # a saved state and the one being written
      needed += 2 * memory.index_bytes(config, count, dimension)
  free = shutil.disk_usage(output).free
  if needed > free:
    raise OSError(
      f"vectors and indexes need up to {memory.gigabytes(needed)} in {output}, and "
      f"{memory.gigabytes(free)} "
      "are free; name an --output on another disk, or fewer kinds of --index."
    )


def prediction(count: int, dimension: int) -> str:
  """Writes a table of what each kind of index takes."""
  free = memory.free_bytes()
  lines = [
    f"{count:,} vectors of {dimension}; vectors on disk (float16): "
    f"{memory.gigabytes(2 * count * dimension)}; "
    f"memory free here: {'unknown' if free is None else memory.gigabytes(free)}",
    "index                 loaded    while building",
  ]
  for kind, storage in (
    ("flat", "float32"),
    ("flat", "float16"),
    ("hnsw", "float16"),
    ("hnsw", "int8"),
    ("ivf_sq", "float16"),
    ("ivf_sq", "int8"),
    ("ivf_pq", None),
  ):
    config = IndexConfig(kind, storage or "float16")
    sizes = (
      memory.gigabytes(f(config, count, dimension))
      for f in (memory.index_bytes, memory.build_bytes)
    )
    lines.append(
      f"{kind + (', ' + storage if storage else ''):<17} {next(sizes):>10}  {next(sizes):>16}"
    )
  return "\n".join(lines)


if __name__ == "__main__":
  main()
