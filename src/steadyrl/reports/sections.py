"""What stands in a report, in which order, and what the reader is told about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steadyrl.reports import figures, paper_figures, reward_figures, timeline, token_figures
from steadyrl.reports.canvas import Plot
from steadyrl.reports.comparison import Comparison, compare_runs
from steadyrl.reports.recorder import RunData
from steadyrl.reports.tables import Table, cells_table, pair_table, ranks, score_table

Draw = Callable[[list[RunData]], Plot | None]


@dataclass(frozen=True)
class Section:
    title: str
    text: str  # how to read what follows
    missing: str  # stands there if nothing follows
    plots: list[Plot]
    tables: list[Table]

    @property
    def is_empty(self) -> bool:
        return not self.plots and not self.tables


SCORE_TEXT = (
    "A point is an evaluation of held-out prompts (avg@k). A cross marks the step from which a run stays far below "
    "its best: there it has collapsed."
)
TABLE_TEXT = (
    "Best and final evaluation score, and d-bar (mean |log ratio| between trainer and engine, over the tokens of the "
    "last quarter of the steps). Brackets hold a 95 % interval over seeds (Student's t); with one seed there is none, "
    "and \u00b1 is the standard error over the held-out prompts. A star marks collapses, with the number of seeds. A "
    "best score is the highest of several noisy evaluations, so it flatters every row a little."
)


def run_sections(runs: list[RunData]) -> list[Section]:
    """The report of one run, or of several laid over each other."""
    comparison = compare_runs(runs)
    several = len(runs) > 1
    parts = [
        Section(
            "Scores by method and lag",
            TABLE_TEXT,
            "No evaluation has been recorded.",
            [],
            _tables(score_table(comparison)),
        ),
        Section(
            "Compared on equal seeds",
            PAIRS_TEXT,
            "No two runs share a lag and a seed.",
            [],
            _tables(pair_table(comparison)),
        ),
    ]
    score = [*paper_figures.scores(comparison), *_plots(runs, figures.reward)]
    best = paper_figures.best_scores(comparison) if several else None
    return [
        *(parts if several else []),
        Section(
            "Score",
            SCORE_TEXT + " Training reward: thin as measured, bold a running mean.",
            "No step and no evaluation has been recorded yet.",
            [*score, *([best] if best else [])],
            [],
        ),
        Section(
            "Drift between trainer and engine",
            "How far the trained policy is from the one that sampled, over the tokens trained on: mean |log ratio| "
            "(d-bar) and KL, then d-bar as measured. A narrow band is healthy; a band that widens or spikes comes "
            "before a collapse.",
            "No mismatch was recorded.",
            [
                *paper_figures.drift(comparison),
                *(paper_figures.drift_by_column(comparison) if len(comparison.columns) > 1 else []),
                *_plots(runs, figures.tails),
            ],
            [],
        ),
        *(Section(title, text, missing, _plots(runs, *draws), []) for title, text, missing, draws in PLAN),
    ]


def sweep_sections(comparison: Comparison) -> list[Section]:
    """The report of a sweep."""
    left_out = [cell for cell in comparison.cells if cell.problem is not None]
    note = ""
    if left_out:
        note = (
            f" {len(left_out)} of {len(comparison.cells)} runs are missing, unfinished or failed: they are in no mean "
            "and in no comparison, and the last table names them."
        )
    best = paper_figures.best_scores(comparison)
    thin = "Thin lines are seeds, bold ones their mean, the band is one standard error of it. "
    return [
        Section(
            "Scores by condition",
            TABLE_TEXT + note,
            "No run of this sweep is finished.",
            [],
            _tables(score_table(comparison)),
        ),
        Section(
            "Best score",
            "Bars are means over seeds, lines 95 % intervals, dots the seeds.",
            "No run of this sweep is finished.",
            [best] if best else [],
            [],
        ),
        Section(
            "Compared on equal seeds",
            PAIRS_TEXT,
            "No two rows share a finished seed.",
            [],
            _tables(pair_table(comparison), ranks(comparison)),
        ),
        Section(
            "Score over training",
            thin + SCORE_TEXT,
            "No evaluation was recorded.",
            paper_figures.scores(comparison),
            [],
        ),
        Section(
            "Drift over training: the lags against each other",
            thin + "Mean |log ratio| between trainer and engine, and KL to the sampling policy; the mean is smoothed.",
            "No mismatch was recorded.",
            paper_figures.drift(comparison),
            [],
        ),
        Section(
            "Drift over training: the methods against each other",
            thin + "d-bar as measured, one line per row.",
            "No mismatch was recorded.",
            paper_figures.drift_by_column(comparison),
            [],
        ),
        Section(
            "Runs", "Every run of the sweep; each folder has a report of its own.", "", [], [cells_table(comparison)]
        ),
    ]


PAIRS_TEXT = (
    "Second minus first, over the seeds that both finished: equal seeds see equal prompts, so their difference is "
    "less noisy than the scores are. Brackets hold a 95 % interval. p is that of a sign-flip test, which cannot fall "
    "below 2 / 2^seeds: with five seeds 0.0625, whatever the difference. Of many comparisons some are small by chance."
)

PLAN: list[tuple[str, str, str, Sequence[Draw]]] = [
    (
        "Clipped tokens",
        "Shares of the trained tokens: those outside the interval, and those whose gradient was removed there. A "
        "token outside keeps its gradient where that pulls the ratio back (r > 1 with A < 0, r < 1 with A > 0). The "
        "last three panels are means over the last quarter of the steps.",
        "No clip fractions were recorded.",
        (
            figures.clipped,
            token_figures.sides,
            lambda runs: token_figures.removed_by(runs, "age"),
            lambda runs: token_figures.removed_by(runs, "position"),
            lambda runs: token_figures.removed_by(runs, "probability"),
        ),
    ),
    (
        "SAT: quantile, radii, gates",
        "q is the quantile of |log ratio| above which a token is gated; it follows the drift of the batch. The radii "
        "are means over all trained tokens. The gate rate counts tokens whose interval SAT narrowed; the intervention "
        "rate those whose gradient only the narrowing removed, which is where SAT differs from a fixed clip.",
        "No run here uses a Staleness-Adaptive Trust Region.",
        (figures.quantile, figures.radii, figures.gates, figures.contraction),
    ),
    (
        "SAT: which tokens",
        "By sign: shares of all tokens of the recorded batches. The others: shares of the tokens of each bucket, "
        "means over the last quarter of the steps; a bucket may hold few tokens.",
        "No run here uses a Staleness-Adaptive Trust Region.",
        (
            token_figures.gated_by_sign,
            lambda runs: token_figures.gated_by(runs, "age"),
            lambda runs: token_figures.gated_by(runs, "position"),
            lambda runs: token_figures.gated_by(runs, "probability"),
        ),
    ),
    (
        "Policy lag and engine numerics",
        "d = policy lag + engine numerics. The two are told apart where the trainer scores the batch with the weights "
        "that sampled it (anchor old_actor); the rest of Var(d) is twice their covariance.",
        "The split needs objective.anchor=old_actor; no run here has it. Drift at lag 0, below, is engine numerics.",
        (figures.split, figures.variances),
    ),
    (
        "Where the drift sits",
        "Drift of the policy grows with age; noise of the engine does not, and sits on improbable or late tokens. "
        "Means over the last quarter of the steps. Routing: share of tokens and layers for which trainer and engine "
        "chose other experts.",
        "No breakdown was recorded.",
        (
            lambda runs: token_figures.drift_by(runs, "age"),
            lambda runs: token_figures.drift_by(runs, "position"),
            lambda runs: token_figures.drift_by(runs, "probability"),
            figures.routing,
        ),
    ),
    (
        "Lag",
        "How many optimizer steps old the tokens were when they were trained on.",
        "No lags were recorded.",
        (figures.lags, figures.lag_over_time, figures.lag_parts),
    ),
    (
        "Who waited for whom",
        "What trainer and engine did. Grey stretches are waiting: on the trainer's lane for responses, on the "
        "engine's lane for weights or for work. The actor near 100 % is the bottleneck: more of it, or less work for "
        "it, shortens the run.",
        "No timeline was recorded.",
        (timeline.start_of_run, timeline.end_of_run, timeline.time_budget, timeline.utilisation_over_time),
    ),
    (
        "Rewards by group",
        "A group is the responses to one prompt. Groups whose rewards are all equal have no advantage and teach "
        "nothing. The bars count the groups of the first and of the last recorded batch by their mean reward.",
        "No rewards were recorded.",
        (figures.signal, reward_figures.group_means),
    ),
    (
        "Verdicts and truncation",
        "What the verifier said about each response. Truncated responses teach the length limit, not the task.",
        "No verdicts were recorded.",
        (reward_figures.statuses, figures.truncation, figures.lengths),
    ),
    (
        "Optimization",
        "Spikes of the gradient norm are early signs of trouble; so is a response length that runs away.",
        "No gradient norm was recorded.",
        (figures.gradient_norm, figures.penalty),
    ),
]


def _plots(runs: list[RunData], *draws: Draw) -> list[Plot]:
    return [plot for draw in draws if (plot := draw(runs)) is not None]


def _tables(*tables: Table | None) -> list[Table]:
    return [table for table in tables if table is not None]
