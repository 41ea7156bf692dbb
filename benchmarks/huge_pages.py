"""What memory in huge pages is worth on this machine: a start of steadyrl, memory written again, an optimizer step.

    python benchmarks/huge_pages.py [--repeats 2]

Each is done with small pages and, in turns, with GLIBC_TUNABLES=glibc.malloc.hugetlb=1 and PYTHONMALLOC=malloc, as the
Makefile sets them. On a machine of its own the two are much alike; in a virtual machine whose host is busy they may
be an order of magnitude apart, and change within minutes. Prints a table in Markdown, for benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPE = Path(__file__).parent.parent / "recipes" / "tiny.toml"
STEPS, WARM_UP = 20, 5
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "PYTHONMALLOC": "malloc"}
WRITE = """
import time, torch
numbers = torch.empty(50_000_000).fill_(1.0)
begin = time.perf_counter()
numbers.fill_(2.0)
print(time.perf_counter() - begin)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    small = {name: value for name, value in os.environ.items() if name not in HUGE} | {"OMP_NUM_THREADS": "1"}
    print("| seconds | small pages | huge pages |")
    print("| --- | --- | --- |")
    kinds = {"a start": start_s, "200 MB written again": write_s, "an optimizer step of recipes/tiny.toml": step_s}
    for name, measure in kinds.items():
        pairs = [(measure(small), measure(small | HUGE)) for _ in range(options.repeats)]
        columns = [statistics.median(column) for column in zip(*pairs, strict=True)]
        print(f"| {name} | {columns[0]:.3g} | {columns[1]:.3g} |", flush=True)


def start_s(environment: dict[str, str]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import steadyrl.run"], check=True, env=environment)
    return time.perf_counter() - begin


def write_s(environment: dict[str, str]) -> float:
    done = subprocess.run([sys.executable, "-c", WRITE], check=True, env=environment, capture_output=True, text=True)
    return float(done.stdout)


def step_s(environment: dict[str, str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"run_dir={folder}/run", f"trainer.steps={STEPS}", "evaluation.every_steps=0"]
        sizes = ["evaluation.prompts=4", "evaluation.samples_per_prompt=1"]
        words = [sys.executable, "-c", "from steadyrl.cli import main; main()", "train", str(RECIPE), *settings, *sizes]
        subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL)
        rows = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()[WARM_UP:]
    return statistics.mean(json.loads(row)["seconds"]["step"] for row in rows)


if __name__ == "__main__":
    main()
