"""What is loaded late: nothing looks for garbage meanwhile, and it does again after that, also where loading fails."""

from __future__ import annotations

import gc

import pytest

from gnomon.late import load_late, without_collection


def test_garbage_is_looked_for_again_once_a_module_is_loaded() -> None:
    assert gc.isenabled()
    with without_collection():
        assert not gc.isenabled()
        assert load_late("json:loads")("[3]") == [3]
        assert not gc.isenabled()  # who turned it off turns it on
    with pytest.raises(ModuleNotFoundError):
        load_late("gnomon.no_such_module:nothing")
    assert gc.isenabled()
