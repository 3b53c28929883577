"""What every test stands on: one thread, no network, the same examples every time."""

import gc
import os
from pathlib import Path

# Before anything imports torch. Tiny models are slower on many threads, and sums depend on their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A test that needs the network is a test that fails on a train.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"

import pytest
from hypothesis import HealthCheck, settings

# derandomize: a law that fails, fails for everyone. No deadline: the machine may be busy.
settings.register_profile("full", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# What `make test` has time for; `make test-full` draws the 100 of `full`.
settings.register_profile("quick", parent=settings.get_profile("full"), max_examples=40)
# `HYPOTHESIS_PROFILE=search`: ten times the examples, new ones each time, to look for what nobody thought of.
settings.register_profile("search", parent=settings.get_profile("full"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# A quarter of the collection's time would go into looking for garbage among what is imported and stays.
gc.disable()


# The files that take the longest. A file goes to one process whole, so a long one that begins last is waited for.
LONGEST = (
    "training/test_resume.py",
    "cluster/test_run.py",
    "architecture/test_readme.py",
    "laws/test_algorithm_laws.py",
    "cluster/test_learners.py",
    "training/test_python_api.py",
    "training/test_continuation.py",
    "faults/test_limits.py",
    "walks/test_every_preset.py",
    "walks/test_walks.py",
    "website/test_site.py",
    "training/test_critic.py",
    "training/test_rare_parts.py",
    "training/test_kills.py",
)


@pytest.fixture(params=["native", "torch"])
def way(request, monkeypatch):
    """What lies between products by functions in C (`gnomon.models.cpu`), or by torch alone."""
    import torch

    from gnomon.models.cpu import kernels

    if request.param == "torch":
        monkeypatch.setattr(kernels, "kernels_for", lambda dtype: None)
    elif kernels.kernels_for(torch.float32) is None:
        pytest.skip("there is no C compiler here")
    return request.param


def pytest_collection_modifyitems(items):
    """Begin with the longest files; the others stay as they were collected."""
    first = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path, len(first)))


def pytest_collection_finish():
    """Take what was imported, and the tests themselves, out of what each collection of garbage visits."""
    gc.collect()
    gc.freeze()
    gc.enable()
