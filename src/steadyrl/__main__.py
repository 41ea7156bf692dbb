"""`python -m steadyrl` is the command `steadyrl`."""

from steadyrl.cli import entry

entry()
