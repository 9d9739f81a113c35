"""Sums of second moments, and what encoding aims at where inputs have moved."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from imatrix.calibrate.run.strips import HeldErrors  # noqa: E402
from imatrix.calibrate.statistics.conditions import (  # noqa: E402  # noqa: E402
    KNEE,
    LIFT,
    Correction,
    Trust,
    conditions_of,
    corrected,
)
from imatrix.calibrate.statistics.gradient_factors import TokenWeights  # noqa: E402
from imatrix.calibrate.statistics.gradients import LayerGradients  # noqa: E402
from imatrix.calibrate.statistics.inputs import Held, HoldoutSplit, Moments, Statistics, gather  # noqa: E402
from imatrix.forward.workers import Workers  # noqa: E402
from quantize.rounding.factor import DAMP  # noqa: E402

CPU = torch.device("cpu")


def rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.RandomState(seed).normal(size=shape).astype(np.float32))


def summed(n_threads: int, n_cols: int = 700) -> Moments:
    """Return the moments of a stack of two matrices, more columns than one unit has."""
    moments = Moments.zeros(2, n_cols, CPU, drifts=True)
    with Workers(n_threads) as workers:
        for seed in range(3):
            moments.add(rows(seed, 90, 2, n_cols), rows(seed + 10, 90, 2, n_cols), workers)
    return moments


def test_moments_are_sums_of_outer_products() -> None:
    moments = summed(1)
    for mat in range(2):
        x = torch.cat([rows(seed, 90, 2, 700)[:, mat] for seed in range(3)]).double().numpy()
        originals = torch.cat([rows(seed + 10, 90, 2, 700)[:, mat] for seed in range(3)]).double().numpy()
        np.testing.assert_allclose(moments.whole(mat), x.T @ x, atol=1e-3)
        drifted = moments.drifted(mat)
        assert drifted is not None
        np.testing.assert_allclose(drifted, (originals - x).T @ x, atol=1e-3)
    assert moments.n_rows == 270


@pytest.mark.parametrize("n_outputs", [3, 600])
def test_a_matrix_of_few_rows_is_corrected_by_a_smaller_sum(n_outputs: int) -> None:
    """The sum is W times that of all columns, and the weights that are aimed at are the same."""
    x, originals = rows(41, 900, 1, 48), rows(42, 900, 1, 48)
    weights, counts = rows(43, n_outputs, 48), rows(44, 900).square()
    made = []
    for through in (None, weights):
        moments = Moments.zeros(1, 48, CPU, drifts=True, through=through)
        with Workers(2) as workers:
            for piece in torch.arange(900).split(400):
                moments.add(x[piece], originals[piece], workers, counts[piece].sqrt())
        made.append(Statistics.of(moments))
    whole, small = made
    assert whole.drift is not None
    assert small.drift is not None
    np.testing.assert_allclose(small.drift, weights.numpy() @ whole.drift, rtol=1e-3, atol=2e-3)
    some = slice(1, n_outputs)
    aimed = [corrected(weights.numpy()[some], correction_of(each), first=1) for each in made]
    np.testing.assert_allclose(aimed[1], aimed[0], rtol=1e-4, atol=1e-4)
    assert np.abs(aimed[0] - weights.numpy()[some]).max() > 0.1


def test_a_weight_counts_a_token_in_all_sums() -> None:
    """With whole numbers, a weight of 3 is what seeing the token three times would be."""
    x, originals = rows(20, 6, 2, 40), rows(21, 6, 2, 40)
    counts = torch.tensor([1, 3, 2, 1, 4, 1])
    holdout = HoldoutSplit(1, 6, (0,))

    def gathered(own: torch.Tensor, other: torch.Tensor, weights: torch.Tensor | None) -> Statistics:
        names = ("a", "b")
        with Workers(1) as workers:
            inputs = gather(
                replace(holdout, chunk_size=len(own)),
                lambda _: [{names: other}, {names: own}],
                workers,
                drifts=True,
                weights=lambda asked: weights if asked == names else None,
            )
        return inputs.statistics(names, 1)

    weighed = gathered(x, originals, counts)
    repeated = gathered(x.repeat_interleave(counts, 0), originals.repeat_interleave(counts, 0), None)
    np.testing.assert_allclose(weighed.own, repeated.own, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(weighed.drift, repeated.drift, rtol=1e-5, atol=1e-5)
    assert (weighed.n_rows, repeated.n_rows) == (6, 12)


def test_tokens_weigh_by_the_size_of_their_gradients() -> None:
    """The gradients at the products of the matrices, or else those after the layer.

    The first token of a chunk without gradients weighs what first tokens do, others what others do.
    """
    after, of_key, of_value = ([1, 2, 3, 6], [6, 3, 2, 1], [2, 0, 4, 2])
    sizes = {"gradient sizes": after, "sizes:k": of_key, "sizes:v": of_value, "sizes:zero": [0] * 4}
    known = LayerGradients({name: np.array(each, np.float32) for name, each in sizes.items()})
    weights = TokenWeights(cast(Any, SimpleNamespace(layer=lambda number: known)), (0, 2), 2, 8).of_layer(0)

    def of(*names: str) -> list[float]:
        found = weights(names)
        assert found is not None
        return list(found.numpy())

    first, other = 2 / 3, 4 / 3
    assert of("o") == pytest.approx([1 / 3, 2 / 3, first, other, 1, 2, first, other])
    assert of("k") == pytest.approx([2, 1, 4 / 3, 2 / 3, 2 / 3, 1 / 3, 4 / 3, 2 / 3])
    assert of("v", "zero") == pytest.approx([1, 0, 1.5, 0.5, 2, 1, 1.5, 0.5])
    assert of("k", "v", "o") == pytest.approx((np.array(of("k")) + of("v")) / 2)
    assert weights(("zero",)) is None
    nothing = TokenWeights(cast(Any, SimpleNamespace(layer=lambda number: None)), (0, 2), 2, 8).of_layer(0)
    assert nothing(("k",)) is None


def test_held_out_rows_count_as_their_tokens_weigh() -> None:
    places = HoldoutSplit.of(2, 6).places(torch.arange(6, 12, 2), 2)
    np.testing.assert_allclose(places.shares, [1 / 6, 2 / 6, 2 / 6])  # a chunk's first token is as no other
    np.testing.assert_allclose(places.weighed(None).shares, [0, 2 / 6, 2 / 6])
    weights = torch.tensor([9, 9, 9, 9, 9, 9, 3, 9, 0.5, 9, 2, 9])
    np.testing.assert_allclose(places.weighed(weights).shares, [3 / 6, 1 / 6, 4 / 6])


def test_sums_are_the_same_for_any_number_of_threads() -> None:
    one, three = summed(1), summed(3)
    assert torch.equal(one.own, three.own)
    assert one.drift is not None
    assert three.drift is not None
    assert torch.equal(one.drift, three.drift)


def statistics(x: torch.Tensor, originals: torch.Tensor | None = None) -> Statistics:
    moments = Moments.zeros(1, x.shape[1], CPU, drifts=originals is not None)
    with Workers(1) as workers:
        moments.add(x[:, None], None if originals is None else originals[:, None], workers)
    return Statistics.of(moments)


def test_leaning_takes_in_the_mean_of_the_shared_rows() -> None:
    few, many = rows(1, 4, 8), rows(2, 100, 8)
    leaned = statistics(few).shrunk_towards(statistics(many), 10)
    expected = few.T @ few + 10 * (many.T @ many) / 100
    np.testing.assert_allclose(leaned.own, expected.numpy(), rtol=1e-5)
    assert (leaned.n_rows, leaned.n_seen) == (14, 4)


def test_importances_are_mean_squares() -> None:
    x = rows(3, 50, 8)
    expected = x.square().mean(0).numpy()
    np.testing.assert_allclose(statistics(x).importances(), expected, rtol=1e-5)


def correction_of(seen: Statistics) -> Correction:
    with Workers(2) as workers:
        made = Correction.of(seen, DAMP, each=workers.each)
    assert made is not None
    return made


def test_the_correction_solves_for_what_the_original_computes() -> None:
    """T (H + d I) = D, in several strips of columns."""
    x, damp = rows(16, 3000, 600), 0.01
    seen = statistics(x, x + 0.3 * rows(17, 3000, 600) + 0.2 * x.roll(1, 1))
    change = correction_of(seen).step(torch.eye(600)).numpy()
    assert seen.drift is not None
    damped = seen.own + damp * np.diagonal(seen.own).mean() * np.eye(600)
    expected = np.linalg.solve(damped, seen.drift.T).T
    np.testing.assert_allclose(change, expected, atol=1e-5 * np.abs(expected).max())


def test_the_correction_makes_up_for_inputs_that_have_moved() -> None:
    originals = rows(4, 400, 32)
    mix = torch.eye(32) + 0.05 * rows(5, 32, 32)
    moved = originals @ mix + 0.1 * rows(6, 400, 32)
    weights = rows(7, 20, 32).numpy()
    change = correction_of(statistics(moved, originals))
    aimed = corrected(weights, change)
    wanted = originals.numpy() @ weights.T

    def loss(values: np.ndarray) -> float:
        return float(((wanted - moved.numpy() @ values.T) ** 2).sum())

    best = np.linalg.lstsq(moved.numpy(), wanted, rcond=None)[0].T
    assert loss(aimed) < 0.2 * loss(weights)
    assert loss(aimed) < 1.1 * loss(best)


def test_a_correction_that_does_not_hold_on_other_rows_is_left_out() -> None:
    weights, x = rows(11, 20, 32).numpy(), rows(12, 40, 32)
    change = correction_of(statistics(x, x + 0.5 * rows(13, 40, 32)))
    other = rows(14, 300, 32)
    places = HoldoutSplit.of(1, 300).places(torch.arange(300), 1)
    held = Held(other, other + 0.5 * rows(15, 300, 32), places)
    full, careful = corrected(weights, change), corrected(weights, change, held)
    assert np.abs(careful - weights).max() < 0.1 * np.abs(full - weights).max()


def test_first_tokens_of_held_out_chunks_say_nothing_of_a_correction() -> None:
    """Their inputs may be huge, and no prediction depends on them, unless gradients say so."""
    weights, originals = rows(21, 20, 32).numpy(), rows(22, 400, 32)
    change = correction_of(statistics(0.8 * originals, originals))
    other = rows(23, 300, 32)
    x = 0.8 * other
    x[::50] = 1000 * rows(24, 6, 32)
    places = HoldoutSplit.of(6, 50).places(torch.arange(300), 1).weighed(None)
    aimed = corrected(weights, change, Held(x, other, places))
    np.testing.assert_allclose(aimed, corrected(weights, change), rtol=1e-2, atol=1e-3)
    others = (0.8 * other)[torch.arange(300) % 50 > 0]
    assert HeldErrors.of(x, places, None).total == pytest.approx(float(others.double().square().sum()) / 50)


def test_the_step_that_makes_up_for_drift_is_damped_more_than_rounding() -> None:
    for n_tokens, n_cols in ((100_000_000, 256), (30_000, 600), (3_000, 600), (1, 600)):
        damps = [rule(n_tokens, n_cols) for rule in (Trust().input_damp, Trust().drift_damp)]
        assert damps[0] <= damps[1]
    x = rows(25, 300, 48)
    seen = statistics(x, x + 0.5 * rows(26, 300, 48))
    with Workers(1) as workers:
        (found,) = conditions_of([(seen, None)], "blk.0.attn_q.weight", workers, Trust())
    assert found.correction is not None
    damp = Trust().drift_damp(300, 48)
    damped = seen.own + damp * np.diagonal(seen.own).mean() * np.eye(48)
    assert seen.drift is not None
    expected = np.linalg.solve(damped, seen.drift.T).T
    np.testing.assert_allclose(found.correction.step(torch.eye(48)), expected, atol=1e-5)


def lifted_slowly(moments: np.ndarray) -> np.ndarray:
    """Lift moments by their eigenvalues."""
    values, vectors = np.linalg.eigh(moments.astype(np.float64))
    mean = np.diagonal(moments).mean()
    units = values / mean
    lifted: np.ndarray = (vectors * (units + LIFT * units / (units + KNEE)) * mean) @ vectors.T
    return lifted


@pytest.mark.slow
@pytest.mark.parametrize(("n_cols", "n_real"), [(48, None), (48, 48), (64, 48), (1100, 1030)])
def test_rounding_sees_moments_whose_eigenvalues_are_nearer_to_each_other(
    n_cols: int, n_real: int | None
) -> None:
    real = n_real or n_cols
    spread = torch.logspace(0, 2, real)
    x = torch.nn.functional.pad(rows(31, 3 * real, real) * spread @ rows(32, real, real), (0, n_cols - real))
    seen = statistics(x)
    before = seen.own.copy()
    with Workers(2) as workers:
        (found,) = conditions_of([(seen, None)], "blk.0.attn_q.weight", workers, Trust(), n_real)
    assert found.factor is not None
    np.testing.assert_array_equal(seen.own, before)  # others may read them
    lifted = lifted_slowly(seen.own[:real, :real])
    damp = Trust().input_damp(3 * real, real)
    expected = lifted / np.diagonal(lifted).mean() + damp * np.eye(real)
    np.testing.assert_allclose(found.factor.hessian[:real, :real], expected, rtol=1e-4, atol=1e-4)
    assert not found.factor.hessian[real:, :real].any()
    np.testing.assert_allclose(np.diagonal(found.factor.hessian)[real:], 1e-6)
    ratios = np.linalg.eigvalsh(lifted) / np.linalg.eigvalsh(seen.own[:real, :real].astype(np.float64))
    assert ratios[0] > 2 * ratios[-1]  # the least eigenvalue gains, and the largest hardly


def test_a_column_that_was_never_seen_counts_as_an_ordinary_one() -> None:
    x = rows(33, 300, 48)
    x[:, 7] = 0
    with Workers(1) as workers:
        (found,) = conditions_of([(statistics(x), None)], "blk.0.attn_q.weight", workers, Trust())
    assert found.factor is not None
    assert 0.5 < found.factor.hessian[7, 7] < 1


def test_inputs_that_have_not_moved_need_no_correction() -> None:
    x = rows(8, 300, 16)
    assert Correction.of(statistics(x), DAMP) is None
    step = correction_of(statistics(x, x)).step(torch.eye(16))
    np.testing.assert_allclose(step, 0, atol=1e-6)


def test_chunks_that_are_held_back_count_in_no_sum() -> None:
    holdout = HoldoutSplit.of(20, 4)
    assert holdout.held == (5, 15)
    x = rows(9, 80, 3)

    def take(chunk: int) -> list[dict[tuple[str, ...], torch.Tensor]]:
        return [{("w",): x[chunk * 4 : chunk * 4 + 4, None]}]

    with Workers(2) as workers:
        inputs = gather(holdout, take, workers, drifts=False)
    held = torch.cat([x[20:24], x[60:64]])
    expected = x.T @ x - held.T @ held
    np.testing.assert_allclose(inputs.statistics(("w",)).own, expected.numpy(), rtol=1e-5, atol=1e-5)
    kept = inputs.held(("w",))
    assert kept is not None
    assert torch.equal(kept.x, held)
    assert kept.places.chunks.tolist() == [5] * 4 + [15] * 4
    assert kept.places.shares.tolist() == [0, 0.25, 0.25, 0.25] * 2  # a chunk's first token counts for none


def test_one_chunk_is_both_summed_and_held_back() -> None:
    holdout = HoldoutSplit.of(1, 16)
    assert holdout.is_summed(0)
    assert holdout.held == (0,)
    assert holdout.summed_tokens(torch.arange(16)).all()


@pytest.mark.parametrize(
    ("n_chunks", "held"),
    [
        (2, (1,)),
        (7, (3,)),
        (16, (4, 12)),
        (24, (4, 12, 20)),
        (64, (4, 12, 20, 28, 36, 44, 52, 60)),
        (100, (6, 18, 31, 43, 56, 68, 81, 93)),
    ],
)
def test_of_a_single_text_one_chunk_of_eight_is_held_back(n_chunks: int, held: tuple[int, ...]) -> None:
    assert HoldoutSplit.of(n_chunks, 512).held == held
    assert HoldoutSplit.of(n_chunks, 512, ("one",) * n_chunks).held == held


@pytest.mark.parametrize(
    ("classes", "held"),
    [
        ("abcabcabc", {"a": 1, "b": 1, "c": 1}),
        ("abab" + "a" * 60, {"a": 4, "b": 1}),
        ("ab" * 40, {"a": 4, "b": 4}),
        ("abcdefghijkl" * 2, dict.fromkeys("abcdefghijkl", 1)),
        ("abcccc", {"c": 1}),
        ("abc", {"b": 1}),
    ],
)
def test_every_class_that_can_spare_a_chunk_is_held_back(classes: str, held: dict[str, int]) -> None:
    split = HoldoutSplit.of(len(classes), 64, tuple(classes))
    assert Counter(classes[chunk] for chunk in split.held) == held
    assert split.held == tuple(sorted(set(split.held)))
