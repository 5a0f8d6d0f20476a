"""Computes what losses read of a micro-batch, by token: log-probs, values, divergences."""

from typing import Any

import jax
import jax.numpy as jnp

from stratified import sharding
from stratified.algorithms.base import Outputs
from stratified.policy import decoder, divergence, heads, log_probs, lora


def forward(
  model, adapter, critic, temperature, chunk, learns_entropy, trained, reference, micro, *,
  reference_logp=None,
):  # fmt: skip
  """The Outputs on a micro-batch; `reference_logp` where it is known already."""

  def log_probs_of(params):
    x = decoder.hidden(model, params, micro.token_art, micro.position_art, micro.segment_art)
    return x, *log_probs.token_log_probs(
      model, params, x, micro.token_art, temperature=temperature, chunk=chunk,
      entropy_gradient=learns_entropy,
    )  # fmt: skip

  params = trained["policy"] if critic else trained
  params = lora.join(adapter, reference, params) if adapter else params
  x, logp, entropy = log_probs_of(params)
  extra = _heads(model, critic, trained["critic"], x, micro) if critic else {}
  if reference_logp is None and reference is not None:
    reference_logp = jax.lax.stop_gradient(log_probs_of(reference)[1])
  return Outputs(logp, entropy, reference_logp, extra)


def _heads(model, critic, weights, x_policy, micro) -> dict[str, Any]:
  """The outputs of the critic's heads at each token, read off what stands before it."""
  x = x_policy
  if critic.body == "own":
    x = decoder.hidden(model, weights, micro.token_art, micro.position_art, micro.segment_art)
  return {name: _of_next(heads.outputs(weights, name, x)) for name in critic.heads}


def compare(model, adapter, teacher, chunk, params, reference, micro, *, reference_logp=None):
  """Outputs with the divergence between the teacher's and the policy's next tokens alone.

  The teacher reads rows of its own; its hidden states are brought to where the policy's token
  stands, so that both lie before the same next token. Logits are linear in hidden states, so a
  contrast of logits is one of hidden states.
  """
  own = lora.join(adapter, reference, params) if adapter else params
  theirs = jax.lax.stop_gradient(own if teacher.weights == "current" else reference)
  alone = micro.token_art, micro.position_art, micro.segment_art

  def read(kind):
    names = ("token", "position", "segment")
    x = decoder.hidden(model, theirs, *(micro.teacher_art[kind + name] for name in names))
    before = jnp.maximum(log_probs.shifted(micro.teacher_art[kind + "at"], -1) - 1, 0)
    return sharding.take_in_rows(x, before)

  x_teacher = read("")
  if teacher.contrast:
    x_teacher += teacher.contrast * (decoder.hidden(model, theirs, *alone) - read("other_"))
  x = decoder.hidden(model, own, *alone)
  between = divergence.token_divergence(
    model, own, theirs, x, x_teacher, settings=teacher.settings, chunk=chunk
  )
  return Outputs(None, None, None, {}, between)


def _of_next(head_rtn):
  """A head's outputs [R, T, N] at the token that follows, [R, T] where N is 1."""
  shifted = jax.vmap(lambda x_rt: log_probs.shifted(x_rt, 1), in_axes=-1, out_axes=-1)
  return log_probs.shifted(head_rtn[..., 0], 1) if head_rtn.shape[-1] == 1 else shifted(head_rtn)
