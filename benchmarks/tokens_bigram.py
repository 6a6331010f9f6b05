"""What to expect of over-optimisation on names, exactly: a bigram reference and a reward that is linear in bigrams.

    pip install names; python benchmarks/tokens_bigram.py [--out benchmarks/results/tokens-bigram.md]

The reference is the bigram chain of the names, cut off at the task's length. For a reward that is a sum over bigrams
the best policy, reference * exp(reward / kl_coef) / Z, is a chain too, whose steps depend on the position. So expected
proxy, KL and gold reward of the best policy at every coefficient are sums over chains, without sampling, without
training and without a network. The reward is fitted to noisy pairs by logistic regression, as a reward model is.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, logsumexp

from purejaxppo.host.rlhf_stages import load_names
from purejaxppo.tokens import names

T = 12
NUM_PAIRS = (250, 1000, 8000)
COEFS = (3.0, 1.0, 0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02)
SHARPNESS, NUM_SEEDS, NUM_REFERENCE = 1.5, 4, 4096
SMOOTHING = 0.01  # added to every count: a bigram that no name has is improbable, not impossible
# Of the logistic regression, chosen by nobody: a prior of standard deviation 1 on the reward of a bigram.
WEIGHT_DECAY = 1.0
SIZE = names.VOCAB - 1  # letters and EOS
LETTERS = SIZE - 1


class Chain(NamedTuple):
    """A policy: log p(first letter) [26], and log p(next | letter) [T, 26, 27] of every step, EOS last."""

    first: np.ndarray
    steps: np.ndarray


class Value(NamedTuple):
    """What a policy is worth, exactly."""

    proxy: float
    gold: float
    kl: float  # nats per response


def reference_chain(prompt: np.ndarray, tokens: np.ndarray) -> Chain:
    """The smoothed bigrams of names."""
    counts = np.full((LETTERS, SIZE), SMOOTHING)
    sequence = np.concatenate([prompt, tokens], axis=1)
    before, after = sequence[:, :-1], sequence[:, 1:]
    real = (before < LETTERS) & (after < SIZE)
    np.add.at(counts, (before[real], after[real]), 1)
    first = np.bincount(prompt[:, 0], minlength=LETTERS) / len(prompt)
    with np.errstate(divide="ignore"):
        log_first = np.log(first)
    steps = np.log(counts / counts.sum(1, keepdims=True))
    return Chain(log_first, np.broadcast_to(steps, (T, LETTERS, SIZE)))


def draw(chain: Chain, rng: np.random.Generator, prompt: np.ndarray) -> np.ndarray:
    """Responses [n, T] to first letters [n]: letters, EOS, PAD."""
    state, rows = prompt.copy(), np.full((len(prompt), T), names.PAD)
    running = np.ones(len(prompt), bool)
    for step in range(T):
        cumulative = np.exp(chain.steps[step][np.minimum(state, LETTERS - 1)]).cumsum(1)
        drawn = (cumulative < rng.random((len(prompt), 1)) * cumulative[:, -1:]).sum(1)
        rows[running, step] = drawn[running]
        state, running = np.where(running, drawn, state), running & (drawn != names.EOS)
    return rows


def features(prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """How often each bigram occurs, [n, 26 * 27]."""
    sequence = np.concatenate([prompt[:, None], tokens], axis=1)
    before, after = sequence[:, :-1], sequence[:, 1:]
    counts = np.zeros((len(prompt), LETTERS, SIZE))
    rows, columns = np.nonzero((before < LETTERS) & (after < SIZE))
    np.add.at(counts, (rows, before[rows, columns], after[rows, columns]), 1)
    return counts.reshape(len(prompt), -1)


def fit_reward(first: np.ndarray, second: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Rewards of bigrams, [26 * 27], by Bradley-Terry with a Gaussian prior."""
    difference = (first - second) * np.where(label, 1.0, -1.0)[:, None]

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        margin = difference @ weights
        value = np.logaddexp(0, -margin).sum() + 0.5 * WEIGHT_DECAY * weights @ weights
        return value, -difference.T @ expit(-margin) + WEIGHT_DECAY * weights

    return minimize(loss, np.zeros(difference.shape[1]), jac=True, method="L-BFGS-B").x


def tilted(reference: Chain, rewards: np.ndarray, kl_coef: float) -> Chain:
    """The best policy: p_t(b | a) ~ ref(b | a) exp(reward(a, b) / kl_coef) Z_{t+1}(b), and Z of EOS and of step T is 1.

    The first letter is the prompt, which no policy chooses.
    """
    to_come, steps = np.zeros(SIZE), np.empty((T, LETTERS, SIZE))
    for step in reversed(range(T)):
        weights = reference.steps[step] + rewards.reshape(LETTERS, SIZE) / kl_coef + to_come
        log_z = logsumexp(weights, axis=1)
        steps[step] = weights - log_z[:, None]
        to_come = np.append(log_z, 0.0)
    return Chain(reference.first, steps)


def worth(chain: Chain, reference: Chain, rewards: np.ndarray, trigram: np.ndarray, gold: tuple[float, float]) -> Value:
    """Expected reward, gold reward and KL of a policy, by sums forwards and backwards along the chain.

    Args:
      rewards: [26 * 27], standardised: mean and bias are those of whole responses, the bias not included.
      trigram: [28, 28, 28] log-probabilities that the gold reward's plausibility is read from.
      gold: mean and standard deviation of the gold reward under the reference.
    """
    probs = np.exp(chain.steps)
    occupied = [np.exp(chain.first)]  # [26] probability of being in each letter before every step
    for step in range(T):
        occupied.append(occupied[-1] @ probs[step][:, :LETTERS])
    joint = np.stack([occupied[t][:, None] * probs[t] for t in range(T)])  # [T, 26, 27]
    kl = (joint * (chain.steps - reference.steps)).sum()
    proxy = (joint * rewards.reshape(LETTERS, SIZE)).sum()

    # P(response has n tokens, EOS included | letter before step t); the last length is shared with those cut off.
    length = np.zeros((T + 1, LETTERS, T + 1))
    length[T, :, T] = 1.0
    for t in reversed(range(T)):
        length[t] = probs[t][:, :LETTERS] @ length[t + 1]
        length[t, :, t + 1] += probs[t][:, names.EOS]
    plausible = 0.0
    for t in range(T):
        before = np.zeros((names.VOCAB, LETTERS))  # P(letter before the previous one, previous one)
        if t == 0:
            before[names.PAD] = occupied[0]
        else:
            before[:LETTERS] = occupied[t - 1][:, None] * probs[t - 1][:, :LETTERS]
        third = before[:, :, None] * probs[t][None]  # [28, 26, 27]
        share = np.zeros((SIZE, T + 1))
        share[:LETTERS], share[names.EOS, t + 1] = length[t + 1], 1.0
        with_length = third[..., None] * share  # of each length
        log_probs = trigram[:, :LETTERS, :SIZE, None]
        plausible += (with_length * log_probs / np.maximum(np.arange(T + 1), 1)).sum()
    by_length = occupied[0] @ length[0]
    cut_off = occupied[T].sum()
    costs = names.LENGTH_COST * (by_length * np.maximum(np.arange(T + 1) - names.LONG, 0)).sum()
    raw = _capped_soft(probs, occupied[0]) + names.PLAUSIBILITY * plausible - costs - names.NO_END_COST * cut_off
    return Value(float(proxy), float((raw - gold[0]) / gold[1]), float(kl))


def _capped_soft(probs: np.ndarray, first: np.ndarray) -> float:
    """Expected number of soft letters, the first one included, at most `MAX_SOFT`."""
    most, soft = int(names.MAX_SOFT), np.isin(np.arange(LETTERS), names.SOFT)
    state, ended = np.zeros((most + 1, LETTERS)), np.zeros(most + 1)
    state[0, ~soft], state[1, soft] = first[~soft], first[soft]
    for step in probs:
        moved = state @ step
        ended += moved[:, names.EOS]
        state = np.where(soft, 0.0, moved[:, :LETTERS])
        for count in range(most + 1):
            state[min(count + 1, most), soft] += moved[count, :LETTERS][soft]
    return float((ended + state.sum(1)) @ np.arange(most + 1))


def gold_of(prompt: np.ndarray, tokens: np.ndarray, trigram: np.ndarray) -> np.ndarray:
    """The annotator's reward of given responses, not standardised."""
    import jax.numpy as jnp

    from purejaxppo.tokens.reward import as_responses
    from purejaxppo.tokens.tasks import make

    model = make("names").model
    column = jnp.asarray(prompt[:, None], jnp.int32)
    responses = as_responses(model, column, jnp.ones(column.shape, bool), jnp.asarray(tokens, jnp.int32))
    return np.asarray(names.gold({"log_probs": trigram, "mean": 0.0, "std": 1.0}, responses), np.float64)


def curve(num_pairs: int, seed: int, reference: Chain, trigram: np.ndarray) -> list[Value]:
    """The best policies' worth at every coefficient, for a reward fitted to `num_pairs` pairs."""
    rng = np.random.default_rng(seed)
    letters = np.exp(reference.first)
    prompt = rng.choice(LETTERS, NUM_REFERENCE, p=letters / letters.sum())
    samples = draw(reference, rng, prompt)
    scores = gold_of(prompt, samples, trigram)
    gold = (scores.mean(), scores.std())
    prompt = rng.choice(LETTERS, num_pairs, p=letters / letters.sum())
    pair = [draw(reference, rng, prompt) for _ in range(2)]
    first, second = ((gold_of(prompt, each, trigram) - gold[0]) / gold[1] for each in pair)
    label = rng.random(num_pairs) < expit(SHARPNESS * (first - second))
    rewards = fit_reward(*(features(prompt, each) for each in pair), label)
    raw = features(*_reference_sample(reference, rng)) @ rewards
    rewards = rewards / raw.std()
    bias = raw.mean() / raw.std()
    values = [worth(tilted(reference, rewards, coef), reference, rewards, trigram, gold) for coef in COEFS]
    return [value._replace(proxy=value.proxy - bias) for value in values]


def _reference_sample(reference: Chain, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    letters = np.exp(reference.first)
    prompt = rng.choice(LETTERS, NUM_REFERENCE, p=letters / letters.sum())
    return prompt, draw(reference, rng, prompt)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    words = [word for word in load_names() if len(word) <= T]
    prompt, tokens = names.encode(words, T)
    reference, trigram = reference_chain(prompt, tokens), names.trigram_log_probs(prompt, tokens)
    lines = [
        "# Over-optimisation on names, exactly",
        "",
        "A bigram reference and a reward linear in bigrams, fitted to N noisy pairs: KL / proxy / gold of the best",
        f"policy at each coefficient, means of {NUM_SEEDS} sets of pairs. Proxy and gold in standard deviations of the",
        "reference's responses.",
        "",
        "| N | " + " | ".join(f"{coef:g}" for coef in COEFS) + " |",
        "|---|" + "---|" * len(COEFS),
    ]
    for num in NUM_PAIRS:
        values = np.array([curve(num, seed, reference, trigram) for seed in range(NUM_SEEDS)])  # [seeds, coefs, 3]
        cells = [f"{kl:.1f} / {proxy:.2f} / {gold:.2f}" for proxy, gold, kl in values.mean(0)]
        lines.append(f"| {num:,} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
