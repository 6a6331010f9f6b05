"""Every setting of the token layer that is refused, and what is said of it."""

import math
import re

import jax
import numpy as np
import pytest

from purejaxppo.tokens import rlhf, tasks
from purejaxppo.tokens.config import (
    INTERVALS,
    TokenConfig,
    TokenHParams,
    check_hparams,
    config_from_mapping,
    hparams_from_mapping,
)
from purejaxppo.tokens.model import Gpt
from purejaxppo.tokens.types import Task
from tests.tokens.helpers import MODEL, TASK, TINY, params, shared, tiny, weighted_count


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"task": "name"}, "config.task = 'name': allowed: 'token-count', 'enum', 'names', or a Task"),
        ({"task": TASK, "task_params": {"width": 8}}, "config.task_params = {'width': 8}: is read only with a task"),
        ({"algorithm": "trpo"}, "config.algorithm = 'trpo': allowed: 'ppo', 'grpo', 'dpo', 'ipo'"),
        ({"num_updates": 0}, "config.num_updates = 0: must be a positive integer"),
        ({"batch_size": 2.5}, "config.batch_size = 2.5: must be a positive integer"),
        ({"num_minibatches": 7}, "config.num_minibatches = 7: must divide batch_size = 64"),
        ({"normalize_advantages": 1}, "config.normalize_advantages = 1: must be a boolean"),
        ({"missing_eos": "drop"}, "config.missing_eos = 'drop': allowed: 'none', 'replace', 'subtract'"),
        ({"critic": "shared", "critic_from": "reward_model"}, "config.critic_from = 'reward_model': is read only with"),
        ({"group_size": 4}, "config.group_size = 4: is read only with algorithm = 'grpo'"),
        ({"algorithm": "grpo", "group_size": 1}, "config.group_size = 1: must be 2 or more"),
        ({"algorithm": "grpo", "group_size": 7}, "config.group_size = 7: must divide batch_size = 64"),
        ({"algorithm": "grpo", "critic": "shared"}, "config.critic = 'shared': is read only with algorithm = 'ppo'"),
        ({"algorithm": "dpo", "num_epochs": 2}, "config.num_epochs = 2: is read only with algorithm = 'ppo' or 'grpo'"),
    ],
)
def test_static_settings_that_are_refused(settings, says):
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        TokenConfig(**settings)
    assert str(error.value).startswith(says), error.value


@pytest.mark.parametrize(
    ("config", "hparams", "says"),
    [
        ({}, {"gamma": 1.5}, "hparams.gamma = 1.5: must be in [0, 1]"),
        ({}, {"dual_clip": 1.0}, "hparams.dual_clip = 1: must be in (1, inf]"),
        ({}, {"kl_coef": math.nan}, "hparams.kl_coef = nan: must be in [0, inf)"),
        ({}, {"kl_coef": "0.1"}, "hparams.kl_coef = '0.1': must be a number"),
        ({}, {"kl_coef": 0.0, "kl_gain": 0.1}, "hparams.kl_coef = 0: must be above 0 with kl_gain > 0"),
        ({}, {"kl_target": 0.0, "kl_gain": 0.1}, "hparams.kl_target = 0: must be above 0 with kl_gain > 0"),
        ({}, {"kl_coef": np.array([0.1, 0.0]), "kl_gain": 0.1}, "hparams.kl_coef = 0: must be above 0"),
        ({}, {"kl_gain": 0.1, "kl_coef_factor": 2.0}, "hparams.kl_gain = 0.1: must be 0 with kl_coef_factor > 1"),
        ({}, {"target_kl": 0.1}, "hparams.target_kl = 0.1: is read only with config.kl_early_stopping = true"),
        ({}, {"missing_eos_score": 1.0}, "hparams.missing_eos_score = 1: is read only with config.missing_eos"),
        ({}, {"label_smoothing": 0.1}, "hparams.label_smoothing = 0.1: is read only with config.algorithm = 'dpo'"),
        ({"algorithm": "grpo"}, {"vf_coef": 0.1}, "hparams.vf_coef = 0.1: is read only with config.algorithm = 'ppo'"),
        ({"algorithm": "dpo"}, {"clip_eps_low": 0.1}, "hparams.clip_eps_low = 0.1: is read only with"),
        ({"algorithm": "dpo"}, {"kl_coef": 0.0}, "hparams.kl_coef = 0: must be above 0: it scales the margin"),
    ],
)
def test_numbers_that_are_refused(config, hparams, says):
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        check_hparams(TokenConfig(**config), TokenHParams(**hparams))
    assert str(error.value).startswith(says), error.value


def test_every_number_has_a_range_and_its_default_is_in_it():
    assert {*INTERVALS} == {*TokenHParams._fields}
    check_hparams(TokenConfig(), TokenHParams())
    check_hparams(TokenConfig(), TokenHParams(kl_coef=np.array([0.0, 1.0])))


def test_a_coefficient_of_0_is_a_run_without_penalty():
    check_hparams(TokenConfig(), TokenHParams(kl_coef=0.0))


def test_typos_in_files_get_the_nearest_name():
    with pytest.raises(ValueError, match=r"config\.num_update: there is no such setting; did you mean 'num_updates'"):
        config_from_mapping({"num_update": 3})
    with pytest.raises(ValueError, match=r"hparams\.kl_coeff: there is no such setting; did you mean 'kl_coef'"):
        hparams_from_mapping({"kl_coeff": 3})
    with pytest.raises(ValueError, match=r"hparams\.kl_coef = True: must be a number"):
        hparams_from_mapping({"kl_coef": True})
    with pytest.raises(ValueError, match=r"task_params\.widht: there is no such setting; did you mean 'width'"):
        tasks.make("enum", (("widht", 8),))
    with pytest.raises(ValueError, match=r"config\.task_params\.response_len = 0: must be a positive integer"):
        tasks.make("token-count", (("response_len", 0),))


# Arrays that do not suit the task


def refused(says, config=TINY, **changes):
    with pytest.raises(ValueError, match=says):
        rlhf.init(config, TokenHParams(), jax.random.key(0), shared(**changes))


def test_a_reference_of_another_vocabulary_is_refused():
    other = Gpt(vocab_size=7, eos_id=4, pad_id=5, context_len=8, width=8)
    refused(
        r"shared\.reference: embedding of shape \(7, 8\): must be \(6, 8\).*vocabulary of 6", reference=params(other)
    )


def test_a_reference_of_another_depth_is_refused():
    refused(r"shared\.reference: its parameters are not those of the task's model", reference=params(MODEL))


def test_a_prompt_that_leaves_no_room_is_refused():
    prompts = np.zeros((2, 6), np.int32)
    refused("10 tokens: longer than the context of 8", prompts=prompts, prompt_mask=prompts == 0)


def test_prompts_that_are_padded_on_the_right_are_refused():
    mask = np.array([[1, 1, 0]] * 3, bool)
    refused(r"shared\.prompt_mask: must be true in the last slot", prompt_mask=mask)


def test_a_task_without_arrays_of_its_own_needs_them():
    with pytest.raises(ValueError, match="needs `shared`"):
        rlhf.init(TINY, TokenHParams(), jax.random.key(0))


def test_a_critic_from_a_reward_model_needs_one():
    refused("this task has no reward model to start from", tiny(critic_from="reward_model"))


def test_dpo_needs_pairs():
    config = TokenConfig(task=Task(TASK.model, 4, weighted_count), algorithm="dpo", batch_size=12)
    with pytest.raises(ValueError, match="this task has no preference pairs to learn from"):
        rlhf.train(config, TokenHParams(), jax.random.key(0), shared())
