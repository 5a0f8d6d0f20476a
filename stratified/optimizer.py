"""The optimizer chain: clip by global norm, AdamW (or plain SGD), linear warm-up to a constant rate."""

import jax
import optax


def make(*, learning_rate: float, warmup_steps: int = 0, weight_decay: float = 0.0, clip_norm: float = 1.0,
         b1: float = 0.9, b2: float = 0.999, decay_steps: int = 0, name: str = "adamw") -> optax.GradientTransformation:
  """An optax chain. The rate rises linearly over `warmup_steps`, then stays, or falls along a cosine to a tenth
  over `decay_steps` where that is positive. Weight decay spares norms and biases (one-dimensional per layer)."""
  if learning_rate <= 0:
    raise ValueError(f"learning_rate={learning_rate} must be positive")
  if warmup_steps < 0 or decay_steps < 0:
    raise ValueError(f"warmup_steps={warmup_steps} and decay_steps={decay_steps} must not be negative")
  after = optax.cosine_decay_schedule(learning_rate, decay_steps, 0.1) if decay_steps else optax.constant_schedule(learning_rate)
  # The first update already moves: step i of the warm-up uses (i + 1) / warmup_steps of the rate.
  warmup = optax.linear_schedule(learning_rate / max(warmup_steps, 1), learning_rate, max(warmup_steps - 1, 1))
  schedule = optax.join_schedules([warmup, after], [warmup_steps]) if warmup_steps else after
  rules = {
      "adamw": lambda: optax.adamw(schedule, b1=b1, b2=b2, weight_decay=weight_decay, mask=decayed),
      "sgd": lambda: optax.sgd(schedule),
  }
  if name not in rules:
    raise ValueError(f"optimizer {name!r} is unknown; choose one of {sorted(rules)}")
  return optax.chain(optax.clip_by_global_norm(clip_norm), rules[name]())


def decayed(params):
  """Which weights decay: matrices do; norms and biases don't."""
  return jax.tree.map_with_path(lambda path, _: not any(s in str(path[-1]) for s in ("norm", "bias")), params)
