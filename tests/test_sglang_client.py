"""The sampler's side of SGLang, without SGLang: what is sent, how answers are read, what becomes of
faults.

Faults happen in processes of their own (scripted_sglang.py), which are killed, stopped and
restarted here.
"""

import contextlib
import copy
import dataclasses
import json
import math
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest
from scripted_sglang import log_prob, VOCAB

from stratified.sampling.interface import Request
from stratified.sampling.sglang import torch_wire, wire
from stratified.sampling.sglang.errors import Lost, SamplerError, Stale
from stratified.sampling.sglang.members import FleetConfig
from stratified.sampling.sglang.sampler import Sampling, Servers, SglangSampler

EOS, PROBE = 999, (3, 1, 4, 1, 5)
# Wide enough for a loaded machine; a test that waits for one of these to pass sets it lower.
FAST = dict(
  timeout_s=30.0,
  retries=4,
  start_s=20.0,
  outage_s=20.0,
  health_every_s=0.1,
  health_s=8.0,
  update_s=30.0,
)


###  The wire  ###

REQUEST = Request((0, 1, 2), (10, 11, 12), 3, ("</search>",))
ANSWER = {
  "output_ids": [13, 14],
  "meta_info": {
    "finish_reason": {"type": "stop", "matched": "</search>"},
    "weight_version": "run-1",
    "output_token_logprobs": [[-0.5, 13, None], [-1.5, 14, None]],
    "weight_versions": [
      {"version": "run-0", "start": 0, "end": 1},
      {"version": "run-1", "start": 1, "end": 2},
    ],
  },
}
NUMBERS = {"run-0": 0, "run-1": 1}


def read(answer, request=REQUEST):
  return wire.read_generation(answer, request, 100, NUMBERS.get)


def changed(path, value):
  answer = copy.deepcopy(ANSWER)
  place = answer
  for name in path[:-1]:
    place = place[name]
  place[path[-1]] = value
  return answer


def test_an_answer_is_read_with_the_version_of_each_token():
  assert read(ANSWER) == wire.Generation((13, 14), (-0.5, -1.5), (0, 1), "stop")


def test_an_answer_without_spans_has_one_version():
  answer = changed(["meta_info", "weight_versions"], None)
  assert read(answer).versions == (1, 1)


def test_an_aborted_answer_keeps_what_it_has():
  answer = changed(["meta_info", "finish_reason"], {"type": "abort", "message": "asked"})
  assert read(answer) == wire.Generation((13, 14), (-0.5, -1.5), (0, 1), "abort", "asked")


META = ["meta_info"]


@pytest.mark.parametrize(
  "path, value, says",
  [
    (["output_ids"], [13], "log-probs of 2 tokens for 1"),
    (["output_ids"], [13, 15], "of other ones"),
    (["output_ids"], [13, 100], "ids of the vocabulary"),
    (["output_ids"], [13, True], "ids of the vocabulary"),
    (["output_ids"], "13", "ids of the vocabulary"),
    ([*META, "output_token_logprobs"], None, "lacks"),
    ([*META, "output_token_logprobs"], [], "log-probs of 0 tokens for 2"),
    ([*META, "output_token_logprobs", 1, 0], None, "log-prob None"),
    ([*META, "output_token_logprobs", 1, 0], math.nan, "log-prob nan"),
    ([*META, "output_token_logprobs", 1, 0], -math.inf, "log-prob -inf"),
    ([*META, "output_token_logprobs", 1, 0], 0.5, "log-prob 0.5"),
    ([*META, "finish_reason"], None, "lacks"),
    ([*META, "finish_reason"], {"type": "tired"}, "'tired'"),
    ([*META, "weight_versions", 1, "end"], 1, "don't cover"),
    ([*META, "weight_versions", 1, "start"], 0, "don't cover"),
    ([*META, "weight_versions", 1], {}, "lack"),
    (["meta_info"], {}, "lacks"),
  ],
)
def test_an_answer_that_breaks_the_contract_counts_as_a_lost_server(path, value, says):
  with pytest.raises(Lost, match=says):
    read(changed(path, value))


def test_more_tokens_than_asked_for_are_refused():
  with pytest.raises(Lost, match="2 tokens where at most 1"):
    read(ANSWER, dataclasses.replace(REQUEST, max_new_tokens=1))


def test_no_tokens_are_refused_unless_aborted():
  empty = {
    "output_ids": [],
    "meta_info": {**ANSWER["meta_info"], "output_token_logprobs": [], "weight_versions": []},
  }
  with pytest.raises(Lost, match="no token"):
    read(empty)
  empty["meta_info"]["finish_reason"] = {"type": "abort"}
  assert read(empty).token_ids == ()


@pytest.mark.parametrize("answer", [None, [], "text", 3, {"output_ids": [1]}])
def test_what_is_no_generation_is_refused(answer):
  with pytest.raises(Lost):
    read(answer)


def test_tokens_of_unknown_weights_are_stale():
  with pytest.raises(Stale, match="'default'"):
    read(changed([*META, "weight_versions", 0, "version"], "default"))


@pytest.mark.parametrize(
  "request_, says",
  [
    (Request((0, 0, 0), (1, 100), 2), r"token id 100 is outside the vocabulary \[0, 100\)"),
    (Request((0, 0, 0), (-1,), 2), "token id -1"),
    (Request((0, 0, 0), (), 2), "needs a context"),
    (Request((0, 0, 0), (1,), 0), "max_new_tokens"),
    (Request((0, 0, 0), (1,) * 8, 5), "larger --context-length"),
  ],
)
def test_what_a_server_must_not_get_is_never_sent(request_, says):
  with pytest.raises(ValueError, match=says):
    wire.check_request(request_, 100, 12)


def test_a_request_asks_for_output_log_probs_alone_and_carries_no_seed():
  body = wire.generate_body(REQUEST, Sampling(0.7, 0.9), EOS, "r1")
  params = body["sampling_params"]
  assert (
    body["input_ids"] == [10, 11, 12] and body["return_logprob"] and body["logprob_start_len"] == -1
  )
  assert (params["temperature"], params["top_p"]) == (0.7, 0.9)
  assert (params["stop"], params["stop_token_ids"]) == (["</search>"], [EOS])
  assert "sampling_seed" not in json.dumps(body) and "n" not in params


@pytest.mark.parametrize(
  "pairs", [None, [[None, 1, None]], [[None, 1], [None, 2]], [[None, 2], [-1.0, 1]], "x"]
)
def test_a_probe_without_its_log_probs_is_refused(pairs):
  with pytest.raises(Lost, match="probe"):
    wire.read_probe({"meta_info": {"input_token_logprobs": pairs}}, (1, 2))


###  Tensors  ###


def tensors():
  ml_dtypes = pytest.importorskip("ml_dtypes")
  rng = np.random.default_rng(0)
  return [
    ("a.weight", rng.standard_normal((3, 5)).astype(np.float32)),
    ("b", rng.standard_normal(7).astype(ml_dtypes.bfloat16)),
    ("c", rng.standard_normal((2, 3, 4)).astype(np.float16)),
    ("d", np.asarray(3, np.float32)),
  ]


def test_pytorch_reads_the_tensors_that_were_written_without_it():
  pytest.importorskip("torch", reason="needs torch, which reads what is written")
  found = pickle.loads(torch_wire.named_tensors(tensors()))  # bytes that were made two lines above
  for (name, value), (read_name, tensor) in zip(tensors(), found, strict=True):
    assert name == read_name and tensor.is_contiguous()
    assert str(tensor.dtype) == f"torch.{value.dtype.name}" and tuple(tensor.shape) == value.shape
    np.testing.assert_array_equal(tensor.float().numpy(), value.astype(np.float32))


def test_the_bytes_name_only_what_rebuilds_tensors():
  import pickletools

  names = {
    argument
    for op, argument, _ in pickletools.genops(torch_wire.named_tensors(tensors()))
    if op.name == "GLOBAL"
  }
  assert names == {
    "torch._utils _rebuild_tensor_v2",
    "torch.storage _load_from_bytes",
    "collections OrderedDict",
  }


def test_the_version_and_the_flush_come_with_the_last_tensors():
  first, last = (
    json.loads(torch_wire.update_body(tensors()[:1], ranks=2, weight_version=v))
    for v in (None, "run-3")
  )
  assert (
    len(first["serialized_named_tensors"]) == 2
    and first["flush_cache"] is False
    and "weight_version" not in first
  )
  assert last["weight_version"] == "run-3" and last["flush_cache"] is True


def test_a_dtype_that_is_not_sent_is_named():
  with pytest.raises(ValueError, match="int64"):
    torch_wire.named_tensors([("a", np.zeros(2, np.int64))])


###  Settings  ###


@pytest.mark.parametrize(
  "change, says",
  [
    (dict(urls=()), "sampler.urls is empty"),
    (dict(urls=("localhost:30000",)), "http://HOST:PORT"),
    (dict(urls=("http://a:1", "http://a:1/")), "twice"),
    (dict(in_flight=0), "sampler.in_flight=0"),
    (dict(timeout_s=0), "sampler.timeout_s=0"),
    (dict(retries=-1), "sampler.retries=-1"),
    (dict(probe_tolerance=-1.0), "sampler.probe_tolerance"),
  ],
)
def test_a_setting_out_of_range_is_named(change, says):
  with pytest.raises(ValueError, match=says):
    FleetConfig(**{"urls": ("http://127.0.0.1:1",)} | change)


###  Servers as processes  ###


class Scripted:
  """A scripted server in a process of its own."""

  def __init__(self, second=0.0, port=0):
    self.second, self.port = second, port
    self.start()

  def start(self):
    self.process = subprocess.Popen(
      [
        sys.executable,
        pathlib.Path(__file__).with_name("scripted_sglang.py"),
        str(self.port),
        str(self.second),
      ],
      stdout=subprocess.PIPE,
      text=True,
    )
    self.port = int(self.process.stdout.readline())

  @property
  def url(self):
    return f"http://127.0.0.1:{self.port}"

  def script(self, **values):
    request = urllib.request.Request(
      self.url + "/script", json.dumps(values).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
      return json.load(answer)

  def seen(self, route):
    return [body for path, body in self.script()["seen"] if path == route]

  def signal(self, number):
    self.process.send_signal(number)

  def kill(self):
    self.process.kill()
    self.process.wait()
    self.process.stdout.close()


class Publisher:
  """Weights that are a version and nothing else; `path` is what the servers are told to read."""

  run, group = "run", None

  def __init__(self):
    self.number, self.path, self.off = 0, "there", 0.0

  def publish(self, params):
    self.number += 1
    return Weights(f"run-{self.number}", self.number, self.path, self.off)

  def close(self):
    pass


@dataclasses.dataclass
class Weights:
  version: str
  number: int
  path: str
  off: float
  probe_ids = PROBE
  together, leads = False, True

  @property
  def probe_log_probs(self):
    return [log_prob(token, self.version) + self.off for token in PROBE[1:]]

  async def apply(self, server, ranks):
    await server.done(
      "/update_weights_from_disk", {"model_path": self.path, "weight_version": self.version}
    )


@pytest.fixture
def start():
  """start(count) -> scripted servers that end with the test."""
  started = []

  def starter(count=1, **options):
    new = [Scripted(**options) for _ in range(count)]
    started.extend(new)
    return new

  yield starter
  for server in started:
    if server.process.poll() is None:
      server.kill()


@contextlib.contextmanager
def sampler(servers, *, publisher=None, loaded=True, **changes):
  config = FleetConfig(tuple(server.url for server in servers), **FAST | changes)
  with Servers(
    config, publisher or Publisher(), vocab_size=VOCAB, eos_id=EOS, max_tokens=64
  ) as fleet:
    found = SglangSampler(fleet, Sampling())
    if loaded:
      load(found, 0)
    yield found, fleet


def load(found, step):
  found.load({"norm": np.full(3, step)}, step)


def requests(count, tokens=5, step=0):
  return [Request((step, i // 4, i % 4), (i % 50 + 1, i % 50 + 2), tokens) for i in range(count)]


def check(completions, version="run-1", tokens=5, step=0):
  """Every generation is whole, and its log-probs are those of these weights."""
  for completion in completions:
    assert completion.finish == "length", completion
    assert len(completion.token_ids) == tokens
    assert completion.log_probs == tuple(log_prob(token, version) for token in completion.token_ids)
    assert completion.weight_versions == (step,) * tokens


def until(condition, seconds=30.0):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "it did not happen in time"
    time.sleep(0.02)


def test_generations_come_back_whole_and_in_bounded_numbers(start):
  samplers = start(2, second=0.002)
  with sampler(samplers, in_flight=7) as (found, fleet):
    out = found.generate(requests(60))
    check(out)
    assert [c.key for c in out] == [r.key for r in requests(60)]
    assert 2 <= max(server.script()["most"] for server in samplers) <= 7
    # the samples of a question meet its prefix on one server
    for server in samplers:
      assert len({tuple(body["input_ids"][:1]) for body in server.seen("/generate")}) < 50
    assert fleet.stats.get("retries", 0) == 0


def test_load_pauses_updates_flushes_and_proves_each_server(start):
  samplers = start(2)
  with sampler(samplers) as (found, fleet):
    for server in samplers:
      routes = [path for path, _ in server.script()["seen"]]
      order = [
        routes.index(path)
        for path in (
          "/pause_generation",
          "/update_weights_from_disk",
          "/flush_cache",
          "/continue_generation",
          "/generate",
        )
      ]
      assert order == sorted(order) and server.script()["version"] == "run-1"
    load(found, 5)
    check(found.generate(requests(8)), version="run-2", step=5)


def test_the_same_parameters_are_not_sent_twice(start):
  samplers = start(1)
  with sampler(samplers, loaded=False) as (found, fleet):
    params = {"norm": np.zeros(3)}
    found.load(params, 1)
    found.load(params, 2)
    assert len(samplers[0].seen("/update_weights_from_disk")) == 1
    check(found.generate(requests(4)), step=2)


def test_parameters_that_share_arrays_with_the_last_ones_are_sent(start):
  samplers = start(1)
  with sampler(samplers, loaded=False) as (found, fleet):
    shared = np.zeros(3)
    found.load({"norm": shared, "q": np.zeros(2)}, 1)
    found.load({"norm": shared, "q": np.ones(2)}, 2)
    assert len(samplers[0].seen("/update_weights_from_disk")) == 2
    check(found.generate(requests(4)), version="run-2", step=2)


@pytest.mark.parametrize(
  "fault", ["500", "503", "garbage", "truncated", "nan", "none", "short", "foreign", "abort"]
)
def test_an_answer_that_is_none_is_asked_for_again(start, fault):
  samplers = start(2)
  with sampler(samplers) as (found, fleet):
    samplers[0].script(fault=fault, count=2)
    check(found.generate(requests(16)))
    assert fleet.stats["retries"] == 2 and len(fleet.usable) == 2


def test_a_server_that_only_answers_garbage_is_left_out_and_its_work_done_elsewhere(start):
  samplers = start(2)
  with sampler(samplers) as (found, fleet):
    samplers[0].script(fault="garbage", count=10**6)
    check(found.generate(requests(40)))
    assert fleet.usable == [samplers[1].url] and fleet.stats["lost"] == 1
    samplers[0].script(count=0)
    until(lambda: len(fleet.usable) == 2)


def test_a_server_that_forgets_its_version_is_left_out(start):
  samplers = start(2, second=0.01)
  with sampler(samplers) as (found, fleet):
    samplers[0].script(fault="no-version", count=10**6, routes=["/model_info"])
    check(found.generate(requests(40, tokens=20)), tokens=20)
    assert fleet.usable == [samplers[1].url]


def test_a_killed_server_s_generations_run_elsewhere(start):
  samplers = start(2, second=0.01)
  with sampler(samplers) as (found, fleet):
    threading.Timer(0.1, samplers[0].kill).start()
    check(found.generate(requests(60, tokens=20)), tokens=20)
    assert fleet.usable == [samplers[1].url] and fleet.stats["lost"] == 1


def test_a_server_that_hangs_is_found_long_before_a_generation_may_take(start):
  samplers = start(2, second=0.005)
  with sampler(samplers, timeout_s=300.0, health_s=1.5) as (found, fleet):
    threading.Timer(0.1, lambda: samplers[0].signal(signal.SIGSTOP)).start()
    began = time.monotonic()
    check(found.generate(requests(60, tokens=20)), tokens=20)
    assert time.monotonic() - began < 60 and fleet.usable == [samplers[1].url]
    samplers[0].signal(signal.SIGCONT)
    until(lambda: len(fleet.usable) == 2)
    assert (
      len(samplers[0].seen("/update_weights_from_disk")) == 1
    )  # it held the right weights all the time


def test_a_scheduler_that_hangs_behind_a_live_front_is_found_by_the_generations_time(start):
  samplers = start(2)
  with sampler(samplers, timeout_s=2.0) as (found, fleet):
    samplers[0].script(fault="hang", count=10**6)
    check(found.generate(requests(40)))
    assert fleet.usable == [samplers[1].url]


def test_a_restarted_server_has_old_weights_and_is_not_believed(start):
  samplers = start(2, second=0.002)
  with sampler(samplers) as (found, fleet):

    def restart():
      samplers[0].kill()
      samplers[0].start()

    worker = threading.Timer(0.05, restart)
    worker.start()
    check(found.generate(requests(200)))  # none has the log-probs of "default"
    worker.join()
    until(lambda: len(fleet.usable) == 2)
    assert samplers[0].script()["version"] == "run-1"


def test_one_server_restarted_between_two_polls_gets_its_weights_before_it_is_used(start):
  samplers = start(1)
  with sampler(samplers) as (found, fleet):
    samplers[0].kill()
    samplers[0].start()
    check(found.generate(requests(12)))
    assert fleet.stats["lost"] == 1 and fleet.stats["returned"] == 1


def test_a_slow_server_gets_less_to_do_and_loses_nothing(start):
  fast, slow = start(1, second=0.01) + start(1, second=0.1)
  with sampler([fast, slow], in_flight=8) as (found, fleet):
    check(found.generate(requests(80)))
    assert fleet.stats.get("lost", 0) == 0
    assert len(slow.seen("/generate")) < len(fast.seen("/generate")) / 1.5


def test_a_server_that_is_down_at_start_is_named_with_the_way_out():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{free.getsockname()[1]}"
  began = time.monotonic()
  with pytest.raises(SamplerError, match=f"no SGLang server answers at {url} .*sampler.urls"):
    Servers(
      FleetConfig((url,), **FAST | dict(start_s=0.5)),
      Publisher(),
      vocab_size=VOCAB,
      eos_id=EOS,
      max_tokens=64,
    )
  assert time.monotonic() - began < 15


def test_a_server_that_starts_late_is_waited_for(start):
  server = start(1)[0]
  server.kill()
  threading.Timer(0.7, server.start).start()
  with sampler([server]) as (found, _):
    check(found.generate(requests(4)))


def test_something_else_at_the_address_is_no_server():
  import http.server

  other = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
  threading.Thread(target=other.serve_forever, daemon=True).start()
  with pytest.raises(SamplerError, match="no SGLang server answers"):
    Servers(
      FleetConfig((f"http://127.0.0.1:{other.server_port}",), **FAST | dict(start_s=0.3)),
      Publisher(),
      vocab_size=VOCAB,
      eos_id=EOS,
      max_tokens=64,
    )
  other.shutdown()


def test_a_context_that_is_too_small_is_refused_before_any_work(start):
  samplers = start(1)
  with pytest.raises(SamplerError, match="holds 512 tokens, rollout.max_tokens is 4096"):
    Servers(
      FleetConfig((samplers[0].url,), **FAST),
      Publisher(),
      vocab_size=VOCAB,
      eos_id=EOS,
      max_tokens=4096,
    )


def test_when_every_server_is_gone_the_run_stops_with_one_sentence_in_time(start):
  samplers = start(2, second=0.01)
  with sampler(samplers, outage_s=1.0) as (found, fleet):
    for request in requests(20):
      found.submit(request)
    for server in samplers:
      server.kill()
    began = time.monotonic()
    with pytest.raises(SamplerError, match="no SGLang server was usable for 1 s .*last checkpoint"):
      while True:
        assert found.poll()
    assert time.monotonic() - began < 30
    with pytest.raises(SamplerError):
      load(found, 1)


def test_a_generation_that_always_fails_is_a_fault_and_not_the_end(start):
  samplers = start(1)
  with sampler(samplers, retries=1) as (found, fleet):
    samplers[0].script(fault="500", count=2)
    (lost,) = found.generate(requests(1))
    assert lost.finish == "fault" and "failed 2 times" in lost.fault and "500" in lost.fault
    assert (lost.token_ids, fleet.stats["faults"]) == ((), 1)
    check(found.generate(requests(4)))


def test_a_request_that_the_server_refuses_stops_the_run(start):
  samplers = start(1)
  with sampler(samplers) as (found, _):
    samplers[0].script(fault="400", count=1)
    with pytest.raises(SamplerError, match="answered 400: .*scripted"):
      found.generate(requests(2))


def test_wrong_weights_behind_the_right_version_are_refused_with_both_values(start):
  publisher = Publisher()
  with sampler(start(2), publisher=publisher) as (found, _):
    publisher.off = 0.25
    with pytest.raises(
      SamplerError,
      match=r"says it holds the trainer's weights and does not: .*probe_tolerance=0.001",
    ):
      load(found, 1)


def test_an_update_that_does_not_arrive_is_refused(start):
  publisher = Publisher()
  samplers = start(2)
  with sampler(samplers, publisher=publisher, outage_s=1.0) as (found, fleet):
    publisher.path = "ignored"  # it says success and keeps what it has
    with pytest.raises(
      SamplerError, match="says it holds version 'run-1' after an update to 'run-2'"
    ):
      load(found, 1)
    assert fleet.usable == []


def test_weights_that_no_server_can_read_are_refused_at_once(start):
  publisher = Publisher()
  publisher.path = "missing"
  with sampler(start(1), publisher=publisher, loaded=False) as (found, _):
    began = time.monotonic()
    with pytest.raises(SamplerError, match="no SGLang server took the weights.*no such directory"):
      load(found, 0)
    assert time.monotonic() - began < 15  # long before an outage would be over


def test_one_server_lost_before_an_update_gets_the_new_weights_when_it_returns(start):
  samplers = start(2)
  with sampler(samplers) as (found, fleet):
    samplers[0].kill()
    load(found, 3)
    assert fleet.usable == [samplers[1].url]
    check(found.generate(requests(8)), version="run-2", step=3)
    samplers[0].start()
    until(lambda: len(fleet.usable) == 2)
    assert samplers[0].script()["version"] == "run-2"


def test_a_server_that_dies_during_the_update_is_left_out(start):
  samplers = start(2)
  with sampler(samplers) as (found, fleet):
    samplers[0].script(fault="hang", count=10**6, routes=["/update_weights_from_disk"])
    threading.Timer(0.3, samplers[0].kill).start()
    load(found, 1)
    check(found.generate(requests(8)), version="run-2", step=1)
    assert fleet.usable == [samplers[1].url]


def test_aborted_generations_return_what_they_have(start):
  samplers = start(1, second=0.01)
  with sampler(samplers, in_flight=2) as (found, fleet):
    for request in requests(4, tokens=100):
      found.submit(request)
    time.sleep(0.3)
    found.abort([(0, 0, 0)])
    (first,) = found.poll()
    assert first.key == (0, 0, 0) and first.finish == "fault" and "aborted" in first.fault
    assert 0 < len(first.token_ids) == len(first.log_probs) == len(first.weight_versions) < 100
    found.abort()
    rest = []
    while len(rest) < 3:
      rest += found.poll()
    assert {completion.finish for completion in rest} == {"fault"}


def test_load_while_generations_run_is_refused_unless_asked_for(start):
  samplers = start(1, second=0.01)
  with sampler(samplers) as (found, fleet):
    found.submit(requests(1, tokens=30)[0])
    with pytest.raises(RuntimeError, match="while generations are running"):
      load(found, 1)
    check(found.poll(), tokens=30)


def test_memory_is_given_back_until_the_next_load(start):
  samplers = start(2)
  with sampler(samplers) as (found, fleet):
    check(found.generate(requests(4)))
    fleet.release()
    with pytest.raises(RuntimeError, match="before load"):
      found.submit(requests(1)[0])
    load(found, 1)
    check(found.generate(requests(4)), version="run-2", step=1)
    for server in samplers:
      routes = [
        path
        for path, _ in server.script()["seen"]
        if any(word in path for word in ("memory", "update", "flush"))
      ]
      # a server that is not idle would die of the release: it is flushed first, which it does only
      # when idle
      assert routes == [
        "/update_weights_from_disk",
        "/flush_cache",
        "/flush_cache",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/update_weights_from_disk",
        "/flush_cache",
      ]


def test_a_cache_that_was_not_emptied_is_emptied_again_before_anything_is_sampled(start):
  samplers = start(1)
  samplers[0].script(fault="busy", count=3, routes=["/flush_cache"])
  with sampler(samplers) as (found, fleet):
    assert samplers[0].script()["flushed"] == 1 and len(samplers[0].seen("/flush_cache")) == 4
    check(found.generate(requests(2)))


def test_an_unforeseen_error_in_the_background_stops_the_run(start):
  samplers = start(1)
  with sampler(samplers) as (found, fleet):

    def broken():
      raise ZeroDivisionError("scripted")

    fleet.fleet._outage = broken
    fleet.fleet.config = dataclasses.replace(fleet.fleet.config, outage_s=0.1)
    samplers[0].kill()
    with pytest.raises(
      SamplerError, match="watch over the SGLang servers broke.*ZeroDivisionError"
    ):
      found.generate(requests(1))


def test_submit_before_load_is_refused(start):
  with sampler(start(1), loaded=False) as (found, _):
    with pytest.raises(RuntimeError, match="before load"):
      found.submit(requests(1)[0])


def test_poll_with_nothing_submitted_returns_nothing(start):
  with sampler(start(1)) as (found, _):
    assert found.poll() == []


def test_an_id_outside_the_vocabulary_never_reaches_a_server(start):
  samplers = start(1)
  with sampler(samplers) as (found, _):
    before = len(samplers[0].seen("/generate"))
    with pytest.raises(ValueError, match="outside the vocabulary"):
      found.submit(Request((0, 0, 0), (1, VOCAB), 4))
    assert len(samplers[0].seen("/generate")) == before


def test_closing_ends_what_runs(start):
  samplers = start(1, second=0.05)
  before = threading.active_count()
  with sampler(samplers) as (found, fleet):
    found.submit(requests(1, tokens=400)[0])
    time.sleep(0.1)
  assert threading.active_count() <= before and not fleet._thread.is_alive()


###  A config's part  ###


def config(**changes):
  import ml_collections

  sampler_ = dict(
    urls="http://127.0.0.1:1, http://127.0.0.1:2",
    sync="disk",
    directory="",
    in_flight=8,
    timeout_s=60.0,
    retries=1,
    start_s=1.0,
    outage_s=1.0,
    health_s=1.0,
    update_s=1.0,
    probe_tolerance=0.0,
    helper_python=sys.executable,
    group_backend="gloo",
    group_address="127.0.0.1",
  )
  return ml_collections.ConfigDict({"sampler": sampler_ | changes, "policy": {"dtype": "bfloat16"}})


def test_a_config_names_its_servers_and_the_tolerance_follows_the_dtype():
  from stratified.runs import samplers

  fleet, publish = samplers.settings(config())
  assert fleet.urls == ("http://127.0.0.1:1", "http://127.0.0.1:2") and fleet.probe_tolerance == 0.1
  assert publish.dtype == "bfloat16"
  assert samplers.settings(config(probe_tolerance=0.5))[0].probe_tolerance == 0.5


@pytest.mark.parametrize(
  "change, says",
  [
    (dict(urls=""), "sampler.urls is empty"),
    (dict(sync="magic"), "sampler.sync='magic' is unknown; choose one of disk, group, tensor"),
    (dict(timeout_s=-1.0), "sampler.timeout_s=-1"),
    (dict(sync="group", helper_python="/nowhere/python"), "make sglang"),
  ],
)
def test_a_config_that_cannot_run_is_refused_in_one_sentence(change, says):
  from stratified.runs import samplers

  with pytest.raises(ValueError, match=says):
    samplers.settings(config(**change))
