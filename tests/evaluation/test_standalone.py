"""`steadyrl eval`: the command, its files, its refusals; and a checkpoint scored again."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from steadyrl.cli import app
from steadyrl.engines.build import build_local_engine
from steadyrl.errors import ConfigError
from steadyrl.evaluation.command import evaluate_and_show, in_words_of_the_command
from steadyrl.evaluation.standalone import data_tables, evaluate_model, find_model, generate, with_room
from steadyrl.models.load import load_model
from steadyrl.recipe import build_config
from steadyrl.reports.recorder import read_run
from steadyrl.run import train
from steadyrl.tasks.build import build_task
from steadyrl.types import GenerationRequest, Prompt

TINY = "bundled:tiny_moe"


def run(*arguments: str):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def refusal(*arguments: str) -> str:
    error = run(*arguments).exception
    assert isinstance(error, ConfigError), error
    return str(error)


def test_the_command_scores_writes_and_compares(tmp_path):
    out = tmp_path / "a.json"
    shown = run(TINY, "--data", "arithmetic", "--k", "4", "--prompts", "6", "--max-tokens", "20", "--out", out)
    assert shown.exit_code == 0, shown.output
    written = json.loads(out.read_text(encoding="utf-8"))
    score = written["score"]
    assert (score["prompts"], score["k"], score["samples"], score["max_response_tokens"]) == (6, 4, 24, 20)
    assert (written["version"], score["version"], len(score["weights"])) == (0, 0, 8)
    assert len(written["problems"]) == 6
    for problem, right in zip(written["problems"], score["right"], strict=True):
        assert len(problem["samples"]) == 4
        assert sum(sample["status"] == "right" for sample in problem["samples"]) == right
        for sample in problem["samples"]:
            assert (sample["answer"] == problem["answer"]) == (sample["status"] == "right")
    assert f"{score['avg_at_k']:.4f}" in shown.output
    assert score["data_checksum"] in shown.output
    compared = run("--compare", out, out)
    assert compared.exit_code == 0, compared.output
    assert "difference over 6 problems: +0.0000" in compared.output


def test_a_checkpoint_gets_the_scores_that_its_run_gave_it(tmp_path):
    sizes = ["evaluation.prompts=5", "evaluation.samples_per_prompt=4"]
    config = build_config(
        {"run_dir": str(tmp_path / "run")},
        [*sizes, "trainer.steps=1", "pipeline.backend=inline", "pipeline.prompts_per_batch=1", "trainer.lr=1e-3"],
    )
    train(config)
    before, row = read_run(tmp_path / "run").evaluations
    assert (before["version"], row["version"]) == (0, 1)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    again = build_config({"model": {"path": str(checkpoint)}}, sizes)
    tokens = row["max_response_tokens"]
    result = evaluate_model(again, seed=row["seed"], max_response_tokens=tokens, progress=lambda _done, _total: None)
    weights = result["score"].pop("weights")
    assert weights == result["weights"]
    assert result["score"] == {name: value for name, value in row.items() if name != "step"}
    assert result["version"] == row["version"] == 1


def test_arguments_that_cannot_work_are_one_sentence(tmp_path):
    assert "needs a model and --data" in refusal()
    assert "needs a model and --data" in refusal(TINY)
    assert "there is no file or folder nothing.jsonl" in refusal(TINY, "--data", "nothing.jsonl")
    assert "evaluation.temperature" in refusal(TINY, "--data", "arithmetic", "--temperature", "0")
    assert "unknown key 'engine.thread'" in refusal(TINY, "engine.thread=2", "--data", "arithmetic")
    assert "set --max-tokens" in refusal(TINY, "--data", "arithmetic", "--max-tokens", "100000")
    assert "in no folder that exists" in refusal(TINY, "--data", "arithmetic", "--out", tmp_path / "no" / "a.json")
    assert "there is no folder /no/model: set MODEL to" in refusal("/no/model", "--data", "arithmetic")
    assert "holds no evaluation of a run" in refusal("--compare", tmp_path, tmp_path)


def test_columns_are_named_by_the_arguments_of_the_command(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"q": "1 + 1", "a": "2"}\n', encoding="utf-8")
    assert "name two of them with --problem and --answer" in refusal(TINY, "--data", path)
    assert "give both, or neither" in refusal(TINY, "--data", path, "--problem", "q")
    assert "has no column 'x'; its columns are q, a" in refusal(TINY, "--data", path, "--problem", "x", "--answer", "a")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("x is a file: set model.path to the folder", "x is a file: set MODEL to the folder"),
        ("(odd). Set model.path to a model", "(odd). Set MODEL to a model"),
        ("there is no folder /a/model.path: name one", "there is no folder /a/model.path: name one"),
    ],
)
def test_a_key_of_recipes_becomes_the_argument(message, expected):
    assert in_words_of_the_command(message) == expected


@pytest.mark.parametrize("terminal", [False, True])
def test_an_error_leaves_no_progress_bar(tmp_path, terminal):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, force_interactive=terminal, width=100)
    given = {"model": {"path": "/no/model"}, "evaluation": {}}
    with pytest.raises(ConfigError, match="there is no folder"):
        evaluate_and_show(given, ["arithmetic"], ("", ""), 2, 0, 4, [], None, console)
    assert ("problems answered" in shown.getvalue()) == terminal
    if terminal:  # back to the first line of the bar, which is erased
        assert shown.getvalue().endswith("\r\x1b[1A\x1b[2K")
    else:
        assert shown.getvalue() == ""


def test_what_cannot_be_compared_is_a_plain_sentence(tmp_path):
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    for content in (None, ""):
        if content is not None:
            (run_folder / "evaluations.jsonl").write_text(content)
        assert "run holds no evaluation of a run" in refusal("--compare", run_folder, tmp_path / "none")
    (run_folder / "evaluations.jsonl").write_text("{}\n")
    assert f"there is no file or folder {tmp_path / 'none'}:" in refusal("--compare", run_folder, tmp_path / "none")


class ListEngine:
    """Notes what it is asked for; its rollouts are numbers."""

    version = 0

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    def generate(self, request):
        self.requests.append(request)
        return [(request.first + i, sample) for i in range(len(request.prompts)) for sample in range(2)]


def request(count: int, length: int = 3) -> GenerationRequest:
    prompts = [Prompt(f"test/{i}", np.ones(length + i, np.int32), "", "") for i in range(count)]
    return GenerationRequest(prompts=prompts, samples_per_prompt=2, max_response_tokens=7, temperature=1.0, seed=5)


def test_parts_cover_every_problem_once_and_know_their_place():
    engine, heard = ListEngine(), []
    whole = generate(engine, request(5), 5, lambda done, total: heard.append((done, total)))  # 5 sequences: 2 problems
    assert whole == [(i, sample) for i in range(5) for sample in range(2)]
    assert [(made.first, len(made.prompts), made.seed) for made in engine.requests] == [(0, 2, 5), (2, 2, 5), (4, 1, 5)]
    assert heard == [(0, 5), (2, 5), (4, 5), (5, 5)]


def test_parts_do_not_change_a_response(tokenizer):
    config = build_config({})
    engine = build_local_engine(TINY, "float32", 64, records_routing=False)
    engine.load_weights(dict(load_model(TINY, torch.float32).named_parameters()), 0)
    prompts = build_task(config.task, tokenizer, 0).prompts("test", 0, 4)
    asked = replace(request(0), prompts=prompts, max_response_tokens=12)
    texts = [[rollout.text for rollout in generate(engine, asked, size, lambda *_: None)] for size in (64, 2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def test_room_is_what_the_context_leaves_beside_the_longest_prompt():
    asked = request(3, length=10)  # 10, 11 and 12 tokens
    assert with_room(asked, 40, None).max_response_tokens == 28
    assert with_room(asked, 40, 9).max_response_tokens == 9
    assert with_room(asked, 100_000, None).max_response_tokens == 32_768
    for context, tokens in ((40, 29), (12, None), (5, None)):
        with pytest.raises(
            ConfigError, match=r"test/2 has 12 tokens, of the model's \d+ that leaves \d+ for a response"
        ):
            with_room(asked, context, tokens)


def test_the_tables_of_data():
    assert data_tables(["arithmetic"], ("", ""), None) == {"task": {"name": "arithmetic"}, "evaluation": {}}
    mixed = data_tables(["aime24", "x.jsonl"], ("q", "a"), 4)
    assert mixed["evaluation"] == {"prompts": 4}
    task = build_config(mixed).task
    assert [(source.source, source.problem, source.answer) for source in task.test] == [
        ("aime24", "q", "a"),
        ("x.jsonl", "q", "a"),
    ]


def test_a_checkpoint_knows_its_version(tmp_path):
    assert find_model("bundled:tiny_moe") == ("bundled:tiny_moe", 0)
    (tmp_path / "state.json").write_text('{"step": 7, "files": {}}', encoding="utf-8")
    assert find_model(str(tmp_path)) == (str(tmp_path / "model"), 7)
    (tmp_path / "state.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"state\.json cannot be read"):
        find_model(str(tmp_path))
