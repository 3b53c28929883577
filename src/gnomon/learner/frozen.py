"""Weights that are no part of a learner's state, but decide what it means."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gnomon.learner.mesh import Mesh
from gnomon.models.quantized import stored


class FrozenWeights:
    """What the trained weights are added to, and what they are compared with: base and reference, which never change.

    Args:
        model: The policy, whole.
        reference: None without one. Where parameters are about to be parted, fingerprints are made now, in rank 0;
            otherwise when they are first asked for.
    """

    def __init__(self, model: nn.Module, reference: nn.Module | None, mesh: Mesh) -> None:
        self._networks = (model, reference)
        self._mesh = mesh
        self._said: dict[str, str] = {}
        # Once the parameters are sharded no process can read a whole one without asking all the others.
        if mesh.rank == 0 and not mesh.is_whole:
            self._said = self._fingerprints()

    def fingerprints(self) -> dict[str, str]:
        """Return one for "base" and one for "reference", "" where nothing is frozen; equal for equal weights."""
        if not self._mesh.is_whole:
            return {name: self._mesh.broadcast(self._said.get(name, "")) for name in ("base", "reference")}
        # Hashing a model takes seconds, so it waits until the first checkpoint, which asks for it.
        self._said = self._said or self._fingerprints()
        return self._said

    def _fingerprints(self) -> dict[str, str]:
        model, reference = self._networks
        named = () if reference is None else reference.named_parameters()
        base = ((name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad)
        return {"base": fingerprint((*base, *stored(model))), "reference": fingerprint(named)}


def fingerprint(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of names, shapes and every bit of the tensors; "" of nothing.

    >>> fingerprint([("a", torch.zeros(2))]) == fingerprint([("a", torch.zeros(3))])
    False
    """
    listed = list(named)
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in listed:
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        plain = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(plain.numpy().data)
    return digest.hexdigest() if listed else ""
