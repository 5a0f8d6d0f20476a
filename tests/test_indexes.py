"""Passage store, vectors on disk, faiss indexes, dense and hybrid retrieval."""

import dataclasses
import gzip
import hashlib
import json
import os
import subprocess
import sys
import threading

import faiss
import numpy as np
import pytest

from stratified.retrieval import embeddings as shards
from stratified.retrieval import indexes, memory
from stratified.retrieval import manifest as manifests
from stratified.retrieval.corpus import corpus_digest, Passage, read_corpus, RetrieverError
from stratified.retrieval.dense import Dense, open_dense
from stratified.retrieval.embeddings import Embeddings
from stratified.retrieval.hybrid import Hybrid
from stratified.retrieval.memory import IndexConfig
from stratified.retrieval.store import PassageStore

COUNT, WIDTH = 12_000, 16
PASSAGES = [
  Passage(f"p{row}", f"Title {row}" if row % 3 else "", f"text {row} naïve 東京")
  for row in range(COUNT)
]


class HashEncoder:
  """A text's vector is drawn from a seed that its text gives: nothing to learn, always the same."""

  def __init__(self, width=WIDTH, **changes):
    self.width = width
    self.manifest = {
      "name": "hash",
      "path": "/nowhere",
      "sha256": "0" * 64,
      "pooling": "mean",
      "normalized": True,
      "prefixes": {"query": "", "passage": ""},
      "max_length": 256,
      "dtype": "float32",
    } | changes
    self.calls = []

  def encode(self, texts, role):
    self.calls.append((role, list(texts)))
    seeds = [
      int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
      for text in texts
    ]
    vectors = np.stack(
      [np.random.default_rng(seed).standard_normal(self.width, np.float32) for seed in seeds]
    )
    # Neighbours that mean something: texts lie around a few centres.
    centres = np.random.default_rng(1).standard_normal((32, self.width)).astype(np.float32)
    return shards.unit(centres[np.array(seeds) % 32] + 0.7 * vectors)


def write_corpus(path, passages=PASSAGES):
  lines = [
    json.dumps({"id": p.id, "contents": p.contents}, ensure_ascii=False) + "\n" for p in passages
  ]
  data = "".join(lines).encode()
  path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
  return path


@pytest.fixture(scope="module")
def world(tmp_path_factory):
  """A folder as experiments/build_index.py leaves it: corpus, offsets, vectors; and its encoder."""
  folder = tmp_path_factory.mktemp("world")
  encoder = HashEncoder()
  store = PassageStore(write_corpus(folder / "corpus.jsonl"), offsets=folder / "offsets.npy")
  shards.encode_corpus(
    folder / "embeddings",
    store,
    lambda texts: encoder.encode(texts, "passage"),
    WIDTH,
    encoder=encoder.manifest,
    corpus=store.manifest,
    shard_size=5_000,
  )
  return folder, encoder


CONFIGS = {
  "flat": IndexConfig("flat"),
  "flat32": IndexConfig("flat", "float32"),
  "hnsw": IndexConfig("hnsw", links=8),
  "ivf_pq": IndexConfig("ivf_pq", lists=32, probes=32, code_bytes=16, rerank=50),
  "ivf_sq": IndexConfig("ivf_sq", "float16", lists=32, probes=16),
  "ivf_sq8": IndexConfig("ivf_sq", "int8", lists=32),
}


@pytest.fixture(scope="module")
def built(world):
  folder, _ = world
  embeddings = Embeddings(folder / "embeddings")
  for name, config in CONFIGS.items():
    indexes.build(config, embeddings, folder / name)
  return folder


QUERIES = [PASSAGES[row].contents for row in (0, 1, 4_999, 5_000, COUNT - 1)] + [
  f"query {n}" for n in range(60)
]


def exact(folder, encoder, queries, topk):
  """Rows by descending inner product in float64, the reference of every index."""
  vectors = Embeddings(folder / "embeddings").read(0, COUNT).astype(np.float64)
  return np.argsort(
    -(encoder.encode(queries, "query").astype(np.float64) @ vectors.T), axis=1, kind="stable"
  )[:, :topk]


###  Passage store  ###


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz"])
def test_the_store_gives_what_reading_the_whole_corpus_gives(tmp_path, name):
  path = write_corpus(tmp_path / name, PASSAGES[:300])
  store = PassageStore(path, offsets=tmp_path / "offsets.npy")
  assert list(store) == read_corpus(path) == PASSAGES[:300]
  assert store[-1] == PASSAGES[299] and store[5:8] == PASSAGES[5:8]
  with pytest.raises(IndexError, match="row 300 of a corpus of 300"):
    store[300]
  assert store.manifest["digest"] == corpus_digest(PASSAGES[:300])


def test_blank_lines_odd_line_ends_and_no_last_newline(tmp_path):
  path = tmp_path / "c.jsonl"
  line = lambda p: json.dumps({"id": p.id, "contents": p.contents}).encode()
  path.write_bytes(
    b"\n \r\n" + line(PASSAGES[0]) + b"\r\n\n\n" + line(PASSAGES[1]) + b"\n  \n" + line(PASSAGES[2])
  )
  assert list(PassageStore(path)) == PASSAGES[:3]


def test_remembered_offsets_are_used_and_those_of_another_corpus_are_not(tmp_path):
  path, offsets = write_corpus(tmp_path / "c.jsonl", PASSAGES[:50]), tmp_path / "offsets.npy"
  first = PassageStore(path, offsets=offsets)
  made = offsets.stat().st_mtime_ns
  again = PassageStore(path, offsets=offsets)
  assert (
    offsets.stat().st_mtime_ns == made
    and again.manifest == first.manifest
    and list(again) == PASSAGES[:50]
  )
  write_corpus(path, PASSAGES[1:51])
  assert list(PassageStore(path, offsets=offsets)) == PASSAGES[1:51]
  for damage in (b"", b"no array", offsets.read_bytes()[:-9]):
    offsets.write_bytes(damage)
    assert list(PassageStore(path, offsets=offsets)) == PASSAGES[1:51]


def test_a_change_anywhere_in_a_large_corpus_of_equal_length_shows_in_the_whole_digest(tmp_path):
  path = write_corpus(tmp_path / "c.jsonl", PASSAGES[:50])
  before = PassageStore(path)
  path.write_bytes(path.read_bytes().replace(b"text 7 ", b"text 8 "))
  after = PassageStore(path)
  for name in ("digest", "sample_sha256"):
    assert before.manifest[name] != after.manifest[name]
  assert (
    before.num_bytes == after.num_bytes
    and after.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()
  )


@pytest.mark.parametrize(
  "text, message",
  [
    (b"", "holds no passage"),
    (b"\n\n", "holds no passage"),
    (b'{"id": "1"}\n', 'line 1, field "contents"'),
    (
      b'{"id": "1", "contents": "a"}\n{"id": "1", "contents": "b"}\n',
      "passages 1 and 2 have the same id",
    ),
    (b'{"id": "1", "contents": "a"}\n[]\n', "line 2: a JSON list"),
    (b"\xff\n", "line 1: not UTF-8"),
  ],
)
def test_a_corpus_that_is_none_is_refused(tmp_path, text, message):
  (tmp_path / "c.jsonl").write_bytes(text)
  with pytest.raises(ValueError, match=message):
    PassageStore(tmp_path / "c.jsonl", offsets=tmp_path / "offsets.npy")
  assert not (tmp_path / "offsets.npy").exists()


def test_missing_and_damaged_corpora_are_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match="corpus .*nowhere.jsonl does not exist"):
    PassageStore(tmp_path / "nowhere.jsonl")
  path = write_corpus(tmp_path / "c.jsonl.gz", PASSAGES[:300])
  path.write_bytes(path.read_bytes()[:-20])
  with pytest.raises(ValueError, match="the compressed file is damaged"):
    PassageStore(path)


def test_a_corpus_cut_short_behind_its_back_is_an_error_of_the_retriever(tmp_path):
  path = write_corpus(tmp_path / "c.jsonl", PASSAGES[:50])
  store = PassageStore(path)
  os.truncate(path, 200)
  assert store[0] == PASSAGES[0]
  with pytest.raises(RetrieverError, match="changed after it was opened"):
    store[49]


def test_lines_across_the_blocks_that_are_read_are_whole(tmp_path):
  long = [Passage(str(row), "t", chr(97 + row % 26) * 1_500_000) for row in range(7)]
  assert list(PassageStore(write_corpus(tmp_path / "c.jsonl", long))) == long


###  Vectors on disk  ###


def test_vectors_come_back_in_any_order_near_what_was_encoded(world):
  folder, encoder = world
  embeddings = Embeddings(folder / "embeddings")
  rows = np.array([11_999, 0, 5_000, 4_999, 0])
  expected = encoder.encode([PASSAGES[row].contents for row in rows], "passage")
  np.testing.assert_allclose(
    embeddings.take(rows), expected, atol=5e-4
  )  # float16: 2^-11 of components below 1
  np.testing.assert_allclose(np.linalg.norm(embeddings.read(4_990, 5_010), axis=1), 1, atol=1e-6)


def encode_into(folder, store, encoder, encode=None, **options):
  shards.encode_corpus(
    folder,
    store,
    encode or (lambda texts: encoder.encode(texts, "passage")),
    encoder.width,
    encoder=encoder.manifest,
    corpus=store.manifest,
    **options,
  )


def test_encoding_goes_on_after_a_kill_with_what_is_missing(tmp_path):
  store = PassageStore(write_corpus(tmp_path / "c.jsonl", PASSAGES[:50]))
  encoder, calls = HashEncoder(), []

  def killed(texts):
    if len(calls) == 3:
      raise KeyboardInterrupt
    calls.append(texts)
    return encoder.encode(texts, "passage")

  with pytest.raises(KeyboardInterrupt):
    encode_into(tmp_path / "e", store, encoder, killed, shard_size=10)
  with pytest.raises(FileNotFoundError, match="shard_00003.npy is missing or cut short"):
    Embeddings(tmp_path / "e")
  shards.shard_path(tmp_path / "e", 1).write_bytes(b"half a sh")
  encoder.calls.clear()
  encode_into(
    tmp_path / "e", store, encoder, shard_size=7
  )  # the shards that are there say how large they are
  assert [len(texts) for _, texts in encoder.calls] == [10, 10, 10]
  encode_into(tmp_path / "whole", store, encoder, shard_size=10)
  np.testing.assert_array_equal(
    Embeddings(tmp_path / "e").read(0, 50), Embeddings(tmp_path / "whole").read(0, 50)
  )


def test_machines_share_the_shards(tmp_path):
  store, encoder = PassageStore(write_corpus(tmp_path / "c.jsonl", PASSAGES[:45])), HashEncoder()
  for part in range(3):
    encode_into(tmp_path / "e", store, encoder, shard_size=10, part=(part, 3))
  assert sorted(len(texts) for _, texts in encoder.calls) == [5, 10, 10, 10, 10]
  assert len(Embeddings(tmp_path / "e")) == 45


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"sha256": "1" * 64}, "sha256 '0000.*but the encoder here is 'hash', sha256 '1111"),
    (
      {"prefixes": {"query": "query: ", "passage": "passage: "}},
      "prefixes {'query': '', 'passage': ''}",
    ),
    ({"max_length": 128}, "max_length 256.*max_length 128"),
    ({"pooling": "cls"}, "pooling 'mean'"),
  ],
)
def test_vectors_of_another_encoder_are_not_mixed_in(tmp_path, changes, message):
  store = PassageStore(write_corpus(tmp_path / "c.jsonl", PASSAGES[:5]))
  encode_into(tmp_path / "e", store, HashEncoder())
  with pytest.raises(ValueError, match=message):
    encode_into(tmp_path / "e", store, HashEncoder(**changes))
  other = PassageStore(write_corpus(tmp_path / "d.jsonl", PASSAGES[:6]))
  with pytest.raises(ValueError, match="count 5, but the corpus here is .*d.jsonl', count 6"):
    encode_into(tmp_path / "e", other, HashEncoder())


###  Indexes  ###


@pytest.mark.parametrize(
  "name, least",
  [
    ("flat", 0.995),
    ("flat32", 1.0),
    ("hnsw", 0.97),
    ("ivf_pq", 0.97),
    ("ivf_sq", 0.9),
    ("ivf_sq8", 0.75),
  ],
)
def test_an_index_finds_what_is_nearest(built, world, name, least):
  """flat32 exactly; float16 may swap neighbours that are equal to 2^-11; the others are
  approximate."""
  _, encoder = world
  hits = open_dense(built / name, encoder).search(QUERIES, topk=5)
  expected = exact(built, encoder, QUERIES, 5)
  found = [[int(hit.id[1:]) for hit in of_query] for of_query in hits]
  assert all(len(of_query) == 5 for of_query in found)
  share = np.mean(
    [
      len(set(mine) & set(theirs)) / 5
      for mine, theirs in zip(found, expected.tolist(), strict=True)
    ]
  )
  assert share >= least
  for of_query in hits:
    assert [hit.score for hit in of_query] == sorted((hit.score for hit in of_query), reverse=True)
    assert all(hit == PASSAGES[int(hit.id[1:])] for hit in of_query)


@pytest.mark.parametrize("name", ["flat", "hnsw", "ivf_sq"])
def test_a_passage_is_found_by_its_own_text_with_score_one(built, world, name):
  hits = open_dense(built / name, world[1]).search(
    [PASSAGES[row].contents for row in (0, 7_777, COUNT - 1)], topk=1
  )
  assert [hit.id for (hit,) in hits] == ["p0", "p7777", f"p{COUNT - 1}"]
  assert [hit.score for (hit,) in hits] == pytest.approx([1, 1, 1], abs=2e-3)  # float16 components


def test_reranking_scores_exactly(built, world):
  folder, encoder = world
  hits = open_dense(built / "ivf_pq", encoder).search(QUERIES, topk=3)
  vectors, queries = Embeddings(folder / "embeddings"), encoder.encode(QUERIES, "query")
  for query, of_query in zip(queries, hits):
    rows = np.array([int(hit.id[1:]) for hit in of_query])
    np.testing.assert_allclose(
      [hit.score for hit in of_query], vectors.take(rows) @ query, atol=1e-6
    )
  without = open_dense(built / "ivf_pq", encoder, rerank=0)
  assert without.manifest["index"]["rerank"] == 0
  assert [hit.score for hit in without.search(QUERIES[:1], 3)[0]] != [hit.score for hit in hits[0]]


@pytest.mark.parametrize("name", list(CONFIGS))
def test_read_and_mapped_indexes_answer_alike(built, world, name):
  mapped, read = (open_dense(built / name, world[1], mapped=mapped) for mapped in (True, False))
  for one, other in zip(mapped.search(QUERIES, 4), read.search(QUERIES, 4), strict=True):
    assert [(hit.id, hit.score) for hit in one] == [(hit.id, hit.score) for hit in other]


def test_an_index_that_reranks_says_what_it_misses(built, world, tmp_path):
  target = copied(built, "ivf_pq", tmp_path / "ivf_pq")
  with pytest.raises(
    FileNotFoundError, match="scores 50 candidates again with the vectors in .*--rerank=0"
  ):
    open_dense(target, world[1])
  assert len(open_dense(target, world[1], rerank=0).search(["x"], 3)[0]) == 3


def test_more_probes_find_more(built, world):
  _, encoder = world
  expected = exact(built, encoder, QUERIES, 5)

  def share(probes):
    hits = open_dense(built / "ivf_sq8", encoder, probes=probes).search(QUERIES, 5)
    return np.mean(
      [
        len({int(h.id[1:]) for h in mine} & set(theirs))
        for mine, theirs in zip(hits, expected.tolist())
      ]
    )

  assert share(1) < share(32)
  assert (
    open_dense(built / "ivf_sq8", encoder, probes=500).manifest["index"]["probes"] == 32
  )  # all there are


@pytest.mark.parametrize("name", ["hnsw", "ivf_sq8", "ivf_pq"])
def test_a_build_that_was_killed_goes_on_where_it_stopped(
  world, built, tmp_path, monkeypatch, name
):
  folder, encoder = world
  config, embeddings, added = CONFIGS[name], Embeddings(folder / "embeddings"), []
  monkeypatch.setattr(memory, "CHUNK_BYTES", 4 * WIDTH * 1_000)
  read = Embeddings.read

  def counting(self, start, stop):
    if start == 4_000 and not added[4:]:
      raise KeyboardInterrupt
    added.append(start)
    return read(self, start, stop)

  monkeypatch.setattr(Embeddings, "read", counting)
  with pytest.raises(KeyboardInterrupt):
    indexes.build(config, embeddings, tmp_path / "i", save_every_s=0)
  assert not (tmp_path / "i/manifest.json").exists() and added == [0, 1_000, 2_000, 3_000]
  with pytest.raises(ValueError, match="was built with"):  # other settings can't go on from it
    indexes.build(dataclasses.replace(config, links=5, lists=16), embeddings, tmp_path / "i")
  added.append("resumed")
  monkeypatch.setattr(indexes, "train", None)  # a second training would fail
  indexes.build(config, embeddings, tmp_path / "i")
  assert added[5:] == list(range(4_000, COUNT, 1_000))
  assert sorted(path.name for path in (tmp_path / "i").iterdir()) == [
    "index.faiss",
    "manifest.json",
  ]
  index, _ = indexes.load(tmp_path / "i")
  assert index.ntotal == COUNT
  if name != "hnsw":  # a graph depends on the steps it grew in
    whole, query = indexes.load(built / name)[0], encoder.encode(QUERIES, "query")
    np.testing.assert_array_equal(index.search(query, 3)[1], whole.search(query, 3)[1])


def test_a_built_index_is_not_built_again_unless_settings_differ(built, world, monkeypatch):
  embeddings = Embeddings(world[0] / "embeddings")
  monkeypatch.setattr(indexes, "make", None)
  indexes.build(dataclasses.replace(CONFIGS["ivf_sq"], probes=4), embeddings, built / "ivf_sq")
  assert manifests.read(built / "ivf_sq/manifest.json")["index"]["probes"] == 4
  indexes.build(CONFIGS["ivf_sq"], embeddings, built / "ivf_sq")
  with pytest.raises(ValueError, match="was built with links=8, not 16"):
    indexes.build(IndexConfig("hnsw", links=16), embeddings, built / "hnsw")


###  Memory  ###


@pytest.mark.parametrize("name", list(CONFIGS))
def test_predicted_size_is_that_of_the_index(built, name):
  predicted = memory.index_bytes(CONFIGS[name], COUNT, WIDTH)
  # Levels of a graph are drawn at random; lists have headers.
  assert (built / name / indexes.FILE).stat().st_size == pytest.approx(predicted, rel=0.02)


def test_an_index_that_does_not_fit_is_refused_before_any_work_with_what_would_fit(world, tmp_path):
  embeddings = Embeddings(world[0] / "embeddings")
  with pytest.raises(
    MemoryError,
    match=r"building a flat index of 12,000 vectors of 16 takes 2.7 MB, and 0.0 MB are free; use a",
  ):
    indexes.build(IndexConfig("flat"), embeddings, tmp_path / "i", free=1)
  assert not (tmp_path / "i").exists()
  with pytest.raises(
    MemoryError,
    match=r"a flat index of 21,015,324 vectors of 768 takes 64.6 GB, and 32.0 GB are free; "
    r"choose ivf_sq with int8 \(.* GB\) or ivf_pq \(.* GB\)\.",
  ):
    wiki = IndexConfig("flat", "float32")
    memory.require(
      wiki,
      21_015_324,
      768,
      memory.index_bytes(wiki, 21_015_324, 768),
      "searching",
      free=32_000_000_000,
    )


def test_opening_more_than_fits_is_refused_and_mapping_counts_what_is_touched(built):
  size = memory.index_bytes(CONFIGS["ivf_sq"], COUNT, WIDTH)
  with pytest.raises(MemoryError, match="searching a ivf_sq index"):
    indexes.load(built / "ivf_sq", mapped=False, free=size)
  indexes.load(built / "ivf_sq", mapped=True, free=size)  # 16 of 32 cells
  with pytest.raises(MemoryError, match="searching a flat index"):
    indexes.load(built / "flat", mapped=True, free=1_000)


def test_free_memory_is_a_number_of_this_machine():
  free = memory.free_bytes()
  assert free is None or 0 <= free < 1 << 50


@pytest.mark.parametrize(
  "arguments, message",
  [
    (dict(kind="annoy"), "index 'annoy' is unknown; choose one of flat, hnsw, ivf_pq, ivf_sq"),
    (dict(storage="int4"), "storage 'int4' is unknown"),
    (dict(links=1), "links=1 must be at least 2"),
    (dict(lists=-1), "lists=-1 must be at least 0"),
    (dict(rerank=-2), "rerank=-2 must be at least 0, or -1"),
  ],
)
def test_settings_out_of_range_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    IndexConfig(**arguments)


@pytest.mark.parametrize(
  "config, count, message",
  [
    (IndexConfig("ivf_pq"), 9_000, "needs at least 9,984 vectors"),
    (IndexConfig("ivf_pq", code_bytes=5), 20_000, "code_bytes=5 must divide the dimension 16"),
    (IndexConfig("ivf_sq", lists=1_000), 20_000, "lists=1000 needs at least 39,000 vectors"),
    (
      IndexConfig("ivf_sq", lists=100, training_vectors=50),
      20_000,
      "training_vectors=50 is too few for 100 lists",
    ),
  ],
)
def test_settings_that_can_not_be_fitted_are_refused(config, count, message):
  with pytest.raises(ValueError, match=message):
    config.settled(count, WIDTH)


@pytest.mark.parametrize("count", [1, 38, 39, 500, 9_984, 59_479, 21_015_324])
def test_settings_chosen_by_size_can_be_fitted_and_stay(count):
  for kind in memory.KINDS if count >= 9_984 else ("flat", "hnsw", "ivf_sq"):
    settled = IndexConfig(kind).settled(count, 768)
    assert settled.settled(count, 768) == settled
    assert 0 < memory.index_bytes(settled, count, 768) <= memory.build_bytes(settled, count, 768)
    if kind.startswith("ivf"):
      assert 1 <= settled.probes <= settled.lists and settled.lists * 39 <= max(count, 39)


###  Manifests  ###


def copied(built, name, target):
  target.mkdir()
  for file in (built / name).iterdir():
    (target / file.name).write_bytes(file.read_bytes())
  return target


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"sha256": "f" * 64}, "was built with encoder 'hash', sha256 '0000.*'hash', sha256 'ffff"),
    ({"prefixes": {"query": "q: ", "passage": ""}}, "prefixes"),
    ({"pooling": "cls"}, "pooling 'mean'.*'cls'"),
  ],
)
def test_queries_of_another_encoder_are_refused_by_name(built, changes, message):
  with pytest.raises(ValueError, match=message):
    open_dense(built / "flat", HashEncoder(**changes))


def test_another_corpus_is_refused_and_the_same_one_elsewhere_or_compressed_is_not(
  built, world, tmp_path
):
  _, encoder = world
  other = [*PASSAGES[:-1], Passage("p11999", "Title 11999", "text 11998 naïve 東京")]
  with pytest.raises(ValueError, match="digest .*corpus.jsonl|digest .* but the corpus here is"):
    open_dense(built / "flat", encoder, corpus=write_corpus(tmp_path / "other.jsonl", other))
  moved = open_dense(built / "flat", encoder, corpus=write_corpus(tmp_path / "moved.jsonl.gz"))
  assert moved.search(QUERIES[:1], 1)[0][0].id == "p0"
  assert moved.manifest == open_dense(built / "flat", encoder).manifest
  assert moved.manifest["corpus"] == corpus_digest(PASSAGES) and moved.manifest["count"] == COUNT
  json.dumps(moved.manifest)


def edited(path, **changes):
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"format": 7}, "has format 7, this version reads 1"),
    ({"count": 11}, "holds 12,000 vectors of 16, its manifest says 11"),
    ({"dimension": 32}, "manifest says 12,000 of 32"),
    ({"count": "many"}, "fields have other types"),
    ({"index": {}}, "does not describe an index"),
    ({"index": {"kind": "hnsw"}}, "holds a IndexScalarQuantizer of another kind"),
    ({"index": None}, "does not describe an index"),
  ],
)
def test_a_manifest_that_disagrees_with_its_index_is_refused(built, tmp_path, changes, message):
  target = copied(built, "flat", tmp_path / "i")
  edited(target / "manifest.json", **changes)
  with pytest.raises(ValueError, match=message):
    indexes.load(target)


def test_damaged_and_missing_indexes_are_refused(built, tmp_path):
  target = copied(built, "hnsw", tmp_path / "i")
  whole = (target / indexes.FILE).read_bytes()
  for mapped in (True, False):
    for damage in (whole[: len(whole) // 2], b"", b"IxHn" * 10):
      (target / indexes.FILE).write_bytes(damage)
      with pytest.raises(ValueError, match="is damaged or cut short"):
        indexes.load(target, mapped=mapped)
  (target / indexes.FILE).unlink()
  with pytest.raises(FileNotFoundError, match="index.faiss does not exist; build"):
    indexes.load(target)
  (target / "manifest.json").write_text("{")
  with pytest.raises(ValueError, match="is no manifest of an index"):
    indexes.load(target)
  with pytest.raises(FileNotFoundError, match="manifest.json does not exist; build"):
    indexes.load(tmp_path / "nowhere")


###  Searching  ###


def test_blank_queries_get_nothing_and_keep_their_place(built, world):
  retriever = open_dense(built / "flat", world[1])
  hits = retriever.search(["", QUERIES[0], " \n", QUERIES[1]], topk=1)
  assert [[hit.id for hit in of_query] for of_query in hits] == [[], ["p0"], [], ["p1"]]
  assert retriever.search([], topk=1) == [] and retriever.search([""], topk=1) == [[]]


def test_more_wanted_than_there_are_or_than_the_cells_hold(built, world):
  _, encoder = world
  assert len(open_dense(built / "flat", encoder).search(["x"], topk=COUNT + 5)[0]) == COUNT
  few = open_dense(built / "ivf_sq", encoder, probes=1).search(["x"], topk=COUNT)[0]
  assert 0 < len(few) < COUNT


def test_equal_vectors_come_in_the_order_of_the_corpus():
  index = faiss.IndexFlatIP(4)
  index.add(np.tile(np.array([[1, 0, 0, 0]], np.float32), (6, 1)))
  one = type(
    "One",
    (),
    {"manifest": {}, "encode": lambda self, texts, role: np.array([[1, 0, 0, 0]], np.float32)},
  )()
  manifest = {"encoder": {}, "corpus": {}, "count": 6, "dimension": 4, "index": {}}
  hits = Dense(index, PASSAGES[:6], one, manifest).search(["x"], topk=6)[0]
  assert [hit.id for hit in hits] == ["p0", "p1", "p2", "p3", "p4", "p5"]


def test_calls_out_of_range_are_refused(built, world):
  retriever = open_dense(built / "flat", world[1])
  with pytest.raises(ValueError, match="topk is 0"):
    retriever.search(["x"], topk=0)
  with pytest.raises(TypeError, match="sequence of queries"):
    retriever.search("x", topk=1)


def test_a_query_that_can_not_be_encoded_is_an_error_of_the_retriever(built, world):
  class Broken(HashEncoder):
    def encode(self, texts, role):
      raise FloatingPointError("the encoder gave a vector that is not finite")

  with pytest.raises(RetrieverError, match="not finite"):
    open_dense(built / "flat", Broken()).search(["x"], 1)


@pytest.mark.parametrize("name", ["hnsw", "ivf_pq"])
def test_threads_share_a_retriever(built, world, name):
  retriever = open_dense(built / name, world[1])
  expected, wrong = retriever.search(QUERIES, 3), []

  def ask():
    for _ in range(5):
      if retriever.search(QUERIES, 3) != expected:
        wrong.append(threading.get_ident())

  threads = [threading.Thread(target=ask) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert wrong == []


###  Hybrid  ###


class Fixed:
  """Always the same ranking."""

  def __init__(self, *ids, corpus="c"):
    self.ids, self.manifest = ids, {"kind": "fixed", "count": 9, "corpus": corpus}

  def search(self, queries, topk):
    return [[Passage(id, "", "text " + id, 9.0) for id in self.ids[:topk]] for _ in queries]


def test_fused_scores_are_the_formula():
  hits = Hybrid([Fixed("a", "b", "c"), Fixed("c", "d")], k=60).search(["x"], topk=4)[0]
  assert [(hit.id, hit.score) for hit in hits] == [
    ("c", pytest.approx(1 / 63 + 1 / 61)),
    ("a", pytest.approx(1 / 61)),
    ("b", pytest.approx(1 / 62)),
    ("d", pytest.approx(1 / 62)),
  ]  # equal scores: the earlier retriever's comes first


def test_a_hybrid_reads_deeper_than_it_answers():
  deep = Hybrid([Fixed("a", "b", "c"), Fixed("d", "e", "c")], depth=3).search(["x", "y"], topk=1)
  assert [[hit.id for hit in of_query] for of_query in deep] == [["c"], ["c"]]
  assert (
    Hybrid([Fixed("a", "b", "c"), Fixed("d", "e", "c")], depth=1).search(["x"], topk=1)[0][0].id
    == "a"
  )
  assert Hybrid([Fixed(), Fixed()]).search(["x"], topk=3) == [[]]


def test_hybrids_that_make_no_sense_are_refused():
  with pytest.raises(ValueError, match="a hybrid of 1 retrievers"):
    Hybrid([Fixed("a")])
  with pytest.raises(ValueError, match="k must be at least 0 and depth at least 1"):
    Hybrid([Fixed("a"), Fixed("b")], depth=0)
  with pytest.raises(ValueError, match="fixed over the corpus c and fixed over d"):
    Hybrid([Fixed("a"), Fixed("b", corpus="d")])
  with pytest.raises(ValueError, match="topk is 0"):
    Hybrid([Fixed("a"), Fixed("b")]).search(["x"], 0)


def test_bm25_and_dense_fuse_over_one_corpus(built, world):
  from stratified.retrieval.bm25 import BM25

  store = PassageStore(world[0] / "corpus.jsonl", offsets=world[0] / "offsets.npy")
  hybrid = Hybrid([BM25(store), open_dense(built / "flat", world[1], passages=store)])
  assert hybrid.search([PASSAGES[77].contents], topk=3)[0][0] == PASSAGES[77]
  assert hybrid.manifest["corpus"] == corpus_digest(PASSAGES)


def test_dense_retrieval_does_not_load_jax():
  program = (
    "import sys, stratified.retrieval.dense, stratified.retrieval.hybrid\n"
    "print(sorted(m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib', 'flax', 'torch')))"
  )
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == "[]"
