"""What is compared is what docs/peers.md says is compared."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from gnomon.tasks.environment import PACKAGES

ROOT = Path(__file__).resolve().parents[2]


def pins(path: Path) -> dict[str, str]:
    """Return distribution to version of a file of pins."""
    lines = [line.split("==") for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name.lower(): pinned for name, pinned in lines}


@pytest.mark.parametrize("peer", ["verl", "trl"])
def test_versions(peer):
    """The installed peer, the pinned one and the documented one are one version."""
    pinned = pins(Path(__file__).parent / "requirements.txt")[peer]
    documented = re.findall(rf"{peer} ([0-9.]+[0-9])", (ROOT / "docs" / "peers.md").read_text(), re.IGNORECASE)

    assert version(peer) == pinned
    assert set(documented) == {pinned}


def test_pins_agree():
    """What constraints.txt pins too has the same version for the peers."""
    own, general = pins(Path(__file__).parent / "requirements.txt"), pins(ROOT / "constraints.txt")

    assert {name: own[name] for name in own if general.get(name, own[name]) != own[name]} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_environments_are_of_the_version_that_they_were_written_for(package: str):
    """Without the package its tests are left out unnoticed; and what a user is told to install is what is tested."""
    assert version(package) == PACKAGES[package][1]
