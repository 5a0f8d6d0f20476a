"""Downloads from a server on the loopback that breaks in every way: cut short, changed, without
ranges, gone."""

import functools
import hashlib
import http.server
import json
import threading

import pytest

from stratified.data import download

DATA = bytes(range(256)) * 12_000  # 3 MB: several blocks
fetch = functools.partial(download.download, wait_s=0.01, timeout_s=10)


class Server(http.server.ThreadingHTTPServer):
  """Serves `data`; what else it does, the test sets."""

  def __init__(self):
    super().__init__(("127.0.0.1", 0), Handler)
    self.data, self.etag, self.ranges, self.head = DATA, '"v1"', True, True
    self.cuts, self.hub, self.redirect, self.status, self.asked = [], {}, False, {}, []
    threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

  @property
  def url(self):
    return f"http://127.0.0.1:{self.server_port}/file"


class Handler(http.server.BaseHTTPRequestHandler):
  def log_message(self, *unused):
    pass

  def do_HEAD(self):
    server = self.server
    if not server.head:
      return self.send_error(405)
    if self.path in server.status:
      return self.send_error(server.status[self.path])
    if server.redirect and self.path == "/file":
      self.send_response(302)
      self.send_header("Location", "/store")
      return self.finish_headers(server.hub)
    self.send_response(200)
    self.send_header("Content-Length", str(len(server.data)))
    self.finish_headers(
      ({"ETag": server.etag} if server.etag else {}) | ({} if server.redirect else server.hub)
    )

  def do_GET(self):
    server = self.server
    server.asked.append(self.headers.get("Range"))
    status = server.status.get("GET")
    if status:
      if isinstance(status, list):
        status = status.pop(0) if status else None
      if status:
        return self.send_error(status)
    start = 0
    if server.ranges and self.headers.get("Range") and self.headers.get("If-Range") == server.etag:
      start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
      if start >= len(server.data):
        return self.send_error(416)
      self.send_response(206)
      self.send_header("Content-Range", f"bytes {start}-{len(server.data) - 1}/{len(server.data)}")
    else:
      self.send_response(200)
    body = server.data[start:]
    self.send_header("Content-Length", str(len(body)))
    self.finish_headers({"ETag": server.etag} if server.etag else {})
    self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)

  def finish_headers(self, more):
    for name, value in more.items():
      self.send_header(name, value)
    self.end_headers()


@pytest.fixture
def server():
  with Server() as made:
    yield made
    made.shutdown()


def test_a_file_arrives_with_its_hash_and_is_not_fetched_twice(server, tmp_path):
  told = []
  found = fetch(server.url, tmp_path / "a" / "file", progress=lambda *x: told.append(x))
  assert (tmp_path / "a" / "file").read_bytes() == DATA
  assert found == {
    "url": server.url,
    "sha256": hashlib.sha256(DATA).hexdigest(),
    "bytes": len(DATA),
  }
  assert told[-1] == (len(DATA), len(DATA))
  assert fetch(server.url, tmp_path / "a" / "file") == found and len(server.asked) == 1
  assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["file", "file.source.json"]


def test_a_connection_that_breaks_is_gone_on_with(server, tmp_path):
  server.cuts = [1_000_000, 500_000]
  fetch(server.url, tmp_path / "file")
  assert (tmp_path / "file").read_bytes() == DATA
  assert server.asked == [None, "bytes=1000000-", "bytes=1500000-"]


def test_the_next_call_goes_on_where_the_last_gave_up(server, tmp_path):
  server.cuts = [100_000] * 2
  with pytest.raises(
    ConnectionError, match="can't be fetched .the connection ended after 200,000 of 3,072,000 bytes"
  ):
    fetch(server.url, tmp_path / "file", attempts=2)
  assert not (tmp_path / "file").exists()
  fetch(server.url, tmp_path / "file")
  assert server.asked[-1] == "bytes=200000-" and (tmp_path / "file").read_bytes() == DATA


def test_a_file_that_changed_meanwhile_is_begun_anew(server, tmp_path):
  server.cuts = [1_000_000]
  with pytest.raises(ConnectionError):
    fetch(server.url, tmp_path / "file", attempts=1)
  server.data, server.etag = DATA[::-1], '"v2"'
  fetch(server.url, tmp_path / "file")
  assert server.asked == [None, None] and (tmp_path / "file").read_bytes() == DATA[::-1]


def test_a_newer_version_replaces_the_file(server, tmp_path):
  fetch(server.url, tmp_path / "file")
  server.data, server.etag = b"new", '"v2"'
  assert (
    fetch(server.url, tmp_path / "file")["bytes"] == 3
    and (tmp_path / "file").read_bytes() == b"new"
  )


@pytest.mark.parametrize("etag", ['W/"weak"', None])
def test_without_a_strong_etag_nothing_is_joined(server, tmp_path, etag):
  server.etag, server.cuts = etag, [1_000_000]
  fetch(server.url, tmp_path / "file")
  assert server.asked == [None, None] and (tmp_path / "file").read_bytes() == DATA


def test_a_server_without_ranges_sends_all_again(server, tmp_path):
  server.ranges, server.cuts = False, [1_000_000]
  fetch(server.url, tmp_path / "file")
  assert server.asked == [None, "bytes=1000000-"] and (tmp_path / "file").read_bytes() == DATA


def test_a_server_without_head_is_asked_all_the_same(server, tmp_path):
  server.head = False
  assert fetch(server.url, tmp_path / "file")["bytes"] == len(DATA)


def test_a_part_longer_than_the_file_is_thrown_away(server, tmp_path):
  (tmp_path / "file.part").write_bytes(DATA + b"more")
  (tmp_path / "file.part.json").write_text(json.dumps({"url": server.url, "etag": '"v1"'}))
  with pytest.raises(ConnectionError, match="HTTP 416"):
    fetch(server.url, tmp_path / "file")
  assert fetch(server.url, tmp_path / "file")["bytes"] == len(DATA)


def test_a_whole_part_is_only_checked(server, tmp_path):
  (tmp_path / "file.part").write_bytes(DATA)
  (tmp_path / "file.part.json").write_text(json.dumps({"url": server.url, "etag": '"v1"'}))
  fetch(server.url, tmp_path / "file")
  assert server.asked == [] and (tmp_path / "file").read_bytes() == DATA


def git_hash(data):
  return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.mark.parametrize(
  "headers, good",
  [
    (
      {
        "X-Linked-Etag": f'"{hashlib.sha256(DATA).hexdigest()}"',
        "X-Linked-Size": str(len(DATA)),
        "X-Repo-Commit": "c",
      },
      True,
    ),
    ({"X-Linked-Etag": f'"{"0" * 64}"', "X-Repo-Commit": "c"}, False),
    ({"X-Linked-Etag": f'"{git_hash(DATA)}"', "X-Repo-Commit": "c"}, True),
    ({"X-Linked-Etag": f'"{"1" * 40}"', "X-Repo-Commit": "c"}, False),
    ({"X-Linked-Size": "17"}, False),
  ],
)
def test_the_hubs_hashes_are_held_against_what_came(server, tmp_path, headers, good):
  server.redirect, server.hub = True, headers
  if good:
    assert fetch(server.url, tmp_path / "file")["bytes"] == len(DATA)
  else:
    with pytest.raises(ValueError, match="came, but .* was expected; it has been deleted"):
      fetch(server.url, tmp_path / "file")
    assert not (tmp_path / "file").exists() and not (tmp_path / "file.part").exists()


def test_a_hash_of_the_callers_is_held_against_what_came(server, tmp_path):
  with pytest.raises(
    ValueError,
    match=f"SHA-256 {hashlib.sha256(DATA).hexdigest()} came, but {'0' * 64} was expected",
  ):
    fetch(server.url, tmp_path / "file", sha256="0" * 64)
  assert fetch(server.url, tmp_path / "file", sha256=hashlib.sha256(DATA).hexdigest())[
    "bytes"
  ] == len(DATA)


def test_an_overloaded_server_is_asked_again_a_missing_file_is_not(server, tmp_path):
  server.status["GET"] = [503, 429]
  assert fetch(server.url, tmp_path / "file")["bytes"] == len(DATA) and len(server.asked) == 3
  server.status["GET"] = 404
  with pytest.raises(ConnectionError, match=r"/file can't be fetched \(HTTP 404 Not Found\)"):
    fetch(server.url, tmp_path / "other")
  assert len(server.asked) == 4
  server.status["/file"] = 404
  with pytest.raises(ConnectionError, match="HTTP 404"):
    fetch(server.url, tmp_path / "third")


def test_nobody_there_is_one_sentence(server, tmp_path):
  server.shutdown()
  server.server_close()
  with pytest.raises(
    ConnectionError, match=r"http://127.0.0.1:\d+/file can't be fetched \(.*[Rr]efused.*\)"
  ):
    fetch(server.url, tmp_path / "file")
  with pytest.raises(ValueError, match="is no http or https address"):
    fetch("file:///etc/passwd", tmp_path / "file")


def test_a_redirection_to_a_local_file_is_not_followed(server, tmp_path):
  server.redirect, server.hub = True, {}
  original = Handler.do_HEAD

  def to_file(self):
    self.send_response(302)
    self.send_header("Location", "file:///etc/passwd")
    self.end_headers()

  Handler.do_HEAD = to_file
  try:
    with pytest.raises(ConnectionError, match="redirects without end or out of http"):
      fetch(server.url, tmp_path / "file")
  finally:
    Handler.do_HEAD = original
