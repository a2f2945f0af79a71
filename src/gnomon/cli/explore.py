"""`gnomon explore`: a page on this machine on which a prediction follows every change.

`run(options)` serves it on 127.0.0.1 until it is interrupted, and returns 0. Only who has the address with its token is
answered, only from the page itself: requests that name another host (a name that leads here) or another origin (a page
of somebody else's) get nothing. What the page sends is options of `gnomon predict`; none of them may write a file or
import a module. Leaves out what is said of a server (`cli.explore_serve`) and what the page looks like
(`report.page.explore`).
"""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from shlex import join
from threading import Lock
from time import monotonic
from typing import Any

from gnomon.cli.options.explore import ExploreOptions, FormOptions
from gnomon.cli.options.flags import Flag, changed_options, flags, parse_options
from gnomon.cli.options.job import TrainingOptions
from gnomon.cli.options.serve import ServeOptions
from gnomon.cli.plan_file import For, plan_file
from gnomon.cli.request import Request, read_request
from gnomon.cli.serving import SHARED, asks_to_serve, refuse_others
from gnomon.errors import GnomonError, InputError
from gnomon.hardware import device_names
from gnomon.late import load_late
from gnomon.models.presets import PRESETS
from gnomon.plans import load_plan_file
from gnomon.prediction import Prediction, predict
from gnomon.report.page import page_data, page_html
from gnomon.report.page.explore import POLICY, Field, explore_html
from gnomon.report.prediction import describe
from gnomon.request.fit import FitRequest
from gnomon.request.model import is_code
from gnomon.schema import dump
from gnomon.search import plan as search
from gnomon.software.engine import engines
from gnomon.units import show_seconds

SHOWN = (
    "model", "on", "global_batch", "seq_len", "micro_batch_size", "tp", "pp", "dp_shard", "dp_replicate", "cp", "ep",
    "zero", "recompute", "schedule", "precision", "stack",
)  # fmt: skip
"""Fields of the form's first part, in this order."""
SERVED = (
    "engine", "input_len", "output_len", "concurrency", "rate", "ttft", "tpot", "weights", "kv", "max_model_len",
    "max_num_seqs", "max_num_batched_tokens", "replicas", "pools",
)  # fmt: skip
"""Fields of a server's first part, in this order."""
LEFT_OUT = ("plan", "source", "strict", "page", "fewest")
"""What the page has in another way, and what writes a file."""
BODY_BYTES = 1 << 20
"""Longest that a request may be."""
BEST_S = 6.0
"""Seconds that `best from here` and `make it fit` may take."""
WAYS = 5
"""Of each that are offered."""


def run(options: ExploreOptions) -> int:
    """Serves the page until interrupted."""
    # Any page in the same browser reaches this machine's ports; only one that knows the token is answered.
    token = secrets.token_urlsafe(24)
    page = Page(options)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", options.port), handler(page, token))
    except OSError as error:
        raise InputError(
            f"cannot listen on 127.0.0.1:{options.port}: {error.strerror}; choose another --port"
        ) from error
    address = f"http://127.0.0.1:{server.server_address[1]}/?token={token}"
    print(f"gnomon explore: {address}", flush=True)
    print("Ctrl+C ends it", file=sys.stderr)
    if not options.no_browser:
        with suppress(webbrowser.Error):
            webbrowser.open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0


class Page:
    """What the page shows and asks. One request at a time: predictions share their memos."""

    def __init__(self, options: ExploreOptions) -> None:
        # Without port and browser: only the form's own options come back from the page.
        self.start = FormOptions(**{f.name: getattr(options, f.name) for f in fields(FormOptions)})
        if self.start.source is not None:
            program, path = self.start.source
            raise InputError(f"the page has no --from: give the file as it is, gnomon explore {path} (of {program})")
        if asks_to_serve(self.start):
            refuse_others(self.start)
            load_late("gnomon.cli.explore_serve:answered")(self.start)
        elif self.start.model is not None:
            refuse_others(self.start)
            read_request(_trains(self.start))  # a mistake on the command line is said there, not in the browser
        self.lock = Lock()

    def html(self, token: str) -> str:
        """The page, filled in as the command line was."""
        state: dict[str, object] = {"words": list(_words(self.start)), "plan": ""}
        if self.start.plan is not None:
            state["plan"] = Path(self.start.plan).read_text(encoding="utf-8")
        return explore_html(_form(), state, token)

    def predict(self, page_fields: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to the form as it is."""
        if server := self._server(page_fields):
            reply: dict[str, Any] = load_late("gnomon.cli.explore_serve:answered")(server)
            return {**reply, "command": join(["gnomon", "predict", *page_fields["words"]])}
        job = self._predicted(page_fields)
        request, prediction = job.request, job.prediction
        # From rest, as the page's picture begins with the pipeline filling.
        timeline = prediction.timeline(steady=False)
        before = ["--plan", "plan.toml"] if page_fields["plan"] else []
        data = page_data([timeline], prediction=prediction, assumed=request.assumed, notes=request.notes)
        return {
            "sentence": data["sentence"],
            "title": data["title"],
            "plan_line": data["plan_line"],
            "cards": [[figure["name"], figure["text"], figure["band_text"] or ""] for figure in data["answer"]],
            "fits": prediction.fits,
            "verdict": prediction.verdict,
            # The answer stands above the frame already.
            "page": page_html(data).replace("</style>", "header { display: none; }</style>", 1),
            "plan": job.file(prediction),
            "file": "plan.toml",
            "command": join(["gnomon", "predict", *before, *page_fields["words"]]),
        }

    def fit(self, page_fields: Mapping[str, Any]) -> dict[str, Any]:
        """Changes after which it fits, the fastest first."""
        if server := self._server(page_fields):
            ways: dict[str, Any] = load_late("gnomon.cli.explore_serve:helped")(server)
            return ways
        job = self._predicted(page_fields)
        request = job.request
        if job.prediction.has_room:
            return {"ways": []}
        until = monotonic() + BEST_S
        to_fit = FitRequest(
            graph=request.graph,
            cluster=request.cluster,
            plan=request.plan,
            workload=request.workload,
            stack=request.stack,
        )
        rungs = sorted(to_fit.fitting(keep_going=lambda: monotonic() < until).enough(), key=lambda rung: rung.step_s)
        ways_to_fit = []
        for rung in rungs[:WAYS]:
            assert rung.prediction is not None, "a rung that is enough was predicted"
            text = f"{rung.what}: {_figures(rung.prediction)}"
            ways_to_fit.append({"text": text, "plan": job.file(rung.prediction)})
        return {"ways": ways_to_fit}

    def best(self, page_fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fastest plans for the model, the machines and the batch; changes of the form's own job among them. The
        best layouts of a server for its load."""
        if server := self._server(page_fields):
            layouts: dict[str, Any] = load_late("gnomon.cli.explore_serve:best")(server)
            return layouts
        job = self._predicted(page_fields)
        request = job.request
        until = monotonic() + BEST_S
        found = search(
            request.graph,
            request.cluster,
            request.workload,
            request.stack,
            top=WAYS,
            keep_going=lambda: monotonic() < until,
        )
        ways = []
        for one in found.best:
            text = f"{describe(one.plan, request.workload)}: {_figures(one.prediction)}"
            ways.append({"text": text, "plan": job.file(one.prediction)})
        return {"ways": ways}

    def _server(self, page_fields: Mapping[str, Any]) -> FormOptions | None:
        """The form's options where it asks for a server. InputError for options of training among them."""
        options = _read(page_fields["words"])
        refuse_others(options)
        self._check_code(options)
        if not asks_to_serve(options):
            return None
        if page_fields["plan"]:
            raise InputError("a plan file is of training, and serve asks for a server; leave the plan, or serve")
        return options

    def _check_code(self, options: FormOptions) -> None:
        """InputError for a module that the command line did not name, and for what would write a file."""
        # Importing runs code. The token keeps strangers out, but the page must not be able to name code either.
        if options.model is not None and is_code(options.model) and options.model != self.start.model:
            raise InputError(
                "a module is imported only where the command line named it: gnomon explore MODULE:FUNCTION …"
            )
        if options.arguments is not None and options.model != self.start.model:
            raise InputError("a script is run only where the command line named it: gnomon explore SCRIPT.py --args …")
        if options.page is not None:
            raise InputError("--page writes a file, which a page may not; the replay is drawn here")

    def _predicted(self, page_fields: Mapping[str, Any]) -> _ExploredJob:
        # The plan comes as text, and is read as a file of the command line is: one reader, the same errors.
        with self.lock, tempfile.TemporaryDirectory(prefix="gnomon-explore-") as folder:
            words = list(page_fields["words"])
            file = Path(folder) / "plan.toml"
            if page_fields["plan"]:
                file.write_text(page_fields["plan"], encoding="utf-8")
                words += ["--plan", str(file)]
            options = _read(words)
            request = read_request(_trains(options))
            base = load_plan_file(file) if page_fields["plan"] else None
            named = For(
                model=options.model or (base.model if base else ""),
                on=options.on or (base.on if base else ""),
                stack=options.stack or (base.stack if base else None),
            )
            prediction = predict(request.graph, request.cluster, request.plan, request.workload, request.stack)
            return _ExploredJob(request=request, prediction=prediction, label=named)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExploredJob:
    """The form's job, predicted."""

    request: Request
    prediction: Prediction
    label: For

    def file(self, prediction: Prediction) -> str:
        """A plan file of a prediction of the same job, as text."""
        request = self.request
        written = plan_file(self.label, request.workload, request.stack, prediction, request.assumed, others=())
        return dump(written)


def _trains(options: FormOptions) -> TrainingOptions:
    """The options of a job that trains."""
    return TrainingOptions(**{f.name: getattr(options, f.name) for f in fields(TrainingOptions)})


def _read(words: Sequence[str]) -> FormOptions:
    """The options that the words say. InputError in argparse's words."""
    stderr = StringIO()
    try:
        with redirect_stderr(stderr):
            return parse_options(FormOptions, words, "gnomon explore")
    except SystemExit:
        text = stderr.getvalue().strip().removeprefix("gnomon explore: ").partition("; see gnomon explore")[0]
        raise InputError(text or "the options cannot be read") from None


def _figures(prediction: Prediction) -> str:
    rate = prediction.tokens_per_s_per_device
    return (
        f"{show_seconds(prediction.step_s)} a step, {rate:,.0f} {prediction.counted}/s per device, {prediction.verdict}"
    )


def _form() -> list[Field]:
    """The fields of the form, of the options themselves."""
    every = flags(FormOptions)
    first = ("serve", *SHOWN, *SERVED)
    names = [*first, *(name for name in every if name not in first and name not in LEFT_OUT)]
    return [_field(name, every[name]) for name in names]


def _field(name: str, flag: Flag) -> Field:
    offered: tuple[str, ...] = ()
    choices = flag.settings.get("choices")
    if name == "model":
        offered = tuple(PRESETS)
    elif name == "on":
        offered = tuple(f"8x{device}" for device in device_names())
    elif name == "engine":
        offered = engines()
    return Field(
        flag=flag.names[0] if flag.names else "",
        label=(flag.names[0].removeprefix("--") if flag.names else "model").replace("-", " "),
        help=flag.help.replace("%%", "%"),
        kind="switch" if flag.is_switch else "choice" if choices else "text",
        choices=tuple(map(str, choices)) if choices else offered,
        shown=name in ("serve", *SHOWN, *SERVED),
        of=_asked_of(name),
    )


def _asked_of(name: str) -> str:
    """`training`, `serving`, or empty for an option of both."""
    if name == "serve" or name in SHARED:
        return ""
    return "serving" if name in flags(ServeOptions) else "training"


def _words(options: FormOptions) -> list[str]:
    """The command line that gives these options, without what the page has in another way."""
    every = flags(FormOptions)
    out: list[str] = []
    for name, value in changed_options(options).items():
        flag = every.get(name)
        if flag is None or name in LEFT_OUT:
            continue
        if not flag.names:
            out.insert(0, str(value))
        elif flag.is_switch:
            out.append(flag.names[0])
        elif isinstance(value, tuple):
            for each in value:
                out += [flag.names[0], str(each)]
        else:
            out += [flag.names[0], str(value)]
    return out


def handler(page: Page, token: str) -> type[BaseHTTPRequestHandler]:
    """What answers a request."""
    answers: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
        "/predict": page.predict,
        "/fit": page.fit,
        "/best": page.best,
    }

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "gnomon", ""
        timeout = 30

        def do_GET(self) -> None:
            """The page, for who has the token."""
            path, _, query = self.path.partition("?")
            # The host too: a name of somebody else that resolves to 127.0.0.1 would be the same origin for a browser
            # (DNS rebinding).
            if not self._is_here() or path != "/" or not _same(query, f"token={token}"):
                return self._refuse()
            self._send(200, "text/html; charset=utf-8", page.html(token).encode())

        def do_POST(self) -> None:
            """An answer, for the page."""
            answer = answers.get(self.path)
            mine = self._is_here() and _same(self.headers.get("X-Gnomon-Token", ""), token)
            if answer is None or not mine:
                return self._refuse()
            try:
                reply: dict[str, Any] = answer(self._fields())
            except GnomonError as error:
                reply = {"error": str(error)}
            except Exception as error:  # a mistake of ours must not end the server
                reply = {"error": f"a mistake in Gnomon itself: {type(error).__name__}: {error}"}
            self._send(200, "application/json", json.dumps(reply, allow_nan=False).encode())

        def _is_here(self) -> bool:
            """Asked by this address, and by no page of another origin."""
            port = self.server.server_address[1]  # type: ignore[index]
            here = {f"127.0.0.1:{port}", f"localhost:{port}"}
            origin = self.headers.get("Origin")
            return self.headers.get("Host") in here and (origin is None or origin.removeprefix("http://") in here)

        def _fields(self) -> Mapping[str, Any]:
            try:
                length = int(self.headers.get("Content-Length", ""))
            except ValueError:
                length = -1
            if not 0 <= length <= BODY_BYTES:
                raise InputError(f"a request has from 0 to {BODY_BYTES:,} bytes")
            try:
                page_fields = json.loads(self.rfile.read(length))
                words, plan = page_fields["words"], page_fields.get("plan", "")
            except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
                raise InputError("a request is JSON with `words` and `plan`") from None
            if not (isinstance(words, list) and all(isinstance(word, str) for word in words) and isinstance(plan, str)):
                raise InputError("`words` is a list of text, and `plan` the text of a plan file")
            return {"words": words, "plan": plan}

        def _refuse(self) -> None:
            self._send(403, "text/plain; charset=utf-8", b"open the address that gnomon explore printed\n")

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            # The page was closed, or has asked something newer.
            with suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Prints no line for a request: the terminal is the user's."""

    return Handler


def _same(one: str, other: str) -> bool:
    # In constant time: how long it takes says nothing of how many characters were right.
    return hmac.compare_digest(one.encode(), other.encode())
