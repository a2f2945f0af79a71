"""How each kind of op runs on divided tensors: what it needs of its inputs, what it makes, what it communicates inside.

`strategies(op, setting)` returns the ways an op can run under a plan's layout, the layout's own choice first; each
names the shardings of inputs and outputs, the axes on which input gradients come out as partial sums, and the
collectives of its own algorithm (ring or gathered attention, sharded loss, dispatch of tokens to experts, convolution
halos). Which collectives follow between ops is in `block`. Leaves out time, and layouts that are legal but that
nobody runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gnomon.errors import PlanError
from gnomon.graph import Block, Number, Op, Tensor, size_of
from gnomon.plans import Layout
from gnomon.sharding.homes import HEAD_DIMS, STATE_DIMS, base, homes, is_sequence
from gnomon.sharding.layout import Collective, CollectiveKind, Phase, Scene, Sharding, ceil_div

AXES = ("cp", "tp", "etp")
"""Axes that divide work inside a block. `ep` divides experts' weights and moves rows; data-parallel axes divide
nothing here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What an op's strategies depend on beside the op."""

    block: Block
    """The block of the op, not lowered: attention is one op."""
    layout: Layout
    """The plan's layout."""
    scene: Scene
    """Sizes of axes and dims, dtypes."""
    homes: Mapping[str, Sharding]
    """How each tensor lies between ops: `homes(block, layout, scene)`."""

    @classmethod
    def of(cls, block: Block, layout: Layout, scene: Scene) -> Setting:
        """A setting with the homes that follow."""
        return cls(block=block, layout=layout, scene=scene, homes=homes(block, layout, scene))

    def home(self, name: str) -> Sharding:
        """How the tensor `name` lies between ops."""
        return self.homes[name]

    def bytes(self, name: str, sharding: Sharding) -> Number:
        """Bytes of the tensor `name` on one rank."""
        return self.scene.bytes(self.block.tensor(name), sharding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to run an op."""

    name: str
    """`column`, `row`, `vocab_parallel`, `ring`, `all_gather`, `ulysses`, `dispatch`, `combine`, `halo`, `local`."""
    inputs: tuple[Sharding, ...]
    """What each input must be."""
    outputs: tuple[Sharding, ...]
    """What each output is, partial sums included."""
    grad_partial: tuple[tuple[str, ...], ...]
    """For each input, axes on which its gradient comes out as a partial sum."""
    inside: tuple[Collective, ...] = ()
    """Collectives of the op's own algorithm, forward ones first."""
    sizes: Mapping[str, Number] = field(default_factory=dict)
    """Sizes of dims inside the op that differ from what the shardings give, as `heads` under Ulysses."""


def strategies(op: Op, setting: Setting) -> tuple[Strategy, ...]:
    """The ways to run `op`. Attention over cp has three, the layout's choice first; other ops have one. PlanError if
    none is known."""
    plain = _captured(op, setting) if op.captured is not None else _plain(op, setting)
    if op.kind == "attention" and setting.scene.ranks("cp") > 1:
        chosen = setting.layout.context
        order = sorted(("ring", "all_gather", "ulysses"), key=lambda name: name != chosen)
        ways = {"ring": _ring, "all_gather": _gathered, "ulysses": _ulysses}
        usable = tuple(way for name in order if (way := ways[name](op, setting, plain)) is not None)
        if usable[0].name != chosen:
            raise PlanError(f"{op.path}: context = {chosen!r} cannot divide its heads over cp; use {usable[0].name!r}")
        return usable
    match op.kind:
        case "cross_entropy":
            return (_loss(op, setting, plain),)
        case "norm":
            return (_norm(op, setting, plain),)
        case "state_space" if setting.scene.ranks("cp") > 1:
            return (_scanned(op, setting, plain),)
        case "dispatch" | "combine":
            return (_experts(op, setting, plain),)
        case "conv2d":
            return (_convolution(op, setting, plain),)
        case "rename":
            return (_renamed(op, setting),)
    return (plain,)


# --- what every op follows


def _owner(op: Op, setting: Setting, axis: str) -> str | None:
    """The dim of the op's work that `axis` divides: that of its weight, else of its outputs, else of its inputs; a
    sequence only if nothing else."""
    if setting.scene.ranks(axis) == 1:
        return None
    names = (
        (*op.inputs[1:2], *op.outputs, *op.inputs)
        if op.contracts or op.kind == "embedding"
        else (*op.outputs, *op.inputs)
    )
    dims = [dim for name in names if (dim := setting.home(name).dim_of(axis)) is not None]
    return next((dim for dim in dims if not is_sequence(dim)), dims[0] if dims else None)


def _agrees(op: Op, dim: str | None, owner: str | None) -> bool:
    """Whether a tensor divided along `dim` fits work divided along `owner`: the same dim; query and key heads
    together; positions before and after (pixels and patches, queries and keys), of which a rank has the same part."""
    if dim is None or owner is None or dim == owner:
        return dim == owner
    if is_sequence(dim) and is_sequence(owner):
        return True
    if op.kind == "state_space":
        return base(dim) in STATE_DIMS and base(owner) in STATE_DIMS
    return op.kind in ("attention", "repeat") and base(dim) in HEAD_DIMS and base(owner) in HEAD_DIMS


def _plain(op: Op, setting: Setting) -> Strategy:
    """Each axis divides the op along one dim: tensors that have it are divided, the others whole, and what was summed
    over is partial."""
    inputs = [setting.home(name) for name in op.inputs]
    outputs = [setting.home(name) for name in op.outputs]
    grads: list[list[str]] = [[] for _ in inputs]
    for axis in AXES:
        owner = _owner(op, setting, axis)
        if owner is None:
            continue
        inputs = [_along(op, n, s, axis, owner, setting) for n, s in zip(op.inputs, inputs, strict=True)]
        outputs = [_along(op, n, s, axis, owner, setting) for n, s in zip(op.outputs, outputs, strict=True)]
        if any(s.dim_of(axis) for s in outputs):
            if op.kind == "grouped_linear":
                continue  # dispatch adds up the rows' gradients; an expert's weights are no replicas on these axes
            for index, sharding in enumerate(inputs):
                if sharding.dim_of(axis) is None:
                    grads[index].append(axis)
        elif axis == "etp" and op.kind == "grouped_linear":
            continue  # `combine` adds the parts up while it scatters the rows
        elif op.contracts or op.kind in _SUMMING:
            outputs = [s.with_partial(axis) for s in outputs]
        else:
            raise PlanError(
                f"{op.path}: no known way to run {op.kind} when {axis} divides {owner!r}, which its "
                f"output has not; use "
                f"{axis} = 1, or a layout rule that keeps {owner!r} whole"
            )
    name = "local"
    if (tp := _owner(op, setting, "tp")) is not None and op.contracts and not is_sequence(tp):
        name = "row" if tp in op.contracts else "column"
    elif op.kind == "embedding" and any("tp" in s.partial for s in outputs):
        name = "vocab_parallel"  # the rows are divided, not the columns
    return Strategy(
        name=name, inputs=tuple(inputs), outputs=tuple(outputs), grad_partial=tuple(tuple(g) for g in grads)
    )


def _along(op: Op, name: str, home: Sharding, axis: str, owner: str, setting: Setting) -> Sharding:
    """What a tensor must be where `axis` divides the op along `owner`: at home if that fits; of a product, divided
    along `owner` where it has that and lies divided along another dim; else whole."""
    dim = home.dim_of(axis)
    if _agrees(op, dim, owner):
        return home
    has_it = dim is not None and any(atom.name == owner for atom in setting.block.tensor(name).atoms)
    return home.without(axis).with_shard(axis, owner) if op.contracts and has_it else home.without(axis)


def _renamed(op: Op, setting: Setting) -> Strategy:
    """Divided where both tensors are, in the same place; else every rank has all of it."""
    given, made = setting.home(op.inputs[0]), setting.home(op.outputs[0])
    places = [
        {atom.name: place for place, dim in enumerate(setting.block.tensor(name).dims) for atom in dim.atoms}
        for name in (op.inputs[0], op.outputs[0])
    ]
    for axis in AXES:
        before, after = given.dim_of(axis), made.dim_of(axis)
        if before is None or after is None or places[0][before] != places[1][after]:
            given, made = given.without(axis), made.without(axis)
    return Strategy(name="local", inputs=(given,), outputs=(made,), grad_partial=((),))


def _captured(op: Op, setting: Setting) -> Strategy:
    """A captured op is divided along a dim only if all its outputs have it and its code does not look across it;
    otherwise every rank runs all of it."""
    assert op.captured is not None, "of captured ops only"
    inputs = [setting.home(name) for name in op.inputs]
    outputs = [setting.home(name) for name in op.outputs]
    grads: list[list[str]] = [[] for _ in inputs]
    for axis in AXES:
        owner = _owner(op, setting, axis)
        if owner is None:
            continue
        if owner in op.captured.summed and not any(s.dim_of(axis) for s in outputs):
            inputs = [s if _agrees(op, s.dim_of(axis), owner) else s.without(axis) for s in inputs]
            outputs = [s.with_partial(axis) for s in outputs]
            continue
        made_here = not any(s.dim_of(axis) for s in inputs)  # counts positions, or cuts them out of a longer table
        free = not {owner, "*"} & set(op.captured.whole) and not made_here
        if free and all(_agrees(op, s.dim_of(axis), owner) for s in outputs):
            inputs = [s if _agrees(op, s.dim_of(axis), owner) else s.without(axis) for s in inputs]
            for index, sharding in enumerate(inputs):
                if sharding.dim_of(axis) is None:
                    grads[index].append(axis)
        else:
            inputs, outputs = [s.without(axis) for s in inputs], [s.without(axis) for s in outputs]
    return Strategy(
        name="local", inputs=tuple(inputs), outputs=tuple(outputs), grad_partial=tuple(tuple(g) for g in grads)
    )


_SUMMING = ("embedding", "cross_entropy", "mse", "pool")
"""Kinds without `contracts` whose outputs are sums over a dim of their inputs (a masked lookup is one over the
vocabulary)."""


def _inside(
    op: Op,
    setting: Setting,
    kind: CollectiveKind,
    axis: str,
    size: Number,
    phase: Phase,
    tensor: str,
    *,
    steps: int = 1,
    weight_grad: bool = False,
) -> Collective:
    return Collective(
        kind=kind,
        axis=axis,
        ranks=setting.scene.ranks(axis),
        bytes=size,
        phase=phase,
        path=op.path,
        tensor=tensor,
        inside=True,
        steps=steps,
        weight_grad=weight_grad,
    )


def _with(
    plain: Strategy, name: str, inside: tuple[Collective, ...], sizes: Mapping[str, Number] | None = None
) -> Strategy:
    return Strategy(
        name=name,
        inputs=plain.inputs,
        outputs=plain.outputs,
        grad_partial=plain.grad_partial,
        inside=inside,
        sizes=sizes or {},
    )


# --- attention over cp: each rank has a part of every sequence


def _whole_keys(op: Op, setting: Setting) -> dict[str, Number]:
    """Keys cover the whole sequence although queries do not."""
    key_dim = setting.block.tensor(op.inputs[1]).dims[-3]
    return {f"kv_{key_dim.name}": size_of(key_dim, setting.scene.sizes)}


def _ring(op: Op, setting: Setting, plain: Strategy) -> Strategy:
    """Ring attention (Liu et al. 2023): keys and values pass around in cp-1 rounds; in backward again, and their
    gradients once all the way round, in cp rounds. Gradients are counted in the compute dtype; ring-flash-attention
    (zhuzilin) sends them in fp32, twice the bytes: a stack says."""
    cp = setting.scene.ranks("cp")
    keys = setting.bytes(op.inputs[1], plain.inputs[1]) + setting.bytes(op.inputs[2], plain.inputs[2])
    inside = (
        _inside(op, setting, "send_recv", "cp", keys, "forward", op.inputs[1], steps=cp - 1),
        _inside(op, setting, "send_recv", "cp", keys, "backward", op.inputs[1], steps=cp - 1),
        _inside(op, setting, "send_recv", "cp", keys, "backward", f"grad({op.inputs[1]})", steps=cp),
    )
    return _with(plain, "ring", inside, _whole_keys(op, setting))


def _gathered(op: Op, setting: Setting, plain: Strategy) -> Strategy:
    """Keys and values gathered over cp (as in Llama 3's training); their gradients scattered. Gathered again in
    backward unless the layout keeps gathered tensors."""
    inside = []
    for phase, kind in (("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")):
        if phase == "backward" and kind == "all_gather" and setting.layout.keep_gathered:
            continue
        for name, sharding in zip(op.inputs[1:3], plain.inputs[1:3], strict=True):
            size = setting.bytes(name, sharding.without("cp"))
            inside.append(_inside(op, setting, _KINDS[kind], "cp", size, _PHASES[phase], name))
    return _with(plain, "all_gather", tuple(inside), _whole_keys(op, setting))


_KINDS: Mapping[str, CollectiveKind] = {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter"}
_PHASES: Mapping[str, Phase] = {"forward": "forward", "backward": "backward"}


def _ulysses(op: Op, setting: Setting, plain: Strategy) -> Strategy | None:
    """DeepSpeed-Ulysses (Jacobs et al. 2023): all-to-alls exchange sequence for heads before attention and back
    after, for queries, keys, values and output, and for their gradients. None if cp does not divide the local
    heads."""
    cp, sizes = setting.scene.ranks("cp"), setting.scene.sizes
    query, key = (setting.block.tensor(name) for name in op.inputs[:2])
    local: dict[str, Number] = {}
    repeats = 1  # fewer local key-value heads than cp: each is sent to several ranks
    for tensor in (query, key):
        heads, ways = tensor.dims[-2], setting.scene.ranks("tp") * cp
        size = size_of(heads, sizes)
        if tensor is query and (not isinstance(size, int) or size % ways):
            return None
        local[heads.name] = ceil_div(size, ways)
        if isinstance(size, int) and tensor is key:
            repeats = max(1, cp // -(-size // setting.scene.ranks("tp")))
    for dim in (query.dims[-3], key.dims[-3]):
        local[dim.name] = size_of(dim, sizes)
    moved = [*zip(op.inputs[:3], plain.inputs[:3], strict=True), (op.outputs[0], plain.outputs[0])]
    inside = []
    for phase, names in (("forward", moved), ("backward", moved[::-1])):
        for name, sharding in names:
            size = setting.bytes(name, sharding) * (repeats if name in op.inputs[1:3] else 1)
            inside.append(_inside(op, setting, "all_to_all", "cp", size, _PHASES[phase], name))
    return _with(plain, "ulysses", tuple(inside), local)


# --- a scan over cp


def _scanned(op: Op, setting: Setting, plain: Strategy) -> Strategy:
    """All-to-alls exchange sequence for groups of heads before a Mamba-2 scan and back after it, and for gradients.
    Source: NVIDIA/Megatron-LM megatron/core/ssm/mamba_context_parallel.py. PlanError where a rank would get no group of
    its own (it copies groups then, which is not described)."""
    cp, sizes = setting.scene.ranks("cp"), setting.scene.sizes
    y, names = setting.block.tensor(op.outputs[0]), (op.inputs[0], op.outputs[0])
    groups = size_of(y.dims[-2], sizes)
    ways = setting.scene.ranks("tp") * cp
    if not isinstance(groups, int) or groups % ways:
        raise PlanError(
            f"{op.path}: a scan divided over cp = {cp} exchanges positions for groups of heads, and tp x cp = {ways} "
            f"does not divide {groups} groups; lower cp"
        )
    local: dict[str, Number] = {y.dims[-3].name: size_of(y.dims[-3], sizes)}
    for name in op.inputs + op.outputs:
        for dim in setting.block.tensor(name).atoms:
            if base(dim.name) in STATE_DIMS:
                local[dim.name] = ceil_div(size_of(dim, sizes), ways)
    shardings = (plain.inputs[0], plain.outputs[0])
    inside = []
    for phase in ("forward", "backward"):
        for name, sharding in zip(names, shardings, strict=True):
            inside.append(_inside(op, setting, "all_to_all", "cp", setting.bytes(name, sharding), _PHASES[phase], name))
    return _with(plain, "exchanged", tuple(inside), local)


# --- ops with statistics over a divided dim


def _rows(op: Op, setting: Setting, sharding: Sharding, over: str) -> Number:
    """Rows of the first input on one rank: its elements without the dim `over`, at one byte each."""
    tensor = setting.block.tensor(op.inputs[0])
    dims = tuple(dim for dim in tensor.dims if dim.name != over)
    return setting.scene.bytes(Tensor(name=tensor.name, dims=dims, dtype="int8"), sharding)


def _loss(op: Op, setting: Setting, plain: Strategy) -> Strategy:
    """Loss over a divided vocabulary, as Megatron-LM's: all-reduces of each token's maximum, target logit and sum of
    exponentials, in fp32; nothing in backward. Without `loss_parallel` the logits are gathered instead."""
    vocab = plain.inputs[0].dim_of("tp")
    if vocab is None or is_sequence(vocab):
        return plain
    # The loss is whole on tp either way: every rank knows every token's loss.
    outputs = tuple(sharding.without("tp") for sharding in plain.outputs)
    if not setting.layout.loss_parallel:
        inputs = tuple(sharding.without("tp") for sharding in plain.inputs)
        return Strategy(name="gathered", inputs=inputs, outputs=outputs, grad_partial=plain.grad_partial)
    size = _rows(op, setting, plain.inputs[0], vocab) * 4
    inside = tuple(_inside(op, setting, "all_reduce", "tp", size, "forward", op.outputs[0]) for _ in range(3))
    return Strategy(
        name="vocab_parallel", inputs=plain.inputs, outputs=outputs, grad_partial=plain.grad_partial, inside=inside
    )


def _norm(op: Op, setting: Setting, plain: Strategy) -> Strategy:
    """A norm over a dim that tp divides adds up its fp32 statistics over the ranks: one a row (rms) or two, forward
    and backward. So does a group norm of an image that cp divides: two for each group of each image."""
    phases: tuple[Phase, ...] = ("forward", "backward")
    over = str(op.attr("over", ""))
    if op.attr("fn", "") == "group" and plain.inputs[0].dim_of("cp") is not None:
        groups = op.attr("groups", 32)
        assert isinstance(groups, int)
        images = size_of(setting.block.tensor(op.inputs[0]).dims[0], setting.scene.sizes)
        sums = tuple(
            _inside(op, setting, "all_reduce", "cp", images * groups * 8, phase, op.inputs[0]) for phase in phases
        )
        return _with(plain, "local", sums)

    if plain.inputs[0].dim_of("tp") != over:
        return plain
    size = _rows(op, setting, plain.inputs[0], over) * (4 if op.attr("fn", "") == "rms" else 8)
    inside = tuple(_inside(op, setting, "all_reduce", "tp", size, phase, op.inputs[0]) for phase in phases)
    return _with(plain, "local", inside)


# --- experts: ep × etp refold the ranks of dp_shard × cp × tp


def _experts(op: Op, setting: Setting, plain: Strategy) -> Strategy:
    """Dispatch: rows go to the ranks of their experts (all-to-all over ep), then to all slices of them (gather over
    etp); combine is the reverse (scatter, all-to-all). Bytes are those of balanced routing. Leaves out the counts and
    probabilities that go along."""
    scene, is_dispatch = setting.scene, op.kind == "dispatch"
    if scene.ranks("tp") > 1 and not setting.layout.sequence_parallel:
        raise PlanError(
            f"{op.path}: experts with tp = {scene.ranks('tp')} need sequence_parallel: otherwise every tp "
            f"rank would send "
            f"the same tokens; set layout.sequence_parallel = true (--sequence-parallel)"
        )
    rows, sharding = (op.outputs[0], plain.outputs[0]) if is_dispatch else (op.inputs[0], plain.inputs[0])
    size, etp = setting.bytes(rows, sharding), scene.ranks("etp")
    inside: list[Collective] = []
    gather: CollectiveKind
    for phase, outward in (("forward", is_dispatch), ("backward", not is_dispatch)):
        gather = "all_gather" if outward else "reduce_scatter"
        steps: list[tuple[CollectiveKind, str, Number]] = [("all_to_all", "ep", size), (gather, "etp", size * etp)]
        for kind, axis, amount in steps if outward else steps[::-1]:
            if scene.ranks(axis) > 1:
                inside.append(_inside(op, setting, kind, axis, amount, _PHASES[phase], rows))
    return _with(plain, op.kind, tuple(inside))


# --- convolution over a divided image


def _convolution(op: Op, setting: Setting, plain: Strategy) -> Strategy:
    """Ranks that hold bands of an image send the rows at their edges to both neighbours: (kernel-1)/2 rows each way."""
    height = plain.inputs[0].dim_of("cp")
    if height is None:
        return plain
    kernel = _kernel_height(op, setting)
    if kernel == 1:
        return plain
    image = setting.block.tensor(op.inputs[0])
    row = Tensor(name=image.name, dims=tuple(d for d in image.dims if d.name != height), dtype=image.dtype)
    size = setting.scene.bytes(row, plain.inputs[0]) * ((kernel - 1) // 2)
    phases: tuple[Phase, ...] = ("forward", "backward")
    inside = tuple(_inside(op, setting, "send_recv", "cp", size, p, op.inputs[0], steps=2) for p in phases)
    return _with(plain, "halo", inside)


def _kernel_height(op: Op, setting: Setting) -> int:
    """Rows of the kernel: the contracted dim of the weight that is named for it."""
    for dim in setting.block.tensor(op.inputs[1]).dims:
        if base(dim.name) == "kernel_h" and dim.size is not None:
            return dim.size
    raise PlanError(f"{op.path}: its weight has no dim 'kernel_h', so the halo over cp is unknown; use cp = 1")
