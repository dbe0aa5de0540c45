"""Small tokenizers of the kinds that models have, and a model that says text in each of them.

The tokenizers are trained here. Their corpus has runs of spaces, characters of one to four bytes
and combining marks. Each has special tokens, an added token that is not special, and the bytes of
rare characters as tokens.

The model is a Markov chain over tokens: its hidden state is the last token, and its head holds the
logarithms of the frequencies with which tokens follow it in the corpus. Now and then it draws a
special or an added token, an id without a token, or any id, which cuts characters.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import rollmesh as rm

CORPUS = (
    "The sky is red and the sea is blue. Hello, world!  Two  spaces   three    four.",
    "def f(x):\n    if x > 10:\n        return [x, 'a']\n\treturn None\n\n\n",
    " I don't know ; they're here . Isn't it ? Yes , it 's . ",
    "日本語のテキスト。你好世界！ 한국어 café naïve Ångström Ωμέγα",
    "😀 👍🏽 👨‍👩‍👧 fin 😀😀 👍🏽 e\u0301 a\u0308 n\u0303\u0323 q\u0307 \u200b\u00a0x",
    "1234567890 + - * / = <tags> </tags> <think>red</think>\r\n the the the red is",
)
MAX_MODEL_LEN = 256
PADDING = 5  # ids of the model beyond the tokenizer's
ADDED = "<think>"
UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"


def _fast(tokenizer: Any, **special: Any) -> Any:
    """The transformers tokenizer of a tokenizers.Tokenizer."""
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=True, **special
    )
    made.add_tokens([ADDED])
    return made


def byte_level(at: Path) -> Any:
    """Like GPT-2's, Llama 3's and Qwen's: every byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(CORPUS[:4] * 4, trainer)
    begin, end, *more = special
    return _fast(made, bos_token=begin, eos_token=end, additional_special_tokens=more)


def metaspace(at: Path) -> Any:
    """Like Llama 2's tokenizer.json: a text gets a space before it, which the decoder removes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    made = Tokenizer(models.BPE(unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    special = [UNKNOWN, BEGIN, END]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [word for line in CORPUS[:3] for word in line.replace(" ", " ▁").split(" ")]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=tokens)
    made.train_from_iterator(words * 4, trainer)
    state = json.loads(made.to_str()) | {"added_tokens": []}  # bytes are not added tokens
    made = Tokenizer.from_str(json.dumps(state))
    spaces, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip])
    made.add_special_tokens(special)
    made.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, 1)]
    )
    return _fast(made, bos_token=BEGIN, eos_token=END, unk_token=UNKNOWN)


def _trained(at: Path, kind: str) -> Path:
    """A folder with a tokenizer.model of sentencepiece."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.splitlines()] * 4),
        model_writer=model,
        model_type=kind,
        vocab_size=400,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<|tool|>"],
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        minloglevel=2,
    )
    folder = at / kind
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder


def sentencepiece(at: Path) -> Any:
    """A tokenizer.model without a tokenizer.json, which transformers converts."""
    from transformers import AutoTokenizer

    folder = _trained(at, "bpe")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    made = AutoTokenizer.from_pretrained(str(folder))
    made.add_tokens([ADDED])
    return made


def unigram(at: Path) -> Any:
    """Like T5's and XLM-R's: pieces with scores, and Metaspace as the decoder."""
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = SentencePieceProcessor(model_file=str(_trained(at, "unigram") / "tokenizer.model"))
    ids = range(pieces.get_piece_size())
    scores = [(pieces.id_to_piece(i), pieces.get_score(i)) for i in ids]
    made = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _fast(made, bos_token=BEGIN, eos_token=END, unk_token=UNKNOWN)


def slow(at: Path) -> Any:
    """A tokenizer of transformers in Python, which calls sentencepiece."""
    from transformers import GPTSw3Tokenizer

    special = {"bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN, "pad_token": UNKNOWN}
    made = GPTSw3Tokenizer(str(_trained(at, "bpe") / "tokenizer.model"), **special)
    made.add_tokens([ADDED])
    return made


KINDS: dict[str, Callable[[Path], Any]] = {
    "byte_level": byte_level,
    "metaspace": metaspace,
    "sentencepiece": sentencepiece,
    "unigram": unigram,
    "slow": slow,
}


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _chances(tokenizer: Any, size: int) -> np.ndarray[Any, Any]:
    """[size, size]: the probability of a token (column) after another (row)."""
    rare = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    rare.update(range(len(tokenizer), size))
    share = 0.08 if tokenizer.is_fast else 0.02  # vLLM differs beside them where it is slow
    follows = np.zeros((size, size))
    for text in CORPUS:
        ids = ids_of(tokenizer, text)
        for before, after in zip(ids, [*ids[1:], ids[0]]):
            follows[before, after] += 1
    follows[follows.sum(1) == 0] = follows.sum(0)
    chances = (0.96 - share) * follows / follows.sum(1, keepdims=True) + 0.04 / size
    chances[:, sorted(rare)] += share / len(rare)
    return chances


def speaker(tokenizer: Any, given: Any) -> rm.Generator:
    """Returns a generator that generates text like the corpus. given: its tokenizer, in any
    form."""
    size = len(tokenizer) + PADDING
    hidden = -(-size // 16) * 16
    config = {
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": hidden,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_MODEL_LEN,
        "eos_token_id": None,
    }
    spec = rm.ModelSpec.from_hf(config)
    weights = {
        p.name: np.full(p.shape, float("norm" in p.name), np.float32) for p in spec.parameters()
    }
    weights["model.embed_tokens.weight"][np.arange(size), np.arange(size)] = 1
    scale = np.sqrt(hidden)  # the norm turns a single 1 into this
    weights["lm_head.weight"][:, :size] = np.log(_chances(tokenizer, size).T) / scale
    made = rm.Generator(
        spec,
        dtype="float32",
        kv_cache_gib=0.05,
        threads=1,
        max_model_len=MAX_MODEL_LEN,
        tokenizer=given,
        eos_token_ids=tokenizer.eos_token_id,
    )
    made.sync_weights(weights)
    return made
