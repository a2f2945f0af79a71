"""Batches of a model that is code: from a function of the user's, or a text's under the names of the model's inputs.

`OwnData("my_project.data:batches")` names a function of the step, counted from 1, that returns the whole batch of that
step by the names of the model's inputs; it must return the same on every rank and at every call, so that a run can go
on from a checkpoint. Leaves out which rows a rank takes (`feed`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gnomon.errors import InputError
from gnomon.late import load_user
from gnomon.runtime.data.corpus import Corpus
from gnomon.runtime.data.sequences import SequenceBatches


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnData:
    """A function of the user's that makes batches."""

    name: str
    """`my_project.data:batches`."""

    def describe(self) -> str:
        """One line that names the source of batches."""
        return f"batches of {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnBatches:
    """What the function returns, checked. There is no held-out part."""

    name: str
    function: Any
    notes: tuple[str, ...] = ()
    training_tokens: int = 0
    validation_tokens: int = 0

    @staticmethod
    def open(data: OwnData) -> OwnBatches:
        """InputError for a function that cannot be imported from the folder where the command runs."""
        module, _, function = data.name.partition(":")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            loaded = load_user(module, function)
        except Exception as error:
            raise InputError(f"importing the batches {data.name!r} failed: {type(error).__name__}: {error}") from error
        if not callable(loaded):
            raise InputError(f"{data.name} is no function of the step that returns a batch")
        return OwnBatches(name=data.name, function=loaded)

    @property
    def identity(self) -> str:
        """Names the batches, as checkpoints keep it."""
        return self.name

    def batch(self, step: int, *, seed: int, sequences: int, seq_len: int) -> dict[str, Tensor]:
        """The batch of a step. InputError for what is no dict of tensors."""
        try:
            batch_of_step = self.function(step)
        except Exception as error:
            raise InputError(f"{self.name}({step}) failed: {type(error).__name__}: {error}") from error
        if not isinstance(batch_of_step, Mapping) or not all(
            isinstance(x, Tensor) and x.ndim for x in batch_of_step.values()
        ):
            raise InputError(
                f"{self.name}({step}) returned {type(batch_of_step).__name__}; it should return a dict from "
                "names of the "
                f"model's inputs to tensors of {sequences} rows"
            )
        return dict(batch_of_step)

    def validation_batch(self, index: int, *, sequences: int, seq_len: int) -> None:
        """Returns no batch: nothing is held out."""

    def epochs(self, steps: int, *, sequences: int, seq_len: int) -> float:
        """Returns 0: how often the function returns the same batch is not known."""
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextBatches:
    """A text's batches under other names."""

    corpus: Corpus
    ids: str
    """The model's input for token ids."""
    labels: str

    @staticmethod
    def of(corpus: Corpus, ids: str, labels: str) -> TextBatches:
        """InputError for rows of several documents, which only a model of Gnomon's own keeps apart."""
        if corpus.packing != "stream":
            raise InputError(
                f"{corpus.where} is packed as {corpus.packing}, which a model that is code does not keep apart; give "
                f"--packing stream"
            )
        return TextBatches(corpus=corpus, ids=ids, labels=labels)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lists what is said before training."""
        return self.corpus.notes

    @property
    def training_tokens(self) -> int:
        """There are to train on."""
        return self.corpus.training_tokens

    @property
    def validation_tokens(self) -> int:
        """Counts the tokens that are held out."""
        return self.corpus.validation_tokens

    @property
    def identity(self) -> str:
        """Names the batches, as checkpoints keep it."""
        return self.corpus.identity

    def batch(self, step: int, *, seed: int, sequences: int, seq_len: int) -> dict[str, Tensor]:
        """The batch of a step."""
        return self._renamed(self.corpus.batch(step, seed=seed, sequences=sequences, seq_len=seq_len))

    def validation_batch(self, index: int, *, sequences: int, seq_len: int) -> dict[str, Tensor]:
        """The same of held-out text."""
        return self._renamed(self.corpus.validation_batch(index, sequences=sequences, seq_len=seq_len))

    def epochs(self, steps: int, *, sequences: int, seq_len: int) -> float:
        """How often so many steps read the text."""
        return self.corpus.epochs(steps, sequences=sequences, seq_len=seq_len)

    def _renamed(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self.ids: batch["input_ids"], self.labels: batch["labels"]}


Batches = Corpus | SequenceBatches | TextBatches | OwnBatches
"""Where a run's batches come from."""
