"""The tables `[task]` of a recipe: what is asked, and how answers are judged."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from steadyrl.axes import AboveZero, Table

Terms = Annotated[int, Field(ge=2, le=20)]
Threads = Annotated[int, Field(ge=1, le=1024)]


class ArithmeticTask(Table):
    """Running sums with visible steps, generated from the seed."""

    name: Literal["arithmetic"] = "arithmetic"
    terms: Terms = 5
    max_term: Annotated[int, Field(ge=1, le=999)] = 9
    min_terms: Terms | None = None  # problems of this many to `terms` summands; None = all of `terms`

    @model_validator(mode="after")
    def _min_is_not_above(self) -> ArithmeticTask:
        if self.min_terms is not None and self.min_terms > self.terms:
            raise ValueError(f"task.min_terms = {self.min_terms} is above task.terms = {self.terms}: lower it")
        return self


class ReasoningTask(Table):
    """A procedural task of the reasoning-gym package, with its own scorer (extra `real`)."""

    name: Literal["reasoning_gym"]
    dataset: str = "chain_sum"
    options: dict[str, Any] = Field(default_factory=dict)
    instruction: str = ""  # put in front of every question


class DataSource(Table):
    """Problems with answers: a published set, a file or folder, or files on the hub (tasks/sources.py)."""

    source: Annotated[str, Field(min_length=1)]
    # columns of a file that is in no published schema; a dot leads into a nested one
    problem: str = ""
    answer: str = ""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _both_columns(self) -> DataSource:
        if bool(self.problem) != bool(self.answer):
            raise ValueError(f"{self.source} needs the names of both columns, problem and answer, or of none")
        return self


class VerifierConfig(Table):
    """The processes that judge answers, and their limits for each of them."""

    policy: str = ""  # a TOML file; "" = the defaults of docs/verifier.md
    workers: Threads = 2
    timeout_s: AboveZero = 5.0
    memory_mb: Annotated[int, Field(ge=16, le=1 << 20)] = 512


class MathDatasetTask(Table):
    """Problems from data sets, graded by the verifier (extra `real`)."""

    name: Literal["math_dataset"]
    train: list[DataSource] = Field(default_factory=list)
    test: list[DataSource] = Field(default_factory=list)
    instruction: str = "Reason step by step, and put the final answer in \\boxed{}."  # after every problem
    bad_rows: Literal["refuse", "skip"] = "refuse"
    verifier: VerifierConfig = VerifierConfig()


Task = Annotated[ArithmeticTask | ReasoningTask | MathDatasetTask, Field(discriminator="name")]
