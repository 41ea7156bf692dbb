"""The exceptions a user can meet. Each message says what to change.

`ConfigError` is the user's to mend before a run starts (exit code 2 from the command line); the
others stop a run that had started (exit code 1), after everything already produced was written.
"""


class SteadyRLError(Exception):
    """Base of all errors raised on purpose by steadyrl."""


class ConfigError(SteadyRLError, ValueError):
    """A recipe, an override or an argument that cannot work, with the remedy."""


class EngineError(SteadyRLError, RuntimeError):
    """A rollout engine died, hung, or returned something that cannot be trained on."""


class TrainingError(SteadyRLError, RuntimeError):
    """Training cannot go on, for example because a gradient is not finite."""


class LearnerLostError(SteadyRLError, RuntimeError):
    """A process that trains died; the run can go on from its newest checkpoint."""


class CheckpointError(SteadyRLError, RuntimeError):
    """A checkpoint that is missing, torn, or made by another recipe."""
