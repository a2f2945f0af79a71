"""The server as OpenAI's own client finds it: answers, streams, structure, refusals, metrics, and how it ends.

It is that of a plan which divides the model over two processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("torch", reason="torch is not installed: the engine's tests need it")
for package in ("transformers", "openai", "starlette", "uvicorn", "llguidance"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import openai  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from serve.hostile import RAW, SEVERAL, all_of, exchanged, statuses  # noqa: E402
from serve.reference import differences  # noqa: E402
from serve.served import Server, serving, workers, write_adapter, write_model  # noqa: E402

from gnomon import schema  # noqa: E402
from gnomon.cli import main  # noqa: E402
from gnomon.serving.file import ServeFile  # noqa: E402
from gnomon.serving.layout import Serving  # noqa: E402
from gnomon.software.engine import engine  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder)
    weights = load_file(folder / "model.safetensors")
    write_adapter(folder / "lora", {n.removesuffix(".weight"): w for n, w in weights.items() if "v_proj" in n}, 1)
    options = ("--name", "tiny", "--api-key", "secret", "--max-waiting", "8")
    layout = Serving(tp=2, weights="fp32", kv="fp32", max_model_len=256)
    plan = ServeFile.of("tiny", "2xcpu-process", layout, replace(engine("gnomon"), max_seqs=4))
    schema.save_file(plan, folder / "serve.toml")
    with serving(folder, *options, "--plan", str(folder / "serve.toml"), "--lora", f"other={folder / 'lora'}") as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return server.client(api_key="secret")


def get(server: Server, path: str) -> str:
    with urllib.request.urlopen(server.url + path) as answer:
        return str(answer.read().decode())


def test_a_completion_and_its_stream_say_the_same(client: Any) -> None:
    asked = {"model": "tiny", "prompt": "hello", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked, logprobs=2)
    assert whole.usage.completion_tokens == 12 and whole.choices[0].finish_reason == "length"
    assert len(whole.choices[0].logprobs.top_logprobs[0]) == 2
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    several = client.completions.create(**{**asked, "prompt": ["hello", "hello"]}, n=2, echo=True)
    assert [c.text for c in several.choices] == ["hello" + whole.choices[0].text] * 4


def test_a_stream_has_each_token_as_it_comes(client: Any) -> None:
    """Those of bytes that are no whole letter yet, too, and with what was counted so far."""
    asked = {"model": "tiny", "prompt": "hello", "max_tokens": 40, "seed": 7, "logprobs": 0}
    more = {"return_token_ids": True, "ignore_eos": True}
    whole = client.completions.create(**asked, extra_body=more).choices[0]
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.completions.create(**asked, stream=True, stream_options=options, extra_body=more)
    assert [c.choices[0].token_ids for c in chunks] == [[token] for token in whole.token_ids]
    assert [c.usage.completion_tokens for c in chunks] == list(range(1, 41)) and last.usage.total_tokens == 45
    assert "".join(c.choices[0].text for c in chunks) == whole.text and any(not c.choices[0].text for c in chunks)
    assert [c.choices[0].logprobs.text_offset[0] for c in chunks] == whole.logprobs.text_offset


def test_echoed_prompts_have_log_probabilities(client: Any) -> None:
    """As evaluation harnesses ask for them: lists of tokens, the prompt's own log-probabilities, no answer or one of a
    token."""
    asked = {"model": "tiny", "temperature": 0, "echo": True, "logprobs": 1}
    [first, second] = client.completions.create(prompt=[[104, 101, 108], [9]], max_tokens=1, **asked).choices
    logs = first.logprobs
    assert len(logs.tokens) == 4 and logs.token_logprobs[0] is None and logs.top_logprobs[0] is None
    assert [max(top.values()) for top in logs.top_logprobs[3:]] == logs.token_logprobs[3:]  # greedy
    assert first.text == "".join(logs.tokens) and logs.text_offset == [0, *(len(first.text[:n]) for n in (1, 2, 3))]
    assert len(second.logprobs.tokens) == 2
    silent = client.completions.create(prompt=[104, 101, 108], max_tokens=0, **asked)
    assert silent.choices[0].logprobs.token_logprobs == logs.token_logprobs[:3]
    assert silent.usage.completion_tokens == 0 and silent.choices[0].text == first.text[:3]
    streamed = list(client.completions.create(prompt=[104, 101, 108], max_tokens=2, stream=True, **asked))
    assert [t for c in streamed for t in c.choices[0].logprobs.token_logprobs][:4] == logs.token_logprobs
    more = client.completions.create(
        model="tiny", prompt=[104, 101, 108], max_tokens=1, extra_body={"prompt_logprobs": 0}
    ).choices[0].model_extra["prompt_logprobs"]  # fmt: skip
    assert (
        more[0] is None
        and [one["101" if at == 0 else "108"]["logprob"] for at, one in enumerate(more[1:])]
        == (logs.token_logprobs[1:3])
    )
    spoken = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    assert len(spoken.model_extra["prompt_logprobs"]) == spoken.usage.prompt_tokens


def test_an_adapter_is_a_model_of_its_own_name(client: Any) -> None:
    assert [(one.id, one.model_extra.get("parent")) for one in client.models.list()] == [
        ("tiny", None),
        ("other", "tiny"),
    ]
    asked = {"prompt": "hello", "max_tokens": 12, "temperature": 0}
    plain, other = (client.completions.create(model=name, **asked) for name in ("tiny", "other"))
    assert other.model == "other" and other.choices[0].text != plain.choices[0].text
    with pytest.raises(openai.NotFoundError, match="'tiny', 'other'"):
        client.completions.create(model="third", **asked)
    with pytest.raises(openai.BadRequestError, match="made by encoders"):
        client.embeddings.create(model="tiny", input="hello")


def test_a_stop_string_ends_an_answer_and_is_not_told(client: Any) -> None:
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 30, "temperature": 0.9, "seed": 5}
    text = client.completions.create(**asked).choices[0].text
    stop = text[4:6]
    cut = client.completions.create(**asked, stop=[stop])
    assert cut.choices[0].text == text[: text.index(stop)] and cut.choices[0].finish_reason == "stop"
    told = client.completions.create(**asked, stop=[stop], stream=True)
    assert "".join(c.choices[0].text for c in told) == cut.choices[0].text


def test_a_conversation_goes_by_the_folders_template(client: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    asked = {"model": "tiny", "max_completion_tokens": 5, "temperature": 0}
    made = client.chat.completions.create(**asked, messages=messages, logprobs=True, top_logprobs=3)
    assert made.usage.prompt_tokens == len("<user>hi<assistant>")
    assert len(made.choices[0].logprobs.content) == 5 and len(made.choices[0].logprobs.content[0].top_logprobs) == 3
    told = list(client.chat.completions.create(**asked, messages=messages, stream=True))
    assert told[0].choices[0].delta.role == "assistant" and told[-1].choices[0].finish_reason == "length"
    assert "".join(c.choices[0].delta.content or "" for c in told) == made.choices[0].message.content


def test_structured_output_is_of_its_schema(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    ask = client.chat.completions.create
    for seed in range(3):
        made = ask(model="tiny", messages=[{"role": "user", "content": "q"}], response_format=form, seed=seed)
        assert json.loads(made.choices[0].message.content)["a"] in ("x", "y")
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    made = ask(model="tiny", messages=[{"role": "user", "content": "q"}], tools=[tool], tool_choice="required")
    [call] = made.choices[0].message.tool_calls
    assert call.function.name == "look" and json.loads(call.function.arguments)["a"] in ("x", "y")
    assert made.choices[0].finish_reason == "tool_calls"


def test_answers_are_of_the_clients_own_types(client: Any) -> None:
    """Strictly: nothing beside OpenAI's fields, none missing, none of another type; vLLM's two of a model apart, and
    the null that OpenAI's streams of completions have too."""
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi", "name": "Bo"}]
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema, "strict": True}}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    usage = {"include_usage": True}
    chat = partial(client.chat.completions.create, model="tiny", messages=said, seed=1, max_tokens=40)
    completion = partial(client.completions.create, model="tiny", prompt="abc", seed=1, max_tokens=3)
    answers = [
        chat(n=4, logprobs=True, top_logprobs=2, stop=["zz"]), chat(response_format=form),
        *chat(n=2, stream=True, logprobs=True, stream_options=usage),
        chat(tools=[tool], tool_choice="required"), *chat(tools=[tool], tool_choice="required", stream=True),
        completion(n=4, logprobs=2), completion(model="other"), *completion(stream=True, stream_options=usage),
        *client.models.list(), client.models.retrieve("other"),
    ]  # fmt: skip
    found = {one for answer in answers for one in differences(answer)}
    assert found == {
        "Model.max_model_len is not OpenAI's", "Model.parent is not OpenAI's",
        "Completion.choices.0.finish_reason: Input should be 'stop', 'length' or 'content_filter'",
    }  # fmt: skip
    streamed = [c for c in answers if c.object == "chat.completion.chunk" and "usage" in c.model_fields_set]
    assert [c.usage is not None for c in streamed] == [False] * (len(streamed) - 1) + [True]
    assert answers[0].choices[0].model_fields_set >= {"finish_reason", "index", "logprobs", "message"}


def test_errors_bear_openais_words(server: Server, client: Any) -> None:
    told = [post(server, path, body, key)[1]["error"] for path, body, key in (
        ("/v1/completions", b'{"prompt": "x", "stop": 5}', "secret"), ("/v1/completions", b"{}", "guess"),
        ("/v1/completions", b'{"prompt": "x", "model": "none"}', "secret"), ("/v1/responses", b"{}", "secret"),
    )]  # fmt: skip
    assert [(one["code"], one["param"]) for one in told] == [
        (None, "stop"), ("invalid_api_key", None), ("model_not_found", "model"), (None, None),
    ]  # fmt: skip
    assert "POST /v1/chat/completions" in told[3]["message"]
    with pytest.raises(openai.NotFoundError) as lost:
        client.models.retrieve("none")
    assert lost.value.code == "model_not_found"


def test_what_vllm_takes_beside_openais_fields_acts(client: Any) -> None:
    asked = {"model": "tiny", "prompt": "q", "max_tokens": 6, "seed": 1}
    ask = client.completions.create
    assert ask(**asked, extra_body={"guided_choice": ["yes", "no."]}).choices[0].text in ("yes", "no.")
    only = ask(**asked, extra_body={"allowed_token_ids": [70, 71], "return_token_ids": True}).choices[0]
    assert set(only.token_ids) <= {70, 71} and len(only.token_ids) == 6
    greedy = {**asked, "temperature": 0}
    letters = list(range(90))
    word = ask(**greedy, extra_body={"allowed_token_ids": letters}).choices[0].text[0]
    assert word not in ask(**greedy, extra_body={"allowed_token_ids": letters, "bad_words": [word]}).choices[0].text
    plain = ask(**greedy).choices[0]
    cut = ask(**{**greedy, "prompt": "zzq"}, extra_body={"truncate_prompt_tokens": 1, "cache_salt": "mine"})
    assert cut.usage.prompt_tokens == 1 and cut.choices[0].text == plain.text
    best = ask(**asked, best_of=4, logprobs=0)
    all_four = ask(**asked, n=4, logprobs=0)
    means = [sum(one.logprobs.token_logprobs) for one in all_four.choices]
    assert best.choices[0].text == all_four.choices[means.index(max(means))].text
    assert best.usage.completion_tokens == 24
    ends = ask(**{**asked, "logit_bias": {"257": 100}}, extra_body={"ignore_eos": True, "skip_special_tokens": False})
    assert ends.choices[0].text == "<eos>" * 6


def test_calls_of_tools_are_streamed(client: Any) -> None:
    """Several at once, where it is asked for; text before the answer ends, where none begins in it."""
    properties = {"properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **properties}}}
    said = [{"role": "user", "content": "q"}]
    asked = {"model": "tiny", "messages": said, "tools": [tool], "stream": True, "seed": 3}
    chunks = list(client.chat.completions.create(**asked, tool_choice="required"))
    [call] = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
    assert (call.index, call.function.name, json.loads(call.function.arguments)) == (0, "f", {"a": 1})
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    several = client.chat.completions.create(
        **{**asked, "stream": False}, tool_choice="required", parallel_tool_calls=True, max_tokens=200
    ).choices[0]
    assert several.finish_reason == "length" or several.message.tool_calls
    told = list(client.chat.completions.create(**asked, max_tokens=30))
    assert sum(bool(c.choices[0].delta.content) for c in told) > 3


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": "x", "best_off": 3}, "best_off is not supported (did you mean 'best_of'"),
        ({"prompt": "x", "temperature": "hot"}, "temperature is a number"),
        ({"prompt": "x", "top_p": 0}, "top_p must be above 0"),
        ({"prompt": "x", "max_tokens": 300}, "max_tokens is a whole number from 1 to 256"),
        ({"prompt": "x" * 250, "max_tokens": 30}, "is more than the 256"),
        ({"prompt": [4, 9999]}, "token 9999"),
        ({"prompt": "\ud800"}, "no text"),
        ({"prompt": ""}, "at least one token"),
        ({"prompt": "x", "chat_template": "{{ 7 * 7 }}"}, "chat_template is not supported"),
        ({"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}}, "schema"),
        ({"prompt": "x", "guided_regex": "("}, "regex"),
        ({"prompt": "x", "guided_regex": "[^\\x00-\\U0010ffff]"}, "could not be held to its grammar"),
        ({"prompt": "x", "temperature": 10**400}, "a number of 401 digits"),
        ({"prompt": "x", "logit_bias": {"5": 10**400}}, "a number of 401 digits"),
        ({"prompt": "x", "logit_bias": {"5" * 5000: 1}}, "logit_bias names token"),
        ({"prompt": "x", "logit_bias": {"5": True}}, "object of numbers"),
        ({"prompt": "x", "stop": "b" * 1000}, "at most 256 letters"),
        ({"prompt": "x", "stop": ["a"] * 10_000}, "at most 16"),
        ({"prompt": "x", "guided_choice": [f"c{at}" for at in range(50_000)]}, "at most 1000"),
        ({"prompt": "x" * 1_000_000}, "of 1000000 letters is more than"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options are of streams"),
        ({"prompt": "x", "stream": True, "stream_options": {"continuous_usage_stats": True}}, "include_usage"),
        ({"prompt": "x", "n": 10**9}, "n is a whole number from 1 to 128"),
        ([], "the body is a JSON object"),
    ],
)
def test_what_cannot_be_answered_is_said(server: Server, body: object, says: str) -> None:
    status, answer = post(server, "/v1/completions", json.dumps(body).encode())
    assert status == 400 and says in answer["error"]["message"], answer


def post(
    server: Server, path: str, body: bytes, key: str = "secret", kind: str = "application/json", coded: str = "identity"
) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": kind, "Content-Encoding": coded}
    request = urllib.request.Request(server.url + path, body, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.mark.parametrize("calls", [5, "ab", {"a": 1}, [{"function": {"name": "f", "arguments": "[1]"}}], [None]])
def test_calls_in_a_conversation_are_looked_at(server: Server, calls: object) -> None:
    body = {"messages": [{"role": "assistant", "tool_calls": calls}]}
    status, answer = post(server, "/v1/chat/completions", json.dumps(body).encode())
    assert status == 400 and "tool_calls" in answer["error"]["message"], answer


def test_templates_in_words_are_words(client: Any) -> None:
    said = "{{ 7 * 7 }}{% for i in range(9) %}x{% endfor %}"
    made = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": said}], max_tokens=1)
    assert made.usage.prompt_tokens == len(f"<user>{said}<assistant>")


def test_many_answers_at_once_let_others_in_between(client: Any) -> None:
    """More than a worker runs at a time, of which each draws by its own number."""
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 6, "seed": 3}
    many = client.completions.create(**asked, n=11)
    assert [one.index for one in many.choices] == list(range(11))
    assert len({one.text for one in many.choices}) > 8
    assert [one.text for one in client.completions.create(**asked, n=2).choices] == [c.text for c in many.choices[:2]]


def test_keys_models_and_bodies_are_looked_at(server: Server, client: Any) -> None:
    assert post(server, "/v1/completions", b"{}", key="guess")[0] == 401
    with pytest.raises(openai.NotFoundError, match="there is no model 'none'"):
        client.completions.create(model="none", prompt="x")
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    for body in (b'{"prompt": NaN}', b"[" * 100000, b"\xff", b"", b'{"prompt": "x", "prompt": "y"}'):
        assert post(server, "/v1/completions", body)[0] == 400
    assert post(server, "/v1/completions", b'{"prompt": "x"}', kind="text/plain")[0] == 415
    assert post(server, "/v1/completions", b'{"prompt": "x"}', coded="gzip")[0] == 415
    assert post(server, "/v1/completions", b" " * (5 << 20))[0] == 413


def test_one_too_many_is_told_when_to_come_again(server: Server, client: Any) -> None:
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model="tiny", prompt=["x"] * 9, max_tokens=5)
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert client.completions.create(model="tiny", prompt="x", max_tokens=5).usage.completion_tokens


def test_who_stops_reading_holds_up_nobody(server: Server, client: Any) -> None:
    slow = client.completions.create(model="tiny", prompt="x", max_tokens=200, stream=True)
    next(iter(slow))
    for _ in range(3):
        assert client.completions.create(model="tiny", prompt="y", max_tokens=3).choices
    slow.close()
    for _ in range(100):
        if 'vllm:num_requests_running{model_name="tiny"} 0.0' in get(server, "/metrics"):
            return
        time.sleep(0.05)
    raise AssertionError("its request still runs")


def test_hostile_requests_leave_it_as_it_was(server: Server, client: Any) -> None:
    """A sample of `benchmarks/serve/hostile.py`."""
    asked = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0}
    before = client.completions.create(**asked).choices[0].text
    came = asyncio.run(all_of(server.url, 80, 1, at_once=16, key="secret"))
    assert not [what for what in came if "500" in what or "without" in what or "no answer" in what], came
    assert came["status 400"] and came["status 200"]
    for _ in range(100):
        if 'vllm:kv_cache_usage_perc{model_name="tiny"} 0.0' in get(server, "/metrics"):
            break
        time.sleep(0.05)
    else:
        raise AssertionError("blocks are held by nobody's requests")
    assert client.completions.create(**asked).choices[0].text == before


@pytest.mark.parametrize(("name", "sent", "wanted"), RAW, ids=[name for name, *_ in RAW])
def test_what_is_hardly_http_is_refused(server: Server, name: str, sent: bytes, wanted: str) -> None:
    where = urlsplit(server.url)
    answer = asyncio.run(exchanged(str(where.hostname), int(where.port or 0), sent, 10))
    assert answer[9:12].decode() in ("", *wanted.split(), "401"), (name, answer[:200])


@pytest.mark.parametrize(("name", "sent", "wanted"), SEVERAL, ids=[name for name, *_ in SEVERAL])
def test_each_request_of_a_connection_has_one_answer(
    server: Server, name: str, sent: bytes, wanted: tuple[str, ...]
) -> None:
    """Without the key, so that most are refused before their body is read."""
    where = urlsplit(server.url)
    answer = asyncio.run(exchanged(str(where.hostname), int(where.port or 0), sent, 10))
    found = statuses(answer)
    assert len(found) == len(wanted) and all(f in (w, "401") for f, w in zip(found, wanted, strict=True)), answer[:400]


def test_metrics_bear_the_names_that_dashboards_know(server: Server) -> None:
    told = get(server, "/metrics")
    for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_count", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
        "vllm:request_success_total", "vllm:prefix_cache_hits_total",
    ):  # fmt: skip
        assert f"{name}{{" in told, name
    assert get(server, "/health") == "" and get(server, "/ready") == ""


def test_prompts_that_the_server_knows_from_before_are_said(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run of the same seed measures the prefix cache, not the model."""
    monkeypatch.setenv("GNOMON_API_KEY", "secret")
    asked = ["bench-serve", server.url, "--num-requests", "3", "--input-len", "48", "--output-len", "2", "--seed"]
    assert main([*asked, "71"]) == 0
    assert "prefix cache" not in capsys.readouterr().out
    # Each of the two workers has a cache of its own: of three runs two are of one worker. A prompt's last block is
    # computed again, for its first token, so it is at most 67%.
    assert main([*asked, "71"]) == 0 and main([*asked, "71"]) == 0
    shares = re.findall(r"(\d+)% of the prompts' tokens were in the server's prefix cache", capsys.readouterr().out)
    assert shares and all(int(share) <= 67 for share in shares)
    assert main([*asked, "72", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prefix_cache_hits"] == 0


def test_a_killed_worker_fails_its_requests_alone_and_comes_back(server: Server, client: Any) -> None:
    stream = client.completions.create(model="tiny", prompt="x", max_tokens=200, stream=True)
    next(iter(stream))
    _, second = workers(server.process.pid)
    os.kill(second, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="the process that was answering is gone"):
        list(stream)
    assert get(server, "/health") == ""
    for _ in range(600):
        if post(server, "/v1/completions", b'{"prompt": "x", "max_tokens": 2}')[0] == 200:
            return
        time.sleep(0.1)
    raise AssertionError("it did not come back")


def test_told_to_end_it_answers_what_runs(server: Server, client: Any) -> None:
    """The last of this module."""
    stream = client.completions.create(model="tiny", prompt="x", max_tokens=150, stream=True)
    next(iter(stream))
    server.process.terminate()
    assert len("".join(chunk.choices[0].text for chunk in stream)) > 0
    assert server.process.wait(30) == 0
