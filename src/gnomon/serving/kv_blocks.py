"""Which KV block is whose: block tables, prefixes used again, copy-on-write, and windows that let go of old blocks.

`KvBlocks(blocks, size, windows)` is the memory that a `Scheduler` asks on the wall clock: it admits a request, finding
the longest beginning that is still there, grows it as it decodes, and releases it. A block with no owner keeps what is
written in it until somebody needs the room, the longest unused first. Numbers only: what lies in a block is the
engine's. Leaves out seconds and tokens' meaning; a token is an integer.

Names: a *group* is the layers that see the same tokens (all of them, or a window); a block number of a group stands for
that block in each of its layers. Group 0 sees everything, whether or not a model has such layers: the scheduler counts
its blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from gnomon.errors import InputError

Hash = bytes
"""Of a block's tokens and of all before them."""


class BlockPool:
    """Blocks of one group: owners counted, contents found again by hash."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self.owners = [0] * blocks
        self.empty = list(range(blocks - 1, -1, -1))
        """Without owner and without contents; the last is taken first, so that memory is used again while warm."""
        self.kept: OrderedDict[int, None] = OrderedDict()
        """Without owner, with contents; the longest unused first."""
        self.by_hash: dict[Hash, int] = {}
        self.hash_of: dict[int, Hash] = {}

    @property
    def free(self) -> int:
        """Blocks without an owner."""
        return len(self.empty) + len(self.kept)

    def take(self) -> int:
        """A block for new contents. AssertionError where there is none: who calls has counted."""
        if self.empty:
            block = self.empty.pop()
        else:
            assert self.kept, "a block is taken that nobody counted"
            block, _ = self.kept.popitem(last=False)
            del self.by_hash[self.hash_of.pop(block)]
        self.owners[block] = 1
        return block

    def share(self, block: int) -> bool:
        """One more owner of it; whether it had none."""
        alone = self.owners[block] == 0
        if alone:
            del self.kept[block]
        self.owners[block] += 1
        return alone

    def drop(self, block: int) -> None:
        """One owner less."""
        self.owners[block] -= 1
        if self.owners[block] == 0:
            if block in self.hash_of:
                self.kept[block] = None
            else:
                self.empty.append(block)

    def seal(self, block: int, by: Hash) -> None:
        """Its contents are whole and have this hash. The first block with a hash is the one that is found."""
        if by not in self.by_hash and block not in self.hash_of:
            self.by_hash[by] = block
            self.hash_of[block] = by

    def forget(self) -> None:
        """What is kept is not found any more."""
        self.empty += self.kept
        self.kept.clear()
        self.by_hash.clear()
        self.hash_of.clear()


@dataclass(slots=True)
class Held:
    """The blocks of one request."""

    tokens: array[int]
    """Ids, those of its answer too."""
    salt: bytes
    """What else its keys depend on (an adapter)."""
    tables: list[list[int]]
    """Of each group: block of each `size` tokens; -1 where a window has let go of it."""
    first_held: list[int]
    """Of each group: entries of its table before this one are let go."""
    hashes: list[Hash] = field(default_factory=list)
    """Of its whole blocks, as far as they are known."""
    sealed: int = 0
    """Blocks of group 0 whose hash the pool knows."""
    found: int = 0
    """Tokens at its beginning that needed no computing when it was last admitted."""
    computed: int = 0
    """Tokens whose keys are written."""
    slot: int = -1
    """Of the states of scans, where the model has some."""


class KvBlocks:
    """Blocks of all groups, and whose they are."""

    def __init__(
        self,
        blocks: int,
        size: int,
        *,
        windows: Sequence[int] = (),
        window_blocks: Sequence[int] = (),
        slots: int = 0,
        prefix_cache: bool = True,
    ) -> None:
        """blocks: of group 0. size: tokens of a block. windows: of the further groups, in tokens, and how many blocks
        each has. slots: states of scans, one a running request; 0 where there are none. prefix_cache: whether
        beginnings are found again, for models whose layers all see everything."""
        if prefix_cache and (windows or slots):
            raise InputError("beginnings are found again only where all layers see all tokens: say prefix_cache=False")
        self.size, self.windows, self.prefix_cache = size, tuple(windows), prefix_cache
        self.pools = [BlockPool(count) for count in (blocks, *window_blocks)]
        self.slots = list(range(slots - 1, -1, -1))
        self.has_slots = slots > 0
        self.sequences: dict[int, Held] = {}
        """Of requests that are known: waiting ones too, without blocks."""
        self.forks: dict[int, int] = {}
        """Request -> another whose prompt is the same, from which it may take blocks as it is admitted."""
        self.copies: list[tuple[int, int]] = []
        """(from, to) of group 0: blocks to be copied before the next iteration writes."""
        self.found_tokens = self.asked_tokens = 0
        """Of prompts, since the start: those that needed no computing, and all."""

    @property
    def free(self) -> int:
        """Blocks of group 0 without an owner."""
        return self.pools[0].free

    def add(self, key: int, tokens: Sequence[int], *, salt: bytes = b"", fork_of: int | None = None) -> None:
        """A request that waits. fork_of: another with the same prompt, which is being answered."""
        groups = len(self.pools)
        self.sequences[key] = Held(array("q", tokens), salt, [[] for _ in range(groups)], [0] * groups)
        if fork_of is not None:
            self.forks[key] = fork_of

    def remove(self, key: int) -> None:
        """A request that is answered or cancelled, with its blocks."""
        self.release(key)
        self.forks.pop(key, None)
        del self.sequences[key]

    def _hashes(self, sequence: Held, blocks: int) -> list[Hash]:
        known = sequence.hashes
        while len(known) < blocks:
            at = len(known) * self.size
            before = known[-1] if known else b"gnomon" + sequence.salt
            part = sequence.tokens[at : at + self.size].tobytes()
            known.append(hashlib.blake2b(part, digest_size=16, key=before[:64]).digest())
        return known

    def find(self, key: int) -> tuple[int, int]:
        """(tokens at its beginning that need no computing, blocks of them that somebody owns): what `admit` would
        find. The last token is always computed, for what follows it."""
        cached, blocks, shared = self._found(key)
        return cached, shared

    def _found(self, key: int) -> tuple[int, list[int], int]:
        sequence, pool = self.sequences[key], self.pools[0]
        prompt = len(sequence.tokens)
        parent = self.sequences.get(self.forks.get(key, -1))
        if parent is not None and self.prefix_cache and parent.computed >= prompt:
            blocks = parent.tables[0][: (prompt - 1) // self.size + 1]
            whole = (prompt - 1) // self.size
            return prompt - 1, blocks, whole  # the last one is copied, as it is written to at once
        if not self.prefix_cache:
            return 0, [], 0
        blocks = []
        for by in self._hashes(sequence, (prompt - 1) // self.size):
            block = pool.by_hash.get(by)
            if block is None:
                break
            blocks.append(block)
        return len(blocks) * self.size, blocks, sum(pool.owners[block] > 0 for block in blocks)

    def admit(self, key: int) -> int:
        """Gives a request blocks for its whole prompt and returns how many tokens of it need no computing."""
        sequence, pool = self.sequences[key], self.pools[0]
        cached, found, _ = self._found(key)
        prompt = len(sequence.tokens)
        table = sequence.tables[0]
        assert not table, "a request is admitted once"
        forked = self.forks.pop(key, None) is not None and cached % self.size
        for block in found[: cached // self.size]:
            pool.share(block)
            table.append(block)
        needed = -(-prompt // self.size)
        table += [pool.take() for _ in range(needed - len(table))]
        if forked:
            self.copies.append((found[cached // self.size], table[cached // self.size]))
        sequence.sealed, sequence.found = cached // self.size, cached
        if self.has_slots:
            sequence.slot = self.slots.pop()
        self.found_tokens += cached
        self.asked_tokens += prompt
        return cached

    def extend(self, key: int, start: int, stop: int) -> None:
        """Blocks of all groups for tokens from `start` to `stop` of it, which the next iteration writes."""
        sequence = self.sequences[key]
        needed = -(-stop // self.size)
        for table, pool in zip(sequence.tables, self.pools, strict=True):
            while len(table) < needed:
                table.append(pool.take())

    def written(self, key: int, stop: int) -> None:
        """Tokens before `stop` are written: whole blocks can be found, and windows let go of what nobody reads."""
        sequence = self.sequences[key]
        sequence.computed = stop
        whole = stop // self.size
        if self.prefix_cache and whole > sequence.sealed:
            hashes, table = self._hashes(sequence, whole), sequence.tables[0]
            for index in range(sequence.sealed, whole):
                self.pools[0].seal(table[index], hashes[index])
            sequence.sealed = whole
        for group, window in enumerate(self.windows, 1):
            table, pool = sequence.tables[group], self.pools[group]
            # the token at `stop` sees those from stop - window + 1 on
            until = max(0, stop - window + 1) // self.size
            for index in range(sequence.first_held[group], min(until, len(table))):
                pool.drop(table[index])
                table[index] = -1
            sequence.first_held[group] = max(sequence.first_held[group], min(until, len(table)))

    def release(self, key: int) -> None:
        """Its blocks have one owner less; what it wrote may be found until they are taken."""
        sequence = self.sequences[key]
        for group, (table, pool) in enumerate(zip(sequence.tables, self.pools, strict=True)):
            for block in reversed(table):  # the end of a sequence is of use to fewer others than its beginning
                if block >= 0:
                    pool.drop(block)
            table.clear()
            sequence.first_held[group] = 0
        sequence.sealed = sequence.computed = 0
        if sequence.slot >= 0:
            self.slots.append(sequence.slot)
            sequence.slot = -1
        mine = [copy for copy in self.copies if self.pools[0].owners[copy[1]] == 0]
        for copy in mine:
            self.copies.remove(copy)

    def problems(self) -> list[str]:
        """What is wrong with the counts, for tests: every block has as many owners as tables name it."""
        found = []
        for group, pool in enumerate(self.pools):
            owners = [0] * pool.total
            for sequence in self.sequences.values():
                for block in sequence.tables[group]:
                    if block >= 0:
                        owners[block] += 1
            if owners != pool.owners:
                found.append(f"group {group}: owners are {pool.owners}, tables say {owners}")
            unowned = sorted([*pool.empty, *pool.kept])
            if unowned != [block for block in range(pool.total) if not owners[block]]:
                found.append(f"group {group}: blocks without owner are not those that no table names")
        return found
