"""The files beside a checkpoint's weights; one file in each folder is strange."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from convert.general_metadata import general_metadata
from convert.tokenizer.pretokenizers import KNOWN
from convert.tokenizer.sentencepiece_model import read_sentencepiece_model
from convert.tokenizer.tokenizer import read_tokenizer
from gguf_tools.commands.convert import main as convert
from gguf_tools.errors import BadTokenizer
from gguf_tools.look.listing import ParameterCounts
from tests.fuzz import tokenizer as small
from tests.fuzz import tokenizer_model
from tests.hostile.warden import Outcome, Warden
from tests.support.checkpoints import STYLES, micro_checkpoint, shard
from tests.support.piece_model import piece

V3 = dict(STYLES["v3"])
DEEP = "[" * 100_000
BPE = small.TOKENIZER_JSON["model"] | {"merges": []}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
S = small.TOKENIZER_JSON["added_tokens"][0]
"""The added token <s>."""
INDEX = "model.safetensors.index.json"


def text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def config(**changes: Any) -> dict[str, Any]:
    return V3 | changes


def tokenizer_json(**changes: Any) -> dict[str, Any]:
    return small.TOKENIZER_JSON | changes


def with_model(**changes: Any) -> dict[str, Any]:
    return tokenizer_json(model=small.TOKENIZER_JSON["model"] | changes)


def tokenizer_config(**changes: Any) -> dict[str, Any]:
    return small.TOKENIZER_CONFIG | changes


def index(file_name: Any) -> dict[str, Any]:
    return {"weight_map": {"x": file_name}}


def split(*regexes: str) -> dict[str, Any]:
    steps = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in regexes
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*steps, byte_level]}


def slow(regex: str) -> dict[str, Any]:
    """A pre-tokenizer that cuts as deepseek-v3's does, after failing to match `regex` at every place."""
    (known,) = (known for known in KNOWN if known.name == "deepseek-v3")
    first, *others = (step[1] for step in known.steps if step[0] == "split")
    return split(f"(?:(?={regex})|){first}", *others)


def card(entries: str) -> str:
    return f"---\n{entries}\n---\n# A model\n"


def tokens_of_config(*entries: Any) -> dict[str, Any]:
    return tokenizer_config(added_tokens_decoder={str(8 + i): entry for i, entry in enumerate(entries)})


CONFIG = ("config_json", "config.json")
CHECKPOINT = ("checkpoint", INDEX)
TOKENIZER = ("tokenizer_json", "tokenizer.json")
TOKENIZER_CONFIG = ("tokenizer_json", "tokenizer_config.json")
CARD = ("model_card", "README.md")

Cases = dict[str, tuple[Any, str | None]]
"""Content of a file, and a regular expression for the error; None: the usable rest of the folder is used."""

CASES: dict[tuple[str, str], Cases] = {
    CONFIG: {
        "nested deep": ('{"a":' + DEEP, "nested deeper than 100"),
        "a list": ([V3], "holds list, expected a JSON object"),
        "after a byte order mark": ("\ufeff" + json.dumps(V3), None),
        "in UTF-16": (json.dumps(V3).encode("utf-16"), "not JSON"),
        "not in UTF-8": (b'{"a": "\xff"}', "not JSON"),
        "cut off": (json.dumps(V3)[:100], "not JSON"),
        "2**63 layers": (config(num_hidden_layers=2**63), "from 1 to 512"),
        "a billion layers": (config(num_hidden_layers=10**9), "from 1 to 512"),
        "a billion experts": (config(n_routed_experts=10**9), "from 1 to 1024"),
        "a billion layers for prediction": (config(num_nextn_predict_layers=10**9), "from 0 to 512"),
        "10**12 heads": (config(num_attention_heads=10**12), "from 1 to 2147483647"),
        "true layers": (config(num_hidden_layers=True), "num_hidden_layers is True"),
        "layers as a text": (config(num_hidden_layers="3"), "num_hidden_layers is '3'"),
        "infinite base": (config(rope_parameters={"rope_theta": float("inf")}), "rope_theta is inf"),
        "NaN for epsilon": (config(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
        "rope that is a list": (config(rope_parameters=[1]), "expected an object or null"),
        "method that is an object": (config(topk_method={}), "topk_method"),
        "architecture that is an object": (config(architectures=[{}]), "architectures"),
        "value nested 90 deep": (config(n_routed_experts=json.loads("[" * 90 + "]" * 90)), "n_routed_exp"),
        "value of a million characters": (config(scoring_func="x" * 10**6), "scoring_func"),
        "200 MB of nothing": (" " * 2 * 10**8, "expected at most"),
        "5 million empty objects": ("[" + "{}," * 5_000_000 + "0]", "160 MiB"),
    },
    CHECKPOINT: {
        "shard above the folder": (index("../../etc/passwd"), r"file '\.\./\.\./etc/passwd'"),
        "shard beside the folder": (index("../model.safetensors"), "expected the name of a"),
        "shard anywhere": (index("/etc/model.safetensors"), "expected the name of a"),
        "shard with a zero in its name": (index("a\0.safetensors"), r"a\\x00.*missing shard"),
        "shard with a surrogate in its name": (index("\ud800.safetensors"), "missing shard"),
        "shard with a long name": (index("a" * 5000 + ".safetensors"), "missing shard"),
        "shard that is a number": (index(1), "found file 1, expected"),
        "shard that is no safetensors file": (index("config.json"), "found file 'config.json'"),
        "a list": ({"weight_map": ["a"]}, "no weight_map"),
        "nested deep": ('{"weight_map":' + DEEP, "nested deeper"),
        "tensor that is nowhere": (index("model-00001-of-00003.safetensors"), "x: not in this shard"),
    },
    TOKENIZER: {
        "nested deep": ('{"model":' + DEEP, "nested deeper than 100"),
        "model that is a list": (tokenizer_json(model=[1]), "model is none"),
        "model without a type": (tokenizer_json(model={"merges": [], "vocab": [["a", 0.0]]}), "as a BPE has"),
        "id 10**12": (with_model(vocab={"a": 10**12}, merges=[]), "can't read it"),
        "id 2**32-1": (with_model(vocab={"a": 2**32 - 1}, merges=[]), "'<s>' is given id 6"),
        "id 2**32-1 and no other": (
            tokenizer_json(added_tokens=[], post_processor=None, model=BPE | {"vocab": {"a": 2**32 - 1}}),
            "no token has id 0, though ids go up to 4294967295",
        ),
        "negative id": (with_model(vocab={"a": -1}, merges=[]), "can't read it"),
        "id twice": (with_model(vocab={"a": 0, "b": 0}, merges=[]), "the same id 0"),
        "merge of one part": (with_model(merges=["ab"]), "can't read it"),
        "merge of no tokens": (with_model(merges=[["x", "y"]]), "can't read it"),
        "added token that is a list": (
            tokenizer_json(added_tokens=[[6, "<s>", False, False, False, False, True]]), "expected|list of",
        ),
        "added token with id 2**32-1": (tokenizer_json(added_tokens=[S | {"id": 2**32 - 1}]), "is given id"),
        "processors that are a number": (
            tokenizer_json(post_processor=BYTE_LEVEL | {"processors": 5}), None
        ),
        "table where the library panics": (
            tokenizer_json(normalizer={"type": "Precompiled", "precompiled_charsmap": "A"}), "can't read it",
        ),
        "template whose ids have no tokens": (
            tokenizer_json(post_processor={
                "type": "TemplateProcessing", "single": [], "pair": [],
                "special_tokens": {"a": {"id": "a", "ids": [1, 2], "tokens": []}},
            }), None,
        ),
        "expression of a megabyte": (tokenizer_json(pre_tokenizer=split("a" * 10**6)), "not recognised"),
        "expression nested deep": (
            tokenizer_json(pre_tokenizer=split("(" * 5000 + ")" * 5000)), "can't be built|can't read it"
        ),
        "expression of exponential time": (tokenizer_json(pre_tokenizer=slow("((.*.*)+ZQ)")), "can't be tri"),
        "expression of a power": (tokenizer_json(pre_tokenizer=slow(".*.*.*.*.*ZQ")), "where others take"),
    },
    TOKENIZER_CONFIG: {
        "20,000 added tokens": (tokens_of_config(*({"content": f"<{i}>"} for i in range(20_000))), None),
        "added token that is an object": (tokens_of_config({"content": {}}), "can't be read"),
        "flag that is a text": (tokens_of_config({"content": "<y>", "special": "yes"}), "can't be added"),
        "id of 5000 digits": (
            tokenizer_config(added_tokens_decoder={"9" * 5000: {"content": "<y>"}}), "can't be read"
        ),
        "special token that is a surrogate": (tokenizer_config(pad_token="\ud800"), "can't be added"),
        "template whose name is a list": (
            tokenizer_config(chat_template=[{"name": [], "template": ""}]), "neither a text nor a list"
        ),
    },
    ("tokenizer_json", "generation_config.json"): {"id 10**12": ({"bos_token_id": 10**12}, None)},
    ("tokenizer_json", "special_tokens_map.json"): {"a list": ([], "holds list")},
    ("tokenizer_json", "config.json"): {
        "2**40 rows": ({"vocab_size": 2**40}, "expected a number from 1 to 524288"),
        "2**31-1 rows": ({"vocab_size": 2**31 - 1}, "expected a number from 1 to"),
        "-1 rows": ({"vocab_size": -1}, "vocab_size is -1"),
        "as many rows as are allowed": ({"vocab_size": 2**19}, None),
    },
    CARD: {
        "nested deep": (card("a: " + DEEP), None),
        "nested deep by dashes": (card("- " * 20_000), None),
        "a bomb": (
            card("\n".join([
                "a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)),
                "tags: *a59", "datasets: *a59", "base_model: *a59",
            ])), None,
        ),
        "a list that holds itself": (card("tags: &a [*a]\ndatasets: *a"), None),
        "a character that does not exist": (card(r'name: "\UFFFFFFFF"'), None),
        "a version of 5000 digits": (card(f"%YAML {'9' * 5000}.1"), None),
        "an object that is to be made": (card("name: !!python/object/apply:os.abort []"), None),
        "a megabyte": (card("- a\n" * 2**18), None),
        "not in UTF-8": (b"---\nname: \xff\n---\n", None),
    },
    ("model_card", "generation_config.json"): {
        "nested deep": (DEEP, None),
        "wrong types": ({"top_k": 2**31, "temperature": 1e300, "sequence": 5, "min_p": []}, None),
    },
}  # fmt: skip


def put(folder: Path, harness: str, name: str, content: Any) -> Path:
    """Make the folder that a harness reads, with one strange file; return it."""
    if harness == "checkpoint":
        shard(micro_checkpoint(folder, "v3"))
    elif harness == "tokenizer_json":
        (folder / "config.json").write_text(json.dumps({"vocab_size": 20_100}))
        (folder / "tokenizer.json").write_text(json.dumps(small.TOKENIZER_JSON))
    data = content if isinstance(content, bytes) else text(content).encode("utf-8", "surrogatepass")
    (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(
    ("place", "name"),
    [pytest.param(place, name, id=f"{place[1]}: {name}") for place in CASES for name in CASES[place]],
)
def test_file_is_refused_in_one_line_or_used(
    warden: Warden, tmp_path: Path, place: tuple[str, str], name: str
) -> None:
    content, says = CASES[place][name]
    outcome = warden.read(place[0], put(tmp_path, *place, content))
    if says is None:
        assert outcome.how == "opened", outcome
        return
    assert outcome.how == "refused", outcome
    assert re.search(says, outcome.text), outcome
    assert len(outcome.text) < 3000


NO_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize(
    ("harness", "file_name"),
    [
        ("config_json", "config.json"), ("checkpoint", INDEX), ("tokenizer_json", "tokenizer.json"),
        ("tokenizer_json", "tokenizer_config.json"), ("tokenizer_json", "chat_template.json"),
        ("tokenizer_json", "additional_chat_templates/a.jinja"), ("tokenizer_model", "tokenizer.model"),
        ("model_card", "README.md"), ("model_card", "generation_config.json"),
    ],
)  # fmt: skip
def test_what_is_no_file_is_not_waited_for(
    warden: Warden, tmp_path: Path, harness: str, file_name: str, kind: str
) -> None:
    put(tmp_path, harness, "config.json", V3 if harness != "tokenizer_model" else {"vocab_size": 12})
    path = tmp_path / file_name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    NO_FILES[kind](path)
    outcome = warden.read(harness, tmp_path)
    assert outcome.how in ("refused", "opened"), outcome
    assert outcome.memory < 100_000_000


def test_commands_say_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = micro_checkpoint(tmp_path, "v3")
    (folder / "tokenizer.json").write_text(text(tokenizer_json(model=[1])))
    for arguments in ([], ["--vocab-only"], ["--outtype", "Q4_K_M"]):
        assert convert([str(folder), *arguments]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert "model is none, expected a byte-level BPE" in err


def test_an_architecture_can_not_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["\x1b[2J\rx" + "y" * 10**6]}))
    assert convert([str(tmp_path), "--vocab-only"]) == 1
    err = capsys.readouterr().err
    assert r"architecture \x1b[2J\rxyyy" in err
    assert err.rstrip("\n").isprintable()
    assert len(err) < 5000


@pytest.mark.parametrize(
    ("name", "file_name"),
    [
        (r"a\0b", "a-b-8x63K-BF16.gguf"),
        (r"a\nb\x1b[2J", "a-b-[2J-8x63K-BF16.gguf"),
        ("../../etc/passwd", "..-..-etc-passwd-8x63K-BF16.gguf"),
        ("n" * 1000, "n" * 40 + "-8x63K-BF16.gguf"),
    ],
)
def test_a_card_can_not_name_any_file(tmp_path: Path, name: str, file_name: str) -> None:
    (tmp_path / "README.md").write_text(card(f'model_name: "{name}"'))
    counts = ParameterCounts(total=500_000, shared=0, expert=63_000, n_experts=8)
    assert general_metadata(tmp_path, {}, counts=counts).default_outfile("BF16") == file_name


# --- tokenizer.model -------------------------------------------------------------------------------------


def test_our_reader_of_pieces_and_the_library_agree(tmp_path: Path) -> None:
    """Wherever both can read a changed file, they read the same pieces."""
    import sentencepiece

    n_read = 0
    path = tmp_path / "tokenizer.model"
    for seed in range(800):
        path.write_bytes(tokenizer_model.make(random.Random(seed)))
        try:
            ours = read_sentencepiece_model(path)
            theirs = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        except (BadTokenizer, RuntimeError):
            continue
        n_read += 1
        pieces = [(theirs.id_to_piece(i), repr(theirs.get_score(i))) for i in range(theirs.vocab_size())]
        assert [(piece.text, repr(piece.score)) for piece in ours.pieces] == pieces
        ids = {"bos": theirs.bos_id(), "eos": theirs.eos_id(), "unk": theirs.unk_id(), "pad": theirs.pad_id()}
        assert ours.special_ids == {kind: id_ for kind, id_ in ids.items() if id_ >= 0}
    assert n_read > 20


def pieces(count: int, size: int = 3) -> bytes:
    parts = (piece(f"{index:0{size}}".encode(), 0, 1) for index in range(count))
    return b"".join(field for part in parts for field in part)


MODEL_FILES = {
    "nothing": (b"", "0 of 0 pieces stand for what is unknown"),
    "number that never ends": (b"\x80" * 100_000, "no number at byte 0"),
    "group": (b"\x0b" * 1000, "a field of type 3"),
    "field longer than the file": (b"\x0a" + b"\xff" * 8 + b"\x7f", "a field of 9223372036854775807"),
    "piece of a megabyte": (pieces(1, 10**6), "a piece of 1000000 bytes, expected at most 65536"),
    "pieces that are the same": (pieces(1) * 2, "pieces 0 and 1 are both '000'"),
    "too many pieces": (b"\x0a\x00" * (2**18 + 1), "more than 262144 pieces"),
    "piece that is not UTF-8": (
        b"".join(piece(b"\xff", 0, 2)), "can't decode byte 0xff in position 0"
    ),
    "piece without a text": (b"\x0a\x00", "piece 0 has no text"),
    "16 MB": (bytes(2**24), "16777216 bytes, expected at most"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODEL_FILES)
def test_model_file_is_refused_in_one_line(warden: Warden, tmp_path: Path, name: str) -> None:
    data, says = MODEL_FILES[name]
    (tmp_path / "config.json").write_text('{"vocab_size": 12}')
    (tmp_path / "tokenizer.model").write_bytes(data)
    outcome: Outcome = warden.read("tokenizer_model", tmp_path)
    assert outcome.how == "refused", outcome
    assert re.search(says, outcome.text), outcome
    assert outcome.text.isprintable()


@pytest.mark.slow
def test_as_many_pieces_as_are_allowed(warden: Warden, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 131072}')
    unknown = b"".join(piece(b"<unk>", 0, 2))
    trainer = b"\x12\x02\x18\x02"
    (tmp_path / "tokenizer.model").write_bytes(unknown + pieces(2**17 - 1, 6) + trainer)
    assert len(read_tokenizer(tmp_path, {}).vocab.tokens) == 2**17
    assert warden.read("tokenizer_model", tmp_path).how == "opened"
