"""Measures the text encoder against sentence-transformers: same weights, texts, cores and vectors.

    pip install sentence-transformers==6.2.0      # for this benchmark alone
    python experiments/benchmarks/bench_encoder.py [--encoder=DIR] [--corpus=FILE] [--texts=512]

Both sides tokenise, encode, pool and normalise the same passages and then as many short queries, in
turns; sentence-transformers gets the fastest of several batch sizes. Without --corpus the passages
are those of a generated encyclopedia, a few in one text, so that they are about a hundred words
long. Ratios are of texts a second by the clock, and of texts a second of processor time, which
other programs on the machine disturb less.
"""

import argparse
import json
import pathlib

import numpy as np

from experiments.benchmarks import paired_timing
from stratified.encoder.text_encoder import Encoder
from stratified.retrieval.store import PassageStore
from stratified.tasks.encyclopedia import pages as encyclopedia

BATCH_SIZES = (16, 32, 64, 128)


def texts_of(corpus, count: int) -> dict[str, list[str]]:
  """Passages spread over the corpus, and their first eight words as queries."""
  if corpus:
    store = PassageStore(corpus)
    if len(store) < count:
      raise SystemExit(
        f"{corpus} holds {len(store)} passages, fewer than --texts={count}; lower it."
      )
    passages = [store[row].contents for row in np.linspace(0, len(store) - 1, count).astype(int)]
  else:
    pages = [
      page.contents
      for page in encyclopedia.make(encyclopedia.EncyclopediaConfig(), seed=0).passages
    ]
    passages = [
      "\n".join(pages[(at * 7 + n) % len(pages)] for n in range(4)) for at in range(count)
    ]
  return {"passages": passages, "queries": [" ".join(text.split()[:8]) for text in passages]}


class Theirs:
  """sentence-transformers' encode of the same texts with one batch size."""

  def __init__(self, model, texts, prefix, batch_size):
    self._model, self._texts, self.batch_size = model, [prefix + text for text in texts], batch_size

  def __call__(self) -> np.ndarray:
    return self._model.encode(
      self._texts, batch_size=self.batch_size, normalize_embeddings=True, show_progress_bar=False
    )


def fastest(model, texts, prefix) -> Theirs:
  sides = {
    size: Theirs(model, texts, prefix, size)
    for size in BATCH_SIZES
    if size <= len(texts) or size == BATCH_SIZES[0]
  }
  times = paired_timing.in_turns(sides, 1)
  return sides[min(times, key=lambda size: sum(times[size].processor))]


def compare(what, texts, encoder, model, repeats) -> dict:
  role = "query" if what == "queries" else "passage"
  theirs = fastest(model, texts, encoder.prefixes[role])
  ours = lambda: encoder.encode(texts, role)
  apart = float(np.abs(ours() - theirs()).max())
  if encoder.config.dtype == "float32" and not apart <= 1e-4:
    raise RuntimeError(f"{what}: vectors differ by {apart}, more than 1e-4: not the same encoder")
  times = paired_timing.in_turns({"stratified": ours, "sentence-transformers": theirs}, repeats)
  wall = {name: time.median for name, time in times.items()}
  processor = {name: float(np.median(time.processor)) for name, time in times.items()}
  tokens = sum(map(len, encoder.token_ids(texts, role)))
  ratio = lambda seconds: seconds["sentence-transformers"] / seconds["stratified"]
  return dict(
    what=what,
    texts=len(texts),
    tokens=tokens,
    apart=apart,
    batch_size=theirs.batch_size,
    wall_s=wall,
    processor_s=processor,
    ratio=ratio(wall),
    processor_ratio=ratio(processor),
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument(
    "--encoder", default=".cache/models/all-minilm-l6-v2", help="a Hugging Face directory"
  )
  parser.add_argument("--corpus", help="take passages from this file")
  parser.add_argument("--texts", type=int, default=512)
  parser.add_argument("--max-length", type=int, default=256)
  parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
  parser.add_argument(
    "--batch-tokens", type=int, help="tokens of our batches; the default's if not given"
  )
  parser.add_argument("--cores", type=int, default=2)
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--json", type=pathlib.Path, help="write the measurements to this file")
  a = parser.parse_args()
  paired_timing.use_cores(a.cores)
  try:
    from sentence_transformers import SentenceTransformer
  except ImportError:
    raise SystemExit(
      "bench_encoder.py: run `pip install sentence-transformers==6.2.0`, which it compares with."
    ) from None
  encoder = Encoder.load(
    a.encoder, max_length=a.max_length, dtype=a.dtype, batch_tokens=a.batch_tokens
  )
  model = SentenceTransformer(str(a.encoder), device="cpu", local_files_only=True)
  model.max_seq_length = encoder.max_length
  print(
    "texts               tokens     stratified   sentence-transformers    by the clock   by "
    "processor time   apart"
  )
  rows = []
  for what, texts in texts_of(a.corpus, a.texts).items():
    rows.append(row := compare(what, texts, encoder, model, a.repeats))
    mine, other = (
      row["texts"] / row["wall_s"][name] for name in ("stratified", "sentence-transformers")
    )
    print(
      f"{row['texts']:6,} {what:9} {row['tokens']:9,} {mine:10,.0f}/s {other:15,.0f}/s (batch "
      f"{row['batch_size']:3}) "
      f"{row['ratio']:10.2f}x {row['processor_ratio']:16.2f}x {row['apart']:10.1e}",
      flush=True,
    )
  if a.json:
    a.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
  main()
