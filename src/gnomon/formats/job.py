"""What a job file of another program says: a `Job`, with everything that could not be carried over beside it.

Each reader beside this file returns a Job: model, plan, workload, stack, number of devices; `notes` on fields that were
understood and do not matter here, `unexpressed` for those that do matter and have no place in our types. `Fields` is
how the readers account for every key. Leaves out: reading any file, and whether the plan fits a cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from pathlib import Path

from gnomon.errors import InputError, nearest
from gnomon.formats.given import GIVE_MODEL, NOTHING, Network, ReadContext, network_graph
from gnomon.formats.keys import MAX_CHARACTERS, Keys, T
from gnomon.formats.shell import UNKNOWN, offered
from gnomon.graph import Graph
from gnomon.models.presets import Config
from gnomon.plans import Plan, Workload
from gnomon.search.fit.terms import Terms
from gnomon.software import Stack, with_facts

ModelConfig = Config

NO_EFFECT = ": no effect on a step's time or memory"
"""End of a note on a field that was understood and does not matter."""

UNKNOWN_FIELD = "no reader knows it: not accounted for, and the band has no room for it"
"""Why a field that is not known is listed; `strict` refuses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unexpressed:
    """A field that changes how the job runs and that nothing in our types says."""

    field: str
    """As the file spells it."""
    value: str
    """As the file has it, shortened to 80 characters."""
    why: str
    """What it does, and which way a prediction without it errs, where known."""

    def __str__(self) -> str:
        return f"{self.field} = {self.value}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Somebody's job, as it stands."""

    model: Network | str | None
    """A config, a Graph, the name of a preset, or None when the file does not say (DeepSpeed, accelerate)."""
    plan: Plan
    """Every decision that the file states or leaves to its program's defaults."""
    workload: Workload
    """The global batch."""
    stack: Stack
    """The program that the file is for, with what the file switches."""
    devices: int | None
    """Devices that the job takes; None when the file does not say."""
    notes: tuple[str, ...] = ()
    """Fields that were understood and change neither work nor memory of a step."""
    unexpressed: tuple[Unexpressed, ...] = ()
    """Fields that do, and that are not in plan, workload, model or stack."""
    assumed: tuple[str, ...] = ()
    """What the file leaves open, and how it was filled in."""
    stated_devices: int | None = None
    """Devices that the file itself says it is for."""
    terms: Terms | None = None
    """The file's own words for changes of the job; None where they are not known."""

    def graph(self) -> Graph:
        """The model as a Graph. InputError when the file does not name one."""
        if self.model is None:
            raise InputError(f"this job file does not say which model it trains; {GIVE_MODEL}")
        return network_graph(self.model)


def layers_of(model: Network | str) -> int:
    """Counts decoder layers: those with an index, or all of a model whose layers have none."""
    layers = network_graph(model).layers()
    return sum(layer.call.first is not None for layer in layers) or len(layers)


def read_source(source: str | Path) -> tuple[str, str]:
    """(text, name for messages) of a file, given as a Path, or of text, given as str.

    Raises InputError if the file cannot be read, is not UTF-8, or is over 8 Mi characters.
    """
    if isinstance(source, str):
        text, name = source, "<text>"
    else:
        name = str(source)
        try:
            with source.open("rb") as file:
                # A character of UTF-8 has 4 bytes at most: one byte more than so many shows that the file is too long,
                # whatever its size.
                text = file.read(4 * MAX_CHARACTERS + 1).decode("utf-8-sig")
        except OSError as error:
            raise InputError(f"cannot read {name!r}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{name} is not UTF-8 text (byte {error.start}); give the text file itself") from error
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"{name} has over {MAX_CHARACTERS} characters, which is the limit for a job file")
    if "\0" in text:
        raise InputError(f"{name} holds a NUL character; give a text file")
    return text, name


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested tables as one, `a.b.c` for a key; an empty table stays as a value."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def give_variable(name: str, value: str = "") -> str:
    """What to do about a variable that a script does not set, an argument of it, or a variable of its loop."""
    if value:
        return f"a loop gives it several values: --set {name}={value}, or another of them"
    if name.isdecimal():
        return f'it is argument {name} of the script: give --set {name}=…, or all of them, --set args="…"'
    return f"set it in the environment ({name}=…), or give --set {name}=…"


def shorten(value: object) -> str:
    """A value as a message shows it."""
    text = (value if isinstance(value, str) else repr(value)).replace(UNKNOWN, "$")
    return text if len(text) <= 80 else text[:77] + "..."


class Fields(Keys):
    """The flattened fields of a job file being read: what was asked for, what does not matter, what has no place."""

    def __init__(self, values: Mapping[str, object], source: str, context: ReadContext = NOTHING) -> None:
        # What was given beside the file comes last, and takes the place of what the file says.
        super().__init__({**values, **context.values()}, source)
        self._settings = frozenset(context.settings)
        self._seq_len = context.seq_len
        self._strict = context.strict
        self.notes: list[str] = []
        self.unexpressed: list[Unexpressed] = []

    def raw(self, key: str) -> object:
        """Reads a value as `Keys` does; InputError for one with a variable that the script does not set."""
        value = super().raw(key)
        for text in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(text, str) and (variable := offered(text)) is not None:
                self.fail(
                    key, f"{key} takes {variable[0]!r}, which the script does not set; {give_variable(*variable)}"
                )
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Reads a string; `default` if absent or null, an error without one."""
        value = self.raw(key)
        if value is None:
            value = self._default(key, default)
        if not isinstance(value, str):
            self.fail(key, f"expected text, got {value!r}")
        return value

    def _default(self, key: str, default: T | None) -> T:
        """A key's default, where neither it nor anything below it is there."""
        if below := next((name for name in self._values if name.startswith(f"{key}.")), None):
            self.fail(key, f"expected one value, got a mapping with {below.removeprefix(key + '.')!r} in it")
        return super()._default(key, default)

    def report(self, key: str, why: str) -> None:
        """List a field in `unexpressed`; nothing if it is absent or null."""
        value = super().raw(key)
        if value is not None and all(listed.field != key for listed in self.unexpressed):
            self.unexpressed.append(Unexpressed(field=key, value=shorten(value), why=why))

    def names(self) -> tuple[str, ...]:
        """Lists all keys."""
        return tuple(self._values)

    def peek(self, key: str) -> object:
        """The value as it is, without counting it as understood."""
        return self._values.get(key)

    def note_default(self, key: str, value: str, why: str) -> None:
        """List in `unexpressed` what leaving a field out means."""
        self.raw(key)
        if all(listed.field != key for listed in self.unexpressed):
            self.unexpressed.append(Unexpressed(field=key, value=value, why=why))

    def note_unpacked(self, key: str, value: str, seq_len: int) -> None:
        """List that samples are not packed. seq_len: of the file; `--seq-len`, where it is given, is what is priced."""
        self.note_default(key, value, f"samples may be shorter: each is priced as {self._seq_len or seq_len} tokens")

    def report_unless(self, key: str, allowed: Collection[object], why: str) -> None:
        """`report` unless the value is one of `allowed` (by type too: 1 is not True)."""
        value = self.raw(key)
        if not any(value == one and type(value) is type(one) for one in allowed):
            self.report(key, why)

    def account(
        self,
        irrelevant: Collection[str],
        inexpressible: Mapping[str, str],
        known: Collection[str],
        *,
        closed: bool = False,
    ) -> None:
        """Account for every key that nobody asked for.

        closed: the program refuses a key that it does not know: one that is a letter or two from a key that matters,
        and is not there, is a mistake.
        irrelevant: patterns of keys that do not change a step; noted. inexpressible: pattern -> why; reported unless
        switched off (false, null, 0). known: other keys of the program; reported. The rest is reported too; it is an
        InputError, with the nearest names, when strict, and for a name that was given beside the file.
        """
        for key, value in self._values.items():
            if key in self._keys_read:
                continue
            why = next((why for pattern, why in inexpressible.items() if fnmatchcase(key, pattern)), None)
            if any(fnmatchcase(key, pattern) for pattern in irrelevant):
                self.notes.append(f"{key} = {shorten(value)}{NO_EFFECT}")
            elif why is not None:
                if value not in (None, False, 0):
                    self.report(key, why)
            elif any(fnmatchcase(key, pattern) for pattern in known):
                self.report(key, "known to the program, but what it does is not described here")
            else:
                names = [*known, *self._keys_read, *irrelevant, *inexpressible]
                hint = nearest(key, [name for name in names if "*" not in name])
                # Keys that the reader looked for and the file has not: what is misspelt is missing under its right
                # name.
                misspelled = [name for name in self._keys_read - set(self._values) if _a_letter_off(key, name)]
                if closed and misspelled:
                    self.fail(
                        key, f"no field is called {key!r} (did you mean {misspelled[0]!r}?), and its program refuses it"
                    )
                if self._strict or key in self._settings:
                    self.fail(key, f"unknown field {key!r}{hint}; it may change how the job runs, so it is not ignored")
                self.report(key, UNKNOWN_FIELD + hint)


def _a_letter_off(key: str, name: str) -> bool:
    """Whether one of both is the other with a letter or two more, less or changed; of long names only, as short ones
    that are close mean other things (use_lora, use_qlora)."""
    return abs(len(key) - len(name)) <= 2 and len(name) > 12 and SequenceMatcher(None, key, name).ratio() > 0.94


def with_job_fields(stack: Stack, source: str, **values: object) -> Stack:
    """`stack` with fields that the job's own file sets; `source` names the setting. None leaves a field as it is."""
    return with_facts(stack, f"the job's own setting: {source}", "as read", **values)


def microbatches(global_batch: int, micro_batch: int, data_ranks: int, names: tuple[str, str]) -> int:
    """Microbatches of a step. InputError, with `names` of (global, micro) batch, when they do not divide."""
    together = micro_batch * data_ranks
    if global_batch % together:
        nearby = max(1, round(global_batch / together)) * together
        raise InputError(
            f"{names[0]} = {global_batch} is not a multiple of {names[1]} x data-parallel ranks = {micro_batch} x "
            f"{data_ranks} = {together}; the nearest legal {names[0]} is {nearby}"
        )
    return global_batch // together


def divides(what: str, size: int, by: str, ways: int) -> None:
    """InputError unless `ways` divides `size`; says which nearest value of `by` would."""
    if ways < 1 or size % ways:
        legal = [n for n in range(1, min(size, 4096) + 1) if size % n == 0]
        best = min(legal, key=lambda n: (abs(n - ways), n))
        raise InputError(f"{what} = {size} is not divisible by {by} = {ways}; the nearest legal {by} is {best}")
