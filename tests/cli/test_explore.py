"""`gnomon explore`: what the page is told, who is answered, what a request may not do; and the page in a browser."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, needs_chromium, visited

from gnomon.cli import main
from gnomon.cli.explore import Page, handler
from gnomon.cli.options import parse
from gnomon.cli.options.explore import ExploreOptions
from gnomon.report.page.explore import POLICY

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


@pytest.mark.parametrize(
    ("words", "said"),
    [
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


@needs_chromium
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_in_a_browser(width: int, port: int, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    document, log = visited(f"http://127.0.0.1:{port}/?token={TOKEN}", tmp_path, width=width)
    assert "CONSOLE" not in log
    assert "tokens/s/device" in document and "fits: " in document and "answered in" in document
