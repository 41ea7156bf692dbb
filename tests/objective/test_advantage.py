import pytest
import torch

from steadyrl.objective.advantage import group_advantage


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["group_standardized", "group_centered"])
@pytest.mark.parametrize("reward", [0.7, 0.35, 0.1, 0.0, 1.0])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 16])  # with 3 and 7, a float64 mean is not exact
def test_equal_rewards_give_exactly_zero(size, reward, mode, dtype):
    advantage = group_advantage(torch.full((2, size), reward, dtype=dtype), mode)
    assert advantage.dtype == torch.float32
    assert torch.equal(advantage, torch.zeros(2, size))


def test_one_different_reward_stays_of_order_one():
    advantage = group_advantage(torch.tensor([[0.35] * 7 + [0.95]]), "group_standardized")
    # (n-1)/sqrt(n) and -1/sqrt(n) for one against n - 1
    torch.testing.assert_close(advantage, torch.tensor([[-(8**-0.5)] * 7 + [7 * 8**-0.5]]), rtol=1e-4, atol=0)


def test_groups_do_not_see_each_other():
    rewards = torch.tensor([[0.0, 1.0], [5.0, 5.0], [2.0, 6.0]])
    assert group_advantage(rewards, "group_centered").tolist() == [[-0.5, 0.5], [0.0, 0.0], [-2.0, 2.0]]
    torch.testing.assert_close(
        group_advantage(rewards, "group_standardized"),
        torch.tensor([[-(0.5**0.5), 0.5**0.5], [0.0, 0.0], [-(0.5**0.5), 0.5**0.5]]),
        rtol=1e-5,
        atol=0,
    )


def test_the_input_is_left_alone():
    rewards = torch.tensor([[0.0, 1.0]])
    group_advantage(rewards, "group_standardized")
    assert rewards.tolist() == [[0.0, 1.0]]
