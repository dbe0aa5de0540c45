"""Makes everything in this folder: the character tokenizer and the JSONL prompts of the example
tasks.

    python data/make_data.py [FOLDER]

The same bytes come out each time (a fixed seed; a test compares). Every prompt appears once, and no
held-out prompt is a training prompt. The tasks, each with a checkable `answer`:

    upper   "qzab="    → "QZAB"      four random letters in upper case
    sort    "sort 4172=" → "1247"    digits in ascending order; stages of 2, 3, 4, 5 digits, held
            out: 5 digits
"""

from __future__ import annotations

import json
import random
import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|pad|>", "<|eos|>", "<|unk|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if "
    "add_generation_prompt %}<|assistant|>{% endif %}"
)
SEED = 1


def make_tokenizer(folder: Path) -> None:
    """One token a printable ASCII character or line feed, and five special ones."""
    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "eos_token": "<|eos|>",
        "unk_token": "<|unk|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=1) + "\n", encoding="utf-8"
    )


def upper(rng: random.Random) -> tuple[str, str]:
    letters = "".join(rng.choices(string.ascii_lowercase, k=4))
    return f"{letters}=", letters.upper()


def sort(digits: int) -> Callable[[random.Random], tuple[str, str]]:
    def task(rng: random.Random) -> tuple[str, str]:
        text = "".join(rng.choices(string.digits, k=digits))
        return f"{text}=", "".join(sorted(text))

    return task


def distinct(
    task: Callable[[random.Random], tuple[str, str]], rng: random.Random, seen: set[str]
) -> Iterator[dict[str, str]]:
    while True:
        prompt, answer = task(rng)
        if prompt not in seen:
            seen.add(prompt)
            yield {"prompt": prompt, "answer": answer}


def write(path: Path, rows: Iterator[dict[str, str]], count: int) -> None:
    path.write_text("".join(json.dumps(next(rows)) + "\n" for _ in range(count)), encoding="utf-8")


def main(folder: Path) -> None:
    make_tokenizer(folder / "chars")
    rows = distinct(upper, random.Random(SEED), set())
    write(folder / "upper_heldout.jsonl", rows, 256)
    write(folder / "upper_train.jsonl", rows, 4096)
    rows = distinct(sort(5), random.Random(SEED), set())
    write(folder / "sort_heldout.jsonl", rows, 256)
    write(folder / "sort5_train.jsonl", rows, 8192)
    for digits, count in ((2, 100), (3, 800), (4, 4096)):
        write(
            folder / f"sort{digits}_train.jsonl",
            distinct(sort(digits), random.Random(SEED), set()),
            count,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
