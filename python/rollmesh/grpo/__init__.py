"""GRPO on rollmesh: prompts, rewards, advantages, loss, trainer, loop. Read loop.py first; it
states the protocol of a step.

Needs the `train` extra (torch, transformers, safetensors, rich, matplotlib, tensorboard); modules
import them where they are used.
"""
