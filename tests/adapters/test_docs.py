"""Every code block of docs/adapters.md is parsed, what it names is there, and its objectives are ones that work."""

import ast
import importlib
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from adapters.padded import stand_in

from steadyrl.adapters import (
    for_areal,
    for_nemo_rl,
    for_openrlhf,
    for_prime_rl,
    for_roll,
    for_skyrl,
    for_slime,
    for_tinker,
    for_trl,
    for_trl_async,
    for_verl,
    settings,
)
from steadyrl.axes import SatBoundary

DOCS = Path(__file__).parent.parent.parent / "docs" / "adapters.md"
TEXT = DOCS.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.M | re.S)
NUMBERED = [pytest.param(kind, body, id=f"{kind}-{i}") for i, (kind, body) in enumerate(BLOCKS)]
FRAMEWORKS = {
    "trl": for_trl.TRL,
    "trl-asynchronous": for_trl_async.ASYNC,
    "verl": for_verl.VERL,
    "slime": for_slime.SLIME,
    "miles": for_slime.SLIME,
    "prime-rl": for_prime_rl.PRIME_RL,
    "skyrl": for_skyrl.SKYRL,
    "openrlhf": for_openrlhf.OPENRLHF,
    "nemo-rl": for_nemo_rl.NEMO_RL,
    "areal": for_areal.AREAL,
    "tinker": for_tinker.TINKER,
    "roll": for_roll.ROLL,
}


def of_kind(kind: str) -> list[str]:
    return [body for found, body in BLOCKS if found == kind]


@pytest.mark.parametrize(("kind", "body"), NUMBERED)
def test_blocks_are_well_formed(kind, body):
    if kind == "python":
        ast.parse(body)
    elif kind == "toml":
        assert tomllib.loads(body)
    elif kind == "yaml":
        assert yaml.safe_load(body)
    else:
        assert kind == "sh"
        done = subprocess.run(["bash", "-n"], input=body, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr


def test_every_framework_has_lines_to_add():
    sections = {title.lower().replace(",", "").replace(" ", "-"): body for title, body in SECTIONS}
    for name in FRAMEWORKS:
        assert "```" in sections[name], name
        assert f"(#{name})" in TEXT, name  # a row of the table


SECTIONS = re.findall(r"^##+ ([^\n]+)\n(.*?)(?=^##+ |\Z)", TEXT, re.M | re.S)


def test_what_the_docs_import_is_there():
    """Names in Python blocks, and dotted paths anywhere."""
    wanted = set(re.findall(r"steadyrl\.adapters\.(\w+)\.(\w+)", TEXT))
    for body in of_kind("python"):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("steadyrl.adapters."):
                wanted |= {(str(node.module).removeprefix("steadyrl.adapters."), alias.name) for alias in node.names}
    assert len(wanted) >= 12
    for module, name in wanted - {("verl_plugin", "ObjectivePolicyLossConfig")}:  # needs verl; parity.py has it
        assert hasattr(importlib.import_module(f"steadyrl.adapters.{module}"), name), f"{module}.{name}"


def test_every_objective_in_the_docs_works_in_its_trainer():
    count = 0
    for title, body in SECTIONS:
        framework = FRAMEWORKS.get(title.lower().replace(",", "").replace(" ", "-"))
        if framework is None:
            continue
        for name in re.findall(r'preset(?:"?: "?|=| = ")([a-z0-9-]+)', body):
            settings.objective_for(framework, name, steps_per_batch=2)
            count += 1
    assert count >= 11


def test_the_tables_of_the_docs_are_objectives():
    toml = tomllib.loads(of_kind("toml")[0])["trainer"]["loss"]
    assert toml["type"] == "custom"
    assert settings.objective_for(for_prime_rl.PRIME_RL, toml["kwargs"]["objective"]).boundary.alpha == 0.9
    tables = [yaml.safe_load(body) for body in of_kind("yaml")]
    for table in tables:
        for key in ("objective", "steadyrl_objective"):
            if key in table:
                settings.objective_for(for_slime.SLIME, table[key])
    nemo = next(table["loss_fn"] for table in tables if "loss_fn" in table)
    assert settings.objective_for(for_nemo_rl.NEMO_RL, nemo["objective"]).preset == "sat-gspo"
    assert "policy_loss.objective.boundary.high=0.2" in TEXT


def test_the_script_of_the_paper_says_what_the_paper_says():
    script = next(body for body in of_kind("sh") if "sat_gspo_r3" in body)
    here_document = re.search(r"<<'YAML'\n(.*?)^YAML$", script, re.M | re.S)
    assert here_document is not None
    table = yaml.safe_load(here_document[1])["steadyrl_objective"]
    rule = settings.objective_for(for_slime.SLIME, table).boundary
    assert isinstance(rule, SatBoundary)
    assert (rule.low, rule.high, rule.alpha, rule.exponent, rule.kernel) == (0.2, 0.2, 0.9, 2.0, "hill")
    flags = dict(re.findall(r"--([a-z0-9-]+) ([^\s-][^\s]*)", script))
    prompts, samples = int(flags["rollout-batch-size"]), int(flags["n-samples-per-prompt"])
    assert (prompts, samples, int(flags["global-batch-size"])) == (256, 16, 4096)
    assert prompts * samples == 4096  # one optimizer step on each batch: the anchor has to be the engine
    assert flags["num-rollout"] == "544"
    assert flags["update-weights-interval"] == '"${LAG}"'
    assert (flags["lr"], flags["adam-beta1"], flags["adam-beta2"]) == ("1e-6", "0.9", "0.98")
    assert (flags["kl-loss-coef"], flags["kl-loss-type"]) == ("0.001", "low_var_kl")
    assert flags["rollout-max-response-len"] == "32768"
    for flag in ("--use-rollout-routing-replay", "--use-rollout-logprobs"):
        assert flag in script
    environment = re.search(r"--runtime-env-json '(.*)'", script)
    assert environment is not None
    assert json.loads(environment[1])["env_vars"]
    # every array that is made is used
    for name in re.findall(r"^([A-Z]+)=\($", script, re.M):
        assert f'"${{{name}[@]}}"' in script


def test_the_lines_for_tinker_run(monkeypatch):
    """The block as it stands, with a client that keeps what it is given."""

    class TensorData:
        def __init__(self, value):
            self.value = value

        @classmethod
        def from_torch(cls, value):
            return cls(value)

        def to_torch(self):
            return self.value

    class Datum:
        def __init__(self, model_input, loss_fn_inputs):
            self.model_input, self.loss_fn_inputs = model_input, loss_fn_inputs

    class ModelInput:
        @staticmethod
        def from_ints(tokens):
            return tokens

    class Client:
        def forward_backward_custom(self, data, loss):
            logprobs = [torch.full((len(datum.model_input),), -1.0, requires_grad=True) for datum in data]
            value, metrics = loss(data, logprobs)
            value.backward()
            self.gradients = [part.grad for part in logprobs]
            return type("Future", (), {"result": lambda self: type("Result", (), {"metrics": metrics})})()

        def optim_step(self, parameters):
            return type("Future", (), {"result": lambda self: parameters})()

    stand_in(
        monkeypatch, "tinker", TensorData=TensorData, Datum=Datum, ModelInput=ModelInput, AdamParams=lambda **kw: kw
    )
    names: dict = {}
    exec(next(body for body in of_kind("python") if "import tinker" in body), names)
    client = Client()
    data = [
        names["datum"]([5, 6, 7, 8], 2, [-1.1, -0.9], 1.0, 3),
        names["datum"]([5, 6, 7], 2, [-1.3], -1.0, 3),
    ]
    metrics, _ = names["step"](client, data, 4)
    # rho of the first is exp(0) = 1, of the second exp(0.3); means over responses, of which there are two
    assert client.gradients[0].tolist() == pytest.approx([0.0, -0.25, -0.25])
    assert client.gradients[1].tolist() == pytest.approx([0.0, 0.5 * 1.3498588])
    assert metrics["mismatch/d_bar"] == pytest.approx((0.1 + 0.1 + 0.3) / 3)


def test_the_lines_for_openrlhf_and_areal_run(monkeypatch):
    class Trainer:
        def training_step(self):
            raise AssertionError

    actor = stand_in(monkeypatch, "openrlhf.trainer.ray.ppo_actor", PolicyLoss=None, ActorPPOTrainer=Trainer)
    stand_in(monkeypatch, "openrlhf.models", aggregate_loss=None)
    names: dict = {}
    exec(next(body for body in of_kind("python") if "for_openrlhf" in body), names)
    names["hook"]()
    assert actor.PolicyLoss is not None
    areal = stand_in(monkeypatch, "areal.trainer.ppo.actor", PPOActor=None, grpo_loss_fn=None)
    exec(next(body for body in of_kind("python") if "for_areal" in body), {})
    assert areal.grpo_loss_fn is not None


def test_the_page_links_to_places_that_exist():
    anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title, _ in SECTIONS}
    for target in re.findall(r"\]\(#([\w-]+)\)", TEXT):
        assert target in anchors, target
    for target in re.findall(r"\]\((\w+\.md)", TEXT):
        assert (DOCS.parent / target).exists(), target
