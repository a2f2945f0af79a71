"""A model that a user names as code: imported, built without weights, captured.

`read(text)` returns the Graph and what is to be said of it; `build(named)` the torch module. The user's module is
imported here and nowhere else, and only because it was named. Leaves out how a request is written (`inputs`), and the
disk, where `request.cache` keeps what was captured.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import nn

from gnomon.errors import CaptureError, InputError
from gnomon.frontend.capture import SMALL, CapturedModule, captured
from gnomon.frontend.inputs import CodeModel
from gnomon.frontend.opaque import share_lines
from gnomon.graph import Graph
from gnomon.late import load_user


def graph_of(text: str) -> tuple[Graph, tuple[str, ...]]:
    """(Graph, notes) of a model named as code."""
    named = CodeModel.parse(text)
    capture = captured_of(named, build(named))
    return capture.graph, notes_of(capture)


def notes_of(capture: CapturedModule) -> tuple[str, ...]:
    """What is to be said of a capture."""
    return (*capture.notes, *share_lines(capture.graph))


def build(named: CodeModel, *, real: bool = False, seed: int = 0) -> nn.Module:
    """What the function returns: without memory for weights where it can be. real: with its own values. seed:
    of torch, for values that it draws."""
    function = _imported(named)
    if not real:
        with suppress(Exception):
            with torch.device("meta"):
                module = function()
            if sum(p.numel() for p in module.parameters()) > SMALL:
                return _checked(named, module)
    torch.manual_seed(seed)
    try:
        return _checked(named, function())
    except InputError:
        raise
    except Exception as error:
        raise CaptureError(f"{named.module}:{named.function}() failed: {type(error).__name__}: {error}") from error


def captured_of(named: CodeModel, module: nn.Module, dtype: torch.dtype | None = torch.bfloat16) -> CapturedModule:
    """Captures the module with its example inputs. dtype: of parameters, so that what the code casts to float32 is
    seen; their own where it then does not run."""
    name = f"{named.module.rpartition('.')[2]}.{named.function}"
    if not named.inputs:
        raise InputError(
            f"{named.module}:{named.function} is captured with inputs; give them, as in --inputs 'ids=int64[batch,seq]'"
        )
    try:
        return captured(module, named.example(), dims=named.dims, name=name, dtype=dtype)
    except CaptureError:
        if dtype is None:
            raise
        return captured(module, named.example(), dims=named.dims, name=name)


def _checked(named: CodeModel, module: object) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise InputError(
            f"{named.module}:{named.function}() returned {type(module).__name__}; it should return a torch.nn.Module"
        )
    return module


def _imported(named: CodeModel) -> Callable[[], nn.Module]:
    """The function, of the module as it is found from the folder where the command runs."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function: object = load_user(named.module, named.function)
    except ImportError as error:
        if named.module.endswith(".py"):
            module = named.module.removesuffix(".py").replace("/", ".")
            raise InputError(f"{named.module!r} is a file; name the module: {module}:{named.function}") from None
        raise InputError(f"cannot import {named.module!r} from {here}: {error}") from None
    except AttributeError as error:
        raise InputError(f"{named.module}:{named.function}: {error}") from None
    except Exception as error:
        raise InputError(f"importing {named.module!r} failed: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise InputError(f"{named.module}:{named.function} is no function that returns a module")
    return function
