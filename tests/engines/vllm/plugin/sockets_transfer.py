"""A plugin of vLLM's for tests on CPUs: its own transfer by NCCL, with sockets in the place of NCCL.

Like a collective, a broadcast is over when all have it, and nobody can leave it. A process that finds a file
``kill-RANK`` or ``stop-RANK`` in the folder ``GNOMON_SOCKETS_FAULTS`` has that done to it in the middle of one.
"""

import datetime
import os
import signal
from pathlib import Path
from typing import Any, ClassVar

import torch

NAME = "sockets"
FOREVER = datetime.timedelta(hours=1)
MIDDLE = 5


class Wire:
    """What vLLM asks of NCCL."""

    def __init__(self, info: Any, rank: int) -> None:
        from vllm.distributed.utils import StatelessProcessGroup

        self._group = StatelessProcessGroup.create(info.master_address, info.master_port, rank, info.world_size)
        self._count = 0

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object) -> None:
        self._count += 1
        self._meet_fate()
        store, rank, size = self._group.store, self._group.rank, self._group.world_size
        if rank == src:
            # Of a clone: the memory of what was made an array cannot be given back, as the learner's is.
            store.set(f"sent/{self._count}", tensor.clone().view(-1).view(torch.uint8).numpy().tobytes())
            store.wait([f"taken/{self._count}/{other}" for other in range(size) if other != src], FOREVER)
            return
        store.wait([f"sent/{self._count}"], FOREVER)
        taken = bytearray(store.get(f"sent/{self._count}"))
        tensor.copy_(torch.frombuffer(taken, dtype=tensor.dtype).view(tensor.shape))
        store.set(f"taken/{self._count}/{rank}", b"")

    def destroy(self) -> None:
        self._group = None

    def _meet_fate(self) -> None:
        folder = os.environ.get("GNOMON_SOCKETS_FAULTS")
        if folder and self._count % MIDDLE == 0:
            for fate, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
                if (Path(folder) / f"{fate}-{self._group.rank}").exists():
                    (Path(folder) / "done").touch()
                    os.kill(os.getpid(), number)


def register() -> None:
    """Tell vLLM of it. Whatever process calls this has no GPU, and nothing to wait for on one."""
    from vllm.distributed.weight_transfer import factory, nccl_engine

    if NAME in factory.WeightTransferEngineFactory._registry:
        return

    class Told(nccl_engine.NCCLTrainerInitInfo):
        backend: ClassVar[str] = NAME

        def __post_init__(self) -> None:
            # Packed, tensors are put together by kernels for GPUs.
            self.packed = False

    class SnapshotTransform(nccl_engine.NCCLTrainerWeightTransferEngine):
        init_info_cls = Told

    factory.WeightTransferEngineFactory.register_engine(NAME, nccl_engine.NCCLWeightTransferEngine)
    factory.WeightTransferTrainerFactory.register_engine(NAME, SnapshotTransform)
    nccl_engine.open_trainer_endpoint = lambda info: Wire(info, 0)
    nccl_engine.worker_init_process_group = lambda info, config: Wire(info, config.rank + info.rank_offset)
    torch.cuda.current_stream = lambda device=None: None
    torch.accelerator.synchronize = lambda device=None: None
