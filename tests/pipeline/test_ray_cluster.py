"""What a run asks of a Ray cluster. Needs no Ray: tests/scale has what does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from steadyrl.config import RunConfig
from steadyrl.errors import ConfigError
from steadyrl.pipeline.ray_backend import Traffic
from steadyrl.pipeline.ray_cluster import absolute, bundles, demand, no_room, open_cluster, total
from steadyrl.recipe import load_config

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.toml"


def config(*changes: str) -> RunConfig:
    sizes = ["pipeline.backend=ray", "trainer.kind=fsdp", "trainer.ranks=3", "engine.replicas=2", "engine.threads=4"]
    return load_config(RECIPE, [*sizes, *changes])


def test_separate_pools_give_everyone_its_own():
    assert bundles(config(), gpus=True) == [[{"CPU": 1, "GPU": 1}] * 3, [{"CPU": 4}] * 2]
    assert bundles(config(), gpus=False) == [[{"CPU": 1}] * 3, [{"CPU": 4}] * 2]


def test_a_shared_pool_pairs_a_rank_and_an_engine_on_the_cpus_of_one():
    shared = config("pipeline.placement=shared")
    assert bundles(shared, gpus=True) == [[{"CPU": 4, "GPU": 1}] * 3]
    assert demand(shared, gpus=True) == ({"CPU": 2, "GPU": 1}, {"CPU": 2})
    more_engines = config("pipeline.placement=shared", "engine.replicas=5", "trainer.threads=8")
    assert bundles(more_engines, gpus=False) == [[{"CPU": 8}] * 5]


def test_servers_elsewhere_need_no_place():
    remote = config("engine.replicas=1", "engine.kind=vllm", 'engine.urls=["http://127.0.0.1:8000"]')
    assert bundles(remote, gpus=True) == [[{"CPU": 1, "GPU": 1}] * 3]
    shared = remote.model_copy(update={"pipeline": remote.pipeline.model_copy(update={"placement": "shared"})})
    assert bundles(shared, gpus=True) == bundles(remote, gpus=True)


def test_the_sum_of_all_bundles():
    assert total(bundles(config(), gpus=True)) == {"CPU": 11, "GPU": 3}
    assert total([]) == {}


def test_what_a_cluster_lacks_is_named():
    asked = {"CPU": 11.0, "GPU": 3.0}
    lacking = no_room(config(), asked, {"CPU": 8.0, "memory": 1e9}, {"CPU": 8.0})
    assert (
        "trainer.ranks = 3 and engine.replicas = 2, which ask for 11 CPU and 3 GPU: it lacks 3 CPU and 3 GPU" in lacking
    )
    taken = no_room(config(), asked, {"CPU": 16.0, "GPU": 8.0}, {"CPU": 16.0, "GPU": 1.0})
    assert "of its 16 CPU and 8 GPU 16 CPU and 1 GPU are free" in taken


def test_an_address_where_nobody_listens_is_named_at_once(monkeypatch):
    class Ray:
        @staticmethod
        def is_initialized():
            return False

        @staticmethod
        def init(**_options):
            pytest.fail("asked although nobody listens")

    monkeypatch.setitem(sys.modules, "ray", Ray)
    for address in ("127.0.0.1:1", "127.0.0.1:99999"):
        asked = config(f"pipeline.ray_address={address}")
        with (
            pytest.raises(ConfigError, match=f"no Ray cluster can be joined at {address}"),
            open_cluster(asked, 0, print),
        ):
            pass


def test_traffic_is_per_step_and_restarts_are_per_run():
    traffic = Traffic(rollout_bytes=300, rollout_tokens=10, weight_bytes=7, engine_restarts=2)
    assert traffic.take() == {
        "transport/rollout_bytes_per_token": 30.0,
        "transport/weight_bytes": 7.0,
        "engine/restarts": 2.0,
    }
    assert traffic.take() == {"transport/weight_bytes": 0.0, "engine/restarts": 2.0}


def test_a_model_folder_is_found_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute("model") == str(tmp_path / "model")
    assert absolute("bundled:tiny_moe") == "bundled:tiny_moe"
    assert absolute("owner/model") == "owner/model"


def test_without_ray_there_is_a_command_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install "steadyrl\[scale\]"'), open_cluster(config(), 0, print):
        pass
