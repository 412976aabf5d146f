"""Fixtures of these tests."""

from tests.model_folder import grpo, model, ppo

__all__ = ["grpo", "model", "ppo"]
