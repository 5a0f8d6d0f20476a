"""The progress line: rate, time left, and what it costs where nobody watches."""

import io

import pytest

from stratified.progress import duration, Progress


class _Terminal(io.StringIO):
  def isatty(self):
    return True


class _Clock:
  def __init__(self):
    self.now = 100.0

  def __call__(self):
    return self.now


def _drive(stream, seconds_each, total, **kwargs):
  clock = _Clock()
  with Progress(total, "steps", stream=stream, clock=clock, **kwargs) as progress:
    for _ in range(total - kwargs.get("done", 0)):
      clock.now += seconds_each
      progress.update(note="reward 0.25")
  return stream.getvalue()


def test_a_log_gets_a_line_every_few_seconds_with_rate_and_time_left():
  lines = _drive(io.StringIO(), 2.0, 20).splitlines()
  assert lines[0] == "steps 5/20  0.50/s  30 s left  reward 0.25"
  assert lines[-1] == "steps 20/20  0.50/s  took 40 s  reward 0.25"
  assert len(lines) == 4


def test_a_terminal_gets_one_line_redrawn_in_place():
  text = _drive(_Terminal(), 30.0, 4)
  assert text.count("\n") == 1 and text.endswith("\n")
  assert "████████████░░░░░░░░░░░░  steps 2/4  30.0 s each  1 min 00 s left" in text


def test_a_resumed_run_counts_from_where_it_stands_and_rates_only_its_own_steps():
  last = _drive(io.StringIO(), 1.0, 110, done=100).splitlines()[-1]
  assert last == "steps 110/110  1.00/s  took 10 s  reward 0.25"


def test_the_time_left_forgets_slow_first_steps():
  stream, clock = io.StringIO(), _Clock()
  progress = Progress(1_000, "steps", stream=stream, clock=clock, every_s=0)
  clock.now += 500
  progress.update()  # compilation
  for _ in range(100):
    clock.now += 1
    progress.update()
  assert stream.getvalue().splitlines()[-1] == "steps 101/1,000  1.00/s  14 min 59 s left"


def test_an_unknown_total_shows_no_time_left():
  stream, clock = io.StringIO(), _Clock()
  progress = Progress(None, "passages", stream=stream, clock=clock, every_s=1)
  clock.now += 4
  progress.update(4_000)
  assert stream.getvalue() == "passages 4,000  1000.00/s\n"


def test_nothing_done_and_no_time_passed_is_no_error():
  stream = io.StringIO()
  Progress(0, "questions", stream=stream, clock=_Clock()).close()
  assert stream.getvalue() == "questions 0/0  took 0 s\n"


@pytest.mark.parametrize(
  "seconds, text", [(0.4, "0 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations_read_as_a_person_says_them(seconds, text):
  assert duration(seconds) == text
