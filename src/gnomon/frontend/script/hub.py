"""Packages around the Hugging Face hub, when a script imports them: models without weights, what is not here stood in.

`patched_imports()` is a context in which functions of transformers, datasets, trl, accelerate and deepspeed are
replaced as their modules are imported: `from_pretrained` builds a model from its config.json alone, a tokenizer or data
set that is not on this machine is stood in for, `Trainer.train` stops the script. None of the packages is imported
here. Leaves out what was found (`answer`).
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import torch

from gnomon.errors import GnomonError
from gnomon.formats.hub import download, find_network, folder_of, is_hub_id, sizes_called
from gnomon.frontend.script.machine import PassThrough, Sharded, fully_shard, where
from gnomon.frontend.script.seen import SEEN, NotHere, Stop
from gnomon.frontend.script.unsloth import older_config, older_trainer, stand_in
from gnomon.models.llama import LlamaConfig
from gnomon.models.presets import CONFIGS

HELD: Mapping[str, object] = {
    "deepspeed": None,
    "fsdp": None,
    "fsdp_config": None,
    "use_liger_kernel": False,
    "torch_compile": False,
    "push_to_hub": False,
    "tf32": None,
}
"""Fields of TrainingArguments that ask for devices, packages or the network -> what stands there meanwhile."""

BACK = ("bf16", "fp16")
"""Fields that are as they were once the arguments are made: only their check asks for a device."""

ROWS = 1000
"""Of a data set that is stood in for, and the most that are taken of one that is here."""

WORDS = "What is the answer to this question? The answer is that it depends on the question."


def here(name: str) -> str:
    """The folder of a model that is named: itself, or one of its last name beside the script or where it is run."""
    if not is_hub_id(name) or Path(name).is_dir():
        return name
    places = (Path.cwd(), Path(sys.argv[0]).resolve().parent)
    # Where `hf download` was told to put it, or a clone of it lies.
    return next((str(p / folder_of(name)) for p in places if (p / folder_of(name) / "config.json").is_file()), name)


def known_config(name: str) -> dict[str, object] | None:
    """The config.json of a model whose sizes are known by its name, or are the catalogue's in the form of Llama and
    Qwen; None for others."""
    if (sized := sizes_called(name)) is not None:
        return {**sized[0], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    try:
        found = find_network(name)
    except GnomonError:
        return None
    config = found[0] if found else None
    config = CONFIGS[config]() if isinstance(config, str) and config in CONFIGS else config
    if not isinstance(config, LlamaConfig):
        return None
    kind, cls = ("llama", "LlamaForCausalLM")
    if config.qk_norm:
        kind, cls = "qwen3", "Qwen3ForCausalLM"
    elif config.qkv_bias:
        kind, cls = "qwen2", "Qwen2ForCausalLM"
    elif config.window:
        kind, cls = "mistral", "MistralForCausalLM"
    return {
        "architectures": [cls],
        "model_type": kind,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        "hidden_act": config.activation,
        "max_position_embeddings": 32768,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


def _configs(module: Any) -> None:
    cls = getattr(module, "PreTrainedConfig", None) or module.PretrainedConfig
    begin = cls.get_config_dict.__func__

    def get_config_dict(cls: Any, name: Any, /, **kwargs: Any) -> Any:
        name = here(str(name))
        try:
            # A cache of the Hub may hold it; the network is closed, so anything else raises here.
            return begin(cls, name, **kwargs)
        except Exception:
            known = known_config(name)
            if known is not None:
                SEEN.note(f"{name}: its config.json is not here; the catalogue's sizes are taken for it")
                return known, kwargs
            if is_hub_id(name):
                raise NotHere(
                    f"the script loads {name!r}, whose config.json is not on this machine; {download(name)}, and run "
                    f"the command again: {folder_of(name)}/config.json is then taken"
                ) from None
            raise

    cls.get_config_dict = classmethod(get_config_dict)


def _dtype(kwargs: Mapping[str, Any], config: Any, newer: bool) -> torch.dtype:
    """The dtype of a model's parameters, as from_pretrained decides: transformers 5 takes the config's where none is
    said."""
    stated = kwargs.get("dtype", kwargs.get("torch_dtype"))
    if stated is None:
        # (The default of from_pretrained changed with release 5.)
        stated = "auto" if newer else torch.float32
    if stated == "auto":
        stated = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float32
    if isinstance(stated, str):
        stated = getattr(torch, stated.removeprefix("torch."))
    assert isinstance(stated, torch.dtype)
    return stated


def _built(cls: Any, name: Any, config: Any, kwargs: Mapping[str, Any]) -> Any:
    """The model of a config, without memory for weights. name: that it is asked for by."""
    config.name_or_path = str(name)
    transformers = sys.modules["transformers"]
    dtype = _dtype(kwargs, config, int(transformers.__version__.partition(".")[0]) >= 5)
    quantization = kwargs.get("quantization_config") or getattr(config, "quantization_config", None)
    # As keywords before release 5 of transformers, and in a config since.
    four = kwargs.get("load_in_4bit") or _asks_for(quantization, "load_in_4bit")
    eight = kwargs.get("load_in_8bit") or _asks_for(quantization, "load_in_8bit")
    if quantization is not None and not (four or eight):
        SEEN.note(
            f"{where()}: weights are stored by {type(quantization).__name__}; read in the compute dtype: too large"
        )
    for name, value in kwargs.items():  # from_pretrained sets keys of the config by name
        if hasattr(config, name) and name not in ("dtype", "torch_dtype", "quantization_config", "attn_implementation"):
            setattr(config, name, value)
    with contextlib.suppress(AttributeError):
        # FlashAttention's package need not be here; what the script asked for is read from its arguments.
        config._attn_implementation = "sdpa" if getattr(cls, "_supports_sdpa", True) else "eager"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        # Weights of 70B parameters are not to be allocated for a prediction.
        with torch.device("meta"):
            model = cls(config)
    finally:
        torch.set_default_dtype(before)
    with contextlib.suppress(AttributeError):
        config.dtype = dtype
    if four or eight:
        SEEN.quantised = "nf4" if four else "int8"
        model.is_loaded_in_4bit, model.is_loaded_in_8bit = bool(four), bool(eight)
    # As from_pretrained leaves it.
    model.eval()
    return model


def _asks_for(config: Any, name: str) -> bool:
    return bool(config.get(name) if isinstance(config, Mapping) else getattr(config, name, False))


def _models(module: Any) -> None:
    cls = module.PreTrainedModel

    def from_pretrained(cls: Any, name: Any, /, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        if config is None or isinstance(config, (str, os.PathLike)):
            config = cls.config_class.from_pretrained(config or name)
        return _built(cls, name, config, kwargs)

    cls.from_pretrained = classmethod(from_pretrained)
    resize = cls.resize_token_embeddings

    def resized(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "mean_resizing" in resize.__code__.co_varnames:
            kwargs["mean_resizing"] = False  # which computes with the weights
        return resize(self, *args, **kwargs)

    cls.resize_token_embeddings = resized


def _auto(module: Any) -> None:
    cls = module._BaseAutoModelClass
    begin = cls.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, /, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        if config is None or isinstance(config, (str, os.PathLike)):
            words = {"trust_remote_code": kwargs["trust_remote_code"]} if "trust_remote_code" in kwargs else {}
            config = sys.modules["transformers"].AutoConfig.from_pretrained(config or name, **words)
        # Code of the model's own repository, which transformers imports: it needs the files.
        if type(config) not in cls._model_mapping:
            return begin(cls, name, *args, config=config, **kwargs)
        return _built(module._get_model_class(config, cls._model_mapping), name, config, kwargs)

    cls.from_pretrained = classmethod(from_pretrained)


def _tokenizers(module: Any) -> None:
    cls = getattr(module, "AutoTokenizer", None) or module.PreTrainedTokenizerBase
    begin = cls.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return begin(cls, here(str(name)), *args, **kwargs)
        except (Exception, NotHere):
            SEEN.note(f"{name}: its tokenizer is not here; a stand-in divides text at spaces")
            return _words(str(name))

    cls.from_pretrained = classmethod(from_pretrained)


def _words(name: str) -> Any:
    """A tokenizer of as many words as the model has rows, where they are known."""
    transformers, tokenizers = sys.modules["transformers"], sys.modules["tokenizers"]
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        size = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
    except (Exception, NotHere):
        size = 32000
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    # As many words as rows, so that ids stay inside the table.
    words = {word: index for index, word in enumerate([*special, *map(str, range(max(0, size - len(special))))][:size])}
    word_level = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    word_level.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_level, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.name_or_path = name
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    return tokenizer


def _arguments(module: Any) -> None:
    cls = module.TrainingArguments
    begin = cls.__post_init__

    def post_init(self: Any) -> None:
        present = {name: getattr(self, name) for name in (*HELD, *BACK) if hasattr(self, name)}
        SEEN.withheld = {**present, "report_to": self.report_to, "output_dir": self.output_dir}
        for name, value in (*HELD.items(), *((name, False) for name in BACK)):
            if name in present:
                setattr(self, name, value)
        # No run is reported and no folder made for a question.
        self.report_to, self.output_dir = [], tempfile.gettempdir()
        if hasattr(self, "use_cpu"):
            self.use_cpu = True
        elif hasattr(self, "no_cuda"):
            self.no_cuda = True
        begin(self)
        for name in BACK:
            if name in present:
                setattr(self, name, present[name])

    cls.__post_init__ = post_init


def _trainer(module: Any) -> None:
    def train(self: Any, *args: Any, **kwargs: Any) -> None:
        SEEN.trainer = self
        SEEN.stopped_at = f"{type(self).__name__}.train() ({where()})"
        raise Stop

    module.Trainer.train = train


def _four_bits(module: Any) -> None:
    cls = getattr(module, "BitsAndBytesConfig", None)
    if cls is None:
        return
    begin = cls.post_init

    def post_init(self: Any) -> None:
        with contextlib.suppress(PackageNotFoundError, ImportError):  # the package itself is not needed
            begin(self)

    cls.post_init = post_init


class BlankRow(dict[str, Any]):
    """A row of data that nobody has: text under every key."""

    def __init__(self, *args: Any, many: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.many = many

    def __missing__(self, key: str) -> Any:
        chat = [{"role": "user", "content": WORDS}, {"role": "assistant", "content": WORDS}]
        one: Any = chat if key in ("messages", "conversations", "chosen", "rejected") else WORDS
        return [one] * self.many if self.many else one


def _data(module: Any) -> None:
    begin = module.load_dataset

    class StandIn(module.Dataset):  # type: ignore[misc,name-defined]
        """A data set that is not here: its columns are those that the script's functions return."""

        def __init__(self, row: BlankRow) -> None:
            table = module.table.InMemoryTable.from_pydict({"text": [WORDS]})
            super().__init__(table, fingerprint="stand-in")  # for who looks behind the methods
            self.row = row

        def map(self, function: Any = None, *args: Any, batched: bool = False, **kwargs: Any) -> Any:
            row = BlankRow(self.row)
            row_given = BlankRow({k: [v, v] for k, v in row.items()}, many=2) if batched else BlankRow(row)
            words = dict(kwargs.get("fn_kwargs") or {})
            try:
                out = function(row_given, *([[0, 1] if batched else 0] if kwargs.get("with_indices") else []), **words)
            except Exception:
                SEEN.note(f"{where()}: a function over data that is not here failed on a stand-in; it is passed over")
                out = None
            removed = kwargs.get("remove_columns") or ()
            for name in [removed] if isinstance(removed, str) else removed:
                row.pop(name, None)
            if isinstance(out, Mapping):
                row |= {k: (v[0] if batched and isinstance(v, list) and v else v) for k, v in out.items()}
            return StandIn(row)

        def _same(self, *args: Any, **kwargs: Any) -> Any:
            return self

        filter = select = shuffle = flatten = sort = cast = with_format = with_transform = shard = take = skip = _same
        rename_column = rename_columns = select_columns = class_encode_column = repeat = flatten_indices = _same
        set_format = set_transform = to_iterable_dataset = _same

        def remove_columns(self, names: Any, *args: Any, **kwargs: Any) -> Any:
            dropped = {names} if isinstance(names, str) else set(names)
            return StandIn(BlankRow({k: v for k, v in self.row.items() if k not in dropped}))

        def add_column(self, name: str, column: Any, *args: Any, **kwargs: Any) -> Any:
            return StandIn(BlankRow({**self.row, name: column[0]}))

        def train_test_split(self, *args: Any, **kwargs: Any) -> Any:
            return Splits({"train": self, "test": self})

        def __len__(self) -> int:
            return ROWS

        def __iter__(self) -> Any:
            return (BlankRow(self.row) for _ in range(ROWS))

        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, str):
                return [BlankRow(self.row)[key]] * ROWS
            if isinstance(key, (slice, list)):
                count = len(range(*key.indices(ROWS))) if isinstance(key, slice) else len(key)
                return BlankRow({k: [v] * count for k, v in self.row.items()}, many=count)
            return BlankRow(self.row)

        __getitems__ = __getitem__
        num_rows = property(lambda self: ROWS)
        column_names = property(lambda self: list(self.row))
        features = property(lambda self: dict.fromkeys(self.row))
        num_columns = property(lambda self: len(self.row))

        def __repr__(self) -> str:
            return f"a stand-in of {ROWS} rows"

    class Splits(module.DatasetDict):  # type: ignore[misc,name-defined]
        def __missing__(self, key: str) -> Any:
            return StandIn(BlankRow({"text": WORDS}))

    def load_dataset(path: Any, name: Any = None, *args: Any, **kwargs: Any) -> Any:
        try:
            found = begin(path, name, *args, **kwargs)
        except Exception as error:
            if Path(str(path)).exists() or kwargs.get("data_files"):
                raise
            SEEN.note(f"data set {path}: not here ({type(error).__name__}); a stand-in, so lengths are those asked for")
            stand_in = StandIn(BlankRow({"text": WORDS}))
            splits = Splits({"train": stand_in, "test": stand_in, "validation": stand_in})
            return splits if kwargs.get("split") is None else stand_in
        return _fewer(module, found)

    module.load_dataset = load_dataset


def _first(data: Any) -> Any:
    return data.select(range(ROWS)) if hasattr(data, "select") and len(data) > ROWS else data


def _fewer(module: Any, found: Any) -> Any:
    """The first rows of what is here: they tell lengths, and no more are needed."""
    if isinstance(found, module.DatasetDict):
        return module.DatasetDict({name: _first(data) for name, data in found.items()})
    return _first(found)


def is_stand_in(data: Any) -> bool:
    """Whether data are not here."""
    return type(data).__qualname__.startswith("_data.") and type(data).__name__ == "StandIn"


def _prepared(module: Any) -> None:
    """TRL's preparation of data passes over data that are not here."""
    for value in list(vars(module).values()):
        begin = vars(value).get("_prepare_dataset") if isinstance(value, type) else None
        if begin is not None:

            def prepare(self: Any, dataset: Any, *args: Any, begin: Any = begin, **kwargs: Any) -> Any:
                return dataset if is_stand_in(dataset) else begin(self, dataset, *args, **kwargs)

            value._prepare_dataset = prepare


def _sft(module: Any) -> None:
    _prepared(module)
    older_trainer(module)


def _accelerator(module: Any) -> None:
    cls = module.Accelerator
    begin = cls.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("mixed_precision", "deepspeed_plugin", "fsdp_plugin", "log_with", "dynamo_plugin"):
            if kwargs.get(name) not in (None, "no"):
                SEEN.launcher[name] = kwargs.pop(name)
        begin(self, *args, **kwargs)
        SEEN.launcher["gradient_accumulation_steps"] = self.gradient_accumulation_steps

    cls.__init__ = init


def _fsdp(module: Any) -> None:
    module.FullyShardedDataParallel, module.fully_shard = Sharded, fully_shard


def _deepspeed(module: Any) -> None:
    class EngineStub(PassThrough):
        """Stands in for DeepSpeed's engine and notes its config."""

        device = torch.device("cpu")

        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
            loss.backward()
            return loss

        def step(self, *args: Any, **kwargs: Any) -> None:
            steps = SEEN.deepspeed.get("gradient_accumulation_steps", 1) if SEEN.deepspeed else 1
            if SEEN.backwards >= int(steps if isinstance(steps, int) else 1):
                SEEN.stopped_at = f"the first step of deepspeed's engine ({where()})"
                raise Stop

        def is_gradient_accumulation_boundary(self) -> bool:
            return True

    def initialize(args: Any = None, model: Any = None, optimizer: Any = None, **kwargs: Any) -> Any:
        config = kwargs.get("config") or kwargs.get("config_params") or getattr(args, "deepspeed_config", None)
        if isinstance(config, (str, os.PathLike)):
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        SEEN.deepspeed = dict(config or {})
        if optimizer is None and kwargs.get("model_parameters") is not None:
            optimizer = torch.optim.AdamW(list(kwargs["model_parameters"]))
        return EngineStub(model), optimizer, kwargs.get("training_data"), kwargs.get("lr_scheduler")

    module.initialize = initialize
    module.init_distributed = lambda *args, **kwargs: None


PATCHES: Mapping[str, Callable[[Any], None]] = {
    "transformers.configuration_utils": _configs,
    "transformers.modeling_utils": _models,
    "transformers.models.auto.auto_factory": _auto,
    "transformers.models.auto.tokenization_auto": _tokenizers,
    "transformers.tokenization_utils_base": _tokenizers,
    "transformers.training_args": _arguments,
    "transformers.trainer": _trainer,
    "transformers.utils.quantization_config": _four_bits,
    "datasets": _data,
    "trl.trainer.sft_trainer": _sft,
    "trl.trainer.sft_config": older_config,
    "trl.trainer.dpo_trainer": _prepared,
    "trl.trainer.reward_trainer": _prepared,
    "trl.trainer.kto_trainer": _prepared,
    "accelerate.accelerator": _accelerator,
    "deepspeed": _deepspeed,
    "unsloth": stand_in,
    "unsloth.chat_templates": stand_in,
    "torch.distributed.fsdp": _fsdp,
}
"""Module -> what is done to it once it is imported."""


class Patching(importlib.abc.MetaPathFinder):
    """Finds modules as others do, and patches those of PATCHES after they have run."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec of the next finder that has the module, with a loader that patches it."""
        if name not in PATCHES:
            return None
        if name.startswith("unsloth"):  # which asks for a GPU when it is imported
            return importlib.machinery.ModuleSpec(name, Absent(), is_package=name == "unsloth")
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                begin = spec.loader.exec_module

                def execute(module: Any, begin: Callable[[Any], None] = begin) -> None:
                    begin(module)
                    PATCHES[name](module)

                spec.loader.exec_module = execute  # type: ignore[method-assign]
                return spec
        if name == "deepspeed":  # not installed, and not needed
            return importlib.machinery.ModuleSpec(name, Absent())
        return None


class Absent(importlib.abc.Loader):
    """Makes deepspeed where it is not installed, and Unsloth."""

    def exec_module(self, module: Any) -> None:
        """Runs the module's patch in place of its code."""
        PATCHES[module.__name__](module)


@contextlib.contextmanager
def patched_imports() -> Iterator[None]:
    """While it lasts, what is imported is patched; deepspeed is there where it is not installed."""
    patching = Patching()
    sys.meta_path.insert(0, patching)
    try:
        yield
    finally:
        sys.meta_path.remove(patching)
