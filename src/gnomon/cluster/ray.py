"""A Ray cluster that a run starts on this machine or joins: resource bundles, actors, and the cluster's health.

Ray is imported when a cluster is opened, because ray reads its environment variables at import.
"""

import atexit
import contextlib
import inspect
import math
import os
import platform
import re
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from gnomon.cluster import start
from gnomon.cluster.start import HeadMonitor
from gnomon.core.errors import ClusterError, ConfigError
from gnomon.core.redaction import without_secrets
from gnomon.core.sections import ClusterConfig

_LONGEST = 500
_DETAIL = "Worker exit detail:"
_UNAVAILABLE = r"The actor [0-9a-f]{8,} is unavailable: "
_ADVICE = r"Some common causes|The task may"


def cause_of(error: Exception) -> str:
    r"""Return Ray's reason for an actor's end in one line, without ids, conjectures and advice.

    >>> said = "The actor died.\n\tclass_name: Seat\nWorker exit detail: End of file. Some common causes are: (1)"
    >>> cause_of(RuntimeError(said))
    'End of file.'
    >>> cause_of(RuntimeError("The actor 0123456789 is unavailable: gone. The task may be tried again"))
    'gone.'
    """
    lines = [line.strip() for line in without_secrets(str(error)).splitlines() if not line.startswith("\t")]
    whole = " ".join(" ".join(lines).split())
    said = whole.partition(_DETAIL)[2] if _DETAIL in whole else re.sub(_UNAVAILABLE, "", whole)
    return (re.split(_ADVICE, said)[0].strip() or whole)[:_LONGEST]


INSTALL = "pip install 'gnomon[cluster]'"
_LOOK_SECONDS = 1.0
# Ray's calls hang when the head is gone, so ending and closing have limits.
_ENDING_SECONDS = 5.0
_CLOSING_SECONDS = 15.0
# Calls that one async actor may have in flight.
_MOST_CALLS = 10_000
_ASK = "import platform; from importlib.metadata import version; print(version('ray'), platform.python_version())"
_SETTINGS = {
    # No usage statistics leave the machine.
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray prints workers' logs on standard output, which must hold only the command's result.
    "RAY_DEDUP_LOGS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    # After the cluster is gone, a call must not connect to another cluster.
    "RAY_ENABLE_AUTO_CONNECT": "0",
}


@dataclass(frozen=True)
class ResourceBundle:
    """Resources for one actor, or for a few that take turns, on one machine.

    Attributes:
        kind: "learner", "engine" or "grader".
        cpus: CPUs, as Ray counts them.
        gpus: GPUs.
        python: The actor's interpreter, on every machine; "" is the cluster's own.
        actors: Actors that take turns on its GPUs, with an equal share of the CPUs each.
    """

    kind: str
    cpus: float = 1.0
    gpus: float = 0.0
    python: str = ""
    actors: int = 1

    @property
    def bundle(self) -> dict[str, float]:
        """The bundle in Ray's format."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


def check_cluster(plan: ClusterConfig, places: Sequence[ResourceBundle], gpus: int) -> None:
    """Refuse an impossible cluster before anything is loaded.

    Args:
        plan: The cluster's settings.
        places: The run's resource bundles.
        gpus: GPUs of this machine.

    Raises:
        ConfigError: If ray is not installed, no server listens at the address, or this machine has too few GPUs.
    """
    needed = sum(place.gpus for place in places)
    if not plan.address and needed > gpus:
        raise ConfigError(
            f"{asked(places)} need {needed:g} GPUs, and this machine has {gpus}; set learner.processes or engine.count "
            "lower, join a larger cluster with cluster.address, or set device = 'cpu'"
        )
    if plan.address not in ("", "auto"):
        start.check_port(plan.address)
    if not plan.address:
        # On a joined cluster the interpreter is one of other machines, which cannot be asked from here.
        for python in {place.python for place in places} - {""}:
            _check_python(python)


def _check_python(python: str) -> None:
    """Raise ConfigError if another interpreter has a different Ray or Python; Ray requires equal versions."""
    ran = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=False, timeout=60)
    found, wanted = ran.stdout.strip(), f"{version('ray')} {platform.python_version()}"
    if found != wanted:
        raise ConfigError(
            f"engine.python = '{python}' runs engines of a cluster, so it needs Ray and Python as they are "
            f"here ({wanted}), and has {found or 'no Ray'}; install them there (pip install ray=={version('ray')})"
        )


def import_ray() -> Any:
    """Import ray with gnomon's settings.

    Raises:
        ConfigError: If ray is not installed.
    """
    os.environ.update(_SETTINGS)
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f'cluster.kind = "ray" needs Ray, and it cannot be imported ({error}); {INSTALL}') from error
    return ray


class Cluster:
    """Resource bundles on a Ray cluster, one actor each, held until `close`.

    A cluster that the run starts is private: it listens on the loopback interface, requires a key that only this user
    can read, and ends with the run, however the run ends (`reaper`). On a joined cluster, the run gives back bundles
    and actors.

    Attributes:
        places: Resource bundles in the requested order.
        address: Address of the head.
        fault: Why the cluster is gone, in one line; "" while it is there. gnomon has its own monitor, because Ray's
            monitor ends the program after a while.
    """

    def __init__(
        self, ray: Any, plan: ClusterConfig, places: Sequence[ResourceBundle], started: "start.StartedCluster | None"
    ) -> None:
        self._ray, self._plan, self._started = ray, plan, started
        self._folder = start.Folder.made() if started is None else started.folder
        self.places = tuple(places)
        self.address = start.head_of(ray, plan.address)
        self._watch = HeadMonitor(self.address, ray.nodes)
        self._group: Any = None
        self._actors: list[Any] = []
        self._is_closed = False

    @classmethod
    def open(cls, plan: ClusterConfig, places: Sequence[ResourceBundle], warn: Callable[[str], None]) -> Self:
        """Start or join the cluster, and reserve the bundles.

        Args:
            plan: The cluster's settings.
            places: The run's resource bundles.
            warn: Receives a line about what is open to others.

        Raises:
            ConfigError: If the cluster cannot be reached, or has no room within ``plan.start_seconds``.
        """
        if plan.address:
            # Before the import, since Ray reads then whether to send a key.
            start.show_key()
            ray, started = import_ray(), None
            start.join(ray, plan, warn)
        else:
            ray, cpus = start.loopback_ray(import_ray), math.ceil(sum(place.cpus for place in places))
            started = start.start(ray, cpus, math.ceil(sum(place.gpus for place in places)), plan.start_seconds)
        cluster = cls(ray, plan, places, started)
        try:
            cluster._take()
            cluster._say_idle(warn)
        except BaseException:
            cluster.close()
            raise
        return cluster

    @property
    def fault(self) -> str:
        """Why the cluster is gone; "" while it is there."""
        return self._watch.fault

    @property
    def folder(self) -> Path:
        """The run's private folder on this machine for temporary files, removed however the run ends."""
        return self._folder.path

    @property
    def is_own(self) -> bool:
        """Whether the run started the cluster, which then ends with the run."""
        return self._started is not None

    @property
    def nodes(self) -> int:
        """Live machines of the cluster."""
        return sum(bool(node["Alive"]) for node in self._ray.nodes())

    @property
    def said(self) -> str:
        """The run card's entry: address, size and authentication of the cluster."""
        how = "joined at " + self._plan.address if self._plan.address else "started for this run, on loopback alone"
        nodes = self.nodes
        lets = "token authentication on" if start.auth_token() else "NO authentication by token"
        return f"Ray {version('ray')}, {how}: {nodes} node{'s' if nodes > 1 else ''}, {lets}"

    def of(self, kind: str) -> list[int]:
        """Return the indices of the bundles of a kind."""
        return [number for number, place in enumerate(self.places) if place.kind == kind]

    def actor(self, place: int, cls: type, *arguments: Any) -> Any:
        """Start an actor of ``cls`` in a bundle and return at once. A bundle can have another actor later."""
        room = self.places[place]
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, place)
        options: dict[str, Any] = {
            "num_cpus": room.cpus / room.actors,
            "num_gpus": room.gpus / room.actors,
            # gnomon restarts what it lost by itself: an actor that Ray restarts would have lost its state without a
            # word.
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        # Ray lets an async actor run 1,000 calls at once by default; all rows of a step may be on their way to one
        # engine.
        if any(inspect.iscoroutinefunction(method) for method in vars(cls).values()):
            options["max_concurrency"] = _MOST_CALLS
        if room.python:
            options["runtime_env"] = {"py_executable": room.python}
        actor = self._ray.remote(cls).options(scheduling_strategy=strategy, **options).remote(*arguments)
        self._actors.append(actor)
        return actor

    def end(self, actor: Any) -> None:
        """End an actor at once, without restart."""
        self._actors = [other for other in self._actors if other is not actor]
        self._within(_ENDING_SECONDS, lambda: self._ray.kill(actor, no_restart=True))

    def put(self, value: Any) -> Any:
        """Put ``value`` into the cluster's object store and return a reference."""
        return self._ray.put(value)

    def ready(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Return the finished references, after waiting at most ``seconds`` for the first one.

        Raises:
            ClusterError: If the cluster is gone.
        """
        self.check()
        # `wait` with num_returns = all would wait for the slowest; so first for any, then for what else is there
        # already.
        found, _ = self._ray.wait(list(references), num_returns=1, timeout=seconds)
        if found and len(references) > 1:
            found, _ = self._ray.wait(list(references), num_returns=len(references), timeout=0)
        return list(found)

    def get(self, reference: Any, seconds: float = math.inf) -> Any:
        """Wait for a reference's value.

        Raises:
            ClusterError: If the cluster is gone.
            TimeoutError: If the value does not arrive in time.
            Exception: The actor's error, or Ray's error about the actor's end.
        """
        until = time.monotonic() + seconds
        # `ray.get` with a long timeout would not notice that the cluster is gone; every second it is looked at.
        while not self.ready([reference], _LOOK_SECONDS):
            if time.monotonic() > until:
                raise TimeoutError
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayActorError:
            # A head that died takes the actors with it.
            self._watch.check_alive()
            self.check()
            raise

    def check(self) -> None:
        """Raise ClusterError if the cluster is gone."""
        if self.fault:
            raise ClusterError(
                f"{self.fault}; nothing on it can be reached. Go on from the newest checkpoint with gnomon resume, "
                "when it is there again"
            )

    def close(self) -> None:
        """End all actors and free their bundles; end the cluster if this run started it. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        actors, self._actors = self._actors, []

        def leave() -> None:
            for actor in actors:
                self._ray.kill(actor, no_restart=True)
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)

        self._within(_ENDING_SECONDS, leave)
        self._watch.close()
        if not self._within(_CLOSING_SECONDS, self._ray.shutdown, is_needed=True):
            # shutdown hangs, and would be called again when the interpreter ends.
            atexit.unregister(self._ray.shutdown)
        (self._folder if self._started is None else self._started).end()

    def _within(self, seconds: float, work: Callable[[], object], is_needed: bool = False) -> bool:
        """Run ``work`` for at most ``seconds`` in a thread; return whether it finished.

        Without a head Ray's calls hang, so ``work`` is skipped then unless it is needed. A hanging thread is left
        alone.
        """
        if self.fault and not is_needed:
            return False

        def do() -> None:
            with contextlib.suppress(Exception):
                work()

        working = threading.Thread(target=do, name="gnomon-ray-bounded", daemon=True)
        working.start()
        working.join(_ENDING_SECONDS if self.fault else seconds)
        return not working.is_alive()

    def _take(self) -> None:
        bundles = [place.bundle for place in self.places]
        self._group = self._ray.util.placement_group(bundles, strategy=self._plan.placement.upper())
        until = time.monotonic() + self._plan.start_seconds
        while not self._group.wait(_LOOK_SECONDS):
            self.check()
            if time.monotonic() > until:
                raise ConfigError(
                    f"{asked(self.places)} found no room on the cluster in {self._plan.start_seconds:g} s "
                    f"(cluster.start_seconds): it has {self._room()}{self._too_wide()}; set learner.processes, "
                    "engine.count, cluster.graders or grading.workers lower, or join a larger cluster"
                )

    def _say_idle(self, warn: Callable[[str], None]) -> None:
        gpus = self._ray.cluster_resources().get("GPU", 0)
        if gpus and not any(place.gpus for place in self.places):
            warn(f"the cluster has {gpus:g} GPUs, and this run asks for none of them; set device = 'cuda' to use them")

    def _too_wide(self) -> str:
        """Name a bundle that is larger than every machine; "" if each bundle fits on a machine."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        for place in self.places:
            # A bundle lies on one machine, so the sum of the cluster's resources is not enough.
            if not any(all(node.get(kind, 0) >= count for kind, count in place.bundle.items()) for node in nodes):
                return f", and no node has room for {asked([place])}"
        return ""

    def _room(self) -> str:
        every, free = self._ray.cluster_resources(), self._ray.available_resources()
        parts = [f"{every.get(kind, 0):g} {kind}s ({free.get(kind, 0):g} free)" for kind in ("CPU", "GPU")]
        return f"{' and '.join(parts)} on {self.nodes} node{'s' if self.nodes > 1 else ''}"


def asked(places: Sequence[ResourceBundle]) -> str:
    """Describe the requested bundles.

    >>> asked([ResourceBundle("learner"), ResourceBundle("learner"), ResourceBundle("grader", 2.0)])
    '2 learners of 1 CPU, 1 grader of 2 CPUs'
    """
    found = []
    for place in dict.fromkeys(places):
        count, many_gpus = places.count(place), "s" if place.gpus > 1 else ""
        gpus = f" and {place.gpus:g} GPU{many_gpus}" if place.gpus else ""
        many, cpus = "s" if count > 1 else "", "s" if place.cpus != 1 else ""
        found.append(f"{count} {place.kind}{many} of {place.cpus:g} CPU{cpus}{gpus}")
    return ", ".join(found)
