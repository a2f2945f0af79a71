"""`gnomon explore`: what the page is told, who is answered, what a request may not do; and the page in a browser."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from browser import CHROMIUM, needs_chromium, visited

from gnomon.cli import main
from gnomon.cli.explore import Page, handler
from gnomon.cli.options import parse
from gnomon.cli.options.explore import ExploreOptions
from gnomon.report.page.explore import POLICY
from gnomon.schema import load as loads
from gnomon.serving.file import ServeFile
from gnomon.units import show_seconds

TOKEN = "a-token"
JOB = ["llama-tiny", "--on", "4xa100-sxm-40gb", "--global-batch", "8", "--seq-len", "128"]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    _, options = parse(["explore", *JOB, "--tp", "2"])
    assert isinstance(options, ExploreOptions)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(Page(options), TOKEN))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def ask(port: int, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = None if body is None else json.dumps(body) if not isinstance(body, str) else body
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET" if body is None else "POST", path, data, named)
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.headers["Content-Security-Policy"] == POLICY
    assert "Access-Control-Allow-Origin" not in answer.headers
    return answer.status, json.loads(text) if answer.headers["Content-Type"] == "application/json" else text


def form(port: int, path: str, words: list[str], plan: str = "") -> Any:
    return ask(port, path, {"words": words, "plan": plan}, X_Gnomon_Token=TOKEN)[1]


def test_the_answer_is_that_of_predict(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*JOB, "--tp", "4"]
    told = form(port, "/predict", words)
    assert main(["predict", *words, "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert told["fits"] == predicted["fits"] and told["verdict"] == predicted["verdict"]
    assert told["command"] == f"gnomon predict {' '.join(words)}"
    again = form(port, "/predict", [], told["plan"])
    assert again["cards"] == told["cards"], "the plan file that it saves is the same job"
    changed = form(port, "/predict", ["--tp", "2"], told["plan"])
    assert changed["plan_line"] != told["plan_line"], "an option changes the plan of a file"


def test_ways_can_be_taken(port: int) -> None:
    large = ["llama-3.1-8b", "--on", "8xa100-sxm-80gb", "--global-batch", "8", "--seq-len", "4096", "--zero", "0"]
    assert not form(port, "/predict", large)["fits"]
    ways = form(port, "/fit", large)["ways"]
    assert ways and form(port, "/predict", [], ways[0]["plan"])["fits"]
    assert form(port, "/fit", JOB)["ways"] == [], "what fits needs none"
    best = form(port, "/best", JOB)["ways"]
    assert best and form(port, "/predict", [], best[0]["plan"])["fits"]


SERVER = [
    *("llama-3.1-8b", "--on", "2xh100-sxm", "--serve", "--engine", "vllm"),
    *("--input-len", "256", "--output-len", "64", "--concurrency", "8"),
]


def test_a_server_is_answered_as_predict_serve_does(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    told = form(port, "/predict", SERVER)
    assert main(["predict", *SERVER, "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    cards = {name: text for name, text, _ in told["cards"]}
    assert cards["TTFT p50"] == show_seconds(predicted["ttft"]["p50_s"])
    assert cards["output tokens/s"] == f"{predicted['output_tokens_per_s']:,.0f}"
    assert told["fits"] and told["file"] == "serve.toml" and "<svg" in told["page"]
    assert loads(ServeFile, told["plan"]).engine == "vllm"
    best = form(port, "/best", SERVER)["ways"]
    again = [*SERVER, *(word for flag, value in best[0]["set"].items() if value for word in (flag, value))]
    assert form(port, "/predict", again)["fits"]


def test_a_plan_of_training_is_not_dropped_for_a_server(port: int) -> None:
    plan = form(port, "/predict", JOB)["plan"]
    assert "a plan file is of training" in form(port, "/predict", SERVER, plan)["error"]


def test_a_server_that_does_not_start_is_helped(port: int) -> None:
    large = ["llama-3.3-70b", *SERVER[1:], "--tp", "1"]
    told = form(port, "/predict", large)
    assert not told["fits"] and told["verdict"] == "does not start" and "70" in told["title"]
    ways = form(port, "/fit", large)["ways"]
    changed = [*large, *(word for pair in ways[0]["set"].items() for word in pair)]
    assert form(port, "/predict", changed)["fits"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*SERVER, "--zero", "3"], "--zero is of training, and --serve predicts a server"),
        ([*JOB, "--concurrency", "3"], "--concurrency is of serving; add --serve"),
        ([*SERVER, "--page", "/tmp/page.html"], "--page writes a file, which a page may not"),
        (["train.py", "--on", "8xh100", "--args", ""], "a script is run only where the command line named it"),
        (["no-such-model", "--on", "8xh100"], "no-such-model"),
        (JOB[:1], "--on"),
        ([*JOB, "--tp", "x"], "--tp"),
        ([*JOB, "--tp", "3"], "3"),
        ([*JOB, "--html", "/tmp/page.html"], "--html"),
        (["os:getcwd", "--on", "8xh100"], "imported only where the command line named it"),
    ],
)
def test_a_wrong_form_is_one_sentence(words: list[str], said: str, port: int) -> None:
    told = form(port, "/predict", words)
    assert list(told) == ["error"] and said in told["error"] and "\n" not in told["error"].strip()


@pytest.mark.parametrize("body", ["", "{", "[]", "[" * 100_000, '{"words": 1}', '{"words": [1], "plan": ""}', "null"])
def test_a_broken_request_is_an_error(body: str, port: int) -> None:
    assert list(ask(port, "/predict", body, X_Gnomon_Token=TOKEN)[1]) == ["error"]


def test_nobody_else_is_answered(port: int) -> None:
    right = {"words": JOB, "plan": ""}
    assert ask(port, "/predict", right, X_Gnomon_Token=TOKEN)[0] == 200
    assert ask(port, "/predict", right, X_Gnomon_Token=TOKEN, Origin=f"http://localhost:{port}")[0] == 200
    for headers in (
        {},
        {"X_Gnomon_Token": "another"},
        {"X_Gnomon_Token": TOKEN, "Origin": "http://elsewhere.example"},
        {"X_Gnomon_Token": TOKEN, "Origin": "null"},
        {"X_Gnomon_Token": TOKEN, "Host": "elsewhere.example"},
    ):
        status, text = ask(port, "/predict", right, **headers)
        assert status == 403 and "llama" not in text
    assert ask(port, f"/?token={TOKEN}")[0] == 200
    for path in ("/", "/?token=another", f"/page?token={TOKEN}", f"/../?token={TOKEN}"):
        assert ask(port, path)[0] == 403


def test_a_mistake_is_said_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "llama-tiny", "--no-browser"]) == 2
    assert "--on" in capsys.readouterr().err
    assert main(["explore", "--from", "vllm", "serve.sh", "--on", "h100-sxm", "--no-browser"]) == 2
    assert "the page has no --from" in capsys.readouterr().err


@needs_chromium
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_in_a_browser(width: int, port: int, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    document, log = visited(f"http://127.0.0.1:{port}/?token={TOKEN}", tmp_path, width=width)
    assert "CONSOLE" not in log
    assert "tokens/s/device" in document and "fits: " in document and "answered in" in document
    state = quote(json.dumps({"words": SERVER, "plan": ""}))
    document, log = visited(f"http://127.0.0.1:{port}/?token={TOKEN}#{state}", tmp_path, width=width)
    assert "CONSOLE" not in log
    assert "TTFT p50" in document and "Make it start" in document and "output tokens/s" in document
