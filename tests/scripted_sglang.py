"""A process that answers as an SGLang server does, from a rule instead of a model, and misbehaves
when told to.

    python scripted_sglang.py PORT [seconds per token]

Tokens of a generation count up from the last id of the context; the log-prob of a token is
`log_prob(id, version)`, so that whoever knows the version knows it. POST /script {"fault": NAME,
"count": N, "routes": [...]} makes the next N calls of these routes (/generate where not given) go
wrong: an HTTP status, garbage, truncated, hang, no-version, or for /generate nan, none, short,
foreign, abort. GET /script tells what was seen.
"""

import http.server
import json
import sys
import threading
import time

VOCAB = 1000


def log_prob(token: int, version: str) -> float:
  return -1.0 - (token % 7) / 10 - (sum(map(ord, version)) % 13) / 100


class State:
  version, paused, seen, fault, count, routes = "default", False, [], "", 0, ("/generate",)
  running, most, flushed, second = 0, 0, 0, 0.0
  aborted: set = set()
  lock = threading.Condition()


class Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"

  def log_message(self, *_):
    pass

  def do_GET(self):
    self.route({})

  def do_POST(self):
    length = int(self.headers.get("content-length") or 0)
    self.route(json.loads(self.rfile.read(length) or b"{}"))

  def route(self, body):
    if self.path == "/script":
      return self.script(body)
    with State.lock:
      State.seen.append([self.path, body])
      fault = State.fault if State.count and self.path in State.routes else ""
      State.count -= bool(fault)
    if fault == "hang":
      time.sleep(3600)
    if fault in ("500", "503", "400"):
      return self.answer({"error": f"scripted {fault}"}, int(fault))
    if fault in ("garbage", "truncated"):
      return self.raw(b"<html>\xff no JSON" if fault == "garbage" else b'{"output_ids": [1, 2', 200)
    name = "do_" + self.path.strip("/").replace("/", "_")
    return getattr(self, name, self.unknown)(body, fault)

  def script(self, body):
    with State.lock:
      for key, value in body.items():
        setattr(State, key, value)
      State.lock.notify_all()
    self.answer(
      {"seen": State.seen, "most": State.most, "version": State.version, "flushed": State.flushed}
    )

  def unknown(self, body, fault):
    self.answer({"error": "no such route"}, 404)

  def do_model_info(self, body, fault):
    self.answer({} if fault == "no-version" else {"weight_version": State.version})

  def do_v1_models(self, body, fault):
    self.answer({"data": [{"max_model_len": 512}]})

  def do_server_info(self, body, fault):
    self.answer({"tp_size": 1, "max_total_num_tokens": 4096})

  def do_update_weights_from_disk(self, body, fault):
    if body["model_path"] == "missing":
      return self.answer({"success": False, "message": "no such directory"}, 400)
    if body["model_path"] != "ignored":
      State.version = body["weight_version"]
    self.answer({"success": True, "message": ""})

  def do_flush_cache(self, body, fault):
    if fault == "busy":  # what the server says while something runs; older ones with a 200
      return self.raw(b"Flush cache failed.\n", 200 if State.flushed % 2 else 400)
    State.flushed += 1
    self.raw(
      b"Cache flushed.\nPlease check backend logs for more details. (When there are running or "
      b"waiting requests, "
      b"the operation will not be performed.)\n",
      200,
    )

  def do_pause_generation(self, body, fault):
    self.answer({"status": "ok"})

  do_continue_generation = do_release_memory_occupation = do_resume_memory_occupation = (
    do_pause_generation
  )

  def do_abort_request(self, body, fault):
    with State.lock:
      State.aborted |= {"all"} if body.get("abort_all") else {body["rid"]}
    self.answer({})

  def do_generate(self, body, fault):
    ids, params = body["input_ids"], body["sampling_params"]
    with State.lock:
      State.running += 1
      State.most = max(State.most, State.running)
      State.aborted.discard("all")
    version, out, finish = State.version, [], {"type": "length"}
    for i in range(params["max_new_tokens"]):
      time.sleep(State.second)
      if State.aborted & {"all", body["rid"]}:
        finish = {"type": "abort", "message": "Aborted"}
        break
      out.append((ids[-1] + 1 + i) % VOCAB)
    with State.lock:
      State.running -= 1
    pairs = [[log_prob(token, version), token, None] for token in out]
    if fault == "nan":
      pairs[-1][0] = float("nan")
    elif fault == "none":
      pairs[-1][0] = None
    elif fault == "short":
      pairs.pop()
    elif fault == "foreign":
      pairs[0][1] += 1
    elif fault == "abort":
      finish = {"type": "abort", "message": "scripted"}
    known = [[None, ids[0], None]] + [[log_prob(token, version), token, None] for token in ids[1:]]
    self.answer(
      {
        "output_ids": out,
        "meta_info": {
          "finish_reason": finish,
          "output_token_logprobs": pairs,
          "input_token_logprobs": known,
          "weight_version": version,
          "weight_versions": [{"version": version, "start": 0, "end": len(out)}],
        },
      }
    )

  def answer(self, value, code=200):
    self.raw(json.dumps(value).encode(), code)

  def raw(self, data, code):
    self.send_response(code)
    self.send_header("content-type", "application/json")
    self.send_header("content-length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)


class Server(http.server.ThreadingHTTPServer):
  daemon_threads, allow_reuse_address, request_queue_size = True, True, 256


if __name__ == "__main__":
  State.second = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
  server = Server(("127.0.0.1", int(sys.argv[1])), Handler)
  print(server.server_address[1], flush=True)
  server.serve_forever()
