"""Reinforcement learning of LLM search agents in JAX: Stratified GRPO and its relatives."""

__version__ = "0.1.0"
