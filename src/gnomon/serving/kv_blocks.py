"""Which KV block is whose: block tables, prefixes used again, copy-on-write, windows that let go of old blocks, and
snapshots of scans' states.

`KvBlocks(blocks, size, windows)` is the memory that a `Scheduler` asks on the wall clock: it admits a request, finding
the longest beginning that is still there, grows it as it decodes, and releases it. A block with no owner keeps what is
written in it until somebody needs the room, the longest unused first. Numbers only: what lies in a block is the
engine's. Leaves out seconds and tokens' meaning; a token is an integer.

A beginning is found as far as everything is still there that its next token reads: its blocks in layers that see all
tokens, those within the window in layers that have one, and, for scans, a snapshot of the state after just so many
tokens. Snapshots are taken where a whole block ends: the last one of a prompt, the last one of an answer so far, and
where the blocks of a prompt were found and no snapshot was (a beginning that others have too: as SGLang's radix tree
does for Mamba). They have slots of their own, and the longest unused goes first.

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

Hash = bytes
"""The hash of a block's tokens and of all before them."""


class BlockPool:
    """Blocks of one group: owners counted, contents found again by hash."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self.owners = [0] * blocks
        self.empty = list(range(blocks - 1, -1, -1))
        """Blocks without owner and without contents; the last is taken first, so that memory is used again while
        warm."""
        self.cached: OrderedDict[int, None] = OrderedDict()
        """Blocks without owner, with contents; the longest unused first."""
        self.by_hash: dict[Hash, int] = {}
        self.hash_of: dict[int, Hash] = {}

    @property
    def free(self) -> int:
        """Counts the blocks without an owner."""
        return len(self.empty) + len(self.cached)

    def take(self) -> int:
        """Takes a block for new contents. AssertionError where there is none: who calls has counted."""
        if self.empty:
            block = self.empty.pop()
        else:
            assert self.cached, "a block is taken that nobody counted"
            # Contents are forgotten only now: until somebody needs the room, the block can be found by its hash.
            block, _ = self.cached.popitem(last=False)
            del self.by_hash[self.hash_of.pop(block)]
        self.owners[block] = 1
        return block

    def share(self, block: int) -> bool:
        """Adds an owner to a block; returns whether it had none."""
        is_first = self.owners[block] == 0
        if is_first:
            # A block without owner that somebody found by its hash lies in `cached`: those in `empty` have no hash.
            del self.cached[block]
        self.owners[block] += 1
        return is_first

    def drop(self, block: int) -> None:
        """Takes an owner from a block, which becomes free with the last."""
        self.owners[block] -= 1
        if self.owners[block] == 0:
            if block in self.hash_of:
                self.cached[block] = None
            else:
                self.empty.append(block)

    def seal(self, block: int, by: Hash) -> None:
        """Notes that a block's contents are whole and have this hash. The first block with a hash is the one that is
        found."""
        if by not in self.by_hash and block not in self.hash_of:
            self.by_hash[by] = block
            self.hash_of[block] = by


class Snapshots:
    """States after whole blocks of tokens, by their hash; slots `first` to `first + count - 1`."""

    def __init__(self, first: int, count: int) -> None:
        self.empty = list(range(first + count - 1, first - 1, -1))
        self.slots: OrderedDict[Hash, int] = OrderedDict()
        """Slots by hash; the longest unused first."""
        self.total = count

    def take(self) -> int | None:
        """Takes a slot to write to; None where all are being written to."""
        if not self.empty and self.slots:
            self.empty.append(self.slots.popitem(last=False)[1])
        return self.empty.pop() if self.empty else None

    def keep(self, by: Hash, slot: int) -> None:
        """Notes that what was written to a slot is the state after tokens of this hash."""
        # Two requests with the same beginning wrote the same state: one copy is enough.
        if by in self.slots:
            self.empty.append(slot)
        else:
            self.slots[by] = slot
        self.slots.move_to_end(by)

    def drop(self, by: Hash) -> None:
        """Drops a snapshot that nobody will ask for."""
        if (slot := self.slots.pop(by, None)) is not None:
            self.empty.append(slot)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest beginning of a prompt that needs no computing."""

    tokens: int = 0
    """Its tokens; 0: none."""
    blocks: tuple[int, ...] = ()
    """Blocks of group 0 that hold it."""
    shared: int = 0
    """How many of these somebody owns."""
    windowed: tuple[tuple[int, ...], ...] = ()
    """Blocks of each further group, those within its window."""
    branch: int = 0
    """Tokens whose blocks are there, where no snapshot is; 0 where there are none such."""


@dataclass(slots=True)
class RequestBlocks:
    """The blocks of one request."""

    tokens: array[int]
    """Ids of its tokens, those of its answer too."""
    salt: bytes
    """What its keys depend on apart from tokens (an adapter)."""
    tables: list[list[int]]
    """Of each group the block of each `size` tokens; -1 where a window has let go of it."""
    first_held: list[int]
    """The entries of each group's table before which all are let go."""
    hashes: list[Hash] = field(default_factory=list)
    """Hashes of its whole blocks, as far as they are known."""
    sealed: int = 0
    """The number of its blocks whose hash the pools know."""
    num_cached: int = 0
    """Tokens at its beginning that needed no computing when it was last admitted."""
    num_computed: int = 0
    """Tokens whose keys are written."""
    slot: int = -1
    """The slot of its scans' states, where the model has some; -1 for none."""
    marks: tuple[int, ...] = ()
    """Tokens after which its state is wanted as a snapshot."""
    taking: list[tuple[int, int]] = field(default_factory=list)
    """(tokens, slot) of snapshots that the next iteration writes."""
    last: Hash | None = None
    """Of its snapshot within its answer: the next one takes its place."""
    source: int = 0
    """Tokens that an encoder reads for it, whose keys and values it holds while it is admitted."""
    prefix_blocks: list[int] = field(default_factory=list)
    """Blocks of group 0 that these lie in."""


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
        snapshots: int = 0,
        prefix_cache: bool = True,
    ) -> None:
        """Takes the number of blocks of group 0, the tokens of a block (size), the windows of the further groups in
        tokens with how many blocks each has, the slots of scans' states (one a running request; 0 where there are
        none), the snapshots (slots after these), and prefix_cache, whether beginnings are found again."""
        self.size, self.windows, self.prefix_cache = size, tuple(windows), prefix_cache
        self.pools = [BlockPool(count) for count in (blocks, *window_blocks)]
        self.slots = list(range(slots - 1, -1, -1))
        self.has_slots = slots > 0
        self.snapshots = Snapshots(slots, snapshots if prefix_cache else 0)
        self.states: list[tuple[int, int]] = []
        """(from, to): slots whose states are copied before the next iteration writes."""
        self.sequences: dict[int, RequestBlocks] = {}
        """The requests that are known: waiting ones too, without blocks."""
        self.forks: dict[int, int] = {}
        """Maps a request to another whose prompt is the same, from which it may take blocks as it is admitted."""
        self.copies: list[tuple[int, int]] = []
        """(from, to) of group 0: blocks to be copied before the next iteration writes."""
        self.found_tokens = self.asked_tokens = 0
        """Tokens of prompts since the start: those that needed no computing, and all."""

    @property
    def free(self) -> int:
        """Counts the blocks of group 0 without an owner."""
        return self.pools[0].free

    def add(
        self, key: int, tokens: Sequence[int], *, salt: bytes = b"", fork_of: int | None = None, source: int = 0
    ) -> None:
        """A request that waits. fork_of: another with the same prompt, which is being answered. source: tokens that an
        encoder reads for it."""
        groups = len(self.pools)
        self.sequences[key] = RequestBlocks(
            array("q", tokens), salt, [[] for _ in range(groups)], [0] * groups, source=source
        )
        if fork_of is not None:
            self.forks[key] = fork_of

    def remove(self, key: int) -> None:
        """Removes a request that is answered or cancelled, with its blocks."""
        self.release(key)
        self.forks.pop(key, None)
        del self.sequences[key]

    def _hashes(self, sequence: RequestBlocks, blocks: int) -> list[Hash]:
        known = sequence.hashes
        # Each hash is keyed with the one before it, so equal hashes mean equal beginnings, not only equal blocks.
        while len(known) < blocks:
            at = len(known) * self.size
            before = known[-1] if known else hashlib.blake2b(sequence.salt, digest_size=16).digest()
            part = sequence.tokens[at : at + self.size].tobytes()
            known.append(hashlib.blake2b(part, digest_size=16, key=before).digest())
        return known

    def find(self, key: int) -> tuple[int, int]:
        """(tokens at its beginning that need no computing, blocks of them that somebody owns): what `admit` would
        find. The last token is always computed, for what follows it."""
        found = self._found(key)
        return found.tokens, found.shared

    def _found(self, key: int) -> PrefixHit:
        sequence, pool = self.sequences[key], self.pools[0]
        prompt = len(sequence.tokens)
        if not self.prefix_cache:
            return PrefixHit()
        parent = self.sequences.get(self.forks.get(key, -1))
        # A fork may take the parent's blocks only where they still hold the whole prompt: windows let go of old blocks,
        # and the state of a scan has gone on beyond it.
        plain = not self.windows and not self.has_slots
        if parent is not None and plain and parent.num_computed >= prompt:
            whole = (prompt - 1) // self.size
            # the last one is copied, as it is written to at once
            return PrefixHit(prompt - 1, tuple(parent.tables[0][: whole + 1]), whole)
        # The last token is always computed, so a block that ends with it is not looked for.
        hashes = self._hashes(sequence, (prompt - 1) // self.size)
        blocks = []
        for by in hashes:
            block = pool.by_hash.get(by)
            if block is None:
                break
            blocks.append(block)
        count = self._whole(hashes, len(blocks))
        at = count * self.size
        windowed = tuple(
            tuple(other.by_hash[by] for by in hashes[self._first_seen(window, at) : count])
            for window, other in zip(self.windows, self.pools[1:], strict=True)
        )
        shared = sum(pool.owners[block] > 0 for block in blocks[:count])
        # Keys are there and a state is not: others share this beginning, so a snapshot at its end will be of use.
        branch = len(blocks) * self.size if self.has_slots and len(blocks) > count else 0
        return PrefixHit(at, tuple(blocks[:count]), shared, windowed, branch)

    def _whole(self, hashes: Sequence[Hash], most: int) -> int:
        """Blocks, at most so many, after which everything is there that the next token reads."""
        # runs[g]: blocks in a row that are there in group g; enough of them must cover the window.
        runs = [0] * len(self.windows)
        best = 0 if self.windows or self.has_slots else most
        for count in range(1, most + 1 if self.windows or self.has_slots else 1):
            fits = not self.has_slots or hashes[count - 1] in self.snapshots.slots
            for group, window in enumerate(self.windows):
                there = hashes[count - 1] in self.pools[group + 1].by_hash
                runs[group] = runs[group] + 1 if there else 0
                fits = fits and runs[group] >= count - self._first_seen(window, count * self.size)
            best = count if fits else best
        return best

    def _first_seen(self, window: int, at: int) -> int:
        """Returns a window's first block that the token at `at` sees: it sees those from at - window + 1 on."""
        return max(0, at - window + 1) // self.size

    def admit(self, key: int) -> int:
        """Gives a request blocks for its whole prompt and returns how many tokens of it need no computing."""
        sequence, pool = self.sequences[key], self.pools[0]
        seen = self._found(key)
        cached, found = seen.tokens, seen.blocks
        prompt = len(sequence.tokens)
        table = sequence.tables[0]
        assert not table, "a request is admitted once"
        # Only a fork has a part of a block in common: hashes are of whole blocks.
        forked = self.forks.pop(key, None) is not None and cached % self.size
        for block in found[: cached // self.size]:
            pool.share(block)
            table.append(block)
        needed = -(-prompt // self.size)
        table += [pool.take() for _ in range(needed - len(table))]
        sequence.prefix_blocks = [pool.take() for _ in range(-(-sequence.source // self.size))]
        if forked:
            self.copies.append((found[cached // self.size], table[cached // self.size]))
        # Found blocks are whole, so they are sealed already.
        sequence.sealed, sequence.num_cached = cached // self.size, cached
        for group, blocks in enumerate(seen.windowed, 1):
            for block in blocks:
                self.pools[group].share(block)
            # Blocks before the window stay -1, so that an index is a position in every group.
            first = cached // self.size - len(blocks)
            sequence.tables[group] += [-1] * first + list(blocks)
            sequence.first_held[group] = first
        if self.has_slots:
            sequence.slot = self.slots.pop()
            if cached:
                by = sequence.hashes[cached // self.size - 1]
                self.snapshots.slots.move_to_end(by)
                # The request changes its state in place, so it gets a copy and the snapshot stays for others.
                self.states.append((self.snapshots.slots[by], sequence.slot))
            # Snapshots are wanted at the last whole block of the prompt, and where a beginning branched off.
            last = (prompt - 1) // self.size * self.size
            sequence.marks = tuple(sorted({seen.branch, last} - {0, cached})) if self.prefix_cache else ()
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
        if self.snapshots.total:
            for at in self._marked(sequence, start, stop):
                if (slot := self.snapshots.take()) is not None:
                    sequence.taking.append((at, slot))

    def _marked(self, sequence: RequestBlocks, start: int, stop: int) -> list[int]:
        """Tokens after which a snapshot is taken, of those that an iteration computes."""
        marks_made = [at for at in sequence.marks if start < at <= stop]
        # Within an answer each whole block gets a snapshot that takes the last one's place (`mark_written`), since only
        # the latest is of use to a request that goes on from this one. stop - start == 1: one token, a decode.
        answers = not sequence.marks or start >= sequence.marks[-1]
        if answers and stop - start == 1 and stop % self.size == 0 and stop not in marks_made:
            marks_made.append(stop)
        return marks_made

    def mark_written(self, key: int, stop: int) -> None:
        """Tokens before `stop` are written: whole blocks can be found, and windows let go of what nobody reads."""
        sequence = self.sequences[key]
        sequence.num_computed = stop
        whole = stop // self.size
        if self.prefix_cache and whole > sequence.sealed:
            hashes = self._hashes(sequence, whole)
            for table, pool in zip(sequence.tables, self.pools, strict=True):
                for index in range(sequence.sealed, whole):
                    # A block becomes findable only once its keys are written, not when it is taken.
                    pool.seal(table[index], hashes[index])
            sequence.sealed = whole
        for at, slot in sequence.taking:
            by = self._hashes(sequence, at // self.size)[at // self.size - 1]
            if at not in sequence.marks:
                if sequence.last is not None:
                    self.snapshots.drop(sequence.last)
                sequence.last = by
            self.snapshots.keep(by, slot)
        sequence.taking.clear()
        for group, window in enumerate(self.windows, 1):
            table, pool = sequence.tables[group], self.pools[group]
            # Blocks wholly before the window are dropped; the table keeps -1 so that indices stay positions.
            until = self._first_seen(window, stop)
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
        for block in sequence.prefix_blocks:
            self.pools[0].drop(block)
        sequence.prefix_blocks = []
        sequence.sealed = sequence.num_computed = 0
        # Snapshots that were to be written by an iteration that will not come.
        self.snapshots.empty += [slot for _, slot in sequence.taking]
        sequence.taking.clear()
        sequence.last = None
        if sequence.slot >= 0:
            self.slots.append(sequence.slot)
            # The slot may go to another request before the copies are made.
            self.states = [copy for copy in self.states if copy[1] != sequence.slot]
            sequence.slot = -1
        # Copies into blocks that nobody owns any more need not be made.
        mine = [copy for copy in self.copies if self.pools[0].owners[copy[1]] == 0]
        for copy in mine:
            self.copies.remove(copy)

    def problems(self) -> list[str]:
        """What is wrong with the counts, for tests: every block has as many owners as tables name it."""
        found = []
        for group, pool in enumerate(self.pools):
            owners = [0] * pool.total
            for sequence in self.sequences.values():
                for block in (*sequence.tables[group], *(() if group else sequence.prefix_blocks)):
                    if block >= 0:
                        owners[block] += 1
            if owners != pool.owners:
                found.append(f"group {group}: owners are {pool.owners}, tables say {owners}")
            unowned = sorted([*pool.empty, *pool.cached])
            if unowned != [block for block in range(pool.total) if not owners[block]]:
                found.append(f"group {group}: blocks without owner are not those that no table names")
        taking = [slot for sequence in self.sequences.values() for _, slot in sequence.taking]
        slots = [*self.snapshots.empty, *self.snapshots.slots.values(), *taking]
        if len(slots) != self.snapshots.total or len(set(slots)) != len(slots):
            found.append(f"slots of snapshots are {sorted(slots)}, and there are {self.snapshots.total}")
        return found
