"""The HTTP retriever against a server in this process whose replies are broken on purpose."""

import json
import math
import random
import socket
import threading
import time

from faulty_retriever import Faulty
from hypothesis import given, settings, strategies
import pytest

from stratified.retrieval import client, wire
from stratified.retrieval.cache import Cached
from stratified.retrieval.client import HttpRetriever, Outage, RetrieverDown
from stratified.retrieval.corpus import Passage, RetrieverError


def echo(asked):
  """Two passages a query, which name it."""
  return {
    "result": [
      [
        {"document": {"id": f"{i}", "contents": f'"{query}"\ntext {i}'}, "score": 2.0 - i}
        for i in range(2)
      ]
      for query in asked["queries"]
    ]
  }


def expected(query, topk=2):
  return [Passage(f"{i}", query, f"text {i}") for i in range(2)][:topk]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.01)


def retriever(server, **changes):
  return HttpRetriever(server.url, **{"timeout_s": 5.0, "retries": 3, "give_up_s": 20.0} | changes)


def test_each_query_gets_its_own_passages_in_order_with_scores():
  with Faulty(echo) as server:
    found = retriever(server).search(["b", "a", "ü 東京"], 2)
  assert found == [expected("b"), expected("a"), expected("ü 東京")]
  assert [p.score for p in found[0]] == [2.0, 1.0]
  assert server.seen == [{"queries": ["b", "a", "ü 東京"], "topk": 2, "return_scores": True}]


def test_no_query_asks_nobody():
  with Faulty(echo) as server:
    assert retriever(server).search([], 3) == [] and server.seen == []


def test_a_server_that_returns_more_than_topk_is_cut():
  with Faulty(echo) as server:
    assert retriever(server).search(["a"], 1) == [expected("a", 1)]


def test_many_queries_are_split_into_requests_that_run_at_the_same_time():
  lock, running, most = threading.Lock(), [0], [0]

  def slow_echo(asked):
    with lock:
      running[0] += 1
      most[0] = max(most[0], running[0])
    time.sleep(0.05)
    with lock:
      running[0] -= 1
    return echo(asked)

  queries = [f"q{i}" for i in range(47)]
  with Faulty(slow_echo) as server:
    found = retriever(server, queries_per_request=5, in_flight=4).search(queries, 2)
    assert sorted(len(asked["queries"]) for asked in server.seen) == [2] + [5] * 9
  assert found == [expected(query) for query in queries]
  assert 2 <= most[0] <= 4


@pytest.mark.parametrize(
  "fault", ["500", "502", "503", "429", "408", "malformed", "html", "short", "truncated", "reset"]
)
def test_a_fault_that_passes_is_tried_again(fault):
  with Faulty(echo, [fault, fault, "ok"]) as server:
    asking = retriever(server)
    assert asking.search(["a", "b"], 2) == [expected("a"), expected("b")]
    assert len(server.seen) == 3 and (asking.requests, asking.retried, asking.lost) == (3, 2, 0)


@pytest.mark.parametrize("fault", ["slow", "drip"])
def test_a_reply_that_takes_too_long_as_a_whole_is_given_up_and_asked_for_again(fault):
  """A byte now and then keeps a connection alive, and must not keep a run waiting."""
  with Faulty(echo, [fault, "ok", "ok", "ok"], slow_s=4.0) as server:
    start = time.monotonic()
    assert retriever(server, timeout_s=0.8).search(["a"], 2) == [expected("a")]
    assert 0.8 <= time.monotonic() - start < 3.9


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_request_that_is_refused_is_not_sent_again(status):
  with Faulty(echo, [str(status)]) as server:
    (found,) = retriever(server).search(["a"], 2)
  assert isinstance(found, RetrieverError) and f"refused it: {status} made to fail" in str(found)
  assert [body["queries"] for body in server.seen] == [["a"], ["health"]]


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_query_that_alone_is_refused_finds_nothing(status):
  with Faulty(echo, [str(status), "ok"]) as server:
    asking = retriever(server)
    assert asking.search(["a"], 2) == [[]]
  assert (asking.refused, asking.lost) == (1, 0)


@pytest.mark.parametrize("status", [301, 401, 403, 404])
def test_a_reply_that_no_retriever_gives_stops_at_once_and_says_where_to_look(status):
  with Faulty(echo, [str(status)]) as server:
    with pytest.raises(
      RetrieverDown, match=f"retrieve answers {status} made to fail, as no retriever does; check "
    ):
      retriever(server).search(["a"], 2)
    assert len(server.seen) == 1


def test_one_bad_query_is_lost_alone():
  queries = [f"q{i}" for i in range(11)] + ["poison"] + [f"r{i}" for i in range(5)]
  with Faulty(echo, poison="poison") as server:
    asking = retriever(server, retries=1)
    found = asking.search(queries, 2)
  for query, result in zip(queries, found, strict=True):
    if query == "poison":
      assert isinstance(result, RetrieverError) and "500 made to fail" in str(result)
    else:
      assert result == expected(query)
  assert asking.lost == 1


def test_a_server_that_only_fails_ends_the_run_within_the_time():
  """It is up and answers /health, but no search works: masking every search would train without
  searching."""
  with Faulty(echo, ["500"]) as server:
    asking, start = retriever(server, retries=1, give_up_s=0.6), time.monotonic()
    with pytest.raises(
      RetrieverDown,
      match=rf"{server.url} has given no usable reply for \d+ s .*500 made to fail\); "
      "start it again, then repeat the command",
    ):
      for _ in range(100):
        assert all(isinstance(result, RetrieverError) for result in asking.search(["a", "b"], 2))
    assert time.monotonic() - start < 6


def free_port():
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def test_a_search_waits_for_a_server_that_is_away_for_less_than_the_time():
  port = free_port()
  asking = HttpRetriever(f"http://127.0.0.1:{port}", retries=1, give_up_s=30)
  late = []

  def start():
    late.append(Faulty(echo, port=port).__enter__())

  timer = threading.Timer(0.8, start)
  timer.start()
  try:
    assert asking.search(["a"], 2) == [expected("a")]
    assert asking.lost == 0 and asking.retried > 1
  finally:
    timer.join()
    late[0].__exit__()


def test_a_server_that_stays_away_ends_the_search_in_one_sentence():
  asking, start = HttpRetriever(f"http://127.0.0.1:{free_port()}", give_up_s=0.7), time.monotonic()
  with pytest.raises(
    RetrieverDown, match=r"no usable reply for \d s \(it may be gone for 0\.7; last: ConnectError"
  ):
    asking.search([f"q{i}" for i in range(300)], 2)
  assert 0.6 < time.monotonic() - start < 5


def test_the_time_without_a_reply_adds_up_over_searches_and_not_between_them():
  now = [0.0]
  outage = Outage(lambda: now[0])
  now[0] = 5.0
  outage.failed(3.0, "late")
  assert outage.seconds == 2.0
  outage.pause()
  now[0] = 100.0
  assert outage.seconds == 2.0
  outage.failed(99.0, "late again")
  assert outage.seconds == 3.0 and outage.last == "late again"
  outage.worked()
  assert outage.seconds == 0.0


def test_another_index_than_at_the_start_stops_the_run():
  manifests = [{"corpus": "a"}, {"corpus": "b"}]

  class Indexed(Faulty):
    def reply(self, path, body):
      status, made, headers = super().reply(path, body)
      return status, made, headers | {"x-retriever-index": wire.digest(manifests[0])}

  with Indexed(echo) as server:
    asking = retriever(server)
    asking.connect()
    assert asking.search(["a"], 2) == [expected("a")]
    manifests.pop(0)
    with pytest.raises(RetrieverDown, match="searches another index"):
      asking.search(["b"], 2)


###  Before any work  ###


def test_connect_returns_the_manifest():
  with Faulty(echo) as server:
    asking = retriever(server)
    assert asking.connect() == {"kind": "function"} == asking.manifest


def test_a_server_of_search_r1_without_a_health_page_is_accepted():
  class Bare(Faulty):
    def reply(self, path, body):
      return super().reply(path, body) if body else (404, b'{"detail": "Not Found"}', {})

  with Bare(echo) as server:
    assert retriever(server).connect() == {}
    assert retriever(server).search(["a"], 2) == [expected("a")]


@pytest.mark.parametrize(
  "fault, reason", [("404", "answers 404"), ("html", "not JSON"), ("500", "500 made to fail")]
)
def test_connect_refuses_what_is_no_retriever_and_names_the_way_out(fault, reason):
  with Faulty(echo, [fault]) as server:
    with pytest.raises(
      ConnectionError, match=f"no retriever answers at {server.url} .*{reason}.*serve_retriever"
    ):
      retriever(server).connect()


def test_connect_refuses_an_address_where_nobody_listens():
  with pytest.raises(
    ConnectionError, match="no retriever answers at http://127.0.0.1:1 .*ConnectError"
  ):
    HttpRetriever("http://127.0.0.1:1").connect()


@pytest.mark.parametrize(
  "url",
  [
    "",
    "localhost:8000",
    "ftp://a:1",
    "http://",
    "http://a:port",
    "http://a:99999",
    "http://a/retrieve?topk=3",
    "http://[::1",
  ],
)
def test_what_is_no_url_is_refused(url):
  with pytest.raises(ValueError, match="is not the URL of a retriever; give one like"):
    HttpRetriever(url)


@pytest.mark.parametrize(
  "url", ["http://a:1", "http://a:1/", "http://a:1/retrieve", " http://a:1/retrieve/ "]
)
def test_the_path_may_be_a_part_of_the_url(url):
  assert client.base_url(url) == "http://a:1"
  assert client.base_url("https://a/wiki/retrieve") == "https://a/wiki"


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"timeout_s": 0}, "retriever.timeout_s=0 must be above 0"),
    ({"give_up_s": math.nan}, "give_up_s=nan must be above 0 and at most 604800, and finite"),
    ({"retries": -1}, "retriever.retries=-1 must be at least 0"),
    ({"in_flight": 0}, "retriever.in_flight=0 must be at least 1"),
    ({"queries_per_request": 0}, "retriever.queries_per_request=0 must be"),
  ],
)
def test_settings_out_of_range_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    HttpRetriever("http://127.0.0.1:1", **changes)


def test_a_string_for_queries_and_a_topk_of_none_are_refused():
  asking = HttpRetriever("http://127.0.0.1:1")
  with pytest.raises(TypeError, match="takes a sequence of queries"):
    asking.search("abc", 3)
  with pytest.raises(ValueError, match="topk is 0"):
    asking.search(["abc"], 0)


###  The wire format  ###


TEXTS = strategies.text(strategies.characters(exclude_categories=["Cs"]), max_size=12)
PASSAGES = strategies.builds(
  Passage,
  TEXTS,
  TEXTS,
  TEXTS,
  strategies.one_of(
    strategies.none(), strategies.floats(width=32, allow_nan=False, allow_infinity=False)
  ),
)


@settings(deadline=None)
@given(strategies.lists(strategies.lists(PASSAGES, max_size=3), max_size=3), strategies.booleans())
def test_passages_come_back_as_they_were_sent_with_their_scores(results, return_scores):
  """Titles that hold quotation marks and line breaks, or none over a text of several lines, too."""
  back = wire.parse_reply(
    wire.reply_body(results, return_scores=return_scores), count=len(results), topk=3
  )
  assert back == results
  scores = [[p.score if return_scores else None for p in passages] for passages in results]
  assert [[p.score for p in passages] for passages in back] == scores


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf, None])
def test_a_score_without_a_number_is_null(score):
  body = wire.reply_body([[Passage("1", "t", "x", score)]], return_scores=True)
  assert b'"score": null' in body and b"NaN" not in body and b"Infinity" not in body


def test_documents_of_other_servers_are_understood():
  body = (
    b'{"result": [[{"document": {"id": 7, "contents": "\\"T\\"\\nx"}, "score": NaN}, {"id": "8", '
    b'"title": "T", '
    b'"text": "x", "contents": "something else"}, {"document": {"id": "9", "title": "T", '
    b'"contents": "T\\nx"}}]]}'
  )
  (found,) = wire.parse_reply(body, count=1, topk=3)
  assert found == [Passage("7", "T", "x"), Passage("8", "T", "x"), Passage("9", "T", "x")]
  assert [p.score for p in found] == [None, None, None]


@pytest.mark.parametrize(
  "body, message",
  [
    (b"", "not JSON"),
    (b"\xff", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"[]", "no list named result"),
    (b'{"result": {}}', "no list named result"),
    (b'{"result": []}', "0 results for 1 queries"),
    (b'{"result": [3]}', "JSON int, not a list"),
    (b'{"result": [[3]]}', "neither a JSON object nor text"),
    (b'{"result": [[{"document": 3}]]}', "neither a JSON object nor text"),
    (b'{"result": [[{"document": null, "contents": "x"}]]}', "neither a JSON object nor text"),
    (b'{"result": [[{"id": true, "contents": "x"}]]}', "the id true"),
    (b'{"result": [[{"id": "1"}]]}', "no contents that are text"),
    (b'{"result": [[{"id": "1", "contents": 3}]]}', "no contents that are text"),
    (b'{"result": [[{"id": "1", "contents": "\\ud800"}]]}', "no contents that are text"),
  ],
)
def test_a_reply_that_makes_no_sense_is_named(body, message):
  with pytest.raises(ValueError, match=message):
    wire.parse_reply(body, count=1, topk=3)


###  The cache  ###


class Counting:
  manifest = {"kind": "counting"}

  def __init__(self):
    self.calls = []

  def search(self, queries, topk):
    self.calls.append((list(queries), topk))
    return [
      RetrieverError("no") if query == "bad" else [Passage(query, "", f"{topk}")]
      for query in queries
    ]


def test_a_repeated_query_is_searched_for_once_and_counted():
  behind = Counting()
  cached = Cached(behind, 10)
  first = cached.search(["a", "b", "a"], 3)
  assert first == [[Passage("a", "", "3")], [Passage("b", "", "3")], [Passage("a", "", "3")]]
  first[0].clear()
  assert cached.search(["c", "a"], 3) == [[Passage("c", "", "3")], [Passage("a", "", "3")]]
  assert cached.search(["a"], 2) == [[Passage("a", "", "2")]]  # another topk is another search
  assert behind.calls == [(["a", "b"], 3), (["c"], 3), (["a"], 2)]
  assert (cached.hits, cached.misses) == (2, 4) and cached.manifest == {"kind": "counting"}


def test_the_least_recent_query_is_forgotten_first():
  behind = Counting()
  cached = Cached(behind, 2)
  for query in ("a", "b", "a", "c", "a", "b"):
    cached.search([query], 1)
  assert [queries[0] for queries, _ in behind.calls] == ["a", "b", "c", "b"]


def test_a_lost_search_is_not_remembered():
  behind = Counting()
  cached = Cached(behind, 10)
  for _ in range(2):
    assert isinstance(cached.search(["bad", "a"], 1)[0], RetrieverError)
  assert behind.calls == [(["bad", "a"], 1), (["bad"], 1)]


def test_a_lost_query_loses_the_rollouts_that_asked_it_and_no_other():
  from stratified.agents import loop
  from stratified.agents.agent import Use
  from stratified.tools.base import Result, ToolError
  from stratified.tools.search import Search

  search = lambda *queries: Use(tuple(("search", query) for query in queries))
  uses = {(0, 0, 0): search("a", "bad"), (0, 0, 1): search("a"), (0, 1, 0): search("bad")}
  found = loop._run(uses, {"search": Search(Counting(), 1)}, {})
  assert isinstance(found[0, 0, 0], ToolError) and isinstance(found[0, 1, 0], ToolError)
  assert found[0, 0, 1] == [Result((Passage("a", "", "1"),))]


@pytest.mark.parametrize("capacity", [1, 3, 50])
def test_a_cache_changes_no_result(capacity):
  draw, cached = random.Random(capacity), Cached(Counting(), capacity)
  for _ in range(200):
    queries = [f"q{draw.randrange(12)}" for _ in range(draw.randrange(6))]
    assert cached.search(queries, 2) == Counting().search(queries, 2)
  assert len(cached._known) <= capacity


def test_a_cache_without_room_is_refused():
  with pytest.raises(ValueError, match="capacity is 0"):
    Cached(Counting(), 0)


@pytest.mark.parametrize(
  "item",
  [
    {"contents": '"Oslo"\nA city.'},
    {"document": {"contents": '"Oslo"\nA city.'}},
    {"document": {"title": "Oslo", "text": "A city."}},
    {"document": '"Oslo"\nA city.', "score": None},
    '"Oslo"\nA city.',
  ],
)
def test_a_server_that_gives_contents_without_id_or_score_is_read(item):
  body = json.dumps({"result": [[item], [item]]}).encode()
  (found,), (again,) = wire.parse_reply(body, count=2, topk=1)
  assert (found.title, found.text, found.score) == ("Oslo", "A city.", None)
  assert found.id.startswith("contents-") and found == again
