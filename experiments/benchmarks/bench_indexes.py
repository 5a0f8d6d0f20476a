"""Measures what an index finds on real questions, and its size and time on random vectors.

    python experiments/benchmarks/bench_indexes.py recall --indexes=DIR --questions=FOLDER \\
        [--kinds flat hnsw]
    python experiments/benchmarks/bench_indexes.py scale --counts 1000000 4000000 \\
        [--dimension=384] [--kinds flat hnsw]

`recall` takes the indexes that experiments/build_index.py made in DIR, and every question whose
gold passages are known (`"evidence": "gold"`, their ids in `evidence_ids`). Recall at 3 of a
question is the share of its gold passages among the first three; a question of three hops has three
of them. BM25 and its fusion with the first kind stand beside it. Each kind's ratio to flat says
what the approximation costs.

`scale` builds each index over random unit vectors in a process of its own. It tells processor time,
peak memory and query time on one thread, beside the sizes that `--predict` of build_index tells.
Random vectors have no neighbours worth finding, so they say nothing of recall; they are the hardest
case for time.
"""

import argparse
import itertools
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np

from stratified.retrieval import memory
from stratified.retrieval.embeddings import unit
from stratified.retrieval.memory import IndexConfig

TOPK = 3


###  Recall  ###


def gold_questions(folder: pathlib.Path) -> dict[str, list[tuple[str, list[str]]]]:
  """Set -> (question, ids of its gold passages) of every question that has them."""
  found = {}
  for path in sorted(folder.glob("*.jsonl")):
    records = (
      json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    )
    asked = [
      (r["question"], r["evidence_ids"])
      for r in records
      if r.get("evidence") == "gold" and r.get("evidence_ids")
    ]
    if asked:
      found[path.stem] = asked
  if not found:
    raise SystemExit(
      f'{folder} holds no question with "evidence": "gold" and evidence_ids; name another '
      "--questions."
    )
  return found


def recall_at(hits, asked) -> np.ndarray:
  return np.array(
    [
      len({hit.id for hit in of_query} & set(gold)) / len(set(gold))
      for of_query, (_, gold) in zip(hits, asked, strict=True)
    ]
  )


class Remembering:
  """An encoder that encodes a text once, so that searches can be timed without it."""

  def __init__(self, encoder):
    self.manifest, self._encoder, self._known = encoder.manifest, encoder, {}

  def encode(self, texts, role):
    new = [text for text in dict.fromkeys(texts) if (role, text) not in self._known]
    if new:
      self._known |= zip(((role, text) for text in new), self._encoder.encode(new, role))
    return np.stack([self._known[role, text] for text in texts])


def retrievers(a):
  """Name -> a retriever over the corpus of the indexes."""
  from stratified.encoder.text_encoder import Encoder
  from stratified.retrieval import manifest as manifests
  from stratified.retrieval.bm25 import BM25
  from stratified.retrieval.dense import open_dense
  from stratified.retrieval.hybrid import Hybrid
  from stratified.retrieval.store import PassageStore

  made = manifests.read(a.indexes / a.kinds[0] / "manifest.json")
  store = PassageStore(made["corpus"]["path"], offsets=a.indexes / "offsets.npy")
  encoder = Remembering(Encoder.matching(made["encoder"]))
  bm25 = BM25(store)
  found = {"BM25": bm25}
  for kind in a.kinds:
    found[kind] = open_dense(a.indexes / kind, encoder, passages=store)
    if (
      found[kind].manifest["index"]["kind"] == "ivf_pq" and found[kind].manifest["index"]["rerank"]
    ):
      found[f"{kind}, codes alone"] = open_dense(
        a.indexes / kind, encoder, passages=store, rerank=0
      )
  first = found[a.kinds[0]]
  return found | {
    f"hybrid, depth {depth}": Hybrid([bm25, first], depth=depth) for depth in a.depths
  }


def measure_recall(a) -> None:
  questions = gold_questions(a.questions)
  header = [
    f"recall@{TOPK} x 100",
    *(f"{name} ({len(asked):,})" for name, asked in questions.items()),
    "mean",
    f"of {a.kinds[0]}",
    "ms a query",
  ]
  print(table_row(header) + "\n" + table_row(["---"] * len(header)))
  rows = {}
  for name, retriever in retrievers(a).items():
    scores, seconds = {}, 0.0
    for source, asked in questions.items():
      texts = [text for text, _ in asked]
      if name == a.kinds[0]:
        retriever.search(texts, 1)  # encodes; the searches that are timed find the vectors made
      start = time.process_time()
      scores[source] = float(recall_at(retriever.search(texts, TOPK), asked).mean())
      seconds += time.process_time() - start
    rows[name] = scores | {"mean": float(np.mean(list(scores.values())))}
    rows[name]["ms"] = 1e3 * seconds / sum(map(len, questions.values()))
  flat = rows[a.kinds[0]]["mean"]
  for name, row in rows.items():
    cells = [f"{100 * row[source]:.1f}" for source in (*questions, "mean")]
    print(table_row([name, *cells, f"{row['mean'] / flat:.3f}", f"{row['ms']:.2f}"]), flush=True)
  if a.json:
    a.json.write_text(json.dumps(rows, indent=1))


###  Scale  ###


class RandomVectors:
  """Draws unit vectors as they are read and keeps none; `seconds` of processor time it took."""

  def __init__(self, count: int, dimension: int):
    self.count, self.dimension, self.seconds = count, dimension, 0.0
    self.manifest = {"encoder": {}, "corpus": {}, "count": count, "dimension": dimension}

  def __len__(self):
    return self.count

  def read(self, start, stop):
    begin = time.process_time()
    values = unit(
      np.random.default_rng(start).standard_normal((stop - start, self.dimension), np.float32)
    )
    self.seconds += time.process_time() - begin
    return values

  def take(self, rows):
    return self.read(int(rows[0]), int(rows[0]) + len(rows))


def peak_bytes() -> int:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
    1 if sys.platform == "darwin" else 1024
  )


def build_one(a) -> dict:
  """Builds and searches one index in this process; run by `scale` in a process of its own."""
  import faiss

  from stratified.retrieval import indexes

  faiss.omp_set_num_threads(1)
  config, vectors = IndexConfig(a.kind, **a.settings), RandomVectors(a.count, a.dimension)
  before, start = peak_bytes(), time.process_time()
  index = indexes.make(config, a.count, a.dimension)
  indexes.train(index, config, vectors)
  trained = time.process_time()
  drawn = vectors.seconds
  indexes.add(index, config, vectors, lambda: None, float("inf"))
  added, peak = time.process_time() - (vectors.seconds - drawn), peak_bytes() - before
  indexes.set_search(index, config.settled(a.count, a.dimension))
  queries = RandomVectors(a.queries, a.dimension).read(a.count + 1, a.count + 1 + a.queries)
  index.search(queries[:1], TOPK)
  times = []
  for query in queries:
    begin = time.process_time()
    index.search(query[None], TOPK)
    times.append(time.process_time() - begin)
  begin = time.process_time()
  index.search(queries, TOPK)
  batched = (time.process_time() - begin) / len(queries)
  with tempfile.NamedTemporaryFile(suffix=".faiss", dir=a.scratch) as file:
    faiss.write_index(index, file.name)
    size = pathlib.Path(file.name).stat().st_size
  return dict(
    kind=a.kind,
    count=a.count,
    dimension=a.dimension,
    train_s=trained - start,
    add_s=added - trained,
    peak=peak,
    size=size,
    query_s=float(np.median(times)),
    batched_s=batched,
    predicted_size=memory.index_bytes(config, a.count, a.dimension),
    predicted_peak=memory.build_bytes(config, a.count, a.dimension),
  )


HEADER = (
  "index",
  "vectors",
  "fit",
  "add",
  "size (predicted)",
  "peak of building (predicted)",
  "one query",
  "of 100 together",
)


def measure_scale(a) -> None:
  print(table_row(HEADER) + "\n" + table_row(["---"] * len(HEADER)), flush=True)
  rows = []
  for count, kind in itertools.product(a.counts, a.kinds):
    config = IndexConfig(kind, **a.settings)
    try:
      memory.require(
        config, count, a.dimension, memory.build_bytes(config, count, a.dimension), "building"
      )
    except MemoryError as error:
      print(table_row([kind, f"{count:,}", str(error)]))
      continue
    command = [
      sys.executable,
      __file__,
      "one",
      f"--kind={kind}",
      f"--count={count}",
      f"--dimension={a.dimension}",
      f"--queries={a.queries}",
      f"--settings={json.dumps(a.settings)}",
    ]
    command += [f"--scratch={a.scratch}"] if a.scratch else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows.append(row := json.loads(done.stdout.splitlines()[-1]))
    size, peak = (
      f"{memory.gigabytes(row[what])} ({memory.gigabytes(row['predicted_' + what])})"
      for what in ("size", "peak")
    )
    cells = [
      kind,
      f"{count:,} x {a.dimension}",
      f"{row['train_s']:.0f} s",
      f"{row['add_s']:.0f} s",
      size,
      peak,
    ]
    cells += [f"{1e3 * row[name]:.2f} ms" for name in ("query_s", "batched_s")]
    print(table_row(cells), flush=True)
  if a.json:
    a.json.write_text(json.dumps(rows, indent=1))


def table_row(cells) -> str:
  return f"| {' | '.join(cells)} |"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  commands = parser.add_subparsers(dest="command", required=True)
  p = commands.add_parser("recall")
  p.add_argument("--indexes", type=pathlib.Path, required=True, help="--output of build_index.py")
  p.add_argument(
    "--questions", type=pathlib.Path, required=True, help="folder of SET.jsonl with evidence_ids"
  )
  p.add_argument(
    "--kinds",
    nargs="+",
    default=["flat", "hnsw", "ivf_pq", "ivf_sq"],
    help="the first is what others are compared with",
  )
  p.add_argument("--depths", nargs="+", type=int, default=[10], help="of the hybrid")
  p = commands.add_parser("scale")
  p.add_argument("--counts", nargs="+", type=int, default=[1_000_000])
  p.add_argument("--kinds", nargs="+", default=list(memory.KINDS), choices=memory.KINDS)
  one = commands.add_parser("one")
  one.add_argument("--kind", required=True)
  one.add_argument("--count", type=int, required=True)
  for q in (p, one):
    q.add_argument("--dimension", type=int, default=384)
    q.add_argument("--queries", type=int, default=100)
    q.add_argument(
      "--scratch", help="where an index is written to be weighed; default: the system's"
    )
    q.add_argument(
      "--settings",
      type=json.loads,
      default={},
      help='of IndexConfig, as JSON: {"ef_construction": 100}',
    )
  for q in commands.choices.values():
    q.add_argument("--json", type=pathlib.Path, help="write the measurements to this file")
  a = parser.parse_args()
  if a.command == "one":
    print(json.dumps(build_one(a)))
  else:
    {"recall": measure_recall, "scale": measure_scale}[a.command](a)


if __name__ == "__main__":
  main()
