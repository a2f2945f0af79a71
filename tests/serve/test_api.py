"""What a body may say: each field of OpenAI and of vLLM acts, or is refused by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the room of the engine needs it")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from serve.served import write_words  # noqa: E402

from gnomon.errors import InputError  # noqa: E402
from gnomon.runtime.data.encode import Encoder  # noqa: E402
from gnomon.serve.api import Answers, CompletionRequest, ServedModel, chat, completion  # noqa: E402
from gnomon.serve.messages import Delta, Token  # noqa: E402
from gnomon.serve.text import TextStream  # noqa: E402
from gnomon.serve.vocabulary import Vocabulary  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if enable_thinking %}T{% endif %}"
    "{{ reasoning_effort or '' }}{% if add_generation_prompt %}<assistant>{% endif %}"
)
BOTH: dict[str, tuple[Any, Any]] = {
    "frequency_penalty": (0.5, "x"), "logit_bias": ({"5": 1}, {"x": 1}), "max_tokens": (7, 0), "n": (2, 0),
    "presence_penalty": (0.5, "x"), "seed": (3, "x"), "stop": (["a"], [""]), "stream": (True, 1),
    "temperature": (0.5, -1), "top_p": (0.5, 0), "top_k": (5, -2), "min_p": (0.1, 2), "repetition_penalty": (1.1, 0),
    "stop_token_ids": ([5], [9999]), "include_stop_str_in_output": (True, 1), "ignore_eos": (True, 1),
    "min_tokens": (2, -1), "skip_special_tokens": (False, 1), "truncate_prompt_tokens": (1, -2),
    "allowed_token_ids": ([5, 6], [9999]), "bad_words": (["x"], [1]), "add_special_tokens": (True, 1),
    "response_format": ({"type": "json_object"}, {"type": "x"}),
    "structured_outputs": ({"regex": "a"}, {"grammar": "x"}),
    "guided_json": ({"type": "object"}, 7), "guided_regex": ("a", 7), "guided_choice": (["a", "b"], [1]),
    "cache_salt": ("s", ""), "request_id": ("r", ""), "return_token_ids": (True, 1),
    "return_tokens_as_token_ids": (True, 1), "user": ("u", None), "use_beam_search": (False, True),
    "length_penalty": (1.0, 0.5), "spaces_between_special_tokens": (True, False), "priority": (0, 1),
    "watermarking": (False, True), "prompt_logprobs": (3, 99), "logprob_token_ids": (None, [5]),
    "session_id": (None, "s"), "kv_transfer_params": (None, {}), "ec_transfer_params": (None, {}),
    "vllm_xargs": (None, {"a": 1}), "repetition_detection": (None, {}), "thinking_token_budget": (None, 5),
    "stream_interval": (None, 2), "logits_processors": (None, ["os.system"]),
}  # fmt: skip
"""Field -> (a value that acts, or is the usual one; one that is refused)."""
COMPLETIONS: dict[str, tuple[Any, Any]] = {
    **BOTH, "echo": (True, 1), "logprobs": (2, 99), "best_of": (3, 0), "suffix": ("", "x"),
    "prompt_embeds": (None, "x"),
}  # fmt: skip
CHATS: dict[str, tuple[Any, Any]] = {
    **BOTH, "logprobs": (True, 1), "max_completion_tokens": (7, 0), "parallel_tool_calls": (False, 1),
    "tools": ([{"type": "function", "function": {"name": "f"}}], [1]), "tool_choice": ("none", "x"),
    "reasoning_effort": ("low", None), "chat_template_kwargs": ({"enable_thinking": True}, {"unread": 1}),
    "add_generation_prompt": (False, 1), "documents": (None, [{"text": "x"}]), "chat_template": (None, "{{ 1 }}"),
    "continue_final_message": (False, True), "echo": (None, True), "include_reasoning": (True, False),
    "media_io_kwargs": (None, {}), "mm_processor_kwargs": (None, {}), "audio": (None, {}), "functions": ([], [{}]),
    "function_call": (None, "auto"), "modalities": (["text"], ["audio"]), "prediction": (None, {}),
    "verbosity": (None, "low"), "web_search_options": (None, {}), "metadata": ({}, None), "store": (False, None),
}  # fmt: skip
SAME = frozenset(
    "user metadata store suffix use_beam_search length_penalty spaces_between_special_tokens priority watermarking "
    "include_reasoning functions modalities continue_final_message add_special_tokens "
    "tool_choice".split()
)
"""Fields whose first value says what is so without it: of the last two, for this tokenizer and without tools."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tmp_path_factory.mktemp("words")
    write_words(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return ServedModel(names=("m",), words=Vocabulary.open(folder, None), max_model_len=64, vocab_size=259)


def asked(served: ServedModel, chats: bool, **more: Any) -> CompletionRequest:
    if chats:
        return chat({"messages": [{"role": "user", "content": "ab"}], **more}, served)
    return completion({"prompt": "abc", **more}, served)


@pytest.mark.parametrize(("chats", "fields"), [(False, COMPLETIONS), (True, CHATS)], ids=["completions", "chat"])
def test_each_field_acts_or_is_refused_by_its_name(served: ServedModel, chats: bool, fields: dict[str, Any]) -> None:
    plain = asked(served, chats)
    for name, (good, bad) in fields.items():
        if good is not None:
            made = asked(served, chats, **{name: good})
            assert (made == plain) == (name in SAME), name
        if bad is not None:
            with pytest.raises(InputError) as refused:
                asked(served, chats, **{name: bad})
            assert name in str(refused.value) or "unread" in str(refused.value), (name, str(refused.value))


def test_structures_are_written_as_grammars(served: ServedModel) -> None:
    for body, wanted in (
        ({"guided_json": {"type": "object"}}, 'schema:{"type": "object"}'),
        ({"structured_outputs": {"json": '{"type": "object"}'}}, 'schema:{"type": "object"}'),
        ({"structured_outputs": {"choice": ["a", "b"]}}, 'choice:["a", "b"]'),
        ({"structured_outputs": {"json_object": True}}, "json"),
    ):
        assert asked(served, False, **body).grammar == wanted
    with pytest.raises(InputError, match="guided_regex and response_format both say"):
        asked(served, False, guided_regex="a", response_format={"type": "json_object"})
    with pytest.raises(InputError, match="allowed_token_ids beside a grammar"):
        asked(served, False, guided_regex="a", allowed_token_ids=[5])


def test_prompts_are_cut_where_it_is_asked_for(served: ServedModel) -> None:
    ids = served.words.prompt("abcdef")
    for more, wanted in (({"truncate_prompt_tokens": 2}, ids[-2:]), ({"truncate_prompt_tokens": 99}, ids)):
        [prompt] = asked(served, False, prompt="abcdef", **more).prompts
        assert list(prompt) == wanted
    [prompt] = asked(served, False, prompt="abcdef", truncate_prompt_tokens=2, truncation_side="right").prompts
    assert list(prompt) == ids[:2]
    [prompt] = asked(served, False, prompt="x" * 80, truncate_prompt_tokens=-1, max_tokens=10).prompts
    assert len(prompt) == 54


def test_a_template_reads_its_variables_and_no_others(served: ServedModel) -> None:
    def text(**more: Any) -> str:
        return served.words.decode(asked(served, True, **more).prompts[0], specials=True)

    assert text() == "<user>ab<assistant>"
    assert text(chat_template_kwargs={"enable_thinking": True}, reasoning_effort="low") == "<user>abTlow<assistant>"
    assert text(add_generation_prompt=False) == "<user>ab"
    with pytest.raises(InputError, match="reads no 'messages'"):
        text(chat_template_kwargs={"messages": []})


def told(index: int, ids: list[int], logprob: float) -> Delta:
    return Delta(1, index, "".join(map(chr, ids)), tuple(Token(i, chr(i), logprob, ()) for i in ids), "length")


def test_the_best_answers_are_told_the_best_first(served: ServedModel) -> None:
    answers = Answers(asked(served, False, n=2, best_of=3, return_token_ids=True), served.words)
    for index, logprob in enumerate((-2.0, -0.5, -1.0)):
        answers.add(index, told(index, [65 + index] * (index + 1), logprob))
    choices = answers.whole()["choices"]
    assert [(one["index"], one["text"], one["logprobs"]) for one in choices] == [(0, "BB", None), (1, "CCC", None)]
    assert choices[0]["token_ids"] == [66, 66] and answers.whole()["usage"]["completion_tokens"] == 6
    with pytest.raises(InputError, match="best_of"):
        asked(served, False, best_of=3, stream=True)


def test_bytes_of_tokens_that_are_parts_of_a_letter_make_the_letter(served: ServedModel) -> None:
    """OpenAI's field is for joining them; the text of such a token by itself is the sign for broken bytes."""
    ids = served.words.encoder.ids("aé€", specials=False)
    texts = [served.words.decode([i]) for i in ids]
    assert len(ids) == 6 and "\ufffd" in texts
    answers = Answers(asked(served, True, logprobs=True, top_logprobs=2), served.words)
    top = tuple((i, text, -1.0) for i, text in zip(ids[1:3], texts[1:3], strict=True))
    tokens = tuple(Token(i, text, -1.0, top) for i, text in zip(ids, texts, strict=True))
    answers.add(0, Delta(1, 0, "aé€", tokens, "length"))
    content = answers.whole()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == "aé€"
    assert bytes(byte for one in content[0]["top_logprobs"] for byte in one["bytes"]).decode() == "é"


def test_of_likeliest_tokens_with_one_text_the_likelier_is_told(served: ServedModel) -> None:
    answers = Answers(asked(served, False, logprobs=3), served.words)
    top = ((200, "\ufffd", -0.5), (97, "a", -1.0), (201, "\ufffd", -2.0))
    answers.add(0, Delta(1, 0, "a", (Token(97, "a", -1.0, top),), "length"))
    assert answers.whole()["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5, "a": -1.0}]


def test_bytes_of_pieces_by_byte_fallback() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    encoder = Encoder()
    pieces = {"<unk>": 0, "<0xC3>": 1, "<0xA9>": 2, "a": 3}
    encoder.tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, [], byte_fallback=True, unk_token="<unk>"))
    words = Vocabulary(encoder, frozenset())
    assert words.raw(1, "\ufffd") + words.raw(2, "\ufffd") == "é".encode()
    assert words.raw(3, "a") == b"a"


def test_calls_are_streamed_as_they_end_with_log_probabilities_of_all_tokens(served: ServedModel) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    answers = Answers(asked(served, True, tools=[tool], logprobs=True, return_tokens_as_token_ids=True), served.words)
    said = ('{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {"a": 1}}')
    text = "So: " + "".join(f"<tool_call>{one}</tool_call>" for one in said)
    deltas, tokens = [], []
    for at, letter in enumerate(text):
        ends = at == len(text) - 1
        message = Delta(1, 0, letter, (Token(ord(letter), letter, -1.0, ()),), "stop" if ends else None)
        for chunk in answers.chunks(0, message):
            [choice] = chunk["choices"]
            deltas.append((choice["delta"], choice["finish_reason"]))
            tokens += [one["token"] for one in ((choice.get("logprobs") or {}).get("content") or ())]
    assert "".join(delta.get("content") or "" for delta, _ in deltas) == "So:"
    calls = [call for delta, _ in deltas for call in delta.get("tool_calls", ())]
    assert [(call["index"], json.loads(call["function"]["arguments"])) for call in calls] == [(0, {}), (1, {"a": 1})]
    assert deltas[-1][1] == "tool_calls" and tokens == [f"token_id:{ord(letter)}" for letter in text]
    one = asked(served, True, tools=[tool], parallel_tool_calls=False)
    assert "</tool_call>" in one.stops and not one.several


def test_letters_are_told_whole_or_not_at_all(served: ServedModel) -> None:
    """However many tokens they come in, and where an answer ends within one."""
    text = "aé€😀 b😀"
    ids = served.words.text(text)
    assert len(ids) == len(text.encode())
    for count in range(1, len(ids) + 1):
        stream, said = TextStream(served.words), []
        for token in ids[:count]:
            stream.push(token)
            said.append(stream.take())
        said.append(stream.take(all=True))
        assert "".join(said) == text.encode()[:count].decode(errors="ignore"), (count, said)


def test_tokens_are_those_of_the_model_not_of_its_tokenizer(served: ServedModel) -> None:
    """A table has rows for as many as the model says; beyond them lies other memory."""
    few, many = replace(served, vocab_size=200), replace(served, vocab_size=300)
    last = served.words.text("é")[0]
    assert last < 200 and max(served.words.text("zz")) < 200
    high = next(letter for letter in map(chr, range(0x80, 0x3000)) if max(served.words.text(letter)) >= 200)
    for chats, said in ((False, {"prompt": high}), (True, {"messages": [{"role": "user", "content": high}]})):
        with pytest.raises(InputError, match="is not one of the model's, 0 to 199"):
            asked(few, chats, **said)
    for field in ({"prompt": [4, 200]}, {"stop_token_ids": [200]}, {"logit_bias": {"200": 1}}, {"prompt": [-1]}):
        with pytest.raises(InputError, match="199"):
            completion({"prompt": "z", **field}, few)
    wanted = completion({"prompt": [299], "bad_words": [high], "logit_bias": {"299": 1}}, many)
    assert wanted.prompts == ((299,),) and wanted.sampling.banned
    wanted = completion({"prompt": "z", "bad_words": [high]}, few)
    assert not wanted.sampling.banned and not wanted.sampling.stop_ids  # <eos> is 257


def test_two_fields_that_say_how_long_an_answer_is_agree(served: ServedModel) -> None:
    assert asked(served, True, max_tokens=5, max_completion_tokens=5).sampling.max_tokens == 5
    with pytest.raises(InputError, match="max_tokens 4 and max_completion_tokens 5"):
        asked(served, True, max_tokens=4, max_completion_tokens=5)


def test_a_folder_without_words_is_left_alone(tmp_path: Path) -> None:
    words = Vocabulary.open(tmp_path, None)
    assert words.prompt("ab") == [97, 98] and words.longest == 1
