"""From the table `[task]` of a recipe to a task."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from steadyrl.task_config import ArithmeticTask, MathDatasetTask, ReasoningTask
from steadyrl.tasks.arithmetic import Arithmetic
from steadyrl.tasks.base import Task


def build_task(
    config: ArithmeticTask | ReasoningTask | MathDatasetTask, tokenizer: PreTrainedTokenizerBase, seed: int
) -> Task:
    """The task that a recipe describes; the seed decides its training prompts.

    Raises:
        ConfigError: what it needs is missing, or its data cannot be read.
    """
    if isinstance(config, ArithmeticTask):
        return Arithmetic(config, tokenizer, seed)
    if isinstance(config, MathDatasetTask):
        from steadyrl.tasks.math_dataset import MathDataset  # these need extras that other tasks do without

        return MathDataset(config, tokenizer, seed)
    from steadyrl.tasks.reasoning import ReasoningGymTask

    return ReasoningGymTask(config, tokenizer, seed)
