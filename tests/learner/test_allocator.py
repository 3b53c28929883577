import json
import os
import platform

from tests.forked import Forked, ended

from gnomon.learner.allocator import bound_prepared_products


def test_the_allocator_says_what_it_took():
    """With glibc all four settings are taken; elsewhere nothing is claimed. In a process of its own."""
    code = "import json; from gnomon.learner.allocator import tune_allocator; print(json.dumps(tune_allocator()))"
    answer = ended(Forked([], code))

    with_glibc = {"arena_max": 1, "mmap_max": 0, "trim_threshold": -1, "top_pad": 2**28}
    assert json.loads(answer.stdout) == (with_glibc if platform.libc_ver()[0] == "glibc" else {})


def test_how_many_products_stay_prepared_is_the_environments_to_say(monkeypatch):
    """64 where nobody said otherwise."""
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.setenv(name, "7")
    bound_prepared_products()
    assert os.environ[name] == "7"

    monkeypatch.delenv(name)
    bound_prepared_products()
    assert os.environ[name] == "64"
