"""vLLM's settings for texts: None, special tokens, the stop string in the text, chats.

Oracle: the token ids, which do not depend on these settings, decoded by the tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import SMALL, numpy_state_dict, tiny_config
from paths import ROOT

import rollmesh as rm

pytest.importorskip("transformers")

from rollmesh.request.text import Detokenizer, TextCodec
from rollmesh.run.data import load_tokenizer, make_prompt

CHARS = ROOT / "data/chars"
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12}


@pytest.fixture(scope="module")
def gen() -> Iterator[rm.Generator]:
    tokenizer = load_tokenizer(CHARS)
    config = tiny_config(vocab_size=len(tokenizer))
    with rm.Generator(
        rm.ModelSpec.from_hf(config), tokenizer=tokenizer, dtype="float32", **SMALL
    ) as made:
        made.sync_weights(numpy_state_dict(config, 0, "float32", False))
        yield made


def one(gen: rm.Generator, **params: Any) -> rm.CompletionOutput:
    return gen.generate("abc=", rm.SamplingParams(**{**GREEDY, **params}), use_tqdm=False)[
        0
    ].outputs[0]


def test_none_is_vllms_default(gen: rm.Generator) -> None:
    plain, none = one(gen), one(gen, stop=None, stop_token_ids=None)
    assert none.token_ids.tolist() == plain.token_ids.tolist()
    assert none.finish_reason == "length"
    for params in (rm.SamplingParams(stop=None), rm.SamplingParams(stop_token_ids=None)):
        assert (params.stop, params.stop_token_ids) == ((), ())
    whole = one(gen, max_tokens=None)
    assert len(whole.token_ids) == gen.max_model_len - len(gen.tokenizer.encode("abc="))
    assert whole.token_ids[:12].tolist() == plain.token_ids.tolist()
    with pytest.raises(rm.RequestError, match="max_tokens: expected an integer in"):
        rm.SamplingParams(max_tokens=0)


def test_the_text_ends_with_the_stop_where_that_is_asked_for(gen: rm.Generator) -> None:
    """Stops at a string, and at a token."""
    text = one(gen).text
    stop = text[4:6]
    at = text.index(stop)
    cut, kept = one(gen, stop=stop), one(gen, stop=stop, include_stop_str_in_output=True)
    assert (cut.text, kept.text) == (text[:at], text[: at + 2])
    assert cut.token_ids.tolist() == kept.token_ids.tolist()
    token = int(one(gen).token_ids[5])
    cut, kept = (
        one(gen, stop_token_ids=[token], include_stop_str_in_output=keeps)
        for keeps in (False, True)
    )
    assert cut.token_ids.tolist() == kept.token_ids.tolist()
    assert kept.text == cut.text + gen.tokenizer.decode([token])
    with pytest.raises(rm.RequestError, match="include_stop_str_in_output: expected a bool, got 1"):
        rm.SamplingParams(include_stop_str_in_output=1)  # type: ignore[arg-type]


def test_special_tokens_stay_where_that_is_asked_for(gen: rm.Generator) -> None:
    """A token of the text becomes special; also with stop strings."""
    plain = one(gen)
    special = gen.tokenizer.convert_ids_to_tokens(int(plain.token_ids[2]))
    gen.tokenizer.add_special_tokens({"additional_special_tokens": [special]})
    without, whole = one(gen), one(gen, skip_special_tokens=False)
    assert without.text == plain.text.replace(gen.tokenizer.decode([int(plain.token_ids[2])]), "")
    assert whole.text == gen.tokenizer.decode(plain.token_ids, skip_special_tokens=False)
    assert len(whole.text) > len(without.text)
    assert one(gen, stop=["never"], skip_special_tokens=False).text == whole.text


def test_spaces_before_punctuation_stay() -> None:
    """transformers may remove these spaces from generated text."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate(["x", " .", " do", " n't"])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="x"))
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=True)
    assert tokenizer.decode([0, 1, 2, 3]) == "x. don't"
    detokenizer = Detokenizer(TextCodec(tokenizer), [0])
    texts = [(detokenizer.push(token), detokenizer.text)[1] for token in (1, 2, 3)]
    assert texts == [" .", " . do", " . do n't"]


def test_a_tokenizer_in_python() -> None:
    """Ids beyond its vocabulary, which models use as padding, have no text."""
    from transformers import PreTrainedTokenizer

    class Letters(PreTrainedTokenizer):
        def __init__(self) -> None:
            self._letters = [*"abc ."]
            super().__init__(clean_up_tokenization_spaces=True)

        @property
        def vocab_size(self) -> int:
            return len(self._letters)

        def get_vocab(self) -> dict[str, int]:
            return {letter: i for i, letter in enumerate(self._letters)}

        def _tokenize(self, text: str) -> list[str]:
            return [*text]

        def _convert_token_to_id(self, token: str) -> int:
            return self._letters.index(token)

        def _convert_id_to_token(self, index: int) -> str:
            return self._letters[index]

        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            return "".join(tokens)

    detokenizer = Detokenizer(TextCodec(Letters()), [0])
    assert [detokenizer.push(token) for token in (1, 99, 3, 4)] == [None] * 4
    assert detokenizer.text == "b ."


@pytest.mark.parametrize(
    "message, words",
    [
        ({"content": "x"}, "expected messages of {role, content}, got {'content': 'x'}"),
        ("x", "expected messages of {role, content}, got 'x'"),
        (
            {"role": "user", "content": None},
            "expected the content of a message of role user to be text, got None",
        ),
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, "to be text, got [{"),
    ],
)
def test_a_message_of_other_fields_is_refused(gen: rm.Generator, message: Any, words: str) -> None:
    with pytest.raises(rm.RequestError, match=re.escape(words)):
        gen.chat([[{"role": "user", "content": "ab"}, message]], use_tqdm=False)


def test_a_chat_is_its_template(gen: rm.Generator) -> None:
    """One chat or several, with arguments for the template."""
    chats = [[{"role": "user", "content": text}] for text in ("ab", "cd")]
    params = rm.SamplingParams(**GREEDY)
    ids = [
        list(make_prompt({"messages": chat}, gen.tokenizer, True, 0, "here").ids) for chat in chats
    ]
    wanted = [o.outputs[0].token_ids.tolist() for o in gen.generate(ids, params, use_tqdm=False)]
    for given, expected in ((chats, wanted), (chats[0], wanted[:1])):
        assert [
            o.outputs[0].token_ids.tolist() for o in gen.chat(given, params, use_tqdm=False)
        ] == expected
    own = gen.chat(chats[0], params, use_tqdm=False, chat_template="{{ messages[0]['content'] }}=")
    assert own[0].prompt_token_ids.tolist() == gen.tokenizer.encode("ab=", add_special_tokens=False)
    own = gen.chat(
        chats[0],
        params,
        use_tqdm=False,
        chat_template="{{ word }}=",
        chat_template_kwargs={"word": "ef"},
    )
    assert own[0].prompt_token_ids.tolist() == gen.tokenizer.encode("ef=", add_special_tokens=False)
    with pytest.raises(rm.RequestError, match=r"^prompt 0: chat: expected messages that the "):
        gen.chat(chats[0], params, chat_template="{{ raise_exception('no') }}")
    some = [chats[0], "x", [{"role": "user", "content": "a\ud800"}], chats[1]]
    outputs = gen.chat(some, params, use_tqdm=False, on_error="return")
    assert [o.outputs[0].token_ids.tolist() for o in outputs if o.error is None] == wanted
    assert [str(o.error) for o in outputs if o.error is not None] == [
        "prompt 1: chat: expected messages of {role, content}, got 'x'",
        "prompt 2: chat: expected text without half of a surrogate pair, "
        "got '<|user|>a\\ud800<|assistant|>'",
    ]
    with pytest.raises(TypeError, match="sampling_params"):
        gen.chat(chats[0], sampling_params=params)  # type: ignore[call-arg]
    with (
        rm.Generator(gen.spec, dtype="float32", **SMALL) as plain,
        pytest.raises(rm.RequestError, match="without a tokenizer"),
    ):
        plain.chat(chats[0])
