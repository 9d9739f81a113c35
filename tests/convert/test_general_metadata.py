"""The general.* keys: golden files, model cards, names taken apart, sizes and file names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert.general_metadata import GeneralMetadata, general_metadata, read_model_card
from convert.model_names import default_file_name, fill_outfile_template, parse_model_name, title
from gguf_tools.errors import BadConfig, BadRequest
from gguf_tools.format.values import Value
from gguf_tools.look.listing import ParameterCounts, count_parameters, rounded

CONVERTED = Path(__file__).parents[1] / "golden" / "convert"


def plain(general: GeneralMetadata) -> dict[str, Any]:
    return {key.removeprefix("general."): value.data for key, value in general.metadata().items()}


def put_card(folder: Path, front_matter: str) -> Path:
    (folder / "README.md").write_text(f"---\n{front_matter}\n---\n# A model\n", encoding="utf-8")
    return folder


# --- golden metadata -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny-deepseek-v2", "tiny-deepseek-v3"])
def test_metadata_is_what_llama_cpps_converter_writes(model: str, tmp_path: Path) -> None:
    """Keys, values and their order; name, version and basename come from the folder's name."""
    golden = json.loads((CONVERTED / f"{model}.f32.json").read_text(encoding="utf-8"))
    of_the_file = ("general.architecture", "general.file_type", "general.quantization_version")
    expected = {
        key.removeprefix("general."): value
        for key, value in golden["metadata"].items()
        if key.startswith("general.") and key not in of_the_file
    }
    folder = tmp_path / model
    folder.mkdir()
    (folder / "generation_config.json").write_text('{"bos_token_id": 0, "use_cache": true}', encoding="utf-8")
    counts = count_parameters((name, ne[::-1]) for name, (_, ne, _) in golden["tensors"].items())
    general = general_metadata(folder, {"architectures": ["DeepseekV3ForCausalLM"]}, counts=counts)
    assert list(plain(general).items()) == list(expected.items())
    assert general.notes == ()


# --- where things are looked for -----------------------------------------------------------------------


def test_order_of_sources(tmp_path: Path) -> None:
    folder = tmp_path / "folder-7B-chat-v1"
    folder.mkdir()
    config = {"_name_or_path": "maker/config-7B-instruct-v2"}
    override = tmp_path / "override.json"
    override.write_text('{"general.name": "From the file", "general.finetune": "f"}', encoding="utf-8")

    def found(**options: Any) -> list[Any]:
        facts = plain(general_metadata(folder, config, **options))
        return [facts.get(key) for key in ("name", "version", "finetune", "size_label", "organization")]

    assert found() == ["Config 7B Instruct v2", "v2", "instruct", "7B", "Maker"]
    put_card(folder, "model_name: From the card\nversion: 3.10")
    assert found() == ["From the card", "3.10", "instruct", "7B", "Maker"]
    assert found(metadata_file=override) == ["From the file", "3.10", "f", "7B", "Maker"]
    assert found(metadata_file=override, model_name="Mine") == ["Mine", "3.10", "f", "7B", "Maker"]
    config["_name_or_path"] = "/home/me/models/x"  # a path says nothing
    assert found() == ["From the card", "3.10", "chat", "7B", None]


def test_a_folder_given_as_dot_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny-deepseek-v3"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert plain(general_metadata(Path(), {}))["name"] == "Tiny Deepseek v3"


def test_size_label_of_the_name_and_of_the_tensors(tmp_path: Path) -> None:
    folder = tmp_path / "Model-16B-Chat"
    folder.mkdir()
    assert plain(general_metadata(folder, {}))["size_label"] == "16B"
    near = ParameterCounts(total=15_700_000_000, shared=1_000_000_000, expert=230_000_000, n_experts=64)
    assert plain(general_metadata(folder, {}, counts=near))["size_label"] == "16B"
    far = ParameterCounts(total=700_000_000, shared=100_000_000, expert=20_000_000, n_experts=30)
    facts = plain(general_metadata(folder, {}, counts=far))
    assert (facts["size_label"], facts["finetune"]) == ("30x120M", "16b-Chat")


def test_sampling_settings(tmp_path: Path) -> None:
    settings = {
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.95,
        "repetition_penalty": 1.5,
        "min_p": None,
        "mirostat": True,
    }
    settings |= {"min_p": None, "mirostat": True}  # no values
    (tmp_path / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    general = general_metadata(tmp_path, {}, model_name="m")
    assert list(general.metadata().items())[:6] == [
        ("general.type", Value.string("model")),
        ("general.sampling.top_k", Value.i32(40)),
        ("general.sampling.top_p", Value.f32(0.95)),
        ("general.sampling.temp", Value.f32(0.5)),
        ("general.sampling.penalty_repeat", Value.f32(1.5)),
        ("general.name", Value.string("m")),
    ]


def test_settings_without_a_key_are_named(tmp_path: Path) -> None:
    idle = {"typical_p": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None, "num_beams": 1}
    for settings, notes in (
        (idle, ()),
        (
            {**idle, "no_repeat_ngram_size": 3, "stop_strings": ["x"]},
            ("generation_config.json: no_repeat_ngram_size, stop_strings: left out, a GGUF file has no key",),
        ),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
        assert general_metadata(tmp_path, {}).notes == notes


def test_a_broken_generation_config_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{", encoding="utf-8")
    (note,) = general_metadata(tmp_path, {}).notes
    assert note.startswith("sampling settings are left out: ")


# --- model cards ---------------------------------------------------------------------------------------

CARD = """\
license: other
license_name: deepseek
license_link: https://example.org/LICENSE
language:
- no
- en
pipeline_tag: text-generation
tags: [moe, mla]
model_creator: Someone
base_model:
- deepseek-ai/DeepSeek-V3-Base
- https://huggingface.co/deepseek-ai/DeepSeek-V2
- https://example.org/other
- {name: Third, author: X, size: 1}
datasets: org/some-data-v2
library_name:\ttransformers"""


def test_model_card(tmp_path: Path) -> None:
    general = general_metadata(put_card(tmp_path, CARD), {}, model_name="m")
    assert plain(general) == {
        "type": "model",
        "name": "m",
        "author": "Someone",
        "license": "other",
        "license.name": "deepseek",
        "license.link": "https://example.org/LICENSE",
        "base_model.count": 4,
        "base_model.0.name": "DeepSeek V3 Base",
        "base_model.0.organization": "Deepseek Ai",
        "base_model.0.repo_url": "https://huggingface.co/deepseek-ai/DeepSeek-V3-Base",
        "base_model.1.name": "DeepSeek V2",
        "base_model.1.version": "V2",
        "base_model.1.organization": "Deepseek Ai",
        "base_model.1.repo_url": "https://huggingface.co/deepseek-ai/DeepSeek-V2",
        "base_model.2.repo_url": "https://example.org/other",
        "base_model.3.name": "Third",
        "base_model.3.author": "X",
        "dataset.count": 1,
        "dataset.0.name": "Some Data v2",
        "dataset.0.version": "v2",
        "dataset.0.organization": "Org",
        "dataset.0.repo_url": "https://huggingface.co/org/some-data-v2",
        "tags": ("moe", "mla", "text-generation"),
        "languages": ("no", "en"),
    }
    assert general.notes == ()


def test_model_card_is_what_gguf_py_makes_of_it(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    folder = put_card(tmp_path, CARD)
    writer = gguf.GGUFWriter(None, "deepseek2")
    gguf.Metadata.load(None, folder, "m").set_gguf_meta_model(writer)
    expected = {
        key.removeprefix("general."): tuple(entry.value) if isinstance(entry.value, list) else entry.value
        for key, entry in writer.kv_data[0].items()
        if key != "general.architecture"
    }
    found = plain(general_metadata(folder, {}, model_name="m"))
    del found["type"]
    assert list(found.items()) == list(expected.items())


@pytest.mark.parametrize("text", ["", "# No front matter\n---\n", "---\nname: never closed\n", "---\n---\n"])
def test_no_model_card(text: str, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    assert read_model_card(path) == ({}, None)
    path.write_text(text, encoding="utf-8")
    assert read_model_card(path) == ({}, None)


@pytest.mark.parametrize("text", ["a: [", "just text", "- a\n- b", "!!python/object/apply:os.getcwd []"])
def test_a_broken_model_card_is_a_note(text: str, tmp_path: Path) -> None:
    card, note = read_model_card(put_card(tmp_path, text) / "README.md")
    assert card == {}
    assert note is not None
    assert note.startswith("README.md: the model card is ignored: ")
    assert "\n" not in note


def test_entries_without_a_value_are_left_out(tmp_path: Path) -> None:
    card, _ = read_model_card(
        put_card(tmp_path, "name:\nversion: ~\nauthor: null\nlicense: mit") / "README.md"
    )
    assert card == {"license": "mit"}


# --- the --metadata file -------------------------------------------------------------------------------


def override(folder: Path, **entries: Any) -> GeneralMetadata:
    path = folder / "override.json"
    path.write_text(json.dumps({f"general.{key}": value for key, value in entries.items()}), encoding="utf-8")
    return general_metadata(folder, {"_name_or_path": "o/name-v1"}, metadata_file=path)


def test_metadata_file(tmp_path: Path) -> None:
    general = override(
        tmp_path,
        **{
            "author": "Me",
            "sampling.temp": 1,
            "tags": ["a"],
            "version": None,
            "size_label": "",
            "nonsense": 1,
        },
        base_models=[{"name": "Base", "what": "ever"}],
    )
    assert plain(general) == {
        "type": "model", "sampling.temp": 1.0, "name": "Name v1", "author": "Me", "organization": "O",
        "basename": "name", "base_model.count": 1, "base_model.0.name": "Base", "tags": ("a",),
    }  # fmt: skip
    assert general.notes == ("--metadata: general.nonsense is not one of the keys that can be set: ignored",)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"name": 1}, "general.name is 1, expected a text"),
        ({"tags": "a"}, "general.tags is 'a', expected a list of texts"),
        ({"base_models": ["a"]}, r"general.base_models is \['a'\], expected a list of objects"),
        ({"sampling.top_k": 1.5}, "general.sampling.top_k is 1.5, expected a whole number"),
        ({"sampling.temp": True}, "general.sampling.temp is true, expected a number"),
    ],
)
def test_wrong_values_in_the_metadata_file(entries: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=f"override.json: {expected}"):
        override(tmp_path, **entries)


def test_a_missing_metadata_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"nowhere\.json: can't be read \(No such file"):
        general_metadata(tmp_path, {}, metadata_file=tmp_path / "nowhere.json")


# --- names ---------------------------------------------------------------------------------------------

MODEL_IDS = [
    "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "deepseek-ai/DeepSeek-R1-0528", "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct", "DeepSeek-V2.5-1210",
    "unsloth/DeepSeek-V3.1-Base-BF16", "Mixtral-8x7B-Instruct-v0.1", "bloom-7b1", "Qwen3-30B-A3B-128k",
    "Phi-3-mini-4k-instruct", "gemma-2b-it", "Moonlight-16B-A3B", "./local-folder", "A plain sentence", "x",
    "gpt2-medium", "org/name-IQ4_XS", "tiny--deepseek-v3-", "70B", "v2-7B", "stories15M-lora",
]  # fmt: skip


def of_gguf_py(model_id: str, n_params: int) -> tuple[Any, ...]:
    gguf = pytest.importorskip("gguf")
    return gguf.Metadata.get_model_id_components(model_id, n_params)


def of_us(model_id: str, n_params: int) -> tuple[Any, ...]:
    name = parse_model_name(model_id, n_params)
    return name.name, name.organization, name.basename, name.finetune, name.version, name.size_label


@pytest.mark.parametrize("n_params", [0, 16_000_000_000])
@pytest.mark.parametrize("model_id", MODEL_IDS)
def test_names_are_taken_apart_as_gguf_py_does(model_id: str, n_params: int) -> None:
    assert of_us(model_id, n_params) == of_gguf_py(model_id, n_params)
    assert title(model_id) == pytest.importorskip("gguf").Metadata.id_to_title(model_id)


PARTS = st.sampled_from([
    "deepseek", "DeepSeek", "V3", "v0.1", "2", "2024.05", "iter3", "Chat", "instruct", "vision", "7B", "7b",
    "7b1", "1.5B", "8x7B", "A3B", "128k", "4k", "mini", "large", "XL", "q4_0", "IQ2_S", "bf16", "fp8",
    "coder", "x", "R1", "0324", "Base", "_",
])  # fmt: skip


@given(st.lists(PARTS, min_size=1, max_size=6), st.sampled_from([0, 1_500_000_000, 7_000_000_000]))
def test_any_name_is_taken_apart_as_gguf_py_does(parts: list[str], n_params: int) -> None:
    model_id = "-".join(parts)
    assert of_us(model_id, n_params) == of_gguf_py(model_id, n_params)


# --- sizes and file names ------------------------------------------------------------------------------


def test_count_parameters() -> None:
    tensors = [
        ("token_embd.weight", (100, 8)),
        ("blk.0.ffn_down_exps.weight", (4, 8, 6)),
        ("blk.0.ffn_up_exps.bias", (1, 4, 6)),
        ("blk.0.exp_probs_b.bias", (4,)),
    ]
    counts = count_parameters(tensors)
    assert counts == ParameterCounts(total=800 + 192 + 24 + 4, shared=804, expert=48 + 6, n_experts=4)
    assert count_parameters([]) == ParameterCounts()


@pytest.mark.parametrize(
    ("n_params", "text"),
    [
        (671_026_419_200, "671B"), (15_706_484_224, "16B"), (5_700_000, "5.7M"), (999_999, "1000K"),
        (1_000_000, "1000K"), (1_500_000_000_000, "1.5T"), (123, "0.12K"), (0, "0.00K"),
    ],
)  # fmt: skip
def test_rounded(n_params: int, text: str) -> None:
    assert rounded(n_params) == text
    assert text == pytest.importorskip("gguf").utility.model_weight_count_rounded_notation(n_params)


def test_size_labels() -> None:
    assert (
        ParameterCounts(total=11_600_000, shared=5_000_000, expert=700_000, n_experts=16).size_label
        == "16x5.7M"
    )
    assert ParameterCounts(total=7_000_000_000, shared=7_000_000_000).size_label == "7.0B"


def test_default_outfile(tmp_path: Path) -> None:
    general = general_metadata(
        tmp_path,
        {"_name_or_path": "deepseek-ai/DeepSeek-V2-Lite-Chat"},
        counts=ParameterCounts(100, 60, 10, 4),
    )
    assert general.default_outfile("Q8_0") == "DeepSeek-V2-Lite-4x0.07K-Chat-Q8_0.gguf"
    assert general.default_outfile("BF16", vocab_only=True) == "DeepSeek-V2-Lite-Chat-vocab.gguf"


def test_default_file_name_without_a_basename() -> None:
    names = {"basename": None, "finetune": None, "version": None, "size_label": None}
    assert default_file_name(name="My Model/x", file_type="f16", **names) == "My-Model-x-F16.gguf"
    assert default_file_name(name=None, file_type="f16", **names) == "ggml-model-F16.gguf"


@pytest.mark.parametrize(
    ("template", "file_name"),
    [
        ("model.gguf", "model.gguf"),
        ("m-{ftype}.gguf", "m-bf16.gguf"),
        ("m-{FTYPE}-{outtype}-{OUTTYPE}-{}.gguf", "m-BF16-bf16-BF16-bf16.gguf"),
    ],
)
def test_fill_outfile_template(template: str, file_name: str) -> None:
    assert fill_outfile_template(template, "BF16") == file_name


def test_unknown_placeholder() -> None:
    with pytest.raises(
        BadRequest, match=r"outfile m-\{type\}\.gguf: unknown placeholder \{type\}; known is \{ftype\}"
    ):
        fill_outfile_template("m-{type}.gguf", "BF16")
