"""Reinforcement learning of LLM search agents in JAX: Stratified GRPO and its relatives."""
