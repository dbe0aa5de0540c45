"""The text of a sample, token by token, without a model.

Input: random prompts and completions of four kinds of tokenizers, with characters of several
tokens, invalid bytes, special tokens and ids beyond the vocabulary. Oracle: the text of prompt and
completion decoded at once, and DecodeStream of tokenizers, which vLLM uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rollmesh.request.text import Detokenizer, TextCodec

tokenizers = pytest.importorskip("tokenizers")

from tokenizers import decoders, models, normalizers, pre_tokenizers  # noqa: E402

WORDS = ["red", "is", "The", "def f(x):", "   ", "é", "漢字", "😀", "a\ufffdb", "\n", "x", " "]
MOST_DECODED = 80  # for each token: at most 64 of the prompt and 12 that are held back


def byte_level() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: i for i, word in enumerate([*alphabet, "Ġr", "Ġre"])}
    made = tokenizers.Tokenizer(models.BPE(vocab, [("Ġ", "r"), ("Ġr", "e")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|pad|>", "<|end|>"])
    return made


def llama(tokens: Sequence[str] = (), merges: Sequence[tuple[str, str]] = ()) -> Any:
    """Like Llama 2's: words begin with a space, bytes spell other characters, and the decoder
    strips one leading space. With more tokens and merges, if given."""
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁redisThx", "▁r", "▁▁"]
    names += tokens
    merges = [("▁", "r"), ("▁", "▁"), *merges]
    vocab = {name: i for i, name in enumerate(names)}
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    replace = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(replace)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["<unk>", "<s>"])
    return made


def unigram() -> Any:
    """Like sentencepiece's: the decoder of Metaspace drops the space of the first token."""
    pieces = ["<unk>", "</s>", "▁", "▁red", "▁is", "▁The", "s", "x", "é", "漢", "字", "😀", ":"]
    made = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens(["<unk>", "</s>"])
    return made


def words() -> Any:
    """A tokenizer without a decoder: tokens are joined by spaces."""
    vocab = {word: i for i, word in enumerate(["red", "is", "The", "x", "<s>"])}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="x"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>"])
    return made


KINDS = {kind.__name__: kind for kind in (byte_level, llama, unigram, words)}


def counted(tokenizer: Any) -> tuple[TextCodec, list[int]]:
    """Also lists the number of tokens of each decode."""
    counts: list[int] = []

    class Counting:
        def encode(self, text: str, add_special_tokens: bool = True) -> Any:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            counts.append(len(ids))
            return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    return TextCodec(Counting()), counts


def streamed(tokenizer: Any, prompt: list[int], tokens: list[int], skips: bool) -> list[str] | None:
    """Returns the text after each token by DecodeStream; None if it dropped text at invalid
    bytes."""
    stream, texts = decoders.DecodeStream(ids=prompt, skip_special_tokens=skips), [""]
    for token in tokens:
        try:
            texts.append(texts[-1] + (stream.step(tokenizer, token) or ""))
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
            return None
    return texts[1:]


def pushed(codec: TextCodec, prompt: list[int], tokens: list[int], **options: Any) -> list[str]:
    detokenizer, texts = Detokenizer(codec, prompt, **options), []
    for token in tokens:
        assert detokenizer.push(token) is None
        texts.append(detokenizer.text_so_far())
    assert detokenizer.num_tokens == len(tokens)
    return texts


def some_ids(rng: np.random.Generator, tokenizer: Any, most: int) -> list[int]:
    """Ids of a text, the beginning of its ids, any ids, or one id repeated."""
    text = "".join(rng.choice(WORDS, rng.integers(1, 9)))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    size, count = tokenizer.get_vocab_size() + 3, int(rng.integers(1, most))
    kind = rng.integers(4) if ids else 2
    if kind == 0:
        return list(ids)
    if kind == 1:
        return list(ids[: rng.integers(1, len(ids) + 1)])
    return rng.integers(0, size, count).tolist() if kind == 2 else [int(rng.integers(size))] * count


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_decode_stream(kind: str) -> None:
    """Compares after each token; the number of tokens that are decoded for each of them is
    bounded."""
    rng, tokenizer, num_compared = np.random.default_rng(0), KINDS[kind](), 0
    for _ in range(400):
        prompt = some_ids(rng, tokenizer, 12)
        tokens = some_ids(rng, tokenizer, 60) + some_ids(rng, tokenizer, 30)
        skips = bool(rng.integers(2))
        codec, counts = counted(tokenizer)
        texts = pushed(codec, prompt, tokens, skip_special_tokens=skips)
        assert all(b.startswith(a) for a, b in pairwise(texts))
        assert not texts[-1].endswith("\ufffd")
        assert sum(counts) <= MOST_DECODED * len(tokens) + 150, (prompt, tokens)
        wanted = streamed(tokenizer, prompt, tokens, skips)
        if wanted and not tokenizer.decode(prompt, skip_special_tokens=skips).endswith("\ufffd"):
            assert texts == wanted, (prompt, tokens)
            num_compared += 1
    assert num_compared > 150


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_text_are_what_is_decoded_at_once(kind: str) -> None:
    """Splits prompt and completion at each place, also after few and many special tokens."""
    rng, tokenizer = np.random.default_rng(1), KINDS[kind]()
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    for _ in range(300):
        text = "The" + "".join(rng.choice(WORDS, rng.integers(2, 9)))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) < 2:
            continue
        at = int(rng.integers(1, len(ids)))
        prompt = ids[:at] + [special[-1]] * int(rng.choice([0, 1, 8, 63, 64, 200]))
        head, whole = tokenizer.decode(prompt), tokenizer.decode(ids)
        if not head.endswith("\ufffd") and not whole.endswith("\ufffd"):
            texts = pushed(TextCodec(tokenizer), prompt, ids[at:])
            assert texts[-1] == whole[len(head) :], ids


@pytest.mark.parametrize("make", [byte_level, llama])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_prompt_that_ends_inside_a_character(make: Callable[[], Any], cut: int) -> None:
    """The completion's text begins with the character that it completes, or after it."""
    tokenizer = make()
    codec = TextCodec(tokenizer)
    ids = tokenizer.encode("is x😀", add_special_tokens=False).ids
    x = tokenizer.encode("x", add_special_tokens=False).ids[-1]
    prompt, rest = ids[:-cut], ids[-cut:]
    assert pushed(codec, prompt, [*rest, x])[cut - 1 :] == ["😀", "😀x"]
    assert pushed(codec, prompt, [x, x]) == ["x", "xx"]
    assert pushed(codec, rest, [x, x])[-1].lstrip("\ufffd") == "xx"


def test_bytes_that_spoil_a_character_before_them() -> None:
    """Byte fallback decodes a run of bytes as a whole: a wrong one also spoils the characters
    before it. The earlier text stays, and so do the wrong byte and the space after it."""
    tokenizer = llama()
    byte = {value: tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256)}
    tokens = [byte[value] for value in (*"é".encode(), 0xFF)] + [tokenizer.token_to_id("▁r")]
    prompt = [tokenizer.token_to_id("x")]
    assert pushed(TextCodec(tokenizer), prompt, tokens) == ["", "é", "é", "é\ufffd r"]
    assert streamed(tokenizer, prompt, tokens, True) is None


@pytest.mark.parametrize("make", KINDS.values())
@pytest.mark.parametrize("what", ["text", "special", "beyond", "undecodable", "half"])
def test_work_for_a_token_is_bounded(make: Callable[[], Any], what: str) -> None:
    """Counts with and without text, after 100 tokens and after 2000."""
    tokenizer = make()
    encoded = tokenizer.encode("😀", add_special_tokens=False).ids
    half = encoded[: max(1, len(encoded) // 2)]
    tokens = {
        "text": tokenizer.encode("xis", add_special_tokens=False).ids,
        "special": [i for i, one in tokenizer.get_added_tokens_decoder().items() if one.special],
        "beyond": [tokenizer.get_vocab_size() + 1],
        "undecodable": encoded[-1:],
        "half": half,
    }[what]
    totals = []
    for count in (100, 2000):
        codec, counts = counted(tokenizer)
        pushed(codec, [tokens[0]], (tokens * count)[:count], stops=["never"])
        totals.append(sum(counts) / count)
        assert max(counts) <= 64
    assert totals[1] < min(1.2 * totals[0], MOST_DECODED)


def test_the_stop_string_that_ends_first_counts() -> None:
    """The result is as if the characters came one by one; if two stop strings end together, the
    first of the list counts."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"abcd": 0, "x": 1}, unk_token="x"))
    tokenizer.decoder = decoders.Fuse()
    for stops, found, text in (
        (["abcd", "bc"], "bc", "xa"),
        (["bc", "abc"], "bc", "xa"),
        (["abc", "bc"], "abc", "x"),
        (["d", "xab"], "xab", ""),
    ):
        for keeps in (False, True):
            detokenizer = Detokenizer(TextCodec(tokenizer), [1], stops=stops, keeps_stop=keeps)
            assert [detokenizer.push(1), detokenizer.push(0)] == [None, found]
            assert detokenizer.text == detokenizer.text_so_far() == text + found * keeps


def test_no_partial_text_has_the_beginning_of_a_stop_string() -> None:
    """Later texts begin with the earlier ones. With keeps_stop the whole text is shown."""
    tokenizer = byte_level()
    codec, ids = TextCodec(tokenizer), tokenizer.encode("one two").ids
    shown = {False: ["", "", "", "o", "on"], True: ["o", "on", "one", "one ", "one t"]}
    for keeps, wanted in shown.items():
        detokenizer = Detokenizer(codec, [], stops=["two!", "w"], keeps_stop=keeps)
        texts = [(detokenizer.push(token), detokenizer.text_so_far()) for token in ids[:6]]
        assert texts == [*((None, text) for text in wanted), ("w", "one t" + "w" * keeps)]


def test_min_tokens_counts_tokens_without_text() -> None:
    tokenizer = byte_level()
    pad, x = tokenizer.token_to_id("<|pad|>"), tokenizer.encode("x").ids[0]
    detokenizer = Detokenizer(TextCodec(tokenizer), [x], stops=["x"], min_tokens=21)
    assert [detokenizer.push(token) for token in [pad] * 20 + [x, x]] == [None] * 21 + ["x"]
    assert (detokenizer.text, detokenizer.num_tokens) == ("x", 22)
