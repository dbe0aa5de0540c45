"""A task of one turn for TitanRL: answer with lower-case letters. The reward is the share of the
answer's tokens that are lower-case letters."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torchtitan.config import Configurable
from torchtitan.experiments.rl.environment import MessageEnv
from torchtitan.experiments.rl.environment.message import MessageEnvInitOutput, MessageEnvStepOutput
from torchtitan.experiments.rl.rollout.rollouter import Rollouter
from torchtitan.experiments.rl.rubrics import RewardFn, Rubric
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# The tokens that the qwen3 renderer needs.
OTHER = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


def byte_tokenizer(folder: Path) -> None:
    """A tokenizer with a token for each byte and Qwen3's markers, 265 tokens."""
    letters = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in OTHER])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)


class Letters(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        seed: int = 1

    def __init__(self, config: Config):
        self._random = random.Random(config.seed)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return self._random.choice("ab")


class LetterEnv(MessageEnv):
    @dataclass(kw_only=True, slots=True)
    class Config(MessageEnv.Config):
        pass

    def __init__(self, config: Config, *, env_input: str):
        self._letter = env_input

    async def init(self) -> MessageEnvInitOutput:
        return MessageEnvInitOutput(
            init_prompt_messages=[{"role": "user", "content": self._letter}]
        )

    async def step(self, completion_message: Any) -> MessageEnvStepOutput:
        return MessageEnvStepOutput(done=True)


class IsLetter(RewardFn):
    @dataclass(kw_only=True, slots=True)
    class Config(RewardFn.Config):
        pass

    async def __call__(self, rollout: Any, env_input: str) -> float:
        tokens = [token for turn in rollout.turns for token in turn.completion_token_ids]
        return sum(ord("a") <= token <= ord("z") for token in tokens) / max(len(tokens), 1)


class LetterRollouter(Rollouter):
    @dataclass(kw_only=True, slots=True)
    class Config(Rollouter.Config):
        train_dataset: Letters.Config = field(default_factory=lambda: Letters.Config(seed=1))
        validation_dataset: Letters.Config = field(default_factory=lambda: Letters.Config(seed=2))
        rubric: Rubric.Config = field(
            default_factory=lambda: Rubric.Config(reward_fns=[IsLetter.Config()])
        )
        message_env: LetterEnv.Config = field(default_factory=LetterEnv.Config)
