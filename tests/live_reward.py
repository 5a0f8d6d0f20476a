"""A reward that an untrained policy's rollouts differ in: runs of a few steps learn from it."""


def varied(trajectory) -> float:
  """0, 1/3, 2/3 or 1 by the policy's own tokens."""
  own = (s for s in trajectory.segments if s.origin == "policy")
  return sum(token for segment in own for token in segment.token_ids) % 4 / 3


def half(trajectory):
  """`varied` for every other question, 0 for the rest."""
  return varied(trajectory) * (sum(trajectory.question.text.encode()) % 2)
