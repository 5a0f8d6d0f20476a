"""Training against real retrieval servers that die, hang, stumble and come back: nothing is lost,
nothing is wrong.

Runs go on from one short run's workdir, so that the policy's warm start, which teaches it to
search, is done once.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import programs
import pytest
from test_train import rows, rows_so_far, SETTINGS, without_times

from configs import search_r1
from stratified.retrieval import retrievers
from stratified.retrieval.bm25 import BM25
from stratified.retrieval.client import HttpRetriever, RetrieverDown
from stratified.retrieval.corpus import Passage, read_corpus
from stratified.runs import build, claim, settings
from stratified.tasks import named
from stratified.tools.base import Result
from stratified.tools.search import Search

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 16
RUN = SETTINGS | {
  "num_steps": 1,
  "warm_start.num_steps": 150,
  "warm_start.learning_rate": 0.01,
  "eval.every": 0,
  "eval.questions": 1,
  "checkpoint.every": 5,
  "retriever.name": "http",
  "retriever.cache": 0,
  "retriever.retries": 3,
}


def flags_of(settings):
  return [f"--config.{name}={value}" for name, value in settings.items()]


def start(program, *flags, **environment):
  """A program as a process, and the URL that it prints."""
  process = subprocess.Popen(
    [sys.executable, program, *flags],
    cwd=ROOT,
    text=True,
    stdout=subprocess.PIPE,
    env=os.environ | environment,
  )  # what it says to stderr, pytest shows
  line = process.stdout.readline()
  found = re.search(r"at (http://127\S+)", line)
  if not found:
    process.kill()
    raise AssertionError(f"{program} did not start: {line}")
  return process, found[1]


def serve(corpus, *flags, port=0):
  return start("experiments/serve_retriever.py", f"--corpus={corpus}", f"--port={port}", *flags)


def end(*processes):
  for process in processes:
    process.kill()
    process.wait()
    process.stdout.close()


def command(workdir, url, **changes):
  return [
    sys.executable,
    "experiments/train.py",
    "--config=configs/search_r1.py:tiny",
    f"--workdir={workdir}",
    f"--config.retriever.url={url}",
    *flags_of(RUN | changes),
  ]


def run(workdir, url, **changes):
  return programs.run(*command(workdir, url, **changes)[1:])


@pytest.fixture(scope="module")
def server():
  """A healthy server of the run's own encyclopedia."""
  process, url = start(
    "experiments/serve_retriever.py",
    "--config=configs/search_r1.py:tiny",
    "--port=0",
    f"--config.data.entities={SETTINGS['data.entities']}",
  )
  yield url
  end(process)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  """The same passages as a file: a server of that starts in no time."""
  config, path = search_r1.get_config("tiny"), tmp_path_factory.mktemp("corpus") / "passages.jsonl"
  config.data.entities = SETTINGS["data.entities"]
  path.write_text(
    "".join(json.dumps({"id": p.id, "contents": p.contents}) + "\n" for p in named.passages(config))
  )
  return path


@pytest.fixture(scope="module")
def begun(server, tmp_path_factory):
  """The workdir of a run that has learnt to search and taken one step."""
  workdir = tmp_path_factory.mktemp("begun") / "run"
  done = run(workdir, server)
  assert done.returncode == 0, done.stderr[-3000:]
  return workdir


def copy_of(workdir, path):
  shutil.copytree(workdir, path)
  return path


@pytest.fixture(scope="module")
def undisturbed(begun, server, tmp_path_factory):
  """What the run does when nothing goes wrong."""
  workdir = copy_of(begun, tmp_path_factory.mktemp("undisturbed") / "run")
  done = run(workdir, server, num_steps=STEPS)
  assert done.returncode == 0, done.stderr[-3000:]
  trained = [row for row in rows(workdir) if "reward/mean" in row]
  assert [row["step"] for row in trained] == list(range(1, STEPS + 1))
  # Without searches this file would prove nothing.
  assert sum(row["rollout/searches_mean"] > 0 for row in trained) > STEPS // 2
  assert all(row["rollout/failed"] == 0 for row in trained)
  return workdir


def same_as(undisturbed, workdir, steps=STEPS):
  """The same rows of training up to that step, and the same rollouts in it."""
  upto = lambda path: [
    row for row in without_times(rows(path)) if "reward/mean" in row and row["step"] <= steps
  ]
  assert upto(workdir) == upto(undisturbed) and len(upto(workdir)) == steps
  name = f"trajectories/step_{steps:06d}.jsonl"
  assert (workdir / name).read_bytes() == (undisturbed / name).read_bytes()


def free_port():
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def until(holds, patience=120):
  last = time.monotonic() + patience
  while not holds():
    assert time.monotonic() < last, "the moment did not come"
    time.sleep(0.005)


@pytest.mark.long
def test_a_server_that_is_killed_may_come_back_or_stay_dead(begun, undisturbed, corpus, tmp_path):
  """Killed and restarted: the run waits. Killed for good: it stops in one sentence; the same
  command goes on."""
  workdir, port = copy_of(begun, tmp_path / "run"), free_port()
  known = rows_so_far(workdir)
  process, url = serve(corpus, port=port)
  log = (tmp_path / "log").open("w+")
  patient = {"retriever.give_up_s": 120.0, "num_steps": STEPS}
  training = subprocess.Popen(
    command(workdir, url, **patient), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
  )
  try:
    until(lambda: rows_so_far(workdir) > known or training.poll() is not None)
    end(process)
    # No row comes any more: the run is waiting for its searches.
    seen = [rows_so_far(workdir)]
    until(
      lambda: (
        seen.append(rows_so_far(workdir)) or time.sleep(0.5) or seen[-1] == rows_so_far(workdir)
      )
    )
    assert training.poll() is None and rows_so_far(workdir) < known + STEPS - 1
    process, _ = serve(corpus, port=port)
    waited_at = rows_so_far(workdir)
    until(lambda: rows_so_far(workdir) > waited_at + 2 or training.poll() is not None)
    end(process)  # now for good, as far as this process knows
    training.send_signal(signal.SIGKILL)
    training.wait()
  finally:
    training.kill()
    training.wait()
    log.close()
  process, _ = serve(corpus, port=port)
  try:
    done = subprocess.Popen(
      command(workdir, url, **patient | {"retriever.give_up_s": 1.5}),
      cwd=ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    before = rows_so_far(workdir)
    until(lambda: rows_so_far(workdir) != before or done.poll() is not None)
    end(process)
    out, errors = done.communicate(timeout=60)
    step = max(row["step"] for row in rows(workdir) if "reward/mean" in row)
    assert done.returncode == 1 and "Traceback" not in errors, errors[-2000:]
    assert (
      f"the retriever at {url} has given no usable reply for" in errors
      and "what was saved is safe" in errors
    )
    assert step < STEPS and (workdir / "checkpoints" / str(step)).exists()
    process, _ = serve(corpus, port=port)
    done = run(workdir, url, **patient)
    assert done.returncode == 0 and f"going on from step {step} of {STEPS}" in done.stdout, (
      done.stderr[-3000:]
    )
  finally:
    end(process)
  same_as(undisturbed, workdir)


@pytest.mark.long
def test_faults_that_pass_change_nothing(begun, undisturbed, server, tmp_path):
  """Errors, broken and late replies, lost connections: each is asked for again."""
  workdir = copy_of(begun, tmp_path / "run")
  faults = "ok,500,slow,ok,malformed,429,ok,truncated,reset,html,ok,short,503"
  proxy, url = start(
    "tests/faulty_retriever.py",
    f"--upstream={server}",
    f"--faults={faults}",
    "--slow_s=3",
    PYTHONPATH=str(ROOT),
  )
  try:
    done = run(workdir, url, **{"num_steps": 7, "retriever.timeout_s": 1.5, "retriever.retries": 6})
  finally:
    end(proxy)
  assert done.returncode == 0, done.stderr[-3000:]
  same_as(undisturbed, workdir, 7)


def test_a_search_that_is_lost_masks_its_rollout_and_is_counted(begun, server, tmp_path):
  """One query of the first new step never works; the other rollouts of its step are trained on."""
  workdir, undisturbed = (copy_of(begun, tmp_path / name) for name in ("run", "undisturbed"))
  done = run(undisturbed, server, num_steps=2)
  assert done.returncode == 0, done.stderr[-3000:]
  step = [
    json.loads(line)
    for line in (undisturbed / "trajectories/step_000002.jsonl").read_text().splitlines()
  ]
  asked = [
    [call["argument"] for turn in one["turns"] for call in turn["calls"] if call["argument"]]
    for one in step
  ]
  poison = next(query for queries in asked for query in queries)
  struck = [one for one, queries in zip(step, asked) if any(poison in query for query in queries)]
  assert 0 < len(struck) < len(step)
  proxy, url = start(
    "tests/faulty_retriever.py",
    f"--upstream={server}",
    f"--poison={json.dumps(poison)[1:-1]}",
    PYTHONPATH=str(ROOT),
  )
  try:
    done = run(workdir, url, **{"num_steps": 2, "retriever.retries": 1})
  finally:
    end(proxy)
  assert done.returncode == 0, done.stderr[-3000:]
  (row,) = (row for row in rows(workdir) if row.get("step") == 2 and "reward/mean" in row)
  assert row["rollout/failed"] == len(struck) and row["update/skipped"] == 0
  after = [
    json.loads(line)
    for line in (workdir / "trajectories/step_000002.jsonl").read_text().splitlines()
  ]
  lost = [one for one in after if one["fault"]]
  assert [(one["question_id"], one["sample"]) for one in lost] == [
    (one["question_id"], one["sample"]) for one in struck
  ]
  assert all("500 made to fail" in one["fault"] and one["reward"] is None for one in lost)


def test_a_run_refuses_a_server_of_another_corpus_before_any_work(server, tmp_path):
  done = run(tmp_path / "other", server, **{"data.entities": 70})
  assert done.returncode == 1 and "Traceback" not in done.stderr
  assert re.search(
    rf"the retriever at {server} searches the corpus \w{{16}}, \d+ passages, not the corpus "
    rf"\w{{16}}: "
    "serve it with python experiments/serve_retriever.py",
    done.stderr,
  )
  assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
  "changes, sentence",
  [
    (
      {"retriever.name": "google"},
      "retriever.name='google' is unknown; choose one of bm25, dense, http, hybrid",
    ),
    (
      {"retriever.url": "localhost"},
      "'localhost' is not the URL of a retriever; give one like http://127.0.0.1:8000",
    ),
    ({"retriever.name": "dense"}, "retriever.index='' is no folder of an index.*build_index.py"),
    (
      {"retriever.name": "hybrid", "retriever.index": "nowhere"},
      "retriever.index='nowhere' is no folder of an index",
    ),
    ({"retriever.give_up_s": 0.0}, "retriever.give_up_s=0.0 must be above 0"),
    ({"retriever.retries": -1}, "retriever.retries=-1 must be at least 0"),
    ({"retriever.in_flight": 0}, "retriever.in_flight=0 must be at least 1"),
  ],
  ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_retriever_that_can_t_be_is_refused_in_words(changes, sentence):
  config = search_r1.get_config("tiny")
  config.update_from_flattened_dict(RUN | changes)
  with pytest.raises((ValueError, OSError), match=sentence):
    build.build(config, task=False)


def test_where_the_retriever_listens_may_change_and_what_it_searches_may_not(tmp_path):
  stored = search_r1.get_config("tiny")
  claim.check_config(tmp_path, json.loads(stored.to_json()), settings.rules())
  stored.retriever.url, stored.retriever.give_up_s, stored.retriever.cache = (
    "http://127.0.0.1:9",
    7.0,
    3,
  )
  claim.check_config(tmp_path, json.loads(stored.to_json()), settings.rules())
  stored.retriever.corpus = "0123"
  with pytest.raises(ValueError, match='retriever.corpus: "" in the workdir, "0123" now'):
    claim.check_config(tmp_path, json.loads(stored.to_json()), settings.rules())


def test_a_workdir_keeps_the_manifest_of_its_index_and_refuses_another(tmp_path):
  first, second = (BM25([Passage("1", "", text)]) for text in ("one", "two"))
  for _ in range(2):
    retrievers.check_same(tmp_path, first)
  with pytest.raises(
    ValueError, match=r"corpus: \w{16} in the workdir, \w{16} now.*or a new --workdir"
  ):
    retrievers.check_same(tmp_path, second)
  retrievers.check_same(tmp_path, first)


###  The client alone, against a process  ###


def test_a_server_that_hangs_is_given_up_in_time_and_works_again_after(corpus):
  process, url = serve(corpus)
  try:
    asking = HttpRetriever(url, timeout_s=0.5, retries=1, give_up_s=2.5)
    asking.connect()
    wanted = asking.search(["who is it"], 3)
    process.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(RetrieverDown, match=r"no usable reply for \d s .*no whole reply within"):
      asking.search(["who is it"], 3)
    assert 2 < time.monotonic() - start < 8
    process.send_signal(signal.SIGCONT)
    until(lambda: _found(asking) == wanted, 20)
  finally:
    end(process)


def _found(asking):
  try:
    return asking.search(["who is it"], 3)
  except RetrieverDown:
    return None


def test_a_server_restarted_with_other_passages_stops_the_run(corpus, tmp_path):
  port = free_port()
  process, url = serve(corpus, port=port)
  try:
    asking = HttpRetriever(url, give_up_s=60)
    asking.connect()
    asking.search(["who"], 1)
    end(process)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(corpus.read_text().splitlines(keepends=True)[:-1]))
    process, _ = serve(other, port=port)
    with pytest.raises(RetrieverDown, match="searches another index"):
      asking.search(["who"], 1)
  finally:
    end(process)


def test_a_query_that_is_refused_finds_nothing_and_loses_no_rollout(corpus):
  process, url = serve(corpus, "--max_query_characters=40")
  try:
    asking = HttpRetriever(url)
    found = asking.search(["who", "w" * 41, "what is it"], 1)
    assert found[1] == [] and (asking.refused, asking.lost) == (1, 0)
    assert isinstance(found[0], list) and isinstance(found[2], list)
  finally:
    end(process)


HOSTILE = {
  "long": "who " * 250_000,
  "longer than a server takes": "x" * 8_200,
  "null bytes": "\0who\0",
  "half of a surrogate pair": "who \ud800",
  "control characters": "\x07\x1b[2J\x85\u2028 who",
  "nothing but control characters": "\0\x01",
  "empty": "",
  "blank": " \n ",
  "quotation marks": '"}], "topk": -1, \\u0000 who',
  "private characters": "\ue000\U000f0000\ufffe",
}


def test_no_query_decides_whether_its_rollout_is_scored(corpus):
  """Every retriever gives the same result for it: never a ToolError, never a crash."""
  process, url = serve(corpus)
  try:
    searches = [Search(BM25(read_corpus(corpus)), 2), Search(HttpRetriever(url, retries=0), 2)]
    embedded, behind_http = [search.run(list(HOSTILE.values())) for search in searches]
    assert all(isinstance(result, Result) for result in embedded)
    assert dict(zip(HOSTILE, embedded)) == dict(zip(HOSTILE, behind_http))
    long = f"{read_corpus(corpus)[0].title} " * 50_000
    (one,), (other,) = [search.run([long]) for search in searches]
    assert one == other and one.items
  finally:
    end(process)
