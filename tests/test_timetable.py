"""What a run says of its whole: its stages, and the time that they will take."""

import pytest

from stratified.runs.timetable import Part, Timetable

TIMES = Timetable([Part("warm-start steps", 100, 20.0), Part("training steps", 10, 400.0, 1000.0)])


def test_the_stages_are_named_in_their_order():
  assert str(TIMES) == "100 warm-start steps, then 10 training steps"


@pytest.mark.parametrize(
  "number, step, seconds, left",
  [
    # 0.1 s a demonstration: 80 steps of 2 s, then 10 steps of 40 s and evaluations of 100 s.
    (0, 20, 2.0, 160 + 400 + 100),
    # The training step itself says what it takes: 6 of 10 are left, and as much of the evaluations.
    (1, 4, 20.0, 120 + 1000 * 20 / 400 * 0.6),
    (1, 10, 20.0, 0),
  ],
)
def test_what_is_left_is_reckoned_from_the_stage_that_runs(number, step, seconds, left):
  assert TIMES.left(number, step, seconds) == pytest.approx(left)


def test_a_progress_line_says_which_stage_it_is_and_when_the_whole_ends():
  assert TIMES.say(0, 20, 2.0) == "(stage 1 of 2, the run about 11 min 00 s)"
