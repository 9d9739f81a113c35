"""A suite in one run: every class has the numbers that `evaluate` gives for its text alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gguf_tools
from gguf_tools.cluster import connect
from gguf_tools.commands.evaluate import main
from gguf_tools.errors import BadRequest
from imatrix.evaluate.evaluation import ClassEvaluation
from tests.imatrix.evaluate.suite.test_tokenise import write
from tests.imatrix.forward.deepseek4_models import v4_model
from tests.support.checkpoints import Tensors, edit_tensors, load_transformers
from tests.support.decoder_models import decoder_model
from tests.support.trained_model import calibration_text

torch = pytest.importorskip("torch")

from imatrix.forward.options import ForwardOptions  # noqa: E402
from imatrix.texts.tokens import Cut  # noqa: E402
from tests.imatrix.evaluate.test_kept import KillAfter, Killed, Layers  # noqa: E402

Made = Callable[[str], Path]

ONE_THREAD = gguf_tools.EvaluateOptions(forward=ForwardOptions(n_threads=1))
CONTEXTS = {"letters": 64, "manual": 100, "tales": 256}
YAML = f"""\
title: Small texts
classes:
  letters: {{context: {CONTEXTS["letters"]}}}
  manual: {{context: {CONTEXTS["manual"]}}}
  tales: {{context: {CONTEXTS["tales"]}, title: Long tales}}
  talk: {{texts: talk.jsonl, template: plain, context: 200}}
"""
TALK = [
    {"messages": [{"role": "user", "content": f"What is {n} times 3?"},
                  {"role": "assistant", "content": f"It is {3 * n}."},
                  {"role": "user", "content": "Are you sure of it?"},
                  {"role": "assistant", "content": "Yes, quite sure: " + "three and three " * n}]}
    for n in range(1, 6)
]  # fmt: skip


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three plain classes, and conversations, whose scored tokens have others between them."""
    text = calibration_text().decode()
    folder = write(
        tmp_path_factory.mktemp("suite"), YAML, letters=text[:1000], manual=text[3000:4500],
        tales=text[9000:12000],
    )  # fmt: skip
    (folder / "talk.jsonl").write_text("\n".join(map(json.dumps, TALK)))
    return folder


def same(found: ClassEvaluation, expected: ClassEvaluation, *, rel: float = 1e-9) -> None:
    """Compare all numbers of two evaluations, those of single tokens with them."""
    assert found.text.chunks.digest() == expected.text.chunks.digest()
    assert found.base_ppl.value == pytest.approx(expected.base_ppl.value, rel=rel)
    for one, other in zip(found.models, expected.models, strict=True):
        for name, values in vars(other.tokens).items():
            np.testing.assert_allclose(getattr(one.tokens, name), values, rtol=rel, err_msg=name)
        compare(one.measures_json(), other.measures_json(), rel)


def compare(found: Any, expected: Any, rel: float) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            compare(found[name], value, rel)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            compare(one, other, rel)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=rel, nan_ok=True)
    else:
        assert found == expected


def alone(
    base: Path, suite: Path, name: str, file: Path, options: gguf_tools.EvaluateOptions
) -> ClassEvaluation:
    cut = replace(options, cut=Cut(CONTEXTS[name]))
    return gguf_tools.evaluate(base, suite / f"{name}.txt", [file], cut).alone


@pytest.mark.parametrize(("n_threads", "memory_bytes"), [(1, 0), (2, 1 << 30)])
def test_a_class_has_the_numbers_of_its_text_alone(
    n_threads: int,
    memory_bytes: int,
    tiny_folder: Path,
    made: Made,
    suite: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trained model has latent attention and experts, whose tokens go in pieces; some are small here."""
    monkeypatch.setattr("imatrix.forward.sweep.PIECE_ROWS", 32)
    monkeypatch.setattr("imatrix.forward.logits.PIECE_POSITIONS", 100)
    forward = ForwardOptions(n_threads=n_threads, memory_bytes=memory_bytes)
    options = gguf_tools.EvaluateOptions(forward=forward)
    found = gguf_tools.evaluate_suite(tiny_folder, suite, [made("Q4_K_M")], options)
    for name in CONTEXTS:
        same(found.by_class[name], alone(tiny_folder, suite, name, made("Q4_K_M"), options))
    assert found.by_class["talk"].text.chunks.n_chunks == len(TALK)


def test_what_is_scored_of_conversations_is_what_transformers_predicts(
    tiny_folder: Path, made: Made, suite: Path
) -> None:
    """Chunks of different lengths, in which turns of the user lie between those that are scored."""
    talk = gguf_tools.evaluate_suite(tiny_folder, suite, [made("Q8_0")], ONE_THREAD).by_class["talk"]
    chunks, found = talk.text.chunks, talk.models[0].tokens
    assert len(set(np.diff(chunks.bounds).tolist())) == len(TALK)
    gaps = np.diff(found.position)[np.diff(found.chunk) == 0]
    assert (gaps > 1).any()
    model, log_probs, tops = load_transformers(tiny_folder), [], []
    for chunk in range(chunks.n_chunks):
        start, stop = chunks.rows(chunk)
        with torch.no_grad():
            logits = model(torch.from_numpy(chunks.inputs[None, start:stop])).logits[0].double()
        logs = torch.log_softmax(logits, -1).numpy()
        scored = np.flatnonzero(chunks.scored[start:stop])
        log_probs.append(logs[scored - 1, chunks.tokens[start:stop][scored]])
        tops.append(logs[scored - 1].max(-1))
        assert found.position[found.chunk == chunk].tolist() == (scored - 1).tolist()
    np.testing.assert_allclose(found.base_log_prob, np.concatenate(log_probs), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.base_top_p, np.exp(np.concatenate(tops)), rtol=1e-4)


def other_family(name: str, folder: Path) -> Path:
    if name == "deepseek4":
        v4_model(folder)
    else:
        decoder_model(name, folder)
    return folder


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek4", "gpt-oss", "llama-yarn")]


@pytest.mark.parametrize("name", ["mixtral", *OTHERS])
def test_a_class_of_another_family_has_its_own_numbers(
    name: str, suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imatrix.forward.sweep.PIECE_ROWS", 32)
    base, other = other_family(name, tmp_path / "base"), tmp_path / "rounded"
    base.rename(other)
    other_family(name, base)
    edit_tensors(other, round_tensors)
    found = gguf_tools.evaluate_suite(base, suite, [other], ONE_THREAD)
    assert found.figures[0]["all"].kld.value > 1e-6
    for each in ("letters", "tales"):
        same(found.by_class[each], alone(base, suite, each, other, ONE_THREAD))


def round_tensors(tensors: Tensors) -> None:
    """Leave a few bits of the matrices."""
    for name, values in tensors.items():
        if values.ndim > 1 and values.dtype == np.float32:
            tensors[name] = np.round(values * 16) / 16


@pytest.fixture(scope="module")
def expected(made: Made, suite: Path) -> gguf_tools.Evaluation:
    return gguf_tools.evaluate_suite(made("F32"), suite, [made("Q2_K")], ONE_THREAD)


@pytest.mark.slow
def test_an_interrupted_run_goes_on(
    expected: gguf_tools.Evaluation, made: Made, suite: Path, tmp_path: Path
) -> None:
    options = replace(ONE_THREAD, work=tmp_path / "work")
    with pytest.raises(Killed):
        gguf_tools.evaluate_suite(made("F32"), suite, [made("Q2_K")], options, KillAfter(60))
    report = Layers()
    found = gguf_tools.evaluate_suite(made("F32"), suite, [made("Q2_K")], options, report)
    assert report.done > 0
    assert found.rows() == expected.rows()
    assert found.to_json() == expected.to_json()


def test_states_of_a_base_are_kept_for_a_suite(
    expected: gguf_tools.Evaluation, made: Made, suite: Path, tmp_path: Path
) -> None:
    options = replace(ONE_THREAD, keep=tmp_path / "kept")
    for n_done in (0, 3):
        report = Layers()
        found = gguf_tools.evaluate_suite(made("F32"), suite, [made("Q2_K")], options, report)
        assert report.done == n_done
        assert found.to_json() == expected.to_json()
    with pytest.raises(BadRequest, match="kept: has states of another text"):
        gguf_tools.evaluate_suite(
            made("F32"), gguf_tools.read_suite(suite, quick=True), [made("Q2_K")], options
        )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make "here:1" the address of a worker in this process."""
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=1, processes=False, threads_per_worker=1, dashboard_address=":0",
            silence_logs=logging.CRITICAL,
        ) as local,
        distributed.Client(local, set_as_default=False) as client,
    ):  # fmt: skip
        monkeypatch.setitem(connect._open, "here:1", connect.Cluster(client, "here:1"))
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_workers_of_a_scheduler_compute_a_suite(
    expected: gguf_tools.Evaluation, made: Made, suite: Path, tmp_path: Path
) -> None:
    forward = ForwardOptions(n_threads=1, scheduler="here:1")
    options = gguf_tools.EvaluateOptions(forward=forward, work=tmp_path / "work")
    found = gguf_tools.evaluate_suite(made("F32"), suite, [made("Q2_K")], options)
    assert found.rows() == expected.rows()


def test_what_is_for_one_text_is_refused(made: Made, suite: Path, tmp_path: Path) -> None:
    def refused(match: str, base: Any = None, given: Path = suite, **choices: Any) -> None:
        with pytest.raises(BadRequest, match=match):
            gguf_tools.evaluate_suite(base or made("F32"), given, [made("F32")], **choices)

    refused("each class of a suite has its own context", chunk_size=64)
    refused(r"b\.kld: a file of log probabilities is of one text", logits=tmp_path / "b.kld")
    refused(r"b\.kld: a file of log probabilities is of one text", gguf_tools.LogitsFile(tmp_path / "b.kld"))
    refused("class 'all': figures over all", given=write(tmp_path, "context: 16", all="What? " * 50))
    (tmp_path / "short").mkdir()
    refused("class 'a': no token is scored", given=write(tmp_path / "short", "context: 2", a="Well, well."))


def test_the_command_measures_a_suite(
    made: Made, suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s.json"
    words = ["--suite", str(suite), "--quick", "--threads", "1", "--json", str(out)]
    assert main([str(made("F32")), str(made("Q8_0")), *words]) == 0
    shown = capsys.readouterr().out
    assert "4 classes, a tenth of each" in shown
    assert "Q8_0.gguf by class" in shown
    found = json.loads(out.read_text())
    assert list(found["models"][0]["classes"]) == [*CONTEXTS, "talk"]
    assert not out.with_name("s.json.work").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--suite x -f t.txt", "not allowed with argument --suite"),
        ("--suite x -c 64", "-c is for -f: each class of a suite has its own context and chunks"),
        ("--suite x --chunks 3", "--chunks is for -f"),
        ("--suite x --kl-divergence-base b.kld", "--kl-divergence-base is for one text, given with -f"),
        ("-f t.txt --quick", "--quick is for --suite, which is missing"),
        ("", "-f TEXT or --suite is missing"),
    ],
)
def test_arguments_for_one_text_are_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["base.gguf", "q.gguf", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_suite_that_is_not_there_is_refused_in_one_line(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(made("F32")), str(made("F32")), "--suite", str(tmp_path / "none")]) == 1
    assert "none: no such suite, expected 'default', a folder or a YAML file" in capsys.readouterr().err
