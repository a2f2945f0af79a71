"""What Dynamo does around each call of a graph of this backend, as far as it may be left out.

Dynamo writes two calls before each graph which mark, for torch.profiler, the time that arguments take. Each goes
through two functions of Python that turn Dynamo off and on: 2 of the 21 us of guards and dispatch of a small model,
40 of 410 with nothing in cache. `allow()` leaves them out of graphs of backend "gnomon", and of no other; what is
computed, and guards, are as they were. Leaves out guards themselves: which of them may go, only a user knows
(`guard_filter_fn` of torch.compile).
"""

from __future__ import annotations

import logging
from typing import Any

from gnomon.compiler.kernels.recurrent_modules import backend_of

log = logging.getLogger("gnomon.compiler")


def allow(backend: Any) -> None:
    """Has Dynamo leave the marks out, once a process; without effect where Dynamo is built in another way."""
    try:
        from torch._dynamo import config
        from torch._dynamo.codegen import PyCodegen

        original = PyCodegen.make_call_generated_code
        if getattr(original, "for_gnomon", False) or not hasattr(config, "record_runtime_overhead"):
            return

        def make_call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if backend_of(self.tx) is not backend:
                return original(self, *args, **kwargs)
            with config.patch(record_runtime_overhead=False):
                return original(self, *args, **kwargs)

        make_call.for_gnomon = True  # type: ignore[attr-defined]
        PyCodegen.make_call_generated_code = make_call  # type: ignore[method-assign]
    except (ImportError, AttributeError) as error:
        log.debug("calls are marked for the profiler: %s", error)
