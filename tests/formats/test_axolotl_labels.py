"""Which tokens of a conversation are learnt, against axolotl's rules, followed by hand.

axolotl renders the whole conversation and labels of each assistant turn the tokens of its content, and the first
end-of-turn token within three tokens after it (axolotl-ai-cloud/axolotl 01f6a5c prompt_strategies/chat_template.py,
`roles_to_train: [assistant]` and `train_on_eos: turn`, its defaults).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon.formats import programs

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from gnomon.runtime.data.documents import Document  # noqa: E402
from gnomon.runtime.data.encode import Encoder  # noqa: E402

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|head|>' + m['role'] + '<|/head|>' + '\n\n' + m['content'] + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>' + '\n\n' }}{% endif %}"
)
SPECIALS = ("<s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>")
MESSAGES = (
    {"role": "system", "content": "be"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "on"},
    {"role": "assistant", "content": "so it"},
)
# Tokens in order, letters one by one; what axolotl labels is in brackets.
EXPECTED = {
    "chatml": (
        CHATML,
        "<|im_end|>",
        "<|im_start|> system ~ be <|im_end|> ~ <|im_start|> user ~ one <|im_end|> ~ "
        "<|im_start|> assistant ~ [two <|im_end|>] ~ <|im_start|> user ~ on <|im_end|> ~ "
        "<|im_start|> assistant ~ [so_it <|im_end|>] ~",
    ),
    "llama3": (
        LLAMA3,
        "<|eot|>",
        "<s> <|head|> system <|/head|> ~~ be <|eot|> <|head|> user <|/head|> ~~ one <|eot|> "
        "<|head|> assistant <|/head|> ~~ [two <|eot|>] <|head|> user <|/head|> ~~ on <|eot|> "
        "<|head|> assistant <|/head|> ~~ [so_it <|eot|>]",
    ),
}
LETTERS = {"~": "\n", "_": " "}


def by_hand(line: str, ids: dict[str, int]) -> tuple[list[int], list[bool]]:
    made, learnt, inside = list[int](), list[bool](), False
    for word in line.split(" "):
        inside |= word.startswith("[")
        bare = word.strip("[]")
        for token in [bare] if bare in ids else [LETTERS.get(letter, letter) for letter in bare]:
            made.append(ids[token])
            learnt.append(inside)
        inside &= not word.endswith("]")
    return made, learnt


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_learnt_of_a_conversation_is_what_axolotl_labels(name: str, tmp_path: Path) -> None:
    """But for the new line that ChatML writes after the end of a turn, which is said."""
    template, end, line = EXPECTED[name]
    letters = sorted({*"abcdefghijklmnopqrstuvwxyz \n"})
    ids = {token: number for number, token in enumerate((*SPECIALS, *letters))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
    made.add_special_tokens(list(SPECIALS))
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "bos_token": "<s>", "eos_token": end})
    )
    program = programs.find("axolotl")
    assert program.learnt is not None
    learnt = program.learnt({})
    encoder = Encoder.open(tmp_path, learn=learnt.learn)
    [encoded] = encoder.encode([Document(text=b"", messages=MESSAGES, where="here", ends=True)])
    expected, labelled = by_hand(line, ids)
    assert encoded.ids.tolist() == expected and encoded.learn is not None
    more = [at for at, (ours, theirs) in enumerate(zip(encoded.learn, labelled, strict=True)) if ours != theirs]
    lines = [at + 1 for at, id in enumerate(expected) if id == ids[end] and labelled[at] and name == "chatml"]
    assert more == lines and all(encoded.learn[at] and expected[at] == ids["\n"] for at in more)
    assert any("new line" in said for said in learnt.differences)


def test_other_labels_of_a_data_set_are_said() -> None:
    program = programs.find("axolotl")
    assert program.learnt is not None
    asked = {"path": "d", "roles_to_train": ["assistant", "user"], "train_on_eos": "last"}
    said = program.learnt({"datasets": [asked]}).differences
    assert [line.partition(" ")[0] for line in said[1:]] == ["roles_to_train", "train_on_eos"]
    usual = {"datasets": [{"roles_to_train": ["assistant"], "train_on_eos": "turn"}]}
    assert len(program.learnt(usual).differences) == 1
