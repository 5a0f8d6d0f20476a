"""The retrieval server: what it answers, to whom, and what it does when too much is asked or when
it is to stop."""

import asyncio
import contextlib
import http.client
import json
import math
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request

import httpx
import programs
import pytest

from stratified.retrieval import server, wire
from stratified.retrieval.batcher import Batcher, Busy
from stratified.retrieval.bm25 import BM25
from stratified.retrieval.client import HttpRetriever
from stratified.retrieval.corpus import Passage, RetrieverError

ROOT = pathlib.Path(__file__).parents[1]
PASSAGES = [
  Passage("1", "Oslo", "Oslo is the capital of Norway."),
  Passage("2", "Bergen", "Bergen lies in Norway."),
  Passage("3", "", 'A line.\n"Another" line about Norway, 東京 and more.'),
]


class Recording:
  """A retriever that notes each call and returns passages named after the query; "bad" and "odd"
  break it."""

  manifest = {"kind": "recording"}

  def __init__(self, gate=None):
    self.calls, self.gate = [], gate

  def search(self, queries, topk):
    self.calls.append((queries, topk))
    if self.gate:
      assert self.gate.wait(20)
    if "bad" in queries:
      raise RetrieverError("it can't")
    return [
      RetrieverError("odd one") if query == "odd" else [Passage(query, "", "x", 1.0)] * topk
      for query in queries
    ]


def ask(app, *requests):
  """The replies to (method, path, body) requests, sent at the same time."""

  async def run():
    async with httpx.AsyncClient(
      transport=httpx.ASGITransport(app), base_url="http://server"
    ) as caller:
      return await asyncio.gather(
        *(caller.request(method, path, content=body) for method, path, body in requests)
      )

  return asyncio.run(run())


def post(app, body, path="/retrieve"):
  return ask(app, ("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode()))[0]


@pytest.fixture(scope="module")
def app():
  return server.make_app(
    BM25(PASSAGES),
    default_topk=2,
    bounds=wire.Bounds(max_queries=5, max_query_characters=50, max_topk=10, max_body_bytes=1000),
  )


def test_scores_come_where_they_are_asked_for_and_bare_documents_where_not(app):
  found = post(app, {"queries": ["Oslo", "norway"], "topk": 1, "return_scores": True}).json()[
    "result"
  ]
  best = BM25(PASSAGES).search(["Oslo", "norway"], 1)
  assert found == [
    [{"document": {"id": p.id, "contents": p.contents}, "score": p.score}] for (p,) in best
  ]
  for return_scores in (False, None):
    assert post(app, {"queries": ["Oslo"], "topk": 1, "return_scores": return_scores}).json() == {
      "result": [[{"id": "1", "contents": '"Oslo"\nOslo is the capital of Norway.'}]]
    }


@pytest.mark.parametrize("topk", [None, 0, "left out"])
def test_no_topk_is_the_servers_own(app, topk):
  body = {"queries": ["norway"]} | ({} if topk == "left out" else {"topk": topk})
  assert len(post(app, body).json()["result"][0]) == 2


@pytest.mark.parametrize(
  "body",
  [
    {"query": "Oslo"},
    {"query": ["Oslo"]},
    {"queries": "Oslo"},
    {"queries": ["Oslo"]},
    {"query": "Oslo", "queries": None, "topk": None, "other": 3},
  ],
)
def test_query_and_queries_mean_the_same(app, body):
  assert [[d["id"] for d in documents] for documents in post(app, body).json()["result"]] == [["1"]]


def test_blank_queries_find_nothing_and_are_not_searched_for():
  recording = Recording()
  assert post(server.make_app(recording), {"queries": ["", " \n", "a"], "topk": 1}).json()[
    "result"
  ][:2] == [[], []]
  assert post(server.make_app(recording), {"queries": []}).json() == {"result": []}
  assert recording.calls == [(["a"], 1)]


def test_a_passage_that_contents_alone_would_change_comes_back_whole(app):
  reply = post(app, {"queries": ["東京"], "topk": 1, "return_scores": True})
  assert wire.parse_reply(reply.content, count=1, topk=1) == [[PASSAGES[2]]]


def test_health_tells_what_is_searched(app):
  (found,) = ask(app, ("GET", "/health", None))
  assert found.json()["status"] == "ok" and found.json()["default_topk"] == 2
  assert (
    found.json()["manifest"] == BM25(PASSAGES).manifest and found.json()["manifest"]["count"] == 3
  )
  assert found.headers["x-retriever-index"] == wire.digest(BM25(PASSAGES).manifest)
  assert wire.digest(BM25(PASSAGES[:2]).manifest) != wire.digest(BM25(PASSAGES).manifest)


@pytest.mark.parametrize(
  "body, status, message",
  [
    (b"", 400, "the body is not JSON"),
    (b"\xff\xfe", 400, "the body is not JSON"),
    (b"[" * 900, 400, "the body is "),
    (b"[]", 400, "a JSON list; it must be an object"),
    ({}, 400, "neither is there (fields: [])"),
    ({"question": "x"}, 400, 'neither is there (fields: ["question"])'),
    ({"query": "a", "queries": ["b"]}, 400, "both are there"),
    ({"queries": 3}, 400, "queries is a JSON int; it must be a list of strings"),
    ({"queries": {"a": 1}}, 400, "queries is a JSON dict"),
    ({"queries": ["a", None]}, 400, "queries[1] is a JSON NoneType; each query must be a string"),
    ({"queries": ["\ud800"]}, 400, "queries[0] holds half of a surrogate pair"),
    ({"queries": ["a"] * 6}, 413, "queries holds 6 queries, more than 5; send fewer at once"),
    ({"queries": ["a" * 51]}, 413, "queries[0] has 51 characters, more than 50"),
    (
      {"queries": ["a"], "topk": 11},
      400,
      "topk is 11; it must be a whole number from 1 to 10, or 0 or null for 2",
    ),
    ({"queries": ["a"], "topk": -1}, 400, "topk is -1"),
    ({"queries": ["a"], "topk": "3"}, 400, 'topk is "3"'),
    ({"queries": ["a"], "topk": True}, 400, "topk is true"),
    ({"queries": ["a"], "topk": 1.0}, 400, "topk is 1.0"),
    (b'{"queries": ["a"], "topk": NaN}', 400, "topk is NaN"),
    (b'{"queries": ["a"], "topk": 1e999}', 400, "topk is Inf"),
    ({"queries": ["a"], "return_scores": 1}, 400, "return_scores is 1; it must be true or false"),
    (b" " * 1001, 413, "the body is longer than 1000 bytes"),
  ],
)
def test_a_request_that_breaks_the_format_is_refused_by_name(app, body, status, message):
  reply = post(app, body)
  assert reply.status_code == status, reply.text
  assert message in reply.json()["error"] and list(reply.json()) == ["error"]


def test_a_body_of_unknown_length_is_cut_off_and_a_compressed_one_refused(app):
  async def endless():
    while True:
      yield b" " * 400

  async def run():
    async with httpx.AsyncClient(
      transport=httpx.ASGITransport(app), base_url="http://server"
    ) as caller:
      return (
        await caller.post("/retrieve", content=endless()),
        await caller.post("/retrieve", content=b"{}", headers={"content-encoding": "gzip"}),
      )

  long, compressed = asyncio.run(run())
  assert long.status_code == 413 and "longer than 1000 bytes" in long.json()["error"]
  assert compressed.status_code == 415 and "compressed" in compressed.json()["error"]


@pytest.mark.parametrize(
  "method, path, status", [("GET", "/retrieve", 405), ("POST", "/health", 405), ("GET", "/", 404)]
)
def test_other_pages_say_what_there_is(app, method, path, status):
  (reply,) = ask(app, (method, path, None))
  assert reply.status_code == status
  assert (
    reply.json()["error"] == f"{method} {path} is not served: use POST /retrieve or GET /health"
  )


def test_scores_that_are_no_numbers_are_null():
  class Broken(Recording):
    def search(self, queries, topk):
      return [
        [Passage("1", "", "x", score) for score in (math.nan, math.inf, None)] for _ in queries
      ]

  reply = post(server.make_app(Broken()), {"queries": ["a"], "return_scores": True})
  assert [item["score"] for item in reply.json()["result"][0]] == [None, None, None]


###  Many at once  ###


def bodies(*queries, **more):
  return [
    (
      "POST",
      "/retrieve",
      json.dumps({"queries": [q] if isinstance(q, str) else q, **more}).encode(),
    )
    for q in queries
  ]


def ids(replies):
  return [[documents[0]["id"] for documents in reply.json()["result"]] for reply in replies]


def after_the_first(gate, recording):
  """Opens the gate once the first search has begun and all the others have had time to arrive."""

  def wait():
    while not recording.calls:
      time.sleep(0.001)
    time.sleep(0.1)
    gate.set()

  threading.Thread(target=wait, daemon=True).start()


def test_searches_that_arrive_while_one_runs_are_joined_into_one():
  gate = threading.Event()
  recording = Recording(gate)
  after_the_first(gate, recording)
  replies = ask(server.make_app(recording, max_batch=8), *bodies("a", "b", ["c", "b"], "d", "b"))
  assert ids(replies) == [["a"], ["b"], ["c", "b"], ["d"], ["b"]]
  assert recording.calls == [(["a"], 3), (["b", "c", "d"], 3)]


def test_a_batch_holds_one_topk_and_no_more_queries_than_it_may():
  gate = threading.Event()
  recording = Recording(gate)
  after_the_first(gate, recording)
  app = server.make_app(recording, max_batch=2)
  replies = ask(
    app,
    *bodies("a", topk=1),
    *bodies("b", "c", "d", topk=2),
    *bodies(["e", "f", "g", "h", "i"], topk=1),
  )
  assert ids(replies) == [["a"], ["b"], ["c"], ["d"], ["e", "f", "g", "h", "i"]]
  assert recording.calls == [
    (["a"], 1),
    (["b", "c"], 2),
    (["d"], 2),
    (["e", "f"], 1),
    (["g", "h"], 1),
    (["i"], 1),
  ]


def test_a_full_queue_says_when_to_come_back_and_serves_who_waits():
  gate = threading.Event()
  recording = Recording(gate)
  after_the_first(gate, recording)
  replies = ask(server.make_app(recording, max_queued=2), *bodies("a", "b", "c", "d", "e"))
  assert [reply.status_code for reply in replies] == [200, 200, 200, 503, 503]
  assert replies[3].headers["retry-after"] == "1"
  assert (
    "2 queries are waiting, which leaves no room for 1 more of 2; try again later"
    in replies[3].json()["error"]
  )
  assert ids(replies[:3]) == [["a"], ["b"], ["c"]]


def test_who_waits_too_long_is_told_so_and_not_searched_for():
  gate = threading.Event()
  recording = Recording(gate)

  async def run():
    batcher = Batcher(recording.search, max_wait_s=0.1)
    waits = [asyncio.create_task(batcher.search([query], 1)) for query in "ab"]
    for wait in waits:
      with pytest.raises(Busy, match="did not end within 0.1 s"):
        await wait
    assert batcher.queued == 0
    gate.set()
    assert [p.id for p in (await batcher.search(["c"], 1))[0]] == ["c"]
    assert batcher.queued == 0
    await batcher.close()

  asyncio.run(run())
  assert recording.calls == [(["a"], 1), (["c"], 1)]


@pytest.mark.parametrize("query, message", [("bad", "it can't"), ("odd", "odd one")])
def test_a_search_that_fails_loses_its_own_request_alone(query, message):
  gate = threading.Event()
  recording = Recording(gate)
  after_the_first(gate, recording)
  replies = ask(server.make_app(recording), *bodies("a", "b", [query, "c"], "d"))
  assert [reply.status_code for reply in replies] == [200, 200, 500, 200]
  assert replies[2].json() == {"error": f"the search failed: {message}"}


@pytest.mark.parametrize("result, message", [([], "0 results for 1 queries"), (None, "TypeError")])
def test_a_retriever_that_breaks_its_interface_is_an_error_and_the_server_goes_on(result, message):
  class Broken(Recording):
    def search(self, queries, topk):
      return result if queries == ["a"] else super().search(queries, topk)

  app = server.make_app(Broken())
  reply = post(app, {"queries": ["a"]})
  assert reply.status_code == 500 and message in reply.json()["error"]
  assert post(app, {"queries": ["b"]}).status_code == 200


@pytest.mark.parametrize(
  "setting",
  [{"max_batch": 0}, {"max_queued": 0}, {"threads": 0}, {"default_topk": 101}, {"default_topk": 0}],
)
def test_settings_out_of_range_are_refused(setting):
  with pytest.raises(
    ValueError, match=f"{'topk' if 'default_topk' in setting else list(setting)[0]} is "
  ):
    server.make_app(Recording(), **setting)
  with pytest.raises(ValueError, match="max_topk is 0"):
    wire.Bounds(max_topk=0)


###  The program  ###


def start(*flags):
  """experiments/serve_retriever.py as a process, and its URL."""
  process = subprocess.Popen(
    [sys.executable, "experiments/serve_retriever.py", *flags],
    cwd=ROOT,
    text=True,
    stdout=subprocess.PIPE,
  )  # what it says to stderr, pytest shows
  line = process.stdout.readline()
  found = re.search(r"serving kind (\w+), count \d+, corpus \w{16} at (http://\S+)", line)
  if not found:
    process.kill()
    raise AssertionError(f"the server did not start: {line}")
  return process, found[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  path = tmp_path_factory.mktemp("corpus") / "passages.jsonl"
  many = PASSAGES[:2] + [
    Passage(f"x{i}", f"Page {i}", f"word{i % 97} and word{i % 89}") for i in range(3000)
  ]
  path.write_text("".join(json.dumps({"id": p.id, "contents": p.contents}) + "\n" for p in many))
  return path


@pytest.fixture(scope="module")
def url(corpus):
  process, url = start(f"--corpus={corpus}", "--port=0", "--topk=2")
  yield url
  process.terminate()
  assert process.wait(30) == 0 and "stopped" in process.stdout.read()


def test_a_server_of_a_file_loads_no_jax():
  program = (
    "import sys\nimport experiments.serve_retriever\n"
    "print(sorted(m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib', 'flax', 'faiss')))"
  )
  found = subprocess.run(
    [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
  )
  assert found.stdout.strip() == "[]"


def test_it_listens_on_this_machine_alone(url):
  assert url.startswith("http://127.0.0.1:")
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
    other.connect(("192.0.2.1", 9))  # sends nothing; names the address that the machine has outside
    outside = other.getsockname()[0]
  if outside.startswith("127."):
    pytest.skip("this machine has no address but its own")
  with pytest.raises(OSError):
    socket.create_connection((outside, int(url.rsplit(":", 1)[1])), timeout=2)


def passages_to_string(result):
  """What Search-R1's and SkyRL's trainers make of a query's result: title on the first line of
  `contents`."""
  lines = [item["document"]["contents"].split("\n", 1) for item in result]
  return "".join(f"Doc {i}(Title: {title}) {text}\n" for i, (title, text) in enumerate(lines, 1))


def test_a_client_of_search_r1s_form_works(url):
  """All queries of a step in one plain request, scores wanted, the default headers of a simple HTTP
  library."""
  body = {"queries": ["capital Norway", "Bergen"] * 400, "topk": 1, "return_scores": True}
  request = urllib.request.Request(
    url + "/retrieve", json.dumps(body).encode(), {"Content-Type": "application/json"}
  )
  with urllib.request.urlopen(request, timeout=30) as reply:
    results = json.load(reply)["result"]
  assert [passages_to_string(result) for result in results] == [
    'Doc 1(Title: "Oslo") Oslo is the capital of Norway.\n',
    'Doc 1(Title: "Bergen") Bergen lies in Norway.\n',
  ] * 400


def test_a_client_of_skyrls_form_works(url):
  """One query in a field of the singular, over a connection that is kept."""
  connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
  for query, title in (("Bergen", "Bergen"), ("Oslo", "Oslo"), ("no such word", None)):
    body = json.dumps({"query": query, "topk": 1, "return_scores": True})
    connection.request(
      "POST", "/retrieve", body, {"Content-Type": "application/json", "Accept": "application/json"}
    )
    found = json.loads(connection.getresponse().read()).get("result", [])
    text = "\n---\n".join(passages_to_string(result) for result in found).strip()
    assert text.startswith(f'Doc 1(Title: "{title}") {title}') if title else text == ""
  connection.close()


def test_our_client_finds_what_the_retriever_finds_and_equal_scores(url, corpus):
  from stratified.retrieval.corpus import read_corpus

  local, remote = BM25(read_corpus(corpus)), HttpRetriever(url, queries_per_request=7)
  assert remote.connect() == local.manifest
  queries = [f"word{i} word{i * 7 % 89} Norway" for i in range(50)]
  found, wanted = remote.search(queries, 5), local.search(queries, 5)
  assert found == wanted
  assert [[p.score for p in passages] for passages in found] == [
    [p.score for p in passages] for passages in wanted
  ]


def test_sigterm_ends_what_is_in_flight_and_takes_nothing_new(corpus):
  process, url = start(
    f"--corpus={corpus}", "--port=0", "--max_batch=1", "--max_queries=20000", "--max_queued=30000"
  )
  got = []
  queries = [f"word{i % 97} word{i % 89} {i}" for i in range(15_000)]
  asking = threading.Thread(
    target=lambda: got.append(
      httpx.post(
        url + "/retrieve", json={"queries": queries, "topk": 1}, timeout=120, trust_env=False
      )
    )
  )
  asking.start()
  end = time.monotonic() + 60
  while (
    httpx.get(url + "/health", trust_env=False).json()["searched"] < 100 and time.monotonic() < end
  ):
    time.sleep(0.01)
  process.send_signal(signal.SIGTERM)
  asking.join(120)
  assert got and got[0].status_code == 200 and len(got[0].json()["result"]) == 15_000
  assert process.wait(60) == 0 and "stopped" in process.stdout.read()
  with pytest.raises(httpx.ConnectError):
    httpx.get(url + "/health", trust_env=False)


def test_a_dense_index_and_a_hybrid_are_served_like_bm25(tmp_path):
  pytest.importorskip("torch", reason="needs torch, which makes the small encoder")
  from experiments import build_index
  from stratified.retrieval import retrievers
  from stratified.retrieval.corpus import read_corpus
  from tests import small_encoders

  small_encoders.save(tmp_path / "encoder")
  path = tmp_path / "corpus.jsonl"
  path.write_text(
    "".join(
      json.dumps({"id": f"{i}", "contents": f'"T{i}"\nthe {word} of {word[::-1]}'}) + "\n"
      for i, word in enumerate(small_encoders.WORDS)
    )
  )
  build_index.main(
    [
      f"--corpus={path}",
      f"--encoder={tmp_path / 'encoder'}",
      f"--output={tmp_path / 'out'}",
      "--index",
      "flat",
    ]
  )
  index, passages, queries = (
    str(tmp_path / "out" / "flat"),
    read_corpus(path),
    small_encoders.WORDS[:5],
  )
  local = {"dense": retrievers.dense(index), "hybrid": retrievers.hybrid(index, passages)}
  for kind, retriever in local.items():
    process, url = start(f"--retriever={kind}", f"--index={index}", f"--corpus={path}", "--port=0")
    try:
      remote = HttpRetriever(url, queries_per_request=2)
      assert (
        remote.connect() == json.loads(json.dumps(retriever.manifest))
        and remote.manifest["kind"] == kind
      )
      assert (
        remote.search(queries, 3) == retriever.search(queries, 3) and remote.search(queries, 3)[0]
      )
    finally:
      process.terminate()
      assert process.wait(30) == 0


@pytest.mark.parametrize(
  "flags, message",
  [
    ([], "--retriever=bm25 needs passages: give --corpus=FILE, or a run's --config"),
    (["--corpus=none.jsonl"], "none.jsonl"),
    (
      ["--retriever=dense"],
      "--retriever=dense needs --index=FOLDER, made by experiments/build_index.py",
    ),
    (["--retriever=dense", "--index=nowhere"], "nowhere/manifest.json does not exist"),
  ],
)
def test_what_can_t_be_served_is_refused_in_one_sentence(flags, message):
  done = programs.run("experiments/serve_retriever.py", "--port=0", *flags)
  assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_a_taken_port_is_named_before_anything_is_loaded():
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(
      OSError, match=rf"127\.0\.0\.1 port {port} can't be bound \(Address already in use\)"
    ):
      server.bind("127.0.0.1", port)


###  Slow, greedy and impatient clients  ###


def connected(url):
  address = urllib.parse.urlsplit(url)
  return socket.create_connection((address.hostname, address.port), timeout=20)


def test_connections_that_never_finish_a_request_are_ended_and_others_served(corpus):
  process, url = start(f"--corpus={corpus}", "--port=0", "--read_s=1")
  head = b"POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n"
  body = b'{"queries": ["Oslo"], "topk": 1}'
  whole = head.replace(b"1000", b"%d" % len(body)) + b"\r\n" + body
  begun = [b"", b"POST /retr", head, head + b"\r\n{", whole + b"POST /re"]
  try:
    slow = [(connected(url), sent) for sent in begun for _ in range(20)]
    for connection, sent in slow:
      connection.sendall(sent)
    assert httpx.post(f"{url}/retrieve", content=body).status_code == 200
    began = time.monotonic()
    for connection, sent in slow:
      received = b""
      while chunk := connection.recv(65536):
        received += chunk
        if b"408" in received:
          break
      assert (b" 408 " in received) == (sent == begun[3])
      assert (b" 200 " in received) == (sent == begun[4])
      connection.close()
    assert time.monotonic() - began < 10
    assert httpx.post(f"{url}/retrieve", content=body).status_code == 200
  finally:
    process.kill()
    process.wait()


def test_bodies_in_flight_are_bounded_together():
  """The seventeenth body of the largest size is told to come back; one that is done makes room."""
  bodies = server._Bodies(100, 5)

  class Slow:
    headers = {}

    async def stream(self):
      yield b"x" * 100

  async def run():
    async with contextlib.AsyncExitStack() as stack:
      for _ in range(server.BODIES):
        await stack.enter_async_context(bodies.read(Slow()))
      with pytest.raises(Busy):
        await stack.enter_async_context(bodies.read(Slow()))
    async with bodies.read(Slow()) as body:
      assert len(body) == 100
    assert bodies._held == 0

  asyncio.run(run())


def test_what_a_client_that_left_had_asked_is_not_searched():
  gate = threading.Event()
  recording = Recording(gate)
  app = server.make_app(recording, max_batch=1)

  async def run():
    body = [json.dumps({"queries": [query]}).encode() for query in "abcdef"]
    async with httpx.AsyncClient(
      transport=httpx.ASGITransport(app), base_url="http://server"
    ) as caller:
      await asyncio.gather(*(client(app, one) for one in body))
      gate.set()
      await asyncio.sleep(0.3)
      return (await caller.get("/health")).json()

  async def client(app, body):
    """Sends its request and leaves at once."""
    messages = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
    scope = {"type": "http", "method": "POST", "path": "/retrieve", "headers": []}
    scope |= {"query_string": b""}

    async def receive():
      await asyncio.sleep(0.05)
      return messages.pop(0)

    async def send(message):
      pass

    await app(scope, receive, send)

  found = asyncio.run(run())
  assert found["queued"] == 0 and len(recording.calls) == 1
