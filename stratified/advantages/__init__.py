"""Advantage estimators: group, batch and token kernels, and `make`, which builds one by name."""

from stratified.advantages.batch import gdpo, gn_batch, reinforce_batch
from stratified.advantages.estimators import AdvantageSettings, estimator, make
from stratified.advantages.group import (
  blend,
  centered,
  dr_grpo,
  gn,
  loo,
  match_rms,
  opo,
  reinforce,
  san,
  san_rms,
  shrunk,
  stratified,
  stratified_loo,
  two_term,
)
from stratified.advantages.tokens import gae, gigpo, turn_gae, whiten
