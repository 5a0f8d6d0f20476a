"""experiments/prepare_data.py: from raw files, or a hub on the loopback, to what the presets
name."""

import contextlib
import gzip
import hashlib
import http.server
import io
import json
import pathlib
import subprocess
import sys
import threading

from absl import flags
from absl.testing import flagsaver
import pytest

from configs import search_r1
from experiments import prepare_data
from stratified.data import prepare, readers
from stratified.retrieval.corpus import Passage, read_corpus

ROOT = pathlib.Path(__file__).parents[1]


def lines(path, *records):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
  return path


def flashrag(id, question, answer="x"):
  return {"id": id, "question": question, "golden_answers": [answer]}


def run(*arguments):
  """The command in this process: as fast as what it does."""
  told, complained = io.StringIO(), io.StringIO()
  flags.FLAGS.unparse_flags()
  flags.FLAGS(["prepare_data.py"])
  with (
    flagsaver.flagsaver(),
    contextlib.redirect_stdout(told),
    contextlib.redirect_stderr(complained),
  ):
    flags.FLAGS(["prepare_data.py", *map(str, arguments)])
    try:
      prepare_data.main(None)
      code = 0
    except SystemExit as error:
      code = 1
      complained.write(f"{error}")
  return subprocess.CompletedProcess(arguments, code, told.getvalue(), complained.getvalue())


def raw_files(raw):
  lines(
    raw / "nq" / "train.jsonl",
    flashrag("train_0", "who wrote hamlet"),
    flashrag("train_1", "where is Oslo?"),
    flashrag("train_2", "who else?"),
  )
  lines(raw / "hotpotqa" / "train.jsonl", flashrag("train_0", "Same country?", "yes"))
  lines(raw / "nq" / "test.jsonl", flashrag("test_0", "Where is oslo"))
  lines(
    raw / "popqa" / "test.jsonl",
    flashrag("test_0", "Who wrote Hamlet?"),
    flashrag("test_1", "Who is Ada?"),
  )
  return raw


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  folder = tmp_path_factory.mktemp("prepared")
  raw, out = raw_files(folder / "raw"), folder / "data"
  (raw / "psgs.tsv").write_text(
    'id\ttext\ttitle\n1\t"Aaron said ""I"" am\t here."\tAaron\n2\tÉ\tB\n'
  )
  done = run(
    f"--out={out}",
    f"--train={raw / 'nq/train.jsonl'}",
    f"--train={raw / 'hotpotqa/train.jsonl'}",
    f"--test={raw / 'nq/test.jsonl'}",
    f"--test={raw / 'popqa'}",
    f"--corpus={raw / 'psgs.tsv'}",
    "--remove_duplicates",
  )
  assert done.returncode == 0, done.stderr
  return out, done.stdout


def test_writes_what_the_presets_read(prepared):
  out, _ = prepared
  config = search_r1.get_config("base")
  place = lambda value: out / pathlib.Path(value).relative_to("data")
  train = readers.read_questions(place(config.data.questions), split=config.data.split)
  assert [(q.source, q.text) for q in train] == [("hotpotqa", "Same country?"), ("nq", "who else?")]
  assert train[0].hops == 2 and train[1].hops is None
  held = readers.read_questions(place(config.data.evaluation))
  assert [(q.source, q.text) for q in held] == [
    ("nq", "Where is oslo"),
    ("popqa", "Who wrote Hamlet?"),
    ("popqa", "Who is Ada?"),
  ]
  passages = read_corpus(place(config.data.corpus))
  assert [(p.id, p.title, p.text) for p in passages] == [
    ("1", "Aaron", 'Aaron said "I" am\t here.'),
    ("2", "B", "É"),
  ]


def test_the_manifest_tells_counts_hashes_licences_and_duplicates(prepared):
  out, told = prepared
  manifest = json.loads((out / "manifest.json").read_text())
  assert set(manifest["files"]) == {
    "nq_hotpotqa_train/nq.jsonl",
    "nq_hotpotqa_train/hotpotqa.jsonl",
    "benchmarks/nq.jsonl",
    "benchmarks/popqa.jsonl",
    "wiki18.jsonl",
  }
  for path, entry in manifest["files"].items():
    data = (out / path).read_bytes()
    assert entry["sha256"] == hashlib.sha256(data).hexdigest() and entry["bytes"] == len(data)
    assert (
      entry["count"] == data.count(b"\n") and entry["licence"] and entry["sources"][0]["sha256"]
    )
  assert manifest["files"]["benchmarks/popqa.jsonl"]["licence"] == "MIT"
  assert manifest["duplicates"] == {
    "across": {"nq / nq": 1, "nq / popqa": 1},
    "within": {},
    "between_training_sets": {},
    "removed": {"nq": 2, "hotpotqa": 0},
  }
  assert "nq / popqa: 1 training question stands in the benchmark (left out)" in told
  assert not list(out.rglob("*.part"))


def test_duplicates_stay_unless_told_and_benchmarks_of_an_earlier_call_are_compared(tmp_path):
  raw, out = raw_files(tmp_path / "raw"), tmp_path / "data"
  assert run(f"--out={out}", f"--test={raw / 'popqa'}").returncode == 0
  done = run(
    f"--out={out}", f"--train={raw / 'nq/train.jsonl'}", "--train_sets=nq", "--train_name=mix"
  )
  assert done.returncode == 0, done.stderr
  assert (
    "nq / popqa: 1 training question stands in the benchmark (kept; --remove_duplicates leaves "
    "them out)" in done.stdout
  )
  manifest = json.loads((out / "manifest.json").read_text())
  assert (
    set(manifest["files"]) == {"benchmarks/popqa.jsonl", "mix/nq.jsonl"}
    and manifest["files"]["mix/nq.jsonl"]["count"] == 3
  )


def test_a_training_set_of_which_nothing_is_left_is_refused(tmp_path):
  raw = raw_files(tmp_path / "raw")
  lines(raw / "nq" / "train.jsonl", flashrag("train_0", "Who is Ada?"))
  done = run(
    f"--out={tmp_path / 'data'}",
    f"--train={raw / 'nq/train.jsonl'}",
    f"--test={raw / 'popqa'}",
    "--train_sets=nq",
    "--remove_duplicates",
  )
  assert (
    "no question of nq is left to write to nq_hotpotqa_train/nq.jsonl: all of its training"
    in done.stderr
  )


def test_the_command_runs_by_itself(tmp_path):
  raw = raw_files(tmp_path / "raw")
  done = subprocess.run(
    [
      sys.executable,
      "experiments/prepare_data.py",
      f"--out={tmp_path / 'data'}",
      f"--test={raw / 'popqa'}",
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0 and "| benchmarks/popqa.jsonl | 2 | 0.0 | MIT |" in done.stdout, (
    done.stderr
  )


def test_a_sets_folder_gives_each_side_its_own_split(tmp_path):
  raw, out = raw_files(tmp_path / "raw"), tmp_path / "data"
  lines(raw / "nq" / "dev.jsonl", flashrag("dev_0", "Not for the table?"))
  assert (
    run(
      f"--out={out}", f"--train={raw / 'nq'}", f"--test={raw / 'nq'}", "--train_sets=nq"
    ).returncode
    == 0
  )
  files = json.loads((out / "manifest.json").read_text())["files"]
  assert {path: (entry["count"], entry["splits"]) for path, entry in files.items()} == {
    "nq_hotpotqa_train/nq.jsonl": (3, ["train"]),
    "benchmarks/nq.jsonl": (1, ["test"]),
  }


def test_the_same_inputs_give_the_same_files(tmp_path):
  raw = raw_files(tmp_path / "raw")
  for name in ("a", "b"):
    assert run(f"--out={tmp_path / name}", f"--test={raw / 'popqa'}").returncode == 0
  assert (tmp_path / "a/manifest.json").read_text() == (tmp_path / "b/manifest.json").read_text()


@pytest.mark.parametrize(
  "arguments, message",
  [
    ([], "nothing to prepare: name files with --train, --test, --corpus, or --download=all"),
    (["--test=RAW/none.jsonl"], "none.jsonl: there is no such file"),
    (["--train=RAW/nq/train.jsonl"], "--train holds no questions of hotpotqa"),
    (["--download=zoo"], "--download names zoo; choose from all, train, test, corpus, nq"),
    (
      ["--corpus=RAW/bad.tsv"],
      "its first row is ['id', 'title'], but passages come with the columns id, text, title",
    ),
    (["--test=../up=RAW/nq/test.jsonl"], "there is no such file"),
    (["--test=RAW/zoo.jsonl"], "name it as SET="),
    (["--test=RAW/twice.jsonl"], "the id '1' names two questions"),
    (["--test=RAW/empty"], "no file in it is named after a question set"),
    (
      ["--train=RAW/popqa"],
      "popqa: no file in it is named after a question set and holds train questions",
    ),
    (
      ["--train=RAW/popqa/test.jsonl"],
      "test.jsonl holds no train questions by its name or by its records' split",
    ),
    (["--test=RAW/nq/train.jsonl"], "train.jsonl holds no test questions"),
    (
      ["--download=nq", "--endpoint=http://127.0.0.1:9", "--raw=RAW/x"],
      "/datasets/RUC-NLPIR/FlashRAG_datasets/resolve/main/nq/test.jsonl can't be fetched",
    ),
  ],
)
def test_what_cannot_be_prepared_is_one_sentence(tmp_path, arguments, message):
  raw = raw_files(tmp_path / "raw")
  (raw / "bad.tsv").write_text("id\ttitle\n1\tx\n")
  (raw / "empty").mkdir()
  lines(raw / "zoo.jsonl", flashrag("1", "x"))
  lines(
    raw / "twice.jsonl",
    flashrag("1", "x") | {"data_source": "a"},
    flashrag("1", "y") | {"data_source": "a"},
  )
  done = run(
    f"--out={tmp_path / 'data'}", *(argument.replace("RAW", str(raw)) for argument in arguments)
  )
  assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
  assert message in done.stderr
  if "--download=nq" in arguments:
    assert (
      "Without a network, bring the files from a machine that has one and name them: --train=PATH"
      in done.stderr
    )


class Hub(http.server.ThreadingHTTPServer):
  def __init__(self, files):
    super().__init__(("127.0.0.1", 0), _Hub)
    self.files, self.cut, self.asked = files, 0, []
    threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class _Hub(http.server.BaseHTTPRequestHandler):
  """As the hub answers: large files by a redirection with their SHA-256, ranges, ETags."""

  def log_message(self, *unused):
    pass

  def do_HEAD(self):
    self._send(body=False)

  def do_GET(self):
    self.server.asked.append((self.path, self.headers.get("Range")))
    self._send(body=True)

  def _send(self, body):
    data = self.server.files.get(self.path.removeprefix("/store"))
    if data is None:
      return self.send_error(404)
    digest = hashlib.sha256(data).hexdigest()
    if not self.path.startswith("/store"):
      self.send_response(302)
      for name, value in {
        "Location": f"/store{self.path}",
        "X-Linked-Etag": f'"{digest}"',
        "X-Linked-Size": len(data),
        "X-Repo-Commit": "c0ffee",
      }.items():
        self.send_header(name, str(value))
      return self.end_headers()
    start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
    self.send_response(206 if start else 200)
    if start:
      self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
    self.send_header("Content-Length", str(len(data) - start))
    self.send_header("ETag", f'"{digest}"')
    self.end_headers()
    if body:
      data = data[start:]
      if self.server.cut and len(data) > 1000:
        self.server.cut, data = self.server.cut - 1, data[: len(data) // 2]
      self.wfile.write(data)


def test_everything_by_name_from_a_hub_with_breaks_and_a_second_call_that_fetches_nothing(tmp_path):
  base = "/datasets/RUC-NLPIR/FlashRAG_datasets/resolve/v7"
  question = lambda *records: "".join(json.dumps(record) + "\n" for record in records).encode()
  files = {
    f"{base}/{name}/{split}.jsonl": question(flashrag(f"{split}_0", f"{name} {split}?"))
    for name, split in [
      ("nq", "train"),
      ("hotpotqa", "train"),
      ("nq", "test"),
      ("triviaqa", "test"),
      ("popqa", "test"),
      ("hotpotqa", "dev"),
      ("2wikimultihopqa", "dev"),
      ("musique", "dev"),
      ("bamboogle", "test"),
    ]
  }
  corpus = question(
    *(
      {"id": str(i), "contents": f'"T{i}"\n{hashlib.sha256(str(i).encode()).hexdigest()}'}
      for i in range(300)
    )
  )
  files["/datasets/PeterJinGo/wiki-18-corpus/resolve/v7/wiki-18.jsonl.gz"] = gzip.compress(corpus)
  with Hub(files) as hub:
    hub.cut = 1
    flags = [
      f"--out={tmp_path}",
      "--download=all",
      "--revision=v7",
      f"--endpoint=http://127.0.0.1:{hub.server_port}",
    ]
    done = run(*flags)
    assert done.returncode == 0, done.stderr
    assert any(range_ for path, range_ in hub.asked if path.endswith("wiki-18.jsonl.gz"))
    asked, before = len(hub.asked), (tmp_path / "manifest.json").read_text()
    stamp = (tmp_path / "wiki18.jsonl").stat().st_mtime_ns
    assert run(*flags).returncode == 0
    assert len(hub.asked) == asked and (tmp_path / "manifest.json").read_text() == before
    assert (
      tmp_path / "wiki18.jsonl"
    ).stat().st_mtime_ns == stamp  # the corpus is not converted again
    hub.shutdown()
  assert (tmp_path / "wiki18.jsonl").read_bytes() == corpus
  manifest = json.loads(before)
  assert len(manifest["files"]) == 10
  assert manifest["files"]["wiki18.jsonl"]["sources"][0]["url"].endswith(
    "/resolve/v7/wiki-18.jsonl.gz"
  )
  assert manifest["files"]["benchmarks/hotpotqa.jsonl"]["splits"] == ["dev"]
  assert len(readers.read_questions(tmp_path / "benchmarks")) == 7


###  The corpus  ###


@pytest.mark.parametrize(
  "record, contents",
  [
    ({"id": 7, "contents": '"T"\nx'}, '"T"\nx'),
    ({"id": "7", "title": "T", "text": "x"}, '"T"\nx'),
    ({"id": "7", "title": "", "text": "x"}, "x"),
  ],
)
def test_passages_in_each_json_form(tmp_path, record, contents):
  found = prepare.write_corpus(lines(tmp_path / "c.jsonl", record), tmp_path / "out.jsonl")
  assert found["count"] == 1 and json.loads((tmp_path / "out.jsonl").read_text()) == {
    "id": "7",
    "contents": contents,
  }


def test_a_compressed_corpus_has_the_same_bytes_each_time(tmp_path):
  source = lines(tmp_path / "c.jsonl", *({"id": str(i), "contents": "x"} for i in range(50)))
  first, second = (
    prepare.write_corpus(source, tmp_path / name / "wiki.jsonl.gz") for name in ("a", "b")
  )
  assert first == second and first["sha256"] == prepare.sha256_of(tmp_path / "a/wiki.jsonl.gz")
  assert len(read_corpus(tmp_path / "a/wiki.jsonl.gz")) == 50


@pytest.mark.parametrize(
  "ids, good",
  [
    (["0", "1", "5"], True),
    (["a", "b", "01", "1"], True),
    (["1", "1"], False),
    (["2", "1"], True),
    (["2", "1", "2"], False),
    (["a", "1", "a"], False),
    (["٣", "3"], True),
    (["", "1"], False),
  ],
)
def test_ids_of_passages_are_unique(tmp_path, ids, good):
  source = lines(tmp_path / "c.jsonl", *({"id": id, "contents": "x"} for id in ids))
  if good:
    assert prepare.write_corpus(source, tmp_path / "o.jsonl")["count"] == len(ids)
  else:
    with pytest.raises(ValueError, match="c.jsonl, line [12]|c.jsonl, line 3"):
      prepare.write_corpus(source, tmp_path / "o.jsonl")
    assert not (tmp_path / "o.jsonl").exists() and not (tmp_path / "o.jsonl.part").exists()


def test_a_damaged_table_of_passages_is_named(tmp_path):
  (tmp_path / "c.tsv").write_text("id\ttext\ttitle\n1\tx\n")
  with pytest.raises(ValueError, match="c.tsv, line 2: 2 fields where there must be 3"):
    prepare.write_corpus(tmp_path / "c.tsv", tmp_path / "o.jsonl")
  whole = gzip.compress(
    b"id\ttext\ttitle\n" + b"".join(b"%d\tx%d\ty\n" % (i, i * i) for i in range(5000))
  )
  (tmp_path / "c.tsv.gz").write_bytes(whole[: len(whole) // 2])
  with pytest.raises(ValueError, match="not a readable table"):
    prepare.write_corpus(tmp_path / "c.tsv.gz", tmp_path / "o.jsonl")


###  Several calls into one folder  ###


def questions_in(path):
  return [json.loads(line)["question"] for line in path.read_text().splitlines()]


def truthful(out):
  """The manifest, after a look at whether it tells the files as they are."""
  manifest = json.loads((out / "manifest.json").read_text())
  for path, entry in manifest["files"].items():
    data = (out / path).read_bytes()
    assert (entry["count"], entry["bytes"]) == (data.count(b"\n"), len(data)), path
    assert entry["sha256"] == hashlib.sha256(data).hexdigest(), path
  return manifest


def test_training_is_compared_with_the_benchmarks_of_every_call(tmp_path):
  raw, out = raw_files(tmp_path / "raw"), tmp_path / "data"
  assert run(f"--out={out}", f"--test={raw / 'nq/test.jsonl'}").returncode == 0
  done = run(
    f"--out={out}",
    f"--test={raw / 'popqa/test.jsonl'}",
    f"--train={raw / 'nq/train.jsonl'}",
    "--train_sets=nq",
    "--remove_duplicates",
  )
  assert (
    "nq / nq: 1 training question stands" in done.stdout and "nq / popqa: 1 training" in done.stdout
  ), done.stderr
  assert questions_in(out / "nq_hotpotqa_train/nq.jsonl") == ["who else?"]
  assert truthful(out)["duplicates"]["removed"] == {"nq": 2}


def test_a_benchmark_in_another_format_is_compared_too(tmp_path):
  raw, out = raw_files(tmp_path / "raw"), tmp_path / "data"
  (out / "benchmarks").mkdir(parents=True)
  (out / "benchmarks/nq.jsonl.gz").write_bytes(
    gzip.compress(json.dumps(flashrag("1", "Who else?")).encode())
  )
  done = run(
    f"--out={out}",
    f"--train={raw / 'nq/train.jsonl'}",
    f"--test={raw / 'nq/test.jsonl'}",
    "--train_sets=nq",
    "--remove_duplicates",
  )
  assert "nq / nq.jsonl.gz: 1 training question stands" in done.stdout, done.stderr
  assert questions_in(out / "nq_hotpotqa_train/nq.jsonl") == ["who wrote hamlet"]


@pytest.mark.parametrize("remove", [False, True])
def test_a_benchmark_that_comes_later_is_compared_with_the_training_that_is_there(tmp_path, remove):
  raw, out = raw_files(tmp_path / "raw"), tmp_path / "data"
  flag = ["--remove_duplicates"] * remove
  assert (
    run(f"--out={out}", f"--train={raw / 'nq/train.jsonl'}", "--train_sets=nq", *flag).returncode
    == 0
  )
  done = run(f"--out={out}", f"--test={raw / 'nq/test.jsonl'}", *flag)
  assert (
    f"nq / nq: 1 training question stands in the benchmark ({'left out' if remove else 'kept'}"
    in done.stdout
  )
  done = run(f"--out={out}", f"--test={raw / 'popqa/test.jsonl'}", *flag)
  assert "nq / popqa: 1 training question stands" in done.stdout
  manifest = truthful(out)
  assert manifest["duplicates"]["across"] == {"nq / nq": 1, "nq / popqa": 1}
  assert manifest["duplicates"]["removed"] == ({"nq": 2} if remove else {})
  assert manifest["files"]["nq_hotpotqa_train/nq.jsonl"]["sources"][0]["file"] == "train.jsonl"
  left = questions_in(out / "nq_hotpotqa_train/nq.jsonl")
  assert left == (["who else?"] if remove else ["who wrote hamlet", "where is Oslo?", "who else?"])
  # again, and with passages alone: nothing changes
  before = (out / "manifest.json").read_text()
  assert run(f"--out={out}", f"--test={raw / 'popqa/test.jsonl'}", *flag).returncode == 0
  assert (out / "manifest.json").read_text() == before
  run(f"--out={out}", f"--corpus={lines(raw / 'c.jsonl', {'id': '1', 'contents': 'x'})}", *flag)
  assert truthful(out)["duplicates"] == manifest["duplicates"]


def test_what_was_left_out_before_still_counts_when_more_is_only_reported(tmp_path):
  raw, out = raw_files(tmp_path / "raw"), tmp_path / "data"
  run(
    f"--out={out}",
    f"--train={raw / 'nq/train.jsonl'}",
    f"--test={raw / 'nq/test.jsonl'}",
    "--train_sets=nq",
    "--remove_duplicates",
  )
  for _ in range(2):
    run(f"--out={out}", f"--test={raw / 'popqa/test.jsonl'}")
    assert truthful(out)["duplicates"] == {
      "across": {"nq / nq": 1, "nq / popqa": 1},
      "within": {},
      "between_training_sets": {},
      "removed": {"nq": 1},
    }
  assert questions_in(out / "nq_hotpotqa_train/nq.jsonl") == ["who wrote hamlet", "who else?"]


def test_nothing_is_written_where_a_benchmark_would_take_all_training_questions(tmp_path):
  raw, out = raw_files(tmp_path / "raw"), tmp_path / "data"
  lines(raw / "nq" / "train.jsonl", flashrag("train_0", "Who is Ada?"))
  run(f"--out={out}", f"--train={raw / 'nq/train.jsonl'}", "--train_sets=nq")
  done = run(f"--out={out}", f"--test={raw / 'popqa'}", "--remove_duplicates")
  assert "no question of nq is left to write to nq_hotpotqa_train/nq.jsonl" in done.stderr
  assert (
    questions_in(out / "nq_hotpotqa_train/nq.jsonl") == ["Who is Ada?"]
    and not (out / "benchmarks").exists()
  )
  assert list(truthful(out)["files"]) == ["nq_hotpotqa_train/nq.jsonl"]


def test_a_file_that_a_broken_call_left_ahead_of_the_manifest_is_noted(tmp_path):
  raw, out = raw_files(tmp_path / "raw"), tmp_path / "data"
  run(f"--out={out}", f"--train={raw / 'nq/train.jsonl'}", "--train_sets=nq")
  path = out / "nq_hotpotqa_train/nq.jsonl"
  path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
  assert run(f"--out={out}", f"--test={raw / 'popqa'}").returncode == 0
  assert truthful(out)["files"]["nq_hotpotqa_train/nq.jsonl"]["count"] == 2


def test_training_under_another_name_is_named_as_not_compared(tmp_path):
  raw, out = raw_files(tmp_path / "raw"), tmp_path / "data"
  run(f"--out={out}", f"--train={raw / 'nq/train.jsonl'}", "--train_sets=nq", "--train_name=mix")
  done = run(f"--out={out}", f"--test={raw / 'popqa'}")
  assert (
    "not compared, as they are of another --train_name or no .jsonl: mix/nq.jsonl" in done.stdout
  )


def test_a_faulty_corpus_leaves_the_manifest_true_to_the_questions_written_before_it(tmp_path):
  raw, out = raw_files(tmp_path / "raw"), tmp_path / "data"
  done = run(
    f"--out={out}", f"--test={raw / 'popqa'}", f"--corpus={lines(raw / 'c.jsonl', {'id': '1'})}"
  )
  assert done.returncode == 1 and list(truthful(out)["files"]) == ["benchmarks/popqa.jsonl"]


###  Faulty places and files  ###


@pytest.mark.parametrize(
  "name, content",
  [
    ("c.jsonl", b""),
    ("c.jsonl", b"\n \n"),
    ("c.jsonl", b"\xef\xbb\xbf"),
    ("c.tsv", b""),
    ("c.tsv", b"id\ttext\ttitle\n"),
    ("c.jsonl.gz", gzip.compress(b"", mtime=0)),
  ],
)
def test_an_empty_corpus_never_takes_the_place_of_a_good_one(tmp_path, name, content):
  (tmp_path / name).write_bytes(content)
  good = lines(tmp_path / "data/wiki18.jsonl", {"id": "1", "contents": "x"}).read_bytes()
  done = run(f"--out={tmp_path / 'data'}", f"--corpus={tmp_path / name}")
  assert f"{name} holds no passage, but a corpus must hold at least one" in done.stderr
  assert (tmp_path / "data/wiki18.jsonl").read_bytes() == good and [
    *(tmp_path / "data").iterdir()
  ] == [tmp_path / "data/wiki18.jsonl"]


def test_no_lines_are_no_file(tmp_path):
  with pytest.raises(ValueError, match="there is nothing to write to"):
    prepare.write_lines(tmp_path / "x.jsonl.gz", [])
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "name, content",
  [
    ("e.jsonl", ""),
    ("e.jsonl", "\n"),
    ("e.csv", ""),
    ("e.csv", "Question,Answer\n"),
    ("e.json", "[]"),
    (
      "e.jsonl",
      '{"id": "2hop", "question": "x", "paragraphs": [], "question_decomposition": [], '
      '"answerable": false}',
    ),
  ],
)
@pytest.mark.parametrize("side", ["train", "test"])
def test_a_file_without_a_question_is_told_so(tmp_path, side, name, content):
  (tmp_path / name).write_text(content)
  done = run(f"--out={tmp_path / 'data'}", f"--{side}=nq={tmp_path / name}", "--train_sets=nq")
  assert (
    f"{name} holds no question, but each file of --{side} must hold at least one; see that it is "
    "whole" in done.stderr
  )
  assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
  "arguments, message",
  [
    (
      ["--corpus=RAW"],
      "raw must name one file of passages (.jsonl or .tsv, plain or .gz), but that is a folder",
    ),
    (
      ["--corpus=RAW/none.jsonl"],
      "none.jsonl must name one file of passages (.jsonl or .tsv, plain or .gz), but there is no "
      "such",
    ),
    (
      ["--out=RAW/file", "--test=RAW/popqa"],
      "file must name a folder that can be written, there already or new; ",
    ),
    (["--out=RAW/file/below", "--test=RAW/popqa"], "below must name a folder that can be written"),
    (
      ["--out=", "--test=RAW/popqa"],
      "--out= must name a folder that can be written, there already or new",
    ),
    (["--raw=RAW/file", "--test=RAW/popqa"], "--raw="),
    (["--out=RAW/taken", "--test=RAW/popqa"], "benchmarks in --out="),
    (
      ["--train_name=../esc", "--test=RAW/popqa"],
      "--train_name=../esc must be a plain name within --out, without separators",
    ),
    (["--train_name=..", "--test=RAW/popqa"], "--train_name=.. must be a plain name"),
    (["--train_name=a/b", "--test=RAW/popqa"], "--train_name=a/b must be a plain name"),
    (["--train_name=", "--test=RAW/popqa"], "--train_name= must be a plain name"),
    (
      ["--train_name=benchmarks", "--test=RAW/popqa"],
      "other than benchmarks, raw and manifest.json",
    ),
    (
      ["--corpus_name=../x.jsonl", "--test=RAW/popqa"],
      "--corpus_name=../x.jsonl must be a plain name",
    ),
    (
      ["--corpus_name=manifest.json", "--test=RAW/popqa"],
      "--corpus_name=manifest.json must be a plain name",
    ),
    (
      ["--corpus_name=x", "--train_name=x", "--test=RAW/popqa"],
      "a folder and a file need two names",
    ),
    (
      ["--test=..=RAW/popqa/test.jsonl"],
      "the question set '..' can't name a file; name it with SET=PATH",
    ),
    (["--test=nq="], "--test=nq= must be PATH or SET=PATH; what stands there is empty"),
    (["--test="], "--test= must be PATH or SET=PATH"),
    (
      ["--test=RAW/" + "n" * 300 + ".jsonl"],
      "file name too long; --train, --test and --corpus must name what can be read",
    ),
  ],
)
def test_a_place_that_cannot_be_is_one_sentence_and_nothing_is_written(
  tmp_path, arguments, message
):
  raw = raw_files(tmp_path / "raw")
  (raw / "file").write_text("x")
  lines(raw / "taken" / "benchmarks", {})
  before = sorted(tmp_path.rglob("*"))
  done = run(
    f"--out={tmp_path / 'data'}", *(argument.replace("RAW", str(raw)) for argument in arguments)
  )
  assert done.returncode == 1 and message in done.stderr and "[Errno" not in done.stderr, (
    done.stderr
  )
  assert sorted(tmp_path.rglob("*")) == before


ENTRY = {"count": 1, "bytes": 1, "sha256": "x", "set": "nq", "licence": "x", "sources": []}


@pytest.mark.parametrize(
  "content, message",
  [
    ("{", "not JSON"),
    ("\udcff", "not JSON"),
    ("[" * 100_000, "not JSON"),
    ("[]", 'an object whose "files" is an object'),
    ("{}", 'an object whose "files" is an object'),
    ('{"files": []}', 'an object whose "files" is an object'),
    ('{"files": {"a": 3}}', "the entry of 'a' must be an object"),
    ('{"files": {}, "duplicates": 3}', '"duplicates" must be an object'),
    (
      json.dumps({"files": {"a": ENTRY | {"count": "3"}}}),
      "\"count\" of 'a' is '3', but must be of type int",
    ),
    (json.dumps({"files": {"a": ENTRY | {"bytes": True}}}), "\"bytes\" of 'a' is True"),
    (json.dumps({"files": {"a": {"count": 3}}}), "\"bytes\" of 'a' is None"),
    (json.dumps({"files": {"a": ENTRY | {"left_out": 3}}}), "\"left_out\" of 'a' must hold"),
    (
      json.dumps({"files": {"a": ENTRY | {"left_out": {"count": 1, "by_benchmark": {"b": "c"}}}}}),
      "\"left_out\" of 'a'",
    ),
  ],
)
def test_a_broken_manifest_is_refused_by_name_and_stays(tmp_path, content, message):
  raw, out = raw_files(tmp_path / "raw"), tmp_path / "data"
  out.mkdir()
  (out / "manifest.json").write_bytes(data := content.encode(errors="surrogateescape"))
  done = run(f"--out={out}", f"--test={raw / 'popqa'}")
  assert (
    "manifest.json is no manifest of prepared data (" in done.stderr and message in done.stderr
  ), done.stderr
  assert (
    done.stderr.endswith("; mend it or move it away")
    and (out / "manifest.json").read_bytes() == data
  )
  assert [*out.iterdir()] == [out / "manifest.json"]


def test_a_broken_note_of_a_download_is_no_source(tmp_path):
  raw, out = raw_files(tmp_path / "raw"), tmp_path / "data"
  for note in ("{", "[]", '{"url": "http://x"}', '{"url": "http://x", "sha256": "x", "bytes": 1}'):
    (raw / "popqa" / "test.jsonl.source.json").write_text(note)
    assert run(f"--out={out}", f"--test={raw / 'popqa/test.jsonl'}").returncode == 0
    assert truthful(out)["files"]["benchmarks/popqa.jsonl"]["sources"][0]["file"] == "test.jsonl"


@pytest.mark.parametrize(
  "name, content",
  [("c.jsonl", '{"id": "1", "contents": "x"}\n'), ("c.tsv", "id\ttext\ttitle\n1\tx\t\n")],
)
def test_a_corpus_may_begin_with_a_byte_order_mark(tmp_path, name, content):
  (tmp_path / name).write_text(content, encoding="utf-8-sig")
  prepare.write_corpus(tmp_path / name, tmp_path / "o.jsonl")
  assert (tmp_path / "o.jsonl").read_text() == '{"id": "1", "contents": "x"}\n'


def test_ids_may_come_in_any_order_and_none_twice(tmp_path):
  ids = ["3", "1", "007", "2", "x", "99999999999", "4294967296", "0"]
  write = lambda found: (tmp_path / "c.jsonl").write_text(
    "".join(json.dumps({"id": id_, "contents": "x"}) + "\n" for id_ in found)
  )
  write(ids)
  prepare.write_corpus(tmp_path / "c.jsonl", tmp_path / "o.jsonl")
  assert [json.loads(line)["id"] for line in (tmp_path / "o.jsonl").open()] == ids
  for again in ids:
    write([*ids, again])
    with pytest.raises(ValueError, match=f"line 9: the id '{again}' has come before"):
      prepare.write_corpus(tmp_path / "c.jsonl", tmp_path / "o.jsonl")


def test_a_corpus_of_title_and_text_is_read_as_it_stands(tmp_path):
  rows = [{"id": 1, "title": "Oslo", "text": "A city."}, {"id": "2", "text": "Bare."}]
  path = tmp_path / "c.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  wanted = [Passage("1", "Oslo", "A city."), Passage("2", "", "Bare.")]
  assert read_corpus(path) == wanted


def test_a_corpus_of_ones_own_is_not_called_wikipedia_and_replaces_none_silently(tmp_path, capsys):
  for name in ("mine", "other"):
    lines(tmp_path / f"{name}.jsonl", {"id": "1", "contents": name})
  licences = {}
  for name in ("mine.jsonl", "other.jsonl", "psgs_w100.tsv"):
    if name.endswith("tsv"):
      (tmp_path / name).write_text("id\ttext\ttitle\n1\tx\t\n")
    with flagsaver.flagsaver(corpus=str(tmp_path / name), out=str(tmp_path / "out")):
      prepare_data._write_corpus(found := {"files": {}}, tmp_path / "out", tmp_path / name)
    ((_, entry),) = found["files"].items()
    licences[name] = entry["licence"]
  assert "Wikipedia" in licences["psgs_w100.tsv"]
  assert "Wikipedia" not in licences["mine.jsonl"] + licences["other.jsonl"]
  assert capsys.readouterr().out.count("is replaced: it was made from another corpus") == 2
