"""C kernels for the operations between a layer's products, each in one pass over memory.

torch needs ten operations for one of these functions, each through memory and with a wake-up of all threads. Formulas
and roundings are those of the torch operations in `fused_decoder` and `fused_forward`; tests compare both.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon.models.cpu.build import build

_DEFINES: dict[torch.dtype, tuple[str, ...]] = {torch.bfloat16: ("HALF",), torch.float32: ()}
_STRIPE = 64
_P, _I, _F, _T = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES: dict[str, list[Any]] = {
    "norm": [*[_P] * 4, *[_I] * 5, _F, _T],
    "norm_back": [*[_P] * 7, *[_I] * 2, _T],
    "turn": [*[_P] * 4, *[_I] * 4, _F, _T],
    "gate": [*[_P] * 2, *[_I] * 2, _T],
    "gate_back": [*[_P] * 4, *[_I] * 2, _T],
    "attend": [*[_P] * 7, *[_I] * 6, _F, _T],
    "head": [*[_P] * 6, *[_I] * 2, _F, _T],
    "head_back": [*[_P] * 7, *[_I] * 3, _F, _T],
    "sample": [*[_P] * 4, *[_I] * 2, _F, _T],
    "branched": [*[_P] * 7, *[_I] * 5, _F, _T],
}
_ALLOCATING = ("attend", "sample", "branched")
"""These take memory of their own and return 0, or 1 where there was none."""
_OF_PAIRS: dict[str, list[Any]] = {
    "pack": [*[_P] * 2, *[_I] * 2, _T],
    "linear": [*[_P] * 5, *[_I] * 3, _T],
    "add_gradient": [*[_P] * 4, *[_I] * 3, _T, _T],
}
_COLUMNS = 32

BranchTable = tuple[Tensor, Tensor, int]


class Kernels:
    """The functions for dense CPU tensors of one precision.

    Attributes:
        name: Identifies sources, compiler and CPU.
        has_pairs: Whether `linear` and `add_gradient_` exist, for bfloat16 on CPUs that multiply pairs of it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library: Any = library
        self.name = Path(library._name).stem
        self.has_pairs = hasattr(library, "linear")
        for name, types in (_SIGNATURES | (_OF_PAIRS if self.has_pairs else {})).items():
            function = getattr(library, name)
            # Without types ctypes would pass addresses as 32-bit integers.
            function.argtypes, function.restype = types, _T if name in _ALLOCATING else None

    def packed(self, weight: Tensor) -> Tensor:
        """Return ``weight`` Float[N M], M even, in the order that `linear` reads."""
        outputs, inputs = weight.shape
        # Outputs are padded to whole tiles of 32 columns.
        result = weight.new_empty(-(-outputs // _COLUMNS) * _COLUMNS * inputs)
        self._library.pack(*_addresses(weight, result), outputs, inputs, _threads())
        return result

    def linear(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None, outputs: int, residual: Tensor | None
    ) -> Tensor:
        """Return the product of ``inputs`` Float[R M] with a `packed` weight, plus bias [N] and residual [R N].

        The result rounds once.
        """
        rows, width = inputs.shape
        result = inputs.new_empty(rows, outputs)
        self._library.linear(*_addresses(inputs, weight, bias, residual, result), rows, outputs, width, _threads())
        return result

    def may_add_gradient(self, *extents: int) -> bool:
        """Whether `add_gradient_` takes factors of these extents."""
        return self.has_pairs and all(extent > 0 and extent % _COLUMNS == 0 for extent in extents)

    def add_gradient_(self, sums: Sequence[Tensor], is_new: bool, gradient: Tensor, inputs: Tensor) -> None:
        """Add ``gradient`` Float[R N] transposed times ``inputs`` Float[R M] to ``sums`` Float32[. M] of N rows.

        ``is_new``: nothing is in the sums yet.
        """
        (rows, outputs), width, threads = gradient.shape, inputs.shape[1], _threads()
        assert all(each.dtype == torch.float32 and each.is_contiguous() for each in sums), "sums are dense, in float32"
        # Address of every 32 rows of the sums, which may lie in several tensors; 4 is float32's size.
        starts = [each.data_ptr() + 4 * width * row for each in sums for row in range(0, len(each), _COLUMNS)]
        # Memory for the factors in the order of the kernel's tiles: inputs once, and 128 columns of the gradient a
        # thread.
        homes, laid = torch.tensor(starts), inputs.new_empty(rows * (width + 4 * _COLUMNS * threads))
        pointers = _addresses(gradient, inputs, homes, laid)
        self._library.add_gradient(*pointers, rows, outputs, width, is_new, threads)

    def norm(self, states: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Return ``states`` Float[R W] normalized and weighted, and 1 / sqrt(mean(x^2) + epsilon), Float32[R]."""
        rows, width = states.shape
        result, factor = torch.empty_like(states), torch.empty(rows)
        self._library.norm(
            *_addresses(states, weight, result, factor), rows, width, 1, width, width, epsilon, _threads()
        )
        return result, factor

    def norm_heads_(self, made: Tensor, weight: Tensor, epsilon: float) -> None:
        """Norm the first N heads of ``made`` Float[R M D] in place, each with its own row of ``weight`` Float[N D]."""
        (rows, total, size), turned = made.shape, len(weight)
        pointers = _addresses(made, weight, made)
        stride = total * size
        self._library.norm(*pointers, None, rows * turned, size, turned, stride, stride, epsilon, _threads())

    def norm_back(
        self,
        gradient: Tensor,
        states: Tensor,
        factor: Tensor,
        weight: Tensor,
        again: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of states Float[R W] and weight Float64[W] and, with ``again``, the result of `norm`."""
        rows, width = states.shape
        found, normed = torch.empty_like(states), torch.empty_like(states) if again else None
        # Each 64 rows add up their own gradient of the weight: the sum does not depend on the number of threads.
        stripes = torch.empty(-(-rows // _STRIPE), width, dtype=torch.float64)
        pointers = _addresses(gradient, states, factor, weight, found, normed, stripes)
        self._library.norm_back(*pointers, rows, width, _threads())
        return found, stripes.sum(0), normed

    def turn(self, made: Tensor, turned: int, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
        """Return ``made`` Float[R M D] with its first heads turned by the angles of cos, sin Float[R D] times sign."""
        result = torch.empty_like(made)
        rows, heads, size = made.shape
        self._library.turn(*_addresses(made, cos, sin, result), rows, turned, heads, size, sign, _threads())
        return result

    def gate(self, opened: Tensor) -> Tensor:
        """Return silu(gate) * up of ``opened`` Float[R 2F]: gate, then up."""
        rows, width = opened.shape[0], opened.shape[1] // 2
        result = opened.new_empty(rows, width)
        self._library.gate(*_addresses(opened, result), rows, width, _threads())
        return result

    def gate_back(self, opened: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of `gate`, and the gradient of ``opened`` from the gradient of that result."""
        rows, width = gradient.shape
        result, back = torch.empty_like(gradient), torch.empty_like(opened)
        self._library.gate_back(*_addresses(opened, gradient, result, back), rows, width, _threads())
        return result, back

    def attend(
        self,
        made: Tensor,
        angles: tuple[Tensor, Tensor],
        places: Tensor,
        buffers: tuple[Tensor, Tensor],
        rows_per_block: int,
        scale: float,
    ) -> Tensor:
        """Rotate queries and keys, write keys and values, and return the attention's output Float[R H * D].

        Args:
            made: Float[R (H + 2 K) D].
            angles: Cosines and sines Float[R D].
            places: Int64[P 5], P <= R: each row's block, its prompt's first column, the prompt's length, the columns
                after the prompt, and the row's lane. Rows without an entry get zeros.
            buffers: Keys and values Float[N K C D].
            rows_per_block: Rows that a block holds, each at its own place ("lane").
            scale: Of the scores.
        """
        keys, values = buffers
        _, shared, columns, size = keys.shape
        heads = made.shape[1] - 2 * shared
        result = made.new_zeros(made.shape[0], heads * size)
        pointers = _addresses(made, *angles, places, keys, values, result)
        sizes = (len(places), heads, shared, size, columns, rows_per_block)
        _check_memory(self._library.attend(*pointers, *sizes, scale, _threads()))
        return result

    def sample(self, logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Draw a token for each row of ``logits`` Float[R V]; return tokens Int64[R] and log-probabilities Float32[R].

        ``uniforms`` Float64[R] in [0, 1): the token is the first whose cumulative probability exceeds the number.
        """
        tokens, logprobs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        pointers = _addresses(logits, uniforms, tokens, logprobs)
        _check_memory(self._library.sample(*pointers, *logits.shape, temperature, _threads()))
        return tokens, logprobs

    def branched(self, made: Tensor, heads: int, table: BranchTable, scale: float) -> tuple[Tensor, Tensor]:
        """Return the attention's output Float[P H D], and the statistics for `branched_back`, Float32[P H 2].

        Args:
            made: Float[P (H + 2 K) D].
            heads: H and K.
            table: Spans Int64[N 4] (first position and length of a prompt, index and number of its responses),
                responses Int64[M 2] (first position, length), and at how many positions every prompt begins before its
                own. Other positions get zeros.
            scale: Of the scores.
        """
        positions, total, size = made.shape
        result, sums = made.new_zeros(positions, heads, size), torch.zeros(positions, heads, 2)
        pointers = _addresses(made, *table[:2], result, sums, None, None)
        sizes = (table[2], len(table[0]), heads, (total - heads) // 2, size)
        _check_memory(self._library.branched(*pointers, *sizes, scale, _threads()))
        return result, sums

    def branched_back(self, made: Tensor, gradient: Tensor, sums: Tensor, table: BranchTable, scale: float) -> Tensor:
        """Return the gradient of ``made`` from the gradient of the output of `branched` and its statistics ``sums``."""
        _, total, size = made.shape
        heads = sums.shape[1]
        back = torch.zeros_like(made)
        pointers = _addresses(made, *table[:2], None, sums, gradient, back)
        sizes = (table[2], len(table[0]), heads, (total - heads) // 2, size)
        _check_memory(self._library.branched(*pointers, *sizes, scale, _threads()))
        return back

    def head(self, logits: Tensor, targets: Tensor, found: Sequence[Tensor | None], temperature: float) -> None:
        """Write the statistics of ``logits`` Float[R V] into ``found``, Float32[R] each.

        With z = logits / temperature: the largest z, the sum of exp(z - largest), the log-probability of ``targets``
        Int64[R], and the entropy, unless it is None.

        Raises:
            IndexError: If a target is not a token.
        """
        # C checks no index: a wrong one would read memory beyond the logits.
        least, most = targets.aminmax()
        if least < 0 or most >= logits.shape[1]:
            raise IndexError(f"targets must be in [0, {logits.shape[1]}), got {int(least)} to {int(most)}")
        self._library.head(*_addresses(logits, targets, *found), *logits.shape, temperature, _threads())

    def head_back_(self, logits: Tensor, first: int, given: Sequence[Tensor | None], temperature: float) -> None:
        """Turn ``logits`` Float[R W] of the W tokens from ``first`` on into their gradient, in place.

        ``given``: targets Int64[R]; largest, sum and entropy of `head`; the gradients of log-probability and entropy,
        Float32[R], the latter None without an entropy.
        """
        self._library.head_back(*_addresses(logits, *given), *logits.shape, first, temperature, _threads())


def kernels_of(tensor: Tensor) -> Kernels | None:
    """Return the kernels for this tensor; None if there are none."""
    return kernels_for(tensor.dtype) if type(tensor.data) is Tensor and tensor.device.type == "cpu" else None


@functools.cache
def kernels_for(dtype: torch.dtype) -> Kernels | None:
    """Return the kernels for plain CPU tensors of this precision; None if there are none (`build`)."""
    defines = _DEFINES.get(dtype)
    library = None if defines is None else build(defines, tuple(_SIGNATURES))
    return None if library is None else Kernels(library)


def _check_memory(status: int) -> None:
    if status:
        raise MemoryError("there is no memory for what a function in C needs while it computes")


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    for tensor in tensors:
        assert tensor is None or tensor.is_contiguous(), "kernels take dense tensors"
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


_threads = torch.get_num_threads
