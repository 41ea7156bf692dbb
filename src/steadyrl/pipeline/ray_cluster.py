"""The Ray cluster that a run lives on, and where its actors go.

With an address, of the recipe or in RAY_ADDRESS (which `ray job submit` sets), the run joins that cluster. Without one
it starts a cluster on this machine and stops it at the end. Trainer ranks and engines get their CPUs and GPUs by
placement groups before anything is trained: a cluster that has no room says so, and what is missing.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadyrl.config import RunConfig
from steadyrl.errors import ConfigError

logger = logging.getLogger(__name__)
Resources = dict[str, float]
INSTALL = 'pip install "steadyrl[scale]"'
MODELS_IN_STORE = 6  # two broadcasts that wait, the trainer's float32 copy (2), and its old weights (2), with a margin
MOST_CHARACTERS = 500  # of what Ray says about an error
JOIN_TIMEOUT_S = 10.0  # for a connection to a cluster
STORE_MARGIN_BYTES = 1 << 28  # for rollouts; what does not fit goes to disk


@dataclass(frozen=True)
class Place:
    """Where an actor runs: a bundle of a placement group, or its share of one."""

    group: Any
    bundle: int
    resources: Resources

    def options(self) -> dict[str, Any]:
        """For `ActorClass.options`."""
        from ray.util import scheduling_strategies  # pyright: ignore[reportMissingImports]

        strategy = scheduling_strategies.PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=self.bundle
        )
        return {
            "num_cpus": self.resources["CPU"],
            "num_gpus": self.resources.get("GPU", 0.0),
            "scheduling_strategy": strategy,
        }


@dataclass
class RayCluster:
    """A cluster with the places of a run on it."""

    ranks: list[Place]
    engines: list[Place]
    folder: str = ""  # that all of it sees, for this run alone: of a cluster that was started for it


def load_ray() -> Any:
    """The package ray.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(f'pipeline.backend = "ray" needs the package ray: {INSTALL}') from None
    return ray


def absolute(model_path: str) -> str:
    """The path of a model as an actor has to read it, whose current folder is another one."""
    folder = Path(model_path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model_path


def lost(ray: Any) -> tuple[type[Exception], ...]:
    """The exceptions that say that an actor, or its answer, is gone: its process or its machine died."""
    return ray.exceptions.RayActorError, ray.exceptions.ObjectLostError


def cause(error: BaseException) -> str:
    """What Ray says about it, on one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."


@contextmanager
def open_cluster(config: RunConfig, weight_bytes: int, tell: Callable[[str], None]) -> Iterator[RayCluster]:
    """Join or start a cluster, and reserve the places of a run; in the end give them back, and stop what was started.

    A connection of this process that is there already is used, and left as it is.

    Args:
        weight_bytes: of the model in float32; a cluster that is started makes its object store for it.

    Raises:
        ConfigError: no such cluster, or no room on it.
    """
    address = config.pipeline.ray_address or os.environ.get("RAY_ADDRESS", "")
    if not address:
        close_the_door()
    ray = load_ray()
    with ExitStack() as held:
        folder = ""
        if ray.is_initialized():
            logger.info("the connection to Ray that is there is used")
        elif address:
            held.enter_context(_joined(ray, address))
        else:
            folder = held.enter_context(_started(ray, config, weight_bytes))
        yield held.enter_context(_placed(ray, config, folder, tell))


def num_engines(config: RunConfig) -> int:
    """Engines on the cluster: none where they are servers that run elsewhere."""
    return config.engine.replicas if config.engine.kind == "local" else 0


def demand(config: RunConfig, gpus: bool) -> tuple[Resources, Resources]:
    """What a trainer rank and an engine ask for: the embedded engine runs on CPUs."""
    rank, engine = {"CPU": float(config.trainer.threads)}, {"CPU": float(config.engine.threads)}
    if config.pipeline.placement == "shared" and num_engines(config):
        rank["CPU"] = engine["CPU"] = max(rank["CPU"], engine["CPU"]) / 2  # both on the CPUs of the larger one
    return rank | ({"GPU": 1.0} if gpus else {}), engine


def bundles(config: RunConfig, gpus: bool) -> list[list[Resources]]:
    """The placement groups: one of the ranks and one of the engines, or one that they share, pair by pair."""
    rank, engine = demand(config, gpus)
    ranks, engines = config.trainer.ranks, num_engines(config)
    if not engines:
        return [[rank] * ranks]
    if config.pipeline.placement == "separate":
        return [[rank] * ranks, [engine] * engines]
    return [[{**rank, "CPU": rank["CPU"] + engine["CPU"]}] * max(ranks, engines)]


def total(groups: Sequence[Sequence[Resources]]) -> Resources:
    summed: Resources = {}
    for resources in (bundle for group in groups for bundle in group):
        for name, number in resources.items():
            summed[name] = summed.get(name, 0.0) + number
    return summed


def no_room(config: RunConfig, asked: Resources, there: Resources, free: Resources) -> str:
    """The sentence for a cluster that did not find the places in time."""
    missing = {name: number - there.get(name, 0.0) for name, number in asked.items() if number > there.get(name, 0.0)}
    why = (
        f"it lacks {_named(missing)}"
        if missing
        else f"of its {_named({name: there[name] for name in asked})} "
        f"{_named({name: free.get(name, 0.0) for name in asked})} are free, or no node has all of a rank or engine"
    )
    return (
        f"the Ray cluster had no room within {config.engine.start_timeout_s:.0f} s for trainer.ranks = "
        f"{config.trainer.ranks} and engine.replicas = {num_engines(config)}, which ask for {_named(asked)}: {why}. "
        "Add nodes, lower one of the two, or set pipeline.placement=shared"
    )


def _named(resources: Resources) -> str:
    return " and ".join(f"{number:g} {name}" for name, number in sorted(resources.items()))


@contextmanager
def _joined(ray: Any, address: str) -> Iterator[None]:
    if address.startswith("ray://"):
        raise ConfigError(
            f"{address} is an address for Ray's client, which a run cannot use: run it on a node of the cluster with "
            "pipeline.ray_address=auto, or send it there with ray job submit"
        )
    problem = f"no Ray cluster can be joined at {address}"
    remedy = "set pipeline.ray_address, or RAY_ADDRESS, to the address of one that runs, or neither to start one here"
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():  # Ray itself tries for minutes, and hears no Ctrl-C meanwhile
        try:
            socket.create_connection((host, int(port)), timeout=JOIN_TIMEOUT_S).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"{problem} ({error}): {remedy}") from None
    _init(ray, problem, remedy, address=address)
    try:
        yield
    finally:
        ray.shutdown()


def _init(ray: Any, problem: str, remedy: str, **options: Any) -> None:
    try:
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # ConnectionError, RuntimeError, ValueError; a plain one for a node that starts slowly
        raise ConfigError(f"{problem} ({cause(error)}): {remedy}") from None


def close_the_door() -> None:
    """Have a cluster that is started here ask for a token: whoever reaches its ports could run code on it.

    Ray reads this when it is imported. A token that Ray makes by itself would stay in the home folder.
    """
    if "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextmanager
def _started(ray: Any, config: RunConfig, weight_bytes: int) -> Iterator[str]:
    """A cluster on this machine alone, as large as the run asks for; yields its folder, which goes with it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    folder = tempfile.mkdtemp(prefix="steadyrl-ray-", dir="/tmp")  # a short path: sockets lie in it
    needed = total(bundles(config, gpus=False))["CPU"]
    try:
        _init(
            ray,
            "Ray does not start on this machine",
            "set pipeline.ray_address to a cluster that runs, or pipeline.backend=process",
            address="local",
            num_cpus=max(int(needed), os.cpu_count() or 1),
            object_store_memory=MODELS_IN_STORE * weight_bytes + STORE_MARGIN_BYTES,
            include_dashboard=False,
            _temp_dir=folder,
        )
        yield folder
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _placed(ray: Any, config: RunConfig, folder: str, tell: Callable[[str], None]) -> Iterator[RayCluster]:
    from ray.util import placement_group, remove_placement_group  # pyright: ignore[reportMissingImports]

    gpus = config.trainer.device != "cpu" and ray.cluster_resources().get("GPU", 0.0) > 0
    wanted = bundles(config, gpus)
    groups = [placement_group([dict(bundle) for bundle in group], strategy="PACK") for group in wanted]
    try:
        deadline = time.monotonic() + config.engine.start_timeout_s
        for group in groups:
            if not group.wait(max(1.0, deadline - time.monotonic())):
                raise ConfigError(no_room(config, total(wanted), ray.cluster_resources(), ray.available_resources()))
        rank, engine = demand(config, gpus)
        tell(
            f"on Ray: trainer ranks {config.trainer.ranks} x {_named(rank)}, engines {num_engines(config)} x "
            f"{_named(engine)}, placement {config.pipeline.placement}"
        )
        yield RayCluster(
            [Place(groups[0], index, rank) for index in range(config.trainer.ranks)],
            [Place(groups[-1], index, engine) for index in range(num_engines(config))],
            folder,
        )
    finally:
        for group in groups:
            remove_placement_group(group)
