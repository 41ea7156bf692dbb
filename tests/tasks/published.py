"""Small files in exactly the schemas of the published sets: column names, types and the texts around a problem."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

MESSAGES = pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))
DAPO_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", MESSAGES),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        ("extra_info", pa.struct([("index", pa.string())])),
    ]
)
DOLCI_SCHEMA = pa.schema([("prompt", pa.string()), ("ground_truth", pa.string()), ("dataset", pa.string())])
AIME_H4_SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("problem", pa.string()),
        ("solution", pa.string()),
        ("answer", pa.string()),
        ("url", pa.string()),
        ("year", pa.string()),
    ]
)
AIME_MJ_SCHEMA = pa.schema(
    [("ID", pa.string()), ("Problem", pa.string()), ("Solution", pa.string()), ("Answer", pa.int64())]
)
GSM8K_SCHEMA = pa.schema([("question", pa.string()), ("answer", pa.string())])
MATH_SCHEMA = pa.schema(
    [("problem", pa.string()), ("level", pa.string()), ("type", pa.string()), ("solution", pa.string())]
)


def dapo_row(problem: str, answer: str, index: str = "0") -> dict:
    content = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
        + problem
        + "\n\nRemember to put your "
        'answer on its own line after "Answer:".'
    )
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def dolci_row(problem: str, answer: str) -> dict:
    return {"prompt": problem, "ground_truth": answer, "dataset": "math"}


def aime_h4_row(problem: str, answer: str) -> dict:
    return {
        "id": 60,
        "problem": problem,
        "solution": f"So \\boxed{{{answer}}}.",
        "answer": answer,
        "url": "",
        "year": "2024",
    }


def aime_mj_row(problem: str, answer: int) -> dict:
    return {"ID": "2024-I-1", "Problem": problem, "Solution": "...", "Answer": answer}


def gsm8k_row(question: str, answer: str) -> dict:
    return {"question": question, "answer": f"She has 2 * 9 = <<2*9=18>>18.\n#### {answer}"}


def math_row(problem: str, solution: str) -> dict:
    return {"problem": problem, "level": "Level 3", "type": "Algebra", "solution": solution}


def parquet(path: Path, rows: list[dict], schema: pa.Schema) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return str(path)


def jsonl(path: Path, rows: list[dict | str]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return str(path)
