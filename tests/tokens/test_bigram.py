"""The exact calculation of over-optimisation beside samples of the same chains."""

import numpy as np
import pytest

from benchmarks import tokens_bigram as bigram
from purejaxppo.tokens import names

WORDS = ["anna", "nora", "max", "emil", "manuel", "amalia", "ben", "ella"]


@pytest.fixture(scope="module")
def task():
    prompt, tokens = names.encode(WORDS, bigram.T)
    rewards = 0.3 * np.random.default_rng(0).normal(size=bigram.LETTERS * bigram.SIZE)
    return bigram.reference_chain(prompt, tokens), names.trigram_log_probs(prompt, tokens), rewards


@pytest.mark.parametrize("kl_coef", [0.1, 0.5])
def test_the_worth_of_the_best_policy_is_the_mean_of_its_samples(task, kl_coef):
    reference, trigram, rewards = task
    chain = bigram.tilted(reference, rewards, kl_coef)
    np.testing.assert_allclose(np.exp(chain.steps).sum(-1), 1.0)
    rng = np.random.default_rng(1)
    letters = np.exp(reference.first)
    prompt = rng.choice(bigram.LETTERS, 20_000, p=letters / letters.sum())
    tokens = bigram.draw(chain, rng, prompt)
    counts = bigram.features(prompt, tokens).reshape(-1, bigram.LETTERS, bigram.SIZE)
    sequence = np.concatenate([prompt[:, None], tokens], axis=1)
    kl = np.zeros(len(prompt))
    for step, log_ratio in enumerate(chain.steps - reference.steps):
        row = np.flatnonzero(sequence[:, step] < bigram.LETTERS)
        kl[row] += log_ratio[sequence[row, step], sequence[row, step + 1]]
    proxy = counts.reshape(len(prompt), -1) @ rewards
    gold = (bigram.gold_of(prompt, tokens, trigram) - 0.5) / 2.0
    exact = bigram.worth(chain, reference, rewards, trigram, (0.5, 2.0))
    for sampled, value in ((proxy, exact.proxy), (gold, exact.gold), (kl, exact.kl)):
        assert abs(sampled.mean() - value) < 4 * sampled.std() / np.sqrt(len(sampled))


def test_a_huge_coefficient_is_the_reference_and_no_policy_does_better_than_the_tilted_one(task):
    reference, trigram, rewards = task
    far = bigram.worth(bigram.tilted(reference, rewards, 1e9), reference, rewards, trigram, (0.0, 1.0))
    assert abs(far.kl) < 1e-9
    best, other = (
        bigram.worth(bigram.tilted(reference, rewards, coef), reference, rewards, trigram, (0.0, 1.0))
        for coef in (0.5, 0.4)
    )
    assert best.proxy - 0.5 * best.kl > max(other.proxy - 0.5 * other.kl, far.proxy)


def test_the_reward_is_fitted_to_the_labels():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 500, 3))
    weights = bigram.fit_reward(first, second, (first - second)[:, 0] > 0)
    assert weights[0] > 1
    assert abs(weights[1:]).max() < 0.5
