"""Decoding on a GPU with CUDA graphs: buffers keep their addresses, so that a step is recorded once and replayed.

A step of a small model is a thousand small kernels, and launching them one by one takes longer than running them. A
CUDA graph launches all at once, but reads and writes the addresses of its recording. So inputs go into one buffer, rows
begin at the left of the cache, and the column that a row writes is an input.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from gnomon.models.cpu.fused_decoder import FusedDecoder
from gnomon.models.decoder import (
    AlignedDecoder,
    Decoder,
    RecomputeDecoder,
    SameLengthDecoder,
    agrees,
    choose_decoder,
)
from gnomon.models.kv_cache import AlignedCache, AlignedLayer, Frame
from gnomon.models.llama_like import beginning, is_standard_head
from gnomon.models.prefix import attends_fully
from gnomon.models.routing import expert_count
from gnomon.models.slow import is_attention_only, warn_slow

# Steps of rows and columns: each pair of numbers is one recording, which takes time and memory.
_ROWS_STEP = 32
_COLUMNS_STEP = 256
_COLUMNS_STEP_WIDE = 1024
_WIDE = 2048


class Recorded:
    """Runs functions over fixed tensors; on a GPU, each is recorded at its first call and then replayed.

    A function must do the same at every call: read the same buffers, write the same buffers, and return a tensor of one
    shape. The next call of any function overwrites the result. On other devices the function is called directly.

    Raises:
        RuntimeError: If a function cannot be recorded, for example because it reads a value back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, tuple[Any, Tensor]] = {}
        self._pool: Any = None

    def __call__(self, key: Hashable, function: Callable[[], Tensor]) -> Tensor:
        """Run ``function``, which ``key`` identifies, and return its result."""
        if self._device.type != "cuda":
            return function()
        with torch.cuda.device(self._device):
            if key not in self._graphs:
                self._graphs[key] = self._record(function)
            graph, output = self._graphs[key]
            graph.replay()
        return output

    def invalidate(self) -> None:
        """Drop all recordings, because buffers have moved."""
        self._graphs = {}
        self._pool = None

    def _record(self, function: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        # Run once without recording, because libraries allocate workspaces and choose kernels at the first call.
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            function()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph: Any = torch.cuda.CUDAGraph()
        # "thread_local": a learner's thread may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = function()
        self._pool = graph.pool()
        return graph, output


class Window:
    """The region of a step: its rows and columns, and each row's new column ``places`` Int[R 1]."""

    def __init__(self) -> None:
        self.rows = 0
        self.columns = 0
        self.places: Tensor | None = None


class StaticLayer(AlignedLayer):
    """One layer's KV cache; a step writes each row's own column."""

    def __init__(self, frame: Frame, window: Window) -> None:
        super().__init__(frame)
        self.window = window

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new column of every row and return views of the window."""
        window = self.window
        assert window.places is not None, "a step says where it writes"
        keys, values = self.buffers(key_states, value_states)
        for buffer, states in ((keys, key_states), (values, value_states)):
            # (rows, heads, 1, size): each row writes the column of its own length.
            where = window.places[:, None, :, None].expand(-1, states.shape[1], 1, states.shape[3])
            buffer[: window.rows].scatter_(2, where, states)
        return keys[: window.rows, :, : window.columns], values[: window.rows, :, : window.columns]

    def get_seq_length(self) -> int:
        """Return 0, because positions and mask are given."""
        return 0


class StaticCache(AlignedCache):
    """A KV cache whose rows begin at column 0; buffers move only when they are full. ``moves`` counts this."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.window = Window()
        self.aligned = [StaticLayer(self.frame, self.window) for _ in range(layers)]
        self.layers = list(self.aligned)
        self.moves = 0

    def release(self) -> None:
        """Keep the buffers, because recorded steps know their addresses."""

    def hold(self, rows: int, columns: int) -> None:
        """Make room for so many rows and columns, rounded up as a step rounds them."""
        now, rows, columns = self.frame, round_rows(rows), round_columns(columns)
        if rows <= now.capacity and columns <= now.columns:
            return
        self.moves += 1
        made = Frame(now.rows, 0, now.end, max(rows, now.capacity), max(columns, now.columns))
        for layer in self.aligned:
            layer.relocate(made)
        now.capacity, now.columns = made.capacity, made.columns

    def _make_room_for(self, news: Sequence[int], room: int) -> None:
        self.hold(len(self.lengths) + len(news), max([*self.lengths, *news]) + room)

    def _columns(self, length: int) -> slice:
        return slice(0, length)

    def _fit(self) -> None:
        self.frame.rows, self.frame.start, self.frame.end = len(self.lengths), 0, max(self.lengths, default=0)


class StaticDecoder(AlignedDecoder):
    """`AlignedDecoder` with recorded steps, for models with full attention on a GPU.

    Rows and columns are rounded up (`round_rows`, `round_columns`), so that few recordings serve all steps. A recording
    takes up to a quarter second. Padding rows write column 0 of unused slots. Steps that record experts are not
    recorded as graphs. The cache stays allocated between calls; engine.max_concurrent bounds its size.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._static = self._cache = StaticCache(len(DynamicCache(config=model.config).layers))
        device = self._forward.device
        self._recorded = Recorded(device)
        self._moves = 0
        # Row 0: each row's latest token, row 1: its position. One copy a step brings both.
        self._inputs = torch.zeros(2, 1, dtype=torch.long, device=device)
        self._columns = torch.zeros(1, dtype=torch.long, device=device)

    def step(self, tokens: Sequence[int], room: int) -> Tensor:
        """Feed one token per row and return the next logits, which the next step overwrites."""
        cache, count = self._static, len(tokens)
        rows, columns = round_rows(count), round_columns(max(cache.lengths) + 1)
        cache.hold(rows, columns)
        # Recordings know the addresses of the former buffers.
        self._follow()
        spare = [0] * (rows - count)
        # Row 0 are tokens, row 1 their positions.
        self._inputs[:, :rows].copy_(torch.tensor([[*tokens, *spare], [*cache.lengths, *spare]]))
        self._forward.experts = None
        if self._forward.records:
            # Experts are read back to the CPU, which a recording cannot do.
            logits = self._run(rows, columns)
        else:
            logits = self._recorded((rows, columns), lambda: self._run(rows, columns))
        cache.after_step()
        self._forward.tokens += count
        experts = self._forward.experts
        self._trace.extend(None if experts is None else experts[:count])
        return logits[:count]

    def _run(self, rows: int, columns: int) -> Tensor:
        ids, places = self._inputs[:, :rows, None]
        window = self._static.window
        window.rows, window.columns, window.places = rows, columns, places
        # Rows begin at column 0, so a row sees the columns up to its own new one: (rows, 1, 1, columns).
        hidden = (self._columns[:columns] > places)[:, None, None]
        dtype = next(self._forward.model.parameters()).dtype
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
        logits: Tensor = self._forward(
            ids, attention_mask=mask, cache=self._static, use_cache=True, **self._at(places)
        ).logits[:, -1]
        self._check_written(self._static)
        return logits

    def _follow(self) -> None:
        """Match the inputs to the cache's size, and drop recordings after buffers have moved."""
        if self._moves == self._static.moves:
            return
        self._moves, frame = self._static.moves, self._static.frame
        self._recorded.invalidate()
        self._inputs = torch.zeros(2, frame.capacity, dtype=torch.long, device=self._inputs.device)
        self._columns = torch.arange(frame.columns, device=self._columns.device)


def round_rows(rows: int) -> int:
    """Return the rows that a step computes: a power of two up to 32, then a multiple of 32.

    >>> [round_rows(n) for n in (1, 3, 32, 33, 200)]
    [1, 4, 32, 64, 224]
    """
    if rows <= _ROWS_STEP:
        return 1 << max(0, rows - 1).bit_length()
    return -(-rows // _ROWS_STEP) * _ROWS_STEP


def round_columns(columns: int) -> int:
    """Return the columns that a step reads: a multiple of 256, above 2,048 of 1,024.

    >>> [round_columns(n) for n in (1, 257, 2049)]
    [256, 512, 3072]
    """
    step = _COLUMNS_STEP if columns <= _WIDE else _COLUMNS_STEP_WIDE
    return max(1, -(-columns // step)) * step


def fastest_decoder(model: nn.Module) -> Decoder:
    """Return `choose_decoder`'s choice, with one more candidate first.

    On a CPU the candidate is `FusedDecoder`, for known models whose first layers it reproduces in float32: two ways
    through 30 layers of bfloat16 differ by a third of a logit, which proves nothing. On a GPU it is `StaticDecoder`, if
    all layers have full attention and no experts: the number of tokens per expert is read back, which cannot be
    recorded. A recording that fails, or that differs from the model's own numbers, is given up with a warning.
    """
    if is_standard_head(model) and agrees(FusedDecoder, beginning(model)):
        return FusedDecoder(model)
    is_on_gpu = next(model.parameters()).device.type == "cuda"
    name = type(model).__name__
    is_recordable = is_on_gpu and attends_fully(model) and expert_count(model) <= 1
    decoder = choose_decoder(model, [StaticDecoder] if is_recordable else [])
    if isinstance(decoder, RecomputeDecoder):
        warn_slow("recomputed", name)
    elif isinstance(decoder, SameLengthDecoder):
        warn_slow("in waves", name)
    elif is_recordable and not isinstance(decoder, StaticDecoder):
        warn_slow("unrecorded", name)
    return decoder


def keeps_between_turns(decoder: Decoder, model: nn.Module) -> bool:
    """Whether the decoder's rows can begin with what was kept of others, tried on the model; said if it does not agree.

    Of a model whose layers carry a state it is said before a run starts (`models.slow`).
    """
    tried = beginning(model) if isinstance(decoder, FusedDecoder) else model
    is_agreeing = decoder.keeps and agrees(type(decoder), tried, in_turns=True)
    if not is_agreeing and is_attention_only(model):
        warn_slow("forgotten", type(model).__name__)
    return is_agreeing
