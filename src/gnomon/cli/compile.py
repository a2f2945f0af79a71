"""`gnomon compile`: a model of one's own through the compiler, and what it made of it.

`run(options)` imports FILE:FUNCTION, which returns a module (or function) and its example inputs, compiles and
calls it, and with --explain prints groups, tiles, memory levels, traffic and times. Returns 0. Leaves out
models that are Graphs.
"""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from gnomon.cli.options.flags import changed_options
from gnomon.cli.options.tools import CompileOptions
from gnomon.cli.terminal import print_json, print_lines
from gnomon.cli.values import quantity
from gnomon.errors import InputError
from gnomon.late import load_late
from gnomon.units import parse_seconds

ELSEWHERE = ("model", "device", "output", "json")
"""Options that texts for another device look at."""
CHOICES = ("ragged", "frozen", "preview")
"""What somebody says of a model's calls, as the options of the backend have it."""


def run(options: CompileOptions) -> int:
    others = [name for name in changed_options(options) if name not in ELSEWHERE]
    if options.device is not None and others:
        raise InputError(f"--device writes texts and runs none of them: leave out --{', --'.join(others)}")
    if options.output is not None and options.device is None:
        raise InputError("-o is for the texts of --device: name a device, or leave it out")
    choices = {name: value for name, value in changed_options(options).items() if name in CHOICES}
    if options.train and choices:
        raise InputError(f"--{', --'.join(choices)}: of calls without gradients; leave --train out")
    built = _built(options.model)
    try:
        if options.device is not None:
            texts = load_late("gnomon.compiler.stencil.elsewhere:texts")
            return _written(texts(*built, options.device), options)
        compiled = load_late("gnomon.compiler.command:compiled")
    except ImportError as error:
        raise InputError(f"gnomon compile needs PyTorch ({error}): pip install 'gnomon[torch]'") from None
    tune_s = 0.0 if options.tune is None else quantity("--tune", parse_seconds, options.tune)
    compiled_result = compiled(*built, train=options.train, tune_s=tune_s, **choices)
    if options.json:
        print_json(compiled_result["data"])
    else:
        print_lines(compiled_result["lines"] if options.explain else compiled_result["summary"])
    return 0


def _written(texts: list[Any], options: CompileOptions) -> int:
    """Texts for a device: to files of a folder, or printed."""
    lines = [line for one in texts for line in one.lines]
    for n, one in enumerate(texts):
        if options.output is None:
            lines += ["", one.source]
            continue
        path = Path(options.output) / f"stencil{n}.{one.suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(one.source, encoding="utf-8")
        lines.append(f"wrote {path}")
    if options.json:
        print_json([{**one.data, "source": one.source} for one in texts])
    else:
        print_lines(lines)
    return 0


def _built(text: str) -> tuple[Any, tuple[Any, ...]]:
    """What the user's function returns: (module, inputs)."""
    path, _, name = text.rpartition(":")
    if not path or not Path(path).is_file():
        raise InputError(f"{text!r} is not FILE.py:FUNCTION with a file that exists")
    spec = spec_from_file_location("gnomon_compiled_model", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} cannot be imported as Python")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        built = getattr(module, name)()
    except Exception as error:
        raise InputError(f"{text} failed: {type(error).__name__}: {error}") from error
    if not (
        isinstance(built, tuple) and len(built) == 2 and callable(built[0]) and isinstance(built[1], (tuple, list))
    ):
        raise InputError(
            f"{text} must return (module, inputs): a module or function, and a tuple of its example inputs"
        )
    return built[0], tuple(built[1])
