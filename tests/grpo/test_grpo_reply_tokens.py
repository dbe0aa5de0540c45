"""The tokens between two turns, by the chat templates of several families.

Oracle: the text of the whole conversation, written by hand or rendered by the template at once.
Bound: 0, also in tokens if the template renders the policy's own text unchanged."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollmesh.request.reply_tokens import ANSWER, REPLY, reply_tokens
from rollmesh.request.text import rendered_chat

MARKERS = (
    *("user", "assistant", "observation", "im_start", "im_end"),
    *("eot_id", "eom_id", "return", "end", "message"),
)
END = "<|endoftext|>"
EACH = "{% for m in messages %}"
ROLE = "{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\n' + m.content }}"
CHATML = "<|im_start|>{{ m.role }}\n"
NEXT = "{% if add_generation_prompt %}"
OPEN = f"{NEXT}<|im_start|>assistant\n{{% endif %}}"
GLM = f"{EACH}{ROLE}{{% endfor %}}{NEXT}<|assistant|>\n{{% endif %}}"
QWEN = f"{EACH}{CHATML}{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}{OPEN}"
THINK = "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
CUT = "{{ m.content.split('</think>')[-1].strip() }}"
QWEN3 = f"{EACH}{CHATML}{THINK}{CUT}<|im_end|>\n{{% endfor %}}{OPEN}"
BOS = f"{END}{EACH}{CHATML}{{{{ m.content | trim }}}}<|eot_id|>{{% endfor %}}{OPEN}"
LAST = f"{EACH}{ROLE}\n{{% endfor %}}{NEXT}<|assistant|>\n{{% else %}}{END}{{% endif %}}"
HARMONY = (
    f"{EACH}<|im_start|>{{{{ m.role }}}}<|message|>{{{{ m.content }}}}"
    "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}"
    f"{{% endfor %}}{NEXT}<|im_start|>assistant<|message|>{{% endif %}}"
)
ROUNDS = (
    f"{EACH}{{% if m.role == 'user' %}}[Round {{{{ loop.index0 // 2 }}}}] {{{{ m.content }}}}\n"
    f"{{% else %}}A: {{{{ m.content }}}}\n\n{{% endif %}}{{% endfor %}}{NEXT}A: {{% endif %}}"
)
PLAIN = f"{EACH}{{{{ m.role }}}}: {{{{ m.content }}}}\n{{% endfor %}}{NEXT}assistant: {{% endif %}}"
USER, TOOL = [{"role": "user", "content": " go on "}], [{"role": "tool", "content": "1"}]


def byte_level(template: str) -> Any:
    """A tokenizer with a token for each byte and each marker."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END, *(f"<|{name}|>" for name in MARKERS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)
    tokenizer.chat_template = template
    return tokenizer


USER_IM = "\n<|im_start|>user\n go on <|im_end|>\n<|im_start|>assistant\n"
TOOL_IM = "\n<|im_start|>tool\n1<|im_end|>"
GLM_ENDS, LLAMA_ENDS = "user observation", "eot_id eom_id"
MARKER = [{"role": "user", "content": "<|observation|>"}]
CASES = {
    # template, end tokens of the model, end token of the turn, reply, what follows the turn's text
    "GLM-4, user": (GLM, GLM_ENDS, "user", USER, "<|user|>\n go on <|assistant|>\n"),
    "GLM-4, tool": (GLM, GLM_ENDS, "observation", TOOL, "<|observation|>\n1<|assistant|>\n"),
    "GLM-4, another reply": (
        GLM, GLM_ENDS, "observation", USER, "<|observation|><|user|>\n go on <|assistant|>\n",
    ),
    "GLM-4, the end of text": (GLM, "user", END, USER, f"{END}<|user|>\n go on <|assistant|>\n"),
    "GLM-4, a reply with a marker": (
        GLM, GLM_ENDS, "observation", MARKER,
        "<|observation|><|user|>\n<|observation|><|assistant|>\n",
    ),
    "Qwen": (QWEN, "im_end", "im_end", USER, f"<|im_end|>{USER_IM}"),
    "Qwen, the end of text": (QWEN, "im_end", END, USER, f"{END}{USER_IM}"),
    "Qwen3": (QWEN3, "im_end", "im_end", USER, f"<|im_end|>{USER_IM.replace(' go on ', 'go on')}"),
    "a beginning in each render, trimmed": (
        BOS, LLAMA_ENDS, "eot_id", USER,
        "<|eot_id|><|im_start|>user\ngo on<|eot_id|><|im_start|>assistant\n",
    ),
    "Llama 3.1, a tool": (
        BOS, LLAMA_ENDS, "eom_id", TOOL,
        "<|eom_id|><|im_start|>tool\n1<|eot_id|><|im_start|>assistant\n",
    ),
    "an end after the last message alone": (
        LAST, "", END, USER, f"{END}\n<|user|>\n go on \n<|assistant|>\n",
    ),
    "a last message that ends otherwise": (
        HARMONY, "return", "return", USER,
        "<|return|><|end|><|im_start|>user<|message|> go on <|end|>"
        "<|im_start|>assistant<|message|>",
    ),
    "numbered rounds": (ROUNDS, "", END, USER, f"{END}\n\n[Round 1]  go on \nA: "),
    "no end token": (PLAIN, "", END, USER, f"{END}\nuser:  go on \nassistant: "),
    "several messages": (
        QWEN, "im_end", "im_end", TOOL * 2,
        f"<|im_end|>{TOOL_IM * 2}\n<|im_start|>assistant\n",
    ),
    "an empty reply": (
        GLM, "user", "user", [{"role": "user", "content": ""}], "<|user|>\n<|assistant|>\n",
    ),
    "a text": (GLM, "user", "user", "<|user|> on", "<|user|><|user|> on"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_follows_the_text_of_a_turn(case: str) -> None:
    template, names, drawn, reply, text = CASES[case]
    tokenizer = byte_level(template)
    ends = tokenizer.convert_tokens_to_ids([END, *(f"<|{name}|>" for name in names.split())])
    [end] = tokenizer.convert_tokens_to_ids([drawn if drawn == END else f"<|{drawn}|>"])
    found = reply_tokens([{"role": "user", "content": "q"}], reply, end, tokenizer, ends)
    assert found == tokenizer.encode(text, add_special_tokens=False)[1:]


@pytest.mark.parametrize(
    "case", ["GLM-4, user", "Qwen", "a beginning in each render, trimmed", "numbered rounds"]
)
def test_three_turns_are_the_conversation_rendered_at_once(case: str) -> None:
    """The texts are equal except for an end token that the template does not render."""
    template, names, drawn, *_ = CASES[case]
    tokenizer = byte_level(template)
    ends = tokenizer.convert_tokens_to_ids([END, *(f"<|{name}|>" for name in names.split())])
    [end] = tokenizer.convert_tokens_to_ids([drawn if drawn == END else f"<|{drawn}|>"])
    chat: list[Any] = [{"role": "system", "content": "s"}] if case != "numbered rounds" else []
    chat += [{"role": "user", "content": f"{ANSWER} {REPLY}0"}]
    ids = tokenizer.encode(rendered_chat(tokenizer, chat, add_generation_prompt=True))
    for turn in ("one", f"{ANSWER}.", "three"):
        reply = [{"role": "user", "content": f"{turn}! {ANSWER}"}]
        ids += [*tokenizer.encode(turn), end, *reply_tokens(chat, reply, end, tokenizer, ends)]
        chat += [{"role": "assistant", "content": turn}, *reply]
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ids).replace(END, "") == whole.replace(END, "")


@pytest.mark.parametrize("scheme", ["first", "always", "never", "normalizer"])
@pytest.mark.parametrize("template", [LAST, BOS, GLM, PLAIN])
def test_pieces_of_sentencepiece_begin_as_in_the_whole(scheme: str, template: str) -> None:
    """The tokens equal those of the text with the end token before it: a reply's first piece gets
    the space of a beginning only if the tokenizer adds it after a special token too."""
    alphabet = ["▁", *map(chr, range(32, 127)), "\n"]
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    if scheme == "normalizer":
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.add_special_tokens([END, *(f"<|{name}|>" for name in MARKERS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)
    tokenizer.chat_template = template
    [end] = tokenizer.convert_tokens_to_ids(
        ["<|user|>" if template == GLM else "<|eot_id|>" if template == BOS else END]
    )
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    reply = [{"role": "user", "content": "go on"}]
    text = rendered_chat(tokenizer, [*chat, *reply], add_generation_prompt=True)
    token = tokenizer.convert_ids_to_tokens(end)
    behind = text.rpartition("a" + (token if template != LAST and template != PLAIN else "\n"))[2]
    behind = behind if template in (GLM, BOS) else "\n" + behind
    whole = tokenizer.encode("x" + token + behind, add_special_tokens=False)
    found = reply_tokens(chat[:1], reply, end, tokenizer, [end])
    assert found == whole[whole.index(end) + 1 :]
    assert (
        reply_tokens(chat[:1], "go on", end, tokenizer, [end])
        == tokenizer.encode(f"x{token}go on", add_special_tokens=False)[whole.index(end) + 1 :]
    )


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ messages[0].content }}", "renders the text of an answer 0 times"),
        (
            EACH + "{{ m.content }}{{ m.content }}{% endfor %}",
            "renders the text of an answer 2 times",
        ),
        (
            EACH + "{% if m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}",
            "leaves out a message of role user",
        ),
        (
            EACH
            + "{{ '<|im_end|>' if 'a' in m.content else '<|end|>' }}{{ m.content }}{% endfor %}",
            "according to the text of the next",
        ),
    ],
)
def test_a_template_that_does_not_show_where_a_turn_ends_is_refused(
    template: str, message: str
) -> None:
    tokenizer = byte_level(template)
    ends = tokenizer.convert_tokens_to_ids(["<|end|>", "<|im_end|>"])
    with pytest.raises(ValueError, match=message):
        reply_tokens(
            [{"role": "user", "content": "q"}],
            [{"role": "user", "content": "a"}],
            ends[0],
            tokenizer,
            ends,
        )
