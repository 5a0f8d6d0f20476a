"""A proxy in front of a retrieval server that breaks replies on purpose, on plain sockets; also a
program.

    python tests/faulty_retriever.py --upstream=http://127.0.0.1:8000 --faults=ok,500,truncated
    [--poison=TEXT]

The n-th search gets the n-th fault, again and again from the first; a search whose body holds
`poison` always gets 500. What the faults do stands in `Faulty.broken`. It prints its URL and runs
until it is stopped.
"""

import argparse
import http.server
import itertools
import json
import threading
import time
import urllib.error
import urllib.request


class Faulty(http.server.ThreadingHTTPServer):
  """`upstream` is a URL, or a function from the request's JSON to the reply's."""

  daemon_threads, request_queue_size = True, 128

  def __init__(self, upstream, faults=("ok",), poison=None, slow_s=1.0, port=0):
    super().__init__(("127.0.0.1", port), Handler)
    self.upstream, self.poison, self.slow_s = upstream, poison, slow_s
    self.faults, self.seen, self.lock = itertools.cycle(faults), [], threading.Lock()
    self.url = f"http://127.0.0.1:{self.server_address[1]}"

  def __enter__(self):
    threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
    return self

  def __exit__(self, *unused):
    self.shutdown()
    self.server_close()

  def handle_error(self, *unused):
    """A client that has gone, which is what it is to do; what else goes wrong here fails its test
    anyway."""

  def next_fault(self, body: bytes) -> str:
    with self.lock:
      self.seen.append(json.loads(body))
      return "500" if self.poison and self.poison.encode() in body else next(self.faults)

  def reply(self, path: str, body: bytes | None):
    """(status, body, headers) of the server behind."""
    if callable(self.upstream):
      made = {"manifest": {"kind": "function"}} if body is None else self.upstream(json.loads(body))
      return 200, json.dumps(made).encode(), {}
    try:
      with urllib.request.urlopen(
        urllib.request.Request(self.upstream + path, data=body), timeout=30
      ) as found:
        return found.status, found.read(), dict(found.headers)
    except urllib.error.HTTPError as error:
      return error.code, error.read(), dict(error.headers)


class Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"

  def log_message(self, *unused):
    pass

  def do_GET(self):
    self.send(*self.server.reply(self.path, None))

  def do_POST(self):
    body = self.rfile.read(int(self.headers["content-length"]))
    fault = self.server.next_fault(body)
    if fault == "ok":
      self.send(*self.server.reply(self.path, body))
    elif fault.isdigit():
      self.send(int(fault), b'{"error": "made to fail"}', {"Retry-After": "0"})
    else:
      self.broken(fault, *self.server.reply(self.path, body))

  def broken(self, fault, status, body, headers):
    if fault == "slow":  # whole and right, but late
      time.sleep(self.server.slow_s)
      self.send(status, body, headers)
    elif fault == "drip":  # a byte at a time, each in time, the whole never
      self.send(
        status,
        body,
        headers,
        write=lambda: [self.drip(body[at : at + 1]) for at in range(len(body))],
      )
    elif fault == "malformed":
      self.send(200, body[: len(body) // 2], headers)
    elif fault == "html":
      self.send(200, b"<html>busy</html>", headers)
    elif fault == "short":  # one result too few
      self.send(200, json.dumps({"result": json.loads(body)["result"][:-1]}).encode(), headers)
    elif fault == "truncated":  # the connection ends in the middle of the announced body
      self.send(200, body, headers, write=lambda: self.wfile.write(body[: len(body) // 2]))
      self.close_connection = True
    elif fault == "reset":  # no reply at all
      self.close_connection = True
    else:
      raise ValueError(f"fault {fault!r} is unknown")

  def drip(self, piece):
    self.wfile.write(piece)
    self.wfile.flush()
    time.sleep(self.server.slow_s / 10)

  def send(self, status, body, headers, write=None):
    self.send_response(status)
    for name, value in headers.items():
      if name.lower() in ("content-type", "retry-after", "x-retriever-index"):
        self.send_header(name, value)
    self.send_header("content-length", str(len(body)))
    self.end_headers()
    try:
      (write or (lambda: self.wfile.write(body)))()
    except (BrokenPipeError, ConnectionResetError):  # the client has given up, as it should
      self.close_connection = True


if __name__ == "__main__":
  parser = argparse.ArgumentParser()
  parser.add_argument("--upstream", required=True)
  parser.add_argument("--faults", default="ok")
  parser.add_argument("--poison")
  parser.add_argument("--slow_s", type=float, default=1.0)
  parsed = parser.parse_args()
  proxy = Faulty(parsed.upstream, parsed.faults.split(","), parsed.poison, parsed.slow_s)
  print(f"faulty at {proxy.url}", flush=True)
  proxy.serve_forever()
