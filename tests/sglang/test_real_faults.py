"""Real servers that are killed, stopped and restarted in the middle of a step: nothing lost,
nothing wrong.

The scripted servers of test_sglang_client.py go through many more faults in less time; these show
that the real one behaves as they do.
"""

import signal
import threading
import time

from conftest import LENGTH
import pytest
from test_real_servers import CLOSE, gap

from stratified.sampling.interface import Request
from stratified.sampling.sglang.errors import SamplerError
from stratified.sampling.sglang.sampler import Sampling, SglangSampler


def requests(count, tokens=100):
  return [
    Request((0, i // 4, i % 4), tuple(range(20 + i // 4, 44 + i // 4)), tokens)
    for i in range(count)
  ]


def run_while(sampler, wanted, fault):
  """The generations of a step in whose middle `fault` happens."""
  for request in wanted:
    sampler.submit(request)
  done = {completion.key: completion for completion in sampler.poll()}
  fault()
  while len(done) < len(wanted):
    done |= {completion.key: completion for completion in sampler.poll()}
  return [done[request.key] for request in wanted]


def check(model, params, wanted, done, step):
  for request, completion in zip(wanted, done):
    assert completion.fault is None and set(completion.weight_versions) == {step}
    assert gap(model, params, request.token_ids, completion) < CLOSE


def until(condition, seconds=240):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "it did not happen in time"
    time.sleep(0.2)


def test_a_server_killed_in_the_middle_of_a_step_and_restarted_empty(
  real_servers, connect, model, params_of
):
  first, second = real_servers
  with connect(real_servers, sync="disk") as servers:
    sampler = SglangSampler(servers, Sampling())
    sampler.load(params_of(2), 2)
    wanted = requests(48)
    check(model, params_of(2), wanted, run_while(sampler, wanted, first.kill), 2)
    assert servers.usable == [second.url] and servers.stats["lost"] == 1
    first.start()  # with the directory's weights, those of step 0
    until(lambda: len(servers.usable) == 2)
    before = servers.stats["returned"]
    check(model, params_of(2), wanted, sampler.generate(wanted), 2)
    assert before == 1


def test_a_server_that_hangs_is_left_out_and_taken_back(real_servers, connect, model, params_of):
  first, second = real_servers
  with connect(real_servers, sync="tensor", health_s=3.0, health_every_s=0.5) as servers:
    sampler = SglangSampler(servers, Sampling())
    sampler.load(params_of(1), 1)
    wanted = requests(48)
    try:
      began = time.monotonic()
      check(
        model,
        params_of(1),
        wanted,
        run_while(sampler, wanted, lambda: first.signal(signal.SIGSTOP)),
        1,
      )
      assert time.monotonic() - began < 60 and servers.usable == [second.url]
      sampler.load(params_of(2), 2)  # an update without it
    finally:
      first.signal(signal.SIGCONT)
    until(lambda: len(servers.usable) == 2)
    check(model, params_of(2), wanted, sampler.generate(wanted), 2)


def test_a_group_goes_on_with_the_servers_that_are_left(real_servers, connect, model, params_of):
  first, second = real_servers
  with connect(real_servers, sync="group") as servers:
    sampler = SglangSampler(servers, Sampling())
    sampler.load(params_of(1), 1)
    first.kill()
    sampler.load(params_of(2), 2)
    assert second.url in servers.usable
    wanted = requests(8)
    check(model, params_of(2), wanted, sampler.generate(wanted), 2)
    first.start()
    until(lambda: len(servers.usable) == 2)
    sampler.load(params_of(3), 3)
    check(model, params_of(3), wanted, sampler.generate(wanted), 3)
    assert len(servers.usable) == 2


def test_the_last_server_killed_stops_the_run_in_time_with_a_sentence(
  real_servers, connect, params_of
):
  first, _ = real_servers
  with connect([first], outage_s=3.0, health_every_s=0.5) as servers:
    sampler = SglangSampler(servers, Sampling())
    sampler.load(params_of(1), 1)
    for request in requests(8, tokens=LENGTH - 40):
      sampler.submit(request)
    threading.Timer(0.2, first.kill).start()
    began = time.monotonic()
    with pytest.raises(SamplerError, match="no SGLang server was usable for 3 s"):
      while True:
        sampler.poll()
    assert time.monotonic() - began < 60
  first.start()
  first.ready()
