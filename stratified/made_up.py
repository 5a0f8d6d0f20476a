"""Makes up rollouts of one question, on which what a config names from outside is tried."""

from stratified.types import Call, Question, Segment, Trajectory, Turn

QUESTION = Question("made-up", "Where is the sea?", ("Oslo",), "made-up", 1)
LONGEST = 6  # tokens of a rollout


def rollouts(count: int = 4) -> list[Trajectory]:
  """Makes `count` rollouts, of every kind in turn.

  Right at once; right after a search; a search and no answer; an invalid turn. Rollouts lost to a
  fault are not among them.
  """
  prompt, early, late = Segment((1, 2), "prompt"), _policy(3), _policy(6)
  read = Segment((4, 5), "observation")
  searched = Turn("call", "<search> sea</search>", (Call("search", "sea", "hit", ("1",)),))
  answered = Turn("answer", "<answer> Oslo</answer>")
  kinds = (
    ((prompt, early), (answered,), "Oslo", "answer"),
    ((prompt, early, read, late), (searched, answered), "Oslo", "answer"),
    ((prompt, early), (searched,), None, "turns"),
    ((prompt, early), (Turn("invalid", "hm"),), None, "length"),
  )
  return [
    Trajectory(QUESTION, k, segments, turns, answer, stop)
    for k, (segments, turns, answer, stop) in ((k, kinds[k % len(kinds)]) for k in range(count))
  ]


def _policy(token: int) -> Segment:
  return Segment((token,), "policy", (-1.0,))
