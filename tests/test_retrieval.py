"""The corpus reader and the embedded BM25 retriever."""

import gzip
import json
import math
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from stratified.data import readers
from stratified.retrieval import bm25
from stratified.retrieval.bm25 import BM25
from stratified.retrieval.corpus import Passage, passage_from_contents, read_corpus

PASSAGES = [
  Passage("0", "Hamlet", "Hamlet is a tragedy by William Shakespeare."),
  Passage("1", "The Who", "The Who are an English rock band formed in London."),
  Passage("2", "Will Smith", "Will Smith is an American actor."),
  Passage("3", "Preradović", "Paula von Preradović was an Austrian writer and poet."),
  Passage("4", "&TV", "&TV (एण्ड टीवी) is a Hindi channel."),
  Passage("5", "東京", "東京は日本の首都です。"),
  Passage("6", "Twin A", "the same words here"),
  Passage("7", "Twin A", "the same words here"),
  Passage("8", "Москва", "Москва́ — столица России."),
]


@pytest.fixture(scope="module")
def retriever():
  return BM25(PASSAGES)


def ids(hits):
  return [[passage.id for passage in passages] for passages in hits]


###  Corpus  ###


def write(path, *lines):
  data = "".join(line + "\n" for line in lines).encode()
  path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
  return path


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_reads_plain_and_compressed_corpora(tmp_path, name):
  lines = [json.dumps({"id": p.id, "contents": p.contents}, ensure_ascii=False) for p in PASSAGES]
  assert read_corpus(write(tmp_path / name, *lines, "")) == PASSAGES


@given(title=st.text(min_size=1).filter(lambda text: "\n" not in text), text=st.text(min_size=1))
@settings(max_examples=50, deadline=None)
def test_contents_of_a_titled_passage_come_back_as_they_were(title, text):
  passage = Passage("7", title, text)
  assert passage_from_contents("7", passage.contents) == passage
  assert passage_from_contents("7", passage.contents, title=title) == passage


@pytest.mark.parametrize(
  "contents, title, expected",
  [
    ("only text", None, ("", "only text")),
    ("A title\nits text", None, ("A title", "its text")),
    ("text that repeats no title", "T", ("T", "text that repeats no title")),
    ('""Good Luck, Ted""\nAn episode.', '"Good Luck, Ted"', ('"Good Luck, Ted"', "An episode.")),
    ('"Alone"', "Alone", ("Alone", "")),
  ],
)
def test_takes_contents_apart(contents, title, expected):
  passage = passage_from_contents("7", contents, title)
  assert (passage.title, passage.text) == expected


@pytest.mark.parametrize(
  "line, parts",
  [
    ('{"id": "2", "contents": ', ["line 2", "not JSON"]),
    ('["2"]', ["line 2", "list", "one JSON object"]),
    ('{"id": "2", "body": "x"}', ["line 2", '"contents"', "missing", "body, id"]),
    ('{"id": "2", "contents": 5}', ["line 2", '"contents"', "5"]),
    ('{"id": "2", "contents": "  "}', ["line 2", '"contents"', "non-empty"]),
    ('{"contents": "x"}', ["line 2", '"id"', "missing"]),
    ('{"id": null, "contents": "x"}', ["line 2", '"id"', "None"]),
    ('{"id": "2", "title": 3, "contents": "x"}', ["line 2", '"title"', "3"]),
    ('{"id": "2", "contents": "\\ud800"}', ["line 2", '"contents"', "surrogate"]),
    ('{"id": "1", "contents": "x"}', ["line 2", '"id"', "line 1", "unique"]),
  ],
)
def test_a_bad_line_names_file_line_and_field(tmp_path, line, parts):
  path = write(tmp_path / "corpus.jsonl", '{"id": 1, "contents": "x"}', line)
  with pytest.raises(ValueError) as error:
    read_corpus(path)
  for part in [str(path), *parts]:
    assert part in str(error.value)


def test_bytes_that_are_not_utf8_and_damaged_archives_are_named(tmp_path):
  path = tmp_path / "corpus.jsonl"
  path.write_bytes(b'{"id": "1", "contents": "x"}\n{"id": "2", "contents": "\xff"}\n')
  with pytest.raises(ValueError, match="line 2: not UTF-8"):
    read_corpus(path)
  whole = gzip.compress(path.read_bytes() * 50)
  for name, data in {
    "cut.jsonl.gz": whole[: len(whole) // 2],
    "plain.jsonl.gz": path.read_bytes(),
  }.items():
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name}.*damaged"):
      read_corpus(tmp_path / name)
  with pytest.raises(FileNotFoundError):
    read_corpus(tmp_path / "nowhere.jsonl")


###  Words  ###


@pytest.mark.parametrize(
  "text, expected",
  [
    ("Who wrote O'Brien's 1,000 lines?", ["who", "wrote", "o", "brien", "s", "1", "000", "lines"]),
    ("snake_case", ["snake", "case"]),
    ("Preradović", ["preradovic"]),
    ("Preradovic\u0301", ["preradovic"]),  # the accent as a character of its own
    ("STRASSE Straße", ["strasse", "strasse"]),
    ("एण्ड टीवी", ["एण्ड", "टीवी"]),
    ("東京tower は", ["東", "京", "tower", "は"]),
    ("한국어", ["한국어"]),
    ("Ｆｕｌｌ ｗｉｄｔｈ", ["full", "width"]),
    (" ...!? \n", []),
    ("", []),
  ],
)
def test_words_of_any_script(text, expected):
  assert bm25.words(text) == expected


@pytest.mark.parametrize(
  "word, expected",
  [
    ("countries", "country"),
    ("names", "name"),
    ("boxes", "boxe"),
    ("class", "class"),
    ("virus", "virus"),
    ("his", "his"),
    ("london", "london"),
  ],
)
def test_plural_stemmer(word, expected):
  assert bm25.STEMMERS["plural"](word) == expected


###  Search  ###


def test_several_queries_in_one_call_keep_their_order(retriever):
  hits = retriever.search(["Shakespeare tragedy", "English rock band", "Austrian poet"], topk=1)
  assert ids(hits) == [["0"], ["1"], ["3"]]
  assert retriever.search([], topk=3) == []


def test_no_hit_is_an_empty_list_never_an_arbitrary_passage(retriever):
  assert retriever.search(["", "   ", "?!", "zyzzyva quux"], topk=5) == [[], [], [], []]
  assert ids(retriever.search(["zyzzyva Shakespeare"], topk=5)) == [["0"]]


def test_more_passages_wanted_than_match_or_exist(retriever):
  hits = retriever.search(["is the"], topk=1000)[0]
  assert {hit.id for hit in hits} == {"0", "1", "2", "4", "6", "7"}


def test_names_made_of_stop_words_are_found_by_default(retriever):
  assert ids(retriever.search(["Will", "the who"], topk=1)) == [["2"], ["1"]]
  without = BM25(PASSAGES, stop_words=bm25.ENGLISH_STOP_WORDS)
  assert without.search(["will"], topk=1) == [[]]


def test_text_that_is_not_english_or_not_ascii(retriever):
  queries = ["preradovic", "PRERADOVIĆ", "टीवी", "首都", "столица россии", "Москва"]
  assert ids(retriever.search(queries, topk=1)) == [["3"], ["3"], ["4"], ["5"], ["8"], ["8"]]


def test_ties_go_to_the_first_in_the_corpus(retriever):
  assert ids(retriever.search(["twin words"], topk=2)) == [["6", "7"]]
  assert ids(retriever.search(["twin words"], topk=1)) == [["6"]]
  many = BM25([Passage(str(i), "", "same" if i % 2 else "same text") for i in range(500)])
  short_then_long = [*range(1, 500, 2), *range(0, 100, 2)]
  assert ids(many.search(["same"], topk=300)) == [[str(i) for i in short_then_long]]


def test_order_and_repetition_of_words_do_not_matter(retriever):
  one, other = retriever.search(
    ["english rock band london", "London band band rock english"], topk=9
  )
  assert [(hit.id, hit.score) for hit in one] == [(hit.id, hit.score) for hit in other]


@given(
  st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8), min_size=1, max_size=12),
  st.lists(st.sampled_from("abcdefghz"), max_size=4),
  st.integers(1, 5),
)
@settings(max_examples=40, deadline=None)
def test_scores_are_the_formulas_best_first(texts, query, topk):
  passages = [Passage(str(i), "", " ".join(text)) for i, text in enumerate(texts)]
  hits = BM25(passages, k1=1.2, b=0.75).search([" ".join(query)], topk)[0]
  mean = sum(map(len, texts)) / len(texts)

  def formula(text):
    total = 0.0
    for word in set(query):
      tf, df = text.count(word), sum(word in other for other in texts)
      idf = math.log(1 + (len(texts) - df + 0.5) / (df + 0.5))
      total += idf * tf / (tf + 1.2 * (1 - 0.75 + 0.75 * len(text) / mean))
    return total

  scores = [formula(text) for text in texts]
  assert len(hits) == min(topk, sum(score > 0 for score in scores))
  for hit, best in zip(hits, sorted(scores, reverse=True)):
    assert hit.score == pytest.approx(best, rel=1e-5)
    assert hit.score == pytest.approx(scores[int(hit.id)], rel=1e-5)
    assert hit == passages[int(hit.id)]


def test_stemmer_and_stop_words_apply_to_passages_and_queries():
  retriever = BM25(PASSAGES, stemmer="plural", stop_words=["WHO"])
  assert ids(retriever.search(["actors", "tragedies", "who"], topk=1)) == [["2"], ["0"], []]


def test_settings_out_of_range_are_refused():
  with pytest.raises(ValueError, match="'porter' is unknown; choose from none, plural"):
    BM25(PASSAGES, stemmer="porter")
  with pytest.raises(ValueError, match="b = 2"):
    BM25(PASSAGES, b=2)
  with pytest.raises(ValueError, match="0 passages without a word"):
    BM25([])
  with pytest.raises(ValueError, match="1 passages without a word"):
    BM25([Passage("0", "?", "!")])


def test_calls_out_of_range_are_refused(retriever):
  with pytest.raises(ValueError, match="topk is 0"):
    retriever.search(["x"], topk=0)
  with pytest.raises(TypeError, match="sequence of queries"):
    retriever.search("Hamlet", topk=1)


###  Cache  ###


def test_a_cached_index_is_used_and_answers_alike(tmp_path, retriever, monkeypatch):
  queries = ["Shakespeare", "the english band", "", "東京", "twin"]
  BM25(PASSAGES, cache_dir=tmp_path)
  monkeypatch.setattr(BM25, "_build", None)  # a second build would fail
  cached = BM25(PASSAGES, cache_dir=tmp_path)
  for one, other in zip(
    cached.search(queries, topk=4), retriever.search(queries, topk=4), strict=True
  ):
    assert [(hit.id, hit.score) for hit in one] == [(hit.id, hit.score) for hit in other]


def test_other_content_or_settings_get_an_index_of_their_own(tmp_path):
  BM25(PASSAGES, cache_dir=tmp_path)
  BM25(PASSAGES, cache_dir=tmp_path, k1=0.9)
  BM25(PASSAGES, cache_dir=tmp_path, stemmer="plural")
  changed = [*PASSAGES[:-1], Passage("8", "Rome", "Rome is a capital.")]
  assert ids(BM25(changed, cache_dir=tmp_path).search(["rome"], topk=1)) == [["8"]]
  assert len(list(tmp_path.iterdir())) == 4


def test_an_interrupted_save_leaves_nothing_to_be_read(tmp_path, monkeypatch):
  def interrupted(self, folder, **unused):
    raise KeyboardInterrupt

  monkeypatch.setattr(bm25.bm25s.BM25, "save", interrupted)
  with pytest.raises(KeyboardInterrupt):
    BM25(PASSAGES, cache_dir=tmp_path)
  assert list(tmp_path.iterdir()) == []


###  Isolation  ###


@pytest.mark.parametrize("before", ["", "import jax; "])
def test_retrieval_does_not_start_jax(before):
  code = before + (
    "import sys; from stratified.retrieval.bm25 import BM25; "
    "from stratified.retrieval.corpus import Passage; "
    "assert BM25([Passage('0', 'a', 'b')]).search(['b'], 1)[0]; "
    "backends = sys.modules.get('jax._src.xla_bridge'); "
    "assert not (backends and backends._backends), 'jax backends were started'; "
    "assert sys.modules.get('jax', 'absent') is not None; "
    "print('jax' in sys.modules)"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == str(bool(before))


###  The real corpus  ###


def test_real_questions_find_their_evidence():
  try:
    root = readers.data_root()
  except FileNotFoundError as error:
    pytest.skip(f"needs the real corpus: {error}")
  passages = read_corpus(root / "corpus.jsonl.gz")
  assert len(passages) == 59_479
  retriever = BM25(passages)
  hamlet = retriever.search(["Who wrote the tragedy Hamlet?"], topk=3)[0]
  assert any("Shakespeare" in hit.contents for hit in hamlet)
  # PopQA's evidence is the subject's article: seen at 94 % in the first three; 85 % tells a broken
  # index.
  lines = (root / "questions/popqa.jsonl").read_text(encoding="utf-8").splitlines()
  records = [record for record in map(json.loads, lines) if record["evidence"] == "gold"][:200]
  hits = retriever.search([record["question"] for record in records], topk=3)
  found = sum(
    bool({hit.id for hit in three} & set(record["evidence_ids"]))
    for record, three in zip(records, hits, strict=True)
  )
  assert found / len(records) >= 0.85
