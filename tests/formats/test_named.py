"""Networks that people train and the catalogue has not, by the names that files give them. The oracle is the number of
parameters that each model's card counts."""

from __future__ import annotations

import pytest

from gnomon.errors import CatalogueError, InputError
from gnomon.formats.given import network_graph
from gnomon.formats.hub import find_network, network_called
from gnomon.formats.huggingface.named import CONFIGS, LANGUAGE_MODELS
from gnomon.formats.huggingface.read import from_hf_config
from gnomon.models.presets import only_words
from gnomon.request.model import named_network

COUNTED = {
    "~/weights/llama-30b": 32_528_943_616,
    "Qwen/Qwen-7B-Chat": 7_721_324_544,
    "Qwen/Qwen1.5-0.5B": 463_987_712,
    "facebook/opt-1.3b": 1_315_758_080,
    "bigscience/bloomz-560m": 559_214_592,
    "tiiuae/falcon-7b-instruct": 6_921_720_704,
    "EleutherAI/gpt-j-6B": 6_050_882_784,
    "EleutherAI/pythia-6.9b-deduped": 6_857_302_016,
    "openai-community/gpt2-large": 774_030_080,
    "microsoft/phi-2": 2_779_683_840,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "google/gemma-2b-it": 2_506_172_416,
    "bigcode/starcoder2-15b": 15_957_889_024,
    "deepseek-ai/deepseek-coder-6.7b-instruct": 6_740_512_768,
    "internlm/internlm2-chat-7b": 7_737_708_544,
    "baichuan-inc/Baichuan2-13B-Chat": 13_896_668_160,
    "THUDM/chatglm3-6b": 6_243_584_000,
    "01-ai/Yi-34B-200K": 34_388_917_248,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "mosaicml/mpt-7b": 6_649_286_656,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "google/flan-t5-xxl": 11_135_332_352,
    "lmsys/vicuna-13b-v1.5": 13_015_864_320,
}


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_those_of_the_models_card(name: str) -> None:
    assert network_graph(network_called(name)[0]).num_parameters() == COUNTED[name]


def test_each_of_the_table_is_a_config_that_is_read() -> None:
    for name, keys in CONFIGS.items():
        assert from_hf_config(keys, name).graph.num_parameters() > 6e7, name


def test_what_is_read_as_another_says_so() -> None:
    found = find_network("baichuan-inc/Baichuan2-13B-Chat")
    assert found is not None and "ALiBi" in found[1]


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-VL-7B-Instruct", "liuhaotian/llava-v1.5-13b", "Qwen/Qwen3-VL-4B-Thinking"]
)
def test_what_sees_images_is_refused_with_its_network_of_words(name: str) -> None:
    with pytest.raises(InputError, match=r"sees images.*--model [\w.-]+ is its network of words"):
        network_called(name)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gemma-3-4b", "gemma3_text"),
        ("google/gemma-3-12b-it", "gemma3_text"),
        ("unsloth/gemma-3-27b-it-bnb-4bit", "gemma3_text"),
        ("google/gemma-4-31B", "gemma4_text"),
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", "mistral"),
        ("gemma-3-1b", ""),
        ("mistralai/Mistral-Small-24B-Base-2501", ""),
    ],
)
def test_a_name_says_as_its_config_does_that_only_words_are_read(name: str, family: str) -> None:
    """On a command line and in a file; models that read words only say nothing of it."""
    said = only_words(family) if family else ""
    for _, note in (named_network(name), network_called(name)):
        assert note.endswith(said) and bool(family) == ("only its language model" in note)


def test_a_name_that_sees_images_gives_its_network_of_words() -> None:
    with pytest.raises(CatalogueError, match="qwen2.5-7b is its network of words alone"):
        named_network("Qwen/Qwen2.5-VL-7B-Instruct")


def test_networks_of_words_are_known() -> None:
    assert all(find_network(name) is not None for name in LANGUAGE_MODELS.values())


@pytest.mark.parametrize("name", ["google-bert/bert-base-cased", "gpt2"])
def test_a_script_that_loads_one_by_its_name_is_given_its_config(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from gnomon.frontend.script.hub import known_config

    config = known_config(name)
    assert config is not None
    cls = transformers.AutoModelForMaskedLM if "bert" in name else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = cls.from_config(transformers.AutoConfig.for_model(**config))
    made = sum(parameter.numel() for parameter in model.parameters())
    assert made == pytest.approx(network_graph(network_called(name)[0]).num_parameters(), rel=1e-3)
