"""Rewards of a finished rollout: exact match, token F1, format, those of papers, and their sums.

matching.py   compares answers
methods.py    the rewards of published methods, pure functions
sums.py       `make("exact_match + 0.1*format")`, what `reward.name` may say
steps.py      rewards of single searches
"""

from stratified.rewards.matching import exact_match, extract_answer, f1, normalize_answer
from stratified.rewards.sums import (
  LARGEST,
  make,
  NAMES,
  of,
  PARTS,
  parts_row,
  Reward,
  RewardSettings,
  Score,
  score,
  well_formed,
)
